"""Which engine a request goes to. A router is one class with one method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from stagewright.errors import UserError, did_you_mean, either
from stagewright.serving.engines.engine import Engine
from stagewright.serving.requests import NO_CHAIN, Workload


class Router(Protocol):
    """Chooses an engine for each request as it arrives."""

    def route(self, request: int, workload: Workload, engines: Sequence[Engine]) -> int:
        """The place of an engine; engines stand where they are when the request arrives."""
        ...


class ByLoad:
    """A router that compares loads of engines.

    Who knows which engines have changed since it last asked keeps the loads of the others.
    """

    def load(self, engine: Engine) -> int:
        """What of an engine counts for any request."""
        raise NotImplementedError

    def choose(
        self, request: int, workload: Workload, engines: Sequence[Engine], loads: Sequence[int]
    ) -> int:
        """The place of an engine, of engines with these loads."""
        raise NotImplementedError

    def route(self, request: int, workload: Workload, engines: Sequence[Engine]) -> int:
        """As `Router.route`."""
        return self.choose(request, workload, engines, [*map(self.load, engines)])


@dataclass
class RoundRobin:
    """One engine after the other."""

    _next: int = 0

    def route(self, request: int, workload: Workload, engines: Sequence[Engine]) -> int:
        """The next one."""
        count = len(engines)
        at = self._next % count
        self._next = (at + 1) % count
        return at


class LeastLoaded(ByLoad):
    """The engine with the fewest requests that wait or run; of several, the first."""

    def load(self, engine: Engine) -> int:
        """Its requests."""
        waiting = len(engine.waiting) + len(engine.inbox) + len(engine.loading)
        return len(engine.running) + waiting

    def choose(
        self, request: int, workload: Workload, engines: Sequence[Engine], loads: Sequence[int]
    ) -> int:
        """The least loaded one."""
        return loads.index(min(loads))


@dataclass
class BySession:
    """Requests of one session go to one engine: where its first one went, one after the other."""

    _homes: dict[int, Engine]
    _next: int = 0

    @classmethod
    def new(cls) -> BySession:
        """No session is known yet."""
        return cls({})

    def route(self, request: int, workload: Workload, engines: Sequence[Engine]) -> int:
        """The session's engine; a request without a session is its own."""
        session = ~request if workload.session is None else workload.session[request]
        home = self._homes.get(session)
        if home is not None and home in engines:
            return engines.index(home)
        at, self._next = self._next % len(engines), (self._next + 1) % len(engines)
        self._homes[session] = engines[at]
        return at


@dataclass(frozen=True)
class KvAware(ByLoad):
    """The engine of least cost: blocks of the prompt that its cache lacks, and blocks in use.

    The cost is that of Dynamo's KV router (ai-dynamo/dynamo, `docs/router`): `overlap_weight` x
    blocks to prefill + blocks in use; of equal ones, the first. Caches are looked at as they are;
    what waits in queues counts as blocks to come.
    """

    overlap_weight: float = 1.0

    def load(self, engine: Engine) -> int:
        """Blocks in use, and those to come."""
        blocks, size, of = engine.blocks, engine.block_size, engine.prompt
        used = blocks.size - blocks.free
        if engine.waiting or engine.inbox:
            used += sum(-(-of[i] // size) for i in (*engine.waiting, *engine.inbox))
        return used

    def choose(
        self, request: int, workload: Workload, engines: Sequence[Engine], loads: Sequence[int]
    ) -> int:
        """The cheapest one."""
        keys, ends = NO_CHAIN if workload.chains is None else workload.chains[request]
        if not keys:
            return loads.index(min(loads))
        limit = (workload.prompt[request] - 1) // engines[0].block_size
        best, least = 0, float("inf")
        for nth, load in enumerate(loads):
            cost = load - self.overlap_weight * engines[nth].blocks.cached_blocks(keys, ends, limit)
            if cost < least:
                best, least = nth, cost
        return best


ROUTERS = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "session": BySession.new,
    "kv_aware": KvAware,
}


def router_of(name: str, option: str = "--router") -> Router:
    """A router by its name, as it is before the first request; `option` named it."""
    if name not in ROUTERS:
        hint = did_you_mean(name, ROUTERS)
        raise UserError(f"{option} is {name!r}, wanted {either(ROUTERS)}{hint}")
    return ROUTERS[name]()


STATIC = (RoundRobin, BySession)
"""Routers that do not look at engines."""
