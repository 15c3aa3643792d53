"""Engines that share the requests of a workload, moved on in time together."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

from stagewright.serving.engines.engine import Engine
from stagewright.serving.requests import Chain, Records, Workload
from stagewright.serving.routers import STATIC, Router

FAR = sys.float_info.max

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


def serve(
    workload: Workload,
    engine: Callable[[Workload, Records], Engine],
    count: int,
    router: Router,
    heard: Heard | None = None,
) -> Outcome:
    """Serve a workload on `count` engines, each of which `engine` makes.

    Requests that do not depend on others go to their engines at once where the router does not look
    at engines; each engine is then moved on by itself. Otherwise all events are in one order.
    """
    records = Records.of(len(workload))
    made = [engine(workload, records) for _ in range(count)]
    alone = workload.after is None and workload.concurrency is None
    stopped = False
    try:
        if alone and isinstance(router, STATIC):
            _apart(workload, records, made, router, heard)
        else:
            _together(workload, records, made, router, heard)
    except KeyboardInterrupt:
        stopped = True
    return Outcome(workload, records, made, stopped)


def in_blocks(workload: Workload, block_size: int) -> Workload:
    """A workload whose chains count blocks: a block is of the segment that has its last token."""
    if workload.chains is None:
        return workload
    known: dict[tuple[int, ...], tuple[int, ...]] = {}
    chains: list[Chain] = []
    for keys, ends in workload.chains:
        found = known.get(ends)
        if found is None:
            known[ends] = found = tuple(end // block_size for end in ends)
        chains.append((keys, found))
    return replace(workload, chains=chains)


def _apart(
    workload: Workload,
    records: Records,
    engines: Sequence[Engine],
    router: Router,
    heard: Heard | None,
) -> None:
    arrival = records.arrival
    arrival[:] = workload.arrival
    for request in range(len(workload)):
        nth = router.route(request, workload, engines)
        records.engine[request] = nth
        engines[nth].inbox.append(request)
    done = 0
    for engine in engines:
        if engine.inbox:
            engine.end = arrival[engine.inbox[0]]
        engine.advance(FAR)
        done += len(engine.completed)
        engine.completed.clear()
        if heard is not None:
            heard(done, len(workload))


def _together(
    workload: Workload,
    records: Records,
    engines: Sequence[Engine],
    router: Router,
    heard: Heard | None,
) -> None:
    """One order of events: of arrivals, and of the ends of engines' batches."""
    arrivals = _ToCome(workload)
    ends: list[tuple[float, int]] = []
    done = 0
    while arrivals.heap or ends:
        at = arrivals.heap[0][0] if arrivals.heap else math.inf
        if not ends or at <= ends[0][0]:
            touched = dict.fromkeys(_deal(at, arrivals, records, engines, router))
        else:
            end, nth = heappop(ends)
            if engines[nth].end != end:
                continue  # the batch was cut since
            touched = (nth,)
            at = end
        for nth in touched:
            engine = engines[nth]
            engine.advance(at)
            for request in engine.completed:
                arrivals.done(request, at)
            done += len(engine.completed)
            engine.completed.clear()
            if engine.end < math.inf:
                heappush(ends, (engine.end, nth))
            if heard is not None and done % 1000 == 0:
                heard(done, len(workload))


def _deal(
    at: float, arrivals: _ToCome, records: Records, engines: Sequence[Engine], router: Router
) -> list[int]:
    """Give all requests that arrive now to engines, and return which got some."""
    dealt: list[int] = []
    while arrivals.heap and arrivals.heap[0][0] <= at:
        _, request = heappop(arrivals.heap)
        records.arrival[request] = at
        nth = router.route(request, arrivals.workload, engines)
        records.engine[request] = nth
        engines[nth].push(request)
        dealt.append(nth)
    return dealt


class _ToCome:
    """Requests that are still to come, of which some wait for others to be done."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
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
        self.heap.extend((workload.arrival[request], request) for request in free)
        heapify(self.heap)

    def done(self, request: int, at: float) -> None:
        """A request is done: those that have waited for it come."""
        for follower in self._next.pop(request, ()):
            heappush(self.heap, (at + self.workload.arrival[follower], follower))
        if self.workload.concurrency is not None and request not in self._next:
            following = next(self._queue, None)
            if following is not None:
                heappush(self.heap, (at, following))
