"""Bytes that a rank holds over the rows of its program: changes, timeline, peak, live values.

Allocation is ideal: a value is live from before the row that makes it until after the last row that
reads it. Rows are in issue order, which is the order of the program.

>>> from stagewright.lower.compile import compile
>>> from stagewright.run.settings import Run
>>> (of,) = compile(Run(model="gpt2", layers=2, seq_length=64)).program.classes
>>> over = timeline(of)
>>> int(over.sum(axis=0).max()) == of.memory["peak"]
True
>>> [name for name, size in zip(CATEGORIES, over[:, -1], strict=True) if size > 99]
['parameters', 'gradients', 'optimizer']
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Int
from stagewright.program.columns import CATEGORIES, RankClass, Values
from stagewright.program.step import Deltas as Deltas
from stagewright.program.step import changed_bytes, summed

_Ints = NDArray[np.integer[Any]]


def deltas(of: RankClass) -> Deltas:
    """The bytes that every row of a rank class allocates and frees."""
    return changed_bytes(of.values, len(of.tasks))


def timeline(of: RankClass) -> Int:
    """Bytes by category held while each row runs: [categories, rows]."""
    start, allocated, freed = deltas(of)
    held = allocated.cumsum(axis=1) + start[:, None]
    held[:, 1:] -= freed[:, :-1].cumsum(axis=1)
    return held


class Samples(NamedTuple):
    """A timeline reduced to few points: of each span of rows, the row with the most bytes."""

    rows: Int  # [points], ascending; the peak is among them
    held: Int  # [categories, points]


def samples(of: RankClass, points: int) -> Samples:
    """The timeline reduced to at most `points`, of spans of equal length."""
    over = timeline(of)
    total = over.sum(axis=0)
    edges = [total.size * i // points for i in range(points + 1)]
    most = [a + int(np.argmax(total[a:b])) for a, b in itertools.pairwise(edges) if b > a]
    rows = np.array(most, dtype=np.int64)
    return Samples(rows, over[:, rows])


class ValueGroup(NamedTuple):
    """Values of one name that are live at the same time."""

    category: str
    name: str
    layers: tuple[int, ...]  # ascending; empty: outside the layers
    microbatches: tuple[int, ...]  # ascending; empty: once per step
    instances: int
    bytes: int


def groups_alive(values: Values, row: int) -> list[ValueGroup]:
    """The values that are live while a row runs, grouped by name, the largest group first."""
    live = alive(values, row)
    value = values.value[live]
    key = values.category[value].astype(np.int64) * len(values.names) + values.name[value]
    found: list[ValueGroup] = []
    for k in np.unique(key):
        mine = np.flatnonzero(key == k)
        category, name = divmod(int(k), len(values.names))
        layers = np.unique(values.layer[value[mine]])
        microbatches = np.unique(values.microbatch[live[mine]])
        found.append(
            ValueGroup(
                CATEGORIES[category],
                values.names[name],
                tuple(layers[layers >= 0].tolist()),
                tuple(microbatches[microbatches >= 0].tolist()),
                len(mine),
                int(values.size[value[mine]].sum()),
            )
        )
    return sorted((g for g in found if g.bytes), key=lambda g: (-g.bytes, g.category, g.name))


def live(values: Values, rows: int) -> Int:
    """Bytes of all categories together held while each row runs."""
    size = values.size[values.value]
    allocated = summed(np.maximum(values.first, 0), size, rows)
    freed = summed(values.last + 1, size, rows + 2)
    return np.cumsum(allocated - freed[:rows])


def peak_row(values: Values, rows: int) -> int:
    """The first row during which the most bytes are held."""
    return int(np.argmax(live(values, rows))) if rows else 0


def alive(values: Values, row: int) -> _Ints:
    """Indices of the instances that are live while a row runs."""
    return np.flatnonzero((values.first <= row) & (values.last >= row))
