"""The space of a search: values by setting, which are crossed to candidates.

>>> from stagewright.run.sections.cluster import ClusterSection
>>> from stagewright.run.sections.execution import Execution
>>> from stagewright.searching.machines import Fleet
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
from stagewright.searching.enumeration import Found, enumerate_candidates
from stagewright.searching.machines import Fleet

_FIRST = (
    *("pp", "tp", "cp", "dp", "order", "ep", "etp", "vpp", "layers_per_stage", "pipeline_split"),
    *("global_batch_size", "micro_batch_size", "schedule", "microbatch_group_size_per_vp_stage"),
    *("seq_length", "zero", "dp_shard", "sequence_parallel", "cp_comm_type"),
)
"""Settings that are crossed first, in this order: those that many constraints read."""

WORKLOAD = ("model", "as_family", "layers", "vocab", "mtp_num_layers", "mode", "framework")
"""Settings that say what is computed, which all candidates have in common."""
_NO_COLUMNS = ("hardware", "nodes", "price", "costs", "stragglers", "durations")
"""Settings of the machine that are not crossed."""


@dataclass(frozen=True, slots=True, eq=False)
class Space:
    """Values by setting, to be combined."""

    base: Experiment
    """Settings that all candidates have in common; those of `axes` count for nothing."""
    model: ModelConfig
    fleets: tuple[Fleet, ...]
    axes: Mapping[str, tuple[Any, ...]]
    """Values by name, of a run, the machine and the execution; in the order of crossing."""
    policies: tuple[Constraint, ...] = ()
    """Constraints of the default space, besides those of runs."""
    headroom: float = 0.0
    """Share of the memory of a device that candidates leave free, as `memory_allowance`."""

    @classmethod
    def of(
        cls,
        base: Experiment,
        fleets: Iterable[Fleet],
        axes: Mapping[str, Sequence[Any]],
        model: ModelConfig | None = None,
        policies: Iterable[Constraint] = (),
        origins: Mapping[str, str] | None = None,
        headroom: float = 0.0,
    ) -> Self:
        """A space whose values have been checked one by one; UserError for one that none may have.

        `model` replaces the configuration that the model's name stands for. `origins` begin errors
        about settings by name: a file and a colon.
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
        return cls(base, model, fleets, checked, tuple(policies), headroom)

    @property
    def combinations(self) -> int:
        """Combinations of all values, before any constraint."""
        return len(self.fleets) * math.prod(map(len, self.axes.values()))

    def candidates(self, progress: Callable[[str, int], None] | None = None) -> Found:
        """All combinations that can run; as `enumerate_candidates`."""
        found = enumerate_candidates(
            self.base, self.model, self.fleets, self.axes, self.policies, progress
        )
        return replace(found, rows=_with_headroom(found.rows, self.headroom))


def _with_headroom(rows: Candidates, share: float) -> Candidates:
    """The candidates with a `memory_allowance` of a share of their device's memory."""
    if not share:
        return rows
    devices = rows.distinct(HARDWARE, "device_memory")
    memory = rows.device_memory[devices.first]
    column = Column.of([_in_gigabytes(share * size) for size in memory.tolist()])
    column = Column(column.codes[devices.of], column.values)
    return replace(rows, columns={**rows.columns, "memory_allowance": column})


def _in_gigabytes(size: float) -> str | None:
    """An allowance as text, such as 4GB; None where it is too small for one."""
    return f"{size / 1e9:.4g}GB" if size >= LEAST_MEMORY else None


def is_searched(name: str) -> bool:
    """True if a search takes several values of the setting of this name."""
    return name in EXPERIMENT and name not in WORKLOAD and name not in _NO_COLUMNS


def check_searched(axes: Mapping[str, Sequence[Any]]) -> None:
    """Raise a UserError for lists of settings that all candidates have in common."""
    for name in axes:
        if name in WORKLOAD or name in _NO_COLUMNS:
            flag = "as the model" if name == "model" else f"by {EXPERIMENT[name].flag}"
            count = many(len(axes[name]), "value", "values")
            raise UserError(
                f"{name} is not searched over, got a list of {count}; all candidates have the "
                f"same: give one {flag}"
            )


def _in_order(names: Iterable[str]) -> list[str]:
    given = set(names)
    others = [name for name in EXPERIMENT if name in given and name not in _FIRST]
    return [name for name in _FIRST if name in given] + others


def _checked(
    base: Experiment, model: ModelConfig, name: str, values: Sequence[Any]
) -> tuple[Any, ...]:
    """Values of one setting, converted to its type; UserError for one that it may not have."""
    setting = EXPERIMENT[name]
    decisive = {*_ends(setting.kind, values)}
    found: list[Any] = []
    for value in values:
        if decisive and value is not None and value not in decisive:
            found.append(float(value) if setting.kind is float else value)
        elif name in SETTINGS:
            # A list may hold what only suits other values of other settings.
            run = Run.of(base.run.model_dump(exclude_unset=True), {name: value})
            check_value(run, model)
            found.append(getattr(run, name))
        else:
            needed = {"launch_mode": "cuda_graph"} if name == "cuda_graph_modules" else {}
            given: dict[str, Any] = {**needed, name: value}
            if setting.section == "cluster":
                found.append(getattr(with_settings(base.cluster, given), name))
            else:
                found.append(getattr(with_settings(base.execution, given), name))
    ordered = list(dict.fromkeys(found))
    if setting.idle:
        # Where the setting has no effect, its first value stands for all.
        ordered.sort(key=lambda value: value != setting.default)
    return tuple(ordered)


def _ends(kind: object, values: Sequence[Any]) -> list[Any]:
    """Numbers among many that decide whether a setting may have all; none: each is looked at.

    What a setting may have is a range, so that its ends decide. A mode that lacks the setting
    refuses all values but defaults, of which there are two at most: of three, one is no default.
    """
    types: tuple[type, ...] = (int,) if kind is int else (int, float)
    numbers = {value for value in values if value is not None}
    if kind not in (int, float) or len(numbers) < 4 or any(type(v) not in types for v in numbers):
        return []
    ordered = sorted(numbers)
    return [*ordered[:2], ordered[-1]]
