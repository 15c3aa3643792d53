"""What changes between two runs: `stagewright.diff`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import PurePath
from typing import Any, NamedTuple

from stagewright.api.compiled import with_views
from stagewright.api.experiments import load_experiment, with_launch_file
from stagewright.api.result import PublicResult, path_text
from stagewright.api.served import Serving, ServingSections, served
from stagewright.api.simulated import Simulation, simulate
from stagewright.errors import UserError
from stagewright.files import manifest_head, read_text
from stagewright.launch import files as launch
from stagewright.launch.names import canonical
from stagewright.launch.reading import LaunchFile
from stagewright.launch.tables import value_of
from stagewright.lower.compile import compile as compile_run
from stagewright.lower.compiled_run import CompiledRun
from stagewright.model.catalog import resolve as model_of
from stagewright.model.config import ModelConfig
from stagewright.run.experiment import Experiment
from stagewright.run.notes import notes
from stagewright.run.other_names import is_setting_name
from stagewright.run.sections import EXPERIMENT
from stagewright.run.sections.serving import SERVING
from stagewright.texttable import Table, escaped
from stagewright.time.hardware import resolve as hardware_of
from stagewright.time.simulate.execute import Progress
from stagewright.time.simulate.step import SimulatedStep
from stagewright.trace import run_manifest
from stagewright.views import changes as views
from stagewright.views.step import memory_line, title

LOAD = SERVING.keys() - EXPERIMENT.keys()
"""Settings that only requests over time have."""

LOAD_OF_CLIENT = {name for name, of in SERVING.items() if of.section == "workload"}
"""Settings of the requests that come."""


class DiffedRun(NamedTuple):
    """One of two runs, read from its file and settings."""

    name: str
    file: LaunchFile | None
    experiment: Experiment
    serving: ServingSections | None
    """Settings of requests over time; None: the run is a step."""
    model: ModelConfig
    compiled: CompiledRun | None
    """The step."""
    notes: list[str]

    @classmethod
    def of(cls, name: str, given: Mapping[str, Any]) -> DiffedRun:
        """Read a launch file, a run file or a model, with `?NAME=VALUE` behind it.

        `given`: settings that replace those of the file.
        """
        path, _, query = name.partition("?")
        source, own = path, dict[str, Any]()
        is_launch = launch.find(path) is not None
        text = read_text(path, "a launch script") if is_launch else ""
        for part in filter(None, query.split("&")):
            key, equals, value = part.partition("=")
            variable = launch.names_variable(text, key)
            ours = is_setting_name(canonical(key)) or canonical(key) in {"model", *LOAD}
            if is_launch and (variable or not ours):
                source += f"{'&' if '?' in source else '?'}{part}"  # a variable, a flag it lacks
            else:
                own[key] = value_of(value) if equals else True
        given = {**given, **own}
        file = launch.read(source) if is_launch else None
        serves = "scheduler" in file.settings if file else bool(LOAD & given.keys())
        if not serves and (load := sorted(LOAD & given.keys())):
            raise UserError(f"{name}: is a step, and {load[0]} is of requests over time; drop it")
        if serves:
            return cls._of_server(name, source, file, given)
        is_file = file is not None or _is_run_file(path)
        if not is_file:
            if os.path.isfile(path) and not path.endswith((".json", ".stg")):
                raise UserError(f"{path}: is no launch file of a tool that is known here")
            given = {"model": path, **given}
        experiment = load_experiment(source if is_file else None, given)
        of_manifest = run_manifest.load_model(path) if is_file and file is None else None
        hardware = hardware_of(_hardware(experiment))
        compiled = compile_run(experiment.run, of_manifest, device_memory=hardware.memory)
        said = [*notes(experiment), *compiled.notes]
        return cls(name, file, experiment, None, compiled.model, compiled, said)

    @classmethod
    def _of_server(
        cls, name: str, source: str, file: LaunchFile | None, given: Mapping[str, Any]
    ) -> DiffedRun:
        script, values = (
            with_launch_file(source, given, serves=True) if file else (source, {**given})
        )
        model = values.pop("model", script)
        of_serving = {n: values.pop(n) for n in [*values] if n in SERVING}
        experiment = load_experiment(None, {"model": model, **values, "mode": "decode"})
        _hardware(experiment)
        sections, config = ServingSections.of(of_serving), model_of(experiment.run.model)
        return cls(name, file, experiment, sections, config, None, notes(experiment))

    @property
    def kind(self) -> str:
        """What runs, in words."""
        mode = self.experiment.run.mode
        step = "a training step" if mode == "train" else f"a step of {mode}"
        return step if self.serving is None else "a server"

    @property
    def all_notes(self) -> list[str]:
        """Assumptions of the file and of the run."""
        return [*(self.file.summary()[1:] if self.file else ()), *self.notes]

    def given(self) -> dict[str, Any]:
        """All settings as they are given."""
        more: dict[str, Any] = {}
        for section in self.serving or ():
            more |= {of.name: getattr(section, of.name) for of in fields(section)}
        return self.experiment.values() | more

    def resolved(self) -> dict[str, Any]:
        """The same with the defaults that follow from the model and from other settings."""
        if self.compiled is None:
            return self.given()
        return replace(self.experiment, run=self.compiled.run).values()

    def result(self, progress: Progress | None = None) -> Simulation | Serving:
        """Simulate the step, or serve the requests; errors say which of the runs it is."""
        experiment = self.experiment
        try:
            if self.compiled is None:
                assert self.serving is not None
                hardware = hardware_of(_hardware(experiment))
                result = served(experiment, hardware, self.serving, progress=progress)
                if result.outcome.stopped:  # a part of a load compares with nothing
                    raise KeyboardInterrupt
                return result
            compiled, execution = with_views(self.compiled), experiment.execution
            return simulate(compiled, experiment.cluster, execution=execution, progress=progress)
        except UserError as error:
            raise UserError(f"{self.name}: {error}") from None


def _is_run_file(path: str) -> bool:
    """True for YAML, and for JSON that names a model: a config.json describes one."""
    suffix = PurePath(path).suffix.lower()
    if suffix in (".yaml", ".yml"):
        return True
    return suffix == ".json" and "model" in (manifest_head(path, "a run file, or a model") or ())


def _hardware(experiment: Experiment) -> str:
    if experiment.cluster.hardware is None:
        raise UserError("no hardware is given; add --hardware, see `stagewright hardware`")
    return experiment.cluster.hardware


@dataclass(frozen=True, eq=False)
class Changes(PublicResult):
    """What changes from an old run to a new one.

    Attributes:

    * `same`: the two are one run, whatever else differs in their files; nothing is simulated.
    * `slowdown`: growth of the time per token, or of the mean time of a request; share of 1.
    * `results`: both as `simulate` or `serve` return them, old and new.
    * `notes`: assumptions, which of the two makes them.

    Tables: `settings`, `model`, `flags` (those without effect on the figures), `figures`,
    `communication`.
    """

    old: DiffedRun
    new: DiffedRun
    results: tuple[Simulation | Serving, Simulation | Serving] | None
    """Old and new; None: they are the same."""

    suffixes = (".json",)

    @property
    def same(self) -> bool:
        """True if nothing differs that counts."""
        return self.results is None

    @property
    def slowdown(self) -> float:
        """Growth of the time per token, or of the mean time of a request."""
        return 0.0 if self.same else views.slowdown(self._figures)

    @property
    def notes(self) -> list[str]:
        """Assumptions of both; those of one side are marked."""
        old, new = ([*side.all_notes, *extra] for side, extra in zip(
            (self.old, self.new), self._result_notes(), strict=True))  # fmt: skip
        texts = [text if text in new else f"old: {text}" for text in old]
        return [*dict.fromkeys([*texts, *(t if t in old else f"new: {t}" for t in new)])]

    def _result_notes(self) -> tuple[list[str], list[str]]:
        """Notes of both results, and remarks on the new one that the old one does not have."""
        if self.results is None:
            return [], []
        old, new = (r.notes() if isinstance(r, Serving) else [*r.notes] for r in self.results)
        remarks = [[of for of in step.remarks() if of.level != "note"] for step in self._steps]
        if remarks:
            known = {(of.level, of.about) for of in remarks[0]}
            new += [str(of) for of in remarks[1] if (of.level, of.about) not in known]
        return old, new

    def _settings(self) -> list[tuple[str, Any, Any]]:
        old, new = self.old.given(), self.new.given()
        names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
        return views.settings(self.old.resolved(), self.new.resolved(), names)

    def _model(self) -> list[tuple[str, Any, Any]]:
        return views.model_parts(self.old.model, self.new.model)

    def _flags(self) -> list[tuple[str, Any, Any, str]]:
        return views.flags(self.old.file, self.new.file)

    def _left_out(self) -> list[str]:
        """Flags that differ and change the run, in a way that the figures do not have."""
        sides = [side.file.left_out for side in (self.old, self.new) if side.file]
        return [name for name, *_ in self._flags() if any(name in side for side in sides)]

    @property
    def _steps(self) -> list[Simulation]:
        return [result for result in self.results or () if isinstance(result, Simulation)]

    @cached_property
    def _figures(self) -> list[views.ChangedFigure]:
        if self._steps:
            return views.of_steps(*self._steps)
        pair = [result for result in self.results or () if isinstance(result, Serving)]
        if not pair:
            return []
        return views.of_servers(
            [r.summary for r in pair], [r.expense() for r in pair], [r.group for r in pair]
        )

    def _communication(self) -> Table:
        return views.communication(*self._steps) if self._steps else Table("communication", {})

    @property
    def tables(self) -> Mapping[str, Callable[..., Table]]:
        """Functions of the tables, by name."""
        return {
            "settings": lambda: views.differences("settings", "setting", self._settings()),
            "model": lambda: views.differences("model", "part", self._model()),
            "flags": lambda: views.differences(
                "flags without effect on the figures", "flag", self._flags(), "reason"
            ),
            "figures": lambda: views.figures(self._figures),
            "communication": self._communication,
        }

    @property
    def verdict(self) -> str:
        """What to conclude, in a sentence."""
        if self.results is None:
            serves = self.new.serving is not None
            return views.nothing_changes(len(self._flags()), self._left_out(), serves=serves)
        words = [views.verdict(self._figures) + ", of another model" * bool(self._model())]
        if self.new.serving and any(name in LOAD_OF_CLIENT for name, *_ in self._settings()):
            words[0] += ", under another load"
        for name, result in zip(("old", "new"), self.results, strict=True):
            if isinstance(result, SimulatedStep) and not result.fit.fits:
                words.append(f"{name}: {memory_line(result.fit)}")
            if isinstance(result, Serving) and result.summary.steadiness.overloaded:
                words.append(f"{name}: {result.summary.verdict}")
        if left_out := self._left_out():
            words.append(f"the figures {views.effects(left_out)}")
        return "; ".join(words)

    def _titles(self) -> dict[str, str]:
        if self.results is None:
            return {"old": self.old.name, "new": self.new.name}
        texts = [title(r) if isinstance(r, SimulatedStep) else r.describe() for r in self.results]
        return dict(zip(("old", "new"), texts, strict=True))

    def text(self) -> Iterator[str | Table]:
        """Lines and tables of `stagewright diff`."""
        yield from views.lines(self._titles(), self.verdict)
        yield from filter(len, (make() for make in self.tables.values()))

    def markdown(self) -> str:
        """The same as Markdown, with the notes."""
        return "\n\n".join([super().markdown(), *(f"* {escaped(note)}" for note in self.notes)])

    def to_dict(self) -> dict[str, Any]:
        """The object of `diff --json`: seconds, bytes, shares of 1."""
        return {
            "same": self.same,
            **self._titles(),
            "verdict": self.verdict,
            "slowdown": self.slowdown,
            "fits": [step.fits for step in self._steps],
            **{
                name: [
                    dict(zip((head, "old", "new", "reason"), map(views.plain, row), strict=False))
                    for row in rows
                ]
                for name, head, rows in (
                    ("settings", "setting", self._settings()),
                    ("model", "part", self._model()),
                    ("flags", "flag", self._flags()),
                )
            },
            "figures": [
                {"figure": f.name, "old": f.old, "new": f.new, "change": f.change}
                for f in self._figures
            ],
            "communication": self._communication().rows,
            "notes": self.notes,
        }


def diff(
    old: str | os.PathLike[str],
    new: str | os.PathLike[str],
    hardware: str | os.PathLike[str] | None = None,
    *,
    progress: Progress | None = None,
    **settings: Any,
) -> Changes:
    """What changes from one run to another: settings, time, memory, communication, cost.

    `old` and `new` are launch scripts, run files or models, each with values behind it:
    `train.sh?TP=8` sets a variable of the script, `llama3-8b?tp=8` a setting. `hardware` and
    `settings` are of both and replace what the files say. Servers are compared under the load that
    their clients send, or `settings` give. `progress` is that of `simulate`, or of `serve`.

    >>> import stagewright as sw
    >>> found = sw.diff("gpt2?layers=2", "gpt2?layers=2&tp=2", "h100-sxm", seq_length=64)
    >>> found.table("settings").columns["setting"]
    ['tp']
    """
    given = dict(settings)
    if hardware is not None:
        given["hardware"] = path_text(hardware)
    sides = read_run("old", path_text(old), given), read_run("new", path_text(new), given)
    if sides[0].kind != sides[1].kind:
        kinds = " and ".join(f"{side.name} is {side.kind}" for side in sides)
        raise UserError(f"{kinds}: wanted two of a kind")
    changes = Changes(*sides, None)
    different = changes.tables["settings"](), changes.tables["model"]()
    if not any(map(len, different)):
        return changes
    return replace(changes, results=(sides[0].result(progress), sides[1].result(progress)))


def read_run(label: str, name: str, given: Mapping[str, Any]) -> DiffedRun:
    """Read one of the runs; errors say which one it is."""
    try:
        return DiffedRun.of(name, given)
    except UserError as error:
        raise UserError(f"{label}: {error}") from None
