"""Batch of an engine step, rules for its KV blocks, and runs of decode steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

UNLIMITED = 1 << 60


class StepBatch(NamedTuple):
    """Requests of an engine's next step, and for how many steps this decision holds."""

    prefill: Sequence[tuple[int, int]] = ()
    """Requests with a prefill chunk, and its number of tokens."""
    decode: bool = True
    """Decoding requests get a token."""
    max_steps: int = UNLIMITED
    """Without prefill: number of steps of this batch if nothing arrives or finishes."""
    interruptible: bool = True
    """An arrival could change the batch."""
    skipped: Sequence[int] = ()
    """Decoding requests that get no token in this single step."""


class CacheRules(NamedTuple):
    """Rules of when prompts take KV blocks and when others may reuse them; vLLM's by default."""

    allocate_whole_prompt: bool = False
    """An admitted request is allocated the blocks of its whole prompt at once."""
    cache_after_compute: bool = False
    """Blocks can be reused once they are computed, not when they are allocated."""
    deduplicate: bool = False
    """Copies of blocks that another request computed in the same step are freed."""


class DecodeRun(NamedTuple):
    """Run of decode steps of one batch, whose durations are an arithmetic series."""

    steps: int
    seconds: float
    """Duration of the first step."""
    growth: float
    """Seconds by which each further step is longer."""

    @property
    def duration(self) -> float:
        """Seconds of all steps."""
        return series_sum(self.seconds, self.growth, self.steps)


NO_RUN = DecodeRun(0, 0.0, 0.0)


class BatchPlan(NamedTuple):
    """Size and duration of the batch that one engine of a lockstep group runs next."""

    run: DecodeRun
    tokens: int
    """New tokens of a step."""
    requests: int


def series_sum(first: float, growth: float, steps: int) -> float:
    """Sum of an arithmetic series of `steps` terms."""
    return steps * (first + growth * (steps - 1) * 0.5)


def steps_to_reach(first: float, growth: float, total: float, limit: int) -> int:
    """Fewest terms of a series, 1 to `limit`, whose sum is at least `total`.

    >>> [steps_to_reach(2.0, 1.0, total, limit=9) for total in (5.0, 5.1, 99.0)]
    [2, 3, 9]
    """
    if growth > 0.0:
        half = first - growth * 0.5
        guess = int(2.0 * total / (half + math.sqrt(half * half + 2.0 * growth * total)))
    else:
        guess = int(total / first)
    steps = guess if 1 < guess < limit else 1 if guess < limit else limit
    growth *= 0.5
    while steps > 1 and (steps - 1) * (first + growth * (steps - 2)) >= total:
        steps -= 1
    while steps < limit and steps * (first + growth * (steps - 1)) < total:
        steps += 1
    return steps
