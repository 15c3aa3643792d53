"""A pipeline stage as rows: what it does in a forward and in a backward action, written down once.

Backward may be split (arXiv 2401.10241): its first half makes the gradient of the stage's input,
which other ranks wait for, the second half the gradients of its weights. Which row belongs to which
half follows from the graph: the first half is all that the gradient of a block's input needs.
Weights are gathered in the half that reads them first, unless they stay gathered for other actions.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace

from stagewright.graph.roles import STREAM
from stagewright.lower.assembly.buckets import Item, Row, merge_messages, one_by_one
from stagewright.lower.assembly.habit import Habit
from stagewright.lower.assembly.lowered_block import (
    BACKWARD_PARTS,
    FORWARD_PARTS,
    Crossing,
    Placed,
    nearest_maker,
    with_gradient,
)
from stagewright.lower.assembly.segments import (
    BACKWARD,
    FIRST,
    FORWARD,
    LAST,
    Dependency,
    SegmentBuilder,
)
from stagewright.lower.assembly.stage_values import ActionRows, StageValues
from stagewright.lower.kernels import kernel
from stagewright.lower.kernels.kernel import Kernel, TaskPart
from stagewright.lower.kernels.live_values import LiveValue
from stagewright.program.columns import TaskKind
from stagewright.schedule.places import Place

_EACH_PASS = (TaskPart.GATHER, TaskPart.GATHER_AGAIN)
_ONCE = (TaskPart.GATHER_ONCE, TaskPart.REDUCE_ONCE)
_MESSAGES = (TaskKind.SEND, TaskKind.RECV)
_GATHER_ONCE, _REDUCE_ONCE = TaskPart.GATHER_ONCE, TaskPart.REDUCE_ONCE


@dataclass(frozen=True, slots=True)
class StageAt:
    """A stage in its place; equal to those whose rows differ in numbers and names only.

    Rows name the stage and the layers and labels of its blocks, as far as blocks are layers.
    """

    blocks: Sequence[Placed] = field(compare=False)
    place: Place = field(compare=False)
    arriving: tuple[Crossing, ...]
    """Values that the stage before hands to this one."""
    leaving: tuple[Crossing, ...]
    habits: Habit
    trains: bool
    """Whether there are backwards."""
    content: tuple[Hashable, ...]
    """Of each block, what decides about rows."""
    shifts: tuple[int | None, int | None]
    """How many ranks further along the pipeline the stages before and after are; None: there is no
    such stage."""

    @classmethod
    def of(
        cls,
        blocks: Sequence[Placed],
        place: Place,
        between: Sequence[tuple[Crossing, ...]],
        pipeline_ranks: int,
        habits: Habit,
        *,
        trains: bool,
        layers: Mapping[int, Hashable] | None = None,
    ) -> StageAt:
        """`between` is what goes from each stage of the model to the one after; `layers` with other
        entries are not alike though their blocks are equal."""
        stage = place.stage
        arriving = between[stage - 1] if stage else ()
        leaving = between[stage] if stage < len(between) else ()
        labels = [p.label for p in blocks]
        content = tuple(
            (p.block, p.layer >= 0 or p.label, labels.index(p.label), (layers or {}).get(p.layer))
            for p in blocks
        )
        before, after = (
            None if rank is None else _shift(place.rank, rank, pipeline_ranks)
            for rank in (place.before, place.after)
        )
        return cls(blocks, place, arriving, leaving, habits, trains, content, (before, after))

    @property
    def unshifted(self) -> StageAt:
        """Equal for stages whose messages go to other ranks, and which are equal besides."""
        before, after = (None if shift is None else 0 for shift in self.shifts)
        return replace(self, shifts=(before, after))

    @property
    def alone(self) -> bool:
        """Whether the stage hands values on as messages only, not to others of its rank."""
        return not self.place.shared and self.place.rank not in (
            self.place.before,
            self.place.after,
        )


def _shift(rank: int, other: int, ranks: int) -> int:
    """How many ranks further along the pipeline another rank is."""
    shift = (other - rank) % ranks
    return shift - (ranks if shift > ranks // 2 else 0)


class Stage:
    """The forward and the backward action of a virtual pipeline stage, as rows.

    Both have all the rows that the action of any microbatch has. The first microbatch's forward
    also gathers weights that stay for the step, the last one's backward also reduces gradients;
    other microbatches leave these rows out (`Segment.once`). A half of a backward has the rows of
    that half.

    Stages that are equal as `StageAt` share one of these: its stage number, ranks, layers and
    labels are those of the first of them.
    """

    def __init__(self, at: StageAt) -> None:
        """No rows yet."""
        self.blocks, self.place, self.habits = at.blocks, at.place, at.habits
        self.stage, self.shifts = at.place.stage, at.shifts
        self.arriving, self.leaving, self.alone = at.arriving, at.leaving, at.alone
        self.values = StageValues(at.blocks, at.place, at.arriving, at.leaving)
        self.on_rank: Mapping[int, Stage] = {self.stage: self}
        # Per block, where each task stands: whose row, and the place there.
        self.where: list[dict[Kernel, tuple[int, int]]] = [{} for _ in at.blocks]
        self.forward = SegmentBuilder().finish((FORWARD, self.stage))
        self.backward = SegmentBuilder().finish((BACKWARD, self.stage))
        self.messages = 1
        """The most messages that one action exchanges along one axis."""
        self.base = self
        """A stage with the same rows and values, but for the ranks that messages go to."""

    def join(self, on_rank: Mapping[int, Stage]) -> None:
        """Say which stages, by number, are on the same rank: these hand values on in memory."""
        self.on_rank = on_rank
        self.values.neighbours = {number: stage.values for number, stage in on_rank.items()}

    def shifted(self, shifts: tuple[int | None, int | None]) -> Stage:
        """The stage where those before and after are so many ranks further along the pipeline."""
        if shifts == self.shifts:
            return self
        stage = copy(self)
        stage.shifts = shifts
        stage.forward, stage.backward = (
            replace(segment, kernels=tuple(
                self._shifted(t, shifts) if block < 0 else t
                for block, t in zip(segment.block.tolist(), segment.kernels, strict=True)
            ))
            for segment in (self.forward, self.backward)
        )  # fmt: skip
        return stage

    @staticmethod
    def _shifted(t: Kernel, shifts: tuple[int | None, int | None]) -> Kernel:
        """A message between stages that goes to another rank."""
        if t.kind not in _MESSAGES:
            return t
        before, after = shifts
        shift = before if (t.kind is TaskKind.RECV) == (t.phase == "forward") else after
        return t if shift is None else replace(t, shift=shift)

    # ---- rows ------------------------------------------------------------------------------------

    def build(self, *, forward: bool) -> None:
        """Make the rows of one direction.

        Of neighbours on one rank, the one that the other depends on must have its rows before.
        """
        segment = self._rows(forward=forward).finished()
        if forward:
            self.forward = segment
        else:
            self.backward = segment

    def _rows(self, *, forward: bool) -> ActionRows:
        """The rows of one direction, what they need, and what they touch."""
        segment = SegmentBuilder()
        whose = FORWARD if forward else BACKWARD
        action = ActionRows(whose, self.stage, segment, [{} for _ in self.blocks])
        self._receive(action)
        messages = max(0, len(self.arriving) - 1, len(self.leaving) - 1)
        # Messages between stages have the first numbers; of other messages, either end has the
        # number of the end that comes first.
        numbers: dict[tuple[int, Kernel], int] = {}
        for group in self._grouped(forward=forward):
            i, t = group[0]
            block, tag = i, -1
            if len(group) > 1:
                t, block = merge_messages(group), -1
            if t.kind in _MESSAGES:
                pair = i, t.twin or t
                if pair not in numbers:
                    messages += 1
                    numbers[pair] = messages
                tag = numbers[pair]
            row = segment.add(t, block, tag)
            if t.part in _ONCE:
                action.once.append(row)
            elif t.part in _EACH_PASS:
                action.gathers.append(row)
            for item in group:
                self._record(item, row, action)
        if not forward:
            self.values.release_with_block(action)
            if not self.habits.unit_weights().kept:
                action.weight.extend(_gathered_for_weights(action))
        self._send(action)
        self.habits.prolong(self.values, action)
        self.messages = max(self.messages, messages + 1)
        return action

    def _record(self, item: Item, row: int, action: ActionRows) -> None:
        """A task's row: what it touches, and what it depends on."""
        i, t = item
        self.where[i][t] = action.whose, row
        action.row_of[i][t] = row
        action.order.append(item)
        self.values.touch(i, t, action.at(row))
        if t in self.blocks[i].block.weight_half:
            action.weight.append(row)
        for d in t.deps:
            found = self._dependency(row, i, d)
            if found is not None:
                # What happens once per step needs the last of all microbatches.
                last = t.part is _REDUCE_ONCE and found[1] == BACKWARD
                action.segment.deps.append((row, LAST, *found[2:]) if last else found)

    def _grouped(self, *, forward: bool) -> Sequence[Row]:
        """The tasks of one direction in order, a row each or merged, as the habits say.

        Weights are gathered, and activations loaded, one block ahead: beside the block before.
        """
        parts = FORWARD_PARTS if forward else BACKWARD_PARTS
        ahead = [part for part in parts if part.ahead]
        main = [part for part in parts if not part.ahead]
        items: list[Item] = []
        order = list(range(len(self.blocks)))[:: 1 if forward else -1]
        for n, i in enumerate(order):
            for j in order[:2] if n == 0 else order[n + 1 : n + 2]:
                items += self._tasks(j, ahead)
            items += self._tasks(i, main)
        arranged = self.habits.arrange(items, self.values.root_blocks, forward=forward)
        return one_by_one(items) if arranged is None else arranged

    def _tasks(self, i: int, parts: Sequence[TaskPart]) -> Iterator[Item]:
        by_part = self.blocks[i].block.by_part
        return ((i, t) for part in parts for t in by_part.get(part, ()))

    def gathered_elsewhere(self, place: int, *, forward: bool) -> int:
        """The row of the other direction that gathers what a row gathers; -1: there is none."""
        ours, theirs = (FORWARD, BACKWARD) if forward else (BACKWARD, FORWARD)
        for rows in self.where:
            gathers = [(t, *at) for t, at in rows.items() if t.part in _EACH_PASS]
            mine = next((t for t, whose, at in gathers if (whose, at) == (ours, place)), None)
            if mine is not None:
                found = [(t, at) for t, whose, at in gathers if whose == theirs]
                alike = [at for t, at in found if (t.op, t.axes) == (mine.op, mine.axes)]
                return next(iter(alike or [at for _, at in found]), -1)
        return -1

    # ---- messages between stages -----------------------------------------------------------------

    def _receive(self, action: ActionRows) -> None:
        """Rows that receive values, or gradients, from the neighbouring stage on another rank."""
        source = self.place.before if action.forward else self.place.after
        if source is None or not self._is_message(forward=action.forward):
            return
        for nth, value in enumerate(self._messages(self.arriving, self.leaving, action)):
            if self.place.shared:
                row, t = self._broadcast(source, value, action)
            else:
                t = self._message(TaskKind.RECV, value, forward=action.forward)
                row = action.segment.add(t, tag=nth)
            name = f"{_message_name(value, forward=action.forward)}received"
            received = LiveValue(value.name, not action.forward)
            buffers = self.habits.message_buffers()
            self.values.receive(received, name, t, action.at(row), buffers)

    def _is_message(self, *, forward: bool) -> bool:
        """Whether what comes to an action of the stage is a message, from one rank or to all."""
        source = self.place.before if forward else self.place.after
        if not self.place.shared:
            return source != self.place.rank
        near = self.on_rank.get(self.stage + (-1 if forward else 1))
        return near is None or not near.place.shared

    def _broadcast(self, source: int, value: Crossing, action: ActionRows) -> tuple[int, Kernel]:
        """The row in which all ranks get a value, or a gradient, from the rank that has it."""
        phase = "forward" if action.forward else "backward"
        name = f"{_message_name(value, forward=action.forward)}broadcast"
        part = TaskPart.FORWARD if action.forward else TaskPart.BACKWARD
        t = Kernel(name, "broadcast", TaskKind.COLLECTIVE, phase, part,
                   axes=("pp",), comm_bytes=value.size, dtype=value.dtype)  # fmt: skip
        row = action.segment.add(t)
        if source == self.place.rank:
            handed = LiveValue(value.name, not action.forward)
            near = self.on_rank[self.stage + (-1 if action.forward else 1)]
            dependency = near.handed_on(row, handed)
            action.segment.deps += [dependency] if dependency is not None else []
            sent = near.values.handed_on(handed)
            if sent is not None:
                sent.touch(action.at(row), phase)
        return row, t

    def _send(self, action: ActionRows) -> None:
        """Rows that send values, or gradients, to the neighbouring stage on another rank."""
        target = self.place.after if action.forward else self.place.before
        if target is None or target == self.place.rank or self.place.shared:
            return  # what ranks share has a neighbour on its own rank
        for nth, value in enumerate(self._messages(self.leaving, self.arriving, action)):
            t = self._message(TaskKind.SEND, value, forward=action.forward)
            row = action.segment.add(t, tag=nth)
            handed = LiveValue(value.name, not action.forward)
            dependency = self.handed_on(row, handed)
            action.segment.deps += [dependency] if dependency is not None else []
            sent = self.values.handed_on(handed)
            if sent is not None:
                sent.touch(action.at(row), t.phase)
                action.sent.append((sent, row))

    @staticmethod
    def _messages(
        forward: Sequence[Crossing], backward: Sequence[Crossing], action: ActionRows
    ) -> Sequence[Crossing]:
        """The values that an action sends or receives; in backward those that have a gradient."""
        return forward if action.forward else with_gradient(backward)

    def _message(self, kind: TaskKind, value: Crossing, *, forward: bool) -> Kernel:
        """One end of a message between stages: a value, or its gradient."""
        shift = self.shifts[(kind == TaskKind.SEND) == forward]
        assert shift is not None
        phase = "forward" if forward else "backward"
        op = "send" if kind == TaskKind.SEND else "recv"
        part = TaskPart.FORWARD if forward else TaskPart.BACKWARD
        return Kernel(
            f"{_message_name(value, forward=forward)}{op}", op, kind, phase, part,
            axes=("pp",), shift=shift, comm_bytes=value.size, dtype=value.dtype,
        )  # fmt: skip

    # ---- dependencies ----------------------------------------------------------------------------

    def handed_on(self, row: int, c: LiveValue) -> Dependency | None:
        """The dependency of a row on what the stage hands on: forward, or a gradient back."""
        return self._handed_to(row, -1 if c.gradient else len(self.blocks), c)

    def once_per_step(self, i: int, d: Kernel) -> tuple[int, int]:
        """Where rows after all actions find a task of block `i`: whose row, and the place."""
        whose, place = self.where[i][d]
        return FIRST if whose == FORWARD else LAST, place

    def _dependency(self, row: int, i: int, d: kernel.Dependency | None) -> Dependency | None:
        """The dependency of a row on what a task of block `i` needs."""
        if d is None:
            return None
        if isinstance(d, LiveValue):  # the block is handed it, or passes it on
            return self._handed_to(row, i, d)
        whose, place = self.where[i][d]
        return row, FIRST if d.part is _GATHER_ONCE else whose, self.stage, place

    def _handed_to(self, row: int, i: int, c: LiveValue) -> Dependency | None:
        """The dependency of a row on a value that block `i` is handed.

        A block of this stage makes it, a message brings it, or a stage on the same rank hands it
        on; None: nobody makes it.
        """
        maker = nearest_maker(self.blocks, i, c)
        if maker is not None:
            return self._dependency(row, maker, self.blocks[maker].block.makers[c])
        crossing = with_gradient(self.leaving) if c.gradient else self.arriving
        nth = next((n for n, x in enumerate(crossing) if x.name == c.name), None)
        if nth is None:
            return None
        if self._is_message(forward=not c.gradient):
            return row, BACKWARD if c.gradient else FORWARD, self.stage, nth  # the message's row
        return self.on_rank[self.stage + (1 if c.gradient else -1)].handed_on(row, c)


def _message_name(value: Crossing, *, forward: bool) -> str:
    """How the names of a message between stages begin: its ends, and where it is received."""
    which = "" if value.name == STREAM else f"{value.name}."
    return f"{'forward' if forward else 'backward'}.{which}"


def _gathered_for_weights(action: ActionRows) -> list[int]:
    """Rows that gather or cast weights in a backward of which only its second half reads them."""
    half = {*action.weight}
    readers: dict[int, set[int]] = {row: set() for row in action.gathers}
    for row, whose, stage, at in action.segment.deps:
        if (whose, stage) == (BACKWARD, action.stage) and at in readers:
            readers[at].add(row)
    found: list[int] = []
    for row in sorted(readers, reverse=True):  # a cast comes after the gather that it reads
        if readers[row] and readers[row] <= half:
            half.add(row)
            found.append(row)
    return found
