"""Where the time of a step goes: kernels, exposed communication, bubbles; and the critical path.

At each moment a rank either runs a kernel of its main stream, or its next kernel waits. The cause
of waiting is followed back to the kernel before: while a collective or a message that the kernel
needs is in flight, communication along that axis is *exposed*; while other ranks are not ready yet,
the rank is in a *bubble*; while all that the kernel needs is there and the host has not launched it
yet, it waits for *launches*. The parts of a lane add up to the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from stagewright.arrays import Int
from stagewright.program.columns import PHASES, TaskKind
from stagewright.program.fit import Fit, fit_of, held_at_peak
from stagewright.time.network import Machine
from stagewright.time.simulate.timeline import TICK, Lane, Timeline

LAUNCHES = "launches"
"""Waiting for the host in a critical path; `host` is the axis of transfers to its memory."""


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Seconds of a step on a rank; `kernels` by phase, `exposed` and `communication` by axis."""

    kernels: Mapping[str, float]
    exposed: Mapping[str, float]
    bubble: float
    communication: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds that transfers run, hidden or exposed; a message counts at its sender."""
    launches: float = 0.0
    """Seconds in which the rank waits for its host: nothing but the launch is missing."""

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        waits = sum(self.exposed.values()) + self.bubble + self.launches
        return sum(self.kernels.values()) + waits


class Axes(NamedTuple):
    """Which axis each place communicates along: indices into `names`, -1 for kernels."""

    names: list[str]
    of: Int


def axes_of(line: Timeline, lane: Lane) -> Axes:
    """The axis that each place of a lane communicates along."""
    axes = line.axes[id(lane.of.work.actions.tasks)]
    names = sorted({*map(str, axes.axes)})
    number = np.array([*(names.index(str(axis)) for axis in axes.axes), -1], dtype=np.int64)
    of = number[axes.number][lane.row]
    # A kernel aside belongs to the communication that it follows.
    for stream in np.unique(lane.issue.stream[lane.aside]):
        mine = np.flatnonzero(lane.issue.stream == stream)
        before = np.maximum.accumulate(np.where(lane.aside[mine], -1, np.arange(len(mine))))
        of[mine] = of[mine[before]]
    return Axes(names, of)


def breakdown(line: Timeline, lane: Lane) -> Breakdown:
    """The parts of the step on one lane."""
    axes = axes_of(line, lane)
    kernel = np.flatnonzero(lane.main)
    begin, end = lane.begin[kernel], lane.end[kernel]
    phase = lane.of.work.actions.tasks.phase[lane.row[kernel]]
    busy = {name: int((end - begin)[phase == nth].sum()) * TICK for nth, name in enumerate(PHASES)}
    # Gaps: before each kernel, and after the last one, where the task that ends last is the cause.
    low = np.concatenate([[0], end])
    high = np.concatenate([begin, [line.ticks]])
    last = int(np.argmax(lane.end))
    blockers = _blockers(lane)
    cause = np.concatenate([blockers[kernel], [last]])
    high[-1] = lane.end[last]
    waits = _follow(lane, axes, _IdleSpans(low, high, cause), blockers)
    bubble = int(line.ticks - lane.end[last]) + waits.bubble
    return Breakdown(
        {name: s for name, s in busy.items() if s},
        {name: int(t) * TICK for name, t in zip(axes.names, waits.exposed, strict=False) if t},
        bubble * TICK,
        _communication(lane, axes),
        waits.launches * TICK,
    )


def _communication(lane: Lane, axes: Axes) -> dict[str, float]:
    ticks = np.where(lane.kind == TaskKind.RECV, 0, lane.end - lane.begin)
    sums = {name: int(ticks[axes.of == nth].sum()) * TICK for nth, name in enumerate(axes.names)}
    return {name: s for name, s in sums.items() if s}


class _Waits(NamedTuple):
    """Ticks that a lane waits: for transfers by axis, for other ranks, for its host."""

    exposed: Int
    bubble: int
    launches: int


class _IdleSpans(NamedTuple):
    """Spans of time in which a lane waits, and the places that it waits for."""

    low: Int
    high: Int
    cause: Int


def _follow(lane: Lane, axes: Axes, gaps: _IdleSpans, blockers: Int) -> _Waits:
    """Follow the causes of gaps to what the lane waits for meanwhile.

    `blockers`: by place, the one that it waits for last.
    """
    low, high, cause = gaps
    exposed = np.zeros(len(axes.names) + 1, dtype=np.int64)
    bubble = launches = 0
    kind, axis = lane.kind, axes.of
    while True:
        open_ = high > low
        bubble += int((high - low)[open_ & (cause == NOTHING)].sum())
        open_ &= cause != NOTHING
        if not open_.any():
            return _Waits(exposed, bubble, launches)
        low, high, cause = low[open_], high[open_], cause[open_]
        if (launch := cause < NOTHING).any():
            place, paused = _paused(lane, cause)
            pause = np.where(launch, np.clip(paused, low, high), high)
            launches += int((high - pause).sum())
            high, cause = pause, place
            continue
        begin = np.maximum(lane.begin[cause], low)
        np.add.at(exposed, axis[cause], high - np.minimum(begin, high))
        high = np.minimum(begin, high)
        # A receive waits for the other rank; a collective from when this rank is ready.
        late = (kind[cause] == TaskKind.RECV) & (lane.end[cause] > lane.ready[cause])
        ready = np.where(late, low, np.maximum(lane.ready[cause], low))
        bubble += int((high - np.minimum(ready, high)).sum())
        high = np.minimum(ready, high)
        cause = blockers[cause]


NOTHING = -1
"""The cause of waiting where a place has no dependencies. Lower numbers: the place is not launched;
`NOTHING - 1 - cause` is the place."""


def _blockers(lane: Lane) -> Int:
    """For each place, its dependency that ended last, or a late launch, or `NOTHING`."""
    issue = lane.issue
    owner = np.repeat(np.arange(len(issue)), np.diff(issue.pointer))
    last = np.flatnonzero(lane.end[issue.needs] == lane.ready[owner])
    result = np.full(len(issue), NOTHING, dtype=np.int64)
    if lane.since is not None:
        places = np.arange(len(issue))
        late = (lane.launched == lane.ready) & (lane.launched > 0)
        result[late] = NOTHING - 1 - places[late]
    result[owner[last][::-1]] = issue.needs[last][::-1]
    return result


def _paused(lane: Lane, cause: Int) -> tuple[Int, Int]:
    """For causes that are launches: what the host waited for last, and when that had ended.

    Other causes stay as they are, with any time.
    """
    assert lane.since is not None, "launches that take no time keep nothing waiting"
    at = np.where(cause < NOTHING, NOTHING - 1 - cause, 0)
    return np.where(cause < NOTHING, lane.since.place[at], cause), lane.since.end[at]


RECV = int(TaskKind.RECV)
_ALONE = int(TaskKind.COMPUTE), int(TaskKind.SEND), int(TaskKind.LOAD), int(TaskKind.STORE)


class PathTask(NamedTuple):
    """A task on the critical path: index of the lane, and place."""

    lane: int
    place: int
    launch: bool = False
    """Not the task itself, but launches up to its own, since the host last paused."""


def critical_path(line: Timeline) -> list[PathTask]:
    """The tasks that the step waited for, each for the one before it, from first to last.

    They touch: each begins when the one before it ends, the first at 0, and the last ends with the
    step. A message is there as its SEND; of several that ended at the same time, one.
    """
    lanes = line.lanes
    blockers: dict[int, Int] = {}
    causes = _Causes(line)
    at = max(range(len(lanes)), key=lambda n: int(lanes[n].end.max(initial=0)))
    task = PathTask(at, int(np.argmax(lanes[at].end)))
    path: list[PathTask] = []
    while True:
        task = causes.of(task)
        lane = lanes[task.lane]
        if lane.kind[task.place] != RECV:
            path.append(task)
        if task.lane not in blockers:
            blockers[task.lane] = _blockers(lane)
        before = int(blockers[task.lane][task.place])
        if before < NOTHING and lane.since is not None:
            path.append(PathTask(task.lane, task.place, launch=True))
            before = int(lane.since.place[task.place])
        if before < 0:
            return path[::-1]
        task = PathTask(task.lane, before)


class _Causes:
    """Which rank kept a task waiting."""

    def __init__(self, line: Timeline) -> None:
        self.line, self.who = line, line.endpoints
        self.received = [
            {place: row for row, place in enumerate(of.place.tolist())} for of in self.who.received
        ]
        self.met = {
            (nth, place): meeting
            for meeting in self.who.meetings
            for nth, place in zip(meeting.classes, meeting.places, strict=True)
        }

    def of(self, task: PathTask) -> PathTask:
        """The SEND of a message that came late, the last rank to be ready for a collective."""
        lane = self.line.lanes[task.lane]
        kind = lane.kind[task.place]
        if kind in _ALONE:
            return task
        nth = int(self.who.class_of[task.lane])
        slot = int(lane.of.work.actions.tasks.slot[lane.row[task.place]])
        if kind == RECV and lane.end[task.place] > lane.ready[task.place]:
            received, row = self.who.received[nth], self.received[nth][task.place]
            own = task.lane - int(self.who.lanes[nth][0])
            return PathTask(int(received.sender[row, own]), int(received.sent[row, own]))
        if lane.begin[task.place] > lane.ready[task.place]:
            group = self.who.groups[slot]
            meeting = self.met.get((nth, task.place))
            for other in np.flatnonzero(group == group[task.lane]).tolist():
                place = task.place
                if meeting is not None:
                    place = meeting.places[meeting.classes.index(int(self.who.class_of[other]))]
                if self.line.lanes[other].ready[place] == lane.begin[task.place]:
                    return PathTask(other, place)
            raise AssertionError("a collective begins when no rank is ready")
        return task


def path_parts(line: Timeline, path: list[PathTask]) -> dict[str, float]:
    """Seconds of the critical path by phase of its kernels and by axis of its communication."""
    found: dict[str, int] = {}
    lanes, places, launch = np.array(path, dtype=np.int64).reshape(-1, 3).T
    for nth in sorted({task.lane for task in path}):
        lane, at = line.lanes[nth], places[(lanes == nth) & (launch == 0)]
        names, of = axes_of(line, lane)
        words = [*PHASES, *names]
        word = lane.of.work.actions.tasks.phase[lane.row[at]].astype(np.int64)
        word = np.where(of[at] >= 0, len(PHASES) + of[at], word)
        sums = np.zeros(len(words), dtype=np.int64)
        np.add.at(sums, word, lane.end[at] - lane.begin[at])
        for name, ticks in zip(words, sums, strict=True):
            found[name] = found.get(name, 0) + int(ticks)
        if lane.since is not None:
            late = places[(lanes == nth) & (launch == 1)]
            ticks = int((lane.launched[late] - lane.since.end[late]).sum())
            found[LAUNCHES] = found.get(LAUNCHES, 0) + ticks
    order = [*PHASES, *sorted(found.keys() - set(PHASES))]
    return {name: found[name] * TICK for name in order if found.get(name)}


@dataclass(frozen=True, eq=False)
class TracedStep:
    """A step of a program without a run, of which all ranks do the same, on a machine.

    Nothing is known of tokens or of what a model needs: there are times, and no utilization.
    """

    name: str
    machine: Machine
    line: Timeline

    @property
    def seconds(self) -> float:
        """The duration of the step."""
        return self.line.seconds

    @cached_property
    def parts(self) -> list[Breakdown]:
        """Where the time of each lane goes."""
        return [breakdown(self.line, lane) for lane in self.line.lanes]

    @property
    def mean(self) -> Breakdown:
        """The parts of any GPU, since all have the same."""
        return self.parts[0]

    @cached_property
    def critical_path(self) -> dict[str, float]:
        """Seconds of the critical path, by phase of kernels and by axis of communication."""
        return path_parts(self.line, critical_path(self.line))

    @property
    def fit(self) -> Fit:
        """Whether what the graph holds fits into the memory of a device."""
        return fit_of(map(held_at_peak, self.line.program.classes), self.machine.hardware.memory)

    def summary(self) -> dict[str, Any]:
        """Everything as one object for JSON; times in seconds, sizes in bytes."""
        return {
            "model": self.name,
            "hardware": self.machine.hardware.name,
            "machine": str(self.machine),
            "world_size": self.machine.gpus,
            "step_seconds": self.seconds,
            "memory": self.fit.entry(),
            "mean": asdict(self.mean),
            "critical_path": self.critical_path,
        }
