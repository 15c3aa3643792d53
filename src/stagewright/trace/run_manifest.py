"""The manifest of a run beside its traces; reads run and model back from it, bundles, run files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stagewright.errors import UserError
from stagewright.lower.compiled_run import CompiledRun
from stagewright.model import json as model_json
from stagewright.model.config import ModelConfig
from stagewright.run import files
from stagewright.run.experiment import Experiment
from stagewright.run.sections import EXPERIMENT
from stagewright.run.sections.cluster import ClusterSection
from stagewright.run.sections.declare import plain
from stagewright.run.sections.execution import Execution
from stagewright.schedule.text import to_csv
from stagewright.trace.formats.archive import is_bundle
from stagewright.trace.formats.bundle import Bundle
from stagewright.version import __version__


def manifest(
    compiled: CompiledRun,
    cluster: ClusterSection | None = None,
    execution: Execution | None = None,
) -> dict[str, Any]:
    """The manifest of traces: everything that the result depends on, to repeat the run.

    `stagewright generate --config manifest.json` does so, and `simulate --config manifest.json` on
    the machine and with the execution that were given. Nodes are not among these: dp fills them.
    Joined steps of two serving instances follow from no single run; theirs names the decode run.
    """
    run, ranks = compiled.run, compiled.program.mesh.world_size
    joined = run.prefill is None and run.world_size != ranks
    schedule = run.schedule or ""
    loads = {"expert_load": compiled.load.lines} if compiled.load else {}
    modules = compiled.model.modules
    return {
        "stagewright": __version__,
        # A file may change or vanish; a schedule by name follows from the run.
        "decode_run" if joined else "run": run.model_dump(mode="json") | loads,
        **_given(cluster=cluster, execution=execution),
        **({"schedule": to_csv(compiled.order)} if schedule.endswith(".csv") else {}),
        "model": model_json.to_json(compiled.model),
        **({"modules": {m.name: m.text for m in modules}} if modules else {}),
        "parameters": {
            "total": compiled.parameters,
            "active": compiled.active_parameters,
            **(compiled.trained._asdict() if compiled.trained else {}),
        },
        "mesh": dict(compiled.program.mesh.axes),
    }


def _given(**sections: ClusterSection | Execution | None) -> dict[str, dict[str, Any]]:
    """The settings of the machine and of the execution that are not their default, by section."""
    sections_given: dict[str, dict[str, Any]] = {}
    for setting in EXPERIMENT.values():
        section = sections.get(setting.section)
        value = setting.default if section is None else getattr(section, setting.name)
        if value != setting.default and setting.name not in ("nodes", "gpus"):
            sections_given.setdefault(setting.section, {})[setting.name] = plain(value)
    return sections_given


def read_experiment(
    path: str | Path | None,
    overrides: Mapping[str, Any] | None = None,
    gpus_per_node: Callable[[str | None], int] | None = None,
) -> Experiment:
    """The run, the machine and the execution of a YAML file, an earlier run's manifest or bundle.

    Overrides replace. With `gpus_per_node`, of hardware by name, dp fills the nodes. Every error is
    a UserError that names the setting, and the file if it came from there.
    """
    path, overrides = files.launched(path, overrides or {})
    values = {} if path is None else _settings(path)
    if "stagewright" in values and not files.is_manifest(values):
        raise UserError(f"{path}: is a manifest without a run; wanted one with a run")
    return Experiment.of(values, overrides, path, gpus_per_node=gpus_per_node)


def load_model(path: str | Path) -> ModelConfig | None:
    """The model in an earlier run's manifest or bundle; None for a run file, which names it."""
    return files.model_of_manifest(_settings(path), path)


def least_bytes(path: str | Path) -> int:
    """The bytes that first kernels move at least in traces for ASTRA-sim; 0 where nothing is said.

    `stagewright.time.astra_sim.with_least_bytes` made them so.
    """
    entry: Any = _settings(path).get("astra_sim")
    least: object = entry.get("least_bytes") if isinstance(entry, dict) else 0  # pyright: ignore
    return least if isinstance(least, int) and 0 < least < 1 << 40 else 0


def _settings(path: str | Path) -> dict[str, Any]:
    return Bundle(path).manifest if is_bundle(path) else files.read_settings(path)
