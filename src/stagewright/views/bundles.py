"""Summaries of bundles: the tables of a run that was written before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stagewright.errors import UserError
from stagewright.lower.compile import compile
from stagewright.lower.parameters import TrainedParameters
from stagewright.trace.formats.bundle import Bundle
from stagewright.trace.recorded import load_experiment, recorded_model
from stagewright.trace.traced import read_traced
from stagewright.views.summary import Recorded, Summary, rank_class, summary


def of_bundle(path: str) -> Summary:
    """The summary of a bundle that `generate` wrote, or `import` of a graph of one rank."""
    traced = read_traced(Bundle(path))
    if traced is None:
        return summary(recorded(path))
    program = traced.program
    return {
        "model": traced.name,
        "run": traced.describe(),
        "world_size": program.mesh.world_size,
        "microbatches": 1,
        "parameters": {"total": traced.parameters, "active": traced.parameters},
        "rank_classes": [rank_class(program, of) for of in program.classes],
    }


def recorded(path: str) -> Recorded:
    """The run and the program of a bundle that `generate` wrote."""
    source = Bundle(path)
    parameters, model = source.manifest.get("parameters"), recorded_model(path)
    if not isinstance(parameters, dict) or model is None:
        raise UserError(f"{path}: tells of no run; only verify, inspect, expand and diff read it")
    total, active = (int(parameters.get(name, 0)) for name in ("total", "active"))  # pyright: ignore
    run = load_experiment(path).run
    if run.device_memory is None:
        trained = _recorded_counts(parameters)  # pyright: ignore
        return Recorded(run, model, total, active, trained, source.program(), None, None)
    again = compile(run, model)
    program = source.program()
    return Recorded(run, model, total, active, again.trained, program, again.capacity, again.fit)


def _recorded_counts(parameters: Mapping[str, Any]) -> TrainedParameters | None:
    if "trainable" not in parameters:
        return None
    return TrainedParameters(int(parameters["trainable"]), int(parameters.get("adapters", 0)))
