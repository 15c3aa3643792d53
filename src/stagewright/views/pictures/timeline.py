"""When ranks compute and communicate: a strip of time for kernels and for each axis.

A column of a strip is as high as the strip while kernels, or transfers, run all of its time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from stagewright.arrays import Bool, Float, Int
from stagewright.numbers import duration, plural, spans
from stagewright.program.columns import PHASES, Program
from stagewright.time.simulate.breakdown import axes_of
from stagewright.time.simulate.timeline import TICK, Lane, Timeline
from stagewright.views.pictures import svg
from stagewright.views.pictures.chart import AXIS, SECONDS, Across
from stagewright.views.stages import stage_name

COLUMN = 2
KERNELS, TRANSFERS, GAP = 26, 15, 10
SLIVER = 3
"""Columns of transfers are at least as high, so that a message of a millisecond is seen."""
MOST = 16
"""Lanes of a picture; of more, the picture shows some, evenly from the first to the last."""
LEAST = 0.001
"""Share of the step below which communication along an axis has no strip."""
LEVELS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_"
"""Characters of the script's data: shares of a column from none to all."""
MOST_COLUMNS, MOST_CHARACTERS = 6000, 240_000
"""The script zooms into as many columns of each strip as all strips together leave room for."""


class Strip(NamedTuple):
    """Tasks of a lane that are drawn in one fill: kernels of a phase, transfers along an axis."""

    name: str
    tasks: Bool  # by place in issue order


class Strips(NamedTuple):
    """A lane as it is drawn: kernels upon each other, and below them a strip for each axis."""

    name: str
    lane: Lane
    kernels: Sequence[Strip]
    transfers: Sequence[Strip]


def strips(line: Timeline) -> list[Strips]:
    """What is drawn of a timeline: at most `MOST` lanes, and axes that take any time worth it."""
    lanes = [line.lanes[nth] for nth in chosen(len(line.lanes), MOST)]
    axes = [axes_of(line, lane) for lane in lanes]
    every = sorted({name for of_lane in axes for name in of_lane.names})
    long: set[str] = set()
    found: list[Strips] = []
    for name, lane, of_lane in zip(_names(line.program, lanes), lanes, axes, strict=True):
        phase = lane.rank_class.tasks.phase[lane.issue.rows]
        kernels = [Strip(each, lane.is_kernel & (phase == nth)) for nth, each in enumerate(PHASES)]
        transfers = [Strip(axis, of_lane.axis == nth) for nth, axis in enumerate(of_lane.names)]
        for each in transfers:
            busy = float((lane.end - lane.begin)[each.tasks].sum())
            if busy > LEAST * line.ticks:
                long.add(each.name)
        kernels = [each for each in kernels if each.tasks.any()]
        found.append(Strips(name, lane, kernels, transfers))
    shown = [name for name in every if name in long]
    return [
        of._replace(transfers=[each for each in of.transfers if each.name in shown]) for of in found
    ]


def picture(line: Timeline, name: str = "timeline", width: int = svg.WIDTH) -> svg.Picture:
    """The timeline of a step: strips for each lane, and the scale below."""
    drawn = strips(line)
    named = [each.name for of in drawn for each in of.transfers]
    axes = sorted({*named})
    phases = [p for p in PHASES if any(p == each.name for of in drawn for each in of.kernels)]
    fills = svg.Fills(name, {p: svg.PHASES[p] for p in phases} | svg.axes(axes))
    heading, y = fills.heading([*phases, *axes], width)
    narrow = width < svg.NARROW
    words = [*axes, *([] if narrow else [of.name for of in drawn])]
    left = max((svg.text_width(each) for each in words), default=0.0) + 10
    across = Across(left, width - 16, line.seconds, SECONDS)
    count = int((across.right - across.left) // COLUMN)
    edges = np.linspace(0, line.ticks, count + 1)
    parts = [heading]
    y += 8
    for nth, of in enumerate(drawn):
        if narrow:
            y += 14
            parts.append(svg.text(0, y - 4, of.name))
        else:
            parts.append(svg.text(left - 8, y + 17, of.name, "end"))
        lane, low, y = of.lane, np.zeros(count), y + KERNELS
        for row, strip in enumerate(of.kernels):
            high = low + _busy(lane, strip.tasks, edges)
            box = _Bounds(across, y, KERNELS, f"{nth} {row}", _title(of, strip, line))
            parts.append(_strip(low, high, box, fills[strip.name]))
            low = high
        for row, strip in enumerate(of.transfers):
            share = _busy(lane, strip.tasks, edges)
            y += TRANSFERS
            parts.append(svg.text(left - 8, y - 2, strip.name, "end", 'font-size="11"'))
            which = f"{nth} {len(of.kernels) + row}"
            box = _Bounds(across, y, TRANSFERS - 2, which, _title(of, strip, line))
            parts.append(_strip(np.zeros(count), share, box, fills[strip.name]))
        y += GAP
    parts += [across.axis(y), '<path class="cursor" d="" fill="none" stroke="currentColor"/>']
    label = (
        f"Timeline of a step of {duration(line.seconds)}: when kernels and communication run on "
        + plural(len(drawn), "group of ranks", "groups of ranks")
    )
    more = f'class="timeline" tabindex="0" data-timeline="timeline" {across.attributes()}'
    return svg.figure(y + AXIS, label, parts, more, width=width)


def _title(of: Strips, strip: Strip, line: Timeline) -> str:
    """What a strip shows in all: its tasks may run beside each other."""
    busy = int((of.lane.end - of.lane.begin)[strip.tasks].sum()) * TICK
    return f"{of.name}: {strip.name} {duration(busy)} of {duration(line.seconds)}"


def data(line: Timeline) -> dict[str, Any]:
    """Data of the script that zooms: how busy each strip is, in more columns than are drawn.

    A share is a character of `LEVELS`; a character that repeats is followed by how often it does,
    in parentheses.
    """
    drawn = strips(line)
    every = sum(len(of.kernels) + len(of.transfers) for of in drawn)
    count = max(600, min(MOST_COLUMNS, MOST_CHARACTERS // max(1, every)))
    edges = np.linspace(0, line.ticks, count + 1)
    return {
        "columns": count,
        "levels": LEVELS,
        "lanes": [
            {
                "name": of.name,
                "kernels": len(of.kernels),
                "strips": [each.name for each in (*of.kernels, *of.transfers)],
                "shares": [
                    _in_characters(_busy(of.lane, each.tasks, edges))
                    for each in (*of.kernels, *of.transfers)
                ],
            }
            for of in drawn
        ],
    }


def _in_characters(share: Float) -> str:
    # What runs at all is told from what does not.
    level = np.maximum(np.rint(share * (len(LEVELS) - 1)), share > 0).astype(int)
    text = "".join(LEVELS[each] for each in level.tolist())
    return re.sub(r"(.)\1{4,}", lambda run: f"{run[1]}({len(run[0])})", text)


def chosen(count: int, most: int) -> list[int]:
    """Indices of `count` things: all, or `most` of them evenly from the first to the last.

    >>> chosen(3, 8), chosen(10, 4)
    ([0, 1, 2], [0, 3, 6, 9])
    """
    if count <= most:
        return [*range(count)]
    return [nth * (count - 1) // (most - 1) for nth in range(most)]


def _names(program: Program, lanes: Sequence[Lane]) -> list[str]:
    """The stages of lanes; with ranks where one stage has several lanes."""
    stages = [stage_name(program, lane.rank_class) for lane in lanes]
    return [
        stage
        if stages.count(stage) == 1
        else f"{stage}, rank{'s' * (len(lane.ranks) > 1)} {spans(lane.ranks.tolist(), 1)}"
        for stage, lane in zip(stages, lanes, strict=True)
    ]


def _busy(lane: Lane, mine: Bool, edges: Float) -> Float:
    """The share of each column during which one of the chosen tasks of a lane runs."""
    begin, end = lane.begin[mine], lane.end[mine]
    until = _passed(end, edges) - _passed(begin, edges)
    return np.clip(np.diff(until) / np.diff(edges), 0, 1)


def _passed(moments: Int, edges: Float) -> Float:
    """For each edge, the sum over moments of the edge or the moment, whichever is earlier.

    The sum for ends less the sum for begins is the time that tasks have run by the edge.
    """
    moments = np.sort(moments)
    before = np.searchsorted(moments, edges)
    sums = np.append(0, np.cumsum(moments, dtype=np.float64))
    # Later moments count as the edge itself, so that large sums do not cancel.
    return sums[before] + (len(moments) - before) * edges


class _Bounds(NamedTuple):
    """Where a strip is drawn, and which of the data's strips it is: lane and place."""

    across: Across
    bottom: float
    height: float
    which: str
    name: str


def _strip(low: Float, high: Float, box: _Bounds, fill: str) -> str:
    """Columns from one height to another, as one path; half units of height."""
    tops = np.ceil(high * box.height * 2) / 2
    if box.height == TRANSFERS - 2:
        tops = np.where(high > 0, np.maximum(tops, SLIVER), 0)
    bases = np.rint(low * box.height * 2) / 2
    runs = np.flatnonzero(np.append(True, (np.diff(tops) != 0) | (np.diff(bases) != 0)))
    ends = np.append(runs[1:], len(tops))
    step = (box.across.right - box.across.left) / len(tops)
    path = [
        svg.box(box.across.left + first * step, box.bottom - top, (last - first) * step, top - base)
        for first, last, top, base in zip(
            runs.tolist(), ends.tolist(), tops[runs].tolist(), bases[runs].tolist(), strict=True
        )
        if top > base
    ]
    place = f"{svg.number(box.bottom)} {svg.number(box.height)}"
    return svg.shape(path, fill, box.name, f'data-strip="{box.which} {place}"')
