"""What an engine notes as it goes: times between tokens, and its state at moments."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Float


class Gaps:
    """Times between tokens as series: n requests, for steps whose length grows linearly."""

    __slots__ = ("add", "numbers")

    def __init__(self) -> None:
        """Nothing yet."""
        self.numbers = array("d")
        """Four for each series: seconds of the first step and of the last, steps, requests."""
        self.add = self.numbers.extend
        """Adds a series: `add((first, last, steps, requests))`."""

    def series(self) -> Float:
        """The series as rows."""
        return np.frombuffer(self.numbers).reshape(-1, 4)


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
