"""The charts of a run, for its page, notebooks and files: each a picture with its numbers.

Charts of several runs take what they have in common, such as the longest step, so that they have
one scale. Names that begin the ids of pictures are unique on a page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from stagewright.errors import UserError
from stagewright.lower.compiled_run import CompiledRun
from stagewright.numbers import duration, plural, quantity, spans
from stagewright.program import memory, traffic
from stagewright.program.columns import PHASES, Program, RankClass
from stagewright.schedule.actions import SLOTS, flat
from stagewright.schedule.play import bubble, play
from stagewright.texttable import Table
from stagewright.time.simulate.breakdown import Breakdown
from stagewright.time.simulate.step import SimulatedStep
from stagewright.views import step as step_tables
from stagewright.views import tables
from stagewright.views.pages.html import Chart, Details, Part
from stagewright.views.pictures import bars, curves, schedule, timeline
from stagewright.views.pictures import memory as areas
from stagewright.views.pictures.colours import MEMORY, WAITING, WORK, of_axes
from stagewright.views.pictures.scales import BYTES, FLOPS, SECONDS, SHARE, WATTS
from stagewright.views.pictures.svg import Fill
from stagewright.views.summary import Summary, summary
from stagewright.views.tables import alive_in_words, stage_kind, stage_name

MAX_PAIRS = 10
"""Rows of the table of exchanges between ranks."""
MIN_AXIS_SHARE = 1e-3
"""Share of an exchange from which on its table names an axis."""


# ---- time ----------------------------------------------------------------------------------------


def time(step: SimulatedStep) -> Chart:
    """Parts of the step as shares, for the mean GPU and for groups of ranks that differ."""
    seconds = step.seconds
    rows = [
        bars.StackedBar(label, {part: size / seconds for part, size in parts_of_time(of).items()})
        for label, of in [("mean GPU", step.mean), *_distinct_lanes(step)]
    ]
    label = "Where the time of a GPU goes"
    caption = (
        "Share of the step: kernels by phase, communication that no kernel hides (exposed) by "
        "axis, the bubble, in which a rank waits for other ranks, and launches, in which it waits "
        "for its host."
    )
    fills = fills_of_time([step.mean])
    return Chart(bars.picture(rows, fills, "time", label, SHARE), caption, step_tables.parts(step))


def time_of_runs(steps: Mapping[str, SimulatedStep]) -> Chart:
    """Seconds of the mean GPU of several runs by part, on one scale."""
    rows = [bars.StackedBar(run, parts_of_time(step.mean)) for run, step in steps.items()]
    label = "Where the time of the mean GPU goes"
    fills = fills_of_time([step.mean for step in steps.values()])
    picture = bars.picture(rows, fills, "time", label, SECONDS)
    caption = "Seconds of a step of the mean GPU: kernels by phase, exposed communication, waiting."
    return Chart(picture, caption, table_of_bars(label, rows, "run", "s"))


def parts_of_time(of: Breakdown) -> dict[str, float]:
    """Seconds of a step by part: phases, exposed communication by axis, waiting."""
    exposed = {f"{axis} exposed": seconds for axis, seconds in of.exposed.items()}
    waiting = {"bubble": of.bubble, "launches": of.launches}
    return {**of.kernels, **exposed, **waiting}


def fills_of_time(means: Sequence[Breakdown]) -> dict[str, Fill]:
    """Fills of the parts of steps."""
    axes = of_axes(sorted({axis for mean in means for axis in mean.communication}))
    exposed = {f"{axis} exposed": fill for axis, fill in axes.items()}
    return {**WORK, **exposed, **WAITING}


def _distinct_lanes(step: SimulatedStep) -> list[tuple[str, Breakdown]]:
    """Groups of ranks whose printed shares differ, each with its parts."""
    program = step.compiled.program
    parts: dict[tuple[str, ...], Breakdown] = {}
    stages: dict[tuple[str, ...], set[int]] = {}
    for lane, of in zip(step.timeline.lanes, step.parts, strict=True):
        shares = (f"{size / step.seconds:.1%}" for size in parts_of_time(of).values())
        key = (stage_kind(program, lane.rank_class), *shares)
        parts.setdefault(key, of)
        stages.setdefault(key, set()).add(lane.rank_class.pipeline_rank)
    return [
        (f"{key[0]}{'s' * (len(stages[key]) > 1)} {spans(sorted(stages[key]), 2)}", of)
        for key, of in parts.items()
    ]


def timeline_of(step: SimulatedStep, name: str = "timeline", longest: float = 0.0) -> Chart:
    """The step from left to right, a lane for each group of ranks with equal timing."""
    lanes = len(step.timeline.lanes)
    some = f" {timeline.MAX_LANES} of {lanes} groups are shown." * (lanes > timeline.MAX_LANES)
    caption = (
        "One step from left to right, a lane for each group of ranks with equal timing. The height "
        "of a column is the share of its time in which kernels, or transfers along an axis, "
        f"run.{some}"
    )
    return Chart(timeline.picture(step.timeline, name, longest), caption)


MOST_SPANS = 400
"""Points of a curve of power; of more spans, the highest and the lowest of each stretch."""


def power(step: SimulatedStep) -> Chart:
    """Watts of all GPUs over the step."""
    of = step.power_over_time
    watts, edges = of.job.watts, of.seconds
    if len(watts) > MOST_SPANS:
        stretches = np.array_split(np.arange(len(watts)), MOST_SPANS // 2)
        ends = [(s[np.argmax(watts[s])], s[np.argmin(watts[s])]) for s in stretches]
        shown = np.sort(np.array(ends), axis=1).ravel()
        watts, edges = watts[shown], edges[shown]
    job = of.job
    caption = (
        f"Power of all GPUs over the step, in means over {duration(job.span)}: "
        f"{WATTS.show(job.mean)} on average, at most {WATTS.show(job.peak)}. The largest swing "
        f"within 10 ms is {WATTS.show(job.swing)}."
    )
    line = curves.Curve("all GPUs", edges.tolist(), watts.tolist(), "power")
    label = "Power over the step"
    picture = curves.curves([line], label, ("time", SECONDS), ("power", WATTS))
    return Chart(picture, caption, step_tables.power(step))


def _timeline_numbers(step: SimulatedStep) -> Table:
    """Begin and end of each task of each lane."""
    columns: dict[str, list[Any]] = {}
    units: Mapping[str, str] = {}
    for i, lane in enumerate(step.timeline.lanes):
        table = step_tables.tasks_in_time(step, i)
        ranks = [step_tables.lanes_in_words([lane])] * len(table)
        for column, values in {"ranks": ranks, **table.columns}.items():
            columns.setdefault(column, []).extend(values)
        units = table.units
    return Table("Timeline", columns, units)


# ---- memory --------------------------------------------------------------------------------------

POINTS = 500
"""Points of a chart of memory over time in a file of its own."""
FEW_POINTS = 160
"""Points of a chart that is a part of a page."""
MAX_PANELS = 16
"""Charts of memory over time; of more rank classes, a page shows some, evenly chosen."""
_ALIVE_ROWS = 12


def peaks(
    compiled: CompiledRun, step: SimulatedStep | None
) -> list[tuple[RankClass, dict[str, int]]]:
    """Classes of ranks with the bytes of each category at the peak: as simulated if it was."""
    if step:
        lanes = zip(step.timeline.lanes, step.memory_peaks, strict=True)
        return [(lane.rank_class, dict(peak.by_category)) for lane, peak in lanes]
    return [
        (of, {k: v for k, v in of.memory.items() if k != "peak" and v})
        for of in compiled.program.classes
    ]


def _by_stage(
    program: Program, rows: Sequence[tuple[RankClass, Mapping[str, float]]]
) -> list[bars.StackedBar]:
    """A bar for stages with equal parts."""
    kinds = dict.fromkeys(stage_kind(program, of) for of, _ in rows)
    return [
        bar
        for kind in kinds
        for bar in bars.merge_equal(
            [(of.pipeline_rank, parts) for of, parts in rows if stage_kind(program, of) == kind],
            kind,
        )
    ]


def _device(capacity: int | None) -> bars.Limit | None:
    return (
        None if capacity is None else bars.Limit(capacity, f"device memory {BYTES.show(capacity)}")
    )


def peak_memory(
    compiled: CompiledRun, step: SimulatedStep | None, numbers: Summary | None = None
) -> Chart:
    """Memory at the peak by category, and the memory of the device."""
    fit = compiled.fit if step is None else step.fit
    rows = _by_stage(compiled.program, peaks(compiled, step))
    limit = _device(fit.device_memory if fit else None)
    label = "Memory at the peak by category"
    picture = bars.picture(rows, MEMORY, "peak", label, BYTES, limit)
    caption = "Bytes of one rank at its peak, by category."
    return Chart(picture, caption, None if numbers is None else tables.memory(numbers))


def memory_of_runs(runs: Mapping[str, tuple[CompiledRun, SimulatedStep | None]]) -> Chart:
    """Memory of the fullest rank of several runs, on one scale; a line if devices are equal."""
    rows = [
        bars.StackedBar(run, max((peak for _, peak in peaks(*of)), key=lambda p: sum(p.values())))
        for run, of in runs.items()
    ]
    fits = [step.fit if step else compiled.fit for compiled, step in runs.values()]
    devices = {fit.device_memory if fit else None for fit in fits}
    limit = _device(devices.pop()) if len(devices) == 1 else None
    label = "Memory of the fullest rank at its peak"
    picture = bars.picture(rows, MEMORY, "memory", label, BYTES, limit)
    caption = "Bytes of the fullest rank of each run at its peak, by category."
    return Chart(picture, caption, table_of_bars(label, rows, "run", "B"))


def memory_over_time(
    compiled: CompiledRun,
    step: SimulatedStep | None,
    data: dict[str, Any],
) -> tuple[Chart, dict[str, list[Part]]]:
    """The legend, and by group of ranks the memory over the step, all on one scale.

    In a simulation over its time. Adds to `data` what a script reads.
    """
    rank_classes, ranks = _rank_classes(compiled, step)
    chosen = timeline.chosen(len(rank_classes), MAX_PANELS)
    levels = [_levels(rank_classes, step, i, FEW_POINTS) for i in chosen]
    fit = step.fit if step else compiled.fit
    scale = areas.Scale(max(max(of.total) for of in levels), fit.device_memory if fit else None)
    panels: dict[str, list[Part]] = {}
    for i, of in zip(chosen, levels, strict=True):
        rank_class, name = rank_classes[i], f"held{i}"
        data[name] = areas.data(of)
        stage = stage_name(compiled.program, rank_class)
        label = f"Memory of {stage} over a step: peak {quantity(max(of.total), 'B')}"
        several = sum(each.pipeline_rank == rank_class.pipeline_rank for each in rank_classes) > 1
        order = "with tasks in the order of issue: " if step else ""
        panels[stage + (f": {spans(ranks[i], 1)}" if several else "")] = [
            f"Rank{'s' * (len(ranks[i]) > 1)} {spans(ranks[i])}. "
            f"Peak {order}{_peak_in_words(rank_class)}.",
            Chart(areas.picture(of, name, label, scale), live=name),
            Details("What is alive at the peak", [_alive(rank_class)]),
        ]
    return Chart(areas.legend(levels, "held-legend")), panels


def _rank_classes(
    compiled: CompiledRun, step: SimulatedStep | None
) -> tuple[list[RankClass], list[list[int]]]:
    """The classes of ranks, or the lanes of a simulation, and the ranks of each."""
    if step:
        lanes = step.timeline.lanes
        return [lane.rank_class for lane in lanes], [lane.ranks.tolist() for lane in lanes]
    classes = compiled.program.classes
    return [*classes], [of.ranks.tolist() for of in classes]


def _levels(
    rank_classes: Sequence[RankClass], step: SimulatedStep | None, index: int, points: int
) -> areas.Levels:
    if step:
        return areas.over_seconds(step.memory_over_time[index], step.seconds, points)
    return areas.over_rows(rank_classes[index], points)


def _fullest_over_time(compiled: CompiledRun, step: SimulatedStep | None) -> Chart | None:
    """Memory over the step of the fullest rank, as one picture."""
    if not varies(compiled):
        return None
    rank_classes, ranks = _rank_classes(compiled, step)
    sizes = [sum(peak.values()) for _, peak in peaks(compiled, step)]
    index = sizes.index(max(sizes))
    levels = _levels(rank_classes, step, index, POINTS)
    fit = step.fit if step else compiled.fit
    scale = areas.Scale(capacity=fit.device_memory if fit else None)
    stage = stage_name(compiled.program, rank_classes[index])
    label = f"Memory of {stage} over a step (ranks {spans(ranks[index])})"
    unit = "begin" if levels.unit == "seconds" else "task"
    columns = {unit: levels.edges[:-1], **levels.by, "event": levels.events}
    picture = areas.picture_with_legend(levels, "memory", label, scale)
    return Chart(picture, label, Table(label, columns))


def varies(compiled: CompiledRun) -> bool:
    """True for training; in inference, memory is constant."""
    return any(len(of.values.value) for of in compiled.program.classes)


def _peak_in_words(of: RankClass) -> str:
    """The bytes at the peak and the task that runs then, as a sentence."""
    tasks = of.tasks
    row = of.work.changes.peak_row
    microbatch = int(tasks.microbatch[row])
    during = tasks.names[int(tasks.name[row])]
    if microbatch >= 0:
        during += f" of microbatch {microbatch}"
    peak = of.memory["peak"]
    return f"{quantity(peak, 'B')} ({peak:,} bytes) during {during}"


def _alive(of: RankClass) -> Table:
    """The values alive at the peak, the largest first."""
    groups = memory.groups_alive(of.values, of.work.changes.peak_row)[:_ALIVE_ROWS]
    columns = {
        "category": [g.category.replace("_", " ") for g in groups],
        "values": [alive_in_words(g._asdict()) for g in groups],
        "bytes": [f"{g.bytes:,}" for g in groups],
    }
    return Table("Alive at the peak", columns, {"bytes": ""})


# ---- work, communication, schedule ---------------------------------------------------------------


def work(compiled: CompiledRun, numbers: Summary) -> Chart:
    """FLOPs of a rank by phase."""
    of_classes = [
        (of, {phase: entry["flops"][phase] for phase in PHASES})
        for of, entry in zip(compiled.program.classes, numbers["rank_classes"], strict=True)
    ]
    rows = _by_stage(compiled.program, of_classes)
    picture = bars.picture(rows, WORK, "flops", "FLOPs of a rank by phase", FLOPS)
    caption = "FLOPs of one rank in a step, two for each multiply-add."
    return Chart(picture, caption, tables.compute(numbers))


def bytes_by_axis(numbers: Summary) -> Chart | None:
    """Bytes along each axis, of the rank that sends most along it; None: all send none."""
    most: dict[str, dict[str, int]] = {}
    for entry in numbers["rank_classes"]:
        by_axis: dict[str, dict[str, int]] = {}
        for row in [*entry["collectives"], *entry["sends"]]:
            phases = by_axis.setdefault(row["axis"], dict.fromkeys(PHASES, 0))
            phases[row["phase"]] += row["bytes"]
        for axis, phases in by_axis.items():
            if sum(phases.values()) > sum(most.get(axis, {}).values()):
                most[axis] = phases
    if not most:
        return None
    rows = [bars.StackedBar(axis, phases) for axis, phases in sorted(most.items())]
    label = "Bytes by axis and phase"
    caption = (
        "Bytes per step of the rank that communicates most along each axis: local inputs of "
        "collectives, and messages that the rank sends."
    )
    picture = bars.picture(rows, WORK, "axes", label, BYTES)
    return Chart(picture, caption, table_of_bars(label, rows, "axis", "B"))


def largest_exchanges(compiled: CompiledRun) -> Table:
    """The largest exchanges between two ranks, or blocks of ranks, and the pairs with as much.

    A collective counts as if its ranks exchanged data directly, each sending equally many bytes to
    every other.
    """
    program = compiled.program
    edges = traffic.blocks(program)
    by_axis = {axis: traffic.matrix(program, axis, edges).bytes for axis in traffic.axes(program)}
    total = np.sum([*by_axis.values()], axis=0)
    pairs: dict[tuple[str, int], list[tuple[int, int]]] = {}
    order = np.argsort(-total, axis=None, kind="stable")
    for sender, receiver in zip(*np.unravel_index(order, total.shape), strict=True):
        size = round(float(total[sender, receiver]))
        visible = MIN_AXIS_SHARE * total[sender, receiver]
        axes = ", ".join(axis for axis, sent in by_axis.items() if sent[sender, receiver] > visible)
        if not size or (len(pairs) == MAX_PAIRS and (axes, size) not in pairs):
            break
        pairs.setdefault((axes, size), []).append((int(sender), int(receiver)))

    def ranks(block: int) -> str:
        return spans(range(int(edges[block]), int(edges[block + 1])))

    first = [members[0] for members in pairs.values()]
    columns = {
        "from": [ranks(sender) for sender, _ in first],
        "to": [ranks(receiver) for _, receiver in first],
        "along": [axes for axes, _ in pairs],
        "bytes": [size for _, size in pairs],
        "equal pairs": [len(members) for members in pairs.values()],
    }
    return Table("Largest exchanges", columns, {"bytes": "B", "equal pairs": "count"})


def schedule_of(compiled: CompiledRun) -> Chart | None:
    """The pipeline schedule; None for one rank and one microbatch."""
    order, run = compiled.order, compiled.run
    if len(order) == 1 and run.microbatches == 1:
        return None
    caption = (
        f"Schedule {run.schedule}: {plural(run.microbatches, 'microbatch', 'microbatches')} pass "
        f"through {plural(run.virtual_stages, 'stage', 'stages')} on "
        f"{plural(len(order), 'pipeline rank', 'pipeline ranks')}. 2F0 is the forward pass of "
        "microbatch 0 through stage 2. With backward passes twice as long as forward passes, and "
        f"communication that takes no time, ranks are idle {bubble(order):.1%} of the step."
    )
    return Chart(schedule.picture(order), caption)


def _schedule_numbers(compiled: CompiledRun) -> Table:
    """Begin and end of each action, in slots."""
    times = play(compiled.order, SLOTS)
    rows = [
        (rank, str(action), *map(float, times[action]))
        for rank, steps in enumerate(compiled.order)
        for action in flat(steps)
    ]
    return Table.of_rows("Schedule", ("rank", "action", "begin", "end"), rows)


def table_of_bars(title: str, rows: Sequence[bars.StackedBar], name: str, unit: str) -> Table:
    """The numbers behind bars."""
    parts = list(dict.fromkeys(part for row in rows for part, size in row.parts.items() if size))
    columns: dict[str, list[Any]] = {name: [row.label for row in rows]}
    for part in parts:
        columns[part.replace("_", " ")] = [row.parts.get(part, 0) for row in rows]
    return Table(title, columns, dict.fromkeys([*columns][1:], unit))


# ---- notebooks -----------------------------------------------------------------------------------


def of_compiled(compiled: CompiledRun) -> list[Chart]:
    """The charts that a notebook shows of a compiled run: its memory and schedule."""
    pipeline = schedule_of(compiled) if len(compiled.order) > 1 else None
    return [peak_memory(compiled, None), *([pipeline] if pipeline else [])]


def of_step(step: SimulatedStep) -> list[Chart]:
    """The charts that a notebook shows of a simulated step: where its time goes, and when."""
    return [time(step)._replace(numbers=None), timeline_of(step)]


# ---- charts by name ------------------------------------------------------------------------------


def _needs_time(step: SimulatedStep | None, name: str) -> SimulatedStep:
    if step is None:
        raise UserError(f"--picture {name} is of a timed step; add --hardware")
    return step


def _timeline(compiled: CompiledRun, step: SimulatedStep | None) -> Chart:
    step = _needs_time(step, "timeline")
    return timeline_of(step)._replace(numbers=_timeline_numbers(step))


def _schedule(compiled: CompiledRun, step: SimulatedStep | None) -> Chart | None:
    chart = schedule_of(compiled)
    return None if chart is None else chart._replace(numbers=_schedule_numbers(compiled))


CHARTS: Mapping[str, Callable[[CompiledRun, SimulatedStep | None], Chart | None]] = {
    "time": lambda compiled, step: time(_needs_time(step, "time")),
    "timeline": _timeline,
    "memory": lambda compiled, step: peak_memory(compiled, step, summary(compiled)),
    "memory-over-step": _fullest_over_time,
    "flops": lambda compiled, step: work(compiled, summary(compiled)),
    "communication": lambda compiled, step: bytes_by_axis(summary(compiled)),
    "schedule": _schedule,
    "power": lambda compiled, step: power(_needs_time(step, "power")),
}
"""Charts of one run by the name that `report --picture` takes."""
