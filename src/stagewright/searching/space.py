"""Space of a search: values per setting, whose combinations that can run are the candidates.

Settings are crossed one by one. A constraint is applied once all settings that it reads are
crossed, so that refused combinations are not multiplied. A setting without effect keeps its first
value (`idle_conditions`), and of candidates that are the same run in other words one remains
(`_EQUIVALENT`).

>>> from stagewright.run.sections.cluster import ClusterSection
>>> from stagewright.run.sections.execution import Execution
>>> from stagewright.time.hardware import resolve
>>> base = Experiment(Run(model="gpt2", global_batch_size=16), ClusterSection(), Execution())
>>> space = Space.of(base, [Fleet(resolve("h100-sxm"), 8)], {"tp": (1, 2, 8), "zero": (0, 1)})
>>> result = space.enumerate()
>>> [result.candidates.describe(index) for index in range(len(result.candidates))]
['gpt2 dp=8 global_batch_size=16', 'gpt2 dp=8 global_batch_size=16 zero=1', \
'gpt2 tp=2 dp=4 global_batch_size=16', 'gpt2 tp=2 dp=4 global_batch_size=16 zero=1']
>>> [(removed.requirement, removed.count) for removed in result.removed]
[('heads and channels are split evenly by tp', 2)]
>>> result.removed[0].example
'tp=8 does not divide the 12 attention heads of gpt2; use 1, 2, 3, 4, 6 or 12'
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np

from stagewright.arrays import Bool, Int
from stagewright.errors import UserError, either
from stagewright.model.catalog import resolve
from stagewright.model.config import ModelConfig
from stagewright.numbers import plural
from stagewright.run.experiment import Experiment, with_settings
from stagewright.run.requests import LEAST_MEMORY
from stagewright.run.sections import EXPERIMENT, SETTINGS
from stagewright.run.settings import Run
from stagewright.searching.candidates import HARDWARE, Candidates, Column
from stagewright.searching.constraints import Constraint, check_value, constraints
from stagewright.searching.machines import Fleet

MOST_CANDIDATES = 30_000_000
"""Limit of candidates: each takes about 20 bytes here, 500 once it is estimated."""
CHUNK = 1 << 21
"""Combinations that are crossed at once."""
DIVIDES = "tp x cp x pp divides the GPUs"
DP_ALLOWED = "dp is one of those asked for"
_GPUS = "gpus"
"""Column of the number of GPUs, while settings are crossed."""

_FIRST = (
    *("pp", "tp", "cp", "dp", "order", "ep", "etp", "vpp", "layers_per_stage", "pipeline_split"),
    *("global_batch_size", "micro_batch_size", "schedule", "microbatch_group_size_per_vp_stage"),
    *("seq_length", "zero", "dp_shard", "sequence_parallel", "cp_comm_type"),
)
"""Settings that are crossed first, in this order: many constraints read them."""

_IDLE: Mapping[str, tuple[Mapping[str, Any], ...]] = {"schedule": ({"pp": 1},)}
"""Conditions under which a setting has no effect on a search, besides `Setting.idle`."""

_SHARED = frozenset({
    "model", "as_family", "layers", "vocab", "mtp_num_layers", "mode", "framework",
    "hardware", "nodes", "gpus", "price", "costs", "stragglers", "durations",
})  # fmt: skip
"""Settings of the computation and of the machine that all candidates share."""


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


@dataclass(frozen=True, slots=True, eq=False)
class Space:
    """Values per setting, to be combined."""

    base: Experiment
    """Settings that all candidates share; `axes` override these."""
    model: ModelConfig
    fleets: tuple[Fleet, ...]
    axes: Mapping[str, tuple[Any, ...]]
    """Values by name of a run's, machine's or execution's setting, in the order of crossing."""
    extra_constraints: tuple[Constraint, ...] = ()
    """Constraints of the default space, besides those of runs."""
    headroom: float = 0.0
    """Share of device memory that candidates leave free, as `memory_allowance`."""

    @classmethod
    def of(
        cls,
        base: Experiment,
        fleets: Iterable[Fleet],
        axes: Mapping[str, Sequence[Any]],
        model: ModelConfig | None = None,
        extra_constraints: Iterable[Constraint] = (),
        origins: Mapping[str, str] | None = None,
        headroom: float = 0.0,
    ) -> Self:
        """Check each value by itself; UserError for one that no candidate may have.

        `model` overrides the configuration of the model's name. `origins`: prefixes of errors by
        setting, such as a file and a colon.
        """
        run = base.run
        model = model or resolve(run.model, run.as_family or "")
        model = model.with_overrides(run.layers, run.vocab, run.mtp_num_layers)
        fleets = tuple(fleets)
        if not fleets:
            raise UserError("a search needs hardware; name some with --hardware")
        check_searched(axes)
        first = [name for name in _FIRST if name in axes]
        checked: dict[str, tuple[Any, ...]] = {}
        for name in (*first, *(name for name in EXPERIMENT if name in axes and name not in first)):
            try:
                checked[name] = _checked(base, model, name, axes[name])
            except UserError as error:
                advice = "; between commas are several orders" if name == "order" else ""
                message = f"{(origins or {}).get(name, '')}{error}"
                raise UserError(message + advice * (len(axes[name]) > 1)) from None
        if "dp" not in checked and not any(fleet.gpus for fleet in fleets):
            checked["dp"] = (run.dp,)
        return cls(base, model, fleets, checked, tuple(extra_constraints), headroom)

    @property
    def combinations(self) -> int:
        """Number of combinations before any constraint."""
        return len(self.fleets) * math.prod(map(len, self.axes.values()))

    def enumerate(self) -> Enumeration:
        """All combinations that can run; dp fills the GPUs where their number is known.

        Raises UserError where there are none, or more than `MOST_CANDIDATES`.
        """
        partial = _PartialCandidates(self)
        for name, values in partial.axes.items():
            if name == "dp" and partial.dp_fills:
                partial.fill_dp(values)
            else:
                partial.cross(name, values)
            partial.drop_equivalent()
        if not len(partial.candidates):
            raise partial.no_run_error(self.combinations)
        columns = {n: of.compact() for n, of in partial.candidates.columns.items() if n != _GPUS}
        candidates = replace(partial.candidates, columns=columns)
        return Enumeration(
            _with_headroom(candidates, self.headroom), self.combinations, partial.removed
        )


def is_searched(name: str) -> bool:
    """True if a search takes several values of this setting."""
    return name in EXPERIMENT and name not in _SHARED


def idle_conditions(name: str) -> tuple[Mapping[str, Any], ...]:
    """Conditions (values of other settings) under which only the first value is tried."""
    return (*EXPERIMENT[name].idle, *_IDLE.get(name, ()))


def check_searched(axes: Mapping[str, Sequence[Any]]) -> None:
    """Raise a UserError for lists of settings that all candidates share."""
    for name in axes:
        if name in _SHARED:
            flag = "as the model" if name == "model" else f"by {EXPERIMENT[name].flag}"
            count = plural(len(axes[name]), "value", "values")
            raise UserError(
                f"{name} is not searched over, got a list of {count}; all candidates have the "
                f"same: give one {flag}"
            )


def _checked(
    base: Experiment, model: ModelConfig, name: str, values: Sequence[Any]
) -> tuple[Any, ...]:
    """Convert values to the setting's type; UserError for an invalid one."""
    setting = EXPERIMENT[name]
    given = base.run.model_dump(exclude_unset=True)

    def convert(value: Any) -> Any:
        if name in SETTINGS:
            run = Run.of(given, {name: value})
            check_value(run, model)
            return getattr(run, name)
        if setting.section == "cluster":
            return getattr(with_settings(base.cluster, {name: value}), name)
        requires = {"launch_mode": "cuda_graph"} if name == "cuda_graph_modules" else {}
        return getattr(with_settings(base.execution, {**requires, name: value}), name)

    converted = list(dict.fromkeys(map(convert, values)))
    if setting.idle:
        # Where the setting has no effect, only its first value remains.
        default = setting.default_of(base.run.framework)
        converted.sort(key=lambda value: value != default)
    return tuple(converted)


def _with_headroom(candidates: Candidates, share: float) -> Candidates:
    """Set `memory_allowance` to a share of the device's memory, in GB; none if it is too small."""
    if not share:
        return candidates

    def allowance(index: int) -> str | None:
        size = share * int(memory[index])
        return f"{size / 1e9:.4g}GB" if size >= LEAST_MEMORY else None

    memory = candidates.device_memory
    first, tuple_of = candidates.distinct(HARDWARE, "device_memory")
    column = Column.of(map(allowance, first.tolist()))
    codes = column.codes[tuple_of]
    return candidates.with_column("memory_allowance", Column(codes, column.values))


# ---- crossing ------------------------------------------------------------------------------------


class _EquivalentSettings(NamedTuple):
    """Settings whose values may say the same in other words."""

    settings: tuple[str, ...]
    reads: tuple[str, ...]
    """Other settings that decide what they say."""
    meaning: Callable[[Candidates, int], object]
    """Equal for candidates that are the same run, if all other settings are equal."""


def _order_of_axes(candidates: Candidates, index: int) -> object:
    """Axes that have more than one rank, in order."""
    run = candidates.run(index)
    return tuple(axis for axis in run.order.split("-") if getattr(run, axis) > 1)


def _layers_per_stage(candidates: Candidates, index: int) -> object:
    return candidates.run(index).resolved(candidates.model).layers_per_stage


_EQUIVALENT = (
    _EquivalentSettings(("order",), ("tp", "cp", "dp", "pp", "ep"), _order_of_axes),
    _EquivalentSettings(
        ("first_stage_less_layers", "last_stage_less_layers"),
        ("pp", "vpp", "layers_per_stage", "pipeline_split"),
        _layers_per_stage,
    ),
)


class _PartialCandidates:
    """Candidates while their settings are crossed."""

    def __init__(self, space: Space) -> None:
        """One candidate per fleet; no axis is crossed."""
        fleets = space.fleets
        columns = {HARDWARE: Column.of([fleet.hardware for fleet in fleets], id)}
        self.axes = dict(space.axes)
        self.dp_fills = any(fleet.gpus for fleet in fleets)
        if self.dp_fills:
            columns[_GPUS] = Column.of(fleet.gpus for fleet in fleets)
            # dp follows pp, tp and cp, also where it is not an axis: it fills the GPUs.
            degrees = {
                name: self.axes.pop(name) for name in ("pp", "tp", "cp") if name in self.axes
            }
            self.axes = {**degrees, "dp": self.axes.pop("dp", (None,)), **self.axes}
        varied = {fleet.hardware.name: fleet.varied for fleet in fleets if fleet.varied}
        self.combinations_left = math.prod(map(len, self.axes.values()))
        """Combinations of the axes still to be crossed: what one candidate stands for."""
        of_runs = constraints(space.base.run.mode, space.model)
        self.constraints = [*of_runs, *space.extra_constraints]
        """Constraints that have not been applied."""
        self.equivalent = [of for of in _EQUIVALENT if self.axes.keys() & {*of.settings}]
        """Settings whose values may say the same, and that are not crossed yet."""
        self._counts = Counter[tuple[str, str]]()
        """Removed combinations by requirement and wording of the message."""
        self._examples: dict[tuple[str, str], str] = {}
        self.candidates = Candidates(space.base, space.model, columns, len(fleets), varied)
        applicable = self._pop_applicable()
        self.candidates = self.candidates.take(self._allowed(self.candidates, applicable))

    def cross(self, name: str, values: tuple[Any, ...]) -> None:
        """Combine all candidates with the values of a setting; remove those that are refused."""
        self.combinations_left //= len(values)
        total, count = len(self.candidates), 0
        if total * len(values) > 4 * MOST_CANDIDATES:
            raise _too_many(total * len(values) * self.combinations_left)
        applicable = self._pop_applicable(name)
        chunks: list[Candidates] = []
        step = max(1, CHUNK // len(values))
        for begin in range(0, max(total, 1), step):
            chunk = self.candidates.take(slice(begin, begin + step)).crossed(name, values)
            allowed = self._allowed(chunk, applicable)
            chunk, parents = chunk.take(allowed), allowed // len(values)
            # Where the setting is idle, only a parent's first child is kept.
            redundant = np.zeros(len(chunk), dtype=bool)
            idle = np.flatnonzero(self._is_idle(chunk, name))
            redundant[idle[1:]] = parents[idle[1:]] == parents[idle[:-1]]
            chunks.append(self._without_redundant(chunk, redundant, (name,)))
            count += len(chunks[-1])
            if count > MOST_CANDIDATES:
                raise _too_many(count / min(1.0, (begin + step) / total) * self.combinations_left)
        self.candidates = Candidates.concatenated(chunks)

    def fill_dp(self, values: tuple[Any, ...]) -> None:
        """Give each candidate the dp that fills its GPUs, where it is one of the values."""
        self.combinations_left //= len(values)
        candidates = self.candidates
        gpus = candidates.numbers(_GPUS) - candidates.prefill_gpus
        ranks = np.prod([candidates.numbers(name) for name in ("tp", "cp", "pp")], axis=0)
        divides = gpus % ranks == 0
        if not divides.all():
            index = int(np.argmin(divides))
            run = candidates.run(index)
            factors = f"tp={run.tp} x cp={run.cp} x pp={run.pp}"
            example = f"{gpus[index]} GPUs are not a multiple of {factors}"
            self._remove(DIVIDES, int((~divides).sum()), example)
        candidates, gpus, dp = candidates.take(divides), gpus[divides], (gpus // ranks)[divides]
        degrees, codes = np.unique(dp, return_inverse=True)
        candidates = candidates.with_column("dp", Column(codes, tuple(degrees.tolist())))
        wanted = np.isin(dp, values) if values != (None,) else np.ones(len(dp), dtype=bool)
        if not wanted.all():
            index = int(np.argmin(wanted))
            example = (
                f"dp is {dp[index]}, which fills {gpus[index]} GPUs, and not "
                f"{either([str(value) for value in values])}"
            )
            self._remove(DP_ALLOWED, int((~wanted).sum()), example)
        candidates = candidates.take(wanted)
        self.candidates = candidates.take(self._allowed(candidates, self._pop_applicable("dp")))

    def drop_equivalent(self) -> None:
        """Keep one of the candidates that are the same run in other words."""
        waiting = self._waiting()
        for of in self.equivalent:
            if not waiting & {*of.settings, *of.reads}:
                self._drop_equivalent(of)
        self.equivalent = [of for of in self.equivalent if waiting & {*of.settings, *of.reads}]

    def _drop_equivalent(self, of: _EquivalentSettings) -> None:
        candidates, number = self.candidates, dict[object, int]()

        def meaning(index: int) -> int:
            return number.setdefault(of.meaning(candidates, index), len(number))

        others = candidates.distinct(
            *(n for n in candidates.columns if n not in of.settings)
        ).tuple_of
        meanings = candidates.map_distinct((*of.settings, *of.reads), meaning)
        redundant = np.ones(len(candidates), dtype=bool)
        redundant[np.unique(others * len(number) + meanings, return_index=True)[1]] = False
        self.candidates = self._without_redundant(candidates, redundant, of.settings)

    def _waiting(self, crossed: str = "") -> set[str]:
        """Axes that are not crossed, except one that is about to be."""
        return self.axes.keys() - self.candidates.columns.keys() - {crossed}

    def _pop_applicable(self, name: str = "") -> list[Constraint]:
        """Pop constraints whose settings are all crossed, once `name` is."""
        waiting = self._waiting(name)
        applicable = [of for of in self.constraints if not of.reads_any_of(waiting)]
        self.constraints = [of for of in self.constraints if of not in applicable]
        return applicable

    def _allowed(self, candidates: Candidates, applicable: Iterable[Constraint]) -> Int:
        """Candidates that no constraint refuses."""
        allowed = np.arange(len(candidates))
        for constraint in applicable:
            subset = candidates.take(allowed) if len(allowed) < len(candidates) else candidates
            refused = constraint.refused(subset, self.combinations_left)
            messages = [*constraint.errors]
            for number, count in enumerate(np.bincount(refused + 1)[1:].tolist()):
                self._remove(constraint.requirement, count, messages[number])
            allowed = allowed[refused < 0]
        return allowed

    def _is_idle(self, candidates: Candidates, name: str) -> Bool:
        """Mask of candidates in which a setting has no effect, by the settings crossed so far."""
        mask = np.zeros(len(candidates), dtype=bool)
        for condition in idle_conditions(name):
            if not self.axes.keys() & condition.keys() - candidates.columns.keys():
                equal = [candidates.column(n).is_one_of(value) for n, value in condition.items()]
                mask |= np.logical_and.reduce(equal)
        return mask

    def _without_redundant(
        self, candidates: Candidates, redundant: Bool, settings: tuple[str, ...]
    ) -> Candidates:
        """Candidates without those that only differ from an earlier one in `settings`."""
        if not redundant.any():
            return candidates
        name = " or ".join(settings)
        example = f"{candidates.describe(int(np.argmax(redundant)))}: the same as without {name}"
        self._remove(f"{name} changes something", int(redundant.sum()), example)
        return candidates.take(~redundant)

    def _remove(self, requirement: str, count: int, example: str) -> None:
        """Count removed combinations by requirement and wording, whatever its numbers."""
        if count:
            key = requirement, re.sub(r"[0-9]+", "", example)
            self._examples.setdefault(key, example)
            self._counts[key] += count * self.combinations_left

    @property
    def removed(self) -> tuple[Removed, ...]:
        """Removed combinations by constraint, largest count first."""
        totals = Counter[str]()
        examples: dict[str, str] = {}
        for key, count in self._counts.most_common():
            totals[key[0]] += count
            examples.setdefault(key[0], self._examples[key])
        ordered = sorted(dict.fromkeys(of for of, _ in self._counts), key=lambda of: -totals[of])
        return tuple(Removed(of, totals[of], examples[of]) for of in ordered)

    def no_run_error(self, combinations: int) -> UserError:
        """Error of a space in which nothing can run: the most frequent reasons."""
        why = "; ".join(
            f"{self._examples[key]} ({count:,} such)" for key, count in self._counts.most_common(2)
        )
        none = f"none of the {combinations:,} combinations can be run"
        if combinations == 1:
            none = "the only combination cannot be run"
        return UserError(f"{none}: {why or 'nothing is left'}")


def _too_many(count: float) -> UserError:
    """Error of a space with about `count` candidates."""
    return UserError(
        f"the space has about {count:.2g} candidates, wanted at most {MOST_CANDIDATES:,}; give "
        "fewer values, or fix some settings"
    )
