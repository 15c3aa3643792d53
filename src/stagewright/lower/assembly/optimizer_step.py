"""The optimizer action of a rank: gradients of tied tables, the global norm, then the updates.

Stages of one class share their tasks (`StageUpdates`); a rank combines those of its stages
(`optimizer_step`).
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
from stagewright.lower.assembly.segments import Owner
from stagewright.lower.assembly.stages import Stage
from stagewright.lower.kernels.kernel import Kernel, TaskPart
from stagewright.lower.kernels.live_values import LiveValue
from stagewright.program.columns import TaskKind

PARTS = (TaskPart.TIE, TaskPart.NORM, TaskPart.UPDATE)
_NO_ROWS = np.zeros(0, dtype=np.int64)


class ClipNorm(NamedTuple):
    """Exchange of the norm by which gradients are clipped: that of the gradients of all ranks."""

    axes: tuple[str, ...] = ()
    """The norm is a sum over the ranks of these axes."""
    gradient_axes: Sequence[tuple[str, ...]] = ()
    """Groups of axes over which ranks exchange the norm of each gradient, one after the other."""
    dtype: str = "fp32"

    def exchanges(self, gradients: int) -> list[tuple[tuple[str, ...], int]]:
        """Axes and bytes of each all-reduce; `gradients`: number of gradients.

        Ranks without gradients, whose stages are frozen, take part in that of the total only.
        """
        size = int(BYTES[self.dtype])
        groups = [tuple(sorted(axes)) for axes in self.gradient_axes if axes]
        total = tuple(a for a in self.axes if not any(a in axes for axes in groups))
        per_gradient = [(axes, size * gradients) for axes in groups if gradients]
        return per_gradient + ([(total, size)] if total else [])


# ---- of a stage ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class StageUpdates:
    """Tasks of a stage in the optimizer action, and their dependencies.

    Task `dep_task[k]` depends on row `dep_segment_row[k]` of `dep_owner[k]`: a task of the stage
    here (`OPTIMIZER`; -1: the factor that clips gradients), a row of its first forward or of its
    last backward.
    """

    tasks: Sequence[Kernel]
    block: Int
    begin: Sequence[int]
    """First task of each of `PARTS`, and the end."""
    last_norms: Int
    """Last task of the norm of each block's gradients."""
    dep_task: Int
    dep_owner: Int
    dep_segment_row: Int


def stage_updates(stage: Stage) -> StageUpdates:
    """Collect the tasks of a stage, and record the values they touch."""
    tasks: list[tuple[int, Kernel]] = []
    begin = [0]
    last_norms: list[int] = []
    for part in PARTS:
        by_block = [[(i, t) for t in p.block.by_part.get(part, ())]
                    for i, p in enumerate(stage.blocks)]  # fmt: skip
        items = [item for block in by_block for item in block]
        if part is TaskPart.TIE:  # ranks with several tied tables reduce them in one order
            items.sort(key=lambda item: item[1].axes)
        if part is TaskPart.NORM:
            ends = np.cumsum([len(block) for block in by_block], dtype=np.int64)
            last_norms = (ends[[bool(block) for block in by_block]] - 1 + begin[-1]).tolist()
        tasks += items
        begin.append(len(tasks))
    index = {item: n for n, item in enumerate(tasks)}
    deps: list[tuple[int, int, int]] = []
    for n, (i, t) in enumerate(tasks):
        stage.values.touch(i, t, (Owner.OPTIMIZER, stage.stage, n))
        for d in t.deps:
            if isinstance(d, LiveValue):
                if d.name == CLIP:
                    deps.append((n, Owner.OPTIMIZER, -1))
            elif (i, d) in index:
                deps.append((n, Owner.OPTIMIZER, index[i, d]))
            else:
                deps.append((n, *stage.once_dep(i, d)))
    task, owner, row = np.array(deps, dtype=np.int64).reshape(-1, 3).T
    block = np.array([i for i, _ in tasks], dtype=np.int64)
    norms = np.array(last_norms, dtype=np.int64)
    return StageUpdates([t for _, t in tasks], block, begin, norms, task, owner, row)


# ---- of a rank -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerStep:
    """Rows of the optimizer action of ranks whose stages have these classes.

    Row `dep_row[k]` depends on row `dep_segment_row[k]` of `dep_owner[k]`: of this action
    (`OPTIMIZER`), or of the first forward or the last backward of stage `dep_stage[k]` of the rank.
    """

    stage_classes: tuple[int, ...]
    kernels: Sequence[Kernel]
    stage: Int
    """By row, index of the rank's stage; -1: none."""
    block: Int
    """By row, block of that stage; -1: none or several."""
    dep_row: Int
    dep_owner: Int
    dep_stage: Int
    dep_segment_row: Int
    row_of: Sequence[Int]
    """By stage of the rank, the row of each of its tasks."""

    def __len__(self) -> int:
        return len(self.kernels)


def optimizer_step(
    stage_classes: tuple[int, ...],
    stages: Sequence[Stage],
    updates: Sequence[StageUpdates],
    clip: ClipNorm | None,
) -> OptimizerStep:
    """Build the optimizer action of one rank; `stages` and `updates` by stage of the rank.

    A rank on which nothing trains takes part in the exchange of norms, as all others do.
    """
    kernels: list[Kernel] = []
    stage: list[Int] = []
    block: list[Int] = []
    row_of = [np.zeros(len(u.tasks), dtype=np.int64) for u in updates]
    deps: list[Int] = []
    clip_row = -1
    for p, part in enumerate(PARTS):
        if part is TaskPart.UPDATE and clip is not None:
            norms = [row_of[s][u.last_norms] for s, u in enumerate(updates)]
            first = len(kernels)
            clip_row = _clip(kernels, deps, np.concatenate([_NO_ROWS, *norms]), stages, clip)
            for column in (stage, block):
                column.append(np.full(len(kernels) - first, -1))
        arranged = _arranged(stages, updates, p)
        if arranged is None:
            for s, u in enumerate(updates):
                tasks = slice(u.begin[p], u.begin[p + 1])
                count = tasks.stop - tasks.start
                row_of[s][tasks] = np.arange(count) + len(kernels)
                stage.append(np.full(count, s))
                block.append(u.block[tasks])
                kernels += u.tasks[tasks]
            continue
        for row in arranged:
            s, n = row[0]
            for other, task in row:
                row_of[other][task] = len(kernels)
            stage.append(np.array([s]))
            block.append(updates[s].block[[n]] if len(row) == 1 else np.array([-1]))
            kernels.append(merge_messages([(0, updates[s].tasks[n]) for s, n in row]))
    for s, u in enumerate(updates):
        inside = u.dep_owner == Owner.OPTIMIZER
        dep = u.dep_segment_row.copy()
        dep[inside] = np.where(dep[inside] < 0, clip_row, row_of[s][dep[inside]])
        columns = np.stack([row_of[s][u.dep_task], u.dep_owner, np.where(inside, -1, s), dep])
        deps.append(columns[:, dep >= 0])
    dep_row, dep_owner, dep_stage, dep_segment_row = _distinct(
        np.concatenate([np.zeros((4, 0), dtype=np.int64), *deps], axis=1)
    )
    return OptimizerStep(
        stage_classes=stage_classes,
        kernels=kernels,
        stage=np.concatenate([_NO_ROWS, *stage]),
        block=np.concatenate([_NO_ROWS, *block]),
        dep_row=dep_row,
        dep_owner=dep_owner,
        dep_stage=dep_stage,
        dep_segment_row=dep_segment_row,
        row_of=row_of,
    )


def _distinct(columns: Int) -> Int:
    """Distinct columns of a table, sorted by its first row, then by the second, and so on."""
    columns = columns[:, np.lexsort(columns[::-1])]
    return columns[:, (np.diff(columns, axis=1, prepend=-2) != 0).any(axis=0)]


def _arranged(
    stages: Sequence[Stage], updates: Sequence[StageUpdates], p: int
) -> list[list[tuple[int, int]]] | None:
    """Rows of part `p`, each of some tasks of stages; None: in order, a row each."""
    part = PARTS[p]
    if part is TaskPart.NORM:
        return None
    items = [(s, n) for s, u in enumerate(updates) for n in range(u.begin[p], u.begin[p + 1])]
    if part is TaskPart.TIE:
        items.sort(key=lambda item: updates[item[0]].tasks[item[1]].axes)
        return [[item] for item in items]
    tasks: Row = [(i, updates[s].tasks[n]) for i, (s, n) in enumerate(items)]
    rows = stages[0].habits.arrange_updates(tasks) if stages else None
    return None if rows is None else [[items[i] for i, _ in row] for row in rows]


def _clip(
    kernels: list[Kernel], deps: list[Int], norms: Int, stages: Sequence[Stage], clip: ClipNorm
) -> int:
    """Append rows that clip by the global norm: sum, all-reduces, scale; return the last row."""
    blocks = Counter(p.block for s in stages for p in s.blocks)
    gradients = sum(count * block.norms for block, count in blocks.items())
    size, row = len(norms), len(kernels)
    kernels.append(
        Kernel("grad_norm", "add", TaskKind.COMPUTE, "optimizer", TaskPart.NORM,
               flops=size, traffic=4 * (size + 1), dtype="fp32")
    )  # fmt: skip
    deps.append(np.stack([np.full(size, x) for x in (row, Owner.OPTIMIZER, -1)] + [norms]))
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
    owner = np.full(len(chain), Owner.OPTIMIZER)
    deps.append(np.stack([chain, owner, np.full(len(chain), -1), chain - 1]))
    return len(kernels) - 1
