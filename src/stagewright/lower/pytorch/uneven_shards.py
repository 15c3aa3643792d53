"""FSDP2 where rows of a weight do not divide: ranks with fewer rows than others, or with none.

Four experts that eight ranks shard are on the first four. All ranks send and store as much, the
others padding; but an optimizer has states of its own rows only, and updates only these.
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
    """The program of all ranks: ranks of a pipeline rank with equal work form a class.

    `make` compiles the program if all ranks hold these rows; `axes` are those that FSDP shards
    over, `splits` those that do not divide. One program is made for every set of rows that some
    rank holds; classes of a pipeline rank differ in the numbers of their actions only.
    """
    first = make(OwnRows(axes))
    if not splits:
        return first
    rows = np.stack([_rows(mesh, split) for split in splits])
    distinct, which = np.unique(rows, axis=1, return_inverse=True)
    classes: dict[object, RankClass] = {}  # by what they do: a stage may have no such split
    base: dict[int, AssembledWork] = {}  # by pipeline rank, whose order all classes share
    for nth, held in enumerate(distinct.T.tolist()):
        ranks = np.flatnonzero(which.ravel() == nth)
        program = make(OwnRows(axes, tuple(zip(splits, held, strict=True))))
        for of in program.classes:
            mine = intersect(of.ranks, ranks)
            if len(mine):
                work = assembled(of)
                rows, held = work.rows, work.stage_bytes
                columns = work.actions.tasks.flops, work.actions.tasks.traffic
                numbers = *(column[rows] for column in columns), *(each.size for each in held)
                key = of.pipeline_rank, *(column.tobytes() for column in numbers)
                if key not in classes:
                    same = base.setdefault(of.pipeline_rank, work)
                    sizes = {a.stage: b.size for a, b in zip(same.stage_bytes, held, strict=True)}
                    work = same.with_numbers(work.actions.tasks, sizes)
                    classes[key] = replace(of, ranks=mine[:0], work=work)
                ranks_of = np.sort(np.concatenate([classes[key].ranks, mine]))
                classes[key] = replace(classes[key], ranks=ranks_of)
    return replace(first, classes=tuple(sorted(classes.values(), key=_place)))


def _place(of: RankClass) -> tuple[int, int]:
    return of.pipeline_rank, int(of.ranks[0])


def _rows(mesh: Mesh, split: Split) -> Int:
    """Of every rank the rows that it has of a split, as `torch.chunk` cuts."""
    count, axes = split
    each = -(-count // mesh.size(*axes))
    return np.clip(count - place_along(mesh, axes) * each, 0, each)
