"""Result of a search: all candidates with their metrics, the best, and how certain these are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stagewright.arrays import Bool, Float, Int, distinct_numbers
from stagewright.errors import UserError, either
from stagewright.searching import objectives
from stagewright.searching.candidates import HARDWARE, Candidates
from stagewright.searching.figures import Figures

TOP = 20
"""Default number of layouts to list."""
MOST = 200
"""Default limit of candidates to simulate."""
SLACK = 0.03
"""Minimum assumed error of estimates."""
MEMORY_SLACK = 0.05
"""Minimum assumed error of estimated bytes."""
TIE = 0.01
"""Candidates within this share of the best count as equal."""
MEMORY_STEP = 0.01
"""Minimum share of device memory by which a slower candidate wins a tie."""
LAYOUT = ("tp", "cp", "pp", "ep", "zero", "recompute", HARDWARE)
"""Settings of a layout, plus the number of GPUs; the best of its variants is listed."""


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Options of a search besides its space."""

    objectives: tuple[str, ...] = ("time",)
    top: int = TOP
    """Layouts to list; with `all_variants` or several objectives, candidates."""
    most: int = MOST
    """Limit of candidates to simulate."""
    exact: bool = False
    """Simulate all candidates whose lower bound is below the best."""
    allow_oom: bool = False
    """Rank candidates that do not fit into memory, too."""
    all_variants: bool = False
    """List several variants of one layout."""


@dataclass(eq=False)
class Ranking:
    """Candidates with their metrics, while and after the search simulates them.

    `best` are those that may be the answer, best first, `listed` what is printed of them, and
    `open` those that could still win.
    """

    candidates: Candidates
    estimates: Figures
    """Estimates of all candidates; `seconds` is NaN without one."""
    options: SearchOptions
    figures: Figures
    """Figures of all candidates: simulated, or else estimates."""
    launches: dict[int, float] = field(default_factory=dict[int, float])
    """Seconds of a step in which the mean GPU waits for launches, of simulated candidates."""
    refused: dict[int, str] = field(default_factory=dict[int, str])
    """Error messages of candidates that could not be compiled or simulated."""
    stopped: bool = False
    """True if Ctrl-C ended the search."""
    bounds: Float | None = None
    """Lower bounds of seconds, with `exact`."""

    def __len__(self) -> int:
        return len(self.candidates)

    @property
    def best(self) -> Int:
        """Simulated candidates that fit, best first; of several objectives, the front.

        The first wins the tie with those that are within 1%.
        """
        best, rows = self._simulated_that_fit, self.of_layouts
        return np.concatenate([rows[:1], best[best != rows[0]]]) if len(rows) else best

    @property
    def listed(self) -> Int:
        """Candidates to list: the best of each layout, or with `all_variants` all of `best`."""
        return (self.best if self.options.all_variants else self.of_layouts)[: self.options.top]

    @property
    def _simulated_that_fit(self) -> Int:
        return best_of(self.figures, self.figures.simulated & self.fits, self.options.objectives)

    @property
    def of_layouts(self) -> Int:
        """The best of each layout, best first; of several objectives, the front."""
        winners = self._simulated_that_fit
        if len(self.options.objectives) > 1 or len(winners) < 2:
            return winners
        values = objectives.values(self.figures, self.options.objectives)[:, 0]
        layout = layouts(self.candidates.take(winners))
        order = np.argsort(layout, kind="stable")
        groups = np.split(winners[order], np.flatnonzero(np.diff(layout[order])) + 1)
        rows = np.array(
            [self._tie_winner(group, values, float(values[int(group[0])])) for group in groups]
        )
        rows = rows[np.lexsort((rows, values[rows]))]
        first = self._tie_winner(rows, values, float(values[int(winners[0])]))
        return np.concatenate([[first], rows[rows != first]])

    def _tie_winner(self, indices: Int, values: Float, fastest: float) -> int:
        """Best of candidates that are within 1% of the fastest; `indices` are best first.

        Sharded optimizer states win, since recipes shard them (ZeRO-1). Among these a slower
        candidate wins if it takes 1% of device memory less.
        """
        tied = indices[values[indices] <= fastest + TIE * abs(fastest)]
        sharded = self.candidates.take(tied).numbers("zero") > 0
        first, *others = tied[sharded].tolist() if sharded.any() else tied.tolist()
        for index in others:
            if self.saves_memory(index, first):
                first = index
        return first

    def saves_memory(self, index: int, other: int) -> bool:
        """True if a candidate takes at least 1% of device memory less than another."""
        saved = self.figures.peak[other] - self.figures.peak[index]
        return bool(saved >= MEMORY_STEP * self.figures.device_memory[index])

    @property
    def fits(self) -> Bool:
        """Mask of candidates that fit into memory, or need not."""
        return self.figures.fits | self.options.allow_oom

    @property
    def simulated(self) -> int:
        """Number of simulated candidates."""
        return int(self.figures.simulated.sum())

    @property
    def attempted(self) -> Bool:
        """Mask of candidates that were simulated, or refused."""
        mask = self.figures.simulated.copy()
        mask[[*self.refused]] = True
        return mask

    @property
    def without_metrics(self) -> Bool:
        """Mask of candidates that were neither estimated nor simulated nor refused."""
        return np.isnan(self.figures.seconds) & ~self.attempted

    def errors(self, objective: str) -> Float:
        """Simulated over estimated objective, of candidates that have both."""
        both = self.figures.simulated & ~np.isnan(self.estimates.seconds)
        column = objectives.OBJECTIVES[objective]
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = column(self.figures.take(both)) / column(self.estimates.take(both))
        return ratio[np.isfinite(ratio)]

    def optimistic_values(self, names: Sequence[str]) -> Float:
        """Estimates times the lowest ratio simulated / estimated at their ZeRO stage.

        That factor is at most 1 - `SLACK` (of bytes 1 - `MEMORY_SLACK`). ZeRO 0 and 1 count as one
        stage. [candidates, objectives].
        """
        zero = np.maximum(self.candidates.numbers("zero"), 1)
        values = objectives.values(self.estimates, names)
        simulated = objectives.values(self.figures, names)
        for n, name in enumerate(names):
            slack = MEMORY_SLACK if name == "memory" else SLACK
            column = values[:, n]
            both = self.figures.simulated & np.isfinite(column) & np.isfinite(simulated[:, n])
            ratio = np.where(both, simulated[:, n], 1.0) / np.where(both, column, 1.0)
            ratio = ratio if name != "mfu" else 1 / ratio  # the objective is -MFU
            for stage in np.unique(zero).tolist():
                in_class = zero == stage
                lowest = min(1 - slack, float(ratio[in_class].min(initial=1.0)))
                column[in_class] *= lowest if name != "mfu" else 1 / lowest
        return values

    def promising(self) -> Int:
        """Candidates not attempted that may be better than the best, or join the front."""
        names, estimates = self.options.objectives, self.estimates
        mask = ~self.attempted & ~np.isnan(estimates.seconds)
        if self.bounds is None:
            peak = self.optimistic_values(("memory",))[:, 0]
            may_fit = np.where(np.isfinite(peak), peak <= estimates.device_memory, True)
            mask &= may_fit | self.options.allow_oom
            optimistic = self.optimistic_values(names)
        else:
            optimistic = (self.bounds / np.maximum(estimates.tokens, 1))[:, None]
        answers = objectives.values(self.figures.take(self.best), names)
        if len(names) == 1:
            answers = answers.min(axis=0, keepdims=True)
        for answer in answers:
            mask &= ~(answer <= optimistic).all(axis=1)
        return np.flatnonzero(mask & np.isfinite(optimistic).all(axis=1))

    @property
    def open(self) -> Int:
        """Candidates that could still win after the search; none if nothing was simulated."""
        return self.promising() if len(self.best) else np.zeros(0, dtype=np.int64)

    @property
    def proven(self) -> bool:
        """True if no candidate that was not simulated can be faster than the best."""
        if not self.options.exact or self.stopped or not len(self.best):
            return False
        return not len(self.open) and not self.without_metrics.any()

    def missing_objective(self, *names: str) -> Bool:
        """Mask of candidates that have metrics, but lack one of these objectives."""
        values = objectives.values(self.figures, names)
        return ~np.isnan(self.figures.seconds) & ~np.isfinite(values).all(axis=1)

    def missing_reason(self, name: str) -> str:
        """Reason why candidates lack an objective."""
        column = self.candidates.columns[HARDWARE]
        codes = np.unique(column.codes[self.missing_objective(name)]).tolist()
        return objectives.missing_reason(name, (column.values[code].name for code in codes))


def layouts(candidates: Candidates) -> Int:
    """Number of each candidate's layout: [candidates]."""
    settings = candidates.distinct(
        *(name for name in LAYOUT if name in candidates.columns)
    ).tuple_of
    return distinct_numbers([settings, candidates.world_size], len(candidates))[1]


def first_of_each(keys: Int) -> Int:
    """Positions of the first occurrence of each key, ascending."""
    return np.sort(np.unique(keys, return_index=True)[1])


def best_of(figures: Figures, usable: Bool, names: Sequence[str]) -> Int:
    """Usable candidates by one objective, best first; of several, the front by the first."""
    values = objectives.values(figures, names)
    indices = np.flatnonzero(usable & np.isfinite(values).all(axis=1))
    if len(names) > 1:
        indices = indices[objectives.front(values[indices])]
    return indices[np.lexsort((indices, *values[indices].T[::-1]))]


# ---- no answer -----------------------------------------------------------------------------------


class NothingFound(UserError):
    """No candidate can be the answer."""

    def __init__(self, message: str, ranking: Ranking, *, too_large: bool) -> None:
        """`too_large`: no candidate fits into memory."""
        super().__init__(message)
        self.ranking, self.too_large = ranking, too_large


_LESS_MEMORY: Mapping[str, tuple[str, Callable[[Sequence[Any]], bool]]] = {
    "zero": ("--zero 3", lambda values: max(values) < 3),
    "recompute": ("--recompute full", lambda values: "full" not in values),
    "tp": ("a larger --tp", lambda values: max(values) == 1),
    "pp": ("a larger --pp", lambda values: max(values) == 1),
    "micro_batch_size": ("--micro-batch-size 1", lambda values: min(values) > 1),
}
"""Advice by setting, and whether the values that were tried leave room for it."""


def _advice(candidates: Candidates) -> str:
    """Settings that hold less memory than those tried, then what always helps."""
    advice = [
        text
        for name, (text, applies) in _LESS_MEMORY.items()
        if candidates.base.run.mode == "train" and applies(candidates.column(name).values)
    ]
    return f"try {either([*advice, 'more GPUs', 'more memory'])}; --allow-oom ranks them"


def nothing_found(ranking: Ranking) -> NothingFound:
    """Error of a search without an answer."""
    figures, candidates = ranking.figures, ranking.candidates
    if ranking.refused and not ranking.simulated:
        first = next(iter(ranking.refused.values()))
        message = f"none of the {len(candidates):,} candidates runs: {first}"
        return NothingFound(message, ranking, too_large=False)
    if ranking.stopped and not ranking.simulated:
        return NothingFound("stopped before any candidate was simulated", ranking, too_large=False)
    large = np.flatnonzero(~np.isnan(figures.seconds) & ~figures.fits)
    if not len(large) or (figures.simulated & ranking.fits).any():
        names = ranking.options.objectives
        missing = [name for name in names if ranking.missing_objective(name).any()]
        name = (missing or names)[0]
        message = (
            f"--objective {name}: not known of any of the {len(candidates):,} candidates: "
            f"{ranking.missing_reason(name)}"
        )
        return NothingFound(message, ranking, too_large=False)
    nearest = int(large[np.argmin((figures.peak - figures.device_memory)[large])])
    source = "" if figures.simulated[nearest] else " by its estimate"
    peak, limit = figures.peak[nearest] / 1e9, figures.device_memory[nearest] / 1e9
    message = (
        f"none of the {len(candidates):,} candidates fits: the least takes {peak:.4g} GB of "
        f"{limit:.4g} GB{source} ({candidates.describe(nearest)}); {_advice(candidates)}"
    )
    return NothingFound(message, ranking, too_large=True)
