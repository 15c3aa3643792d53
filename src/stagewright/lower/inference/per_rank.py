"""Merge the programs of dp ranks that serve different requests: same tasks, different sizes.

The sizes of a step may differ between ranks of data parallelism and between microbatches; the
tasks and their order do not. So the step is lowered once for each distinct set of sizes, and the
columns of a rank are merged from these programs, microbatch by microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Int
from stagewright.program.columns import Program, RankClass, RankWork, Shape, Tasks

Memory = Callable[[int, tuple[int, ...]], Mapping[str, int]]
"""Bytes by category of a pipeline rank; arguments: the rank, and by microbatch its sizes."""


def merge_programs(
    programs: Sequence[Program], rank_of: Int, batches: Int, memory: Memory
) -> Program:
    """Merge: in microbatch m, rank r has the sizes of `programs[batches[rank_of[r], m]]`.

    `programs`: of all ranks if all have equal sizes; they differ in nothing else. `rank_of`: the dp
    rank of each rank.
    """
    first = programs[0]
    tables = _merge_shapes([p.classes[0].tasks.shapes for p in programs])
    shapes = tuple(dict.fromkeys(s for p in programs for s in p.classes[0].tasks.shapes))
    distinct, row_of = np.unique(batches, axis=0, return_inverse=True)
    classes: list[RankClass] = []
    for i, c in enumerate(first.classes):
        variants = [p.classes[i].tasks for p in programs]
        row_of_rank = row_of.ravel()[rank_of[c.ranks]]
        # Layers of a stage may not depend on sizes that differ: equal columns are one class.
        merged: dict[object, RankClass] = {}
        for row in np.unique(row_of_rank):
            sizes = tuple(int(v) for v in distinct[row])
            columns = _merge_columns(variants, tables, sizes)
            memory_bytes, ranks = memory(c.pipeline_rank, sizes), c.ranks[row_of_rank == row]
            key = *(column.tobytes() for column in columns.values()), *memory_bytes.items()
            if key in merged:
                ranks = np.sort(np.concatenate((merged[key].ranks, ranks)))
            tasks = replace(variants[0], shapes=shapes, **columns)
            work = RankWork.from_tables(tasks, memory_bytes)
            merged[key] = RankClass(ranks, c.pipeline_rank, work)
        classes += merged.values()
    return replace(first, classes=tuple(classes))


def _merge_shapes(tables: Sequence[tuple[Shape, ...]]) -> list[NDArray[np.int32]]:
    """Index of each program's shapes in the merged table; last, an entry for -1."""
    index: dict[Shape, int] = {}
    return [
        np.array([*(index.setdefault(s, len(index)) for s in table), -1], dtype=np.int32)
        for table in tables
    ]


def _merge_columns(
    variants: Sequence[Tasks], tables: Sequence[NDArray[np.int32]], sizes: tuple[int, ...]
) -> dict[str, Int]:
    """Merge columns that depend on sizes: rows of microbatch m from the program `sizes[m]`."""
    tasks = variants[sizes[0]]
    columns = {name: getattr(tasks, name) for name in ("flops", "traffic", "comm_bytes")}
    columns["shape"] = tables[sizes[0]][tasks.shape]
    for m, variant in enumerate(sizes):
        other = variants[variant]
        rows = tasks.microbatch == m
        for name, column in columns.items():
            value = tables[variant][other.shape] if name == "shape" else getattr(other, name)
            columns[name] = np.where(rows, value, column)
    return columns
