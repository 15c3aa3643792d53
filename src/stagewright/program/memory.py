"""Memory over the rows of a rank's program: samples of the bytes in use, live values.

Allocation is ideal: a value is live from before the row that makes it until after the last row that
reads it. Rows are in program order.

>>> from stagewright.lower.compile import compile
>>> from stagewright.run.settings import Run
>>> (rank_class,) = compile(Run(model="gpt2", layers=2, seq_length=64)).program.classes
>>> in_use = rank_class.work.changes.in_use
>>> int(in_use.sum(axis=0).max()) == rank_class.memory["peak"]
True
>>> [name for name, size in zip(CATEGORIES, in_use[:, -1], strict=True) if size > 99]
['parameters', 'gradients', 'optimizer']
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Int
from stagewright.program.columns import CATEGORIES, RankClass, Values

_Ints = NDArray[np.integer[Any]]


class Samples(NamedTuple):
    """Timeline with few points: of each span of rows, the row with the most bytes."""

    rows: Int  # [points], ascending; the peak is among them
    held: Int  # [categories, points]


def samples(rank_class: RankClass, points: int) -> Samples:
    """Reduce a timeline to at most `points`, of spans of equal length."""
    in_use = rank_class.work.changes.in_use
    total = in_use.sum(axis=0)
    edges = [total.size * i // points for i in range(points + 1)]
    peaks = [a + int(np.argmax(total[a:b])) for a, b in itertools.pairwise(edges) if b > a]
    rows = np.array(peaks, dtype=np.int64)
    return Samples(rows, in_use[:, rows])


class ValueGroup(NamedTuple):
    """Values of one name that are live at the same time."""

    category: str
    name: str
    layers: tuple[int, ...]  # ascending; empty: outside the layers
    microbatches: tuple[int, ...]  # ascending; empty: once per step
    instances: int
    bytes: int


def groups_alive(values: Values, row: int) -> list[ValueGroup]:
    """Values that are live while a row runs, grouped by name, the largest group first."""
    live = alive(values, row)
    value = values.value[live]
    key = values.category[value].astype(np.int64) * len(values.names) + values.name[value]
    groups: list[ValueGroup] = []
    for k in np.unique(key):
        members = np.flatnonzero(key == k)
        category, name = divmod(int(k), len(values.names))
        layers = np.unique(values.layer[value[members]])
        microbatches = np.unique(values.microbatch[live[members]])
        groups.append(
            ValueGroup(
                CATEGORIES[category],
                values.names[name],
                tuple(layers[layers >= 0].tolist()),
                tuple(microbatches[microbatches >= 0].tolist()),
                len(members),
                int(values.size[value[members]].sum()),
            )
        )
    return sorted((g for g in groups if g.bytes), key=lambda g: (-g.bytes, g.category, g.name))


def alive(values: Values, row: int) -> _Ints:
    """Indices of the instances that are live while a row runs."""
    return np.flatnonzero((values.first <= row) & (values.last >= row))
