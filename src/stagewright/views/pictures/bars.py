"""Bars made of parts, one below the other: memory by category, time by phase, bytes by axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stagewright.numbers import spans
from stagewright.views.pictures import svg
from stagewright.views.pictures.colours import LIMIT
from stagewright.views.pictures.scales import AXIS, Across, Measure

LINE, THICK, GAP = 16, 16, 8
MAX_BARS = 32
"""Bars that a picture shows at most."""


class StackedBar(NamedTuple):
    """A bar made of parts: its name, and the length of each part."""

    label: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """The length of the whole bar."""
        return sum(self.parts.values())


class Limit(NamedTuple):
    """A length that bars are compared with, and its name."""

    value: float
    name: str


def merge_equal(parts: Sequence[tuple[int, Mapping[str, float]]], name: str) -> list[StackedBar]:
    """One bar for all numbers with equal parts, in the order of their first number.

    >>> merge_equal([(0, {"a": 2}), (1, {"a": 1}), (2, {"a": 1})], "stage")
    [StackedBar(label='stage 0', parts={'a': 2}), StackedBar(label='stages 1-2', parts={'a': 1})]
    """
    numbers_of: dict[tuple[tuple[str, float], ...], set[int]] = {}
    for number, lengths in parts:
        numbers_of.setdefault(tuple(lengths.items()), set()).add(number)
    return [
        StackedBar(f"{name}{'s' * (len(numbers) > 1)} {spans(sorted(numbers), 2)}", dict(key))
        for key, numbers in numbers_of.items()
    ]


def picture(
    bars: Sequence[StackedBar],
    fills: Mapping[str, svg.Fill],
    name: str,
    label: str,
    measure: Measure,
    limit: Limit | None = None,
) -> svg.Picture:
    """The bars over a scale, with the values of all parts in words, and a line at the limit.

    Of more than `MAX_BARS` bars, the picture has the largest.
    """
    left_out = max(0, len(bars) - MAX_BARS)
    if left_out:
        smallest = sorted(range(len(bars)), key=lambda i: bars[i].total)[:left_out]
        bars = [bar for i, bar in enumerate(bars) if i not in set(smallest)]
    names = {key for bar in bars for key in bar.parts} - fills.keys()
    fills = {**fills, **dict.fromkeys(sorted(names), svg.UNKNOWN)}
    used = [key for key in fills if any(bar.parts.get(key) for bar in bars)]
    chosen = svg.Fills(name, {key: fills[key] for key in used})
    heading, y = chosen.heading(used)
    longest = max((bar.total for bar in bars), default=0.0)
    if limit is not None and limit.value < 3 * longest:
        longest = max(longest, limit.value)
    across = Across(0, svg.WIDTH - 22, longest, measure)
    y += 8 if limit is None else 24
    parts = [heading]
    limit_at = None
    if limit is not None and limit.value <= longest * 1.001:
        limit_at = across.at(limit.value)
        half = svg.text_width(limit.name) / 2
        middle = min(max(limit_at, half), svg.WIDTH - half)
        parts.append(svg.text(middle, y - 9, limit.name, "middle"))
    for bar in bars:
        row, y = _row(bar, chosen, y, across, limit_at)
        parts.append(row)
    parts.append(across.axis(y))
    y += AXIS
    if left_out:
        y += LINE
        parts.append(svg.text(0, y - 4, f"{left_out} smaller bars are not shown"))
    return svg.figure(y, label, parts, 'class="bars"')


def _row(
    bar: StackedBar, fills: svg.Fills, y: float, across: Across, limit: float | None
) -> tuple[str, float]:
    """A bar below its name and total, with the values of its parts, and where the next begins."""
    show = across.measure.show
    parts = [svg.text(across.left, y + 12, f"{bar.label}: {show(bar.total)}")]
    y += 17
    marks: list[str] = []
    labels: list[str] = []
    small: list[str] = []
    x = across.left
    for key, size in bar.parts.items():
        if not size:
            continue
        wide = size * across.per_unit
        value = show(size)
        words = f"{key} {value}".replace("_", " ")
        paint = f'fill="{fills[key]}"'
        marks.append(svg.rect(x, y, max(wide, 0.3), THICK, paint, f"{bar.label}: {words}"))
        if wide > svg.text_width(value, svg.SMALL) + 6:
            labels.append(fills.label(key, x + wide / 2, y + THICK / 2, value))
        elif value.strip("0.% "):
            small.append(words)
        x += wide
    parts.append(f'<g class="marks">{"".join(marks)}</g>{"".join(labels)}')
    if limit is not None:
        parts.append(svg.limit(limit, y - 3, limit, y + THICK + 3, LIMIT))
        y += 3
    y += THICK
    # The colour of a part with its value inside is in the legend; others need name and value.
    for line in _lines(small, across.right - across.left):
        y += LINE
        parts.append(svg.text(across.left, y - 3, line, more=f'font-size="{svg.SMALL}em"'))
    return "".join(parts), y + GAP


def _lines(words: Sequence[str], width: float) -> list[str]:
    """Phrases in lines no longer than the width, if no phrase is.

    >>> _lines(["dp exposed 1.0%", "pp exposed 0.3%", "bubble 4.0%"], 300)
    ['dp exposed 1.0%, pp exposed 0.3%,', 'bubble 4.0%']
    """
    lines: list[str] = []
    for i, phrase in enumerate(words):
        phrase += "," if i + 1 < len(words) else ""
        if lines and svg.text_width(f"{lines[-1]} {phrase}", svg.SMALL) <= width:
            lines[-1] += f" {phrase}"
        else:
            lines.append(phrase)
    return lines
