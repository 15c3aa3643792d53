"""Arrivals of requests: at their times, after others, and in lanes of a closed loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from stagewright.serving.host import HostTimes
from stagewright.serving.workload import Workload


class ArrivalQueue(Iterator[tuple[float, int]]):
    """Arrivals at the router of requests that wait for no other one.

    A follow-up arrives after all of its predecessors have ended (`after`). With a `concurrency`,
    so many sessions are in flight: a session holds its lane until all of its requests have ended,
    and the next session begins then, or at its own time if that is later. AIPerf's `--concurrency`
    counts sessions in this way (ai-dynamo/aiperf, `docs/benchmark-modes/
    timing-modes-reference.md`); of single requests it is vLLM's `--max-concurrency`.
    """

    def __init__(self, workload: Workload, host: HostTimes) -> None:
        """Requests pass `host` on their way."""
        self._workload, self._host = workload, host
        self._followers: dict[int, list[int]] = {}
        self._predecessors: dict[int, int] = {}  # number of those that have not ended, if several
        first: Sequence[int] = range(len(workload))
        if workload.after is not None:
            for request in first:
                predecessors = workload.predecessors(request)
                for predecessor in predecessors:
                    self._followers.setdefault(predecessor, []).append(request)
                if len(predecessors) > 1:
                    self._predecessors[request] = len(predecessors)
            first = [request for request in first if workload.after[request] < 0]
        self._session_of: list[int] = []  # first request of each request's session
        self._open: Counter[int] = Counter()  # requests that have not ended, by session
        self._waiting = iter(())
        if workload.concurrency is not None:
            self._waiting = iter(first[workload.concurrency :])
            first = first[: workload.concurrency]
            if workload.after is not None:
                for request, predecessor in enumerate(workload.after):
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
        """Time at which a request has passed the host, if it waits for no other one."""
        return self._workload.arrival[request] + self.delay(request)

    def delay(self, request: int) -> float:
        """Seconds from the user to the engine's queue."""
        return self._host.before_prefill(self._workload.prompt[request])

    def after(self, request: int, at: float) -> Iterator[tuple[float, int]]:
        """Arrivals of the requests that waited for the end of one."""
        for follower in self._followers.pop(request, ()):
            if follower in self._predecessors:
                self._predecessors[follower] -= 1
                if self._predecessors[follower]:
                    continue
            yield at + self._arrival(follower), follower
        if self._session_of:
            session = self._session_of[request]
            self._open[session] -= 1
            if self._open[session]:
                return
        begins = next(self._waiting, None)
        if begins is not None:
            yield max(at, self._workload.arrival[begins]) + self.delay(begins), begins
