"""Engines that share the requests of a workload, moved on in time together."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush

from stagewright.serving.engines.engine import Engine
from stagewright.serving.engines.lockstep import Lockstep
from stagewright.serving.hosts import HostTimes
from stagewright.serving.requests import Chain, Handover, Records, UpTime, Workload
from stagewright.serving.routers import STATIC, ByLoad, Router

NO_HOST = HostTimes()
FAR = sys.float_info.max
TOLD = 50
"""How often it is told, of each engine that is moved on by itself, how many requests are done."""

Heard = Callable[[int, int], None]
"""Is told how many requests are done, of how many."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """What became of a workload's requests on some engines."""

    workload: Workload
    records: Records
    engines: Sequence[Engine]
    stopped: bool = False
    """Whether somebody stopped it: what is known so far."""
    handover: Handover | None = None
    """Of prompts and decode on instances of their own; the first engines compute the prompts."""
    refused: Mapping[str, int] = field(default_factory=dict[str, int])
    """Requests that were not served to their ends, by reason: queues full, instances failed."""
    instances: Sequence[tuple[float, int]] = ()
    """Seconds at which the number of instances that serve changed, and that number."""
    up: Sequence[UpTime] = ()
    """When engines were up, where instances fail, start or leave; none: all the time."""
    stages: Mapping[str, array[float]] = field(default_factory=dict[str, "array[float]"])
    """By stage before the prompt: seconds of each request there, nan where it was not."""


def serve(
    workload: Workload,
    engine: Callable[[Workload, Records], Engine],
    count: int,
    router: Router,
    host: HostTimes = NO_HOST,
    heard: Heard | None = None,
    together: int = 1,
) -> Outcome:
    """Serve a workload on `count` engines, each of which `engine` makes.

    So many of them step `together`, as ranks that share experts do.

    Requests that do not depend on others go to their engines at once where the router does not look
    at engines; each engine is then moved on by itself. Where the router looks at them, all are
    moved on up to each arrival; where requests depend on others, all events are in one order.
    `host` is what lies between a user and an engine's queue.
    """
    records = Records.of(len(workload))
    made = [engine(workload, records) for _ in range(count)]
    if together > 1:
        for first in range(0, count, together):
            Lockstep(made[first : first + together])
    alone = workload.after is None and workload.concurrency is None
    stopped = False
    try:
        if alone and isinstance(router, STATIC):
            _apart(workload, records, made, router, host, heard)
        elif alone:
            _as_they_come(ToCome(workload, host), records, made, router, heard)
        else:
            _together(ToCome(workload, host), records, made, router, heard)
    except KeyboardInterrupt:
        stopped = True
    return Outcome(workload, records, made, stopped)


def in_blocks(workload: Workload, block_size: int) -> Workload:
    """A workload whose chains count blocks: a block is of the segment that has its last token."""
    if workload.chains is None:
        return workload
    whole_blocks = block_size.__rfloordiv__  # of so many tokens

    lengths = {ends for _, ends in workload.chains}  # many chains are as long as others
    blocks = {ends: tuple(map(whole_blocks, ends)) for ends in lengths}
    chains: list[Chain] = [(keys, blocks[ends]) for keys, ends in workload.chains]
    return replace(workload, chains=chains)


def _apart(
    workload: Workload,
    records: Records,
    engines: Sequence[Engine],
    router: Router,
    host: HostTimes,
    heard: Heard | None,
) -> None:
    reached = records.reached
    records.arrival[:] = workload.arrival
    reached[:] = host.reached(workload.arrival, workload.prompt)
    order: Sequence[int] = range(len(workload))
    if host.per_prompt_token:
        order = sorted(order, key=reached.__getitem__)
    route, engine_of = router.route, records.engine
    inboxes = [engine.inbox.append for engine in engines]
    for request in order:
        engine_of[request] = nth = route(request, workload, engines)
        inboxes[nth](request)
    done = 0
    last = reached[order[-1]]
    moments = (*(last * nth / TOLD for nth in range(1, TOLD) if heard is not None), FAR)
    for unit in dict.fromkeys(engine.unit for engine in engines):
        for engine in unit.engines:
            if engine.inbox:
                unit.end = min(unit.end, reached[engine.inbox[0]])
        for at in moments:
            unit.advance(at)
            done += _taken_out(unit.engines)
            if heard is not None:
                heard(done, len(workload))


def _as_they_come(
    arrivals: ToCome,
    records: Records,
    engines: Sequence[Engine],
    router: Router,
    heard: Heard | None,
) -> None:
    """Move engines on up to each arrival: what is done in between changes nothing for others."""
    workload = arrivals.workload
    total, done = len(workload), 0
    told = max(1, total // TOLD)
    units = [*dict.fromkeys(engine.unit for engine in engines)]
    place = {unit: nth for nth, unit in enumerate(units)}
    numbers = {engine: nth for nth, engine in enumerate(engines)}
    by_load = router if isinstance(router, ByLoad) else None
    loads = [] if by_load is None else [*map(by_load.load, engines)]
    ends: list[tuple[float, int]] = []  # of units that have something to do; some hold no longer
    now, before = -math.inf, 0.0
    for dealt, (at, request) in enumerate(sorted(arrivals.heap), 1):
        if at > now:
            now, before = at, math.nextafter(at, -math.inf)
        while ends and ends[0][0] < at:
            unit = units[heappop(ends)[1]]
            if unit.end < at:
                unit.advance(before)
                if unit.end < math.inf:
                    heappush(ends, (unit.end, place[unit]))
                if by_load is not None:
                    for engine in unit.engines:
                        loads[numbers[engine]] = by_load.load(engine)
        if by_load is None:
            nth = router.route(request, workload, engines)
        else:
            nth = by_load.choose(request, workload, engines, loads)
        engine = engines[nth]
        unit = engine.unit
        end = unit.end
        _enter(request, at, nth, arrivals, records, engine)
        if by_load is not None:
            loads[nth] = by_load.load(engine)
        if unit.end < end:
            heappush(ends, (unit.end, place[unit]))
        if heard is not None and dealt % told == 0:
            done += _taken_out(engines)
            heard(done, total)
    for unit in units:
        unit.advance(FAR)
        if heard is not None:
            done += _taken_out(unit.engines)
            heard(done, total)


def _taken_out(engines: Sequence[Engine]) -> int:
    """How many requests are done that nobody has heard of."""
    count = sum(len(engine.completed) for engine in engines)
    for engine in engines:
        engine.completed.clear()
    return count


def _together(
    arrivals: ToCome,
    records: Records,
    engines: Sequence[Engine],
    router: Router,
    heard: Heard | None,
) -> None:
    """One order of events: of arrivals, and of the ends of engines' batches."""
    total = len(arrivals.workload)
    units = [*dict.fromkeys(engine.unit for engine in engines)]
    place = {unit: nth for nth, unit in enumerate(units)}
    ends: list[tuple[float, int]] = []
    done = 0
    while arrivals.heap or ends:
        at = arrivals.heap[0][0] if arrivals.heap else math.inf
        if not ends or at <= ends[0][0]:
            dealt = _deal(at, arrivals, records, engines, router)
            touched = dict.fromkeys(place[engines[nth].unit] for nth in dealt)
        else:
            end, nth = heappop(ends)
            if units[nth].end != end:
                continue  # the batch was cut since
            touched = (nth,)
            at = end
        for nth in touched:
            unit = units[nth]
            unit.advance(at)
            for engine in unit.engines:
                for request in engine.completed:
                    arrivals.done(request, at)
                done += len(engine.completed)
                engine.completed.clear()
            if unit.end < math.inf:
                heappush(ends, (unit.end, nth))
            if heard is not None and done % 1000 == 0:
                heard(done, total)


def _deal(
    at: float, arrivals: ToCome, records: Records, engines: Sequence[Engine], router: Router
) -> list[int]:
    """Give all requests that arrive now to engines, and return which got some."""
    dealt: list[int] = []
    while arrivals.heap and arrivals.heap[0][0] <= at:
        _, request = heappop(arrivals.heap)
        nth = router.route(request, arrivals.workload, engines)
        _enter(request, at, nth, arrivals, records, engines[nth])
        dealt.append(nth)
    return dealt


def _enter(
    request: int, at: float, nth: int, arrivals: ToCome, records: Records, engine: Engine
) -> None:
    """A request reaches the queue of the nth engine."""
    records.arrival[request] = at - arrivals.delay(request)
    records.reached[request] = at
    records.engine[request] = nth
    engine.push(request)


class ToCome:
    """Requests that are still to come, of which some wait for others to be done."""

    def __init__(self, workload: Workload, host: HostTimes) -> None:
        """Those that wait for nobody are in `heap`, by when they reach a queue."""
        self.workload, self.host = workload, host
        self.heap: list[tuple[float, int]] = []
        self._next: dict[int, list[int]] = {}
        self._queue = iter(list[int]())
        free: list[int] = []
        for request in range(len(workload)):
            before = -1 if workload.after is None else workload.after[request]
            if before >= 0:
                self._next.setdefault(before, []).append(request)
            else:
                free.append(request)
        if workload.concurrency is not None:
            self._queue = iter(free[workload.concurrency :])
            free = free[: workload.concurrency]
        self.heap.extend((self._reaches(0.0, request), request) for request in free)
        heapify(self.heap)

    def delay(self, request: int) -> float:
        """Seconds from the user to the engine's queue."""
        return self.host.before_prefill(self.workload.prompt[request])

    def _reaches(self, after: float, request: int) -> float:
        return after + self.workload.arrival[request] + self.delay(request)

    def done(self, request: int, at: float) -> None:
        """A request is done: those that have waited for it come."""
        for follower in self._next.pop(request, ()):
            heappush(self.heap, (self._reaches(at, follower), follower))
        if self.workload.concurrency is not None and request not in self._next:
            following = next(self._queue, None)
            if following is not None:
                heappush(self.heap, (self._reaches(at, following), following))
