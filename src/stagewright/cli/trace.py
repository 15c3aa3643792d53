"""The commands about traces that exist: verify, inspect, diff. `cli` adds them to its group."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stagewright.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from stagewright.check.verify import Report

GROUP_FILE = click.option(
    "--comm-group", metavar="FILE", help="The communicator groups. [beside the traces]"
)
JSON = click.option("--json", "as_json", is_flag=True, help="The result as one JSON object.")


@click.command()
@click.argument("directory")
@GROUP_FILE
@JSON
@click.option("--strict", is_flag=True, help="Exit with 1 for warnings, too.")
@click.option(
    "--workers", type=click.IntRange(1), metavar="N", help="Processes that read. [one per core]"
)
def verify(
    directory: str, comm_group: str | None, as_json: bool, strict: bool, workers: int | None
) -> int:
    """Check Chakra traces, whoever wrote them; exit with 0 if they are sound and 1 if not.

    DIRECTORY holds files such as workload.0.et; it may also be DIR/workload, one file, or a bundle,
    which is checked by its rank classes.
    """
    from stagewright.check.verify import verify

    report = verify(directory, comm_group, workers=workers)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        _print_report(report)
    return int(not report.ok or (strict and bool(report.findings)))


@click.command()
@click.argument("file")
@GROUP_FILE
@JSON
@click.option("--nodes", metavar="RANGE", help="Print these nodes, such as 0-50, in file order.")
@click.option("--rank", type=click.IntRange(0), metavar="N", help="Which rank of a bundle. [0]")
def inspect(
    file: str, comm_group: str | None, as_json: bool, nodes: str | None, rank: int | None
) -> None:
    """Print a Chakra trace: its nodes by kind, phase, op and group, or node by node.

    FILE is a trace or a bundle.
    """
    from stagewright.check import inspect as inspect_trace

    with _trace(file, rank) as (trace, name):
        if nodes is not None:
            found = inspect_trace.nodes(trace, *parse_range(nodes))
            if as_json:
                click.echo(json.dumps(list(found), indent=2))
            else:
                inspect_trace.print_nodes(found, _console())
            return
        profile = inspect_trace.inspect(trace, comm_group)
    profile.path = name
    if as_json:
        click.echo(json.dumps(profile.to_json(), indent=2))
    else:
        inspect_trace.print_profile(profile, _console())


@contextmanager
def _trace(file: str, rank: int | None) -> Generator[tuple[Path, str]]:
    """A trace to read, which for a bundle is made for the time of the block, and its name."""
    from stagewright.trace.formats.bundle import is_bundle
    from stagewright.trace.unbundle import traces

    if is_bundle(file):
        with traces(file, [rank or 0]) as (path,):
            yield path, f"{file}, rank {rank or 0}"
        return
    if rank is not None:
        raise UserError(f"--rank {rank}: {file} is no bundle; name the file of the rank")
    yield Path(file), file


@click.command()
@click.argument("a")
@click.argument("b")
@JSON
def diff(a: str, b: str, as_json: bool) -> int:
    """Compare two traces, directories or bundles; exit with 0 if they hold the same, else 1."""
    from stagewright.check import diff

    found = diff.diff(a, b)
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=2))
    else:
        diff.print_difference(found, _console())
    return int(not found.same)


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


def _print_report(report: Report) -> None:
    from stagewright.check.inspect import readable
    from stagewright.numbers import plural

    color = {"error": "red", "warning": "yellow"}
    for found in report.findings:
        where = "" if found.rank is None else f"rank {found.rank}: "
        more = _more(found.nodes, found.ranks)
        level = click.style(f"{found.level}", fg=color[found.level], bold=True)
        click.echo(f"{level} [{found.code}] {where}{readable(found.message)}{more}")
    for text in report.skipped:
        click.echo(f"not checked: {readable(text)}")
    click.echo(
        f"{report.directory}: {plural(report.ranks, 'file', 'files')}, "
        f"{plural(report.kinds, 'kind', 'kinds')}, {report.nodes:,} nodes, "
        f"{report.bytes:,} bytes, {report.seconds:.1f} s; checked: {', '.join(report.checks)}"
    )
    numbers = [(len(report.of(level)), level) for level in ("error", "warning")]
    words = [f"{n} {level}{'s' * (n > 1)}" for n, level in numbers if n]
    click.echo(", ".join(words) if words else "sound")


def _more(nodes: int, ranks: int) -> str:
    if ranks > 1:
        return f" ({nodes:,} such, on {ranks:,} ranks)"
    return f" ({nodes:,} such)" if nodes > 1 else ""


def _console() -> Console:
    from rich.console import Console

    # A pipe or a file has no width of its own: rich would take 80 and cut the tables.
    return Console(width=None if sys.stdout.isatty() else 200, highlight=False)


COMMANDS = (verify, inspect, diff)
