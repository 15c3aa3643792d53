"""The command that shows what the ranks of a run do."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from stagewright.cli import output, runs
from stagewright.cli.command import command
from stagewright.cli.options import ALLOW_OOM, JSON, experiment_options
from stagewright.errors import UserError

if TYPE_CHECKING:
    from stagewright.lower.compiled_run import CompiledRun
    from stagewright.run.experiment import Experiment


@command(
    30,
    "stagewright show llama3.1-70b --tp 8 --pp 4 --dp 2 --sequence-parallel",
    "stagewright show llama3-8b --pp 4 --global-batch-size 8 --schedule-picture",
    "stagewright show deepseek-v3 --pp 16 --dp 8 --ep 8 --recompute full --json",
)
@experiment_options()
@JSON
@click.option(
    "--via",
    type=click.Choice(["torch"]),
    help="Build hf:path/to/config.json with transformers, and import that module.",
)
@click.option("--graph", is_flag=True, help="The sharded graph, as text.")
@click.option("--kernels", is_flag=True, help="The distinct kernels, as CSV to fill in durations.")
@click.option("--launch", is_flag=True, help="What was read of a launch file: flags, settings.")
@click.option("--schedule-picture", is_flag=True, help="The pipeline schedule, as a picture.")
@ALLOW_OOM
def show(
    model: str | None,
    config: str | None,
    as_json: bool,
    via: str | None,
    graph: bool,
    kernels: bool,
    launch: bool,
    schedule_picture: bool,
    **settings: Any,
) -> int:
    """Print what the ranks compute, communicate and hold.

    MODEL is a preset (see `stagewright models`), the path of a Hugging Face config.json, an id of
    the hub in its local cache, a launch script of another tool, or a bundle, whose run may get
    other settings. `--as megatron` (torchtitan, deepspeed, accelerate) prints the run as a file of
    that tool. The exit code is 3 if the run does not fit into the memory of the hardware, or
    into --device-memory.
    """
    from stagewright.run.tool_files import TOOLS
    from stagewright.trace.formats.archive import is_bundle
    from stagewright.trace.formats.bundle import Bundle
    from stagewright.trace.traced_bundle import read_traced
    from stagewright.views.summary import summary, summary_text, traced_summary

    if launch:
        return _launch_file(model, config, as_json=as_json)
    chosen = (as_json, graph, kernels, schedule_picture)
    if sum(chosen) > 1:
        raise UserError(
            "--json, --graph, --kernels and --schedule-picture exclude each other; use one"
        )
    if model is not None and is_bundle(model):
        if (traced := read_traced(Bundle(model))) is not None:
            given = [*(name for name, value in settings.items() if value is not None)]
            if given or config is not None or any(chosen[1:]):
                raise UserError(
                    f"{model}: a recorded graph is shown as it is; --json alone applies"
                )
            values = traced_summary(traced)
            output.print_result(lambda: values if as_json else summary_text(values))
            return 0
        model, config = None, model
    model = _imported(model) if via and model else model
    if tool := runs.tool_of(model, settings["as_family"], TOOLS):
        settings["as_family"] = None
    experiment = runs.load_experiment(model, config, settings)
    output.show_notes(() if tool else _notes_of_times(settings))
    compiled = runs.compile_run(experiment.run, model, config, experiment.cluster.hardware)
    if tool:
        _as_tool(experiment, compiled, tool)
    elif graph:
        output.say(compiled.graph_text())
    elif kernels:
        from stagewright.time.measured import to_csv

        click.echo(to_csv(compiled.program), nl=False)
    elif schedule_picture:
        from stagewright.schedule.text import text

        columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        output.say(text(compiled.order, columns))
    else:
        values = summary(compiled)
        output.print_result(lambda: values if as_json else summary_text(values))
    return runs.code_of(compiled.fit)


def _as_tool(experiment: Experiment, compiled: CompiledRun, tool: str) -> None:
    """Print the run as a file of another tool."""
    from stagewright.run.tool_files import TrainedRun, notes, text_lines
    from stagewright.time.hardware import resolve

    if experiment.run.mode != "train":
        raise UserError(f"--as {tool}: wanted a run of training, got --mode {experiment.run.mode}")
    hardware = experiment.cluster.hardware
    trained = TrainedRun.of(
        compiled.run, compiled.model, experiment.execution,
        before_blackwell=hardware is not None and resolve(hardware).is_before_blackwell,
    )  # fmt: skip
    output.show_notes(notes(trained, tool))
    click.echo("\n".join(text_lines(trained, tool)))


def _launch_file(model: str | None, config: str | None, *, as_json: bool) -> int:
    """Print what was read of a launch file."""
    from stagewright.launch import files

    named = next((name for name in (config, model) if name and files.find(name)), None)
    if named is None:
        raise UserError("--launch is of a launch file of another tool; name one, such as train.sh")
    reading = files.read(named)
    output.print_result(reading.to_dict if as_json else reading.tables)
    return 0


def _imported(source: str) -> str:
    """Import a module as the text of a model, in a file that ends with the command; its path."""
    from stagewright.files import write_text
    from stagewright.imports.sources import recorded
    from stagewright.imports.translate import translate

    started = time.perf_counter()
    traced = recorded(source)
    translated = translate(traced)
    folder = tempfile.TemporaryDirectory(prefix="stagewright-")
    path = f"{click.get_current_context().with_resource(folder)}/{traced.name or 'imported'}.stg"
    write_text(path, translated.text)
    seconds = time.perf_counter() - started
    keep = f"to keep the text: stagewright import {source} -o FILE.stg"
    output.show_notes([*translated.notes, f"{source} imported in {seconds:.1f} s; {keep}"])
    return path


def _notes_of_times(settings: Mapping[str, Any]) -> Iterator[str]:
    """Options without effect here, where nothing is timed."""
    from stagewright.run.sections import EXPERIMENT, SETTINGS

    for setting in EXPERIMENT.values():
        timed = setting.name not in SETTINGS and setting.name not in ("hardware", "nodes", "gpus")
        if timed and settings.get(setting.name) is not None:
            yield f"{setting.flag} changes no figure of show, which times nothing; see simulate"
