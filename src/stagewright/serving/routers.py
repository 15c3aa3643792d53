"""Routers: rules that choose the engine of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from stagewright.errors import UserError, did_you_mean, either
from stagewright.serving.engine import Engine
from stagewright.serving.workload import NO_CHAIN, Workload


class Router(Protocol):
    """Chooses an engine for each request as it arrives."""

    reads_engines: bool
    """The choice depends on the state of engines."""

    def route(self, request: int, workload: Workload, engines: Sequence[Engine]) -> int:
        """Return the index of an engine."""
        ...


@dataclass
class RoundRobin:
    """One engine after the other."""

    reads_engines = False
    _next: int = 0

    def route(self, request: int, workload: Workload, engines: Sequence[Engine]) -> int:
        """Return the index of the next engine."""
        index = self._next % len(engines)
        self._next = (index + 1) % len(engines)
        return index


class LeastLoaded:
    """Engine with the fewest waiting and running requests; of several, the first."""

    reads_engines = True

    def route(self, request: int, workload: Workload, engines: Sequence[Engine]) -> int:
        """Return the index of the least loaded engine."""
        loads = [
            len(e.running) + len(e.waiting) + len(e.arrivals) + len(e.loading) for e in engines
        ]
        return loads.index(min(loads))


@dataclass
class BySession:
    """Engine of the session's first request; sessions are dealt round-robin."""

    reads_engines = False
    _engine_of: dict[int, Engine] = field(default_factory=dict[int, Engine])
    _next: int = 0

    def route(self, request: int, workload: Workload, engines: Sequence[Engine]) -> int:
        """Return the index of the session's engine; a request without one is its own session."""
        session = ~request if workload.session is None else workload.session[request]
        engine = self._engine_of.get(session)
        if engine is not None and engine in engines:
            return engines.index(engine)
        index, self._next = self._next % len(engines), (self._next + 1) % len(engines)
        self._engine_of[session] = engines[index]
        return index


@dataclass(frozen=True)
class KvAware:
    """Engine of least cost: blocks of the prompt that its cache lacks, and blocks in use.

    The cost is that of Dynamo's KV router (ai-dynamo/dynamo, `docs/router`): `overlap_weight` x
    blocks to prefill + blocks in use; of equal ones, the first. Waiting requests count with the
    blocks of their prompts.
    """

    reads_engines = True
    overlap_weight: float = 1.0

    def route(self, request: int, workload: Workload, engines: Sequence[Engine]) -> int:
        """Return the index of the cheapest engine."""
        segments, ends = NO_CHAIN if workload.chains is None else workload.chains[request]
        limit = (workload.prompt[request] - 1) // engines[0].block_size
        best, lowest_cost = 0, float("inf")
        for index, engine in enumerate(engines):
            kv_cache, prompt, size = engine.kv_cache, engine.prompt, engine.block_size
            cost = float(kv_cache.size - kv_cache.free)
            for waiting in (engine.waiting, engine.arrivals):
                for other in waiting:
                    cost -= -prompt[other] // size
            if segments:
                cost -= self.overlap_weight * kv_cache.find(segments, ends, limit).blocks
            if cost < lowest_cost:
                best, lowest_cost = index, cost
        return best


ROUTERS = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "session": BySession,
    "kv_aware": KvAware,
}


def router_of(name: str, option: str = "--router") -> Router:
    """Router by name, before its first request; errors name `option`."""
    if name not in ROUTERS:
        hint = did_you_mean(name, ROUTERS)
        raise UserError(f"{option} is {name!r}, wanted {either(ROUTERS)}{hint}")
    return ROUTERS[name]()
