"""Runs of tasks that repeat, as matrices over (max, +): long programs in few steps.

Within a run of tasks of one rank, the end of each is the latest of what it waits for plus its
duration. So every end is the maximum, over the few inputs of the run (ends of tasks before it, the
arrival of a message), of the input plus a constant; and runs that are alike, as those of all
microbatches, share the constants.

Times are whole ticks, so that sums are exact and in any order the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Bool, Int
from stagewright.time.simulate.host import HostThread
from stagewright.time.simulate.issue import Issue

NEVER = -(1 << 62)
"""Before every time; to add durations to it does not overflow."""


@dataclass(slots=True, eq=False)
class SegmentMatrix:
    """What equal segments of tasks share; places count from the start of the segment.

    An input is the latest end of what one place waits for outside the run. After these come, where
    it has them, the arrival of the message that the first place receives, the start of time, and
    when the host begins to launch the run.
    """

    outside: Int  # of the run's needs, those outside it
    starts: Int  # into `outside`: where those of the next place begin
    arrives: bool
    from_start: bool
    ticks: Int  # (places, inputs): ticks from an input to the end of a place
    ports: Int  # the places whose ends others need
    launches: bool  # the host takes time
    to_ports: Int  # `ticks` of the ports; and to when the host is done, where it `launches`

    def inputs(self, needs: Int, ends: Int, arrival: int, host: int) -> Int:
        """The inputs of a run: `needs` are its own, `ends` those of all places."""
        values = ends[needs[self.outside]]
        if len(self.starts) != len(values):
            values = np.maximum.reduceat(values, self.starts)
        more = [arrival] * self.arrives + [0] * self.from_start + [host] * self.launches
        return np.concatenate([values, np.array(more, dtype=np.int64)]) if more else values

    def port_ends(self, inputs: Int) -> tuple[Int, int]:
        """Ends of the ports of one run, and when the host is done with it."""
        ends = np.maximum.reduce(self.to_ports + inputs, axis=1)
        return (ends[:-1], int(ends[-1])) if self.launches else (ends, 0)

    def ends(self, inputs: Int) -> Int:
        """Ends of all places, for many runs: (runs, inputs) to (runs, places)."""
        result = np.full((len(inputs), len(self.ticks)), NEVER, dtype=np.int64)
        for column, values in zip(self.ticks.T, inputs.T, strict=True):
            np.maximum(result, values[:, None] + column[None, :], out=result)
        return result


@dataclass(slots=True, eq=False)
class SegmentMatrices:
    """The matrices of all distinct segments so far."""

    known: dict[tuple[object, ...], SegmentMatrix] = field(
        default_factory=dict[tuple[object, ...], SegmentMatrix]
    )

    def of(
        self,
        cuts: Int,
        issue: Issue,
        duration: Int,
        arrives: Bool,
        sent: Bool,
        host: HostThread | None = None,
    ) -> list[SegmentMatrix]:
        """The matrix of the segment from each of the places `cuts` to the next.

        `arrives` are the places that wait for a message from elsewhere; each must begin a segment.
        `sent` are those whose ends are asked for although no place of the rank needs them.
        """
        owner = np.repeat(np.arange(len(issue)), np.diff(issue.pointer))
        begin = np.repeat(cuts[:-1], np.diff(cuts))
        inside = (issue.needs - begin[owner]).astype(np.int32)
        inside[issue.needs < begin[owner]] = -1
        counts = np.diff(issue.pointer).astype(np.int32)
        used = sent.copy()
        used[issue.needs[inside < 0]] = True
        found: list[SegmentMatrix] = []
        for b, e in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
            mine = slice(issue.pointer[b], issue.pointer[e])
            parts = duration[b:e], counts[b:e], inside[mine], used[b:e]
            key = (bool(arrives[b]), *(part.tobytes() for part in parts))
            launches = None
            if host is not None:
                launches = HostThread(host.cost[b:e], host.waits[b:e])
                key = (*key, launches.cost.tobytes(), launches.waits.tobytes())
            if key not in self.known:
                self.known[key] = _segment_matrix(*parts, bool(arrives[b]), launches)
            found.append(self.known[key])
        return found


def _segment_matrix(
    duration: Int,
    counts: NDArray[np.int32],
    needs: NDArray[np.int32],
    used: Bool,
    arrives: bool,
    host: HostThread | None,
) -> SegmentMatrix:
    """The matrix of one segment; `needs` are places in the segment, or -1."""
    owner = np.repeat(np.arange(len(counts)), counts)
    outside = np.flatnonzero(needs < 0)
    places, starts = np.unique(owner[outside], return_index=True)
    idle = counts == 0
    own = len(places) + arrives + bool(idle.any())
    columns = own + (host is not None)
    ends = np.full((len(counts), columns), NEVER, dtype=np.int64)
    ends[places, np.arange(len(places))] = 0
    if arrives:
        ends[0, len(places)] = 0
    ends[idle, own - 1 if idle.any() else 0] = 0
    thread = np.full(columns, NEVER, dtype=np.int64)  # to the last launch; set behind a wait
    waits = [False] * len(counts)
    waited = False
    if host is not None:
        ends[:, -1] = host.total  # the launch of each place, while the host has not waited
        thread[-1] = host.total[-1]
        waits = host.waits.tolist()
    inside = needs.tolist()
    at = 0
    for place, (count, ticks) in enumerate(zip(counts.tolist(), duration.tolist(), strict=True)):
        here = ends[place]
        for need in inside[at : at + count]:
            if need >= 0:
                np.maximum(here, ends[need], out=here)
        if waited and host is not None:
            thread += host.cost[place]
            np.maximum(here, thread, out=here)
        here += ticks
        if waits[place] and host is not None:
            if not waited:
                thread[-1] = host.total[place]
            waited = True
            np.maximum(thread, here, out=thread)
        at += count
    np.maximum(ends, NEVER, out=ends)
    ports = np.flatnonzero(used)
    to_ports = ends[ports]
    if host is not None:
        to_ports = np.concatenate([to_ports, np.maximum(thread, NEVER)[None]])
    from_start = bool(idle.any())
    return SegmentMatrix(
        outside, starts, arrives, from_start, ends, ports, host is not None, to_ports
    )
