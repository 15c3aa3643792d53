"""Breakdown of a step: kernels, exposed communication, bubbles, launches; and the critical path.

At any time a rank either runs a kernel of its compute stream, or its next kernel waits. Each gap is
attributed by walking blockers back to the previous kernel: while a collective or a message is in
flight, communication along that axis is *exposed*; while other ranks are not ready, the rank is in
a *bubble*; while only the host's launch is missing, it waits for *launches*. The parts of a lane
add up to the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Bool, Int
from stagewright.program.columns import COLLECTIVE, PHASES, RECV, TaskKind
from stagewright.time.simulate.timeline import TICK, Lane, Timeline

_Task = tuple[int, int]
"""Lane and issue index."""
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
    """Seconds in which the rank waits for its host: only the launch is missing."""

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        waits = sum(self.exposed.values()) + self.bubble + self.launches
        return sum(self.kernels.values()) + waits


class Axes(NamedTuple):
    """Axis that each task communicates along, as an index into `names`; -1: a kernel."""

    names: list[str]
    axis: Int


def axes_of(timeline: Timeline, lane: Lane) -> Axes:
    """Axis that each task of a lane communicates along, by issue index."""
    axes = timeline.axes[id(lane.rank_class.work.actions.tasks)]
    names = sorted({*map(str, axes.axes)})
    number = np.array([*(names.index(str(axis)) for axis in axes.axes), -1], dtype=np.int64)
    axis = number[axes.number][lane.row]
    # A kernel of a communication stream counts to the communication that it follows.
    for stream in np.unique(lane.issue.stream[lane.on_comm_stream]):
        tasks = np.flatnonzero(lane.issue.stream == stream)
        is_kernel = lane.on_comm_stream[tasks]
        latest = np.maximum.accumulate(np.where(is_kernel, -1, np.arange(len(tasks))))
        axis[tasks] = axis[tasks[latest]]
    return Axes(names, axis)


NOTHING = -1
"""Blocker of a task without dependencies."""


class _Blockers(NamedTuple):
    """Blocker of each task: the dependency that ended last, or its launch; by issue index."""

    task: Int
    """Issue index of the dependency, or of the task that is launched; `NOTHING`: none."""
    is_launch: Bool


def breakdown(timeline: Timeline, lane: Lane) -> Breakdown:
    """Break down the step of one lane."""
    axes, kernel = axes_of(timeline, lane), np.flatnonzero(lane.is_kernel)
    ticks = (lane.end - lane.begin)[kernel]
    phase = lane.rank_class.work.actions.tasks.phase[lane.row[kernel]]
    waits = _waits(lane, kernel)
    bubble = waits.bubble + int(timeline.ticks - lane.end.max())
    exposed = np.zeros(len(axes.names) + 1, dtype=np.int64)  # the last one: kernels
    np.add.at(exposed, axes.axis[waits.task], waits.end - waits.begin)
    return Breakdown(
        _seconds(PHASES, [ticks[phase == p].sum() for p in range(len(PHASES))]),
        _seconds(axes.names, exposed[:-1].tolist()), bubble * TICK, _communication(lane, axes),
        waits.launches * TICK,
    )  # fmt: skip


def exposed_intervals(lane: Lane) -> tuple[Int, Int]:
    """Beginnings and ends (ticks) of waits of a lane for transfers, unordered."""
    waits = _waits(lane, np.flatnonzero(lane.is_kernel))
    transfers = lane.kind[waits.task] != TaskKind.COMPUTE
    return waits.begin[transfers], waits.end[transfers]


def _communication(lane: Lane, axes: Axes) -> dict[str, float]:
    """Seconds that transfers run, by axis."""
    ticks = np.where(lane.kind == RECV, 0, lane.end - lane.begin)
    return _seconds(axes.names, [ticks[axes.axis == n].sum() for n in range(len(axes.names))])


def _seconds(names: Sequence[str], ticks: Sequence[int]) -> dict[str, float]:
    """Seconds by name, without those that are 0."""
    return {name: int(t) * TICK for name, t in zip(names, ticks, strict=True) if t}


class _Waits(NamedTuple):
    """Ticks in which no kernel of the compute stream runs."""

    task: Int
    """Tasks of other streams that run meanwhile, by issue index, once for each interval."""
    begin: Int
    """Interval in which the next kernel waits for this task."""
    end: Int
    bubble: int
    launches: int


def _waits(lane: Lane, kernel: Int) -> _Waits:
    """Waits of a lane; `kernel`: issue indices of the kernels of the compute stream."""
    # Gaps are before each kernel, and from the last one to the end of the task that ends last.
    last, blockers = int(np.argmax(lane.end)), _blockers(lane)
    low = np.append(0, lane.end[kernel])
    high = np.append(lane.begin[kernel], lane.end[last])
    blocker = np.append(blockers.task[kernel], last)
    is_launch = np.append(blockers.is_launch[kernel], False)
    intervals: list[Int] = [np.zeros((3, 0), dtype=np.int64)]
    bubble = launches = 0
    while True:
        is_open = high > low
        bubble += int((high - low)[is_open & (blocker == NOTHING)].sum())
        is_open &= blocker != NOTHING
        if not is_open.any():
            task, begin, end = np.concatenate(intervals, axis=1)
            return _Waits(task, begin, end, bubble, launches)
        low, high, blocker, is_launch = (c[is_open] for c in (low, high, blocker, is_launch))
        if is_launch.any():
            assert lane.last_wait is not None, "launches that take no time block nothing"
            last_end = np.clip(lane.last_wait.end[blocker], low, high)
            launches += int((high - last_end)[is_launch].sum())
            high = np.where(is_launch, last_end, high)
            blocker = np.where(is_launch, lane.last_wait.issue_index[blocker], blocker)
            is_launch = np.zeros_like(is_launch)
            continue
        begin = np.minimum(np.maximum(lane.begin[blocker], low), high)
        intervals.append(np.array([blocker, begin, high], dtype=np.int64))
        high = begin
        # A receive waits for the other rank; a collective from when this rank is ready.
        waits = (lane.kind[blocker] == RECV) & (lane.end[blocker] > lane.ready[blocker])
        ready = np.where(waits, low, np.maximum(lane.ready[blocker], low))
        bubble += int((high - np.minimum(ready, high)).sum())
        high = np.minimum(ready, high)
        blocker, is_launch = blockers.task[blocker], blockers.is_launch[blocker]


def _blockers(lane: Lane) -> _Blockers:
    """Blockers of all tasks of a lane."""
    issue = lane.issue
    waiter = np.repeat(np.arange(len(issue)), np.diff(issue.pointer))
    last = np.flatnonzero(lane.end[issue.deps] == lane.ready[waiter])
    is_launch = np.zeros(len(issue), dtype=bool)
    if lane.last_wait is not None:
        is_launch = (lane.launched == lane.ready) & (lane.launched > 0)
        is_launch[waiter[last]] = False
    task = np.where(is_launch, np.arange(len(issue)), NOTHING)
    task[waiter[last][::-1]] = issue.deps[last][::-1]
    return _Blockers(task, is_launch)


class PathTask(NamedTuple):
    """A task on the critical path."""

    lane: int
    issue_index: int
    launch: bool = False
    """Not the task itself: launches up to its launch, after the last wait of the host."""


def critical_path(timeline: Timeline) -> list[PathTask]:
    """Tasks that determine the duration of the step, from first to last.

    Each begins when the one before it ends, the first at 0, and the last ends with the step. A
    message is on the path as its SEND; of several that ended at the same time, one.
    """
    lanes = timeline.lanes
    blockers: dict[int, _Blockers] = {}
    senders: dict[_Task, _Task] = {
        (lane, index): (sender, send)
        for lane, index, sender, send in timeline.endpoints.messages.tolist()
    }
    last = max(range(len(lanes)), key=lambda n: int(lanes[n].end.max(initial=0)))
    task = PathTask(last, int(np.argmax(lanes[last].end)))
    path: list[PathTask] = []
    while True:
        task = _remote_blocker(timeline, senders, task)
        lane = lanes[task.lane]
        if lane.kind[task.issue_index] != RECV:
            path.append(task)
        if task.lane not in blockers:
            blockers[task.lane] = _blockers(lane)
        of_lane = blockers[task.lane]
        before = int(of_lane.task[task.issue_index])
        if lane.last_wait is not None and of_lane.is_launch[task.issue_index]:
            path.append(task._replace(launch=True))
            before = int(lane.last_wait.issue_index[task.issue_index])
        if before < 0:
            return path[::-1]
        task = PathTask(task.lane, before)


def _remote_blocker(timeline: Timeline, senders: Mapping[_Task, _Task], task: PathTask) -> PathTask:
    """SEND of a late message, the last task to be ready for a collective, or the task itself."""
    lane, index = timeline.lanes[task.lane], task.issue_index
    kind, ready = lane.kind[index], lane.ready[index]
    if kind == RECV and lane.end[index] > ready:
        return PathTask(*senders[task.lane, index])
    if kind != COLLECTIVE or lane.begin[index] <= ready:
        return task
    lanes = timeline.lane_map
    group = lanes.groups[int(lane.rank_class.work.actions.tasks.slot[lane.row[index]])]
    shared = timeline.endpoints.shared.get((int(lanes.class_of[task.lane]), index), {})
    for other in np.flatnonzero(group == group[task.lane]).tolist():
        other_index = shared.get(int(lanes.class_of[other]), index)
        if timeline.lanes[other].ready[other_index] == lane.begin[index]:
            return PathTask(other, other_index)
    raise AssertionError("a collective begins when no rank is ready")


def path_parts(timeline: Timeline, path: list[PathTask]) -> dict[str, float]:
    """Seconds of the critical path by phase of kernels and axis of communication."""
    sums: dict[str, int] = {}
    lanes, indices, is_launch = np.array(path, dtype=np.int64).reshape(-1, 3).T
    for lane_id in sorted({task.lane for task in path}):
        lane, on_lane = timeline.lanes[lane_id], lanes == lane_id
        tasks = indices[on_lane & (is_launch == 0)]
        names, axis = axes_of(timeline, lane)
        part_names = [*PHASES, *names]
        part = lane.rank_class.work.actions.tasks.phase[lane.row[tasks]].astype(np.int64)
        part = np.where(axis[tasks] >= 0, len(PHASES) + axis[tasks], part)
        ticks = np.zeros(len(part_names), dtype=np.int64)
        np.add.at(ticks, part, lane.end[tasks] - lane.begin[tasks])
        for name, size in zip(part_names, ticks.tolist(), strict=True):
            sums[name] = sums.get(name, 0) + size
        if lane.last_wait is not None:
            launched = indices[on_lane & (is_launch == 1)]
            size = int((lane.launched[launched] - lane.last_wait.end[launched]).sum())
            sums[LAUNCHES] = sums.get(LAUNCHES, 0) + size
    order = [*PHASES, *sorted(sums.keys() - set(PHASES))]
    return {name: sums[name] * TICK for name in order if sums.get(name)}
