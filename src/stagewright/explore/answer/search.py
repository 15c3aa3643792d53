"""The best of many candidates: evaluated, the best of these simulated, and how sure the answer is.

Candidates that may be among the best are evaluated in columns, the others are bounded out
(`promising`). The best by their figures are simulated one by one, and the answer is the best as
simulated. Where columns cannot evaluate a candidate, a lower bound of its time
(`promising.least_seconds`) says how good it could be: candidates with the lowest bounds are
simulated first, and the answer says how many are left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from stagewright.arrays import Bool, Float, Int
from stagewright.errors import UserError
from stagewright.executors import Executor
from stagewright.search import objectives
from stagewright.search.usd import with_costs
from stagewright.explore.answer.promising import (
    MARGIN,
    TOO_LARGE,
    Evaluate,
    Promising,
    least_seconds,
    promising,
    step_tokens,
)
from stagewright.explore.answer.ranking import TOP, Ranking, Wanted, best_of, nothing_found
from stagewright.explore.bounding.least_compute import lower_bounds
from stagewright.search.candidates import Candidates
from stagewright.explore.evaluate import Evaluated, LeftOut
from stagewright.search.simulated import Heard, exact, unknown
from stagewright.search.figures import Figures
from stagewright.explore.lots import STOPPED
from stagewright.garbage import seldom_collected

MOST = 200
"""Candidates that are simulated where columns say nothing of any, unless asked otherwise; where
they know others, `TOP` of those that they cannot evaluate."""
_NEAREST = 1.15
"""Memory in columns over that of a device, of candidates that may still fit where no other does:
estimates are up to 13% off (docs/search.md)."""
_ROUNDS = 5
"""How often the next best are simulated where none of the best fits into memory."""


@dataclass(slots=True)
class _SearchState:
    """What is known meanwhile."""

    rows: Candidates
    columns: Figures
    how: Wanted
    executor: Executor | None
    heard: Heard | None
    done: Bool = field(init=False)
    stopped: bool = False
    parts: list[tuple[Int, Figures]] = field(default_factory=list[tuple[Int, Figures]])
    launches: dict[int, float] = field(default_factory=dict[int, float])
    refused: dict[int, str] = field(default_factory=dict[int, str])

    def __post_init__(self) -> None:
        self.done = np.zeros(len(self.rows), dtype=bool)

    @classmethod
    def of(
        cls,
        rows: Candidates,
        found: Promising,
        how: Wanted,
        executor: Executor | None,
        heard: Heard | None,
    ) -> Self:
        """The promising of some candidates, of which the best have been simulated."""
        rows = rows.take(found.candidates)
        columns = with_costs(rows, found.evaluated.figures)
        state = cls(rows, columns, how, executor, heard)
        for each in found.evaluated.left:
            if not each.possible:
                state.refused |= dict.fromkeys(each.candidates.tolist(), each.reason)
                state.done[each.candidates] = True
        _simulate_best(state, ~np.isnan(columns.seconds))
        return state

    def simulate(self, rows: Int) -> None:
        """Simulate some candidates that have not been."""
        rows = rows[~self.done[rows]]
        if not len(rows) or self.stopped:
            return
        before = int(self.done.sum())

        def heard(done: int, total: int, figures: Figures) -> None:
            if self.heard is not None:
                self.heard(before + done, before + total, figures)

        try:
            found = exact(self.rows.take(rows), self.executor, heard)
        except KeyboardInterrupt:
            self.stop()
            return
        at = rows[found.rows]
        self.done[at] = True
        self.parts.append((at, with_costs(self.rows.take(at), found.figures)))
        self.launches |= {int(rows[nth]): seconds for nth, seconds in found.launches.items()}
        self.refused |= {int(rows[nth]): why for nth, why in found.refused.items()}
        self.stopped = found.stopped

    def stop(self) -> None:
        """End with what is known, if anything is; else Ctrl-C goes on."""
        if not self.parts and np.isnan(self.columns.seconds).all():
            raise KeyboardInterrupt
        self.stopped = True

    def figures(self) -> Figures:
        """The figures of all, simulated ones over those of columns."""
        at = np.concatenate([rows for rows, _ in self.parts] or [np.zeros(0, dtype=np.int64)])
        every = Figures.concatenated([self.columns, *(figures for _, figures in self.parts)])
        place = np.arange(len(self.rows))
        place[at] = len(self.rows) + np.arange(len(at))
        return every.take(place)

    def ranked(self) -> Int:
        """The simulated candidates that fit, best first."""
        figures = self.figures()
        usable = figures.exact & (figures.fits | self.how.any_memory)
        return best_of(figures, usable, self.how.objectives)

    def listed(self) -> Int:
        """Those of one objective that are no worse than any that is known in columns alone."""
        best, names = self.ranked(), self.how.objectives
        figures = self.figures()
        rest = ~self.done & (figures.fits | self.how.any_memory)
        order = best_of(figures, rest, names)
        if len(names) > 1 or not len(order) or not len(best):
            return best
        values = objectives.values(figures, names)[:, 0]
        return best[: max(1, int((values[best] <= values[order[0]]).sum()))]


@seldom_collected()
def search(
    rows: Candidates,
    how: Wanted | None = None,
    *,
    evaluate: Evaluate | None = None,
    executor: Executor | None = None,
    heard: Heard | None = None,
    stopping: Callable[[int], None] | None = None,
) -> Ranking:
    """Find the best candidates.

    `evaluate` gives the figures of candidates in columns; None: nothing is known before simulation.
    `executor` runs the simulations, None: this process does. Ctrl-C ends the evaluation: `stopping`
    hears of how many candidates, of which the best are then simulated. A second one, or one while
    candidates are simulated, ends the search with what has been simulated by then. Raises
    `NothingFound` where nothing that was simulated fits, or runs.
    """
    how = how or Wanted()
    if how.prove and how.objectives != ("time",):
        raise UserError("--exact proves the least time; use --objective time alone")
    if "mfu" in how.objectives and rows.base.run.mode != "train":
        raise UserError(f"--objective mfu: {objectives.UNKNOWN['mfu']}")
    found = _evaluated(rows, how, evaluate)
    if stopping is not None and _is_stopped(found):
        stopping(int((~np.isnan(found.evaluated.figures.seconds)).sum()))
    state = _SearchState.of(rows, found, how, executor, heard)
    others_may_fit = any(each.reason != TOO_LARGE for each in found.bounded)
    if others_may_fit and evaluate is not None and not len(state.ranked()) and not state.stopped:
        # The best by columns do not fit: any candidate may be the best that does.
        found = Promising(np.arange(len(rows)), evaluate(rows), None)
        state = _SearchState.of(rows, found, how, executor, heard)
    stopped = _is_stopped(found)
    rows, bounds = state.rows, np.zeros(len(state.rows))
    try:
        if found.bounds is not None:
            bounds[:] = found.bounds
        if not stopped:
            _simulate_by_bounds(state, bounds, known=found.bounds is not None)
    except KeyboardInterrupt:  # between two simulations
        state.stop()
    result = Ranking(
        rows, state.figures(), state.columns, state.listed(), found.evaluated.left, found.bounded,
        state.launches, state.refused, bounds, how, state.stopped or stopped,
    )  # fmt: skip
    if not len(result.best):
        raise nothing_found(result)
    return result


def _is_stopped(found: Promising) -> bool:
    """Whether Ctrl-C has ended the evaluation."""
    return any(each.reason == STOPPED for each in found.evaluated.left)


def _simulate_by_bounds(state: _SearchState, bounds: Float, *, known: bool) -> None:
    """Simulate further candidates by their lower bounds, which are written to `bounds`.

    Those that nothing else is known of, and to prove the answer all that may be better.
    """
    rows, how = state.rows, state.how
    blind = np.flatnonzero(np.isnan(state.columns.seconds))
    if not known and (how.prove or len(blind)):
        some = np.arange(len(rows)) if how.prove else blind
        seconds, may_fit = least_seconds(rows.take(some), any_memory=how.any_memory)
        if how.prove:  # bounds in columns may be as far above the simulated time as columns are
            seconds = lower_bounds(rows)
        bounds[some] = np.where(may_fit, seconds, np.inf)
    _simulate_blind(state, blind, bounds)
    if how.prove:
        _prove(state, bounds)


def _evaluated(rows: Candidates, how: Wanted, evaluate: Evaluate | None) -> Promising:
    """The figures in columns of as many candidates as the answer takes."""
    every = np.arange(len(rows))
    if evaluate is None:
        return Promising(every, Evaluated(unknown(len(rows)), [LeftOut(every, "", True)]), None)
    few_in_columns = bool(rows.base.cluster.stragglers)
    if how.prove or how.objectives != ("time",) or not how.bounded or few_in_columns:
        return Promising(every, evaluate(rows), None)
    # One more than are simulated: those as good as it in columns are listed (`listed`).
    return promising(rows, evaluate, how.top + 1, any_memory=how.any_memory)


def _simulate_best(state: _SearchState, seen: Bool) -> None:
    """Simulate the best by columns, and further ones while none of them fits."""
    columns, how = state.columns, state.how
    plausible = seen & ((columns.peak <= MARGIN * columns.device_memory) | how.any_memory)
    order = best_of(columns, plausible, how.objectives)
    if not len(order):  # what is looked for is not known in columns
        order = best_of(columns, plausible, ("time",))
    if len(how.objectives) > 1 and len(order) > how.top:
        order = order[np.linspace(0, len(order) - 1, how.top).astype(np.int64)]
    for begin in range(0, _ROUNDS * how.top, how.top):
        state.simulate(order[begin : begin + how.top])
        if len(state.ranked()):
            return
    # No estimate fits: candidates that lack little memory may fit all the same.
    near = seen & ~plausible & (columns.peak <= _NEAREST * columns.device_memory)
    lacking = columns.peak[near] / columns.device_memory[near]
    state.simulate(np.flatnonzero(near)[np.argsort(lacking, kind="stable")][: how.top])


def _simulate_blind(state: _SearchState, blind: Int, bounds: Float) -> None:
    """Simulate the most promising of candidates that columns cannot evaluate."""
    tokens = step_tokens(state.rows)
    per_token = bounds / tokens
    order = blind[np.argsort(per_token[blind], kind="stable")]
    best = state.ranked()
    if len(best) and state.how.objectives[0] in ("time", "mfu"):
        winner = int(best[0])
        least = float(state.figures().seconds[winner]) / tokens[winner]
        order = order[per_token[order] < least]
    order = order[np.isfinite(per_token[order])]
    usual = TOP if len(blind) < len(state.rows) else MOST
    state.simulate(order[: usual if state.how.most is None else state.how.most])


def _prove(state: _SearchState, bounds: Float) -> None:
    """Simulate all candidates whose lower bounds are below the best, the lowest first."""
    tokens = step_tokens(state.rows)
    per_token = bounds / tokens
    order = np.argsort(per_token, kind="stable")
    order = order[~state.done[order] & np.isfinite(per_token[order])]
    step = max(state.how.top, 1)
    for begin in range(0, len(order), step):
        best = state.ranked()
        if len(best):
            winner = int(best[0])
            least = float(state.figures().seconds[winner]) / tokens[winner]
            if per_token[order[begin]] >= least:
                return
        state.simulate(order[begin : begin + step])
        if state.stopped:
            return
