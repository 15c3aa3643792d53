"""The space of a search: every combination of listed values that can be run, as columns.

Settings are crossed one after another, and each constraint is applied as soon as all that it reads
is there, so that what cannot be run is never spread out. dp follows from the number of GPUs.

>>> from stagewright.explore.systems import System
>>> from stagewright.run.sections.cluster import ClusterSection
>>> from stagewright.run.sections.execution import Execution
>>> from stagewright.time.hardware import resolve
>>> base = Experiment(Run(model="gpt2", global_batch_size=16), ClusterSection(), Execution())
>>> space = Space.of(base, [System(resolve("h100-sxm"), 8)], {"tp": (1, 2, 8), "zero": (0, 1)})
>>> found = space.candidates()
>>> [found.rows.run(row).describe() for row in range(len(found.rows))]
['gpt2 dp=8 global_batch_size=16', 'gpt2 dp=8 global_batch_size=16 zero=1', \
'gpt2 tp=2 dp=4 global_batch_size=16', 'gpt2 tp=2 dp=4 global_batch_size=16 zero=1']
>>> [(removed.why, removed.count) for removed in found.removed]
[('heads and channels are split evenly by tp', 2)]
>>> found.removed[0].example
'tp=8 does not divide the 12 attention heads of gpt2; use 1, 2, 3, 4, 6 or 12'
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from stagewright.arrays import Bool, Int
from stagewright.errors import UserError
from stagewright.explore.candidates import HARDWARE, Candidates, Column, code_type
from stagewright.explore.constraints import SAME_RUN, Constraint, check_value, constraints
from stagewright.explore.systems import System, divisors_of
from stagewright.model.catalog import resolve
from stagewright.model.config import ModelConfig
from stagewright.run.experiment import Experiment, with_settings
from stagewright.run.rule import ALL
from stagewright.run.sections import EXPERIMENT, SETTINGS
from stagewright.run.settings import Run
from stagewright.time.hardware import Hardware

MOST_CANDIDATES = 30_000_000
"""More are refused: each takes about 20 bytes, and a search of so many minutes."""
_PIECE = 1 << 21
"""Combinations that are spread out at once."""
_SEED = 20260
_GPUS = "gpus"

_FIRST = (
    *("pp", "tp", "cp", "dp", "order", "ep", "etp", "vpp", "layers_per_stage", "pipeline_split"),
    *("global_batch_size", "micro_batch_size", "schedule", "microbatch_group_size_per_vp_stage"),
    *("seq_length", "zero", "dp_shard", "sequence_parallel", "cp_comm_type"),
)
"""Settings that are crossed first, in this order: those that many constraints read."""

WORKLOAD = ("model", "as_family", "layers", "vocab", "mtp_num_layers", "mode", "framework")
"""Settings that say what is done, which all candidates have in common."""
_ELSEWHERE = ("hardware", "nodes", "price", "stragglers", "durations")
"""Settings of the machine that are no columns."""


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
    """Candidates of the whole space; more than `rows` where these are a sample (an estimate)."""

    @property
    def sampled(self) -> bool:
        """Whether `rows` are a sample."""
        return self.of > len(self.rows)


@dataclass(frozen=True, slots=True, eq=False)
class Space:
    """Values by setting, to be combined."""

    base: Experiment
    """What all candidates have in common; its settings of `axes` count for nothing."""
    model: ModelConfig
    systems: tuple[System, ...]
    axes: Mapping[str, tuple[Any, ...]]
    """Values by name, of a run, the machine and the execution; in the order of crossing."""
    policies: tuple[Constraint, ...] = ()
    """Constraints of a space by default, beside those of runs."""

    @classmethod
    def of(
        cls,
        base: Experiment,
        systems: Iterable[System],
        axes: Mapping[str, Sequence[Any]],
        model: ModelConfig | None = None,
        policies: Iterable[Constraint] = (),
    ) -> Self:
        """A space whose values have been checked one by one; UserError for a value that none has.

        `model` replaces the configuration that the model's name stands for.
        """
        run = base.run
        of = model or resolve(run.model, run.as_family or "")
        of = of.with_overrides(run.layers, run.vocab, run.mtp_num_layers)
        every = tuple(systems)
        if not every:
            raise UserError("a search needs hardware; name some with --hardware")
        for name in axes:
            if name in WORKLOAD or name in _ELSEWHERE:
                raise UserError(
                    f"{name} takes one value in a search, got {len(axes[name])}; choose one"
                )
        checked = {name: _checked(base, of, name, axes[name]) for name in _in_order(axes)}
        known = any(system.gpus for system in every)
        if "dp" not in checked and not known:
            checked["dp"] = (run.dp,)
        return cls(base, of, every, checked, tuple(policies))

    @property
    def combinations(self) -> int:
        """Combinations of all values, before any constraint."""
        return len(self.systems) * math.prod(map(len, self.axes.values()))

    def candidates(
        self, sample: int | None = None, progress: Callable[[str, int], None] | None = None
    ) -> Found:
        """All combinations that can be run; with `sample`, so many of them drawn at random.

        The draw is the same each time. `progress` hears which setting is crossed next, and how many
        candidates there are. Raises UserError where there are too many, or none.
        """
        crossing = _Crossing.of(self, sample)
        for name, values in crossing.axes.items():
            if progress is not None:
                progress(name, len(crossing.rows))
            crossing.cross(name, values)
        return crossing.found()


def _in_order(names: Iterable[str]) -> list[str]:
    given = set(names)
    rest = [name for name in EXPERIMENT if name in given and name not in _FIRST]
    return [name for name in _FIRST if name in given] + rest


def _checked(
    base: Experiment, model: ModelConfig, name: str, values: Sequence[Any]
) -> tuple[Any, ...]:
    """Values of one setting, as the setting's type has them; UserError for one that it has not."""
    found: list[Any] = []
    for value in values:
        if name in SETTINGS:
            # A list may hold what only suits other values of other settings.
            run = Run.of(base.run.model_dump(exclude_unset=True), {name: value})
            check_value(run, model)
            found.append(getattr(run, name))
        else:
            home = base.cluster if EXPERIMENT[name].section == "cluster" else base.execution
            beside = {"launch_mode": "cuda_graph"} if name == "cuda_graph_modules" else {}
            found.append(getattr(with_settings(home, {**beside, name: value}), name))
    ordered = list(dict.fromkeys(found))
    if EXPERIMENT[name].idle:
        # Where the setting does nothing, its first value stands for all.
        ordered.sort(key=lambda value: value != EXPERIMENT[name].default)
    return tuple(ordered)


@dataclass(slots=True)
class _Crossing:
    """Candidates while their settings are crossed."""

    space: Space
    sample: int | None
    axes: dict[str, tuple[Any, ...]]
    rows: Candidates
    rules: list[Constraint]
    """Those that have not been applied."""
    left: int
    """Combinations of the axes that have not been crossed."""
    degrees: tuple[int, ...] = ()
    """All that dp may be, where it fills the GPUs."""
    drawn: float = 1.0
    """The share of candidates that was kept where a sample is drawn."""
    removed: dict[str, float] = field(default_factory=dict[str, float])
    examples: dict[str, str] = field(default_factory=dict[str, str])
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(_SEED))

    @classmethod
    def of(cls, space: Space, sample: int | None) -> Self:
        axes = dict(space.axes)
        counts = [system.gpus for system in space.systems]
        degrees: tuple[int, ...] = ()
        columns = {HARDWARE: _column([system.hardware for system in space.systems])}
        if any(counts):
            given = axes.pop("dp", None)
            columns[_GPUS] = Column.of(counts)
            axes = _with_dp(axes, given)
            filled = {(count or 1) - _beside(space.base.run) for count in counts}
            degrees = tuple(sorted({d for count in filled for d in divisors_of(count)}))
        rows = Candidates(space.base, space.model, columns, len(counts))
        mode = space.base.run.mode
        rules = [*constraints(mode, space.model), *space.policies]
        left = math.prod(len(values) for values in axes.values())
        crossing = cls(space, sample, axes, rows, rules, left, degrees)
        crossing.rows = crossing.constrained(rows, crossing.due())
        return crossing

    def cross(self, name: str, values: tuple[Any, ...]) -> None:
        """Spread out one setting, and drop what is refused."""
        self.left //= len(values)
        if len(self.rows) * len(values) > 4 * MOST_CANDIDATES and self.sample is None:
            raise self._too_many(len(self.rows) * len(values))
        filled = name == "dp" and _GPUS in self.rows.columns
        due: list[Constraint] | None = None
        pieces: list[Candidates] = []
        share = 1.0
        step = max(1, _PIECE // len(values))
        for begin in range(0, max(len(self.rows), 1), step):
            piece = self.rows.take(slice(begin, begin + step))
            piece = self._filled(piece, values) if filled else _spread(piece, name, values)
            due = self.due(piece) if due is None else due
            parents = np.arange(len(piece)) // len(values)
            kept = self._kept(piece, due)
            piece, parents = piece.take(kept), parents[kept]
            if not filled and len(values) > 1:
                piece = self._without_same(piece, parents, name)
            pieces.append(self._thinned(piece, share))
            while sum(map(len, pieces)) > self._most:
                if self.sample is None:
                    raise self._too_many(sum(map(len, pieces)) * len(self.rows) // (begin + step))
                pieces, share = [self._thinned(each, 0.5) for each in pieces], share / 2
        self.rows = _joined(pieces)
        self.drawn *= share

    @property
    def _most(self) -> int:
        """Candidates that are kept meanwhile."""
        return MOST_CANDIDATES if self.sample is None else 16 * self.sample + _PIECE

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

    def constrained(self, rows: Candidates, due: Iterable[Constraint]) -> Candidates:
        """Candidates that some constraints let pass."""
        return rows.take(self._kept(rows, due))

    def _kept(self, rows: Candidates, due: Iterable[Constraint]) -> Int:
        kept = np.arange(len(rows))
        for rule in due:
            refused = rule.refused(rows.take(kept)) if len(kept) < len(rows) else rule.refused(rows)
            if refused.any():
                self._note(rule.name, int(refused.sum()), rule.example)
                kept = kept[~refused]
        return kept

    def _note(self, why: str, count: int, example: str) -> None:
        self.removed[why] = self.removed.get(why, 0) + count * self.left / self.drawn
        self.examples.setdefault(why, example)

    def _filled(self, rows: Candidates, values: tuple[Any, ...]) -> Candidates:
        """dp is what the other degrees leave of the GPUs."""
        gpus = rows.numbers(_GPUS)
        gpus = gpus - _beside(self.space.base.run)
        others = rows.numbers("tp") * rows.numbers("cp") * rows.numbers("pp")
        divides = gpus % others == 0
        dp = gpus // others
        if not divides.all():
            at = int(np.argmin(divides))
            run = rows.run(at)
            example = (
                f"{gpus[at]} GPUs are not a multiple of tp={run.tp} x cp={run.cp} x pp={run.pp}"
            )
            self._note("tp x cp x pp divides the GPUs", int((~divides).sum()), example)
        rows, dp = rows.take(divides), dp[divides]
        codes = np.searchsorted(self.degrees, dp).astype(code_type(len(self.degrees)))
        column = Column(codes, self.degrees)
        rows = Candidates(rows.base, rows.model, {**rows.columns, "dp": column}, len(rows))
        if values == (None,):
            return rows
        asked = column.is_one_of(*values)
        if not asked.all():
            at = int(np.argmin(asked))
            example = f"{rows.run(at).describe()} fills {rows.world_size[at]} GPUs"
            self._note("dp is one of those asked for", int((~asked).sum()), example)
        return rows.take(asked)

    def _without_same(self, rows: Candidates, parents: Int, name: str) -> Candidates:
        """One candidate of those that differ only in a setting that does nothing there."""
        idle = np.zeros(len(rows), dtype=bool)
        for values in (*EXPERIMENT[name].idle, *SAME_RUN.get(name, ())):
            if not self.axes.keys() & values.keys() - rows.columns.keys():
                each = [rows.column(other).is_one_of(value) for other, value in values.items()]
                idle |= np.logical_and.reduce(each)
        again = np.zeros(len(rows), dtype=bool)
        where = np.flatnonzero(idle)
        again[where[1:]] = parents[where[1:]] == parents[where[:-1]]
        if not again.any():
            return rows
        example = f"{rows.run(int(np.argmax(again))).describe()}: the same as without {name}"
        self._note(f"{name} changes something", int(again.sum()), example)
        return rows.take(~again)

    def _thinned(self, rows: Candidates, share: float) -> Candidates:
        """Candidates drawn at random, each with the same probability."""
        if share == 1:
            return rows
        return rows.take(self.random.random(len(rows)) < share)

    def _too_many(self, rows: int) -> UserError:
        of = rows * self.left
        return UserError(
            f"the space has about {of:.2g} candidates, wanted at most {MOST_CANDIDATES:,}; give "
            "fewer values, or --sample N for so many of them drawn at random"
        )

    def found(self) -> Found:
        """The candidates; UserError where there are none."""
        rows, combinations = self.rows, self.space.combinations
        removed = sorted(self.removed.items(), key=lambda each: -each[1])
        listed = tuple(
            Removed(why, round(count), self.examples[why]) for why, count in removed if count >= 0.5
        )
        if not len(rows):
            first = "; ".join(f"{of.example} ({of.count:,} such)" for of in listed[:2])
            why = first or "nothing is left"
            raise UserError(f"none of the {combinations:,} combinations can be run: {why}")
        whole = round(len(rows) / self.drawn)
        if self.sample is not None and len(rows) > self.sample:
            kept = self.random.choice(len(rows), self.sample, replace=False)
            rows = rows.take(np.sort(kept))
        columns = {name: of for name, of in rows.columns.items() if name != _GPUS}
        columns = {name: _compact(of) for name, of in columns.items()}
        return Found(
            Candidates(rows.base, rows.model, columns, len(rows)), combinations, listed, whole
        )


def _beside(run: Run) -> int:
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


def _column(systems: Sequence[Hardware]) -> Column:
    """A column of hardware, which cannot be hashed."""
    number: dict[int, int] = {}
    codes = [number.setdefault(id(hardware), len(number)) for hardware in systems]
    values = tuple({id(hardware): hardware for hardware in systems}.values())
    return Column(np.array(codes, dtype=code_type(len(values))), values)


def _spread(rows: Candidates, name: str, values: tuple[Any, ...]) -> Candidates:
    """Each candidate with each of the values, in order."""
    count = len(rows) * len(values)
    if len(values) == 1:
        columns = {**rows.columns, name: Column.constant(values[0], count)}
        return Candidates(rows.base, rows.model, columns, count)
    columns = {
        other: Column.constant(of.values[0], count)
        if len(of.values) == 1
        else Column(np.repeat(of.codes, len(values)), of.values)
        for other, of in rows.columns.items()
    }
    codes = np.tile(np.arange(len(values), dtype=code_type(len(values))), len(rows))
    columns[name] = Column(codes, values)
    return Candidates(rows.base, rows.model, columns, count)


def _joined(pieces: Sequence[Candidates]) -> Candidates:
    """Pieces of the same columns behind each other."""
    first = pieces[0]
    if len(pieces) == 1:
        return first
    count = sum(map(len, pieces))
    columns = {
        name: Column.constant(of.values[0], count)
        if len(of.values) == 1
        else Column(np.concatenate([piece.columns[name].codes for piece in pieces]), of.values)
        for name, of in first.columns.items()
    }
    return Candidates(first.base, first.model, columns, count)


def _compact(column: Column) -> Column:
    """The column without values that no candidate has."""
    if len(column.values) == 1:
        return column
    used: Bool = np.zeros(len(column.values), dtype=bool)
    used[column.codes] = True
    if used.all():
        return column
    values = tuple(v for v, there in zip(column.values, used.tolist(), strict=True) if there)
    number = np.cumsum(used) - 1
    if len(values) == 1:
        return Column.constant(values[0], len(column))
    return Column(number[column.codes].astype(code_type(len(values))), values)
