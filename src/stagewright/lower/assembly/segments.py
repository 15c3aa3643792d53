"""Rows of a stage in one direction, and the rows that they refer to.

A reference is a row of the same stage, or of another stage on the same rank, given by the distance
of the two stages. So a segment serves all stages with equal blocks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from stagewright.arrays import Bool, Int
from stagewright.lower.assembly.lowered_block import RowRef, Value
from stagewright.lower.kernels.kernel import LoweredTask
from stagewright.program.columns import KINDS, TaskKind

FORWARD, BACKWARD, INPUT_HALF, WEIGHT_HALF, UNSHARD = range(len(KINDS))
"""Kinds of actions as indices into `KINDS`; `UNSHARD` gathers the weights of a stage, before all
other actions of its rank."""
OPTIMIZER = -1
"""The optimizer action, as a kind of action and as a part of the pass."""
PASS_PARTS = 3
"""Forward, input half and weight half of a backward."""
HAS_PASS_PART: Bool = np.array([
    *([kind in kinds for kinds in ("UF", "BI", "BW", "")] for kind in KINDS),
    [False, False, False, True],
])  # fmt: skip
"""[kinds, pass parts]: True if an action of the kind includes the part; `OPTIMIZER` is last."""


class CopyRelation:
    """Copy of an action, relative to the copy whose row refers to it.

    Plain integers: tuples of integers cost the garbage collector nothing. The numbers are not those
    of kinds of actions, and their order counts: from `FIRST_FORWARD` to `OPTIMIZER` once per step,
    from `SPLIT_BACKWARD` on halves of a backward.
    """

    BACKWARD = 0  # this and FORWARD: of the same microbatch
    FORWARD = 1
    FIRST_FORWARD = 2
    LAST_BACKWARD = 3
    OPTIMIZER = 4
    NEXT_BACKWARD = 5  # of the next microbatch
    SPLIT_BACKWARD = 6  # of the same microbatch, if its backward is split
    NEXT_AFTER_SPLIT = 7  # of the next microbatch, if the backward of this one is split


RowDep = tuple[int, int, int, int]
"""A row; and the row it depends on, a `RowRef`."""

_Item = TypeVar("_Item", bound=Hashable)


class Interner(Generic[_Item]):
    """Numbers items in the order in which they first occur."""

    def __init__(self) -> None:
        """Start empty."""
        self.table: dict[_Item, int] = {}

    def __call__(self, item: _Item) -> int:
        """Number of an item."""
        return self.table.setdefault(item, len(self.table))

    def ids(self, items: Iterable[_Item]) -> Int:
        """Numbers of several items."""
        table = self.table
        return np.array([table.setdefault(item, len(table)) for item in items], dtype=np.int64)


class RowRefs(NamedTuple):
    """References to rows, as columns: by rows that depend on them, or by values they touch."""

    reader: Int
    """Row that depends, or value that is touched; ascending."""
    stage: Int
    """Distance to the stage of the row; of references of a rank, index of the stage on the rank."""
    pass_part: Int
    """Part of the pass that has the row; `OPTIMIZER`: the optimizer action."""
    segment_row: Int
    """Row in the segment; of touches in the optimizer action, row of `Stage.updates`."""
    once_per_step: Bool
    """True if the row is in the stage's action with the rows once per step."""
    next_microbatch: Bool
    """True if the row is of the next microbatch."""
    if_split: Bool
    """True if the reference holds only if the reader's own backward is split."""

    @classmethod
    def of_stage(
        cls, reader: Int, refs: Int, stage: int, weight_halves: Mapping[int, Bool]
    ) -> RowRefs:
        """References by `reader` of a stage; `weight_halves`: by stage of the rank.

        `refs`: copy, stage and segment row of each row: [3, references].
        """
        copy, stages, row = refs
        pass_part = ((copy != CopyRelation.FORWARD) & (copy != CopyRelation.FIRST_FORWARD)).astype(
            np.int64
        )
        pass_part[copy == CopyRelation.OPTIMIZER] = OPTIMIZER
        for number, weight_half in weight_halves.items():
            backward = (stages == number) & (pass_part == 1)
            pass_part[backward] += weight_half[row[backward]]
        once = (copy >= CopyRelation.FIRST_FORWARD) & (copy <= CopyRelation.OPTIMIZER)
        following = (copy == CopyRelation.NEXT_BACKWARD) | (copy == CopyRelation.NEXT_AFTER_SPLIT)
        if_split = copy >= CopyRelation.SPLIT_BACKWARD
        return cls(reader, stages - stage, pass_part, row, once, following, if_split)

    def take(self, selected: Int | Bool) -> RowRefs:
        """Select some references."""
        columns: list[Any] = [column[selected] for column in self]
        return RowRefs(*columns)

    @classmethod
    def concatenate(cls, refs: Sequence[RowRefs]) -> RowRefs:
        """Join references."""
        columns: list[Any] = [np.concatenate(column) for column in zip(*refs, strict=True)]
        return cls(*columns)


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Rows of a stage in one direction, its updates, or the optimizer action of a rank.

    `deps` are sorted by reader; all of the same segment are earlier rows.
    """

    tasks: Sequence[LoweredTask]
    block: Int
    """By row, the block of its stage; -1: none or several."""
    tag: Int
    """By row, the number among the messages of the action; -1: no message."""
    deps: RowRefs
    once_per_step: Bool
    """Rows of the stage's first forward or last backward action only."""
    weight_half: Bool
    """Rows of the second half of a backward that is split."""
    gathers: Bool
    """Rows that gather the weights of one microbatch's pass."""
    waits_for_comm: Bool
    """Kernels that depend on communication of the same action."""
    stage: Int
    """By row of the optimizer action, index of the rank's stage, -1: none; else 0."""
    row_of: Sequence[Int] = ()
    """Optimizer action: by stage of the rank, the row of each of its updates."""

    def __len__(self) -> int:
        return len(self.once_per_step)

    @classmethod
    def of_optimizer(
        cls, tasks: Sequence[LoweredTask], block: Int, deps: RowRefs, stage: Int,
        row_of: Sequence[Int] = (),
    ) -> Segment:  # fmt: skip
        """Rows of the optimizer action: all once per step."""
        none, every = np.zeros(len(tasks), dtype=bool), np.ones(len(tasks), dtype=bool)
        no_tag = np.full(len(tasks), -1)
        return cls(tasks, block, no_tag, deps, every, none, none, none, stage, row_of)


Shifts = tuple[int | None, int | None]
"""Distance along the pipeline to the ranks of the previous and the next stage; None: no stage."""


class StageLabels(NamedTuple):
    """Number of a stage, layers and labels of its blocks, and where its messages go."""

    stage: int
    layers: tuple[int, ...]
    labels: tuple[str, ...]
    shifts: Shifts


def row_names(segment: Segment, labels: Sequence[StageLabels]) -> list[str]:
    """Names of the rows of a segment; `labels`: of its stages."""
    stages: list[int] = segment.stage.tolist()
    blocks: list[int] = segment.block.tolist()
    rows = zip(stages, blocks, segment.tasks, strict=True)
    return [t.name if b < 0 else f"{labels[s].labels[b]}.{t.name}" for s, b, t in rows]


def row_layers(segment: Segment, labels: Sequence[StageLabels]) -> Int:
    """Layers of the rows of a segment, -1 of rows of no block; `labels`: of its stages."""
    layer = np.full(len(segment), -1, dtype=np.int64)
    for i, stage_labels in enumerate(labels):
        rows = np.flatnonzero((segment.stage == i) & (segment.block >= 0))
        layer[rows] = np.array(stage_labels.layers, dtype=np.int64)[segment.block[rows]]
    return layer


@dataclass(frozen=True, slots=True, eq=False)
class ActionRows:
    """Rows of a stage's forward or backward action while they are built: per block and task."""

    copy: int
    """`CopyRelation.FORWARD` or `CopyRelation.BACKWARD`."""
    stage: int
    row_of: Sequence[dict[LoweredTask, int]]
    """Row of each task, per block of the stage."""
    order: list[tuple[int, LoweredTask]] = field(default_factory=list[tuple[int, LoweredTask]])
    """Blocks and tasks in the order of their rows."""
    once_per_step: list[int] = field(default_factory=list[int])
    """Rows that only one microbatch has."""
    weight_half: list[int] = field(default_factory=list[int])
    """Rows in the second half of a backward that is split."""
    gathers: list[int] = field(default_factory=list[int])
    """Rows that gather the weights of one microbatch's pass."""
    sent: list[tuple[Value, int]] = field(default_factory=list[tuple[Value, int]])
    """Values sent to other stages, and the rows of the sends."""
    tasks: list[LoweredTask] = field(default_factory=list[LoweredTask])
    blocks: list[int] = field(default_factory=list[int])
    tags: list[int] = field(default_factory=list[int])
    deps: list[RowDep] = field(default_factory=list[RowDep])

    @property
    def forward(self) -> bool:
        """True for the forward action."""
        return self.copy == CopyRelation.FORWARD

    @property
    def every_microbatch(self) -> list[int]:
        """Rows that every microbatch has, including messages added so far."""
        return sorted({*range(len(self.tasks))} - {*self.once_per_step})

    def add(self, t: LoweredTask, block: int = -1, tag: int = -1) -> int:
        """Append a row of a block; -1: none or several."""
        self.tasks.append(t)
        self.blocks.append(block)
        self.tags.append(tag)
        return len(self.tasks) - 1

    def touch_by(self, row: int) -> RowRef:
        """Reference to a row of this action, as a value records its touch."""
        return self.copy, self.stage, row

    def last_rows(self) -> dict[int, int]:
        """Last row of each block, blocks in the order of the action."""
        return {i: self.row_of[i][t] for i, t in self.order}

    def finish(self, weight_halves: Mapping[int, Bool]) -> Segment:
        """Convert the rows to columns; `weight_halves`: of the backwards of the rank's stages."""
        weight_half = self._mask(self.weight_half)
        if not self.forward:
            weight_halves = {**weight_halves, self.stage: weight_half}
        deps = np.array(sorted({*self.deps}), dtype=np.int64).reshape(-1, 4).T
        row, copy, stage, segment_row = deps
        compute = TaskKind.COMPUTE
        computes = np.array([t.kind is compute for t in self.tasks], dtype=bool)
        inside = (copy == self.copy) & (stage == self.stage)
        waits = row[inside][~computes[segment_row[inside]]]
        return Segment(
            tasks=tuple(self.tasks),
            block=np.array(self.blocks, dtype=np.int64),
            tag=np.array(self.tags, dtype=np.int64),
            deps=RowRefs.of_stage(row, deps[1:], self.stage, weight_halves),
            once_per_step=self._mask(self.once_per_step),
            weight_half=weight_half,
            gathers=self._mask(self.gathers),
            waits_for_comm=self._mask(waits) & computes,
            stage=np.zeros(len(self.tasks), dtype=np.int64),
        )

    def _mask(self, rows: Sequence[int] | Int) -> Bool:
        """Mask of `rows` among all rows of the action."""
        mask = np.zeros(len(self.tasks), dtype=bool)
        mask[rows] = True
        return mask
