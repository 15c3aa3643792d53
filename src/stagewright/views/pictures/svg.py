"""The parts of pictures: fills, legends, shapes, lines, text, axes, and the frame around them.

>>> number(12.30), number(7.0), number(-0.04)
('12.3', '7', '0')
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

WIDTH = 760
"""Units across every picture, so that all text on a page has one size."""


class Picture(str):
    """SVG text that a notebook shows as a picture."""

    def __repr__(self) -> str:
        return f"<picture, {len(self):,} characters of SVG>"

    def _repr_html_(self) -> str:
        return str(self)


class Fill(NamedTuple):
    """A colour and the pattern over it, which distinguishes fills where colours are not seen."""

    colour: str
    pattern: str = ""  # a key of _STROKES


# Okabe and Ito's colours, which people with any colour vision tell apart (jfly.uni-koeln.de/color).
BLUE, SKY, GREEN, ORANGE = "#0072B2", "#56B4E9", "#009E73", "#E69F00"
VERMILLION, PURPLE, YELLOW, GREY = "#D55E00", "#CC79A7", "#F0E442", "#999999"

CATEGORIES: Mapping[str, Fill] = {
    "parameters": Fill(BLUE),
    "gradients": Fill(SKY, "/"),
    "optimizer": Fill(GREY, "-"),
    "gathered_parameters": Fill(PURPLE, "x"),
    "activations": Fill(ORANGE, "."),
    "communication": Fill(GREEN, "\\"),
    "workspace": Fill(VERMILLION, "|"),
    "allowance": Fill(YELLOW, "+"),
    "kv_cache": Fill(SKY, "/"),
}
"""Fills of the categories of memory."""

PHASES: Mapping[str, Fill] = {
    "forward": Fill(SKY),
    "recompute": Fill(PURPLE, "x"),
    "backward": Fill(ORANGE, "/"),
    "optimizer": Fill(GREY, "-"),
}

BUBBLE = Fill("#e6e6e6", ".")
"""The fill of time in which a rank waits."""

_AXES = {
    "tp": Fill(BLUE, "."),
    "dp": Fill(VERMILLION, "|"),
    "pp": Fill(GREEN, "\\"),
    "ep": Fill(YELLOW, "+"),
    "cp": Fill(PURPLE, "/"),
}
_OTHERS = (Fill(SKY, "x"), Fill(ORANGE, "-"), Fill(GREY, "/"), Fill("#222222", "."))


def axes(names: Sequence[str]) -> dict[str, Fill]:
    """Fills of communication along axes; from the fifth fused axis on, fills repeat."""
    fused = [name for name in names if name not in _AXES]
    others = {name: _OTHERS[nth % len(_OTHERS)] for nth, name in enumerate(fused)}
    return {name: _AXES.get(name) or others[name] for name in names}


_STROKES = {
    "/": "M-2 2L2 -2M0 8L8 0M6 10L10 6",
    "\\": "M-2 6L2 10M0 0L8 8M6 -2L10 2",
    "-": "M0 4H8",
    "|": "M4 0V8",
    "x": "M0 0L8 8M0 8L8 0",
    "+": "M4 0V8M0 4H8",
    ".": "M3 4a1 1 0 1 0 2 0a1 1 0 1 0 -2 0",
}


class Fills:
    """The fills of one picture, by the category that each stands for."""

    def __init__(self, name: str, fills: Mapping[str, Fill]) -> None:
        """`name` begins the ids of the patterns."""
        self._name = name
        self._fills = fills

    def __getitem__(self, key: str) -> str:
        """The value of the attribute `fill`: a colour, or a reference to a pattern."""
        fill = self._fills[key]
        if not fill.pattern:
            return fill.colour
        return f"url(#{self._id(fill)})"

    def defs(self) -> str:
        """The definitions of the patterns."""
        patterns = "".join(
            f'<pattern id="{self._id(fill)}" width="8" height="8" patternUnits="userSpaceOnUse">'
            f'<path d="M0 0H8V8H0z" fill="{fill.colour}"/><path d="{_STROKES[fill.pattern]}" '
            'fill="none" stroke="#fff" stroke-opacity=".75" stroke-width="1.3"/></pattern>'
            for fill in dict.fromkeys(self._fills.values())
            if fill.pattern
        )
        return f"<defs>{patterns}</defs>" if patterns else ""

    def _id(self, fill: Fill) -> str:
        # Named by its looks: two pictures of one name on a page mean the same by an id.
        return f"{self._name}-{fill.colour[1:]}-{list(_STROKES).index(fill.pattern)}"

    def legend(self, keys: Iterable[str], x: float = 0, y: float = 14) -> tuple[str, float]:
        """A patch and a name for each key, in lines, and the height at which the last line ends."""
        parts: list[str] = []
        at = x
        for key in keys:
            words = key.replace("_", " ")
            wide = 24 + text_width(words) + 14
            if at + wide > WIDTH and at > x:
                at, y = x, y + 20
            parts.append(rect(at, y - 11, 16, 13, f'fill="{self[key]}"') + text(at + 21, y, words))
            at += wide
        return "".join(parts), y + 8

    def heading(self, keys: Iterable[str]) -> tuple[str, float]:
        """The patterns and the legend at the top of a picture, and where the legend ends."""
        legend, bottom = self.legend(keys)
        return self.defs() + legend, bottom


def number(x: float) -> str:
    """A coordinate as text, rounded to a tenth."""
    short = f"{x:.1f}".removesuffix(".0")
    return "0" if short == "-0" else short


def text_width(words: str, size: float = 12) -> float:
    """An estimate of the width of a text, whose font the reader's system chooses."""
    return 0.57 * size * len(words)


def text(x: float, y: float, words: str, anchor: str = "", more: str = "") -> str:
    """A line of text; `anchor` is start, middle or end."""
    where = f' text-anchor="{anchor}"' if anchor and anchor != "start" else ""
    extra = f" {more}" if more else ""
    return f'<text x="{number(x)}" y="{number(y)}"{where}{extra}>{html.escape(words)}</text>'


def line(x0: float, y0: float, x1: float, y1: float, more: str = "") -> str:
    """A line in the colour of the text."""
    ends = f"M{number(x0)} {number(y0)}L{number(x1)} {number(y1)}"
    return f'<path d="{ends}" fill="none" stroke="currentColor"{" " if more else ""}{more}/>'


def limit(x0: float, y0: float, x1: float, y1: float) -> str:
    """A dashed line at a limit, such as the memory of a device."""
    return line(x0, y0, x1, y1, 'stroke-width="2" stroke-dasharray="9 4"')


def rect(x: float, y: float, width: float, height: float, paint: str, name: str = "") -> str:
    """A rectangle; `paint` are its attributes from the fill on, `name` is its title."""
    where = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
    return f"<rect {where} {paint}" + (f">{title(name)}</rect>" if name else "/>")


def box(x: float, y: float, width: float, height: float) -> str:
    """A rectangle as a part of the path of a shape."""
    across = number(width)
    return f"M{number(x)} {number(y)}h{across}v{number(height)}h-{across}z"


def shape(path: Iterable[str], fill: str, name: str = "", more: str = "") -> str:
    """A filled path; `name` is its title, `more` are other attributes. Empty where the path is."""
    drawn = "".join(path)
    if not drawn:
        return ""
    kind = f" {more}" if more else ""
    return f'<path{kind} d="{drawn}" fill="{fill}"' + (f">{title(name)}</path>" if name else "/>")


ON_FILL = 'fill="#000" stroke="#fff" stroke-width="3" paint-order="stroke"'
"""Text on a fill: black in a white rim, on any colour and pattern."""


def title(words: str) -> str:
    """The text that appears where the mouse rests on a shape."""
    return f"<title>{html.escape(words)}</title>"


def figure(
    height: float, label: str, parts: Sequence[str], more: str = "", width: float = WIDTH
) -> Picture:
    """The whole picture; `label` describes it for readers who do not see it."""
    extra = f" {more}" if more else ""
    return Picture(
        f'<svg viewBox="0 0 {number(width)} {number(height)}" width="{number(width)}" role="img" '
        f'aria-label="{html.escape(label)}" font-family="system-ui,sans-serif" font-size="12" '
        f'fill="currentColor" style="max-width:100%;height:auto"{extra}>{"".join(parts)}</svg>'
    )


def ticks(most: float, about: int = 5) -> list[float]:
    """Three to six round numbers from 0 up to `most`, for an axis.

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
