"""The values of a pipeline rank: expanded with their live ranges, or as bytes by action."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Bool, Int, distinct_numbers
from stagewright.lower.assembly.distinct_actions import ActionTable, Naming
from stagewright.lower.assembly.live_ranges import Ranges, ValueColumns, live_ranges
from stagewright.lower.assembly.microbatch_classes import (
    AHEAD,
    NEXT,
    SLOTS,
    Classes,
    StageGroup,
    groups,
)
from stagewright.lower.assembly.rank_order import RankOrder, uses_weights
from stagewright.lower.assembly.rank_schedule import (
    BACKWARD,
    FORWARD,
    INPUT_HALF,
    UNSHARD,
    WEIGHT_HALF,
)
from stagewright.lower.assembly.segments import Numbers
from stagewright.lower.assembly.stages import Stage
from stagewright.program.columns import CATEGORIES, Values
from stagewright.program.step import Deltas, MemoryChanges, Profiles, changed_bytes, summed

_SLOT_OF_KIND = np.zeros(5, dtype=np.int64)
_SLOT_OF_KIND[[FORWARD, BACKWARD, INPUT_HALF, WEIGHT_HALF, UNSHARD]] = 0, 1, 1, 2, AHEAD
Sizes = Mapping[Stage, Int]
"""Bytes of the values of stages, where they are not those of the stage."""


@lru_cache(maxsize=256)  # stages of a search have equal content
def value_columns(stage: Stage) -> ValueColumns:
    """The values of a stage whose rows are made."""
    return ValueColumns.of(stage)


class Cells(NamedTuple):
    """Where values of some stages are allocated and freed: a column each, [cells]."""

    value: Int
    slot: Int
    """`(class * stages + stage) * SLOTS + slot`, ascending; -1: once per step, after all actions."""
    place: Int
    """In the segment of the action; after all actions the task of the stage, -1: the last row."""
    before: Bool
    """Freed just before the row."""
    freed: Bool
    stage: Int
    cls: Int
    """The class of microbatches, each of which has such a value; -1: one for all."""

    def take(self, some: Int) -> Cells:
        """Some of them."""
        return Cells(*(column[some] for column in self))


@dataclass(frozen=True, slots=True, eq=False)
class GroupRanges:
    """Live ranges of the values of some stages, and the cells that they are made of."""

    stages: tuple[Stage, ...]
    classes: Classes
    ranges: Ranges
    begin: Int
    """Where the values of each stage begin, and the end."""
    cells: Cells
    """Within actions."""
    first_cell: Int
    """Where the cells of each slot begin, and the end."""
    ending: Cells
    """After all actions."""

    def cells_of(self, slot: int) -> Cells:
        """The cells of an action."""
        return Cells(*(c[self.first_cell[slot] : self.first_cell[slot + 1]] for c in self.cells))

    def sizes(self, of: Sizes) -> Int:
        """Bytes of the values of all stages."""
        return np.concatenate([of.get(s, value_columns(s).size) for s in self.stages])

    @property
    def category(self) -> Int:
        """Of the values of all stages."""
        return np.concatenate([value_columns(s).category for s in self.stages])


@lru_cache(maxsize=256)
def _group_ranges(
    stages: tuple[Stage, ...], classes: Classes, step_rows: _StepRows
) -> GroupRanges:
    columns = [value_columns(stage) for stage in stages]
    ranges = live_ranges(stages, columns, classes, step_rows.rows)
    begin = np.cumsum([0, *(len(c.names) for c in columns)])
    every = _cells(ranges, classes)
    ending = np.flatnonzero(every.slot < 0)
    inside = np.flatnonzero(every.slot >= 0)
    inside = inside[np.argsort(every.slot[inside], kind="stable")]
    count = classes.count * len(stages) * SLOTS
    first = np.searchsorted(every.slot[inside], np.arange(count + 1))
    return GroupRanges(
        stages, classes, ranges, begin, every.take(inside), first, every.take(ending)
    )


class _StepRows:
    """The order of the tasks of stages after all actions."""

    def __init__(self, rows: Sequence[Int]) -> None:
        self.rows = rows
        self.key = tuple(r.tobytes() for r in rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _StepRows) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def _cells(ranges: Ranges, classes: Classes) -> Cells:
    """The cells of live ranges."""
    stages = len(classes.acting)
    slots = np.array(classes.slots, dtype=np.int64).reshape(-1, 3)
    value, cls = np.nonzero(ranges.there & ~ranges.once[:, None])
    single = np.flatnonzero(ranges.once & ranges.there[:, 0])
    value = np.concatenate([value, single])
    cls = np.concatenate([cls, np.full(len(single), -1)])
    parts: list[Cells] = []
    for freed, of in ((False, ranges.first), (True, ranges.last)):
        ends = of[value, np.maximum(cls, 0)]
        position, place = ranges.position(ends), ranges.place(ends)
        within = position < classes.positions
        slot, stage = np.full(len(ends), -1), np.full(len(ends), -1)
        q, s, k = slots[position[within]].T
        slot[within], stage[within] = (k * stages + q) * SLOTS + s, q
        stage = np.where(within, stage, position - classes.positions)
        place = np.where(position == classes.positions + stages, -1, place)
        parts.append(
            Cells(value, slot, place, ranges.before(ends), np.full(len(ends), freed), stage, cls)
        )
    return Cells(*(np.concatenate(column) for column in zip(*parts, strict=True)))


# ---- a rank --------------------------------------------------------------------------------------


class RankValues:
    """The values of the stages of one rank."""

    def __init__(self, order: RankOrder, *, kept: bool) -> None:
        """`kept`: weights that a backward has gathered stay until the next action uses them."""
        self.order, self._kept = order, kept
        self.stages = [order.table.stages[content] for content in order.contents.tolist()]

    @cached_property
    def groups(self) -> list[tuple[StageGroup, GroupRanges]]:
        """The stages that hand values to each other in memory, with the ranges of their values."""
        schedule, supplier = self.order.schedule, self.order.supplier
        alone = tuple(stage.alone for stage in self.stages)
        waits = tuple(value_columns(stage).waits_for_next for stage in self.stages)
        found: list[tuple[StageGroup, GroupRanges]] = []
        for group in groups(schedule, supplier, alone, waits):
            stages = tuple(self.stages[place] for place in group.places)
            step_rows = _StepRows([self._step_rows(place) for place in group.places])
            found.append((group, _group_ranges(stages, group.classes, step_rows)))
        return found

    def _step_rows(self, place: int) -> Int:
        """The order of a stage's tasks after all actions: as they are, unless they are merged."""
        row = self.order.table.afters[self.order.after].rows.row_of[place]
        return np.arange(len(row)) if (np.diff(row) > 0).all() else row

    # ---- expanded --------------------------------------------------------------------------------

    def expanded(self, naming: Sequence[Naming], sizes: Sizes) -> Values:
        """The values as columns, with their first and last rows."""
        names = Numbers[str]()
        table: list[list[Int]] = [[] for _ in range(5)]
        body: list[Int] = []
        of_place = {
            place: (group, ranges, q)
            for group, ranges in self.groups
            for q, place in enumerate(group.places)
        }
        start = 0
        for place, stage in enumerate(self.stages):
            columns, named = value_columns(stage), naming[place]
            layer = _relabelled(columns.layer, stage, named)
            table[0].append(np.array(names.each(columns.names), dtype=np.int64))
            for column, more in zip(
                table[1:],
                (np.full(len(layer), named.stage), layer, columns.category,
                 sizes.get(stage, columns.size)),
                strict=True,
            ):  # fmt: skip
                column.append(more)
            group, ranges, q = of_place[place]
            body += _instances(self, group, ranges, q, start)
            start += len(layer)
        name, of, layer, category, size = (
            np.concatenate([np.zeros(0, dtype=np.int64), *column]) for column in table
        )
        ends = np.concatenate([np.zeros((4, 0), dtype=np.int64), *body], axis=1).astype(np.int32)
        if self._kept:
            self._keep_weights(ends)
        return Values(
            name.astype(np.int32), of.astype(np.int32), layer.astype(np.int32),
            category.astype(np.uint8), size, *ends, names=tuple(names.table),
        )  # fmt: skip

    def _keep_weights(self, body: Int) -> None:
        """Weights that a backward has gathered live until the action that uses them next, in place.

        `body`: value, microbatch, first and last row of each instance."""
        value, microbatch, first, last = body
        schedule, supplier = self.order.schedule, self.order.supplier
        start = 0
        for place, stage in enumerate(self.stages):
            columns = value_columns(stage)
            pairs = columns.kept_weights + start
            start += len(columns.names)
            actions = np.flatnonzero((schedule.place == place) & (schedule.kind != UNSHARD))
            kinds = schedule.kind[actions].tolist()
            uses = [
                ((kind == FORWARD, int(schedule.microbatch[i])), int(supplier[i]) == i)
                for i, kind in zip(actions.tolist(), kinds, strict=True)
                if uses_weights(stage, kind)
            ]
            for pair in pairs.tolist():
                at: dict[tuple[bool, int], int] = {}
                for forward, v in zip((True, False), pair, strict=True):
                    rows = np.flatnonzero(value == v)
                    at |= {(forward, int(microbatch[i])): int(i) for i in rows}
                for (before, _), (after, gathers) in itertools.pairwise(uses):
                    i, j = at.get(before), at.get(after)
                    if i is not None and j is not None and not gathers:
                        last[i] = max(last[i], first[j] - 1)


def _relabelled(layer: Int, stage: Stage, naming: Naming) -> Int:
    """The layers of a stage's values in another stage with the same content."""
    found = layer.copy()
    for placed, here in zip(stage.blocks, naming.layers, strict=True):
        found[layer == placed.layer] = here
    return found


def _instances(
    rank: RankValues, group: StageGroup, of: GroupRanges, q: int, start: int
) -> list[Int]:
    """Value, microbatch, first and last row of the instances of one stage's values, [4, instances];
    the stage's values are numbered from `start` on."""
    order, ranges = rank.order, of.ranges
    begin, end = of.begin[q : q + 2].tolist()
    columns = value_columns(of.stages[q])
    always = np.flatnonzero(~columns.touched)
    found = [np.stack([start + always, *(np.full(len(always), x) for x in (-1, -1, order.total))])]
    # Values made by the same actions, and freed by the same rule, are together.
    alike: dict[tuple[int, bool, bool, bool], list[int]] = {}
    flags = ranges.owner[begin:end], ranges.once[begin:end], columns.lasts, columns.lasts_halved
    for n, key in enumerate(zip(*(flag.tolist() for flag in flags), strict=True)):
        if columns.touched[n]:
            alike.setdefault(key, []).append(n)
    for (owner, once, _, _), several in alike.items():
        values = np.array(several, dtype=np.int64)
        if once:
            microbatches, cls = np.array([-1]), np.zeros(1, dtype=np.int64)
        else:
            stage, half = divmod(owner, 3)
            place = group.places[stage]
            microbatches = np.flatnonzero(order.schedule.by_microbatch[half, place] >= 0)
            cls = group.class_of[microbatches]
        at = begin + values[None, :], cls[:, None]
        there = ranges.there[at]
        value, microbatch = (
            np.broadcast_to(x, there.shape)[there] for x in (values, microbatches[:, None])
        )
        rows = [
            _row(rank, group, of, ends[at][there], microbatch) for ends in (ranges.first, ranges.last)
        ]
        found.append(np.stack([start + value, microbatch, *rows]))
    return found


def _row(
    rank: RankValues, group: StageGroup, of: GroupRanges, ends: Int, microbatch: Int
) -> Int:
    """The rows of ends of live ranges; those of one value for all microbatches have microbatch -1."""
    order, ranges, schedule = rank.order, of.ranges, rank.order.schedule
    position, place = ranges.position(ends), ranges.place(ends)
    row = np.full(len(ends), order.total - 1)
    within = np.flatnonzero(position < of.classes.positions)
    stage, slot, _ = np.array(of.classes.slots, dtype=np.int64).reshape(-1, 3)[position[within]].T
    action = group.actions[position[within]]
    places = np.array(group.places, dtype=np.int64)[stage]
    m = microbatch[within]
    several = np.flatnonzero(m >= 0)
    half = np.where(slot == AHEAD, 0, np.where(slot > NEXT, slot - NEXT, slot))
    m = np.minimum(m + (slot > NEXT), schedule.microbatches - 1)
    acting = schedule.by_microbatch[half, places, np.maximum(m, 0)]
    acting = np.where(slot == AHEAD, order.supplier[acting], acting)
    action[several] = acting[several]
    row[within] = order.rows(action, place[within])
    for q, at in enumerate(group.places):
        there = position == of.classes.positions + q
        row[there] = order.end + _step_row(order.table, order.table.first_after + order.after, at, place[there])
    return row - ranges.before(ends)


# ---- bytes by action -----------------------------------------------------------------------------


class MemoryPlan:
    """The memory of the ranks of a program by action: equal copies of actions have one profile."""

    def __init__(self, table: ActionTable, ranks: Sequence[RankValues]) -> None:
        """`ranks`: those whose values live as long as the class of their microbatch says."""
        self._table = table
        self._profiles: dict[tuple[object, ...], int] = {}
        self._makers: list[_Maker] = []
        self.kinds = [self._kinds(rank) for rank in ranks]
        """By rank, the profile of each copy."""
        self._ranks = ranks

    def changes(self, rank: int, sizes: Sizes) -> MemoryChanges:
        """The changes of a rank; `sizes` as in `RankValues.expanded`."""
        return MemoryChanges(
            _always(self._ranks[rank], sizes), self.kinds[rank], self.profiles(sizes)
        )

    def profiles(self, sizes: Sizes) -> Profiles:
        """The profiles of all ranks."""
        if not sizes:
            return self._own
        return Profiles(maker.profile(sizes) for maker in self._makers)

    @cached_property
    def _own(self) -> Profiles:
        return Profiles(maker.profile({}) for maker in self._makers)

    def _kinds(self, rank: RankValues) -> Int:
        """The profile of each copy of a rank's actions."""
        order, schedule = rank.order, rank.order.schedule
        numbers = [ranges for _, ranges in rank.groups]
        # By stage of the rank: its ranges, how many stages these are of, which one it is.
        of_stage = np.zeros((3, len(rank.stages)), dtype=np.int64)
        class_of = np.empty((len(rank.stages), schedule.microbatches), dtype=np.int64)
        for number, (group, _) in enumerate(rank.groups):
            for q, place in enumerate(group.places):
                of_stage[:, place] = number, len(group.places), q
                class_of[place] = group.class_of
        number, several, q = of_stage[:, schedule.place]
        kind, microbatch = schedule.kind, schedule.microbatch
        slot = (class_of[schedule.place, microbatch] * several + q) * SLOTS + _SLOT_OF_KIND[kind]
        columns = np.stack([number + 1, slot, np.zeros_like(slot)])
        if any(stage_waits for stage_waits in map(_waits, rank.stages)):
            before = np.where(microbatch > 0, class_of[schedule.place, microbatch - 1], -1)
            slot = (before * several + q) * SLOTS + NEXT + _SLOT_OF_KIND[kind]
            for at in np.flatnonzero((before >= 0) & (kind != FORWARD) & (kind != UNSHARD)):
                first = numbers[int(number[at])].first_cell
                columns[2, at] = (first[slot[at]] < first[slot[at] + 1]) * (slot[at] + 1)
        by_part = np.zeros((2, 3, schedule.steps), dtype=np.int64)
        by_part[schedule.part, :, schedule.step] = columns.T
        steps = order.action[: schedule.steps]
        first, of = distinct_numbers([steps, *by_part.reshape(6, -1)], schedule.steps)
        makers: list[int] = []
        for copy in first.tolist():
            action = int(steps[copy])
            parts = [
                (numbers[int(n) - 1], int(slot), int(later) - 1)
                for n, slot, later in by_part[:, :, copy].tolist()
                if n
            ]
            makers.append(self._maker(_Maker(self._table, action, tuple(parts), ())))
        kinds = np.array(makers, dtype=np.int64)[of] if len(of) else of
        ends = tuple(
            (ranges, tuple(_counts(group).tolist()), group.places) for group, ranges in rank.groups
        )
        if len(order.action) > schedule.steps:
            maker = _Maker(self._table, int(order.action[-1]), (), ends)
            return np.append(kinds, self._maker(maker))
        rows = np.flatnonzero(np.diff(order.begin))
        if len(rows) and any(len(ranges.ending.value) for _, ranges in rank.groups):
            kinds = kinds.copy()
            last = self._makers[int(kinds[rows[-1]])]
            kinds[rows[-1]] = self._maker(_Maker(self._table, last.action, last.parts, ends))
        return kinds

    def _maker(self, maker: _Maker) -> int:
        number = self._profiles.setdefault(maker.key, len(self._makers))
        if number == len(self._makers):
            self._makers.append(maker)
        return number


def _waits(stage: Stage) -> bool:
    return value_columns(stage).waits_for_next


def _counts(group: StageGroup) -> Int:
    """How many microbatches each class has."""
    return np.bincount(group.class_of[group.class_of >= 0], minlength=group.classes.count)


def _always(rank: RankValues, sizes: Sizes) -> Int:
    """Bytes by category that are allocated all the time."""
    start = np.zeros(len(CATEGORIES), dtype=np.int64)
    for stage in rank.stages:
        columns = value_columns(stage)
        always = ~columns.touched
        size = sizes.get(stage, columns.size)[always]
        start += summed(columns.category[always], size, len(CATEGORIES))
    return start


class _Maker(NamedTuple):
    """What the profile of some copies of an action follows from."""

    table: ActionTable
    action: int
    parts: tuple[tuple[GroupRanges, int, int], ...]
    """Ranges, the slot of the part's cells, and that of those which the microbatch before frees."""
    ends: tuple[tuple[GroupRanges, tuple[int, ...], tuple[int, ...]], ...]
    """Ranges, how many microbatches of each class, and stages, where the step ends here."""

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for equal profiles."""
        return (
            self.action,
            *((id(ranges), slot, later) for ranges, slot, later in self.parts),
            *((id(ranges), counts, places) for ranges, counts, places in self.ends),
        )

    def profile(self, sizes: Sizes) -> Deltas:
        """Bytes that each row allocates and frees."""
        table, (begin, end) = self.table, self.table.actions.begin[self.action : self.action + 2]
        rows = int(end - begin)
        cell: list[tuple[Int, Int, Bool]] = []  # row and category, bytes, freed or allocated
        for nth, (ranges, slot, later) in enumerate(self.parts):
            form = table.form_of[self.action, nth]
            for number in (slot, later) if later >= 0 else (slot,):
                cells = ranges.cells_of(number)
                row = table.offset(form, cells.place) - cells.before
                category = ranges.category[cells.value]
                cell.append((category * rows + row, ranges.sizes(sizes)[cells.value], cells.freed))
        for ranges, counts, places in self.ends:
            cells = ranges.ending
            row = np.full(len(cells.place), rows - 1)
            for q, place in enumerate(places):
                mine = np.flatnonzero((cells.stage == q) & (cells.place >= 0))
                row[mine] = _step_row(table, self.action, place, cells.place[mine])
            category = ranges.category[cells.value]
            many = np.array([*counts, 1], dtype=np.int64)[cells.cls]
            size = ranges.sizes(sizes)[cells.value] * many
            cell.append((category * rows + row, size, cells.freed))
        at, size, freed = (np.concatenate(column) for column in zip(*cell, strict=True))
        shape = len(CATEGORIES), rows
        up, down = (
            summed(at[some], size[some], shape[0] * rows).reshape(shape) for some in (~freed, freed)
        )
        return Deltas(np.zeros(len(CATEGORIES), dtype=np.int64), up, down)


def _step_row(table: ActionTable, action: int, place: int, task: Int) -> Int:
    """The rows of tasks of a rank's stage after all actions, in the order of `GroupRanges`."""
    row = table.afters[action - table.first_after].rows.row_of[place]
    return row[task] if (np.diff(row) > 0).all() else task


def changes_of(order: RankOrder, values: Values) -> MemoryChanges:
    """The changes of a rank from its expanded values; equal copies of an action have one profile."""
    start, allocated, freed = changed_bytes(values, order.total)
    profiles: dict[tuple[int, bytes, bytes], int] = {}
    found: list[Deltas] = []
    kind: list[int] = []
    nothing = np.zeros_like(start)
    for copy, action in enumerate(order.action.tolist()):
        some = slice(int(order.begin[copy]), int(order.begin[copy + 1]))
        up, down = allocated[:, some], freed[:, some]
        number = profiles.setdefault((action, up.tobytes(), down.tobytes()), len(found))
        if number == len(found):
            found.append(Deltas(nothing, up, down))
        kind.append(number)
    return MemoryChanges(start, np.array(kind, dtype=np.int64), Profiles(found))
