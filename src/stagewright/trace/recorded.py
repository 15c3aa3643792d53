"""Records a run beside its traces; reads run and model back from run files, manifests, bundles."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stagewright.lower.compiled_run import CompiledRun
from stagewright.model import json as model_json
from stagewright.model.config import ModelConfig
from stagewright.run import files
from stagewright.run.experiment import Experiment
from stagewright.run.settings import Run
from stagewright.schedule.text import to_csv
from stagewright.trace.formats.archive import is_bundle
from stagewright.trace.formats.bundle import Bundle
from stagewright.version import __version__


def manifest(compiled: CompiledRun) -> dict[str, Any]:
    """What is written beside the traces: everything that the result depends on, to repeat the run.

    `stagewright generate --config manifest.json` does so.
    """
    schedule = compiled.run.schedule or ""
    loads = {"expert_load": compiled.load.lines} if compiled.load else {}
    modules = compiled.model.modules
    return {
        "stagewright": __version__,
        # A file may change or vanish; a schedule by name follows from the run.
        "run": compiled.run.model_dump(mode="json") | loads,
        **({"schedule": to_csv(compiled.order)} if schedule.endswith(".csv") else {}),
        "model": model_json.to_json(compiled.model),
        **({"modules": {m.name: m.text for m in modules}} if modules else {}),
        "parameters": {"total": compiled.parameters, "active": compiled.active_parameters},
        "mesh": dict(compiled.program.mesh.axes),
    }


def load_run(path: str | Path | None, overrides: Mapping[str, Any] | None = None) -> Run:
    """A run from a YAML file, or an earlier run's manifest or bundle; overrides replace.

    Raises `UserError`, which names the setting, and the file if the setting came from there.

    >>> import stagewright as sw, pathlib, tempfile
    >>> file = pathlib.Path(tempfile.mkdtemp(), "run.yaml")
    >>> _ = file.write_text("{model: llama3-8b, tp: 8, hardware: h100-sxm}")
    >>> sw.load_run(file, {"tp": 4}).tp
    4
    """
    return Run.of({} if path is None else _settings(path), overrides, path)


def load_experiment(
    path: str | Path | None, overrides: Mapping[str, Any] | None = None
) -> Experiment:
    """Likewise, with the machine and the execution, which a run file may name."""
    return Experiment.of({} if path is None else _settings(path), overrides, path)


def recorded_model(path: str | Path) -> ModelConfig | None:
    """The model in an earlier run's manifest or bundle; None for a run file, which names it."""
    return files.recorded_model(_settings(path), path)


def _settings(path: str | Path) -> dict[str, Any]:
    return Bundle(path).manifest if is_bundle(path) else files.read_settings(path)
