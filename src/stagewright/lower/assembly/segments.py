"""Segments: the rows of an action of one stage, written down once for all microbatches.

A row is a task in columns; names, shapes, groups and peers are numbers that point into tables. A
dependency is a place in an action, of this stage or of another one on the same rank: `rank_rows`
turns places into row numbers by adding where the actions begin, for all microbatches at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from stagewright.algebra.layout import MIRROR
from stagewright.arrays import Bool, Int
from stagewright.graph.node import BYTES
from stagewright.lower.kernels.kernel import TIED, Kernel
from stagewright.program.columns import COLLECTIVES, PHASES, Shape, TaskKind
from stagewright.program.communicators import Communicator, Peer
from stagewright.varying import first_of

DTYPES = tuple(BYTES)
COLUMNS = {
    "kind": np.uint8, "name": np.int32, "op": np.int32, "phase": np.uint8, "stage": np.int32,
    "layer": np.int32, "microbatch": np.int32, "flops": np.int64, "traffic": np.int64,
    "collective": np.int8, "dtype": np.int8, "comm_bytes": np.int64, "slot": np.int16,
    "tag": np.int32, "shape": np.int32, "kernel": np.int32,
}  # fmt: skip

# Whose rows a dependency counts from: a stage's forward or backward action of the same microbatch,
# its first forward and its last backward action of all, or the rows after all actions; and a touch
# from the backward action of the next microbatch.
BACKWARD, FORWARD, FIRST, LAST, STEP, NEXT = range(6)
Dependency = tuple[int, int, int, int]
"""A row; and what it depends on: whose rows, of which stage, and the place there."""

_Named = TypeVar("_Named", bound=Hashable)


class Numbers(Generic[_Named]):
    """Numbers things in the order in which they are first met."""

    def __init__(self) -> None:
        """Nothing is numbered yet."""
        self.table: dict[_Named, int] = {}

    def __call__(self, thing: _Named) -> int:
        """The number of a thing."""
        return self.table.setdefault(thing, len(self.table))

    def each(self, things: Iterable[_Named]) -> list[int]:
        """The numbers of several things."""
        table = self.table
        return [table.setdefault(thing, len(table)) for thing in things]


class _KernelColumns(NamedTuple):
    """The columns of a row that its task decides, whatever its block and stage."""

    kind: int
    op: int
    phase: int
    flops: int
    traffic: int
    collective: int
    dtype: int
    comm_bytes: int
    slot: int
    shape: int


OWN = tuple(c for c in COLUMNS if c not in (*_KernelColumns._fields, "microbatch"))
"""Columns that the rows of a segment have of their own: where they stand, and of which task."""


@dataclass(slots=True, eq=False)
class Tables:
    """What the columns of a program point into, numbered as rows are made."""

    pipeline_ranks: int
    holders: Mapping[str, tuple[int, ...]]
    """The pipeline ranks that hold a copy of each table with copies."""
    messages: int = 1
    """The most messages that one action exchanges along one axis."""
    names: Numbers[str] = field(default_factory=Numbers[str])
    ops: Numbers[str] = field(default_factory=Numbers[str])
    shapes: Numbers[Shape] = field(default_factory=Numbers[Shape])
    communicators: Numbers[Communicator] = field(default_factory=Numbers[Communicator])
    peers: Numbers[Peer] = field(default_factory=Numbers[Peer])
    kernels: Numbers[Kernel] = field(default_factory=Numbers[Kernel])
    """Of which rows are copies."""

    def of_kernels(self) -> dict[str, NDArray[Any]]:
        """The columns of rows that their tasks decide, by number of the task.

        Those of numbers are of the first configuration.
        """
        rows = [self._columns_of(t) for t in self.kernels.table]
        table = np.array(rows, dtype=np.int64).reshape(-1, len(_KernelColumns._fields)).T
        return {
            c: of.astype(COLUMNS[c]) for c, of in zip(_KernelColumns._fields, table, strict=True)
        }

    def _columns_of(self, t: Kernel) -> _KernelColumns:
        return _KernelColumns(
            kind=t.kind,
            op=self.ops(t.op),
            phase=PHASES.index(t.phase),
            flops=first_of(t.flops),
            traffic=first_of(t.traffic),
            collective=COLLECTIVES.index(t.op) if t.kind == TaskKind.COLLECTIVE else -1,
            dtype=DTYPES.index(t.dtype) if t.dtype else 0,
            comm_bytes=first_of(t.comm_bytes),
            slot=self.slot(t),
            shape=self.shapes(t.shape) if t.shape else -1,
        )

    def slot(self, t: Kernel) -> int:
        """The number of the group or peer that a task communicates with, or of the group on whose
        stream a kernel runs; -1: none."""
        if t.kind == TaskKind.COMPUTE and t.axes:
            return self.communicators(Communicator(t.axes))
        if t.kind == TaskKind.COLLECTIVE:
            # With two pipeline ranks, the replicas of a stage are all the ranks of the pipeline.
            pairs = "pp" if self.pipeline_ranks == 2 else MIRROR
            group = Communicator(tuple(sorted(pairs if a == MIRROR else a for a in t.axes)))
            if t.axes[0] == TIED:
                holders = self.holders[t.axes[1]]
                only = holders if len(holders) < self.pipeline_ranks else None
                group = Communicator(("pp",), only)
            return self.communicators(group)
        if t.kind in (TaskKind.SEND, TaskKind.RECV):
            return self.peers(Peer(t.axes[0], t.shift))
        return -1


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A block of task rows repeated per microbatch, and what the rows depend on.

    Row `dep_row[k]` depends on place `dep_at[k]` among the rows of `dep_whose[k]`, of the stage
    `dep_stage[k]`.
    """

    columns: Mapping[str, Int]
    """Those in `OWN`."""
    dep_row: Int
    dep_whose: Int
    dep_stage: Int
    dep_at: Int
    once: Bool
    """Rows of the stage's first forward or last backward action only."""
    weight: Bool
    """Rows of the second half of a backward that is split."""
    gathers: Bool
    """Rows that gather the weights of one microbatch's pass."""
    waits: Bool
    """Kernels that need what was communicated in the same action."""

    def __len__(self) -> int:
        return len(self.once)


UnnumberedRow = tuple[Kernel, str, int, int, int]
"""A row before its names, shapes and groups are numbered: the kernel; the label of the block whose
row it is, empty of none or of several; the layer; the stage; the number among the messages of the
action. A plain tuple: assembling a program makes thousands."""


def relabelled(
    rows: Sequence[UnnumberedRow], stage: int, blocks: Mapping[str, tuple[object, int, str]]
) -> list[UnnumberedRow]:
    """The rows in another stage, by whose labels here `blocks` are its blocks: layer and label."""
    found: list[UnnumberedRow] = []
    for t, label, layer, _, tag in rows:
        if label:
            _, layer, label = blocks[label]
        found.append((t, label, layer, stage, tag))
    return found


class SegmentBuilder:
    """Collects rows one by one: the few rows of blocks and stages, never those of microbatches."""

    def __init__(self, tables: Tables) -> None:
        """No rows."""
        self.tables = tables
        self.rows: list[UnnumberedRow] = []
        self.deps: list[Dependency] = []

    def add(self, t: Kernel, label: str, layer: int, stage: int, tag: int = -1) -> int:
        """One row; the microbatch is filled in later."""
        self.rows.append((t, label, layer, stage, tag))
        return len(self.rows) - 1

    def finish(
        self,
        action: tuple[int, int],
        once: Sequence[int] = (),
        weight: Sequence[int] = (),
        gathers: Sequence[int] = (),
    ) -> Segment:
        """The segment of `action`, a pair: whose rows these are, and the stage."""
        count = len(self.rows)
        columns = self._numbered()
        every = itertools.chain.from_iterable(sorted({*self.deps}))
        deps = np.fromiter(every, dtype=np.int64).reshape(-1, 4)
        compute = TaskKind.COMPUTE
        computes = np.array([row[0].kind is compute for row in self.rows], dtype=bool)
        inside = deps[(deps[:, 1] == action[0]) & (deps[:, 2] == action[1])]
        waits = _are(inside[~computes[inside[:, 3]], 0], count) & computes
        row, whose, stage, at = deps.T
        in_once, in_weight, in_gathers = (_are(x, count) for x in (once, weight, gathers))
        return Segment(columns, row, whose, stage, at, in_once, in_weight, in_gathers, waits)

    def repeated(
        self, segment: Segment, stage: int, blocks: Mapping[str, tuple[object, int, str]]
    ) -> Segment:
        """The rows of another stage, where `segment` are the same rows of some stage.

        By their labels in this stage, `blocks` are the blocks of the other, with layer and label.
        All that rows depend on is within their stage.
        """
        rows = relabelled(self.rows, stage, blocks)
        columns = {
            **segment.columns,
            "name": np.array(self._names(rows)),
            "layer": np.array([layer for _, _, layer, _, _ in rows]),
            "stage": np.full(len(rows), stage),
        }
        return replace(segment, columns=columns, dep_stage=np.full_like(segment.dep_stage, stage))

    def _names(self, rows: Sequence[UnnumberedRow]) -> list[int]:
        return self.tables.names.each(
            f"{label}.{t.name}" if label else t.name for t, label, _, _, _ in rows
        )

    def _numbered(self) -> dict[str, Int]:
        """The columns of the rows: those in `OWN`."""
        kernels, _, layers, stages, tags = zip(*self.rows, strict=True) if self.rows else [()] * 5
        own = self._names(self.rows), stages, layers, tags, self.tables.kernels.each(kernels)
        return {c: np.array(of, dtype=np.int64) for c, of in zip(OWN, own, strict=True)}


def _are(rows: Sequence[int] | Int, count: int) -> Bool:
    """Which of so many rows are among some."""
    found = np.zeros(count, dtype=bool)
    found[np.asarray(rows, dtype=np.int64)] = True
    return found
