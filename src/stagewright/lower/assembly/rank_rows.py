"""The rows of one pipeline rank: which action begins where, and which rows of its stage it has.

Actions of one *form* differ in their microbatch only: what is known of a form's rows is known of
all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stagewright.arrays import Int
from stagewright.lower.assembly.lifetimes import Touch
from stagewright.lower.assembly.segments import BACKWARD, FORWARD, LAST, NEXT, STEP, Segment
from stagewright.lower.assembly.stages import Stage
from stagewright.schedule.actions import ScheduleStep, parts

HALVES = ("F", "BI", "BW")
"""The kinds of action that hold a forward, and each half of a backward."""


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """What actions of one stage and kind have in common."""

    segment: Segment
    keep: Int
    """The rows of the segment that they have."""
    offset: Int
    """Of each row that they have, the distance from where the step of the schedule begins."""

    def offsets(self) -> Int:
        """Row of the segment -> offset, -1 for rows that the actions do not have."""
        result = np.full(len(self.segment), -1, dtype=np.int64)
        result[self.keep] = self.offset
        return result


class RankRows:
    """Maps places in the segments of a rank's stages to row numbers of the rank's program."""

    def __init__(
        self, stages: Sequence[Stage], steps: Sequence[ScheduleStep], after: Segment
    ) -> None:
        """The actions of the schedule's steps in order; the rows `after` all actions."""
        self.stages: Mapping[int, Stage] = {s.stage: s for s in stages}
        self.after = after
        self.actions = [a for step in steps for a in parts(step)]
        self.once = self._once_per_step()
        """Stage and half -> the action that does what happens once per step: the first forward, the
        last of each half of a backward."""
        self._complete = {i for (_, half), i in self.once.items() if half != 1}
        self.forms: list[Form] = []
        self.begin, self.form_of, self.end = self._lay_out(steps)
        """Per action, where its step begins and its form; and where all actions have ended."""
        self.total = self.end + len(after)
        self._offsets = [form.offsets() for form in self.forms]
        self.by_microbatch = self._by_microbatch()
        """Stage and half -> the action of each microbatch, -1 for none."""

    def _once_per_step(self) -> dict[tuple[int, int], int]:
        once: dict[tuple[int, int], int] = {}
        for i, a in enumerate(self.actions):
            for half, kinds in enumerate(HALVES):
                if a.kind in kinds and (half or (a.stage, half) not in once):
                    once[a.stage, half] = i
        return once

    def _lay_out(self, steps: Sequence[ScheduleStep]) -> tuple[Int, Int, int]:
        known: dict[tuple[tuple[int, str, bool], ...], list[int]] = {}
        begin: list[int] = []
        form_of: list[int] = []
        now = 0
        for step in steps:
            first = len(begin)
            key = tuple(
                (a.stage, a.kind, first + n in self._complete) for n, a in enumerate(parts(step))
            )
            if key not in known:
                made = _take_turns([self._rows_of(*action) for action in key])
                known[key] = list(range(len(self.forms), len(self.forms) + len(made)))
                self.forms += made
            form_of += known[key]
            begin += [now] * len(key)
            now += sum(len(self.forms[f].keep) for f in known[key])
        return np.array(begin, dtype=np.int64), np.array(form_of, dtype=np.int64), now

    def _rows_of(self, stage: int, kind: str, complete: bool) -> tuple[Segment, Int]:
        """The segment of an action, and which of its rows the action has."""
        segment = self.stages[stage].forward if kind == "F" else self.stages[stage].backward
        in_half = {"I": ~segment.weight, "W": segment.weight}.get(
            kind, np.ones(len(segment), dtype=bool)
        )
        return segment, np.flatnonzero(in_half & (complete | ~segment.once))

    def _by_microbatch(self) -> dict[tuple[int, int], Int]:
        microbatches = 1 + max((a.microbatch for a in self.actions), default=0)
        found = {
            (s, half): np.full(microbatches, -1) for s in self.stages for half in range(len(HALVES))
        }
        for i, a in enumerate(self.actions):
            for half, kinds in enumerate(HALVES):
                if a.kind in kinds:
                    found[a.stage, half][a.microbatch] = i
        return found

    def half(self, touch: Touch) -> int:
        """Which half of its stage's actions a touch is in, as an index of `HALVES`."""
        whose, stage, place = touch
        backward = whose in (BACKWARD, LAST, NEXT)
        return 1 + int(self.stages[stage].backward.weight[place]) if backward else 0

    def is_once(self, touch: Touch) -> bool:
        """Whether the row of a touch is there once per step."""
        whose, stage, place = touch
        if whose == STEP:
            return True
        owner = self.stages[stage]
        return bool((owner.forward if whose == FORWARD else owner.backward).once[place])

    def rows(self, actions: Int, places: Int, absent: int | None = None) -> Int:
        """The row numbers of some places in some actions; `absent` where an action lacks one."""
        forms = self.form_of[actions]
        offset = np.empty((len(actions), len(places)), dtype=np.int64)
        for f in np.unique(forms):
            offset[forms == f] = self._offsets[f][places]
        rows = self.begin[actions][:, None] + offset
        return rows if absent is None else np.where(offset < 0, absent, rows)


def _take_turns(actions: Sequence[tuple[Segment, Int]]) -> list[Form]:
    """The forms of the actions of one step: of one alone, or of two that overlap.

    Actions that overlap take turns: each goes on until its next kernel needs what the action has
    communicated.
    """
    turn = [np.cumsum(s.waits[keep]) * len(actions) + n for n, (s, keep) in enumerate(actions)]
    order = np.argsort(np.concatenate(turn), kind="stable")
    offset = np.empty_like(order)
    offset[order] = np.arange(len(order))
    ends = np.cumsum([len(keep) for _, keep in actions])
    return [
        Form(segment, keep, own)
        for (segment, keep), own in zip(actions, np.split(offset, ends[:-1]), strict=True)
    ]
