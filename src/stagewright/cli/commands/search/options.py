"""Options of a search besides the settings of its runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from stagewright.cli.help import WholeNumber, Word

_Command = TypeVar("_Command", bound=Callable[..., Any])

OPTIONS = (
    click.option(
        "--serve",
        is_flag=True,
        help="The fewest GPUs that serve --rate R --isl N --osl N (or --requests FILE) within "
        "--ttft and --tpot; --concurrency LIST: tokens per GPU over tokens per user. --as vllm, "
        "sglang or trtllm prints the engine's command lines.",
    ),
    click.option(
        "--attainment",
        type=float,
        metavar="X",
        help="With --serve: share of requests that must keep the limits. [0.9]",
    ),
    click.option(
        "--pairs",
        type=WholeNumber(),
        metavar="N",
        help="With --serve: pairs of layouts for prompts and for decode, the most promising. [4]",
    ),
    click.option(
        "--gpus",
        metavar="N",
        help="GPUs, which dp fills; or several numbers of them. With --serve: at most so many. "
        "[256]",
    ),
    click.option(
        "--vary",
        metavar="NAME=LIST",
        multiple=True,
        help="A list or range of a setting, or of a figure of the hardware such as "
        "memory.gb=80:288:8; may be repeated.",
    ),
    click.option(
        "--space",
        metavar="LIST",
        help="Tried beyond the default: hsdp, offload, placement, stages, overlap, recompute, "
        "schedules; full is all of these.",
    ),
    click.option(
        "--objective",
        metavar="NAME",
        multiple=True,
        help="time, memory, cost, energy or mfu; several: the front of them. [time] With --serve: "
        "gpus or cost. [gpus]",
    ),
    click.option("--top", type=WholeNumber(), metavar="N", help="Layouts to list. [20]"),
    click.option(
        "--most", type=WholeNumber(), metavar="N", help="Most candidates to simulate. [200]"
    ),
    click.option("--exact", is_flag=True, help="Simulate all that may be faster than the best."),
    click.option("--all-variants", is_flag=True, help="List several variants of one layout."),
    click.option("--why", is_flag=True, help="List what constraints have removed."),
    click.option("--allow-oom", is_flag=True, help="Candidates that do not fit into memory count."),
    click.option(
        "--run", "listed_row", type=WholeNumber(), metavar="N", help="Row of the best to write."
    ),
    click.option(
        "-o",
        "--out",
        metavar="FILE",
        multiple=True,
        help="All candidates (.csv, .parquet, .json), a page (.html), or the run of --run (.yaml).",
    ),
    click.option("--force", is_flag=True, help="Replace files of an earlier search."),
    click.option("--workers", type=WholeNumber(), metavar="N", help="Processes. [one per core]"),
    click.option(
        "--engine",
        type=Word(("processes", "ray")),
        default="processes",
        help="Simulations: processes of this machine, or a Ray cluster. [processes]",
    ),
    click.option(
        "--address", metavar="ADDRESS", help="Address of the Ray cluster: host:port, or auto."
    ),
)


def search_options(command: _Command) -> _Command:
    """Add the options of a search to a command."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command
