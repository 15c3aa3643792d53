"""Stages of requests before their prompts: stations that they pass, stores that have their past.

HERMES (arXiv 2504.09775) calls a request a chain of stages: retrieval of documents (embedding,
search, reranking), retrieval of keys and values, prefill, decode; tools between turns.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from stagewright.serving.engines.engine import Engine
from stagewright.serving.pools.agenda import OTHER, Agenda
from stagewright.serving.pools.stations import StageCost, Station
from stagewright.serving.pools.stores import Store, StoreTier
from stagewright.serving.requests import NO_CHAIN, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptStages:
    """What requests pass before their prompts, in order, and the stores that engines read."""

    stations: tuple[StageCost, ...] = ()
    tiers: tuple[StoreTier, ...] = ()
    """The nearest first."""
    added_tokens: int = 0
    """Tokens by which documents make each prompt longer."""
    past: int = 0
    """Tokens of an earlier session at each prompt's start; stations read only what is new."""
    bytes_per_token: float = 0.0
    """Of a request's cache."""
    seed: int = 0
    """Of the engines whose stores are preloaded with a request's past."""


class Passage:
    """Requests on their way through stations."""

    def __init__(
        self,
        stages: PromptStages,
        workload: Workload,
        agenda: Agenda,
        through: Callable[[float, int], None],
    ) -> None:
        """`through` takes requests that have passed all stations."""
        stations, self._known = stages.stations, stages.past + stages.added_tokens
        self._stations = [Station(cost) for cost in stations]
        self._workload, self._agenda, self._through = workload, agenda, through
        nan = array("d", [float("nan")])
        self.seconds = {cost.name: nan * len(workload) for cost in stations}
        """By station: seconds of each request there, with its wait."""

    def enter(self, at: float, request: int, nth: int = 0) -> None:
        """A request comes to a station, or to the next one that is for it."""
        after = self._workload.after
        first = after is None or after[request] < 0
        while nth < len(self._stations) and first and self._stations[nth].cost.follow_ups:
            nth += 1
        if nth == len(self._stations):
            self._through(at, request)
            return
        station = self._stations[nth]
        self.seconds[station.cost.name][request] = -at  # until the end is added
        end = station.arrive(at, request, self._workload.prompt[request] - self._known)
        if end is not None:
            self._agenda.note(end, OTHER, request, partial(self._leave, nth, [request]))

    def _leave(self, nth: int, batch: list[int], at: float, number: int) -> None:
        """A batch is done at a station."""
        del number
        station = self._stations[nth]
        following = station.end(at)
        if following is not None:
            end, requests = following
            self._agenda.note(end, OTHER, requests[0], partial(self._leave, nth, requests))
        for request in batch:
            self.seconds[station.cost.name][request] += at
            self.enter(at, request, nth + 1)


class Retrieval:
    """Stores of engines, and what of requests is in them."""

    def __init__(
        self,
        of: PromptStages,
        workload: Workload,
        engines: Sequence[Engine],
        numbers: Sequence[int],
    ) -> None:
        """Stores of the engines with these numbers, among all."""
        self._of, self._workload, self._engines = of, workload, engines
        self._place = {nth: place for place, nth in enumerate(numbers)}
        size = engines[numbers[0]].block_size
        self._stores = [
            [
                Store(tier, of.bytes_per_token * size)
                for _ in range(-(-len(numbers) // tier.shared_by))
            ]
            for tier in of.tiers
        ]
        self._reads: dict[int, list[tuple[Store, int]]] = {}  # tokens up to which each store has
        self.seconds = array("d", [float("nan")]) * len(workload)
        """Of each request's read, with its wait."""
        draw = Random(of.seed)
        preloaded = any(tier.preloaded for tier in of.tiers)
        self._homes = [int(draw.random() * len(numbers)) for _ in workload.prompt if preloaded]

    def _chain(self, request: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        chains = self._workload.chains
        return NO_CHAIN if chains is None else chains[request]

    def near(self, request: int, numbers: Sequence[int]) -> Sequence[int]:
        """Of some engines those that reach the preloaded store with a request's past."""
        if not self._homes:
            return numbers
        home = self._homes[request]
        reach = max(tier.shared_by for tier in self._of.tiers if tier.preloaded)
        found = [n for n in numbers if self._place[n] // reach == home // reach]
        return found or numbers

    def find(self, request: int, nth: int) -> int:
        """Tokens of a request that an engine's stores have, without its last one."""
        chain = self._chain(request)
        if not chain[0]:
            return 0
        size = self._engines[nth].block_size
        most = (self._workload.prompt[request] - 1) // size
        reads: list[tuple[Store, int]] = []
        here = 0
        for stores in self._stores:
            store = stores[self._place[nth] // stores[0].tier.shared_by]
            found = max(store.find(chain), chain[1][0] if store.tier.preloaded else 0)
            if min(found, most) > here:
                here = min(found, most)
                reads.append((store, here * size))
        if reads:
            self._reads[request] = reads
        return here * size

    def read(self, at: float, request: int, tokens: int) -> float:
        """When the last so many of the tokens found have come; each store reads for itself."""
        reads = self._reads.pop(request)
        start = reads[-1][1] - tokens
        arrives = at
        for store, end in reads:
            if end > start:
                arrives = max(arrives, store.read(at, (end - start) * self._of.bytes_per_token))
                start = end
        self.seconds[request] = arrives - at
        return arrives

    def keep(self, request: int, nth: int) -> None:
        """Keep what a chain names of a request that is done, in all tiers."""
        chain = self._chain(request)
        if chain[0]:
            done = self._workload.prompt[request] + self._workload.output[request] - 1
            for stores in self._stores:
                store = stores[self._place[nth] // stores[0].tier.shared_by]
                store.keep(chain, done // self._engines[nth].block_size)
