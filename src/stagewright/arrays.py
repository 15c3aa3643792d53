"""Types of the numpy arrays that programs, timings and traces are made of."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int64]
"""Rows, ranks, sizes in bytes."""
Bool = NDArray[np.bool_]
"""Which rows or ranks are meant."""
Float = NDArray[np.float64]
"""Seconds, shares."""

_Whole = TypeVar("_Whole", bound=np.integer[Any])

_ODD = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so that to multiply by it loses nothing: 2**64 over the golden ratio, as Fibonacci hashing
takes it (Knuth, The Art of Computer Programming, volume 3, section 6.4)."""

_KEYS_OF_A_ROW = 16
"""Combinations of values, for each row, that are looked up in a table rather than sorted."""


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


def is_any(column: NDArray[np.integer[Any]], values: Sequence[int]) -> Bool:
    """As `numpy.isin`, for a few values: one comparison each, and nothing is sorted.

    >>> is_any(np.array([3, 1, 2]), [1, 3]).tolist()
    [True, True, False]
    """
    found = np.zeros(len(column), dtype=bool)
    for value in values:
        found |= column == value
    return found


def offsets(counts: Sequence[int] | NDArray[np.integer[Any]]) -> Int:
    """CSR pointer of runs of items: where each run begins, and where the last one ends.

    >>> offsets([2, 0, 3]).tolist()
    [0, 2, 2, 5]
    """
    pointer = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=pointer[1:])
    return pointer


def entries_of(pointer: Int, rows: Int) -> tuple[Int, Int]:
    """Entries of some rows of a CSR table: of each, the index into `rows`, and the entry.

    >>> owner, entry = entries_of(np.array([0, 2, 2, 5]), np.array([2, 0]))
    >>> owner.tolist(), entry.tolist()
    ([0, 0, 0, 1, 1], [2, 3, 4, 0, 1])
    """
    counts = np.diff(pointer)[rows]
    owner = np.repeat(np.arange(len(rows)), counts)
    return owner, np.arange(len(owner)) + (pointer[rows] - offsets(counts)[:-1])[owner]


def latest(times: Sequence[Float]) -> Float:
    """The latest of some moments, of which there is one: seconds of any shape."""
    return reduce(np.maximum, times)


def sorted_values(column: NDArray[_Whole]) -> NDArray[_Whole]:
    """The values of a column of integers, in order.

    As `numpy.unique`, in a third to a tenth of the time: numpy 2.3 and later hash before they sort.

    >>> sorted_values(np.array([5, 2, 5])).tolist()
    [2, 5]
    """
    values = np.sort(column)
    first = np.ones(len(values), dtype=bool)
    np.not_equal(values[1:], values[:-1], out=first[1:])
    return values[first]


def distinct_values(column: NDArray[np.integer[Any]]) -> list[int]:
    """The values of a column of integers, in order, as Python numbers.

    >>> distinct_values(np.array([5, 2, 5]))
    [2, 5]
    """
    return sorted_values(column).tolist()


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
    values = sorted_values(mixed)
    of = np.searchsorted(values, mixed)
    first = np.empty(len(values), dtype=np.int64)
    first[of[::-1]] = np.arange(len(mixed))[::-1]
    if all(np.array_equal(column[first][of], column) for column in bits):
        return first, of
    _, first, of = np.unique(np.stack(bits), axis=1, return_index=True, return_inverse=True)
    return first, of.ravel()


def distinct_numbers(columns: Sequence[NDArray[Any]], count: int) -> tuple[Int, Int]:
    """As `distinct_rows`, of `count` rows of whole numbers from 0 on, or of truth values.

    Sets are numbered in the order of their rows, of which the first columns count most.

    >>> first, of = distinct_numbers([np.array([3, 1, 3]), np.array([True, True, False])], 3)
    >>> first.tolist(), of.tolist()
    ([1, 2, 0], [2, 0, 1])
    """
    keys, most = np.zeros(count, dtype=np.int64), 1
    for column in columns:
        values = int(column.max(initial=0)) + 1
        if values == 1:
            continue
        if most * values >= 1 << 62:  # more tuples than rows: number those that occur
            keys = np.unique(keys, return_inverse=True)[1].astype(np.int64)
            most = int(keys.max(initial=0)) + 1
        keys = keys * values + column
        most *= values
    if most > _KEYS_OF_A_ROW * count:
        _, first, of = np.unique(keys, return_index=True, return_inverse=True)
        return first.astype(np.int64), of.astype(np.int64)
    first = np.full(most, -1, dtype=np.int64)
    first[keys[::-1]] = np.arange(count - 1, -1, -1)
    present = np.flatnonzero(first >= 0)
    number = np.zeros(most, dtype=np.int64)
    number[present] = np.arange(len(present))
    return first[present], number[keys]
