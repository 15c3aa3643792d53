"""Candidates that may be among the best, evaluated; those that cannot are bounded out.

Seconds and bytes that candidates take at least (`explore.bounding`) cost little. The candidates
with the lowest bounds are evaluated first; then those whose bounds are not above the best so far.
Rough bounds are refined where they are not above it, before anything is evaluated for them. What
is left cannot be among the best in columns, and the answer is the one of evaluating all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np

from stagewright.arrays import Bool, Float, Int
from stagewright.explore.bounding.bounds import CandidateBounds, bounds, rough_bounds
from stagewright.explore.bounding.least_compute import least_factor, lower_bounds
from stagewright.explore.bounding.relaxed import kinds_of_relaxed
from stagewright.search.candidates import Candidates
from stagewright.explore.evaluate import Evaluated, LeftOut
from stagewright.search.simulated import unknown
from stagewright.search.figures import Figures
from stagewright.explore.lots import STOPPED

Evaluate = Callable[[Candidates], Evaluated]
"""Figures in columns, and candidates that columns cannot evaluate."""

MARGIN = 1.02
"""Memory in columns may be this much too large without a candidate being left out."""
SLOWER = "take longer than the best, by their lower bounds"
TOO_LARGE = "do not fit into memory, by their lower bounds"
FEW = 256
"""So many candidates are evaluated without bounds, which would cost as much."""
_AHEAD, _FURTHER = 1.02, 1.08
"""The best in columns are usually within so much of the lowest bounds; and how much further to look
while too few of those that were promising fit."""
_NEAR = 1.2
"""How much further bounds are refined while it is not known what is among the best."""


class Bounded(NamedTuple):
    """Candidates that cannot be among the best."""

    reason: str
    per_token: Float
    """Seconds that they take at least, over their tokens (`step_tokens`)."""
    nearest: str = ""
    """Of those that do not fit: the one that lacks least memory, and how much it holds at least."""


class Promising(NamedTuple):
    """Candidates that may be among the best, with their figures, and what is known of others."""

    candidates: Int
    """By their numbers among all, ascending."""
    evaluated: Evaluated
    """Of these."""
    bounds: Float | None
    """Seconds that each of these takes at least; None: nobody has looked."""
    bounded: Sequence[Bounded] = ()
    """All others."""


def promising(rows: Candidates, evaluate: Evaluate, best: int, *, any_memory: bool) -> Promising:
    """The `best` candidates by time per token, and all that might be among them in columns.

    `any_memory`: candidates that do not fit count, too.
    """
    if len(rows) <= FEW or rows.base.run.mode != "train":
        return Promising(np.arange(len(rows)), evaluate(rows), None)
    least = _LeastTimes.of(rows, any_memory=any_memory)
    known = _EvaluatedSoFar(rows, evaluate)
    try:
        _evaluate_best(least, known, best)
    except KeyboardInterrupt:  # between two lots
        if not known.parts:
            raise
        known.stopped = True
    if known.stopped:
        known.leave(np.flatnonzero(~known.done))
    kept = np.flatnonzero(known.done)
    reasons = (SLOWER, least.fits), (TOO_LARGE, ~least.fits)
    bounded = [
        Bounded(why, least.per_token[mine], "" if why == SLOWER else least.nearest(mine))
        for why, of in reasons
        if (mine := ~known.done & of).any()
    ]
    return Promising(kept, known.evaluated(), least.seconds[kept], bounded)


def least_seconds(rows: Candidates, *, any_memory: bool) -> tuple[Float, Bool]:
    """Seconds that each candidate takes at least in columns, and whether it may fit into memory.

    A simulated step may take less, by as much as it differs from its time in columns.
    """
    if rows.base.run.mode != "train":
        return np.zeros(len(rows)), np.ones(len(rows), dtype=bool)
    least = bounds(rows, simulated=True)
    seconds = np.maximum(least.seconds * least_factor(rows), lower_bounds(rows))
    return seconds, any_memory | _may_fit(least)


def step_tokens(rows: Candidates) -> Float:
    """Tokens of a training step, up to a factor that all have in common; 1 in inference."""
    if rows.base.run.mode != "train":
        return np.ones(len(rows))
    lengths = rows.numbers("seq_length")
    return (rows.numbers("global_batch_size") * np.maximum(lengths, 1)).astype(np.float64)


@dataclass(slots=True, eq=False)
class _LeastTimes:
    """The bounds of all candidates, as they are known so far: [candidates] each."""

    rows: Candidates
    tokens: Float
    seconds: Float
    per_token: Float
    fits: Bool
    """Whether the candidate may fit into memory, or need not."""
    rough: Bool
    bytes: Float
    any_memory: bool

    @classmethod
    def of(cls, rows: Candidates, *, any_memory: bool) -> Self:
        """Those that cost least."""
        least, tokens = rough_bounds(rows), step_tokens(rows)
        seconds = np.maximum(least.seconds, lower_bounds(rows))
        fits = any_memory | _may_fit(least)
        per_token, bytes_ = seconds / tokens, least.bytes
        return cls(rows, tokens, seconds, per_token, fits, least.rough, bytes_, any_memory)

    def lowest(self, best: int) -> float:
        """The bound per token of the candidate with `best` candidates of lower bounds before it.

        Of the last candidate, where fewer may fit.
        """
        every = self.per_token[self.fits]
        place = min(best, len(every) - 1)
        return float(np.partition(every, place)[place])

    def refine(self, some: Bool, near: float) -> None:
        """The bounds of some candidates alone, and of those up to `near` that share their graphs:
        these cost little more, and may be asked for next."""
        kind = kinds_of_relaxed(self.rows)
        alike = np.isin(kind, np.unique(kind[some])) & (self.per_token <= near)
        at = np.flatnonzero(some | (alike & self.fits & self.rough))
        least = bounds(self.rows.take(at))
        self.seconds[at] = np.maximum(least.seconds, self.seconds[at])
        self.per_token[at] = self.seconds[at] / self.tokens[at]
        self.fits[at] = self.any_memory | _may_fit(least)
        self.rough[at], self.bytes[at] = False, least.bytes

    def nearest(self, some: Bool) -> str:
        """Of some candidates, the one that lacks least memory, and how much it holds at least."""
        rows = np.flatnonzero(some)
        device = self.rows.device_memory
        row = int(rows[(self.bytes - device)[rows].argmin()])
        words = held_of_room(float(self.bytes[row]), int(device[row]))
        return f"{words} at least ({self.rows.describe(row)})"


def held_of_room(held: float, room: int) -> str:
    """The bytes that a candidate holds, of those that it may."""
    return f"{held / 1e9:.4g} GB of {room / 1e9:.4g} GB"


def _may_fit(least: CandidateBounds) -> Bool:
    return least.bytes <= MARGIN * least.device_memory


def _evaluate_best(least: _LeastTimes, known: _EvaluatedSoFar, best: int) -> None:
    """Evaluate candidates, those with the lowest bounds first, until the best are known."""
    ahead, further, worst = _AHEAD, _FURTHER, np.inf
    while least.fits.any() and not known.stopped:
        lowest = least.lowest(best)
        limit = min(worst, ahead * lowest)
        reached = least.fits & ~known.done & (least.per_token <= limit)
        if (reached & least.rough).any():
            least.refine(reached & least.rough, limit if np.isfinite(worst) else _NEAR * limit)
        elif reached.any():
            known.add(np.flatnonzero(reached))
            worst = known.worst_of(best, least.tokens, any_memory=least.any_memory)
        else:
            rest = least.per_token[least.fits & ~known.done]
            rest = rest[rest <= worst]
            if not len(rest):
                return
            # The best of few may be far from the best of all: a step further may show better ones.
            ahead = max(further * ahead, float(rest.min()) / lowest)
            further = further**2


@dataclass(slots=True, eq=False)
class _EvaluatedSoFar:
    """What has been evaluated."""

    rows: Candidates
    evaluate: Evaluate
    done: Bool = field(init=False)
    parts: list[tuple[Int, Evaluated]] = field(default_factory=list[tuple[Int, Evaluated]])
    stopped: bool = False

    def __post_init__(self) -> None:
        self.done = np.zeros(len(self.rows), dtype=bool)

    def add(self, at: Int) -> None:
        """Evaluate some more."""
        found = self.evaluate(self.rows.take(at))
        self.parts.append((at, found))
        self.done[at] = True
        self.stopped |= any(of.reason == STOPPED for of in found.left)

    @property
    def rows_done(self) -> Int:
        """The numbers of those that were evaluated, as `times` has them."""
        return np.concatenate([np.zeros(0, dtype=np.int64), *(at for at, _ in self.parts)])

    def times(self, *, any_memory: bool) -> Float:
        """Seconds of those that were evaluated; NaN where they do not fit."""
        every = [of.figures for _, of in self.parts]
        fits = [any_memory | (of.peak <= MARGIN * of.device_memory) for of in every]
        pairs = zip(every, fits, strict=True)
        return np.concatenate(
            [np.zeros(0), *(np.where(fit, of.seconds, np.nan) for of, fit in pairs)]
        )

    def worst_of(self, best: int, tokens: Float, *, any_memory: bool) -> float:
        """The time per token of the last of so many of the best; infinite while there are fewer."""
        seen = self.times(any_memory=any_memory) / tokens[self.rows_done]
        seen = np.sort(seen[~np.isnan(seen)])
        return float(seen[best]) if len(seen) > best else np.inf

    def leave(self, at: Int) -> None:
        """Ctrl-C has left out the rest."""
        none = Evaluated(unknown(len(at)), [LeftOut(np.arange(len(at)), STOPPED, True)])
        self.parts.append((at, none))
        self.done[at] = True

    def evaluated(self) -> Evaluated:
        """The figures of those that were evaluated, in the order of their numbers."""
        order = np.argsort(self.rows_done)
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        figures = [of.figures for _, of in self.parts] or [unknown(0)]
        left: list[LeftOut] = []
        begin = 0
        for at, of in self.parts:
            mine = place[begin : begin + len(at)]
            left += [each._replace(candidates=mine[each.candidates]) for each in of.left]
            begin += len(at)
        return Evaluated(Figures.concatenated(figures).take(order), left)
