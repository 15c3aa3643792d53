"""The values of a pipeline rank: expanded with their live ranges, or as bytes by action."""

from __future__ import annotations

import itertools
from collections import Counter
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
from stagewright.program.step import MemoryChanges, Profiles, changed_bytes, summed

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


@dataclass(frozen=True, eq=False)
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

    def ending_counts(self, group: StageGroup) -> tuple[int, ...]:
        """How many microbatches each class has whose values are held until after all actions; 0 of
        others."""
        count = np.bincount(group.class_of[group.class_of >= 0], minlength=self.classes.count)
        count[np.bincount(self.ending.cls + 1, minlength=len(count) + 1)[1:] == 0] = 0
        return tuple(count.tolist())

    def sizes(self, of: Sizes) -> Int:
        """Bytes of the values of all stages."""
        return np.concatenate([of.get(s, value_columns(s).size) for s in self.stages])

    @cached_property
    def category(self) -> Int:
        """Of the values of all stages."""
        return np.concatenate([value_columns(s).category for s in self.stages])


@lru_cache(maxsize=256)
def _group_ranges(stages: tuple[Stage, ...], classes: Classes, step_rows: _StepRows) -> GroupRanges:
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
        contents: list[int] = order.contents.tolist()
        self.stages = [order.table.stages[content].base for content in contents]

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
            layer = relabelled(columns.layer, stage, named)
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


def relabelled(layer: Int, stage: Stage, naming: Naming) -> Int:
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
    always = columns.always
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
            _row(rank, group, of, ends[at][there], microbatch)
            for ends in (ranges.first, ranges.last)
        ]
        found.append(np.stack([start + value, microbatch, *rows]))
    return found


def _row(rank: RankValues, group: StageGroup, of: GroupRanges, ends: Int, microbatch: Int) -> Int:
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
        row[there] = order.end + _step_row(
            order.table, order.table.first_after + order.after, at, place[there]
        )
    return row - ranges.before(ends)


# ---- bytes by action -----------------------------------------------------------------------------


class _ProfileKey(NamedTuple):
    """What the bytes that copies of an action allocate and free follow from."""

    action: int
    parts: tuple[tuple[GroupRanges, int, int], ...] = ()
    """By part: ranges, the slot of its cells, and of those that the microbatch before frees; -1:
    none."""
    ends: tuple[tuple[GroupRanges, tuple[int, ...], tuple[int, ...]], ...] = ()
    """Where the step ends: ranges, how many microbatches each class has, and the stages."""


class _PlacedCells(NamedTuple):
    """Cells of one `GroupRanges` in profiles."""

    value: Int
    row: Int
    """Of all profiles one after the other."""
    freed: Bool
    count: Int
    """How many values there are."""


class MemoryPlan:
    """The memory of the ranks of a program by action: equal copies of actions have one profile."""

    def __init__(self, table: ActionTable, ranks: Sequence[RankValues]) -> None:
        """`ranks`: those whose values live as long as the class of their microbatch says."""
        self._table, self._ranks = table, ranks
        self._number = Numbers[_ProfileKey]()
        self._kinds = [self._kinds_of(rank) for rank in ranks]
        self._own: Profiles | None = None

    def changes(self, rank: int, sizes: Sizes) -> MemoryChanges:
        """The changes of a rank; `sizes` as in `RankValues.expanded`."""
        return MemoryChanges(
            _always(self._ranks[rank], sizes), self._kinds[rank], self.profiles(sizes)
        )

    def profiles(self, sizes: Sizes) -> Profiles:
        """The profiles of all ranks."""
        if sizes:
            return self._profiles(sizes)
        if self._own is None:
            self._own = self._profiles({})
        return self._own

    def _profiles(self, sizes: Sizes) -> Profiles:
        total = int(self._begin[-1])
        cell: list[Int] = []
        size: list[Int] = []
        freed: list[Bool] = []
        for ranges, cells in self._cells:
            cell.append(ranges.category[cells.value] * total + cells.row)
            size.append(ranges.sizes(sizes)[cells.value] * cells.count)
            freed.append(cells.freed)
        at = np.concatenate([np.zeros(0, dtype=np.int64), *cell])
        bytes_ = np.concatenate([np.zeros(0, dtype=np.int64), *size])
        frees = np.concatenate([np.zeros(0, dtype=bool), *freed])
        shape = len(CATEGORIES), total
        up, down = (
            summed(at[some], bytes_[some], shape[0] * total).reshape(shape)
            for some in (~frees, frees)
        )
        return Profiles.of(up, down, self._begin)

    # ---- which profiles --------------------------------------------------------------------------

    def _kinds_of(self, rank: RankValues) -> Int:
        """The profile of each copy of a rank's actions."""
        order, schedule = rank.order, rank.order.schedule
        numbers = [ranges for _, ranges in rank.groups]
        columns = _slots(rank)
        by_part = np.zeros((2, 3, schedule.steps), dtype=np.int64)
        by_part[schedule.part, :, schedule.step] = columns.T
        steps = order.action[: schedule.steps]
        first, of = distinct_numbers([steps, *by_part.reshape(6, -1)], schedule.steps)
        keys = [
            _ProfileKey(
                action,
                tuple((numbers[n - 1], slot, later - 1) for n, slot, later in parts if n),
            )
            for action, parts in zip(
                steps[first].tolist(), by_part[:, :, first].transpose(2, 0, 1).tolist(), strict=True
            )
        ]
        kinds = np.array(self._number.each(keys), dtype=np.int64)[of]
        ends = tuple((ranges, ranges.ending_counts(group), group.places)
                     for group, ranges in rank.groups)  # fmt: skip
        if len(order.action) > schedule.steps:
            return np.append(kinds, self._number(_ProfileKey(int(order.action[-1]), ends=ends)))
        rows = np.flatnonzero(np.diff(order.begin))
        if len(rows) and any(len(ranges.ending.value) for ranges in numbers):
            key = keys[int(of[rows[-1]])]
            kinds[rows[-1]] = self._number(key._replace(ends=ends))
        return kinds

    # ---- what they are made of -------------------------------------------------------------------

    @cached_property
    def _begin(self) -> Int:
        """Where the rows of each profile begin among those of all, and the end."""
        sizes = np.diff(self._table.actions.begin)
        actions = np.array([key.action for key in self._number.table], dtype=np.int64)
        return np.concatenate([[0], np.cumsum(sizes[actions])]).astype(np.int64)

    @cached_property
    def _cells(self) -> list[tuple[GroupRanges, _PlacedCells]]:
        """All cells, with the ranges that they are of."""
        table = self._table
        parts: dict[GroupRanges, list[tuple[int, int, int]]] = {}  # profile, form, slot
        found: list[tuple[GroupRanges, _PlacedCells]] = []
        for profile, key in enumerate(self._number.table):
            for nth, (ranges, slot, later) in enumerate(key.parts):
                form = int(table.form_of[key.action, nth])
                several = parts.setdefault(ranges, [])
                several += [(profile, form, s) for s in (slot, later) if s >= 0]
            found += [(ranges, self._ending(profile, key.action, ranges, counts, places))
                      for ranges, counts, places in key.ends]  # fmt: skip
        for ranges, several in parts.items():
            profile, form, slot = np.array(several, dtype=np.int64).T
            first = ranges.first_cell[slot]
            counts = ranges.first_cell[slot + 1] - first
            start = np.cumsum(counts) - counts
            cells = ranges.cells.take(
                np.repeat(first - start, counts) + np.arange(int(counts.sum()))
            )
            offset = table.offset(np.repeat(form, counts), cells.place)
            row = np.repeat(self._begin[profile], counts) + offset - cells.before
            one = np.ones(len(row), dtype=np.int64)
            found.append((ranges, _PlacedCells(cells.value, row, cells.freed, one)))
        return found

    def _ending(
        self,
        profile: int,
        action: int,
        ranges: GroupRanges,
        counts: tuple[int, ...],
        places: tuple[int, ...],
    ) -> _PlacedCells:
        cells = ranges.ending
        row = np.full(len(cells.place), self._begin[profile + 1] - 1)
        for q, place in enumerate(places):
            mine = np.flatnonzero((cells.stage == q) & (cells.place >= 0))
            after = _step_row(self._table, action, place, cells.place[mine])
            row[mine] = self._begin[profile] + after
        count = np.array([*counts, 1], dtype=np.int64)[cells.cls]
        return _PlacedCells(cells.value, row, cells.freed, count)


def _slots(rank: RankValues) -> Int:
    """By action of the schedule: its ranges (a number from 1 on), the slot of its cells, and one
    more than that of those that the microbatch before frees, 0: none: [3, actions]."""
    schedule = rank.order.schedule
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
    if any(value_columns(stage).waits_for_next for stage in rank.stages):
        before = np.where(microbatch > 0, class_of[schedule.place, microbatch - 1], -1)
        slot = (before * several + q) * SLOTS + NEXT + _SLOT_OF_KIND[kind]
        waits = (before >= 0) & (kind != FORWARD) & (kind != UNSHARD)
        for n, (_, ranges) in enumerate(rank.groups):
            mine = np.flatnonzero(waits & (number == n))
            some = ranges.first_cell[slot[mine]] < ranges.first_cell[slot[mine] + 1]
            columns[2, mine] = np.where(some, slot[mine] + 1, 0)
    return columns


def _always(rank: RankValues, sizes: Sizes) -> Int:
    """Bytes by category that are allocated all the time."""
    start = np.zeros(len(CATEGORIES), dtype=np.int64)
    for stage, many in Counter(rank.stages).items():
        columns = value_columns(stage)
        size = sizes.get(stage, columns.size)[columns.always]
        start += many * summed(columns.category[columns.always], size, len(CATEGORIES))
    return start


def _step_row(table: ActionTable, action: int, place: int, task: Int) -> Int:
    """The rows of tasks of a rank's stage after all actions, in the order of `GroupRanges`."""
    row = table.afters[action - table.first_after].rows.row_of[place]
    return row[task] if (np.diff(row) > 0).all() else task


def changes_of(order: RankOrder, values: Values) -> MemoryChanges:
    """The changes of a rank from its expanded values; equal copies of an action have one profile."""
    start, allocated, freed = changed_bytes(values, order.total)
    number = Numbers[tuple[int, bytes, bytes]]()
    rows = [slice(a, b) for a, b in itertools.pairwise(order.begin.tolist())]
    kind = number.each(
        (action, allocated[:, some].tobytes(), freed[:, some].tobytes())
        for action, some in zip(order.action.tolist(), rows, strict=True)
    )
    of = np.array(kind, dtype=np.int64)
    _, first = np.unique(of, return_index=True)
    up, down = (
        np.concatenate([column[:, :0], *(column[:, rows[n]] for n in first.tolist())], axis=1)
        for column in (allocated, freed)
    )
    begin = np.concatenate([[0], np.cumsum(np.diff(order.begin)[first])]).astype(np.int64)
    return MemoryChanges(start, of, Profiles.of(up, down, begin))
