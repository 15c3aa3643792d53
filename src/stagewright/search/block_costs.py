"""Costs of single blocks: seconds and bytes of a layer, the embedding and the head.

They are read off *tiny runs*: the model with its first few layers, in one pipeline stage with one
microbatch, compiled and simulated like any other run. Candidates that differ only in their
pipeline, in dp, in ZeRO or in the batch share a tiny run: what these add is the estimate's part.

There are two kinds of tiny runs. `pass_costs` has what a microbatch takes: seconds of the forward
and backward pass, and bytes saved for backward. `state_costs` has what a step takes once: bytes of
parameters, gradients and optimizer states, bytes exchanged along dp, and seconds of the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np

from stagewright.arrays import Bool, Float, Int, distinct_numbers
from stagewright.lower.compile import compile
from stagewright.lower.compiled_run import CompiledRun
from stagewright.lower.variants import PlacedVariant, place_blocks
from stagewright.model.layers import Layer
from stagewright.program.along import along
from stagewright.program.columns import CATEGORIES, COLLECTIVES, PHASES, TaskKind
from stagewright.run.sections import EXPERIMENT
from stagewright.run.settings import Run
from stagewright.search.candidates import Candidates
from stagewright.time.expense.power import kernel_energies
from stagewright.time.hardware import Hardware
from stagewright.time.network import Machine
from stagewright.time.simulate.step import SimulatedStep, simulate
from stagewright.time.simulate.timeline import TICK

PIPELINE = (
    *("pp", "vpp", "schedule", "microbatch_group_size_per_vp_stage", "layers_per_stage"),
    *("first_stage_less_layers", "last_stage_less_layers", "pipeline_split", "global_batch_size"),
    *("recompute_num_layers", "cpu_offloading_num_layers"),
)
"""Settings that decide which blocks run where and when, and nothing of a block."""
STATES = (
    *("dp", "zero", "dp_shard", "optimizer_cpu_offload", "optimizer_offload_fraction"),
    *("overlap_param_gather", "grad_reduce"),
)
"""Settings of the states of a model, without effect on a pass."""
PASSES = (
    *("micro_batch_size", "cp", "cp_comm_type", "recompute", "recompute_modules"),
    *("moe_flex_dispatcher", "tp_comm_overlap"),
)
"""Settings of a pass, without effect on the states of a model."""
LIMITS = ("device_memory", "memory_allowance")
"""Settings that change no cost."""


class BlockKind(NamedTuple):
    """Blocks of one kind cost the same."""

    block: str
    """A name in `blocks.BLOCKS`: embedding, layer, head, ..."""
    layer: Layer


class Blocks(NamedTuple):
    """The blocks of a model by kind."""

    kinds: tuple[BlockKind, ...]
    layers: int
    """Layers of a tiny run: as many as have a block of each kind, and two."""

    @classmethod
    def of(cls, rows: Candidates) -> Self:
        """The blocks of candidates."""
        run = rows.run(0)
        whole = run.model_copy(update=_defaults(PIPELINE, run) | {"pp": 1, "vpp": 1, "dp": 1})
        placed = place_blocks(whole.resolved(rows.model), rows.model)[0]
        met: dict[BlockKind, int] = {}
        for variant, layer in placed:
            met.setdefault(BlockKind(variant.block, variant.layer), layer)
        layers = max(2, 1 + max(met.values(), default=0))
        return cls(tuple(met), min(layers, rows.model.num_layers))

    def kind(self, placed: PlacedVariant) -> int:
        """Number of the kind of a block of a stage."""
        return self.kinds.index(BlockKind(placed[0].block, placed[0].layer))


@dataclass(frozen=True, slots=True, eq=False)
class PassCosts:
    """What a microbatch takes in each block: [tuples of settings, kinds of blocks] each."""

    of: Int
    """Tuple of each candidate."""
    seconds: Mapping[str, Float]
    """By kind of action, `F` and `B`, and `I` and `W` where some schedule has such halves;
    communication that the block waits for included."""
    kernels: Mapping[str, Float]
    """Seconds of kernels among these, for `F` and `B`."""
    drawn: Float
    """Seconds at TDP in which a GPU draws as much energy as these kernels."""
    saved: Float
    """Bytes saved for backward."""
    transient: Float
    """Bytes beyond these at the peak of a block's backward pass."""


@dataclass(frozen=True, slots=True, eq=False)
class StateCosts:
    """What a step takes once in each block: [tuples of settings, kinds of blocks] each."""

    of: Int
    """Tuple of each candidate."""
    shards: Int
    """Ranks of dp in the tiny run, over which ZeRO shards states: [tuples]."""
    memory: Mapping[str, Float]
    """Bytes on a rank of the tiny run, by category."""
    optimizer: Float
    """Seconds of kernels of the optimizer in the tiny run."""
    added: Mapping[str, Float]
    """Seconds of kernels that ZeRO adds to a pass, `F` and `B`, beyond those without it."""
    exchanged: Mapping[tuple[str, str], Float]
    """Bytes of whole tensors exchanged over the ranks that have the same weights, by group (`dense`
    or `expert`) and use, one of `USES`."""


# ---- tuples of settings and their tiny runs ------------------------------------------------------


def pass_costs(rows: Candidates, blocks: Blocks, *, halves: bool = False) -> PassCosts:
    """Costs of passes; `halves`: also of the halves of backward passes."""
    dp = _fewest_ranks(rows, rows.numbers("cp"))
    first, of = _tuples(rows, (*PIPELINE, *STATES, *LIMITS), dp)
    passes = _passes(rows, first, dp, blocks, None)
    split = _passes(rows, first, dp, blocks, "zb-h2") if halves else {}
    return PassCosts(
        of,
        {kind: passes[kind] for kind in ("F", "B")} | {k: split[k] for k in "IW" if k in split},
        {kind: passes[f"{kind} kernels"] for kind in ("F", "B")},
        passes["drawn"],
        passes["saved"],
        passes["transient"],
    )


def _passes(
    rows: Candidates, first: Int, dp: Int, blocks: Blocks, schedule: str | None
) -> dict[str, Float]:
    """Columns of `PassCosts` for the settings of some candidates."""

    def tiny(row: int) -> Run:
        run, ranks = rows.run(row), int(dp[row])
        return _tiny(run, (*STATES, *LIMITS), blocks).model_copy(
            update={
                "dp": ranks,
                "global_batch_size": ranks * run.micro_batch_size,
                "schedule": schedule,
                "zero": 0,
            }
        )

    return _columns(_simulated(rows, first, tiny, lambda step: _read_passes(step, blocks)))


def state_costs(rows: Candidates, blocks: Blocks) -> StateCosts:
    """Costs of states."""
    dp = 2 * _fewest_ranks(rows, 1)
    without = (*PIPELINE, *PASSES, *LIMITS, "dp", "dp_shard")
    first, of = _tuples(rows, without, dp)

    def tiny(row: int) -> Run:
        ranks = int(dp[row])
        update = {"dp": ranks, "global_batch_size": ranks, "recompute": "none"}
        run = _tiny(rows.run(row), (*PASSES, *LIMITS, "dp_shard"), blocks)
        return run.model_copy(update=update)

    def unsharded(row: int) -> Run:
        return tiny(row).model_copy(update={"zero": 0})

    found = _columns(_simulated(rows, first, tiny, lambda step: _read_states(step, blocks)))
    sharded = rows.numbers("zero")[first] >= 2
    _, same = distinct_numbers([sharded, rows.distinct(*_names(rows, without, "zero")).of[first], dp[first]], len(first))
    added = {kind: np.zeros_like(found["optimizer seconds"]) for kind in "FB"}
    if sharded.any():
        some = np.flatnonzero(sharded)
        keys, of_some = np.unique(same[some], return_inverse=True)
        lead = first[some[np.unique(of_some, return_index=True)[1]]]
        plain = _columns(_simulated(rows, lead, unsharded, lambda s: _read_passes(s, blocks)))
        for kind in "FB":
            more = found[f"{kind} kernels"][some] - plain[f"{kind} kernels"][of_some]
            added[kind][some] = np.maximum(more, 0.0)
    memory = {name: found[name] for name in _STATE_CATEGORIES if name in found}
    exchanged = {(g, use): found[f"{g} {use}"] for g in GROUPS for use in USES
                 if f"{g} {use}" in found}  # fmt: skip
    return StateCosts(of, dp[first], memory, found["optimizer seconds"], added, exchanged)


def _tiny(run: Run, names: Iterable[str], blocks: Blocks) -> Run:
    """A run of the first few layers without a pipeline, with defaults for some settings."""
    update = _defaults((*PIPELINE, *names), run) | {"pp": 1, "vpp": 1, "layers": blocks.layers}
    return run.model_copy(update=update)


def _defaults(names: Iterable[str], run: Run) -> dict[str, Any]:
    """Defaults of those of some settings that a run has."""
    fields = type(run).model_fields
    return {n: EXPERIMENT[n].default_of(run.framework) for n in names if n in fields}


def _fewest_ranks(rows: Candidates, cp: Int | int) -> Int:
    """Fewest ranks of dp that the experts of each candidate can be spread over."""
    if not rows.model.num_experts:
        return np.ones(len(rows), dtype=np.int64)
    tp, ep, etp = (rows.numbers(name) for name in ("tp", "ep", "etp"))
    experts = np.where(etp < 0, tp, etp) * ep
    return experts // np.gcd(experts, tp * cp)


def _names(rows: Candidates, *without: Iterable[str] | str) -> list[str]:
    dropped = {name for each in without for name in ((each,) if isinstance(each, str) else each)}
    return [name for name in rows.columns if name not in dropped]


def _tuples(rows: Candidates, without: Iterable[str], dp: Int) -> tuple[Int, Int]:
    """First candidate of each distinct tuple of settings, and the tuple of each candidate."""
    return distinct_numbers([rows.distinct(*_names(rows, without)).of, dp], len(rows))


_Read = TypeVar("_Read")


def _simulated(
    rows: Candidates,
    first: Int,
    tiny: Callable[[int], Run],
    read: Callable[[SimulatedStep], _Read],
) -> list[_Read]:
    """What is read off the tiny run of each of some candidates; machines share compiled runs."""
    compiled: dict[Run, CompiledRun] = {}
    found: list[_Read] = []
    for row in first.tolist():
        run, cluster, hardware = tiny(row), rows.cluster(row), rows.hardware(row)
        if run not in compiled:
            compiled[run] = compile(run, rows.model, device_memory=hardware.memory)
        program = compiled[run]
        machine = Machine.of(
            hardware,
            gpus=program.run.world_size,
            topology=cluster.topology,
            algorithm=cluster.algorithm,
        )
        found.append(read(simulate(program, machine, rows.execution(row))))
    return found


def _columns(found: Sequence[Mapping[str, Float]]) -> dict[str, Float]:
    """Rows by name as tables by name; 0 where a row lacks a name."""
    names = dict.fromkeys(name for row in found for name in row)
    none = np.zeros_like(next(iter(found[0].values())))
    return {name: np.array([row.get(name, none) for row in found]) for name in names}


# ---- reading a tiny run --------------------------------------------------------------------------

GROUPS = ("dense", "expert")
USES = ("reduce", "gather_forward", "gather_recompute", "gather_backward", "update")
_STATE_CATEGORIES = ("parameters", "gradients", "optimizer")
_FORWARD, _OPTIMIZER = PHASES.index("forward"), PHASES.index("optimizer")


class _TinyStep:
    """A simulated tiny run, its tasks by block; arrays are by row of its tasks."""

    def __init__(self, step: SimulatedStep, blocks: Blocks) -> None:
        placed = place_blocks(step.compiled.run, step.compiled.model)[0]
        self.names = {variant.name_at(layer): n for n, (variant, layer) in enumerate(placed)}
        self.kinds = np.array([blocks.kind(each) for each in placed])
        self.count = len(blocks.kinds)
        self.program, lane = step.line.program, step.line.lanes[0]
        self.tasks, self.values = lane.of.tasks, lane.of.values
        self.block = self.numbers(self.tasks.names)[self.tasks.name]
        rows = lane.issue.rows
        self.begin, self.end = np.zeros((2, len(self.tasks)), dtype=np.int64)
        self.begin[rows], self.end[rows] = lane.begin, lane.end
        self.main = np.zeros(len(self.tasks), dtype=bool)
        self.main[rows] = lane.main

    def numbers(self, names: Sequence[str]) -> Int:
        """The block that each name of a task begins with, by number; -1: none."""
        return np.array([self.names.get(n.partition(".")[0], -1) for n in names], dtype=np.int64)

    def by_kind(self, of_block: Float) -> Float:
        """What the last block of each kind has: the first ones may wait for launches."""
        found = np.zeros(self.count)
        found[self.kinds] = of_block
        return found

    def sums(self, rows: Bool, amounts: Float) -> Float:
        """Sums over some rows, for the mean block of each kind."""
        of = np.bincount(self.kinds[self.block[rows]], amounts[rows], self.count)
        return of / np.bincount(self.kinds, minlength=self.count).clip(1)


def _read_passes(step: SimulatedStep, blocks: Blocks) -> dict[str, Float]:
    """Columns of `PassCosts`, and `I` and `W` where the backward pass is in halves."""
    tiny = _TinyStep(step, blocks)
    main = tiny.main & (tiny.block >= 0)
    forward = main & (tiny.tasks.phase == _FORWARD)
    backward = main & (tiny.tasks.phase != _FORWARD) & (tiny.tasks.phase != _OPTIMIZER)
    weights = backward & _is_second_half(np.where(backward, tiny.block, -1))
    begin = int(tiny.begin[forward].min(initial=0))
    turn = int(tiny.end[forward].max(initial=begin))
    middle = int(tiny.end[backward & ~weights].max(initial=turn))
    took = (tiny.end - tiny.begin) * TICK
    saved, transient = _activations(tiny)
    return {
        "F": _spans(tiny, forward, begin),
        "B": _spans(tiny, backward, turn),
        "I": _spans(tiny, backward & ~weights, turn),
        "W": _spans(tiny, weights, middle),
        "F kernels": tiny.sums(forward, took),
        "B kernels": tiny.sums(backward, took),
        "drawn": tiny.sums(forward | backward, _drawn(tiny, took, step.machine.hardware)),
        "saved": saved,
        "transient": transient,
    }


def _is_second_half(block: Int) -> Bool:
    """Rows from the first one on whose block has been left before; -1: rows of no block."""
    rows = np.flatnonzero(block >= 0)
    entered = rows[np.flatnonzero(np.diff(block[rows], prepend=-1))]
    again = entered[np.isin(np.arange(len(entered)), np.unique(block[entered], True)[1], invert=True)]
    return np.arange(len(block)) >= (again[0] if len(again) else len(block))


def _spans(tiny: _TinyStep, rows: Bool, begin: int) -> Float:
    """Seconds of each kind of block: from the end of the block before to its own."""
    ends = np.full(len(tiny.kinds), begin, dtype=np.int64)
    np.maximum.at(ends, tiny.block[rows], tiny.end[rows])
    order = np.argsort(ends, kind="stable")
    spans = np.zeros(len(ends))
    spans[order] = np.diff(ends[order], prepend=begin) * TICK
    found = np.zeros(tiny.count)
    found[tiny.kinds[order]] = spans[order]
    return found


def _drawn(tiny: _TinyStep, took: Float, hardware: Hardware) -> Float:
    """Seconds at TDP of each kernel; 0 of other tasks."""
    found = np.zeros(len(took))
    rows = np.flatnonzero((tiny.tasks.kind == TaskKind.COMPUTE) & (took > 0))
    found[rows] = kernel_energies(tiny.tasks, rows, took[rows], hardware)
    return found


def _activations(tiny: _TinyStep) -> tuple[Float, Float]:
    """Bytes of each kind of block that are saved for backward, and beyond these at its peak."""
    tasks, values = tiny.tasks, tiny.values
    passing = values.microbatch >= 0
    value, first, last = values.value[passing], values.first[passing], values.last[passing]
    layer = [f"layer{n}." if n >= 0 else "" for n in values.layer[value].tolist()]
    named = zip(layer, values.name[value].tolist(), strict=True)
    block = tiny.numbers([f"{of}{values.names[name]}" for of, name in named])
    size = values.size[value].astype(np.float64)
    backward = np.flatnonzero(tasks.phase != _FORWARD)
    turn = int(backward[0]) if len(backward) else len(tasks)
    crossing = (first < turn) & (last >= turn) & (block >= 0)
    saved = np.bincount(block[crossing], size[crossing], len(tiny.kinds))
    live = np.zeros(len(tasks) + 2)
    np.add.at(live, np.maximum(first, 0), size)
    np.add.at(live, last + 1, -size)
    live = np.cumsum(live)[: len(tasks)]
    beyond = np.zeros(len(saved))
    rows = np.flatnonzero((tiny.block >= 0) & (tasks.phase != _OPTIMIZER))
    rows = rows[rows >= turn]
    np.maximum.at(beyond, tiny.block[rows], live[rows] - np.cumsum(saved)[tiny.block[rows]])
    return tiny.by_kind(saved), tiny.by_kind(beyond)


def _read_states(step: SimulatedStep, blocks: Blocks) -> dict[str, Float]:
    """Columns of `StateCosts`: bytes by category, seconds of the optimizer, bytes exchanged."""
    tiny = _TinyStep(step, blocks)
    tasks, values = tiny.tasks, tiny.values
    found: dict[str, Float] = {}
    blocks_of_kind = np.bincount(tiny.kinds, minlength=tiny.count).clip(1)
    value = values.value[values.microbatch < 0]
    layer = [f"layer{n}." if n >= 0 else "" for n in values.layer[value].tolist()]
    named = zip(layer, values.name[value].tolist(), strict=True)
    block = tiny.numbers([f"{of}{values.names[name]}" for of, name in named])
    for category in _STATE_CATEGORIES:
        mine = (values.category[value] == CATEGORIES.index(category)) & (block >= 0)
        sizes = np.bincount(tiny.kinds[block[mine]], values.size[value[mine]], tiny.count)
        found[category] = sizes / blocks_of_kind
    kernels, took = tiny.main & (tiny.block >= 0), (tiny.end - tiny.begin) * TICK
    updates, forward = tasks.phase == _OPTIMIZER, tasks.phase == _FORWARD
    found["optimizer seconds"] = tiny.sums(kernels & updates, took)
    found["F kernels"] = tiny.sums(kernels & forward, took)
    found["B kernels"] = tiny.sums(kernels & ~forward & ~updates, took)
    axes = along(tiny.program, tasks)
    for key, axis, degree in zip(axes.keys, axes.axes, axes.degrees, strict=True):
        _, slot, collective = key
        if degree != "dp":
            continue
        mesh = tiny.program.mesh
        ranks = mesh.size(*tiny.program.communicators[slot].axes)
        group = "expert" if "edp" in axis.degrees else "dense"
        gathers = COLLECTIVES[collective] == "all_gather"
        sizes = tasks.comm_bytes * (ranks if gathers else 1)
        for phase, name in enumerate(PHASES):
            use = ("update" if name == "optimizer" else f"gather_{name}") if gathers else "reduce"
            rows = (tasks.slot == slot) & (tasks.collective == collective) & (tasks.phase == phase)
            rows &= (tasks.kind == TaskKind.COLLECTIVE) & (tiny.block >= 0)
            if rows.any():
                column = f"{group} {use}"
                found[column] = found.get(column, 0.0) + tiny.sums(rows, sizes)
    return found
