"""Event queue of a simulation, and the arrivals that start it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count

import numpy as np

from stagewright.serving.host import HostTimes
from stagewright.serving.workload import Workload

ARRIVAL, OTHER, BATCH_END = range(3)
"""Order of events at one time: arrivals, other events, ends of batches."""

Handler = Callable[[float, int], None]
"""Processes an event of a request or an engine, by its number."""


class EventQueue:
    """Heap of events by time, kind, number and order of addition."""

    def __init__(self) -> None:
        """Create an empty heap."""
        self._heap: list[tuple[float, int, int, int, Handler]] = []
        self._additions = count()

    def __bool__(self) -> bool:
        """True if there are events."""
        return bool(self._heap)

    def add(self, at: float, kind: int, number: int, handler: Handler) -> None:
        """Add an event."""
        heappush(self._heap, (at, kind, number, next(self._additions), handler))

    def run(self) -> None:
        """Call the handlers of all events in order, also of those that handlers add."""
        heap = self._heap
        while heap:
            at, _, number, _, handler = heappop(heap)
            handler(at, number)


class ArrivalQueue(Iterator[tuple[float, int]]):
    """Arrivals at the router of requests that wait for no other one.

    A follow-up arrives after all of its predecessors have ended (`followers_of`). With a
    `concurrency`, at most that number of sessions is in flight: a session holds its slot until all
    of its requests have ended, and the next session begins then, or at its own time if that is
    later. AIPerf's `--concurrency` counts sessions in this way (ai-dynamo/aiperf,
    `docs/benchmark-modes/timing-modes-reference.md`); of single requests it is vLLM's
    `--max-concurrency`.
    """

    def __init__(self, workload: Workload, host: HostTimes) -> None:
        """Arrivals of a workload through `host`."""
        self._workload, self._host = workload, host
        self._followers: dict[int, list[int]] = {}
        self._open_predecessors: dict[int, int] = {}  # number that have not ended, if several
        first: Sequence[int] = range(len(workload))
        if workload.predecessor is not None:
            for request in first:
                predecessors = workload.predecessors(request)
                for predecessor in predecessors:
                    self._followers.setdefault(predecessor, []).append(request)
                if len(predecessors) > 1:
                    self._open_predecessors[request] = len(predecessors)
            first = [request for request in first if workload.predecessor[request] < 0]
        self._session_of: list[int] = []  # first request of each request's session
        self._open: Counter[int] = Counter()  # requests that have not ended, by session
        self._waiting = iter(())
        if workload.concurrency is not None:
            self._waiting = iter(first[workload.concurrency :])
            first = first[: workload.concurrency]
            if workload.predecessor is not None:
                for request, predecessor in enumerate(workload.predecessor):
                    session = request if predecessor < 0 else self._session_of[predecessor]
                    self._session_of.append(session)
                self._open.update(self._session_of)
        if host.per_prompt_token or (np.diff(np.frombuffer(workload.arrival)) < 0).any():
            first = sorted(first, key=self._arrival)
        self._first = iter(first)

    def __next__(self) -> tuple[float, int]:
        """Return time and number of the next request."""
        request = next(self._first)
        return self._arrival(request), request

    def _arrival(self, request: int) -> float:
        """Time at which a request is at the router, if it waits for no other one."""
        return self._workload.arrival[request] + self.seconds_to_router(request)

    def seconds_to_router(self, request: int) -> float:
        """Seconds from the user to the router: HTTP, queues, tokenizer."""
        return self._host.seconds_to_router(self._workload.prompt[request])

    def followers_of(self, request: int, at: float) -> Iterator[tuple[float, int]]:
        """Arrivals of the requests that waited for the end of this one."""
        for follower in self._followers.pop(request, ()):
            if follower in self._open_predecessors:
                self._open_predecessors[follower] -= 1
                if self._open_predecessors[follower]:
                    continue
            yield at + self._arrival(follower), follower
        if self._session_of:
            session = self._session_of[request]
            self._open[session] -= 1
            if self._open[session]:
                return
        begins = next(self._waiting, None)
        if begins is not None:
            yield max(at, self._workload.arrival[begins]) + self.seconds_to_router(begins), begins
