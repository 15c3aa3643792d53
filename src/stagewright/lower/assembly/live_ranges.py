"""Live ranges of the values of a rank's stages, for all microbatches that are alike at once.

A value is live from the first row that touches it to the last. Which rows these are is the same for
all microbatches of one *class*: whose actions are of the same kinds, do what happens once per step
or do not, and are the first or the last of their stage or are not. So live ranges are found for one
microbatch of each class.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Bool, Int
from stagewright.lower.assembly.distinct_actions import Part, rows_of
from stagewright.lower.assembly.microbatch_classes import AHEAD, Acting, Classes
from stagewright.lower.assembly.microbatch_classes import NEXT as NEXT_HALF
from stagewright.lower.assembly.rank_schedule import HALVES
from stagewright.lower.assembly.segments import FORWARD as OF_FORWARD
from stagewright.lower.assembly.segments import NEXT, STEP
from stagewright.lower.assembly.stages import Stage
from stagewright.program.columns import CATEGORIES

_CATEGORY = {name: nth for nth, name in enumerate(CATEGORIES)}
_MOST = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False)
class ValueColumns:
    """The values of one stage as columns; rows that touch them stand one after the other."""

    names: Sequence[str]
    layer: Int
    category: Int
    size: Int
    whole: Bool
    lasts: Bool
    lasts_halved: Bool
    begin: Int
    """Where the touches of each value begin, and the end."""
    whose: Int
    stage: Int
    """How many stages further on."""
    place: Int
    needs: Int
    """Value, whose, stage, and place of a row without which the value is not there: [needs, 4]."""
    first_gradients: Int
    """Gradients of a microbatch, and the sums that the first ones become: [pairs, 2]."""
    kept_weights: Int
    """Weights as forward and as backward gathers them: [pairs, 2]."""

    @classmethod
    def of(cls, stage: Stage) -> ValueColumns:
        """The values of a stage whose rows are made."""
        values = stage.values.values
        touches = itertools.chain.from_iterable(v.touches for v in values)
        numbers = [*itertools.chain.from_iterable(touches)]
        whose, of_stage, place = np.array(numbers, dtype=np.int64).reshape(-1, 3).T
        number = {id(v): n for n, v in enumerate(values)}
        needs = [(n, *v.needs) for n, v in enumerate(values) if v.needs is not None]
        needed = np.array(needs, dtype=np.int64).reshape(-1, 4)
        needed[:, 2] -= stage.stage

        def pairs(of: Sequence[tuple[object, object]]) -> Int:
            found = [(number[id(a)], number[id(b)]) for a, b in of]
            return np.array(found, dtype=np.int64).reshape(-1, 2)

        return cls(
            [v.name for v in values],
            np.array([v.layer for v in values], dtype=np.int64),
            np.array([_CATEGORY[v.category] for v in values], dtype=np.int64),
            np.array([v.size for v in values], dtype=np.int64),
            np.array([v.whole for v in values], dtype=bool),
            np.array([v.lasts for v in values], dtype=bool),
            np.array([v.lasts_halved for v in values], dtype=bool),
            np.concatenate([[0], np.cumsum([len(v.touches) for v in values], dtype=np.int64)]),
            whose,
            of_stage - stage.stage,
            place,
            needed,
            pairs(stage.values.first_gradients),
            pairs(stage.values.kept_weights),
        )

    @cached_property
    def touched(self) -> Bool:
        """Values that rows touch."""
        return np.diff(self.begin) > 0

    @cached_property
    def always(self) -> Int:
        """Values that are allocated all the time."""
        return np.flatnonzero(~self.touched)

    @cached_property
    def waits_for_next(self) -> bool:
        """Whether a row of the next microbatch touches a value."""
        return bool((self.whose == NEXT).any())


class Ranges(NamedTuple):
    """Live ranges by value and class.

    Ends are positions of actions and places in their segments: `position * span + 2 * place + 1`;
    one less means just before that row. The positions after those of actions are those of each
    stage's rows after all actions, and of the end of the step.
    """

    once: Bool
    """Values of which there is one for all microbatches: [values]."""
    there: Bool
    """[values, classes]"""
    first: Int
    last: Int
    span: int
    owner: Int
    """By value, the stage and half (`stage * 3 + half`) whose microbatches have one; -1: after all
    actions."""

    def position(self, ends: Int) -> Int:
        """Of some ends."""
        return ends // self.span

    def place(self, ends: Int) -> Int:
        """Of some ends."""
        return ends % self.span // 2

    def before(self, ends: Int) -> Bool:
        """Which of some ends are just before a row."""
        return ends % 2 == 0


class _Touches(NamedTuple):
    """Touches of the values of some stages: the stage and half of each."""

    value: Int
    stage: Int
    half: Int
    once: Bool
    """Rows that are there once per step, those after all actions among them."""
    step: Bool
    next: Bool
    place: Int


def _located(
    stages: Sequence[Stage], of: int, whose: Int, distance: Int, place: Int
) -> tuple[Int, Int, Bool]:
    """Stage and half of places that the stage number `of` names, and which are once per step."""
    stage = of + distance
    half = ((whose != OF_FORWARD) & (whose != STEP)).astype(np.int64)
    once = whose == STEP
    for number, other in enumerate(stages):
        for backward, segment in enumerate((other.forward, other.backward)):
            rows = np.flatnonzero((stage == number) & (whose != STEP) & (half == backward))
            if len(rows):
                once[rows] = segment.once[place[rows]]
                half[rows] += segment.weight[place[rows]] & (backward > 0)
    return stage, half, once


def live_ranges(
    stages: Sequence[Stage],
    columns: Sequence[ValueColumns],
    classes: Classes,
    step_rows: Sequence[Int],
) -> Ranges:
    """The live ranges of the values of some stages, one after the other.

    Stages are of consecutive numbers, or alone. `step_rows`: by stage, the order of its tasks after
    all actions.
    """
    counts = [len(c.names) for c in columns]
    start = np.cumsum([0, *counts])
    total, width = int(start[-1]), classes.count
    touches = _touches(stages, columns, start)
    # Touches of a value stand together; values without one are allocated all the time.
    has = np.concatenate([c.touched for c in columns])
    first_touch = np.searchsorted(touches.value, np.arange(total))
    clipped = np.minimum(first_touch, max(0, len(touches.value) - 1))
    whole = np.concatenate([c.whole for c in columns])
    owner = np.full(total, -1, dtype=np.int64)
    once = np.zeros(total, dtype=bool)
    if len(touches.value):
        owner = np.where(touches.step, -1, touches.stage * HALVES + touches.half)[clipped]
        once = touches.once[clipped] | whole
    longest = max(len(s) for stage in stages for s in (stage.forward, stage.backward))
    longest = max([longest, *(int(r.max(initial=0)) + 1 for r in step_rows)])
    span = 2 * (longest + 1)

    rows = _rows(stages, touches, once[touches.value], classes, span, step_rows)
    acts = np.zeros((total, width), dtype=bool)
    made = np.array([[a is not None for a in acting] for stage in classes.acting
                     for acting in stage[:HALVES]], dtype=bool)  # fmt: skip
    at = np.flatnonzero(has & (owner >= 0))
    acts[at] = made[owner[at]]
    if classes.first >= 0:
        acts[np.flatnonzero(has & (owner < 0)), classes.first] = True
    else:
        acts[np.flatnonzero(has & (owner < 0)), :1] = True
    first = np.full((total, width), _MOST, dtype=np.int64)
    last = np.full((total, width), -1, dtype=np.int64)
    some = np.flatnonzero(has)
    if len(some):
        rows = np.where(acts[touches.value], rows, -1)
        last[some] = np.maximum.reduceat(rows, first_touch[some], axis=0)
        first[some] = np.minimum.reduceat(
            np.where(rows < 0, _MOST, rows), first_touch[some], axis=0
        )
    first[once], last[once] = first[once].min(axis=1)[:, None], last[once].max(axis=1)[:, None]
    there = last >= 0
    there[~once] &= acts[~once]
    ranges = Ranges(once, there, first, last, span, owner)
    _prolong(ranges, columns, classes, start)
    _drop_without_rows(ranges, stages, columns, classes, start)
    _take_first_gradients(ranges, columns, start)
    return ranges


def _touches(stages: Sequence[Stage], columns: Sequence[ValueColumns], start: Int) -> _Touches:
    parts: list[_Touches] = []
    for of, c in enumerate(columns):
        stage, half, once = _located(stages, of, c.whose, c.stage, c.place)
        value = np.repeat(np.arange(len(c.names)), np.diff(c.begin)) + start[of]
        parts.append(_Touches(value, stage, half, once, c.whose == STEP, c.whose == NEXT, c.place))
    return _Touches(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _rows(
    stages: Sequence[Stage],
    touches: _Touches,
    value_once: Bool,
    classes: Classes,
    span: int,
    step_rows: Sequence[Int],
) -> Int:
    """By touch and class the end that it is, -1 where no action has its row."""
    rows = np.full((len(touches.value), classes.count), -1, dtype=np.int64)
    of_step = np.flatnonzero(touches.step)
    for number, order in enumerate(step_rows):
        mine = of_step[touches.stage[of_step] == number]
        position = classes.positions + number
        rows[mine] = (position * span + 2 * order[touches.place[mine]] + 1)[:, None]
    single = touches.once & value_once & ~touches.step
    for number, stage in enumerate(stages):
        for half in range(HALVES):
            here = (touches.stage == number) & (touches.half == half) & ~touches.step
            mine = np.flatnonzero(here & single)
            if len(mine):
                acting = classes.once[number][half]
                rows[mine] = _ends(stage, acting, touches.place[mine], span)[:, None]
            for later in (False, True) if half else (False,):
                mine = np.flatnonzero(here & ~single & (touches.next == later))
                slot = half + NEXT_HALF * later
                for k, acting in enumerate(classes.acting[number][slot]) if len(mine) else ():
                    found = _ends(stage, acting, touches.place[mine], span)
                    if half == 0 and (ahead := classes.acting[number][AHEAD][k]) is not None:
                        found = np.maximum(found, _ends(stage, ahead, touches.place[mine], span))
                    rows[mine, k] = found
    return rows


def _ends(stage: Stage, acting: Acting | None, places: Int, span: int) -> Int:
    """The ends that places in an action are, -1 where it lacks them."""
    if acting is None:
        return np.full(len(places), -1, dtype=np.int64)
    mask = rows_of(stage, Part(0, acting.kind, acting.complete, acting.gathers))
    return np.where(mask[places], acting.position * span + 2 * places + 1, -1)


def _prolong(ranges: Ranges, columns: Sequence[ValueColumns], classes: Classes, start: Int) -> None:
    """Values that are live until the step is over, in place."""
    end = (classes.positions + len(columns)) * ranges.span + 1
    lasts = np.concatenate([c.lasts for c in columns])
    ranges.last[lasts] = end
    halved = np.concatenate([c.lasts_halved for c in columns]) & ~lasts
    for value in np.flatnonzero(halved & (ranges.owner >= 0)).tolist():
        stage = classes.acting[int(ranges.owner[value]) // HALVES]
        for k in range(ranges.last.shape[1]):
            # One value for all microbatches goes by the last one.
            of = classes.last if ranges.once[value] else k
            halves = [stage[half][of] if of >= 0 else None for half in (1, 2)]
            ends = [None if acting is None else acting.position for acting in halves]
            if ends[0] != ends[1]:
                ranges.last[value, k] = end


def _drop_without_rows(
    ranges: Ranges,
    stages: Sequence[Stage],
    columns: Sequence[ValueColumns],
    classes: Classes,
    start: Int,
) -> None:
    """Values whose needed row an action lacks are not there, in place; where weights are gathered
    ahead, they are copied out at once."""
    for of, c in enumerate(columns):
        stage, half, once = _located(stages, of, *c.needs[:, 1:].T)
        for n in np.flatnonzero(~once).tolist():
            value, place = int(start[of] + c.needs[n, 0]), c.needs[n, 3:]
            slots = classes.acting[int(stage[n])]
            for k in range(ranges.last.shape[1]):
                at = classes.last if ranges.once[value] else k
                acting = slots[int(half[n])][at] if at >= 0 else None
                row = int(_ends(stages[int(stage[n])], acting, place, ranges.span)[0])
                by = slots[AHEAD][at] if at >= 0 and half[n] == 0 else None
                ahead = int(_ends(stages[int(stage[n])], by, place, ranges.span)[0])
                ranges.there[value, k] &= max(row, ahead) >= 0
                if ahead >= 0:
                    ranges.last[value, k] = ranges.first[value, k]
                    ranges.first[value, k] = min(ranges.first[value, k], ahead)


def _take_first_gradients(ranges: Ranges, columns: Sequence[ValueColumns], start: Int) -> None:
    """The first gradient that a sum is made of has no bytes besides the sum, in place."""
    for of, c in enumerate(columns):
        gradient, total = (c.first_gradients + start[of]).T
        begins = ranges.first[total, :1]
        taken = (ranges.last[gradient] == begins) & (ranges.first[gradient] < begins)
        ranges.last[gradient] = np.where(taken, begins - 1, ranges.last[gradient])
