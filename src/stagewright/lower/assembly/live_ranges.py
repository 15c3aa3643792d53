"""Live ranges: the values of a pipeline rank with the first and last row that touches each."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from stagewright.arrays import Bool, Int
from stagewright.lower.assembly.lifetimes import Touch
from stagewright.lower.assembly.rank_order import RankOrder, uses_weights
from stagewright.lower.assembly.rank_schedule import FORWARD, UNSHARD
from stagewright.lower.assembly.segments import FORWARD as OF_FORWARD
from stagewright.lower.assembly.segments import NEXT, STEP, Numbers
from stagewright.lower.assembly.stages import Stage
from stagewright.program.columns import CATEGORIES

_CATEGORY = {name: nth for nth, name in enumerate(CATEGORIES)}
_MOST = np.iinfo(np.int64).max


# ---- values --------------------------------------------------------------------------------------


class Touches(NamedTuple):
    """Rows that need values, a column for each: [touches]."""

    value: Int
    """Ascending."""
    stage: Int
    """Of one stage's values, how many stages further on; of a rank's, which of its stages."""
    half: Int
    """The half of the stage (`rank_schedule.HALVES`) that has the row; -1: it is after all
    actions."""
    place: Int
    """In the segment, or among the stage's rows after all actions."""
    once: Bool
    """Rows that are there once per step."""
    next: Bool
    """Rows of the next microbatch."""

    @classmethod
    def of(cls, stage: Stage, values: Int, touches: Iterable[Touch]) -> Touches:
        """The touches of some values of a stage."""
        numbers = itertools.chain.from_iterable(touches)
        whose, owner, place = np.fromiter(numbers, dtype=np.int64).reshape(-1, 3).T
        half, once = np.where(whose == STEP, -1, whose != OF_FORWARD), whose == STEP
        for number, other in stage.on_rank.items():
            forward, backward = ((owner == number) & (half == n) for n in (0, 1))
            once[forward] = other.forward.once[place[forward]]
            once[backward] = other.backward.once[place[backward]]
            half[backward] += other.backward.weight[place[backward]]
        return cls(values, owner - stage.stage, half, place, once, whose == NEXT)

    @classmethod
    def of_rank(cls, touches: Sequence[Touches], start: Sequence[int]) -> Touches:
        """Those of a rank, from those of each stage, whose values begin at these numbers."""
        numbered = [
            of._replace(value=of.value + first, stage=of.stage + place)
            for place, (of, first) in enumerate(zip(touches, start, strict=True))
        ]
        columns: list[Any] = [np.concatenate(column) for column in zip(*numbered, strict=True)]
        return cls(*columns)

    def take(self, some: Int | Bool) -> Touches:
        """Some of them."""
        value, stage, half, place, once, following = self
        return Touches(
            value[some], stage[some], half[some], place[some], once[some], following[some]
        )


@dataclass(frozen=True, eq=False)
class ValueColumns:
    """The values of one stage, or of the stages of a rank one after the other, as columns
    (`lifetimes.Value`)."""

    names: Sequence[str]
    stage: Int
    """Which of the stages."""
    layer: Int
    category: Int
    size: Int
    whole: Bool
    lasts: Bool
    lasts_halved: Bool
    touches: Touches
    needs: Touches
    """Rows without which values are not there."""
    first_gradients: Int
    """Gradients of a microbatch, and the sums that the first ones become: [2, pairs]."""
    kept_weights: Int
    """Weights as forward and as backward gathers them: [2, pairs]."""

    @cached_property
    def touched(self) -> Bool:
        """Values that rows touch; others are allocated all the time."""
        return np.bincount(self.touches.value, minlength=len(self.names)) > 0

    @cached_property
    def first_touch(self) -> Int:
        """By value that rows touch, the first of its touches."""
        return np.flatnonzero(np.diff(self.touches.value, prepend=-1))

    @cached_property
    def maker(self) -> tuple[Int, Int]:
        """Stage and half of the first touch of each value; -1 of those without one."""
        stage, half = np.full((2, len(self.names)), -1, dtype=np.int64)
        stage[self.touched] = self.touches.stage[self.first_touch]
        half[self.touched] = self.touches.half[self.first_touch]
        return stage, half

    @cached_property
    def once(self) -> Bool:
        """Values of which there is one for all microbatches."""
        once = self.whole | ~self.touched
        once[self.touched] |= self.touches.once[self.first_touch]
        return once

    @cached_property
    def group(self) -> Int:
        """Number of the values of a stage that the same actions make and the same rule frees; 0:
        those allocated all the time."""
        flags = *self.maker, self.once, self.lasts, self.lasts_halved
        keys = zip(self.stage.tolist(), *(flag.tolist() for flag in flags), strict=True)
        return np.where(self.touched, np.array(Numbers[object]().each(keys), np.int64) + 1, 0)


@lru_cache(maxsize=256)  # stages of a search have equal content
def value_columns(stage: Stage) -> ValueColumns:
    """The values of a stage whose rows are made."""
    values = stage.values.values
    number = {id(v): n for n, v in enumerate(values)}
    counts = np.array([len(v.touches) for v in values], dtype=np.int64)
    touches = itertools.chain.from_iterable(v.touches for v in values)
    needs = {n: v.needs for n, v in enumerate(values) if v.needs is not None}
    needed = Touches.of(stage, np.array([*needs], dtype=np.int64), needs.values())
    first_gradients, kept_weights = (
        np.array([(number[id(a)], number[id(b)]) for a, b in pairs], np.int64).reshape(-1, 2).T
        for pairs in (stage.values.first_gradients, stage.values.kept_weights)
    )
    return ValueColumns(
        [v.name for v in values],
        np.zeros(len(values), dtype=np.int64),
        np.array([v.layer for v in values], dtype=np.int64),
        np.array([_CATEGORY[v.category] for v in values], dtype=np.int64),
        np.array([v.size for v in values], dtype=np.int64),
        np.array([v.whole for v in values], dtype=bool),
        np.array([v.lasts for v in values], dtype=bool),
        np.array([v.lasts_halved for v in values], dtype=bool),
        Touches.of(stage, np.repeat(np.arange(len(values)), counts), touches),
        needed.take(~needed.once),
        first_gradients,
        kept_weights,
    )


@lru_cache(maxsize=64)
def rank_columns(stages: tuple[Stage, ...]) -> ValueColumns:
    """The values of the stages of a rank."""
    columns = [value_columns(stage) for stage in stages]
    counts = [len(c.names) for c in columns]
    start: list[int] = (np.cumsum(counts) - counts).tolist()

    def column(name: str) -> Any:
        return np.concatenate([getattr(c, name) for c in columns])

    def pairs(of: Sequence[Int]) -> Int:
        return np.concatenate([p + first for p, first in zip(of, start, strict=True)], axis=1)

    return ValueColumns(
        [*itertools.chain.from_iterable(c.names for c in columns)],
        np.repeat(np.arange(len(columns)), counts),
        column("layer"),
        column("category"),
        column("size"),
        column("whole"),
        column("lasts"),
        column("lasts_halved"),
        Touches.of_rank([c.touches for c in columns], start),
        Touches.of_rank([c.needs for c in columns], start),
        pairs([c.first_gradients for c in columns]),
        pairs([c.kept_weights for c in columns]),
    )


# ---- live ranges ---------------------------------------------------------------------------------


class LiveRanges(NamedTuple):
    """Values, one for each microbatch or one for all (microbatch -1), with their rows.

    Allocated before row `first` (-1: from the start) and freed after row `last` (the number of
    rows: never).
    """

    value: Int
    microbatch: Int
    first: Int
    last: Int


def live_ranges(order: RankOrder) -> LiveRanges:
    """The live ranges of the values of a rank.

    They are found as [values, microbatches]; those of a value that is there once are all equal.
    """
    columns = rank_columns(order.stages)
    once, touched, (stage, half) = columns.once, columns.touched, columns.maker
    # Each microbatch has a value for which there is an action of the half that makes the value;
    # what rows after all actions make goes by the first one.
    made = (order.schedule.by_microbatch[half, stage] >= 0) & touched[:, None]
    made[half < 0] = False
    made[half < 0, 0] = touched[half < 0]
    first = np.full(made.shape, _MOST, dtype=np.int64)
    last = np.full(made.shape, -1, dtype=np.int64)
    if touched.any():
        rows = np.where(made[columns.touches.value], _touching_rows(order, columns), -1)
        last[touched] = np.maximum.reduceat(rows, columns.first_touch, axis=0)
        rows[rows < 0] = _MOST
        first[touched] = np.minimum.reduceat(rows, columns.first_touch, axis=0)
    first[once], last[once] = first[once].min(axis=1)[:, None], last[once].max(axis=1)[:, None]
    there = (last >= 0) & (made | once[:, None])
    _prolong(order, columns, last)
    _drop_without_rows(order, columns, there, first, last)
    _take_first_gradients(columns, first, last)
    if order.borrows:
        _keep_weights(order, columns, there, first, last)
    first[~touched], last[~touched], there[~touched] = -1, order.total, True
    there[once, 1:] = False
    value, microbatch = np.nonzero(there)
    at = np.lexsort((value, microbatch, columns.group[value], columns.stage[value]))
    value, microbatch = value[at], microbatch[at]
    ends = first[value, microbatch], last[value, microbatch]
    return LiveRanges(value, np.where(once[value], -1, microbatch), *ends)


def _touching_rows(order: RankOrder, columns: ValueColumns) -> Int:
    """The rows of all touches, -1 where they are not there: [touches, microbatches]."""
    touches = columns.touches
    actions = _actions(order, touches)
    ahead = _gathered_ahead(order, actions, touches)
    rows = np.maximum(_rows(order, actions, touches), _rows(order, ahead, touches))
    single = np.flatnonzero((touches.half >= 0) & touches.once & columns.once[touches.value])
    some = touches.take(single)
    rows[single] = _rows(order, order.schedule.once[some.half, some.stage][:, None], some)
    for place, row in enumerate(order.table.afters[order.after].rows.row_of):
        step = np.flatnonzero((touches.half < 0) & (touches.stage == place))
        rows[step] = order.end + row[touches.place[step], None]
    return rows


def _actions(order: RankOrder, touches: Touches) -> Int:
    """The actions of the schedule that have the rows: [touches, microbatches]; -1: none."""
    actions = order.schedule.by_microbatch
    after = np.concatenate([actions[:, :, 1:], np.full_like(actions[:, :, :1], -1)], axis=2)
    found = np.stack([actions, after])[touches.next.astype(np.int64), touches.half, touches.stage]
    return np.where(touches.half[:, None] < 0, -1, found)


def _gathered_ahead(order: RankOrder, actions: Int, touches: Touches) -> Int:
    """The actions that have gathered weights for forwards before all other actions; -1: none."""
    if not order.borrows:
        return np.full_like(actions, -1)
    ahead = order.supplier[actions]
    gathered = (actions >= 0) & (order.schedule.kind[ahead] == UNSHARD)
    return np.where(gathered & (touches.half == 0)[:, None], ahead, -1)


def _rows(order: RankOrder, actions: Int, touches: Touches) -> Int:
    """The rows of touches in actions, -1 where they are not there."""
    rows = np.full(actions.shape, -1, dtype=np.int64)
    touch, microbatch = np.nonzero(actions >= 0)
    rows[touch, microbatch] = order.rows(actions[touch, microbatch], touches.place[touch])
    return rows


def _prolong(order: RankOrder, columns: ValueColumns, last: Int) -> None:
    """Values that are live until the step is over, in place."""
    _, first_half, second_half = order.schedule.by_microbatch
    stage, half = columns.maker
    halved = (first_half != second_half)[stage]
    halved[columns.once] = halved[columns.once, -1:]  # one for all goes by the last microbatch
    halved &= (columns.lasts_halved & (half >= 0))[:, None]
    last[columns.lasts[:, None] | halved] = order.total - 1


def _drop_without_rows(
    order: RankOrder, columns: ValueColumns, there: Bool, first: Int, last: Int
) -> None:
    """Values whose needed row an action lacks are not there, in place; where weights are gathered
    ahead, they are copied out at once."""
    needs = columns.needs
    actions = _actions(order, needs)
    once = columns.once[needs.value]
    actions[once] = actions[once, -1:]
    row = _rows(order, actions, needs)
    ahead = _rows(order, _gathered_ahead(order, actions, needs), needs)
    there[needs.value] &= np.maximum(row, ahead) >= 0
    starts = first[needs.value]
    last[needs.value] = np.where(ahead >= 0, starts, last[needs.value])
    first[needs.value] = np.where(ahead >= 0, np.minimum(starts, ahead), starts)


def _take_first_gradients(columns: ValueColumns, first: Int, last: Int) -> None:
    """The first gradient that a sum is made of has no bytes besides the sum, in place."""
    gradient, total = columns.first_gradients
    taken = (last[gradient] == first[total]) & (first[gradient] < first[total])
    last[gradient] = np.where(taken, first[total] - 1, last[gradient])


def _keep_weights(
    order: RankOrder, columns: ValueColumns, there: Bool, first: Int, last: Int
) -> None:
    """Weights that a backward has gathered live until the action that uses them next, in place."""
    schedule = order.schedule
    for place, stage in enumerate(order.stages):
        pairs: Int = columns.kept_weights[:, columns.stage[columns.kept_weights[0]] == place]
        uses = np.flatnonzero((schedule.place == place) & (schedule.kind != UNSHARD))
        uses = uses[[uses_weights(stage, kind) for kind in schedule.kind[uses].tolist()]]
        microbatch = schedule.microbatch[uses]
        value = pairs[(schedule.kind[uses] != FORWARD).astype(np.int64)]
        held, following = (value[:-1], microbatch[:-1, None]), (value[1:], microbatch[1:, None])
        gathers = (order.supplier[uses] == uses)[1:, None]
        until = np.where(there[held] & there[following] & ~gathers, first[following] - 1, -1)
        np.maximum.at(last, held, until)
