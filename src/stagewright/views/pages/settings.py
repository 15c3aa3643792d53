"""What a page says of the run's settings, and the command that repeats the page."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from stagewright.lower.compiled_run import CompiledRun
from stagewright.run.sections import EXPERIMENT, SETTINGS
from stagewright.run.sections.cluster import ClusterSection
from stagewright.run.sections.declare import Setting, text_of
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.texttable import Table
from stagewright.time.simulate.step import SimulatedStep


class Repeat(NamedTuple):
    """What was asked for, as a template takes it."""

    command: str
    """The command line that makes the page; empty where settings are no options but a file."""
    changed: Table
    """Settings that differ from their defaults."""
    every: Table
    model: Table


def asked(compiled: CompiledRun, simulation: SimulatedStep | None = None) -> Repeat:
    """The command, the settings, and the fields of the model."""
    run, model = compiled.run, compiled.model
    unresolved = run.unresolved()
    given = {
        name: _value(getattr(run, name))
        for name in type(run).model_fields
        if getattr(run, name) is not None
    }
    chosen = {n for n in given if getattr(unresolved, n) != type(run).model_fields[n].default}
    changed = {name: value for name, value in given.items() if name in chosen}
    every = {
        "setting": list(given),
        "value": list(given.values()),
        "": ["set" if name in chosen else "default" for name in given],
    }
    fields = {
        f.name: getattr(model, f.name)
        for f in dataclasses.fields(model)
        if f.name not in ("name", "modules") and getattr(model, f.name) not in (None, (), "", 0)
    }
    of_model = {"field": list(fields), "value": [_value(value) for value in fields.values()]}
    again = command(run)
    if simulation is not None:
        again = command(run, simulation.cluster, simulation.line.how)
    return Repeat(
        again,
        Table("Settings that are not defaults", _columns(changed)),
        Table("All settings", every),
        Table(f"Model {model.name}", of_model),
    )


def _columns(settings: Mapping[str, str]) -> dict[str, list[str]]:
    return {"setting": [*settings], "value": [*settings.values()]}


def _value(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)  # pyright: ignore
    return text if len(text) <= 120 else text[:117] + "..."


def command(
    run: Run, cluster: ClusterSection | None = None, execution: Execution | None = None
) -> str:
    """The command line that shows this run, or simulates it on a machine.

    It is empty where settings are no options but a file, or a name holds what no terminal should
    be given.

    >>> command(Run(model="gpt2", dp=2, sequence_parallel=True, layers_per_stage=(3, 4)))
    'stagewright show gpt2 --dp 2 --sequence-parallel --layers-per-stage 3,4'
    >>> command(Run(model="gpt2"), ClusterSection(hardware="b200"), Execution(prefetch=2))
    'stagewright simulate gpt2 --hardware b200 --prefetch 2'
    """
    simulated = cluster is not None and cluster.hardware is not None
    words = ["stagewright", "simulate" if simulated else "show", run.model]
    homes = {"cluster": cluster, "execution": execution} if simulated else {}
    unresolved = run.unresolved()
    for setting in EXPERIMENT.values() if simulated else SETTINGS.values():
        home = homes.get(setting.section, unresolved)
        value = setting.default if home is None else getattr(home, setting.name)
        if value == setting.default or setting.name == "nodes":  # dp has filled the nodes
            continue
        option = option_words(setting, value)
        if option is None:
            return ""
        words += option
    line = shlex.join(words)
    return line if line.isprintable() else ""


def option_words(setting: Setting, value: object) -> list[str] | None:
    """A setting as words of a command line; None where no option says this value.

    >>> option_words(EXPERIMENT["fuse"], False), option_words(EXPERIMENT["stragglers"], {5: 1.2})
    (['--no-fuse'], ['--straggler', '5=1.2'])
    """
    if isinstance(value, bool):
        return [setting.flag if value else "--no-" + setting.flag[2:]]
    if isinstance(value, Mapping):
        factors = cast("Mapping[int, float]", value)
        return [w for rank, by in factors.items() for w in (setting.flag, f"{rank}={by:g}")]
    if isinstance(value, frozenset):
        return [setting.flag, text_of(tuple(sorted(cast("frozenset[str]", value))))]
    items = cast("tuple[object, ...]", value) if isinstance(value, tuple) else ()
    if not all(isinstance(item, int | str) for item in items):
        return None
    return [setting.flag, text_of(cast("object", value))]
