"""Records of an engine's run: step durations, gaps between tokens, and samples of its state."""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Float, Int

STEP_AND_GAPS, GAPS, STEP = 0.0, 1.0, 2.0
"""Kinds of rows: a step that is also the gap of all its requests, gaps that are longer than a step
(of skipped or preempted requests), and a step whose gaps, if any, have rows of their own."""


class StepLog:
    """Steps of an engine and gaps between tokens, as series of linearly growing durations.

    A row has seconds of the first and the last step of a series, steps, requests, and its kind.
    """

    def __init__(self) -> None:
        """Empty log; `add` appends a row."""
        self._rows = array("d")
        self.add = self._rows.extend

    def end(self, seconds: float) -> LogPosition:
        """Current end of the log; `seconds`: the end of its last step."""
        return LogPosition(seconds, len(self._rows) // 5)

    def gaps(self, span: LogSpan | None = None) -> Float:
        """All gaps between tokens: rows (first, last, steps, requests)."""
        return self._without(STEP, span)

    def steps(self, span: LogSpan | None = None) -> Float:
        """All steps: rows (first, last, steps, decoding requests)."""
        return self._without(GAPS, span)

    def _without(self, kind: float, span: LogSpan | None) -> Float:
        rows = np.frombuffer(self._rows).reshape(-1, 5)
        if span is not None:
            rows = rows[span[0].rows : span[1].rows]
        return rows[rows[:, 4] != kind, :4]


class LogPosition(NamedTuple):
    """Moment of an engine's run, and the rows of its log up to there."""

    seconds: float
    rows: int


LogSpan = tuple[LogPosition, LogPosition]
"""First and last position of a part of a log."""


class EngineSamples(NamedTuple):
    """State of an engine at equidistant times."""

    seconds: array[float]
    waiting: array[int]
    running: array[int]
    blocks: array[int]
    """KV blocks that requests hold."""
    logged: list[LogPosition]
    """End of the engine's log: of the last step that was over."""

    @classmethod
    def none(cls) -> EngineSamples:
        """Create empty samples."""
        return cls(array("d"), array("i"), array("i"), array("i"), [])

    def every_second(self) -> EngineSamples:
        """Every second sample."""
        seconds, waiting, running, blocks, logged = self
        return EngineSamples(
            seconds[1::2], waiting[1::2], running[1::2], blocks[1::2], logged[1::2]
        )

    def log_span(self, begins: float, ends: float, end: LogPosition) -> LogSpan:
        """Part of the log between two times, as exact as the samples are close.

        `end` is that of the whole log.
        """
        first = bisect_right(self.seconds, begins)
        last = bisect_left(self.seconds, ends)
        return (
            self.logged[first - 1] if first else LogPosition(0.0, 0),
            self.logged[last] if last < len(self.seconds) else end,
        )


MAX_SAMPLES = 1 << 16
"""Samples of an engine; in longer runs they are farther apart."""

# ---- quantiles of gaps ---------------------------------------------------------------------------

CHUNK = 1 << 18
"""Steps that are written out at a time."""
SHIFT = 37
"""Bits of a float that a histogram bin leaves out: 32,768 bins from x to 2 x."""


def gap_quantiles(rows: Float, shares: Sequence[float]) -> list[float]:
    """Smallest gaps that some shares of all gaps do not exceed, within 1.5e-5.

    `rows` are series. A histogram counts the gaps of all requests; its bins are floats without
    their last `SHIFT` bits, whose order is that of the floats.
    """
    ends = np.maximum([rows[:, :2].min(), rows[:, :2].max()], 0.0)
    lowest, highest = _bins(ends).tolist()
    histogram = np.zeros(highest - lowest + 1)
    for seconds, requests in _durations(rows):
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


def _durations(rows: Float) -> Iterator[tuple[Float, Float]]:
    """Durations of all steps of some series, and their requests, in chunks."""
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
