"""Tables of a simulated step, for the terminal, pages and notebooks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from stagewright.errors import UserError
from stagewright.texttable import Table
from stagewright.time.simulate.breakdown import Breakdown
from stagewright.time.simulate.step import SimulatedStep, TracedStep
from stagewright.time.simulate.timeline import TICK, Lane
from stagewright.views.tables import of_class, of_rows

_MOST_ROWS = 32
_LAUNCHES = 0.005
"""The share of a step from which on waiting for the host has a column of its own."""


def parts(step: SimulatedStep | TracedStep) -> Table:
    """The parts of the mean GPU and of every lane, as shares of the step."""
    mean, whole = step.mean, step.seconds
    phases, axes = list(mean.kernels), list(mean.exposed)
    names = [*phases, *(f"{axis} exposed" for axis in axes), "bubble"]
    waits_for_host = any(of.launches / whole >= _LAUNCHES for of in step.parts)
    names += ["launches"] * waits_for_host

    def shares(parts: Breakdown) -> tuple[float, ...]:
        seconds = [parts.kernels.get(phase, 0.0) for phase in phases]
        seconds += [parts.exposed.get(axis, 0.0) for axis in axes]
        seconds += [parts.bubble, *[parts.launches] * waits_for_host]
        return tuple(s / whole for s in seconds)

    rows: list[tuple[Any, ...]] = [(f"mean of {step.machine.gpus}", *shares(mean))]
    pairs = zip(step.timeline.lanes, step.parts, strict=True)
    of_lanes = [(lane, shares(of)) for lane, of in pairs]
    by_print = itertools.groupby(of_lanes, key=lambda row: tuple(f"{s:.1%}" for s in row[1]))
    groups = [list(group) for _, group in by_print]
    if len(of_lanes) > 1:
        for group in groups[:_MOST_ROWS]:
            rows.append((lanes_in_words([lane for lane, _ in group]), *group[0][1]))
    if len(groups) > _MOST_ROWS:
        rows.append((f"... {len(groups) - _MOST_ROWS} more", *[None] * len(names)))
    units = dict.fromkeys(names, "share")
    return of_rows("where the time of a GPU goes", ["GPUs", *names], rows, units)


def lanes_in_words(lanes: Sequence[Lane]) -> str:
    """A name for consecutive lanes: a rank, or how many ranks of which pipeline ranks."""
    count = sum(len(lane.ranks) for lane in lanes)
    first, last = lanes[0].rank_class.pipeline_rank, lanes[-1].rank_class.pipeline_rank
    if count == 1:
        return f"rank {lanes[0].ranks[0]}"
    return f"{count} of pipeline rank {first}" + (f" to {last}" if last > first else "")


def transfers(step: SimulatedStep | TracedStep) -> Table:
    """Seconds that the mean GPU communicates along each axis, and the share that kernels hide."""
    mean = step.mean
    rows = [
        (axis, busy, exposed, max(0.0, 1 - exposed / busy))
        for axis, busy in mean.communication.items()
        for exposed in [mean.exposed.get(axis, 0.0)]
    ]
    units = {"busy": "s", "exposed": "s", "hidden": "whole share"}
    names = ("axis", "busy", "exposed", "hidden")
    return of_rows("communication of the mean GPU", names, rows, units)


def tasks_in_time(step: SimulatedStep, lane: int) -> Table:
    """The tasks of a lane with the seconds at which each begins and ends, in the order of issue."""
    count = len(step.timeline.lanes)
    if not 0 <= lane < count:
        raise UserError(f"there is no lane {lane}; use 0 to {count - 1}")
    selected = step.timeline.lanes[lane]
    title = f"Tasks of {lanes_in_words([selected])}"
    table = of_class(title, step.timeline.program, selected.rank_class)
    rows = selected.issue.rows.tolist()
    columns = {name: [column[row] for row in rows] for name, column in table.columns.items()}
    begin, end = (selected.begin * TICK).tolist(), (selected.end * TICK).tolist()
    return Table(
        title, {**columns, "begin": begin, "end": end}, {**table.units, "begin": "s", "end": "s"}
    )
