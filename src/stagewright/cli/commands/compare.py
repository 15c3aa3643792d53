"""The command that puts a measured step beside a simulated one."""

from __future__ import annotations

from typing import Any

import click

from stagewright.cli import output, runs
from stagewright.cli.command import command
from stagewright.cli.option_types import WholeNumber
from stagewright.cli.options import FORCE, JSON, experiment_options, output_file
from stagewright.errors import UserError


@command(
    46,
    "stagewright generate gpt2 --dp 2 --hardware h100-sxm --format kineto -o recorded",
    "stagewright compare recorded gpt2 --dp 2 --hardware h100-sxm -o compared.html",
)
@experiment_options()
@click.argument("others", nargs=-1, metavar="[TRACE]...")
@click.option("--step", type=WholeNumber(0), metavar="N", help="ProfilerStep#N. [the middle one]")
@click.option("--annotation", metavar="NAME", help="A record_function of this name.")
@output_file("-o", "--out", help="A page (.html) or everything (.json).")
@FORCE
@JSON
def compare(
    model: str | None,
    others: tuple[str, ...],
    config: str | None,
    step: int | None,
    annotation: str | None,
    out: str | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Compare a step that PyTorch's profiler recorded with its simulation, part by part.

    TRACE is a file of Kineto's JSON, plain or compressed, or an archive or a folder of these, one
    per rank. The last word is the MODEL, as in `simulate`, unless --config names a run file.
    """
    from stagewright.api.compared import compare as run
    from stagewright.api.result import check_suffix
    from stagewright.cli.commands.simulate import run_experiment

    words = [word for word in (model, *others) if word is not None]
    model = words.pop() if config is None and words else None
    if not words or (model is None and config is None):
        raise UserError("wanted one TRACE or more, then the MODEL: trace.json.gz llama3-8b")
    if out is not None:
        check_suffix(out, (".json", ".html"))
    experiment = runs.load_experiment(model, config, settings)
    runs.hardware_of(experiment)
    simulation = run_experiment(experiment, model, config)
    result = run(words, simulation, step=step, annotation=annotation)
    output.show_notes(result.notes)
    output.print_result(result.to_dict if as_json else result.text)
    if out is not None:
        result.write(out)


# The model is parsed as the first word, as in other commands.
compare.collect_usage_pieces = lambda ctx: ["[OPTIONS]", "TRACE...", "[MODEL]"]
