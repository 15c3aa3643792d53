"""Rows of a pipeline stage: its forward and its backward action, and its updates, built once.

Backward may be split (arXiv 2401.10241): the input half makes the gradient of the stage's input,
which other ranks wait for, the weight half the gradients of its weights. The graph decides: the
input half is all that the gradient of a block's input depends on. Weights are gathered in the half
that reads them first, unless they stay gathered for other actions.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from stagewright.arrays import Bool
from stagewright.graph.roles import CLIP, STREAM
from stagewright.lower.assembly.habit import Habit, Item, Row, merge_messages, one_by_one
from stagewright.lower.assembly.lowered_block import (
    BACKWARD_SECTIONS,
    FORWARD_SECTIONS,
    Crossing,
    RowRef,
    StageBlock,
    Value,
    nearest_maker,
    with_gradient,
)
from stagewright.lower.assembly.segments import (
    ActionRows,
    CopyRelation,
    RowDep,
    RowRefs,
    Segment,
    Shifts,
    StageLabels,
)
from stagewright.lower.assembly.stage_values import StageValues
from stagewright.lower.kernels.kernel import BlockSection, Dependency, LoweredTask
from stagewright.lower.kernels.live_values import LiveValue
from stagewright.program.columns import TaskKind
from stagewright.schedule.places import Place

UPDATE_SECTIONS = (BlockSection.TIE, BlockSection.NORM, BlockSection.UPDATE)
"""Parts of a block in the optimizer action."""
_EACH_PASS = (BlockSection.GATHER, BlockSection.GATHER_AGAIN)
_GATHER_ONCE, _REDUCE_ONCE = BlockSection.GATHER_ONCE, BlockSection.REDUCE_ONCE
_ONCE = (_GATHER_ONCE, _REDUCE_ONCE)
_MESSAGES = (TaskKind.SEND, TaskKind.RECV)


@dataclass(frozen=True, slots=True)
class StageKey:
    """Content of a stage: those with equal keys share rows.

    These differ in stage, layers and labels of layers only, and messages in the ranks that they go
    to.
    """

    blocks: Sequence[StageBlock] = field(compare=False)
    place: Place = field(compare=False)
    arriving: tuple[Crossing, ...]
    """Values from the previous stage."""
    leaving: tuple[Crossing, ...]
    """Values for the next stage."""
    habits: Habit
    block_keys: tuple[Hashable, ...]
    ends: tuple[bool, bool]
    """True if there is no previous stage, no next one."""
    shifts: Shifts = field(compare=False)

    @classmethod
    def of(
        cls,
        blocks: Sequence[StageBlock],
        place: Place,
        between: Sequence[tuple[Crossing, ...]],
        pipeline_ranks: int,
        habits: Habit,
        *,
        layers: Mapping[int, Hashable] | None = None,
    ) -> StageKey:
        """`between`: values between each stage and the next; `layers`: extra key per layer."""
        stage = place.stage
        arriving = between[stage - 1] if stage else ()
        leaving = between[stage] if stage < len(between) else ()
        labels = [p.label for p in blocks]
        block_keys = tuple(
            (p.block, p.layer >= 0 or p.label, labels.index(p.label), (layers or {}).get(p.layer))
            for p in blocks
        )
        before, after = (
            None if rank is None else _shift(place.rank, rank, pipeline_ranks)
            for rank in (place.before, place.after)
        )
        ends = before is None, after is None
        return cls(blocks, place, arriving, leaving, habits, block_keys, ends, (before, after))

    @property
    def labels(self) -> StageLabels:
        """Differences between stages with equal keys."""
        layers, labels = (tuple(p.layer for p in self.blocks), tuple(p.label for p in self.blocks))
        return StageLabels(self.place.stage, layers, labels, self.shifts)

    @property
    def messages_only(self) -> bool:
        """True if values cross the stage's ends as messages only, not in memory of its rank."""
        place = self.place
        return not place.shared and place.rank not in (place.before, place.after)


def _shift(rank: int, other: int, ranks: int) -> int:
    """Signed distance to another rank along the pipeline."""
    shift = (other - rank) % ranks
    return shift - (ranks if shift > ranks // 2 else 0)


class Stage:
    """Rows of a virtual pipeline stage: `forward` and `backward`, and `updates` of its weights.

    A direction has all rows that the action of any microbatch has. The first microbatch's forward
    also gathers weights that stay for the step, the last one's backward also reduces gradients;
    other microbatches omit these rows (`Segment.once_per_step`). A half of a backward has the rows
    of that half.

    Stages with equal `StageKey` share one of these: its stage number, ranks, layers and labels are
    those of the first of them.
    """

    def __init__(self, key: StageKey) -> None:
        """Start without rows."""
        self.blocks, self.place, self.habits = key.blocks, key.place, key.habits
        self.stage = key.place.stage
        self.arriving, self.leaving = key.arriving, key.leaving
        self.values = StageValues(key.blocks, key.place, key.arriving, key.leaving)
        """Until the rows are built; then `value_columns`."""
        self.on_rank: Mapping[int, Stage] = {self.stage: self}
        # Per block, the direction (`FORWARD` or `BACKWARD` of `CopyRelation`) and row of a task.
        self.row_of_task: list[dict[LoweredTask, tuple[int, int]]] = [{} for _ in key.blocks]
        self.forward = self.backward = ActionRows(CopyRelation.FORWARD, self.stage, []).finish({})
        self.updates = self.forward
        """Rows in the optimizer action: those of `UPDATE_SECTIONS`, one after the other.

        A dependency on row -1 of the optimizer action is one on the factor that clips gradients.
        """
        self.update_begin = [0] * (len(UPDATE_SECTIONS) + 1)
        """First row of each of `UPDATE_SECTIONS` in `updates`, and the end."""
        self.num_messages = 1
        """Largest number of messages of one action along one axis."""

    def join(self, on_rank: Mapping[int, Stage]) -> None:
        """Set the stages of the same rank, by number: these exchange values in memory."""
        self.on_rank = on_rank
        self.values.neighbours = {number: stage.values for number, stage in on_rank.items()}

    # ---- rows ------------------------------------------------------------------------------------

    @property
    def weight_halves(self) -> dict[int, Bool]:
        """Masks of the rows in the weight half, of the backwards of the rank's stages."""
        return {number: stage.backward.weight_half for number, stage in self.on_rank.items()}

    def build(self, *, forward: bool) -> None:
        """Build the rows of one direction.

        Stages of the same rank that it reads from must be built.
        """
        segment = self._rows(forward=forward).finish(self.weight_halves)
        if forward:
            self.forward = segment
        else:
            self.backward = segment

    def build_updates(self) -> None:
        """Build the rows in the optimizer action. Build both directions first."""
        items: list[Item] = []
        self.update_begin = [0]
        for section in UPDATE_SECTIONS:
            section_items = [
                item for i in range(len(self.blocks)) for item in self._tasks(i, [section])
            ]
            if section is BlockSection.TIE:
                # Ranks with several tied tables reduce them in one order.
                section_items.sort(key=lambda item: item[1].axes)
            items += section_items
            self.update_begin.append(len(items))
        row_of = {item: row for row, item in enumerate(items)}
        deps: list[RowDep] = []
        for row, (i, t) in enumerate(items):
            self.values.touch(i, t, (CopyRelation.OPTIMIZER, self.stage, row))
            for d in t.deps:
                ref: RowRef | None
                if isinstance(d, LiveValue):
                    ref = (CopyRelation.OPTIMIZER, self.stage, -1) if d.name == CLIP else None
                elif (i, d) in row_of:
                    ref = CopyRelation.OPTIMIZER, self.stage, row_of[i, d]
                else:
                    copy, segment_row = self.row_of_task[i][d]
                    first = copy == CopyRelation.FORWARD
                    copy = CopyRelation.FIRST_FORWARD if first else CopyRelation.LAST_BACKWARD
                    ref = copy, self.stage, segment_row
                if ref is not None:
                    deps.append((row, ref[0], ref[1], ref[2]))
        columns = np.array(deps, dtype=np.int64).reshape(-1, 4).T
        refs = RowRefs.of_stage(columns[0], columns[1:], self.stage, self.weight_halves)
        block = np.array([i for i, _ in items], dtype=np.int64)
        self.updates = Segment.of_optimizer([t for _, t in items], block, refs, block * 0)

    def finish(self) -> None:
        """Convert the values to columns. Build the rows of all stages of the rank first."""
        on_rank = {n: (stage.forward, stage.backward) for n, stage in self.on_rank.items()}
        self.value_columns = self.values.columns(on_rank)
        del self.values  # thousands of objects

    def _rows(self, *, forward: bool) -> ActionRows:
        """Rows of one direction with their dependencies, and the values they touch."""
        copy = CopyRelation.FORWARD if forward else CopyRelation.BACKWARD
        action = ActionRows(copy, self.stage, [{} for _ in self.blocks])
        self._receive(action)
        messages = max(0, len(self.arriving) - 1, len(self.leaving) - 1)
        # Tags: stage messages first, then one per SEND/RECV pair.
        tags: dict[tuple[int, LoweredTask], int] = {}
        for group in self._grouped(forward=forward):
            i, t = group[0]
            block, tag = i, -1
            if len(group) > 1:
                t, block = merge_messages(group), -1
            if t.kind in _MESSAGES:
                pair = i, t.twin or t
                if pair not in tags:
                    messages += 1
                    tags[pair] = messages
                tag = tags[pair]
            row = action.add(t, block, tag)
            if t.section in _ONCE:
                action.once_per_step.append(row)
            elif t.section in _EACH_PASS:
                action.gathers.append(row)
            for item in group:
                self._record(item, row, action)
        if not forward:
            ends = self.habits.weight_ends(action, self.values.root_blocks)
            self.values.release_with_block(action, ends or action.last_rows())
            if not self.habits.unit_weights().keeps_gathered:
                action.weight_half.extend(_gathered_for_weights(action))
        self._send(action)
        self.habits.extend_live_ranges(self.values, action)
        self.num_messages = max(self.num_messages, messages + 1)
        return action

    def _record(self, item: Item, row: int, action: ActionRows) -> None:
        """Record the row of a task, the values it touches, and its dependencies."""
        i, t = item
        self.row_of_task[i][t] = action.copy, row
        action.row_of[i][t] = row
        action.order.append(item)
        self.values.touch(i, t, action.touch_by(row))
        if t in self.blocks[i].block.weight_half:
            action.weight_half.append(row)
        for d in t.deps:
            dep = self._dep(i, d)
            if dep is not None:
                # A reduction once per step depends on the last of all microbatches.
                last = t.section is _REDUCE_ONCE and dep[0] == CopyRelation.BACKWARD
                copy = CopyRelation.LAST_BACKWARD if last else dep[0]
                action.deps.append((row, copy, dep[1], dep[2]))

    def _grouped(self, *, forward: bool) -> Sequence[Row]:
        """Tasks of one direction in order, merged as the habits say.

        Weights are gathered, and activations loaded, one block ahead.
        """
        sections = FORWARD_SECTIONS if forward else BACKWARD_SECTIONS
        ahead = [section for section in sections if section.ahead]
        main = [section for section in sections if not section.ahead]
        items: list[Item] = []
        order = list(range(len(self.blocks)))[:: 1 if forward else -1]
        for n, i in enumerate(order):
            for j in order[:2] if n == 0 else order[n + 1 : n + 2]:
                items += self._tasks(j, ahead)
            items += self._tasks(i, main)
        arranged = self.habits.arrange(items, self.values.root_blocks, forward=forward)
        return one_by_one(items) if arranged is None else arranged

    def _tasks(self, i: int, sections: Sequence[BlockSection]) -> Iterator[Item]:
        by_section = self.blocks[i].block.by_section
        return ((i, t) for section in sections for t in by_section.get(section, ()))

    def matching_gather(self, segment_row: int, *, forward: bool) -> int:
        """Row of the other direction that gathers the same weights as a row; -1: none."""
        here, there = CopyRelation.FORWARD, CopyRelation.BACKWARD
        if not forward:
            here, there = there, here
        for rows in self.row_of_task:
            gathers = {t: at for t, at in rows.items() if t.section in _EACH_PASS}
            task = next((t for t, at in gathers.items() if at == (here, segment_row)), None)
            if task is not None:
                others = [(t, row) for t, (copy, row) in gathers.items() if copy == there]
                equal = [row for t, row in others if (t.op, t.axes) == (task.op, task.axes)]
                return next(iter(equal or [row for _, row in others]), -1)
        return -1

    # ---- messages between stages -----------------------------------------------------------------

    def _receive(self, action: ActionRows) -> None:
        """Add rows that receive values, or gradients, from the neighbouring stage."""
        forward = action.forward
        source = self.place.before if forward else self.place.after
        if source is None:
            return
        if not self._is_message(forward=forward):
            self._keep_local(action)
            return
        for tag, value in enumerate(self._messages(self.arriving, self.leaving, action)):
            if self.place.shared:
                row, t = self._broadcast(source, value, action)
            else:
                t = self._message(TaskKind.RECV, value, forward=forward)
                row = action.add(t, tag=tag)
                if value.parts.ranks > 1:
                    row, t = self._gather_parts(value, row, action)
            name = f"{_message_prefix(value, forward=forward)}received"
            received, touch = LiveValue(value.name, not forward), action.touch_by(row)
            self.values.receive(
                received, name, value.size, touch, t.phase, self.habits.message_buffers()
            )

    def _keep_local(self, action: ActionRows) -> None:
        """Add buffers of values, or gradients, of a stage on the same rank, where these are kept.

        The buffers of the last step hold them until those of this step replace them.
        """
        buffers = self.habits.message_buffers()
        for value in self._messages(self.arriving, self.leaving, action) if buffers else ():
            name = f"{_message_prefix(value, forward=action.forward)}kept"
            phase = "forward" if action.forward else "backward"
            kept, touch = LiveValue(value.name, not action.forward), action.touch_by(0)
            self.values.receive(kept, name, value.size, touch, phase, buffers)

    def _is_message(self, *, forward: bool) -> bool:
        """True if the action's input arrives by message or broadcast."""
        source = self.place.before if forward else self.place.after
        if not self.place.shared:
            return source != self.place.rank
        neighbour = self.on_rank.get(self.stage + (-1 if forward else 1))
        return neighbour is None or not neighbour.place.shared

    def _broadcast(
        self, source: int, value: Crossing, action: ActionRows
    ) -> tuple[int, LoweredTask]:
        """Add a row in which one rank broadcasts a value, or a gradient, to all."""
        phase = "forward" if action.forward else "backward"
        name = f"{_message_prefix(value, forward=action.forward)}broadcast"
        section = BlockSection.FORWARD if action.forward else BlockSection.BACKWARD
        t = LoweredTask(name, "broadcast", TaskKind.COLLECTIVE, phase, section,
                   axes=("pp",), comm_bytes=value.size, dtype=value.dtype)  # fmt: skip
        row = action.add(t)
        if source == self.place.rank:
            neighbour = self.on_rank[self.stage + (-1 if action.forward else 1)]
            neighbour.read_output(LiveValue(value.name, not action.forward), row, phase, action)
        return row, t

    @staticmethod
    def _gather_parts(value: Crossing, part: int, action: ActionRows) -> tuple[int, LoweredTask]:
        """Add a row in which ranks gather the parts that each of them received."""
        phase = "forward" if action.forward else "backward"
        name = f"{_message_prefix(value, forward=action.forward)}gather"
        section = BlockSection.FORWARD if action.forward else BlockSection.BACKWARD
        t = LoweredTask(
            name, "all_gather", TaskKind.COLLECTIVE, phase, section,
            axes=value.parts.axes, comm_bytes=value.size // value.parts.ranks, dtype=value.dtype,
        )  # fmt: skip
        row = action.add(t)
        action.deps.append((row, action.copy, action.stage, part))
        return row, t

    def _send(self, action: ActionRows) -> None:
        """Add rows that send values, or gradients, to the neighbouring stage on another rank."""
        target = self.place.after if action.forward else self.place.before
        if target is None or target == self.place.rank or self.place.shared:
            return  # the neighbour of a shared stage is on the same rank
        for tag, value in enumerate(self._messages(self.leaving, self.arriving, action)):
            t = self._message(TaskKind.SEND, value, forward=action.forward)
            row = action.add(t, tag=tag)
            output = LiveValue(value.name, not action.forward)
            sent = self.read_output(output, row, t.phase, action)
            if sent is not None:
                action.sent.append((sent, row))

    def read_output(
        self, output: LiveValue, row: int, phase: str, action: ActionRows
    ) -> Value | None:
        """Make a row of an action depend on an output of this stage, and touch its value."""
        dep = self._output_dep(output)
        if dep is not None:
            action.deps.append((row, *dep))
        value = self.values.output(output)
        if value is not None:
            value.touch(action.touch_by(row), phase)
        return value

    @staticmethod
    def _messages(
        forward: Sequence[Crossing], backward: Sequence[Crossing], action: ActionRows
    ) -> Sequence[Crossing]:
        """Values that an action sends or receives; in backward those with a gradient."""
        return forward if action.forward else with_gradient(backward)

    def _message(self, kind: TaskKind, value: Crossing, *, forward: bool) -> LoweredTask:
        """Build one end of a message between stages (`shifted`): of a value, or of its gradient."""
        phase = "forward" if forward else "backward"
        op = "send" if kind == TaskKind.SEND else "recv"
        section = BlockSection.FORWARD if forward else BlockSection.BACKWARD
        return LoweredTask(
            f"{_message_prefix(value, forward=forward)}{op}", op, kind, phase, section,
            axes=("pp",), comm_bytes=value.size // value.parts.ranks, dtype=value.dtype,
        )  # fmt: skip

    # ---- dependencies ----------------------------------------------------------------------------

    def _dep(self, i: int, d: Dependency | None) -> RowRef | None:
        """Row of a dependency of a task of block `i`."""
        if d is None:
            return None
        if isinstance(d, LiveValue):
            return self._input_dep(i, d)
        copy, segment_row = self.row_of_task[i][d]
        copy = CopyRelation.FIRST_FORWARD if d.section is _GATHER_ONCE else copy
        return copy, self.stage, segment_row

    def _output_dep(self, c: LiveValue) -> RowRef | None:
        """Row that makes an output of the stage: forward, or a gradient back."""
        return self._input_dep(-1 if c.gradient else len(self.blocks), c)

    def _input_dep(self, i: int, c: LiveValue) -> RowRef | None:
        """Row that makes an input of block `i`; None: nothing makes it.

        A block of this stage makes it, a message brings it, or a stage on the same rank outputs it.
        """
        maker = nearest_maker(self.blocks, i, c)
        if maker is not None:
            return self._dep(maker, self.blocks[maker].block.makers[c])
        crossing = with_gradient(self.leaving) if c.gradient else self.arriving
        message = next((n for n, x in enumerate(crossing) if x.name == c.name), None)
        if message is None:
            return None
        if self._is_message(forward=not c.gradient):  # messages are the first rows
            copy = CopyRelation.BACKWARD if c.gradient else CopyRelation.FORWARD
            received = crossing[: message + 1]
            gathers = 0 if self.place.shared else sum(x.parts.ranks > 1 for x in received)
            return copy, self.stage, message + gathers
        return self.on_rank[self.stage + (1 if c.gradient else -1)]._output_dep(c)


def shifted(segment: Segment, shifts: Shifts) -> list[LoweredTask]:
    """Tasks of a segment, its messages sent as far as `shifts` says."""
    blocks: list[int] = segment.block.tolist()
    tasks: list[LoweredTask] = []
    for block, t in zip(blocks, segment.tasks, strict=True):
        if block < 0 and t.kind in _MESSAGES:
            shift = shifts[(t.kind is TaskKind.SEND) == (t.phase == "forward")]
            assert shift is not None, "a message to a stage that does not exist"
            t = replace(t, shift=shift)
        tasks.append(t)
    return tasks


def _message_prefix(value: Crossing, *, forward: bool) -> str:
    """Prefix of the names of a message between stages."""
    name = "" if value.name == STREAM else f"{value.name}."
    return f"{'forward' if forward else 'backward'}.{name}"


def _gathered_for_weights(action: ActionRows) -> list[int]:
    """Rows that gather or cast weights in a backward of which only the weight half reads them."""
    half = {*action.weight_half}
    readers: dict[int, set[int]] = {row: set() for row in action.gathers}
    for row, copy, stage, source in action.deps:
        if (copy, stage) == (CopyRelation.BACKWARD, action.stage) and source in readers:
            readers[source].add(row)
    rows: list[int] = []
    for row in sorted(readers, reverse=True):  # a cast comes after the gather that it reads
        if readers[row] and readers[row] <= half:
            half.add(row)
            rows.append(row)
    return rows
