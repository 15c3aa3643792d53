"""Bars made of parts, one below the other: memory by category, time by phase, bytes by axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stagewright.numbers import spans
from stagewright.views.pictures import svg
from stagewright.views.pictures.chart import AXIS, Across, Measure

THICK, GAP, LINE = 18, 9, 15
MOST = 40
"""Bars that a picture shows at most."""
MOST_LEFT = 190
"""Units that names take beside the bars at most."""


class StackedBar(NamedTuple):
    """A bar made of parts: its name, and the length of each part."""

    label: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """The length of the whole bar."""
        return sum(self.parts.values())


class Limit(NamedTuple):
    """A length that bars are held against, and its name."""

    value: float
    name: str


def merge_equal(parts: Sequence[tuple[int, Mapping[str, float]]], what: str) -> list[StackedBar]:
    """One bar for all numbers with equal parts, in the order of their first number.

    >>> merge_equal([(0, {"a": 2}), (1, {"a": 1}), (2, {"a": 1})], "stage")
    [StackedBar(label='stage 0', parts={'a': 2}), StackedBar(label='stages 1-2', parts={'a': 1})]
    """
    numbers_of: dict[tuple[tuple[str, float], ...], set[int]] = {}
    for number, lengths in parts:
        numbers_of.setdefault(tuple(lengths.items()), set()).add(number)
    return [
        StackedBar(f"{what}{'s' * (len(numbers) > 1)} {spans(sorted(numbers), 2)}", dict(key))
        for key, numbers in numbers_of.items()
    ]


def picture(
    bars: Sequence[StackedBar],
    fills: Mapping[str, svg.Fill],
    name: str,
    label: str,
    measure: Measure,
    limit: Limit | None = None,
    width: int = svg.WIDTH,
) -> svg.Picture:
    """The bars over a scale, with the values of all parts in words, and a line at the limit.

    Of more than `MOST` bars, the picture has the largest.
    """
    left_out = max(0, len(bars) - MOST)
    if left_out:
        smallest = sorted(range(len(bars)), key=lambda nth: bars[nth].total)[:left_out]
        bars = [bar for nth, bar in enumerate(bars) if nth not in set(smallest)]
    unknown = dict.fromkeys((key for bar in bars for key in bar.parts), svg.Fill(svg.GREY, "x"))
    fills = {**fills, **{key: fill for key, fill in unknown.items() if key not in fills}}
    used = [key for key in fills if any(bar.parts.get(key) for bar in bars)]
    chosen = svg.Fills(name, {key: fills[key] for key in used})
    heading, y = chosen.heading(used, width)
    across = _scale(bars, measure, limit, width)
    y += 8 if limit is None else 24
    parts = [heading]
    at = None
    if limit is not None and limit.value <= across.most * 1.001:
        at = across.at(limit.value)
        half = svg.text_width(limit.name) / 2
        parts.append(svg.text(min(max(at, half), width - half - 4), y - 9, limit.name, "middle"))
    for bar in bars:
        row, y = _row(bar, chosen, y, across, width, at)
        parts.append(row)
    parts.append(across.axis(y))
    y += AXIS
    if left_out:
        y += LINE
        parts.append(svg.text(0, y - 4, f"{left_out} smaller bars are not shown"))
    more = f'class="bars" {across.attributes()}'
    return svg.figure(y, label, parts, more, width=width)


def _scale(bars: Sequence[StackedBar], measure: Measure, limit: Limit | None, width: int) -> Across:
    """The scale: beside names and totals, or below them where the picture is narrow."""
    most = max((bar.total for bar in bars), default=0.0)
    if limit is not None and limit.value < 3 * most:
        most = max(most, limit.value)
    if width < svg.NARROW:
        return Across(14, width - 22, most, measure)
    longest = max((svg.text_width(bar.label) for bar in bars), default=0.0)
    ends = max((svg.text_width(measure.show(bar.total)) for bar in bars), default=0.0)
    return Across(min(longest, MOST_LEFT) + 12, width - max(ends + 10, 30), most, measure)


def _row(
    bar: StackedBar, fills: svg.Fills, y: float, across: Across, width: int, limit: float | None
) -> tuple[str, float]:
    """A bar with its name, its total and the values of its parts, and where the next one begins.

    The line at the limit crosses bars, and no words.
    """
    show = across.measure.show
    if width < svg.NARROW:
        parts = [svg.text(across.left, y + 12, f"{bar.label}: {show(bar.total)}")]
        y += 17
    else:
        parts = [svg.text(across.left - 8, y + 13, bar.label, "end")]
        parts.append(svg.text(width - 4, y + 13, show(bar.total), "end"))
    drawn: list[str] = []
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
        drawn.append(svg.rect(x, y, max(wide, 0.3), THICK, paint, f"{bar.label}: {words}"))
        if wide > svg.text_width(value) + 8:
            labels.append(fills.label(key, x + wide / 2, y + 13, value))
        elif value.strip("0.% "):
            small.append(words)
        x += wide
    # The colour of a part with its value inside is in the legend; others need name and value.
    parts.append(f'<g class="marks">{"".join(drawn)}</g><g class="labels">{"".join(labels)}</g>')
    if limit is not None:
        parts.append(f'<g class="limit">{svg.limit(limit, y - 4, limit, y + THICK + 4)}</g>')
        y += 3
    y += THICK
    for line in _lines(small, across.right - across.left):
        y += LINE
        parts.append(svg.text(across.left, y - 2, line, more='font-size="11"'))
    return "".join(parts), y + GAP


def _lines(words: Sequence[str], width: float) -> list[str]:
    """Phrases in lines no longer than the width, if no phrase is.

    >>> _lines(["dp exposed 1.0%", "pp exposed 0.3%", "bubble 4.0%"], 300)
    ['dp exposed 1.0%, pp exposed 0.3%,', 'bubble 4.0%']
    """
    lines: list[str] = []
    for nth, phrase in enumerate(words):
        phrase += "," if nth + 1 < len(words) else ""
        if lines and svg.text_width(f"{lines[-1]} {phrase}") <= width:
            lines[-1] += f" {phrase}"
        else:
            lines.append(phrase)
    return lines
