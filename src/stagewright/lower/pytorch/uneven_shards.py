"""FSDP2 where rows of a weight do not divide: some ranks have fewer rows, or none.

If eight ranks shard four experts, the first four have one each. All ranks send and store equal
sizes, some of it padding; an optimizer has states of its rank's rows only, and updates only these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from stagewright.algebra.layout import Mesh
from stagewright.arrays import Int
from stagewright.lower.assembly.work import AssembledWork, assembled
from stagewright.lower.kernels.extent import OwnRows, Split
from stagewright.program.columns import Program, RankClass, intersect
from stagewright.program.communicators import place_along


def by_rows(
    mesh: Mesh,
    axes: tuple[str, ...],
    splits: Sequence[Split],
    make: Callable[[OwnRows], Program],
) -> Program:
    """Build the program of all ranks: ranks of a pipeline rank with equal work form a class.

    `make` compiles the program of ranks with equal rows; `axes`: those that FSDP shards over;
    `splits`: those that do not divide. One program is made for every distinct set of rows; classes
    of a pipeline rank differ in the numbers of their actions only.
    """
    first = make(OwnRows(axes))
    if not splits:
        return first
    rows = np.stack([_rows(mesh, split) for split in splits])
    distinct, index = np.unique(rows, axis=1, return_inverse=True)
    classes: dict[object, RankClass] = {}  # by their numbers: a stage may have no such split
    base: dict[int, AssembledWork] = {}  # by pipeline rank; all its classes share the order
    for i, rank_rows in enumerate(distinct.T.tolist()):
        ranks = np.flatnonzero(index.ravel() == i)
        program = make(OwnRows(axes, tuple(zip(splits, rank_rows, strict=True))))
        for rank_class in program.classes:
            members = intersect(rank_class.ranks, ranks)
            if not len(members):
                continue
            work, pipeline_rank = assembled(rank_class), rank_class.pipeline_rank
            tasks, action_rows, stages = work.actions.tasks, work.rows, work.stage_bytes
            numbers = (
                tasks.flops[action_rows],
                tasks.traffic[action_rows],
                *(s.size for s in stages),
            )
            key = pipeline_rank, *(column.tobytes() for column in numbers)
            if key in classes:
                members = np.sort(np.concatenate([classes[key].ranks, members]))
                classes[key] = replace(classes[key], ranks=members)
                continue
            shared = base.setdefault(pipeline_rank, work)
            sizes = {a.stage: b.size for a, b in zip(shared.stage_bytes, stages, strict=True)}
            work = shared.with_numbers(tasks, sizes)
            classes[key] = replace(rank_class, ranks=members, work=work)
    order = sorted(classes.values(), key=lambda c: (c.pipeline_rank, int(c.ranks[0])))
    return replace(first, classes=tuple(order))


def _rows(mesh: Mesh, split: Split) -> Int:
    """Number of rows of a split on every rank, as `torch.chunk` cuts."""
    count, axes = split
    chunk = -(-count // mesh.size(*axes))
    return np.clip(count - place_along(mesh, axes) * chunk, 0, chunk)
