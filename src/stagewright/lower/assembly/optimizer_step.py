"""The optimizer action of a rank: gradients of tied tables, the global norm, then the updates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Int
from stagewright.graph.node import BYTES
from stagewright.lower.assembly.habit import Row, merge_messages
from stagewright.lower.assembly.segments import OPTIMIZER, RowRefs, Segment
from stagewright.lower.assembly.stages import UPDATE_SECTIONS, Stage
from stagewright.lower.kernels.kernel import BlockSection, LoweredTask
from stagewright.program.columns import TaskKind


class ClipNorm(NamedTuple):
    """Exchange of the norm by which gradients are clipped: that of the gradients of all ranks."""

    axes: tuple[str, ...] = ()
    """The norm is a sum over the ranks of these axes."""
    gradient_axes: Sequence[tuple[str, ...]] = ()
    """Groups of axes over which ranks exchange the norm of each gradient, one after the other."""
    dtype: str = "fp32"

    def tasks(self, gradients: int, norms: int) -> list[LoweredTask]:
        """Kernels that clip by the global norm: sum, all-reduces, factor; each reads the last one.

        `gradients`: number of gradients of a rank; `norms`: number of kernels that make norms.
        Ranks without gradients, whose stages are frozen, take part in the all-reduce of the total
        only.
        """
        size = int(BYTES[self.dtype])
        groups = [tuple(sorted(axes)) for axes in self.gradient_axes if axes]
        total = tuple(a for a in self.axes if not any(a in axes for axes in groups))
        exchanges = [(axes, size * gradients) for axes in groups if gradients]
        exchanges += [(total, size)] if total else []
        compute, collective, section = TaskKind.COMPUTE, TaskKind.COLLECTIVE, BlockSection.NORM
        return [
            LoweredTask("grad_norm", "add", compute, "optimizer", section,
                        flops=norms, traffic=4 * (norms + 1), dtype="fp32"),
            *(LoweredTask("grad_norm.all_reduce", "all_reduce", collective, "optimizer", section,
                          axes=axes, comm_bytes=width, dtype=self.dtype)
              for axes, width in exchanges),
            LoweredTask("clip_scale", "divide", compute, "optimizer", section,
                        flops=3, traffic=8, dtype="fp32"),
        ]  # fmt: skip


def optimizer_step(stages: Sequence[Stage], clip: ClipNorm | None) -> Segment:
    """Build the optimizer action of one rank; `stages` are those of the rank.

    A rank on which nothing trains takes part in the exchange of norms, as all others do.
    """
    tasks: list[LoweredTask] = []
    stage_of: list[int] = []
    block: list[int] = []
    row_of = [[0] * len(stage.updates) for stage in stages]
    blocks: list[list[int]] = [stage.updates.block.tolist() for stage in stages]
    deps: list[RowRefs] = []
    clip_row = -1
    for p, section in enumerate(UPDATE_SECTIONS):
        if section is BlockSection.UPDATE and clip is not None:
            norms = [row_of[s][n] for s, stage in enumerate(stages) for n in _last_norms(stage)]
            gradients = sum(placed.block.norms for stage in stages for placed in stage.blocks)
            first = len(tasks)
            tasks += clip.tasks(gradients, len(norms))
            clip_row = len(tasks) - 1
            stage_of += [-1] * (len(tasks) - first)
            block += [-1] * (len(tasks) - first)
            chain = np.arange(first, clip_row)
            readers = np.append(np.full(len(norms), first), chain + 1)
            deps.append(_refs_to_optimizer(readers, np.append(np.array(norms, np.int64), chain)))
        for row in _rows(stages, p):
            for s, n in row:
                row_of[s][n] = len(tasks)
            s, n = row[0]
            stage_of.append(s)
            block.append(blocks[s][n] if len(row) == 1 else -1)
            tasks.append(merge_messages([(0, stages[s].updates.tasks[n]) for s, n in row]))
    rows = [np.array(numbers, dtype=np.int64) for numbers in row_of]
    for s, stage in enumerate(stages):
        refs = stage.updates.deps
        reader, inside = rows[s][refs.reader], refs.pass_part == OPTIMIZER
        row = refs.segment_row.copy()
        row[inside] = np.append(rows[s], clip_row)[row[inside]]  # -1: the factor
        refs = refs._replace(reader=reader, stage=np.where(inside, 0, s), segment_row=row)
        deps.append(refs.take(row >= 0))
    columns = np.array(stage_of, dtype=np.int64), np.array(block, dtype=np.int64)
    return Segment.of_optimizer(tasks, columns[1], _distinct(deps), columns[0], rows)


def _last_norms(stage: Stage) -> list[int]:
    """Last update of the norm of each block's gradients."""
    first, end = stage.update_begin[1:3]
    block = stage.updates.block[first:end]
    return (np.flatnonzero(np.diff(block, append=-1)) + first).tolist()


def _rows(stages: Sequence[Stage], p: int) -> Iterable[Sequence[tuple[int, int]]]:
    """Rows of a section: the stage and the update of each task that a row has."""
    items = [(s, n) for s, x in enumerate(stages) for n in range(*x.update_begin[p : p + 2])]
    section = UPDATE_SECTIONS[p]
    if section is BlockSection.TIE:
        items.sort(key=lambda item: stages[item[0]].updates.tasks[item[1]].axes)
    if section is BlockSection.UPDATE and stages:
        tasks: Row = [(i, stages[s].updates.tasks[n]) for i, (s, n) in enumerate(items)]
        arranged = stages[0].habits.arrange_updates(tasks)
        if arranged is not None:
            return [[items[i] for i, _ in row] for row in arranged]
    return [[item] for item in items]


def _refs_to_optimizer(reader: Int, row: Int) -> RowRefs:
    """References of rows to rows of the same optimizer action."""
    zero, no, yes = np.zeros_like(reader), *(np.full(len(reader), x) for x in (False, True))
    return RowRefs(reader, zero, np.full_like(reader, OPTIMIZER), row, yes, no, no)


def _distinct(deps: Sequence[RowRefs]) -> RowRefs:
    """Distinct references by reader: to the first forward, to the last backward, to the action."""
    none = np.zeros(0, dtype=np.int64)
    refs = RowRefs.concatenate([_refs_to_optimizer(none, none), *deps])
    action = np.where(refs.pass_part == OPTIMIZER, 2, np.minimum(refs.pass_part, 1))
    columns = np.stack([refs.reader, action, refs.stage, refs.segment_row])
    order = np.lexsort(columns[::-1])
    new = (np.diff(columns[:, order], axis=1, prepend=-2) != 0).any(axis=0)
    return refs.take(order[new])
