"""The best of many candidates: all evaluated, the best simulated, and how sure the answer is.

All are evaluated in columns where columns can. The best by these figures are simulated one by one,
and the answer is the best as simulated. Where nothing in columns is known of a candidate, its lower
bound (`bounds`) says how good it could be: the most promising are simulated first, and what is
left is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from stagewright.arrays import Bool, Float, Int
from stagewright.errors import UserError
from stagewright.executors import Executor
from stagewright.explore.answer import objectives
from stagewright.explore.answer.costs import with_costs
from stagewright.explore.answer.promising import (
    MARGIN,
    SLOWER,
    Bounded,
    Evaluate,
    Promising,
    least_seconds,
    promising,
    step_tokens,
)
from stagewright.explore.bounding.least_compute import lower_bounds
from stagewright.explore.candidates import Candidates
from stagewright.explore.evaluate import Evaluated, LeftOut
from stagewright.explore.exact import Heard, exact, unknown
from stagewright.explore.figures import Figures
from stagewright.explore.lots import STOPPED
from stagewright.garbage import seldom_collected

TOP = 20
MOST = 200
"""Candidates that are simulated where columns say nothing of any, unless asked otherwise; where
they know others, `TOP` of those that they cannot evaluate."""
_ROUNDS = 5
"""How often the next best are simulated where none of the best fits into memory."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked of a search."""

    objectives: tuple[str, ...] = ("time",)
    top: int = TOP
    """Candidates that are simulated, the best by columns."""
    most: int | None = None
    """Candidates that are simulated where columns cannot say; None: `MOST`, or `TOP`."""
    prove: bool = False
    """Simulate all that may be better than the best, by their lower bounds."""
    any_memory: bool = False
    """Candidates that do not fit into memory count, too."""
    bounded: bool = True
    """Candidates that cannot be among the best by their lower bounds need no figures."""


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """Candidates with their figures, and the best of them."""

    rows: Candidates
    """All but those that are bounded out."""
    figures: Figures
    """Of all: as simulated where `exact`, else in columns; NaN where nobody has looked."""
    columns: Figures
    """Of all in columns, also of those that were simulated; NaN where columns cannot say."""
    best: Int
    """The simulated candidates that fit, best first; of several objectives, the front."""
    left: Sequence[LeftOut]
    """Candidates that columns cannot evaluate, with the reason."""
    bounded: Sequence[Bounded]
    """Candidates that cannot be among the best by their lower bounds in columns."""
    refused: Mapping[int, str]
    """What was said of candidates whose run could not be compiled or simulated."""
    bounds: Float
    """Lower bounds of seconds, where they were asked for, else 0; infinite of candidates that do
    not fit into memory by their lower bounds."""
    how: Wanted
    stopped: bool
    """Whether Ctrl-C has left out the rest."""

    @property
    def simulated(self) -> int:
        """How many candidates have been simulated."""
        return int(self.figures.exact.sum())

    @property
    def unseen(self) -> int:
        """How many candidates nobody knows anything of."""
        return int(np.isnan(self.figures.seconds).sum()) - len(self.refused)

    @property
    def evaluated(self) -> int:
        """How many candidates have figures, or have been refused for a reason."""
        return len(self.rows) - self.unseen

    @property
    def bounded_out(self) -> int:
        """How many candidates were not evaluated, since they cannot be among the best."""
        return sum(len(of.per_token) for of in self.bounded)

    @property
    def candidates(self) -> int:
        """How many candidates there are."""
        return len(self.rows) + self.bounded_out

    @property
    def gaps(self) -> Float:
        """Seconds as simulated over seconds in columns, of the candidates that have both."""
        both = self.figures.exact & ~np.isnan(self.columns.seconds)
        ratio = self.figures.seconds[both] / self.columns.seconds[both]
        return ratio[~np.isnan(ratio)]

    @property
    def open(self) -> int:
        """How many candidates that were not simulated could still be the best.

        By columns, if they were as much too slow there as the most extreme of those simulated; by
        their lower bounds where nothing else is known. Of the first objective, where that is time.
        """
        if not len(self.best) or self.how.objectives[0] not in ("time", "mfu"):
            return 0
        tokens = np.maximum(self.figures.tokens, 1)
        seen = ~np.isnan(self.columns.seconds)
        gaps = self.gaps
        slack = float(gaps.min()) if len(gaps) else 1.0
        least = self.bounds * min(slack, 1.0)
        least[seen] = np.maximum(least[seen], self.columns.seconds[seen] * min(slack, 1.0))
        winner = int(self.best[0])
        per_token = self.figures.seconds[winner] / tokens[winner]
        left = ~self.figures.exact & ~self._too_large() & ~self.without(*self.how.objectives)
        left[[*self.refused]] = False
        of_rows = np.where(self.figures.tokens > 0, tokens, tokens[winner])
        open_ = int((left & (least / of_rows < per_token)).sum())
        seconds = self.figures.seconds[winner] / step_tokens(self.rows)[winner]
        for each in self.bounded:
            if each.reason == SLOWER:
                open_ += int((each.per_token * min(slack, 1.0) < seconds).sum())
        return open_

    def without(self, *names: str) -> Bool:
        """Which candidates have been evaluated, but have no figure for one of the objectives."""
        values = objectives.values(self.figures, names)
        return ~np.isnan(self.figures.seconds) & ~np.isfinite(values).all(axis=1)

    @property
    def front_left(self) -> int:
        """How many candidates on the front of several objectives are known in columns alone."""
        if len(self.how.objectives) < 2:
            return 0
        usable = self.figures.fits | self.how.any_memory
        return int((~self.figures.exact[_best(self.figures, usable, self.how.objectives)]).sum())

    @property
    def proven(self) -> bool:
        """Whether no candidate that was not simulated can be faster than the best."""
        return self.how.prove and not self.stopped and len(self.best) > 0

    def _too_large(self) -> Bool:
        """Which candidates do not fit by columns, with a margin."""
        seen = ~np.isnan(self.columns.seconds)
        over = self.columns.peak > MARGIN * self.columns.device_memory
        return seen & over & (not self.how.any_memory)


class NothingFound(UserError):
    """None of the candidates can be the answer."""

    def __init__(self, why: str, ranking: Ranking, *, too_large: bool) -> None:
        """`too_large`: since none that was evaluated fits into memory."""
        super().__init__(why)
        self.ranking, self.too_large = ranking, too_large


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

        found = exact(self.rows.take(rows), self.executor, heard)
        at = rows[found.rows]
        self.done[at] = True
        self.parts.append((at, with_costs(self.rows.take(at), found.figures)))
        self.refused |= {int(rows[nth]): why for nth, why in found.refused.items()}
        self.stopped = found.stopped

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
        return _best(figures, usable, self.how.objectives)

    def listed(self) -> Int:
        """Those of one objective that are no worse than any that is known in columns alone."""
        best, names = self.ranked(), self.how.objectives
        figures = self.figures()
        rest = ~self.done & (figures.fits | self.how.any_memory)
        order = _best(figures, rest, names)
        if len(names) > 1 or not len(order) or not len(best):
            return best
        values = objectives.values(figures, names)[:, 0]
        return best[: max(1, int((values[best] <= values[order[0]]).sum()))]


def _best(figures: Figures, usable: Bool, names: Sequence[str]) -> Int:
    """Candidates by one objective, best first; of several, the front by the first of them."""
    values = objectives.values(figures, names)
    rows = np.flatnonzero(usable & np.isfinite(values).all(axis=1))
    if len(names) > 1:
        rows = rows[objectives.front(values[rows])]
    return rows[np.lexsort((rows, *values[rows].T[::-1]))]


@seldom_collected()
def search(
    rows: Candidates,
    how: Wanted | None = None,
    *,
    evaluate: Evaluate | None = None,
    executor: Executor | None = None,
    heard: Heard | None = None,
) -> Ranking:
    """Find the best candidates.

    `evaluate` gives the figures of all in columns, None: nothing is known before simulation.
    `executor` runs the simulations, None: this process does. Ctrl-C ends the search with what has
    been found by then. Raises UserError where nothing that was simulated fits, or runs.
    """
    how = how or Wanted()
    if how.prove and how.objectives != ("time",):
        raise UserError("--exact proves the least time; use --objective time alone")
    if "mfu" in how.objectives and rows.base.run.mode != "train":
        raise UserError(f"--objective mfu: {objectives.UNKNOWN['mfu']}")
    found = _evaluated(rows, how, evaluate)
    state = _SearchState.of(rows, found, how, executor, heard)
    if found.bounded and evaluate is not None and not len(state.ranked()) and not state.stopped:
        # The best by columns do not fit: any candidate may be the best that does.
        found = Promising(np.arange(len(rows)), evaluate(rows), None)
        state = _SearchState.of(rows, found, how, executor, heard)
    rows, columns, left = state.rows, state.columns, found.evaluated.left
    blind = np.flatnonzero(np.isnan(columns.seconds))
    bounds = np.zeros(len(rows))
    if found.bounds is not None:
        bounds = found.bounds
    elif how.prove or len(blind):
        some = np.arange(len(rows)) if how.prove else blind
        seconds, may_fit = least_seconds(rows.take(some), any_memory=how.any_memory)
        if how.prove:  # bounds in columns may be as far above the simulated time as columns are
            seconds = lower_bounds(rows)
        bounds[some] = np.where(may_fit, seconds, np.inf)
    stopped = [each.candidates for each in left if each.reason == STOPPED]
    if not stopped:
        _simulate_blind(state, blind, bounds)
    if how.prove and not stopped:
        _prove(state, bounds)
    result = Ranking(
        rows, state.figures(), columns, state.listed(), left, found.bounded, state.refused,
        bounds, how, state.stopped or bool(stopped),
    )  # fmt: skip
    if not len(result.best):
        raise _nothing_found(result)
    return result


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
    order = _best(columns, plausible, how.objectives)
    if not len(order):  # what is looked for is not known in columns
        order = _best(columns, plausible, ("time",))
    if len(how.objectives) > 1 and len(order) > how.top:
        order = order[np.linspace(0, len(order) - 1, how.top).astype(np.int64)]
    for begin in range(0, _ROUNDS * how.top, how.top):
        state.simulate(order[begin : begin + how.top])
        if len(state.ranked()):
            return


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


def _nothing_found(of: Ranking) -> NothingFound:
    """Why nothing was found."""
    figures = of.figures
    if of.refused and len(of.refused) == of.simulated + len(of.refused):
        why = f"none of the {len(of.rows):,} candidates runs: {next(iter(of.refused.values()))}"
        return NothingFound(why, of, too_large=False)
    seen = np.flatnonzero(~np.isnan(figures.seconds) & ~figures.fits)
    if not len(seen):
        unknown = [name for name in of.how.objectives if of.without(name).any()]
        names = unknown or of.how.objectives
        why = (
            f"--objective {names[0]}: not known of any of the {len(of.rows):,} candidates: "
            f"{objectives.UNKNOWN[names[0]]}"
        )
        return NothingFound(why, of, too_large=False)
    least = int(seen[np.argmin((figures.peak - figures.device_memory)[seen])])
    peak, room = figures.peak[least] / 1e9, figures.device_memory[least] / 1e9
    why = (
        f"none of the {len(seen):,} candidates evaluated fits: the least takes {peak:.4g} GB of "
        f"{room:.4g} GB ({of.rows.run(least).describe()}); use more GPUs, more memory, or "
        "--allow-oom to see them"
    )
    return NothingFound(why, of, too_large=True)
