"""A rank's step as distinct actions and their order: each row once, whatever the microbatches.

An *action* is what a rank does in one step of its schedule: a forward, a backward or half of one,
of one stage for one microbatch; two that overlap (`Overlap`) are one action of two parts. The rows
after all actions (norms, optimizer) are the last action of a rank. Copies of an action differ in
microbatch and stage only, so that rows, durations and issue rules are needed once per action.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from stagewright.arrays import Bool, Int
from stagewright.program.columns import Tasks
from stagewright.program.memory import Deltas

KINDS = "FBIWU"
"""Kinds of the parts of an action: those of the schedule, and `U`, which gathers weights ahead."""


@dataclass(frozen=True, slots=True, eq=False)
class Actions:
    """The distinct actions of a program, their rows one after another: row `i` of action `a` is
    row `begin[a] + i` of `tasks`.

    Columns of `tasks` are those of an example copy: its stage, layers and names. `microbatch` is a
    number of its own for each part (0 for parts of a first forward), -1 for rows once per step;
    `tag` is the number among the messages of the part. Rows of an action are in program order.
    """

    tasks: Tasks
    begin: Int
    """[actions + 1]"""
    part: Int
    """[rows]: 0, or 1 for rows of the second of two actions that overlap."""
    carried: Bool
    """[needs], by entry of `tasks.data`: whether another copy has the needed row; the entry names
    a row that stands for it in some action."""


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

        `needs` are entries of `tasks.data` of rows of the action. Rows are those of `Actions.tasks`,
        in the action that the source copy is of.
        """
        ...

    def tags(self, action: int, rows: Int) -> Int:
        """Message numbers, equal on both ends, of rows of all copies of an action: [copies of it,
        rows]."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class MemoryChanges:
    """Bytes that the copies of a rank's actions allocate and free."""

    start: Int
    """[categories]: held before the first row."""
    kind: Int
    """[copies]: index into `profiles`."""
    profiles: tuple[Deltas, ...]
    """Allocated before and freed after each row of an action; `start` of each is 0."""
