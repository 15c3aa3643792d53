"""The actions of an order in columns, and the steps of all ranks in an order of execution.

>>> from stagewright.schedule.schedules import make
>>> of = OrderColumns.of(make("1f1b", 2, 2))
>>> of.rank.tolist(), of.stage.tolist(), "".join(KINDS[kind] for kind in of.kind)
([0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, 1, 1], 'FFBBFBFB')
>>> of.once_per_step.tolist()
[True, False, False, True, True, False, False, True]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Self

import numpy as np

from stagewright.arrays import Bool, Int
from stagewright.schedule.actions import Order, flat, parts

KINDS = "FBIW"
FORWARD, BACKWARD, INPUT_HALF, WEIGHT_HALF = range(4)
"""Kinds of actions by their place in `KINDS`; see `schedule.actions.Action`."""


class Turns(NamedTuple):
    """The steps of all ranks, each behind what it needs."""

    steps: Int
    """Their numbers (`OrderColumns.step`): [steps]."""
    source: Int
    """Which action on another rank hands on what each action needs; -1: none: [actions]."""


@dataclass(frozen=True, slots=True, eq=False)
class OrderColumns:
    """The actions of an order [actions], those of rank 0 first, and of a rank in its order."""

    rank: Int
    stage: Int
    kind: Int
    """Its place in `KINDS`."""
    microbatch: Int
    step: Int
    """The number of its step among those of all ranks: two that overlap have the same."""

    @classmethod
    @lru_cache(maxsize=8)  # what follows from an order is asked for by one after another
    def of(cls, order: Order) -> Self:
        """The columns of an order."""
        every = [*map(flat, order)]
        stage, kind, microbatch = zip(*(a for actions in every for a in actions), strict=True)
        rank = np.repeat(np.arange(len(order)), [len(actions) for actions in every])
        sizes = [len(parts(step)) for steps in order for step in steps]
        step = np.repeat(np.arange(len(sizes)), sizes)
        return cls(
            rank, np.array(stage), np.array([KINDS.index(k) for k in kind]), np.array(microbatch),
            step,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def stages(self) -> int:
        """How many virtual stages there are: one more than the largest number."""
        return int(self.stage.max()) + 1

    @property
    def begins(self) -> Int:
        """The first action of each step, and the number of all actions: [steps + 1]."""
        every: Int = np.arange(len(np.unique(self.step)) + 1)
        return np.searchsorted(self.step, every)

    @property
    def place(self) -> Int:
        """Equal numbers for actions of one stage on one rank: [actions]."""
        return self.rank * self.stages + self.stage

    @property
    def first_forward(self) -> Bool:
        """Whether an action is the first forward of its stage on its rank: [actions]."""
        return self._first(self.kind == FORWARD, np.arange(len(self)))

    @property
    def last_backward(self) -> Bool:
        """Whether an action is the last on its rank of those with which backwards of its stage
        end: [actions]."""
        ends = (self.kind == BACKWARD) | (self.kind == WEIGHT_HALF)
        return self._first(ends, np.arange(len(self))[::-1])

    @property
    def once_per_step(self) -> Bool:
        """Whether an action does what happens once per step: [actions]."""
        return self.first_forward | self.last_backward

    def _first(self, some: Bool, order: Int) -> Bool:
        """Of some actions, which is the first of its place in an order of all."""
        mine = order[some[order]]
        _, first = np.unique(self.place[mine], return_index=True)
        found = np.zeros(len(self), dtype=bool)
        found[mine[first]] = True
        return found

    def execution(self) -> Turns:
        """Steps in an order in which they can be done; a ValueError where they cannot be."""
        stages, width, count = self.stages, int(self.microbatch.max()) + 1, len(self)
        cell = self.stage * width + self.microbatch
        # Which action does what in a cell; what needs nothing needs one that is always done, and
        # what nobody does never is.
        nothing, nowhere = np.full(count, count), np.full(count, -1)
        at = [np.full(stages * width, count + 1) for _ in KINDS]
        for kind, numbers in enumerate(at):
            mine = self.kind == kind
            numbers[cell[mine]] = np.flatnonzero(mine)
        if sum(int((numbers < count).sum()) for numbers in at) < count:
            raise ValueError("several ranks do the same action")
        behind = self.kind != FORWARD
        own = np.where(self.kind == WEIGHT_HALF, at[INPUT_HALF][cell], at[FORWARD][cell])
        # The gradient that a backward waits for comes from a whole one, or from a half.
        gradient = np.minimum(at[INPUT_HALF], at[BACKWARD])
        after = gradient[np.minimum(cell + width, stages * width - 1)]
        other = np.where(behind, after, at[FORWARD][np.maximum(cell - width, 0)])
        alone = self.stage == np.where(behind, stages - 1, 0)
        alone |= self.kind == WEIGHT_HALF
        own, other = np.where(behind, own, nothing), np.where(alone, nothing, other)
        steps = self._in_turn(own.tolist(), other.tolist())
        away = (other < count) & (self.rank[np.minimum(other, count - 1)] != self.rank)
        return Turns(steps, np.where(away, other, nowhere))

    def _in_turn(self, own: list[int], other: list[int]) -> Int:
        """The steps of all ranks, given what actions need on their stage and of another one."""
        begins: list[int] = self.begins.tolist()
        ranks: Int = np.arange(len(np.unique(self.rank)) + 1)
        first: Int = np.searchsorted(self.rank[self.begins[:-1]], ranks)
        reached: list[int] = first[:-1].tolist()
        ends: list[int] = first[1:].tolist()
        done = bytearray(len(self) + 2)
        done[-2] = True
        found: list[int] = []
        waiting: dict[int, list[int]] = {}
        runnable = [*range(len(reached))]
        while runnable:
            rank = runnable.pop()
            step = reached[rank]
            while step < ends[rank]:
                actions = range(begins[step], begins[step + 1])
                for action in actions:
                    need = other[action] if done[own[action]] else own[action]
                    if not done[need]:
                        waiting.setdefault(need, []).append(rank)
                        break
                else:
                    found.append(step)
                    step += 1
                    for action in actions:
                        done[action] = True
                        if action in waiting:
                            runnable += waiting.pop(action)
                    continue
                break
            reached[rank] = step
        if waiting:
            raise ValueError("the order cannot complete")
        return np.array(found)
