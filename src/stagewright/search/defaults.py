"""The space of a search where a setting is not given: values that are tried by default.

Training searches degrees, microbatches, schedules, ZeRO stages, sequence parallelism, kinds of
context parallelism, recomputation and the dispatcher of experts; inference the degrees. More is
added by `families`; all else is what the run says.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from stagewright.errors import UserError
from stagewright.search.candidates import Candidates
from stagewright.search.constraints import Constraint
from stagewright.search.families import whole_domains
from stagewright.search.machines import Fleet, divisors_of
from stagewright.model.config import ModelConfig
from stagewright.run.settings import Run

LEAST_TOKENS = 4_194_304
"""Tokens of a step where no batch is given: Llama 2's, arXiv 2307.09288, section 2.2."""
TOKENS_PER_GPU = 1024
"""Of a step on many GPUs where no batch is given: 16M on 16,384, as Llama 3 405B's, arXiv
2407.21783, table 4."""
TOKENS_OF_RANK = 4096
"""By default context parallelism leaves a rank no fewer tokens of a sequence."""
MOST_MICRO_BATCH = 16
FINE_GRAINED = 4
"""Experts of a token from which on sending it once to each rank is tried by default: Megatron-LM's
recipes do so for DeepSeek-V3 and Qwen3 (8 experts), not for Mixtral (2)."""
MOST_CHUNKS = 8
"""Virtual stages of a rank that are tried whether they divide the layers or not."""

SCHEDULES = {
    "megatron": ("1f1b", "interleaved"),
    "torchtitan": ("1f1b", "interleaved", "zbv", "dualpipev"),
}
"""Schedules that frameworks have; any other is searched where it is named."""


def default_batch(run: Run, model: ModelConfig, gpus: Iterable[int]) -> int:
    """Sequences of a step where none are given: `LEAST_TOKENS`, more on many GPUs.

    A power of two, times the odd factor of each number of GPUs: dp divides these, and has to divide
    the batch. Where several numbers of GPUs would make that more than four times as much, the odd
    factor of the largest alone.

    >>> from stagewright.model.catalog import resolve
    >>> run, model = Run(model="llama3.1-405b"), resolve("llama3.1-405b")
    >>> [default_batch(run, model, [gpus]) for gpus in (64, 16384, 192, 7)]
    [512, 2048, 768, 896]
    """
    counts = sorted({*gpus})
    length = run.resolved(model).seq_length or 1
    wanted = max(LEAST_TOKENS, TOKENS_PER_GPU * counts[-1]) / length
    odd = [count // (count & -count) for count in counts]
    common = math.lcm(*odd)
    batch = common if common <= 4 * wanted else odd[-1]
    while batch < wanted:
        batch *= 2
    return batch


def default_axes(run: Run, model: ModelConfig, fleets: Iterable[Fleet]) -> dict[str, Any]:
    """Values by setting that are tried where the setting is not given.

    dp is not among them where the number of GPUs is known: it fills them.
    """
    every = list(fleets)
    gpus = max((of.gpus or 1 for of in every), default=1)
    counts = {of.gpus for of in every if of.gpus}
    domain = max(of.hardware.scale_up.gpus for of in every)
    whole = sorted({d for count in counts or {1} for d in divisors_of(count)})
    layers = model.depth
    axes: dict[str, Any] = {
        "tp": [d for d in whole if d <= domain and _may_split(model, d)],
        "pp": [d for d in whole if d <= layers],
    }
    if model.num_experts:
        axes["ep"] = [d for d in divisors_of(model.num_experts) if d <= gpus]
        axes["etp"] = sorted({1, *axes["tp"]})
    if run.mode != "train":
        return axes
    length = run.resolved(model).seq_length or 1
    axes["cp"] = [d for d in _doubling(gpus) if length // d >= TOKENS_OF_RANK or d == 1]
    chunks = {*range(1, MOST_CHUNKS + 1), *divisors_of(layers)}
    axes["vpp"] = sorted(d for d in chunks if 2 * d <= layers or d == 1)
    axes["micro_batch_size"] = list(_doubling(MOST_MICRO_BATCH))
    axes["schedule"] = SCHEDULES.get(run.framework, SCHEDULES["megatron"])
    axes["zero"] = (0, 1, 2, 3)
    axes["sequence_parallel"] = (False, True)
    axes["cp_comm_type"] = (run.cp_comm_type, "p2p", "all_gather", "a2a")
    axes["recompute"] = ("none", "selective", "full")
    if model.top_k >= FINE_GRAINED and run.moe_token_dispatcher_type == "alltoall":
        axes["moe_flex_dispatcher"] = (False, True)
    return axes


_TOGETHER = {
    "cp": ("cp_comm_type",),
    "tp": ("sequence_parallel",),
    "pp": ("vpp", "schedule"),
}
"""Settings that do nothing where a degree is 1."""


def without_idle(axes: Collection[str], values: Mapping[str, Sequence[Any]]) -> set[str]:
    """Settings among those tried by default that do nothing, since a degree is 1 everywhere.

    >>> sorted(without_idle(["vpp", "zero"], {"pp": (1,), "tp": (1, 2)}))
    ['vpp']
    """
    single = [degree for degree in _TOGETHER if tuple(values.get(degree, ())) == (1,)]
    return {name for degree in single for name in _TOGETHER[degree] if name in axes}


def policies(given: Collection[str]) -> list[Constraint]:
    """Constraints of the space by default, where the settings are not `given`."""
    found: list[Constraint] = []
    if "etp" not in given:
        found.append(Constraint("by default etp is 1 or tp", ("etp", "tp"), _check_etp))
    if "dp_shard" not in given:
        found.append(whole_domains())
    return found


def _check_etp(rows: Candidates, row: int) -> None:
    run = rows.run(row)
    if run.etp not in (None, 1, run.tp):
        raise UserError(f"etp={run.etp} is neither 1 nor tp={run.tp}; list it with --etp to try it")


def _doubling(most: int) -> Iterator[int]:
    n = 1
    while n <= most:
        yield n
        n *= 2


def _may_split(model: ModelConfig, ranks: int) -> bool:
    """Whether so many ranks could split the heads: a rough filter, the checks decide."""
    return not model.attends or model.num_attention_heads % ranks == 0
