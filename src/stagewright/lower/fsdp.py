"""FSDP2: units of weights that are gathered and reduced as one, their memory, and uneven shards.

Source: `torch.distributed.fsdp` of PyTorch 2.13 (`fully_shard`, `FSDPParamGroup`, `FSDPParam`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from stagewright.algebra.layout import Mesh
from stagewright.arrays import Int
from stagewright.graph.node import Node
from stagewright.graph.roles import Role
from stagewright.lower.assembly.habit import Habit, Item, Row, UnitWeights, merged, one_by_one
from stagewright.lower.assembly.lowered_block import Value, moves_gradients
from stagewright.lower.assembly.segments import ActionRows, CopyRelation
from stagewright.lower.assembly.stage_values import StageValues
from stagewright.lower.assembly.work import AssembledWork, assembled
from stagewright.lower.kernels.extent import LocalRows, Split
from stagewright.lower.kernels.kernel import BlockSection, LoweredTask
from stagewright.program.columns import Program, RankClass, TaskKind, intersect
from stagewright.program.communicators import place_along
from stagewright.run.settings import Run
from stagewright.schedule.actions import Order, flat

ONE_STAGE = frozenset({"gpipe", "1f1b"})
"""Schedules whose classes in `torch.distributed.pipelining` have one stage on a rank and a loop of
their own; all others, and orders from files, run in `_PipelineScheduleRuntime`."""


@dataclass(frozen=True, slots=True)
class FsdpUnits(Habit):
    """FSDP2's `fully_shard`: a unit per layer, and the root unit for all other parameters."""

    pipelined: bool
    """`torch.distributed.pipelining`: all units reduce after the last backward of a stage, and
    their weights stay gathered from one action of the stage to the next."""
    gathers_ahead: bool
    """A rank gathers the weights of all its stages before the first action, as in the loop of
    schedules with several stages (`_PipelineScheduleRuntime`)."""

    split_backward: bool
    """Backward is split into halves."""
    prefetches: bool
    """A unit gathers the next one when it begins, as torchtitan asks for with experts over ep."""

    @staticmethod
    def applies(run: Run) -> bool:
        """Return True for a run with `fsdp_root_unit` that shards its weights."""
        return run.fsdp_root_unit and run.zero == 3

    @classmethod
    def of(cls, run: Run, order: Order) -> Self | None:
        """Habit of a run to which it applies."""
        if not cls.applies(run):
            return None
        pipelined = len(order) > 1
        split_backward = any(a.kind == "I" for steps in order for a in flat(steps))
        gathers_ahead = pipelined and run.schedule not in ONE_STAGE
        return cls(pipelined, gathers_ahead, split_backward, run.ep > 1 and not pipelined)

    def unit_weights(self) -> UnitWeights:
        """Keep a pipeline's units gathered after backward."""
        return UnitWeights(self.pipelined, self.gathers_ahead)

    def weight_ends(self, action: ActionRows, root: AbstractSet[int]) -> Mapping[int, int]:
        """Free a unit before its gradients are copied for their reduction (`post_backward`).

        A layer's weights go one row before the end of its backward: the copy-out of the next unit
        comes with the last row.
        """
        reductions = {t for _, t in _reductions(action.order)}
        ends = {i: action.row_of[i][t] for i, t in action.order if t not in reductions}
        unit = _unit(root) & ends.keys()
        end = max((ends[i] for i in unit), default=0)
        return {i: end if i in unit else row - (i not in root) for i, row in ends.items()}

    def arrange(
        self, items: Sequence[Item], root: AbstractSet[int], *, forward: bool
    ) -> Sequence[Row] | None:
        """Make units of blocks: the root's gathers first, and reduces last (pipelines: first)."""
        if self.pipelined:  # in the order of the module's units: the root is the first
            return _with_root_unit(items, root, root_first=True)
        return _with_root_unit(items, _unit(root))

    def extend_live_ranges(self, values: StageValues, action: ActionRows) -> None:
        """Extend weights, buffers of gathers, and gradients as FSDP2's units hold them."""
        if not action.forward:
            sections = () if self.pipelined else (BlockSection.GATHER_AGAIN,)
            for i, row in self.weight_ends(action, values.root_blocks).items():
                root = i in values.root_blocks
                values.extend_weights(
                    i, (BlockSection.GATHER,) if root else sections, action.touch_by(row)
                )
            _extend_reduced(values, action)
        rows = action.every_microbatch
        if rows:
            _add_gather_buffers(values, action, rows, prefetches=self.prefetches)
        if self.pipelined and not action.forward:
            _pair_gathered_weights(values)
            if values.arriving and self.split_backward:
                _extend_to_next_input_half(values, action)


def _unit(root: AbstractSet[int]) -> AbstractSet[int]:
    """Blocks of the root unit; none if there is a single root block."""
    return root if len(root) > 1 else frozenset[int]()


# ---- order of tasks ------------------------------------------------------------------------------


def _with_root_unit(
    items: Sequence[Item], root: AbstractSet[int], *, root_first: bool = False
) -> list[Row]:
    """Make each block a unit that gathers weights and reduces gradients; `root` is one unit.

    After its backward, a unit casts its gradients, adds them to those of earlier microbatches and
    reduces them. The root gathers before all other units, and reduces after them.
    With `root_first`, all units reduce after the whole backward: the root, then the others from the
    first on.
    """
    gather_sections = (BlockSection.GATHER_ONCE, BlockSection.GATHER)
    root_gathers = [(i, t) for i, t in items if i in root and t.section in gather_sections]
    all_reductions = _reductions(items)
    reductions = {i: [item for item in all_reductions if item[0] == i] for i, _ in items}
    additions = {
        i: [(j, t) for j, t in items if j == i and _adds_before_reduction(t)] for i in reductions
    }
    moved = {t for by_unit in (reductions, additions) for u in by_unit.values() for _, t in u}
    moved |= {t for _, t in root_gathers}
    remaining = _gather_after_loss([item for item in items if item[1] not in moved])
    # Gradients are complete after the backward of their block; the root's, of all blocks.
    last_row = {i: n for n, (i, t) in enumerate(remaining) if t.section is BlockSection.BACKWARD}
    last = max(last_row.values(), default=-1)
    rows = merged(root_gathers)
    for n, (i, t) in enumerate(remaining):
        rows.append([(i, t)])
        if last_row.get(i) == n and i not in root:
            rows += one_by_one([*additions[i], *(() if root_first else reductions[i])])
        if n == last:
            rows += one_by_one([item for j in additions if j in root for item in additions[j]])
            rows += merged([item for j in reductions if j in root for item in reductions[j]])
            others = sorted(reductions.keys() - root) if root_first else []
            rows += one_by_one([item for j in others for item in reductions[j]])
    return rows


def _adds_before_reduction(t: LoweredTask) -> bool:
    """True if a kernel adds a gradient in another precision to those of earlier microbatches.

    A kernel that adds a reduced gradient is part of the reduction.
    """
    reduced = any(isinstance(d, LoweredTask) and moves_gradients(d) for d in t.deps)
    return t.op == "cast+accumulate" and not reduced


def _gather_after_loss(items: Sequence[Item]) -> Row:
    """Gather for the second block of backward when the loss has its gradient."""
    start = next((n for n, (_, t) in enumerate(items) if t.section is BlockSection.BACKWARD), 0)
    first = items[start][0] if items else 0
    gathers = [
        (i, t) for i, t in items[:start] if t.section is BlockSection.GATHER_AGAIN and i != first
    ]
    deferred = {t for _, t in gathers}
    candidates = range(start, len(items))
    end = next((n for n in candidates if _ends_wait(items[n][1], deferred)), start)
    before = [item for item in items[:start] if item not in gathers]
    return [*before, *items[start:end], *gathers, *items[end:]] if gathers else [*items]


def _ends_wait(t: LoweredTask, gathers: AbstractSet[LoweredTask]) -> bool:
    """True if gathers are issued before this task: a product, or a task that depends on them."""
    product = t.shape is not None and t.shape.kernel == "gemm"
    return product or any(isinstance(d, LoweredTask) and d in gathers for d in t.deps)


def _reductions(items: Sequence[Item]) -> Row:
    """Reductions of gradients, the tasks that depend on these, and the casts before these."""
    moved: set[LoweredTask] = set()
    for _, t in items:
        depends = any(isinstance(d, LoweredTask) and d in moved for d in t.deps)
        if t.section in (BlockSection.BACKWARD, BlockSection.REDUCE_ONCE) and (
            depends or moves_gradients(t)
        ):
            moved.add(t)
    sources = {d for t in moved if moves_gradients(t) for d in t.deps}
    return [(i, t) for i, t in items if t in moved or (t in sources and t.op == "cast")]


# ---- memory --------------------------------------------------------------------------------------


def _extend_to_next_input_half(values: StageValues, action: ActionRows) -> None:
    """Extend gradients of a weight half to the next input half, after which their unit adds them.

    A backward that is not split adds its own (`post_backward`).
    """
    input_half = sorted({*action.every_microbatch} - {*action.weight_half})
    for i, t in action.order:
        if input_half and _adds_before_reduction(t):
            gradient = values.value(i, t.reads[0])
            if gradient is not None:
                gradient.touches.append(
                    (CopyRelation.NEXT_AFTER_SPLIT, action.stage, input_half[-1])
                )


def _pair_gathered_weights(values: StageValues) -> None:
    """Record weights of each unit, as forward and as backward gathers them."""
    for i, placed in enumerate(values.blocks):
        gathered = [
            [new.nodes[0] for t in placed.block.by_section.get(section, ())
             if t.kind == TaskKind.COLLECTIVE for new in placed.block.uses[t].new]
            for section in (BlockSection.GATHER, BlockSection.GATHER_AGAIN)
        ]  # fmt: skip
        for forward_node, backward_node in zip(*gathered, strict=False):
            forward, backward = values.value(i, forward_node), values.value(i, backward_node)
            if forward is not None and backward is not None:
                values.gathered_pairs.append((forward, backward))


def _extend_reduced(values: StageValues, action: ActionRows) -> None:
    """Hold the gradients of a unit and the input of its reduction, as `foreach_reduce` does.

    All gradients of the unit are there until the last one is copied to the input, in the precision
    of the reduction; that of the last parameter, the first in the order of backward, until the
    reduction is issued. The inputs of a block, one for each mesh, are freed before those of the
    next block are made.
    """
    root = _unit(values.root_blocks)
    reduced: list[Value] = []  # of a block
    copied: list[Value] = []  # of a block on one mesh
    owner: tuple[int, tuple[str, ...]] = (-1, ())
    cast = {d for _, t in action.order if t.op.startswith("cast") for d in t.deps}
    summed = {
        d for t in cast if isinstance(t, LoweredTask) and t.op == "all_reduce" for d in t.deps
    }
    for i, t in action.order:
        if not (moves_gradients(t) and t.op == "reduce_scatter"):
            continue
        row_of = action.row_of[i]
        casts = [d for d in t.deps if isinstance(d, LoweredTask) and d.op == "cast"]
        rows = [row_of[d] for d in (*casts, t)]
        once = t.section is BlockSection.REDUCE_ONCE
        copy = CopyRelation.LAST_BACKWARD if once else action.copy
        before = copy, action.stage, min(rows) - 1
        unit = min(root) if i in root else i
        if owner[0] != unit:
            for value in reduced:
                value.touches.append(before)
            reduced = []
        if owner != (unit, t.axes):
            copied = []
        read = [v for n in t.reads if (v := values.value(i, n)) is not None]
        reduced += read
        for d in sorted(casts, key=lambda d: row_of[d]):
            copied += [v for n in d.reads if (v := values.value(i, n)) is not None]
        for value in copied if casts else ():
            value.touches.append(action.touch_by(max(rows[:-1])))
        for value in copied[:1]:
            value.touches.append(action.touch_by(row_of[t]))
        padding = max(0, t.comm_bytes - sum(v.size for v in read))
        if padding:
            reduced.append(_buffer(values, action, i, "reduced.padding", padding, rows))
        if t in summed:  # the sum over replicas lives as long as the unit: a cast is the gradient
            for n in t.made:
                if (value := values.value(i, n)) is not None:
                    value.touches.append(action.touch_by(len(action.tasks) - 1))
        if not casts:  # the gradients are there beside their copies, before the result is
            made = {id(v): v.size for n in t.made if (v := values.value(i, n)) is not None}
            size = t.comm_bytes - sum(made.values()) - padding
            _buffer(values, action, i, "reduced.copy", size, [row_of[t]])
        owner = unit, t.axes


def _buffer(
    values: StageValues, action: ActionRows, i: int, name: str, size: int, rows: Sequence[int]
) -> Value:
    """Add a buffer of a reduction of block `i`, which these rows touch."""
    placed = values.blocks[i]
    buffer = Value(placed.name(name), placed.layer, "backward", "communication", size)
    buffer.touches += [action.touch_by(row) for row in rows]
    values.values.append(buffer)
    return buffer


def _add_gather_buffers(
    values: StageValues, action: ActionRows, rows: Sequence[int], *, prefetches: bool
) -> None:
    """Add the buffers that units are gathered into, and from which weights are copied out.

    In forward a buffer is live until the next one is copied, the last one until the module returns;
    in backward it is freed at once. A unit with weights on several meshes has a buffer for each,
    and copies one after the other. `prefetches`: the unit before has gathered it, as it began.
    `rows`: rows of all microbatches.
    """
    root = _unit(values.root_blocks)
    gather_section = BlockSection.GATHER if action.forward else BlockSection.GATHER_AGAIN
    begins: dict[int, int] = {}  # per block, its first row
    gather_rows = set[int]()
    sizes: dict[int, list[int]] = {}  # per block, bytes that each collective gathers
    collective_rows: dict[int, int] = {}  # per block, the last
    casts: dict[int, int] = {}  # per block, bytes of shards that are cast for its last gather
    for i, row_of in enumerate(action.row_of):
        for t, row in row_of.items():
            if t.section in (BlockSection.FORWARD, BlockSection.BACKWARD):
                begins[i] = min(row, begins.get(i, row))
            elif t.section is gather_section:
                gather_rows.add(row)
                if t.kind == TaskKind.COLLECTIVE:
                    collective_rows[i] = row
                    cast = any(isinstance(d, LoweredTask) and d.op == "cast" for d in t.deps)
                    casts[i] = t.comm_bytes if cast else 0
                    new = values.blocks[i].block.uses[t].new
                    sizes.setdefault(i, []).append(sum(value.size for value in new))
    computing = [row for row in rows if row not in gather_rows]
    units = sorted(first for i, first in begins.items() if i not in root)
    if action.forward:
        unit_begin = min((begins[i] for i in begins.keys() & root), default=0)
        root_begins = dict.fromkeys(root & begins.keys(), unit_begin)
        _begin_with_block(values, action, begins | root_begins, gather_rows)

    def add(i: int, size: int, *touching: int) -> None:
        buffer = _buffer(values, action, i, "gathered.buffer", size, touching)
        buffer.phase, buffer.category = "forward", "gathered_parameters"
        buffer.requires = action.touch_by(collective_rows[i])

    for i, of_mesh in sizes.items():
        first = begins[i]
        previous = computing[max(0, bisect_left(computing, first) - 1)]
        following = units[bisect_right(units, first) :][:1]
        end = following[0] if following else _row_of_logits(values, action, rows[-1])
        if not action.forward:
            # Copied out when the casts of its shards are gone.
            gone = casts[i] if previous < collective_rows[i] else 0
            add(i, max(of_mesh) - gone, max(previous, collective_rows[i]))
        elif i in root:
            add(i, sum(of_mesh), rows[0], units[0] if units else rows[-1])
        elif prefetches:
            before = units[: bisect_left(units, first)]
            add(i, sum(of_mesh), before[-1] if before else rows[0], previous)
            last = computing[bisect_left(computing, end) - 1] if following else end
            add(i, of_mesh[-1], first, last)
        else:
            add(i, sum(of_mesh), first, end)


def _begin_with_block(
    values: StageValues,
    action: ActionRows,
    begins: Mapping[int, int],
    gather_rows: AbstractSet[int],
) -> None:
    """Allocate gathered weights of forward when their unit begins, after the message runs.

    The host issues a unit's gather when the previous block has ended, and memory is allocated in
    the order of the host; backward prefetches the next unit.
    """
    for i, begin in begins.items():
        for t in values.blocks[i].block.by_section.get(BlockSection.GATHER, ()):
            for new in values.blocks[i].block.uses[t].new:
                v = values.value(i, new.nodes[0])
                if v is None:
                    continue
                if new.nodes[0].role is Role.SENT:  # unused where weights are still gathered
                    v.requires = action.touch_by(action.row_of[i][t])
                    v.touches = [action.touch_by(max(0, begin - 1))]  # freed before the copy out
                    continue
                gathers = {action.touch_by(row) for row in gather_rows}
                v.touches = [action.touch_by(begin), *(x for x in v.touches if x not in gathers)]


def _row_of_logits(values: StageValues, action: ActionRows, end: int) -> int:
    """Row with which the stage's module returns; the loss comes after."""
    logits = module_logits(values)
    rows = [row for t, row in action.row_of[-1].items() if logits in t.made]
    return min(rows, default=end)


def module_logits(values: StageValues) -> Node | None:
    """Output of the stage's last block before its loss: logits, gathered where they are."""
    forward = [n for n in values.blocks[-1].block.graph if n.phase == "forward"]
    return next((n for n in reversed(forward) if n.role is Role.LOGITS), None)


# ---- uneven shards ------------------------------------------------------------------------------


def by_rows(
    mesh: Mesh,
    axes: tuple[str, ...],
    splits: Sequence[Split],
    make: Callable[[LocalRows], Program],
) -> Program:
    """Build the program of all ranks where the rows of some weights do not divide.

    If eight ranks shard four experts, the first four have one each. All ranks send and store equal
    sizes, some of it padding; an optimizer has states of its rank's rows only, and updates only
    these. `make` compiles the program of ranks with equal rows, once for every distinct set;
    `axes`: those that FSDP shards over; `splits`: those that do not divide. Ranks of a pipeline
    rank with equal work form a class; its classes differ in the numbers of their actions only.
    """
    first = make(LocalRows(axes))
    if not splits:
        return first
    rows = np.stack([_rows(mesh, split) for split in splits])
    distinct, index = np.unique(rows, axis=1, return_inverse=True)
    classes: dict[object, RankClass] = {}  # by their numbers: a stage may have no such split
    base: dict[int, AssembledWork] = {}  # by pipeline rank; all its classes share the order
    for i, rank_rows in enumerate(distinct.T.tolist()):
        ranks = np.flatnonzero(index.ravel() == i)
        program = make(LocalRows(axes, tuple(zip(splits, rank_rows, strict=True))))
        for rank_class in program.classes:
            members = intersect(rank_class.ranks, ranks)
            if not len(members):
                continue
            work, pipeline_rank = assembled(rank_class), rank_class.pipeline_rank
            tasks, action_rows, stages = work.actions.tasks, work.rows, work.stage_bytes
            numbers = (
                tasks.flops[action_rows],
                tasks.traffic[action_rows],
                *(s.size for s in stages),
            )
            key = pipeline_rank, *(column.tobytes() for column in numbers)
            if key in classes:
                members = np.sort(np.concatenate([classes[key].ranks, members]))
                classes[key] = replace(classes[key], ranks=members)
                continue
            shared = base.setdefault(pipeline_rank, work)
            sizes = {a.stage: b.size for a, b in zip(shared.stage_bytes, stages, strict=True)}
            work = shared.with_numbers(tasks, sizes)
            classes[key] = replace(rank_class, ranks=members, work=work)
    order = sorted(classes.values(), key=lambda c: (c.pipeline_rank, int(c.ranks[0])))
    return replace(first, classes=tuple(order))


def _rows(mesh: Mesh, split: Split) -> Int:
    """Number of rows of a split on every rank, as `torch.chunk` cuts."""
    count, axes = split
    chunk = -(-count // mesh.size(*axes))
    return np.clip(count - place_along(mesh, axes) * chunk, 0, chunk)
