"""The answer of a search: all candidates with their figures, the best, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stagewright.arrays import Bool, Float, Int
from stagewright.errors import UserError
from stagewright.searching import objectives
from stagewright.searching.candidates import HARDWARE, Candidates
from stagewright.searching.figures import Figures

TOP = 20
"""Candidates that are listed unless the user says otherwise."""
MOST = 200
"""Candidates that are simulated at most unless the user says otherwise."""
SLACK = 0.03
"""Estimates are taken to be off by this share at least."""
MEMORY_SLACK = 0.05
"""The same for bytes."""
TIE = 0.01
"""Candidates within this share of the best count as equally good."""
LAYOUT = ("tp", "cp", "pp", "ep", "zero", "recompute", HARDWARE, "gpus")
"""Settings of a layout: of variants that agree in these, the best is listed."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the user asks of a search."""

    objectives: tuple[str, ...] = ("time",)
    top: int = TOP
    """Candidates to list, and layouts of which the best variant is simulated."""
    most: int = MOST
    """Candidates to simulate at most."""
    prove: bool = False
    """Simulate all candidates whose lower bound is below the best."""
    any_memory: bool = False
    """Candidates that do not fit into memory count, too."""
    all_variants: bool = False
    """List variants of one layout."""


@dataclass(frozen=True, eq=False)
class Ranking:
    """Candidates with their figures, and the best of them."""

    rows: Candidates
    estimates: Figures
    """Of all candidates; `seconds` is NaN where there is no estimate."""
    figures: Figures
    """Of all candidates: simulated where `exact`, else their estimates."""
    launches: Mapping[int, float]
    """Seconds of a step in which the mean GPU waits for launches, of simulated candidates."""
    refused: Mapping[int, str]
    """Error messages of candidates that could not be compiled or simulated."""
    wanted: Wanted
    stopped: bool
    """True if Ctrl-C has ended the search."""
    bounds: Float | None = None
    """Lower bounds of seconds, where the answer is to be proven."""

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def best(self) -> Int:
        """Simulated candidates that fit, best first; of several objectives, the front.

        Of one objective, the first is the one among equally good ones (`TIE`) that takes least
        memory, but none with whole optimizer states on every rank: recipes shard these (ZeRO-1).
        """
        found = best_of(self.figures, self.figures.exact & self.fits, self.wanted.objectives)
        if len(self.wanted.objectives) > 1 or len(found) < 2:
            return found
        values = objectives.values(self.figures, self.wanted.objectives)[found, 0]
        tied = found[values <= values[0] + TIE * abs(values[0])]
        unsharded = self.rows.numbers("zero")[tied] == 0
        first = tied[np.lexsort((self.figures.peak[tied], unsharded))[0]]
        return np.concatenate([[first], found[found != first]])

    @cached_property
    def listed(self) -> Int:
        """The best to list: one of each layout, unless all variants are asked for."""
        best = self.best
        if not self.wanted.all_variants and len(self.wanted.objectives) == 1:
            best = best[first_of_each(self.layouts[best])]
        return best[: self.wanted.top]

    @cached_property
    def layouts(self) -> Int:
        """A number for each candidate that is equal for variants of one layout."""
        return layouts(self.rows)

    @property
    def fits(self) -> Bool:
        """Candidates that fit into memory, or need not."""
        return self.figures.fits | self.wanted.any_memory

    @property
    def simulated(self) -> int:
        """Number of simulated candidates."""
        return int(self.figures.exact.sum())

    @property
    def unknown(self) -> Bool:
        """Candidates without figures: neither estimated nor simulated."""
        found = np.isnan(self.figures.seconds)
        found[[*self.refused]] = False
        return found

    def errors(self, objective: str) -> Float:
        """Objective as simulated over its estimate, of candidates that have both."""
        both = self.figures.exact & ~np.isnan(self.estimates.seconds)
        column = objectives.OBJECTIVES[objective].column
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = column(self.figures.take(both)) / column(self.estimates.take(both))
        return ratio[np.isfinite(ratio)]

    @cached_property
    def open(self) -> Int:
        """Candidates that were not simulated and could still be the best, or on the front."""
        if not len(self.best):
            return np.zeros(0, dtype=np.int64)
        promising = promising_candidates(
            self.rows, self.estimates, self.figures, self.best, self.wanted, self.bounds
        )
        promising[[*self.refused]] = False
        return np.flatnonzero(promising)

    @property
    def proven(self) -> bool:
        """True if no candidate that was not simulated can be faster than the best."""
        return self.wanted.prove and not self.stopped and len(self.best) > 0 and not len(self.open)

    def without(self, *names: str) -> Bool:
        """Candidates that have figures, but none for one of these objectives."""
        values = objectives.values(self.figures, names)
        return ~np.isnan(self.figures.seconds) & ~np.isfinite(values).all(axis=1)

    def why_unknown(self, name: str) -> str:
        """Reason why candidates have no figure for an objective."""
        column = self.rows.columns[HARDWARE]
        codes = np.unique(column.codes[self.without(name)]).tolist()
        return objectives.why_unknown(name, (column.values[code].name for code in codes))


def layouts(rows: Candidates) -> Int:
    """A number for each candidate that is equal for variants of one layout: [candidates]."""
    return rows.distinct(*(name for name in LAYOUT if name in rows.columns)).of


def first_of_each(keys: Int) -> Int:
    """Positions of the first element of each set of equal ones, ascending."""
    return np.sort(np.unique(keys, return_index=True)[1])


def best_of(figures: Figures, usable: Bool, names: Sequence[str]) -> Int:
    """Candidates by one objective, best first; of several, the front by the first of them."""
    values = objectives.values(figures, names)
    rows = np.flatnonzero(usable & np.isfinite(values).all(axis=1))
    if len(names) > 1:
        rows = rows[objectives.front(values[rows])]
    return rows[np.lexsort((rows, *values[rows].T[::-1]))]


# ---- how far estimates are off -------------------------------------------------------------------


def hopes(rows: Candidates, estimates: Figures, figures: Figures, names: Sequence[str]) -> Float:
    """Best values that objectives of candidates may have: [candidates, objectives].

    Estimates are taken to be as far off as the worst one of the same ZeRO stage that was simulated,
    and by `SLACK` at least; of bytes by `MEMORY_SLACK`.
    """
    kind = np.maximum(rows.numbers("zero"), 1)
    found = objectives.values(estimates, names)
    simulated = objectives.values(figures, names)
    for n, name in enumerate(names):
        least = MEMORY_SLACK if name == "memory" else SLACK
        column = found[:, n]
        both = figures.exact & np.isfinite(column) & np.isfinite(simulated[:, n])
        ratio = np.where(both, simulated[:, n], 1.0) / np.where(both, column, 1.0)
        better = ratio if name != "mfu" else 1 / ratio  # MFU counts below zero
        for stage in np.unique(kind).tolist():
            mine = kind == stage
            low = min(1 - least, float(better[mine].min(initial=1.0)))
            column[mine] *= low if name != "mfu" else 1 / low
    return found


def may_fit(rows: Candidates, estimates: Figures, figures: Figures) -> Bool:
    """Candidates that may fit into memory, if estimates are as far off as those simulated."""
    peak = hopes(rows, estimates, figures, ("memory",))[:, 0]
    return np.where(np.isfinite(peak), peak <= estimates.device_memory, True)


def promising_candidates(
    rows: Candidates,
    estimates: Figures,
    figures: Figures,
    best: Int,
    wanted: Wanted,
    bounds: Float | None = None,
) -> Bool:
    """Candidates that were not simulated and may be better than the best, or join the front."""
    names = wanted.objectives
    promising = ~figures.exact & ~np.isnan(estimates.seconds)
    if bounds is None:
        promising &= may_fit(rows, estimates, figures) | wanted.any_memory
        hoped = hopes(rows, estimates, figures, names)
    else:
        hoped = (bounds / np.maximum(estimates.tokens, 1))[:, None]
    answers = objectives.values(figures.take(best), names)
    if len(names) == 1:
        answers = answers.min(axis=0, keepdims=True)
    for answer in answers:
        promising &= ~(answer <= hoped).all(axis=1)
    return promising & np.isfinite(hoped).all(axis=1)


# ---- no answer -----------------------------------------------------------------------------------


class NothingFound(UserError):
    """None of the candidates can be the answer."""

    def __init__(self, why: str, ranking: Ranking, *, too_large: bool) -> None:
        """`too_large`: no candidate fits into memory."""
        super().__init__(why)
        self.ranking, self.too_large = ranking, too_large


def nothing_found(ranking: Ranking) -> NothingFound:
    """Reason why there is no answer."""
    figures, rows = ranking.figures, ranking.rows
    if ranking.refused and len(ranking.refused) == ranking.simulated + len(ranking.refused):
        why = f"none of the {len(rows):,} candidates runs: {next(iter(ranking.refused.values()))}"
        return NothingFound(why, ranking, too_large=False)
    if ranking.stopped and not ranking.simulated:
        return NothingFound("stopped before any candidate was simulated", ranking, too_large=False)
    large = np.flatnonzero(~np.isnan(figures.seconds) & ~figures.fits)
    if not len(large) or (figures.exact & ranking.fits).any():
        unknown = [name for name in ranking.wanted.objectives if ranking.without(name).any()]
        name = (unknown or ranking.wanted.objectives)[0]
        why = (
            f"--objective {name}: not known of any of the {len(rows):,} candidates: "
            f"{ranking.why_unknown(name)}"
        )
        return NothingFound(why, ranking, too_large=False)
    least = int(large[np.argmin((figures.peak - figures.device_memory)[large])])
    how = "" if figures.exact[least] else " by its estimate"
    held, room = figures.peak[least] / 1e9, figures.device_memory[least] / 1e9
    why = (
        f"none of the {len(rows):,} candidates fits: the least takes {held:.4g} GB of {room:.4g} "
        f"GB{how} ({rows.describe(least)}); use more GPUs, more memory, or --allow-oom to see them"
    )
    return NothingFound(why, ranking, too_large=True)
