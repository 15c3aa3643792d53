"""Products and collectives along tp that overlap in chunks, for many configurations at once."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence

import numpy as np

from stagewright.arrays import Float
from stagewright.program.columns import Tasks
from stagewright.time.columns.durations import Columns
from stagewright.time.columns.meshes import MeshColumns
from stagewright.time.columns.row_kinds import Known, RowKinds
from stagewright.time.fused_products import Gemms
from stagewright.time.tensor_overlap import OverlapPairs, overlap_pairs, overlapped, split_seconds


def in_chunks(columns: Columns, tasks: Tasks, rows: RowKinds, meshes: MeshColumns) -> RowKinds:
    """Rows whose collectives along tp overlap in chunks with products
    (`time.tensor_overlap`)."""
    program = meshes.program
    pairs = overlap_pairs(program, tasks)
    if not len(pairs.product):
        return rows
    took, kernel = rows.number[rows.of], rows.kernel[rows.of]
    before: list[int] = took.tolist()
    of_kernel: list[int] = kernel.tolist()
    beside: dict[int, list[int]] = {}
    for move, product in zip(pairs.collective.tolist(), pairs.product.tolist(), strict=True):
        beside.setdefault(move, []).append(product)
    # Collectives that take as long and overlap with products that take as long do so alike.
    known = columns.known
    keys: dict[int, Hashable] = {}
    new: dict[Hashable, tuple[int, list[int]]] = {}
    for move, some in beside.items():
        products = tuple((before[row], columns.each[of_kernel[row]].content) for row in some)
        axes = program.communicators[int(tasks.slot[move])].axes
        keys[move] = "chunks", before[move], products, axes, meshes.content
        if (keys[move], 0) not in known.found:
            new.setdefault(keys[move], (move, some))
    chosen = [*new.values()]
    for key, found in zip(new, _overlapped(columns, tasks, rows, meshes, chosen), strict=True):
        numbers = map(known.rows.number, found)
        known.found.update(((key, nth), number) for nth, number in enumerate(numbers))
    pieces: dict[int, list[int]] = {}
    for move, some in beside.items():
        took[move] = known.found[keys[move], 0]
        for nth, product in enumerate(some, 1):
            pieces.setdefault(product, []).append(known.found[keys[move], nth])
    for product, cuts in pieces.items():
        took[product] = _last_cut(known, before[product], cuts)
    return RowKinds.made(known.rows, took, kernel)


def _last_cut(known: Known, whole: int, cuts: Sequence[int]) -> int:
    """The number of what a product takes that overlaps with several collectives: the last of
    `cuts` that differs from what it takes in one piece."""
    if len(cuts) == 1:
        return cuts[0]

    def last() -> Float:
        found = uncut = known.rows.rows[whole]
        for cut in map(known.rows.rows.__getitem__, cuts):
            found = np.where(cut != uncut, cut, found)
        return found

    return known.number(("last cut", whole, *cuts), last)


def _overlapped(
    columns: Columns,
    tasks: Tasks,
    rows: RowKinds,
    meshes: MeshColumns,
    chosen: Sequence[tuple[int, Sequence[int]]],
) -> list[Float]:
    """Seconds of some collectives, and behind each those of the products that it overlaps with:
    [rows, configurations] each."""
    if not chosen:
        return []
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
        OverlapPairs(first, place, ranks), rows.known.table(rows.number[rows.of[every]].tolist()),
        cut.reshape(-1, columns.count), ranks,
    )  # fmt: skip
    return [took[a:b] for a, b in itertools.pairwise(begin)]
