"""Candidates that may be among the best, evaluated; those that cannot are bounded out.

Seconds and bytes that candidates take at least (`explore.bounding`) cost little. The candidates
with the lowest bounds are evaluated first; then those whose bounds are not above the best so far.
What is left cannot be among the best in columns, and the answer is the one of evaluating all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Bool, Float, Int
from stagewright.explore.answer.bounds import lower_bounds
from stagewright.explore.bounding.bounds import bounds
from stagewright.explore.candidates import Candidates
from stagewright.explore.evaluate import Evaluated, LeftOut
from stagewright.explore.exact import unknown
from stagewright.explore.figures import Figures
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


class Bounded(NamedTuple):
    """Candidates that cannot be among the best."""

    reason: str
    per_token: Float
    """Seconds that they take at least, over their tokens (`step_tokens`)."""


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
    tokens = step_tokens(rows)
    least = bounds(rows)
    seconds = np.maximum(least.seconds, lower_bounds(rows))
    fits = any_memory | (least.bytes <= MARGIN * least.device_memory)
    known = _EvaluatedSoFar(rows, evaluate)
    per_token = seconds / tokens
    for limit in _limits(known, per_token, tokens, fits, best, any_memory=any_memory):
        known.add(np.flatnonzero(fits & ~known.done & (per_token <= limit)))
    if known.stopped:
        known.leave(np.flatnonzero(~known.done))
    kept = np.flatnonzero(known.done)
    reasons = (SLOWER, fits), (TOO_LARGE, ~fits)
    rest = [Bounded(why, per_token[~known.done & of]) for why, of in reasons]
    bounded = [of for of in rest if len(of.per_token)]
    return Promising(kept, known.evaluated(), seconds[kept], bounded)


def step_tokens(rows: Candidates) -> Float:
    """Tokens of a training step, up to a factor that all have in common; 1 in inference."""
    if rows.base.run.mode != "train":
        return np.ones(len(rows))
    lengths = rows.numbers("seq_length")
    return (rows.numbers("global_batch_size") * np.maximum(lengths, 1)).astype(np.float64)


def _limits(
    known: _EvaluatedSoFar,
    per_token: Float,
    tokens: Float,
    fits: Bool,
    best: int,
    *,
    any_memory: bool,
) -> Iterator[float]:
    """Bounds up to which candidates are evaluated, one after another, until the best are known."""
    order = np.sort(per_token[fits])
    if not len(order):
        return
    wanted = min(best, len(order) - 1)
    limit, further = _AHEAD * float(order[wanted]), _FURTHER
    while True:
        yield limit
        if known.stopped:
            return
        seen = known.times(any_memory=any_memory) / tokens[known.rows_done]
        seen = np.sort(seen[~np.isnan(seen)])
        worst = float(seen[best]) if len(seen) > best else np.inf
        rest = per_token[fits & ~known.done]
        rest = rest[rest <= worst]
        if not len(rest):
            return
        # The best of few may be far from the best of all: a step further may show better ones.
        limit = min(worst, max(further * limit, float(rest.min())))
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
        return np.concatenate([np.where(fit, of.seconds, np.nan) for of, fit in pairs])

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
