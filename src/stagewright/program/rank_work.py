"""A rank's step as distinct actions and their order: each row once, whatever the microbatches.

An *action* is what a rank does in one step of its schedule: a forward, a backward or half of one,
of one stage for one microbatch; two that overlap (`Overlap`) are one action of two parts. The last
action of a rank is the *optimizer action*: norms and updates, once per step. Copies of an action
differ in microbatch and stage only, so rows, durations and issue rules are needed once per action.

Explicit tables (a bundle, an import, joined programs) are one action with all their rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from stagewright.arrays import Bool, Int
from stagewright.program.memory_changes import MemoryChanges, Profiles, changed_bytes
from stagewright.program.tables import NO_VALUES, Tasks, Values

KINDS = "FBIWU"
"""Kinds of the parts of an action: those of the schedule, and `U`, which gathers weights ahead."""


@dataclass(frozen=True, slots=True, eq=False)
class Actions:
    """Distinct actions of a program: row `i` of action `a` is row `begin[a] + i` of `tasks`.

    Columns of `tasks` are those of an example copy: its stage, layers and names. `microbatch` is a
    distinct placeholder per part, -1 for rows once per step; `tag` numbers the messages of a part.
    Rows of an action are in program order.
    """

    tasks: Tasks
    begin: Int
    """[actions + 1]"""
    part: Int
    """[rows]: 0, or 1 for rows of the second of two actions that overlap."""
    carried: Bool
    """Loop-carried dependencies, by entry of `Tasks.data`.

    The source row is in another copy; the entry names an example of it in some action.
    """

    def rows(self, action: int) -> Int:
        """Rows of an action."""
        return np.arange(int(self.begin[action]), int(self.begin[action + 1]))

    def dep_entries(self, action: int) -> Int:
        """Entries of `Tasks.data` of the rows of an action."""
        pointer = self.tasks.data_ptr[self.begin]
        return np.arange(int(pointer[action]), int(pointer[action + 1]))


class ActionOrder(Protocol):
    """Copies of actions that one pipeline rank executes, in program order.

    The optimizer action is the last copy, if there is one; its microbatch and stage are -1.
    """

    action: Int
    """[copies]: index into `Actions`."""
    begin: Int
    """[copies + 1]: first row of each copy among the rank's tasks."""
    kind: Int
    """[copies, 2]: by part, index into `KINDS`; -1: no such part, or the optimizer action."""
    stage: Int
    """[copies, 2]: by part, the virtual stage."""
    microbatch: Int
    """[copies, 2]"""

    def sources(self, action: int, entries: Int) -> tuple[Int, Int]:
        """Copies and rows that dependencies of an action refer to, each [copies of it, entries].

        `entries` are entries of `Tasks.data` of rows of the action. Rows are those of
        `Actions.tasks`, in the action that the source copy is of.
        """
        ...

    def tags(self, action: int, rows: Int) -> Int:
        """Message numbers, equal on both ends, of rows of an action: [copies of it, rows]."""
        ...

    def cache_key(self) -> Sequence[object]:
        """Cache key of `sources` and `tags`, in addition to the columns above and `Actions`."""
        ...


def numbers_among_copies(order: ActionOrder, action: int, copies: Int) -> Int:
    """Index of each of `copies` among all copies of their action, as in `sources`."""
    return np.searchsorted(np.flatnonzero(order.action == action), copies).astype(np.int64)


class RankWork:
    """Work of a pipeline rank in a step, by action; rows are built when they are read.

    Subclasses set each attribute, or compute it when it is first read.
    """

    @cached_property
    def actions(self) -> Actions:
        """Distinct actions: of this rank, and of others where ranks share them."""
        raise NotImplementedError

    @cached_property
    def order(self) -> ActionOrder:
        """Copies of the actions."""
        raise NotImplementedError

    @cached_property
    def changes(self) -> MemoryChanges:
        """Bytes that the copies allocate and free."""
        raise NotImplementedError

    @cached_property
    def tasks(self) -> Tasks:
        """Rows of all copies, in program order."""
        raise NotImplementedError

    @cached_property
    def values(self) -> Values:
        """Values in memory, with the live range of each."""
        raise NotImplementedError

    @cached_property
    def memory(self) -> Mapping[str, int]:
        """Bytes at the peak in program order, by category, and their sum, `peak`."""
        return self.changes.at_peak()

    def with_tasks(self, tasks: Tasks) -> RankWork:
        """Replace the rows; values and memory stay."""
        return _TableWork(tasks, self)

    @staticmethod
    def from_tables(
        tasks: Tasks, memory: Mapping[str, int] | None = None, values: Values = NO_VALUES
    ) -> RankWork:
        """Work of explicit tables: one action. By default, memory follows from `values`."""
        return _TableWork(tasks, values, memory)


class _TableWork(RankWork):
    """Work of explicit tables."""

    def __init__(
        self, tasks: Tasks, source: Values | RankWork, memory: Mapping[str, int] | None = None
    ) -> None:
        """`source`: the values, or other work that has the same."""
        self._source = source
        if memory is not None:
            self.memory = memory
        self.tasks = tasks
        self.actions = table_actions(tasks, np.array([0, len(tasks)]))
        self.order = TableOrder(np.zeros(1, dtype=np.int64), self.actions)

    @cached_property
    def values(self) -> Values:
        return self._source.values if isinstance(self._source, RankWork) else self._source

    @cached_property
    def memory(self) -> Mapping[str, int]:
        source = self._source
        return source.memory if isinstance(source, RankWork) else self.changes.at_peak()

    @cached_property
    def changes(self) -> MemoryChanges:
        start, allocated, freed = changed_bytes(self.values, len(self.tasks))
        profiles = Profiles(allocated, freed, self.order.begin)
        return MemoryChanges(start, np.zeros(1, dtype=np.int64), profiles)


def table_actions(tasks: Tasks, begin: Int) -> Actions:
    """Actions of explicit tables: no dependency is loop-carried, none overlap."""
    return Actions(
        tasks, begin, np.zeros(len(tasks), np.int64), np.zeros(len(tasks.data), dtype=bool)
    )


class TableOrder:
    """Copies of the actions of explicit tables; each row depends on rows of its own copy."""

    def __init__(self, action: Int, actions: Actions) -> None:
        """`action`: [copies], index into `actions`."""
        self._tasks = actions.tasks
        self.action = action
        self.begin = np.concatenate([[0], np.cumsum(np.diff(actions.begin)[action])])
        self.kind, self.stage, self.microbatch = (np.full((len(action), 2), -1) for _ in range(3))

    def sources(self, action: int, entries: Int) -> tuple[Int, Int]:
        """Copies and rows that dependencies refer to: those of the same copy."""
        copies = np.flatnonzero(self.action == action)
        rows = np.tile(self._tasks.data[entries].astype(np.int64), (len(copies), 1))
        return np.broadcast_to(copies[:, None], rows.shape), rows

    def tags(self, action: int, rows: Int) -> Int:
        """Tags of the table, equal in all copies."""
        return np.tile(self._tasks.tag[rows].astype(np.int64), ((self.action == action).sum(), 1))

    def cache_key(self) -> Sequence[object]:
        """Empty: the table says everything."""
        return ()
