"""Curves over time, distributions of times, and requests as bars from arrival to last token.

A colour means one thing on a page: `INKS` of curves and of parts of bars.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Float
from stagewright.numbers import duration
from stagewright.views.pictures import svg
from stagewright.views.pictures.chart import (
    AXIS,
    EDGE,
    SECONDS,
    SHARE,
    Across,
    Measure,
    round_in_words,
    ticks,
)

HEIGHT, LEFT = 240, 70
MOST_BARS = 120
"""Requests that are drawn; of more, some evenly from the first to the last."""


class Ink(NamedTuple):
    """Colour and dashes of a curve."""

    colour: str
    dashes: str = ""

    @property
    def paint(self) -> str:
        """Attributes of a path."""
        dashed = f' stroke-dasharray="{self.dashes}"' if self.dashes else ""
        return f'fill="none" stroke="{self.colour}" stroke-width="2"{dashed}'


INKS: Mapping[str, Ink] = {
    "queue": Ink(svg.ORANGE, "7 3"),
    "TTFT": Ink(svg.BLUE),
    "TPOT": Ink(svg.GREEN),
    "E2E": Ink(svg.PURPLE),
    "running": Ink(svg.SKY),
    "cache": Ink(svg.GREY),
    "fullest cache": Ink(svg.GREY, "7 3"),
    "limit": Ink(svg.VERMILLION, "9 4"),
}
"""Waiting is orange, the time to the first token blue, decode green, a whole request purple."""


class Curve(NamedTuple):
    """A line through points, from left to right."""

    name: str
    across: Sequence[float]
    up: Sequence[float]
    ink: Ink


def curves(
    lines: Sequence[Curve],
    label: str,
    across: tuple[str, Measure],
    up: tuple[str, Measure],
    width: int = svg.WIDTH,
    shaded: tuple[float, float] | None = None,
) -> svg.Picture:
    """Curves by two measures; `shaded`: from 0 to the first place, and from the second on."""
    far = max((max(line.across, default=0.0) for line in lines), default=0.0)
    scale = Across(LEFT, width - EDGE, far, across[1])
    legend, top = _legend([(line.name, line.ink) for line in lines], width)
    most = max((max(line.up, default=0.0) for line in lines), default=0.0) * 1.12
    frame = _Frame(scale, top, most)
    parts = [legend, *frame.axes(across[0], up, width)]
    for begin, end in [] if shaded is None else [(0.0, shaded[0]), (shaded[1], far)]:
        if end > begin:
            place = scale.at(begin), top + 14, (end - begin) * scale.per_unit
            parts.append(
                svg.rect(*place, frame.bottom - top - 14, 'fill="currentColor" opacity=".08"')
            )
    for line in lines:
        title = f"{line.name}: at the most {up[1].show(max(line.up, default=0.0))}"
        parts.append(frame.path(line, title))
    return svg.figure(HEIGHT, label, parts, width=width)


class _Frame(NamedTuple):
    """Scales of a chart of curves."""

    across: Across
    top: float
    most: float
    """Largest value upwards."""

    @property
    def bottom(self) -> float:
        return HEIGHT - AXIS - 16

    def y(self, value: float) -> float:
        return self.bottom - value * (self.bottom - self.top - 14) / (self.most or 1)

    def axes(self, across: str, up: tuple[str, Measure], width: int) -> list[str]:
        """Both axes with their names and ticks."""
        parts = [svg.text(4, self.top + 8, up[0]), self.across.axis(self.bottom)]
        parts.append(svg.text(width - EDGE, HEIGHT - 4, across, "end"))
        values = ticks(self.most)
        for value in values:
            y = self.y(value)
            parts.append(svg.line(LEFT - 4, y, LEFT, y))
            words = round_in_words(value, values[-1], up[1])
            parts.append(svg.text(LEFT - 7, y + 4, words, "end"))
        parts.append(svg.line(LEFT, self.top + 14, LEFT, self.bottom))
        return parts

    def path(self, line: Curve, title: str) -> str:
        """The line of a curve."""
        path = "L".join(
            f"{svg.number(self.across.at(x))} {svg.number(self.y(y))}"
            for x, y in zip(line.across, line.up, strict=True)
        )
        return f'<path d="M{path}" {line.ink.paint}>{svg.title(title)}</path>' if path else ""


def _legend(names: Sequence[tuple[str, Ink]], width: int) -> tuple[str, float]:
    parts: list[str] = []
    at, y = 0.0, 14.0
    for name, ink in names:
        wide = 34 + svg.text_width(name) + 14
        if at + wide > width and at > 0:
            at, y = 0.0, y + 20
        ends = f"M{svg.number(at)} {svg.number(y - 4)}h28"
        parts.append(f'<path d="{ends}" {ink.paint}/>' + svg.text(at + 34, y, name))
        at += wide
    return "".join(parts), y + 8


MARKED = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
"""Percentiles that distributions mark."""


def distributions(
    times: Mapping[str, Float], label: str, limit: float | None, width: int = svg.WIDTH
) -> svg.Picture:
    """Shares of requests that take no longer than a time, which lies across.

    `times` are those of requests (s) by the name of their ink. p50, p90 and p99 are marked on each
    curve; a vertical line is the limit.
    """
    shares = np.concatenate([np.linspace(0, 0.99, 100), np.linspace(0.991, 1, 10)])
    lines = [
        Curve(name, np.quantile(values, shares).tolist(), shares.tolist(), INKS[name])
        for name, values in times.items()
        if len(values)
    ]
    far = max(
        (float(np.quantile(values, 0.99)) for values in times.values() if len(values)), default=0.0
    )
    far = 1.1 * max(far, limit or 0.0)
    names = [(line.name, line.ink) for line in lines]
    if limit is not None:
        names.append((f"limit {duration(limit)}", INKS["limit"]))
    legend, top = _legend(names, width)
    frame = _Frame(Across(LEFT, width - EDGE, far, SECONDS), top, 1.0)
    parts = [legend, *frame.axes("time", ("share of requests", SHARE), width)]
    for line in lines:
        shown = [(x, y) for x, y in zip(line.across, line.up, strict=True) if x <= far]
        xs, ys = [x for x, _ in shown], [y for _, y in shown]
        parts.append(frame.path(line._replace(across=xs, up=ys), line.name))
        for mark, share in MARKED.items():
            value = float(np.quantile(times[line.name], share))
            x, y = frame.across.at(value), frame.y(share)
            words = f"{line.name} {mark}: {duration(value)}"
            parts.append(
                f'<circle cx="{svg.number(x)}" cy="{svg.number(y)}" r="4" '
                f'fill="{line.ink.colour}">{svg.title(words)}</circle>'
            )
            beside = f"{mark} {duration(value)}"
            left = x + 8 + svg.text_width(beside) > width
            parts.append(
                svg.text(x - 8 if left else x + 8, y + 13, beside, "end" if left else "start")
            )
    if limit is not None:
        x = frame.across.at(limit)
        ends = f"M{svg.number(x)} {svg.number(top + 14)}V{svg.number(frame.bottom)}"
        words = svg.title(f"limit {duration(limit)}")
        parts.append(f'<path d="{ends}" {INKS["limit"].paint}>{words}</path>')
    return svg.figure(HEIGHT, label, parts, width=width)


class RequestBar(NamedTuple):
    """A request: seconds at which its parts begin, and its end."""

    name: str
    begins: tuple[float, ...]
    """Of each part, in order; the end behind them."""


PARTS = ("queue", "prompt", "decode")
"""Of a request: until its first step, until its first token, until its last."""
_FILLS = {
    "queue": svg.Fill(svg.ORANGE, "/"),
    "prompt": svg.Fill(svg.BLUE),
    "decode": svg.Fill(svg.GREEN, "."),
}


def requests_over_time(
    bars: Sequence[RequestBar], name: str, label: str, width: int = svg.WIDTH
) -> svg.Picture:
    """A bar for each request, one below the other, in the order of arrival."""
    fills = svg.Fills(name, _FILLS)
    heading, y = fills.heading(PARTS, width)
    high = max(2.0, min(12.0, 360 / max(len(bars), 1)))
    scale = Across(10, width - EDGE, max((bar.begins[-1] for bar in bars), default=1.0), SECONDS)
    parts = [heading]
    for nth, bar in enumerate(bars):
        top = y + 6 + nth * high
        times = [
            f"{part} {duration(max(end - begin, 0.0))}"
            for part, begin, end in zip(PARTS, bar.begins, bar.begins[1:], strict=False)
        ]
        words = f"{bar.name}: {', '.join(times)}"
        for part, begin, end in zip(PARTS, bar.begins, bar.begins[1:], strict=False):
            wide = max((end - begin) * scale.per_unit, 0.0)
            if wide > 0:
                paint = f'fill="{fills[part]}"'
                parts.append(svg.rect(scale.at(begin), top, wide, high * 0.8, paint, words))
    bottom = y + 10 + len(bars) * high
    parts.append(scale.axis(bottom))
    return svg.figure(bottom + AXIS, label, parts, width=width)
