"""What charts share: layouts for screens, scales with round ticks, axes, and measures.

A chart is drawn once for each layout, and the page shows the one that fits the screen: text keeps
its size, and what stands beside a bar on a desk stands above the bar on a phone. The script zooms
into charts that name their scale: `Across.attributes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from stagewright.numbers import duration, quantity
from stagewright.views.pictures import svg


class ScreenSize(NamedTuple):
    """A way to draw a chart: its name, a class of the page's style sheet, and units across."""

    name: str
    width: int


SCREENS = (ScreenSize("narrow", 360), ScreenSize("medium", svg.WIDTH), ScreenSize("wide", 1120))
"""For a phone, for a tablet and for paper, and for a desk."""


class Measure(NamedTuple):
    """What lengths of a chart stand for: the unit, as the script knows it, and a value in words."""

    unit: str
    show: Callable[[float], str]


def _bytes(size: float) -> str:
    return quantity(round(size), "B")


def _flops(number: float) -> str:
    return quantity(round(number), "FLOP")


def _share(part: float) -> str:
    return f"{part:.1%}"


BYTES, FLOPS, SHARE = Measure("B", _bytes), Measure("FLOP", _flops), Measure("%", _share)
SECONDS = Measure("s", duration)


class Across(NamedTuple):
    """A scale from left to right: 0 at `left`, `most` at `right`."""

    left: float
    right: float
    most: float
    measure: Measure

    def at(self, value: float) -> float:
        """Where a value lies."""
        return self.left + value * self.per_unit

    @property
    def per_unit(self) -> float:
        """Units of the picture for one unit of the measure."""
        return (self.right - self.left) / (self.most or 1)

    def attributes(self) -> str:
        """What the script must know of the scale to zoom, as attributes of the picture."""
        ends = f"{svg.number(self.left)} {svg.number(self.right)}"
        return f'data-across="{ends} {self.most:.9g}" data-unit="{self.measure.unit}"'

    def axis(self, y: float) -> str:
        """The line of the scale with its ticks below, as a group that the script redraws."""
        values = ticks(self.most, max(2, int((self.right - self.left) / 75)))
        marks = [svg.line(self.left, y, self.right, y)]
        for value in values:
            x = self.at(value)
            marks.append(svg.line(x, y, x, y + 4))
            words = round_in_words(value, values[-1], self.measure)
            inside = self.right + EDGE - svg.text_width(words) / 2
            marks.append(svg.text(min(x, inside), y + 17, words, "middle"))
        return f'<g class="ticks" data-y="{svg.number(y)}">{"".join(marks)}</g>'


AXIS, EDGE = 24, 10
"""Units that the axis of a scale takes below its line, and that its words take beyond its end."""


def round_in_words(value: float, most: float, measure: Measure) -> str:
    """A tick's value, without the digits that a measured value has; all ticks have one unit.

    >>> round_in_words(0.2, 1, SHARE), round_in_words(0.5, 2, SECONDS), round_in_words(0, 1, BYTES)
    ('20%', '0.5 s', '0')
    >>> round_in_words(500e6, 2e9, BYTES)
    '0.5 GB'
    """
    if not value:
        return "0"
    if measure.unit == "tasks":
        return f"{value:,.6g}"
    if measure.unit == "%":
        return f"{value * 100:g}%"
    prefixes = {0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P", 18: "E", 21: "Z"}
    if measure.unit == "s":
        prefixes = {0: "", -3: "m", -6: "u", -9: "n"}
    scales = [power for power in prefixes if 10.0**power <= most * (1 + 1e-9)]
    power = max(scales, default=min(prefixes))
    return f"{value / 10.0**power:g} {prefixes[power]}{measure.unit}"


def ticks(most: float, about: int = 5) -> list[float]:
    """Round numbers from 0 up to `most` for an axis, no more than `about` and one.

    >>> ticks(81e9)
    [0.0, 20000000000.0, 40000000000.0, 60000000000.0, 80000000000.0]
    >>> ticks(0.3, 3)
    [0.0, 0.1, 0.2, 0.3]
    """
    if most <= 0:
        return [0.0]
    unit = 10.0 ** math.floor(math.log10(most / about))
    step = next(unit * n for n in (1, 2, 5, 10) if most / (unit * n) <= about * (1 + 1e-9))
    return [float(f"{step * n:.12g}") for n in range(int(most / step * (1 + 1e-9)) + 1)]
