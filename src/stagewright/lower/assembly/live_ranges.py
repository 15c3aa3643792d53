"""Values of a pipeline rank, and the rows between which each is live."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from stagewright.arrays import Bool, Int, offsets
from stagewright.lower.assembly.rank_order import RankOrder, uses_weights
from stagewright.lower.assembly.segments import (
    FORWARD,
    UNSHARD,
    Interner,
    RowRefs,
    StageLabels,
)
from stagewright.lower.assembly.stage_values import COLUMNS, ValueColumns
from stagewright.lower.assembly.stages import Stage
from stagewright.program.columns import (
    Values,
)

_MAX_ROW = np.iinfo(np.int64).max

ValueSizes = Mapping[Stage, Int]
"""Bytes of values by stage, where they differ from those of the stage."""


# ---- live ranges ---------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def rank_columns(stages: tuple[Stage, ...]) -> ValueColumns:
    """Values of the stages of a rank."""
    columns = [stage.value_columns for stage in stages]
    counts = [len(c.names) for c in columns]
    start: list[int] = offsets(counts)[:-1].tolist()

    def refs(of_stages: Sequence[RowRefs]) -> RowRefs:
        numbered = enumerate(zip(of_stages, start, strict=True))
        return RowRefs.concatenate(
            [x._replace(reader=x.reader + first, stage=x.stage + i) for i, (x, first) in numbered]
        )

    def pairs(of_stages: Sequence[Int]) -> Int:
        shifted = [p + first for p, first in zip(of_stages, start, strict=True)]
        return np.concatenate(shifted, axis=1)

    joined: dict[str, Any] = {
        name: np.concatenate([getattr(c, name) for c in columns]) for name in (*COLUMNS, "category")
    }
    return ValueColumns(
        names=[name for c in columns for name in c.names],
        stage=np.repeat(np.arange(len(columns)), counts),
        **joined,
        touches=refs([c.touches for c in columns]),
        requires=refs([c.requires for c in columns]),
        first_gradients=pairs([c.first_gradients for c in columns]),
        gathered_pairs=pairs([c.gathered_pairs for c in columns]),
    )


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
        rows = np.where(made[columns.touches.reader], _touching_rows(order, columns), -1)
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
    once = touches.once_per_step & columns.once_per_step[touches.reader]
    single = np.flatnonzero((touches.pass_part >= 0) & once)
    t = touches.take(single)
    rows[single] = _rows(order, once_action[t.pass_part, t.stage][:, None], t)
    for local_stage, row in enumerate(order.optimizer.row_of):
        touch = np.flatnonzero((touches.pass_part < 0) & (touches.stage == local_stage))
        rows[touch] = order.optimizer_begin + row[touches.segment_row[touch], None]
    return rows


def _actions(order: RankOrder, touches: RowRefs) -> Int:
    """Actions of the schedule that have the rows: [touches, microbatches]; -1: none."""
    actions = order.schedule.action_of
    following = np.concatenate([actions[:, :, 1:], np.full_like(actions[:, :, :1], -1)], axis=2)
    shift = touches.next_microbatch.astype(np.int64)
    selected = np.stack([actions, following])[shift, touches.pass_part, touches.stage]
    _, input_half, weight_half = actions
    absent = touches.if_split[:, None] & (input_half == weight_half)[touches.stage]
    return np.where(absent | (touches.pass_part[:, None] < 0), -1, selected)


def _prefetching_actions(order: RankOrder, actions: Int, touches: RowRefs) -> Int:
    """Actions that prefetch weights of forwards before all other actions; -1: none."""
    if not order.reuses_gathered:
        return np.full_like(actions, -1)
    gathered_by = order.gathered_by[actions]
    prefetched = (actions >= 0) & (order.schedule.kind[gathered_by] == UNSHARD)
    return np.where(prefetched & (touches.pass_part == 0)[:, None], gathered_by, -1)


def _rows(order: RankOrder, actions: Int, touches: RowRefs) -> Int:
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
    once = columns.once_per_step[requires.reader]
    actions[once] = actions[once, -1:]
    row = _rows(order, actions, requires)
    prefetch = _rows(order, _prefetching_actions(order, actions, requires), requires)
    exists[requires.reader] &= np.maximum(row, prefetch) >= 0
    start = first[requires.reader]
    last[requires.reader] = np.where(prefetch >= 0, start, last[requires.reader])
    first[requires.reader] = np.where(prefetch >= 0, np.minimum(start, prefetch), start)


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


def relabel_layers(layer: Int, stage: Stage, labels: StageLabels) -> Int:
    """Layers of a stage's values in another stage of the same class."""
    result = layer.copy()
    for placed, new_layer in zip(stage.blocks, labels.layers, strict=True):
        result[layer == placed.layer] = new_layer
    return result


def rank_values(order: RankOrder, labels: Sequence[StageLabels], sizes: ValueSizes) -> Values:
    """Values of a rank with their first and last rows; `labels` by stage of the rank."""
    columns, interner = rank_columns(order.stages), Interner[str]()
    layers = [
        relabel_layers(stage.value_columns.layer, stage, stage_labels)
        for stage, stage_labels in zip(order.stages, labels, strict=True)
    ]
    return Values(
        interner.ids(columns.names).astype(np.int32),
        np.array([stage_labels.stage for stage_labels in labels], np.int32)[columns.stage],
        np.concatenate(layers).astype(np.int32),
        columns.category.astype(np.uint8),
        _value_sizes(order, sizes),
        *(column.astype(np.int32) for column in live_ranges(order)),
        names=tuple(interner.table),
    )


def _value_sizes(order: RankOrder, sizes: ValueSizes) -> Int:
    """Bytes of the values of a rank."""
    return np.concatenate([sizes.get(s, s.value_columns.size) for s in order.stages])
