"""Types of the numpy arrays that programs, timings and traces consist of, and what numpy lacks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int64]
"""Rows, ranks, sizes in bytes."""
Bool = NDArray[np.bool_]
"""Masks of rows or ranks."""
Float = NDArray[np.float64]
"""Seconds, shares."""

_Integer = TypeVar("_Integer", bound=np.integer[Any])

_KEYS_OF_A_ROW = 16
"""Combinations of values, for each row, that are looked up in a table rather than sorted."""


def exact_sum(column: Int) -> int:
    """The exact sum of a column, also where it exceeds 64 bits.

    >>> exact_sum(np.array([2**62, 2**62, 2**62, 1]))
    13835058055282163713
    """
    low = np.int64(2**31 - 1)
    return (int((column >> 31).sum()) << 31) + int((column & low).sum())


def compressed_pairs(tokens: Any, ratio: int, top: int = 0) -> Any:
    """Pairs of a query and a compressed key; `ratio` positions share a compressed key.

    `tokens`: number of queries, an integer or an array of integers. A query sees the compressed
    keys of complete groups of positions up to its own; with `top`, at most that many.

    >>> compressed_pairs(9, 4), compressed_pairs(9, 4, 1), compressed_pairs(12, 4)
    (8, 6, 15)
    """
    rising = np.minimum(tokens, ratio * (top + 1) - 1) if top else tokens
    keys = rising // ratio
    pairs = ratio * (keys * (keys - 1) // 2) + keys * (rising - ratio * keys + 1)
    pairs = pairs + (tokens - rising) * top
    return int(pairs) if isinstance(tokens, int) else pairs


def is_any(column: NDArray[np.integer[Any]], values: Sequence[int]) -> Bool:
    """Like `numpy.isin`, for a few values: one comparison each, and nothing is sorted.

    >>> is_any(np.array([3, 1, 2]), [1, 3]).tolist()
    [True, True, False]
    """
    mask = np.zeros(len(column), dtype=bool)
    for value in values:
        mask |= column == value
    return mask


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
    """Latest of one or more times: seconds of any shape."""
    return reduce(np.maximum, times)


def sorted_values(column: NDArray[_Integer]) -> NDArray[_Integer]:
    """Distinct values of a column of integers, in order.

    Like `numpy.unique`, in a third to a tenth of the time: numpy 2.3 and later hash before they
    sort.

    >>> sorted_values(np.array([5, 2, 5])).tolist()
    [2, 5]
    """
    values = np.sort(column)
    first = np.ones(len(values), dtype=bool)
    np.not_equal(values[1:], values[:-1], out=first[1:])
    return values[first]


def distinct_values(column: NDArray[np.integer[Any]]) -> list[int]:
    """Distinct values of a column of integers, in order, as Python numbers.

    >>> distinct_values(np.array([5, 2, 5]))
    [2, 5]
    """
    return sorted_values(column).tolist()


def distinct_rows(columns: Sequence[NDArray[Any]]) -> tuple[Int, Int]:
    """First of each set of equal rows of columns side by side, and each row's set.

    Columns are of integers, truth values or floats.

    >>> first, number = distinct_rows([np.array([3, 1, 3]), np.array([0.5, 2.0, 0.5])])
    >>> sorted(first.tolist()), bool(number[0] == number[2] != number[1])
    ([0, 1], True)
    """
    codes = [np.unique(column, return_inverse=True)[1] for column in columns]
    return distinct_numbers(codes, len(codes[0]))


def distinct_numbers(columns: Sequence[NDArray[Any]], count: int) -> tuple[Int, Int]:
    """Like `distinct_rows`, for `count` rows of integers from 0 on, or of truth values.

    Sets are numbered in the order of their rows, compared column by column.

    >>> first, number = distinct_numbers([np.array([3, 1, 3]), np.array([True, True, False])], 3)
    >>> first.tolist(), number.tolist()
    ([1, 2, 0], [2, 0, 1])
    """
    keys, limit = np.zeros(count, dtype=np.int64), 1
    for column in columns:
        size = int(column.max(initial=0)) + 1
        if size == 1:
            continue
        if limit * size >= 1 << 62:  # more tuples than rows: number those that occur
            keys = np.unique(keys, return_inverse=True)[1].astype(np.int64)
            limit = int(keys.max(initial=0)) + 1
        keys = keys * size + column
        limit *= size
    if limit > _KEYS_OF_A_ROW * count:
        _, first, number = np.unique(keys, return_index=True, return_inverse=True)
        return first.astype(np.int64), number.astype(np.int64)
    first = np.full(limit, -1, dtype=np.int64)
    first[keys[::-1]] = np.arange(count - 1, -1, -1)
    present = np.flatnonzero(first >= 0)
    number = np.zeros(limit, dtype=np.int64)
    number[present] = np.arange(len(present))
    return first[present], number[keys]
