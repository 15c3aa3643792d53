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
from stagewright.views.advice import remarks
from stagewright.views.pages import charts, settings
from stagewright.views.pages.html import (
    Cards,
    Chart,
    Columns,
    PageSection,
    Paragraph,
    Part,
    Remarks,
    render,
)
from stagewright.views.pages.report import cards, fit_of, heading

Runs = Mapping[str, tuple[CompiledRun, SimulatedStep | None]]
"""Runs by name, each with its simulation if it has one."""


def compare_page(runs: Runs) -> str:
    """The page of several runs as HTML."""
    steps = _steps(runs)
    differ = settings.differing_settings(runs)
    sections = [
        PageSection(
            "settings",
            "Settings that differ",
            [differ if len(differ) else "None: these are the same run."],
            "Settings",
        ),
        PageSection(
            "figures",
            "Key figures",
            [figures(runs), "In parentheses: the difference from the first run."]
            if steps
            else ["This page was made without --hardware, so it has no times."],
            "Figures",
        ),
        *([PageSection("time", "Time", _times(steps))] if steps else []),
        PageSection("memory", "Memory", [charts.memory_of_runs(runs)]),
        PageSection(
            "runs", "Runs", [part for name, run in runs.items() for part in _run(name, *run)]
        ),
    ]
    return render(_title(runs), _verdict(runs), sections)


def _steps(runs: Runs) -> dict[str, SimulatedStep]:
    return {name: step for name, (_, step) in runs.items() if step is not None}


def _title(runs: Runs) -> str:
    """The runs, after what all have in common: the model, and the hardware."""
    models = {compiled.model.name for compiled, _ in runs.values()}
    machines = {step.machine.hardware.name if step else "" for _, step in runs.values()} - {""}
    common = [*models] * (len(models) == 1) + [*machines] * (len(machines) == 1)
    of = f" of {' on '.join(common)}" if len(models) == 1 else "".join(f" on {m}" for m in common)
    return f"{len(runs)} runs{of} compared: {', '.join(runs)}"


def _verdict(runs: Runs) -> list[Part]:
    """The runs that do not fit, and the fastest of those that do."""
    unfit = [name for name, run in runs.items() if (fit := fit_of(*run)) and not fit.fits]
    parts: list[Part] = []
    if unfit:
        moot = "Figures of a run that does not fit are of a step that cannot run."
        parts.append(Paragraph(f"**Out of memory:** {', '.join(unfit)}. {moot}", "verdict"))
    rates = {
        name: step.tokens_per_second / step.machine.gpus
        for name, step in _steps(runs).items()
        if name not in unfit
    }
    if len(rates) > 1:
        first, second, *_ = sorted(rates, key=lambda name: -rates[name])
        parts.append(
            f"**{first}** has the most tokens/s per GPU{' of the runs that fit' * bool(unfit)}: "
            f"{rates[first]:,.1f}, {rates[first] / rates[second] - 1:.1%} more than {second}."
        )
    return parts


def _times(steps: Mapping[str, SimulatedStep]) -> list[Part]:
    longest = max(step.seconds for step in steps.values())
    timelines = [
        [
            Paragraph(name, tag="h3"),
            charts.timeline_of(step, f"timeline{i}", longest)._replace(caption=""),
        ]
        for i, (name, step) in enumerate(steps.items())
    ]
    return [
        charts.time_of_runs(steps),
        Paragraph("Timelines on one scale", tag="h3"),
        "A lane for each group of ranks with equal timing. The height of a column is the share of "
        "its time in which kernels, or transfers along an axis, run.",
        Columns(timelines),
    ]


def _run(name: str, compiled: CompiledRun, step: SimulatedStep | None) -> list[Part]:
    known = [remark for remark in remarks(compiled, step) if remark.level != "note"]
    return [
        Paragraph(f"{name}: {heading(compiled, step)}", tag="h3"),
        Cards(cards(compiled, step)),
        *([Remarks(known)] if known else []),
    ]


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
    return Table("", columns, dict.fromkeys(of_runs, ""))


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
    spent = step.expense()
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
