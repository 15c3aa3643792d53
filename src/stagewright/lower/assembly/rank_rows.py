"""The rows of one pipeline rank: which action begins where, and which rows of its stage it has.

Actions of one *form* differ in their microbatch only: what is known of a form's rows is known of
all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Bool, Int
from stagewright.lower.assembly.habit import UnitWeights
from stagewright.lower.assembly.segments import FIRST, FORWARD, STEP, Segment
from stagewright.lower.assembly.stages import Stage
from stagewright.schedule.actions import Action, ScheduleStep, parts

UNSHARD = "U"
"""The kind of an action that gathers the weights of a stage, before all others of its rank."""
HALVES = ("UF", "BI", "BW")
"""The kinds of action that hold a forward, and each half of a backward."""


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """What actions of one stage and kind have in common."""

    segment: Segment
    keep: Int
    """The rows of the segment that they have."""
    offset: Int
    """Of each row that they have, the distance from where the step of the schedule begins."""
    ahead: bool = False
    """Whether the actions gather weights before all microbatches."""

    def offsets(self) -> Int:
        """Row of the segment -> offset, -1 for rows that the actions do not have."""
        result = np.full(len(self.segment), -1, dtype=np.int64)
        result[self.keep] = self.offset
        return result


class PlacesInHalves(NamedTuple):
    """Where places are in the actions of their stages; those after all actions are in none."""

    half: Int
    """Which half of the actions, as an index of `HALVES`."""
    once: Bool
    """Whether the row is there once per step."""


class RankRows:
    """Maps places in the segments of a rank's stages to row numbers of the rank's program."""

    def __init__(
        self,
        stages: Sequence[Stage],
        steps: Sequence[ScheduleStep],
        after: Segment,
        weights: UnitWeights,
    ) -> None:
        """The actions of the schedule's steps in order; the rows `after` all actions."""
        self.stages: Mapping[int, Stage] = {s.stage: s for s in stages}
        self.after = after
        segments = [of for s in stages for of in (s.forward, s.backward)]
        self._starts = np.zeros((1 + max(self.stages), 2), dtype=np.int64)
        """Stage and direction -> where its rows begin among those of all segments."""
        ends = np.cumsum([len(of) for of in segments])
        self._starts[[*self.stages]] = np.append(0, ends[:-1]).reshape(-1, 2)
        self._once = np.concatenate([of.once for of in segments])
        self._weight = np.concatenate([of.weight for of in segments])
        if weights.before:
            first = {a.stage: a for step in reversed(steps) for a in reversed(parts(step))}
            order = dict.fromkeys(a.stage for step in steps for a in parts(step))
            steps = [*(Action(s, UNSHARD, first[s].microbatch) for s in order), *steps]
        self.actions = [a for step in steps for a in parts(step)]
        self._unshards = weights.before
        self.supplier = self._suppliers(weights)
        """Per action, the action that has gathered the weights it uses: itself, or one before."""
        self.borrows = bool((self.supplier != np.arange(len(self.supplier))).any())
        """Whether some action uses weights that another one has gathered."""
        self.once = self._once_per_step()
        """Stage and half -> the action that does what happens once per step: the first forward, the
        last of each half of a backward."""
        self._complete = {i for (_, half), i in self.once.items() if half != 1}
        self.forms: list[Form] = []
        self.begin, self.form_of, self.end = self._lay_out(steps)
        """Per action, where its step begins and its form; and where all actions have ended."""
        self.total = self.end + len(after)
        offsets = [form.offsets() for form in self.forms]
        self._offsets = np.concatenate([*offsets, np.zeros(0, dtype=np.int64)])
        self._first = np.cumsum([0, *map(len, offsets)])
        """By form, where its offsets begin among those of all forms."""
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
        known: dict[tuple[tuple[int, str, bool, bool], ...], list[int]] = {}
        begin: list[int] = []
        form_of: list[int] = []
        now = 0
        for step in steps:
            first = len(begin)
            key = tuple(
                (a.stage, a.kind, i in self._complete, int(self.supplier[i]) == i)
                for i, a in enumerate(parts(step), first)
            )
            if key not in known:
                ahead = key[0][1] == UNSHARD
                made = _take_turns([self._rows_of(*action) for action in key], ahead=ahead)
                known[key] = list(range(len(self.forms), len(self.forms) + len(made)))
                self.forms += made
            form_of += known[key]
            begin += [now] * len(key)
            now += sum(len(self.forms[f].keep) for f in known[key])
        return np.array(begin, dtype=np.int64), np.array(form_of, dtype=np.int64), now

    def _suppliers(self, weights: UnitWeights) -> Int:
        supplier = np.arange(len(self.actions))
        gathered: dict[int, int] = {}  # stage -> the action that has gathered its weights
        for i, a in enumerate(self.actions) if weights.kept else ():
            if self.uses_weights(a):
                supplier[i] = gathered.setdefault(a.stage, i)
            if a.kind == "F":
                del gathered[a.stage]
        return supplier

    def uses_weights(self, a: Action) -> bool:
        """Whether weights are gathered for an action, unless they still are.

        The half of a backward that makes the gradients of weights gathers what it alone reads.
        """
        rows = self._half(a.stage, a.kind) & self.stages[a.stage].backward.gathers
        return a.kind in "UF" or bool(rows.any())

    def _half(self, stage: int, kind: str) -> Bool:
        """The rows of a stage's backward that an action of this kind has, but for what is once."""
        segment = self.stages[stage].backward
        every = np.ones(len(segment), dtype=bool)
        return {"I": ~segment.weight, "W": segment.weight}.get(kind, every)

    def _rows_of(self, stage: int, kind: str, complete: bool, gathers: bool) -> tuple[Segment, Int]:
        """The segment of an action, and which of its rows the action has."""
        if kind not in "UF":
            segment = self.stages[stage].backward
            wanted = self._half(stage, kind)
        else:
            segment = self.stages[stage].forward
            every = np.ones(len(segment), dtype=bool)
            wanted = every if kind == "F" else segment.once | segment.gathers
        wanted = wanted & (complete | ~segment.once) & (gathers | ~segment.gathers)
        return segment, np.flatnonzero(wanted)

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

    def places(self, whose: Int, stage: Int, place: Int) -> PlacesInHalves:
        """In which part of a stage's actions places are that touches or dependencies name."""
        once = whose == STEP
        half = ((whose != FORWARD) & (whose != FIRST) & ~once).astype(np.int64)
        inside = np.flatnonzero(~once)
        at = self._starts[stage[inside], half[inside]] + place[inside]
        once[inside] = self._once[at]
        half[inside] += self._weight[at] & (half[inside] > 0)
        return PlacesInHalves(half, once)

    def rows(self, actions: Int, places: Int, absent: int | None = None) -> Int:
        """The row numbers of some places in some actions; `absent` where an action lacks one."""
        offset = self._offsets[self._first[self.form_of[actions]][:, None] + places]
        rows = self.begin[actions][:, None] + offset
        return rows if absent is None else np.where(offset < 0, absent, rows)

    def _is_of(self, actions: Int, kinds: str) -> Bool:
        """Which of some actions are of one of these kinds."""
        return np.array([self.actions[int(i)].kind in kinds for i in actions], dtype=bool)

    def gathered_ahead(self, actions: Int, places: Int) -> Int:
        """The row numbers of places of a forward where an `UNSHARD` has them for it; else -1."""
        rows = np.full((len(actions), len(places)), -1, dtype=np.int64)
        if not self._unshards:
            return rows
        by = self.supplier[actions]
        there = np.flatnonzero(self._is_of(by, UNSHARD))
        rows[there] = self.rows(by[there], places, absent=-1)
        return rows

    def suppliers_rows(self, actions: Int, whose: int, stage: int, places: Int) -> Int:
        """The row numbers of places that gather weights, where the weights are gathered.

        An action that lacks these rows uses weights that an action before it has gathered, which
        may be one of the other direction.
        """
        owner = self.stages[stage]
        by = self.supplier[actions]
        forward = whose == FORWARD
        same = self._is_of(by, "UF") == forward
        result = np.empty((len(actions), len(places)), dtype=np.int64)
        other = np.array([owner.gathered_elsewhere(int(p), forward=forward) for p in places])
        result[same] = self.rows(by[same], places)
        result[~same] = self.rows(by[~same], np.maximum(other, 0))
        return result


def _take_turns(actions: Sequence[tuple[Segment, Int]], *, ahead: bool) -> list[Form]:
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
        Form(segment, keep, own, ahead)
        for (segment, keep), own in zip(actions, np.split(offset, ends[:-1]), strict=True)
    ]
