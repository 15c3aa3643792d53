"""The command that compares two runs, or the traces of two runs."""

from __future__ import annotations

import os
from typing import Any

import click

from stagewright.cli import output, runs
from stagewright.cli.command import command
from stagewright.cli.option_types import RealNumber
from stagewright.cli.options import ALLOW_OOM, JSON, diff_settings
from stagewright.cli.progress import shown
from stagewright.errors import UserError, did_you_mean

SLOWER = 1
"""Exit code if the new run is slower than allowed; also that of traces that differ."""

_OF_RUNS = (".yaml", ".yml", ".json", ".stg", ".sh", ".bash", ".sbatch", ".slurm", ".toml", ".py")
"""Ends of names of files that are no traces."""


@command(
    90,
    "stagewright diff 'llama3-8b?tp=2' 'llama3-8b?tp=4' --gpus 16 --hardware h100-sxm",
    "stagewright diff traces again",
    "stagewright diff traces/workload.0.et again/workload.0.et --json",
)
@diff_settings
@click.argument("a", metavar="OLD")
@click.argument("b", metavar="NEW")
@click.option(
    "--max-slowdown",
    type=RealNumber(),
    metavar="PERCENT",
    help="Exit with 1 if a token, or a request of a server, takes longer by more than this.",
)
@click.option("--markdown", is_flag=True, help="The result as Markdown, for a comment.")
@ALLOW_OOM
@JSON
def diff(
    a: str, b: str, max_slowdown: float | None, markdown: bool, as_json: bool, **settings: Any
) -> int:
    """Compare two runs: settings that differ, time, memory, communication and cost of both.

    OLD and NEW are launch scripts of other tools, run files (YAML), manifests or models. Values
    may stand behind each: train.sh?TP=8, llama3-8b?tp=8; options are of both. Servers are compared
    under the load that their clients send. If OLD is /dev/null, NEW alone is shown. The exit code
    is 3 if the new run does not fit into the memory of a device.

    Two traces, directories or bundles are compared node by node; the exit code is 0 if they are
    equal, else 1.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    traces = [_holds_traces(path) for path in (a, b) if path != os.devnull]
    if any(traces):
        if not all(traces):
            raise UserError(f"{(a, b)[traces.index(True)]} holds traces, and the other is a run")
        if given or markdown or max_slowdown is not None:
            raise UserError("traces are compared as they are; drop all options but --json")
        return _diff_traces(a, b, as_json=as_json)
    if markdown and as_json:
        raise UserError("--json and --markdown exclude each other; use one")
    from stagewright.api.changes import diff as compare
    from stagewright.api.changes import read_run
    from stagewright.api.simulated import Simulation

    if b == os.devnull:
        raise UserError(f"{b}: a deleted file has no figures; wanted a new run")
    with shown("tasks or requests") as bar:
        if a == os.devnull:
            run = read_run("new", b, given)
            result = new = run.result(bar)
            notes, slowdown = run.all_notes, 0.0
        else:
            result = compare(a, b, progress=bar, **given)
            new = result.results[1] if result.results else None
            notes, slowdown = result.notes, result.slowdown
    if markdown:
        output.say(result.markdown())
    else:
        output.show_notes(notes)
        output.print_result(result.to_dict if as_json else result.text)
    code = runs.code_of(new.fit) if isinstance(new, Simulation) else 0
    if max_slowdown is not None and slowdown > max_slowdown / 100:
        message = f"slower by {slowdown:.1%}, allowed are {max_slowdown:g}%"
        click.echo(f"stagewright: {message} (exit code {code or SLOWER})", err=True)
        return code or SLOWER
    return code


def _holds_traces(name: str) -> bool:
    """True for a directory of traces, a prefix of their names, a trace or a bundle.

    Raises UserError for a name that stands for nothing.
    """
    from stagewright.launch import files
    from stagewright.model import hub
    from stagewright.model.presets import PRESETS
    from stagewright.trace.formats.archive import is_bundle

    path = name.partition("?")[0]
    if path in PRESETS or files.find(path):
        return False
    if os.path.isdir(path):
        return not os.path.isfile(os.path.join(path, "config.json"))
    if os.path.exists(path):
        return is_bundle(path) or not path.endswith(_OF_RUNS)
    folder = os.path.dirname(path)
    if path.endswith((".et", ".etb")) or (os.path.isdir(folder) and "." not in path[len(folder) :]):
        return True
    if hub.is_id(path):
        return False
    raise UserError(
        f"{path}: there is no such file, and no model of that name"
        f"{did_you_mean(path.lower(), PRESETS)}; wanted two launch scripts, run files or models, "
        "or two traces"
    )


def _diff_traces(a: str, b: str, *, as_json: bool) -> int:
    """Compare two traces by content."""
    from stagewright.check import diff

    difference = diff.diff(a, b)
    if as_json:
        output.print_json(difference.to_json())
    else:
        diff.print_difference(difference, output.console())
    return int(not difference.same)
