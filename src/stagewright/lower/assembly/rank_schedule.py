"""The actions of one pipeline rank as arrays, as far as its schedule alone decides them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from stagewright.arrays import Bool, Int
from stagewright.program.step import KINDS
from stagewright.schedule.actions import Action, Order, ScheduleStep, parts

FORWARD, BACKWARD, INPUT_HALF, WEIGHT_HALF, UNSHARD = range(len(KINDS))
"""Kinds of actions by their place in `KINDS`; `UNSHARD` gathers the weights of a stage, before all
other actions of its rank."""

HALVES = 3
"""A forward, and each half of a backward."""
HAS_HALF: Bool = np.array([
    [kind in kinds for kinds in ("UF", "BI", "BW")] for kind in KINDS
])  # fmt: skip
"""[kinds, halves]: whether an action of a kind holds a half."""

FIRST_OF_HALF, LAST_OF_HALF = 1, 2


@dataclass(frozen=True, eq=False)
class RankSchedule:
    """The actions of a rank in order, each with its place in the steps of the schedule."""

    kind: Int
    """Index into `KINDS`: [actions]."""
    stage: Int
    microbatch: Int
    step: Int
    """The step of the schedule that each is of; two that overlap have one."""
    part: Int
    """1: the second of two that overlap."""

    @classmethod
    def of(cls, steps: Sequence[ScheduleStep], *, unshards: bool) -> RankSchedule:
        """From the steps of a rank, which gathers the weights of its stages first if `unshards`."""
        if unshards:
            first = {a.stage: a for step in reversed(steps) for a in reversed(parts(step))}
            order = dict.fromkeys(a.stage for step in steps for a in parts(step))
            steps = [*(Action(s, KINDS[UNSHARD], first[s].microbatch) for s in order), *steps]
        number = {kind: n for n, kind in enumerate(KINDS)}
        rows = [
            (number[a.kind], a.stage, a.microbatch, n, nth)
            for n, step in enumerate(steps)
            for nth, a in enumerate(parts(step))
        ]
        return cls(*np.array(rows, dtype=np.int64).reshape(-1, 5).T.copy())

    def __len__(self) -> int:
        return len(self.kind)

    @cached_property
    def stages(self) -> Int:
        """The stages of the rank, ascending."""
        return np.unique(self.stage)

    @cached_property
    def place(self) -> Int:
        """Of each action, where its stage is among those of the rank."""
        return np.searchsorted(self.stages, self.stage)

    @cached_property
    def microbatches(self) -> int:
        """One more than the largest microbatch."""
        return 1 + int(self.microbatch.max(initial=0))

    @cached_property
    def steps(self) -> int:
        """Number of steps."""
        return 1 + int(self.step.max(initial=-1))

    @cached_property
    def by_microbatch(self) -> Int:
        """The action that does a half of a stage for a microbatch, -1 for none: [halves, stages,
        microbatches]."""
        shape = HALVES, len(self.stages), self.microbatches
        action = np.full(shape, -1, dtype=np.int64)
        for half in range(HALVES):
            mine = np.flatnonzero(HAS_HALF[self.kind, half])
            action[half, self.place[mine], self.microbatch[mine]] = mine
        return action

    @cached_property
    def once(self) -> Int:
        """The action that does what happens once per step, -1 for none: the first forward, the last
        of each half of a backward: [halves, stages]."""
        return np.stack([self._end_of(half, FIRST_OF_HALF if half == 0 else LAST_OF_HALF)
                         for half in range(HALVES)])  # fmt: skip

    def _end_of(self, half: int, end: int) -> Int:
        """The first or the last action of each stage that holds a half."""
        action = np.full(len(self.stages), -1, dtype=np.int64)
        mine = np.flatnonzero(HAS_HALF[self.kind, half])
        mine = mine[::-1] if end == FIRST_OF_HALF else mine
        action[self.place[mine]] = mine  # the last write counts
        return action

    @cached_property
    def ends(self) -> Int:
        """Whether each action is the first (1) or the last (2) of a half of its stage, or both:
        [halves, actions]."""
        flags = np.zeros((HALVES, len(self)), dtype=np.int64)
        for half in range(HALVES):
            for end in (FIRST_OF_HALF, LAST_OF_HALF):
                action = self._end_of(half, end)
                flags[half, action[action >= 0]] += end
        return flags

    @cached_property
    def complete(self) -> Bool:
        """Which actions do what happens once per step; the first half of a backward never does."""
        mask = np.zeros(len(self), dtype=bool)
        ones = self.once[[0, 2]]
        mask[ones[ones >= 0]] = True
        return mask


class _Same:
    """An order that is equal to itself only: to compare two takes as long as to read them."""

    def __init__(self, order: Order) -> None:
        self.order = order

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.order is other.order

    def __hash__(self) -> int:
        return id(self.order)


def rank_schedules(order: Order, *, unshards: bool) -> tuple[RankSchedule, ...]:
    """The schedule of each rank; an order that was asked for before has the same arrays."""
    return _rank_schedules(_Same(order), unshards=unshards)


@lru_cache(maxsize=16)
def _rank_schedules(order: _Same, *, unshards: bool) -> tuple[RankSchedule, ...]:
    return tuple(RankSchedule.of(steps, unshards=unshards) for steps in order.order)
