"""Recorded ranks as a program, which the trace writers take: tasks with measured durations.

A kernel is a task. It waits for the kernel before it on its stream, for events, and for what the
host had waited for when it launched it. While no kernel ran, the rank has a task `idle` of that
duration: whatever started later waits for it. Collectives and sends of a rank are also chained
in the order in which they ended, which is one order on all ranks, so readers that run one at a time
cannot hang.

One rank stands for all ranks of its job; several must be all of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from stagewright.algebra.layout import Mesh
from stagewright.arrays import Int, offsets
from stagewright.errors import UserError
from stagewright.graph.node import BYTES
from stagewright.lower.disaggregated import Joined
from stagewright.numbers import plural, spans
from stagewright.program.columns import (
    BACKWARD_PHASE,
    COLLECTIVES,
    FORWARD_PHASE,
    OPTIMIZER_PHASE,
    RankClass,
    RankWork,
    TaskKind,
    Tasks,
)
from stagewright.program.communicators import Communicator, Peer
from stagewright.recorded.link import LAUNCH, StepGraph, StepNode, link
from stagewright.recorded.rank import Kernel, RankTrace
from stagewright.recorded.ranks import instances, messages

AXIS = "rank"
"""The only axis of the mesh: groups and peers of recorded ranks are tables."""
MOST_GROUPS = 500
"""Communicators that ids of groups can tell apart (`Communication.group_ids`)."""
_T = TypeVar("_T")


@dataclass(slots=True)
class _TaskRow:
    """A task that is made of a kernel, or of the time in which none ran."""

    moment: int
    """Its place: the start, or of what communicates the end."""
    name: str
    duration: int
    kernel: Kernel | None = None
    kind: TaskKind = TaskKind.COMPUTE
    slot: int = -1
    bytes: int = 0
    tag: int = -1
    reads: list[_TaskRow] = field(default_factory=lambda: list[_TaskRow]())
    after: list[_TaskRow] = field(default_factory=lambda: list[_TaskRow]())
    index: int = -1


def program_of(traces: Sequence[RankTrace]) -> tuple[Joined, list[str]]:
    """The program of all ranks of a job, and notes on what was assumed."""
    world = _world(traces)
    notes: Counter[str] = Counter()
    graph = link(traces)
    groups = _GroupTables(world, everywhere=len(traces) == 1)
    sizes = _collective_sizes(traces)
    tags = _tags(traces)
    rows_of: dict[int, list[_TaskRow]] = {}
    for trace in traces:
        rank_rows = _RankTasks(trace, graph)
        for row in rank_rows.rows:
            _communicate(row, trace, groups, sizes, tags, notes)
        rows_of[trace.rank] = rank_rows.ordered()
    everyone = np.arange(world, dtype=np.int64)
    classes = tuple(
        RankClass(
            everyone if len(traces) == 1 else np.array([rank], np.int64),
            rank,
            RankWork.from_tables(_tasks(rows)),
        )
        for rank, rows in rows_of.items()
    )
    if len(traces) == 1 and world > 1:
        notes[
            f"rank {traces[0].rank} alone was read: all {world} ranks are taken to do the same"
        ] = 0
    program = Joined(
        Mesh(((AXIS, world),), ((AXIS, (AXIS,)),)),
        classes,
        tuple(Communicator((AXIS,)) for _ in groups.index),
        tuple(Peer(AXIS, shift) for shift in groups.shifts),
        tuple(groups.index),
        tuple((everyone + shift) % world for shift in groups.shifts),
    )
    return program, [text if not n else f"{plural(n, *_NOUNS)} {text}" for text, n in notes.items()]


_NOUNS = "transfer", "transfers"


def _world(traces: Sequence[RankTrace]) -> int:
    """Ranks of the job."""
    members = [max(k.comm.ranks) + 1 for t in traces for k in t.kernels if k.comm and k.comm.ranks]
    world = max(traces[0].world_size, traces[-1].rank + 1, *members, 1)
    if 1 < len(traces) < world:
        missing = sorted(set(range(world)) - {trace.rank for trace in traces})
        raise UserError(
            f"ranks {spans(missing)} of {world} were not given; wanted the traces of all ranks, or "
            "of one, which then stands for all"
        )
    return world


# ---- rows ----------------------------------------------------------------------------------------


class _RankTasks:
    """Tasks of one rank, linked."""

    def __init__(self, trace: RankTrace, graph: StepGraph) -> None:
        self.rows: list[_TaskRow] = []
        self._awaited: dict[int, list[_TaskRow]] = {}  # by node of the host: kernels it waited for
        row_of: dict[int, _TaskRow] = {}  # by node
        idle: _TaskRow | None = None
        last: _TaskRow | None = None  # the kernel that ended last
        end = trace.start + trace.clock_offset
        for node in graph.nodes:
            if node.rank != trace.rank or node.members:
                continue
            if node.kernel is None:
                self._awaited[node.index] = self._waited_for(node, row_of)
                continue
            kernel = node.kernel
            row = _TaskRow(node.start, _name(kernel), node.duration, kernel)
            row_of[node.index] = row
            gap = node.start - end
            if gap >= 500:  # ns; durations are written in microseconds
                idle = _TaskRow(end, "idle", gap, reads=[r for r in (last, idle) if r is not None])
                self.rows.append(idle)
            self._link(row, node, row_of)
            if idle is not None and not any(r.moment >= idle.moment for r in row.reads):
                row.reads.append(idle)
            self.rows.append(row)
            if node.start + node.duration >= end:
                end, last = node.start + node.duration, row

    def _waited_for(self, node: StepNode, row_of: Mapping[int, _TaskRow]) -> list[_TaskRow]:
        """Kernels that the host had last waited for when a node of the host ended."""
        own = [row_of[d.node.index] for d in node.after if d.node.index in row_of]
        if own:
            return own
        before = [self._awaited.get(d.node.index, []) for d in node.after]
        if len(before) == 1:
            return before[0]
        return list({id(row): row for rows in before for row in rows}.values())

    def _link(self, row: _TaskRow, node: StepNode, row_of: Mapping[int, _TaskRow]) -> None:
        for needed, _, why in node.after:
            if why == LAUNCH:
                row.reads += self._awaited.get(needed.index, [])
            elif needed.index in row_of:
                row.reads.append(row_of[needed.index])

    def ordered(self) -> list[_TaskRow]:
        """The rows in an order in which each follows what it waits for, transfers chained."""
        for row in self.rows:
            if row.kind != TaskKind.COMPUTE:
                row.moment += row.kernel.duration if row.kernel else 0
        self.rows.sort(key=lambda row: row.moment)
        previous: _TaskRow | None = None
        for index, row in enumerate(self.rows):
            row.index = index
            if row.kind in (TaskKind.COLLECTIVE, TaskKind.SEND):
                if previous is not None:
                    row.after.append(previous)
                previous = row
        return self.rows


def _name(kernel: Kernel) -> str:
    """A short name without the characters at which readers split: of the op and the kernel.

    >>> _name(Kernel("void at::native::fill<4, float>(int)", 0, 1, 0, 7, 1))
    'at::native::fill'
    """
    name = kernel.name.removeprefix("void ").replace("(anonymous namespace)::", "")
    name = name.partition("<")[0].partition("(")[0].strip() or kernel.family
    op = f"{kernel.op.name} " if kernel.op else ""
    return (op + name).replace(",", ";")[:120]


# ---- communication -------------------------------------------------------------------------------


class _GroupTables:
    """Communicators and peers as tables of all ranks."""

    def __init__(self, world: int, *, everywhere: bool) -> None:
        """With `everywhere`, a communicator must have a group for every rank."""
        self._world, self._everywhere = world, everywhere
        self._slots: dict[tuple[int, ...], int] = {}
        self.index: list[Int] = []
        """Of each communicator: the number of the group of each rank, -1: none."""
        self.shifts: list[int] = []
        """Of each peer: its distance."""

    def slot_of(self, ranks: tuple[int, ...]) -> int:
        """The communicator of a group: with its neighbours of one stride, or alone; -1: none."""
        ranks = tuple(sorted(ranks))
        if ranks not in self._slots:
            groups = self._neighbours(ranks)
            if self._everywhere and len(groups) * len(ranks) < self._world:
                return -1
            if len(self.index) == MOST_GROUPS:
                raise UserError(f"over {MOST_GROUPS} process groups; wanted a trace with fewer")
            table = np.full(self._world, -1, np.int64)
            for number, group in enumerate(groups):
                self._slots[group] = len(self.index)
                table[list(group)] = number
            self.index.append(table)
        return self._slots[ranks]

    def _neighbours(self, ranks: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The groups of one stride and size that divide all ranks; the group alone if none do."""
        size, stride = len(ranks), ranks[1] - ranks[0]
        blocks = self._world // (size * stride)
        everyone = [
            tuple(range(block * size * stride + first, (block + 1) * size * stride, stride))
            for block in range(blocks)
            for first in range(stride)
        ]
        whole = blocks * size * stride == self._world
        return everyone if whole and ranks in everyone else [ranks]

    def peer(self, rank: int, other: int) -> int:
        """The slot of a peer."""
        shift = (other - rank) % self._world
        if shift not in self.shifts:
            self.shifts.append(shift)
        return self.shifts.index(shift)


def _collective_sizes(traces: Sequence[RankTrace]) -> dict[int, int]:
    """Bytes of each collective that all of its ranks recorded: the most of a rank, by kernel."""
    if len(traces) == 1:
        comms = [(id(k), k.comm) for k in traces[0].kernels if k.comm is not None]
        return {key: comm.bytes for key, comm in comms}
    sizes: dict[int, int] = {}
    for instance in instances(traces):
        comms = [kernel.comm for kernel in instance.values() if kernel.comm is not None]
        if len(comms) == comms[0].size:
            sizes |= dict.fromkeys(map(id, instance.values()), max(comm.bytes for comm in comms))
    return sizes


def _tags(traces: Sequence[RankTrace]) -> dict[int, int]:
    """Number of each message among those from one rank to another, by kernel."""
    tags: dict[int, int] = {}
    count: Counter[tuple[int, ...]] = Counter()
    for message in messages(traces):
        ends = tuple(message)
        tags |= dict.fromkeys(map(id, message.values()), count[ends])
        count[ends] += 1
    return tags


def _communicate(
    row: _TaskRow,
    trace: RankTrace,
    groups: _GroupTables,
    sizes: Mapping[int, int],
    tags: Mapping[int, int],
    notes: Counter[str],
) -> None:
    """Make a kernel that communicates a collective or a message; else it stays a kernel."""
    kernel = row.kernel
    comm = kernel.comm if kernel is not None else None
    if comm is None or comm.size == 1:
        return
    if comm.transfer >= 0:
        row.duration = comm.transfer
    if comm.kind in ("send", "recv"):
        if id(kernel) in tags and comm.bytes > 0:
            row.kind = TaskKind.SEND if comm.kind == "send" else TaskKind.RECV
            row.slot, row.tag, row.bytes = (
                groups.peer(trace.rank, comm.peer),
                tags[id(kernel)],
                comm.bytes,
            )
            return
    elif comm.kind in COLLECTIVES and comm.ranks and sizes.get(id(kernel), 0) > 0:
        slot = groups.slot_of(comm.ranks)
        if slot >= 0:
            row.kind, row.slot, row.bytes = TaskKind.COLLECTIVE, slot, sizes[id(kernel)]
            return
    notes["became kernels of their duration: kind, size, ranks or the other end are unknown"] += 1


# ---- columns -------------------------------------------------------------------------------------


def _tasks(rows: Sequence[_TaskRow]) -> Tasks:
    """Columns of the rows of a rank."""
    name, names = _indexed(row.name for row in rows)
    op, ops = _indexed(_op(row) for row in rows)
    dtype, dtypes = _indexed(_dtype(row) for row in rows)
    shape, shapes = _indexed(row.kernel.shape if row.kernel else None for row in rows)
    reads = [sorted({r.index for r in row.reads if r.index < row.index}) for row in rows]
    after = [sorted({r.index for r in row.after if r.index < row.index}) for row in rows]
    work = [_work(row) for row in rows]
    local = np.array([_local_bytes(row) for row in rows], np.int64)
    size = np.array([row.bytes for row in rows], np.int64)
    return Tasks(
        kind=np.array([row.kind for row in rows], np.uint8),
        name=name.astype(np.int32),
        op=op.astype(np.int32),
        phase=np.array([_phase(row) for row in rows], np.uint8),
        stage=np.zeros(len(rows), np.int32),
        layer=np.full(len(rows), -1, np.int32),
        microbatch=np.full(len(rows), -1, np.int32),
        flops=np.array([flops for flops, _ in work], np.int64),
        traffic=np.array([traffic for _, traffic in work], np.int64),
        collective=np.array([_collective(row) for row in rows], np.int8),
        dtype=dtype.astype(np.int8),
        comm_bytes=size,
        slot=np.array([row.slot for row in rows], np.int16),
        tag=np.array([row.tag for row in rows], np.int32),
        shape=shape.astype(np.int32),
        data_ptr=offsets([len(entries) for entries in reads]),
        data=np.array([row for entries in reads for row in entries], np.int32),
        order_ptr=offsets([len(entries) for entries in after]),
        order=np.array([row for entries in after for row in entries], np.int32),
        names=names,
        ops=ops,
        dtypes=dtypes,
        shapes=tuple(s for s in shapes if s is not None),
        duration=np.array([max(row.duration, 1) for row in rows], np.int64),
        uneven_bytes=None if (local == size).all() else local,
    )


def _indexed(values: Iterable[_T]) -> tuple[Int, tuple[_T, ...]]:
    """Index of each value among the distinct ones; None is -1."""
    distinct: dict[Any, int] = {}
    index = [-1 if v is None else distinct.setdefault(v, len(distinct)) for v in values]
    return np.array(index, np.int64), tuple(distinct)


def _op(row: _TaskRow) -> str:
    """The op of a task: the kind of a transfer, the family of a kernel, or `idle`."""
    if row.kernel is None:
        return "idle"
    return row.kernel.comm.kind if row.kernel.comm else row.kernel.family


def _dtype(row: _TaskRow) -> str:
    kernel = row.kernel
    dtype = (kernel.comm.dtype if kernel.comm else kernel.dtype) if kernel else ""
    return dtype if dtype in BYTES else "bf16"


def _collective(row: _TaskRow) -> int:
    if row.kind != TaskKind.COLLECTIVE or row.kernel is None or row.kernel.comm is None:
        return -1
    return COLLECTIVES.index(row.kernel.comm.kind)


def _local_bytes(row: _TaskRow) -> int:
    """Bytes that the rank itself gives to a transfer."""
    if row.kind == TaskKind.COMPUTE or row.kernel is None or row.kernel.comm is None:
        return 0
    return row.kernel.comm.bytes


def _phase(row: _TaskRow) -> int:
    """The phase, by the ops around the call."""
    op = row.kernel.op if row.kernel else None
    for each in op.with_parents() if op else ():
        if "Backward" in each.name or "backward" in each.name:
            return BACKWARD_PHASE
        if each.name.startswith("Optimizer."):
            return OPTIMIZER_PHASE
    return FORWARD_PHASE


def _work(row: _TaskRow) -> tuple[int, int]:
    """FLOPs, and bytes of device memory, of a task that computes; at least 1 each."""
    kernel = row.kernel
    if row.kind != TaskKind.COMPUTE:
        return 0, 0
    if kernel is None or kernel.shape is None:
        return 1, max(kernel.bytes if kernel else 0, 1)
    n = kernel.shape.sizes()
    width = float(BYTES.get(kernel.dtype, 2))
    if kernel.shape.kernel == "gemm":
        values = n["m"] * n["k"] + n["k"] * n["n"] + n["m"] * n["n"]
        flops = 2 * n["batch"] * math.prod((n["m"], n["n"], n["k"]))
        return max(flops, 1), max(round(n["batch"] * values * width), 1)
    pairs = n["batch"] * n["heads"] * n["q"] * n["k"] // (2 if n["causal"] else 1)
    products = 5 if kernel.shape.kernel == "attention_bwd" else 2
    values = n["batch"] * (n["q"] * n["heads"] * 2 + n["k"] * n["kv_heads"] * 2) * n["d"]
    return max(products * pairs * (n["d"] + n["v"]), 1), max(round(values * width), 1)
