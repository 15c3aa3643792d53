"""Costs of single blocks, read off the simulated step of a tiny run (`block_costs`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Bool, Float, Int
from stagewright.lower.variants import PlacedVariant, place_blocks
from stagewright.model.layers import Layer
from stagewright.program.columns import (
    CATEGORIES,
    COLLECTIVES,
    FORWARD_PHASE,
    OPTIMIZER_PHASE,
    PHASES,
    TaskKind,
)
from stagewright.program.comm_axes import comm_axes
from stagewright.time.power import kernel_energies
from stagewright.time.simulate.launches import HostWork
from stagewright.time.simulate.step import SimulatedStep
from stagewright.time.simulate.timeline import TICK, table_rows

WEIGHTS = ("dense", "expert")
"""Kinds of weights, each replicated over ranks of its own."""
USES = ("gather_forward", "gather_recompute", "gather_backward", "reduce", "update")
"""Gathers of parameters for a pass, reductions of gradients, gathers of updated parameters."""
_STATE_CATEGORIES = ("parameters", "gradients", "optimizer")

ALL_ACTIONS = str(files("stagewright.data") / "schedules" / "all_actions.csv")
"""Order of one stage that also halves the backward pass of microbatch 1, and overlaps the forward
pass of microbatch 3 with the backward pass of microbatch 2."""

COSTS = (
    *("F", "B", "W", "F kernels", "B kernels", "F experts", "B experts", "F host", "B host"),
    *("F waits", "W host"),
    *("overlap exposed", "energy over TDP", "saved", "transient", *_STATE_CATEGORIES),
    *("optimizer seconds", "expert to dense reduce"),
    *(f"{weights} {use}" for weights in WEIGHTS for use in USES),
)
"""Names of all costs of a tiny run."""


class BlockKind(NamedTuple):
    """Kind of blocks with equal costs."""

    block: str
    """Name in `blocks.BLOCKS`: embedding, layer, head, ..."""
    layer: Layer


class Blocks(NamedTuple):
    """Blocks of a model by kind."""

    kinds: tuple[BlockKind, ...]
    layers: int
    """Layers of a tiny run: the first ones that include each kind, at least two."""
    are_layers: tuple[bool, ...]
    """Mask of kinds that are layers, which may be recomputed."""

    def kind(self, placed: PlacedVariant) -> int:
        """Index of a block's kind."""
        return self.kinds.index(BlockKind(placed[0].block, placed[0].layer))


def tiny_step_costs(
    step: SimulatedStep, hosts: Sequence[HostWork] | None, blocks: Blocks
) -> dict[str, Float]:
    """All costs by name (`block_costs.BlockCosts`): [kinds] each.

    `hosts`: launches; the step is simulated without them.
    """
    tiny = _TinyStep(step, hosts, blocks)
    costs = _pass_costs(tiny) | _activations(tiny) | _state_costs(tiny) | _dp_bytes(tiny)
    if step.compiled.run.schedule == ALL_ACTIONS:
        costs |= _halves_and_overlap(tiny, costs)
    return costs


def _sums(keys: Int, amounts: Float, count: int) -> Float:
    """Sums of amounts by key."""
    return np.bincount(keys, amounts, count).astype(np.float64)


class _TinyStep:
    """Simulated tiny run; arrays are by row of its tasks."""

    def __init__(
        self, step: SimulatedStep, hosts: Sequence[HostWork] | None, blocks: Blocks
    ) -> None:
        stages = place_blocks(step.compiled.run, step.compiled.model)
        placed = [block for stage in stages for block in stage]
        self.step = step
        self.index_of_name = {
            variant.name_at(layer): n for n, (variant, layer) in enumerate(placed)
        }
        self.kinds = np.array([blocks.kind(block) for block in placed])
        """Kind of each block."""
        self.num_kinds = len(blocks.kinds)
        self.program, lane = step.timeline.program, step.timeline.lanes[0]
        self.tasks, self.values = lane.rank_class.tasks, lane.rank_class.values
        self.block = self.block_indices(self.tasks.names)[self.tasks.name]
        """Block of each task; -1: none."""
        self.begin, self.end = np.zeros((2, len(self.tasks)), dtype=np.int64)
        rows = lane.issue.rows
        self.begin[rows], self.end[rows] = lane.begin, lane.end
        self.is_kernel = np.zeros(len(self.tasks), dtype=bool)
        """Mask of tasks on the compute stream."""
        self.is_kernel[rows] = lane.is_kernel
        self.span = np.zeros(len(self.tasks))
        """Seconds from the end of the previous kernel to the end of each kernel."""
        kernels = rows[lane.is_kernel]
        self.span[kernels] = np.diff(self.end[kernels], prepend=0) * TICK
        self.seconds: Float = np.asarray((self.end - self.begin) * TICK, dtype=np.float64)
        """Duration of each task."""
        self.issued = np.zeros(len(self.tasks))
        """Seconds of all kernels that are issued before each task."""
        self.issued[rows] = np.cumsum(np.where(lane.is_kernel, self.seconds[rows], 0.0))
        phase, in_block = self.tasks.phase, self.block >= 0
        self.forward = in_block & (phase == FORWARD_PHASE)
        """Mask of tasks of blocks in forward passes."""
        self.backward = in_block & (phase != FORWARD_PHASE) & (phase != OPTIMIZER_PHASE)
        """Mask of tasks of blocks in backward passes, recomputation included."""
        self.launches, self.waits = np.zeros((2, len(self.tasks)))
        """Seconds of each task's launch, and 1 where launches then wait for the task."""
        if hosts is not None:
            of_task = table_rows(self.program.classes[0].work)
            self.launches = hosts[0].seconds[of_task]
            self.waits = hosts[0].waits[of_task].astype(np.float64)

    def block_indices(self, names: Sequence[str]) -> Int:
        """Index of the block that each name begins with; -1: none."""
        prefixes = [name.partition(".")[0] for name in names]
        return np.array([self.index_of_name.get(p, -1) for p in prefixes], dtype=np.int64)

    def value_blocks(self, value: NDArray[np.int32]) -> Int:
        """Index of the block that each value belongs to; -1: none."""
        values = self.values
        layers: list[int] = values.layer[value].tolist()
        rows: list[int] = values.name[value].tolist()
        pairs = zip(layers, rows, strict=True)
        names = [f"layer{layer}" if layer >= 0 else values.names[row] for layer, row in pairs]
        return self.block_indices(names)

    def last_of_kind(self, of_block: Float, *, backward: bool = False) -> Float:
        """Value of each kind's last block."""
        result = np.zeros(self.num_kinds)
        step = -1 if backward else 1
        result[self.kinds[::step]] = of_block[::step]
        return result

    def spans(self, rows: Bool, *, backward: bool = True) -> Float:
        """Seconds of a pass by kind, from the end of the previous block to the end of its own."""
        of_block = _sums(self.block[rows], self.span[rows], len(self.kinds))
        return self.last_of_kind(of_block, backward=backward)

    def mean_of_kind(self, block: Int, amounts: Float) -> Float:
        """Sum of amounts per block, averaged over the blocks of each kind."""
        num_blocks = np.bincount(self.kinds, minlength=self.num_kinds).clip(1)
        return _sums(self.kinds[block], amounts, self.num_kinds) / num_blocks


def _pass_costs(tiny: _TinyStep) -> dict[str, Float]:
    """Pass costs. Forward is read off microbatch 1, backward off microbatch 0.

    There is no warm-up in the former, and no reduction in the latter.
    """
    tasks = tiny.tasks
    forward = tiny.forward & (tasks.microbatch == 1)
    backward = tiny.backward & (tasks.microbatch == 0)
    is_kernel, over_ep = tiny.is_kernel, _communicates_over(tiny, "ep")
    energy = np.zeros(len(tasks))
    kernels = np.flatnonzero((tasks.kind == TaskKind.COMPUTE) & (tiny.end > tiny.begin))
    hardware = tiny.step.machine.hardware
    energy[kernels] = kernel_energies(tasks, kernels, tiny.seconds[kernels], hardware)

    def total(rows: Bool, amounts: Float) -> Float:
        return tiny.mean_of_kind(tiny.block[rows], amounts[rows])

    return {
        "F": _forward_spans(tiny),
        "B": tiny.spans(backward),
        "F kernels": total(forward & is_kernel, tiny.seconds),
        "B kernels": total(backward & is_kernel, tiny.seconds),
        "F experts": total(forward & over_ep, tiny.seconds),
        "B experts": total(backward & over_ep, tiny.seconds),
        "F host": total(forward, tiny.launches),
        "B host": total(backward, tiny.launches),
        "F waits": total(forward, tiny.waits),
        "energy over TDP": total((forward | backward) & is_kernel, energy),
    }


def _forward_spans(tiny: _TinyStep) -> Float:
    """Seconds of a forward pass by kind."""
    return tiny.spans(tiny.forward & (tiny.tasks.microbatch == 1), backward=False)


def forward_seconds(step: SimulatedStep, blocks: Blocks) -> Float:
    """Seconds of the blocks of a forward pass in a simulated step, launches included: [kinds]."""
    return _forward_spans(_TinyStep(step, None, blocks))


def _halves_and_overlap(tiny: _TinyStep, costs: Mapping[str, Float]) -> dict[str, Float]:
    """Costs of weight gradients in halved passes, and the exposed share of overlapped passes.

    Two overlapped passes take at least as long as the longer and as the kernels of both, and at
    most as long as both in turn. The share is 0 at the former and 1 at the latter.
    """
    microbatch = tiny.tasks.microbatch
    weights = _weight_half(tiny, tiny.backward & tiny.is_kernel & (microbatch == 1))
    both = (tiny.forward & (microbatch == 3)) | (tiny.backward & (microbatch == 2))
    num_blocks = np.bincount(tiny.kinds, minlength=tiny.num_kinds)
    of_forward, of_backward = (float(costs[name] @ num_blocks) for name in "FB")
    kernels = float((costs["F kernels"] + costs["B kernels"]) @ num_blocks)
    least, most = max(of_forward, of_backward, kernels), of_forward + of_backward
    seconds = float(tiny.span[both].sum())
    share = (seconds - least) / (most - least) if most > least else 0.0
    return {
        "W": tiny.spans(weights),
        "W host": tiny.mean_of_kind(tiny.block[weights], tiny.launches[weights]),
        "overlap exposed": np.full(tiny.num_kinds, min(max(share, 0.0), 1.0)),
    }


def _communicates_over(tiny: _TinyStep, degree: str) -> Bool:
    """Mask of tasks that communicate over one parallel degree."""
    axes = comm_axes(tiny.program, tiny.tasks)
    return axes.of_tasks([name == degree for name in axes.degrees])


def _weight_half(tiny: _TinyStep, backward: Bool) -> Bool:
    """Weight-gradient rows: from where backward first returns to a block that it had left."""
    rows = np.flatnonzero(backward)
    block = tiny.block[rows]
    entries = np.flatnonzero(np.diff(block, prepend=-1))
    returns = np.ones(len(entries), dtype=bool)
    returns[np.unique(block[entries], return_index=True)[1]] = False
    begin = rows[entries[returns][0]] if returns.any() else len(backward)
    return backward & (np.arange(len(backward)) >= begin)


def _activations(tiny: _TinyStep) -> dict[str, Float]:
    """Bytes saved for backward, and bytes beyond these at the peak of a backward pass."""
    values, tasks = tiny.values, tiny.tasks
    mask = values.microbatch == 0
    value, first, last = (column[mask] for column in (values.value, values.first, values.last))
    block, size = tiny.value_blocks(value), values.size[value].astype(np.float64)
    turn = int(np.argmax(tasks.phase != FORWARD_PHASE))
    crossing = (first < turn) & (last >= turn) & (block >= 0)
    saved = _sums(block[crossing], size[crossing], len(tiny.kinds))
    live = np.zeros(len(tasks) + 2)
    np.add.at(live, np.maximum(first, 0), size)
    np.add.at(live, last + 1, -size)
    live = np.cumsum(live)[: len(tasks)]
    rows = np.flatnonzero(tiny.backward & (tasks.microbatch == 0))
    transient = np.zeros(len(saved))
    np.maximum.at(transient, tiny.block[rows], live[rows] - np.cumsum(saved)[tiny.block[rows]])
    return {"saved": tiny.last_of_kind(saved), "transient": tiny.last_of_kind(transient)}


def _state_costs(tiny: _TinyStep) -> dict[str, Float]:
    """Bytes of states by category, and seconds of the optimizer."""
    values, tasks = tiny.values, tiny.tasks
    value = values.value[values.microbatch < 0]
    block, category = tiny.value_blocks(value), values.category[value]
    costs: dict[str, Float] = {}
    for name in _STATE_CATEGORIES:
        rows = (category == CATEGORIES.index(name)) & (block >= 0)
        costs[name] = tiny.mean_of_kind(block[rows], values.size[value[rows]].astype(np.float64))
    updates = tiny.is_kernel | (
        tasks.kind == TaskKind.STORE
    )  # stores offload to the host's optimizer
    updates &= (tiny.block >= 0) & (tasks.phase == OPTIMIZER_PHASE)
    costs["optimizer seconds"] = tiny.mean_of_kind(tiny.block[updates], tiny.seconds[updates])
    return costs


def _dp_bytes(tiny: _TinyStep) -> dict[str, Float]:
    """Bytes of unsharded tensors in dp communication, by kind of weights and use.

    `expert to dense reduce`: share of a backward pass's kernels between these reductions.
    """
    program, tasks = tiny.program, tiny.tasks
    axes = comm_axes(program, tasks)
    costs = {f"{weights} {use}": np.zeros(tiny.num_kinds) for weights in WEIGHTS for use in USES}
    issued = {weights: np.zeros(len(tiny.kinds)) for weights in WEIGHTS}
    collectives = (tasks.kind == TaskKind.COLLECTIVE) & (tiny.block >= 0) & (tasks.microbatch != 0)
    for (_, slot, collective), axis, degree in zip(axes.keys, axes.axes, axes.degrees, strict=True):
        if degree != "dp":
            continue
        weights = "expert" if "edp" in axis.degrees else "dense"
        gathers = COLLECTIVES[collective] == "all_gather"
        ranks = program.mesh.size(*program.communicators[slot].axes) if gathers else 1
        in_class = collectives & (tasks.slot == slot) & (tasks.collective == collective)
        for phase, name in enumerate(PHASES):
            rows = in_class & (tasks.phase == phase)
            use = ("update" if name == "optimizer" else f"gather_{name}") if gathers else "reduce"
            sizes = tasks.comm_bytes[rows].astype(np.float64) * ranks
            costs[f"{weights} {use}"] += tiny.mean_of_kind(tiny.block[rows], sizes)
            if use == "reduce":
                np.maximum.at(issued[weights], tiny.block[rows], tiny.issued[rows])
    backward = tiny.backward & tiny.is_kernel & (tasks.microbatch == 1)
    of_block = _sums(tiny.block[backward], tiny.seconds[backward], len(tiny.kinds))
    apart = (issued["dense"] - issued["expert"]) / np.where(of_block > 0, of_block, 1.0)
    apart = np.where(issued["expert"] > 0, apart, 0.0)
    costs["expert to dense reduce"] = tiny.last_of_kind(apart, backward=True)
    return costs
