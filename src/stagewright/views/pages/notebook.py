"""Results as a notebook shows them: key figures, a picture, and tables that the reader opens."""

from __future__ import annotations

import html

from stagewright.lower.compiled_run import CompiledRun
from stagewright.texttable import SHOWN, STYLE
from stagewright.time.simulate.step import SimulatedStep
from stagewright.views import tables
from stagewright.views.advice import remarks
from stagewright.views.pages.report import parts_of_time, peaks, tiles
from stagewright.views.pages.shell import details
from stagewright.views.pictures import bars, schedule, svg, timeline
from stagewright.views.summary import summary


def of_compiled(compiled: CompiledRun) -> str:
    """A compiled run as HTML: its memory and schedule."""
    drawn = bars.picture(
        bars.merge_equal(peaks(compiled, None), "stage"), svg.CATEGORIES, "peak",
        "Memory at the peak by category", bars.show_bytes,
    )  # fmt: skip
    parts = [_head(compiled, None), _titled("Memory of a rank at its peak", drawn)]
    if len(compiled.order) > 1:
        parts.append(_titled("Pipeline", schedule.picture(compiled.order)))
    numbers = summary(compiled)
    shown = tables.compute(numbers), tables.memory(numbers), tables.communication(numbers)
    parts += [details(table.title, STYLE + table.html(SHOWN)) for table in shown if len(table)]
    return f"<div>{''.join(parts)}</div>"


def of_simulation(found: SimulatedStep) -> str:
    """A simulated step as HTML: where its time goes."""
    parts = [_head(found.compiled, found), f"<p>{html.escape(str(found.machine))}</p>"]
    parts.append(_titled("Where the time of a GPU goes", parts_of_time(found)))
    parts.append(_titled("Timeline", timeline.picture(found.line)))
    shown = tables.parts(found), tables.transfers(found)
    parts += [details(table.title, STYLE + table.html(SHOWN)) for table in shown]
    return f"<div>{''.join(parts)}</div>"


def _head(compiled: CompiledRun, found: SimulatedStep | None) -> str:
    figures = "; ".join(
        f"{html.escape(name.lower() if name != name.upper() else name)} <b>{html.escape(value)}</b>"
        + (f" ({html.escape(more)})" if more else "")
        for name, value, more in tiles(compiled, found)
    )
    items = "".join(
        f"<li><b>{html.escape(r.level)}: {html.escape(r.about)}</b> {html.escape(r.text)}</li>"
        for r in remarks(compiled, found)
        if r.level != "note"
    )
    title = f"<p><b>{html.escape(compiled.run.describe())}</b><br>{figures}</p>"
    return title + (f"<ul>{items}</ul>" if items else "")


def _titled(title: str, picture: str) -> str:
    return f"<p>{html.escape(title)}</p>{picture}"
