"""Start and end of every task of a program.

Ranks with equal timing are one *lane*: a rank class, unless factors make its ranks differ. Distinct
actions have one transfer matrix each; the step is executed wave by wave (`waves`). Times of single
tasks are computed on demand (`Timeline.lanes`).

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
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Bool, Float, Int
from stagewright.errors import UserError
from stagewright.program.columns import COMPUTE, RECV, Program, RankClass, RankWork, TaskKind
from stagewright.program.comm_axes import CommAxes, comm_axes
from stagewright.run.sections.execution import ISSUED_BY, Execution
from stagewright.time.simulate.endpoints import Endpoints, endpoints
from stagewright.time.simulate.execute import Executed, Progress, TaskTicks, execute
from stagewright.time.simulate.expand import expand_issue_order
from stagewright.time.simulate.host import HostWork, LastHostWait, launch_times
from stagewright.time.simulate.lanes import Lanes
from stagewright.time.simulate.order import IssueOrder, crosses_actions, tables_of
from stagewright.time.simulate.transfer import (
    NEVER,
    Fragments,
    TransferMatrices,
    transfer_matrices,
)
from stagewright.time.simulate.waves import Waves

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
    def main(self) -> Bool:
        """Mask of kernels of the main stream, which run one at a time."""
        return self.issue.stream == 0

    @property
    def on_comm_stream(self) -> Bool:
        """Mask of kernels that accumulate reduced gradients on a communication stream."""
        return (self.kind == TaskKind.COMPUTE) & ~self.main


class FragmentTimes(NamedTuple):
    """Times of one fragment in all instances of a lane: ticks, [instances, positions]."""

    instances: Int
    positions: Int
    inputs: Int
    """[instances, inputs]; unused for a rendezvous."""
    rendezvous: Int | None
    """[instances, 3]: when a rendezvous is ready, begins and ends; None: no rendezvous."""
    matrices: TransferMatrices
    rows: Int
    """Row of `matrices` of each position."""
    set_index: int
    durations: Int
    """By position; of a receive that of its message."""

    def ready(self, selected: Int) -> Int:
        """Ready times of selected positions, given as indices."""
        if self.rendezvous is not None:
            return self.rendezvous[:, :1]
        return self._propagate(self.matrices.ready[self.set_index, self.rows[selected]])

    def end(self, selected: Int) -> Int:
        """Ends of selected positions, given as indices."""
        if self.rendezvous is not None:
            return self.rendezvous[:, 2:]
        return self._propagate(self.matrices.ends[self.set_index, self.rows[selected]])

    def elapsed(self) -> Int:
        """Durations of all positions."""
        if self.rendezvous is not None:
            return self.rendezvous[:, 2:] - self.rendezvous[:, 1:2]
        return np.broadcast_to(self.durations, (len(self.inputs), len(self.durations)))

    def _propagate(self, matrix: Int) -> Int:
        """Multiply the inputs by rows of a transfer matrix."""
        inputs = self.inputs
        always = np.flatnonzero((matrix > NEVER).all(axis=0))
        first = int(always[np.argmax(inputs[:, always].sum(axis=0))]) if len(always) else 0
        latest = inputs[:, first, None] + matrix[:, first]
        # Skip inputs that cannot exceed the first.
        lead = (inputs - inputs[:, first, None]).max(axis=0)
        lead += (matrix - matrix[:, first, None]).max(axis=0, initial=NEVER)
        for column in np.flatnonzero((lead > 0) & (matrix > NEVER).any(axis=0)).tolist():
            np.maximum(latest, inputs[:, column, None] + matrix[:, column], out=latest)
        return latest


@dataclass(frozen=True, eq=False)
class Timeline:
    """A simulated step of all ranks."""

    program: Program
    execution: Execution
    lane_map: Lanes
    waves: Waves
    duration_sets: tuple[TaskTicks, ...]
    matrices: tuple[tuple[TransferMatrices, ...], ...]
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
        """End of the last task, in ticks."""
        if self.window is not None:
            return self.window[1] - self.window[0]
        return int(lane_ends(self.waves, self.executed.times).max(initial=0))

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
        waves, executed = self.waves, self.executed
        t = waves.table_of[int(self.lane_map.class_of[lane])]
        ticks = self.duration_sets[t]
        set_index = int(ticks.set_of_lane[lane])
        for number, batch in enumerate(waves.batches):
            lane_rows = np.flatnonzero(batch.lane == lane) if batch.table == t else ()
            if not len(lane_rows):
                continue
            order = lane_rows[np.argsort(batch.fragment[lane_rows], kind="stable")]
            bounds = np.flatnonzero(np.diff(batch.fragment[order])) + 1
            group = waves.fragments[t].groups[batch.group]
            for rows in np.split(order, bounds):
                index = int(group.indices[batch.fragment[rows[0]]])
                fragment = waves.fragments[t].fragments[index]
                if fragment.begin == fragment.end:
                    continue
                positions = np.arange(fragment.begin, fragment.end)
                rendezvous = executed.rendezvous_times[number]
                yield FragmentTimes(
                    batch.instance[rows], positions, executed.inputs[number][rows],
                    rendezvous[rows] if batch.is_rendezvous else None,
                    self.matrices[t][batch.group], group.row[positions], set_index,
                    ticks.raw_duration[set_index, positions],
                )  # fmt: skip

    @cached_property
    def lanes(self) -> tuple[Lane, ...]:
        """Tasks of all lanes, with their times."""
        return tuple(self._lane(lane) for lane in range(self.lane_map.count))

    @cached_property
    def issues(self) -> tuple[IssueOrder, ...]:
        """Tasks of each class in issue order."""
        return tuple(expand_issue_order(self.waves, c) for c in range(len(self.program.classes)))

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
        return endpoints(self.waves, self.issues)

    def _lane(self, lane: int) -> Lane:
        class_id = int(self.lane_map.class_of[lane])
        rank_class, issue = self.program.classes[class_id], self.issues[class_id]
        row = table_rows(rank_class.work)[issue.rows]
        ready, end, elapsed = np.zeros((3, len(issue)), np.int64)
        for times in self.fragments(lane):
            rows = self.waves.expanded_rows(class_id, times.instances[:, None], times.positions)
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


def lane_ends(waves: Waves, times: Int) -> Int:
    """End of each lane: max over its registers, `LAUNCHED` excluded."""
    ends = np.zeros(waves.lanes.count, np.int64)
    for class_id, lanes in enumerate(waves.lanes.by_class):
        registers = len(waves.tables[waves.table_of[class_id]].rules.registers)
        first, size = int(waves.base[class_id]), registers * len(lanes)
        held = times[first : first + size].reshape(registers, len(lanes))
        ends[lanes] = held[1:].max(axis=0, initial=0)
    return ends


def timeline(
    program: Program,
    seconds: Sequence[Float],
    execution: Execution | None = None,
    factors: Mapping[int, float] | None = None,
    progress: Progress | None = None,
    hosts: Sequence[HostWork] | None = None,
) -> Timeline:
    """Simulate a program whose tasks take `seconds`: by class, by row of its `Actions`.

    `factors` multiply the duration of kernels of some ranks: stragglers. The duration of a message
    is that of its SEND; that of a collective of several classes the longest of theirs. `hosts` are
    the launches of each class, by row of its `Actions`; None: they take no time.
    """
    execution = execution or Execution()
    if any(crosses_actions(c.work.actions.tasks, execution) for c in program.classes):
        program, seconds, hosts = _row_by_row(program, seconds, hosts)
    factor = _factors(program, factors or {})
    ticks = [_ticks(*pair) for pair in zip(program.classes, seconds, strict=True)]
    lanes = Lanes.of(program, factor)
    waves = _waves_of(program, execution, lanes)
    duration_sets = tuple(
        _duration_sets(waves, t, ticks, factor[lanes.example], hosts)
        for t in range(len(waves.tables))
    )
    matrices = tuple(_matrices(*pair) for pair in zip(waves.fragments, duration_sets, strict=True))
    executed = execute(waves, duration_sets, matrices, progress)
    return Timeline(program, execution, lanes, waves, duration_sets, matrices, executed, hosts)


def _waves_of(program: Program, execution: Execution, lanes: Lanes) -> Waves:
    """Waves of a program; programs of equal structure share them, whatever their sizes."""
    key = _structure(program, execution, lanes)
    waves = _CACHE.get(key)
    if waves is None:
        waves = Waves(program, tables_of(program, execution), lanes)
        if len(_CACHE) >= _MAX_CACHED:
            del _CACHE[next(iter(_CACHE))]
        if waves.count < _MAX_WAVES:
            _CACHE[key] = waves
    return waves


_MAX_CACHED, _MAX_WAVES = 16, 20_000
"""Structures whose waves are cached, and the waves of one that is too long to be cached."""
_CACHE: dict[bytes, Waves] = {}


def _structure(program: Program, execution: Execution, lanes: Lanes) -> bytes:
    """Cache key of `Waves`: all but sizes and durations."""
    digest = blake2b(digest_size=16)

    def add(*parts: object) -> None:
        for part in parts:
            if isinstance(part, np.ndarray):
                digest.update(part.tobytes())
            elif isinstance(part, str | int | tuple | frozenset):
                digest.update(f"{part!r}".encode())
            else:  # ids stay unique: a cached `Waves` keeps these objects alive
                digest.update(b"%d" % id(part))
            digest.update(b";")

    degrees = [program.degrees_of(slot) for slot in range(len(program.communicators))]
    names = [
        tuple(program.mesh.degree_of(name) for names in parts for name in names)
        for parts in degrees
    ]
    add(repr(execution.only(*ISSUED_BY)), repr(program.communicators), repr(names))
    add(repr(program.peers), lanes.class_of, *lanes.groups, *lanes.peers)
    tables: dict[int, int] = {}
    for rank_class in program.classes:
        actions, order = rank_class.work.actions, rank_class.work.order
        add(order.action, order.begin, order.kind, order.stage, order.microbatch)
        add(*order.cache_key(), tables.setdefault(id(actions.begin), len(tables)))
        if len(tables) > tables[id(actions.begin)] + 1:
            continue
        tasks = actions.tasks
        add(actions.begin, actions.part, actions.carried, tasks.data_ptr, tasks.data)
        add(tasks.kind, tasks.phase, tasks.stage, tasks.layer, tasks.microbatch, tasks.collective)
        add(tasks.slot, tasks.tag)
        if execution.overlap_moe_expert_parallel_comm:
            add(tasks.comm_bytes)
    return digest.digest()


def _matrices(fragments: Fragments, ticks: TaskTicks) -> tuple[TransferMatrices, ...]:
    """Matrices of all fragments of a table; a rendezvous ends when it is ready."""
    is_rendezvous = fragments.connections.is_rendezvous
    duration = np.where(is_rendezvous, 0, ticks.duration)
    waits = None if ticks.waits is None else ticks.waits & ~is_rendezvous
    return tuple(
        transfer_matrices(group, duration, ticks.launch, waits) for group in fragments.groups
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


def _factors(program: Program, by_rank: Mapping[int, float]) -> Float:
    world_size = program.mesh.world_size
    factor = np.ones(world_size)
    for rank, by in by_rank.items():
        if not 0 <= rank < world_size:
            raise UserError(f"there is no rank {rank} to slow down; use 0 to {world_size - 1}")
        if not 0 < by < 1e6:
            raise UserError(f"rank {rank}: a factor of {by:g} is no slowdown; use one such as 1.1")
        factor[rank] = by
    return factor


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
    waves: Waves, t: int, ticks: Sequence[Int], factor: Float, hosts: Sequence[HostWork] | None
) -> TaskTicks:
    """Distinct durations and launches of the lanes of a table; `factor` by lane."""
    table, lanes = waves.tables[t], waves.lanes
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
            if factor[lane] != 1:
                slowed = np.rint(duration * factor[lane]).astype(np.int64)
                duration = np.where(kind == COMPUTE, slowed, duration)
            key = tuple(column.tobytes() for column in (duration, *(host or ())))
            if key not in indices:
                indices[key] = len(durations)
                durations.append(duration)
                if host is not None:
                    launches.append(host[0])
                    waits.append(host[1])
            set_of_lane[lane] = indices[key]
    raw_duration = np.stack(durations)
    duration = np.where(kind == RECV, 0, raw_duration)
    if hosts is None:
        return TaskTicks(duration, None, None, set_of_lane, raw_duration)
    all_waits = np.stack(waits).astype(bool)
    return TaskTicks(duration, np.stack(launches), all_waits, set_of_lane, raw_duration)
