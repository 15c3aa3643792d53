"""Stages of requests before their prompts: station queues, and stores of KV caches.

HERMES (arXiv 2504.09775) calls a request a chain of stages: retrieval of documents (embedding,
search, reranking), retrieval of keys and values, prefill, decode; tools between turns.

A station has servers, each of which serves one batch at a time, first come first served; the
duration of a batch is linear in its requests and their tokens. A store tier is host memory, an SSD
or a remote store, one for every few engines. When a request finishes, its chain goes into the
stores of its engine in all tiers, as LMCache writes to all of its backends; writes take no time
here, and the least recently used segment is evicted first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heapreplace
from random import Random

from stagewright.errors import UserError
from stagewright.serving.engine import Engine
from stagewright.serving.events import OTHER, EventQueue
from stagewright.serving.workload import NO_CHAIN, Chain, Workload

CODE_ENTRIES = 256
"""Rows of a product quantizer's table: codes have 8 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """Seconds of a batch, and what a station serves it with."""

    name: str
    seconds: float = 0.0
    """Seconds of a batch, whatever is in it."""
    per_request: float = 0.0
    per_token: float = 0.0
    """Seconds per prompt token of the batch."""
    servers: int = 1
    batch: int = 1
    """Largest number of requests of a batch."""
    follow_ups: bool = False
    """Only later turns of a session pass here: tools that an answer calls."""

    def of(self, tokens: Sequence[int]) -> float:
        """Seconds of a batch of requests with these numbers of tokens."""
        return self.seconds + self.per_request * len(tokens) + self.per_token * sum(tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class IvfPq:
    """Search in an index of inverted lists with product quantization.

    FLOPs and bytes of a query are HERMES' (arXiv 2504.09775; MIST-Simulator/MIST,
    `mist/Engine/RAG_Engine.py`): the query with all centroids; table look-ups for the vectors of
    the lists that are probed; exact distances of the candidates. Centroids and the table of codes
    are read once for a batch. HERMES counts the codes of one list only where `n_probe` are read;
    here all are.
    """

    dimensions: int
    centroids: int
    """Inverted lists (`nlist` of FAISS)."""
    probes: int
    """Lists that a query looks into (`nprobe`)."""
    sub_quantizers: int
    """Bytes of a vector's code (`M`)."""
    vectors: int
    """Vectors of the whole index."""
    candidates: int
    """Vectors whose exact distances are computed."""

    @property
    def index_bytes(self) -> float:
        """Bytes of the index: OpenSearch's estimate, 10% more than codes, centroids and tables."""
        codes = self.vectors * (self.sub_quantizers + 24)
        return 1.1 * (4 * self.dimensions * (self.centroids + CODE_ENTRIES) + codes)

    @property
    def flops(self) -> float:
        """FLOPs of a query."""
        scanned = self.vectors / self.centroids * self.probes
        exact = 2 * self.dimensions * (self.centroids + self.candidates)
        return exact + self.sub_quantizers * scanned

    @property
    def query_bytes(self) -> float:
        """Bytes of a query besides those read once for a batch."""
        scanned = self.vectors / self.centroids * self.probes
        results = 8 * self.probes + 8 * self.candidates
        exact = 4 * self.dimensions * (1 + self.candidates)
        return self.sub_quantizers * scanned + results + exact

    @property
    def batch_bytes(self) -> float:
        """Bytes read once for a batch: centroids and the table of codes."""
        return 4 * self.dimensions * (self.centroids + CODE_ENTRIES)

    def cost(self, *, tflops: float, bandwidth_gb_s: float, servers: int, batch: int) -> StageCost:
        """Cost on a machine: arithmetic and memory one after the other, like HERMES."""
        per_query = self.flops / (tflops * 1e12) + self.query_bytes / (bandwidth_gb_s * 1e9)
        return StageCost(
            name="search",
            seconds=self.batch_bytes / (bandwidth_gb_s * 1e9),
            per_request=per_query,
            servers=servers,
            batch=batch,
        )

    def __post_init__(self) -> None:
        """Refuse an index that cannot be."""
        if self.probes > self.centroids or self.centroids > self.vectors:
            raise UserError(
                f"search: probes={self.probes}, centroids={self.centroids}, "
                f"vectors={self.vectors}; wanted probes <= centroids <= vectors"
            )


class Station:
    """The queue of a stage and its servers, at work.

    >>> station = Station(StageCost(name="embed", seconds=2.0))
    >>> station.arrive(0.0, 7, 100), station.arrive(1.0, 8, 100)
    (2.0, None)
    >>> station.end(2.0)
    (4.0, [8])
    """

    __slots__ = ("_busy", "_queue", "cost")

    def __init__(self, cost: StageCost) -> None:
        """Create an idle station."""
        self.cost = cost
        self._queue: deque[tuple[int, int]] = deque()
        self._busy = 0

    def arrive(self, now: float, request: int, tokens: int) -> float | None:
        """Add a request; return its end if a server is free, otherwise None."""
        if self._busy < self.cost.servers:
            self._busy += 1
            return now + self.cost.of([tokens])
        self._queue.append((request, tokens))
        return None

    def end(self, now: float) -> tuple[float, list[int]] | None:
        """End a batch; return the end and the requests of the next one, if any wait."""
        if not self._queue:
            self._busy -= 1
            return None
        count = min(self.cost.batch, len(self._queue))
        following = [self._queue.popleft() for _ in range(count)]
        return now + self.cost.of([n for _, n in following]), [r for r, _ in following]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreTier:
    """Stores of one kind."""

    name: str
    bandwidth_gb_s: float
    """Bandwidth of a read (GB/s)."""
    capacity_gb: float = float("inf")
    latency_ms: float = 0.0
    shared_by: int = 1
    """Engines that have one store together."""
    reads: int = 1
    """Concurrent reads, each with the whole bandwidth; others wait. 0: any number."""
    network_gb_s: float = float("inf")
    """Bandwidth of the network between store and engine, used after the read (GB/s)."""
    network_latency_ms: float = 0.0
    preloaded: bool = False
    """A store holds the earlier session of all requests whose home it is."""


class Store:
    """One store at work. Chains count blocks here, as engines do.

    >>> store = Store(StoreTier(name="ssd", bandwidth_gb_s=2, capacity_gb=8e-9), bytes_per_block=1)
    >>> store.keep(((1, 2), (4, 6)), 6); store.keep(((1, 3), (4, 8)), 7)
    >>> store.find(((1, 2), (4, 6))), store.find(((1, 3), (4, 8)))
    (6, 4)
    >>> store.find(((1, 2), (4, 9)))
    6
    """

    __slots__ = ("_blocks", "_capacity", "_free", "_held", "tier")

    def __init__(self, tier: StoreTier, bytes_per_block: float) -> None:
        """An empty store."""
        self.tier = tier
        self._capacity = tier.capacity_gb * 1e9 / bytes_per_block
        self._held: OrderedDict[int, int] = OrderedDict()  # blocks by segment, oldest first
        self._blocks = 0
        self._free = [0.0] * tier.reads

    def find(self, chain: Chain) -> int:
        """Blocks of the beginning of a chain that are here."""
        segments, ends = chain
        num_segments = blocks = 0
        for segment, end in zip(segments, ends, strict=True):
            length = self._held.get(segment)
            if length is None:
                break
            num_segments, blocks = num_segments + 1, min(end, blocks + length)
            if blocks < end:  # the segment has grown since
                break
        for segment in reversed(segments[:num_segments]):  # beginnings outlive what follows them
            self._held.move_to_end(segment)
        return blocks

    def keep(self, chain: Chain, blocks: int) -> None:
        """Keep the whole segments of a chain up to `blocks`."""
        lengths = {segment: end - start for segment, end, start in
                   zip(*chain, (0, *chain[1]), strict=False) if end <= blocks}  # fmt: skip
        for segment in reversed(lengths):
            self._blocks += lengths[segment] - self._held.pop(segment, 0)
            self._held[segment] = lengths[segment]
        while self._blocks > self._capacity:
            self._blocks -= self._held.popitem(last=False)[1]

    def read(self, now: float, bytes_: float) -> float:
        """End of a read, after its transfer to the engine."""
        seconds = self.tier.latency_ms / 1e3 + bytes_ / self.tier.bandwidth_gb_s / 1e9
        network = self.tier.network_latency_ms / 1e3 + bytes_ / self.tier.network_gb_s / 1e9
        if not self._free:
            return now + seconds + network
        end = max(now, self._free[0]) + seconds
        heapreplace(self._free, end)
        return end + network


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptStages:
    """Stages of requests before their prompts, in order, and stores that engines read."""

    stations: tuple[StageCost, ...] = ()
    tiers: tuple[StoreTier, ...] = ()
    """The nearest first."""
    added_tokens: int = 0
    """Tokens by which documents make each prompt longer."""
    past: int = 0
    """Tokens of an earlier session at each prompt's start; stations read only what is new."""
    bytes_per_token: float = 0.0
    """Bytes of a token in the KV cache."""
    seed: int = 0
    """Seed of the engines whose stores hold a request's earlier session."""


class StageQueues:
    """Requests on their way through stations."""

    def __init__(
        self,
        stages: PromptStages,
        workload: Workload,
        events: EventQueue,
        through: Callable[[float, int], None],
    ) -> None:
        """`through` takes requests that have passed all stations."""
        stations, self._known = stages.stations, stages.past + stages.added_tokens
        self._stations = [Station(cost) for cost in stations]
        self._workload, self._events, self._through = workload, events, through
        nan = array("d", [float("nan")])
        self.seconds = {cost.name: nan * len(workload) for cost in stations}
        """Seconds of each request in each station, waiting included."""

    def enter(self, at: float, request: int, index: int = 0) -> None:
        """Add a request to a station, or to the next one that applies to it."""
        predecessor = self._workload.predecessor
        first = predecessor is None or predecessor[request] < 0
        while index < len(self._stations) and first and self._stations[index].cost.follow_ups:
            index += 1
        if index == len(self._stations):
            self._through(at, request)
            return
        station = self._stations[index]
        self.seconds[station.cost.name][request] = -at  # until the end is added
        end = station.arrive(at, request, self._workload.prompt[request] - self._known)
        if end is not None:
            self._events.add(end, OTHER, request, partial(self._leave, index, [request]))

    def _leave(self, index: int, batch: list[int], at: float, number: int) -> None:
        """End a batch of a station."""
        del number
        station = self._stations[index]
        next_batch = station.end(at)
        if next_batch is not None:
            end, requests = next_batch
            self._events.add(end, OTHER, requests[0], partial(self._leave, index, requests))
        for request in batch:
            self.seconds[station.cost.name][request] += at
            self.enter(at, request, index + 1)


class StoreReads:
    """Stores of engines, and what of requests is in them."""

    def __init__(
        self,
        stages: PromptStages,
        workload: Workload,
        engines: Sequence[Engine],
        numbers: Sequence[int],
    ) -> None:
        """Stores of the engines with these numbers, among all."""
        self._stages, self._workload, self._engines = stages, workload, engines
        self._place = {number: place for place, number in enumerate(numbers)}
        size = engines[numbers[0]].block_size
        self._stores = [
            [
                Store(tier, stages.bytes_per_token * size)
                for _ in range(-(-len(numbers) // tier.shared_by))
            ]
            for tier in stages.tiers
        ]
        self._reads: dict[int, list[tuple[Store, int]]] = {}  # tokens up to which each store has
        self.seconds = array("d", [float("nan")]) * len(workload)
        """Seconds of each request's read, waiting included."""
        draw = Random(stages.seed)
        preloaded = any(tier.preloaded for tier in stages.tiers)
        self._homes = [int(draw.random() * len(numbers)) for _ in workload.prompt if preloaded]

    def _chain(self, request: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        chains = self._workload.chains
        return NO_CHAIN if chains is None else chains[request]

    def near(self, request: int, numbers: Sequence[int]) -> Sequence[int]:
        """Engines that reach the preloaded store with a request's earlier session."""
        if not self._homes:
            return numbers
        home = self._homes[request]
        shared_by = max(tier.shared_by for tier in self._stages.tiers if tier.preloaded)
        near = [n for n in numbers if self._place[n] // shared_by == home // shared_by]
        return near or numbers

    def find(self, request: int, engine: int) -> int:
        """Tokens of a request that an engine's stores have, without its last one."""
        chain = self._chain(request)
        if not chain[0]:
            return 0
        size = self._engines[engine].block_size
        limit = (self._workload.prompt[request] - 1) // size
        reads: list[tuple[Store, int]] = []
        stored = 0
        for stores in self._stores:
            store = stores[self._place[engine] // stores[0].tier.shared_by]
            blocks = max(store.find(chain), chain[1][0] if store.tier.preloaded else 0)
            if min(blocks, limit) > stored:
                stored = min(blocks, limit)
                reads.append((store, stored * size))
        if reads:
            self._reads[request] = reads
        return stored * size

    def read(self, at: float, request: int, tokens: int) -> float:
        """Time at which the last `tokens` of the stored ones have arrived."""
        reads = self._reads.pop(request)
        start = reads[-1][1] - tokens
        arrives = at
        for store, end in reads:
            if end > start:
                arrives = max(arrives, store.read(at, (end - start) * self._stages.bytes_per_token))
                start = end
        self.seconds[request] = arrives - at
        return arrives

    def keep(self, request: int, engine: int) -> None:
        """Keep what a chain names of a request that is done, in all tiers."""
        chain = self._chain(request)
        if chain[0]:
            tokens = self._workload.prompt[request] + self._workload.output[request] - 1
            for stores in self._stores:
                store = stores[self._place[engine] // stores[0].tier.shared_by]
                store.keep(chain, tokens // self._engines[engine].block_size)
