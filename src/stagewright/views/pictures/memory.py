"""Memory of a rank over a step: stacked areas, one per category."""

from __future__ import annotations

import re
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
from stagewright.views.pictures.colours import LIMIT, MEMORY
from stagewright.views.pictures.scales import BYTES, SECONDS, Across, Frame, Measure

TASKS = Measure("tasks", "{:g}".format)
"""Measure of a scale over the rows of a program."""
HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 250, 62, 12, 24, 42


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


def over_rows(rank_class: RankClass, points: int) -> Levels:
    """Memory of a rank class while its tasks run, in the order of issue."""
    tasks = rank_class.tasks
    rows, sizes = memory.samples(rank_class, points)
    edges = [len(tasks) * i / len(rows) for i in range(len(rows) + 1)]
    events = [
        f"{tasks.names[tasks.name[r]]} ({PHASES[tasks.phase[r]]}"
        + (f", microbatch {tasks.microbatch[r]})" if tasks.microbatch[r] >= 0 else ")")
        for r in rows.tolist()
    ]
    return Levels(edges, _by_category(sizes), events, "tasks in the order of issue")


def over_seconds(timeline: MemoryTimeline, end: float, points: int) -> Levels:
    """Memory of a lane of a simulation; the step is over at `end` seconds."""
    sampled = timeline.sampled(points)
    starts = [int(t) * TICK for t in sampled.ticks]
    events = [f"{duration(t) if t else '0 s'} after the start" for t in starts]
    return Levels([0.0, *starts[1:], end], _by_category(sampled.size), events, "seconds")


def _by_category(sizes: Int) -> dict[str, list[int]]:
    return {n: by.tolist() for n, by in zip(CATEGORIES, sizes, strict=True) if by.any()}


class Scale(NamedTuple):
    """The common scale of all pictures of a page."""

    most: int = 0  # bytes that the axis reaches at least
    capacity: int | None = None  # bytes of a device, drawn as a line

    def top(self, levels: Levels) -> int:
        """The bytes at the upper end of the axis."""
        top = max(*levels.total, self.most, 1)
        if self.capacity is not None and self.capacity < 2.5 * top:
            return max(top, round(self.capacity * 1.04))
        return top


def picture(levels: Levels, name: str, label: str, scale: Scale | None = None) -> svg.Picture:
    """The areas over tasks or time; `data(levels)` is what the script reads of them."""
    scale = scale or Scale()
    top = scale.top(levels)
    measure = SECONDS if levels.unit == "seconds" else TASKS
    across = Across(LEFT, svg.WIDTH - RIGHT, levels.edges[-1] or 1, measure)
    frame = Frame(across, Across(HEIGHT - BOTTOM, TOP, top, BYTES))
    fills = svg.Fills(name, {n: MEMORY[n] for n in levels.by})
    parts = [fills.defs(), *frame.axes(levels.unit if measure is TASKS else "time", "")]
    # From the top of the pile down: each area hides what is behind it.
    above = np.cumsum([*levels.by.values()], axis=0)
    for n, heights in reversed([*zip(levels.by, above.tolist(), strict=True)]):
        title = f"{n}, at the most {quantity(max(levels.by[n]), 'B')}".replace("_", " ")
        parts.append(_area(frame, levels.edges, heights, fills[n], title))
    if scale.capacity is not None and scale.capacity <= top:
        parts += _device_line(frame, scale.capacity, levels.peak * 2 < len(levels.events))
    parts += [*_peak(levels, frame), _CURSOR]
    field = f"{svg.number(across.left)} {svg.number(across.right)} {TOP} {HEIGHT - BOTTOM}"
    more = f'tabindex="0" data-held="{name}" data-field="{field}" class="held"'
    return svg.figure(HEIGHT, label, parts, more)


_CURSOR = '<path class="cursor" d="" fill="none" stroke="currentColor"/>'
"""A line that the script moves."""


def data(levels: Levels) -> dict[str, Any]:
    """Data of the script that describes the point under the cursor; `x` are shares of the width."""
    end = levels.edges[-1] or 1
    return {
        "x": [round(edge / end, 4) for edge in levels.edges],
        "peak": levels.peak,
        "held": dict(levels.by),
        "task": [*levels.events],
    }


def picture_with_legend(levels: Levels, name: str, label: str, scale: Scale) -> svg.Picture:
    """The areas below their legend, as a picture that stands alone."""
    used = [n for n in CATEGORIES if n in levels.by]
    heading, end = svg.Fills(name, {n: MEMORY[n] for n in used}).heading(used)
    areas = re.sub(r"^<svg[^>]*>|</svg>$", "", picture(levels, name, label, scale))
    below = f'<g transform="translate(0 {svg.number(end)})">{areas}</g>'
    return svg.figure(end + HEIGHT, label, [heading, below])


def legend(levels: Sequence[Levels], name: str) -> svg.Picture:
    """The legend of several pictures."""
    used = [n for n in CATEGORIES if any(n in shown.by for shown in levels)]
    heading, end = svg.Fills(name, {n: MEMORY[n] for n in used}).heading(used)
    return svg.figure(end, "Colours: " + ", ".join(used).replace("_", " "), [heading])


def _area(
    frame: Frame, edges: Sequence[float], heights: Sequence[int], fill: str, name: str
) -> str:
    """Level while a point lasts; corners that add nothing are left out."""
    bottom = svg.number(frame.bottom)
    path = [f"M{svg.number(frame.across.at(edges[0]))} {bottom}"]
    last = ""
    for edge, height in zip(edges, heights, strict=False):
        y = svg.number(frame.up.at(height))
        if y != last:
            path.append(f"H{svg.number(frame.across.at(edge))}V{y}")
        last = y
    path.append(f"H{svg.number(frame.across.at(edges[-1]))}V{bottom}z")
    return svg.shape(path, fill, name, 'class="area"')


def _device_line(frame: Frame, capacity: int, right: bool) -> list[str]:
    """The line at the memory of a device, and its name at one of its ends."""
    words = f"device memory {quantity(capacity, 'B')}"
    across, y = frame.across, frame.up.at(capacity)
    at, anchor = (across.right - 6, "end") if right else (across.left + 6, "start")
    baseline = y + 17 if y - 17 < TOP else y - 6
    left = at - (svg.text_width(words) if right else 0) - 3
    patch = 'fill="#fff" fill-opacity=".85"'
    return [
        svg.limit(across.left, y, across.right, y, LIMIT),
        svg.rect(left, baseline - 13, svg.text_width(words) + 6, 17, patch),
        svg.text(at, baseline, words, anchor, 'fill="#000"'),
    ]


def _peak(levels: Levels, frame: Frame) -> list[str]:
    across, peak = frame.across, levels.peak
    at = across.at((levels.edges[peak] + levels.edges[peak + 1]) / 2)
    anchor = "end" if at > (across.left + across.right) / 2 else "start"
    return [
        svg.line(at, TOP - 4, at, frame.bottom, 'stroke-dasharray="4 3"'),
        svg.text(at, TOP - 9, f"peak {quantity(levels.total[peak], 'B')}", anchor),
    ]
