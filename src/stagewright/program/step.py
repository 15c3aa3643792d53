"""A rank's step as distinct actions and their order: each row once, whatever the microbatches.

An *action* is what a rank does in one step of its schedule: a forward, a backward or half of one,
of one stage for one microbatch; two that overlap (`Overlap`) are one action of two parts. The rows
after all actions (norms, optimizer) are the last action of a rank. Copies of an action differ in
microbatch and stage only, so that rows, durations and issue rules are needed once per action.

Tables that are given (a bundle, an import, joined programs) have one action with all their rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Bool, Int
from stagewright.program.tables import CATEGORIES, NO_VALUES, Tasks, Values

KINDS = "FBIWU"
"""Kinds of the parts of an action: those of the schedule, and `U`, which gathers weights ahead."""


class Deltas(NamedTuple):
    """Changes of the bytes held by category, in the order of `CATEGORIES`.

    While row i runs, `start + allocated[:, : i + 1].sum(1) - freed[:, :i].sum(1)` bytes are held.
    With the times at which rows start and end, these changes give memory over time.
    """

    start: Int  # [categories]
    allocated: Int  # [categories, rows], before the row
    freed: Int  # [categories, rows], after the row


@dataclass(frozen=True, slots=True, eq=False)
class Actions:
    """The distinct actions of a program, their rows one after another: row `i` of action `a` is
    row `begin[a] + i` of `tasks`.

    Columns of `tasks` are those of an example copy: its stage, layers and names. `microbatch` is a
    number of its own for each part, -1 for rows once per step; `tag` is the number among the
    messages of the part. Rows of an action are in program order.
    """

    tasks: Tasks
    begin: Int
    """[actions + 1]"""
    part: Int
    """[rows]: 0, or 1 for rows of the second of two actions that overlap."""
    carried: Bool
    """[needs], by entry of `Tasks.data`: whether another copy has the needed row; the entry names
    a row that stands for it in some action."""

    def rows(self, action: int) -> Int:
        """The rows of an action."""
        return np.arange(int(self.begin[action]), int(self.begin[action + 1]))

    def needs(self, action: int) -> Int:
        """The entries of `Tasks.data` of the rows of an action."""
        pointer = self.tasks.data_ptr[self.begin]
        return np.arange(int(pointer[action]), int(pointer[action + 1]))


class ActionOrder(Protocol):
    """The copies of actions that one pipeline rank executes, in program order.

    The last copy is the rows after all actions, if there are any (its microbatch and stage are -1).
    """

    action: Int
    """[copies]: index into `Actions`."""
    begin: Int
    """[copies + 1]: where the rows of each begin among the rank's tasks."""
    kind: Int
    """[copies, 2]: by part, index into `KINDS`; -1: no such part, or after all actions."""
    stage: Int
    """[copies, 2]: by part, the virtual stage."""
    microbatch: Int
    """[copies, 2]"""

    def sources(self, action: int, needs: Int) -> tuple[Int, Int]:
        """Where carried needs of an action are met: copies and rows, each [copies of it, needs].

        `needs` are entries of `Tasks.data` of rows of the action. Rows are those of
        `Actions.tasks`, in the action that the source copy is of.
        """
        ...

    def tags(self, action: int, rows: Int) -> Int:
        """Message numbers, equal on both ends, of rows of all copies of an action: [copies of it,
        rows]."""
        ...

    def structure(self) -> Sequence[object]:
        """Arrays and objects from which `sources` and `tags` follow, besides the columns above and
        `Actions`: orders in which these are equal, or the same, give equal answers."""
        ...


def numbers_among_copies(order: ActionOrder, action: int, copies: Int) -> Int:
    """Number of each of some copies among all copies of their action, as `sources` has them."""
    return np.searchsorted(np.flatnonzero(order.action == action), copies).astype(np.int64)


class Profiles(tuple[Deltas, ...]):
    """Changes of memory by row of actions, each from nothing."""

    net: Int
    """Bytes that are held longer: [profiles, categories]."""
    most: Int
    """The most bytes held while a row runs, -1 of profiles without rows: [profiles]."""

    @classmethod
    def of(cls, allocated: Int, freed: Int, begin: Int) -> Profiles:
        """Profiles whose rows stand one after the other: `begin` are the first of each, and the
        end."""
        start = np.zeros(len(allocated), dtype=np.int64)
        ends = list(pairwise(begin.tolist()))
        profiles = cls(Deltas(start, allocated[:, a:b], freed[:, a:b]) for a, b in ends)
        held = np.zeros((len(allocated), allocated.shape[1] + 1), dtype=np.int64)
        np.cumsum(allocated - freed, axis=1, out=held[:, 1:])
        profiles.net = (held[:, begin[1:]] - held[:, begin[:-1]]).T
        total = held.sum(axis=0)
        while_running = total[1:] + freed.sum(axis=0)
        most = np.full(len(profiles), -1, dtype=np.int64)
        some = np.flatnonzero(np.diff(begin))
        if len(some):
            at = begin[some]
            most[some] = np.maximum.reduceat(while_running, at) - total[at]
        profiles.most = most
        return profiles

    def at_most(self, profile: int) -> Int:
        """Bytes by category while the first row runs that has the most."""
        start, allocated, freed = self[profile]
        held = (allocated - freed).cumsum(axis=1) + freed
        return held[:, int(np.argmax(held.sum(axis=0)))] if held.size else start


@dataclass(frozen=True, slots=True, eq=False)
class MemoryChanges:
    """Bytes that the copies of a rank's actions allocate and free."""

    start: Int
    """[categories]: held before the first row."""
    kind: Int
    """[copies]: index into `profiles`."""
    profiles: Profiles
    """Allocated before and freed after each row of an action; `start` of each is 0."""

    def at_peak(self) -> dict[str, int]:
        """Bytes by category at the first row with the most in program order; their sum, `peak`."""
        net = self.profiles.net[self.kind]
        before = self.start + net.cumsum(axis=0) - net
        at = self.start
        if len(before):
            copy = int(np.argmax(before.sum(axis=1) + self.profiles.most[self.kind]))
            at = before[copy] + self.profiles.at_most(int(self.kind[copy]))
        by = {name: int(size) for name, size in zip(CATEGORIES, at, strict=True)}
        return by | {"peak": sum(by.values())}


class RankWork(ABC):
    """What a pipeline rank does in a step, by action; row by row where that is asked for."""

    @cached_property
    @abstractmethod
    def actions(self) -> Actions:
        """The distinct actions: of this rank, and of others where ranks share them."""

    @cached_property
    @abstractmethod
    def order(self) -> ActionOrder:
        """The copies of the actions."""

    @cached_property
    @abstractmethod
    def changes(self) -> MemoryChanges:
        """What the copies allocate and free."""

    @cached_property
    @abstractmethod
    def tasks(self) -> Tasks:
        """The rows of all copies, in program order."""

    @cached_property
    @abstractmethod
    def values(self) -> Values:
        """The values in memory, with the live range of each."""

    @cached_property
    def memory(self) -> Mapping[str, int]:
        """Bytes at the peak in program order, by category, and their sum, `peak`."""
        return self.changes.at_peak()

    def with_tasks(self, tasks: Tasks) -> RankWork:
        """Other rows, with values and memory as they are."""
        return _TableWork(tasks, self)

    @staticmethod
    def given(
        tasks: Tasks, memory: Mapping[str, int] | None = None, values: Values = NO_VALUES
    ) -> RankWork:
        """The work of explicit tables: one action. Memory follows from `values` if not given."""
        return _TableWork(tasks, values, memory)


class _TableWork(RankWork):
    """The work of explicit tables."""

    def __init__(
        self, tasks: Tasks, held: Values | RankWork, memory: Mapping[str, int] | None = None
    ) -> None:
        """`held`: the values, or other work that has the same."""
        self._tasks, self._held, self._memory = tasks, held, memory

    @cached_property
    def tasks(self) -> Tasks:
        return self._tasks

    @cached_property
    def values(self) -> Values:
        return self._held.values if isinstance(self._held, RankWork) else self._held

    @cached_property
    def memory(self) -> Mapping[str, int]:
        if isinstance(self._held, RankWork):
            return self._held.memory
        return self.changes.at_peak() if self._memory is None else self._memory

    @cached_property
    def actions(self) -> Actions:
        size = len(self.tasks)
        no_need = np.zeros(len(self.tasks.data), dtype=bool)
        return Actions(self.tasks, np.array([0, size]), np.zeros(size, dtype=np.int64), no_need)

    @cached_property
    def order(self) -> ActionOrder:
        return _OneCopy(self.tasks)

    @cached_property
    def changes(self) -> MemoryChanges:
        start, allocated, freed = changed_bytes(self.values, len(self.tasks))
        profiles = Profiles.of(allocated, freed, np.array([0, len(self.tasks)]))
        return MemoryChanges(start, np.zeros(1, dtype=np.int64), profiles)


class _OneCopy:
    """The order of one action that has all rows of a table."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self.action = np.zeros(1, dtype=np.int64)
        self.begin = np.array([0, len(tasks)])
        self.kind, self.stage, self.microbatch = (np.full((1, 2), -1) for _ in range(3))

    def sources(self, action: int, needs: Int) -> tuple[Int, Int]:
        """No needs are carried."""
        row = self._tasks.data[needs].astype(np.int64)[None]
        return np.zeros_like(row), row

    def tags(self, action: int, rows: Int) -> Int:
        """Those of the table."""
        return self._tasks.tag[rows].astype(np.int64)[None]

    def structure(self) -> Sequence[object]:
        """Nothing besides the table."""
        return ()


def changed_bytes(values: Values, rows: int, freed: Int | int = 1) -> Deltas:
    """The bytes that each row of a table with these values allocates and frees; `freed`: how many
    values like each one end with it."""
    category, size = values.category[values.value].astype(np.int64), values.size[values.value]

    def per_row(row: NDArray[np.integer[Any]], size: Int, chosen: Bool) -> Int:
        cell = (category * rows + row)[chosen]
        return summed(cell, size[chosen], len(CATEGORIES) * rows).reshape(len(CATEGORIES), rows)

    before = values.first < 0
    start = summed(category[before], size[before], len(CATEGORIES))
    allocated = per_row(values.first, size, ~before)
    return Deltas(start, allocated, per_row(values.last, size * freed, values.last < rows))


def summed(at: NDArray[np.integer[Any]], size: Int, length: int) -> Int:
    """The sum of sizes at each of so many places."""
    # Sums of bytes of one rank are exact in double precision: they are far below 2**53.
    return np.bincount(at, weights=size, minlength=length).astype(np.int64)
