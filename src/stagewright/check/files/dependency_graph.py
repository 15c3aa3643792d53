"""Dependencies between the nodes of one rank: order, cycles, chains, all on arrays.

>>> graph = DependencyGraph(4, np.array([1, 2, 3]), np.array([0, 1, 1]))
>>> graph.unordered(np.arange(4), np.array([0, 2, 3])).tolist()
[2]
>>> graph.longest(np.arange(4)).tolist()
[0, 1, 2]
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Bool, Int
from stagewright.trace.formats.wire import Words


@dataclass(frozen=True, slots=True, eq=False)
class DependencyGraph:
    """`count` rows; row `child[i]` needs row `parent[i]`. A pair may come twice."""

    count: int
    child: Int
    parent: Int

    def parents(self) -> tuple[list[int], list[int]]:
        """The pairs as CSR: row `i` needs `second[first[i]:first[i + 1]]`."""
        return _grouped(self.child, self.parent, self.count)

    def children(self) -> tuple[list[int], list[int]]:
        """The pairs as CSR: row `i` is needed by `second[first[i]:first[i + 1]]`."""
        return _grouped(self.parent, self.child, self.count)

    def order(self, ids: NDArray[np.uint64]) -> Int:
        """All rows in topological order; of several rows that could come next, the lowest id first.

        Rows of a cycle, and those that need them, are left out.
        """
        rows = np.argsort(ids, kind="stable")
        place = np.empty(self.count, np.int64)
        place[rows] = np.arange(self.count)
        if (place[self.parent] < place[self.child]).all():
            return rows
        first, needs = _grouped(place[self.parent], place[self.child], self.count)
        missing = np.bincount(place[self.child], minlength=self.count).tolist()
        ready = [row for row in range(self.count) if not missing[row]]  # ascending: a heap
        ordered: list[int] = []
        while ready:
            row = heapq.heappop(ready)
            ordered.append(row)
            for child in needs[first[row] : first[row + 1]]:
                missing[child] -= 1
                if not missing[child]:
                    heapq.heappush(ready, child)
        return rows[np.array(ordered, np.int64)]

    def cycle(self, order: Int) -> list[int]:
        """Rows of a cycle, each needing the next; `order` is what `order` returns."""
        left = np.ones(self.count, bool)
        left[order] = False
        inside = np.flatnonzero(left[self.child] & left[self.parent])
        need = dict(zip(self.child[inside].tolist(), self.parent[inside].tolist(), strict=True))
        row = next(iter(need))
        path: dict[int, int] = {}
        while row not in path:
            path[row] = len(path)
            row = need[row]
        return list(path)[path[row] :]

    def unlinked(self, rows: Int) -> Int:
        """Places in `rows` of rows that do not directly need the row before."""
        before = np.full(self.count, -1)
        before[rows[1:]] = rows[:-1]
        linked = np.zeros(self.count, bool)
        linked[self.child[before[self.child] == self.parent]] = True
        return np.flatnonzero(~linked[rows[1:]]) + 1

    def unordered(self, order: Int, rows: Int) -> Int:
        """Places in `rows` (ascending by `order`) of rows that do not need the row before."""
        if not len(self.unlinked(rows)):
            return np.zeros(0, np.int64)
        position = np.full(self.count, -1)
        position[rows] = np.arange(len(rows))
        # The last of `rows` that a row needs, itself or through others.
        first, needs = self.parents()
        latest = [-1] * self.count
        positions, unordered = position.tolist(), list[int]()
        for row in order.tolist():
            last = max((latest[p] for p in needs[first[row] : first[row + 1]]), default=-1)
            if positions[row] >= 0:
                if last != positions[row] - 1:
                    unordered.append(positions[row])
                last = positions[row]
            latest[row] = last
        return np.array(unordered, np.int64)

    def late(self, order: Int, rows: Int) -> Int:
        """A sort key per row: its place in `order`; for `rows` just before who needs them."""
        place = np.empty(self.count, np.int64)
        place[order] = np.arange(len(order))
        first = np.full(self.count, self.count)
        np.minimum.at(first, self.parent, place[self.child])
        key = 2 * place + 1
        key[rows] = 2 * first[rows]
        return key

    def longest(self, order: Int) -> Int:
        """Rows of a longest path, from a row that needs nothing."""
        first, needs = self.parents()
        length, via = [0] * self.count, [-1] * self.count
        for row in order.tolist():
            for parent in needs[first[row] : first[row + 1]]:
                if length[parent] >= length[row]:
                    length[row], via[row] = length[parent] + 1, parent
        row = max(order.tolist(), key=length.__getitem__, default=-1)
        path: list[int] = []
        while row >= 0:
            path.append(row)
            row = via[row]
        return np.array(path[::-1], np.int64)


def graph_of_ids(ids: Words, child: Int, needed: Words) -> tuple[DependencyGraph, Bool]:
    """The graph in which row `child[i]` needs the row of id `needed[i]`; ids are unique.

    Also the mask of the pairs whose id exists; others are left out of the graph.
    """
    by_id = np.argsort(ids, kind="stable")
    place = np.minimum(np.searchsorted(ids[by_id], needed), len(ids) - 1)
    exists = ids[by_id[place]] == needed
    return DependencyGraph(len(ids), child[exists], by_id[place[exists]]), exists


def graph_of_lists(ptr: Sequence[Int], values: Sequence[Int]) -> DependencyGraph:
    """A graph of several lists of needed rows per row, each in CSR."""
    count = len(ptr[0]) - 1
    rows = np.arange(count)
    child = np.concatenate([np.repeat(rows, np.diff(p)) for p in ptr])
    return DependencyGraph(count, child, np.concatenate(list(values)))


def _grouped(key: Int, value: Int, count: int) -> tuple[list[int], list[int]]:
    by_key = np.argsort(key, kind="stable")
    ends = np.cumsum(np.bincount(key, minlength=count))
    return [0, *ends.tolist()], value[by_key].tolist()
