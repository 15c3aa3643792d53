"""Memory over time: the bytes that the values of a rank's program take while the step runs.

A value is allocated when the first task that touches it could start, and freed when the last in
issue order ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Int
from stagewright.program.columns import CATEGORIES
from stagewright.program.memory import Deltas, deltas
from stagewright.time.simulate.timeline import TICK, Lane


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


def memory_timeline(lane: Lane, change: Deltas | None = None) -> MemoryTimeline:
    """The memory of a lane over the step; `change` are the `deltas` of its class, if known."""
    ticks, changes, order = _changes(lane, change or deltas(lane.of))
    last = _last_of_each(ticks)
    return MemoryTimeline(ticks[last], changes[:, order].cumsum(axis=1)[:, last])


def peak(lane: Lane, change: Deltas) -> Peak:
    """The peak of `memory_timeline`, in a third of its time."""
    ticks, changes, order = _changes(lane, change)
    last = _last_of_each(ticks)
    at = last[int(changes.sum(axis=0)[order].cumsum()[last].argmax())]
    held = changes[:, order[: at + 1]].sum(axis=1)
    parts = {name: size for name, size in zip(CATEGORIES, held.tolist(), strict=True) if size}
    return Peak(int(ticks[at]) * TICK, parts)


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
