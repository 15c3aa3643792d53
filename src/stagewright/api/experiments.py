"""Runs and experiments from files, manifests and bundles: `stagewright.load_run`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stagewright.api.result import check_names, path_text
from stagewright.errors import UserError
from stagewright.launch import files as launch
from stagewright.launch.reading import LaunchFile
from stagewright.run.experiment import Experiment
from stagewright.run.other_names import setting_of
from stagewright.run.sections.serving import OF_ONE_STEP, SERVING, by_own_names
from stagewright.run.settings import Run
from stagewright.time.hardware import resolve
from stagewright.trace import run_manifest


def load_run(path: str | Path | None, overrides: Mapping[str, Any] | None = None) -> Run:
    """A run from a YAML file, an earlier run's manifest or bundle, or a launch script of another
    tool; overrides replace.

    If the file names nodes or GPUs and no dp, dp fills them. Errors are UserErrors that name the
    setting, and the file if it came from there.
    """
    return load_experiment(path, overrides).run


def load_experiment(
    path: str | Path | None, overrides: Mapping[str, Any] | None = None
) -> Experiment:
    """Like `load_run`, with the machine and the execution, which a run file may name."""
    check_names(overrides, "overrides as a mapping of settings")
    if path is not None:
        path = path_text(path, "the path of a run file")
    return run_manifest.read_experiment(path, overrides, gpus_per_node)


def read_launch(
    path: str | Path, variables: Mapping[str, str] | None = None, *, ignore_unknown: bool = False
) -> LaunchFile:
    """What a launch script, recipe or server command of another tool says; nothing is run.

    `variables` are values of variables from outside, and of flags that it lacks, by name. The
    result has the `settings` and the `model`, and for each flag what it means (`lines`), or why it
    means nothing here (`ignored`). `load_run` makes the run.
    """
    name = path_text(path, "the path of a launch file")
    if launch.find(name) is None:
        raise UserError(f"{name}: is no launch file of a tool that is known here")
    return launch.read(
        launch.with_variables(name, dict(variables or {}), ignore_unknown=ignore_unknown)
    )


def with_launch_file(
    what: object, settings: Mapping[str, Any], *, serves: bool = False
) -> tuple[Any, dict[str, Any]]:
    """Model and settings of a launch file; `settings` replace the file's.

    Without a launch file, both arguments are returned. `serves`: with the settings of requests and
    engines, and without those of one step.
    """
    given = {**settings}
    path = what if isinstance(what, str) else str(what) if isinstance(what, Path) else ""
    if not launch.find(path):
        return what, given
    taken = {setting_of(name): value for name, value in by_own_names(given).items()}
    values = launch.complete(path, launch.settings(path), taken)
    model = values.pop("model", None)
    left_out = OF_ONE_STEP if serves else SERVING
    values = {name: value for name, value in values.items() if name not in left_out}
    return model, {k: v for k, v in values.items() if setting_of(k) not in taken} | given


def gpus_per_node(hardware: str | None) -> int:
    """GPUs of a node of hardware, which is a name or the path of a YAML file."""
    if hardware is None:
        raise UserError("--nodes is for --hardware; add that, or give --gpus instead")
    return resolve(hardware).gpus_per_node
