"""Parts of pictures as SVG text: fills, legends, shapes, lines, text, and the frame around them.

Each picture is one drawing of `WIDTH` units that stretches with its page. The layout has room for
text of `FONT` units, which a phone needs; where the picture is wider, a page sets smaller text.

>>> number(12.30), number(7.0), number(-0.04)
('12.3', '7', '0')
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

WIDTH = 600
"""Units across a picture."""
FONT = 15
"""Size in units of the largest text that a page may set."""
SMALL = 0.9
"""Size of labels on and below marks, as a share of other text."""
_ALONE = 'width="720" font-size="12"'
"""Width in pixels, and size of text in units, of a picture outside a page."""


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

    def file(self) -> str:
        """The text of a file of its own: black on white, with a margin."""
        _, _, width, height = re.findall(r"[\d.]+", self)[:4]
        box = f"-12 -12 {float(width) + 24:g} {float(height) + 24:g}"
        looks = 'style="max-width:100%;height:auto;background:#fff"'
        text = re.sub(r'viewBox="[^"]*"', f'color="#000" viewBox="{box}"', self, count=1)
        text = re.sub(r'style="[^"]*"', looks, text, count=1)
        return text.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1) + "\n"


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


UNKNOWN = Fill("#999999", "x")
"""The fill of a part without a meaning of its own."""

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
        """Small words on a fill, around a point: on a patch of its colour without the pattern."""
        fill = self._fills[key]
        wide = text_width(words, SMALL) + 4
        patch = ""
        if fill.pattern and fill.colour.startswith("#"):
            paint = f'fill="{fill.colour}" pointer-events="none"'
            patch = rect(x - wide / 2, y - 7, wide, 14, paint)
        more = f'fill="{fill.ink}" font-size="{SMALL}em" dy=".35em" pointer-events="none"'
        return patch + text(x, y, words, "middle", more)

    def _id(self, fill: Fill) -> str:
        # Named by its looks: two pictures of one name on a page mean the same by an id.
        return f"{self._name}-{fill.colour.lstrip('#')}-{list(_STROKES).index(fill.pattern)}"

    def heading(self, keys: Iterable[str]) -> tuple[str, float]:
        """The patterns and the legend at the top of a picture, and the height where it ends."""

        def patch(key: str, x: float, y: float) -> str:
            paint = f'fill="{self[key]}" stroke="currentColor" stroke-opacity=".35"'
            return rect(x, y - 11, 18, 13, paint)

        drawn, bottom = legend([(key.replace("_", " "), key) for key in keys], patch)
        return self.defs() + drawn, bottom


class _DrawPatch(Protocol):
    def __call__(self, key: str, x: float, y: float) -> str: ...


def legend(entries: Iterable[tuple[str, str]], patch: _DrawPatch) -> tuple[str, float]:
    """Words beside patches of 18 units, in lines, and the height at which the last line ends."""
    parts: list[str] = []
    x, y = 0.0, 14.0
    for words, key in entries:
        wide = 24 + text_width(words)
        if x + wide > WIDTH and x > 0:
            x, y = 0.0, y + 19
        parts.append(patch(key, x, y) + text(x + 23, y, words))
        x += wide + 14
    return "".join(parts), y + 8


def _opacity(fill: Fill) -> str:
    return f' fill-opacity="{fill.opacity:g}"' if fill.opacity < 1 else ""


def _stroke(fill: Fill) -> str:
    return "#fff" if fill.colour.startswith("#") else fill.colour


def number(x: float) -> str:
    """A coordinate as text, rounded to a tenth."""
    short = f"{x:.1f}".removesuffix(".0")
    return "0" if short == "-0" else short


_THIN, _BROAD = frozenset(" iIjl.,:;'!|()[]ftr/"), frozenset("mwMW@%+=<>GOQ")


def text_width(words: str, size: float = 1.0) -> float:
    """An estimate of the width of the largest text; `size` is a share of it.

    Letters are as wide as those of DejaVu Sans, which is broader than most.
    """
    ems = sum(0.42 if c in _THIN else 0.87 if c in _BROAD else 0.64 for c in words)
    return FONT * size * ems


def text(x: float, y: float, words: str, anchor: str = "", more: str = "") -> str:
    """A line of text; `anchor` is start, middle or end."""
    where = f' text-anchor="{anchor}"' if anchor and anchor != "start" else ""
    extra = f" {more}" if more else ""
    return f'<text x="{number(x)}" y="{number(y)}"{where}{extra}>{html.escape(words)}</text>'


def line(x0: float, y0: float, x1: float, y1: float, more: str = "") -> str:
    """A line in the colour of the text."""
    ends = f"M{number(x0)} {number(y0)}L{number(x1)} {number(y1)}"
    return f'<path d="{ends}" fill="none" stroke="currentColor"{" " if more else ""}{more}/>'


def limit(x0: float, y0: float, x1: float, y1: float, colour: str) -> str:
    """A dashed line at a limit, such as the memory of a device."""
    ends = f"M{number(x0)} {number(y0)}L{number(x1)} {number(y1)}"
    looks = f'stroke="{colour}" stroke-width="2" stroke-dasharray="9 4"'
    return f'<path d="{ends}" fill="none" {looks}/>'


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
    extra = f" {more}" if more else ""
    return f'<path{extra} d="{drawn}" fill="{fill}"' + (f">{title(name)}</path>" if name else "/>")


def title(words: str) -> str:
    """The text that appears where the mouse rests on a shape."""
    return f"<title>{html.escape(words)}</title>"


def figure(height: float, label: str, parts: Sequence[str], more: str = "") -> Picture:
    """The whole picture; `label` describes it for readers who do not see it."""
    extra = f" {more}" if more else ""
    return Picture(
        f'<svg viewBox="0 0 {WIDTH} {number(height)}" {_ALONE} role="img" '
        f'aria-label="{html.escape(label)}" font-family="system-ui,sans-serif" '
        f'fill="currentColor" style="max-width:100%;height:auto"{extra}>{"".join(parts)}</svg>'
    )
