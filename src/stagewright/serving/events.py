"""Future events of a serving simulation, in one order."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

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
