"""Search: estimate all candidates, then simulate the most promising until none can win.

1. The best variant of each of the `top` layouts, by estimate.
2. Candidates in the order of estimates, until no estimate, lowered by the worst error seen at its
   ZeRO stage, beats the best.
3. For the printed tables: the best of each choice (`choices`), and smaller variants of listed
   layouts.
4. Step 2 again.

Spaces of at most `SMALL` candidates are simulated whole, without estimates.
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
from stagewright.searching.choices import choices_of
from stagewright.searching.estimate import estimate, lower_bounds
from stagewright.searching.figures import Figures, with_costs, with_useful_shares
from stagewright.searching.ranking import (
    MEMORY_STEP,
    SLACK,
    TIE,
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
BATCHES_THAT_DO_NOT_FIT = 2
"""Batches after which a search ends whose candidates do not fit, least memory first."""
CHOICE_ROUNDS = 2
"""Rounds in which the best estimate of each choice is simulated."""
MOST_CHOICES = 40
"""Limit of simulations for choices."""

Estimator = Callable[[Candidates, Executor | None], Figures]
"""Returns estimated figures of all candidates."""


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
        ranking.stopped = results.stopped

    @property
    def remaining(self) -> int:
        """Number of candidates that the options still allow to simulate."""
        return max(0, self.ranking.options.most - int(self.ranking.attempted.sum()))

    @property
    def at_limit(self) -> bool:
        """True if as many candidates were attempted as the options allow."""
        return not self.remaining


def search(
    candidates: Candidates,
    options: SearchOptions | None = None,
    *,
    estimator: Estimator = estimate,
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
    if "days" in options.objectives and candidates.base.cluster.tokens is None:
        raise UserError("--objective days needs the tokens of the job; give --tokens, such as 2T")
    if "mfu" in options.objectives and candidates.base.run.mode != "train":
        raise UserError(f"--objective mfu: {objectives.MISSING['mfu']}")
    small = len(candidates) <= SMALL
    if small:
        estimated = Figures.missing(len(candidates))
    else:
        estimated = with_useful_shares(candidates, estimator(candidates, executor))
        estimated = with_costs(candidates, estimated)
    indices = np.arange(len(candidates))
    figures = estimated.take(indices)  # a copy: simulations overwrite it
    ranking = Ranking(candidates, estimated, options, figures)
    simulator = _Simulator(ranking, executor, progress)
    if small:
        simulator.simulate(indices)
    else:
        ranking.bounds = lower_bounds(candidates) if options.exact else None
        _simulate_layouts(simulator)
        _simulate_promising(simulator)
        _simulate_choices(simulator)
        _simulate_smaller(simulator)
        _simulate_promising(simulator)
    if not len(ranking.best):
        raise nothing_found(ranking)
    return ranking


def _simulate_layouts(simulator: _Simulator) -> None:
    """Simulate the best variant of each of the best layouts, or points of the estimated front.

    If none fits, two batches follow of those that need least memory by their estimates.
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
    share = estimates.peak / np.maximum(estimates.device_memory, 1)
    remaining = np.flatnonzero(usable & ~ranking.attempted)
    remaining = remaining[np.argsort(share[remaining], kind="stable")]
    most = BATCHES_THAT_DO_NOT_FIT * BATCH
    if len(remaining) < most:
        remaining = np.concatenate([remaining, np.flatnonzero(~usable)])
    else:
        remaining = remaining[:most]
    for begin in range(0, len(remaining), BATCH):
        if len(ranking.best) or ranking.stopped or simulator.at_limit:
            return
        simulator.simulate(remaining[begin : begin + BATCH])


def _simulate_promising(simulator: _Simulator) -> None:
    """Simulate candidates that may be better than the best, by the first objective."""
    ranking = simulator.ranking
    values = ranking.bounds
    if values is None:
        values = objectives.values(ranking.estimates, ranking.options.objectives)[:, 0]
    while len(ranking.best) and not ranking.stopped:
        indices = ranking.promising()
        if not len(indices) or (simulator.at_limit and not ranking.options.exact):
            return
        simulator.simulate(indices[np.argsort(values[indices], kind="stable")][:BATCH])


def _simulate_choices(simulator: _Simulator) -> None:
    """For each row of the table of choices, simulate its best estimate if that is promising.

    It is if it is more than `SLACK` below the row's best simulated value.
    """
    ranking, names = simulator.ranking, simulator.ranking.options.objectives[:1]
    remaining = MOST_CHOICES
    for _ in range(CHOICE_ROUNDS):
        if not len(ranking.best):
            return
        values = objectives.values(ranking.figures, names)[:, 0]
        attempted, usable = ranking.attempted, ranking.fits & np.isfinite(values)
        estimated = np.where(usable & ~attempted, values, np.inf)
        simulated_values = np.where(usable & ranking.figures.simulated, values, np.inf)
        indices: dict[int, None] = {}
        for choice in choices_of(ranking.candidates):
            index = int(np.argmin(np.where(choice.mask, estimated, np.inf)))
            simulated = float(simulated_values[choice.mask].min(initial=np.inf))
            if _is_less(float(estimated[index]), simulated):
                indices[index] = None
        selected = [*indices][: min(remaining, simulator.remaining)]
        remaining -= len(selected)
        simulator.simulate(np.array(selected, dtype=np.int64))


def _is_less(estimate: float, simulated: float) -> bool:
    """True if an estimate is below a simulated objective by more than `SLACK`."""
    if not np.isfinite(simulated):
        return bool(np.isfinite(estimate))
    return estimate < simulated - SLACK * abs(simulated)


def _simulate_smaller(simulator: _Simulator) -> None:
    """Simulate a variant of each listed layout that ties by its estimate and takes less memory."""
    ranking, options = simulator.ranking, simulator.ranking.options
    if len(options.objectives) > 1 or options.all_variants:
        return
    estimates, rows = ranking.estimates, ranking.of_layouts[: options.top]
    values = objectives.values(estimates, options.objectives)[:, 0]
    exact = objectives.values(ranking.figures.take(rows), options.objectives)[:, 0]
    layout, peak = layouts(ranking.candidates), estimates.peak
    usable = ranking.fits & ~ranking.attempted & np.isfinite(values)
    selected: list[int] = []
    for index, value in zip(rows.tolist(), exact.tolist(), strict=True):
        least = ranking.figures.peak[index] - MEMORY_STEP * estimates.device_memory[index]
        variants = usable & (layout == layout[index]) & (peak <= least)
        variants = np.flatnonzero(variants & (values <= value + TIE * abs(value)))
        if len(variants):
            selected.append(int(variants[np.argmin(peak[variants])]))
    simulator.simulate(np.array(selected[: simulator.remaining], dtype=np.int64))
