"""Products and collectives along tp that overlap in chunks, for many configurations at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from stagewright.arrays import Float
from stagewright.program.columns import Tasks
from stagewright.time.columns.durations import Columns
from stagewright.time.columns.meshes import MeshColumns
from stagewright.time.columns.row_kinds import GrowingKinds, RowKinds
from stagewright.time.fused_products import Gemms
from stagewright.time.tensor_overlap import OverlapPairs, overlap_pairs, overlapped, split_seconds


def in_chunks(columns: Columns, tasks: Tasks, rows: RowKinds, meshes: MeshColumns) -> RowKinds:
    """Rows whose collectives along tp overlap in chunks with products
    (`time.tensor_overlap`)."""
    program = meshes.program
    pairs = overlap_pairs(program, tasks)
    if not len(pairs.product):
        return rows
    # Collectives of one kind that overlap with products of one kind each do so alike.
    of_row: list[int] = rows.of.tolist()
    beside: dict[int, list[int]] = {}
    for move, product in zip(pairs.collective.tolist(), pairs.product.tolist(), strict=True):
        beside.setdefault(move, []).append(product)
    alike: dict[tuple[int, ...], int] = {}
    products: dict[int, list[tuple[int, int]]] = {}
    chosen: list[tuple[int, list[int]]] = []
    for move, some in beside.items():
        key = int(tasks.slot[move]), of_row[move], *(of_row[product] for product in some)
        if key not in alike:
            alike[key] = len(chosen)
            chosen.append((move, some))
        for nth, product in enumerate(some):
            products.setdefault(product, []).append((alike[key], nth))
    took = _overlapped(columns, tasks, rows, meshes, chosen)
    kinds = GrowingKinds(rows.of, rows.seconds)
    for move, some in beside.items():
        of = alike[int(tasks.slot[move]), of_row[move], *(of_row[p] for p in some)]
        kinds.of[move] = kinds.number((of,), lambda of=of: took[of][0])
    for product, pieces in products.items():
        before = of_row[product]

        def last(before: int = before, pieces: list[tuple[int, int]] = pieces) -> Float:
            whole: Float = rows.seconds[before]
            found = whole
            for of, nth in pieces:
                cut: Float = took[of][1 + nth]
                found = np.where(cut != whole, cut, found)
            return found

        kinds.of[product] = kinds.number((before, *pieces), last)
    return kinds.made(columns.count, rows.kernel[rows.of])


def _overlapped(
    columns: Columns,
    tasks: Tasks,
    rows: RowKinds,
    meshes: MeshColumns,
    chosen: Sequence[tuple[int, Sequence[int]]],
) -> list[Float]:
    """Seconds of some collectives, and behind each those of the products that it overlaps with:
    [rows, configurations] each."""
    moves = np.array([move for move, some in chosen for _ in some])
    products = np.array([product for _, some in chosen for product in some])
    kernels: list[int] = rows.kernel[rows.of[products]].tolist()
    each = [columns.extents(kernel) for kernel in kernels]
    batch, m, n, k = (np.concatenate([of[x] for of in each]) for x in ("batch", "m", "n", "k"))
    dtype = np.repeat(tasks.dtype[products].astype(np.int64), columns.count)
    traffic = columns.stacked([columns.each[kernel].traffic for kernel in kernels])
    whole = Gemms(batch, m, n, k, traffic.ravel(), dtype, np.ones(len(batch)))
    slots: list[int] = tasks.slot[moves].tolist()
    ranks = np.stack([meshes.size(meshes.program.communicators[n].axes) for n in slots])
    cut = split_seconds(whole, tasks.dtypes, ranks.ravel(), columns.hardware)
    counts = [1 + len(some) for _, some in chosen]
    begin: list[int] = np.cumsum([0, *counts]).tolist()
    place = np.array([n for a, b in itertools.pairwise(begin) for n in range(a + 1, b)])
    first = np.repeat(begin[:-1], [count - 1 for count in counts])
    every = np.concatenate([[move, *some] for move, some in chosen])
    took = overlapped(
        OverlapPairs(first, place, ranks), rows.seconds[rows.of[every]],
        cut.reshape(-1, columns.count), ranks,
    )  # fmt: skip
    return [took[a:b] for a, b in itertools.pairwise(begin)]
