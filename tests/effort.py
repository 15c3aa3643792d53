"""How far random searches go: `EFFORT=10 pytest -m slow` tries ten times as many draws."""

import itertools
import os
from collections.abc import Iterable
from typing import TypeVar

A, B = TypeVar("A"), TypeVar("B")

EFFORT = int(os.environ.get("EFFORT", "1"))


def pairs(rows: Iterable[A], columns: Iterable[B], share: int = 2) -> list[tuple[A, B]]:
    """Of all pairs one in `share`, so that every row and every column is tried; with as much effort
    all of them."""
    step = -(-share // EFFORT)
    table = itertools.product(enumerate(rows), enumerate(columns))
    return [(row, column) for (i, row), (j, column) in table if (i + j) % step == 0]


def times(count: int) -> int:
    """So many draws, times the effort that is asked for."""
    return count * EFFORT
