"""Curves over time or over shares, and requests as bars from their arrival to their last token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Float
from stagewright.numbers import duration
from stagewright.views.pictures import svg
from stagewright.views.pictures.chart import (
    AXIS,
    EDGE,
    SECONDS,
    Across,
    Measure,
    round_in_words,
    ticks,
)

HEIGHT, LEFT = 240, 70
MOST_BARS = 120
"""Requests that are drawn; of more, some evenly from the first to the last."""
_INKS = (svg.BLUE, svg.VERMILLION, svg.GREEN, svg.PURPLE, svg.ORANGE)
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 4")


class Curve(NamedTuple):
    """A line through points, from left to right."""

    name: str
    across: Sequence[float]
    up: Sequence[float]


def curves(
    some: Sequence[Curve],
    label: str,
    across: tuple[str, Measure],
    up: tuple[str, Measure],
    width: int = svg.WIDTH,
) -> svg.Picture:
    """Curves by two measures, told apart by colour and by dashes."""
    most = max((max(of.up, default=0.0) for of in some), default=0.0)
    far = max((max(of.across, default=0.0) for of in some), default=0.0)
    scale = Across(LEFT, width - EDGE, far, across[1])
    legend, top = _legend(some, width)
    bottom = HEIGHT - AXIS - 16
    per_unit = (bottom - top - 14) / (most * 1.12 or 1)
    parts = [legend, svg.text(4, top + 8, up[0]), scale.axis(bottom)]
    parts.append(svg.text(width - EDGE, HEIGHT - 4, across[0], "end"))
    values = ticks(most * 1.12)
    for value in values:
        y = bottom - value * per_unit
        parts.append(svg.line(LEFT - 4, y, LEFT, y))
        parts.append(svg.text(LEFT - 7, y + 4, round_in_words(value, values[-1], up[1]), "end"))
    parts.append(svg.line(LEFT, top + 14, LEFT, bottom))
    for nth, of in enumerate(some):
        path = "L".join(
            f"{svg.number(scale.at(x))} {svg.number(bottom - y * per_unit)}"
            for x, y in zip(of.across, of.up, strict=True)
        )
        title = f"{of.name}: at the most {up[1].show(max(of.up, default=0.0))}"
        parts.append(f'<path d="M{path}" {_ink(nth)}>{svg.title(title)}</path>' if path else "")
    return svg.figure(HEIGHT, label, parts, width=width)


def _ink(nth: int) -> str:
    dashes = _DASHES[nth % len(_DASHES)]
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'fill="none" stroke="{_INKS[nth % len(_INKS)]}" stroke-width="2"{dashed}'


def _legend(some: Sequence[Curve], width: int) -> tuple[str, float]:
    parts: list[str] = []
    at, y = 0.0, 14.0
    for nth, of in enumerate(some):
        wide = 34 + svg.text_width(of.name) + 14
        if at + wide > width and at > 0:
            at, y = 0.0, y + 20
        ends = f"M{svg.number(at)} {svg.number(y - 4)}h28"
        parts.append(f'<path d="{ends}" {_ink(nth)}/>' + svg.text(at + 34, y, of.name))
        at += wide
    return "".join(parts), y + 8


class RequestBar(NamedTuple):
    """A request: seconds at which its parts begin, and its end."""

    name: str
    begins: tuple[float, ...]
    """Of each part, in order; the end behind them."""


PARTS = ("queue", "prompt", "decode")
"""Of a request: until its first step, until its first token, until its last."""
_FILLS = {"queue": svg.BUBBLE, "prompt": svg.Fill(svg.ORANGE, "/"), "decode": svg.Fill(svg.SKY)}


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


def percentiles(name: str, values: Float) -> Curve:
    """Values by the share of requests that have no larger one."""
    shares = np.linspace(0, 1, 101)
    found = np.quantile(values, shares) if len(values) else np.zeros(0)
    return Curve(name, shares[: len(found)].tolist(), found.tolist())
