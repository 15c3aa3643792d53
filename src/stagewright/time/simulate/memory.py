"""Memory over time: the bytes that the values of a rank's program take while the step runs.

A value is allocated when the first task that touches it could start, and freed when the last in
issue order ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Int, distinct_values
from stagewright.program.columns import CATEGORIES
from stagewright.program.memory import Deltas, deltas
from stagewright.program.step import MemoryChanges
from stagewright.time.simulate.timeline import TICK, Lane, Timeline


@dataclass(frozen=True, slots=True, eq=False)
class MemoryTimeline:
    """Bytes held per memory category (in the order of `CATEGORIES`), as a step function of time."""

    ticks: Int  # ascending
    size: Int  # [categories, times]

    @property
    def peak(self) -> int:
        """The most at any time."""
        return int(self.size.sum(axis=0).max(initial=0))

    def pairs(self) -> list[tuple[float, int]]:
        """Pairs of seconds and bytes of all categories."""
        seconds = (self.ticks * TICK).tolist()
        return list(zip(seconds, self.size.sum(axis=0).tolist(), strict=True))

    def sampled(self, points: int) -> MemoryTimeline:
        """Reduced to at most `points`: of each span of time, the moment with the most bytes."""
        if len(self.ticks) <= points:
            return self
        span = self.ticks * points // (int(self.ticks[-1]) + 1)
        order = np.lexsort((self.size.sum(axis=0), span))
        last = np.flatnonzero(np.diff(span[order], append=points))
        chosen = order[last]
        return MemoryTimeline(self.ticks[chosen], self.size[:, chosen])


class Peak(NamedTuple):
    """What a lane holds when it holds most."""

    seconds: float
    """When that is first so."""
    by_category: dict[str, int]
    """Bytes; those of which there are none are left out."""


def peak(line: Timeline, lane: int) -> Peak:
    """The peak of a lane's memory over time, from the times of its actions: no rows are expanded.

    A value is there from when the first task that touches it could start until the last one ends.
    """
    changes = line.class_of(lane).work.changes
    events = [*_events(line, lane, changes)]
    ticks = np.concatenate([[0], *(ticks.ravel() for ticks, _ in events)])
    sizes = np.concatenate([
        [int(changes.start.sum())],
        *(np.broadcast_to(size.sum(axis=0), ticks.shape).ravel() for ticks, size in events),
    ])  # fmt: skip
    if line.window is not None:
        ticks = np.clip(ticks, *line.window) - line.window[0]
    order = np.argsort(ticks, kind="stable")
    last = _last_of_each(ticks[order])
    at = int(ticks[order[last[int(sizes[order].cumsum()[last].argmax())]]])
    held = changes.start.copy()
    limit = at if line.window is None else at + line.window[0]
    for when, size in events:
        held += size @ (when <= limit).sum(axis=0)
    parts = {name: size for name, size in zip(CATEGORIES, held.tolist(), strict=True) if size}
    return Peak(at * TICK, parts)


def _events(line: Timeline, lane: int, changes: MemoryChanges) -> Iterator[tuple[Int, Int]]:
    """Changes of a lane's bytes: ticks [copies, rows], and by how much: [categories, rows]."""
    waves = line.waves
    nth = int(waves.lanes.class_of[lane])
    table, sequence = waves.tables[waves.table_of[nth]], waves.sequence[nth]
    order, begin = line.program.classes[nth].work.order, table.actions.begin
    for run in line.runs(lane):
        members = table.rules.member[run.positions]
        for member in distinct_values(members):
            of_member = np.flatnonzero(members == member)
            copies = sequence.copies[run.instances, member]
            kinds = changes.kind[copies]
            rows = table.rules.rows[run.positions[of_member]] - begin[order.action[copies[0]]]
            for kind in distinct_values(kinds):
                of_kind = np.flatnonzero(kinds == kind)
                profile = changes.profiles[kind]
                for size, ticks in (
                    (-profile.freed[:, rows], run.end), (profile.allocated[:, rows], run.ready)
                ):  # fmt: skip
                    changed = np.flatnonzero(size.any(axis=0))
                    if len(changed):
                        yield ticks(of_member[changed])[of_kind], size[:, changed]


def memory_timeline(lane: Lane, change: Deltas | None = None) -> MemoryTimeline:
    """The memory of a lane over the step; `change` are the `deltas` of its class, if known."""
    ticks, changes, order = _changes(lane, change or deltas(lane.of))
    last = _last_of_each(ticks)
    return MemoryTimeline(ticks[last], changes[:, order].cumsum(axis=1)[:, last])


def _changes(lane: Lane, of: Deltas) -> tuple[Int, Int, Int]:
    """When the bytes that a lane holds change: ticks, ascending. By how much, [categories, changes]
    in an order of their own, of which the third gives that of the ticks."""
    start, allocated, freed = of
    rows = lane.issue.rows
    ready, end = np.empty_like(lane.ready), np.empty_like(lane.end)
    ready[rows], end[rows] = lane.ready, lane.end
    come, go = allocated.any(axis=0), freed.any(axis=0)
    ticks = np.concatenate([[0], end[go], ready[come]])
    changes = np.concatenate([start[:, None], -freed[:, go], allocated[:, come]], axis=1)
    order = np.argsort(ticks, kind="stable")  # at equal times, frees come before allocations
    return ticks[order], changes, order


def _last_of_each(ticks: Int) -> Int:
    """The last of each run of equal times."""
    return np.flatnonzero(np.diff(ticks, append=ticks[-1] + 1))
