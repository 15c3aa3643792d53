"""What requests pass before their prompts: embedding, vector search, reranking, tools.

A station has servers, each of which serves a batch at a time, first come first served; how long a
batch takes is linear in its requests and their tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from stagewright.errors import UserError

CODE_ENTRIES = 256
"""Rows of a product quantizer's table: codes have 8 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """Seconds of a batch, and what a station serves it with."""

    name: str
    seconds: float = 0.0
    """Of a batch, whatever is in it."""
    per_request: float = 0.0
    per_token: float = 0.0
    """Of the prompts of the batch."""
    servers: int = 1
    batch: int = 1
    """Most requests of a batch."""
    follow_ups: bool = False
    """Whether only later turns of a session pass here: the tools that an answer calls."""

    def of(self, tokens: Sequence[int]) -> float:
        """Seconds of a batch of requests with so many tokens each."""
        return self.seconds + self.per_request * len(tokens) + self.per_token * sum(tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class IvfPq:
    """A search in an index of inverted lists with product quantization.

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
    """Of the whole index."""
    candidates: int
    """Whose exact distances are computed."""

    @property
    def index_bytes(self) -> float:
        """Bytes of the index: OpenSearch's estimate, 10% more than codes, centroids and tables."""
        codes = self.vectors * (self.sub_quantizers + 24)
        return 1.1 * (4 * self.dimensions * (self.centroids + CODE_ENTRIES) + codes)

    @property
    def flops(self) -> float:
        """Of a query."""
        scanned = self.vectors / self.centroids * self.probes
        exact = 2 * self.dimensions * (self.centroids + self.candidates)
        return exact + self.sub_quantizers * scanned

    @property
    def query_bytes(self) -> float:
        """Read and written for a query besides what a batch reads once."""
        scanned = self.vectors / self.centroids * self.probes
        results = 8 * self.probes + 8 * self.candidates
        exact = 4 * self.dimensions * (1 + self.candidates)
        return self.sub_quantizers * scanned + results + exact

    @property
    def batch_bytes(self) -> float:
        """Read once for a batch: centroids and the table of codes."""
        return 4 * self.dimensions * (self.centroids + CODE_ENTRIES)

    def cost(self, *, tflops: float, bandwidth_gb_s: float, servers: int, batch: int) -> StageCost:
        """On a machine: arithmetic and memory one after the other, as HERMES has it."""
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
        """Nobody is here."""
        self.cost = cost
        self._queue: deque[tuple[int, int]] = deque()
        self._busy = 0

    def arrive(self, now: float, request: int, tokens: int) -> float | None:
        """A request comes: when it is done if a server is free, else None."""
        if self._busy < self.cost.servers:
            self._busy += 1
            return now + self.cost.of([tokens])
        self._queue.append((request, tokens))
        return None

    def end(self, now: float) -> tuple[float, list[int]] | None:
        """A batch is done: the next one's end and its requests, if somebody waits."""
        if not self._queue:
            self._busy -= 1
            return None
        count = min(self.cost.batch, len(self._queue))
        following = [self._queue.popleft() for _ in range(count)]
        return now + self.cost.of([n for _, n in following]), [r for r, _ in following]
