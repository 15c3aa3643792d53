"""What results look like in a notebook: key figures, a picture, and tables for who opens them."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from stagewright.numbers import quantity
from stagewright.texttable import SHOWN, STYLE
from stagewright.views import tables
from stagewright.views.advice import remarks
from stagewright.views.pages.report import parts_of_time, peaks, tiles
from stagewright.views.pages.shell import details
from stagewright.views.pictures import bars, schedule, svg, timeline

if TYPE_CHECKING:
    from stagewright.lower.training import Compiled
    from stagewright.time.simulate.step import Simulation


def of_compiled(compiled: Compiled) -> str:
    """A run: its memory and schedule."""
    told = compiled.summary()
    drawn = bars.picture(
        bars.merge_equal(peaks(compiled, None), "stage"), svg.CATEGORIES, "peak",
        "Memory at the peak by category", lambda size: quantity(round(size), "B"),
    )  # fmt: skip
    parts = [_head(compiled, None), _titled("Memory of a rank at its peak", drawn)]
    if len(compiled.order) > 1:
        parts.append(_titled("Pipeline", schedule.picture(compiled.order)))
    found = (tables.compute(told), tables.memory(told), tables.communication(told))
    parts += [details(each.title, STYLE + each.html(SHOWN)) for each in found if len(each)]
    return f"<div>{''.join(parts)}</div>"


def of_simulation(found: Simulation) -> str:
    """A step on a machine: where its time goes."""
    parts = [_head(found.compiled, found), f"<p>{html.escape(str(found.machine))}</p>"]
    parts.append(_titled("Where the time of a GPU goes", parts_of_time(found)))
    parts.append(_titled("Timeline", timeline.picture(found.line)))
    parts += [
        details(each.title, STYLE + each.html(SHOWN)) for each in (found.where(), found.transfers())
    ]
    return f"<div>{''.join(parts)}</div>"


def _head(compiled: Compiled, found: Simulation | None) -> str:
    figures = "; ".join(
        f"{html.escape(name.lower() if name != name.upper() else name)} <b>{html.escape(value)}</b>"
        + (f" ({html.escape(more)})" if more else "")
        for name, value, more in tiles(compiled, found)
    )
    said = "".join(
        f"<li><b>{html.escape(r.level)}: {html.escape(r.about)}</b> {html.escape(r.text)}</li>"
        for r in remarks(compiled, found)
        if r.level != "note"
    )
    title = f"<p><b>{html.escape(compiled.run.describe())}</b><br>{figures}</p>"
    return title + (f"<ul>{said}</ul>" if said else "")


def _titled(title: str, picture: str) -> str:
    return f"<p>{html.escape(title)}</p>{picture}"
