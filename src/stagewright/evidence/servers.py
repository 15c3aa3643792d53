"""Measured servers under load, whose requests are simulated one by one.

Two kinds of loads. Runs of `data/measured/serving.yaml` have stages of a mean rate. Rows of
`serving.csv` are closed loops: each user sends the next request when the last one ended, all begin
at once, lengths are uniform between the shortest and the longest, and no prefixes are shared.
`data/measured/servers.yaml` says, with the place that says so, how these servers were started and
how many requests each user sent. What was fitted of hosts, `serving.host` says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple, cast

import numpy as np

from stagewright.evidence.rows import Row, carried_cells, carried_text, of_cells, within
from stagewright.evidence.training import run_of_values
from stagewright.files import own_yaml
from stagewright.model.config import ModelConfig
from stagewright.model.hf.quantization import read_quantization
from stagewright.run.sections.execution import Execution, ServingEngine
from stagewright.run.sections.serving.engines import EngineSection
from stagewright.run.settings import Run
from stagewright.serving.deployment import InstanceGroup
from stagewright.serving.energy import serving_expense
from stagewright.serving.instance import Instance, make_instance
from stagewright.serving.metrics import RequestTimes, Slo
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
from stagewright.time.power import idle_watts

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
    "watts": "mean power of a GPU",
}
MAX_NUM_BATCHED_TOKENS = 8192
"""`max_num_batched_tokens` of vLLM's server on large GPUs (vllm/engine/arg_utils.py), and at most
of the recipes of the other engines here. Tables of step times have as many tokens at least, so that
servers which differ in nothing else share one."""


@dataclass(frozen=True, kw_only=True)
class ClosedLoopRow(Row):
    """Measurements of clients of a server whose users send one request after the other."""

    engine: ServingEngine
    users: int
    isl: int
    osl: int
    shortest: float
    """Tokens of the shortest request over `isl` and `osl`, which are the longest's; lengths are
    evenly spread. 1: all requests are equally long."""
    max_num_batched_tokens: int
    """Of a step, where `servers.yaml` has no entry for the server."""
    checkpoint: str
    """Of `checkpoints.yaml`: how the weights are stored, where not as the preset's; or empty."""
    settings: Mapping[str, Any]
    busy: float
    """Share of the time of a power measurement in which the GPU ran kernels, as its driver says:
    measurements begin before a run and end after it."""

    @property
    def server(self) -> str:
        """The server, without options of its engine."""
        return f"{self.hardware} {self.engine} {self.checkpoint} {sorted(self.settings.items())}"

    @property
    def experiment(self) -> str:
        """The server and its load; power is computed for rows of power alone."""
        load = (self.users, self.isl, self.osl, self.shortest, self.quantity == "watts")
        return repr((self.server, load, client_of(self)))

    def simulate(self) -> dict[str, float]:
        """Figures of all requests by quantity.

        Where the first step of a server took longer, the first request of each user waited for it,
        so that the mean rises by that time over the number of a user's requests.
        """
        client = client_of(self)
        # Clients ask for all tokens: `--ignore-eos`, `ignore_eos:true`.
        options: dict[str, Any] = {"ignore_eos": True, **client.options}
        options["scheduler"] = ENGINES[self.engine]
        engines = EngineSection(enable_prefix_caching=False, **options)
        group = _group(
            self.hardware, self.engine, {**self.settings, **client.settings}, engines,
            self.checkpoint, least_tokens=MAX_NUM_BATCHED_TOKENS,
        )  # fmt: skip
        lengths = Lengths(isl=self.isl, osl=self.osl, range_ratio=self.shortest)
        work = closed_loop(client.requests_per_user * self.users, self.users, lengths)
        # Clients measure from the first request to the last token.
        run = group.serve(work, Slo(), whole_run=True)
        of = run.summary
        figures = {
            "tpot_ms": of.tpot.mean * 1e3,
            "ttft_ms": (of.ttft.mean + client.first_step / client.requests_per_user) * 1e3,
            "ttft_p50_ms": of.ttft.p50 * 1e3,
            "output_tokens_s_gpu": of.output_rate
            * (of.seconds / (of.seconds + client.first_step) / of.gpus),
        }
        if self.quantity == "watts":
            figures["watts"] = serving_expense(run, [group]).watts_per_gpu
        return figures

    def predict(self, outcome: dict[str, float]) -> float:
        """The figure that was measured."""
        figure = outcome[self.quantity]
        if self.quantity != "watts":
            return figure
        return self.busy * figure + (1 - self.busy) * idle_watts(hardware_of(self.hardware))


def closed_loops(source: str | None = None) -> list[ClosedLoopRow]:
    """The rows of closed loops, those of one server in succession."""
    rows = (_loop(cells) for cells in carried_cells("serving.csv", source))
    return sorted(rows, key=lambda row: row.server)


def _loop(cells: Mapping[str, str]) -> ClosedLoopRow:
    others = set(ClosedLoopRow.__dataclass_fields__)
    values = {k: v for k, v in cells.items() if k not in others and v}
    settings = {k: int(v) if v.isdecimal() else v for k, v in values.items()}
    row = ClosedLoopRow(
        **of_cells(cells),
        engine=cast("ServingEngine", cells["engine"]),
        users=int(cells["users"]),
        isl=int(cells["isl"]),
        osl=int(cells["osl"]),
        shortest=float(cells["shortest"] or 1),
        max_num_batched_tokens=int(cells["max_num_batched_tokens"] or MAX_NUM_BATCHED_TOKENS),
        checkpoint=cells["checkpoint"],
        settings=settings,
        busy=float(cells["busy"] or 1),
    )
    named = row.row if row.hardware in row.row else f"{row.hardware} {row.row}"
    return replace(row, row=named)


# ---- how servers were started --------------------------------------------------------------------

REQUESTS_PER_USER = 10
"""InferenceX's `--num-prompts` over `--max-concurrency` (SemiAnalysisAI/InferenceX,
`benchmarks/benchmark_lib.sh`)."""


class Client(NamedTuple):
    """Requests of a client, and how its server was started."""

    requests_per_user: int
    settings: Mapping[str, Any]
    """Of the run, beside the row's."""
    options: Mapping[str, Any]
    """Of the engine."""
    first_step: float = 0.0
    """Seconds that the server takes longer for its first step, since no requests came before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFilter:
    """Rows that an entry of `servers.yaml` selects; empty fields fit all."""

    source: str = ""
    engine: str = ""
    models: tuple[str, ...] = ()
    hardware: tuple[str, ...] = ()
    equal: bool | None = None
    """True if all requests are equally long."""
    tokens: tuple[int, ...] = ()
    """Of a prompt and of an output, of the longest request."""
    below_tp: float = float("inf")
    below_users: float = float("inf")
    before: str = "9"
    """A day; rows whose names end with none fit."""

    def __call__(self, row: ClosedLoopRow) -> bool:
        """Check whether a row is one of them."""
        day = re.search(r"\d{4}-\d\d-\d\d$", row.row)
        return (
            self.source in row.source
            and self.engine in ("", row.engine)
            and (not self.models or str(row.settings["model"]) in self.models)
            and (not self.hardware or row.hardware in self.hardware)
            and self.equal in (None, row.shortest == 1)
            and self.tokens in ((), (row.isl, row.osl))
            and int(row.settings.get("tp", 1)) < self.below_tp
            and row.users < self.below_users
            and (day is None or day.group() < self.before)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredServer:
    """An entry of `servers.yaml`: of all rows of a source that were measured alike."""

    fits: RowFilter
    cited: str
    """The place that says so."""
    requests_per_user: int = REQUESTS_PER_USER
    max_tokens: int | None = None
    """`max_num_batched_tokens` beyond a prompt and the users' tokens."""
    min_tokens: int = 0
    """Its lower limit."""
    prefill_tokens: int | None = None
    """`max_prefill_tokens` beyond a prompt."""
    first_step: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def client(self, row: ClosedLoopRow) -> Client:
        """Client of a row of this entry."""
        options = dict(self.options)
        if self.max_tokens is not None:
            tokens = row.isl + row.users + self.max_tokens
            options["max_num_batched_tokens"] = max(self.min_tokens, tokens)
        if self.prefill_tokens is not None:
            options["max_prefill_tokens"] = row.isl + self.prefill_tokens
        return Client(self.requests_per_user, self.settings, options, self.first_step)


@cache
def entries() -> tuple[MeasuredServer, ...]:
    """All entries; the first one that fits a row counts."""
    listed: Any = own_yaml(carried_text("servers.yaml"))
    return tuple(map(_entry, listed))


def _entry(values: Mapping[str, Any]) -> MeasuredServer:
    fits: dict[str, Any] = dict(values["fits"])
    for name in fits.keys() & {"models", "hardware", "tokens"}:
        fits[name] = tuple(fits[name])
    others: dict[str, Any] = {name: value for name, value in values.items() if name != "fits"}
    return MeasuredServer(fits=RowFilter(**fits), **others)


def client_of(row: ClosedLoopRow) -> Client:
    """Client of a row, as far as a source says; else InferenceX's requests per user."""
    entry = next((entry for entry in entries() if entry.fits(row)), None)
    if entry is None:
        return Client(REQUESTS_PER_USER, {}, {"max_num_batched_tokens": row.max_num_batched_tokens})
    return entry.client(row)


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
        engines.free_gpu_memory_fraction,
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
    free_gpu_memory_fraction: float | None,
) -> Instance:
    """The instance of a server, whose table of step times is kept."""
    run, model = model_of_row(dict(settings), checkpoint)
    run = run.model_copy(update={"mode": "decode"})
    return make_instance(
        run, model, Machine.of(hardware_of(hardware), gpus=run.world_size),
        Execution(serving_engine=engine), max_tokens=tokens, max_requests=requests,
        gpu_memory_utilization=gpu_memory_utilization,
        free_gpu_memory_fraction=free_gpu_memory_fraction,
    )  # fmt: skip


def model_of_row(values: Mapping[str, Any], checkpoint: str) -> tuple[Run, ModelConfig]:
    """The run of a row's settings, and its model with weights as the checkpoint stores them."""
    run, model = run_of_values(values)
    if checkpoint:
        stored, _ = read_quantization(checkpoint, _checkpoints()[checkpoint], model)
        model = replace(model, quantization=stored)
    return run, model


@cache
def _checkpoints() -> dict[str, Any]:
    return own_yaml(carried_text("checkpoints.yaml"))
