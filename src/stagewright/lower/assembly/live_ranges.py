"""Live ranges: values of a pipeline rank with the first and last row that touches each."""

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
from stagewright.lower.assembly.segments import Interner, Owner
from stagewright.lower.assembly.stages import Stage
from stagewright.program.columns import CATEGORIES

_CATEGORY = {name: index for index, name in enumerate(CATEGORIES)}
_MAX_ROW = np.iinfo(np.int64).max


# ---- values --------------------------------------------------------------------------------------


class Touches(NamedTuple):
    """Accesses of values by rows, as columns: [touches]."""

    value: Int
    """Ascending."""
    local_stage: Int
    """Stage of the row: of one stage's values its distance, of a rank's the index on the rank."""
    pass_part: Int
    """Part of the pass that has the row (`rank_schedule.PASS_PARTS`); -1: optimizer."""
    segment_row: Int
    """Row in the segment, or index of the stage's task in the optimizer action."""
    once_per_step: Bool
    next_microbatch: Bool
    """True if the row is of the next microbatch."""

    @classmethod
    def of_stage(cls, stage: Stage, values: Int, touches: Iterable[Touch]) -> Touches:
        """Touches of `values` of a stage."""
        columns = np.fromiter(itertools.chain.from_iterable(touches), dtype=np.int64)
        owner, stages, row = columns.reshape(-1, 3).T
        pass_part = np.where(owner == Owner.OPTIMIZER, -1, owner != Owner.FORWARD)
        once = owner == Owner.OPTIMIZER
        for number, other in stage.on_rank.items():
            forward, backward = ((stages == number) & (pass_part == h) for h in (0, 1))
            once[forward] = other.forward.once_per_step[row[forward]]
            once[backward] = other.backward.once_per_step[row[backward]]
            pass_part[backward] += other.backward.weight_half[row[backward]]
        return cls(values, stages - stage.stage, pass_part, row, once, owner == Owner.NEXT_BACKWARD)

    @classmethod
    def of_rank(cls, touches: Sequence[Touches], start: Sequence[int]) -> Touches:
        """Concatenate touches of a rank's stages; `start`: first value of each stage."""
        renumbered = [
            t._replace(value=t.value + first, local_stage=t.local_stage + i)
            for i, (t, first) in enumerate(zip(touches, start, strict=True))
        ]
        columns: list[Any] = [np.concatenate(column) for column in zip(*renumbered, strict=True)]
        return cls(*columns)

    def take(self, selected: Int | Bool) -> Touches:
        """Select some touches."""
        columns: list[Any] = [column[selected] for column in self]
        return Touches(*columns)


@dataclass(frozen=True, eq=False)
class ValueColumns:
    """Values (`lifetimes.Value`) of one stage, or of the stages of a rank, as columns."""

    names: Sequence[str]
    stage: Int
    """Index of the stage on the rank."""
    layer: Int
    category: Int
    size: Int
    per_step: Bool
    until_step_end: Bool
    until_step_end_if_split: Bool
    touches: Touches
    requires: Touches
    """Rows that must exist for values to exist."""
    first_gradients: Int
    """(gradient, sum) pairs that share the first microbatch's buffer: [2, pairs]."""
    gathered_pairs: Int
    """(weight as forward gathers it, as backward gathers it): [2, pairs]."""

    @cached_property
    def touched(self) -> Bool:
        """Mask of values that rows touch; others are permanent."""
        return np.bincount(self.touches.value, minlength=len(self.names)) > 0

    @cached_property
    def first_touch(self) -> Int:
        """First touch of each touched value."""
        return np.flatnonzero(np.diff(self.touches.value, prepend=-1))

    @cached_property
    def maker(self) -> tuple[Int, Int]:
        """Stage and part of the pass of the first touch of each value; -1: permanent."""
        stage, pass_part = np.full((2, len(self.names)), -1, dtype=np.int64)
        stage[self.touched] = self.touches.local_stage[self.first_touch]
        pass_part[self.touched] = self.touches.pass_part[self.first_touch]
        return stage, pass_part

    @cached_property
    def once_per_step(self) -> Bool:
        """Mask of values that all microbatches share."""
        once = self.per_step | ~self.touched
        once[self.touched] |= self.touches.once_per_step[self.first_touch]
        return once

    @cached_property
    def group(self) -> Int:
        """Group of values of a stage with the same makers and the same end; 0: permanent."""
        flags = *self.maker, self.once_per_step, self.until_step_end, self.until_step_end_if_split
        keys = zip(self.stage.tolist(), *(flag.tolist() for flag in flags), strict=True)
        return np.where(self.touched, np.array(Interner[object]().ids(keys), np.int64) + 1, 0)


@lru_cache(maxsize=256)  # stages of a search are of few classes
def value_columns(stage: Stage) -> ValueColumns:
    """Values of a stage whose rows are built."""
    values = stage.values.values
    index = {id(v): i for i, v in enumerate(values)}
    counts = np.array([len(v.touches) for v in values], dtype=np.int64)
    touches = itertools.chain.from_iterable(v.touches for v in values)
    required = {i: v.requires for i, v in enumerate(values) if v.requires is not None}
    requires = Touches.of_stage(stage, np.array([*required], np.int64), required.values())
    first_gradients, gathered_pairs = (
        np.array([(index[id(a)], index[id(b)]) for a, b in pairs], np.int64).reshape(-1, 2).T
        for pairs in (stage.values.first_gradients, stage.values.gathered_pairs)
    )
    return ValueColumns(
        [v.name for v in values],
        np.zeros(len(values), dtype=np.int64),
        np.array([v.layer for v in values], dtype=np.int64),
        np.array([_CATEGORY[v.category] for v in values], dtype=np.int64),
        np.array([v.size for v in values], dtype=np.int64),
        np.array([v.per_step for v in values], dtype=bool),
        np.array([v.until_step_end for v in values], dtype=bool),
        np.array([v.until_step_end_if_split for v in values], dtype=bool),
        Touches.of_stage(stage, np.repeat(np.arange(len(values)), counts), touches),
        requires.take(~requires.once_per_step),
        first_gradients,
        gathered_pairs,
    )


@lru_cache(maxsize=64)
def rank_columns(stages: tuple[Stage, ...]) -> ValueColumns:
    """Values of the stages of a rank."""
    columns = [value_columns(stage) for stage in stages]
    counts = [len(c.names) for c in columns]
    start: list[int] = (np.cumsum(counts) - counts).tolist()

    def column(name: str) -> Any:
        return np.concatenate([getattr(c, name) for c in columns])

    def pairs(of_stages: Sequence[Int]) -> Int:
        shifted = [p + first for p, first in zip(of_stages, start, strict=True)]
        return np.concatenate(shifted, axis=1)

    return ValueColumns(
        [*itertools.chain.from_iterable(c.names for c in columns)],
        np.repeat(np.arange(len(columns)), counts),
        column("layer"),
        column("category"),
        column("size"),
        column("per_step"),
        column("until_step_end"),
        column("until_step_end_if_split"),
        Touches.of_rank([c.touches for c in columns], start),
        Touches.of_rank([c.requires for c in columns], start),
        pairs([c.first_gradients for c in columns]),
        pairs([c.gathered_pairs for c in columns]),
    )


# ---- live ranges ---------------------------------------------------------------------------------


class LiveRanges(NamedTuple):
    """Rows of values, per microbatch or shared by all microbatches (-1).

    Allocated before row `first` (-1: from the start) and freed after row `last` (the number of
    rows: never).
    """

    value: Int
    microbatch: Int
    first: Int
    last: Int


def live_ranges(order: RankOrder) -> LiveRanges:
    """Compute the live ranges of the values of a rank, as [values, microbatches].

    Those of a value that all microbatches share are equal.
    """
    columns = rank_columns(order.stages)
    once, touched, (stage, pass_part) = columns.once_per_step, columns.touched, columns.maker
    # A microbatch has a value if it has an action of the part of the pass that makes the value;
    # values of the optimizer action belong to the first microbatch.
    made = (order.schedule.action_of[pass_part, stage] >= 0) & touched[:, None]
    made[pass_part < 0] = False
    made[pass_part < 0, 0] = touched[pass_part < 0]
    first = np.full(made.shape, _MAX_ROW, dtype=np.int64)
    last = np.full(made.shape, -1, dtype=np.int64)
    if touched.any():
        rows = np.where(made[columns.touches.value], _touching_rows(order, columns), -1)
        last[touched] = np.maximum.reduceat(rows, columns.first_touch, axis=0)
        rows[rows < 0] = _MAX_ROW
        first[touched] = np.minimum.reduceat(rows, columns.first_touch, axis=0)
    first[once], last[once] = first[once].min(axis=1)[:, None], last[once].max(axis=1)[:, None]
    exists = (last >= 0) & (made | once[:, None])
    _extend_to_step_end(order, columns, last)
    _apply_requires(order, columns, exists, first, last)
    _share_first_gradients(columns, first, last)
    if order.reuses_gathered:
        _extend_gathered_weights(order, columns, exists, first, last)
    first[~touched], last[~touched], exists[~touched] = -1, order.total, True
    exists[once, 1:] = False
    value, microbatch = np.nonzero(exists)
    by_group = np.lexsort((value, microbatch, columns.group[value], columns.stage[value]))
    value, microbatch = value[by_group], microbatch[by_group]
    ends = first[value, microbatch], last[value, microbatch]
    return LiveRanges(value, np.where(once[value], -1, microbatch), *ends)


def _touching_rows(order: RankOrder, columns: ValueColumns) -> Int:
    """Rows of all touches, -1 if absent: [touches, microbatches]."""
    touches, once_action = columns.touches, order.schedule.once_action
    actions = _actions(order, touches)
    prefetch = _prefetching_actions(order, actions, touches)
    rows = np.maximum(_rows(order, actions, touches), _rows(order, prefetch, touches))
    once = touches.once_per_step & columns.once_per_step[touches.value]
    single = np.flatnonzero((touches.pass_part >= 0) & once)
    t = touches.take(single)
    rows[single] = _rows(order, once_action[t.pass_part, t.local_stage][:, None], t)
    optimizer_step = order.table.optimizer_steps[order.optimizer_index]
    for local_stage, row in enumerate(optimizer_step.row_of):
        touch = np.flatnonzero((touches.pass_part < 0) & (touches.local_stage == local_stage))
        rows[touch] = order.optimizer_begin + row[touches.segment_row[touch], None]
    return rows


def _actions(order: RankOrder, touches: Touches) -> Int:
    """Actions of the schedule that have the rows: [touches, microbatches]; -1: none."""
    actions = order.schedule.action_of
    following = np.concatenate([actions[:, :, 1:], np.full_like(actions[:, :, :1], -1)], axis=2)
    shift = touches.next_microbatch.astype(np.int64)
    selected = np.stack([actions, following])[shift, touches.pass_part, touches.local_stage]
    return np.where(touches.pass_part[:, None] < 0, -1, selected)


def _prefetching_actions(order: RankOrder, actions: Int, touches: Touches) -> Int:
    """Actions that prefetch weights of forwards before all other actions; -1: none."""
    if not order.reuses_gathered:
        return np.full_like(actions, -1)
    gathered_by = order.gathered_by[actions]
    prefetched = (actions >= 0) & (order.schedule.kind[gathered_by] == UNSHARD)
    return np.where(prefetched & (touches.pass_part == 0)[:, None], gathered_by, -1)


def _rows(order: RankOrder, actions: Int, touches: Touches) -> Int:
    """Rows of touches in actions, -1 if absent."""
    rows = np.full(actions.shape, -1, dtype=np.int64)
    touch, microbatch = np.nonzero(actions >= 0)
    segment_rows = touches.segment_row[touch]
    rows[touch, microbatch] = order.rows(actions[touch, microbatch], segment_rows)
    return rows


def _extend_to_step_end(order: RankOrder, columns: ValueColumns, last: Int) -> None:
    """Extend values that are live until the end of the step, in place."""
    _, input_half, weight_half = order.schedule.action_of
    stage, pass_part = columns.maker
    split = (input_half != weight_half)[stage]
    once = columns.once_per_step
    split[once] = split[once, -1:]  # shared values: the last microbatch decides
    split &= (columns.until_step_end_if_split & (pass_part >= 0))[:, None]
    last[columns.until_step_end[:, None] | split] = order.total - 1


def _apply_requires(
    order: RankOrder, columns: ValueColumns, exists: Bool, first: Int, last: Int
) -> None:
    """Remove values whose required row is absent, in place.

    Prefetched weights are copied out at once.
    """
    requires = columns.requires
    actions = _actions(order, requires)
    once = columns.once_per_step[requires.value]
    actions[once] = actions[once, -1:]
    row = _rows(order, actions, requires)
    prefetch = _rows(order, _prefetching_actions(order, actions, requires), requires)
    exists[requires.value] &= np.maximum(row, prefetch) >= 0
    start = first[requires.value]
    last[requires.value] = np.where(prefetch >= 0, start, last[requires.value])
    first[requires.value] = np.where(prefetch >= 0, np.minimum(start, prefetch), start)


def _share_first_gradients(columns: ValueColumns, first: Int, last: Int) -> None:
    """End the first gradient of a sum where the sum begins in its buffer, in place."""
    gradient, total = columns.first_gradients
    shared = (last[gradient] == first[total]) & (first[gradient] < first[total])
    last[gradient] = np.where(shared, first[total] - 1, last[gradient])


def _extend_gathered_weights(
    order: RankOrder, columns: ValueColumns, exists: Bool, first: Int, last: Int
) -> None:
    """Extend gathered weights to the next action that uses them, in place."""
    schedule = order.schedule
    for i, stage in enumerate(order.stages):
        pairs: Int = columns.gathered_pairs[:, columns.stage[columns.gathered_pairs[0]] == i]
        uses = np.flatnonzero((schedule.local_stage == i) & (schedule.kind != UNSHARD))
        uses = uses[[uses_weights(stage, kind) for kind in schedule.kind[uses].tolist()]]
        microbatch = schedule.microbatch[uses]
        value = pairs[(schedule.kind[uses] != FORWARD).astype(np.int64)]
        current, following = (value[:-1], microbatch[:-1, None]), (value[1:], microbatch[1:, None])
        gathers = (order.gathered_by[uses] == uses)[1:, None]
        until = np.where(exists[current] & exists[following] & ~gathers, first[following] - 1, -1)
        np.maximum.at(last, current, until)
