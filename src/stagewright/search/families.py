"""What a search tries beyond its default space, by word: `--space hsdp,offload` or `--space full`.

The default space is what recipes of the framework try. Each family adds settings that most
clusters leave alone, and multiplies the candidates.

>>> words("offload,stages"), words("full") == tuple(FAMILIES)
(('offload', 'stages'), True)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from stagewright.errors import UserError, did_you_mean
from stagewright.search.candidates import HARDWARE, Candidates
from stagewright.search.constraints import Constraint
from stagewright.search.machines import Fleet
from stagewright.model.config import ModelConfig
from stagewright.run.settings import Run

DEFAULT, FULL = "default", "full"

Axes = dict[str, Sequence[Any]]


def _hsdp(run: Run, model: ModelConfig, fleets: Sequence[Fleet]) -> Axes:
    gpus = max((of.gpus or 1 for of in fleets), default=1)
    return {"dp_shard": [None, *(d for d in _doubling(gpus // 2) if d > 1)]}


def _offload(run: Run, model: ModelConfig, fleets: Sequence[Fleet]) -> Axes:
    layers = [n for n in _doubling(8) if n < model.depth]
    return {"optimizer_cpu_offload": (False, True), "cpu_offloading_num_layers": [None, *layers]}


def _placement(run: Run, model: ModelConfig, fleets: Sequence[Fleet]) -> Axes:
    # Experts lie over the ranks of dp first, wherever these are.
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
    layers = [n for n in _doubling(model.depth) if n < model.depth]
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


def words(text: str | None) -> tuple[str, ...]:
    """The families that `--space` names; UserError for another word. None: nothing is added."""
    if text is None:
        return ()
    named = [word.strip() for word in text.split(",")]
    known = (DEFAULT, FULL, *FAMILIES)
    for word in named:
        if not word:
            raise UserError(
                f"--space: got {text!r}, in which a word is empty; wanted {', '.join(known)}, or "
                "several of these"
            )
        if word not in known:
            raise UserError(
                f"--space {word}: wanted {', '.join(known)}, or several of these"
                f"{did_you_mean(word, known)}"
            )
    if FULL in named:
        return tuple(FAMILIES)
    return tuple(dict.fromkeys(word for word in named if word != DEFAULT))


def axes_of(
    names: Iterable[str], run: Run, model: ModelConfig, fleets: Sequence[Fleet]
) -> dict[str, Any]:
    """Values by setting that families add; UserError in inference, which has none of them."""
    found: dict[str, Any] = {}
    for name in names:
        if run.mode != "train":
            raise UserError(f"--space {name} adds settings of training, got mode={run.mode}")
        found |= FAMILIES[name](run, model, fleets)
    return {name: tuple(dict.fromkeys(values)) for name, values in found.items()}


def whole_domains() -> Constraint:
    """By default copies of sharded states fill whole scale-up domains, and there are several."""
    reads = ("dp_shard", "tp", "cp", "dp", HARDWARE)
    return Constraint("by default copies of sharded states fill whole domains", reads, _check_hsdp)


def _check_hsdp(rows: Candidates, row: int) -> None:
    run, domain = rows.run(row), rows.hardware(row).scale_up.gpus
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


def _doubling(most: int) -> Iterable[int]:
    n = 1
    while n <= most:
        yield n
        n *= 2
