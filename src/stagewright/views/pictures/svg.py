"""The parts of pictures: fills, legends, shapes, lines, text, and the frame around them.

>>> number(12.30), number(7.0), number(-0.04)
('12.3', '7', '0')
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

WIDTH = 760
"""Units across a picture where nothing else is asked for, so that text has one size."""
NARROW = 520
"""Units across below which names stand above what they name, not beside it."""
FONT = 12
"""The size of text in units."""


class Picture(str):
    """SVG text that a notebook shows as a picture, and a template of a page takes as it is.

    `figure` makes it of parts whose words are escaped; nothing else does.
    """

    def __repr__(self) -> str:
        return f"<picture, {len(self):,} characters of SVG>"

    def _repr_html_(self) -> str:
        return str(self)

    def __html__(self) -> str:
        return str(self)


class Fill(NamedTuple):
    """A colour and the pattern over it, which distinguishes fills where colours are not seen."""

    colour: str  # of six hexadecimal digits, or currentColor: that of the text
    pattern: str = ""  # a key of _STROKES
    opacity: float = 1.0  # of the colour, not of the pattern

    @property
    def ink(self) -> str:
        """The colour of text on this fill: whichever of black and white stands out more."""
        if not self.colour.startswith("#"):
            return "currentColor"
        red, green, blue = (int(self.colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
        # The relative luminance of WCAG 2.2 with a gamma of 2.2; 0.18 is as far from both.
        light = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2
        return "#000" if light > 0.18 else "#fff"


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

BUBBLE = Fill("currentColor", ".", 0.1)
"""The fill of time in which a rank waits: fainter than any work, on light and on dark."""
LAUNCHES = Fill("currentColor", "-", 0.25)
"""The fill of time in which a rank waits for its host."""

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
            f'<path d="M0 0H8V8H0z" fill="{fill.colour}"{_opacity(fill)}/>'
            f'<path d="{_STROKES[fill.pattern]}" fill="none" stroke="{_stroke(fill)}" '
            f'stroke-opacity="{0.4 if fill.opacity == 1 else 0.2}"/></pattern>'
            for fill in dict.fromkeys(self._fills.values())
            if fill.pattern
        )
        return f"<defs>{patterns}</defs>" if patterns else ""

    def label(self, key: str, x: float, y: float, words: str) -> str:
        """Words on a fill, around `x`: on a patch of its colour without the pattern."""
        fill = self._fills[key]
        wide = text_width(words) + 6
        patch = ""
        if fill.pattern and fill.colour.startswith("#"):
            paint = f'fill="{fill.colour}" pointer-events="none"'
            patch = rect(x - wide / 2, y - 11, wide, 14, paint)
        more = f'fill="{fill.ink}" pointer-events="none"'
        return f'<g data-x="{number(x)}">{patch}{text(x, y, words, "middle", more)}</g>'

    def _id(self, fill: Fill) -> str:
        # Named by its looks: two pictures of one name on a page mean the same by an id.
        return f"{self._name}-{fill.colour.lstrip('#')}-{list(_STROKES).index(fill.pattern)}"

    def legend(self, keys: Iterable[str], width: float = WIDTH) -> tuple[str, float]:
        """A patch and a name for each key, in lines, and the height at which the last line ends."""
        parts: list[str] = []
        at, y = 0.0, 14.0
        for key in keys:
            words = key.replace("_", " ")
            wide = 24 + text_width(words) + 14
            if at + wide > width and at > 0:
                at, y = 0.0, y + 20
            paint = f'fill="{self[key]}" stroke="currentColor" stroke-opacity=".35"'
            parts.append(rect(at, y - 11, 16, 13, paint) + text(at + 21, y, words))
            at += wide
        return "".join(parts), y + 8

    def heading(self, keys: Iterable[str], width: float = WIDTH) -> tuple[str, float]:
        """The patterns and the legend at the top of a picture, and where the legend ends."""
        legend, bottom = self.legend(keys, width)
        return self.defs() + legend, bottom


def _opacity(fill: Fill) -> str:
    return f' fill-opacity="{fill.opacity:g}"' if fill.opacity < 1 else ""


def _stroke(fill: Fill) -> str:
    return "#fff" if fill.colour.startswith("#") else fill.colour


def number(x: float) -> str:
    """A coordinate as text, rounded to a tenth."""
    short = f"{x:.1f}".removesuffix(".0")
    return "0" if short == "-0" else short


_THIN, _BROAD = frozenset(" iIjl.,:;'!|()[]ftr/"), frozenset("mwMW@%+=<>GOQ")


def text_width(words: str, size: float = FONT) -> float:
    """An estimate of the width of a text, whose font the reader's system chooses.

    Letters are as wide as those of DejaVu Sans, which is broader than most.
    """
    ems = sum(0.42 if c in _THIN else 0.87 if c in _BROAD else 0.64 for c in words)
    return size * ems


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
