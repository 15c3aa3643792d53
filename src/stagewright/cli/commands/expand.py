"""The command that writes traces of a bundle's ranks."""

from __future__ import annotations

import time
from contextlib import nullcontext

import click

from stagewright.cli import output, runs
from stagewright.cli.command import command
from stagewright.cli.option_types import Word
from stagewright.cli.options import ADDRESS, FORCE, OUT_DIRECTORY, RANKS, WORKERS, forced
from stagewright.cli.progress import shown


@command(
    100,
    "stagewright generate palm-540b --tp 8 --pp 64 --dp 2048 --format bundle -o palm.bundle",
    "stagewright expand palm.bundle --ranks 0-7,131071 -o some",
)
@click.argument("bundle")
@OUT_DIRECTORY
@RANKS
@click.option(
    "--format",
    "format_",
    default="chakra",
    metavar="NAME",
    help="Format of the traces: chakra, dot or json. [chakra]",
)
@FORCE
@WORKERS
@click.option(
    "--engine",
    type=Word(("local", "ray")),
    default="local",
    help="Writers: threads of this process, or machines of a Ray cluster that share DIR. [local]",
)
@ADDRESS
def expand(
    bundle: str,
    out: str,
    ranks: str | None,
    format_: str,
    workers: int | None,
    engine: str,
    address: str | None,
) -> None:
    """Write the traces of ranks of a bundle, byte for byte as generate writes them."""
    from stagewright.trace.formats.bundle import Bundle
    from stagewright.trace.write import expand

    started = time.perf_counter()
    source = Bundle(bundle)
    chosen = None if ranks is None else runs.parse_ranks(ranks, source.world_size)
    with runs.ray_cluster(engine, address) or nullcontext() as cluster, shown() as bar:
        written = expand(
            source,
            out,
            format=format_,
            ranks=chosen,
            cluster=cluster,
            force=forced(),
            workers=workers,
            progress=bar,
        )
    output.say(runs.describe_written(written, out, started))
