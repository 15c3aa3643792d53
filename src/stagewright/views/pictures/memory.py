"""Memory of a rank over a step: stacked areas, one per category."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from stagewright.arrays import Int
from stagewright.numbers import duration, quantity
from stagewright.program import memory
from stagewright.program.columns import CATEGORIES, PHASES, RankClass
from stagewright.time.simulate.memory import MemoryTimeline
from stagewright.time.simulate.timeline import TICK
from stagewright.views.pictures import svg

HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 260, 64, 10, 20, 36


class Levels(NamedTuple):
    """Bytes in points that follow each other, in rows of a program or in seconds."""

    edges: Sequence[float]  # where each point begins, and where the last ends
    by: Mapping[str, Sequence[int]]  # bytes by category, by point
    events: Sequence[str]  # what happens at each point
    unit: str  # of the edges: the name of the axis

    @property
    def total(self) -> list[int]:
        """Bytes of all categories, by point."""
        return [sum(sizes) for sizes in zip(*self.by.values(), strict=True)]

    @property
    def peak(self) -> int:
        """The point with the most."""
        return int(np.argmax(self.total))


def over_rows(of: RankClass, points: int) -> Levels:
    """Memory of a rank class while its tasks run, in the order of issue."""
    tasks = of.tasks
    rows, held = memory.samples(of, points)
    edges = [len(tasks) * i / len(rows) for i in range(len(rows) + 1)]
    events = [
        f"{tasks.names[tasks.name[r]]} ({PHASES[tasks.phase[r]]}"
        + (f", microbatch {tasks.microbatch[r]})" if tasks.microbatch[r] >= 0 else ")")
        for r in rows.tolist()
    ]
    unit = f"tasks in the order of issue (0 to {len(tasks):,})"
    return Levels(edges, _by_category(held), events, unit)


def over_seconds(timeline: MemoryTimeline, end: float, points: int) -> Levels:
    """Memory of a lane of a simulation; the step is over at `end` seconds."""
    sampled = timeline.sampled(points)
    starts = [int(t) * TICK for t in sampled.ticks]
    events = [f"{duration(t) if t else '0 s'} after the start" for t in starts]
    return Levels([0.0, *starts[1:], end], _by_category(sampled.size), events, "seconds")


def _by_category(held: Int) -> dict[str, list[int]]:
    return {n: by.tolist() for n, by in zip(CATEGORIES, held, strict=True) if by.any()}


def picture(
    levels: Levels, name: str, label: str, most: int | None = None, capacity: int | None = None
) -> svg.Picture:
    """The areas. The axis reaches at least `most`, so that pictures compare; `capacity`, the memory
    of a device, is drawn as a line."""
    top = max(*levels.total, most or 0, 1)
    if capacity is not None and capacity < 2.5 * top:
        top = max(top, round(capacity * 1.04))
    bottom, right = HEIGHT - BOTTOM, svg.WIDTH - RIGHT
    scale = (bottom - TOP) / top
    x = _places(levels)
    fills = svg.Fills(name, {n: svg.CATEGORIES[n] for n in levels.by})
    parts = [fills.defs(), *_grid(top, scale, bottom, right)]
    # From the top of the pile down: each area hides what is behind it.
    above = np.cumsum([*levels.by.values()], axis=0)
    for n, heights in reversed([*zip(levels.by, above.tolist(), strict=True)]):
        parts.append(_area(x, heights, scale, bottom, fills[n], n.replace("_", " ")))
    parts += _marks(levels, x, scale, bottom, right, capacity if (capacity or 0) <= top else None)
    more = f'tabindex="0" data-held="{name}" class="held"'
    return svg.figure(HEIGHT, label, parts, more)


def data(levels: Levels) -> dict[str, Any]:
    """Data of the script that describes the point under the cursor; `x` are edges drawn."""
    x = [round(edge, 1) for edge in _places(levels)]
    return {
        "x": x,
        "top": TOP,
        "bottom": HEIGHT - BOTTOM,
        "peak": levels.peak,
        "held": dict(levels.by),
        "task": [*levels.events],
    }


def legend(levels: Sequence[Levels], name: str) -> svg.Picture:
    """The legend of several pictures."""
    used = [n for n in CATEGORIES if any(n in shown.by for shown in levels)]
    fills = svg.Fills(name, {n: svg.CATEGORIES[n] for n in used})
    heading, end = fills.heading(used)
    return svg.figure(end, "Colours: " + ", ".join(used).replace("_", " "), [heading])


def _places(levels: Levels) -> list[float]:
    end = levels.edges[-1] or 1
    wide = svg.WIDTH - LEFT - RIGHT
    return [LEFT + edge / end * wide for edge in levels.edges]


def _area(
    x: Sequence[float], heights: Sequence[int], scale: float, bottom: float, fill: str, name: str
) -> str:
    """Level while a point lasts; corners that add nothing are left out."""
    path = [f"M{svg.number(x[0])} {svg.number(bottom)}"]
    last = ""
    for at, height in zip(x, heights, strict=False):
        y = svg.number(bottom - height * scale)
        if y != last:
            path.append(f"H{svg.number(at)}V{y}")
        last = y
    path.append(f"H{svg.number(x[-1])}V{svg.number(bottom)}z")
    return svg.shape(path, fill, name, 'class="area"')


def _grid(top: float, scale: float, bottom: float, right: float) -> list[str]:
    parts: list[str] = []
    for value in svg.ticks(top):
        y = bottom - value * scale
        parts.append(svg.line(LEFT, y, right, y, 'stroke-opacity=".25"'))
        parts.append(svg.text(LEFT - 6, y + 4, quantity(round(value), "B"), "end"))
    return parts


def _marks(
    levels: Levels,
    x: Sequence[float],
    scale: float,
    bottom: float,
    right: float,
    capacity: int | None,
) -> list[str]:
    """The peak, the device's memory, the axis, and the cursor, which a script moves."""
    parts: list[str] = []
    at = (x[levels.peak] + x[levels.peak + 1]) / 2
    most = quantity(levels.total[levels.peak], "B")
    parts.append(svg.line(at, TOP, at, bottom, 'stroke-dasharray="4 3"'))
    parts.append(svg.text(at, TOP - 6, f"peak {most}", "end" if at > svg.WIDTH / 2 else "start"))
    if capacity is not None:
        y = bottom - capacity * scale
        parts.append(svg.limit(LEFT, y, right, y))
        words = f"memory of the device: {quantity(capacity, 'B')}"
        left = at > svg.WIDTH / 2
        where = LEFT + 6 if left else right - 4
        parts.append(svg.text(where, y + 14, words, "start" if left else "end", svg.ON_FILL))
    middle = (LEFT + right) / 2
    if levels.unit == "seconds":
        for value in svg.ticks(levels.edges[-1], 8):
            place = LEFT + value / levels.edges[-1] * (right - LEFT)
            parts.append(svg.text(place, bottom + 15, f"{value:g}", "middle"))
    parts.append(svg.text(middle, HEIGHT - 6, levels.unit, "middle"))
    parts.append('<path class="cursor" d="" fill="none" stroke="currentColor"/>')
    return parts
