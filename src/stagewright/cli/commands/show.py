"""The command that shows what the ranks of a run do."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from stagewright.cli import shared
from stagewright.cli.help import Entry, command
from stagewright.cli.options import ALLOW_OOM, experiment_options
from stagewright.cli.writing import output_file
from stagewright.errors import UserError

if TYPE_CHECKING:
    from stagewright.views.summary import Summary


@command
@experiment_options("hardware", "nodes")
@click.option("--json", "as_json", is_flag=True, help="The summary as one JSON object.")
@click.option(
    "--via",
    type=click.Choice(["torch"]),
    help="Build hf:path/to/config.json with transformers, and import that module.",
)
@click.option("--graph", is_flag=True, help="The sharded graph, as text.")
@click.option("--kernels", is_flag=True, help="The distinct kernels, as CSV to fill in durations.")
@click.option("--schedule-picture", is_flag=True, help="The pipeline schedule, as a picture.")
@output_file("--memory-plot", help="Memory over the step, as an HTML page.")
@ALLOW_OOM
def show(
    model: str | None,
    config: str | None,
    as_json: bool,
    graph: bool,
    kernels: bool,
    schedule_picture: bool,
    memory_plot: str | None,
    **settings: Any,
) -> int:
    """Print what the ranks compute, communicate and hold.

    MODEL is a preset (see `stagewright models`), the path of a Hugging Face config.json, an id of
    the hub that is in its local cache, or a bundle, which is shown as it is: without settings. The
    exit code is 3 if the run does not fit into the memory of the hardware, or into --device-memory.
    """
    from stagewright.trace.formats.archive import is_bundle
    from stagewright.views.summary import summary

    via = settings.pop("via")
    chosen = (as_json, graph, kernels, schedule_picture, memory_plot is not None)
    if sum(chosen) > 1:
        raise UserError(
            "--json, --graph, --kernels, --schedule-picture and --memory-plot exclude each other; "
            "use one"
        )
    if model is not None and is_bundle(model):
        if config is not None or any(value is not None for value in settings.values()):
            raise UserError(
                f"{model}: a bundle is shown as it is; for other settings: --config {model}"
            )
        if as_json or not any(chosen):
            _show_bundle(model, as_json)
            return 0
        model, config = None, model
    model = _imported(model) if via and model else model
    experiment = shared.load_experiment(model, config, settings)
    _note_of_times(settings)
    compiled = shared.compile_run(experiment.run, model, config, experiment.cluster.hardware)
    if memory_plot is not None:
        from stagewright.files import write_text
        from stagewright.views.pages.report import memory_page

        write_text(memory_plot, memory_page(compiled))
        shared.say(f"{memory_plot}: memory of {len(compiled.program.classes)} classes of ranks")
    elif graph:
        shared.say(compiled.graph_text())
    elif kernels:
        from stagewright.time.measured import to_csv

        click.echo(to_csv(compiled.program), nl=False)
    elif schedule_picture:
        from stagewright.schedule.text import text

        columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        shared.say(text(compiled.order, columns))
    else:
        _show_summary(summary(compiled), as_json)
    return shared.code_of(compiled.fit)


def _imported(source: str) -> str:
    """The path of the text that a module is imported as, in a folder of its own."""
    from stagewright.files import write_text
    from stagewright.imports.module import recorded
    from stagewright.imports.translate import translate

    started = time.perf_counter()
    traced = recorded(source)
    made = translate(traced)
    path = f"{tempfile.mkdtemp()}/{traced.name or 'imported'}.stg"
    write_text(path, made.text)
    shared.show_notes(made.notes)
    seconds = time.perf_counter() - started
    click.echo(f"stagewright: note: {source} imported in {seconds:.1f} s: {path}", err=True)
    return path


def _note_of_times(settings: Mapping[str, Any]) -> None:
    """Say which options have no effect here, where nothing is timed."""
    from stagewright.run.sections import EXPERIMENT, SETTINGS

    for setting in EXPERIMENT.values():
        timed = setting.name not in SETTINGS and setting.name not in ("hardware", "nodes")
        if timed and settings.get(setting.name) is not None:
            text = f"{setting.flag} changes no figure of show, which times nothing; see simulate"
            click.echo(f"stagewright: note: {text}", err=True)


def _show_bundle(path: str, as_json: bool) -> None:
    from stagewright.views.bundles import of_bundle

    _show_summary(of_bundle(path), as_json)


def _show_summary(result: Summary, as_json: bool) -> None:
    from stagewright.views.summary import tables

    if as_json:
        shared.print_json(result)
    else:
        tables(result, shared.console())


ENTRY = Entry(
    30,
    show,
    (
        "stagewright show llama3.1-70b --tp 8 --pp 4 --dp 2 --sequence-parallel",
        "stagewright show llama3-8b --pp 4 --global-batch-size 8 --schedule-picture",
        "stagewright show deepseek-v3 --pp 16 --dp 8 --ep 8 --recompute full --json",
    ),
)
