"""The command that compares traces."""

from __future__ import annotations

import click

from stagewright.cli import output
from stagewright.cli.command import Entry, command
from stagewright.cli.options import JSON


@command
@click.argument("a")
@click.argument("b")
@JSON
def diff(a: str, b: str, as_json: bool) -> int:
    """Compare two traces, directories or bundles; the exit code is 0 if they are equal, else 1."""
    from stagewright.check import diff

    difference = diff.diff(a, b)
    if as_json:
        output.print_json(difference.to_json())
    else:
        diff.print_difference(difference, output.console())
    return int(not difference.same)


ENTRY = Entry(
    90,
    diff,
    (
        "stagewright diff traces again",
        "stagewright diff traces/workload.0.et again/workload.0.et --json",
    ),
)
