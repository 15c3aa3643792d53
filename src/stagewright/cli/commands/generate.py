"""The command that writes traces."""

from __future__ import annotations

import time
from typing import Any

import click

import stagewright
from stagewright.cli import output, runs
from stagewright.cli.command import command
from stagewright.cli.options import FORCE, OUT_DIRECTORY, RANKS, WORKERS, experiment_options, forced
from stagewright.cli.progress import shown
from stagewright.errors import UserError


@command(
    60,
    "stagewright generate llama3.1-70b --tp 8 --pp 4 --dp 2 -o traces",
    "stagewright generate path/to/config.json --zero 3 --dp 64 --ranks 0-7 -o few",
    "stagewright generate --config traces/manifest.json -o again",
)
@experiment_options("durations")
@OUT_DIRECTORY
@click.option(
    "--format",
    "format_",
    default="chakra",
    metavar="NAME",
    help="Format of the traces: chakra, dot, json, bundle or kineto. [chakra]",
)
@click.option(
    "--astra-sim", is_flag=True, help="Also write the files with which ASTRA-sim runs the traces."
)
@RANKS
@FORCE
@WORKERS
def generate(
    model: str | None,
    config: str | None,
    out: str,
    format_: str,
    astra_sim: bool,
    ranks: str | None,
    workers: int | None,
    **settings: Any,
) -> None:
    """Write the trace of every rank.

    MODEL is a preset (see `stagewright models`), the path of a Hugging Face config.json, or an id
    of the hub in its local cache.
    """
    started = time.perf_counter()
    experiment = runs.load_experiment(model, config, settings)
    run, cluster = experiment.run, experiment.cluster
    chosen = None if ranks is None else runs.parse_ranks(ranks, run.world_size)
    if astra_sim and (cluster.hardware is None or format_ != "chakra" or chosen is not None):
        raise UserError("--astra-sim needs --hardware, and all ranks in --format chakra")
    if format_ == "kineto" and cluster.hardware is None:
        raise UserError("--format kineto is of a simulated step; add --hardware")
    with shown() as bar:
        bar.say("compiling")
        compiled = runs.compile_run(run, model, config)
        bar.say("checking")
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
            force=forced(),
            workers=workers,
        )
    output.say(runs.describe_written(written, out, started))
    output.show_notes(written.get("astra_sim", {}).get("notes", ()))
    if "durations" in written:
        from stagewright.time import measured

        output.say(measured.describe(written["durations"]))
