"""What kernels of a served step take that depend on more than its number of tokens.

Attention depends on new tokens, on pairs of a query and a key, and on the places of the cache that
are read: apart from its launch it takes twice as long for twice as much of all three. So a surface
over two ratios says it all; it is made of exact values, and interpolated in logarithms. Layers with
a state depend on tokens and requests, expanded latents on keys.

All functions take and return plain floats: they run in an event loop.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from math import log2
from typing import Protocol

import numpy as np

from stagewright.arrays import Float, Int
from stagewright.time.roofline import DecodingBesidePrompts

PER_OCTAVE = 8
"""Points of a surface for a doubling of a ratio."""
PAIRS = (-4, 15)
"""Octaves of pairs over places of the cache."""
TOKENS = (-20, 1)
"""Octaves of new tokens over places of the cache."""
PLACES = 1 << 20
"""Places of the cache for which surfaces are computed, so that whole numbers are fine enough."""


class Term(Protocol):
    """Seconds of one kernel, or of some that run as often."""

    @property
    def least(self) -> float:
        """Seconds that it takes at least."""
        ...

    def __call__(self, tokens: float, requests: float, pairs: float, keys: float) -> float:
        """Seconds for the sums of a batch."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """Attention of one reach, by pairs and tokens over places of the cache."""

    least: float
    table: list[list[float]]
    """log2 of seconds without the launch over places, by octaves of `PAIRS` and `TOKENS`."""
    partly: float
    """Places of a request's last block that hold nothing, in the mean."""
    beside: DecodingBesidePrompts | None = None
    """How requests that decode are computed in one kernel with prompts; None: as alone."""

    @classmethod
    def of(cls, seconds: Callable[[Int, Int, Int], Float], partly: float) -> Attention:
        """From the seconds of tokens, pairs and keys: arrays in, array out."""
        small = np.array([1, 2], dtype=np.int64)
        one, two = seconds(64 * small, 65536 * small, 65536 * small).tolist()
        least = max(2 * one - two, 0.0)
        u, v = (
            np.arange(a * PER_OCTAVE, b * PER_OCTAVE + 1) / PER_OCTAVE for a, b in (PAIRS, TOKENS)
        )
        pairs = np.rint(np.exp2(np.repeat(u, len(v))) * PLACES).astype(np.int64)
        tokens = np.maximum(np.rint(np.exp2(np.tile(v, len(u))) * PLACES), 1).astype(np.int64)
        found = seconds(tokens, pairs, np.full(len(pairs), PLACES)) - least
        logs = np.log2(np.maximum(found, 1e-30) / PLACES)
        return cls(least, logs.reshape(len(u), len(v)).tolist(), partly)

    def __call__(self, tokens: float, requests: float, pairs: float, keys: float) -> float:
        """Seconds for the sums of a batch."""
        places = keys + requests * self.partly
        x = (log2(pairs / places) - PAIRS[0]) * PER_OCTAVE
        y = (log2(tokens / places) - TOKENS[0]) * PER_OCTAVE
        i, j = int(x), int(y)
        if not 0 <= i < ROWS:
            i = 0 if i < 0 else ROWS - 1
        if not 0 <= j < COLUMNS:
            j = 0 if j < 0 else COLUMNS - 1
        row, after = self.table[i], self.table[i + 1]
        y -= j
        low, high = row[j], after[j]
        low += y * (row[j + 1] - low)
        high += y * (after[j + 1] - high)
        return self.least + places * 2.0 ** (low + (x - i) * (high - low))


ROWS = (PAIRS[1] - PAIRS[0]) * PER_OCTAVE
COLUMNS = (TOKENS[1] - TOKENS[0]) * PER_OCTAVE


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """Kernels of layers with a state, by tokens over requests."""

    least: float
    ratios: list[float]
    seconds: list[float]
    """Without the launch, of one request."""

    @classmethod
    def of(cls, seconds: Callable[[Int, Int], Float], most: int) -> State:
        """From the seconds of tokens and requests: arrays in, array out."""
        many = 256
        ratios = np.unique(np.rint(np.exp2(np.arange(0, 8 * log2(most) + 1) / 8)).astype(np.int64))
        one, two = seconds(np.array([many, 2 * many]), np.array([many, 2 * many])).tolist()
        least = max(2 * one - two, 0.0)
        found = (seconds(ratios * many, np.full(len(ratios), many)) - least) / many
        return cls(least, ratios.astype(float).tolist(), found.tolist())

    def __call__(self, tokens: float, requests: float, pairs: float, keys: float) -> float:
        """Seconds for the sums of a batch."""
        return self.least + requests * _between(self.ratios, self.seconds, tokens / requests)


@dataclass(frozen=True, slots=True, eq=False)
class OverKeys:
    """Kernels that depend on the keys that are read, and on nothing else."""

    least: float
    keys: list[float]
    seconds: list[float]

    def __call__(self, tokens: float, requests: float, pairs: float, keys: float) -> float:
        """Seconds for the sums of a batch."""
        return _between(self.keys, self.seconds, keys)


def _between(at: list[float], values: list[float], x: float) -> float:
    """The value at `x` between points; beyond the last ones it goes on as between these."""
    n = bisect_right(at, x, 1, len(at) - 1)
    low, high = at[n - 1], at[n]
    return values[n - 1] + (x - low) * (values[n] - values[n - 1]) / (high - low)
