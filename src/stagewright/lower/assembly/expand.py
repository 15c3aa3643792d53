"""The rows of a pipeline rank, copied from those of distinct actions."""

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
    Naming,
    layers_after,
    names_after,
)
from stagewright.lower.assembly.rank_order import RankOrder
from stagewright.lower.assembly.segments import Numbers
from stagewright.lower.assembly.streams import order_by_streams
from stagewright.program.columns import Tasks

_OF_COPY = ("name", "stage", "layer", "microbatch", "tag")
"""Columns that differ between copies of a row."""
_POINTERS = ("data_ptr", "data", "order_ptr", "order")


class Names:
    """The names of all rows of a program, numbered in the order in which they are first met: rank
    by rank, those of forwards from the first stage on, of backwards from the last one on, then
    those after all actions."""

    def __init__(
        self,
        table: ActionTable,
        ranks: Sequence[Sequence[int]],
        afters: Sequence[int],
        naming: Sequence[Sequence[Naming]],
        *,
        trains: bool,
    ) -> None:
        """By rank: the contents of its stages, its rows after all actions (a number among
        `ActionTable.afters`), and the naming of its stages."""
        self._table, self._ranks, self._afters = table, ranks, afters
        self._naming, self._trains = naming, trains

    @cached_property
    def _numbered(self) -> tuple[tuple[str, ...], dict[tuple[int, int, bool], Int], list[Int]]:
        """All names; by rank, place of the stage and direction those of rows; by rank, those of
        rows after all actions."""
        table, numbers = self._table, Numbers[str]()
        rows: dict[tuple[int, int, bool], Int] = {}
        for rank, contents in enumerate(self._ranks):
            stages = [*enumerate(zip(contents, self._naming[rank], strict=True))]
            for place, (content, named) in stages:
                segment = table.stages[content].forward
                rows[rank, place, False] = np.array(numbers.each(named.names(segment)), np.int64)
            for place, (content, named) in reversed(stages) if self._trains else ():
                segment = table.stages[content].backward
                rows[rank, place, True] = np.array(numbers.each(named.names(segment)), np.int64)
        after: list[Int] = []
        for named, nth in zip(self._naming, self._afters, strict=True):
            names = names_after(named, table.afters[nth].rows)
            after.append(np.array(numbers.each(names), np.int64))
        return tuple(numbers.table), rows, after

    @property
    def names(self) -> tuple[str, ...]:
        """By number."""
        return self._numbered[0]

    def of_stage(self, rank: int, place: int, *, backward: bool) -> Int:
        """Those of the rows of a segment of one of the rank's stages."""
        return self._numbered[1].get((rank, place, backward), np.zeros(0, dtype=np.int64))

    def after(self, rank: int) -> Int:
        """Those of the rows after all actions."""
        return self._numbered[2][rank]

    def naming(self, rank: int) -> Sequence[Naming]:
        """Of the stages of a rank."""
        return self._naming[rank]


def expanded(order: RankOrder, of: Tasks, names: Names, rank: int, streams: str) -> Tasks:
    """The rows of a rank; `of` are those of its table's actions, as ranks with its loads have them.

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
        and isinstance(column := getattr(of, f.name), np.ndarray)
    }
    part = table.actions.part[row]
    stage, microbatch = order.stage[copy, part], order.microbatch[copy, part]
    name, layer, tag = (np.full(order.total, -1, dtype=np.int64) for _ in range(3))
    naming, end = names.naming(rank), order.end
    blocks = _BlockNames(order, names, rank)
    place = np.searchsorted(schedule.stages, stage[:end])
    name[:end], layer[:end] = blocks.of(place, table.backward[row[:end]], table.place[row[:end]])
    if end < order.total:
        rows = table.afters[order.after].rows
        name[end:], layer[end:] = names.after(rank), layers_after(naming, rows)
        stage[end:] = np.append(schedule.stages, -1)[rows.stage]
    for action in order.distinct:
        of_action = table.actions.rows(action)
        copies = order.begin[order.copies(action)][:, None] + np.arange(len(of_action))
        tag[copies] = order.tags(action, of_action)
    microbatch = np.where(table.actions.tasks.microbatch[row] < 0, -1, microbatch)
    for column, found in zip(_OF_COPY, (name, stage, layer, microbatch, tag), strict=True):
        columns[column] = found.astype(np.int32)
    counts = np.diff(table.actions.tasks.data_ptr)[row]
    data_ptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    order_ptr, waits = order_by_streams(columns, counts, streams)
    return replace(
        of, **columns, names=names.names, data_ptr=data_ptr, data=_needed(order, data_ptr),
        order_ptr=order_ptr, order=waits,
    )  # fmt: skip


def _needed(order: RankOrder, data_ptr: Int) -> NDArray[np.int32]:
    """The rows that all rows of a rank need, one after the other."""
    actions = order.table.actions
    data = np.empty(int(data_ptr[-1]), dtype=np.int32)
    for action in order.distinct:
        needs = actions.needs(action)
        copy, row = order.sources(action, needs)
        at = data_ptr[order.begin[order.copies(action)]]
        needed = order.begin[copy] + row - actions.begin[order.action[copy]]
        data[at[:, None] + np.arange(len(needs))] = needed
    return data


class _BlockNames:
    """Names and layers of the rows of a rank's stages."""

    def __init__(self, order: RankOrder, names: Names, rank: int) -> None:
        begin: list[int] = []
        name: list[Int] = []
        layer: list[Int] = []
        size = 0
        for place, naming in enumerate(names.naming(rank)):
            stage = order.table.stages[int(order.contents[place])]
            for segment, backward in ((stage.forward, False), (stage.backward, True)):
                begin.append(size)
                size += len(segment)
                name.append(names.of_stage(rank, place, backward=backward))
                layer.append(naming.layers_of(segment.block))
        self._begin = np.array(begin, dtype=np.int64)
        self._name, self._layer = np.concatenate(name), np.concatenate(layer)

    def of(self, stage: Int, backward: Any, place: Int) -> tuple[Int, Int]:
        """Names and layers of places in the segments of the rank's stages."""
        at = self._begin[stage * 2 + backward] + place
        return self._name[at], self._layer[at]
