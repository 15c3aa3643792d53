"""The command that writes traces."""

from __future__ import annotations

import time
from typing import Any

import click

import stagewright
from stagewright.cli import shared
from stagewright.cli.help import Entry, command
from stagewright.cli.options import experiment_options
from stagewright.cli.progress import describe_written, shown
from stagewright.cli.writing import writing
from stagewright.errors import UserError


@command
@experiment_options("hardware", "nodes", "durations")
@click.option("-o", "--out", required=True, metavar="DIR", help="Directory of the traces.")
@click.option(
    "--format",
    "format_",
    default="chakra",
    metavar="NAME",
    help="Format of the traces: chakra, dot, json or bundle. [chakra]",
)
@click.option(
    "--astra-sim", is_flag=True, help="Also write what ASTRA-sim needs to run the traces."
)
@click.option("--ranks", metavar="LIST", help="Only these ranks, such as 0-7,12. [all]")
@writing
def generate(
    model: str | None,
    config: str | None,
    out: str,
    format_: str,
    astra_sim: bool,
    ranks: str | None,
    force: bool,
    workers: int | None,
    **settings: Any,
) -> None:
    """Write the trace of every rank.

    MODEL is a preset (see `stagewright models`), the path of a Hugging Face config.json, or an id
    of the hub that is in its local cache.
    """
    started = time.perf_counter()
    experiment = shared.load_experiment(model, config, settings)
    run, cluster = experiment.run, experiment.cluster
    chosen = None if ranks is None else shared.parse_ranks(ranks, run.world_size)
    if astra_sim and (cluster.hardware is None or format_ != "chakra" or chosen is not None):
        raise UserError("--astra-sim needs --hardware, and all ranks in --format chakra")
    with shown() as bar:
        bar.say("working out what ranks do")
        compiled = shared.compile_run(run, model, config)
        bar.say("checking it")
        written = stagewright.generate(
            compiled,
            out,
            format=format_,
            durations=cluster.durations,
            astra_sim=cluster.hardware if astra_sim else None,
            cluster=cluster,
            execution=experiment.execution,
            ranks=chosen,
            progress=bar,
            force=force,
            workers=workers,
        )
    shared.say(describe_written(written, out, time.perf_counter() - started))
    shared.show_notes(written.get("astra_sim", {}).get("notes", ()))
    if cluster.durations is not None:
        from stagewright.time import measured

        shared.say(measured.describe(written["durations"]))


ENTRY = Entry(
    60,
    generate,
    (
        "stagewright generate llama3.1-70b --tp 8 --pp 4 --dp 2 -o traces",
        "stagewright generate path/to/config.json --zero 3 --dp 64 --ranks 0-7 -o few",
        "stagewright generate --config traces/manifest.json -o again",
    ),
)
