"""Results as a notebook shows them: key figures, a picture, and tables that the reader opens."""

from __future__ import annotations

from stagewright.lower.compiled_run import CompiledRun
from stagewright.texttable import SHOWN, Table
from stagewright.time.simulate.step import SimulatedStep
from stagewright.views import step_tables, tables
from stagewright.views.advice import remarks
from stagewright.views.pages.cards import cards
from stagewright.views.pages.charts import parts_of_time, peak_memory
from stagewright.views.pages.templates import render
from stagewright.views.pictures import schedule, svg, timeline
from stagewright.views.summary import summary


def of_compiled(compiled: CompiledRun) -> str:
    """A compiled run as HTML: its memory and schedule."""
    drawn = peak_memory(compiled, None, None)("peak", svg.WIDTH)
    pictures = [("Memory of a rank at its peak", drawn)]
    if len(compiled.order) > 1:
        pictures.append(("Pipeline", schedule.picture(compiled.order)))
    numbers = summary(compiled)
    shown = tables.compute(numbers), tables.memory(numbers), tables.communication(numbers)
    return _page(compiled, None, pictures, [table for table in shown if len(table)])


def of_simulation(found: SimulatedStep) -> str:
    """A simulated step as HTML: where its time goes."""
    pictures = [
        ("Where the time of a GPU goes", parts_of_time(found)("where", svg.WIDTH)),
        ("Timeline", timeline.picture(found.timeline)),
    ]
    shown = [step_tables.parts(found), step_tables.transfers(found)]
    return _page(found.compiled, found, pictures, shown)


def _page(
    compiled: CompiledRun,
    found: SimulatedStep | None,
    pictures: list[tuple[str, svg.Picture]],
    shown: list[Table],
) -> str:
    return render(
        "notebook.html",
        run=compiled.run.describe(),
        machine=str(found.machine) if found else "",
        cards=cards(compiled, found),
        remarks=[r for r in remarks(compiled, found) if r.level != "note"],
        pictures=pictures,
        tables=shown,
        most=SHOWN,
    )
