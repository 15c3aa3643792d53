"""Types of the numpy arrays that programs, timings and traces are made of."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int64]
"""Rows, ranks, sizes in bytes."""
Bool = NDArray[np.bool_]
"""Which rows or ranks are meant."""
Float = NDArray[np.float64]
"""Seconds, shares."""


def exact_sum(column: Int) -> int:
    """The exact sum of a column, also where it exceeds 64 bits.

    >>> exact_sum(np.array([2**62, 2**62, 2**62, 1]))
    13835058055282163713
    """
    low = np.int64(2**31 - 1)
    return (int((column >> 31).sum()) << 31) + int((column & low).sum())


def compressed_pairs(tokens: Any, each: int, top: int = 0) -> Any:
    """Pairs of a query among the first `tokens`, a number or an array of numbers, and a compressed
    key, where `each` positions have one: a query sees those behind whose positions it is.

    With `top`, a query sees so many at most.

    >>> compressed_pairs(9, 4), compressed_pairs(9, 4, 1), compressed_pairs(12, 4)
    (8, 6, 15)
    """
    first = np.minimum(tokens, each * (top + 1) - 1) if top else tokens
    keys = first // each
    pairs = each * (keys * (keys - 1) // 2) + keys * (first - each * keys + 1)
    pairs = pairs + (tokens - first) * top
    return int(pairs) if isinstance(tokens, int) else pairs
