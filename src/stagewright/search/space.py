"""The space of a search: every combination of listed values that can be run, as columns.

Settings are crossed one after another, and each constraint is applied as soon as all that it reads
is there, so that what cannot be run is never spread out. dp follows from the number of GPUs.

>>> from stagewright.search.machines import Fleet
>>> from stagewright.run.sections.cluster import ClusterSection
>>> from stagewright.run.sections.execution import Execution
>>> from stagewright.time.hardware import resolve
>>> base = Experiment(Run(model="gpt2", global_batch_size=16), ClusterSection(), Execution())
>>> space = Space.of(base, [Fleet(resolve("h100-sxm"), 8)], {"tp": (1, 2, 8), "zero": (0, 1)})
>>> found = space.candidates()
>>> [found.rows.describe(row) for row in range(len(found.rows))]
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
from dataclasses import dataclass
from typing import Any, Self

from stagewright.errors import UserError
from stagewright.search.constraints import Constraint, check_value
from stagewright.search.enumeration import (
    MOST_CANDIDATES,
    PIECE,
    Enumeration,
    Found,
    Sample,
    too_many,
)
from stagewright.search.machines import Fleet
from stagewright.model.catalog import resolve
from stagewright.model.config import ModelConfig
from stagewright.numbers import many
from stagewright.run.experiment import Experiment, with_settings
from stagewright.run.sections import EXPERIMENT, SETTINGS
from stagewright.run.settings import Run

_FIRST = (
    *("pp", "tp", "cp", "dp", "order", "ep", "etp", "vpp", "layers_per_stage", "pipeline_split"),
    *("global_batch_size", "micro_batch_size", "schedule", "microbatch_group_size_per_vp_stage"),
    *("seq_length", "zero", "dp_shard", "sequence_parallel", "cp_comm_type"),
)
"""Settings that are crossed first, in this order: those that many constraints read."""

FEW = 250
"""Candidates by which the size of a large space is estimated."""
_LARGE = 30 * MOST_CANDIDATES
"""Combinations from which on the size is estimated before they are enumerated, and from which on a
sample is of few of them."""
_PIECES = (1 << 9, 1 << 14, PIECE)
"""Of a large space, how many combinations are spread out at once: more where too few can be run."""

WORKLOAD = ("model", "as_family", "layers", "vocab", "mtp_num_layers", "mode", "framework")
"""Settings that say what is done, which all candidates have in common."""
_ELSEWHERE = ("hardware", "nodes", "price", "costs", "stragglers", "durations")
"""Settings of the machine that are no columns."""


@dataclass(frozen=True, slots=True, eq=False)
class Space:
    """Values by setting, to be combined."""

    base: Experiment
    """What all candidates have in common; its settings of `axes` count for nothing."""
    model: ModelConfig
    fleets: tuple[Fleet, ...]
    axes: Mapping[str, tuple[Any, ...]]
    """Values by name, of a run, the machine and the execution; in the order of crossing."""
    policies: tuple[Constraint, ...] = ()
    """Constraints of a space by default, beside those of runs."""

    @classmethod
    def of(
        cls,
        base: Experiment,
        fleets: Iterable[Fleet],
        axes: Mapping[str, Sequence[Any]],
        model: ModelConfig | None = None,
        policies: Iterable[Constraint] = (),
        origins: Mapping[str, str] | None = None,
    ) -> Self:
        """A space whose values have been checked one by one; UserError for a value that none has.

        `model` replaces the configuration that the model's name stands for. `origins` begin errors
        about settings by name: a file and a colon.
        """
        run = base.run
        of = model or resolve(run.model, run.as_family or "")
        of = of.with_overrides(run.layers, run.vocab, run.mtp_num_layers)
        every = tuple(fleets)
        if not every:
            raise UserError("a search needs hardware; name some with --hardware")
        check_searched(axes)
        checked: dict[str, tuple[Any, ...]] = {}
        for name in _in_order(axes):
            try:
                checked[name] = _checked(base, of, name, axes[name])
            except UserError as error:
                more = "; between commas are several orders" if name == "order" else ""
                said = f"{(origins or {}).get(name, '')}{error}"
                raise UserError(said + more * (len(axes[name]) > 1)) from None
        known = any(fleet.gpus for fleet in every)
        if "dp" not in checked and not known:
            checked["dp"] = (run.dp,)
        return cls(base, of, every, checked, tuple(policies))

    @property
    def combinations(self) -> int:
        """Combinations of all values, before any constraint."""
        return len(self.fleets) * math.prod(map(len, self.axes.values()))

    def candidates(
        self, sample: int | None = None, progress: Callable[[str, int], None] | None = None
    ) -> Found:
        """All combinations that can be run; with `sample`, so many of them drawn at random.

        The draw is the same each time. `progress` hears which setting is crossed next, and how many
        candidates there are. Raises UserError where there are too many, or none.
        """
        if self.combinations > _LARGE:
            # A few of them tell the size, before any time is spent on all.
            few = self._few(FEW if sample is None else sample, progress)
            if sample is not None:
                return few.result()
            if len(few.rows) / few.drawn > MOST_CANDIDATES:
                raise too_many(len(few.rows) / few.drawn)
        every = self._crossing(None if sample is None else Sample(sample))
        self._cross(every, progress)
        return every.result()

    def _few(self, sample: int, progress: Callable[[str, int], None] | None) -> Enumeration:
        """Candidates of a large space, of which few are spread out unless most are refused."""
        few, *more = _PIECES
        crossing = self._crossing(Sample(sample, few))
        self._cross(crossing, progress)
        for piece in more:
            if len(crossing.rows) >= sample or crossing.drawn == 1:
                break
            crossing = self._crossing(Sample(sample, piece))
            self._cross(crossing, progress)
        return crossing

    def _crossing(self, sample: Sample | None) -> Enumeration:
        """Where nothing has been crossed."""
        return Enumeration.of(self.base, self.model, self.fleets, self.axes, self.policies, sample)

    def _cross(self, crossing: Enumeration, progress: Callable[[str, int], None] | None) -> None:
        """Cross all settings."""
        for name, values in crossing.axes.items():
            if progress is not None:
                progress(name, len(crossing.rows))
            crossing.cross(name, values)


def is_searched(name: str) -> bool:
    """Whether a name is that of a setting of which a search takes several values."""
    return name in EXPERIMENT and name not in WORKLOAD and name not in _ELSEWHERE


def check_searched(axes: Mapping[str, Sequence[Any]]) -> None:
    """Raise a UserError for lists of settings that all candidates have in common."""
    for name in axes:
        if name in WORKLOAD or name in _ELSEWHERE:
            flag = "as the model" if name == "model" else f"by {EXPERIMENT[name].flag}"
            count = many(len(axes[name]), "value", "values")
            raise UserError(
                f"{name} is not searched over, got a list of {count}; all candidates have the "
                f"same: give one {flag}"
            )


def _in_order(names: Iterable[str]) -> list[str]:
    given = set(names)
    rest = [name for name in EXPERIMENT if name in given and name not in _FIRST]
    return [name for name in _FIRST if name in given] + rest


def _checked(
    base: Experiment, model: ModelConfig, name: str, values: Sequence[Any]
) -> tuple[Any, ...]:
    """Values of one setting, as the setting's type has them; UserError for one that it has not."""
    setting = EXPERIMENT[name]
    looked_at = {*_ends(setting.kind, values)}
    found: list[Any] = []
    for value in values:
        if looked_at and value is not None and value not in looked_at:
            found.append(float(value) if setting.kind is float else value)
        elif name in SETTINGS:
            # A list may hold what only suits other values of other settings.
            run = Run.of(base.run.model_dump(exclude_unset=True), {name: value})
            check_value(run, model)
            found.append(getattr(run, name))
        else:
            beside = {"launch_mode": "cuda_graph"} if name == "cuda_graph_modules" else {}
            given: dict[str, Any] = {**beside, name: value}
            if setting.section == "cluster":
                found.append(getattr(with_settings(base.cluster, given), name))
            else:
                found.append(getattr(with_settings(base.execution, given), name))
    ordered = list(dict.fromkeys(found))
    if setting.idle:
        # Where the setting does nothing, its first value stands for all.
        ordered.sort(key=lambda value: value != setting.default)
    return tuple(ordered)


def _ends(kind: object, values: Sequence[Any]) -> list[Any]:
    """Of many numbers those that decide whether all may be had; none: each has to be looked at.

    What a setting takes of numbers is a range, so that its ends decide. A mode that lacks the
    setting refuses all values but defaults, of which there are two at most (the framework's and the
    usual one): of three numbers, one is no default.
    """
    types: tuple[type, ...] = (int,) if kind is int else (int, float)
    numbers = {value for value in values if value is not None}
    if kind not in (int, float) or len(numbers) < 4 or any(type(v) not in types for v in numbers):
        return []
    ordered = sorted(numbers)
    return [*ordered[:2], ordered[-1]]
