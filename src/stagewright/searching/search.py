"""The best of many candidates: all are estimated, and the best are simulated until one is sure.

First the best variant of each of the best layouts is simulated, as estimates have them. Then
candidates are simulated best first, until no estimate, widened by how far estimates were off so
far, can still be among the best. A small space is simulated as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from stagewright.arrays import Float, Int
from stagewright.errors import UserError
from stagewright.executors import Executor
from stagewright.searching import objectives
from stagewright.searching.candidates import Candidates
from stagewright.searching.estimate import estimate, lower_bounds
from stagewright.searching.figures import Figures
from stagewright.searching.ranking import (
    Ranking,
    Wanted,
    best_of,
    first_of_each,
    layouts,
    nothing_found,
    promising_candidates,
)
from stagewright.searching.simulated import Progress, simulate_all, unknown
from stagewright.searching.usd import with_costs

SMALL = 70
"""Spaces of at most this many candidates are simulated whole: estimates would cost as much."""
BATCH = 20
"""Candidates that are simulated at once; the answer depends on it, but not on workers."""

Estimate = Callable[[Candidates, Executor | None], Figures]


@dataclass(slots=True, eq=False)
class _SearchState:
    """What is known of candidates so far."""

    rows: Candidates
    estimates: Figures
    wanted: Wanted
    executor: Executor | None
    progress: Progress | None
    figures: Figures = field(init=False)
    launches: dict[int, float] = field(default_factory=dict[int, float])
    refused: dict[int, str] = field(default_factory=dict[int, str])
    bounds: Float | None = None
    stopped: bool = False

    def __post_init__(self) -> None:
        self.figures = self.estimates.take(np.arange(len(self.rows)))

    def simulate(self, rows: Int) -> None:
        """Simulate those of some candidates that have not been."""
        done = self.figures.exact.copy()
        done[[*self.refused]] = True
        rows = rows[~done[rows]]
        if not len(rows) or self.stopped:
            return
        before = int(done.sum())

        def progress(count: int, total: int, figures: Figures) -> None:
            if self.progress is not None:
                self.progress(before + count, before + total, figures)

        found = simulate_all(self.rows.take(rows), self.executor, progress)
        at = rows[found.rows]
        self.figures.put(at, with_costs(self.rows.take(at), found.figures))
        self.launches |= {int(rows[n]): seconds for n, seconds in found.launches.items()}
        self.refused |= {int(rows[n]): why for n, why in found.refused.items()}
        for row in self.refused:
            self.figures.exact[row] = False
        self.stopped = found.stopped

    @property
    def best(self) -> Int:
        """Simulated candidates that fit, best first; of several objectives, the front."""
        usable = self.figures.exact & (self.figures.fits | self.wanted.any_memory)
        return best_of(self.figures, usable, self.wanted.objectives)

    @property
    def simulated(self) -> int:
        """Number of candidates that were simulated, or refused."""
        return int(self.figures.exact.sum()) + len(self.refused)

    def ranking(self) -> Ranking:
        """The answer."""
        return Ranking(
            self.rows, self.estimates, self.figures, self.launches, self.refused, self.wanted,
            self.stopped, self.bounds,
        )  # fmt: skip


def search(
    rows: Candidates,
    wanted: Wanted | None = None,
    *,
    estimates: Estimate = estimate,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> Ranking:
    """Find the best candidates.

    `executor` runs the simulations, None: this process does. Ctrl-C ends the search with what has
    been simulated by then. Raises `NothingFound` where nothing that was simulated fits, or runs.
    """
    wanted = wanted or Wanted()
    if wanted.prove and wanted.objectives != ("time",):
        raise UserError("--exact proves the least time; use --objective time alone")
    if "mfu" in wanted.objectives and rows.base.run.mode != "train":
        raise UserError(f"--objective mfu: {objectives.UNKNOWN['mfu']}")
    every = np.arange(len(rows))
    if len(rows) <= SMALL:
        state = _SearchState(rows, unknown(len(rows)), wanted, executor, progress)
        state.simulate(every)
    else:
        state = _SearchState(
            rows, with_costs(rows, estimates(rows, executor)), wanted, executor, progress
        )
        if wanted.prove:
            state.bounds = lower_bounds(rows)
        _simulate_layouts(state)
        _simulate_promising(state)
    ranking = state.ranking()
    if not len(ranking.best):
        raise nothing_found(ranking)
    return ranking


def _simulate_layouts(state: _SearchState) -> None:
    """Simulate the best variant of each of the best layouts, or the best of a front.

    Where none of them fits, go on with those that lack least memory.
    """
    rows, estimates, wanted = state.rows, state.estimates, state.wanted
    usable = ~np.isnan(estimates.seconds)
    fits = usable & ((estimates.peak <= estimates.device_memory) | wanted.any_memory)
    order = best_of(estimates, fits, wanted.objectives)
    if len(wanted.objectives) == 1:
        order = order[first_of_each(layouts(rows)[order])]
    elif len(order) > wanted.top:
        order = order[np.linspace(0, len(order) - 1, wanted.top).astype(np.int64)]
    state.simulate(order[: wanted.top])
    lacking = estimates.peak / np.maximum(estimates.device_memory, 1)
    near = np.flatnonzero(usable & ~fits)
    near = near[np.argsort(lacking[near], kind="stable")]
    remaining = np.concatenate([order[wanted.top :], near, np.flatnonzero(~usable)])
    for begin in range(0, len(remaining), BATCH):
        if len(state.best) or state.stopped or state.simulated >= wanted.most:
            return
        state.simulate(remaining[begin : begin + BATCH])


def _simulate_promising(state: _SearchState) -> None:
    """Simulate candidates that may be better than the best, best estimates first."""
    rows, estimates, wanted = state.rows, state.estimates, state.wanted
    values = objectives.values(estimates, wanted.objectives)
    if state.bounds is not None:
        values = state.bounds[:, None]
    while len(state.best) and not state.stopped:
        left = promising_candidates(
            rows, estimates, state.figures, state.best, wanted, state.bounds
        )
        left[[*state.refused]] = False
        order = np.flatnonzero(left)
        if not len(order) or (state.simulated >= wanted.most and not wanted.prove):
            return
        if len(wanted.objectives) == 1:
            order = order[np.argsort(values[order, 0], kind="stable")]
        state.simulate(order[:BATCH])
