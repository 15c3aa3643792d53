"""When every task of a program starts and ends.

One rank stands for all ranks with equal timing, its *lane*: a rank class, unless factors make its
ranks differ. Distinct actions have one transfer matrix each; the step is executed wave by wave
(`waves`). Tasks get times of their own only when they are asked for (`Timeline.lanes`).

>>> from stagewright.lower.compile import compile
>>> from stagewright.run.settings import Run
>>> program = compile(Run(model="gpt2", pp=2, layers=2, seq_length=8)).program
>>> line = timeline(program, [np.full(len(of.work.actions.tasks), 1e-6) for of in program.classes])
>>> [len(lane.ranks) for lane in line.lanes], round(line.seconds * 1e6)
([1, 1], 168)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Bool, Float, Int
from stagewright.errors import UserError
from stagewright.program.along import TasksAlong, along
from stagewright.program.columns import COMPUTE, RECV, Program, RankClass, TaskKind
from stagewright.program.rank_work import RankWork
from stagewright.run.sections.execution import ISSUED_BY, Execution
from stagewright.time.simulate.endpoints import Endpoints, endpoints
from stagewright.time.simulate.execute import Executed, Progress, TaskTicks, execute
from stagewright.time.simulate.expand import expanded
from stagewright.time.simulate.host import HostThread, HostWork, Since
from stagewright.time.simulate.lanes import Lanes
from stagewright.time.simulate.order import IssueOrder, crosses_actions, tables_of
from stagewright.time.simulate.transfer import NEVER, Evaluated, Runs, evaluate
from stagewright.time.simulate.waves import Waves

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
    issue: IssueOrder
    row: Int  # of the class's actions
    kind: NDArray[np.uint8]
    since: Since | None  # when the host last paused; None: launches take no time
    launched: Int  # ticks, as all times
    ready: Int
    begin: Int
    end: Int

    @property
    def main(self) -> Bool:
        """Mask of kernels of the main stream, which run one at a time."""
        return self.issue.stream == 0

    @property
    def aside(self) -> Bool:
        """Mask of kernels that add up reduced gradients on a communication stream."""
        return (self.kind == TaskKind.COMPUTE) & ~self.main


class RunTimes(NamedTuple):
    """Times of one run of a unit, in all instances of a lane: ticks, [instances, positions]."""

    instances: Int
    positions: Int
    begun: Int
    """[instances, inputs]: what each instance began with; of a meeting when it is ready, begins and
    ends."""
    alone: Evaluated | None
    """None: a meeting."""
    rows: Int
    """By position, the row of `alone`."""
    timing: int
    durations: Int
    """By position; of a receive that of its message."""

    def ready(self, chosen: Int) -> Int:
        """When some of the positions are ready; `chosen` are indices."""
        if self.alone is None:
            return self.begun[:, :1]
        return self._after(self.alone.ready[self.timing, self.rows[chosen]])

    def end(self, chosen: Int) -> Int:
        """When some of the positions end."""
        if self.alone is None:
            return self.begun[:, 2:]
        return self._after(self.alone.ends[self.timing, self.rows[chosen]])

    def took(self) -> Int:
        """How long each position takes."""
        if self.alone is None:
            return self.begun[:, 2:] - self.begun[:, 1:2]
        return np.broadcast_to(self.durations, (len(self.begun), len(self.durations)))

    def _after(self, matrix: Int) -> Int:
        """The latest of all inputs plus what `matrix` adds to each."""
        always = np.flatnonzero((matrix > NEVER).all(axis=0))
        first = int(always[np.argmax(self.begun[:, always].sum(axis=0))]) if len(always) else 0
        latest = self.begun[:, first, None] + matrix[:, first]
        # Most inputs never decide: they are not later than the first one, whatever is added.
        ahead = (self.begun - self.begun[:, first, None]).max(axis=0)
        more = (matrix - matrix[:, first, None]).max(axis=0, initial=NEVER)
        for column in np.flatnonzero((ahead + more > 0) & (matrix > NEVER).any(axis=0)).tolist():
            np.maximum(latest, self.begun[:, column, None] + matrix[:, column], out=latest)
        return latest


@dataclass(frozen=True, eq=False)
class Timeline:
    """A step of all ranks in time."""

    program: Program
    how: Execution
    lanes_of: Lanes
    waves: Waves
    timings: tuple[TaskTicks, ...]
    evaluated: tuple[tuple[Evaluated, ...], ...]
    executed: Executed
    hosts: Sequence[HostWork] | None
    window: tuple[int, int] | None = None
    """The first and the last tick of the step, where it is one of many in a pipeline that never
    drains (`steady`)."""

    @property
    def steady(self) -> bool:
        """Whether the step is one of many in a pipeline that never drains."""
        return self.window is not None

    @cached_property
    def ticks(self) -> int:
        """The end of the last task, in ticks."""
        if self.window is not None:
            return self.window[1] - self.window[0]
        return int(lane_ends(self.waves, self.executed.times).max(initial=0))

    @property
    def seconds(self) -> float:
        """The duration of the step."""
        return self.ticks * TICK

    @cached_property
    def ranks(self) -> tuple[Int, ...]:
        """The ranks of each lane."""
        of_rank = self.lanes_of.of_rank
        order = np.argsort(of_rank, kind="stable")
        return tuple(np.split(order, np.cumsum(np.bincount(of_rank))[:-1]))

    def class_of(self, lane: int) -> RankClass:
        """The rank class of a lane."""
        return self.program.classes[int(self.waves.lanes.class_of[lane])]

    def runs(self, lane: int) -> Iterator[RunTimes]:
        """The times of a lane, run by run of its units."""
        waves, executed = self.waves, self.executed
        t = waves.table_of[int(waves.lanes.class_of[lane])]
        timing = int(self.timings[t].of_lane[lane])
        runs = waves.runs[t]
        for number, batch in enumerate(waves.batches):
            if batch.table != t:
                continue
            lane_rows = np.flatnonzero(batch.lane == lane)
            if not len(lane_rows):
                continue
            order = lane_rows[np.argsort(batch.run[lane_rows], kind="stable")]
            bounds = np.flatnonzero(np.diff(batch.run[order])) + 1
            for rows in np.split(order, bounds):
                group = runs.groups[batch.group]
                run = runs.runs[int(group.runs[batch.run[rows[0]]])]
                if run.begin == run.end:
                    continue
                positions = np.arange(run.begin, run.end)
                durations = self.timings[t].given[timing, positions]
                alone, begun = self.evaluated[t][batch.group], executed.inputs[number]
                if batch.meets:
                    alone, begun = None, executed.met[number]
                yield RunTimes(
                    batch.instance[rows], positions, begun[rows], alone, group.row[positions],
                    timing, durations,
                )  # fmt: skip

    @cached_property
    def lanes(self) -> tuple[Lane, ...]:
        """The tasks of all lanes, with their times."""
        return tuple(self._lane(nth) for nth in range(self.waves.lanes.count))

    @cached_property
    def issues(self) -> tuple[IssueOrder, ...]:
        """By class, its tasks in issue order."""
        return tuple(expanded(self.waves, nth) for nth in range(len(self.program.classes)))

    @cached_property
    def axes(self) -> dict[int, TasksAlong]:
        """By id of a table of actions, the axis that each row communicates along."""
        tables = {id(of.work.actions.tasks): of.work.actions.tasks for of in self.program.classes}
        return {key: along(self.program, tasks) for key, tasks in tables.items()}

    @cached_property
    def endpoints(self) -> Endpoints:
        """Messages and shared collectives of all lanes."""
        return endpoints(self.waves, self.issues)

    def _lane(self, lane: int) -> Lane:
        nth = int(self.waves.lanes.class_of[lane])
        of, issue = self.program.classes[nth], self.issues[nth]
        row = table_rows(of.work)[issue.rows]
        ready, end, took = np.zeros((3, len(issue)), np.int64)
        for run in self.runs(lane):
            rows = self.waves.expanded_rows(nth, run.instances[:, None], run.positions)
            chosen = np.arange(len(run.positions))
            ready[rows], end[rows], took[rows] = run.ready(chosen), run.end(chosen), run.took()
        ready, end, took = ready[issue.rows], end[issue.rows], took[issue.rows]
        kind = of.work.actions.tasks.kind[row]
        since, launched = None, np.zeros_like(end)
        if self.hosts is not None:
            thread = HostThread.of(self.hosts[nth], row, TICK)
            launched, since = thread.launched(end[:, None])[:, 0], thread.since(end)
        # A receive whose message has already arrived takes no time.
        arrived = (kind == RECV) & (end == ready)
        begin = np.where((kind == COMPUTE) | arrived, ready, end - took)
        times = [self.within(of) for of in (launched, ready, begin, end)]
        if since is not None:
            since = since._replace(end=self.within(since.end))
        return Lane(of, self.ranks[lane], issue, row, kind, since, *times)

    def within(self, ticks: Int) -> Int:
        """Times counted from the begin of the step; those outside it are at its begin or end."""
        if self.window is None:
            return ticks
        first, last = self.window
        return np.clip(ticks, first, last) - first


def table_rows(work: RankWork) -> Int:
    """By row of a rank's tasks, the row of its `Actions`."""
    order, actions = work.order, work.actions
    counts = np.diff(order.begin)
    return np.arange(int(order.begin[-1])) + np.repeat(
        actions.begin[order.action] - order.begin[:-1], counts
    )


def lane_ends(waves: Waves, times: Int) -> Int:
    """By lane, the latest time that a register of it holds, but for launches."""
    ends = np.zeros(waves.lanes.count, np.int64)
    for nth, lanes in enumerate(waves.lanes.by_class):
        registers = len(waves.tables[waves.table_of[nth]].rules.registers)
        first, width = int(waves.base[nth]), len(lanes)
        held = times[first : first + registers * width].reshape(registers, width)
        ends[lanes] = held[1:].max(axis=0, initial=0)
    return ends


def timeline(
    program: Program,
    seconds: Sequence[Float],
    how: Execution | None = None,
    factors: Mapping[int, float] | None = None,
    progress: Progress | None = None,
    hosts: Sequence[HostWork] | None = None,
) -> Timeline:
    """Run a program whose tasks take `seconds`: by class, by row of its `Actions`.

    `factors` multiply the duration of kernels of some ranks: stragglers. The duration of a message
    is that of its SEND; that of a collective of several classes the longest that they give.
    `progress` is called now and then with the tasks done so far, of all classes, and in all.
    `hosts` are the launches of each class, by row of its `Actions`; None: they take no time.
    """
    how = how or Execution()
    if any(crosses_actions(of.work.actions.tasks, how) for of in program.classes):
        program, seconds, hosts = _row_by_row(program, seconds, hosts)
    factor = _factors(program, factors or {})
    ticks = [_ticks(of, given) for of, given in zip(program.classes, seconds, strict=True)]
    lanes = Lanes.of(program, factor)
    waves = _waves_of(program, how, lanes)
    timings = tuple(
        _timing(waves, t, ticks, factor[lanes.example], hosts) for t in range(len(waves.tables))
    )
    evaluated = tuple(_evaluated(runs, of) for runs, of in zip(waves.runs, timings, strict=True))
    executed = execute(waves, timings, evaluated, progress)
    return Timeline(program, how, lanes, waves, timings, evaluated, executed, hosts)


def _waves_of(program: Program, how: Execution, lanes: Lanes) -> Waves:
    """The waves of a program; programs of equal structure share them, whatever their sizes."""
    key = _structure(program, how, lanes)
    waves = _KNOWN.get(key)
    if waves is None:
        waves = Waves(program, tables_of(program, how), lanes)
        if len(_KNOWN) >= _MOST_KNOWN:
            del _KNOWN[next(iter(_KNOWN))]
        if waves.count < _LONG:
            _KNOWN[key] = waves
    return waves


_MOST_KNOWN, _LONG = 16, 20_000
"""Structures whose waves are kept, and the waves of one that is too long for it."""
_KNOWN: dict[bytes, Waves] = {}


def _structure(program: Program, how: Execution, lanes: Lanes) -> bytes:
    """What is equal for programs whose units, messages and meetings are."""
    digest = blake2b(digest_size=16)

    def add(*parts: object) -> None:
        for part in parts:
            if isinstance(part, np.ndarray):
                digest.update(part.tobytes())
            elif isinstance(part, str | int | tuple | frozenset):
                digest.update(f"{part!r}".encode())
            else:
                digest.update(b"%d" % id(part))
            digest.update(b";")

    degrees = [program.degrees_of(slot) for slot in range(len(program.communicators))]
    names = [tuple(program.mesh.degree_of(n) for names in of for n in names) for of in degrees]
    add(repr(how.only(*ISSUED_BY)), repr(program.communicators), repr(names))
    add(repr(program.peers), lanes.class_of, *lanes.groups, *lanes.peers)
    tables: dict[int, int] = {}
    for of in program.classes:
        actions, order = of.work.actions, of.work.order
        add(order.action, order.begin, order.kind, order.stage, order.microbatch)
        add(*order.cache_key(), tables.setdefault(id(actions.begin), len(tables)))
        if len(tables) > tables[id(actions.begin)] + 1:
            continue
        tasks = actions.tasks
        add(actions.begin, actions.part, actions.carried, tasks.data_ptr, tasks.data)
        add(tasks.kind, tasks.phase, tasks.stage, tasks.layer, tasks.microbatch, tasks.collective)
        add(tasks.slot, tasks.tag)
        if how.overlap_moe_expert_parallel_comm:
            add(tasks.comm_bytes)
    return digest.digest()


def _evaluated(runs: Runs, timing: TaskTicks) -> tuple[Evaluated, ...]:
    """The matrices of all runs of a table; those of meetings end when they are ready."""
    duration = np.where(runs.connections.meets, 0, timing.duration)
    waits = None if timing.waits is None else timing.waits & ~runs.connections.meets
    return tuple(evaluate(group, duration, timing.cost, waits) for group in runs.groups)


def _row_by_row(
    program: Program, seconds: Sequence[Float], hosts: Sequence[HostWork] | None
) -> tuple[Program, Sequence[Float], Sequence[HostWork] | None]:
    """A program whose classes have one action with all their rows, and the same durations."""
    rows = [table_rows(of.work) for of in program.classes]
    classes = tuple(replace(of, work=of.work.with_tasks(of.tasks)) for of in program.classes)
    seconds = [each[at] for each, at in zip(seconds, rows, strict=True)]
    if hosts is not None:
        hosts = [HostWork(of.seconds[at], of.waits[at]) for of, at in zip(hosts, rows, strict=True)]
    return replace(program, classes=classes), seconds, hosts


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


def _ticks(of: RankClass, seconds: Float) -> Int:
    """Durations in ticks, by row of the class's actions."""
    actions, order = of.work.actions, of.work.order
    if len(seconds) != len(actions.tasks):
        raise ValueError(f"{len(seconds)} durations for {len(actions.tasks)} tasks")
    if (seconds < 0).any() or np.isnan(seconds).any():
        raise ValueError("durations must be numbers, and not negative")
    sums = np.concatenate([[0.0], np.cumsum(seconds)])[actions.begin]
    total = float(np.diff(sums)[order.action].sum())
    if total > LONGEST:
        raise UserError(
            f"the tasks of rank {of.ranks[0]} take {total:.3g} s in all, and a step may "
            f"take {LONGEST:.0e} s (11 days) at most; check the figures of the hardware, or use "
            "a smaller batch or shorter sequences"
        )
    return np.rint(seconds / TICK).astype(np.int64)


def _timing(
    waves: Waves, t: int, ticks: Sequence[Int], factor: Float, hosts: Sequence[HostWork] | None
) -> TaskTicks:
    """The distinct durations and launches of the lanes of a table; `factor` by lane."""
    table, lanes = waves.tables[t], waves.lanes
    rows, kind = table.rules.rows, table.actions.tasks.kind[table.rules.rows]
    of_lane = np.zeros(lanes.count, np.int64)
    known: dict[tuple[bytes, ...], int] = {}
    durations: list[Int] = []
    costs: list[Int] = []
    waits: list[Bool] = []
    for nth in table.classes:
        host: tuple[Int, Bool] | None = None
        if hosts is not None:
            cost = np.rint(hosts[nth].seconds[rows] / TICK).astype(np.int64)
            host = cost, hosts[nth].waits[rows]
        for lane in lanes.by_class[nth].tolist():
            given = ticks[nth][rows]
            if factor[lane] != 1:
                slowed = np.rint(given * factor[lane]).astype(np.int64)
                given = np.where(kind == COMPUTE, slowed, given)
            key = tuple(part.tobytes() for part in (given, *(host or ())))
            if key not in known:
                known[key] = len(durations)
                durations.append(given)
                if host is not None:
                    costs.append(host[0])
                    waits.append(host[1])
            of_lane[lane] = known[key]
    given = np.stack(durations)
    duration = np.where(kind == RECV, 0, given)
    if hosts is None:
        return TaskTicks(duration, None, None, of_lane, given)
    return TaskTicks(duration, np.stack(costs), np.stack(waits).astype(bool), of_lane, given)
