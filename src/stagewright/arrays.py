"""Types of the numpy arrays that programs, timings and traces are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int64]
"""Rows, ranks, sizes in bytes."""
Bool = NDArray[np.bool_]
"""Which rows or ranks are meant."""
Float = NDArray[np.float64]
"""Seconds, shares."""

_ODD = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so that to multiply by it loses nothing: 2**64 over the golden ratio, as Fibonacci hashing
takes it (Knuth, The Art of Computer Programming, volume 3, section 6.4)."""


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


def distinct_rows(columns: Sequence[NDArray[Any]]) -> tuple[Int, Int]:
    """Of columns side by side, the first of each set of equal rows, and each row's set.

    Sets are numbered in any order. A row is known by one number that mixes its values, which costs
    far less than to sort whole rows; should two that differ have one number, rows are sorted.
    Columns are of integers, truth values or floats; 0.0 and -0.0 differ.

    >>> first, of = distinct_rows([np.array([3, 1, 3]), np.array([0.5, 2.0, 0.5])])
    >>> sorted(first.tolist()), bool(of[0] == of[2] != of[1])
    ([0, 1], True)
    """
    bits = [
        c.astype(np.float64).view(np.int64) if c.dtype.kind == "f" else c.astype(np.int64)
        for c in columns
    ]
    mixed = np.zeros(len(bits[0]), dtype=np.uint64)
    for column in bits:
        mixed = (mixed ^ column.view(np.uint64)) * _ODD
        mixed ^= mixed >> np.uint64(29)
    values = np.unique(mixed)
    of = np.searchsorted(values, mixed)
    first = np.empty(len(values), dtype=np.int64)
    first[of[::-1]] = np.arange(len(mixed))[::-1]
    if all(np.array_equal(column[first][of], column) for column in bits):
        return first, of
    _, first, of = np.unique(np.stack(bits), axis=1, return_index=True, return_inverse=True)
    return first, of.ravel()


def distinct_columns(table: Float) -> tuple[Int, Int]:
    """Of a table [rows, columns], the first of each set of equal columns, and each column's set.

    Sets have an order that only their columns decide, not where these stand.

    >>> first, of = distinct_columns(np.array([[3.0, 1.0, 3.0], [0.5, 2.0, 0.5]]))
    >>> sorted(first.tolist()), bool(of[0] == of[2] != of[1])
    ([0, 1], True)
    """
    bits = np.ascontiguousarray(table, dtype=np.float64).view(np.uint64)
    bits = bits ^ (bits >> np.uint64(32))  # whole numbers have their bits at one end
    with np.errstate(over="ignore"):
        odd = np.cumprod(np.full(len(bits), _ODD)) if len(bits) else np.zeros(0, dtype=np.uint64)
        mixed = (bits * odd[:, None]).sum(axis=0, dtype=np.uint64)
    _, first, of = np.unique(mixed, return_index=True, return_inverse=True)
    if np.array_equal(table[:, first][:, of], table):
        return first, of
    _, first, of = np.unique(table, axis=1, return_index=True, return_inverse=True)
    return first, of.ravel()
