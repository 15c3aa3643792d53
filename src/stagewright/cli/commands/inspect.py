"""The command that prints a trace."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import click

from stagewright.cli import output, runs
from stagewright.cli.command import command
from stagewright.cli.option_types import WholeNumber
from stagewright.cli.options import GROUP_FILE, JSON
from stagewright.errors import UserError


@command(
    80,
    "stagewright inspect traces/workload.0.et",
    "stagewright inspect traces/workload.0.et --nodes 0-50",
)
@click.argument("file")
@GROUP_FILE
@JSON
@click.option("--nodes", metavar="RANGE", help="Print these nodes, such as 0-50, in file order.")
@click.option("--rank", type=WholeNumber(0), metavar="N", help="Rank of a bundle to print. [0]")
def inspect(
    file: str, comm_group: str | None, as_json: bool, nodes: str | None, rank: int | None
) -> None:
    """Print a Chakra trace: nodes by kind, phase, op and group, or one by one.

    FILE is a trace or a bundle.
    """
    from stagewright.check import inspect as inspect_trace

    with _trace(file, rank) as (trace, name):
        if nodes is not None:
            first, last = runs.parse_range(nodes, "--nodes", "a range such as 0-50")
            rows = inspect_trace.nodes(trace, first, last)
            if as_json:
                output.print_json(list(rows))
            else:
                inspect_trace.print_nodes(rows, output.console())
            return
        profile = inspect_trace.inspect(trace, comm_group)
    profile.path = name
    if as_json:
        output.print_json(profile.to_json())
    else:
        inspect_trace.print_profile(profile, output.console())


@contextmanager
def _trace(file: str, rank: int | None) -> Generator[tuple[Path, str]]:
    """A trace to read, and its name; that of a bundle exists within the block."""
    from stagewright.trace.formats.archive import is_bundle
    from stagewright.trace.write import traces

    if is_bundle(file):
        with traces(file, [rank or 0]) as (path,):
            yield path, f"{file}, rank {rank or 0}"
        return
    if rank is not None:
        raise UserError(f"--rank {rank}: {file} is no bundle; name the file of the rank")
    path = Path(file)
    if path.is_dir():
        trace = min(path.glob("*.et"), key=lambda file: (len(file.name), file.name), default=None)
        which = f", such as {trace}" if trace else ""
        raise UserError(f"{file}: is a directory; wanted one trace{which}")
    yield path, file
