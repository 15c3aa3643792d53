"""Servers under load, whose requests are served one by one, beside what their clients measured.

Runs of `data/measured/serving.yaml`: stages of constant rates, of which clients saw times to the
first token, per token behind it and to the last. Nothing is fitted to times per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal, NamedTuple

import numpy as np

from stagewright.arrays import Float
from stagewright.evidence.predictions import Prediction
from stagewright.files import own_yaml
from stagewright.model.catalog import resolve as model_of
from stagewright.run.sections.execution import Execution
from stagewright.run.sections.serving.engines import EngineSection
from stagewright.run.settings import Run
from stagewright.serving.deployment import InstanceGroup
from stagewright.serving.instance import instance
from stagewright.serving.metrics import RequestTimes, Slo
from stagewright.serving.schedulers.named import batch_limits, scheduler_of
from stagewright.serving.workloads.synthetic import LoadStage, SharedPrefix, staged
from stagewright.time.hardware import resolve as hardware_of
from stagewright.time.network import Machine

OVERLOADED = "overloaded: some of its requests ended in no answer, and ours wait without end"


class MeasuredStage(NamedTuple):
    """A stage of the load, and what clients saw: means, in milliseconds."""

    load: LoadStage
    times: Mapping[str, float]
    """By quantity, `ttft_p99_ms` besides."""
    failed: int
    """Requests that ended in no answer."""


@dataclass(frozen=True, slots=True)
class LoadedServer:
    """A server, and the stages of its load."""

    source: str
    row: str
    hardware: str
    engine: Literal["vllm", "sglang", "trtllm"]
    settings: Mapping[str, Any]
    options: Mapping[str, Any]
    prompts: SharedPrefix
    stages: tuple[MeasuredStage, ...]


def servers() -> list[LoadedServer]:
    """The servers that the package carries."""
    text = (files("stagewright") / "data" / "measured" / "serving.yaml").read_text("utf-8")
    of: Any = own_yaml(text)
    shared = (of[name] for name in ("source", "hardware", "engine", "options"))
    source, hardware, engine, options = shared
    return [
        LoadedServer(
            source, run["row"], hardware, engine, run["settings"], options,
            SharedPrefix(**run["prompts"]), tuple(map(_stage, run["stages"])),
        )
        for run in of["runs"]
    ]  # fmt: skip


def _stage(values: Mapping[str, Any]) -> MeasuredStage:
    load = LoadStage(values["rate"], values["duration"])
    times = {name: float(value) for name, value in values.items() if name.endswith("_ms")}
    return MeasuredStage(load, times, values["failed"])


FITTED = "the host"
"""`serving.host.HOSTS`: 6.5 ms until a request is in the queue, for all servers."""
QUANTITIES = {
    "ttft_ms": "mean milliseconds to the first token",
    "ttft_p99_ms": "99th percentile of these",
    "tpot_ms": "mean milliseconds per token behind the first",
    "e2e_ms": "mean milliseconds to the last token",
}
PEERS = (
    "Other simulators on runs of the same kind (inference-sim/sim-to-real-accuracy-validation@"
    "dcec3fd4, different subsets): mean error end to end BLIS 23.2%, AIConfigurator 0.9 17.2%, "
    "LLM-Optimizer 42.2%, LLMServingSim 2.0 38.4%; to the first token 23.6%, 808%, 709%, 1,629%."
)


def validate(
    source: str | None = None,
    *,
    every: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Prediction]:
    """Predictions of all stages, or of the servers whose source contains the text `source`."""
    chosen = [s for s in servers() if source is None or source.lower() in s.source.lower()][::every]
    for nth, server in enumerate(chosen):
        yield from predictions(server)
        if progress is not None:
            progress(nth + 1, len(chosen))


def predictions(server: LoadedServer) -> list[Prediction]:
    """What clients of a server would see of each stage."""
    times, arrival, begins = _served(server)
    ends = [*begins[1:], np.inf]
    found: list[Prediction] = []
    for stage, begin, end in zip(server.stages, begins, ends, strict=True):
        mine = (arrival >= begin) & (arrival < end)
        values = {
            "ttft_ms": times.ttft[mine].mean(),
            "ttft_p99_ms": np.quantile(times.ttft[mine], 0.99),
            "tpot_ms": times.tpot[mine].mean(),
            "e2e_ms": times.e2e[mine].mean(),
        }
        overloaded = OVERLOADED if stage.failed else ""
        for quantity, measured in stage.times.items():
            predicted = float(values[quantity]) * 1e3
            name = f"{server.row} {stage.load.rate:g}/s"
            source = f"{server.source}, overloaded" if overloaded else server.source
            error = predicted / measured - 1
            fitted = FITTED if quantity == "ttft_ms" else ""
            found.append(
                Prediction(source, name, quantity, measured, predicted, error, fitted, overloaded)
            )
    return found


def _served(server: LoadedServer) -> tuple[RequestTimes, Float, tuple[float, ...]]:
    """Times of all requests, when they arrived, and when stages of the load begin."""
    run = Run.model_validate({"mode": "decode", **server.settings})
    run = run.model_copy(update={"max_model_len": server.options["max_model_len"]})
    batch = {k: v for k, v in server.options.items() if k != "max_model_len"}
    engines = EngineSection(scheduler=server.engine, **batch)
    hardware = hardware_of(server.hardware)
    limits = batch_limits(engines, hardware)
    made = instance(
        run, model_of(run.model), Machine.of(hardware, gpus=run.world_size),
        Execution(serving_engine=server.engine),
        most_tokens=limits.tokens, most_requests=limits.requests,
        gpu_memory_utilization=engines.gpu_memory_utilization,
    )  # fmt: skip
    work = staged(tuple(s.load for s in server.stages), server.prompts, poisson=False)
    group = InstanceGroup(made, engines, limits, scheduler_of(engines, limits))
    outcome = group.serve(work, Slo()).outcome
    times = RequestTimes.of(outcome)
    return times, np.array(outcome.records.arrival)[times.number], work.stages
