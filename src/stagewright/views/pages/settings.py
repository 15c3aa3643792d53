"""Settings of a run on its page, and the command that writes the page again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any, cast

import yaml

from stagewright.lower.compiled_run import CompiledRun
from stagewright.run.experiment import Experiment
from stagewright.run.lengths import Group
from stagewright.run.sections import EXPERIMENT, SETTINGS
from stagewright.run.sections.cluster import ClusterSection
from stagewright.run.sections.declare import Setting, text_of
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.texttable import Table
from stagewright.time.simulate.step import SimulatedStep
from stagewright.views.pages.html import Details, Paragraph, Part

PAGE = "run.html"
"""The name of the page in the command that writes it again."""


def repeat(compiled: CompiledRun, step: SimulatedStep | None = None) -> list[Part]:
    """The command that writes the page, the settings, and the fields of the model."""
    run, model = compiled.run, compiled.model
    experiment = _experiment(run, step)
    unresolved = replace(experiment, run=run.unresolved(model)).values()
    given = settings_of(compiled, step)
    chosen = {"model"} | {
        name
        for name in given.keys() & unresolved.keys()
        if unresolved[name] != EXPERIMENT[name].default_of(run.framework)
    }
    rows = [(name, value, "set" if name in chosen else "default") for name, value in given.items()]
    changed = [row[:2] for row in rows if row[2] == "set"]
    values = {field.name: getattr(model, field.name) for field in fields(model)}
    of_model = [
        (name, _value(value))
        for name, value in values.items()
        if name not in ("name", "modules") and value not in (None, (), "", 0)
    ]
    mesh = ", ".join(f"{axis}={size}" for axis, size in compiled.program.mesh.axes if size > 1)
    layouts = (
        f"The mesh: {mesh}. `stagewright show --graph` prints the layout of every value on it."
    )
    return [
        "This command makes the page again:",
        Paragraph(command(run, experiment.cluster, experiment.execution), "command", "pre"),
        *([layouts] if mesh else []),
        Table.of_rows("Settings that are not defaults", ("setting", "value"), changed),
        Details("All settings", [Table.of_rows("", ("setting", "value", ""), rows)]),
        Details("The model", [Table.of_rows(f"Model {model.name}", ("field", "value"), of_model)]),
    ]


def _experiment(run: Run, step: SimulatedStep | None) -> Experiment:
    if step is None:
        return Experiment(run, ClusterSection(), Execution())
    return Experiment(run, step.cluster or ClusterSection(), step.timeline.execution)


def settings_of(compiled: CompiledRun, step: SimulatedStep | None) -> dict[str, str]:
    """All settings of a run in words; of its machine and execution if it was simulated."""
    values = _experiment(compiled.run, step).values()
    return {"model": compiled.run.model} | {
        name: _value(value)
        for name, value in values.items()
        if value is not None and (step is not None or name in SETTINGS)
    }


def differing_settings(
    runs: Mapping[str, tuple[CompiledRun, SimulatedStep | None]],
) -> Table:
    """Settings in which runs differ, a column for each run."""
    values = {name: settings_of(*run) for name, run in runs.items()}
    names = dict.fromkeys(name for of_run in values.values() for name in of_run)
    differ = [name for name in names if len({of.get(name) for of in values.values()}) > 1]
    columns = {run: [of.get(name, "") for name in differ] for run, of in values.items()}
    return Table("", {"setting": differ, **columns})


def _value(value: Any) -> str:
    if isinstance(value, frozenset):
        value = tuple(sorted(cast("frozenset[str]", value))) or "none"
    text = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)  # pyright: ignore
    return text if len(text) <= 120 else text[:117] + "..."


def command(
    run: Run, cluster: ClusterSection | None = None, execution: Execution | None = None
) -> str:
    """The command that writes the page of this run, on a machine if one is named.

    If no option has the value of a setting, such as rows of requests, or a name has control
    characters, the command writes a run file first.

    >>> command(Run(model="gpt2", dp=2, sequence_parallel=True, layers_per_stage=(3, 4)))
    'stagewright report gpt2 --dp 2 --sequence-parallel --layers-per-stage 3,4 -o run.html'
    >>> command(Run(model="gpt2"), ClusterSection(hardware="b200"), Execution(prefetch=2))
    'stagewright report gpt2 --hardware b200 --prefetch 2 -o run.html'
    """
    if cluster is None or cluster.hardware is None:
        cluster, execution = ClusterSection(), None
    values = {
        name: value
        for name, value in Experiment(run.unresolved(), cluster, execution or Execution())
        .values()
        .items()
        if value != EXPERIMENT[name].default_of(run.framework)
    }
    options = {name: option_words(EXPERIMENT[name], value) for name, value in values.items()}
    words = ["stagewright", "report", run.model]
    for option in options.values():
        words += option or []
    line = shlex.join([*words, "-o", PAGE])
    # A terminal should be given no control characters; YAML escapes them.
    is_line = None not in options.values() and line.isprintable()
    return line if is_line else _with_run_file(run, values)


def _with_run_file(run: Run, values: Mapping[str, Any]) -> str:
    """A run file of these settings, and the command that reads it."""
    plain = {"model": run.model} | {name: _plain(value) for name, value in values.items()}
    text = yaml.safe_dump(plain, sort_keys=False, default_flow_style=None, width=100)
    return f"cat > run.yaml <<'END'\n{text}END\nstagewright report --config run.yaml -o {PAGE}"


def _plain(value: Any) -> Any:
    """A value as a run file has it."""
    if isinstance(value, Group):
        return {k: v for k, v in asdict(value).items() if v is not None}
    if isinstance(value, frozenset):
        return sorted(cast("frozenset[str]", value))
    if isinstance(value, tuple):
        return [_plain(item) for item in cast("tuple[Any, ...]", value)]
    if isinstance(value, Mapping):
        return dict(cast("Mapping[Any, Any]", value))
    return value if isinstance(value, bool | int | float | str) else str(value)


def option_words(setting: Setting, value: object) -> list[str] | None:
    """A setting as words of a command line; None if no option has this value.

    >>> option_words(EXPERIMENT["fuse"], False), option_words(EXPERIMENT["stragglers"], {5: 1.2})
    (['--no-fuse'], ['--straggler', '5=1.2'])
    """
    if isinstance(value, bool):
        return [setting.flag if value else "--no-" + setting.flag[2:]]
    if isinstance(value, Mapping):
        factors = cast("Mapping[int, float]", value)
        return [w for rank, by in factors.items() for w in (setting.flag, f"{rank}={by}")]
    if isinstance(value, frozenset):
        return [setting.flag, text_of(tuple(sorted(cast("frozenset[str]", value))))]
    items = cast("tuple[object, ...]", value) if isinstance(value, tuple) else ()
    if not all(isinstance(item, int | str) for item in items):
        return None
    return [setting.flag, text_of(cast("object", value))]
