"""Records of an engine's run: step durations, gaps between tokens, and samples of its state."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Float, Int


class StepLog:
    """Steps of an engine and gaps between tokens, as series of linearly growing durations.

    A series has four numbers: seconds of its first and last step, steps, and requests.
    """

    def __init__(self) -> None:
        """Empty log; `add(series)`, `add_gap(series)` and `add_step(series)` append."""
        self._steps = array("d")  # steps that are the gaps of all their requests
        self._gaps = array("d")  # gaps longer than a step: of skipped or preempted requests
        self._prefill_steps = array("d")  # steps that are no gaps
        self.add, self.add_gap = self._steps.extend, self._gaps.extend
        self.add_step = self._prefill_steps.extend

    def gap_parts(self) -> list[Float]:
        """All gaps between tokens, as two arrays of rows (first, last, steps, requests)."""
        return [_rows(self._steps), _rows(self._gaps)]

    def gaps(self) -> Float:
        """All gaps between tokens: rows (first, last, steps, requests)."""
        return np.concatenate(self.gap_parts())

    def steps(self) -> Float:
        """All steps: rows (first, last, steps, decoding requests)."""
        return np.concatenate([_rows(self._steps), _rows(self._prefill_steps)])


def _rows(numbers: array[float]) -> Float:
    return np.frombuffer(numbers).reshape(-1, 4)


class EngineSamples(NamedTuple):
    """State of an engine at equidistant times."""

    seconds: array[float]
    waiting: array[int]
    running: array[int]
    blocks: array[int]
    """KV blocks that requests hold."""

    @classmethod
    def none(cls) -> EngineSamples:
        """Create empty samples."""
        return cls(array("d"), array("i"), array("i"), array("i"))

    def halved(self) -> EngineSamples:
        """Every second sample."""
        seconds, waiting, running, blocks = self
        return EngineSamples(seconds[1::2], waiting[1::2], running[1::2], blocks[1::2])


MAX_SAMPLES = 1 << 16
"""Samples of an engine; in longer runs they are farther apart."""

# ---- quantiles of gaps ---------------------------------------------------------------------------

CHUNK = 1 << 18
"""Steps that are written out at a time."""
SHIFT = 37
"""Bits of a float that a histogram bin leaves out: 32,768 bins from x to 2 x."""


def gap_quantiles(parts: Sequence[Float], shares: Sequence[float]) -> list[float]:
    """Smallest gaps that some shares of all gaps do not exceed, within 1.5e-5.

    `parts` are series. A histogram counts the gaps of all requests; its bins are floats without
    their last `SHIFT` bits, whose order is that of the floats.
    """
    lows = [max(float(rows[:, :2].min()), 0.0) for rows in parts]
    highs = [max(float(rows[:, :2].max()), 0.0) for rows in parts]
    lowest, highest = _bins(np.array([min(lows), max(highs)])).tolist()
    histogram = np.zeros(highest - lowest + 1)
    for seconds, requests in _written_out(parts):
        bins = np.clip(_bins(seconds), lowest, highest) - lowest
        histogram += np.bincount(bins, requests, len(histogram))
    below: Float = np.cumsum(histogram)
    targets = [share * float(below[-1]) * (1 - 1e-12) for share in shares]
    chosen = [lowest + int(np.searchsorted(below, target)) for target in targets]
    return [(_edge(index) + _edge(index + 1)) / 2 for index in chosen]


def _edge(index: int) -> float:
    """Smallest duration of a bin."""
    (seconds,) = struct.unpack("d", struct.pack("q", index << SHIFT))
    return seconds


def _bins(seconds: Float) -> Int:
    """Histogram bins of durations, in their order."""
    return seconds.view(np.int64) >> SHIFT


def _written_out(parts: Sequence[Float]) -> Iterator[tuple[Float, Float]]:
    """Durations of all steps of some series, and their requests, in chunks."""
    for rows in parts:
        ends, begin = np.cumsum(rows[:, 2]), 0
        while begin < len(rows):
            before = ends[begin - 1] if begin else 0.0
            end = max(begin + 1, int(np.searchsorted(ends, before + CHUNK, side="right")))
            first, last, steps, requests = rows[begin:end].T
            counts = steps.astype(np.int64)
            growth = (last - first) / np.maximum(steps - 1, 1)
            # Index of each step in its series: a running count, less its value at the begin.
            index = np.arange(float(counts.sum())) - np.repeat(np.cumsum(steps) - steps, counts)
            seconds = np.repeat(first, counts) + np.repeat(growth, counts) * index
            yield np.maximum(seconds, 0.0), np.repeat(requests, counts)
            begin = end
