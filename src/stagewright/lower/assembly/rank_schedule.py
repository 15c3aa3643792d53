"""Actions of one pipeline rank as columns, as far as the schedule alone decides them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from stagewright.arrays import Bool, Int
from stagewright.program.rank_work import KINDS
from stagewright.schedule.actions import Action, Order, ScheduleStep, parts

FORWARD, BACKWARD, INPUT_HALF, WEIGHT_HALF, UNSHARD = range(len(KINDS))
"""Kinds of actions as indices into `KINDS`; `UNSHARD` gathers the weights of a stage, before all
other actions of its rank."""

PASS_PARTS = 3
"""Forward, input half and weight half of a backward."""
HAS_PASS_PART: Bool = np.array([
    [kind in kinds for kinds in ("UF", "BI", "BW")] for kind in KINDS
])  # fmt: skip
"""[kinds, pass parts]: True if an action of the kind includes the part."""

FIRST_OF_PASS_PART, LAST_OF_PASS_PART = 1, 2


@dataclass(frozen=True, eq=False)
class RankSchedule:
    """Actions of a rank in order, each with its step of the schedule."""

    kind: Int
    """[actions]: index into `KINDS`."""
    stage: Int
    microbatch: Int
    step: Int
    """Step of the schedule; two actions that overlap share one."""
    part: Int
    """1: the second of two that overlap."""

    @classmethod
    def from_steps(cls, steps: Sequence[ScheduleStep], *, unshards: bool) -> RankSchedule:
        """Build from the steps of a rank; if `unshards`, it gathers weights of its stages first."""
        if unshards:
            first = {a.stage: a for step in reversed(steps) for a in reversed(parts(step))}
            order = dict.fromkeys(a.stage for step in steps for a in parts(step))
            steps = [*(Action(s, KINDS[UNSHARD], first[s].microbatch) for s in order), *steps]
        index = {kind: i for i, kind in enumerate(KINDS)}
        rows = [
            (index[a.kind], a.stage, a.microbatch, s, part)
            for s, step in enumerate(steps)
            for part, a in enumerate(parts(step))
        ]
        return cls(*np.array(rows, dtype=np.int64).reshape(-1, 5).T.copy())

    def __len__(self) -> int:
        return len(self.kind)

    @cached_property
    def stages(self) -> Int:
        """Stages of the rank, ascending."""
        return np.unique(self.stage)

    @cached_property
    def local_stage(self) -> Int:
        """By action, index of its stage among those of the rank."""
        return np.searchsorted(self.stages, self.stage)

    @cached_property
    def microbatches(self) -> int:
        """Number of microbatches."""
        return 1 + int(self.microbatch.max(initial=0))

    @cached_property
    def steps(self) -> int:
        """Number of steps."""
        return 1 + int(self.step.max(initial=-1))

    @cached_property
    def action_of(self) -> Int:
        """Action by part of the pass, stage and microbatch; -1: none."""
        shape = PASS_PARTS, len(self.stages), self.microbatches
        action = np.full(shape, -1, dtype=np.int64)
        for pass_part in range(PASS_PARTS):
            actions = np.flatnonzero(HAS_PASS_PART[self.kind, pass_part])
            action[pass_part, self.local_stage[actions], self.microbatch[actions]] = actions
        return action

    @cached_property
    def once_action(self) -> Int:
        """Action with the rows once per step: [pass parts, stages]."""
        ends = FIRST_OF_PASS_PART, LAST_OF_PASS_PART, LAST_OF_PASS_PART
        return np.stack([self._end_of(pass_part, end) for pass_part, end in enumerate(ends)])

    def _end_of(self, pass_part: int, end: int) -> Int:
        """First or last action of each stage that includes a part of the pass; -1: none."""
        action = np.full(len(self.stages), -1, dtype=np.int64)
        actions = np.flatnonzero(HAS_PASS_PART[self.kind, pass_part])
        actions = actions[::-1] if end == FIRST_OF_PASS_PART else actions
        action[self.local_stage[actions]] = actions  # the last write counts
        return action

    @cached_property
    def end_flags(self) -> Int:
        """Flags of the first (1) and last (2) action of each stage: [pass parts, actions]."""
        flags = np.zeros((PASS_PARTS, len(self)), dtype=np.int64)
        for pass_part in range(PASS_PARTS):
            for end in (FIRST_OF_PASS_PART, LAST_OF_PASS_PART):
                action = self._end_of(pass_part, end)
                flags[pass_part, action[action >= 0]] += end
        return flags

    @cached_property
    def once_per_step(self) -> Bool:
        """Mask of actions with the rows once per step; input halves have none."""
        mask = np.zeros(len(self), dtype=bool)
        actions = self.once_action[[0, 2]]
        mask[actions[actions >= 0]] = True
        return mask


class _ById:
    """Order compared by identity: comparing two by value takes as long as reading them."""

    def __init__(self, order: Order) -> None:
        self.order = order

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and self.order is other.order

    def __hash__(self) -> int:
        return id(self.order)


def rank_schedules(order: Order, *, unshards: bool) -> tuple[RankSchedule, ...]:
    """Schedule of each rank; the same order gives the same arrays."""
    return _rank_schedules(_ById(order), unshards=unshards)


@lru_cache(maxsize=16)
def _rank_schedules(order: _ById, *, unshards: bool) -> tuple[RankSchedule, ...]:
    return tuple(RankSchedule.from_steps(steps, unshards=unshards) for steps in order.order)
