"""Exact whole numbers in arrays: of int64, or of Python's ints where 64 bits do not hold a number.

Sums and products take bounds of the absolute values along, so that few arrays are looked through.

>>> times(np.array([2**40, 3]), 2**40, 2**30, 2**30)[0].tolist() == [2**70, 3 * 2**30]
True
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Whole: TypeAlias = "int | NDArray[Any]"

MOST = 2**63 - 1
"""The largest number that an array of int64 holds."""


def is_1(x: Whole) -> bool:
    """Whether this is the int 1, and no array."""
    return isinstance(x, int) and x == 1


def is_same(a: Whole, b: Whole) -> bool:
    """Whether two are equal for sure: one array, or equal ints."""
    return a is b or (isinstance(a, int) and isinstance(b, int) and a == b)


def bound(x: Whole) -> int:
    """A bound of the absolute values, at least 1."""
    if isinstance(x, int):
        return max(1, abs(x))
    return max(1, int(x.max()), -int(x.min()))


def _wide(x: Whole) -> Whole:
    """As Python's ints, which have no bound."""
    return x if isinstance(x, int) else x.astype(object)


def plus(a: Whole, most: int, b: Whole, other: int) -> tuple[Whole, int]:
    """A sum and a bound of it; `most` and `other` bound the terms."""
    if most + other > MOST:
        most, other = bound(a), bound(b)
    if most + other > MOST:
        a, b = _wide(a), _wide(b)
    return a + b, most + other


def times(a: Whole, most: int, b: Whole, other: int) -> tuple[Whole, int]:
    """A product and a bound of it; `most` and `other` bound the factors."""
    if is_1(b):
        return a, most
    if most * other > MOST:
        most, other = bound(a), bound(b)
    if most * other > MOST:
        a, b = _wide(a), _wide(b)
    return a * b, most * other


def floor(above: Whole, below: Whole) -> Whole:
    """The quotient, rounded down; `below` is positive."""
    if is_1(below):
        return above
    if isinstance(below, int) and not isinstance(above, int) and below > MOST:
        above = above.astype(object)
    found = above // below
    if isinstance(found, int) or found.dtype != object or bound(found) > MOST:
        return found
    return found.astype(np.int64)
