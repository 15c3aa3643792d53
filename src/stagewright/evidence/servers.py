"""Measured servers under load, whose requests are simulated one by one.

Two kinds of loads. Runs of `data/measured/serving.yaml` have stages of a mean rate. Rows of
`inference.csv` and `serving.csv` with a number of users are closed loops: each user sends the next
request when the last one ended, all begin at once, lengths are uniform between the shortest and the
longest, and no prefixes are shared. `data/measured/servers.yaml` says, with the place that says so,
how these servers were started and how many requests each user sent. What was fitted of hosts,
`serving.host` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from stagewright.evidence.inference import ServedRow, client_of, model_of_row
from stagewright.evidence.inference import rows as inference_rows
from stagewright.evidence.rows import Row, carried_text, within
from stagewright.files import own_yaml
from stagewright.run.sections.execution import Execution, ServingEngine
from stagewright.run.sections.serving.engines import EngineSection
from stagewright.serving.deployment import InstanceGroup
from stagewright.serving.instance import Instance, make_instance
from stagewright.serving.metrics import RequestTimes, ServingSummary, Slo
from stagewright.serving.schedulers.named import ENGINES, batch_limits
from stagewright.serving.workloads.synthetic import (
    Lengths,
    LoadStage,
    SharedPrefix,
    closed_loop,
    load_in_stages,
)
from stagewright.time.hardware import resolve as hardware_of
from stagewright.time.network import Machine

PEERS = (
    "Other simulators on runs of the same kind (inference-sim/sim-to-real-accuracy-validation@"
    "dcec3fd4, different subsets): mean error end to end BLIS 23.2%, AIConfigurator 0.9 17.2%, "
    "LLM-Optimizer 42.2%, LLMServingSim 2.0 38.4%; to the first token 23.6%, 808%, 709%, 1,629%."
)


def rows(source: str | None = None) -> list[StageRow | ClosedLoopRow]:
    """The rows of the package, of sources whose name contains `source`."""
    return [*stages(source), *closed_loops(source)]


# ---- stages of a mean rate -----------------------------------------------------------------------

OVERLOADED = "overloaded: some of its requests ended in no answer, and ours wait without end"
FITTED = "the host"
"""`serving.host.HOSTS`: 6.5 ms until a request is in the queue, for all servers."""
STAGE_QUANTITIES = {
    "ttft_ms": "mean milliseconds to the first token",
    "ttft_p99_ms": "99th percentile of these",
    "tpot_ms": "mean milliseconds per token after the first",
    "e2e_ms": "mean milliseconds to the last token",
}


@dataclass(frozen=True, slots=True)
class LoadedServer:
    """A server, and the stages of its load."""

    name: str
    hardware: str
    engine: ServingEngine
    settings: Mapping[str, Any]
    options: Mapping[str, Any]
    prompts: SharedPrefix
    stages: tuple[LoadStage, ...]

    def serve(self) -> list[dict[str, float]]:
        """Milliseconds of each stage by quantity."""
        options = dict(self.options)
        settings = {**self.settings, "max_model_len": options.pop("max_model_len")}
        engines = EngineSection(scheduler=ENGINES[self.engine], **options)
        group = _group(self.hardware, self.engine, settings, engines)
        work = load_in_stages(self.stages, self.prompts)
        outcome = group.serve(work, Slo()).outcome
        times = RequestTimes.of(outcome)
        arrival = np.array(outcome.records.arrival)[times.number]
        stage_of = np.searchsorted(work.stages, arrival, side="right") - 1
        return [
            {
                "ttft_ms": float(times.ttft[stage_of == stage].mean()) * 1e3,
                "ttft_p99_ms": float(np.quantile(times.ttft[stage_of == stage], 0.99)) * 1e3,
                "tpot_ms": float(times.tpot[stage_of == stage].mean()) * 1e3,
                "e2e_ms": float(times.e2e[stage_of == stage].mean()) * 1e3,
            }
            for stage in range(len(self.stages))
        ]


@dataclass(frozen=True, kw_only=True)
class StageRow(Row):
    """Measurements of clients in a stage of the load of a server."""

    server: LoadedServer
    stage: int

    @property
    def experiment(self) -> str:
        """The server and all stages of its load."""
        return repr(self.server)

    def simulate(self) -> list[dict[str, float]]:
        """Milliseconds of each stage by quantity."""
        return self.server.serve()

    def predict(self, outcome: list[dict[str, float]]) -> float:
        """Milliseconds of the stage."""
        return outcome[self.stage][self.quantity]


def stages(source: str | None = None) -> list[StageRow]:
    """The rows of `serving.yaml`: each quantity of each stage of each server."""
    entry: Any = own_yaml(carried_text("serving.yaml"))
    if not within(entry["source"], source):
        return []
    result: list[StageRow] = []
    for run in entry["runs"]:
        server = LoadedServer(
            run["row"], entry["hardware"], entry["engine"], run["settings"], entry["options"],
            SharedPrefix(**run["prompts"]),
            tuple(LoadStage(stage["rate"], stage["duration"]) for stage in run["stages"]),
        )  # fmt: skip
        for number, stage in enumerate(run["stages"]):
            overloaded = bool(stage["failed"])
            result += [
                StageRow(
                    source=f"{entry['source']}, overloaded" if overloaded else entry["source"],
                    row=f"{server.name} {server.stages[number].rate:g}/s",
                    url=entry["url"],
                    hardware=server.hardware,
                    quantity=quantity,
                    measured=float(measured),
                    fitted=FITTED if quantity == "ttft_ms" else "",
                    reason=OVERLOADED if overloaded else "",
                    server=server,
                    stage=number,
                )
                for quantity, measured in stage.items()
                if quantity.endswith("_ms")
            ]
    return result


# ---- closed loops of users -----------------------------------------------------------------------

LOOP_QUANTITIES = {
    "tpot_ms": "mean milliseconds per token after the first",
    "ttft_ms": "mean milliseconds to the first token",
    "ttft_p50_ms": "median of these",
    "output_tokens_s_gpu": "output tokens per second and GPU",
}
MOST_TOKENS = 8192
"""Of a step, at least, so that servers which differ in nothing else have one table of times."""
HARDWARE = ("h100-sxm", "h200")
"""Of the rows of AIConfigurator that are simulated."""


@dataclass(frozen=True, kw_only=True)
class ClosedLoopRow(Row):
    """Measurements of clients of a server whose users send one request after the other."""

    served: ServedRow
    """The server and its load."""

    @property
    def experiment(self) -> str:
        """The server, its users, and where they are described."""
        return repr((self.served.experiment, self.url))

    def simulate(self) -> ServingSummary:
        """Figures of all requests."""
        row, client = self.served, client_of(self.served)
        assert row.concurrency is not None
        # Clients ask for all tokens: `--ignore-eos`, `ignore_eos:true`.
        options: dict[str, Any] = {"ignore_eos": True, **client.options}
        options["scheduler"] = ENGINES[row.engine]
        engines = EngineSection(enable_prefix_caching=False, **options)
        settings = {**row.settings, **client.settings}
        group = _group(
            row.hardware, row.engine, settings, engines, row.checkpoint, least_tokens=MOST_TOKENS
        )
        users = round(row.concurrency)
        lengths = Lengths(isl=row.isl, osl=row.osl, range_ratio=row.shortest)
        work = closed_loop(client.requests_per_user * users, users, lengths)
        # Clients measure from the first request to the last token.
        return group.serve(work, Slo(), whole_run=True).summary

    def predict(self, outcome: ServingSummary) -> float:
        """The figure that was measured.

        Where the first step of a server took longer, the first request of each user waited for it:
        a share of the mean that is 1 over its requests.
        """
        client = client_of(self.served)
        late = client.first_step / client.requests_per_user
        slower = outcome.seconds / (outcome.seconds + client.first_step)
        values = {
            "tpot_ms": outcome.tpot.mean * 1e3,
            "ttft_ms": (outcome.ttft.mean + late) * 1e3,
            "ttft_p50_ms": outcome.ttft.p50 * 1e3,
            "output_tokens_s_gpu": outcome.output_rate * slower / outcome.gpus,
        }
        return values[self.quantity]


def closed_loops(source: str | None = None) -> list[ClosedLoopRow]:
    """The rows of closed loops, those of one server in succession."""
    result: list[ClosedLoopRow] = []
    for row in (*inference_rows(source), *inference_rows(source, "serving.csv")):
        known = row.quantity in LOOP_QUANTITIES and row.concurrency is not None
        if not known or row.cached:
            continue
        if "InferenceX" not in row.source and row.hardware not in HARDWARE:
            continue
        result.append(
            ClosedLoopRow(
                source=row.source,
                row=row.row if row.hardware in row.row else f"{row.hardware} {row.row}",
                url=row.url,
                hardware=row.hardware,
                quantity=row.quantity,
                measured=row.measured,
                reason=row.reason,
                served=row,
            )
        )
    return sorted(result, key=_server)


def _server(loop: ClosedLoopRow) -> str:
    row = loop.served
    return f"{row.hardware} {row.engine} {row.checkpoint} {sorted(row.settings.items())}"


# ---- engines -------------------------------------------------------------------------------------


def _group(
    hardware: str,
    engine: ServingEngine,
    settings: Mapping[str, Any],
    engines: EngineSection,
    checkpoint: str = "",
    least_tokens: int = 0,
) -> InstanceGroup:
    """The server of an engine with such settings of its run and options of its scheduler.

    Step times are computed for at least `least_tokens` tokens.
    """
    limits = batch_limits(engines, hardware_of(hardware))
    engine_instance = _instance(
        hardware, engine, tuple(sorted(settings.items())), checkpoint,
        max(limits.tokens, least_tokens), limits.requests, engines.gpu_memory_utilization,
    )  # fmt: skip
    return InstanceGroup(engine_instance, engines)


@cache
def _instance(
    hardware: str,
    engine: ServingEngine,
    settings: tuple[tuple[str, Any], ...],
    checkpoint: str,
    tokens: int,
    requests: int,
    gpu_memory_utilization: float,
) -> Instance:
    """The instance of a server, whose table of step times is kept."""
    run, model = model_of_row(dict(settings), checkpoint)
    run = run.model_copy(update={"mode": "decode"})
    return make_instance(
        run, model, Machine.of(hardware_of(hardware), gpus=run.world_size),
        Execution(serving_engine=engine), max_tokens=tokens, max_requests=requests,
        gpu_memory_utilization=gpu_memory_utilization,
    )  # fmt: skip
