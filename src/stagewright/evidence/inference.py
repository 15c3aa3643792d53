"""Predicted times of serving beside measurements: rows of `data/measured/inference.csv`.

A row is a server under a steady load, and one of its figures: the mean time per output token, the
time to the first token, or the mean power of a GPU. The load is a number of users, each of whom
sends a request when the last one ended (`concurrency`), or a rate of requests (`request_rate`).

A request waits for its prompt, and then for each of its tokens. While it gets them, prompts of
others are computed: in chunks beside the tokens (vLLM, TensorRT-LLM), or in steps of their own
(SGLang). In a steady state a request sees as many prompts as there are other requests, so that

    time per output token = decode step + prompts per step x (step with a prompt - decode step)

and Little's law gives the number of requests that get tokens: their rate times the time that they
take to get them. Where all requests are equally long and prompts run in steps of their own, users
stay in step: all send their prompts at once, and while these run nobody gets a token. The first
prompt's request waits for all others, the last one's for none: half of them on average, and half
of their time counts until the first token. Of times per output token only TensorRT-LLM's host is
fitted (`serving.host.HOSTS`), and what hosts take until the first token (`HOST_MS`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple, cast

from stagewright.evidence.rows import Row, carried_cells, carried_text, of_cells
from stagewright.evidence.training import run_of_values
from stagewright.files import own_yaml
from stagewright.lower.compile import compile
from stagewright.lower.compiled_run import CompiledRun
from stagewright.model.config import ModelConfig
from stagewright.model.hf.quantization import read_quantization
from stagewright.program.fit import peak_in_program_order
from stagewright.run.sections.execution import Execution, ServingEngine
from stagewright.run.settings import Run
from stagewright.serving.host import HOSTS, NO_HOST
from stagewright.time.hardware import resolve
from stagewright.time.network import Machine
from stagewright.time.power import idle_watts
from stagewright.time.simulate.step import simulate

QUANTITIES = {
    "tpot_ms": "mean milliseconds between two tokens of a request",
    "ttft_ms": "mean milliseconds from a request to its first token",
    "watts": "mean power of a GPU",
}
MAX_NUM_BATCHED_TOKENS = 8192
"""`max_num_batched_tokens` of vLLM's server on large GPUs (vllm/engine/arg_utils.py), and at most
of the recipes of the other engines here."""
SEPARATE_PREFILL = ("sglang",)
"""Engines that compute prompts in steps of their own (rules of SGLang's scheduler)."""
RESERVED_SHARE, RESERVED_BYTES = 0.1, 2e9
"""Memory that engines keep for other things: a share (`gpu_memory_utilization` 0.9), and an
allowance for activations and graphs."""


HOST_MS: Mapping[str, tuple[float, float]] = {
    "vllm": (5.0, 16.0),
    "trtllm": (0.0, 4.0),
    "sglang": (95.0, 16.0),
}
"""Milliseconds of an engine's host until a request's first token: of the request, and of 1,024
tokens of its prompt. HTTP, the tokenizer, and queues between processes;
`benchmarks/fit_requests.py first` fits them to 70% of the rows of first tokens. No requests are
simulated here, so that these times include what an engine's rules make a request wait for.
`serving.host.HOSTS` has what remains where requests are simulated: another quantity, fitted by
`benchmarks/fit_requests.py queue`."""
ROUNDS = 3
"""Times that the number of requests that get tokens is computed from the time they take."""


@dataclass(frozen=True, kw_only=True)
class ServedRow(Row):
    """One published figure of a server, and its load."""

    engine: ServingEngine
    concurrency: float | None
    request_rate: float | None
    """Requests per second."""
    isl: int
    """Tokens of a prompt that are computed."""
    cached: int
    """Tokens of a prompt before them that are in the cache already."""
    osl: int
    shortest: float
    """Tokens of the shortest request over `isl` and `osl`, which are the longest's; lengths are
    evenly spread. 1: all requests are equally long."""
    chunk: int
    """Tokens of prompts in a step at most."""
    checkpoint: str
    """Of `checkpoints.yaml`: how the weights are stored, where not as the preset's; or empty."""
    settings: Mapping[str, Any]
    busy: float = 1.0
    """Share of the time of a power measurement in which the GPU ran kernels, as its driver says:
    measurements begin before a run and end after it."""

    @property
    def experiment(self) -> str:
        """The server and its load."""
        server = (self.hardware, self.engine, self.checkpoint, sorted(self.settings.items()))
        load = (self.concurrency, self.request_rate, self.isl, self.cached, self.osl, self.shortest)
        return repr((server, self.chunk, load))

    def simulate(self) -> SteadyState:
        """The steady state."""
        return steady_state(self)

    def predict(self, outcome: SteadyState) -> float:
        """The figure that was measured."""
        idle = idle_watts(resolve(self.hardware))
        values = {
            "tpot_ms": outcome.tpot * 1e3,
            "ttft_ms": outcome.ttft * 1e3,
            "watts": self.busy * outcome.watts + (1 - self.busy) * idle,
        }
        return values[self.quantity]


class SteadyState(NamedTuple):
    """A server in its steady state; seconds."""

    requests: float
    """Requests that decode at a time."""
    tpot: float
    ttft: float
    watts: float


def rows(source: str | None = None, name: str = "inference.csv") -> list[ServedRow]:
    """The rows of a file of `data/measured`, of sources whose name contains `source`."""
    return [_row(cells) for cells in carried_cells(name, source)]


def _row(cells: Mapping[str, str]) -> ServedRow:
    others = set(ServedRow.__dataclass_fields__) - {"settings"} | {"max_num_batched_tokens"}
    values = {k: v for k, v in cells.items() if k not in others and v}
    settings = {k: int(v) if v.isdecimal() else v for k, v in values.items()}
    return ServedRow(
        **of_cells(cells),
        engine=cast("ServingEngine", cells["engine"]),
        concurrency=float(cells["concurrency"]) if cells["concurrency"] else None,
        request_rate=float(cells["request_rate"]) if cells["request_rate"] else None,
        isl=int(cells["isl"]),
        cached=int(cells["cached"] or 0),
        osl=int(cells["osl"]),
        shortest=float(cells["shortest"] or 1),
        checkpoint=cells["checkpoint"],
        chunk=int(cells["max_num_batched_tokens"] or MAX_NUM_BATCHED_TOKENS),
        settings=settings,
        busy=float(cells["busy"] or 1),
    )


# ---- a server in its steady state ----------------------------------------------------------------


class _TimedStep(NamedTuple):
    """A simulated step: seconds, and joules of all GPUs."""

    seconds: float
    joules: float


def steady_state(row: ServedRow) -> SteadyState:
    """The steady state of the server of a row, whose requests count at their mean lengths."""
    mean = (1 + row.shortest) / 2
    row = replace(row, isl=round(row.isl * mean), osl=round(row.osl * mean))
    dp = row.settings.get("dp", 1)
    prompt = row.cached + row.isl
    context = prompt + row.osl // 2
    chunk = min(row.isl, row.chunk)
    chunks = math.ceil(row.isl / chunk)
    max_requests = min(
        _requests_that_fit(row, context), _requests_by_token_budget(row, chunk, chunks) * dp
    )
    users = None if row.concurrency is None else min(row.concurrency, max_requests)
    requests = min(8.0, max_requests) if users is None else users
    state = SteadyState(requests, 0.0, 0.0, 0.0)
    for _ in range(ROUNDS):
        batch = max(1, round(requests / dp)) * dp
        decode = _decode(row, batch, context)
        both = _with_prompt(row, batch, context, chunk, decode)
        state = _steady(row, requests / dp, chunks, decode, both)
        if _in_lockstep(row):
            next_requests = users or max_requests
        elif users is None:
            assert row.request_rate is not None
            next_requests = min(row.request_rate * row.osl * state.tpot, max_requests)
        else:
            whole = state.ttft + row.osl * state.tpot
            next_requests = users * row.osl * state.tpot / whole
        if abs(next_requests - requests) < 0.02 * requests + 0.5:
            break
        requests = next_requests
    return state


def _steady(
    row: ServedRow, requests: float, chunks: int, decode: _TimedStep, both: _TimedStep
) -> SteadyState:
    """Figures of `requests` on a rank of dp, which wait for prompts of other users only."""
    host = HOSTS.get(row.engine, NO_HOST)
    ahead = client_of(row).options.get("async_scheduling", True)
    host = replace(host, overlaps_gpu=ahead)
    waited = host.step_interval(decode.seconds, requests)
    users = math.inf if row.concurrency is None else row.concurrency / row.settings.get("dp", 1)
    share = requests * max(0.0, 1 - 1 / users) * chunks / row.osl
    prompts = chunks * (both.seconds - decode.seconds)
    if _in_lockstep(row):
        share /= 2
    tpot = waited + share * (both.seconds - decode.seconds)
    joules = decode.joules + share * (both.joules - decode.joules)
    gpus = _gpus(row)
    if row.concurrency is not None and row.concurrency <= 1:
        ttft = _prefill(row).seconds
    elif _in_lockstep(row):
        ttft = prompts * (users + 1) / 2
    else:
        ttft = chunks * both.seconds + decode.seconds / 2
    ttft += host_seconds(row)
    return SteadyState(requests, tpot, ttft, joules / tpot / gpus)


def host_seconds(row: ServedRow) -> float:
    """Seconds that the host adds until the first token."""
    request, tokens = HOST_MS.get(row.engine, (0.0, 0.0))
    return (request + tokens * row.isl / 1024) * 1e-3


def _in_lockstep(row: ServedRow) -> bool:
    """Check whether users send their prompts at once, since all requests are equally long."""
    return row.engine in SEPARATE_PREFILL and row.shortest == 1 and row.concurrency is not None


def _with_prompt(
    row: ServedRow, batch: int, context: int, chunk: int, decode: _TimedStep
) -> _TimedStep:
    """A decode step beside a chunk of a prompt, or after a step of prompts alone."""
    if row.engine in SEPARATE_PREFILL:
        together = max(1, row.chunk // chunk) if _in_lockstep(row) else 1
        whole = _prefill(row, chunk, together)
        seconds, joules = (x / together for x in whole)
        return _TimedStep(decode.seconds + seconds, decode.joules + joules)
    mixed = _step(row, mode="decode", batch_size=batch, context_length=context, prompt_length=chunk)
    # A step of ours has one form of latent attention, which decode's is; engines compute prompts in
    # the other one, so that two steps may be nearer to theirs.
    prompt = _prefill(row, chunk)
    separate = _TimedStep(decode.seconds + prompt.seconds, decode.joules + prompt.joules)
    return min(mixed, separate)


def _decode(row: ServedRow, batch: int, context: int) -> _TimedStep:
    return _step(row, mode="decode", batch_size=batch, context_length=context)


def _prefill(row: ServedRow, tokens: int | None = None, prompts: int = 1) -> _TimedStep:
    """A step with `prompts` prompts of `tokens` tokens on each rank of dp."""
    batch, length = prompts * row.settings.get("dp", 1), tokens or row.isl
    return _step(
        row, mode="prefill", batch_size=batch, prompt_length=length, context_length=row.cached
    )


def _requests_that_fit(row: ServedRow, context: int) -> float:
    """Requests whose cache the memory holds, at the mean number of tokens."""
    dp = row.settings.get("dp", 1)
    batch = 16 * dp
    compiled = _compiled(_key(row, mode="decode", batch_size=batch, context_length=context))
    held = dict(peak_in_program_order(compiled.program.classes[0]).by_category)
    cache_bytes = held.pop("kv_cache", 0)
    memory, rest = resolve(row.hardware).memory, sum(held.values()) + RESERVED_BYTES
    # TensorRT-LLM takes the share of what the weights leave (`free_gpu_memory_fraction`).
    kept = RESERVED_SHARE * (memory - rest if row.engine == "trtllm" else memory)
    room = memory - kept - rest
    return max(1.0, batch * room / cache_bytes) if cache_bytes else math.inf


def _requests_by_token_budget(row: ServedRow, chunk: int, chunks: int) -> float:
    """Requests on a rank of dp at which prompts start as fast as requests end.

    A step has a budget of prompt tokens; more requests would wait for their first token.
    """
    if row.engine in SEPARATE_PREFILL:
        return math.inf
    return row.chunk / chunk * row.osl / chunks


def _gpus(row: ServedRow) -> int:
    return row.settings.get("dp", 1) * row.settings.get("tp", 1)


def _step(row: ServedRow, **more: Any) -> _TimedStep:
    compiled = _compiled(_key(row, **more))
    machine = Machine.of(resolve(row.hardware), gpus=compiled.run.world_size)
    step = simulate(compiled, machine, Execution(serving_engine=row.engine))
    return _TimedStep(step.seconds, step.expense().joules)


def _key(row: ServedRow, **more: Any) -> frozenset[tuple[str, Any]]:
    return frozenset({**row.settings, "checkpoint": row.checkpoint, **more}.items())


@cache
def _compiled(key: frozenset[tuple[str, Any]]) -> CompiledRun:
    values = dict(key)
    checkpoint = values.pop("checkpoint")
    return compile(*model_of_row(values, checkpoint))


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

    def __call__(self, row: ServedRow) -> bool:
        """Check whether a row is one of them."""
        day = re.search(r"\d{4}-\d\d-\d\d$", row.row)
        return (
            self.source in row.source
            and self.engine in ("", row.engine)
            and (not self.models or str(row.settings["model"]) in self.models)
            and (not self.hardware or row.hardware in self.hardware)
            and self.equal in (None, row.shortest == 1)
            and self.tokens in ((), (row.isl + row.cached, row.osl))
            and int(row.settings.get("tp", 1)) < self.below_tp
            and (row.concurrency or 0) < self.below_users
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

    def client(self, row: ServedRow) -> Client:
        """Client of a row of this entry."""
        options = dict(self.options)
        if self.max_tokens is not None:
            tokens = row.isl + round(row.concurrency or 0) + self.max_tokens
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


def client_of(row: ServedRow) -> Client:
    """Client of a row, as far as a source says; else InferenceX's requests per user."""
    entry = next((entry for entry in entries() if entry.fits(row)), None)
    if entry is None:
        return Client(REQUESTS_PER_USER, {}, {"max_num_batched_tokens": row.chunk})
    return entry.client(row)
