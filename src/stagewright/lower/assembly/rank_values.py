"""The values of a pipeline rank: expanded with their live ranges, or as bytes by action."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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
_HALF_OF_SLOT: Int = np.array([0, 1, 2, 0, 1, 2])
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
    """`(class * stages + stage) * SLOTS + slot`, ascending; -1: after all actions."""
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
        value, slot, place, before, freed, stage, cls = self
        return Cells(
            value[some], slot[some], place[some], before[some], freed[some], stage[some], cls[some]
        )


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

    def _keep_weights(self, body: NDArray[np.int32]) -> None:
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
    """The rows of ends of live ranges; the microbatch of a value that all share is -1."""
    order, ranges, schedule = rank.order, of.ranges, rank.order.schedule
    position, place = ranges.position(ends), ranges.place(ends)
    row = np.full(len(ends), order.total - 1)
    within = np.flatnonzero(position < of.classes.positions)
    slots = np.array(of.classes.slots, dtype=np.int64).reshape(-1, 3)
    stage, slot, _ = slots[position[within]].T
    places = np.array(group.places, dtype=np.int64)[stage]
    number = microbatch[within]
    half = _HALF_OF_SLOT[slot]
    acts_for = np.clip(number + (slot > NEXT), 0, schedule.microbatches - 1)
    action = schedule.by_microbatch[half, places, acts_for]
    action = np.where(slot == AHEAD, order.supplier[action], action)
    action = np.where(number < 0, group.actions[position[within]], action)
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
    number: Int
    """Number of values."""


class _Cells(NamedTuple):
    """The cells of some profiles, whose rows stand one after the other."""

    begin: Int
    """Where the rows of each profile begin, and the end."""
    cells: Sequence[tuple[GroupRanges, _PlacedCells]]

    def profiles(self, sizes: Sizes) -> Profiles:
        """The profiles with the bytes of values."""
        rows = int(self.begin[-1])
        cell, size = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        freed = [np.zeros(0, dtype=bool)]
        for ranges, cells in self.cells:
            cell.append(ranges.category[cells.value] * rows + cells.row)
            size.append(ranges.sizes(sizes)[cells.value] * cells.number)
            freed.append(cells.freed)
        at, bytes_held, frees = np.concatenate(cell), np.concatenate(size), np.concatenate(freed)
        up, down = (
            summed(at[mask], bytes_held[mask], len(CATEGORIES) * rows).reshape(-1, rows)
            for mask in (~frees, frees)
        )
        return Profiles.of(up, down, self.begin)


class MemoryPlan:
    """The memory of the ranks of a program by action: equal copies of actions have one profile."""

    def __init__(self, table: ActionTable, ranks: Sequence[RankValues]) -> None:
        """`ranks`: those whose values live as long as the class of their microbatch says."""
        self._table, self._ranks = table, ranks
        self._number = Numbers[_ProfileKey]()
        self._of_rank: dict[int, tuple[Int, _Cells]] = {}

    def changes(self, rank: int, sizes: Sizes) -> MemoryChanges:
        """The changes of a rank; `sizes` as in `RankValues.expanded`."""
        start, kinds = _always(self._ranks[rank], sizes), self._kinds[rank]
        if not sizes:
            return MemoryChanges(start, kinds, self._profiles)
        if rank not in self._of_rank:
            used, kind = np.unique(kinds, return_inverse=True)
            self._of_rank[rank] = kind.ravel(), self._cells(used)
        kind, cells = self._of_rank[rank]
        return MemoryChanges(start, kind, cells.profiles(sizes))

    @cached_property
    def _kinds(self) -> list[Int]:
        """By rank, the profile of each copy."""
        return [self._kinds_of(rank) for rank in self._ranks]

    @cached_property
    def _profiles(self) -> Profiles:
        """The profiles of all ranks."""
        return self._cells(np.arange(len(self._number.table))).profiles({})

    # ---- which profiles --------------------------------------------------------------------------

    def _kinds_of(self, rank: RankValues) -> Int:
        """The profile of each copy of a rank's actions."""
        order, schedule = rank.order, rank.order.schedule
        groups = [ranges for _, ranges in rank.groups]
        by_part = np.zeros((2, 3, schedule.steps), dtype=np.int64)
        by_part[schedule.part, :, schedule.step] = _slots(rank).T
        steps = order.action[: schedule.steps]
        first, number = distinct_numbers([steps, *by_part.reshape(6, -1)], schedule.steps)
        actions: list[int] = steps[first].tolist()
        parts: list[list[tuple[int, int, int]]] = by_part[:, :, first].transpose(2, 0, 1).tolist()
        keys = [
            _ProfileKey(
                action,
                tuple((groups[n - 1], slot, later - 1) for n, slot, later in of_action if n),
            )
            for action, of_action in zip(actions, parts, strict=True)
        ]
        kinds = np.array(self._number.each(keys), dtype=np.int64)[number]
        ends = tuple(
            (ranges, ranges.ending_counts(group), group.places) for group, ranges in rank.groups
        )
        if len(order.action) > schedule.steps:
            return np.append(kinds, self._number(_ProfileKey(int(order.action[-1]), ends=ends)))
        copies = np.flatnonzero(np.diff(order.begin))
        if len(copies) and any(len(ranges.ending.value) for ranges in groups):
            key = keys[int(number[copies[-1]])]
            kinds[copies[-1]] = self._number(key._replace(ends=ends))
        return kinds

    # ---- what they are made of -------------------------------------------------------------------

    def _cells(self, profiles: Int) -> _Cells:
        """The cells of some profiles."""
        table = self._table
        every = [*self._number.table]
        numbers: list[int] = profiles.tolist()
        keys = [every[number] for number in numbers]
        actions = np.array([key.action for key in keys], dtype=np.int64)
        sizes = np.diff(table.actions.begin)[actions]
        begin = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        parts: dict[GroupRanges, list[tuple[int, int, int]]] = {}  # profile, form, slot
        placed: list[tuple[GroupRanges, _PlacedCells]] = []
        for profile, key in enumerate(keys):
            for nth, (ranges, slot, later) in enumerate(key.parts):
                form = int(table.form_of[key.action, nth])
                slots = parts.setdefault(ranges, [])
                slots += [(profile, form, s) for s in (slot, later) if s >= 0]
            rows = int(begin[profile]), int(begin[profile + 1])
            for ranges, counts, places in key.ends:
                placed.append((ranges, self._ending(rows, key.action, ranges, counts, places)))
        for ranges, slots in parts.items():
            profile, form, slot = np.array(slots, dtype=np.int64).T
            first = ranges.first_cell[slot]
            counts = ranges.first_cell[slot + 1] - first
            start = np.cumsum(counts) - counts
            cells = ranges.cells.take(
                np.repeat(first - start, counts) + np.arange(int(counts.sum()))
            )
            offset = table.offset(np.repeat(form, counts), cells.place)
            row = np.repeat(begin[profile], counts) + offset - cells.before
            one = np.ones(len(row), dtype=np.int64)
            placed.append((ranges, _PlacedCells(cells.value, row, cells.freed, one)))
        return _Cells(begin, placed)

    def _ending(
        self,
        rows: tuple[int, int],
        action: int,
        ranges: GroupRanges,
        counts: tuple[int, ...],
        places: tuple[int, ...],
    ) -> _PlacedCells:
        """The cells after all actions; `rows` are those of their profile."""
        cells = ranges.ending
        row = np.full(len(cells.place), rows[1] - 1)
        for nth, place in enumerate(places):
            of_stage = np.flatnonzero((cells.stage == nth) & (cells.place >= 0))
            row[of_stage] = rows[0] + _step_row(self._table, action, place, cells.place[of_stage])
        number = np.array([*counts, 1], dtype=np.int64)[cells.cls]
        return _PlacedCells(cells.value, row, cells.freed, number)


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
    """The changes of a rank from its expanded values; equal copies of actions share a profile."""
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
