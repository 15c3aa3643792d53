"""Start and end of every task of a program.

Ranks with equal timing are one *lane*: a rank class, unless slowdowns make its ranks differ. Each
fragment of a distinct unit has one transfer matrix per set of durations. Times of single tasks are
computed on demand (`Timeline.lanes`).

>>> from stagewright.lower.compile import compile
>>> from stagewright.run.settings import Run
>>> program = compile(Run(model="gpt2", pp=2, layers=2, seq_length=8)).program
>>> tables = [rank_class.work.actions.tasks for rank_class in program.classes]
>>> line = timeline(program, [np.full(len(tasks), 1e-6) for tasks in tables])
>>> [len(lane.ranks) for lane in line.lanes], round(line.seconds * 1e6)
([1, 1], 168)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Bool, Float, Int
from stagewright.errors import UserError
from stagewright.program.columns import COMPUTE, RECV, Program, RankClass, RankWork, TaskKind
from stagewright.program.comm_axes import CommAxes, comm_axes
from stagewright.run.sections.execution import Execution
from stagewright.time.simulate.execute import (
    Executed,
    FragmentTimes,
    Progress,
    TaskTicks,
    execute,
)
from stagewright.time.simulate.expand import (
    Endpoints,
    IssueOrder,
    endpoints,
    expand_issue_order,
)
from stagewright.time.simulate.lanes import LaneMap
from stagewright.time.simulate.launches import HostWork, LastHostWait, launch_times
from stagewright.time.simulate.order import crosses_actions
from stagewright.time.simulate.plan import StepPlan
from stagewright.time.simulate.rules import IssueTable, tables_of
from stagewright.time.simulate.transfer import Fragments, TransferMatrix, transfer_matrix

TICK = 1e-12
"""Seconds per tick. Times are integers; 64 bits hold a hundred days of ticks."""
LONGEST = 1e6
"""Limit of the total seconds of the tasks of a rank."""


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """Ranks with equal timing, and the times of their tasks; arrays are by issue index.

    `launched`: the host has launched the task. `ready`: it is launched, and all its dependencies on
    its rank have ended. `begin`: a collective begins when its last rank is ready, a message when it
    is sent.
    """

    rank_class: RankClass
    ranks: Int
    issue: IssueOrder
    row: Int  # of the class's actions
    kind: NDArray[np.uint8]
    last_wait: LastHostWait | None  # None: launches take no time
    launched: Int  # ticks, as all times
    ready: Int
    begin: Int
    end: Int

    @property
    def is_kernel(self) -> Bool:
        """Mask of kernels of the compute stream, which run one at a time."""
        return self.issue.stream == 0

    @property
    def on_comm_stream(self) -> Bool:
        """Mask of kernels that accumulate reduced gradients on a communication stream."""
        return (self.kind == TaskKind.COMPUTE) & ~self.is_kernel


@dataclass(frozen=True, eq=False)
class Timeline:
    """A simulated step of all ranks."""

    program: Program
    execution: Execution
    lane_map: LaneMap
    plan: StepPlan
    executed: Executed
    hosts: Sequence[HostWork] | None
    window: tuple[int, int] | None = None
    """First and last tick of the step, if it is one of many in a pipeline that never drains
    (`steady`)."""

    @property
    def steady(self) -> bool:
        """True if the step is one of many in a pipeline that never drains."""
        return self.window is not None

    @cached_property
    def ticks(self) -> int:
        """Ticks of the step: to the end of its last task, or of the window of a steady one."""
        if self.window is not None:
            return self.window[1] - self.window[0]
        return int(self.executed.ends.max(initial=0))

    @property
    def seconds(self) -> float:
        """Duration of the step."""
        return self.ticks * TICK

    @cached_property
    def ranks(self) -> tuple[Int, ...]:
        """Ranks of each lane."""
        of_rank = self.lane_map.of_rank
        order = np.argsort(of_rank, kind="stable")
        return tuple(np.split(order, np.cumsum(np.bincount(of_rank))[:-1]))

    def class_of(self, lane: int) -> RankClass:
        """Rank class of a lane."""
        return self.program.classes[int(self.lane_map.class_of[lane])]

    def fragments(self, lane: int) -> Iterator[FragmentTimes]:
        """Times of a lane, fragment by fragment of its units."""
        class_id = int(self.lane_map.class_of[lane])
        number = lane - int(self.lane_map.by_class[class_id][0])
        for executed in self.executed.fragments[class_id].values():
            if len(executed.copies.fragment):
                yield FragmentTimes(executed, number)

    @cached_property
    def lanes(self) -> tuple[Lane, ...]:
        """Tasks of all lanes, with their times."""
        return tuple(self._lane(lane) for lane in range(self.lane_map.count))

    @cached_property
    def issues(self) -> tuple[IssueOrder, ...]:
        """Tasks of each class in issue order."""
        return tuple(expand_issue_order(class_plan) for class_plan in self.plan.classes)

    @cached_property
    def axes(self) -> dict[int, CommAxes]:
        """Axis that each row communicates along, by id of a table of actions."""
        tables = [rank_class.work.actions.tasks for rank_class in self.program.classes]
        return {
            key: comm_axes(self.program, tasks) for key, tasks in {id(t): t for t in tables}.items()
        }

    @cached_property
    def endpoints(self) -> Endpoints:
        """Messages and shared collectives of all lanes."""
        return endpoints(self.plan, self.executed.shared, self.issues)

    def _lane(self, lane: int) -> Lane:
        class_id = int(self.lane_map.class_of[lane])
        rank_class, issue = self.program.classes[class_id], self.issues[class_id]
        plan = self.plan.classes[class_id]
        row = table_rows(rank_class.work)[issue.rows]
        ready, end, elapsed = np.zeros((3, len(issue)), np.int64)
        for times in self.fragments(lane):
            rows = plan.expanded_rows(times.instances[:, None], times.positions)
            every = np.arange(len(times.positions))
            ready[rows], end[rows], elapsed[rows] = (
                times.ready(every), times.end(every), times.elapsed()
            )  # fmt: skip
        ready, end, elapsed = ready[issue.rows], end[issue.rows], elapsed[issue.rows]
        kind = rank_class.work.actions.tasks.kind[row]
        last_wait, launched = None, np.zeros_like(end)
        if self.hosts is not None:
            cost = _in_ticks(self.hosts[class_id].seconds[row])
            launched, last_wait = launch_times(cost, self.hosts[class_id].waits[row], end)
            last_wait = last_wait._replace(end=self.within(last_wait.end))
        # A receive whose message has already arrived takes no time.
        arrived = (kind == RECV) & (end == ready)
        begin = np.where((kind == COMPUTE) | arrived, ready, end - elapsed)
        times = [self.within(ticks) for ticks in (launched, ready, begin, end)]
        return Lane(rank_class, self.ranks[lane], issue, row, kind, last_wait, *times)

    def within(self, ticks: Int) -> Int:
        """Count times from the begin of the step, and clip those outside it."""
        if self.window is None:
            return ticks
        first, last = self.window
        return np.clip(ticks, first, last) - first


def table_rows(work: RankWork) -> Int:
    """Row of `Actions` of each row of a rank's tasks."""
    order, actions = work.order, work.actions
    counts = np.diff(order.begin)
    return np.arange(int(order.begin[-1])) + np.repeat(
        actions.begin[order.action] - order.begin[:-1], counts
    )


def timeline(
    program: Program,
    seconds: Sequence[Float],
    execution: Execution | None = None,
    slowdowns: Mapping[int, float] | None = None,
    progress: Progress | None = None,
    hosts: Sequence[HostWork] | None = None,
) -> Timeline:
    """Simulate a program whose tasks take `seconds`: by class, by row of its `Actions`.

    `slowdowns` by rank multiply the durations of its kernels: stragglers. The duration of a message
    is that of its SEND; that of a collective of several classes the longest of theirs. `hosts` are
    the launches of each class, by row of its `Actions`; None: they take no time.
    """
    execution = execution or Execution()
    if any(crosses_actions(c.work.actions.tasks, execution) for c in program.classes):
        program, seconds, hosts = _row_by_row(program, seconds, hosts)
    slowdown = _slowdown_by_rank(program, slowdowns or {})
    ticks = [_ticks(*pair) for pair in zip(program.classes, seconds, strict=True)]
    lanes = LaneMap.of(program, slowdown)
    plan = StepPlan(program, tables_of(program, execution), lanes)
    duration_sets = tuple(
        _duration_sets(table, lanes, ticks, slowdown[lanes.example], hosts) for table in plan.tables
    )
    of_tables = zip(plan.tables, plan.fragments, duration_sets, strict=True)
    matrices = tuple(_matrices(*of_table) for of_table in of_tables)
    executed = execute(program, plan, duration_sets, matrices, progress)
    return Timeline(program, execution, lanes, plan, executed, hosts)


def _matrices(
    table: IssueTable, fragments: Fragments, ticks: TaskTicks
) -> tuple[TransferMatrix, ...]:
    """Matrices of all fragments of a table; a receive and a rendezvous end when they are ready."""
    is_rendezvous = fragments.connections.is_rendezvous
    receives = table.actions.tasks.kind[table.rules.rows] == RECV
    duration = np.where(is_rendezvous | receives, 0, ticks.duration)
    waits = None if ticks.waits is None else ticks.waits & ~is_rendezvous
    return tuple(
        transfer_matrix(fragments, f, duration, ticks.launch, waits)
        for f in range(len(fragments.fragments))
    )


def _row_by_row(
    program: Program, seconds: Sequence[Float], hosts: Sequence[HostWork] | None
) -> tuple[Program, Sequence[Float], Sequence[HostWork] | None]:
    """Program whose classes have one action with all their rows, and the same durations."""
    rows = [table_rows(rank_class.work) for rank_class in program.classes]
    classes = tuple(replace(c, work=c.work.with_tasks(c.tasks)) for c in program.classes)
    seconds = [of_class[r] for of_class, r in zip(seconds, rows, strict=True)]
    if hosts is not None:
        pairs = zip(hosts, rows, strict=True)
        hosts = [HostWork(host.seconds[r], host.waits[r]) for host, r in pairs]
    return replace(program, classes=classes), seconds, hosts


def _slowdown_by_rank(program: Program, by_rank: Mapping[int, float]) -> Float:
    world_size = program.mesh.world_size
    slowdown = np.ones(world_size)
    for rank, by in by_rank.items():
        if not 0 <= rank < world_size:
            raise UserError(f"there is no rank {rank} to slow down; use 0 to {world_size - 1}")
        if not 0 < by < 1e6:
            raise UserError(f"rank {rank}: a factor of {by:g} is no slowdown; use one such as 1.1")
        slowdown[rank] = by
    return slowdown


def _ticks(rank_class: RankClass, seconds: Float) -> Int:
    """Durations in ticks, by row of the class's actions."""
    actions, order = rank_class.work.actions, rank_class.work.order
    if len(seconds) != len(actions.tasks):
        raise ValueError(f"{len(seconds)} durations for {len(actions.tasks)} tasks")
    if (seconds < 0).any() or np.isnan(seconds).any():
        raise ValueError("durations must be numbers, and not negative")
    sums = np.concatenate([[0.0], np.cumsum(seconds)])[actions.begin]
    total = float(np.diff(sums)[order.action].sum())
    if total > LONGEST:
        raise UserError(
            f"the tasks of rank {rank_class.ranks[0]} take {total:.3g} s in all, and a step may "
            f"take {LONGEST:.0e} s (11 days) at most; check the figures of the hardware, or use "
            "a smaller batch or shorter sequences"
        )
    return _in_ticks(seconds)


def _in_ticks(seconds: Float) -> Int:
    return np.rint(seconds / TICK).astype(np.int64)


def _duration_sets(
    table: IssueTable, lanes: LaneMap, ticks: Sequence[Int], slowdown: Float,
    hosts: Sequence[HostWork] | None,
) -> TaskTicks:  # fmt: skip
    """Distinct durations and launches of the lanes of a table; `slowdown` by lane."""
    rows, kind = table.rules.rows, table.actions.tasks.kind[table.rules.rows]
    set_of_lane = np.zeros(lanes.count, np.int64)
    indices: dict[tuple[bytes, ...], int] = {}
    durations: list[Int] = []
    launches: list[Int] = []
    waits: list[Bool] = []
    for class_id in table.classes:
        host: tuple[Int, Bool] | None = None
        if hosts is not None:
            host = _in_ticks(hosts[class_id].seconds[rows]), hosts[class_id].waits[rows]
        for lane in lanes.by_class[class_id].tolist():
            duration = ticks[class_id][rows]
            if slowdown[lane] != 1:
                slowed = np.rint(duration * slowdown[lane]).astype(np.int64)
                duration = np.where(kind == COMPUTE, slowed, duration)
            key = tuple(column.tobytes() for column in (duration, *(host or ())))
            if key not in indices:
                indices[key] = len(durations)
                durations.append(duration)
                if host is not None:
                    launches.append(host[0])
                    waits.append(host[1])
            set_of_lane[lane] = indices[key]
    if hosts is None:
        return TaskTicks(np.stack(durations), None, None, set_of_lane)
    all_waits = np.stack(waits).astype(bool)
    return TaskTicks(np.stack(durations), np.stack(launches), all_waits, set_of_lane)
