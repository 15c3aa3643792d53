"""Types of the numpy arrays that programs, timings and traces are made of."""

from __future__ import annotations

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
