"""Scales of charts: measures, round ticks, and axes from left to right and upwards."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from stagewright.numbers import duration, quantity
from stagewright.views.pictures import svg


class Measure(NamedTuple):
    """Unit of the lengths of a chart, and a value in words."""

    unit: str
    show: Callable[[float], str]


def _in_prefixes(unit: str) -> Measure:
    """Numbers of a unit, rounded to whole ones, with decimal prefixes."""

    def show(number: float) -> str:
        return quantity(round(number), unit)

    return Measure(unit, show)


BYTES, FLOPS, WATTS = _in_prefixes("B"), _in_prefixes("FLOP"), _in_prefixes("W")
SHARE = Measure("%", "{:.1%}".format)
SECONDS = Measure("s", duration)
NUMBER = Measure("", "{:,.4g}".format)

AXIS, EDGE = 24, 10
"""Units that the axis of a scale takes below its line, and that its words take beyond its end."""


class Across(NamedTuple):
    """A scale from left to right: `low` at `left`, `high` at `right`."""

    left: float
    right: float
    high: float
    measure: Measure
    low: float = 0.0
    log: bool = False

    def at(self, value: float) -> float:
        """Place of a value."""
        if self.log:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
            return self.left + share * (self.right - self.left)
        return self.left + (value - self.low) * self.per_unit

    @property
    def per_unit(self) -> float:
        """Units of the picture for one unit of the measure."""
        return (self.right - self.left) / ((self.high - self.low) or 1)

    @property
    def ticks(self) -> list[float]:
        """Round values along the scale."""
        if self.log:
            return log_ticks(self.low, self.high)
        return ticks(self.high, max(2, int((self.right - self.left) / 90)))

    def axis(self, y: float) -> str:
        """The line of the scale with its ticks below."""
        values = self.ticks
        marks = [svg.line(self.left, y, self.right, y)]
        for value in values:
            x = self.at(value)
            marks.append(svg.line(x, y, x, y + 4))
            words = round_in_words(value, values[-1], self.measure)
            half = svg.text_width(words) / 2
            middle = min(max(x, half), svg.WIDTH - half)
            marks.append(svg.text(middle, y + 18, words, "middle"))
        return "".join(marks)


class Frame(NamedTuple):
    """The field of a chart with two scales; `up` goes from `bottom` (its left) to its right."""

    across: Across
    up: Across

    @property
    def top(self) -> float:
        """Height of the upper edge."""
        return self.up.right

    @property
    def bottom(self) -> float:
        """Height of the lower edge."""
        return self.up.left

    @property
    def room(self) -> float:
        """Width that the words of the upward ticks take to the left of the field."""
        values = self.up.ticks
        words = [round_in_words(value, values[-1], self.up.measure) for value in values]
        return max(map(svg.text_width, words)) + 9

    def axes(self, across: str, up: str) -> list[str]:
        """Both axes with their names and ticks."""
        left = self.across.left
        parts = [svg.text(0, self.top - 9, up)] if up else []
        parts.append(self.across.axis(self.bottom))
        parts.append(svg.text(svg.WIDTH, self.bottom + AXIS + 12, across, "end"))
        values = self.up.ticks
        for value in values:
            y = self.up.at(value)
            parts.append(svg.line(left, y, self.across.right, y, 'stroke-opacity=".18"'))
            words = round_in_words(value, values[-1], self.up.measure)
            parts.append(svg.text(left - 7, y + 5, words, "end"))
        return [*parts, svg.line(left, self.top, left, self.bottom)]


_PREFIXES = {0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P", 18: "E", 21: "Z"}
_SECOND_PREFIXES = {0: "", -3: "m", -6: "u", -9: "n"}


def round_in_words(value: float, largest: float, measure: Measure) -> str:
    """A tick's value, without the digits that a measured value has; all ticks have one unit.

    >>> round_in_words(0.2, 1, SHARE), round_in_words(0.5, 2, SECONDS), round_in_words(0, 1, BYTES)
    ('20%', '0.5 s', '0')
    >>> round_in_words(500e6, 2e9, BYTES)
    '0.5 GB'
    """
    if not value:
        return "0"
    if measure.unit == "%":
        return f"{value * 100:g}%"
    if measure.unit in ("", "tasks"):
        return f"{value:,.6g}"
    prefixes = _SECOND_PREFIXES if measure.unit == "s" else _PREFIXES
    scales = [power for power in prefixes if 10.0**power <= largest * (1 + 1e-9)]
    power = max(scales, default=min(prefixes))
    return f"{value / 10.0**power:g} {prefixes[power]}{measure.unit}"


def ticks(high: float, about: int = 5) -> list[float]:
    """Round numbers from 0 up to `high` for an axis, no more than `about` and one.

    >>> ticks(81e9)
    [0.0, 20000000000.0, 40000000000.0, 60000000000.0, 80000000000.0]
    >>> ticks(0.3, 3)
    [0.0, 0.1, 0.2, 0.3]
    """
    if high <= 0:
        return [0.0]
    unit = 10.0 ** math.floor(math.log10(high / about))
    step = next(unit * n for n in (1, 2, 5, 10) if high / (unit * n) <= about * (1 + 1e-9))
    return [float(f"{step * n:.12g}") for n in range(int(high / step * (1 + 1e-9)) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers on a logarithmic axis: 1, 2 and 5 of each power of ten, or fewer.

    >>> log_ticks(3, 40)
    [5.0, 10.0, 20.0]
    >>> log_ticks(3, 40_000)
    [10.0, 100.0, 1000.0, 10000.0]
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1.0,) if high / low > 500 else (1.0, 2.0, 5.0)
    if high / low < 4:
        digits = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
    values = [float(f"{digit * 10.0**power:.12g}") for power in powers for digit in digits]
    return [value for value in values if low <= value <= high]
