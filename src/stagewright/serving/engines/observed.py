"""What an engine notes as it goes: times between tokens, and its state at moments."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from struct import Struct
from typing import Any, NamedTuple

import numpy as np

from stagewright.arrays import Float

pack_series = Struct("4d").pack
"""The four numbers of a series as bytes, as `Gaps.add_packed` takes them."""


class Gaps:
    """Times between tokens, and seconds of steps, as series: steps whose length grows linearly.

    A series is four numbers: seconds of the first step and of the last, steps, requests.
    """

    __slots__ = (
        *("add", "add_late", "add_packed", "add_step"),
        *("late", "numbers", "single"),
    )

    def __init__(self) -> None:
        """Nothing yet."""
        self.numbers = array("d")
        """Steps between whose tokens nothing else passes: gaps of all their requests."""
        self.late = array("d")
        """Gaps that no single step fills: those of requests that were put off or preempted."""
        self.single = array("d")
        """Steps behind which gaps are late, and steps in which no request gets a further token."""
        self.add, self.add_late = self.numbers.extend, self.late.extend
        self.add_step = self.single.extend
        """Each adds a series: `add((first, last, steps, requests))`."""
        self.add_packed = self.numbers.frombytes
        """The same for a series as bytes, in half the time: `add_packed(pack_series(...))`."""

    def add_alone(self, seconds: Sequence[float]) -> None:
        """Add steps in which no request gets a further token; many at once are much faster."""
        if len(seconds) < 16:
            for each in seconds:
                self.add_step((each, each, 1, 0))
            return
        rows = np.ones((len(seconds), 4))
        rows[:, 0] = rows[:, 1] = seconds
        rows[:, 3] = 0
        self.single.frombytes(rows.tobytes())

    @property
    def parts(self) -> list[Float]:
        """All times between tokens, in parts: rows (first, last, steps, requests)."""
        return [_rows(self.numbers), _rows(self.late)]

    def series(self) -> Float:
        """All times between tokens: rows (first, last, steps, requests)."""
        return np.concatenate(self.parts)

    def steps(self) -> Float:
        """All steps: rows (first, last, steps, requests that get a further token)."""
        return np.concatenate([_rows(self.numbers), _rows(self.single)])


def _rows(numbers: array[float]) -> Float:
    return np.frombuffer(numbers).reshape(-1, 4)


class EngineSamples(NamedTuple):
    """The state of an engine at moments that lie equally far apart."""

    seconds: array[float]
    waiting: array[int]
    running: array[int]
    blocks: array[int]
    """Blocks that requests hold."""

    @classmethod
    def none(cls) -> EngineSamples:
        """Nothing yet."""
        return cls(array("d"), array("i"), array("i"), array("i"))

    def halved(self) -> EngineSamples:
        """Every other moment: the second, the fourth and so on."""
        seconds, waiting, running, blocks = self
        return EngineSamples(seconds[1::2], waiting[1::2], running[1::2], blocks[1::2])


MOST_SAMPLES = 1 << 16
"""Moments at which the state of an engine is noted; in longer runs they lie farther apart."""
MANY = 50_000
"""Rows of an array of series that are looked at together: more would need memory."""
FEW = 10_000
"""Rows below which arrays of series are put together: fewer calls, and no large copy."""


def gaps_upto(seconds: float, rows: Float) -> float:
    """How many times between tokens, of series as rows, are at most so long."""
    first, last, steps, requests = rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3]
    low, high = np.minimum(first, last), np.maximum(first, last)
    by = (high - low) / np.maximum(steps - 1, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        count = np.floor((seconds - low) / by) + 1
    count = np.where(high <= seconds, steps, np.where(low > seconds, 0, count))
    return float((count * requests).sum())


Mask = np.ndarray[Any, np.dtype[np.bool_]]

SHIFT = 44
"""Bits of a number's fraction that a bin of `_bins` leaves out: 256 bins from x to 2 x."""


def _bins(values: Float) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Numbers of bins in which times lie, in their order; what is below 0 counts as 0."""
    return np.maximum(values, 0.0).view(np.int64) >> SHIFT


def _upto_bins(parts: Sequence[Float], first: int, count: int) -> tuple[Float, Float]:
    """Of each bin, how many times surely lie before it, and how many may lie up to its end."""
    ended, begun = np.zeros(count + 1), np.zeros(count)
    for rows in parts:
        low = _bins(np.minimum(rows[:, 0], rows[:, 1])) - first
        high = _bins(np.maximum(rows[:, 0], rows[:, 1])) - first
        weights = rows[:, 2] * rows[:, 3]
        begun += np.bincount(low, weights, count)
        ended[1:] += np.bincount(high, weights, count)
    return np.cumsum(ended[:-1]), np.cumsum(begun)


def gaps_quantiles(parts: Sequence[Float], shares: Sequence[float]) -> list[float]:
    """The least times between tokens that such shares of them do not exceed, of series as rows.

    A search halves the range of times, where bins leave open which half the time lies in; it
    looks only at series that cross the range.
    """
    parts = [rows[at : at + MANY] for rows in parts for at in range(0, len(rows), MANY)]
    total = sum(float(rows[:, 2] @ rows[:, 3]) for rows in parts)
    smallest = min(float(rows[:, :2].min()) for rows in parts)
    largest = max(float(rows[:, :2].max()) for rows in parts)
    first, last = _bins(np.array([smallest, largest])).tolist()
    surely, perhaps = _upto_bins(parts, first, last - first + 1)

    def quantile(share: float) -> float:
        wanted = share * total
        # Bins before `low` are too early, those behind `high` are not.
        low = int(np.searchsorted(perhaps, wanted))
        high = int(np.searchsorted(surely, wanted)) - 1
        below, crossing = 0.0, list[Float]()
        for rows in parts:
            one, other = (_bins(column) - first for column in (rows[:, 0], rows[:, 1]))
            under, over = (one < low) & (other < low), (one > high) & (other > high)
            below += _keep_crossing(rows, under, over, crossing)
        least, most = smallest, largest
        while most - least > 1e-9 * most:
            middle = (least + most) / 2
            nth = _bins(np.array([middle])).item() - first
            if nth < low:
                least = middle
                continue
            if nth > high:
                most = middle
                continue
            if below + sum(gaps_upto(middle, rows) for rows in crossing) >= wanted:
                most = middle
            else:
                least = middle
            left: list[Float] = []
            for rows in crossing:
                under = (rows[:, 0] <= least) & (rows[:, 1] <= least)
                over = (rows[:, 0] > most) & (rows[:, 1] > most)
                below += _keep_crossing(rows, under, over, left)
            crossing = left
        return most

    return [*map(quantile, shares)]


def _keep_crossing(rows: Float, under: Mask, over: Mask, kept: list[Float]) -> float:
    """Keep the series that lie neither under nor over some range, and count the times under it.

    All are kept, and none is counted, where a copy is not worth it; small ones are put together.
    """
    cross = ~(under | over)
    count = np.count_nonzero(cross)
    if 8 * count > len(rows) > FEW:
        kept.append(rows)
        return 0.0
    few = rows[cross]
    if kept and len(few) + len(kept[-1]) < FEW:
        kept[-1] = np.concatenate([kept[-1], few])
    else:
        kept.append(few)
    return float(rows[under, 2] @ rows[under, 3])
