"""What a search knows of each candidate: a step's time, memory and cost, an array element each.

>>> import numpy as np
>>> two = np.array([2.0, 1.0])
>>> found = Figures(two, {"parameters": np.array([10, 30])}, np.array([20, 20]), {}, 0 * two,
...     np.array([8, 8]), 0.4 * two, 0.3 * two, 400 * two, 700 * two, 3 * two, two > 1)
>>> found.peak.tolist(), found.fits.tolist(), found.tokens_per_second.tolist()
([10, 30], [True, False], [4.0, 8.0])
>>> both = Figures.concatenated([found.take([1]), found])
>>> both.seconds.tolist()
[1.0, 2.0, 1.0]
>>> both.put(np.array([2, 0]), found)
>>> both.seconds.tolist(), both.memory["parameters"].tolist()
([1.0, 2.0, 2.0], [30, 10, 10])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np

from stagewright.arrays import Bool, Float, Int

_BY_NAME = ("memory", "exposed")
"""Fields that have a column for each of several names."""


@dataclass(frozen=True, slots=True, eq=False)
class Figures:
    """The figures of candidates, an array element per candidate; NaN where a figure is unknown.

    Definitions are those of `SimulatedStep`, of which these are the columns.
    """

    seconds: Float
    """Of a step."""
    memory: dict[str, Int]
    """Bytes that the fullest rank holds at its peak, by category (`program.columns.CATEGORIES`, and
    `allowance` where the run has one)."""
    device_memory: Int
    """Bytes that a rank may use."""
    exposed: dict[str, Float]
    """Seconds of a step in which the mean GPU waits for communication, by axis."""
    bubble: Float
    """Seconds of a step in which the mean GPU waits for other ranks."""
    tokens: Int
    """New tokens of a step over all ranks."""
    mfu: Float
    """Model FLOPs utilization, attention counted in full."""
    mfu_causal: Float
    """The same, attention counted without masked pairs."""
    tflops: Float
    """TFLOP/s of a GPU that `mfu` is the share of the peak of."""
    joules: Float
    """Energy of a step over all GPUs."""
    usd: Float
    """Cost of a step over all GPUs, at the hardware's price; NaN without a price."""
    exact: Bool
    """True where the figures are those of `simulate`, false where they are estimates."""

    def __len__(self) -> int:
        return len(self.seconds)

    def __repr__(self) -> str:
        return f"<figures of {len(self)} candidates, {int(self.exact.sum())} exact>"

    @property
    def peak(self) -> Int:
        """Bytes that the fullest rank holds at its peak, all categories together."""
        return sum(self.memory.values(), np.zeros(len(self), dtype=np.int64))

    @property
    def fits(self) -> Bool:
        """Whether the fullest rank fits into the memory that it may use."""
        return self.peak <= self.device_memory

    @property
    def tokens_per_second(self) -> Float:
        """Tokens per second of all GPUs together."""
        return self.tokens / self.seconds

    def take(self, rows: Sequence[int] | Int | Bool) -> Self:
        """The figures of some candidates, in the order of `rows`."""
        at = np.asarray(rows)
        columns: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        taken: dict[str, Any] = {
            name: column[at] for name, column in columns.items() if name not in _BY_NAME
        }
        taken |= {name: {k: v[at] for k, v in columns[name].items()} for name in _BY_NAME}
        return type(self)(**taken)

    def put(self, rows: Int, part: Figures) -> None:
        """Write the figures of some candidates, given in the order of `rows`.

        A category or an axis that `part` lacks is 0 for these, a new one is 0 for all others.
        """
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(part, field.name)
            if field.name not in _BY_NAME:
                mine[rows] = theirs
                continue
            for name in mine:
                mine[name][rows] = 0
            for name, column in theirs.items():
                if name not in mine:
                    mine[name] = np.zeros(len(self), dtype=column.dtype)
                mine[name][rows] = column

    def halves(self) -> tuple[Self, Self]:
        """The first and the second half of the candidates."""
        middle = len(self) // 2
        return self.take(np.arange(middle)), self.take(np.arange(middle, len(self)))

    def extrapolated(self, other: Figures, times: Float) -> Self:
        """These figures plus the difference of others to them, so many times, as estimates."""

        def column(one: Any, another: Any) -> Any:
            found = one + times * (another - one)
            return found if one.dtype.kind == "f" else np.ceil(found).astype(one.dtype)

        columns: dict[str, Any] = {}
        for field in fields(self):
            one, another = getattr(self, field.name), getattr(other, field.name)
            if field.name in ("exact", "tokens", "device_memory"):
                columns[field.name] = one & False if field.name == "exact" else one
            elif field.name in _BY_NAME:
                columns[field.name] = {name: column(one[name], another[name]) for name in one}
            else:
                columns[field.name] = column(one, another)
        return type(self)(**columns)

    @classmethod
    def concatenated(cls, parts: Sequence[Figures]) -> Self:
        """The figures of several lots of candidates behind each other.

        A category or an axis that a lot does not name is 0 there.
        """
        columns: dict[str, Any] = {}
        for field in fields(cls):
            each: list[Any] = [getattr(part, field.name) for part in parts]
            if field.name not in _BY_NAME:
                columns[field.name] = np.concatenate(each)
                continue
            names = dict.fromkeys(name for one in each for name in one)
            columns[field.name] = {
                name: np.concatenate(
                    [one.get(name, 0 * part.tokens) for one, part in zip(each, parts, strict=True)]
                )
                for name in names
            }
        return cls(**columns)
