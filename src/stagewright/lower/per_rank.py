"""One program of ranks whose numbers differ: those of dp serve what each gets.

The sizes of a step may differ between ranks of data parallelism and between microbatches; what is
done in which order does not. So the step is lowered once for each distinct set of sizes, and a
rank's columns are put together from these programs, microbatch by microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from stagewright.algebra.layout import Mesh
from stagewright.arrays import Int
from stagewright.program.columns import Program, RankClass, Shape, Tasks

Memory = Callable[[int, tuple[int, ...]], Mapping[str, int]]
"""Bytes by category: of a pipeline rank, given the set of sizes that each microbatch has."""


def shared(programs: Sequence[Program], rank_of: Int, of: Int, memory: Memory) -> Program:
    """The program in which rank r has the sizes `of[rank_of[r], m]` in microbatch m.

    `programs` have one set of sizes each, and are otherwise the same.
    """
    first = programs[0]
    tables = _one_table([p.classes[0].tasks.shapes for p in programs])
    shapes = tuple(dict.fromkeys(s for p in programs for s in p.classes[0].tasks.shapes))
    kinds, kind_of = np.unique(of, axis=0, return_inverse=True)
    classes: list[RankClass] = []
    for at, c in enumerate(first.classes):
        variants = [p.classes[at].tasks for p in programs]
        mine = kind_of.ravel()[rank_of[c.ranks]]
        alike: dict[object, RankClass] = {}  # sizes may differ that no layer of a stage depends on
        for kind in np.unique(mine):
            sizes = tuple(int(v) for v in kinds[kind])
            columns = _put_together(variants, tables, sizes)
            held, ranks = memory(c.pipeline_rank, sizes), c.ranks[mine == kind]
            key = *(column.tobytes() for column in columns.values()), *held.items()
            if key in alike:
                ranks = np.sort(np.concatenate((alike[key].ranks, ranks)))
            tasks = replace(variants[0], shapes=shapes, **columns)
            alike[key] = RankClass(ranks, c.pipeline_rank, tasks, held)
        classes += alike.values()
    return replace(first, classes=tuple(classes))


def place_along(mesh: Mesh, axes: Sequence[str]) -> Int:
    """The place of every rank in the joint group of some axes, outermost first.

    >>> place_along(Mesh((("tp", 2), ("dp", 3))), ["dp"]).tolist()
    [0, 0, 1, 1, 2, 2]
    """
    ranks = np.arange(mesh.world_size, dtype=np.int64)
    index = np.zeros_like(ranks)
    for axis in axes:
        index = index * mesh.size(axis) + ranks // mesh.stride(axis) % mesh.size(axis)
    return index


def _one_table(tables: Sequence[tuple[Shape, ...]]) -> list[NDArray[np.int32]]:
    """Per program, the place of each of its shapes among those of all; the last is that of -1."""
    place: dict[Shape, int] = {}
    return [
        np.array([*(place.setdefault(s, len(place)) for s in table), -1], dtype=np.int32)
        for table in tables
    ]


def _put_together(
    variants: Sequence[Tasks], tables: Sequence[NDArray[np.int32]], sizes: tuple[int, ...]
) -> dict[str, Int]:
    """The columns that sizes decide: rows of a microbatch from the program with its sizes."""
    tasks = variants[sizes[0]]
    columns = {name: getattr(tasks, name) for name in ("flops", "traffic", "comm_bytes")}
    columns["shape"] = tables[sizes[0]][tasks.shape]
    for m, variant in enumerate(sizes):
        other = variants[variant]
        mine = tasks.microbatch == m
        for name, column in columns.items():
            value = tables[variant][other.shape] if name == "shape" else getattr(other, name)
            columns[name] = np.where(mine, value, column)
    return columns
