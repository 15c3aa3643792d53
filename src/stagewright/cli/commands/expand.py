"""The command that writes traces of a bundle's ranks."""

from __future__ import annotations

import time
from typing import Any

import click

from stagewright.cli import shared
from stagewright.cli.help import Entry, command
from stagewright.cli.progress import describe_written, shown
from stagewright.cli.writing import check_lasting, writing


@command
@click.argument("bundle")
@click.option("-o", "--out", required=True, metavar="DIR", help="Directory of the traces.")
@click.option("--ranks", metavar="LIST", help="These ranks, such as 0-7,131071. [all]")
@click.option(
    "--format",
    "format_",
    default="chakra",
    metavar="NAME",
    help="Format of the traces: chakra, dot or json. [chakra]",
)
@writing
def expand(bundle: str, out: str, ranks: str | None, format_: str, **how: Any) -> None:
    """Write the traces of ranks of a bundle: the bytes that generate writes for them."""
    from stagewright.trace.formats.bundle import Bundle
    from stagewright.trace.unbundle import expand

    started = time.perf_counter()
    check_lasting(out)
    source = Bundle(bundle)
    chosen = None if ranks is None else shared.parse_ranks(ranks, source.world_size)
    with shown() as bar:
        written = expand(source, out, format=format_, ranks=chosen, progress=bar, **how)
    shared.say(describe_written(written, out, time.perf_counter() - started))


ENTRY = Entry(
    100,
    expand,
    (
        "stagewright generate palm-540b --tp 8 --pp 64 --dp 2048 --format bundle -o palm.bundle",
        "stagewright expand palm.bundle --ranks 0-7,131071 -o some",
    ),
)
