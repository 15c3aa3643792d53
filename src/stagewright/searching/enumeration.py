"""Enumeration of a space: settings are crossed one by one, constraints applied in between.

A constraint is applied once all settings that it reads are crossed, so that refused combinations
are not multiplied. Of candidates that differ in a setting without effect, one remains.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from stagewright.arrays import Bool, Int
from stagewright.errors import UserError, either
from stagewright.model.config import ModelConfig
from stagewright.run.experiment import Experiment
from stagewright.run.rule import ALL
from stagewright.run.sections import EXPERIMENT
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
"""Limit of candidates: each takes about 20 bytes here, 500 once it is estimated."""
CHUNK = 1 << 21
"""Combinations that are crossed at once."""
DIVIDES = "tp x cp x pp divides the GPUs"
DP_ALLOWED = "dp is one of those asked for"
_GPUS = "gpus"
_STAGE_SETTINGS = "first_stage_less_layers", "last_stage_less_layers"


@dataclass(frozen=True, slots=True)
class Removed:
    """Combinations that a constraint removed."""

    requirement: str
    """Requirement of the constraint."""
    count: int
    """Number of combinations."""
    example: str
    """Error message of one of them as a run."""


@dataclass(frozen=True, slots=True)
class Enumeration:
    """All candidates of a space."""

    candidates: Candidates
    combinations: int
    """Number of combinations before any constraint."""
    removed: tuple[Removed, ...]
    """Removed combinations by constraint, largest count first."""


def enumerate_candidates(
    base: Experiment,
    model: ModelConfig,
    fleets: Sequence[Fleet],
    axes: Mapping[str, tuple[Any, ...]],
    extra_constraints: Iterable[Constraint] = (),
) -> Enumeration:
    """All combinations of values that can run; dp fills the GPUs where their number is known.

    Raises UserError where there are none, or more than `MOST_CANDIDATES`.
    """
    crossing = _PartialCandidates.of(base, model, fleets, axes, extra_constraints)
    for name, values in crossing.axes.items():
        crossing.cross(name, values)
    return crossing.result()


@dataclass(slots=True)
class _PartialCandidates:
    """Candidates while their settings are crossed."""

    candidates: Candidates
    """Candidates with a column `gpus`, where the number of GPUs is known."""
    axes: dict[str, tuple[Any, ...]]
    combinations: int
    constraints: list[Constraint]
    """Constraints that have not been applied."""
    uncrossed: int
    """Combinations of the axes that have not been crossed."""
    degrees: tuple[int, ...]
    """Possible values of dp where it fills the GPUs."""
    removed: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    """Number of removed combinations by requirement and example."""

    @classmethod
    def of(
        cls,
        base: Experiment,
        model: ModelConfig,
        fleets: Sequence[Fleet],
        axes: Mapping[str, tuple[Any, ...]],
        extra_constraints: Iterable[Constraint],
    ) -> Self:
        """One candidate per fleet; no axis is crossed."""
        combinations = len(fleets) * math.prod(map(len, axes.values()))
        counts = [fleet.gpus for fleet in fleets]
        columns = {HARDWARE: _hardware_column([fleet.hardware for fleet in fleets])}
        axes = dict(axes)
        dp_fills = any(counts)
        if dp_fills:
            dp_values = axes.pop("dp", None)
            columns[_GPUS] = Column.of(counts)
            axes = _with_dp(axes, dp_values)
        varied = {fleet.hardware.name: fleet.varied for fleet in fleets if fleet.varied}
        candidates = Candidates(base, model, columns, len(counts), varied)
        degrees: tuple[int, ...] = ()
        if dp_fills:
            filled = {(count or 1) - candidates.prefill_gpus for count in counts}
            degrees = tuple(sorted({d for count in filled for d in divisors_of(count)}))
        remaining = [*constraints(base.run.mode, model), *extra_constraints]
        uncrossed = math.prod(len(values) for values in axes.values())
        start = cls(candidates, axes, combinations, remaining, uncrossed, degrees)
        start.candidates = candidates.take(
            start._allowed(candidates, start._pop_applicable(candidates))
        )
        return start

    def cross(self, name: str, values: tuple[Any, ...]) -> None:
        """Combine all candidates with the values of a setting; remove those that are refused."""
        self.uncrossed //= len(values)
        fills = name == "dp" and _GPUS in self.candidates.columns
        if not fills and self._has_no_effect(name, values):
            values = values[:1]
        total = len(self.candidates)
        if total * len(values) > 4 * MOST_CANDIDATES:
            raise _too_many(total * len(values) * self.uncrossed)
        applicable: list[Constraint] | None = None
        chunks: list[Candidates] = []
        step = max(1, CHUNK // len(values))
        for begin in range(0, max(total, 1), step):
            chunk = self.candidates.take(slice(begin, begin + step))
            chunk = self._filled(chunk, values) if fills else _crossed(chunk, name, values)
            parents = np.arange(len(chunk)) // len(values)
            if applicable is None:
                applicable = self._pop_applicable(chunk)
            allowed = self._allowed(chunk, applicable)
            chunk, parents = chunk.take(allowed), parents[allowed]
            if not fills and len(values) > 1:
                chunk = self._without_same(chunk, parents, name)
            chunks.append(chunk)
            count = sum(map(len, chunks))
            if count > MOST_CANDIDATES:
                raise _too_many(count / min(1.0, (begin + step) / total) * self.uncrossed)
        self.candidates = _concatenated(chunks)

    def _pop_applicable(self, candidates: Candidates) -> list[Constraint]:
        """Pop constraints whose settings are all crossed."""
        waiting = self.axes.keys() - candidates.columns.keys()
        applicable = [
            constraint
            for constraint in self.constraints
            if not (waiting if constraint.reads == ALL else waiting.intersection(constraint.reads))
        ]
        self.constraints = [c for c in self.constraints if c not in applicable]
        return applicable

    def _allowed(self, candidates: Candidates, applicable: Iterable[Constraint]) -> Int:
        """Candidates that no constraint refuses."""
        allowed = np.arange(len(candidates))
        for constraint in applicable:
            subset = candidates.take(allowed) if len(allowed) < len(candidates) else candidates
            try:
                refused = constraint.refused(subset)
            except TooManyChecks as error:
                raise error.as_user_error(len(subset) * self.uncrossed) from None
            counts = np.bincount(refused + 1, minlength=1 + len(constraint.examples)).tolist()
            for example, count in zip(constraint.examples, counts[1:], strict=True):
                if count:
                    self._count_removed(constraint.requirement, count, example)
            allowed = allowed[refused < 0]
        return allowed

    def _count_removed(self, requirement: str, count: int, example: str) -> None:
        """Count removed combinations. Merge examples of chunks that differ in numbers only."""
        counts = self.removed.setdefault(requirement, {})
        example = next((text for text in counts if same_words(text, example)), example)
        counts[example] = counts.get(example, 0) + count * self.uncrossed

    def _filled(self, candidates: Candidates, values: tuple[Any, ...]) -> Candidates:
        """Candidates with the dp that fills their GPUs, where it is one of the values."""
        gpus = candidates.numbers(_GPUS) - candidates.prefill_gpus
        ranks = np.prod([candidates.numbers(name) for name in ("tp", "cp", "pp")], axis=0)
        divides = gpus % ranks == 0
        dp: Int = gpus // ranks
        if not divides.all():
            index = int(np.argmin(divides))
            run = candidates.run(index)
            example = (
                f"{gpus[index]} GPUs are not a multiple of tp={run.tp} x cp={run.cp} x pp={run.pp}"
            )
            self._count_removed(DIVIDES, int((~divides).sum()), example)
        candidates, dp = candidates.take(divides), dp[divides]
        codes: Int = np.searchsorted(self.degrees, dp)
        column = Column(codes.astype(code_type(len(self.degrees))), self.degrees)
        candidates = replace(candidates, columns={**candidates.columns, "dp": column})
        if values == (None,):
            return candidates
        allowed = column.is_one_of(*values)
        if not allowed.all():
            index = int(np.argmin(allowed))
            example = (
                f"dp is {dp[index]}, which fills {candidates.world_size[index]} GPUs, and not "
                f"{either([str(value) for value in values])}"
            )
            self._count_removed(DP_ALLOWED, int((~allowed).sum()), example)
        return candidates.take(allowed)

    # ---- candidates that are the same run --------------------------------------------------------

    def _has_no_effect(self, name: str, values: tuple[Any, ...]) -> bool:
        """True if a setting changes no candidate, and no remaining constraint reads it.

        Its further values are then counted as removed without being crossed.
        """
        candidates = self.candidates
        if len(values) == 1 or not len(candidates):
            return False
        if any(c.reads == ALL or name in c.reads for c in self.constraints):
            return False
        if not self._no_effect(candidates, name).all():
            return False
        second = _crossed(candidates.take(slice(1)), name, values[:2])
        self._count_same(second, 1, name, len(candidates) * (len(values) - 1))
        return True

    def _no_effect(self, candidates: Candidates, name: str) -> Bool:
        """Mask of candidates in which a setting changes nothing, by the settings crossed so far."""
        mask = np.zeros(len(candidates), dtype=bool)
        for values in (*EXPERIMENT[name].idle, *SAME_RUN.get(name, ())):
            if not self.axes.keys() & values.keys() - candidates.columns.keys():
                equal = [candidates.column(n).is_one_of(value) for n, value in values.items()]
                mask |= np.logical_and.reduce(equal)
        return mask

    def _without_same(self, candidates: Candidates, parents: Int, name: str) -> Candidates:
        """Keep one of the candidates that differ only in a setting without effect."""
        same = np.zeros(len(candidates), dtype=bool)
        at = np.flatnonzero(self._no_effect(candidates, name))
        same[at[1:]] = parents[at[1:]] == parents[at[:-1]]
        if name == "order":
            same |= _same_order(candidates, parents, self.axes.keys() - candidates.columns.keys())
        if not same.any():
            return candidates
        self._count_same(candidates, int(np.argmax(same)), name, int(same.sum()))
        return candidates.take(~same)

    def _count_same(self, candidates: Candidates, index: int, name: str, count: int) -> None:
        example = f"{candidates.describe(index)}: the same as without {name}"
        self._count_removed(f"{name} changes something", count, example)

    # ---- the result ------------------------------------------------------------------------------

    def result(self) -> Enumeration:
        """All candidates; UserError where there are none."""
        candidates = self.candidates
        same = _same_stages(candidates)
        if same.any():
            names = " or ".join(_STAGE_SETTINGS)
            self._count_same(candidates, int(np.argmax(same)), names, int(same.sum()))
            candidates = candidates.take(~same)
        if not len(candidates):
            raise self._none()
        removed = [
            Removed(requirement, sum(counts.values()), max(counts, key=lambda text: counts[text]))
            for requirement, counts in self.removed.items()
        ]
        columns = {n: _compact(column) for n, column in candidates.columns.items() if n != _GPUS}
        return Enumeration(
            replace(candidates, columns=columns),
            self.combinations,
            tuple(sorted((r for r in removed if r.count), key=lambda r: -r.count)),
        )

    def _none(self) -> UserError:
        """Error of a space in which nothing can run: the most frequent reasons."""
        reasons = [item for counts in self.removed.values() for item in counts.items()]
        frequent = sorted(reasons, key=lambda item: -item[1])[:2]
        why = "; ".join(f"{example} ({count:,} such)" for example, count in frequent)
        none = f"none of the {self.combinations:,} combinations can be run"
        if self.combinations == 1:
            none = "the only combination cannot be run"
        return UserError(f"{none}: {why or 'nothing is left'}")


def _too_many(count: float) -> UserError:
    """Error of a space with about `count` candidates."""
    return UserError(
        f"the space has about {count:.2g} candidates, wanted at most {MOST_CANDIDATES:,}; give "
        "fewer values, or fix some settings"
    )


def _with_dp(
    axes: Mapping[str, tuple[Any, ...]], dp_values: tuple[Any, ...] | None
) -> dict[str, tuple[Any, ...]]:
    """Axes with dp after the degrees that it follows from."""
    before = [name for name in axes if name in ("pp", "tp", "cp")]
    result = {name: axes[name] for name in before} | {"dp": dp_values or (None,)}
    return result | {name: values for name, values in axes.items() if name not in before}


# ---- columns of crossed candidates ---------------------------------------------------------------


def _hardware_column(systems: Sequence[Hardware]) -> Column:
    """Column of hardware, which cannot be hashed."""
    number: dict[int, int] = {}
    codes = [number.setdefault(id(hardware), len(number)) for hardware in systems]
    values = tuple({id(hardware): hardware for hardware in systems}.values())
    return Column(np.array(codes, dtype=code_type(len(values))), values)


def _crossed(candidates: Candidates, name: str, values: tuple[Any, ...]) -> Candidates:
    """Each candidate with each of the values, in order."""
    count = len(candidates) * len(values)
    columns = {
        other: Column.constant(column.values[0], count)
        if len(column.values) == 1
        else Column(np.repeat(column.codes, len(values)), column.values)
        for other, column in candidates.columns.items()
    }
    if len(values) == 1:
        columns[name] = Column.constant(values[0], count)
    else:
        codes = np.tile(np.arange(len(values), dtype=code_type(len(values))), len(candidates))
        columns[name] = Column(codes, values)
    return replace(candidates, columns=columns, count=count)


def _concatenated(chunks: Sequence[Candidates]) -> Candidates:
    """Concatenate chunks that have the same columns."""
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
    return replace(first, columns=columns, count=count)


def _compact(column: Column) -> Column:
    """Drop values that no candidate has."""
    used: Bool = np.zeros(len(column.values), dtype=bool)
    used[column.codes] = True
    if used.all():
        return column
    values = tuple(v for v, is_used in zip(column.values, used.tolist(), strict=True) if is_used)
    if len(values) == 1:
        return Column.constant(values[0], len(column))
    number = np.cumsum(used) - 1
    return Column(number[column.codes].astype(code_type(len(values))), values)


# ---- candidates that are the same run as an earlier one ------------------------------------------


def _same_order(candidates: Candidates, parents: Int, uncrossed: Collection[str]) -> Bool:
    """Mask of axis orders equal to an earlier one once size-1 axes are dropped.

    `uncrossed`: degrees that are not crossed yet, and may be more than one.
    """
    degrees = {axis: candidates.numbers(axis) > 1 for axis in ("tp", "cp", "dp", "pp", "ep")}
    split = {axis: mask | (axis in uncrossed) for axis, mask in degrees.items()}
    column = candidates.column("order")
    orders = [value.split("-") for value in column.values]
    number_of: dict[tuple[str, ...], int] = {}
    number = np.zeros(len(candidates), dtype=np.int64)
    pattern = sum(mask.astype(np.int64) << n for n, mask in enumerate(split.values()))
    for bits in np.unique(pattern).tolist():
        axes = {axis for n, axis in enumerate(split) if bits >> n & 1}
        of_value = [
            number_of.setdefault(tuple(axis for axis in order if axis in axes), len(number_of))
            for order in orders
        ]
        selected = pattern == bits
        number[selected] = np.array(of_value)[column.codes[selected]]
    return _is_repeated(parents * len(number_of) + number)


def _same_stages(candidates: Candidates) -> Bool:
    """Mask of candidates with the layers per stage of an earlier, otherwise equal one."""
    columns = candidates.columns
    varies = any(len(columns[n].values) > 1 for n in _STAGE_SETTINGS if n in columns)
    if not varies or not len(candidates):
        return np.zeros(len(candidates), dtype=bool)
    others = candidates.distinct(*(name for name in columns if name not in _STAGE_SETTINGS)).of
    number: dict[object, int] = {}

    def number_of_split(index: int) -> int:
        layers = candidates.run(index).resolved(candidates.model).layers_per_stage
        return number.setdefault(layers, len(number))

    names = ("pp", "vpp", "layers_per_stage", "pipeline_split", *_STAGE_SETTINGS)
    split = candidates.map_distinct(names, number_of_split)
    return _is_repeated(others * len(number) + split)


def _is_repeated(keys: Int) -> Bool:
    """Mask of keys that occurred before."""
    mask = np.ones(len(keys), dtype=bool)
    mask[np.unique(keys, return_index=True)[1]] = False
    return mask
