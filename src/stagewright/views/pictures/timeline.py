"""When ranks compute and communicate: a strip of time for kernels and for each axis.

A column of a strip is as high as the strip while kernels, or transfers, run all of its time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Bool, Float, Int
from stagewright.numbers import duration, plural, spans
from stagewright.program.columns import PHASES, Program
from stagewright.time.simulate.breakdown import axes_of
from stagewright.time.simulate.timeline import TICK, Lane, Timeline
from stagewright.views.pictures import svg
from stagewright.views.pictures.colours import WORK, of_axes
from stagewright.views.pictures.scales import AXIS, SECONDS, Across
from stagewright.views.tables import stage_name

KERNELS, TRANSFERS, GAP = 20, 15, 10
SLIVER = 2.5
"""Columns of transfers are at least as high, so that a message of a millisecond is seen."""
MAX_LANES = 16
"""Lanes of a picture; of more, the picture shows some, evenly from the first to the last."""
MIN_SHARE = 0.001
"""Share of the step below which communication along an axis has no strip."""


class Strip(NamedTuple):
    """Tasks of a lane that are drawn in one fill: kernels of a phase, transfers along an axis."""

    name: str
    tasks: Bool  # by position in issue order


class Strips(NamedTuple):
    """The drawn parts of a lane: kernels upon each other, and below them a strip for each axis."""

    name: str
    lane: Lane
    kernels: Sequence[Strip]
    transfers: Sequence[Strip]
    axes: Sequence[str]
    """All axes along which the lane communicates, drawn or not."""


def strips(line: Timeline) -> list[Strips]:
    """The drawn lanes, at most `MAX_LANES`, with the axes that take a visible time in any."""
    lanes = [line.lanes[i] for i in chosen(len(line.lanes), MAX_LANES)]
    visible: set[str] = set()
    drawn: list[Strips] = []
    for name, lane in zip(_names(line.program, lanes), lanes, strict=True):
        axes = axes_of(line, lane)
        phase = lane.rank_class.tasks.phase[lane.issue.rows]
        kernels = [Strip(name, lane.is_kernel & (phase == i)) for i, name in enumerate(PHASES)]
        transfers = [Strip(axis, axes.axis == i) for i, axis in enumerate(axes.names)]
        for strip in transfers:
            busy = float((lane.end - lane.begin)[strip.tasks].sum())
            if busy > MIN_SHARE * line.ticks:
                visible.add(strip.name)
        kernels = [strip for strip in kernels if strip.tasks.any()]
        drawn.append(Strips(name, lane, kernels, transfers, axes.names))
    return [
        strip._replace(transfers=[each for each in strip.transfers if each.name in visible])
        for strip in drawn
    ]


def picture(line: Timeline, name: str = "timeline", longest: float = 0.0) -> svg.Picture:
    """The timeline of a step: strips for each lane, and the scale below, up to `longest` (s)."""
    drawn = strips(line)
    axes = sorted({strip.name for lane in drawn for strip in lane.transfers})
    phases = [p for p in PHASES if any(p == s.name for lane in drawn for s in lane.kernels)]
    every_axis = sorted({axis for lane in drawn for axis in lane.axes})
    fills = svg.Fills(name, {p: WORK[p] for p in phases} | of_axes(every_axis))
    heading, y = fills.heading([*phases, *axes])
    left = max((svg.text_width(axis, svg.SMALL) for axis in axes), default=0.0) + 10
    across = Across(left, svg.WIDTH - 16, max(line.seconds, longest), SECONDS)
    columns = int(across.at(line.seconds) - across.left)
    edges = np.linspace(0, line.ticks, columns + 1)
    parts = [heading]
    y += 4
    for strips_of_lane in drawn:
        y += 17
        parts.append(svg.text(0, y - 4, strips_of_lane.name))
        lane, low, y = strips_of_lane.lane, np.zeros(columns), y + KERNELS
        for strip in strips_of_lane.kernels:
            high = low + _busy(lane, strip.tasks, edges)
            title = _title(strips_of_lane, strip, line)
            parts.append(_strip(low, high, (left, y, KERNELS), fills[strip.name], title))
            low = high
        for strip in strips_of_lane.transfers:
            share = _busy(lane, strip.tasks, edges)
            y += TRANSFERS
            small = f'font-size="{svg.SMALL}em"'
            parts.append(svg.text(left - 8, y - 3, strip.name, "end", small))
            title = _title(strips_of_lane, strip, line)
            heights = np.where(share > 0, np.maximum(share, SLIVER / (TRANSFERS - 2)), 0)
            place = (left, y, TRANSFERS - 2)
            parts.append(_strip(np.zeros(columns), heights, place, fills[strip.name], title))
        y += GAP
    parts.append(across.axis(y))
    label = (
        f"Timeline of a step of {duration(line.seconds)}: when kernels and communication run on "
        + plural(len(drawn), "group of ranks", "groups of ranks")
    )
    return svg.figure(y + AXIS, label, parts, 'class="timeline"')


class PartsInTime(NamedTuple):
    """Times of the parts of a step on one rank: begins and ends in nanoseconds, by part."""

    name: str
    parts: Mapping[str, Int]
    """[times, 2]; of all parts no two times overlap."""


def picture_of_parts(
    rows: Sequence[PartsInTime], fills: Mapping[str, svg.Fill], longest: float
) -> svg.Picture:
    """A strip for each row, in the fills of its parts; the scale goes up to `longest` (ns)."""
    used = [part for part in fills if any(part in row.parts for row in rows)]
    chosen = svg.Fills("parts", {part: fills[part] for part in used})
    heading, y = chosen.heading(used)
    across = Across(0, svg.WIDTH - 16, longest / 1e9, SECONDS)
    columns = int(across.at(longest / 1e9) - across.left)
    edges = np.linspace(0, longest, columns + 1)
    parts, y = [heading], y + 4
    for row in rows:
        y += 17
        parts.append(svg.text(0, y - 4, row.name))
        low, y = np.zeros(columns), y + KERNELS
        for part in used:
            if part not in row.parts:
                continue
            begin, end = row.parts[part].T
            high = low + np.diff(_passed(end, edges) - _passed(begin, edges)) / np.diff(edges)
            title = f"{row.name}: {part} {duration(float((end - begin).sum()) / 1e9)}"
            place = (across.left, y, KERNELS)
            parts.append(_strip(low, np.minimum(high, 1.0), place, chosen[part], title))
            low = np.minimum(high, 1.0)
        y += GAP
    parts.append(across.axis(y))
    label = f"Parts of a step in time on {plural(len(rows), 'rank', 'ranks')}"
    return svg.figure(y + AXIS, label, parts, 'class="timeline"')


def _title(lane: Strips, strip: Strip, line: Timeline) -> str:
    """The busy time of a strip as a sum over its tasks."""
    busy = int((lane.lane.end - lane.lane.begin)[strip.tasks].sum()) * TICK
    return f"{lane.name}: {strip.name} {duration(busy)} of {duration(line.seconds)}"


def chosen(count: int, limit: int) -> list[int]:
    """Indices of `count` items: all, or `limit` of them evenly from the first to the last.

    >>> chosen(3, 8), chosen(10, 4)
    ([0, 1, 2], [0, 3, 6, 9])
    """
    if count <= limit:
        return [*range(count)]
    return [i * (count - 1) // (limit - 1) for i in range(limit)]


def _names(program: Program, lanes: Sequence[Lane]) -> list[str]:
    """The stages of lanes; with ranks where one stage has several lanes."""
    stages = [stage_name(program, lane.rank_class) for lane in lanes]
    return [
        stage
        if stages.count(stage) == 1
        else f"{stage}, rank{'s' * (len(lane.ranks) > 1)} {spans(lane.ranks.tolist(), 1)}"
        for stage, lane in zip(stages, lanes, strict=True)
    ]


def _busy(lane: Lane, selected: Bool, edges: Float) -> Float:
    """The share of each column during which one of the chosen tasks of a lane runs."""
    begin, end = lane.begin[selected], lane.end[selected]
    until = _passed(end, edges) - _passed(begin, edges)
    return np.clip(np.diff(until) / np.diff(edges), 0, 1)


def _passed(times: Int, edges: Float) -> Float:
    """For each edge, the sum over times of the edge or the time, whichever is earlier.

    The sum for ends less the sum for begins is the time that tasks have run by the edge.
    """
    times = np.sort(times)
    before = np.searchsorted(times, edges)
    sums = np.append(0, np.cumsum(times, dtype=np.float64))
    # Later times count as the edge itself, so that large sums do not cancel.
    return sums[before] + (len(times) - before) * edges


def _strip(
    low: Float, high: Float, place: tuple[float, float, float], fill: str, title: str
) -> str:
    """Columns of one unit as one path, in half units of height; `place`: left, bottom, height."""
    left, bottom, height = place
    tops, bases = np.ceil(high * height * 2) / 2, np.rint(low * height * 2) / 2
    runs = np.flatnonzero(np.append(True, (np.diff(tops) != 0) | (np.diff(bases) != 0)))
    ends = np.append(runs[1:], len(tops))
    path = [
        svg.box(left + first, bottom - top, last - first, top - base)
        for first, last, top, base in zip(
            runs.tolist(), ends.tolist(), tops[runs].tolist(), bases[runs].tolist(), strict=True
        )
        if top > base
    ]
    return svg.shape(path, fill, title)
