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
    """Times that are drawn in one fill: kernels of a phase, transfers along an axis."""

    name: str
    begin: Int
    end: Int

    @property
    def length(self) -> int:
        """The sum of the times."""
        return int((self.end - self.begin).sum())


class StripRow(NamedTuple):
    """Strips of a lane or a rank: some upon each other, and further ones below."""

    name: str
    stacked: Sequence[Strip]
    below: Sequence[Strip] = ()


def picture(line: Timeline, name: str = "timeline", longest: float = 0.0) -> svg.Picture:
    """The timeline of a step: strips for each lane, and the scale below, up to `longest` (s).

    At most `MAX_LANES` lanes are drawn, with the axes that take a visible time in any of them.
    """
    lanes = [line.lanes[i] for i in chosen(len(line.lanes), MAX_LANES)]
    rows: list[StripRow] = []
    every_axis: set[str] = set()
    for title, lane in zip(_names(line.program, lanes), lanes, strict=True):
        axes = axes_of(line, lane)
        phase = lane.rank_class.tasks.phase[lane.issue.rows]
        kernels = [_strip(lane, lane.is_kernel & (phase == i), of) for i, of in enumerate(PHASES)]
        transfers = [_strip(lane, axes.axis == i, axis) for i, axis in enumerate(axes.names)]
        rows.append(StripRow(title, [strip for strip in kernels if len(strip.begin)], transfers))
        every_axis |= {*axes.names}
    least = MIN_SHARE * line.ticks
    visible = {strip.name for row in rows for strip in row.below if strip.length > least}
    rows = [row._replace(below=[s for s in row.below if s.name in visible]) for row in rows]
    phases = [p for p in PHASES if any(p == strip.name for row in rows for strip in row.stacked)]
    fills = {phase: WORK[phase] for phase in phases} | of_axes(sorted(every_axis))
    left = max((svg.text_width(axis, svg.SMALL) for axis in visible), default=0.0) + 10
    across = Across(left, svg.WIDTH - 16, max(line.seconds, longest), SECONDS)
    label = (
        f"Timeline of a step of {duration(line.seconds)}: when kernels and communication run on "
        + plural(len(rows), "group of ranks", "groups of ranks")
    )
    keys = [*phases, *sorted(visible)]
    whole = f" of {duration(line.seconds)}"
    return _drawn(rows, svg.Fills(name, fills), keys, across, line.ticks, TICK, label, whole)


def _strip(lane: Lane, tasks: Bool, name: str) -> Strip:
    """The times of some tasks of a lane."""
    return Strip(name, lane.begin[tasks], lane.end[tasks])


def picture_of_parts(
    rows: Sequence[StripRow], fills: Mapping[str, svg.Fill], longest: float
) -> svg.Picture:
    """Parts of a step on ranks (ns), in these fills; the scale goes up to `longest` (ns)."""
    names = {strip.name for row in rows for strip in row.stacked}
    used = {name: fill for name, fill in fills.items() if name in names}
    across = Across(0, svg.WIDTH - 16, longest / 1e9, SECONDS)
    label = f"Parts of a step in time on {plural(len(rows), 'rank', 'ranks')}"
    return _drawn(rows, svg.Fills("parts", used), [*used], across, longest, 1e-9, label)


def _drawn(
    rows: Sequence[StripRow],
    fills: svg.Fills,
    keys: Sequence[str],
    across: Across,
    end: float,
    unit: float,
    label: str,
    whole: str = "",
) -> svg.Picture:
    """Rows below the legend of `keys`; their times are in units of `unit` seconds, up to `end`.

    `whole` follows the length of a strip in its title.
    """
    heading, y = fills.heading(keys)
    left = across.left
    columns = int(across.at(end * unit) - left)
    edges = np.linspace(0, end, columns + 1)
    parts = [heading]
    y += 4
    for row in rows:
        y += 17
        parts.append(svg.text(0, y - 4, row.name))
        titles = {
            strip.name: f"{row.name}: {strip.name} {duration(strip.length * unit)}{whole}"
            for strip in (*row.stacked, *row.below)
        }
        low, y = np.zeros(columns), y + KERNELS
        for strip in row.stacked:
            high = np.minimum(low + _busy(strip, edges), 1.0)
            place = (left, y, KERNELS)
            parts.append(_shape(low, high, place, fills[strip.name], titles[strip.name]))
            low = high
        for strip in row.below:
            share = _busy(strip, edges)
            y += TRANSFERS
            small = f'font-size="{svg.SMALL}em"'
            parts.append(svg.text(left - 8, y - 3, strip.name, "end", small))
            heights = np.where(share > 0, np.maximum(share, SLIVER / (TRANSFERS - 2)), 0)
            place = (left, y, TRANSFERS - 2)
            bottom = np.zeros(columns)
            parts.append(_shape(bottom, heights, place, fills[strip.name], titles[strip.name]))
        y += GAP
    parts.append(across.axis(y))
    return svg.figure(y + AXIS, label, parts, 'class="timeline"')


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


def _busy(strip: Strip, edges: Float) -> Float:
    """The share of each column during which a strip's tasks run."""
    until = _passed(strip.end, edges) - _passed(strip.begin, edges)
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


def _shape(
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
