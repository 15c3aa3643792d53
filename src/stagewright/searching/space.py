"""Space of a search: values per setting, of which candidates are the combinations.

>>> from stagewright.run.sections.cluster import ClusterSection
>>> from stagewright.run.sections.execution import Execution
>>> from stagewright.searching.machines import Fleet
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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from stagewright.errors import UserError
from stagewright.model.catalog import resolve
from stagewright.model.config import ModelConfig
from stagewright.numbers import many
from stagewright.run.experiment import Experiment, with_settings
from stagewright.run.requests import LEAST_MEMORY
from stagewright.run.sections import EXPERIMENT, SETTINGS
from stagewright.run.settings import Run
from stagewright.searching.candidates import HARDWARE, Candidates, Column
from stagewright.searching.constraints import Constraint, check_value
from stagewright.searching.enumeration import Enumeration, enumerate_candidates
from stagewright.searching.machines import Fleet

_FIRST = (
    *("pp", "tp", "cp", "dp", "order", "ep", "etp", "vpp", "layers_per_stage", "pipeline_split"),
    *("global_batch_size", "micro_batch_size", "schedule", "microbatch_group_size_per_vp_stage"),
    *("seq_length", "zero", "dp_shard", "sequence_parallel", "cp_comm_type"),
)
"""Settings that are crossed first, in this order: many constraints read them."""

WORKLOAD = ("model", "as_family", "layers", "vocab", "mtp_num_layers", "mode", "framework")
"""Settings of the computation, which all candidates share."""
_SHARED = ("hardware", "nodes", "price", "costs", "stragglers", "durations")
"""Settings of the machine that are not crossed."""


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
        checked: dict[str, tuple[Any, ...]] = {}
        for name in _in_order(axes):
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
        """All combinations that can run (`enumerate_candidates`)."""
        result = enumerate_candidates(
            self.base, self.model, self.fleets, self.axes, self.extra_constraints
        )
        return replace(result, candidates=_with_headroom(result.candidates, self.headroom))


def _with_headroom(candidates: Candidates, share: float) -> Candidates:
    """Set `memory_allowance` to a share of the device's memory."""
    if not share:
        return candidates
    first, of = candidates.distinct(HARDWARE, "device_memory")
    memory = candidates.device_memory[first]
    column = Column.of([_in_gigabytes(share * size) for size in memory.tolist()])
    column = Column(column.codes[of], column.values)
    return replace(candidates, columns={**candidates.columns, "memory_allowance": column})


def _in_gigabytes(size: float) -> str | None:
    """Allowance as text, such as 4GB; None if it is too small."""
    return f"{size / 1e9:.4g}GB" if size >= LEAST_MEMORY else None


def is_searched(name: str) -> bool:
    """True if a search takes several values of this setting."""
    return name in EXPERIMENT and name not in WORKLOAD and name not in _SHARED


def check_searched(axes: Mapping[str, Sequence[Any]]) -> None:
    """Raise a UserError for lists of settings that all candidates share."""
    for name in axes:
        if name in WORKLOAD or name in _SHARED:
            flag = "as the model" if name == "model" else f"by {EXPERIMENT[name].flag}"
            count = many(len(axes[name]), "value", "values")
            raise UserError(
                f"{name} is not searched over, got a list of {count}; all candidates have the "
                f"same: give one {flag}"
            )


def _in_order(names: Iterable[str]) -> list[str]:
    selected = set(names)
    later = [name for name in EXPERIMENT if name in selected and name not in _FIRST]
    return [name for name in _FIRST if name in selected] + later


def _checked(
    base: Experiment, model: ModelConfig, name: str, values: Sequence[Any]
) -> tuple[Any, ...]:
    """Convert values to the setting's type; UserError for an invalid one."""
    setting = EXPERIMENT[name]
    extremes = {*_extremes(setting.kind, values)}
    converted: list[Any] = []
    for value in values:
        if extremes and value is not None and value not in extremes:
            converted.append(float(value) if setting.kind is float else value)
        elif name in SETTINGS:
            # A value may suit only some values of other settings.
            run = Run.of(base.run.model_dump(exclude_unset=True), {name: value})
            check_value(run, model)
            converted.append(getattr(run, name))
        else:
            requires = {"launch_mode": "cuda_graph"} if name == "cuda_graph_modules" else {}
            settings: dict[str, Any] = {**requires, name: value}
            if setting.section == "cluster":
                converted.append(getattr(with_settings(base.cluster, settings), name))
            else:
                converted.append(getattr(with_settings(base.execution, settings), name))
    ordered = list(dict.fromkeys(converted))
    if setting.idle:
        # Where the setting has no effect, only its first value remains.
        ordered.sort(key=lambda value: value != setting.default)
    return tuple(ordered)


def _extremes(kind: object, values: Sequence[Any]) -> list[Any]:
    """Extremes whose validity implies all values'; empty: check each.

    Valid numbers are a range. A mode that lacks the setting refuses all values but its at most two
    defaults, so that three values are enough.
    """
    types: tuple[type, ...] = (int,) if kind is int else (int, float)
    numbers = {value for value in values if value is not None}
    if kind not in (int, float) or len(numbers) < 4 or any(type(v) not in types for v in numbers):
        return []
    ordered = sorted(numbers)
    return [*ordered[:2], ordered[-1]]
