"""Memory over time: bytes of the values of a rank's program while the step runs.

A value is allocated when the first task that touches it could start, and freed when the last in
issue order ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from stagewright.arrays import Int, distinct_values
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
    rank_class, events = timeline.class_of(lane), [*_events(timeline, lane)]
    start = rank_class.work.changes.start
    ticks, order, last = _in_order(timeline, [ticks for ticks, _ in events])
    sizes = np.concatenate([
        [int(start.sum())],
        *(np.broadcast_to(size.sum(axis=0), ticks.shape).ravel() for ticks, size in events),
    ])  # fmt: skip
    peak_tick = int(ticks[int(sizes[order].cumsum()[last].argmax())])
    used = start.copy()
    for event_ticks, size in events:
        used += size @ (event_ticks <= peak_tick).sum(axis=0)
    by_category = {name: size for name, size in zip(CATEGORIES, used.tolist(), strict=True) if size}
    if by_category and rank_class.allowance:
        by_category["allowance"] = rank_class.allowance
    return Peak(rank_class, by_category, peak_tick * TICK)


def memory_timeline(timeline: Timeline, lane: int) -> MemoryTimeline:
    """Memory of a lane over the step."""
    events = [*_events(timeline, lane)]
    ticks, order, last = _in_order(timeline, [ticks for ticks, _ in events])
    changes = [np.tile(size, len(event_ticks)) for event_ticks, size in events]
    start = timeline.class_of(lane).work.changes.start[:, None]
    size = np.concatenate([start, *changes], axis=1)[:, order]
    return MemoryTimeline(ticks, size.cumsum(axis=1)[:, last])


def _in_order(timeline: Timeline, changes: Sequence[Int]) -> tuple[Int, Int, Int]:
    """Sort changes: distinct times from 0 on, order, and last change of each time."""
    ticks = np.concatenate([[0], *(ticks.ravel() for ticks in changes)])
    order = np.argsort(ticks, kind="stable")
    last = np.flatnonzero(np.diff(ticks[order], append=ticks[order[-1]] + 1))
    return ticks[order[last]], order, last


def _events(timeline: Timeline, lane: int) -> Iterator[tuple[Int, Int]]:
    """Changes of a lane's bytes: ticks [copies, rows], and bytes [categories, rows]."""
    changes = timeline.class_of(lane).work.changes
    plan = timeline.plan.classes[int(timeline.lane_map.class_of[lane])]
    table, sequence, order, begin = plan.table, plan.sequence, plan.order, plan.table.actions.begin
    for times in timeline.fragments(lane):
        members = table.rules.member[times.positions]
        for member in distinct_values(members):
            of_member = np.flatnonzero(members == member)
            copies = sequence.copies[times.instances, member]
            profiles = changes.profile[copies]
            rows = table.rules.rows[times.positions[of_member]] - begin[order.action[copies[0]]]
            for profile_id in distinct_values(profiles):
                instances = np.flatnonzero(profiles == profile_id)
                profile = changes.profiles[profile_id]
                for size, ticks in (
                    (-profile.freed[:, rows], times.end), (profile.allocated[:, rows], times.ready)
                ):  # fmt: skip
                    changed = np.flatnonzero(size.any(axis=0))
                    if len(changed):
                        selected = timeline.within(ticks(of_member[changed])[instances])
                        yield selected, size[:, changed]
