"""What an engine notes as it goes: times between tokens, and its state at moments."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Float


class Gaps:
    """Times between tokens, and seconds of steps, as series: steps whose length grows linearly.

    A series is four numbers: seconds of the first step and of the last, steps, requests.
    """

    __slots__ = ("add", "add_late", "add_step", "late", "numbers", "single")

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


def gaps_quantiles(parts: Sequence[Float], shares: Sequence[float]) -> list[float]:
    """The least times between tokens that such shares of them do not exceed, of series as rows.

    The search looks only at series that cross the times in question.
    """
    parts = [rows[at : at + MANY] for rows in parts for at in range(0, len(rows), MANY)]
    total = sum(float(rows[:, 2] @ rows[:, 3]) for rows in parts)
    smallest = min(float(rows[:, :2].min()) for rows in parts)
    largest = max(float(rows[:, :2].max()) for rows in parts)

    def quantile(share: float) -> float:
        least, most, below, crossing = smallest, largest, 0.0, [*parts]
        while most - least > 1e-9 * most:
            middle = (least + most) / 2
            if below + sum(gaps_upto(middle, rows) for rows in crossing) >= share * total:
                most = middle
            else:
                least = middle
            left: list[Float] = []
            for rows in crossing:
                under = (rows[:, 0] <= least) & (rows[:, 1] <= least)
                cross = ~under & ((rows[:, 0] <= most) | (rows[:, 1] <= most))
                if 8 * np.count_nonzero(cross) > len(rows):  # not worth a copy
                    left.append(rows)
                    continue
                below += float(rows[under, 2] @ rows[under, 3])
                left.append(rows[cross])
            small = [rows for rows in left if len(rows) < FEW]
            crossing = [rows for rows in left if len(rows) >= FEW]
            if small:
                crossing.append(np.concatenate(small))
        return most

    return [*map(quantile, shares)]
