"""Points in two dimensions, and lines through several scales: the candidates of a search."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import NamedTuple

from stagewright.views.pictures import svg
from stagewright.views.pictures.chart import AXIS, EDGE, Across, Measure, round_in_words, ticks

HEIGHT = 320
LEFT = 70


class Point(NamedTuple):
    """A point, or a line through the scales: its place on each, 0 or above, and what it is."""

    at: tuple[float, ...]
    words: str
    link: str = ""
    """Where a click leads, within the page."""
    marked: bool = False


def scatter(
    points: Sequence[Point],
    label: str,
    across: tuple[str, Measure],
    up: tuple[str, Measure],
    width: int = svg.WIDTH,
    limits: Sequence[float] = (),
) -> svg.Picture:
    """Points by two measures; those that are marked are larger, and in front.

    `limits` are values across at which a dashed line stands.
    """
    most_x = max([point.at[0] for point in points] + list(limits), default=1.0)
    most_y = max([point.at[1] for point in points], default=1.0)
    scale = Across(LEFT, width - EDGE, most_x * 1.03, across[1])
    bottom = HEIGHT - AXIS - 16
    per_unit = (bottom - 24) / (most_y * 1.05 or 1)
    parts = [scale.axis(bottom), svg.text(width - EDGE, HEIGHT - 4, across[0], "end")]
    parts.append(svg.text(4, 14, up[0]))
    values = ticks(most_y * 1.05)
    for value in values:
        y = bottom - value * per_unit
        parts.append(svg.line(LEFT - 4, y, LEFT, y))
        parts.append(svg.text(LEFT - 7, y + 4, round_in_words(value, values[-1], up[1]), "end"))
    parts.append(svg.line(LEFT, 20, LEFT, bottom))
    parts += [svg.limit(scale.at(x), 20, scale.at(x), bottom) for x in limits]
    for point in sorted(points, key=lambda point: point.marked):
        x, y = scale.at(point.at[0]), bottom - point.at[1] * per_unit
        parts.append(_linked(_dot(x, y, point), point.link))
    return svg.figure(HEIGHT, label, parts, width=width)


def _dot(x: float, y: float, point: Point) -> str:
    radius, paint = (5, svg.VERMILLION) if point.marked else (3, svg.BLUE)
    opacity = "" if point.marked else ' fill-opacity="0.5"'
    return (
        f'<circle cx="{svg.number(x)}" cy="{svg.number(y)}" r="{radius}" fill="{paint}"{opacity}>'
        f"{svg.title(point.words)}</circle>"
    )


def _linked(drawn: str, link: str) -> str:
    return f'<a href="#{html.escape(link)}">{drawn}</a>' if link else drawn


class Coordinate(NamedTuple):
    """A scale of parallel coordinates: its name and the words at its ticks, from the bottom."""

    name: str
    words: Sequence[str]


def parallel(
    lines: Sequence[Point], scales: Sequence[Coordinate], label: str, width: int = svg.WIDTH
) -> svg.Picture:
    """A line for each candidate through one scale for each setting; `at` is 0 to 1 on each."""
    top, bottom = 34, HEIGHT - 10
    step = (width - LEFT - EDGE - 30) / max(len(scales) - 1, 1)
    places = [LEFT + nth * step for nth in range(len(scales))]

    def y_of(share: float) -> float:
        return bottom - share * (bottom - top)

    parts: list[str] = []
    for of in sorted(lines, key=lambda of: of.marked):
        path = "L".join(
            f"{svg.number(x)} {svg.number(y_of(share))}"
            for x, share in zip(places, of.at, strict=True)
        )
        ink, thick = (svg.VERMILLION, 2) if of.marked else (svg.BLUE, 1)
        opacity = 1 if of.marked else 0.25
        drawn = (
            f'<path d="M{path}" fill="none" stroke="{ink}" stroke-width="{thick}" '
            f'stroke-opacity="{opacity}">{svg.title(of.words)}</path>'
        )
        parts.append(_linked(drawn, of.link))
    for nth, (x, scale) in enumerate(zip(places, scales, strict=True)):
        parts.append(svg.line(x, top, x, bottom))
        parts.append(svg.text(x, 12 + 13 * (nth % 2), scale.name, "middle"))
        count = max(len(scale.words) - 1, 1)
        for place, word in enumerate(scale.words):
            y = y_of(place / count) + 4
            parts.append(svg.text(x + 4, y, word))
    return svg.figure(HEIGHT, label, parts, width=width)
