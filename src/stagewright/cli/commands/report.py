"""The command that writes a page about a run, a page that compares runs, or one of their charts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stagewright.cli import output, runs
from stagewright.cli.command import command
from stagewright.cli.commands.simulate import run_experiment
from stagewright.cli.options import ALLOW_OOM, FORCE, experiment_options, output_file
from stagewright.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from stagewright.lower.compiled_run import CompiledRun
    from stagewright.run.experiment import Experiment
    from stagewright.time.simulate.step import SimulatedStep
    from stagewright.views.pages.html import Chart

_RUN_FILES = (".yaml", ".yml")


@command(
    50,
    "stagewright report llama3.1-70b --tp 8 --pp 4 --dp 2 -o run.html",
    "stagewright report llama3-8b --dp 8 --zero 3 --hardware h100-sxm -o step.html",
    "stagewright report gpt2 --hardware h100-sxm --picture time -o time.svg",
)
@experiment_options()
@click.argument("others", nargs=-1, metavar="[MODEL]...")
@output_file(
    "-o",
    "--out",
    required=True,
    help="The page, such as run.html; with --picture a picture (.svg) or its numbers (.csv).",
)
@click.option(
    "--picture",
    metavar="NAME",
    help="Write one chart: time, timeline, memory, memory-over-step, flops, communication, "
    "schedule or power; of several runs time or memory.",
)
@FORCE
@ALLOW_OOM
def report(
    model: str | None,
    others: tuple[str, ...],
    config: str | None,
    out: str,
    picture: str | None,
    **settings: Any,
) -> int:
    """Write a page about a run: memory, communication, pipeline; with --hardware, time.

    One file of HTML that needs no network. MODEL is a preset (see `stagewright models`), the path
    of a Hugging Face config.json, an id of the hub that is in its local cache, a run file (.yaml),
    a launch script of another tool, or a bundle. Several of them make a page that compares these
    runs; options apply to all of them. The exit code is 3 if a run does not fit into the memory of
    the hardware, or into --device-memory.
    """
    from stagewright.files import write_text
    from stagewright.numbers import quantity

    _check_output(out, picture, several=bool(others))
    names = [model, *others] if others else [model]
    if others and config is not None:
        raise UserError("--config is for one run; name run files as MODEL to compare runs")
    reported = {
        _label(name, i, names): _run(name, config, settings) for i, name in enumerate(names)
    }
    if picture is None:
        text = _page(reported)
    else:
        chart = _chart(picture, reported)
        text = chart.picture.file() if out.endswith(".svg") else _numbers(chart)
    write_text(out, text)
    output.say(f"{out}: {quantity(len(text.encode()), 'B')}")
    fits = [compiled.fit if step is None else step.fit for compiled, step in reported.values()]
    unfit = [fit for fit in fits if fit is not None and fit.cannot_fit]
    return runs.code_of(unfit[0] if unfit else None)


def _check_output(out: str, picture: str | None, *, several: bool) -> None:
    """Refuse, before any work, an unknown chart, or an ending that is not of what is written."""
    is_chart = out.endswith((".svg", ".csv"))
    if picture is None:
        if is_chart:
            raise UserError(f"{out}: is a chart or its numbers; add --picture NAME, such as time")
        if not out.endswith((".html", ".htm")) and Path(out).suffix:
            raise UserError(f"{out}: a report is a page; name it .html")
        return
    from stagewright.views.pages import charts, compare

    known = compare.CHARTS if several else charts.CHARTS
    if picture not in known:
        names, hint = ", ".join(known), did_you_mean(picture, known)
        raise UserError(f"--picture is {picture!r}, expected one of {names}{hint}")
    if not is_chart:
        raise UserError(f"{out}: a chart is written as .svg, its numbers as .csv")


def _label(name: str | None, index: int, names: list[str | None]) -> str:
    """Name of a run on the page: its file without the ending, numbered if several are equal."""
    suffixes = (*_RUN_FILES, ".json", ".bundle")
    texts = [str(each) for each in names]
    stems = [Path(text).stem if text.endswith(suffixes) else text for text in texts]
    stem = stems[index]
    return stem if stems.count(stem) == 1 else f"{stem} {stems[: index + 1].count(stem)}"


def _run(
    model: str | None, config: str | None, settings: dict[str, Any]
) -> tuple[CompiledRun, SimulatedStep | None]:
    """Compile a run, and simulate it if it names hardware."""
    from stagewright.launch import files
    from stagewright.trace.formats.archive import is_bundle

    if model is not None and config is None and (is_bundle(model) or model.endswith(_RUN_FILES)):
        model, config = None, model
    experiment = runs.load_experiment(model, config, settings)
    if experiment.cluster.hardware is not None:
        step = run_experiment(experiment, model, config)
        return step.compiled, step
    if not files.find(config or model or ""):  # a launch file says more than a page needs
        _check_no_machine(experiment)
    return runs.compile_run(experiment.run, model, config), None


def _page(reported: dict[str, tuple[CompiledRun, SimulatedStep | None]]) -> str:
    from stagewright.views.pages.compare import compare_page
    from stagewright.views.pages.report import page

    if len(reported) > 1:
        return compare_page(reported)
    ((compiled, step),) = reported.values()
    return page(compiled, step)


def _chart(name: str, reported: dict[str, tuple[CompiledRun, SimulatedStep | None]]) -> Chart:
    from stagewright.views.pages import charts, compare

    if len(reported) > 1:
        return compare.CHARTS[name](reported)
    ((compiled, step),) = reported.values()
    chart = charts.CHARTS[name](compiled, step)
    if chart is None:
        raise UserError(f"--picture {name}: this run has no such chart; leave --picture out")
    return chart


def _numbers(chart: Chart) -> str:
    """Numbers of a chart as CSV, with units in the names of columns."""
    from stagewright.texttable import Table

    assert chart.numbers is not None, "charts by name have numbers"
    units, columns = chart.numbers.units, chart.numbers.columns
    named = {
        f"{name} ({unit})" if (unit := units.get(name)) else name: values
        for name, values in columns.items()
    }
    return Table(chart.numbers.title, named).to_csv()


def _check_no_machine(experiment: Experiment) -> None:
    """Refuse options that say how a step runs on hardware that is not named."""
    from stagewright.run.sections import EXPERIMENT, SETTINGS

    for name in (name for name in experiment.given() if name not in SETTINGS):
        flag = EXPERIMENT[name].flag
        raise UserError(f"{flag} is for --hardware; add that, or leave {flag} out")
