"""A rank class task by task, for all its lanes at once: where ranks differ, or kernels slow down.

Communication is placed as early as possible: when the turn of a kernel comes, all communication
that may run beside it is known. Kernels slow down beside collectives; messages, and the few kernels
that add up gradients on another stream, neither slow other kernels nor are slowed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Bool, Float, Int
from stagewright.program.columns import TaskKind
from stagewright.time.simulate.host import HostClock, HostThread
from stagewright.time.simulate.issue import Issue


class LaneWork(NamedTuple):
    """The tasks of a class: arrays by place, but `factor`, which slows kernels, by lane."""

    issue: Issue
    kind: NDArray[np.uint8]
    duration: Int  # ticks
    groups: Sequence[Int | None]  # lanes that meet, by `lanes_met`; None: no others
    factor: Float
    slowdown: float
    host: HostThread | None = None


class SingleLane:
    """A class of one lane."""

    def __init__(self, work: LaneWork) -> None:
        """Start at time 0."""
        self.slowdown = work.slowdown
        self.ends = [0] * len(work.issue)
        pointer: list[int] = work.issue.pointer.tolist()
        needs: list[int] = work.issue.needs.tolist()
        self.needs = [needs[a:b] for a, b in itertools.pairwise(pointer)]
        kernel = work.kind == TaskKind.COMPUTE
        ticks = np.where(kernel, np.rint(work.duration * work.factor[0]), work.duration)
        self.duration: list[int] = ticks.astype(np.int64).tolist()
        self.slows: list[bool] = (kernel & (work.issue.stream == 0)).tolist()
        self.collective: list[bool] = (work.kind == TaskKind.COLLECTIVE).tolist()
        self.beside: list[tuple[int, int]] = []
        self.clock = None if work.host is None else HostClock(work.host, None)

    def ready(self, place: int) -> Int:
        """When a place is launched and all its dependencies have ended: ticks, by lane."""
        launched = 0 if self.clock is None else self.clock.launched(place, self.ends)
        return np.array([max((self.ends[n] for n in self.needs[place]), default=0)]).clip(launched)

    def run(self, places: Iterable[int]) -> None:
        """Run kernels, and collectives within this class; the caller runs everything else."""
        ends, needs, duration, clock = self.ends, self.needs, self.duration, self.clock
        for place in places:
            start = 0 if clock is None else clock.launched(place, ends)
            for need in needs[place]:
                if ends[need] > start:
                    start = ends[need]
            end = start + duration[place]
            if self.slowdown:
                if self.collective[place]:
                    self.beside.append((start, end))
                elif self.slows[place] and self.beside:
                    self.beside = [pair for pair in self.beside if pair[1] > start]
                    end = stretched(start, duration[place], self.beside, self.slowdown)
            ends[place] = end

    def settle(self, place: int, end: Int) -> None:
        """Record the end of a transfer that involves other classes."""
        self.ends[place] = int(end[0])
        if self.collective[place]:
            self.beside.append((int(end[0]) - self.duration[place], int(end[0])))

    def end(self, place: int) -> Int:
        """When a place ended: ticks, by lane."""
        return np.array([self.ends[place]])

    def all_ends(self) -> Int:
        """The ends of all places: ticks, [places, lanes]."""
        return np.array(self.ends, dtype=np.int64)[:, None]


class SeveralLanes:
    """A class of several lanes."""

    def __init__(self, work: LaneWork) -> None:
        """Start at time 0."""
        self.work = work
        self.lanes = len(work.factor)
        self.ends = np.zeros((len(work.issue), self.lanes), dtype=np.int64)
        pointer: list[int] = work.issue.pointer.tolist()
        needs: list[int] = work.issue.needs.tolist()
        self.needs = [needs[a:b] for a, b in itertools.pairwise(pointer)]
        self.duration: list[int] = work.duration.tolist()
        self.kernel: list[bool] = (work.kind == TaskKind.COMPUTE).tolist()
        self.slows: list[bool] = (work.issue.stream == 0).tolist()
        self.beside: list[tuple[Int, Int]] = []
        self.scaled: dict[int, Int] = {}
        self.clock = None if work.host is None else HostClock(work.host, self.lanes)

    def ready(self, place: int) -> Int:
        """When a place is launched and all its dependencies have ended: ticks, by lane."""
        if self.clock is None:
            latest = np.zeros(self.lanes, dtype=np.int64)
        else:
            latest = self.clock.launched_by_lane(place, self.ends)
        for need in self.needs[place]:
            latest = np.maximum(latest, self.ends[need])
        return latest

    def run(self, places: Iterable[int]) -> None:
        """Run kernels, and collectives within this class; the caller runs everything else."""
        for place in places:
            start, ticks = self.ready(place), self.duration[place]
            if self.kernel[place]:
                work = self.scaled.get(ticks)
                if work is None:
                    work = np.rint(ticks * self.work.factor).astype(np.int64)
                    self.scaled[ticks] = work
                if self.beside and self.slows[place]:
                    self.ends[place] = self._stretched(start, work)
                else:
                    np.add(start, work, out=self.ends[place])
                continue
            group = self.work.groups[place]
            if group is not None:
                start = start[group].max(axis=1)
            self.settle(place, start + ticks)

    def settle(self, place: int, end: Int) -> None:
        """Record the end of a transfer."""
        self.ends[place] = end
        if self.work.slowdown and self.work.kind[place] == TaskKind.COLLECTIVE:
            self.beside.append((end - self.duration[place], end))

    def end(self, place: int) -> Int:
        """When a place ended: ticks, by lane."""
        return self.ends[place]

    def all_ends(self) -> Int:
        """The ends of all places: ticks, [places, lanes]."""
        return self.ends

    def _stretched(self, start: Int, work: Int) -> Int:
        self.beside = [pair for pair in self.beside if (pair[1] > start).any()]
        ends = np.empty_like(start)
        for lane in range(self.lanes):
            pairs = [(int(a[lane]), int(b[lane])) for a, b in self.beside]
            ends[lane] = stretched(int(start[lane]), int(work[lane]), pairs, self.work.slowdown)
        return ends


def stretched(start: int, work: int, beside: Iterable[tuple[int, int]], slowdown: float) -> int:
    """The end of `work` ticks that start at `start` and run slower during the intervals `beside`.

    Intervals may be in any order.

    >>> stretched(0, 10, [(4, 10)], 0.5)  # 4 alone, 4 in 6 ticks, 2 alone
    12
    """
    now, left = float(start), float(work)
    for begin, end in sorted(beside):
        if end <= now:
            continue
        if begin > now:
            alone = begin - now
            if left <= alone:
                break
            left -= alone
            now = float(begin)
        done = (end - now) / (1 + slowdown)
        if left <= done:
            return round(now + left * (1 + slowdown))
        left -= done
        now = float(end)
    return round(now + left)


def lanes_met(group: Int) -> Int:
    """For each lane the lanes of its group, padded by repetition: [lanes, size of largest group].

    >>> lanes_met(np.array([7, 5, 7])).tolist()
    [[0, 2], [1, 1], [0, 2]]
    """
    mine = [np.flatnonzero(group == number) for number in group]
    most = max(len(lanes) for lanes in mine)
    return np.stack([np.pad(lanes, (0, most - len(lanes)), mode="edge") for lanes in mine])


def earliest_order(issue: Issue, fixed: Bool, host: HostThread | None = None) -> list[int]:
    """Places in an order that puts each place not `fixed` right after its last dependency.

    A place also depends on what the host waits for before it launches the place.
    """
    pointer: list[int] = issue.pointer.tolist()
    needs: list[int] = issue.needs.tolist()
    turn = [*range(len(issue))]
    waits = np.zeros(len(issue), dtype=bool) if host is None else host.waits
    waited = -1
    for place, (stays, joins) in enumerate(zip(fixed.tolist(), waits.tolist(), strict=True)):
        if not stays:
            mine = needs[pointer[place] : pointer[place + 1]]
            turn[place] = max([turn[need] for need in mine], default=-1)
            turn[place] = max(turn[place], waited)
        if joins:
            waited = max(waited, turn[place])
    return sorted(range(len(turn)), key=turn.__getitem__)
