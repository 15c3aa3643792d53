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
"""Lanes of a picture; of more, some from first to last."""
LEAST = 0.001
"""Of the step: an axis along which less time passes has no strip."""


def picture(line: Timeline, name: str = "timeline") -> svg.Picture:
    """The strips of each lane."""
    lanes = [line.lanes[nth] for nth in chosen(len(line.lanes), MOST)]
    found = [axes_of(line, lane) for lane in lanes]
    every = sorted({n for each in found for n in each.names})
    names = [n for n in every if _long(line, lanes, found, n)]
    phases = [p for nth, p in enumerate(PHASES) if any(_has(lane, nth) for lane in lanes)]
    colours = svg.axes(every)
    some = {p: svg.PHASES[p] for p in phases} | {n: colours[n] for n in names}
    fills = svg.Fills(name, some)
    legend, y = fills.legend([*phases, *names])
    parts = [fills.defs(), legend]
    y += 8
    columns = (svg.WIDTH - LEFT - RIGHT) // COLUMN
    edges = np.linspace(0, line.ticks, columns + 1)
    for lane, each in zip(lanes, found, strict=True):
        parts.append(svg.text(LEFT - 8, y + 15, _who(lane), "end"))
        low = np.zeros(columns)
        for phase in phases:
            mine = lane.main & (_phase(lane) == PHASES.index(phase))
            high = low + _busy(lane, mine, edges)
            parts.append(_strip(low, high, y + KERNELS, KERNELS, fills[phase], phase))
            low = high
        y += KERNELS
        for axis in (n for n in each.names if n in names):
            share = _busy(lane, each.of == each.names.index(axis), edges)
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


def _long(line: Timeline, lanes: Sequence[Lane], found: Sequence[Axes], axis: str) -> bool:
    """Whether some lane communicates along an axis for more than a moment."""
    for lane, each in zip(lanes, found, strict=True):
        mine = each.of == (each.names.index(axis) if axis in each.names else -2)
        if float((lane.end - lane.begin)[mine].sum()) > LEAST * line.ticks:
            return True
    return False


def chosen(count: int, most: int) -> list[int]:
    """All of so many things, or some from the first to the last.

    >>> chosen(3, 8), chosen(10, 4)
    ([0, 1, 2], [0, 3, 6, 9])
    """
    if count <= most:
        return [*range(count)]
    return [nth * (count - 1) // (most - 1) for nth in range(most)]


def _who(lane: Lane) -> str:
    stage = f"stage {lane.of.pipeline_rank}"
    return f"{stage}, rank {lane.ranks[0]}" if len(lane.ranks) == 1 else stage


def _phase(lane: Lane) -> NDArray[np.uint8]:
    return lane.of.tasks.phase[lane.issue.rows]


def _has(lane: Lane, phase: int) -> bool:
    return bool((lane.main & (_phase(lane) == phase)).any())


def _busy(lane: Lane, mine: Bool, edges: Float) -> Float:
    """The part of each column in which some of a lane's tasks run."""
    begin, end = lane.begin[mine], lane.end[mine]
    until = _passed(end, edges) - _passed(begin, edges)
    return np.clip(np.diff(until) / np.diff(edges), 0, 1)


def _passed(moments: Int, edges: Float) -> Float:
    """For each edge, the sum over moments of what comes first, the edge or the moment.

    The difference between this for ends and for begins is the time that has run by then.
    """
    moments = np.sort(moments)
    before = np.searchsorted(moments, edges)
    sums = np.append(0, np.cumsum(moments, dtype=np.float64))
    # Counted from the edge, so that large numbers do not meet.
    return sums[before] + (len(moments) - before) * edges


def _strip(low: Float, high: Float, bottom: float, height: float, fill: str, name: str) -> str:
    """Columns from one height to another, as one path; half units of height."""
    tops = np.rint(high * height * 2) / 2
    bases = np.rint(low * height * 2) / 2
    runs = np.flatnonzero(np.append(True, (np.diff(tops) != 0) | (np.diff(bases) != 0)))
    ends = np.append(runs[1:], len(tops))
    path = [
        f"M{LEFT + first * COLUMN} {svg.number(bottom - top)}h{(last - first) * COLUMN}"
        f"v{svg.number(top - base)}h-{(last - first) * COLUMN}z"
        for first, last, top, base in zip(
            runs.tolist(), ends.tolist(), tops[runs].tolist(), bases[runs].tolist(), strict=True
        )
        if top > base
    ]
    return f'<path d="{"".join(path)}" fill="{fill}">{svg.title(name)}</path>' if path else ""


def _scale(line: Timeline, y: float) -> Sequence[str]:
    wide = svg.WIDTH - LEFT - RIGHT
    parts = [svg.line(LEFT, y, LEFT + wide, y)]
    unit, scale = ("s", 1.0) if line.seconds >= 1 else ("ms", 1e3)
    for value in svg.ticks(line.seconds * scale, 6):
        x = LEFT + value / scale / line.seconds * wide
        parts.append(svg.line(x, y, x, y + 4))
        parts.append(svg.text(x, y + 17, f"{value:g} {unit}", "middle"))
    return parts
