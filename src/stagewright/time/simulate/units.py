"""Units of issue: which copies of actions are issued without a break, and the rows of each kind.

Most units are one copy of an action. Several copies are one unit where their tasks take turns, and
the last unit of a rank also has the tasks that the rank's backward actions leave until then.
Distinct units have their rows once, whatever ranks and microbatches execute them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Bool, Int
from stagewright.program.columns import Tasks
from stagewright.program.rank_work import KINDS, ActionOrder, Actions, numbers_among_copies

WITHOUT_DEFERRED, DEFERRED, ALL = range(3)
"""Rows of a copy that are in a unit: those that are not deferred, those that are, or all."""
Member = tuple[int, int]
"""An action, and which of its rows."""

_FORWARD = KINDS.index("F")
_BACKWARDS = [KINDS.index(kind) for kind in "BIW"]


class UnitRows(NamedTuple):
    """Needs of rows that are not in the same unit."""

    at: Int
    """The rows that need them: indices into the rows of the units."""
    member: Int
    """Which copy of its unit the row is of."""
    entry: Int
    """The need, as an entry of `Tasks.data` that `ActionOrder.sources` finds; -1: the needed row is
    of the same copy."""
    row: Int
    """The needed row of `Actions.tasks`, or one that stands for it."""

    def select(self, chosen: Bool) -> UnitRows:
        """Only the chosen needs."""
        return UnitRows(*(column[chosen] for column in self))


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """The rows of distinct units, one after another; `row`, `unit` and `member` are by row."""

    tasks: Tasks
    row: Int
    """Row of `tasks`."""
    unit: Int
    member: Int
    """Which of its copies the row is of."""
    edges: tuple[Int, Int]
    """Data needs within units: waiters, and what they need."""
    carried: UnitRows
    actions: tuple[tuple[int, ...], ...] = ((0,),)
    """By unit, the actions of its copies."""
    index: Int = field(default_factory=lambda: np.zeros(0, np.int64))
    """Where the rows of an action are in a unit, from `first`; -1: not in it."""
    first: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    """By unit and member, where its action's rows begin in `index`."""


class UnitSequence(NamedTuple):
    """The units that one pipeline rank issues, in order."""

    unit: Int
    """[instances]"""
    copies: Int
    """[instances, members]: copies of the rank's `ActionOrder`; -1: no such member."""
    instance: Int
    """[copies]: the instance that a copy is issued in, but for its deferred rows."""
    member: Int
    """[copies]: which member of that instance it is."""
    deferred: Int
    """[copies]: which member of the last instance its deferred rows are; -1: it has none."""


def one_unit(tasks: Tasks) -> Units:
    """All rows of a rank as one unit."""
    size = len(tasks)
    zero, none = np.zeros(size, np.int64), np.zeros(0, np.int64)
    reads = tasks.reads
    return Units(
        tasks, np.arange(size), zero, zero, reads, UnitRows(none, none, none, none),
        index=np.arange(size), first={(0, 0): 0},
    )  # fmt: skip


def units_of(
    actions: Actions, orders: Sequence[ActionOrder], deferred: Bool, *, in_turns: bool
) -> tuple[Units, list[UnitSequence]]:
    """The distinct units of some ranks, and the order in which each rank issues them.

    `deferred` are rows that a rank leaves until its last unit. `in_turns`: a backward and the
    forward after it are one unit.
    """
    has_deferred = np.add.reduceat(
        np.append(deferred, False).astype(np.int64), actions.begin[:-1]
    ) * (np.diff(actions.begin) > 0) > 0  # fmt: skip
    numbers: dict[tuple[Member, ...], int] = {}
    examples: list[tuple[int, tuple[int, ...]]] = []
    sequences: list[UnitSequence] = []
    for nth, order in enumerate(orders):
        groups, last = _groups(order, in_turns), ()
        late = np.flatnonzero(has_deferred[order.action])
        ends = bool(len(order.action)) and int(order.kind[-1, 0]) < 0
        late = late[late != len(order.action) - 1] if ends else late
        if ends:
            groups = groups[:-1]
        if ends or len(late):
            last = (*late.tolist(), *([len(order.action) - 1] if ends else []))
        sequences.append(_sequence(order, groups, last, len(late), numbers, examples, nth))
    return _rows_of(actions, orders, deferred, [*numbers], examples), sequences


def _groups(order: ActionOrder, in_turns: bool) -> Int:
    """The copies of each unit but for deferred rows: [units, members], -1 where there are fewer."""
    copies = np.arange(len(order.action))
    if not in_turns:
        return copies[:, None]
    alone = order.kind[:, 1] < 0
    forward = alone & (order.kind[:, 0] == _FORWARD)
    backward = alone & np.isin(order.kind[:, 0], _BACKWARDS)
    second = np.append(False, backward[:-1] & forward[1:])
    first = copies[~second]
    joined = np.append(second, False)[first + 1]
    return np.stack([first, np.where(joined, first + 1, -1)], axis=1)


def _sequence(
    order: ActionOrder, groups: Int, last: tuple[int, ...], late: int,
    numbers: dict[tuple[Member, ...], int], examples: list[tuple[int, tuple[int, ...]]],
    nth: int,
) -> UnitSequence:  # fmt: skip
    """The units of one rank; new ones get the next number, and this rank as their example."""

    def number(key: tuple[Member, ...], copies: tuple[int, ...]) -> int:
        if key not in numbers:
            numbers[key] = len(numbers)
            examples.append((nth, copies))
        return numbers[key]

    action = np.where(groups < 0, -1, order.action[groups])
    base = int(order.action.max(initial=0)) + 2
    powers = np.array([base**m for m in range(groups.shape[1])], dtype=np.int64)
    code: Int = (action + 1) @ powers
    _, index, back = np.unique(code, return_index=True, return_inverse=True)
    by_code = np.zeros(len(index), np.int64)
    for k in np.argsort(index).tolist():
        copies = tuple(c for c in groups[index[k]].tolist() if c >= 0)
        by_code[k] = number(tuple((int(order.action[c]), WITHOUT_DEFERRED) for c in copies), copies)
    unit = by_code[back.ravel()]
    width = max(groups.shape[1], len(last))
    table = np.full((len(groups) + bool(last), width), -1)
    table[: len(groups), : groups.shape[1]] = groups
    instance = np.zeros(len(order.action), np.int64)
    member = np.zeros(len(order.action), np.int64)
    for m in range(groups.shape[1]):
        there = np.flatnonzero(groups[:, m] >= 0)
        instance[groups[there, m]], member[groups[there, m]] = there, m
    deferred = np.full(len(order.action), -1)
    if last:
        key = tuple(
            (int(order.action[c]), DEFERRED if m < late else ALL) for m, c in enumerate(last)
        )
        unit = np.append(unit, number(key, last))
        table[-1, : len(last)] = last
        deferred[[*last[:late]]] = np.arange(late)
        if len(last) > late:
            instance[last[-1]], member[last[-1]] = len(groups), late
    return UnitSequence(unit, table, instance, member, deferred)


def _rows_of(
    actions: Actions, orders: Sequence[ActionOrder], deferred: Bool,
    units: Sequence[tuple[Member, ...]], examples: Sequence[tuple[int, tuple[int, ...]]],
) -> Units:  # fmt: skip
    """The rows of distinct units; of each unit, `examples` have a rank and its copies."""
    tasks, begin = actions.tasks, actions.begin
    size = 0
    row: list[Int] = []
    unit: list[Int] = []
    member: list[Int] = []
    index: list[Int] = []
    first: dict[tuple[int, int], int] = {}
    ends = 0
    for u, members in enumerate(units):
        for m, (action, which) in enumerate(members):
            rows = actions.rows(action)
            chosen = rows if which == ALL else rows[deferred[rows] == (which == DEFERRED)]
            where = np.full(len(rows), -1)
            where[chosen - begin[action]] = size + np.arange(len(chosen))
            first[u, m] = ends
            ends += len(rows)
            index.append(where)
            row.append(chosen)
            unit.append(np.full(len(chosen), u))
            member.append(np.full(len(chosen), m))
            size += len(chosen)
    none = np.zeros(0, np.int64)
    rows, of_unit, of_member, at = (
        np.concatenate([none, *each]) for each in (row, unit, member, index)
    )
    # Every need of every row: its entry, and the row itself.
    counts = np.diff(tasks.data_ptr)[rows]
    waiter = np.repeat(np.arange(size), counts)
    offset = np.arange(len(waiter)) - np.repeat(np.cumsum(counts) - counts, counts)
    entry = tasks.data_ptr[rows][waiter] + offset
    needed = tasks.data[entry].astype(np.int64)
    taken = actions.carried[entry]
    start = np.array([first[key] for key in sorted(first)] or [0])
    nth_member = np.cumsum([0, *(len(members) for members in units)])
    action_of = np.array([action for members in units for action, _ in members] or [0])
    slot = nth_member[of_unit[waiter]] + of_member[waiter]
    local = np.full(len(waiter), -1)
    same = np.flatnonzero(~taken)
    local[same] = at[start[slot[same]] + needed[same] - begin[action_of[slot[same]]]]
    for u, members in enumerate(units):
        if len(members) == 1:
            continue
        nth, copies = examples[u]
        where = {copy: m for m, copy in enumerate(copies)}
        for m, (action, _) in enumerate(members):
            mine = np.flatnonzero(taken & (slot == nth_member[u] + m))
            if not len(mine):
                continue
            source, source_row = orders[nth].sources(action, entry[mine])
            here = int(numbers_among_copies(orders[nth], action, np.array([copies[m]]))[0])
            for k, (copy, r) in enumerate(
                zip(source[here].tolist(), source_row[here].tolist(), strict=True)
            ):
                if copy in where:
                    other = where[copy]
                    local[mine[k]] = at[first[u, other] + r - int(begin[members[other][0]])]
    inside = local >= 0
    edges = waiter[inside], local[inside]
    out = ~inside
    carried = UnitRows(
        waiter[out], of_member[waiter[out]], np.where(taken[out], entry[out], -1), needed[out]
    )
    return Units(
        tasks, rows, of_unit, of_member, edges, carried,
        tuple(tuple(action for action, _ in members) for members in units), at, first,
    )  # fmt: skip
