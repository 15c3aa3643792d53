"""Transfer of a request's KV cache from its prefill instance to its decode instance.

Decode ranks read from the prefill ranks that hold the keys and values of their layers and heads
(`lower.disaggregated`): every pair of ranks has bytes of its own, and all go at once.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple, Self

import numpy as np

from stagewright.errors import UserError
from stagewright.lower.compiled_run import CompiledRun
from stagewright.lower.disaggregated import Message, messages, ranks_of_replica
from stagewright.model.config import ModelConfig
from stagewright.run.lengths import Group
from stagewright.run.sections.serving.pools import KvPush
from stagewright.run.settings import Run
from stagewright.serving.disaggregation import PrefillEngine
from stagewright.serving.steps.step_times import batch_run
from stagewright.time.collectives import message_seconds
from stagewright.time.hardware import Hardware
from stagewright.time.network import Machine, tier_of

_TOKENS = (1 << 17, 1 << 18)
"""Two lengths beyond all windows: bytes are linear between them, and taken to be so below."""
_ALONE = {"dp": 1, "ep": 1, "etp": None, "dcp": None, "batch_size": None}
"""Changes that leave one replica of a run."""


def not_sent(model: ModelConfig) -> str:
    """Reason why the cache of a model cannot be sent between instances; empty: it can.

    >>> from stagewright.model.catalog import resolve
    >>> not_sent(resolve("mamba2-2.7b")), not_sent(resolve("llama3.1-8b"))
    ('layers of mamba2-2.7b keep states', '')
    """
    if model.state_space:
        return f"layers of {model.name} keep states"
    if model.o_groups:
        return f"{model.name} keeps compressed keys and states of unfinished ones"
    return ""


class _Pair(NamedTuple):
    """Bytes from one prefill rank to one decode rank."""

    fixed: float
    """Bytes of windows, whatever the length."""
    per_token: float


@dataclass(frozen=True, slots=True)
class KvTransferCost:
    """Transfer of a request's cache; a rank's link is shared by all its messages."""

    fixed: float
    """Bytes of all ranks whatever the length: windows."""
    per_token: float
    """Bytes of a token on all ranks."""
    links: tuple[_Pair, ...]
    """Bytes on the links of the ranks that send or receive most."""
    machines: tuple[Machine, ...]
    """Both sides' networks: the slower one counts."""
    level: int
    """The tier in which both sides meet, from the GPU outwards."""
    layers: int = 1
    """Layers of a pipeline stage that computes prompts."""

    @classmethod
    def between(
        cls,
        prefill: Run,
        decode: Run,
        model: ModelConfig,
        hardware: tuple[Hardware, Hardware],
    ) -> Self:
        """Transfer from a prefill instance to a decode instance, on different nodes.

        Runs are not resolved. Raises UserError where they are not possible, and for models whose
        caches are not keys and values of single tokens.
        """
        why = not_sent(model)
        if why:
            raise UserError(
                f"instances for prompts only send keys and values, but {why}; compute prompts "
                "where they decode (without --prefill-instances or `serves`)"
            )
        first, second = (run.model_copy(update=_ALONE) for run in (prefill, decode))
        short, long = (_pairs(first, second, model, tokens) for tokens in _TOKENS)
        pairs = {key: _line(short[key], long[key]) for key in short}
        links: dict[tuple[int, int], _Pair] = {}
        for ends, pair in pairs.items():
            for side, rank in enumerate(ends):
                old = links.get((side, rank), _Pair(0.0, 0.0))
                links[side, rank] = _Pair(old.fixed + pair.fixed, old.per_token + pair.per_token)
        busiest = {max(links.values(), key=lambda link, n=n: link[n]) for n in (0, 1)}
        node = max(side.gpus_per_node for side in hardware)
        begins = -(-first.tp * first.pp // node) * node
        gpus = begins + -(-second.tp * second.pp // node) * node
        distinct = {side.name: side for side in hardware}
        machines = tuple(Machine.of(side, gpus=gpus) for side in distinct.values())
        level = int(tier_of(machines[0], np.array([0]), np.array([begins]))[0])
        return cls(
            sum(pair.fixed for pair in pairs.values()),
            sum(pair.per_token for pair in pairs.values()),
            tuple(sorted(busiest)), machines, level, max(1, model.num_layers // prefill.pp),
        )  # fmt: skip

    def with_second_model(self, other: KvTransferCost) -> KvTransferCost:
        """Add the cache of a second model of the same request, sent along with this one."""
        links = {
            _Pair(a.fixed + b.fixed, a.per_token + b.per_token)
            for a in self.links
            for b in other.links
        }
        return replace(
            self,
            fixed=self.fixed + other.fixed,
            per_token=self.per_token + other.per_token,
            links=tuple(sorted(links)),
        )

    def bytes(self, tokens: int, last: bool = True) -> int:
        """Bytes of some tokens of a request, on all ranks.

        `last`: windows go with the last tokens of a prompt, so that they are sent once.
        """
        return round(self.fixed * last + self.per_token * tokens)

    def seconds(self, tokens: int, last: bool = True, *, parts: int = 1) -> float:
        """Seconds of `bytes` of some tokens alone on the links, or of one of equal parts."""
        return max(
            message_seconds(
                round((link.fixed * last + link.per_token * tokens) / parts), self.level, machine
            )
            for link in self.links
            for machine in self.machines
        )


def _messages(
    first: Run, second: Run, model: ModelConfig, tokens: int
) -> tuple[tuple[Run, Run], list[Message]]:
    """Both sides' resolved runs, and the messages of one request."""
    new = 1 + second.num_speculative_tokens
    sides = (
        batch_run(first, [Group(1, 0, tokens)]).resolved(model),
        batch_run(second, [Group(1, tokens, new)]).resolved(model),
    )
    return sides, messages(*sides, model)


class TransferEnd(NamedTuple):
    """One end of a transfer."""

    run: Run
    """Run of the instance; not resolved."""
    step: CompiledRun
    """Step of the instance."""
    replica: int


def cache_messages(
    prefill: TransferEnd, decode: TransferEnd, tokens: int, upto: int
) -> list[Message]:
    """Messages of a request's cache between the ranks of two whole instances.

    Layers with windows send what they keep of `upto` tokens, the others `tokens`.
    """
    model, ends = decode.step.model, (prefill, decode)
    first, second = (end.run.model_copy(update=_ALONE) for end in ends)
    sides, sent = _messages(first, second, model, tokens)
    if upto != tokens:
        windows = _messages(first, second, model, upto)[1] if upto else []
        reaches = [model.reach(model.layer(n).mixer) for n in range(model.num_layers)]
        local = {n for n, reach in enumerate(reaches) if reach.window or reach.chunk}
        sent = [m for m in sent if m.layer not in local]
        sent += [m for m in windows if m.layer in local]
        sent.sort(key=lambda message: message.layer)
    ranks = [
        ranks_of_replica(alone, end.step.run, model, end.replica)
        for alone, end in zip(sides, ends, strict=True)
    ]
    return [m._replace(source=ranks[0][m.source], target=ranks[1][m.target]) for m in sent]


def _pairs(
    first: Run, second: Run, model: ModelConfig, tokens: int
) -> Mapping[tuple[int, int], int]:
    """Bytes of one request by prefill rank and decode rank."""
    sent: dict[tuple[int, int], int] = {}
    for one in _messages(first, second, model, tokens)[1]:
        key = one.source, one.target
        sent[key] = sent.get(key, 0) + one.size
    return sent


def _line(short: int, long: int) -> _Pair:
    per_token = (long - short) / (_TOKENS[1] - _TOKENS[0])
    return _Pair(short - per_token * _TOKENS[0], per_token)


# ---- transfers of a run --------------------------------------------------------------------------


class Push(NamedTuple):
    """Chunk of a request's cache that left while its prompt was computed."""

    request: int
    tokens: int
    last: bool
    """Last chunk of the prompt, with which windows are sent."""
    step_end: float
    """End of the step that computed it."""
    begins: float
    """Begin of the transfer on its links."""
    arrives: float


@dataclass(frozen=True, eq=False)
class Handover:
    """Columns of what lies between a request's prefill and its decode; nan where nothing does."""

    engine: array[int]
    """Prefill engine of the request, or -1."""
    prefilled: array[float]
    """Time at which the prompt was complete."""
    begins: array[float]
    """Begin of the transfer of the cache on its links."""
    arrives: array[float]
    """Time at which all of the cache had arrived."""
    bytes: array[float]
    tokens: array[int]
    """Tokens whose cache was sent."""
    pushes: list[Push] = field(default_factory=list[Push])
    """Chunks that left before their prompts were complete, in the order of their steps."""

    @classmethod
    def of(cls, requests: int) -> Handover:
        """Columns of requests without a handover so far."""
        nan = array("d", [math.nan]) * requests
        zeros = array("i", bytes(4 * requests))
        no_bytes = array("d", bytes(8 * requests))
        return cls(array("i", [-1]) * requests, nan[:], nan[:], nan[:], no_bytes, zeros)


class KvLinks:
    """Links of engines to the network; each sends or receives one cache at a time.

    A transfer waits until the links of both ends are free of all transfers before it.

    >>> links = KvLinks(3)
    >>> links.send(0, 1, now=0.0, seconds=2.0), links.send(0, 2, now=1.0, seconds=2.0)
    (0.0, 2.0)
    """

    def __init__(self, engines: int) -> None:
        """All links are free."""
        self._free_at = [0.0] * engines

    def send(self, source: int, target: int, now: float, seconds: float) -> float:
        """Begin of a transfer that takes `seconds` on its links."""
        begins = max(now, self._free_at[source], self._free_at[target])
        self.hold(source, target, begins + seconds)
        return begins

    def hold(self, source: int, target: int, until: float) -> None:
        """Keep both links busy until then."""
        self._free_at[source] = max(self._free_at[source], until)
        self._free_at[target] = max(self._free_at[target], until)


class KvTransfers:
    """Caches that prefill engines send to decode engines.

    * prompt: the decode engine pulls the cache of a whole prompt when it has blocks for it.
    * chunk: the cache of a chunk leaves when its step ends (SGLang: sgl-project/sglang
      `python/sglang/srt/disaggregation/prefill.py`, `send_kv_chunk`).
    * layer: a layer's keys and values of the step's tokens leave when the layer is computed
      (`save_kv_layer` of vLLM's `P2pNcclConnector`, vllm-project/vllm
      `vllm/distributed/kv_transfer/kv_connector/v1/p2p/p2p_nccl_connector.py`;
      `MooncakeLayerwiseConnector` of vLLM Ascend). Layers take equal shares of a step. Exposed are
      the last layer's messages, or as many layers as the links are late.

    With chunk and layer the decode engine is chosen when the request arrives, as proxies do that
    name it to the prefill instance (`disaggregated_serving_p2p_nccl_xpyd` in vLLM's examples). It
    receives into a buffer next to its blocks; the request goes to it when the prompt is complete.
    """

    def __init__(
        self,
        handover: Handover,
        engines: int,
        cost: Callable[[int, int], KvTransferCost],
        kv_transfer: KvPush = "prompt",
    ) -> None:
        """Create transfers that have sent nothing; `cost`: from one engine to another."""
        self.handover, self.kv_transfer = handover, kv_transfer
        self._cost, self._links = cost, KvLinks(engines)
        self._in_flight: dict[int, int] = {}  # number of the transfer of each request
        self._transfers = count()
        self.decode_engine: dict[int, int] = {}
        """Chosen decode engine of requests whose cache is pushed."""

    @property
    def pushes(self) -> bool:
        """True if caches leave before their prompts are complete."""
        return self.kv_transfer != "prompt"

    def pull(self, at: float, request: int, tokens: int, target: int) -> tuple[float, int]:
        """Send the cache of a prompt; return when it arrives, and the number of the transfer."""
        handover = self.handover
        source = handover.engine[request]
        cost = self._cost(source, target)
        seconds = cost.seconds(tokens)
        begins = self._links.send(source, target, at, seconds)
        handover.begins[request], handover.arrives[request] = begins, begins + seconds
        handover.bytes[request] = cost.bytes(tokens)
        handover.tokens[request] = tokens
        self._in_flight[request] = number = next(self._transfers)
        return begins + seconds, number

    def finish(self, request: int, number: int) -> bool:
        """End a transfer; False if it was cancelled."""
        if self._in_flight.get(request) != number:
            return False
        del self._in_flight[request]
        return True

    def cancel(self, request: int) -> None:
        """Cancel the transfer of a request, if it is in flight."""
        if self._in_flight.pop(request, None) is not None:
            self.handover.begins[request] = self.handover.arrives[request] = math.nan
            self.handover.bytes[request] = 0.0

    def push(self, engine: PrefillEngine) -> None:
        """Send the chunks that a prefill engine computed in its last step."""
        handover, links = self.handover, self._links
        for request, tokens, last_chunk, begin, end in engine.computed:
            source, target = handover.engine[request], self.decode_engine[request]
            cost = self._cost(source, target)
            seconds = cost.seconds(tokens, last_chunk)
            leaves, last_layer = end, 0.0
            if self.kv_transfer == "layer":
                last_layer = cost.seconds(tokens, last_chunk, parts=cost.layers)
                leaves = begin + (end - begin) / cost.layers
            begins = links.send(source, target, leaves, seconds)
            arrives = max(begins + seconds, end + last_layer)
            links.hold(source, target, arrives)
            if math.isnan(handover.begins[request]):
                handover.begins[request] = begins
            handover.arrives[request] = arrives
            push = Push(request, tokens, last_chunk, end, begins, arrives)
            handover.pushes.append(push)
            handover.bytes[request] += cost.bytes(tokens, last_chunk)
            handover.tokens[request] += tokens
        engine.computed.clear()

    def pushed_by(self, at: float, request: int) -> float:
        """Time at which all pushed cache of a request has arrived, `at` or later."""
        return max(at, self.handover.arrives[request])
