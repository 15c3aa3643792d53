"""Kernels of a serving step whose time depends on more than the number of tokens.

Attention depends on new tokens, on pairs of a query and a key, and on the places of the cache that
are read. Without its launch it takes twice as long for twice as much of all three, so that a
surface over two ratios says it all: exact values at points, interpolated in logarithms. Layers with
a state depend on tokens and requests, latents that are expanded for prompts on keys.

Terms take and return plain floats: an event loop calls them for each step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from math import log2
from typing import Protocol

import numpy as np

from stagewright.arrays import Float, Int
from stagewright.model.layers import Reach
from stagewright.time.roofline import DecodingBesidePrompts

PER_OCTAVE = 8
"""Points of a surface for a doubling of a ratio."""
PAIRS = (-4, 15)
"""Octaves of pairs over places of the cache."""
TOKENS = (-20, 1)
"""Octaves of new tokens over places of the cache."""
PLACES = 1 << 20
"""Cache positions for which surfaces are timed; so many that whole numbers are fine enough."""
ROWS = (PAIRS[1] - PAIRS[0]) * PER_OCTAVE
COLUMNS = (TOKENS[1] - TOKENS[0]) * PER_OCTAVE


class Term(Protocol):
    """Seconds of one kernel, or of several that run equally often."""

    @property
    def least(self) -> float:
        """Seconds of its launch, whatever the batch."""
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
    unfilled: float
    """Places of a request's last block that hold nothing, in the mean."""
    beside: DecodingBesidePrompts | None
    """Requests that decode, in one kernel with prompts; None: as if alone."""

    @classmethod
    def of(
        cls,
        seconds: Callable[[Int, Int, Int], Float],
        unfilled: float,
        beside: DecodingBesidePrompts | None,
    ) -> Attention:
        """Surface from the seconds of tokens, pairs and keys: arrays in, array out."""
        small = np.array([1, 2], dtype=np.int64)
        one, two = seconds(64 * small, 65536 * small, 65536 * small).tolist()
        least = max(2 * one - two, 0.0)
        u, v = (
            np.arange(a * PER_OCTAVE, b * PER_OCTAVE + 1) / PER_OCTAVE for a, b in (PAIRS, TOKENS)
        )
        pairs = np.rint(np.exp2(np.repeat(u, len(v))) * PLACES).astype(np.int64)
        tokens = np.maximum(np.rint(np.exp2(np.tile(v, len(u))) * PLACES), 1).astype(np.int64)
        each = seconds(tokens, pairs, np.full(len(pairs), PLACES)) - least
        logs = np.log2(np.maximum(each, 1e-30) / PLACES)
        return cls(least, logs.reshape(len(u), len(v)).tolist(), unfilled, beside)

    def __call__(self, tokens: float, requests: float, pairs: float, keys: float) -> float:
        """Seconds for the sums of a batch."""
        places = keys + requests * self.unfilled
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


@dataclass(frozen=True, slots=True, eq=False)
class TimedCurve:
    """Kernels that depend on one number: keys in the cache, or tokens of a request.

    The former expand latents, the latter are of layers with a state, and go with requests.
    """

    least: float
    at: list[float]
    seconds: list[float]
    """Seconds by keys; or by tokens of one request, without the launch."""
    by_requests: bool = False

    @classmethod
    def of_requests(cls, seconds: Callable[[Int, Int], Float]) -> TimedCurve:
        """Curve from the seconds of tokens and requests: arrays in, array out."""
        many = 256
        ratios = np.unique(np.rint(np.exp2(np.arange(0, 16.01, 1 / 8))).astype(np.int64))
        one, two = seconds(np.array([many, 2 * many]), np.array([many, 2 * many])).tolist()
        least = max(2 * one - two, 0.0)
        each = (seconds(ratios * many, np.full(len(ratios), many)) - least) / many
        return cls(least, ratios.astype(float).tolist(), each.tolist(), by_requests=True)

    def __call__(self, tokens: float, requests: float, pairs: float, keys: float) -> float:
        """Seconds for the sums of a batch."""
        if self.by_requests:
            return self.least + requests * _between(self.at, self.seconds, tokens / requests)
        return _between(self.at, self.seconds, keys)


def _between(at: list[float], values: list[float], x: float) -> float:
    """The value at `x` between points; beyond the last ones it goes on as between these."""
    n = bisect_right(at, x, 1, len(at) - 1)
    low, high = at[n - 1], at[n]
    return values[n - 1] + (x - low) * (values[n] - values[n - 1]) / (high - low)


def mean_sums(reach: Reach, context: float, new: float) -> tuple[float, float]:
    """Query-key pairs, and keys that any query sees, of one request.

    As `run.lengths.attention_sums`, for numbers of tokens that are means. Where a request is in its
    chunk of positions is taken to be anywhere.

    >>> mean_sums(Reach(), 10.0, 2.0), mean_sums(Reach(window=4), 10.0, 2.0)
    ((23.0, 12.0), (8.0, 5.0))
    """
    window, chunk, top, block, _ = reach
    if window:
        before = min(context, window - 1.0)
        rising = min(max(window - context, 0.0), new)
        return rising * context + rising * (rising + 1) / 2 + (new - rising) * window, before + new
    if chunk and context + new > chunk:
        before = context if context < chunk else (chunk - 1) / 2
        seen = (before + 1 + chunk) / 2 if new > chunk else before + (new + 1) / 2
        return new * min(seen, (chunk + 1) / 2 if new > chunk else chunk), before + new
    if top:
        pairs = _chosen(context + new, top, block) - _chosen(context, top, block)
        return pairs, min(context + new, pairs)
    return new * context + new * (new + 1) / 2, context + new


def _chosen(tokens: float, top: int, block: int) -> float:
    first = min(tokens, float(top))
    rest = tokens - first
    return first * (first + 1) / 2 + rest * (top - block) + rest * (block + 1) / 2
