"""When every task of a program starts and ends.

One rank stands for all ranks with equal timing, its *lane*: a rank class, unless factors make its
ranks differ. A class of one lane is advanced segment by segment (`max_plus`), any other
task by task (`walk`). Messages and collectives of several classes connect the classes.

>>> from stagewright.lower.compile import compile
>>> from stagewright.run.settings import Run
>>> program = compile(Run(model="gpt2", pp=2, layers=2, seq_length=8)).program
>>> line = timeline(program, [np.full(len(of.tasks), 1e-6) for of in program.classes])
>>> [len(lane.ranks) for lane in line.lanes], round(line.seconds * 1e6)
([1, 1], 168)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Bool, Float, Int
from stagewright.errors import UserError
from stagewright.program.columns import Program, RankClass, TaskKind
from stagewright.run.sections.execution import Execution
from stagewright.time.simulate.endpoints import Endpoints, endpoints, lane_of_rank
from stagewright.time.simulate.host import HostThread, HostWork, Since
from stagewright.time.simulate.issue import Issue, issue
from stagewright.time.simulate.system import Progress, System

TICK = 1e-12
"""Seconds per tick. Times are whole ticks; 64 bits hold a hundred days of them."""
LONGEST = 1e6
"""Seconds that the tasks of a rank may take in all."""


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """Ranks with equal timing, and when their tasks run; arrays are by place in issue order.

    `launched` is when the host has launched a task, `ready` is when the task is launched and all
    its dependencies on its rank have ended, `begin` is when it starts: a collective begins when its
    last rank is ready, a message when it is sent.
    """

    of: RankClass
    ranks: Int
    issue: Issue
    kind: NDArray[np.uint8]
    since: Since | None  # when the host last paused; None: launches take no time
    launched: Int  # ticks, as all times
    ready: Int
    begin: Int
    end: Int

    @property
    def main(self) -> Bool:
        """Which places are kernels of the main stream, which run one at a time."""
        return self.issue.stream == 0

    @property
    def aside(self) -> Bool:
        """Which places are kernels that add up reduced gradients on a communication stream."""
        return (self.kind == TaskKind.COMPUTE) & ~self.main


@dataclass(frozen=True, eq=False)
class Timeline:
    """A step of all ranks in time."""

    program: Program
    how: Execution
    lanes: tuple[Lane, ...]
    endpoints: Endpoints
    steady: bool = False
    """Whether the step is one of many in a pipeline that never drains (`steady`)."""

    @cached_property
    def ticks(self) -> int:
        """The end of the last task, in ticks."""
        return max((int(lane.end.max(initial=0)) for lane in self.lanes), default=0)

    @property
    def seconds(self) -> float:
        """The duration of the step."""
        return self.ticks * TICK


def timeline(
    program: Program,
    seconds: Sequence[Float],
    how: Execution | None = None,
    factors: Mapping[int, float] | None = None,
    progress: Progress | None = None,
    hosts: Sequence[HostWork] | None = None,
) -> Timeline:
    """Run a program whose tasks take `seconds`, an array by row for each class.

    `factors` multiply the duration of kernels of some ranks: stragglers. The duration of a message
    is that of its SEND; that of a collective of several classes the longest that they give.
    `progress` is called now and then with the tasks done so far, of all classes, and in all.
    `hosts` are the launches of each class; None: they take no time.
    """
    how = how or Execution()
    issues = [issue(program, of.tasks, how) for of in program.classes]
    factor = _factors(program, factors or {})
    who = endpoints(program, issues, lane_of_rank(program, factor))
    each = zip(program.classes, seconds, issues, strict=True)
    durations = [_ticks(of, given, order) for of, given, order in each]
    for meeting in who.meetings:  # a collective takes all its ranks equally long
        met = list(zip(meeting.classes, meeting.places, strict=True))
        longest = max(int(durations[nth][place]) for nth, place in met)
        for nth, place in met:
            durations[nth][place] = longest
    threads: list[HostThread | None] = [None] * len(issues)
    if hosts is not None:
        threads = [
            HostThread.of(work, order.rows, TICK) for work, order in zip(hosts, issues, strict=True)
        ]
    system = System(program, how, issues, durations, factor[who.example], who, threads)
    system.run(progress)
    lanes: list[Lane] = []
    for each, of, numbers in zip(system.classes, program.classes, who.lanes, strict=True):
        times = each.times()
        for column, number in enumerate(numbers.tolist()):
            ranks = of.ranks[who.lane_of[of.ranks] == number]
            at = [t[:, column] for t in times]
            host = threads[each.nth]
            since = None if host is None else host.since(at[-1])
            lanes.append(Lane(of, ranks, issues[each.nth], each.ports.kind, since, *at))
    return Timeline(program, how, tuple(lanes), who)


def _factors(program: Program, given: Mapping[int, float]) -> Float:
    world = program.mesh.world_size
    factor = np.ones(world)
    for rank, by in given.items():
        if not 0 <= rank < world:
            raise UserError(f"there is no rank {rank} to slow down; use 0 to {world - 1}")
        if not 0 < by < 1e6:
            raise UserError(f"rank {rank}: a factor of {by:g} is no slowdown; use one such as 1.1")
        factor[rank] = by
    return factor


def _ticks(of: RankClass, seconds: Float, order: Issue) -> Int:
    if len(seconds) != len(of.tasks):
        raise ValueError(f"{len(seconds)} durations for {len(of.tasks)} tasks")
    if (seconds < 0).any() or np.isnan(seconds).any():
        raise ValueError("durations must be numbers, and not negative")
    if seconds.sum() > LONGEST:
        raise UserError(
            f"the tasks of rank {of.ranks[0]} take {seconds.sum():.3g} s in all, and a step may "
            f"take {LONGEST:.0e} s (11 days) at most; check the figures of the hardware, or use "
            "a smaller batch or shorter sequences"
        )
    return np.rint(seconds[order.rows] / TICK).astype(np.int64)
