"""What an engine notes as it goes: times between tokens, and its state at moments."""

from __future__ import annotations

from array import array
from typing import NamedTuple


class Gaps:
    """Times between tokens as series: n requests, for steps whose length grows linearly."""

    __slots__ = ("first", "last", "requests", "steps")

    def __init__(self) -> None:
        """Nothing yet."""
        self.first, self.last = array("d"), array("d")
        self.steps, self.requests = array("i"), array("i")

    def add(self, first: float, last: float, steps: int, requests: int) -> None:
        """Steps from the `first` length to the `last`, in seconds, of so many requests."""
        self.first.append(first)
        self.last.append(last)
        self.steps.append(steps)
        self.requests.append(requests)


class EngineSamples(NamedTuple):
    """The state of an engine at moments that lie equally far apart."""

    seconds: array[float]
    waiting: array[int]
    running: array[int]
    blocks: array[int]
    """Blocks that requests hold."""

    @classmethod
    def none(cls) -> EngineSamples:
        """Nothing yet."""
        return cls(array("d"), array("i"), array("i"), array("i"))
