"""The command that searches the best execution of a model on a machine."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from stagewright.cli import output, runs
from stagewright.cli.command import Entry, command
from stagewright.cli.commands.search.files import (
    check_hardware_files,
    check_outputs,
    is_run_file,
    write_files,
)
from stagewright.cli.commands.search.serving import (
    hardware_names,
    search_serving,
    without_serving,
)
from stagewright.cli.option_types import RealNumber, WholeNumber, Word
from stagewright.cli.options import ADDRESS, FORCE, JSON, WORKERS, search_settings
from stagewright.cli.progress import shown
from stagewright.errors import Stopped, UserError, either
from stagewright.numbers import duration, many
from stagewright.printable import printable

if TYPE_CHECKING:
    from stagewright.api.searched import Search
    from stagewright.cli.progress import ProgressBar
    from stagewright.executors import Executor
    from stagewright.searching.candidates import Candidates
    from stagewright.searching.figures import Figures
    from stagewright.searching.ranking import NothingFound, SearchOptions
    from stagewright.searching.request import SearchRequest
    from stagewright.searching.simulated import Progress
    from stagewright.searching.space import Enumeration


@command
@search_settings
@click.option(
    "--serve",
    is_flag=True,
    help="The fewest GPUs that serve --rate R --isl N --osl N (or --requests FILE) within --ttft "
    "and --tpot; --concurrency LIST: tokens per GPU over tokens per user. --as vllm, sglang or "
    "trtllm prints the engine's command lines.",
)
@click.option(
    "--attainment",
    type=RealNumber(),
    metavar="X",
    help="With --serve: share of requests that must keep the limits. [0.9]",
)
@click.option(
    "--pairs",
    type=WholeNumber(),
    metavar="N",
    help="With --serve: pairs of layouts for prefill and decode, the most promising. [4]",
)
@click.option(
    "--gpus",
    metavar="LIST",
    help="Numbers of GPUs, which dp fills. With --serve: the most GPUs. [256]",
)
@click.option(
    "--vary",
    metavar="NAME=LIST",
    multiple=True,
    help="A list or range of a setting, or of a figure of the hardware such as "
    "memory.gb=80:288:8; may be repeated.",
)
@click.option(
    "--space",
    metavar="LIST",
    help="Settings beyond the default space: hsdp, offload, placement, stages, overlap, recompute, "
    "schedules; full is all of these.",
)
@click.option(
    "--objective",
    metavar="NAME",
    multiple=True,
    help="time, memory, cost, energy or mfu; several: the Pareto front. [time] With --serve: gpus "
    "or cost. [gpus]",
)
@click.option("--top", type=WholeNumber(1), metavar="N", help="Layouts to list. [20]")
@click.option(
    "--most", type=WholeNumber(1), metavar="N", help="Limit of candidates to simulate. [200]"
)
@click.option("--exact", is_flag=True, help="Simulate all candidates that may beat the best.")
@click.option("--all-variants", is_flag=True, help="List several variants of one layout.")
@click.option("--why", is_flag=True, help="List combinations that constraints removed.")
@click.option("--allow-oom", is_flag=True, help="Rank candidates that do not fit into memory, too.")
@click.option(
    "--run", "listed_row", type=WholeNumber(1), metavar="N", help="Row of the best to write."
)
@click.option(
    "-o",
    "--out",
    metavar="FILE",
    multiple=True,
    help="All candidates (.csv, .parquet, .json), a page (.html), or the run of --run (.yaml).",
)
@FORCE
@WORKERS
@click.option(
    "--engine",
    type=Word(("processes", "ray")),
    default="processes",
    help="Where simulations run: processes of this machine, or a Ray cluster. [processes]",
)
@ADDRESS
@JSON
def search(
    model: str | None, config: str | None, out: tuple[str, ...], as_json: bool, **settings: Any
) -> int:
    """Find the best execution of a model on a machine.

    MODEL is a preset (see `stagewright models`), the path of a Hugging Face config.json, or an id
    of the hub in its local cache. Settings take lists and ranges: 1,2,4 or 1:8 or 8:64:8 or 1:64:x2
    (each twice the one before); settings that are not given take several values by default. A run
    file given by --config may hold lists, too. `--as megatron` (or torchtitan) prints the flags of
    the best.

    With --serve: layouts, and numbers of instances of each, that serve requests over time as
    `serve` does; --attainment of all requests keep --ttft, --tpot and --e2e.
    """
    given = model, config, {**settings}
    check_outputs(out, given)
    vary = _pairs(settings.pop("vary"))
    if settings.pop("serve"):
        return search_serving(model, config, out, vary, as_json=as_json, settings=settings)
    settings = without_serving(settings)
    return _search_steps(model, config, out, vary, given, as_json=as_json, settings=settings)


def _search_steps(
    model: str | None,
    config: str | None,
    out: tuple[str, ...],
    vary: Mapping[str, str],
    given: object,
    *,
    as_json: bool,
    settings: dict[str, Any],
) -> int:
    """Search the best step, print the result and write files; returns the exit code."""
    from stagewright.api.searched import pop_search_options
    from stagewright.searching import flags
    from stagewright.searching.request import search_request
    from stagewright.searching.simulated import step_of
    from stagewright.views.deviations import known
    from stagewright.views.search import without_objective

    why, row = settings.pop("why"), settings.pop("listed_row")
    options = pop_search_options(settings)
    executor = _executor(*(settings.pop(name) for name in ("engine", "workers", "address")))
    tool = _tool(model, settings["as_family"])
    if tool:
        settings["as_family"] = None
    families, gpus = settings.pop("space"), settings.pop("gpus")
    hardware = hardware_names(settings.pop("hardware"))
    request = search_request(
        {**settings, "model": model}, config,
        hardware=hardware, gpus=gpus, vary=vary, families=families,
    )  # fmt: skip
    if row is not None and row > options.top:
        raise UserError(
            f"--run {row}: a search lists the best {options.top:,} (--top); give --run 1 to "
            f"{options.top:,}, or --top {row}"
        )
    check_hardware_files(out, given, [fleet.hardware for fleet in request.space.fleets])
    output.show_notes(request.notes)
    begin = time.perf_counter()
    with shown("candidates") as bar, executor as pool:
        result, nothing = _run_with_progress(request, options, pool, bar, why=why)
    seconds = time.perf_counter() - begin
    output.show_notes(without_objective(result.ranking))
    if nothing is not None:
        return _end_without_best(result, nothing, out)
    candidates = result.ranking.candidates
    if candidates.model.num_experts:  # largest deviations from measured steps
        output.show_notes(known(step_of(candidates, result.index(1))))
    more: dict[str, Any] = {}
    errors: list[str] = []
    try:
        if tool is not None:
            index = result.index(row or 1)
            output.show_notes(flags.notes(candidates, index, tool))
            more["flags"] = flags.flags(candidates, index, tool)
        elif row is not None and not any(map(is_run_file, out)):
            more["run_file"] = result.run_file(row)
    except UserError as error:  # a row that is not listed; the result is shown all the same
        errors.append(str(error))
    output.print_result(
        (lambda: result.to_dict() | more) if as_json else partial(result.text, seconds)
    )
    errors += write_files(result, out, row or 1)
    if not as_json:
        output.print_texts(more.values())
    if errors:
        raise UserError("; ".join(dict.fromkeys(errors)))
    return runs.INTERRUPTED if result.ranking.stopped else 0


def _end_without_best(result: Search, why: NothingFound, out: tuple[str, ...]) -> int:
    """Write the files of all candidates, and say why nothing was found; returns the exit code."""
    errors = [*write_files(result, [path for path in out if not is_run_file(path)], 1), str(why)]
    errors += [
        f"{path}: not written, since there is no run to write" for path in filter(is_run_file, out)
    ]
    stopped, text = result.ranking.stopped, "; ".join(dict.fromkeys(errors))
    if not why.too_large and not stopped:
        raise UserError(text)
    click.echo(f"stagewright: {'' if stopped else 'error: '}{printable(text)}", err=True)
    return runs.INTERRUPTED if stopped else runs.DOES_NOT_FIT


def _tool(model: str | None, name: str | None) -> str | None:
    """Framework whose flags are printed; None: the name is a model's family, or absent."""
    from stagewright.model.presets import PRESETS
    from stagewright.searching.flags import TOOLS

    if name is not None and name not in TOOLS and model in PRESETS:
        raise UserError(
            f"--as {printable(name)}: wanted {either(TOOLS)}, whose flags are printed; a model's "
            f"family is for config.json files, and {model} is a preset"
        )
    return name if name in TOOLS else None


def _pairs(texts: tuple[str, ...]) -> Mapping[str, str]:
    """`NAME=LIST` and others by name."""
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not name.strip():
            raise UserError(f"--vary: got {text!r}, wanted NAME=LIST such as memory.gb=80:288:8")
        if name.strip() in pairs:
            raise UserError(f"--vary {name.strip()}: is given twice; give one list of both")
        pairs[name.strip()] = values.strip()
    return pairs


def _executor(
    engine: str, workers: int | None, address: str | None
) -> AbstractContextManager[Executor | None]:
    """Executor of the simulations; None: this process."""
    from stagewright.executors import Processes, cores

    if engine == "ray" and workers is not None:
        raise UserError("--workers is of --engine processes; a Ray cluster has its own number")
    if (cluster := runs.ray_cluster(engine, address)) is not None:
        return cluster
    count = workers or cores()
    return nullcontext(Processes(count) if count > 1 else None)


# ---- progress ------------------------------------------------------------------------------------

_SECONDS_BETWEEN_LINES = 10.0
"""Seconds between lines of progress if stderr is no terminal."""


def _run_with_progress(
    request: SearchRequest,
    options: SearchOptions,
    executor: Executor | None,
    bar: ProgressBar,
    *,
    why: bool,
) -> tuple[Search, NothingFound | None]:
    """Result, and the error if nothing was found; stderr shows progress."""
    from stagewright.api.searched import Search, run_search
    from stagewright.searching.estimate import estimate
    from stagewright.searching.ranking import NothingFound

    def estimates(candidates: Candidates, executor: Executor | None) -> Figures:
        count = many(len(candidates), "candidate", "candidates")
        bar.say(f"estimating {count} ")
        _say_without_terminal(f"estimating {count}")
        figures = estimate(candidates, executor)
        _say_without_terminal(f"estimated {count}; simulating the best")
        bar.say("simulating ")
        return figures

    bar.say("constraints ")
    try:
        enumeration = request.space.enumerate()
        _show_space(enumeration, why=why)
        bar.say("simulating ")
        progress = _progress(bar)
        try:
            result = run_search(request, options, executor, progress, enumeration, estimates)
            return result, None
        except NothingFound as error:
            return Search(enumeration, error.ranking, request.notes), error
    except KeyboardInterrupt:
        raise Stopped("stopped before any candidate was simulated; nothing was written") from None


def _progress(bar: ProgressBar) -> Progress:
    """Show the rate and the best step so far; in lines if stderr is no terminal."""
    best, line = float("inf"), time.monotonic()

    def progress(done: int, total: int, latest: Figures) -> None:
        nonlocal best, line
        best = min(best, float(latest.seconds[latest.fits].min(initial=float("inf"))))
        text = "" if best == float("inf") else f"best {duration(best)}"
        bar(done, total, more=text)
        if time.monotonic() > line + _SECONDS_BETWEEN_LINES:
            line = time.monotonic()
            count = many(done, "candidate", "candidates")
            _say_without_terminal(", ".join(filter(None, (f"{count} simulated", text))))

    return progress


def _say_without_terminal(text: str) -> None:
    """Print a line of progress to stderr, unless it is a terminal, which has the bar."""
    if not sys.stderr.isatty():
        click.echo(f"stagewright: {text}", err=True)


def _show_space(enumeration: Enumeration, *, why: bool) -> None:
    """Print the size of the space to stderr, and the combinations that constraints removed."""
    removed, count = enumeration.removed, len(enumeration.candidates)
    combinations = many(enumeration.combinations, "combination", "combinations")
    line = f"{combinations}: {count:,} can be run"
    if removed and not why:
        line += f", {many(len(removed), 'rule', 'rules')} removed the others (--why)"
    lines = [line]
    if why:
        lines += [
            f"{r.count:,} removed by the rule that {r.requirement} ({r.example})" for r in removed
        ]
    for text in lines:
        click.echo(f"stagewright: {printable(text)}", err=True)


ENTRY = Entry(
    45,
    search,
    (
        "stagewright search llama3-8b --gpus 8 --hardware h100-sxm --zero 1 --pp 1",
        "stagewright search llama3.1-8b --serve --hardware h100-sxm --rate 60 --isl 1024 --osl 128 "
        "--ttft 300 --tpot 12",
        "stagewright search gpt2 --gpus 4 --hardware h100-sxm,h200 --tp 1 --pp 1 --zero 1 --vary "
        "memory.gb=80,141 --recompute none --objective time --objective memory",
    ),
)
