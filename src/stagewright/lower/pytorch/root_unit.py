"""FSDP2: units of weights that are gathered and reduced together, and what their memory does."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Self

from stagewright.graph.node import Node
from stagewright.graph.roles import Role
from stagewright.lower.assembly.buckets import Item, Row, adds_before_reduction, with_root_unit
from stagewright.lower.assembly.habit import Habit, UnitWeights
from stagewright.lower.assembly.lifetimes import Value, moves_gradients
from stagewright.lower.assembly.segments import NEXT
from stagewright.lower.assembly.stage_values import ActionRows, StageValues
from stagewright.lower.kernels.kernel import Kernel, TaskPart
from stagewright.program.columns import PHASES, TaskKind
from stagewright.run.settings import Run
from stagewright.schedule.actions import Order, flat
from stagewright.schedule.schedules import SCHEDULES

_COMPUTED = (TaskPart.FORWARD, TaskPart.BACKWARD)


@dataclass(frozen=True, slots=True)
class RootUnit(Habit):
    """FSDP2's `fully_shard`: each layer is a unit, all parameters outside of layers are another."""

    pipelined: bool
    """`torch.distributed.pipelining` has all units reduce after the last backward of a stage, and
    frees what backward has gathered only then."""
    one_stage: bool
    """Its schedules of several stages (`_PipelineScheduleRuntime`) gather the weights of all stages
    of a rank before the first action, its schedules of one stage do not."""

    split_backward: bool
    """A backward is done in halves."""

    @staticmethod
    def applies(run: Run) -> bool:
        """By `fsdp_root_unit`, where weights are sharded."""
        return run.fsdp_root_unit and run.zero == 3

    @classmethod
    def of(cls, run: Run, order: Order) -> Self | None:
        """Where it applies."""
        schedule = SCHEDULES.get(run.schedule or "")
        one_stage = schedule is not None and schedule.one_stage
        halves = any(a.kind == "I" for steps in order for a in flat(steps))
        return cls(len(order) > 1, one_stage, halves) if cls.applies(run) else None

    def unit_weights(self) -> UnitWeights:
        """A pipeline's units stay gathered after backward."""
        return UnitWeights(self.pipelined, self.pipelined and not self.one_stage)

    def arrange(
        self, items: Sequence[Item], root: AbstractSet[int], *, forward: bool
    ) -> Sequence[Row] | None:
        """The root's blocks gather first and reduce last; in other units, a block is alone."""
        if self.pipelined:  # in the order of the module's units: the root is the first
            return with_root_unit(items, root, root_first=True)
        return with_root_unit(items, _together(root))

    def prolong(self, values: StageValues, action: ActionRows) -> None:
        """Weights, buffers of gathers, and gradients live as FSDP2's units hold them."""
        if not action.forward:
            _hold_root_weights(values, action)
            _hold_reduced(values, action)
        rows = action.of_all_microbatches
        if rows:
            _copy_out(values, action, rows)
        if self.pipelined and not action.forward:
            _keep_weights(values)
            if values.arriving and self.split_backward:
                _add_in_next_half(values, action)


def _together(root: AbstractSet[int]) -> AbstractSet[int]:
    """The blocks of the root unit, if they are several."""
    return root if len(root) > 1 else frozenset[int]()


def _hold_root_weights(values: StageValues, action: ActionRows) -> None:
    """Gathered weights of the root are live until the backward of all its blocks is done."""
    last_rows = action.last_rows()
    for i in values.root_blocks & last_rows.keys():
        unit = {i} | _together(values.root_blocks)
        done = max(row for j, row in last_rows.items() if j in unit)
        values.hold_weights(i, (TaskPart.GATHER_ONCE, TaskPart.GATHER), action.at(done))


def _add_in_next_half(values: StageValues, action: ActionRows) -> None:
    """Gradients of weights come after the half of backward that ends with their addition: they wait
    for that half of the next microbatch."""
    first_half = sorted({*action.of_all_microbatches} - {*action.weight})
    for i, t in action.order:
        if first_half and adds_before_reduction(t):
            gradient = values.value(i, t.reads[0])
            if gradient is not None:
                gradient.touches.append((NEXT, action.stage, first_half[-1]))


def _keep_weights(values: StageValues) -> None:
    """Weights of each unit, as forward and as backward gathers them."""
    for i, placed in enumerate(values.blocks):
        gathered = [
            [new.nodes[0] for t in placed.block.by_part.get(part, ())
             if t.kind == TaskKind.COLLECTIVE for new in placed.block.uses[t].new]
            for part in (TaskPart.GATHER, TaskPart.GATHER_AGAIN)
        ]  # fmt: skip
        for ahead, again in zip(*gathered, strict=False):
            pair = values.value(i, ahead), values.value(i, again)
            if pair[0] is not None and pair[1] is not None:
                values.kept_weights.append((pair[0], pair[1]))


def _hold_reduced(values: StageValues, action: ActionRows) -> None:
    """What one unit has reduced is live until the next unit reduces."""
    reduced: list[Value] = []
    owner: tuple[int, tuple[str, ...]] = (-1, ())
    for i, t in action.order:
        if not (moves_gradients(t) and t.op == "reduce_scatter"):
            continue
        row_of = action.row_of[i]
        casts = [row_of[d] for d in t.deps if isinstance(d, Kernel) and d.op == "cast"]
        before = action.at(min([*casts, row_of[t]]) - 1)
        unit = i, t.axes
        for value in reduced if owner != unit else ():
            value.touches.append(before)
        read = [v for n in t.reads if (v := values.value(i, n)) is not None]
        reduced = read + (reduced if owner == unit else [])
        padding = t.comm_bytes - sum(v.size for v in read)
        if padding > 0:  # of the buffer that gradients are copied to
            placed = values.blocks[i]
            name = placed.name("reduced.padding")
            buffer = Value(name, placed.layer, t.phase, "communication", padding)
            buffer.touches += [action.at(row) for row in (*casts, row_of[t])]
            values.values.append(buffer)
            reduced.append(buffer)
        owner = unit


def _copy_out(values: StageValues, action: ActionRows, rows: Sequence[int]) -> None:
    """A unit is gathered into a buffer, and its weights are copied out of that before they run.

    In forward the buffer is live until the next unit's is copied, of the last until the module
    returns; in backward it is freed at once. `rows`: those that all microbatches have.
    """
    root = _together(values.root_blocks)
    gathers = TaskPart.GATHER if action.forward else TaskPart.GATHER_AGAIN
    begins: dict[int, int] = {}  # per block, its first row
    gather_rows = set[int]()
    gathered: dict[int, int] = {}  # per block, bytes
    moved: dict[int, int] = {}  # per block, the row that gathers
    for i, row_of in enumerate(action.row_of):
        for t, row in row_of.items():
            if t.part in _COMPUTED:
                begins[i] = min(row, begins.get(i, row))
            elif t.part is gathers:
                gather_rows.add(row)
                if t.kind == TaskKind.COLLECTIVE:
                    moved[i] = row
                    new = values.blocks[i].block.uses[t].new
                    gathered[i] = gathered.get(i, 0) + sum(value.size for value in new)
    computing = [row for row in rows if row not in gather_rows]
    units = sorted(first for i, first in begins.items() if i not in root)
    if action.forward:
        _begin_with_block(values, action, begins, gather_rows)
    for i, size in gathered.items():
        first = begins[i]
        if not action.forward:
            held = [computing[max(0, bisect_left(computing, first) - 1)]]
        elif i in root:
            held = [rows[0], units[0] if units else rows[-1]]
        else:
            after = units[bisect_right(units, first) :][:1]
            held = [first, *(after or [_row_of_logits(values, action, rows[-1])])]
        placed = values.blocks[i]
        name = placed.name("gathered.buffer")
        buffer = Value(name, placed.layer, PHASES[0], "gathered_parameters", size)
        buffer.touches += [action.at(row) for row in held]
        buffer.needs = action.at(moved[i])
        values.values.append(buffer)


def _begin_with_block(
    values: StageValues,
    action: ActionRows,
    begins: Mapping[int, int],
    gather_rows: AbstractSet[int],
) -> None:
    """Forward allocates what it gathers when the block comes, though the message runs before.

    The host issues a unit's gather when the block before has ended, and memory is allocated in the
    order of the host; backward asks for the next unit's gather by itself.
    """
    for i, begin in begins.items():
        for t in values.blocks[i].block.by_part.get(TaskPart.GATHER, ()):
            for new in values.blocks[i].block.uses[t].new:
                v = values.value(i, new.nodes[0])
                if v is None:
                    continue
                if new.nodes[0].role is Role.SENT:  # of no use where weights are gathered still
                    v.needs = action.at(action.row_of[i][t])
                ahead = {action.at(row) for row in gather_rows}
                v.touches = [action.at(begin), *(x for x in v.touches if x not in ahead)]


def _row_of_logits(values: StageValues, action: ActionRows, end: int) -> int:
    """The row with which the stage's module returns: the loss comes after."""
    logits = module_logits(values)
    rows = [row for t, row in action.row_of[-1].items() if logits in t.made]
    return min(rows, default=end)


def module_logits(values: StageValues) -> Node | None:
    """What the stage's last block returns before its loss: logits, gathered where they are."""
    forward = [n for n in values.blocks[-1].block.graph if n.phase == "forward"]
    return next((n for n in reversed(forward) if n.role is Role.LOGITS), None)
