"""Memory over time: the bytes that the values of a rank's program take while the step runs.

A value is allocated when the first task that touches it could start, and freed when the last in
issue order ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Int, distinct_values
from stagewright.program.columns import CATEGORIES
from stagewright.time.simulate.timeline import TICK, Timeline


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
    """Bytes of a lane when it holds most."""

    seconds: float
    """First time at which it holds them."""
    by_category: dict[str, int]
    """Bytes; categories without any are left out."""


def peak(line: Timeline, lane: int) -> Peak:
    """The peak of a lane's memory over time; only its bytes are counted by category."""
    start, events = line.class_of(lane).work.changes.start, [*_events(line, lane)]
    ticks, order, last = _in_order(line, [ticks for ticks, _ in events])
    sizes = np.concatenate([
        [int(start.sum())],
        *(np.broadcast_to(size.sum(axis=0), ticks.shape).ravel() for ticks, size in events),
    ])  # fmt: skip
    at = int(ticks[int(sizes[order].cumsum()[last].argmax())])
    held = start.copy()
    for when, size in events:
        held += size @ (when <= at).sum(axis=0)
    parts = {name: size for name, size in zip(CATEGORIES, held.tolist(), strict=True) if size}
    return Peak(at * TICK, parts)


def memory_timeline(line: Timeline, lane: int) -> MemoryTimeline:
    """The memory of a lane over the step."""
    events = [*_events(line, lane)]
    ticks, order, last = _in_order(line, [ticks for ticks, _ in events])
    changes = [np.tile(size, len(when)) for when, size in events]
    start = line.class_of(lane).work.changes.start[:, None]
    size = np.concatenate([start, *changes], axis=1)[:, order]
    return MemoryTimeline(ticks, size.cumsum(axis=1)[:, last])


def _in_order(line: Timeline, changes: Sequence[Int]) -> tuple[Int, Int, Int]:
    """The distinct times of changes, the start of the step being the first; the changes in order
    of time; and, of these, the last one at each time."""
    ticks = np.concatenate([[0], *(ticks.ravel() for ticks in changes)])
    order = np.argsort(ticks, kind="stable")
    last = np.flatnonzero(np.diff(ticks[order], append=ticks[order[-1]] + 1))
    return ticks[order[last]], order, last


def _events(line: Timeline, lane: int) -> Iterator[tuple[Int, Int]]:
    """Changes of a lane's bytes: ticks [copies, rows], and by how much: [categories, rows].

    No rows are expanded: the times are those of actions.
    """
    waves, changes = line.waves, line.class_of(lane).work.changes
    nth = int(waves.lanes.class_of[lane])
    table, sequence = waves.tables[waves.table_of[nth]], waves.sequence[nth]
    order, begin = line.program.classes[nth].work.order, table.actions.begin
    for run in line.runs(lane):
        members = table.rules.member[run.positions]
        for member in distinct_values(members):
            of_member = np.flatnonzero(members == member)
            copies = sequence.copies[run.instances, member]
            kinds = changes.profile[copies]
            rows = table.rules.rows[run.positions[of_member]] - begin[order.action[copies[0]]]
            for kind in distinct_values(kinds):
                of_kind = np.flatnonzero(kinds == kind)
                profile = changes.profiles[kind]
                for size, ticks in (
                    (-profile.freed[:, rows], run.end), (profile.allocated[:, rows], run.ready)
                ):  # fmt: skip
                    changed = np.flatnonzero(size.any(axis=0))
                    if len(changed):
                        when = line.within(ticks(of_member[changed])[of_kind])
                        yield when, size[:, changed]
