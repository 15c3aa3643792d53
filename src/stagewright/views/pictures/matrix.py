"""Who sends how much to whom, as a field of squares: senders down, receivers across."""

from __future__ import annotations

import math

import numpy as np

from stagewright.numbers import quantity
from stagewright.time.traffic import Matrix
from stagewright.views.pictures import svg

MOST_SIDE, CELL, LEFT, TOP = 420, 34, 96, 44
LEVELS = ("#c6dbef", "#9ecae1", "#6baed6", "#3182bd", "#08519c")
"""Light to dark, five steps of ColorBrewer's Blues; squares also grow from step to step."""


def side_of(matrix: Matrix) -> int:
    """The length of the sides of the field."""
    return min(MOST_SIDE, CELL * max(4, len(matrix.bytes)))


def picture(matrix: Matrix, name: str, label: str) -> svg.Picture:
    """Squares by the logarithm of bytes: each step of colour and size is the same factor."""
    count = len(matrix.bytes)
    most = float(matrix.bytes.max(initial=0))
    sent = matrix.bytes > 0
    least = float(matrix.bytes[sent].min()) if sent.any() else most
    field = side_of(matrix)
    cell = field / count
    # Steps of a tenth or less of the largest say more than those of the smallest messages.
    factor = max(2.0, (most / least) ** (1 / len(LEVELS))) if most else 2.0
    bounds = [most / factor**nth for nth in range(len(LEVELS))]
    level = np.full(matrix.bytes.shape, -1)
    with np.errstate(divide="ignore"):
        steps = np.floor(np.log(most / matrix.bytes[sent]) / math.log(factor) + 1e-9)
    level[sent] = np.clip(len(LEVELS) - 1 - steps, 0, len(LEVELS) - 1).astype(int)
    parts = [
        svg.rect(LEFT, TOP, field, field, 'fill="#fff" stroke="currentColor" stroke-opacity=".4"')
    ]
    for nth, colour in enumerate(LEVELS):
        side = cell * (0.45 + 0.5 * (nth + 1) / len(LEVELS))
        squares = [
            svg.box(
                LEFT + (x + 0.5) * cell - side / 2, TOP + (y + 0.5) * cell - side / 2, side, side
            )
            for y, x in np.argwhere(level == nth).tolist()
        ]
        if squares:
            parts.append(f'<path d="{"".join(squares)}" fill="{colour}" stroke="none"/>')
    parts += [*_edges(matrix, cell), *_legend(bounds, least, cell, LEFT + field + 28)]
    parts.append('<path class="cursor" d="" fill="none" stroke="currentColor" stroke-width="2"/>')
    more = f'tabindex="0" data-matrix="{name}" class="matrix"'
    return svg.figure(TOP + max(field, 150) + 12, label, parts, more)


def data(matrix: Matrix) -> dict[str, object]:
    """Data of the script that describes the square under the cursor: bytes, to three digits."""
    return {
        "edges": matrix.edges.tolist(),
        "left": LEFT,
        "top": TOP,
        "side": side_of(matrix),
        "bytes": [[float(f"{x:.3g}") if x else 0 for x in row] for row in matrix.bytes.tolist()],
    }


def _edges(matrix: Matrix, cell: float) -> list[str]:
    """Numbers of ranks along both sides, as many as there is room for."""
    field = side_of(matrix)
    parts = [
        svg.text(LEFT + field / 2, 14, "receiving rank", "middle"),
        f'<text transform="translate(14 {svg.number(TOP + field / 2)}) rotate(-90)" '
        'text-anchor="middle">sending rank</text>',
    ]
    count = len(matrix.bytes)
    every = max(1, math.ceil(14 / cell))
    across = max(1, math.ceil(svg.text_width(f"{matrix.edges[-1]:,}  ") / cell))
    first = matrix.edges[:-1].tolist()
    for nth in range(0, count, every):
        y = TOP + (nth + 0.5) * cell + 4
        parts.append(svg.text(LEFT - 6, y, f"{first[nth]:,}", "end"))
    for nth in range(0, count, across):
        parts.append(svg.text(LEFT + (nth + 0.5) * cell, TOP - 6, f"{first[nth]:,}", "middle"))
    return parts


def _bytes(size: float) -> str:
    return quantity(round(size), "B") if size >= 1 else "under 1 B"


def _legend(bounds: list[float], least: float, cell: float, x: float) -> list[str]:
    """The bytes that squares stand for, from the largest down."""
    if not bounds[0]:
        return []
    y = TOP + 10.0
    parts = [svg.text(x, y, "bytes in a step")]
    big = min(cell, 22.0)
    for nth in range(len(LEVELS)):
        high = bounds[nth]
        low = bounds[nth + 1] if nth + 1 < len(bounds) else least
        if high < least * (1 - 1e-9):
            break
        y += 26
        side = big * (0.45 + 0.5 * (len(LEVELS) - nth) / len(LEVELS))
        paint = f'fill="{LEVELS[-1 - nth]}"'
        parts.append(svg.rect(x + (big - side) / 2, y - 5 - side / 2, side, side, paint))
        low, words = _bytes(max(low, least)), _bytes(high)
        parts.append(svg.text(x + big + 10, y, words if low == words else f"{low} to {words}"))
    return parts
