"""Scatter plot of the candidates of a search."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import NamedTuple

from stagewright.views.pictures import svg
from stagewright.views.pictures.chart import AXIS, EDGE, Across, Measure, round_in_words, ticks

HEIGHT = 320
LEFT = 70


class Point(NamedTuple):
    """A point and its label."""

    at: tuple[float, float]
    """Coordinates, 0 or above."""
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
