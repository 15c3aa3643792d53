"""Steps of several ranks that are played at once: each needs only what was done before them.

A wave has at most one step of each rank. What the actions of a step hand on to other ranks lies in
slots, each of which is used again when its receiver has taken what lies there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from stagewright.arrays import Int
from stagewright.explore.pipeline.ordered_steps import OrderedSteps, StepInTurn


@dataclass(frozen=True, slots=True, eq=False)
class Waves:
    """Steps of an order by wave, and by rank within a wave."""

    kinds: Sequence[int]
    """The distinct kinds of these steps: numbers of `OrderedSteps.kinds`."""
    wave: Int
    """[steps], as all that follow."""
    rank: Int
    what: Int
    """A number of `OrderedSteps.kinds`."""
    source: Int
    """The slots of what the actions need, -1 where no other rank hands it on: [steps, 2]."""
    way: Int
    """On which of `OrderedSteps.ways` that comes: [steps, 2]."""
    target: Int
    """The slots of what the actions hand on: [steps, 2]."""
    slots: int
    before: Mapping[int, int]
    """By action that was done before these steps, the slot of what it hands on to one of them."""
    behind: Mapping[int, int]
    """By action of these steps, the slot of what it hands on to one behind them."""

    def __len__(self) -> int:
        """The number of steps."""
        return len(self.wave)

    @classmethod
    def of(cls, of: OrderedSteps, steps: Sequence[StepInTurn]) -> Self:
        """The waves of some steps of an order, each of which is behind what it needs."""
        wave_of = _waves(of, steps)
        order = sorted(range(len(steps)), key=lambda nth: (wave_of[nth], steps[nth].rank))
        slots = _Slots()
        made = {action for step in steps for action in range(step.begin, step.end)}
        needed = [of.source[action] for action in made if of.source[action] >= 0]
        before = {action: slots.taken() for action in sorted({*needed} - made)}
        at = dict(before)
        source, way, target = np.full((3, len(steps), 2), -1)
        now = 0
        for row, nth in enumerate(order):
            step = steps[nth]
            if wave_of[nth] > now:  # others of the same wave may still need what it has taken
                now = wave_of[nth]
                slots.hand_back()
            for column, action in enumerate(range(step.begin, step.end)):
                if of.source[action] >= 0:  # what an action hands on, one other takes
                    source[row, column] = slots.done_with(at.pop(of.source[action]))
                    way[row, column] = of.way[action]
                if of.wanted[action]:
                    target[row, column] = at[action] = slots.taken()
        in_order = [steps[nth] for nth in order]
        return cls(
            (*dict.fromkeys(step.what for step in in_order),),
            np.array([wave_of[nth] for nth in order], dtype=np.int64),
            np.array([step.rank for step in in_order], dtype=np.int64),
            np.array([step.what for step in in_order], dtype=np.int64),
            source, way, target, slots.count, before, at,
        )  # fmt: skip


def _waves(of: OrderedSteps, steps: Sequence[StepInTurn]) -> list[int]:
    """The wave of each step: the first one behind all that it needs."""
    on_rank: dict[int, int] = {}
    of_action: dict[int, int] = {}
    found: list[int] = []
    for rank, _, _, begin, end in steps:
        needs = [of_action.get(of.source[action], 0) for action in range(begin, end)]
        wave = 1 + max(on_rank.get(rank, 0), *needs)
        on_rank[rank] = wave
        for action in range(begin, end):
            of_action[action] = wave
        found.append(wave)
    return found


class _Slots:
    """Numbers that are given out, and again once they are handed back."""

    def __init__(self) -> None:
        self.count = 0
        self._free: list[int] = []
        self._done: list[int] = []

    def taken(self) -> int:
        """One that nobody has."""
        if self._free:
            return self._free.pop()
        self.count += 1
        return self.count - 1

    def done_with(self, slot: int) -> int:
        """Note that a slot may be handed back, and return it."""
        self._done.append(slot)
        return slot

    def hand_back(self) -> None:
        """Make all that were noted free."""
        self._free += self._done
        self._done.clear()
