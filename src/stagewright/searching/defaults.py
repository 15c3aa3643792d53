"""Default space: values of settings that the user leaves open.

Training searches degrees, microbatch sizes, schedules, ZeRO stages, sequence parallelism, context
parallelism, recomputation and the dispatcher of experts; inference the degrees. `--space` adds
families of settings that few clusters use (`FAMILIES`), and multiplies candidates.

>>> families_of("offload,stages"), families_of("full") == tuple(FAMILIES)
(('offload', 'stages'), True)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from stagewright.errors import UserError, did_you_mean
from stagewright.model.config import ModelConfig
from stagewright.run.settings import Run
from stagewright.searching.candidates import HARDWARE, Candidates
from stagewright.searching.constraints import Constraint
from stagewright.searching.flags import recompute_names
from stagewright.searching.machines import Fleet, divisors_of

Axes = dict[str, Sequence[Any]]
"""Values to try by setting."""

STEP_TOKENS = 4_194_304
"""Tokens of the default batch: Llama 2's, arXiv 2307.09288, section 2.2."""
TOKENS_PER_GPU = 1024
"""Tokens per GPU of the default batch on many GPUs: Llama 3 405B's 16M on 16,384, arXiv
2407.21783, table 4."""
MIN_TOKENS_PER_CP_RANK = 4096
"""Minimum tokens of a sequence per rank of cp."""
MOST_MICRO_BATCH = 16
FINE_GRAINED = 4
"""Minimum top-k of a fine-grained MoE.

Megatron-LM's recipes send a token once per rank for DeepSeek-V3 and Qwen3 (top-k 8), not for
Mixtral (top-k 2)."""
MOST_CHUNKS = 8
"""Limit of virtual stages per rank that need not divide the layers."""
HEADROOM = 0.05
"""Share of device memory for the CUDA context, libraries and fragmentation."""

SCHEDULES = {
    "megatron": ("1f1b", "interleaved"),
    "torchtitan": ("1f1b", "interleaved", "zbv", "dualpipev"),
}
"""Default schedules of frameworks."""
FINE_GRAINED_SCHEDULES = ("dualpipe",)
"""Default schedules of fine-grained MoEs: DeepSeek-V3's, arXiv 2412.19437, section 3.2.1."""


def default_batch(run: Run, model: ModelConfig, gpus: Iterable[int]) -> int:
    """Default global batch size in sequences: about `STEP_TOKENS` tokens, more on many GPUs.

    A power of two times the odd factor of every number of GPUs, since dp divides both. If that is
    more than four times as much, only the odd factor of the largest number counts.

    >>> from stagewright.model.catalog import resolve
    >>> run, model = Run(model="llama3.1-405b"), resolve("llama3.1-405b")
    >>> [default_batch(run, model, [gpus]) for gpus in (64, 16384, 192, 7)]
    [512, 2048, 768, 896]
    """
    counts = sorted({*gpus})
    length = run.resolved(model).seq_length or 1
    target = max(STEP_TOKENS, TOKENS_PER_GPU * counts[-1]) / length
    odd = [count // (count & -count) for count in counts]
    common = math.lcm(*odd)
    batch = common if common <= 4 * target else odd[-1]
    while batch < target:
        batch *= 2
    return batch


def default_axes(run: Run, model: ModelConfig, fleets: Sequence[Fleet]) -> Axes:
    """Default values by setting; dp is left out, since it fills the GPUs."""
    gpus = max((fleet.gpus or 1 for fleet in fleets), default=1)
    counts = {fleet.gpus for fleet in fleets if fleet.gpus}
    domain = max(fleet.hardware.scale_up.gpus for fleet in fleets)
    divisors = sorted({d for count in counts or {1} for d in divisors_of(count)})
    layers = model.depth
    axes: Axes = {
        "tp": [d for d in divisors if d <= domain and _may_split(model, d)],
        "pp": [d for d in divisors if d <= layers],
    }
    if model.num_experts:
        axes["ep"] = [d for d in divisors_of(model.num_experts) if d <= gpus]
        axes["etp"] = sorted({1, *axes["tp"]})
    if run.mode != "train":
        return axes
    length = run.resolved(model).seq_length or 1
    axes["cp"] = [
        d for d in _powers_of_two(gpus) if length // d >= MIN_TOKENS_PER_CP_RANK or d == 1
    ]
    chunks = {*range(1, MOST_CHUNKS + 1), *divisors_of(layers)}
    axes["vpp"] = sorted(d for d in chunks if 2 * d <= layers or d == 1)
    axes["micro_batch_size"] = list(_powers_of_two(MOST_MICRO_BATCH))
    axes["schedule"] = SCHEDULES.get(run.framework, SCHEDULES["megatron"])
    axes["zero"] = (0, 1, 2, 3)
    axes["sequence_parallel"] = (False, True)
    axes["cp_comm_type"] = (run.cp_comm_type, "p2p", "all_gather", "a2a")
    axes["recompute"] = ("none", "selective", "full")
    if run.flash_attention:
        axes["recompute_modules"] = (run.recompute_modules, _selective_modules(run, model))
    if model.top_k >= FINE_GRAINED:
        axes["schedule"] = (*axes["schedule"], *FINE_GRAINED_SCHEDULES)
        if run.moe_token_dispatcher_type == "alltoall":
            axes["moe_flex_dispatcher"] = (False, True)
        axes |= _precision(run, model, fleets)
    return axes


def _selective_modules(run: Run, model: ModelConfig) -> tuple[str, ...]:
    """Modules that `selective` recomputes with flash attention, which saves no scores.

    These are norms and activations, in Megatron-LM those for which it has a flag.
    """
    modules = ("norm", "activation")
    if run.framework != "megatron":
        return modules
    names = recompute_names(run, model)
    return tuple(module for module in modules if names[module]) or modules


def _precision(run: Run, model: ModelConfig, fleets: Sequence[Fleet]) -> Axes:
    """fp8 if published weights are in fp8 and all hardware has it."""
    published = model.quantization is not None and model.quantization.method == "fp8"
    if not published or any(fleet.hardware.rate_of("fp8") is None for fleet in fleets):
        return {}
    return {"precision": ("fp8",), "fp8_recipe": ("blockwise",)}


def not_tried(run: Run, axes: Mapping[str, Sequence[Any]], model: ModelConfig) -> list[str]:
    """Sentence that names settings of MoE recipes that no axis covers."""
    if run.mode != "train" or not model.num_experts:
        return []
    missing: list[str] = []
    if "fp8" not in (run.precision, *axes.get("precision", ())):
        missing.append("fp8 (--precision fp8)")
    if "overlap_moe_expert_parallel_comm" not in axes:
        missing.append("overlap_moe_expert_parallel_comm (--space overlap)")
    return [f"not tried: {', '.join(missing)}"] if missing else []


_WITHOUT_DEGREE = {
    "cp": ("cp_comm_type",),
    "tp": ("sequence_parallel",),
    "pp": ("vpp", "schedule"),
}
"""Settings without effect where a degree is 1."""


def without_effect(axes: Collection[str], values: Mapping[str, Sequence[Any]]) -> set[str]:
    """Axes without effect, since a degree is always 1 or nothing recomputes modules.

    >>> sorted(without_effect(["vpp", "zero"], {"pp": (1,), "tp": (1, 2)}))
    ['vpp']
    """
    single = [degree for degree in _WITHOUT_DEGREE if tuple(values.get(degree, ())) == (1,)]
    names = {name for degree in single for name in _WITHOUT_DEGREE[degree]}
    if "selective" not in values.get("recompute", ("selective",)):
        names.add("recompute_modules")
    return names.intersection(axes)


def default_constraints(fixed: Collection[str]) -> list[Constraint]:
    """Constraints of default values, for settings that the user did not fix."""
    result: list[Constraint] = []
    if "etp" not in fixed:
        result.append(Constraint("by default etp is 1 or tp", ("etp", "tp"), _check_etp))
    if "recompute_modules" not in fixed:
        reads = ("recompute", "recompute_modules", "flash_attention")
        requirement = "by default selective recomputation saves memory"
        result.append(Constraint(requirement, reads, _check_modules))
    if "dp_shard" not in fixed:
        reads = ("dp_shard", "tp", "cp", "dp", HARDWARE)
        requirement = "by default copies of sharded states fill whole domains"
        result.append(Constraint(requirement, reads, _check_hsdp))
    return result


def _check_etp(candidates: Candidates, index: int) -> None:
    run = candidates.run(index)
    if run.etp not in (None, 1, run.tp):
        raise UserError(f"etp={run.etp} is neither 1 nor tp={run.tp}; list it with --etp to try it")


def _check_modules(candidates: Candidates, index: int) -> None:
    run = candidates.run(index)
    fused = run.mode == "train" and run.flash_attention
    if fused and run.recompute == "selective" and run.recompute_modules == ("core_attn",):
        raise UserError(
            "recompute_modules=core_attn saves nothing with flash attention; list it with "
            "--recompute-modules to try it"
        )


def _check_hsdp(candidates: Candidates, index: int) -> None:
    run, domain = candidates.run(index), candidates.hardware(index).scale_up.gpus
    if run.dp_shard is None:
        return
    if run.dp_shard == run.dp:
        raise UserError(f"dp_shard={run.dp_shard} is all of dp: the same as without dp_shard")
    ranks = run.tp * run.cp * run.dp_shard
    if ranks % domain:
        raise UserError(
            f"tp={run.tp} x cp={run.cp} x dp_shard={run.dp_shard} are {ranks} ranks, no multiple "
            f"of the {domain} GPUs of a domain; list it with --dp-shard to try it"
        )


def _powers_of_two(limit: int) -> Iterator[int]:
    n = 1
    while n <= limit:
        yield n
        n *= 2


def _may_split(model: ModelConfig, ranks: int) -> bool:
    """True if this many ranks divide the heads; a rough filter before the checks."""
    return not model.attends or model.num_attention_heads % ranks == 0


# ---- families that --space adds ------------------------------------------------------------------

DEFAULT, FULL = "default", "full"


def _hsdp(run: Run, model: ModelConfig, fleets: Sequence[Fleet]) -> Axes:
    gpus = max((fleet.gpus or 1 for fleet in fleets), default=1)
    return {"dp_shard": [None, *(d for d in _powers_of_two(gpus // 2) if d > 1)]}


def _offload(run: Run, model: ModelConfig, fleets: Sequence[Fleet]) -> Axes:
    layers = [n for n in _powers_of_two(8) if n < model.depth]
    return {"optimizer_cpu_offload": (False, True), "cpu_offloading_num_layers": [None, *layers]}


def _placement(run: Run, model: ModelConfig, fleets: Sequence[Fleet]) -> Axes:
    # ep is the innermost part of dp.
    orders = itertools.permutations(("tp", "cp", "ep-dp", "pp"))
    return {"order": [run.order, *("-".join(axes) for axes in orders)]}


def _stages(run: Run, model: ModelConfig, fleets: Sequence[Fleet]) -> Axes:
    return {
        "first_stage_less_layers": (run.first_stage_less_layers, 0, 1),
        "last_stage_less_layers": (run.last_stage_less_layers, 0, 1),
    }


def _overlap(run: Run, model: ModelConfig, fleets: Sequence[Fleet]) -> Axes:
    axes: Axes = {"tp_comm_overlap": (False, True), "overlap_param_gather": (False, True)}
    if model.num_experts:
        axes["overlap_moe_expert_parallel_comm"] = (False, True)
    return axes


def _recompute(run: Run, model: ModelConfig, fleets: Sequence[Fleet]) -> Axes:
    layers = [n for n in _powers_of_two(model.depth) if n < model.depth]
    modules = (("core_attn",), ("norm", "activation"), ("core_attn", "norm", "activation"))
    return {"recompute_num_layers": [None, *layers], "recompute_modules": modules}


def _schedules(run: Run, model: ModelConfig, fleets: Sequence[Fleet]) -> Axes:
    names = ("1f1b", "interleaved", "zb-h1", "zb-h2", "zbv", "v-half", "v-min", "dualpipe")
    return {"schedule": (*names, "dualpipev")}


FAMILIES: Mapping[str, Callable[[Run, ModelConfig, Sequence[Fleet]], Axes]] = {
    "hsdp": _hsdp,
    "offload": _offload,
    "placement": _placement,
    "stages": _stages,
    "overlap": _overlap,
    "recompute": _recompute,
    "schedules": _schedules,
}


def families_of(text: str | None) -> tuple[str, ...]:
    """Families in the text of `--space`; UserError for another word."""
    if text is None:
        return ()
    words = [word.strip() for word in text.split(",")]
    allowed = (DEFAULT, FULL, *FAMILIES)
    for word in words:
        if not word:
            raise UserError(
                f"--space: got {text!r}, in which a word is empty; wanted {', '.join(allowed)}, or "
                "several of these"
            )
        if word not in allowed:
            raise UserError(
                f"--space {word}: wanted {', '.join(allowed)}, or several of these"
                f"{did_you_mean(word, allowed)}"
            )
    if FULL in words:
        return tuple(FAMILIES)
    return tuple(dict.fromkeys(word for word in words if word != DEFAULT))


def family_axes(
    names: Iterable[str], run: Run, model: ModelConfig, fleets: Sequence[Fleet]
) -> Axes:
    """Values by setting that families add; UserError in inference, which has no families."""
    axes: Axes = {}
    for name in names:
        if run.mode != "train":
            raise UserError(f"--space {name} adds settings of training, got mode={run.mode}")
        axes |= FAMILIES[name](run, model, fleets)
    return {name: tuple(dict.fromkeys(values)) for name, values in axes.items()}
