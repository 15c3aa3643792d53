"""Bytes that a rank allocates and frees, by row and by copy of an action."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Bool, Int
from stagewright.program.tables import CATEGORIES, Values


class Deltas(NamedTuple):
    """Changes of the bytes in use by category, in the order of `CATEGORIES`.

    While row i runs, `start + allocated[:, : i + 1].sum(1) - freed[:, :i].sum(1)` bytes are in use.
    With the times at which rows start and end, these changes give memory over time.
    """

    start: Int  # [categories]
    allocated: Int  # [categories, rows], before the row
    freed: Int  # [categories, rows], after the row


@dataclass(frozen=True, eq=False)
class Profiles:
    """Changes of memory by row of actions, one profile after another."""

    allocated: Int
    """[categories, rows]: before the row."""
    freed: Int
    """[categories, rows]: after the row."""
    begin: Int
    """[profiles + 1]: first row of each profile."""

    def __len__(self) -> int:
        return len(self.begin) - 1

    def __getitem__(self, profile: int) -> Deltas:
        """Changes of one profile, from zero bytes."""
        rows = slice(int(self.begin[profile]), int(self.begin[profile + 1]))
        start = np.zeros(len(self.allocated), dtype=np.int64)
        return Deltas(start, self.allocated[:, rows], self.freed[:, rows])

    @cached_property
    def _before(self) -> Int:
        """Bytes before each row, counted from the first profile: [categories, rows + 1]."""
        before = np.zeros((len(self.allocated), self.allocated.shape[1] + 1), dtype=np.int64)
        np.cumsum(self.allocated - self.freed, axis=1, out=before[:, 1:])
        return before

    @cached_property
    def net(self) -> Int:
        """Bytes allocated minus bytes freed: [profiles, categories]."""
        return (self._before[:, self.begin[1:]] - self._before[:, self.begin[:-1]]).T

    @cached_property
    def peak(self) -> Int:
        """Peak of the bytes while a row runs, -1 without rows: [profiles]."""
        total = self._before.sum(axis=0)
        while_running = total[1:] + self.freed.sum(axis=0)
        peak = np.full(len(self), -1, dtype=np.int64)
        with_rows = np.flatnonzero(np.diff(self.begin))
        if len(with_rows):
            first = self.begin[with_rows]
            peak[with_rows] = np.maximum.reduceat(while_running, first) - total[first]
        return peak

    def at_peak(self, profile: int) -> Int:
        """Bytes by category during the first row of the profile that has the most."""
        start, allocated, freed = self[profile]
        in_use = (allocated - freed).cumsum(axis=1) + freed
        return in_use[:, int(np.argmax(in_use.sum(axis=0)))] if in_use.size else start


@dataclass(frozen=True, slots=True, eq=False)
class MemoryChanges:
    """Bytes that the copies of a rank's actions allocate and free."""

    start: Int
    """[categories]: in use before the first row."""
    profile: Int
    """[copies]: index into `profiles`."""
    profiles: Profiles

    def at_peak(self) -> dict[str, int]:
        """Bytes by category at the first row with the most in program order; their sum, `peak`."""
        net = self.profiles.net[self.profile]
        before = self.start + net.cumsum(axis=0) - net
        at = self.start
        if len(before):
            copy = int(np.argmax(before.sum(axis=1) + self.profiles.peak[self.profile]))
            at = before[copy] + self.profiles.at_peak(int(self.profile[copy]))
        by_category = {name: int(size) for name, size in zip(CATEGORIES, at, strict=True)}
        return by_category | {"peak": sum(by_category.values())}


def changed_bytes(values: Values, rows: int, freed_values: Int | int = 1) -> Deltas:
    """Bytes that each row of a table allocates and frees.

    `freed_values`: number of equal values that each entry stands for.
    """
    category, size = values.category[values.value].astype(np.int64), values.size[values.value]

    def per_row(row: NDArray[np.integer[Any]], size: Int, mask: Bool) -> Int:
        cell = (category * rows + row)[mask]
        sums = sum_by_index(cell, size[mask], len(CATEGORIES) * rows)
        return sums.reshape(len(CATEGORIES), rows)

    before = values.first < 0
    start = sum_by_index(category[before], size[before], len(CATEGORIES))
    allocated = per_row(values.first, size, ~before)
    return Deltas(start, allocated, per_row(values.last, size * freed_values, values.last < rows))


def sum_by_index(index: NDArray[np.integer[Any]], size: Int, length: int) -> Int:
    """Sum of the sizes with each index below `length`."""
    # Sums of bytes of one rank are exact in double precision: they are far below 2**53.
    return np.bincount(index, weights=size, minlength=length).astype(np.int64)
