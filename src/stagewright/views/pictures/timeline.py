"""When ranks compute and communicate: a strip of time for kernels and for each axis.

A column of a strip is as high as the strip while kernels, or transfers, run all of its time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Bool, Float, Int
from stagewright.numbers import duration, plural
from stagewright.program.columns import PHASES
from stagewright.time.simulate.breakdown import Axes, axes_of
from stagewright.time.simulate.timeline import Lane, Timeline
from stagewright.views.pictures import svg

LEFT, RIGHT, COLUMN = 118, 8, 2
KERNELS, AXIS, GAP = 22, 14, 9
MOST = 16
"""Lanes of a picture; of more, the picture shows some, evenly from the first to the last."""
LEAST = 0.001
"""Share of the step below which communication along an axis has no strip."""


def picture(line: Timeline, name: str = "timeline") -> svg.Picture:
    """The timeline of a step: strips for each lane, and the scale below."""
    lanes = [line.lanes[nth] for nth in chosen(len(line.lanes), MOST)]
    axes = [axes_of(line, lane) for lane in lanes]
    every = sorted({name for of_lane in axes for name in of_lane.names})
    names = [name for name in every if _is_long(line, lanes, axes, name)]
    phases = [p for nth, p in enumerate(PHASES) if any(_has(lane, nth) for lane in lanes)]
    colours = svg.axes(every)
    fills = svg.Fills(name, {p: svg.PHASES[p] for p in phases} | {n: colours[n] for n in names})
    heading, y = fills.heading([*phases, *names])
    parts = [heading]
    y += 8
    columns = (svg.WIDTH - LEFT - RIGHT) // COLUMN
    edges = np.linspace(0, line.ticks, columns + 1)
    for lane, of_lane in zip(lanes, axes, strict=True):
        parts.append(svg.text(LEFT - 8, y + 15, _name_of(lane), "end"))
        low = np.zeros(columns)
        for phase in phases:
            mine = lane.main & (_phase(lane) == PHASES.index(phase))
            high = low + _busy(lane, mine, edges)
            parts.append(_strip(low, high, y + KERNELS, KERNELS, fills[phase], phase))
            low = high
        y += KERNELS
        for axis in (n for n in of_lane.names if n in names):
            share = _busy(lane, of_lane.of == of_lane.names.index(axis), edges)
            y += AXIS
            parts.append(svg.text(LEFT - 8, y, axis, "end", 'font-size="9"'))
            parts.append(_strip(np.zeros(columns), share, y, AXIS - 2, fills[axis], axis))
        y += GAP
    parts += _scale(line, y)
    label = (
        f"Timeline of a step of {duration(line.seconds)}: when kernels and communication run on "
        + plural(len(lanes), "kind of ranks", "kinds of ranks")
    )
    return svg.figure(y + 34, label, parts)


def _is_long(line: Timeline, lanes: Sequence[Lane], axes: Sequence[Axes], axis: str) -> bool:
    """Whether some lane communicates along an axis for more than `LEAST` of the step."""
    for lane, of_lane in zip(lanes, axes, strict=True):
        mine = of_lane.of == (of_lane.names.index(axis) if axis in of_lane.names else -2)
        if float((lane.end - lane.begin)[mine].sum()) > LEAST * line.ticks:
            return True
    return False


def chosen(count: int, most: int) -> list[int]:
    """Indices of `count` things: all, or `most` of them evenly from the first to the last.

    >>> chosen(3, 8), chosen(10, 4)
    ([0, 1, 2], [0, 3, 6, 9])
    """
    if count <= most:
        return [*range(count)]
    return [nth * (count - 1) // (most - 1) for nth in range(most)]


def _name_of(lane: Lane) -> str:
    stage = f"stage {lane.of.pipeline_rank}"
    return f"{stage}, rank {lane.ranks[0]}" if len(lane.ranks) == 1 else stage


def _phase(lane: Lane) -> NDArray[np.uint8]:
    return lane.of.tasks.phase[lane.issue.rows]


def _has(lane: Lane, phase: int) -> bool:
    return bool((lane.main & (_phase(lane) == phase)).any())


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


def _strip(low: Float, high: Float, bottom: float, height: float, fill: str, name: str) -> str:
    """Columns from one height to another, as one path; half units of height."""
    tops = np.rint(high * height * 2) / 2
    bases = np.rint(low * height * 2) / 2
    runs = np.flatnonzero(np.append(True, (np.diff(tops) != 0) | (np.diff(bases) != 0)))
    ends = np.append(runs[1:], len(tops))
    path = [
        svg.box(LEFT + first * COLUMN, bottom - top, (last - first) * COLUMN, top - base)
        for first, last, top, base in zip(
            runs.tolist(), ends.tolist(), tops[runs].tolist(), bases[runs].tolist(), strict=True
        )
        if top > base
    ]
    return svg.shape(path, fill, name)


def _scale(line: Timeline, y: float) -> Sequence[str]:
    wide = svg.WIDTH - LEFT - RIGHT
    parts = [svg.line(LEFT, y, LEFT + wide, y)]
    unit, scale = ("s", 1.0) if line.seconds >= 1 else ("ms", 1e3)
    for value in svg.ticks(line.seconds * scale, 6):
        x = LEFT + value / scale / line.seconds * wide
        parts.append(svg.line(x, y, x, y + 4))
        parts.append(svg.text(x, y + 17, f"{value:g} {unit}", "middle"))
    return parts
