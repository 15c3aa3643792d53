"""The candidates of a space: settings crossed one after another, with constraints between them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np

from stagewright.arrays import Bool, Int
from stagewright.errors import UserError, either
from stagewright.search.candidates import HARDWARE, Candidates, Column, code_type
from stagewright.search.constraints import (
    SAME_RUN,
    Constraint,
    TooManyChecks,
    constraints,
    same_words,
)
from stagewright.search.same_runs import of_same_order, of_same_stages
from stagewright.search.spread import (
    column_of_systems,
    compact,
    concatenated,
    paired,
    spread,
)
from stagewright.search.machines import Fleet, divisors_of
from stagewright.model.config import ModelConfig
from stagewright.run.experiment import Experiment
from stagewright.run.rule import ALL
from stagewright.run.sections import EXPERIMENT
from stagewright.run.settings import Run

MOST_CANDIDATES = 30_000_000
"""More are refused: each takes about 20 bytes, and a search of so many minutes."""
PIECE = 1 << 21
"""Combinations that are spread out at once."""
_SPREAD = 8
"""Of a sample, so many times the candidates that are kept are spread out at once."""
_PARENTS = 256
"""Of a sample, as many candidates at least are spread out."""
_FEW_VALUES = 64
"""Of a sample, settings of more values are not spread out whole: some of their values are drawn."""
_SEED = 20260
_GPUS = "gpus"
DIVIDES = "tp x cp x pp divides the GPUs"
DP_ASKED = "dp is one of those asked for"


@dataclass(frozen=True, slots=True)
class Removed:
    """Combinations that a constraint has removed."""

    why: str
    """What the constraint asks for."""
    count: int
    """Combinations; of a sample, an estimate."""
    example: str
    """What one of them is told as a run."""


@dataclass(frozen=True, slots=True)
class Found:
    """The candidates of a space."""

    rows: Candidates
    combinations: int
    """Before any constraint."""
    removed: tuple[Removed, ...]
    """By constraint, the one that removed most first."""
    of: int
    """Candidates of the whole space; more than `rows` where these are a sample."""
    estimated: bool = False
    """Whether `of` and the counts of `removed` are estimates, of what was drawn at random."""

    @property
    def sampled(self) -> bool:
        """Whether `rows` are a sample."""
        return self.of > len(self.rows)


class Sample(NamedTuple):
    """How a sample is drawn."""

    wanted: int
    """Candidates."""
    piece: int = PIECE
    """Combinations that are spread out at once."""


@dataclass(slots=True)
class Enumeration:
    """Candidates while their settings are crossed."""

    rows: Candidates
    """With a column `gpus`, where the number of GPUs is known."""
    axes: dict[str, tuple[Any, ...]]
    sample: int | None
    combinations: int
    rules: list[Constraint]
    """Those that have not been applied."""
    left: int
    """Combinations of the axes that have not been crossed."""
    degrees: tuple[int, ...] = ()
    """All that dp may be, where it fills the GPUs."""
    piece: int = PIECE
    """Combinations that are spread out at once, and candidates from which on a sample is drawn."""
    drawn: float = 1.0
    """The share of candidates that was kept where a sample is drawn."""
    removed: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    """By constraint and example, which stands for all that are refused in its words."""
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(_SEED))

    @classmethod
    def of(
        cls,
        base: Experiment,
        model: ModelConfig,
        fleets: Sequence[Fleet],
        axes: Mapping[str, tuple[Any, ...]],
        policies: Iterable[Constraint] = (),
        sample: Sample | None = None,
    ) -> Self:
        """The rows of the fleets, where nothing has been crossed; as the fields of `Space`."""
        combinations = len(fleets) * math.prod(map(len, axes.values()))
        counts = [fleet.gpus for fleet in fleets]
        degrees: tuple[int, ...] = ()
        columns = {HARDWARE: column_of_systems([fleet.hardware for fleet in fleets])}
        axes = dict(axes)
        if any(counts):
            given = axes.pop("dp", None)
            columns[_GPUS] = Column.of(counts)
            axes = _with_dp(axes, given)
            filled = {(count or 1) - beside(base.run) for count in counts}
            degrees = tuple(sorted({d for count in filled for d in divisors_of(count)}))
        rows = Candidates(base, model, columns, len(counts))
        rules = [*constraints(base.run.mode, model), *policies]
        left = math.prod(len(values) for values in axes.values())
        start = cls(rows, axes, None, combinations, rules, left, degrees)
        if sample is not None:
            start.sample, start.piece = sample
            start._draw(_SPREAD * start._most)
        start.rows = start.rows.take(start._kept(start.rows, start.due()))
        return start

    def cross(self, name: str, values: tuple[Any, ...]) -> None:
        """Spread out one setting, and drop what is refused."""
        self.left //= len(values)
        filled = name == "dp" and _GPUS in self.rows.columns
        if not filled and self._is_idle(name, values):
            values = values[:1]
        if len(self.rows) * len(values) > 4 * MOST_CANDIDATES and self.sample is None:
            raise too_many(len(self.rows) * len(values) * self.left)
        drawn: list[tuple[Candidates, Int]] = []
        if self.sample is not None:  # spread out few of many, as few of what comes of them are kept
            if filled or name == "order" or len(values) <= _FEW_VALUES:
                self._draw(max(_SPREAD * self._most / len(values), _PARENTS))
            else:
                drawn.append(self._drawn(name, values))
        due: list[Constraint] | None = None
        pieces: list[Candidates] = []
        share = 1.0
        step = max(1, self.piece // len(values))
        for begin in range(0, max(len(self.rows), 1), step):
            piece = self.rows.take(slice(begin, begin + step))
            piece = self._filled(piece, values) if filled else spread(piece, name, values)
            parents = np.arange(len(piece)) // len(values)
            if drawn:
                other, of = drawn.pop()
                parents = np.concatenate([parents, len(piece) + of])
                piece = concatenated([piece, other])
            due = self.due(piece) if due is None else due
            kept = self._kept(piece, due)
            piece, parents = piece.take(kept), parents[kept]
            if not filled and len(values) > 1:
                piece = self._without_same(piece, parents, name)
            pieces.append(self._thinned(piece, share))
            while sum(map(len, pieces)) > self._most:
                if self.sample is None:
                    share_done = min(1.0, (begin + step) / len(self.rows))
                    raise too_many(sum(map(len, pieces)) / share_done * self.left)
                pieces, share = [self._thinned(each, 0.5) for each in pieces], share / 2
        self.rows = concatenated(pieces)
        self.drawn *= share

    def _is_idle(self, name: str, values: tuple[Any, ...]) -> bool:
        """Whether a setting does nothing for all candidates, and nobody asks for its value: then
        its further values are removed without being spread out."""
        rows = self.rows
        asked = (rule for rule in self.rules if rule.reads == ALL or name in rule.reads)
        if len(values) == 1 or not len(rows) or any(asked) or not self._idle(rows, name).all():
            return False
        second = spread(rows.take(slice(1)), name, values[:2])
        self._note_same(second, 1, name, len(rows) * (len(values) - 1))
        return True

    def _draw(self, most: float) -> None:
        """Keep about so many candidates, drawn at random."""
        share = min(1.0, most / max(len(self.rows), 1))
        self.rows = self._thinned(self.rows, share)
        self.drawn *= share

    def _drawn(self, name: str, values: tuple[Any, ...]) -> tuple[Candidates, Int]:
        """Some of all candidates with some of a setting's many values, each pair as likely as any
        other, and which candidate each pair has. They are no longer among the rows.

        Candidates for which the setting does nothing stay: of their values the first is kept
        (`_without_same`), and which one is first is known where all are there.
        """
        rows, count = self.rows, len(values)
        most = min(_SPREAD * self._most, 2 * PIECE)
        share = min(1.0, most / max(len(rows) * count, 1))
        idle = self._idle(rows, name)
        some = np.flatnonzero(~idle)
        pairs = len(some) * count
        size = self.random.binomial(pairs, share)
        chosen = np.sort(self.random.choice(pairs, size, replace=False, shuffle=False))
        self.rows = self._thinned(rows.take(idle), share)
        self.drawn *= share
        of, value = np.divmod(chosen, count)
        return paired(rows, name, values, some[of], value), of

    @property
    def _most(self) -> int:
        """Candidates that are kept meanwhile."""
        return MOST_CANDIDATES if self.sample is None else 16 * self.sample + self.piece

    def due(self, rows: Candidates | None = None) -> list[Constraint]:
        """Constraints whose settings are all there, which are applied but once."""
        there = (self.rows if rows is None else rows).columns
        waiting = self.axes.keys() - there.keys()
        due = [
            rule
            for rule in self.rules
            if not (waiting if rule.reads == ALL else waiting.intersection(rule.reads))
        ]
        self.rules = [rule for rule in self.rules if rule not in due]
        return due

    def _kept(self, rows: Candidates, due: Iterable[Constraint]) -> Int:
        kept = np.arange(len(rows))
        for rule in due:
            some = rows.take(kept) if len(kept) < len(rows) else rows
            try:
                refused = rule.refused(some)
            except TooManyChecks as many:
                raise many.as_user_error(len(some) * self.left / self.drawn) from None
            counts = np.bincount(refused + 1, minlength=1 + len(rule.examples)).tolist()
            for example, count in zip(rule.examples, counts[1:], strict=True):
                if count:
                    self._note(rule.name, count, example)
            kept = kept[refused < 0]
        return kept

    def _note(self, why: str, count: int, example: str) -> None:
        told = self.removed.setdefault(why, {})
        # What is found in pieces has an example for each: the first stands for all.
        words = next((known for known in told if same_words(known, example)), example)
        told[words] = told.get(words, 0.0) + count * self.left / self.drawn

    def _filled(self, rows: Candidates, values: tuple[Any, ...]) -> Candidates:
        """dp is what the other degrees leave of the GPUs."""
        gpus = rows.numbers(_GPUS)
        gpus = gpus - beside(self.rows.base.run)
        others = rows.numbers("tp") * rows.numbers("cp") * rows.numbers("pp")
        divides = gpus % others == 0
        dp = gpus // others
        if not divides.all():
            at = int(np.argmin(divides))
            run = rows.run(at)
            example = (
                f"{gpus[at]} GPUs are not a multiple of tp={run.tp} x cp={run.cp} x pp={run.pp}"
            )
            self._note(DIVIDES, int((~divides).sum()), example)
        rows, dp = rows.take(divides), dp[divides]
        codes = np.searchsorted(self.degrees, dp).astype(code_type(len(self.degrees)))
        column = Column(codes, self.degrees)
        rows = Candidates(rows.base, rows.model, {**rows.columns, "dp": column}, len(rows))
        if values == (None,):
            return rows
        asked = column.is_one_of(*values)
        if not asked.all():
            at = int(np.argmin(asked))
            example = (
                f"dp is {dp[at]}, which fills {rows.world_size[at]} GPUs, and not "
                f"{either([str(value) for value in values])}"
            )
            self._note(DP_ASKED, int((~asked).sum()), example)
        return rows.take(asked)

    def _without_same(self, rows: Candidates, parents: Int, name: str) -> Candidates:
        """One candidate of those that differ only in a setting that does nothing there."""
        idle = self._idle(rows, name)
        again = np.zeros(len(rows), dtype=bool)
        where = np.flatnonzero(idle)
        again[where[1:]] = parents[where[1:]] == parents[where[:-1]]
        if name == "order":
            again |= of_same_order(rows, parents, self.axes.keys() - rows.columns.keys())
        if not again.any():
            return rows
        self._note_same(rows, int(np.argmax(again)), name, int(again.sum()))
        return rows.take(~again)

    def _note_same(self, rows: Candidates, row: int, name: str, count: int) -> None:
        """Note candidates, one of them by its row, that are the same whatever a setting is."""
        example = f"{rows.describe(row)}: the same as without {name}"
        self._note(f"{name} changes something", count, example)

    def _idle(self, rows: Candidates, name: str) -> Bool:
        """For which candidates a setting does nothing, as far as their settings are known."""
        idle = np.zeros(len(rows), dtype=bool)
        for values in (*EXPERIMENT[name].idle, *SAME_RUN.get(name, ())):
            if not self.axes.keys() & values.keys() - rows.columns.keys():
                each = [rows.column(other).is_one_of(value) for other, value in values.items()]
                idle |= np.logical_and.reduce(each)
        return idle

    def _thinned(self, rows: Candidates, share: float) -> Candidates:
        """Candidates drawn at random, each with the same probability."""
        if share == 1:
            return rows
        return rows.take(self.random.random(len(rows)) < share)

    def result(self) -> Found:
        """The candidates; UserError where there are none."""
        rows, combinations = self.rows, self.combinations
        again = of_same_stages(rows)
        if again.any():
            row, ends = int(np.argmax(again)), "first_stage_less_layers or last_stage_less_layers"
            self._note_same(rows, row, ends, int(again.sum()))
            rows = rows.take(~again)
        every = [
            Removed(why, round(sum(told.values())), max(told, key=lambda words: told[words]))
            for why, told in self.removed.items()
        ]
        listed = tuple(sorted((e for e in every if e.count), key=lambda each: -each.count))
        if not len(rows):
            told = [each for by_words in self.removed.values() for each in by_words.items()]
            most = sorted(told, key=lambda each: -each[1])[:2]
            number = "about {:.2g}" if self.drawn < 1 else "{:,.0f}"
            such = [f"{example} ({number.format(count)} such)" for example, count in most]
            why = "; ".join(such) or "nothing is left"
            none = f"none of the {combinations:,} combinations can be run"
            if self.drawn < 1:
                none = (
                    f"none of the combinations that were drawn of {combinations:.3g} can be run, "
                    "others may; give fewer values"
                )
            alone = "the only combination cannot be run"
            raise UserError(f"{alone if combinations == 1 else none}: {why}")
        whole = round(len(rows) / self.drawn)
        if self.sample is not None and len(rows) > self.sample:
            kept = self.random.choice(len(rows), self.sample, replace=False)
            rows = rows.take(np.sort(kept))
        columns = {name: of for name, of in rows.columns.items() if name != _GPUS}
        columns = {name: compact(of) for name, of in columns.items()}
        return Found(
            Candidates(rows.base, rows.model, columns, len(rows)),
            combinations,
            listed,
            whole,
            self.drawn < 1,
        )


def too_many(count: float) -> UserError:
    """What is said of a space of so many candidates."""
    return UserError(
        f"the space has about {count:.2g} candidates, wanted at most {MOST_CANDIDATES:,}; give "
        "fewer values, or --sample N for so many of them drawn at random"
    )


def beside(run: Run) -> int:
    """GPUs that the degrees do not count: those of `prefill`."""
    return run.world_size - run.tp * run.cp * run.dp * run.pp


def _with_dp(
    axes: Mapping[str, tuple[Any, ...]], given: tuple[Any, ...] | None
) -> dict[str, tuple[Any, ...]]:
    """The axes with dp behind the degrees that it follows from."""
    result: dict[str, tuple[Any, ...]] = {}
    before = [name for name in axes if name in ("pp", "tp", "cp")]
    for name in before:
        result[name] = axes[name]
    result["dp"] = given or (None,)
    return result | {name: values for name, values in axes.items() if name not in before}
