"""Rows of one stage in one direction, and the tables that the columns of rows point into.

A dependency is a place in an action of the same stage, or of another one on the same rank, given by
the distance of the two stages. So a segment serves all stages with equal blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from stagewright.algebra.layout import MIRROR
from stagewright.arrays import Bool, Int
from stagewright.graph.node import BYTES
from stagewright.lower.kernels.kernel import TIED, Kernel
from stagewright.program.columns import COLLECTIVES, PHASES, Shape, TaskKind
from stagewright.program.communicators import Communicator, Peer

DTYPES = tuple(BYTES)

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


# ---- tables --------------------------------------------------------------------------------------

KERNEL_COLUMNS = {
    "kind": np.uint8, "op": np.int32, "phase": np.uint8, "flops": np.int64, "traffic": np.int64,
    "collective": np.int8, "dtype": np.int8, "comm_bytes": np.int64, "slot": np.int16,
    "shape": np.int32,
}  # fmt: skip
"""Columns of a row that its kernel decides, whatever its block and stage."""


@dataclass(slots=True, eq=False)
class Tables:
    """What the columns of a program point into, numbered as kernels are met."""

    pipeline_ranks: int
    holders: Mapping[str, tuple[int, ...]]
    """The pipeline ranks that hold a copy of each table with copies."""
    kernels: Numbers[Kernel] = field(default_factory=Numbers[Kernel])
    ops: Numbers[str] = field(default_factory=Numbers[str])
    shapes: Numbers[Shape] = field(default_factory=Numbers[Shape])
    communicators: Numbers[Communicator] = field(default_factory=Numbers[Communicator])
    peers: Numbers[Peer] = field(default_factory=Numbers[Peer])

    def of_kernels(self) -> dict[str, NDArray[Any]]:
        """The columns of rows that their kernels decide, by number of the kernel."""
        rows = [self._row(t) for t in self.kernels.table]
        table = np.array(rows, dtype=np.int64).reshape(-1, len(KERNEL_COLUMNS)).T
        return {
            name: column.astype(dtype)
            for (name, dtype), column in zip(KERNEL_COLUMNS.items(), table, strict=True)
        }

    def _row(self, t: Kernel) -> tuple[int, ...]:
        """The columns of a kernel, in the order of `KERNEL_COLUMNS`."""
        return (
            t.kind,
            self.ops(t.op),
            PHASES.index(t.phase),
            t.flops,
            t.traffic,
            COLLECTIVES.index(t.op) if t.kind is TaskKind.COLLECTIVE else -1,
            DTYPES.index(t.dtype) if t.dtype else 0,
            t.comm_bytes,
            self.slot(t),
            self.shapes(t.shape) if t.shape else -1,
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


# ---- rows ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Rows of a stage in one direction, and what they depend on.

    Row `dep_row[k]` depends on place `dep_at[k]` among the rows of `dep_whose[k]`, of the stage
    that is `dep_stage[k]` stages further on.
    """

    kernels: Sequence[Kernel]
    block: Int
    """By row, the block of the stage that it is of; -1: of none or of several."""
    tag: Int
    """By row, the number among the messages of the action; -1: no message."""
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


class SegmentBuilder:
    """Collects rows one by one: those of blocks, never those of microbatches."""

    def __init__(self) -> None:
        """No rows."""
        self.kernels: list[Kernel] = []
        self.blocks: list[int] = []
        self.tags: list[int] = []
        self.deps: list[Dependency] = []

    def add(self, t: Kernel, block: int = -1, tag: int = -1) -> int:
        """Append a row of a block; -1: of none or of several."""
        self.kernels.append(t)
        self.blocks.append(block)
        self.tags.append(tag)
        return len(self.kernels) - 1

    def finish(
        self,
        action: tuple[int, int],
        once: Sequence[int] = (),
        weight: Sequence[int] = (),
        gathers: Sequence[int] = (),
    ) -> Segment:
        """The segment of `action`, a pair: whose rows these are, and the stage."""
        count = len(self.kernels)
        every = itertools.chain.from_iterable(sorted({*self.deps}))
        row, whose, stage, at = np.fromiter(every, dtype=np.int64).reshape(-1, 4).T
        compute = TaskKind.COMPUTE
        computes = np.array([t.kind is compute for t in self.kernels], dtype=bool)
        inside = (whose == action[0]) & (stage == action[1])
        waits = _mask(row[inside][~computes[at[inside]]], count) & computes
        return Segment(
            kernels=tuple(self.kernels),
            block=np.array(self.blocks, dtype=np.int64),
            tag=np.array(self.tags, dtype=np.int64),
            dep_row=row,
            dep_whose=whose,
            dep_stage=stage - action[1],
            dep_at=at,
            once=_mask(once, count),
            weight=_mask(weight, count),
            gathers=_mask(gathers, count),
            waits=waits,
        )


def _mask(rows: Sequence[int] | Int, count: int) -> Bool:
    """Mask of some rows among so many."""
    found = np.zeros(count, dtype=bool)
    found[np.asarray(rows, dtype=np.int64)] = True
    return found
