"""The page that compares runs: settings that differ, key figures, and charts on one scale.

Runs may differ in anything: the model, the machine, the layout, the schedule. The first is the one
that figures of the others are compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from stagewright.errors import UserError
from stagewright.lower.compiled_run import CompiledRun
from stagewright.numbers import count, duration, quantity
from stagewright.texttable import Table
from stagewright.time.simulate.step import SimulatedStep
from stagewright.views.advice import Remark, remarks
from stagewright.views.pages import charts, settings
from stagewright.views.pages.html import Card, Chart, render
from stagewright.views.pages.report import cards, fit_of, heading

Runs = Mapping[str, tuple[CompiledRun, SimulatedStep | None]]
"""Runs by name, each with its simulation if it has one."""


class _RunPanel(NamedTuple):
    name: str
    heading: str
    cards: list[Card]
    remarks: list[Remark]
    timeline: Chart | None


def compare_page(runs: Runs) -> str:
    """The page of several runs as HTML."""
    steps = _steps(runs)
    longest = max((step.seconds for step in steps.values()), default=0.0)
    panels = [
        _RunPanel(
            name,
            heading(compiled, step),
            cards(compiled, step),
            [remark for remark in remarks(compiled, step) if remark.level != "note"],
            charts.timeline_of(step, f"timeline{i}", longest)._replace(caption="")
            if step
            else None,
        )
        for i, (name, (compiled, step)) in enumerate(runs.items())
    ]
    return render(
        "compare.html",
        title=f"{len(runs)} runs compared: {', '.join(runs)}",
        settings=settings.differing_settings(runs),
        figures=figures(runs),
        unfit=[name for name, run in runs.items() if (fit := fit_of(*run)) and not fit.fits],
        runs=panels,
        time=charts.time_of_runs(steps) if steps else None,
        memory=charts.memory_of_runs(runs),
    )


def _steps(runs: Runs) -> dict[str, SimulatedStep]:
    return {name: step for name, (_, step) in runs.items() if step is not None}


def figures(runs: Runs) -> Table:
    """Key figures, a column for each simulated run; later runs have the distance to the first."""
    of_runs = {name: _figures(step) for name, step in _steps(runs).items()}
    names = list(dict.fromkeys(name for of_run in of_runs.values() for name in of_run))
    columns: dict[str, list[str]] = {"figure": names, **{run: [] for run in of_runs}}
    for name in names:
        values = {run: of_run.get(name) for run, of_run in of_runs.items()}
        first = next(iter(values.values()))
        for i, (run, figure) in enumerate(values.items()):
            cell = "" if figure is None else figure.words
            if i and first and figure and first.compared and first.value:
                cell += f" ({figure.value / first.value - 1:+.1%})"
            columns[run].append(cell)
    return Table("Key figures", columns, dict.fromkeys(of_runs, ""))


class _Figure(NamedTuple):
    """A key figure of a run; `compared`: its distance from the first run is shown."""

    value: float
    words: str
    compared: bool = True


def _figures(step: SimulatedStep) -> dict[str, _Figure]:
    seconds, rate = step.seconds, step.tokens_per_second
    per_gpu, exposed = rate / step.machine.gpus, sum(step.mean.exposed.values()) / seconds

    def share(value: float) -> _Figure:
        return _Figure(value, f"{value:.1%}", compared=False)

    def size(value: int, *, compared: bool) -> _Figure:
        return _Figure(value, quantity(value, "B"), compared)

    result = {
        "GPUs": _Figure(step.machine.gpus, f"{step.machine.gpus:,}", compared=False),
        "step": _Figure(seconds, duration(seconds)),
        "tokens": _Figure(step.tokens, f"{step.tokens:,}", compared=False),
        "tokens/s": _Figure(rate, count(round(rate))),
        "tokens/s per GPU": _Figure(per_gpu, f"{per_gpu:,.1f}"),
    }
    if step.compiled.run.mode == "train":
        result |= {"MFU": share(step.mfu), "causal MFU": share(step.mfu_causal)}
    result |= {
        "bubble": share(step.mean.bubble / seconds),
        "exposed communication": share(exposed),
        "peak memory": size(step.fit.peak, compared=True),
        "device memory": size(step.fit.device_memory, compared=False),
    }
    spent = step.expense(step.cluster.price if step.cluster else None)
    usd, joules = spent.usd_per_million_tokens, spent.joules_per_token
    if usd is not None:
        result["USD per million tokens"] = _Figure(usd, f"{usd:.3g}")
    return {**result, "J per token": _Figure(joules, f"{joules:.3g}")}


def _timed(runs: Runs) -> Chart:
    steps = _steps(runs)
    if not steps:
        raise UserError("--picture time is of timed steps; add --hardware")
    return charts.time_of_runs(steps)


CHARTS: Mapping[str, Callable[[Runs], Chart]] = {"time": _timed, "memory": charts.memory_of_runs}
"""Charts of several runs by the name that `report --picture` takes."""
