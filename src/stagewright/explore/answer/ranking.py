"""What a search answers: candidates with their figures, the best of them, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stagewright.arrays import Bool, Float, Int
from stagewright.errors import UserError
from stagewright.search import objectives
from stagewright.explore.answer.promising import (
    MARGIN,
    SLOWER,
    Bounded,
    held_of_room,
    step_tokens,
)
from stagewright.search.candidates import HARDWARE, Candidates
from stagewright.explore.evaluate import LeftOut
from stagewright.search.figures import Figures

TOP = 20
"""Candidates that are simulated unless asked otherwise, the best by their estimates."""


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
    launches: Mapping[int, float]
    """Seconds of a step in which the mean GPU waits for launches, of candidates simulated."""
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
        """Seconds as simulated over estimated seconds, of the candidates that have both."""
        return self.gaps_of("time")

    def gaps_of(self, objective: str) -> Float:
        """An objective as simulated over its estimate, of the candidates that have both."""
        both = self.figures.exact & ~np.isnan(self.columns.seconds)
        column = objectives.OBJECTIVES[objective].column
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = column(self.figures.take(both)) / column(self.columns.take(both))
        return ratio[np.isfinite(ratio)]

    @property
    def open(self) -> int:
        """How many candidates that were not simulated could still be the best, or on the front.

        Their estimates are taken to be too high by the largest gap of those that were simulated;
        where nothing else is known, lower bounds of their time are taken.
        """
        if not len(self.best):
            return 0
        names = self.how.objectives
        left = ~self.figures.exact & ~self._too_large() & ~self.without(*names)
        left &= np.isfinite(self.bounds)
        left[[*self.refused]] = False
        hopes, worst = self._range()
        answers = self.best if len(names) > 1 else self.best[:1]
        for answer in objectives.values(self.figures.take(answers), names):
            left &= ~(answer <= hopes).all(axis=1)
        if len(names) > 1:  # others of the front as estimated stand before the rest, too
            ahead = np.flatnonzero(left & (self.figures.fits | self.how.any_memory))
            for other in worst[ahead[objectives.front(worst[ahead])]]:
                left &= ~((other <= hopes).all(axis=1) & (other < hopes).any(axis=1))
        winner = int(self.best[0])
        seconds = self.figures.seconds[winner] / step_tokens(self.rows)[winner]
        slower = [each for each in self.bounded if each.reason == SLOWER]
        slack = _extremes(self.gaps)[0]
        return int(left.sum()) + sum(
            int((each.per_token * slack < seconds).sum()) for each in slower
        )

    def _range(self) -> tuple[Float, Float]:
        """The least and the most that the objectives of each candidate may be by its estimate:
        [candidates, objectives] each."""
        names = self.how.objectives
        worst = objectives.values(self.columns, names)
        hopes = worst.copy()
        hopes[np.isnan(self.columns.seconds)] = -np.inf
        for nth, name in enumerate(names):
            low, high = _extremes(self.gaps_of(name))
            positive = worst[:, nth] > 0  # MFU counts below zero
            hopes[:, nth] *= np.where(positive, low, high)
            worst[:, nth] *= np.where(positive, high, low)
            if name == "time":
                tokens = np.maximum(self.figures.tokens, 1)
                tokens = np.where(self.figures.tokens > 0, tokens, tokens[int(self.best[0])])
                hopes[:, nth] = np.maximum(hopes[:, nth], self.bounds * low / tokens)
        return hopes, worst

    def without(self, *names: str) -> Bool:
        """Which candidates have been evaluated, but have no figure for one of the objectives."""
        values = objectives.values(self.figures, names)
        return ~np.isnan(self.figures.seconds) & ~np.isfinite(values).all(axis=1)

    def why_unknown(self, name: str) -> str:
        """Why candidates have no figure for an objective."""
        column = self.rows.columns[HARDWARE]
        codes = np.unique(column.codes[self.without(name)]).tolist()
        return objectives.why_unknown(name, (column.values[code].name for code in codes))

    @property
    def proven(self) -> bool:
        """Whether no candidate that was not simulated can be faster than the best."""
        return self.how.prove and not self.stopped and len(self.best) > 0

    def _too_large(self) -> Bool:
        """Which candidates do not fit by columns, with a margin."""
        seen = ~np.isnan(self.columns.seconds)
        over = self.columns.peak > MARGIN * self.columns.device_memory
        return seen & over & (not self.how.any_memory)


def _extremes(gaps: Float) -> tuple[float, float]:
    """The least and the largest of some ratios and of 1."""
    return float(min(gaps.min(initial=1.0), 1.0)), float(max(gaps.max(initial=1.0), 1.0))


def best_of(figures: Figures, usable: Bool, names: Sequence[str]) -> Int:
    """Candidates by one objective, best first; of several, the front by the first of them."""
    values = objectives.values(figures, names)
    rows = np.flatnonzero(usable & np.isfinite(values).all(axis=1))
    if len(names) > 1:
        rows = rows[objectives.front(values[rows])]
    return rows[np.lexsort((rows, *values[rows].T[::-1]))]


class NothingFound(UserError):
    """None of the candidates can be the answer."""

    def __init__(self, why: str, ranking: Ranking, *, too_large: bool) -> None:
        """`too_large`: since none that was evaluated fits into memory."""
        super().__init__(why)
        self.ranking, self.too_large = ranking, too_large


def nothing_found(of: Ranking) -> NothingFound:
    """Why nothing was found."""
    figures = of.figures
    if of.stopped and not of.simulated:
        why = (
            f"stopped by Ctrl-C after {of.evaluated:,} of {of.candidates:,} candidates were "
            "evaluated, before any was simulated"
        )
        return NothingFound(why, of, too_large=False)
    if of.refused and len(of.refused) == of.simulated + len(of.refused):
        why = f"none of the {len(of.rows):,} candidates runs: {next(iter(of.refused.values()))}"
        return NothingFound(why, of, too_large=False)
    seen = np.flatnonzero(~np.isnan(figures.seconds) & ~figures.fits)
    help_ = "use more GPUs, more memory, or --allow-oom to see them"
    nearest = next((each.nearest for each in of.bounded if each.nearest), "")
    if nearest and not len(seen):
        why = f"none of the {of.candidates:,} candidates fits: the least takes {nearest}; {help_}"
        return NothingFound(why, of, too_large=True)
    if not len(seen):
        unknown = [name for name in of.how.objectives if of.without(name).any()]
        names = unknown or of.how.objectives
        why = (
            f"--objective {names[0]}: not known of any of the {len(of.rows):,} candidates: "
            f"{of.why_unknown(names[0])}"
        )
        return NothingFound(why, of, too_large=False)
    least = int(seen[np.argmin((figures.peak - figures.device_memory)[seen])])
    how = "" if figures.exact[least] else " by its estimate"
    words = held_of_room(float(figures.peak[least]), int(figures.device_memory[least]))
    why = (
        f"none of the {len(seen):,} candidates evaluated fits: the least takes {words}{how} "
        f"({of.rows.describe(least)}); {help_}"
    )
    return NothingFound(why, of, too_large=True)
