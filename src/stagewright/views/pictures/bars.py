"""Bars made of parts, one below the other: memory by category, time by phase, bytes by axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from stagewright.numbers import quantity, spans
from stagewright.views.pictures import svg

ROW, THICK, LEFT, RIGHT, TOP = 24, 17, 118, 84, 30
MOST = 40
"""Bars that a picture shows at most."""


class StackedBar(NamedTuple):
    """A bar made of parts: its name, and the length of each part."""

    label: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """The length of the whole bar."""
        return sum(self.parts.values())


Format = Callable[[float], str]


def show_bytes(size: float) -> str:
    """A number of bytes with its unit, as bars say it."""
    return quantity(round(size), "B")


def merge_equal(parts: Sequence[tuple[int, Mapping[str, float]]], what: str) -> list[StackedBar]:
    """One bar for all numbers with equal parts, in the order of their first number.

    >>> merge_equal([(0, {"a": 2}), (1, {"a": 1}), (2, {"a": 1})], "stage")
    [StackedBar(label='stage 0', parts={'a': 2}), StackedBar(label='stages 1-2', parts={'a': 1})]
    """
    numbers_of: dict[tuple[tuple[str, float], ...], list[int]] = {}
    for number, lengths in parts:
        numbers_of.setdefault(tuple(lengths.items()), []).append(number)
    return [
        StackedBar(f"{what}{'s' * (len(numbers) > 1)} {spans(numbers, 2)}", dict(key))
        for key, numbers in numbers_of.items()
    ]


def picture(
    bars: Sequence[StackedBar],
    fills: Mapping[str, svg.Fill],
    name: str,
    label: str,
    show: Format,
    limit: tuple[float, str] | None = None,
) -> svg.Picture:
    """The bars, with lengths written by `show`; `limit` is the place and the name of a line.

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
    heading, top = chosen.heading(used)
    top += 6 if limit is None else 24
    most = max((bar.total for bar in bars), default=0.0)
    if limit is not None and limit[0] < 3 * most:
        most = max(most, limit[0])
    scale = (svg.WIDTH - LEFT - RIGHT) / (most or 1)
    rows = [_row(bar, chosen, top + nth * ROW, scale, show) for nth, bar in enumerate(bars)]
    bottom = top + len(bars) * ROW
    parts = [heading, *rows]
    if limit is not None and limit[0] <= most * 1.001:
        x = LEFT + limit[0] * scale
        parts.append(svg.limit(x, top - 4, x, bottom))
        anchor = "end" if x > svg.WIDTH / 2 else "start"
        parts.append(svg.text(x, top - 9, limit[1], anchor))
    if left_out:
        bottom += 16
        parts.append(svg.text(LEFT, bottom - 2, f"and {left_out} smaller ones"))
    return svg.figure(bottom + 4, label, parts)


def _row(bar: StackedBar, fills: svg.Fills, y: float, scale: float, show: Format) -> str:
    parts = [svg.text(LEFT - 8, y + 13, bar.label, "end")]
    x = float(LEFT)
    for key, size in bar.parts.items():
        wide = size * scale
        if not size:
            continue
        words = show(size)
        name, paint = f"{bar.label}: {key} {words}".replace("_", " "), f'fill="{fills[key]}"'
        parts.append(svg.rect(x, y, max(wide, 0.3), THICK, paint, name))
        if wide > svg.text_width(words) + 8:
            parts.append(svg.text(x + wide / 2, y + 13, words, "middle", svg.ON_FILL))
        x += wide
    parts.append(svg.text(svg.WIDTH - 4, y + 13, show(bar.total), "end"))
    return "".join(parts)
