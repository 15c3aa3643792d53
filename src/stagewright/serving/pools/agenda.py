"""What is to happen, by time."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

ARRIVAL, OTHER, BATCH_END = range(3)
"""The order of events at one moment: arrivals, other events, ends of batches."""

Act = Callable[[float, int], None]
"""What happens at a moment to a request or an engine, by its number."""


class Agenda:
    """What is to happen, by time; of equal times by kind, then by number, then as it was noted."""

    __slots__ = ("_heap", "_noted")

    def __init__(self) -> None:
        """Nothing is to happen."""
        self._heap: list[tuple[float, int, int, int, Act]] = []
        self._noted = count()

    def __bool__(self) -> bool:
        """Whether anything is to happen."""
        return bool(self._heap)

    def note(self, at: float, kind: int, number: int, act: Act) -> None:
        """Something is to happen."""
        heappush(self._heap, (at, kind, number, next(self._noted), act))

    def run(self) -> None:
        """Let it happen, and what follows from it, to the end."""
        heap = self._heap
        while heap:
            at, _, number, _, act = heappop(heap)
            act(at, number)
