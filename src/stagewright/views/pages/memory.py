"""Memory over a step: a chart for each class of ranks, as a page or as a part of one.

A script adds a cursor, moved by mouse or keys, and describes the memory at the cursor; without a
script the charts and the tables of the peaks remain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from stagewright.errors import UserError
from stagewright.lower.compiled_run import CompiledRun
from stagewright.numbers import quantity, spans
from stagewright.program import memory
from stagewright.program.columns import Program, RankClass
from stagewright.texttable import Table
from stagewright.time.simulate.step import SimulatedStep
from stagewright.views.pages.charts import Chart, chart
from stagewright.views.pages.templates import render
from stagewright.views.pictures import memory as pictures
from stagewright.views.pictures import timeline
from stagewright.views.stages import stage_name
from stagewright.views.tables import alive_in_words

POINTS = 500
"""Points of a chart on a page of its own."""
FEW_POINTS = 160
"""Points of a chart that is a part of a page."""
MOST_CLASSES = 16
"""Charts of memory over time; of more rank classes, a page shows some, evenly chosen."""
_SHOWN = 12  # groups of values alive at the peak


class Panel(NamedTuple):
    """Memory over a step of the ranks of a class, or of a lane of a simulation."""

    title: str
    ranks: str
    peak: str
    chart: Chart
    alive: Table


class OverTime(NamedTuple):
    """The charts on one scale, their legend, and how many there would be in all."""

    legend: Chart
    panels: Sequence[Panel]
    classes: int


def page(compiled: CompiledRun) -> str:
    """The page of a compiled training run; UserError for inference, whose memory is constant."""
    if compiled.run.mode != "train":
        raise UserError(
            f"--memory-plot is for training, got mode={compiled.run.mode}, where all is held all "
            "the time; drop it"
        )
    data: dict[str, Any] = {}
    shown = over_time(compiled, None, data, points=POINTS, most_classes=None)
    return render(
        "memory.html",
        title=f"Memory of a rank over one step: {compiled.model.name}",
        run=compiled.run.describe(),
        shown=shown,
        data=data,
    )


def over_time(
    compiled: CompiledRun,
    found: SimulatedStep | None,
    data: dict[str, Any],
    *,
    points: int = FEW_POINTS,
    most_classes: int | None = MOST_CLASSES,
) -> OverTime:
    """Memory over the step, in a simulation over its time; adds to `data` what a script reads."""
    if found:
        of_class = [lane.rank_class for lane in found.timeline.lanes]
        ranks = [lane.ranks.tolist() for lane in found.timeline.lanes]
    else:
        of_class = [*compiled.program.classes]
        ranks = [of.ranks.tolist() for of in of_class]
    chosen = timeline.chosen(len(of_class), most_classes or len(of_class))
    levels = [
        pictures.over_seconds(found.memory_over_time[nth], found.seconds, points)
        if found
        else pictures.over_rows(of_class[nth], points)
        for nth in chosen
    ]
    fit = found.fit if found else compiled.fit
    capacity = fit.device_memory if fit else None
    scale = pictures.Scale(max(max(each.total) for each in levels), capacity)
    panels = [
        _panel(compiled.program, nth, each, scale, of_class, ranks, data)
        for nth, each in zip(chosen, levels, strict=True)
    ]
    legend = chart(lambda name, width: pictures.legend(levels, name, width), "held-legend")
    return OverTime(legend, panels, len(of_class))


def _panel(
    program: Program,
    nth: int,
    levels: pictures.Levels,
    scale: pictures.Scale,
    of_class: Sequence[RankClass],
    ranks: Sequence[Sequence[int]],
    data: dict[str, Any],
) -> Panel:
    name, of, mine = f"held{nth}", of_class[nth], ranks[nth]
    data[name] = pictures.data(levels)
    peak = quantity(max(levels.total), "B")
    stage = stage_name(program, of)
    label = f"Memory of {stage} over a step: peak {peak}"
    drawn = chart(
        lambda _, width: pictures.picture(levels, name, label, scale, width), name, live=name
    )
    alike = sum(each.pipeline_rank == of.pipeline_rank for each in of_class) > 1
    title = stage + (f": {spans(mine, 1)}" if alike else "")
    who = f"Rank{'s' * (len(mine) > 1)} {spans(mine)}"
    return Panel(title, who, _peak_in_words(of), drawn, _alive(of))


def _peak_in_words(of: RankClass) -> str:
    """The bytes at the peak and the task that runs then, as a sentence."""
    tasks = of.tasks
    row = memory.peak_row(of.values, len(tasks))
    microbatch = int(tasks.microbatch[row])
    during = tasks.names[int(tasks.name[row])]
    if microbatch >= 0:
        during += f" of microbatch {microbatch}"
    peak = of.memory["peak"]
    return f"{quantity(peak, 'B')} ({peak:,} bytes) during {during}"


def _alive(of: RankClass) -> Table:
    """The values alive at the peak, the largest first."""
    groups = memory.groups_alive(of.values, memory.peak_row(of.values, len(of.tasks)))[:_SHOWN]
    columns = {
        "category": [g.category.replace("_", " ") for g in groups],
        "values": [alive_in_words(g._asdict()) for g in groups],
        "bytes": [f"{g.bytes:,}" for g in groups],
    }
    return Table("Alive at the peak", columns, {"bytes": ""})
