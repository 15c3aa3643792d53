"""Runs and experiments from files, manifests and bundles: `stagewright.load_run`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stagewright.api.result import check_names, path_text
from stagewright.errors import UserError
from stagewright.run.experiment import Experiment
from stagewright.run.settings import Run
from stagewright.time.hardware import resolve
from stagewright.trace import recorded


def load_run(path: str | Path | None, overrides: Mapping[str, Any] | None = None) -> Run:
    """A run from a YAML file, or an earlier run's manifest or bundle; overrides replace.

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
    return recorded.load_experiment(path, overrides, gpus_per_node)


def gpus_per_node(hardware: str | None) -> int:
    """GPUs of a node of hardware, which is a name or the path of a YAML file."""
    if hardware is None:
        raise UserError("--nodes is for --hardware; add that, or leave --nodes out")
    return resolve(hardware).gpus_per_node
