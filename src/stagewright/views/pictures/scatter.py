"""Candidates of a search as points by two measures, on logarithmic axes."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import NamedTuple

from stagewright.views.pictures import svg
from stagewright.views.pictures.colours import CANDIDATE, FRONT, LIMIT
from stagewright.views.pictures.scales import AXIS, EDGE, Across, Frame, Measure

HEIGHT, LEFT = 330, 68
MARGIN = 1.08
"""Factor between the outermost points and the edges of the chart."""


class Point(NamedTuple):
    """A candidate and its label."""

    at: tuple[float, float]
    """Coordinates, above 0."""
    words: str
    link: str = ""
    """Where a click leads, within the page."""
    on_front: bool = False
    fits: bool = True
    best: bool = False


_LEGEND = {
    "best": f'r="7" fill="none" stroke="{FRONT}" stroke-width="3"',
    "on the front": f'r="5" fill="{FRONT}"',
    "other": f'r="3.5" fill="{CANDIDATE}"',
    "does not fit": f'r="3.5" fill="none" stroke="{LIMIT}" stroke-width="1.5"',
}
"""Looks of points by what they are."""


def _looks(point: Point) -> str:
    if not point.fits:
        return "does not fit"
    return "on the front" if point.on_front else "other"


def scatter(
    points: Sequence[Point],
    label: str,
    across: tuple[str, Measure],
    up: tuple[str, Measure],
    limits: Sequence[float] = (),
) -> svg.Picture:
    """Points by two measures; `limits` are values across at which a dashed line stands."""
    used = {_looks(point) for point in points} | (
        {"best"} if any(p.best for p in points) else {"-"}
    )
    legend, top = svg.legend([(key, key) for key in _LEGEND if key in used], _patch)
    xs = [point.at[0] for point in points] + [value for value in limits if value > 0]
    ys = [point.at[1] for point in points]
    frame = Frame(
        _log_scale(xs, LEFT, svg.WIDTH - EDGE, across[1]),
        _log_scale(ys, HEIGHT - AXIS - 16, top + 20, up[1]),
    )
    parts = [legend, *frame.axes(across[0], up[0])]
    for value in limits:
        x = frame.across.at(value)
        parts.append(svg.limit(x, frame.top, x, frame.bottom, LIMIT))
    for point in sorted(points, key=lambda point: (point.on_front and point.fits, point.best)):
        x, y = frame.across.at(point.at[0]), frame.up.at(point.at[1])
        dots = _circle(x, y, _LEGEND[_looks(point)], svg.title(point.words))
        if point.best:
            # Points of the front to the left of the best lie above it.
            right = x - 12 - svg.text_width("best") < LEFT
            dots += _circle(x, y, _LEGEND["best"], svg.title(point.words))
            dots += svg.text(x + 12 if right else x - 12, y + 6, "best", "" if right else "end")
        parts.append(f'<a href="#{html.escape(point.link)}">{dots}</a>' if point.link else dots)
    return svg.figure(HEIGHT, label, parts)


def _patch(key: str, x: float, y: float) -> str:
    return _circle(x + 9, y - 4.5, _LEGEND[key])


def _circle(x: float, y: float, looks: str, inside: str = "") -> str:
    return f'<circle cx="{svg.number(x)}" cy="{svg.number(y)}" {looks}>{inside}</circle>'


def _log_scale(values: Sequence[float], left: float, right: float, measure: Measure) -> Across:
    low, high = min(values, default=1.0), max(values, default=1.0)
    return Across(left, right, high * MARGIN, measure, low / MARGIN, log=True)
