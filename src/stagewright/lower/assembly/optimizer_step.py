"""The rows after all actions: gradients of tied tables, the global norm, then the updates.

Each stage has its part of them (`StageUpdates`), shared by stages with equal content; a rank has
those of its stages together (`optimizer_step`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Int
from stagewright.graph.node import BYTES
from stagewright.graph.roles import CLIP
from stagewright.lower.assembly.buckets import Row, merge_messages
from stagewright.lower.assembly.segments import STEP
from stagewright.lower.assembly.stages import Stage
from stagewright.lower.kernels.kernel import Kernel, TaskPart
from stagewright.lower.kernels.live_values import LiveValue
from stagewright.program.columns import TaskKind

PARTS = (TaskPart.TIE, TaskPart.NORM, TaskPart.UPDATE)
_NOTHING = np.zeros(0, dtype=np.int64)


class ClipNorm(NamedTuple):
    """How ranks exchange what gradients are clipped by: the norm of the gradients of all ranks."""

    axes: tuple[str, ...] = ()
    """The norm is a sum over the ranks of these axes."""
    gradient_axes: Sequence[tuple[str, ...]] = ()
    """Groups of axes over which ranks exchange the norm of each gradient, one after the other."""
    dtype: str = "fp32"

    def exchanges(self, gradients: int) -> list[tuple[tuple[str, ...], int]]:
        """Axes and bytes of each all-reduce, for the norms of so many gradients.

        Ranks without gradients, whose stages are frozen, take part in that of the total only.
        """
        size = int(BYTES[self.dtype])
        groups = [tuple(sorted(axes)) for axes in self.gradient_axes if axes]
        total = tuple(a for a in self.axes if not any(a in axes for axes in groups))
        each = [(axes, size * gradients) for axes in groups if gradients]
        return each + ([(total, size)] if total else [])


# ---- of a stage ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class StageUpdates:
    """The tasks of a stage after all actions, and what they depend on.

    Task `dep_task[k]` depends on place `dep_at[k]` of `dep_whose[k]`: among the stage's tasks here
    (`STEP`; -1: the factor that clips gradients), its first forward or its last backward.
    """

    tasks: Sequence[Kernel]
    block: Int
    begin: Sequence[int]
    """Where the tasks of each of `PARTS` begin, and the end."""
    last_norms: Int
    """The tasks with which the norm of a block's gradients is done."""
    dep_task: Int
    dep_whose: Int
    dep_at: Int


def stage_updates(stage: Stage) -> StageUpdates:
    """The tasks of a stage, whose values they touch."""
    tasks: list[tuple[int, Kernel]] = []
    begin = [0]
    last_norms: list[int] = []
    for part in PARTS:
        of_blocks = [(i, p.block.by_part.get(part, ())) for i, p in enumerate(stage.blocks)]
        items = [(i, t) for i, some in of_blocks for t in some]
        if part is TaskPart.TIE:  # ranks that hold several tables reduce them in one order
            items.sort(key=lambda item: item[1].axes)
        if part is TaskPart.NORM:
            ends = np.cumsum([len(some) for _, some in of_blocks], dtype=np.int64)
            last_norms = (ends[[bool(some) for _, some in of_blocks]] - 1 + begin[-1]).tolist()
        tasks += items
        begin.append(len(tasks))
    number = {item: n for n, item in enumerate(tasks)}
    deps: list[tuple[int, int, int]] = []
    for n, (i, t) in enumerate(tasks):
        stage.values.touch(i, t, (STEP, stage.stage, n))
        for d in t.deps:
            if isinstance(d, LiveValue):
                if d.name == CLIP:
                    deps.append((n, STEP, -1))
            elif (i, d) in number:
                deps.append((n, STEP, number[i, d]))
            else:
                deps.append((n, *stage.once_per_step(i, d)))
    task, whose, at = np.array(deps, dtype=np.int64).reshape(-1, 3).T
    block = np.array([i for i, _ in tasks], dtype=np.int64)
    norms = np.array(last_norms, dtype=np.int64)
    return StageUpdates([t for _, t in tasks], block, begin, norms, task, whose, at)


# ---- of a rank -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerStep:
    """The rows of a rank after all actions.

    Row `dep_row[k]` depends on place `dep_at[k]` of `dep_whose[k]`: among these rows (`STEP`), or
    in the first forward or the last backward of the rank's stage number `dep_stage[k]`.
    """

    kernels: Sequence[Kernel]
    stage: Int
    """By row, which of the rank's stages it is of; -1: of none."""
    block: Int
    """By row, which block of that stage; -1: of none or of several."""
    dep_row: Int
    dep_whose: Int
    dep_stage: Int
    dep_at: Int
    row_of: Sequence[Int]
    """By stage of the rank, the row of each of its tasks."""

    def __len__(self) -> int:
        return len(self.kernels)


def optimizer_step(
    stages: Sequence[Stage], updates: Sequence[StageUpdates], clip: ClipNorm | None
) -> OptimizerStep:
    """The rows of the stages of one rank; `clip` is None where gradients are not clipped.

    A rank on which nothing trains takes part in the exchange of norms, as all others do.
    """
    kernels: list[Kernel] = []
    stage: list[Int] = []
    block: list[Int] = []
    row_of = [np.zeros(len(u.tasks), dtype=np.int64) for u in updates]
    deps: list[Int] = []
    clip_row = -1
    for nth, part in enumerate(PARTS):
        if part is TaskPart.UPDATE and clip is not None:
            norms = [row_of[c][u.last_norms] for c, u in enumerate(updates)]
            before = len(kernels)
            clip_row = _clip(kernels, deps, np.concatenate([_NOTHING, *norms]), stages, clip)
            for column in (stage, block):
                column.append(np.full(len(kernels) - before, -1))
        arranged = _arranged(stages, updates, nth)
        if arranged is None:
            for c, u in enumerate(updates):
                tasks = slice(u.begin[nth], u.begin[nth + 1])
                count = tasks.stop - tasks.start
                row_of[c][tasks] = np.arange(count) + len(kernels)
                stage.append(np.full(count, c))
                block.append(u.block[tasks])
                kernels += u.tasks[tasks]
            continue
        for row in arranged:
            c, n = row[0]
            for other, task in row:
                row_of[other][task] = len(kernels)
            stage.append(np.array([c]))
            block.append(updates[c].block[[n]] if len(row) == 1 else np.array([-1]))
            kernels.append(merge_messages([(0, updates[c].tasks[n]) for c, n in row]))
    for c, u in enumerate(updates):
        inside = u.dep_whose == STEP
        at = u.dep_at.copy()
        at[inside] = np.where(at[inside] < 0, clip_row, row_of[c][at[inside]])
        some = np.stack([row_of[c][u.dep_task], u.dep_whose, np.where(inside, -1, c), at])
        deps.append(some[:, at >= 0])
    row, whose, dep_stage, at = _distinct(
        np.concatenate([np.zeros((4, 0), dtype=np.int64), *deps], axis=1)
    )
    return OptimizerStep(
        kernels=kernels,
        stage=np.concatenate([_NOTHING, *stage]),
        block=np.concatenate([_NOTHING, *block]),
        dep_row=row,
        dep_whose=whose,
        dep_stage=dep_stage,
        dep_at=at,
        row_of=row_of,
    )


def _distinct(columns: Int) -> Int:
    """The distinct columns of a table, in the order of its first row, then of the second, ..."""
    columns = columns[:, np.lexsort(columns[::-1])]
    return columns[:, (np.diff(columns, axis=1, prepend=-2) != 0).any(axis=0)]


def _arranged(
    stages: Sequence[Stage], updates: Sequence[StageUpdates], nth: int
) -> list[list[tuple[int, int]]] | None:
    """The rows of a part, each of some tasks of stages; None: in order, a row each."""
    part = PARTS[nth]
    if part is TaskPart.NORM:
        return None
    items = [(c, n) for c, u in enumerate(updates) for n in range(u.begin[nth], u.begin[nth + 1])]
    if part is TaskPart.TIE:
        items.sort(key=lambda item: updates[item[0]].tasks[item[1]].axes)
        return [[item] for item in items]
    tasks: Row = [(n, updates[c].tasks[task]) for n, (c, task) in enumerate(items)]
    rows = stages[0].habits.arrange_updates(tasks) if stages else None
    return None if rows is None else [[items[n] for n, _ in row] for row in rows]


def _clip(
    kernels: list[Kernel], deps: list[Int], norms: Int, stages: Sequence[Stage], clip: ClipNorm
) -> int:
    """Clipping by the global norm: add up, all-reduce one number or many, scale; the last row."""
    blocks = Counter(p.block for s in stages for p in s.blocks)
    gradients = sum(count * block.norms for block, count in blocks.items())
    size, row = len(norms), len(kernels)
    kernels.append(
        Kernel("grad_norm", "add", TaskKind.COMPUTE, "optimizer", TaskPart.NORM,
               flops=size, traffic=4 * (size + 1), dtype="fp32")
    )  # fmt: skip
    deps.append(np.stack([np.full(size, x) for x in (row, STEP, -1)] + [norms]))
    for axes, width in clip.exchanges(gradients):
        kernels.append(
            Kernel("grad_norm.all_reduce", "all_reduce", TaskKind.COLLECTIVE, "optimizer",
                   TaskPart.NORM, axes=axes, comm_bytes=width, dtype=clip.dtype)
        )  # fmt: skip
    kernels.append(
        Kernel("clip_scale", "divide", TaskKind.COMPUTE, "optimizer", TaskPart.NORM,
               flops=3, traffic=8, dtype="fp32")
    )  # fmt: skip
    chain = np.arange(row + 1, len(kernels))
    deps.append(np.stack([chain, np.full(len(chain), STEP), np.full(len(chain), -1), chain - 1]))
    return len(kernels) - 1
