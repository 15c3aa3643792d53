"""Which instances of a rank's values are there while which of its rows run."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Self

import numpy as np

from stagewright.arrays import Bool, Int, distinct_numbers, is_any
from stagewright.lower.assembly.assemble import AssembledRank
from stagewright.program.columns import TaskKind, Tasks


class Live:
    """Which instances of values are there when."""

    def __init__(self, rank: AssembledRank, number: Int, count: int) -> None:
        """Of a rank: the number of each value's size, of so many sizes."""
        values = rank.of.values
        self.number, self.count = number[values.value], count
        self.stage = values.stage[values.value]
        self.microbatch = values.microbatch
        self.issued, self.last = values.first.astype(np.int64), values.last.astype(np.int64)
        ready = _ready(rank.of.tasks)
        self.first = np.where(self.issued >= 0, ready[self.issued], self.issued)

    def certain(self, tasks: Tasks) -> Self:
        """The same where values are there only between kernels that need them: so much is there
        however long transfers take, and whenever they begin."""
        found = copy(self)
        found.first, found.last = _certain(tasks, self.issued, self.last)
        return found

    @property
    def none(self) -> Int:
        """No instances of any size."""
        return np.zeros(self.count, dtype=np.int64)

    def counts(self, begin: int, end: int, of: Sequence[tuple[int, int | None]]) -> Int:
        """Live instances of each size while each row runs: [rows, sizes].

        They are those of microbatches of stages, and what these stages have for all of them; of the
        microbatch None, all instances.
        """
        there = self._of(of) & (self.first < end) & (self.last >= begin)
        return self._changes(begin, end, np.flatnonzero(there), self.first)

    def _of(self, of: Sequence[tuple[int, int | None]]) -> Bool:
        mine = np.zeros(len(self.number), dtype=bool)
        for stage, microbatch in of:
            same = self.microbatch == microbatch if microbatch is not None else self.first >= -1
            mine |= (self.stage == stage) & (same | (self.microbatch < 0))
        return mine

    def _changes(self, begin: int, end: int, there: Int, since: Int) -> Int:
        number, size = self.number[there], (end - begin + 1) * self.count
        come = (np.maximum(since[there], begin) - begin) * self.count + number
        go = (np.minimum(self.last[there] + 1, end) - begin) * self.count + number
        change = np.bincount(come, minlength=size) - np.bincount(go, minlength=size)
        return change.reshape(end - begin + 1, self.count)[:-1].cumsum(axis=0)

    def lasting_to(self, rows: Int) -> tuple[Int, Int]:
        """The first and the last row of instances that some rows are the last to touch, and how
        many of each size they are: [pairs, 2], [pairs, sizes]."""
        return self._by_rows(np.flatnonzero(np.isin(self.last, rows)))

    def last_at(self, rows: Int, group: Int) -> Int:
        """How many instances of each size some rows are the last to touch, by the group of the row:
        [groups, sizes]."""
        order = np.argsort(rows)
        at = np.searchsorted(rows[order], self.last)
        there = np.flatnonzero(np.append(rows[order], -2)[at] == self.last)
        counts = np.zeros((int(group.max(initial=-1)) + 1, self.count), dtype=np.int64)
        np.add.at(counts, (group[order][at[there]], self.number[there]), 1)
        return counts

    def apart(
        self, begin: int, end: int, of: Sequence[tuple[int, int | None]], come: Bool, go: Bool
    ) -> tuple[Int, Int, Int]:
        """As `counts` in the order of issue, without the instances that come with some of the rows
        from `begin` to `end` or go with some; and these as `lasting_to` has them."""
        there = np.flatnonzero(self._of(of) & (self.issued < end) & (self.last >= begin))
        first, last = self.issued[there] - begin, self.last[there] - begin
        apart = (first >= 0) & come[np.maximum(first, 0)]
        apart |= (last < end - begin) & go[np.minimum(last, end - begin - 1)]
        counts = self._changes(begin, end, there[~apart], self.issued)
        return counts, *self._by_rows(there[apart])

    def _by_rows(self, some: Int) -> tuple[Int, Int]:
        issued, last = self.issued[some], self.last[some]
        distinct, of = distinct_numbers([issued + 1, last + 1], len(some))
        pairs = np.stack([issued, last], axis=1)[distinct]
        counts = np.zeros((len(pairs), self.count), dtype=np.int64)
        np.add.at(counts, (of, self.number[some]), 1)
        return pairs, counts

    def always(self, row: int, stage: int) -> Int:
        """Instances of each size that a stage has for all microbatches while a row runs."""
        return self.through(row, row, -1, [stage])

    def through(self, begin: int, end: int, microbatch: int | None, stages: Sequence[int]) -> Int:
        """Instances of each size that are live from one row to another; those of a microbatch
        without those for all."""
        mine = self.microbatch == microbatch if microbatch is not None else self.first >= -1
        mine = mine & is_any(self.stage, stages)
        there = mine & (self.first <= begin) & (self.last >= end)
        return np.bincount(self.number[there], minlength=self.count)


def _ready(tasks: Tasks) -> Int:
    """By row, the first row beside which its task may run: that behind all rows which the task
    waits for, if it is a collective, which need not wait for kernels that were issued before it.

    What it makes is there from then on (`time.simulate.memory`).
    """
    rows = np.arange(len(tasks))
    behind = np.full(len(tasks), -1)
    for pointer, needed in ((tasks.data_ptr, tasks.data), (tasks.order_ptr, tasks.order)):
        np.maximum.at(behind, np.repeat(rows, np.diff(pointer)), needed)
    apart = (tasks.kind == TaskKind.COLLECTIVE) & (behind >= 0)
    return np.where(apart, behind + 1, rows)


def _certain(tasks: Tasks, first: Int, last: Int) -> tuple[Int, Int]:
    """Of values with these first and last rows, the kernels between which they are certainly there;
    behind all rows: none are known.

    What a transfer makes is there when the first kernel runs that reads it; what a transfer is the
    last to read, when the last kernel ran that the transfer has to wait for.
    """
    total = len(tasks)
    kernel = (tasks.kind == TaskKind.COMPUTE) & (tasks.slot < 0)  # of the model's stream
    owner, needed = tasks.reads
    reader = np.full(total, total)
    np.minimum.at(reader, needed[kernel[owner]], owner[kernel[owner]])
    rows = np.arange(total)
    begin = np.where(first >= 0, np.where(kernel, rows, reader)[np.maximum(first, 0)], first)
    end = np.where(last < total, _waited_for(tasks, kernel)[np.minimum(last, total - 1)], last)
    return np.where(begin <= end, begin, total), end


def _waited_for(tasks: Tasks, kernel: Bool) -> Int:
    """By row, the last kernel that has run before it begins; of a kernel, itself.

    A transfer waits for what it reads and, a collective, for those of its communicator before it.
    """
    found: list[int] = np.where(kernel, np.arange(len(tasks)), -1).tolist()
    pointer: list[int] = tasks.data_ptr.tolist()
    needed: list[int] = tasks.data.tolist()
    latest: dict[int, int] = {}
    slots: list[int] = np.where(tasks.kind == TaskKind.COLLECTIVE, tasks.slot, -1).tolist()
    for row in np.flatnonzero(~kernel).tolist():
        slot = slots[row]
        behind = [found[need] for need in needed[pointer[row] : pointer[row + 1]]]
        found[row] = max([*behind, latest.get(slot, -1)])
        if slot >= 0:
            latest[slot] = found[row]
    return np.array(found, dtype=np.int64)
