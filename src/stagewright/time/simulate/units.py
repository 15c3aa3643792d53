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

from stagewright.arrays import Bool, Int
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


def units_of(
    actions: Actions, orders: Sequence[ActionOrder], deferred: Bool, *, in_turns: bool
) -> tuple[Units, list[UnitSequence]]:
    """Distinct units of some ranks, and the order in which each rank issues them.

    `deferred`: rows that a rank leaves until its last unit. `in_turns`: a backward and the forward
    after it are one unit.
    """
    has_deferred = np.zeros(len(actions.begin) - 1, dtype=bool)
    has_deferred[np.searchsorted(actions.begin, np.flatnonzero(deferred), side="right") - 1] = True
    units: dict[tuple[Member, ...], _Example] = {}
    sequences: list[UnitSequence] = []
    for index, order in enumerate(orders):
        groups, end = _groups(order, in_turns), len(order.action) - 1
        deferring_copies = np.flatnonzero(has_deferred[order.action])
        has_optimizer = end >= 0 and int(order.kind[end, 0]) < 0
        if has_optimizer:
            deferring_copies = deferring_copies[deferring_copies != end]
            groups = groups[:-1]
        last_unit: list[int] = [*deferring_copies.tolist(), *[end] * has_optimizer]
        sequences.append(_sequence(order, index, groups, last_unit, len(deferring_copies), units))
    return _rows_of(actions, orders, deferred, units), sequences


def _groups(order: ActionOrder, in_turns: bool) -> Int:
    """Copies of each unit without deferred rows: [units, members], padded with -1."""
    copies = np.arange(len(order.action))
    if not in_turns:
        return copies[:, None]
    single = order.kind[:, 1] < 0
    forward = single & (order.kind[:, 0] == _FORWARD)
    backward = single & np.isin(order.kind[:, 0], _BACKWARDS)
    second = np.append(False, backward[:-1] & forward[1:])
    first = copies[~second]
    has_second = np.append(second, False)[first + 1]
    return np.stack([first, np.where(has_second, first + 1, -1)], axis=1)


def _sequence(
    order: ActionOrder, order_index: int, groups: Int, last_unit: Sequence[int],
    num_deferring: int, units: dict[tuple[Member, ...], _Example],
) -> UnitSequence:  # fmt: skip
    """Units of one rank; those that are new are added to `units`.

    `last_unit`: copies of the last unit; the first `num_deferring` have deferred rows in it.
    """

    def unit_of(copies: Sequence[int], row_sets: Sequence[RowSet]) -> int:
        actions: list[int] = order.action[[*copies]].tolist()
        members = tuple(zip(actions, row_sets, strict=True))
        return units.setdefault(members, _Example(len(units), order_index, tuple(copies))).unit

    num_groups, width = groups.shape
    action = np.where(groups < 0, -1, order.action[groups])
    base = int(order.action.max(initial=0)) + 2
    powers = np.array([base**m for m in range(width)], dtype=np.int64)
    _, first, inverse = np.unique((action + 1) @ powers, return_index=True, return_inverse=True)
    distinct = np.zeros(len(first), np.int64)
    for k in np.argsort(first).tolist():
        copies = [copy for copy in groups[first[k]].tolist() if copy >= 0]
        distinct[k] = unit_of(copies, [RowSet.WITHOUT_DEFERRED] * len(copies))
    unit = distinct[inverse.ravel()]
    table = np.full((num_groups + bool(last_unit), max(width, len(last_unit))), -1)
    table[:num_groups, :width] = groups
    instance, member = np.zeros((2, len(order.action)), np.int64)
    for m in range(width):
        present = np.flatnonzero(groups[:, m] >= 0)
        instance[groups[present, m]], member[groups[present, m]] = present, m
    deferred_member = np.full(len(order.action), -1)
    if last_unit:
        num_full = len(last_unit) - num_deferring
        row_sets = [RowSet.DEFERRED] * num_deferring + [RowSet.ALL] * num_full
        unit = np.append(unit, unit_of(last_unit, row_sets))
        table[-1, : len(last_unit)] = last_unit
        deferred_member[last_unit[:num_deferring]] = np.arange(num_deferring)
        if num_full:
            instance[last_unit[-1]], member[last_unit[-1]] = num_groups, num_deferring
    return UnitSequence(unit, table, instance, member, deferred_member)


def _rows_of(
    actions: Actions, orders: Sequence[ActionOrder], deferred: Bool,
    units: dict[tuple[Member, ...], _Example],
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
    counts = np.diff(tasks.data_ptr)[row]
    waiter = np.repeat(np.arange(size), counts)
    offset = np.arange(len(waiter)) - np.repeat(np.cumsum(counts) - counts, counts)
    entry = tasks.data_ptr[row][waiter] + offset
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
