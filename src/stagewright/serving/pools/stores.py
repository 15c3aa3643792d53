"""Stores of key-value caches beside the GPUs: what they hold, and how long a read takes.

A tier is a kind of store (host memory, SSD, remote): one for every so many engines. When a request
is done, what its chain names of it goes into the stores of its engine in all tiers, as LMCache
writes to all of its backends; writes take no time here. The least recently used goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from heapq import heapreplace

from stagewright.serving.requests import Chain


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreTier:
    """Stores of one kind."""

    name: str
    bandwidth_gb_s: float
    """Of a read."""
    capacity_gb: float = float("inf")
    latency_ms: float = 0.0
    shared_by: int = 1
    """Engines that have one store together."""
    reads: int = 1
    """At a time, each with the whole bandwidth; others wait. 0: any number."""
    network_gb_s: float = float("inf")
    """Of the way from the store to the engine, which follows the read."""
    network_latency_ms: float = 0.0
    preloaded: bool = False
    """Whether a store holds the past of all requests whose home it is."""


class Store:
    """One store at work. Chains count blocks here, as engines do.

    >>> store = Store(StoreTier(name="ssd", bandwidth_gb_s=2, capacity_gb=8e-9), bytes_per_block=1)
    >>> store.keep(((1, 2), (4, 6)), 6); store.keep(((1, 3), (4, 8)), 7)
    >>> store.find(((1, 2), (4, 6))), store.find(((1, 3), (4, 8)))
    (6, 4)
    >>> store.find(((1, 2), (4, 9)))
    6
    """

    __slots__ = ("_blocks", "_free", "_held", "_most", "tier")

    def __init__(self, tier: StoreTier, bytes_per_block: float) -> None:
        """An empty store."""
        self.tier = tier
        self._most = tier.capacity_gb * 1e9 / bytes_per_block
        self._held: OrderedDict[int, int] = OrderedDict()  # blocks by segment, oldest first
        self._blocks = 0
        self._free = [0.0] * tier.reads

    def find(self, chain: Chain) -> int:
        """Blocks of the beginning of a chain that are here."""
        keys, ends = chain
        here = found = 0
        for key, end in zip(keys, ends, strict=True):
            length = self._held.get(key)
            if length is None:
                break
            here, found = here + 1, min(end, found + length)
            if found < end:  # the segment has grown since
                break
        for key in reversed(keys[:here]):  # beginnings outlive what is behind them
            self._held.move_to_end(key)
        return found

    def keep(self, chain: Chain, blocks: int) -> None:
        """Keep the whole segments of a chain up to so many blocks."""
        lengths = {key: end - start for key, end, start in
                   zip(*chain, (0, *chain[1]), strict=False) if end <= blocks}  # fmt: skip
        for key in reversed(lengths):
            self._blocks += lengths[key] - self._held.pop(key, 0)
            self._held[key] = lengths[key]
        while self._blocks > self._most:
            self._blocks -= self._held.popitem(last=False)[1]

    def read(self, now: float, bytes_: float) -> float:
        """When a read is done, and what was read has come to the engine."""
        seconds = self.tier.latency_ms / 1e3 + bytes_ / self.tier.bandwidth_gb_s / 1e9
        way = self.tier.network_latency_ms / 1e3 + bytes_ / self.tier.network_gb_s / 1e9
        if not self._free:
            return now + seconds + way
        done = max(now, self._free[0]) + seconds
        heapreplace(self._free, done)
        return done + way
