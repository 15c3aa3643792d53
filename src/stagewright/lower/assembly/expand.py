"""Rows of a pipeline rank, copied from those of distinct actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Int
from stagewright.lower.assembly.distinct_actions import (
    ActionTable,
    StageLabels,
    optimizer_layers,
    optimizer_names,
)
from stagewright.lower.assembly.rank_order import RankOrder
from stagewright.lower.assembly.segments import Interner
from stagewright.lower.assembly.streams import order_by_streams
from stagewright.program.columns import Tasks

_OF_COPY = ("name", "stage", "layer", "microbatch", "tag")
"""Columns that differ between copies of a row."""
_POINTERS = ("data_ptr", "data", "order_ptr", "order")


class RowNames:
    """Names of all rows of a program, numbered in the order in which they first occur.

    Rank by rank: forwards from the first stage on, backwards from the last one on, then the
    optimizer action.
    """

    def __init__(
        self,
        table: ActionTable,
        stage_classes: Sequence[Sequence[int]],
        optimizer_indices: Sequence[int],
        labels: Sequence[Sequence[StageLabels]],
        *,
        trains: bool,
    ) -> None:
        """By rank: classes of its stages, index of its optimizer step, labels of its stages."""
        self.labels, self._table, self._trains = labels, table, trains
        self._stage_classes, self._optimizer_indices = stage_classes, optimizer_indices

    @cached_property
    def _numbers(self) -> tuple[tuple[str, ...], dict[tuple[int, int, bool], Int], list[Int]]:
        """All names; numbers by (rank, local stage, backward); numbers of optimizer actions."""
        table, interner = self._table, Interner[str]()
        rows: dict[tuple[int, int, bool], Int] = {}
        for rank, classes in enumerate(self._stage_classes):
            stages = [*enumerate(zip(classes, self.labels[rank], strict=True))]
            for local_stage, (stage_class, labels) in stages:
                names = labels.row_names(table.stages[stage_class].forward)
                rows[rank, local_stage, False] = np.array(interner.ids(names), np.int64)
            for local_stage, (stage_class, labels) in reversed(stages) if self._trains else ():
                names = labels.row_names(table.stages[stage_class].backward)
                rows[rank, local_stage, True] = np.array(interner.ids(names), np.int64)
        optimizer: list[Int] = []
        for labels, index in zip(self.labels, self._optimizer_indices, strict=True):
            names = optimizer_names(labels, table.optimizer_steps[index])
            optimizer.append(np.array(interner.ids(names), np.int64))
        return tuple(interner.table), rows, optimizer

    @property
    def names(self) -> tuple[str, ...]:
        """Names by number."""
        return self._numbers[0]

    def of_stage(self, rank: int, local_stage: int, *, backward: bool) -> Int:
        """Numbers of the names of a segment's rows, of one of the rank's stages."""
        return self._numbers[1].get((rank, local_stage, backward), np.zeros(0, dtype=np.int64))

    def of_optimizer(self, rank: int) -> Int:
        """Numbers of the names of the rank's optimizer action."""
        return self._numbers[2][rank]


def expand_rows(order: RankOrder, tasks: Tasks, names: RowNames, rank: int, streams: str) -> Tasks:
    """Rows of a rank; `tasks`: rows of its actions, whose numbers may differ from the table's.

    `streams` as in `order_by_streams`.
    """
    table, schedule = order.table, order.schedule
    sizes = np.diff(order.begin)
    copy = np.repeat(np.arange(len(order.action)), sizes)
    begin = table.actions.begin[order.action]
    row = np.arange(order.total) - np.repeat(order.begin[:-1] - begin, sizes)
    columns: dict[str, NDArray[Any]] = {
        f.name: column[row]
        for f in fields(Tasks)
        if f.name not in (*_OF_COPY, *_POINTERS)
        and isinstance(column := getattr(tasks, f.name), np.ndarray)
    }
    part = table.actions.part[row]
    stage, microbatch = order.stage[copy, part], order.microbatch[copy, part]
    name, layer, tag = (np.full(order.total, -1, dtype=np.int64) for _ in range(3))
    end = order.optimizer_begin
    local_stage = np.searchsorted(schedule.stages, stage[:end])
    name[:end], layer[:end] = _names_and_layers(order, names, rank, local_stage, row[:end])
    if end < order.total:
        rows = table.optimizer_steps[order.optimizer_index]
        name[end:] = names.of_optimizer(rank)
        layer[end:] = optimizer_layers(names.labels[rank], rows)
        stage[end:] = np.append(schedule.stages, -1)[rows.stage]
    for action in order.distinct:
        action_rows = table.actions.rows(action)
        copies = order.begin[order.copies(action)][:, None] + np.arange(len(action_rows))
        tag[copies] = order.tags(action, action_rows)
    microbatch = np.where(table.actions.tasks.microbatch[row] < 0, -1, microbatch)
    for column, values in zip(_OF_COPY, (name, stage, layer, microbatch, tag), strict=True):
        columns[column] = values.astype(np.int32)
    num_deps = np.diff(table.actions.tasks.data_ptr)[row]
    data_ptr = np.concatenate([[0], np.cumsum(num_deps)]).astype(np.int64)
    order_ptr, order_deps = order_by_streams(columns, num_deps, streams)
    return replace(
        tasks, **columns, names=names.names, data_ptr=data_ptr, data=_dep_rows(order, data_ptr),
        order_ptr=order_ptr, order=order_deps,
    )  # fmt: skip


def _dep_rows(order: RankOrder, data_ptr: Int) -> NDArray[np.int32]:
    """Rows that the rows of a rank depend on."""
    actions = order.table.actions
    data = np.empty(int(data_ptr[-1]), dtype=np.int32)
    for action in order.distinct:
        entries = actions.dep_entries(action)
        copy, row = order.sources(action, entries)
        first = data_ptr[order.begin[order.copies(action)]]
        dep_row = order.begin[copy] + row - actions.begin[order.action[copy]]
        data[first[:, None] + np.arange(len(entries))] = dep_row
    return data


def _names_and_layers(
    order: RankOrder, names: RowNames, rank: int, local_stage: Int, row: Int
) -> tuple[Int, Int]:
    """Names and layers of rows of `Actions.tasks` in the stages of a rank."""
    begin: list[int] = []
    name: list[Int] = []
    layer: list[Int] = []
    size = 0
    for i, (stage, labels) in enumerate(zip(order.stages, names.labels[rank], strict=True)):
        for segment, backward in ((stage.forward, False), (stage.backward, True)):
            begin.append(size)
            size += len(segment)
            name.append(names.of_stage(rank, i, backward=backward))
            layer.append(labels.layers_of_blocks(segment.block))
    table = order.table
    segment_begin = np.array(begin, dtype=np.int64)[local_stage * 2 + table.backward[row]]
    at = segment_begin + table.segment_row[row]
    return np.concatenate(name)[at], np.concatenate(layer)[at]
