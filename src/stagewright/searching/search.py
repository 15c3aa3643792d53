"""Estimate all candidates, then simulate best first until none can win.

First the best variant of each of the best layouts is simulated. Then candidates are simulated in
the order of their estimates, until no estimate, reduced by its stage's worst error so far, beats
the best. A small space is simulated without estimates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from stagewright.arrays import Int
from stagewright.errors import UserError
from stagewright.executors import Executor
from stagewright.searching import objectives
from stagewright.searching.candidates import Candidates
from stagewright.searching.estimate import estimate, lower_bounds
from stagewright.searching.figures import Figures, with_costs
from stagewright.searching.ranking import (
    Ranking,
    SearchOptions,
    best_of,
    first_of_each,
    layouts,
    nothing_found,
)
from stagewright.searching.simulated import Progress, simulate_all

SMALL = 70
"""Spaces of at most this many candidates are simulated whole: estimates would cost as much."""
BATCH = 20
"""Batch size; independent of the number of workers, so answers are too."""

Estimate = Callable[[Candidates, Executor | None], Figures]


@dataclass(slots=True, eq=False)
class _Simulator:
    """Simulates candidates of a ranking, and writes their metrics into it."""

    ranking: Ranking
    executor: Executor | None
    progress: Progress | None

    def simulate(self, indices: Int) -> None:
        """Simulate candidates that have not been attempted."""
        ranking = self.ranking
        attempted = ranking.attempted
        indices = indices[~attempted[indices]]
        if not len(indices) or ranking.stopped:
            return
        before = int(attempted.sum())

        def progress(count: int, total: int, figures: Figures) -> None:
            if self.progress is not None:
                self.progress(before + count, before + total, figures)

        results = simulate_all(ranking.candidates.take(indices), self.executor, progress)
        at = indices[results.indices]
        ranking.figures.put(at, with_costs(ranking.candidates.take(at), results.figures))
        ranking.launches |= {int(indices[n]): seconds for n, seconds in results.launches.items()}
        ranking.refused |= {int(indices[n]): message for n, message in results.refused.items()}
        ranking.figures.exact[[*ranking.refused]] = False
        ranking.stopped = results.stopped

    @property
    def at_limit(self) -> bool:
        """True if as many candidates were attempted as the options allow."""
        return int(self.ranking.attempted.sum()) >= self.ranking.options.most


def search(
    candidates: Candidates,
    options: SearchOptions | None = None,
    *,
    estimates: Estimate = estimate,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> Ranking:
    """Find the best candidates.

    `executor` runs the simulations; None: this process. Ctrl-C ends the search with the candidates
    simulated so far. Raises `NothingFound` if no simulated candidate fits, or runs.
    """
    options = options or SearchOptions()
    if options.exact and options.objectives != ("time",):
        raise UserError("--exact proves the least time; use --objective time alone")
    if "mfu" in options.objectives and candidates.base.run.mode != "train":
        raise UserError(f"--objective mfu: {objectives.MISSING['mfu']}")
    small = len(candidates) <= SMALL
    if small:
        estimated = Figures.missing(len(candidates))
    else:
        estimated = with_costs(candidates, estimates(candidates, executor))
    every = np.arange(len(candidates))
    ranking = Ranking(candidates, estimated, options, estimated.take(every))
    simulator = _Simulator(ranking, executor, progress)
    if small:
        simulator.simulate(every)
    else:
        ranking.bounds = lower_bounds(candidates) if options.exact else None
        _simulate_layouts(simulator)
        _simulate_promising(simulator)
    if not len(ranking.best):
        raise nothing_found(ranking)
    return ranking


def _simulate_layouts(simulator: _Simulator) -> None:
    """Simulate the best variant of each of the best layouts, or points of the estimated front.

    If none fits, continue with those that lack least memory.
    """
    ranking = simulator.ranking
    estimates, options = ranking.estimates, ranking.options
    usable = ~np.isnan(estimates.seconds)
    fits = usable & (estimates.fits | options.allow_oom)
    order = best_of(estimates, fits, options.objectives)
    if len(options.objectives) == 1:
        order = order[first_of_each(layouts(ranking.candidates)[order])]
    elif len(order) > options.top:
        order = order[np.linspace(0, len(order) - 1, options.top).astype(np.int64)]
    simulator.simulate(order[: options.top])
    excess = estimates.peak / np.maximum(estimates.device_memory, 1)
    too_large = np.flatnonzero(usable & ~fits)
    too_large = too_large[np.argsort(excess[too_large], kind="stable")]
    remaining = np.concatenate([order[options.top :], too_large, np.flatnonzero(~usable)])
    for begin in range(0, len(remaining), BATCH):
        if len(ranking.winners) or ranking.stopped or simulator.at_limit:
            return
        simulator.simulate(remaining[begin : begin + BATCH])


def _simulate_promising(simulator: _Simulator) -> None:
    """Simulate candidates that may be better than the best, best estimates first."""
    ranking = simulator.ranking
    options = ranking.options
    values = objectives.values(ranking.estimates, options.objectives)
    if ranking.bounds is not None:
        values = ranking.bounds[:, None]
    while len(ranking.winners) and not ranking.stopped:
        order = ranking.promising()
        if not len(order) or (simulator.at_limit and not options.exact):
            return
        if len(options.objectives) == 1:
            order = order[np.argsort(values[order, 0], kind="stable")]
        simulator.simulate(order[:BATCH])
