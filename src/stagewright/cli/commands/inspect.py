"""The command that prints a trace."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import click

from stagewright.cli import shared
from stagewright.cli.help import Entry, command
from stagewright.cli.options import GROUP_FILE, JSON
from stagewright.errors import UserError


@command
@click.argument("file")
@GROUP_FILE
@JSON
@click.option("--nodes", metavar="RANGE", help="Print these nodes, such as 0-50, in file order.")
@click.option("--rank", type=click.IntRange(0), metavar="N", help="Rank of a bundle to print. [0]")
def inspect(
    file: str, comm_group: str | None, as_json: bool, nodes: str | None, rank: int | None
) -> None:
    """Print a Chakra trace: its nodes by kind, phase, op and group, or node by node.

    FILE is a trace or a bundle.
    """
    from stagewright.check import inspect as inspect_trace

    with _trace(file, rank) as (trace, name):
        if nodes is not None:
            rows = inspect_trace.nodes(trace, *parse_range(nodes))
            if as_json:
                shared.print_json(list(rows))
            else:
                inspect_trace.print_nodes(rows, shared.console())
            return
        profile = inspect_trace.inspect(trace, comm_group)
    profile.path = name
    if as_json:
        shared.print_json(profile.to_json())
    else:
        inspect_trace.print_profile(profile, shared.console())


@contextmanager
def _trace(file: str, rank: int | None) -> Generator[tuple[Path, str]]:
    """A trace to read, which for a bundle is made for the time of the block, and its name."""
    from stagewright.trace.formats.archive import is_bundle
    from stagewright.trace.unbundle import traces

    if is_bundle(file):
        with traces(file, [rank or 0]) as (path,):
            yield path, f"{file}, rank {rank or 0}"
        return
    if rank is not None:
        raise UserError(f"--rank {rank}: {file} is no bundle; name the file of the rank")
    path = Path(file)
    if path.is_dir():
        trace = min(path.glob("*.et"), key=lambda each: (len(each.name), each.name), default=None)
        which = f", such as {trace}" if trace else ""
        raise UserError(f"{file}: is a directory; wanted one trace{which}")
    yield path, file


def parse_range(text: str) -> tuple[int, int]:
    """A range of numbers such as `0-50`, or one number.

    >>> parse_range("3"), parse_range("0-50")
    ((3, 3), (0, 50))
    """
    first, _, last = (word.strip() for word in text.partition("-"))
    last = last or first
    if not all(word.isdecimal() and word.isascii() and len(word) < 16 for word in (first, last)):
        raise UserError(f"--nodes: cannot read {text!r}; wanted a range such as 0-50")
    if int(first) > int(last):
        raise UserError(f"--nodes: {text!r} runs backwards; use {last}-{first}")
    return int(first), int(last)


ENTRY = Entry(
    80,
    inspect,
    (
        "stagewright inspect traces/workload.0.et",
        "stagewright inspect traces/workload.0.et --nodes 0-50",
    ),
)
