"""Memory over time: bytes of the values of a rank's program while the step runs.

A value is allocated when the first task that touches it could start, and freed when the last in
issue order ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stagewright.arrays import Int
from stagewright.program.columns import CATEGORIES
from stagewright.program.fit import Peak
from stagewright.time.simulate.timeline import TICK, Timeline


@dataclass(frozen=True, slots=True, eq=False)
class MemoryTimeline:
    """Bytes by memory category (in the order of `CATEGORIES`), a step function of time."""

    ticks: Int  # ascending
    size: Int  # [categories, times]

    @property
    def peak(self) -> int:
        """Maximum over time."""
        return int(self.size.sum(axis=0).max(initial=0))

    def pairs(self) -> list[tuple[float, int]]:
        """Pairs of seconds and bytes of all categories."""
        seconds = (self.ticks * TICK).tolist()
        return list(zip(seconds, self.size.sum(axis=0).tolist(), strict=True))

    def sampled(self, points: int) -> MemoryTimeline:
        """Reduce to at most `points`: the peak of each of equal spans of time."""
        if len(self.ticks) <= points:
            return self
        span = self.ticks * points // (int(self.ticks[-1]) + 1)
        order = np.lexsort((self.size.sum(axis=0), span))
        peaks = order[np.flatnonzero(np.diff(span[order], append=points))]
        return MemoryTimeline(self.ticks[peaks], self.size[:, peaks])


def peak(timeline: Timeline, lane: int) -> Peak:
    """Find the peak of a lane's memory without its whole timeline, allowance included."""
    rank_class, ticks, size = timeline.class_of(lane), *_events(timeline, lane)
    times, order, last = _in_order(ticks)
    peak_tick = int(times[int(size.sum(axis=0)[order].cumsum()[last].argmax())])
    used = size[:, ticks <= peak_tick].sum(axis=1)
    by_category = {name: size for name, size in zip(CATEGORIES, used.tolist(), strict=True) if size}
    if by_category and rank_class.allowance:
        by_category["allowance"] = rank_class.allowance
    return Peak(rank_class, by_category, peak_tick * TICK)


def memory_timeline(timeline: Timeline, lane: int) -> MemoryTimeline:
    """Memory of a lane over the step."""
    ticks, size = _events(timeline, lane)
    times, order, last = _in_order(ticks)
    return MemoryTimeline(times, size[:, order].cumsum(axis=1)[:, last])


def _in_order(ticks: Int) -> tuple[Int, Int, Int]:
    """Sort changes: distinct times, order, and last change of each time."""
    order = np.argsort(ticks, kind="stable")
    last = np.flatnonzero(np.diff(ticks[order], append=ticks[order[-1]] + 1))
    return ticks[order[last]], order, last


def _events(timeline: Timeline, lane: int) -> tuple[Int, Int]:
    """Changes of a lane's bytes: ticks [changes], the first 0, and bytes [categories, changes]."""
    changes = timeline.class_of(lane).work.changes
    plan = timeline.plan.classes[int(timeline.lane_map.class_of[lane])]
    allocated, freed = changes.allocated, -changes.freed
    allocates, frees = np.any(allocated, axis=0), np.any(freed, axis=0)
    ticks, sizes = [np.zeros(1, np.int64)], [changes.start[:, None]]
    for times in timeline.fragments(lane):
        rows = plan.expanded_rows(times.instances[:, None], times.positions)
        for size, changing, ticks_of in (
            (freed, frees, times.end), (allocated, allocates, times.ready)
        ):  # fmt: skip
            changed = changing[rows]
            positions = np.flatnonzero(changed.any(axis=0))
            if len(positions):
                selected = changed[:, positions]
                ticks.append(timeline.within(ticks_of(positions))[selected])
                sizes.append(size[:, rows[:, positions][selected]])
    return np.concatenate(ticks), np.concatenate(sizes, axis=1)
