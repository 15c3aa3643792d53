"""Curves over time, and distributions of times with their percentiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Float
from stagewright.numbers import duration
from stagewright.views.pictures import svg
from stagewright.views.pictures.colours import CURVES
from stagewright.views.pictures.scales import AXIS, EDGE, SECONDS, SHARE, Across, Frame, Measure

HEIGHT, LEFT = 250, 62
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
"""Percentiles that distributions mark."""


class Curve(NamedTuple):
    """A line through points, from left to right."""

    name: str
    across: Sequence[float]
    up: Sequence[float]
    meaning: str
    """A key of `colours.CURVES`."""

    @property
    def highest(self) -> float:
        """The largest value upwards."""
        return max(self.up, default=0.0)


def _paint(meaning: str) -> str:
    colour, dashes = CURVES[meaning]
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'fill="none" stroke="{colour}" stroke-width="2"{dashed}'


def _legend(entries: Sequence[tuple[str, str]]) -> tuple[str, float]:
    def patch(key: str, x: float, y: float) -> str:
        return f'<path d="M{svg.number(x)} {svg.number(y - 4)}h18" {_paint(key)}/>'

    return svg.legend(entries, patch)


def _frame(top: float, across: Across, high: float, measure: Measure) -> Frame:
    return Frame(across, Across(HEIGHT - AXIS - 16, top + 18, high, measure))


def _path(frame: Frame, line: Curve, title: str) -> str:
    path = "L".join(
        f"{svg.number(frame.across.at(x))} {svg.number(frame.up.at(y))}"
        for x, y in zip(line.across, line.up, strict=True)
    )
    return f'<path d="M{path}" {_paint(line.meaning)}>{svg.title(title)}</path>' if path else ""


def curves(
    lines: Sequence[Curve],
    label: str,
    across: tuple[str, Measure],
    up: tuple[str, Measure],
    shaded: tuple[float, float] | None = None,
) -> svg.Picture:
    """Curves by two measures; `shaded`: from 0 to the first value, and from the second on."""
    far = max((max(line.across, default=0.0) for line in lines), default=0.0)
    legend, top = _legend([(line.name, line.meaning) for line in lines])
    highest = max((line.highest for line in lines), default=0.0)
    scale = Across(LEFT, svg.WIDTH - EDGE, far, across[1])
    frame = _frame(top, scale, highest * 1.12, up[1])
    scale = scale._replace(left=max(LEFT, frame.room))
    frame = frame._replace(across=scale)
    parts = [legend, *frame.axes(across[0], up[0])]
    for begin, end in [] if shaded is None else [(0.0, shaded[0]), (shaded[1], far)]:
        if end > begin:
            x, wide = scale.at(begin), (end - begin) * scale.per_unit
            paint = 'fill="currentColor" opacity=".08"'
            parts.append(svg.rect(x, frame.top, wide, frame.bottom - frame.top, paint))
    for line in lines:
        parts.append(_path(frame, line, f"{line.name}: at the most {up[1].show(line.highest)}"))
    return svg.figure(HEIGHT, label, parts)


def distributions(times: Mapping[str, Float], label: str, limit: float | None) -> svg.Picture:
    """Shares of requests that take no longer than a time, which lies across.

    `times` are those of requests (s) by their meaning. p50, p90 and p99 are marked on each curve; a
    vertical line is the limit.
    """
    shares = np.concatenate([np.linspace(0, 0.99, 100), np.linspace(0.991, 1, 10)])
    times = {name: values for name, values in times.items() if len(values)}
    far = max((float(np.quantile(values, 0.99)) for values in times.values()), default=0.0)
    far = max(1.3 * far, 1.1 * (limit or 0.0))  # room for words beside p99
    entries = [(name, name) for name in times]
    if limit is not None:
        entries.append((f"limit {duration(limit)}", "limit"))
    legend, top = _legend(entries)
    frame = _frame(top, Across(LEFT, svg.WIDTH - EDGE, far, SECONDS), 1.0, SHARE)
    parts = [legend, *frame.axes("time", "share of requests")]
    if limit is not None:
        x = frame.across.at(limit)
        ends = f"M{svg.number(x)} {svg.number(frame.top)}V{svg.number(frame.bottom)}"
        words = svg.title(f"limit {duration(limit)}")
        parts.append(f'<path d="{ends}" {_paint("limit")}>{words}</path>')
    marks: list[str] = []
    for name, values in times.items():
        pairs = zip(np.quantile(values, shares).tolist(), shares.tolist(), strict=True)
        inside = [(time, share) for time, share in pairs if time <= far]
        line = Curve(name, [time for time, _ in inside], [share for _, share in inside], name)
        parts.append(_path(frame, line, name))
        for mark, share in PERCENTILES.items():
            time = float(np.quantile(values, share))
            x, y = frame.across.at(time), frame.up.at(share)
            marks.append(
                f'<circle cx="{svg.number(x)}" cy="{svg.number(y)}" r="4" '
                f'fill="{CURVES[name][0]}">{svg.title(f"{name} {mark}: {duration(time)}")}</circle>'
            )
            if name == next(iter(times)):  # those of a second curve would meet them
                words = f"{mark} {duration(time)}"
                left = x + 8 + svg.text_width(words) > svg.WIDTH
                anchor = "end" if left else "start"
                below = y + (18 if mark == "p90" else 5)
                marks.append(svg.text(x - 8 if left else x + 8, below, words, anchor))
    return svg.figure(HEIGHT, label, [*parts, *marks])
