"""The command that writes traces of a bundle's ranks."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import click

from stagewright.cli import shared
from stagewright.cli.help import Entry, Word, command
from stagewright.cli.progress import describe_written, shown
from stagewright.cli.writing import writing
from stagewright.errors import UserError

if TYPE_CHECKING:
    from stagewright.executors import RayCluster


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
@click.option(
    "--engine",
    type=Word(("local", "ray")),
    default="local",
    help="Writers: threads of this process, or machines of a Ray cluster that share DIR. [local]",
)
@click.option(
    "--address", metavar="ADDRESS", help="Address of the Ray cluster: host:port, or auto."
)
def expand(
    bundle: str,
    out: str,
    ranks: str | None,
    format_: str,
    force: bool,
    workers: int | None,
    engine: str,
    address: str | None,
) -> None:
    """Write the traces of ranks of a bundle: the bytes that generate writes for them."""
    from stagewright.trace.formats.bundle import Bundle
    from stagewright.trace.unbundle import expand

    started = time.perf_counter()
    source = Bundle(bundle)
    chosen = None if ranks is None else shared.parse_ranks(ranks, source.world_size)
    with _cluster(engine, address) as cluster, shown() as bar:
        written = expand(
            source,
            out,
            format=format_,
            ranks=chosen,
            cluster=cluster,
            force=force,
            workers=workers,
            progress=bar,
        )
    shared.say(describe_written(written, out, time.perf_counter() - started))


def _cluster(engine: str, address: str | None) -> AbstractContextManager[RayCluster | None]:
    """The Ray cluster that writes; None: this process."""
    from stagewright.executors import ray_cluster

    if engine == "ray":
        return ray_cluster(address)
    if address is not None:
        raise UserError("--address is of a Ray cluster; add --engine ray, or leave --address out")
    return nullcontext()


ENTRY = Entry(
    100,
    expand,
    (
        "stagewright generate palm-540b --tp 8 --pp 64 --dp 2048 --format bundle -o palm.bundle",
        "stagewright expand palm.bundle --ranks 0-7,131071 -o some",
    ),
)
