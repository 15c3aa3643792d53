"""A whole experiment: a run, the machine that it runs on, and how a framework executes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from stagewright.errors import UserError
from stagewright.run.sections import EXPERIMENT, SETTINGS
from stagewright.run.sections.cluster import ClusterSection
from stagewright.run.sections.declare import as_lists, setting_in_words
from stagewright.run.sections.execution import Execution
from stagewright.run.sections.serving import (
    SERVING,
    EngineSection,
    OperationSection,
    PoolSection,
    WorkloadSection,
)
from stagewright.run.settings import Run
from stagewright.run.validation import invalid

_Section = TypeVar(
    "_Section",
    ClusterSection,
    Execution,
    WorkloadSection,
    EngineSection,
    PoolSection,
    OperationSection,
)


@dataclass(frozen=True, slots=True)
class Experiment:
    """Settings of a run file: the run, its cluster and its execution."""

    run: Run
    cluster: ClusterSection
    execution: Execution

    def value(self, name: str) -> Any:
        """Value of one setting."""
        homes = {"cluster": self.cluster, "execution": self.execution}
        return getattr(homes.get(EXPERIMENT[name].section, self.run), name)

    def values(self) -> dict[str, Any]:
        """All settings by name."""
        return {name: self.value(name) for name in EXPERIMENT}

    def given(self) -> dict[str, Any]:
        """Settings that are not defaults, in the order of their sections."""
        of_run = self.run.given()
        values = {
            of.name: of_run.get(of.name, of.default) if of.name in SETTINGS else self.value(of.name)
            for of in EXPERIMENT.values()
        }
        return {n: v for n, v in values.items() if n in of_run or v != EXPERIMENT[n].default}

    @classmethod
    def of(
        cls,
        values: Mapping[str, Any],
        overrides: Mapping[str, Any] | None = None,
        path: str | Path | None = None,
        *,
        gpus_per_node: Callable[[str | None], int] | None = None,
    ) -> Experiment:
        """From settings by name, flat or by section, or a manifest; overrides replace.

        `path` is where the settings stood, for errors. With `gpus_per_node`, of hardware by name,
        dp fills the nodes or GPUs.
        """
        run, chosen, pending = Run.read(values, overrides, path)
        cluster = section_of(ClusterSection, chosen, path, overrides)
        execution = section_of(Execution, chosen, path, overrides)
        if gpus_per_node is not None:
            run = filled(run, cluster, gpus_per_node)
        return cls(run.completed(pending), cluster, execution)


def describe(run: Run, execution: Execution) -> str:
    """Run, and settings of its execution that differ from the framework's defaults.

    >>> describe(Run(model="gpt2", dp=2), Execution(overlap_param_gather=True))
    'gpt2 dp=2 overlap_param_gather'
    """
    values = {name: getattr(execution, name) for name in sorted(_names(Execution))}
    differ = [
        setting_in_words(name, value)
        for name, value in values.items()
        if value != EXPERIMENT[name].default_of(run.framework)
    ]
    return " ".join([run.describe(), *differ])


def filled(run: Run, cluster: ClusterSection, gpus_per_node: Callable[[str | None], int]) -> Run:
    """The run on the nodes or GPUs of a cluster, if it has some; dp fills them unless given.

    >>> filled(Run(model="gpt2", tp=2), ClusterSection(nodes=2), lambda hardware: 8).dp
    8
    """
    gpus, nodes = cluster.gpus, cluster.nodes
    if nodes is not None:
        if gpus is not None:
            raise UserError("--gpus and --nodes both say how many GPUs there are; give one of them")
        gpus = nodes * gpus_per_node(cluster.hardware)
    if gpus is None:
        return run
    named = f"--gpus {gpus}" if nodes is None else f"--nodes {nodes} means {gpus} GPUs"
    others = run.world_size // run.dp
    if "dp" not in run.model_fields_set and run.prefill is None and gpus % others:
        raise UserError(
            f"{named}, which dp cannot fill: {gpus} is not a multiple of "
            f"tp={run.tp} x cp={run.cp} x pp={run.pp} = {others}; change one of them"
        )
    if "dp" not in run.model_fields_set and gpus % others == 0:
        run = run.model_copy(update={"dp": gpus // others})
    if run.world_size != gpus:
        raise UserError(
            f"{named}, but tp={run.tp} x cp={run.cp} x dp={run.dp} x pp={run.pp} makes "
            f"{run.world_size} ranks; make them equal, or leave out one of them"
        )
    return run


def section_of(
    section: type[_Section],
    values: Mapping[str, Any],
    path: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> _Section:
    """One section from settings by name; those of other sections are passed over.

    >>> section_of(Execution, {"no_overlap": ["dp"], "tp": 8}).no_overlap
    frozenset({'dp'})
    """
    given = {name: values[name] for name in _names(section) if name in values}
    if not given:
        return section()
    try:
        return _reader(section).validate_python(as_lists(given, EXPERIMENT))
    except ValidationError as error:
        raise invalid(error, {**EXPERIMENT, **SERVING}, path, overrides or {}) from None


@cache
def _reader(section: type[_Section]) -> TypeAdapter[_Section]:
    """Validator of a section; making one takes milliseconds, and a search reads many values."""
    return TypeAdapter(section)


def with_settings(section: _Section, values: Mapping[str, Any]) -> _Section:
    """A section with some settings replaced; those of other sections are passed over.

    >>> found = with_settings(Execution(prefetch=2), {"no_overlap": ["dp"], "tp": 8})
    >>> found.prefetch, found.no_overlap
    (2, frozenset({'dp'}))
    """
    read = section_of(type(section), values)
    return replace(
        section, **{name: getattr(read, name) for name in _names(type(section)) if name in values}
    )


def _names(section: type[_Section]) -> list[str]:
    """The settings that a section declares; other fields are for code."""
    return [of.name for of in fields(section) if "setting" in of.metadata]
