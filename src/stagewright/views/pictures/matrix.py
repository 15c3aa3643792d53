"""Who sends how much to whom, as a field of squares: senders down, receivers across."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Float
from stagewright.numbers import quantity
from stagewright.program.traffic import Matrix
from stagewright.views.pictures import svg

MOST_SIDE, CELL, TOP, LINE = 420, 34, 44, 22
COLOURS = ("#f89540", "#e97158", "#d35171", "#b6308b", "#9511a1", "#6700a8", "#0d0887")
"""From little to much: plasma, whose lightness alone tells them apart."""
LEAST = 1e-6
"""Squares with less than this share of the largest are left out: a norm's four bytes beside a
model's gradients."""
SPAN = 100.0
"""From the largest to this share of it, the colours go through all; further if data do."""
ALIKE = 0.8
"""Values of at least this share of the largest of them have one colour and one line of legend."""
MOST_LINES = 9
"""Lines of the legend at most; where values differ more, those of a colour share a line."""


class Shade(NamedTuple):
    """Bytes that are drawn in one colour, from the largest to the smallest."""

    high: float
    low: float
    level: int  # of COLOURS


def is_worth_drawing(size: float, most: float) -> bool:
    """Whether bytes show beside the largest of a step."""
    return size > LEAST * most


def shades(sizes: Sequence[float]) -> list[Shade]:
    """What the legend names, the largest first; values beside the largest as nothing are left out.

    >>> [(each.high, each.level) for each in shades([4.0, 0.5e9, 90e9, 100e9])]
    [(100000000000.0, 6), (500000000.0, 0)]
    """
    most = max(sizes, default=0.0)
    kept = sorted({size for size in sizes if size and is_worth_drawing(size, most)}, reverse=True)
    if not kept:
        return []
    span = math.log(max(SPAN, most / kept[-1]))
    last = len(COLOURS) - 1
    found: list[Shade] = []
    for size in kept:
        if found and size >= ALIKE * found[-1].high:
            found[-1] = found[-1]._replace(low=size)
        else:
            found.append(Shade(size, size, round(last * (1 - math.log(most / size) / span))))
    if len(found) <= MOST_LINES:
        return found
    by_level = [list(some) for _, some in itertools.groupby(found, key=lambda of: of.level)]
    return [some[0]._replace(low=some[-1].low) for some in by_level]


def picture(
    along: Matrix,
    name: str,
    label: str,
    parts: Mapping[str, Float] | None = None,
    width: int = svg.WIDTH,
) -> svg.Picture:
    """Squares coloured by the logarithm of bytes.

    `parts` are the bytes along each axis, where the matrix is of several: the legend names them.
    """
    count = len(along.bytes)
    left, field = _sides(along, width)
    cell = field / count
    rounded = np.vectorize(_three_digits, otypes=[float])(along.bytes)
    shown = shades(rounded.ravel().tolist())
    frame = 'fill="none" stroke="currentColor" stroke-opacity=".4"'
    drawn = [svg.rect(left, TOP, field, field, frame)]
    side = cell * (0.9 if cell > 4 else 1)
    for level in range(len(COLOURS)):
        mine = np.zeros(rounded.shape, dtype=bool)
        for each in shown:
            if each.level == level:
                mine |= (rounded <= each.high) & (rounded >= each.low)
        squares = [
            svg.box(
                left + (x + 0.5) * cell - side / 2, TOP + (y + 0.5) * cell - side / 2, side, side
            )
            for y, x in np.argwhere(mine).tolist()
        ]
        drawn.append(svg.shape(squares, COLOURS[level], more=f'class="level{level}"'))
    beside = width >= svg.NARROW
    where = (left + field + 28, TOP + 10.0) if beside else (0.0, TOP + field + 22)
    legend, bottom = _legend(shown, rounded, parts or {}, where)
    bottom = max(TOP + field, bottom) + 6
    drawn += [*_edges(along, left, field), *legend]
    drawn.append('<path class="cursor" d="" fill="none" stroke="currentColor" stroke-width="2"/>')
    place = f"{svg.number(left)} {TOP} {svg.number(field)}"
    more = f'tabindex="0" data-matrix="{name}" data-field="{place}" class="matrix"'
    return svg.figure(bottom, label, drawn, more, width=width)


def data(along: Matrix) -> dict[str, object]:
    """Data of the script that describes the square under the cursor: bytes, to three digits."""
    return {
        "edges": along.edges.tolist(),
        "bytes": [[_three_digits(x) for x in row] for row in along.bytes.tolist()],
    }


def _three_digits(size: float) -> float:
    return float(f"{size:.3g}") if size else 0


def _sides(along: Matrix, width: int) -> tuple[float, float]:
    """Where the field begins, and how long its sides are."""
    left = 30 + svg.text_width(f"{along.edges[-1]:,}")
    most = min(MOST_SIDE, CELL * max(4, len(along.bytes)))
    return left, min(most, width - left - 8)


def _edges(along: Matrix, left: float, field: float) -> list[str]:
    """Numbers of ranks, the same along both sides, as many as there is room for."""
    parts = [
        svg.text(left + field / 2, 14, "receiving rank", "middle"),
        f'<text transform="translate(14 {svg.number(TOP + field / 2)}) rotate(-90)" '
        'text-anchor="middle">sending rank</text>',
    ]
    count = len(along.bytes)
    cell = field / count
    room = max(16.0, svg.text_width(f"{along.edges[-1]:,} "))
    every = 2 ** max(0, math.ceil(math.log2(room / cell)))
    for nth in range(0, count, every):
        words = f"{int(along.edges[nth]):,}"
        parts.append(svg.text(left - 6, TOP + (nth + 0.5) * cell + 4, words, "end"))
        parts.append(svg.text(left + (nth + 0.5) * cell, TOP - 6, words, "middle"))
    return parts


def _legend(
    shown: Sequence[Shade],
    bytes_of: Float,
    parts: Mapping[str, Float],
    where: tuple[float, float],
) -> tuple[list[str], float]:
    """Colours with the bytes that they stand for, and along which axes; and where the list ends."""
    x, y = where
    if not shown:
        return [], y
    drawn = [svg.text(x, y, "bytes in a step")]
    for each in shown:
        y += LINE
        high, low = _bytes(each.high), _bytes(each.low)
        words = high if high == low else f"{low} to {high}"
        there = (bytes_of <= each.high) & (bytes_of >= each.low)
        # An axis that only adds a little to what others send is not what the colour stands for.
        axes = [a for a, of in parts.items() if (of[there] > 0.01 * bytes_of[there]).any()]
        paint = f'fill="{COLOURS[each.level]}" class="level{each.level}"'
        drawn.append(svg.rect(x, y - 12, 15, 15, paint))
        drawn.append(svg.text(x + 23, y, f"{words}: {', '.join(axes)}" if axes else words))
    return drawn, y + 6


def _bytes(size: float) -> str:
    return quantity(round(size), "B") if size >= 1 else "under 1 B"
