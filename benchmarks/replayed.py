"""Recorded workloads replayed on the servers that answered them, beside what was measured there.

`benchmarks/predictions.py` writes the figures beside the measured ones. The requests are ShareGPT's
as casys-kaist/LLMServingSim@5daddb21 (MIT) sent them to vLLM 0.19; the measured figures are of all
requests of a run. Engines have the arguments, and the blocks of the cache, that the server's log
gives. The servers are overloaded: most requests wait, and times to first tokens are how fast the
server works.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from stagewright.evidence.rows import Prediction
from stagewright.files import own_yaml
from stagewright.model.catalog import resolve as model_of
from stagewright.run.sections.execution import Execution
from stagewright.run.sections.serving.engines import EngineSection
from stagewright.run.settings import Run
from stagewright.serving.compare_log import figure_of
from stagewright.serving.deployment import InstanceGroup
from stagewright.serving.instance import make_instance
from stagewright.serving.metrics import RequestTimes, Slo
from stagewright.serving.schedulers.named import batch_limits
from stagewright.serving.workloads import traces
from stagewright.time.hardware import Hardware
from stagewright.time.hardware import resolve as hardware_of
from stagewright.time.network import Machine

DATA = Path(__file__).parent / "data"


class ReplayedServer(NamedTuple):
    """A server, and what its users saw, in milliseconds by figure such as `ttft_p50_ms`."""

    source: str
    hardware: str
    settings: Mapping[str, Any]
    options: Mapping[str, Any]
    measured: Mapping[str, float]
    reason: str
    requests: str
    """The file of its requests in `data`."""
    links: Mapping[str, float] = {}
    """`bandwidth_gb_s` and `latency_us` of each step between its GPUs; none: the hardware's."""


def replayed_servers() -> list[ReplayedServer]:
    """All servers."""
    of: Any = own_yaml((DATA / "replayed.yaml").read_text("utf-8"))
    return [
        ReplayedServer(
            of["source"],
            run["hardware"],
            of["settings"] | run.get("settings", {}),
            of["options"] | run["options"],
            run["measured"],
            run["reason"],
            run.get("requests", "sharegpt-300.csv"),
            run.get("links", {}),
        )
        for run in of["runs"]
    ]


def predictions(of: ReplayedServer) -> list[Prediction]:
    """What the users of a server would see."""
    times = replay(of)
    found: list[Prediction] = []
    for quantity, measured in of.measured.items():
        name, figure, _ = quantity.split("_")
        predicted = figure_of(getattr(times, name), figure) * 1e3
        row = f"{of.hardware} {of.settings['model']}"
        found.append(Prediction(of.source, row, quantity, measured, predicted, "", of.reason))
    return found


def replay(of: ReplayedServer) -> RequestTimes:
    """Times of all requests."""
    run = Run.model_validate({"mode": "decode", **of.settings})
    engines = EngineSection(**of.options)
    hardware = _with_links(hardware_of(of.hardware), of.links)
    limits = batch_limits(engines, hardware)
    made = make_instance(
        run, model_of(run.model), Machine.of(hardware, gpus=run.world_size),
        Execution(serving_engine="vllm"),
        max_tokens=limits.tokens, max_requests=limits.requests,
        gpu_memory_utilization=engines.gpu_memory_utilization,
    )  # fmt: skip
    group = InstanceGroup(made, engines)
    return RequestTimes.of(group.serve(traces.read(DATA / of.requests), Slo()).outcome)


def _with_links(hardware: Hardware, links: Mapping[str, float]) -> Hardware:
    """Hardware whose GPUs are joined by such links, whatever the size of messages."""
    if not links:
        return hardware
    none = dict.fromkeys(("latency_us", "medium_us", "bulk_us"), 0.0)
    whole = dict.fromkeys(("bandwidth_fraction", "medium_fraction", "low_latency_fraction"), 1.0)
    own = {"bandwidth_gb_s": links["bandwidth_gb_s"], "hop_us": links["latency_us"]}
    scale_up = hardware.scale_up.model_copy(update={**none, **whole, **own})
    return hardware.model_copy(update={"scale_up": scale_up})
