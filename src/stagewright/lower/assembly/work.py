"""Work of a pipeline rank of an assembled program: rows, values and memory on demand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Int, offsets
from stagewright.lower.assembly.live_ranges import (
    ValueSizes,
    rank_values,
    relabel_layers,
)
from stagewright.lower.assembly.rank_order import RankOrder
from stagewright.lower.assembly.segments import Interner, StageLabels, row_layers, row_names
from stagewright.lower.assembly.stages import Stage
from stagewright.lower.assembly.streams import order_by_streams
from stagewright.program.columns import Actions, RankClass, RankWork, Tasks, Values

_COPY_COLUMNS = ("name", "stage", "layer", "microbatch", "tag")
"""Columns that differ between copies of a row."""
_POINTERS = ("data_ptr", "data", "order_ptr", "order")


class RowNames:
    """Names of all rows of a program, numbered in the order in which they first occur.

    Rank by rank: forwards from the first stage on, backwards from the last one on; then the
    optimizer actions.
    """

    def __init__(
        self, orders: Sequence[RankOrder], labels: Sequence[Sequence[StageLabels]]
    ) -> None:
        """By rank; `labels`: of its stages."""
        self.labels, self._orders = labels, orders

    @cached_property
    def _numbers(self) -> tuple[tuple[str, ...], list[list[Int]]]:
        """All names; by rank, numbers of the names of its segments (`RankOrder.segments`)."""
        interner = Interner[str]()
        numbers: list[list[Int]] = []
        for order, labels in zip(self._orders, self.labels, strict=True):
            names = [row_names(s, [labels[i // 2]]) for i, s in enumerate(order.segments[:-1])]
            ids: dict[int, Int] = {i: interner.ids(names[i]) for i in range(0, len(names), 2)}
            ids |= {i: interner.ids(names[i]) for i in range(len(names) - 1, 0, -2)}
            numbers.append([ids[i] for i in range(len(names))])
        for rank, order in enumerate(self._orders):
            numbers[rank].append(interner.ids(row_names(order.optimizer, self.labels[rank])))
        return tuple(interner.table), numbers

    @property
    def names(self) -> tuple[str, ...]:
        """Names by number."""
        return self._numbers[0]

    def of_rank(self, rank: int) -> list[Int]:
        """Numbers of the names of the rank's segments."""
        return self._numbers[1][rank]


class StageBytes(NamedTuple):
    """Values of a stage: layer (of the stage whose columns `Actions` has) and bytes of each."""

    stage: Stage
    layer: Int
    size: Int


class AssembledWork(RankWork):
    """Work of a rank of an assembled program.

    Classes of a pipeline rank share order, rows and dependencies; sizes may differ.
    """

    def __init__(
        self,
        actions: Actions,
        order: RankOrder,
        names: RowNames,
        rank: int,
        streams: str,
        sizes: ValueSizes | None = None,
    ) -> None:
        """`sizes`: bytes of values by stage, where they differ from those of the stage."""
        self.actions, self._order = actions, order
        self._names, self._rank, self._streams = names, rank, streams
        self._sizes: ValueSizes = sizes or {}

    @cached_property
    def order(self) -> RankOrder:
        """Copies of the actions."""
        return self._order

    @property
    def rows(self) -> Int:
        """Rows of `actions` that this rank has copies of."""
        rows = [self.actions.rows(action) for action in self.order.distinct]
        return np.concatenate([np.zeros(0, dtype=np.int64), *rows])

    @property
    def stage_bytes(self) -> list[StageBytes]:
        """Values of the rank's stages, by distinct stage."""
        table = self.order.table
        result: list[StageBytes] = []
        classes: list[int] = self.order.stage_classes.tolist()
        for stage_class in dict.fromkeys(classes):
            stage = table.stages[stage_class]
            columns = stage.value_columns
            layer = relabel_layers(columns.layer, stage, table.labels[stage_class])
            result.append(StageBytes(stage, layer, self._sizes.get(stage, columns.size)))
        return result

    def with_numbers(self, tasks: Tasks, sizes: ValueSizes) -> AssembledWork:
        """Replace numbers: columns of actions, and bytes of values by stage.

        Rows, dependencies and order stay the same objects.
        """
        old = self.actions
        tasks = replace(tasks, data_ptr=old.tasks.data_ptr, data=old.tasks.data)
        actions = replace(old, tasks=tasks)
        return AssembledWork(actions, self.order, self._names, self._rank, self._streams, sizes)

    @cached_property
    def tasks(self) -> Tasks:
        """Rows of all copies, in program order."""
        order, tasks = self.order, self.actions.tasks
        sizes = np.diff(order.begin)
        copy = np.repeat(np.arange(len(order.action)), sizes)
        begin = order.table.begin[order.action]
        row = np.arange(order.total) - np.repeat(order.begin[:-1] - begin, sizes)
        columns: dict[str, NDArray[Any]] = {
            f.name: column[row]
            for f in fields(Tasks)
            if f.name not in (*_COPY_COLUMNS, *_POINTERS)
            and isinstance(column := getattr(tasks, f.name), np.ndarray)
        }
        columns |= self._copy_columns(copy, row)
        num_deps = np.diff(tasks.data_ptr)[row]
        data_ptr = offsets(num_deps)
        order_ptr, order_deps = order_by_streams(columns, num_deps, self._streams)
        return replace(
            tasks, **columns, names=self._names.names, data_ptr=data_ptr,
            data=self._dep_rows(data_ptr), order_ptr=order_ptr, order=order_deps,
        )  # fmt: skip

    def _copy_columns(self, copy: Int, row: Int) -> dict[str, NDArray[np.int32]]:
        """Columns that differ between copies; `row`: of `actions`."""
        order, table = self.order, self.order.table
        labels, segments = self._names.labels[self._rank], self.order.segments
        part = table.actions.part[row]
        stage, microbatch = order.stage[copy, part], order.microbatch[copy, part]
        microbatch = np.where(table.actions.tasks.microbatch[row] < 0, -1, microbatch)
        # Segments of the rank, one after another: rows of each have a name and a layer.
        segment = 2 * np.searchsorted(order.schedule.stages, stage) + table.segment[row] % 2
        segment[order.optimizer_begin :] = len(segments) - 1
        at = offsets([*map(len, segments)])[segment] + table.segment_row[row]
        name = np.concatenate(self._names.of_rank(self._rank))[at]
        layers = [row_layers(s, [labels[i // 2]]) for i, s in enumerate(segments[:-1])]
        layer = np.concatenate([*layers, row_layers(segments[-1], labels)])[at]
        optimizer_stage = np.append(order.schedule.stages, -1)[order.optimizer.stage]
        stage[order.optimizer_begin :] = optimizer_stage
        tag = np.full(order.total, -1, dtype=np.int64)
        for action in order.distinct:
            rows = table.actions.rows(action)
            copies = order.begin[order.copies(action)][:, None] + np.arange(len(rows))
            tag[copies] = order.tags(action, rows)
        columns = zip(_COPY_COLUMNS, (name, stage, layer, microbatch, tag), strict=True)
        return {column: values.astype(np.int32) for column, values in columns}

    def _dep_rows(self, data_ptr: Int) -> NDArray[np.int32]:
        """Rows that the rows of the rank depend on."""
        order, actions = self.order, self.order.table.actions
        data = np.empty(int(data_ptr[-1]), dtype=np.int32)
        for action in order.distinct:
            entries = actions.dep_entries(action)
            copy, row = order.sources(action, entries)
            first = data_ptr[order.begin[order.copies(action)]]
            dep_row = order.begin[copy] + row - actions.begin[order.action[copy]]
            data[first[:, None] + np.arange(len(entries))] = dep_row
        return data

    @cached_property
    def values(self) -> Values:
        """Values in memory, with the live range of each."""
        return rank_values(self.order, self._names.labels[self._rank], self._sizes)


def assembled(rank_class: RankClass) -> AssembledWork:
    """Work of a class of an assembled program."""
    assert isinstance(rank_class.work, AssembledWork)
    return rank_class.work
