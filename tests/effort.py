"""How far random searches go: `EFFORT=10 pytest -m slow` tries ten times as many draws."""

import itertools
import os
import random
from collections.abc import Iterable, Sequence
from typing import TypeVar

A, B = TypeVar("A"), TypeVar("B")

EFFORT = int(os.environ.get("EFFORT", "1"))


def pairs(rows: Iterable[A], columns: Iterable[B], share: int = 2) -> list[tuple[A, B]]:
    """Of all pairs one in `share`, so that every row and every column is tried; with as much effort
    all of them."""
    step = -(-share // EFFORT)
    table = itertools.product(enumerate(rows), enumerate(columns))
    return [(row, column) for (i, row), (j, column) in table if (i + j) % step == 0]


def some(cases: Sequence[A], share: int = 2) -> list[A]:
    """One case in `share`, drawn once and for all, in their order; with as much effort, all."""
    share = -(-share // EFFORT)
    drawn = random.Random(len(cases)).sample(range(len(cases)), -(-len(cases) // share))
    return [cases[i] for i in sorted(drawn)]


def times(count: int) -> int:
    """So many draws, times the effort that is asked for."""
    return count * EFFORT
