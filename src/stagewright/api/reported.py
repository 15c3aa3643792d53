"""The page about a run: what `stagewright.report` writes."""

from __future__ import annotations

import os
from typing import Any

from stagewright.api.compiled import Asked, compile
from stagewright.api.simulated import simulate
from stagewright.files import write_text
from stagewright.lower.compiled_run import CompiledRun
from stagewright.time.simulate.step import SimulatedStep
from stagewright.views.pages.report import page


def report(
    what: Asked | CompiledRun | SimulatedStep,
    out: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> str:
    """The page of `stagewright report` as HTML, written to `out` if that is given.

    With a `hardware` among the settings, or of a simulation, the page has times as well.

    >>> import stagewright as sw
    >>> page = sw.report("gpt2", layers=2, seq_length=8, tp=2, hardware="h100-sxm")
    >>> page.startswith("<!doctype html>")
    True
    """
    found = None
    if isinstance(what, SimulatedStep):
        found, what = what, what.compiled
    elif "hardware" in settings:
        found = simulate(what, settings.pop("hardware"), **settings)
        what = found.compiled
    compiled = what if isinstance(what, CompiledRun) else compile(what, **settings)
    text = page(compiled, found)
    if out is not None:
        write_text(os.fspath(out), text)
    return text
