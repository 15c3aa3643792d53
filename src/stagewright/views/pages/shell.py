"""The frame of all pages: head, style, script, sections, tabs and tables.

Sections have ids, so that a list at the top leads to them. Tabs are panels below each other until
the script puts them behind each other; on paper they are below each other again.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

from stagewright.texttable import Table


class Section(NamedTuple):
    """A part of a page."""

    id: str
    title: str
    body: str


class Panel(NamedTuple):
    """One of several tabs."""

    title: str
    body: str


def page_of(
    title: str, head: str, sections: Sequence[Section], data: Mapping[str, Any] | None = None
) -> str:
    """The whole file as text; `head` is HTML below the title, `data` is read by the script."""
    links = "".join(f'<li><a href="#{s.id}">{html.escape(s.title)}</a></li>' for s in sections)
    body = "".join(
        f'<section id="{s.id}" aria-labelledby="{s.id}-title">'
        f'<h2 id="{s.id}-title">{html.escape(s.title)}</h2>{s.body}</section>'
        for s in sections
    )
    script_data = json.dumps(data or {}, separators=(",", ":")).replace("<", "\\u003c")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title>"
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<style>{_file('style.css')}</style></head><body>"
        '<a class="skip" href="#main">Skip to the content</a>'
        f"<header><h1>{html.escape(title)}</h1>{head}</header>"
        + (f'<nav aria-label="Sections"><ul>{links}</ul></nav>' if len(sections) > 1 else "")
        + f'<main id="main" tabindex="-1">{body}</main>'
        f'<script type="application/json" id="data">{script_data}</script>'
        f"<script>{_file('script.js')}</script></body></html>\n"
    )


def _file(name: str) -> str:
    return (files("stagewright.views.pages") / name).read_text(encoding="utf-8")


def picture(svg: str, caption: str = "", live: str = "") -> str:
    """A picture that scrolls by itself where it is wider than the page.

    `live` is the id of a line below, in which the script describes the place under the cursor.
    """
    below = f"<figcaption>{html.escape(caption)}</figcaption>" if caption else ""
    at = f'<p class="at" id="at-{live}" aria-live="polite"></p>' if live else ""
    return f'<figure><div class="wide">{svg}</div>{at}{below}</figure>'


def table(shown: Table) -> str:
    """A table that scrolls by itself where it is wider than the page."""
    name = html.escape(shown.title)
    return f'<div class="wide" role="region" tabindex="0" aria-label="{name}">{shown.html()}</div>'


def details(summary: str, body: str, *, on_paper: bool = True) -> str:
    """A body that the reader opens; paper shows it too, if `on_paper`."""
    opened = " data-print" if on_paper else ""
    return f"<details{opened}><summary>{html.escape(summary)}</summary>{body}</details>"


def paragraph(text: str) -> str:
    """A paragraph of plain text."""
    return f"<p>{html.escape(text)}</p>"


def tabs(name: str, label: str, panels: Sequence[Panel]) -> str:
    """Panels, of which the script shows one at a time; a single panel has no tab."""
    if len(panels) == 1:
        return panels[0].body
    buttons = "".join(
        f'<button type="button" role="tab" id="{name}-tab-{nth}" aria-controls="{name}-{nth}" '
        f'aria-selected="{"false" if nth else "true"}" tabindex="{-1 if nth else 0}">'
        f"{html.escape(panel.title)}</button>"
        for nth, panel in enumerate(panels)
    )
    bodies = "".join(
        f'<div role="tabpanel" id="{name}-{nth}" aria-labelledby="{name}-tab-{nth}" tabindex="0">'
        f"<h3>{html.escape(panel.title)}</h3>{panel.body}</div>"
        for nth, panel in enumerate(panels)
    )
    return (
        f'<div class="tabs"><div role="tablist" aria-label="{html.escape(label)}">{buttons}</div>'
        f"{bodies}</div>"
    )
