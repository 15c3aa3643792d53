"""Units of issue: copies of actions that are issued without a break, and their rows.

Most units are one copy of an action. Several copies are one unit where their tasks take turns, and
the last unit of a rank also has the tasks that the rank's backward actions defer until then.
Distinct units have their rows once, whatever ranks and microbatches execute them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Bool, Int, entries_of
from stagewright.program.columns import KINDS, ActionOrder, Actions, Tasks, numbers_among_copies


class RowSet(IntEnum):
    """Rows of a copy that a unit issues."""

    WITHOUT_DEFERRED = 0
    DEFERRED = 1
    ALL = 2


Member = tuple[int, RowSet]
"""An action, and the rows of it that a unit issues."""

_FORWARD = KINDS.index("F")
_BACKWARDS = [KINDS.index(kind) for kind in "BIW"]


class CarriedDeps(NamedTuple):
    """Deps of unit rows on other units."""

    waiter: Int
    """Rows of the units."""
    member: Int
    """Copy of its unit that the waiter is of."""
    entry: Int
    """Entry of `Tasks.data` that `ActionOrder.sources` looks up; -1: a dep on the same copy."""
    row: Int
    """Row of `Actions.tasks` that is waited for, or one that stands for it."""

    def select(self, mask: Bool) -> CarriedDeps:
        """Deps in `mask`."""
        return CarriedDeps(*(column[mask] for column in self))


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """Rows of distinct units, one unit after another; `row`, `unit` and `member` are by row."""

    tasks: Tasks
    deferred: Bool
    """Rows of `tasks` that ranks leave until their last unit."""
    row: Int
    """Row of `tasks`."""
    unit: Int
    member: Int
    """Copy of the unit that the row is of."""
    edges: tuple[Int, Int]
    """Data dependencies within units: waiters and deps."""
    carried: CarriedDeps
    actions: tuple[tuple[int, ...], ...]
    """By unit, the actions of its copies."""
    index: Int
    """Unit row of each row of a member's action, from `first`; -1: not in the unit."""
    first: Int
    """[units, members]: start of the member in `index`."""

    def locate(self, sequence: UnitSequence, copies: Int, offsets: Int) -> tuple[Int, Int]:
        """Instances and unit rows that issue rows of copies; `offsets`: rows within the action."""
        instance = sequence.instance[copies]
        first = self.first[sequence.unit[instance], sequence.member[copies]]
        row = self.index[first + offsets]
        deferred = row < 0
        instance[deferred] = last = len(sequence.unit) - 1
        first = self.first[sequence.unit[last], sequence.deferred_member[copies[deferred]]]
        row[deferred] = self.index[first + offsets[deferred]]
        return instance, row


class UnitSequence(NamedTuple):
    """The units that one pipeline rank issues, in order."""

    unit: Int
    """[instances]"""
    copies: Int
    """[instances, members]: copies of the rank's `ActionOrder`; -1: no such member."""
    instance: Int
    """[copies]: instance that issues the copy, without its deferred rows."""
    member: Int
    """[copies]: member of that instance."""
    deferred_member: Int
    """[copies]: member of the last instance that issues the deferred rows; -1: it has none."""


class _Example(NamedTuple):
    """A unit, and where it occurs first: index of the rank's order, and copies."""

    unit: int
    order: int
    copies: tuple[int, ...]


_Examples = dict[tuple[Member, ...], _Example]


def units_of(
    actions: Actions, orders: Sequence[ActionOrder], deferred: Bool, *, in_turns: bool
) -> tuple[Units, list[UnitSequence]]:
    """Distinct units of some ranks, and the order in which each rank issues them.

    `deferred`: rows that a rank leaves until its last unit. `in_turns`: a backward and the forward
    after it are one unit.
    """
    has_deferred = np.zeros(len(actions.begin) - 1, dtype=bool)
    has_deferred[np.searchsorted(actions.begin, np.flatnonzero(deferred), side="right") - 1] = True
    units: _Examples = {}
    sequences = [
        _sequence(order, index, _groups(order, in_turns), has_deferred, units)
        for index, order in enumerate(orders)
    ]
    return _rows_of(actions, orders, deferred, units), sequences


def _groups(order: ActionOrder, in_turns: bool) -> list[list[int]]:
    """Copies of each unit without deferred rows."""
    copies = [[copy] for copy in range(len(order.action))]
    if not in_turns:
        return copies
    single = order.kind[:, 1] < 0
    forward = single & (order.kind[:, 0] == _FORWARD)
    backward = single & np.isin(order.kind[:, 0], _BACKWARDS)
    second = np.append(False, backward[:-1] & forward[1:]).tolist()
    pairs = zip(copies, [*second[1:], False], second, strict=True)
    return [[*copy, copy[0] + 1] if first else copy for copy, first, last in pairs if not last]


def _sequence(
    order: ActionOrder, order_index: int, groups: list[list[int]], has_deferred: Bool,
    units: _Examples,
) -> UnitSequence:  # fmt: skip
    """Units of one rank; those that are new are added to `units`.

    The last unit has the deferred rows of other copies, and all rows of the optimizer action.
    """
    num_copies = len(order.action)
    deferring: list[int] = np.flatnonzero(has_deferred[order.action]).tolist()
    optimizer: list[int] = []
    if num_copies and int(order.kind[-1, 0]) < 0:
        *groups, optimizer = groups
        deferring = [copy for copy in deferring if copy not in optimizer]
    row_sets = [[RowSet.WITHOUT_DEFERRED] * len(copies) for copies in groups]
    if deferring or optimizer:
        groups = [*groups, deferring + optimizer]
        row_sets.append([RowSet.DEFERRED] * len(deferring) + [RowSet.ALL] * len(optimizer))
    actions: list[int] = order.action.tolist()
    unit = np.zeros(len(groups), np.int64)
    table = np.full((len(groups), max(map(len, groups), default=1)), -1)
    instance, member, deferred_member = np.zeros((3, num_copies), np.int64)
    deferred_member -= 1
    for i, (copies, sets) in enumerate(zip(groups, row_sets, strict=True)):
        members = tuple(zip([actions[copy] for copy in copies], sets, strict=True))
        unit[i] = units.setdefault(members, _Example(len(units), order_index, (*copies,))).unit
        table[i, : len(copies)] = copies
        for m, (copy, row_set) in enumerate(zip(copies, sets, strict=True)):
            if row_set == RowSet.DEFERRED:
                deferred_member[copy] = m
            else:
                instance[copy], member[copy] = i, m
    return UnitSequence(unit, table, instance, member, deferred_member)


def _rows_of(
    actions: Actions, orders: Sequence[ActionOrder], deferred: Bool,
    units: _Examples,
) -> Units:  # fmt: skip
    """Rows of distinct units, and their dependencies."""
    tasks, begin = actions.tasks, actions.begin
    none = np.zeros(0, np.int64)
    members = [(u, m, *member) for u, unit in enumerate(units) for m, member in enumerate(unit)]
    examples = [*units.values()]
    row_parts: list[Int] = []
    index_parts: list[Int] = [none]
    size = 0
    for *_, action, row_set in members:
        rows = actions.rows(action)
        in_unit = (deferred[rows] == (row_set == RowSet.DEFERRED)) | (row_set == RowSet.ALL)
        index_parts.append(np.where(in_unit, size + np.cumsum(in_unit) - 1, -1))
        row_parts.append(rows[in_unit])
        size += len(row_parts[-1])
    row, index = np.concatenate([none, *row_parts]), np.concatenate(index_parts)
    unit_of, member_of, action_of = np.array(members, dtype=np.int64).reshape(-1, 4).T[:3]
    first = np.cumsum([0, *map(len, index_parts[1:])])[:-1]
    owner = np.repeat(np.arange(len(members)), [len(rows) for rows in row_parts])

    # All deps: of each, the waiting row, the entry of `Tasks.data`, and the row waited for.
    waiter, entry = entries_of(tasks.data_ptr, row)
    needed = tasks.data[entry].astype(np.int64)
    is_carried = actions.carried[entry]
    local = np.full(len(waiter), -1)  # row of the same unit

    # Deps on the same copy; they leave the unit where one of both rows is deferred.
    same = np.flatnonzero(~is_carried)
    of_same = owner[waiter[same]]
    local[same] = index[first[of_same] + needed[same] - begin[action_of[of_same]]]

    # Deps between members: on copies that are in the same unit.
    for number, (u, m, action, _) in enumerate(members):
        example = examples[u]
        if len(example.copies) == 1:
            continue
        edges = np.flatnonzero(is_carried & (owner[waiter] == number))
        if not len(edges):
            continue
        order = orders[example.order]
        source, source_row = order.sources(action, entry[edges])
        copy = int(numbers_among_copies(order, action, np.array([example.copies[m]]))[0])
        for k, (other, r) in enumerate(
            zip(source[copy].tolist(), source_row[copy].tolist(), strict=True)
        ):
            if other in example.copies:
                member = number - m + example.copies.index(other)
                local[edges[k]] = index[first[member] + r - int(begin[action_of[member]])]

    inside = local >= 0
    carried = CarriedDeps(
        waiter, member_of[owner][waiter], np.where(is_carried, entry, -1), needed
    ).select(~inside)
    table = np.zeros((len(units), max(map(len, units), default=1)), np.int64)
    table[unit_of, member_of] = first
    return Units(
        tasks, deferred, row, unit_of[owner], member_of[owner], (waiter[inside], local[inside]),
        carried, tuple(tuple(action for action, _ in unit) for unit in units), index, table,
    )  # fmt: skip
