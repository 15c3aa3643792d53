"""The candidates of a space: settings crossed one after another, with constraints between them.

Each constraint is applied as soon as all settings that it reads are there, so that what cannot run
is never crossed with more. Of candidates that differ in a setting without effect, one stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from stagewright.arrays import Bool, Int
from stagewright.errors import UserError, either
from stagewright.model.config import ModelConfig
from stagewright.run.experiment import Experiment
from stagewright.run.rule import ALL
from stagewright.run.sections import EXPERIMENT
from stagewright.run.settings import Run
from stagewright.searching.candidates import HARDWARE, Candidates, Column, code_type
from stagewright.searching.constraints import (
    SAME_RUN,
    Constraint,
    TooManyChecks,
    constraints,
    same_words,
)
from stagewright.searching.machines import Fleet, divisors_of
from stagewright.time.hardware import Hardware

MOST_CANDIDATES = 30_000_000
"""Larger spaces are refused: a candidate takes about 20 bytes here, 500 once it is estimated."""
CHUNK = 1 << 21
"""Combinations that are made at once."""
DIVIDES = "tp x cp x pp divides the GPUs"
DP_GIVEN = "dp is one of those asked for"
_GPUS = "gpus"
_ENDS = "first_stage_less_layers", "last_stage_less_layers"


@dataclass(frozen=True, slots=True)
class Removed:
    """Combinations that a constraint has removed."""

    why: str
    """Requirement of the constraint."""
    count: int
    """Number of combinations."""
    example: str
    """Error message of one of them as a run."""


@dataclass(frozen=True, slots=True)
class Found:
    """The candidates of a space."""

    rows: Candidates
    combinations: int
    """Before any constraint."""
    removed: tuple[Removed, ...]
    """By constraint, the one that removed most first."""


def enumerate_candidates(
    base: Experiment,
    model: ModelConfig,
    fleets: Sequence[Fleet],
    axes: Mapping[str, tuple[Any, ...]],
    policies: Iterable[Constraint] = (),
    progress: Callable[[str, int], None] | None = None,
) -> Found:
    """All combinations of values that can run; dp fills the GPUs where their number is known.

    `progress` is called with each setting before it is crossed, and the candidates so far. Raises
    UserError where there are none, or more than `MOST_CANDIDATES`.
    """
    crossing = _PartialCandidates.of(base, model, fleets, axes, policies)
    for name, values in crossing.axes.items():
        if progress is not None:
            progress(name, len(crossing.rows))
        crossing.cross(name, values)
    return crossing.result()


@dataclass(slots=True)
class _PartialCandidates:
    """Candidates while their settings are crossed."""

    rows: Candidates
    """With a column `gpus`, where the number of GPUs is known."""
    axes: dict[str, tuple[Any, ...]]
    combinations: int
    rules: list[Constraint]
    """Constraints that have not been applied."""
    left: int
    """Combinations of the axes that have not been crossed."""
    degrees: tuple[int, ...]
    """Values that dp may have where it fills the GPUs."""
    removed: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    """Combinations by constraint and example."""

    @classmethod
    def of(
        cls,
        base: Experiment,
        model: ModelConfig,
        fleets: Sequence[Fleet],
        axes: Mapping[str, tuple[Any, ...]],
        policies: Iterable[Constraint],
    ) -> Self:
        """The rows of the fleets, where nothing has been crossed."""
        combinations = len(fleets) * math.prod(map(len, axes.values()))
        counts = [fleet.gpus for fleet in fleets]
        degrees: tuple[int, ...] = ()
        columns = {HARDWARE: _hardware_column([fleet.hardware for fleet in fleets])}
        axes = dict(axes)
        if any(counts):
            given = axes.pop("dp", None)
            columns[_GPUS] = Column.of(counts)
            axes = _with_dp(axes, given)
            filled = {(count or 1) - prefill_gpus(base.run) for count in counts}
            degrees = tuple(sorted({d for count in filled for d in divisors_of(count)}))
        rows = Candidates(base, model, columns, len(counts))
        rules = [*constraints(base.run.mode, model), *policies]
        left = math.prod(len(values) for values in axes.values())
        start = cls(rows, axes, combinations, rules, left, degrees)
        start.rows = start.rows.take(start._kept(start.rows, start._due(start.rows)))
        return start

    def cross(self, name: str, values: tuple[Any, ...]) -> None:
        """Combine all candidates with the values of a setting, and drop those that are refused."""
        self.left //= len(values)
        fills = name == "dp" and _GPUS in self.rows.columns
        if not fills and self._has_no_effect(name, values):
            values = values[:1]
        if len(self.rows) * len(values) > 4 * MOST_CANDIDATES:
            raise _too_many(len(self.rows) * len(values) * self.left)
        due: list[Constraint] | None = None
        chunks: list[Candidates] = []
        step = max(1, CHUNK // len(values))
        for begin in range(0, max(len(self.rows), 1), step):
            chunk = self.rows.take(slice(begin, begin + step))
            chunk = self._filled(chunk, values) if fills else _crossed(chunk, name, values)
            parents = np.arange(len(chunk)) // len(values)
            due = self._due(chunk) if due is None else due
            kept = self._kept(chunk, due)
            chunk, parents = chunk.take(kept), parents[kept]
            if not fills and len(values) > 1:
                chunk = self._without_same(chunk, parents, name)
            chunks.append(chunk)
            if sum(map(len, chunks)) > MOST_CANDIDATES:
                share = min(1.0, (begin + step) / len(self.rows))
                raise _too_many(sum(map(len, chunks)) / share * self.left)
        self.rows = _concatenated(chunks)

    def _due(self, rows: Candidates) -> list[Constraint]:
        """Constraints whose settings are all there, which are applied but once."""
        waiting = self.axes.keys() - rows.columns.keys()
        due = [
            rule
            for rule in self.rules
            if not (waiting if rule.reads == ALL else waiting.intersection(rule.reads))
        ]
        self.rules = [rule for rule in self.rules if rule not in due]
        return due

    def _kept(self, rows: Candidates, due: Iterable[Constraint]) -> Int:
        """Candidates that no constraint refuses."""
        kept = np.arange(len(rows))
        for rule in due:
            some = rows.take(kept) if len(kept) < len(rows) else rows
            try:
                refused = rule.refused(some)
            except TooManyChecks as error:
                raise error.as_user_error(len(some) * self.left) from None
            counts = np.bincount(refused + 1, minlength=1 + len(rule.examples)).tolist()
            for example, count in zip(rule.examples, counts[1:], strict=True):
                if count:
                    self._note(rule.name, count, example)
            kept = kept[refused < 0]
        return kept

    def _note(self, why: str, count: int, example: str) -> None:
        """Count combinations that a constraint has removed."""
        examples = self.removed.setdefault(why, {})
        # Each chunk has an example of its own: the first stands for all.
        words = next((known for known in examples if same_words(known, example)), example)
        examples[words] = examples.get(words, 0) + count * self.left

    def _filled(self, rows: Candidates, values: tuple[Any, ...]) -> Candidates:
        """Candidates with the dp that fills their GPUs, where it is one of the values."""
        gpus = rows.numbers(_GPUS) - prefill_gpus(rows.base.run)
        others = rows.numbers("tp") * rows.numbers("cp") * rows.numbers("pp")
        divides = gpus % others == 0
        dp = gpus // others
        if not divides.all():
            row = int(np.argmin(divides))
            run = rows.run(row)
            example = (
                f"{gpus[row]} GPUs are not a multiple of tp={run.tp} x cp={run.cp} x pp={run.pp}"
            )
            self._note(DIVIDES, int((~divides).sum()), example)
        rows, dp = rows.take(divides), dp[divides]
        codes = np.searchsorted(self.degrees, dp).astype(code_type(len(self.degrees)))
        column = Column(codes, self.degrees)
        rows = Candidates(rows.base, rows.model, {**rows.columns, "dp": column}, len(rows))
        if values == (None,):
            return rows
        given = column.is_one_of(*values)
        if not given.all():
            row = int(np.argmin(given))
            example = (
                f"dp is {dp[row]}, which fills {rows.world_size[row]} GPUs, and not "
                f"{either([str(value) for value in values])}"
            )
            self._note(DP_GIVEN, int((~given).sum()), example)
        return rows.take(given)

    # ---- candidates that are the same run --------------------------------------------------------

    def _has_no_effect(self, name: str, values: tuple[Any, ...]) -> bool:
        """True if a setting changes no candidate, and no constraint reads it: then its further
        values are removed without being crossed."""
        rows = self.rows
        read = (rule for rule in self.rules if rule.reads == ALL or name in rule.reads)
        if len(values) == 1 or not len(rows) or any(read) or not self._no_effect(rows, name).all():
            return False
        second = _crossed(rows.take(slice(1)), name, values[:2])
        self._note_same(second, 1, name, len(rows) * (len(values) - 1))
        return True

    def _no_effect(self, rows: Candidates, name: str) -> Bool:
        """Candidates for which a setting changes nothing, as far as their settings are known."""
        found = np.zeros(len(rows), dtype=bool)
        for values in (*EXPERIMENT[name].idle, *SAME_RUN.get(name, ())):
            if not self.axes.keys() & values.keys() - rows.columns.keys():
                each = [rows.column(other).is_one_of(value) for other, value in values.items()]
                found |= np.logical_and.reduce(each)
        return found

    def _without_same(self, rows: Candidates, parents: Int, name: str) -> Candidates:
        """One candidate of those that differ only in a setting without effect."""
        same = np.zeros(len(rows), dtype=bool)
        at = np.flatnonzero(self._no_effect(rows, name))
        same[at[1:]] = parents[at[1:]] == parents[at[:-1]]
        if name == "order":
            same |= _same_order(rows, parents, self.axes.keys() - rows.columns.keys())
        if not same.any():
            return rows
        self._note_same(rows, int(np.argmax(same)), name, int(same.sum()))
        return rows.take(~same)

    def _note_same(self, rows: Candidates, row: int, name: str, count: int) -> None:
        example = f"{rows.describe(row)}: the same as without {name}"
        self._note(f"{name} changes something", count, example)

    # ---- the result ------------------------------------------------------------------------------

    def result(self) -> Found:
        """The candidates; UserError where there are none."""
        rows = self.rows
        same = _same_stages(rows)
        if same.any():
            ends = "first_stage_less_layers or last_stage_less_layers"
            self._note_same(rows, int(np.argmax(same)), ends, int(same.sum()))
            rows = rows.take(~same)
        if not len(rows):
            raise self._none()
        removed = [
            Removed(why, sum(examples.values()), max(examples, key=lambda words: examples[words]))
            for why, examples in self.removed.items()
        ]
        columns = {name: _compact(of) for name, of in rows.columns.items() if name != _GPUS}
        return Found(
            Candidates(rows.base, rows.model, columns, len(rows)),
            self.combinations,
            tuple(sorted((each for each in removed if each.count), key=lambda each: -each.count)),
        )

    def _none(self) -> UserError:
        """Error of a space in which nothing can run: the most frequent reasons."""
        reasons = [item for examples in self.removed.values() for item in examples.items()]
        most = sorted(reasons, key=lambda item: -item[1])[:2]
        why = "; ".join(f"{example} ({count:,} such)" for example, count in most)
        none = f"none of the {self.combinations:,} combinations can be run"
        if self.combinations == 1:
            none = "the only combination cannot be run"
        return UserError(f"{none}: {why or 'nothing is left'}")


def _too_many(count: float) -> UserError:
    """Error of a space of so many candidates."""
    return UserError(
        f"the space has about {count:.2g} candidates, wanted at most {MOST_CANDIDATES:,}; give "
        "fewer values, or fix some settings"
    )


def prefill_gpus(run: Run) -> int:
    """GPUs that the degrees do not count: those of `prefill`."""
    return run.world_size - run.tp * run.cp * run.dp * run.pp


def _with_dp(
    axes: Mapping[str, tuple[Any, ...]], given: tuple[Any, ...] | None
) -> dict[str, tuple[Any, ...]]:
    """The axes with dp after the degrees that it follows from."""
    before = [name for name in axes if name in ("pp", "tp", "cp")]
    result = {name: axes[name] for name in before} | {"dp": given or (None,)}
    return result | {name: values for name, values in axes.items() if name not in before}


# ---- columns of crossed candidates ---------------------------------------------------------------


def _hardware_column(systems: Sequence[Hardware]) -> Column:
    """A column of hardware, which cannot be hashed."""
    number: dict[int, int] = {}
    codes = [number.setdefault(id(hardware), len(number)) for hardware in systems]
    values = tuple({id(hardware): hardware for hardware in systems}.values())
    return Column(np.array(codes, dtype=code_type(len(values))), values)


def _crossed(rows: Candidates, name: str, values: tuple[Any, ...]) -> Candidates:
    """Each candidate with each of the values, in order."""
    count = len(rows) * len(values)
    columns = {
        other: Column.constant(column.values[0], count)
        if len(column.values) == 1
        else Column(np.repeat(column.codes, len(values)), column.values)
        for other, column in rows.columns.items()
    }
    if len(values) == 1:
        columns[name] = Column.constant(values[0], count)
    else:
        codes = np.tile(np.arange(len(values), dtype=code_type(len(values))), len(rows))
        columns[name] = Column(codes, values)
    return Candidates(rows.base, rows.model, columns, count)


def _concatenated(chunks: Sequence[Candidates]) -> Candidates:
    """Chunks of the same columns, one after another."""
    first = chunks[0]
    if len(chunks) == 1:
        return first
    count = sum(map(len, chunks))
    columns = {
        name: Column.constant(column.values[0], count)
        if len(column.values) == 1
        else Column(np.concatenate([c.columns[name].codes for c in chunks]), column.values)
        for name, column in first.columns.items()
    }
    return Candidates(first.base, first.model, columns, count)


def _compact(column: Column) -> Column:
    """The column without values that no candidate has."""
    used: Bool = np.zeros(len(column.values), dtype=bool)
    used[column.codes] = True
    if used.all():
        return column
    values = tuple(v for v, is_used in zip(column.values, used.tolist(), strict=True) if is_used)
    if len(values) == 1:
        return Column.constant(values[0], len(column))
    number = np.cumsum(used) - 1
    return Column(number[column.codes].astype(code_type(len(values))), values)


# ---- candidates that are the same run as one before them -----------------------------------------


def _same_order(rows: Candidates, parents: Int, unknown: Collection[str]) -> Bool:
    """Orders that only move axes of one rank, and number ranks as another of the same parent does.

    `unknown`: degrees that are not crossed yet, and may be more than one.
    """
    degrees = {axis: rows.numbers(axis) > 1 for axis in ("tp", "cp", "dp", "pp", "ep")}
    split = {axis: flag | (axis in unknown) for axis, flag in degrees.items()}
    orders = [value.split("-") for value in rows.column("order").values]
    codes = rows.column("order").codes
    known: dict[tuple[str, ...], int] = {}
    number = np.zeros(len(rows), dtype=np.int64)
    pattern = sum(flag.astype(np.int64) << n for n, flag in enumerate(split.values()))
    for bits in np.unique(pattern).tolist():
        axes = {axis for n, axis in enumerate(split) if bits >> n & 1}
        of_value = [
            known.setdefault(tuple(axis for axis in order if axis in axes), len(known))
            for order in orders
        ]
        selected = pattern == bits
        number[selected] = np.array(of_value)[codes[selected]]
    return _seen_before(parents * len(known) + number)


def _same_stages(rows: Candidates) -> Bool:
    """Candidates that differ from one before them only in how many layers the ends of the pipeline
    count for, and have the same layers on each stage."""
    several = any(len(rows.columns[n].values) > 1 for n in _ENDS if n in rows.columns)
    if not several or not len(rows):
        return np.zeros(len(rows), dtype=bool)
    others = rows.distinct(*(name for name in rows.columns if name not in _ENDS)).of
    splits = rows.distinct("pp", "vpp", "layers_per_stage", "pipeline_split", *_ENDS)
    known: dict[object, int] = {}
    number = [
        known.setdefault(rows.run(row).resolved(rows.model).layers_per_stage, len(known))
        for row in splits.first.tolist()
    ]
    return _seen_before(others * len(known) + np.array(number)[splits.of])


def _seen_before(keys: Int) -> Bool:
    """Keys that an earlier row has."""
    found = np.ones(len(keys), dtype=bool)
    found[np.unique(keys, return_index=True)[1]] = False
    return found
