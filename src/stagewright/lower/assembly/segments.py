"""Rows of one stage in one direction, and the tables that their columns index.

A dependency is a row of a segment of the same stage, or of another stage on the same rank, given by
the distance of the two stages. So a segment serves all stages with equal blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from stagewright.algebra.layout import MIRROR
from stagewright.arrays import Bool, Int
from stagewright.graph.node import BYTES
from stagewright.lower.assembly.lifetimes import Touch, Value
from stagewright.lower.kernels.kernel import TIED, Kernel
from stagewright.program.columns import COLLECTIVES, PHASES, Shape, TaskKind
from stagewright.program.communicators import Communicator, Peer

DTYPES = tuple(BYTES)


class Owner(IntEnum):
    """Action that has a row on which another row depends, or that touches a value."""

    BACKWARD = 0  # this and FORWARD: of the same microbatch
    FORWARD = 1
    FIRST_FORWARD = 2
    LAST_BACKWARD = 3
    OPTIMIZER = 4
    NEXT_BACKWARD = 5  # of the next microbatch


RowDep = tuple[int, int, int, int]
"""A row; and the row it depends on: owner, stage, segment row."""

_Item = TypeVar("_Item", bound=Hashable)


class Interner(Generic[_Item]):
    """Numbers items in the order in which they first occur."""

    def __init__(self) -> None:
        """Start empty."""
        self.table: dict[_Item, int] = {}

    def __call__(self, item: _Item) -> int:
        """Number of an item."""
        return self.table.setdefault(item, len(self.table))

    def ids(self, items: Iterable[_Item]) -> list[int]:
        """Numbers of several items."""
        table = self.table
        return [table.setdefault(item, len(table)) for item in items]


# ---- tables --------------------------------------------------------------------------------------

KERNEL_COLUMNS = {
    "kind": np.uint8, "op": np.int32, "phase": np.uint8, "flops": np.int64, "traffic": np.int64,
    "collective": np.int8, "dtype": np.int8, "comm_bytes": np.int64, "slot": np.int16,
    "shape": np.int32,
}  # fmt: skip
"""Columns of a row that its kernel decides, whatever its block and stage."""


@dataclass(slots=True, eq=False)
class Tables:
    """Tables that the columns of a program index, numbered in the order of kernels."""

    pipeline_ranks: int
    tied_ranks: Mapping[str, tuple[int, ...]]
    """Pipeline ranks that have a copy of each tied table."""
    kernels: Interner[Kernel] = field(default_factory=Interner[Kernel])
    ops: Interner[str] = field(default_factory=Interner[str])
    shapes: Interner[Shape] = field(default_factory=Interner[Shape])
    communicators: Interner[Communicator] = field(default_factory=Interner[Communicator])
    peers: Interner[Peer] = field(default_factory=Interner[Peer])

    def kernel_columns(self) -> dict[str, NDArray[Any]]:
        """Columns that kernels decide, by number of the kernel."""
        rows = [self._row(t) for t in self.kernels.table]
        table = np.array(rows, dtype=np.int64).reshape(-1, len(KERNEL_COLUMNS)).T
        return {
            name: column.astype(dtype)
            for (name, dtype), column in zip(KERNEL_COLUMNS.items(), table, strict=True)
        }

    def _row(self, t: Kernel) -> tuple[int, ...]:
        """Columns of a kernel, in the order of `KERNEL_COLUMNS`."""
        return (
            t.kind,
            self.ops(t.op),
            PHASES.index(t.phase),
            t.flops,
            t.traffic,
            COLLECTIVES.index(t.op) if t.kind is TaskKind.COLLECTIVE else -1,
            DTYPES.index(t.dtype) if t.dtype else 0,
            t.comm_bytes,
            self._slot(t),
            self.shapes(t.shape) if t.shape else -1,
        )

    def _slot(self, t: Kernel) -> int:
        """Communicator or peer of a task, or communicator of a kernel's stream; -1: none."""
        if t.kind == TaskKind.COMPUTE and t.axes:
            return self.communicators(Communicator(t.axes))
        if t.kind == TaskKind.COLLECTIVE:
            # With two pipeline ranks, the replicas of a stage are all the ranks of the pipeline.
            pairs = "pp" if self.pipeline_ranks == 2 else MIRROR
            group = Communicator(tuple(sorted(pairs if a == MIRROR else a for a in t.axes)))
            if t.axes[0] == TIED:
                ranks = self.tied_ranks[t.axes[1]]
                group = Communicator(("pp",), ranks if len(ranks) < self.pipeline_ranks else None)
            return self.communicators(group)
        if t.kind in (TaskKind.SEND, TaskKind.RECV):
            return self.peers(Peer(t.axes[0], t.shift))
        return -1


# ---- rows ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Rows of a stage in one direction, and their dependencies.

    Row `dep_row[k]` depends on row `dep_segment_row[k]` of owner `dep_owner[k]`, of the stage that
    is `dep_stage[k]` stages further on.
    """

    kernels: Sequence[Kernel]
    block: Int
    """By row, the block of the stage; -1: none or several."""
    tag: Int
    """By row, the number among the messages of the action; -1: no message."""
    dep_row: Int
    dep_owner: Int
    dep_stage: Int
    dep_segment_row: Int
    once_per_step: Bool
    """Rows of the stage's first forward or last backward action only."""
    weight_half: Bool
    """Rows of the second half of a backward that is split."""
    gathers: Bool
    """Rows that gather the weights of one microbatch's pass."""
    waits_for_comm: Bool
    """Kernels that depend on communication of the same action."""

    def __len__(self) -> int:
        return len(self.once_per_step)


@dataclass(frozen=True, slots=True, eq=False)
class ActionRows:
    """Rows of a stage's forward or backward action while they are built: per block and task."""

    owner: Owner
    """FORWARD or BACKWARD."""
    stage: int
    row_of: Sequence[dict[Kernel, int]]
    """Row of each task, per block of the stage."""
    order: list[tuple[int, Kernel]] = field(default_factory=list[tuple[int, Kernel]])
    """Blocks and tasks in the order of their rows."""
    once_per_step: list[int] = field(default_factory=list[int])
    """Rows that only one microbatch has."""
    weight_half: list[int] = field(default_factory=list[int])
    """Rows in the second half of a backward that is split."""
    gathers: list[int] = field(default_factory=list[int])
    """Rows that gather the weights of one microbatch's pass."""
    sent: list[tuple[Value, int]] = field(default_factory=list[tuple[Value, int]])
    """Values sent to other stages, and the rows of the sends."""
    kernels: list[Kernel] = field(default_factory=list[Kernel])
    blocks: list[int] = field(default_factory=list[int])
    tags: list[int] = field(default_factory=list[int])
    deps: list[RowDep] = field(default_factory=list[RowDep])

    @property
    def forward(self) -> bool:
        """True for the forward action."""
        return self.owner == Owner.FORWARD

    @property
    def every_microbatch(self) -> list[int]:
        """Rows that every microbatch has, including messages added so far."""
        return sorted({*range(len(self.kernels))} - {*self.once_per_step})

    def add(self, t: Kernel, block: int = -1, tag: int = -1) -> int:
        """Append a row of a block; -1: none or several."""
        self.kernels.append(t)
        self.blocks.append(block)
        self.tags.append(tag)
        return len(self.kernels) - 1

    def touch_by(self, row: int) -> Touch:
        """Touch of a value by a row."""
        return self.owner, self.stage, row

    def last_rows(self) -> dict[int, int]:
        """Last row of each block, blocks in the order of the action."""
        return {i: self.row_of[i][t] for i, t in self.order}

    def finish(self) -> Segment:
        """Convert the rows to columns."""
        deps = itertools.chain.from_iterable(sorted({*self.deps}))
        row, owner, stage, segment_row = np.fromiter(deps, dtype=np.int64).reshape(-1, 4).T
        compute = TaskKind.COMPUTE
        computes = np.array([t.kind is compute for t in self.kernels], dtype=bool)
        inside = (owner == self.owner) & (stage == self.stage)
        return Segment(
            kernels=tuple(self.kernels),
            block=np.array(self.blocks, dtype=np.int64),
            tag=np.array(self.tags, dtype=np.int64),
            dep_row=row,
            dep_owner=owner,
            dep_stage=stage - self.stage,
            dep_segment_row=segment_row,
            once_per_step=self._mask(self.once_per_step),
            weight_half=self._mask(self.weight_half),
            gathers=self._mask(self.gathers),
            waits_for_comm=self._mask(row[inside][~computes[segment_row[inside]]]) & computes,
        )

    def _mask(self, rows: Sequence[int] | Int) -> Bool:
        """Mask of `rows` among all rows of the action."""
        mask = np.zeros(len(self.kernels), dtype=bool)
        mask[np.asarray(rows, dtype=np.int64)] = True
        return mask
