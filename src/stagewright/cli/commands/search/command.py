"""The command that searches the best execution of a model on a machine."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from stagewright.cli import shared
from stagewright.cli.commands.search.options import search_options
from stagewright.cli.commands.search.outputs import (
    check_hardware_files,
    check_outputs,
    end,
    end_without_best,
)
from stagewright.cli.commands.search.served import (
    hardware_names,
    search_serving,
    without_serving,
)
from stagewright.cli.help import Entry, command
from stagewright.cli.options import JSON, search_settings
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
@search_options
@JSON
def search(
    model: str | None, config: str | None, out: tuple[str, ...], as_json: bool, **settings: Any
) -> int:
    """Find the best execution of a model on a machine.

    MODEL is a preset (see `stagewright models`), the path of a Hugging Face config.json, or an id
    of the hub that is in its local cache. Settings take lists and ranges: 1,2,4 or 1:8 or 8:64:8 or
    1:64:x2 (each twice the one before). What is not given is tried by default. A run file given by
    --config may hold lists, too. `--as megatron` (or torchtitan) prints the flags of the best.

    With --serve: layouts, and how many instances of each, that serve requests over time as `serve`
    does; --attainment of all requests keep --ttft, --tpot and --e2e.
    """
    from stagewright.api.searched import check_count, pop_search_options
    from stagewright.searching.simulated import step_of
    from stagewright.views.deviations import known
    from stagewright.views.search import without_objective

    for name, option in {"top": "top", "most": "most", "listed_row": "run"}.items():
        check_count(option, settings[name])
    given, force = (model, config, {**settings}), settings.pop("force")
    check_outputs(out, given, force=force)
    check_hardware = partial(check_hardware_files, out, given, force=force)
    if settings.pop("serve"):
        pairs = _pairs(settings.pop("vary"))
        return search_serving(
            model, config, out, pairs, check=check_hardware, as_json=as_json, settings=settings
        )
    settings = without_serving(settings)
    why, listed_row = settings.pop("why"), settings.pop("listed_row")
    options = pop_search_options(settings)
    engine = [settings.pop(name) for name in ("engine", "workers", "address")]
    tool = _tool(model, settings["as_family"])
    if tool:
        settings["as_family"] = None
    request = _request(model, config, settings)
    if listed_row is not None and listed_row > options.top:
        raise UserError(
            f"--run {listed_row}: a search lists the best {options.top:,} (--top); give --run 1 to "
            f"{options.top:,}, or --top {listed_row}"
        )
    check_hardware(fleet.hardware for fleet in request.space.fleets)
    shared.show_notes(request.notes)
    begin = time.perf_counter()
    with shown("candidates") as bar, _executor(*engine) as executor:
        result, nothing = _run_with_progress(request, options, executor, bar, why=why)
    shared.show_notes(without_objective(result.ranking))
    if nothing is not None:
        return end_without_best(result, nothing, out)
    candidates = result.ranking.candidates
    if candidates.model.num_experts:  # largest deviations from measured steps
        best = step_of(candidates, result.index(1))
        shared.show_notes(known(best))
    seconds = time.perf_counter() - begin
    flags = partial(_flags, result, tool, listed_row or 1) if tool else None
    report = partial(_report, result, seconds)
    return end(result, report, out, listed_row, as_json=as_json, flags=flags)


def _flags(result: Search, tool: str, listed_row: int) -> Sequence[str]:
    """Flags of a framework; notes name settings without one."""
    shared.show_notes(result.flag_notes(tool, listed_row))
    return result.flags(tool, listed_row)


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


def _request(model: str | None, config: str | None, settings: dict[str, Any]) -> SearchRequest:
    """Space of the options and the run file."""
    from stagewright.searching.request import search_request

    vary, families = _pairs(settings.pop("vary")), settings.pop("space")
    gpus, hardware = settings.pop("gpus"), hardware_names(settings.pop("hardware"))
    return search_request(
        {**settings, "model": model}, config,
        hardware=hardware, gpus=gpus, vary=vary, families=families,
    )  # fmt: skip


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
    from stagewright.executors import Processes, cores, ray_cluster

    if engine == "ray":
        if workers is not None:
            raise UserError("--workers is of --engine processes; a Ray cluster has its own number")
        return ray_cluster(address)
    if address is not None:
        raise UserError("--address is of a Ray cluster; add --engine ray, or leave --address out")
    count = cores() if workers is None else workers
    if count < 1:
        raise UserError(f"--workers: got {count}, wanted 1 or more")
    return nullcontext(Processes(count) if count > 1 else None)


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


_SECONDS_BETWEEN_LINES = 10.0
"""Seconds between lines of progress where stderr is no terminal."""


def _progress(bar: ProgressBar) -> Progress:
    """Show the rate and the best step so far; in lines where stderr is no terminal."""
    best, line = [float("inf")], [time.monotonic()]

    def progress(done: int, total: int, latest: Figures) -> None:
        best[0] = min(best[0], float(latest.seconds[latest.fits].min(initial=float("inf"))))
        text = "" if best[0] == float("inf") else f"best {duration(best[0])}"
        bar(done, total, more=text)
        if time.monotonic() > line[0] + _SECONDS_BETWEEN_LINES:
            line[0] = time.monotonic()
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


def _report(result: Search, seconds: float) -> None:
    """Print the best, the price of other choices, and how certain the result is."""
    from stagewright.texttable import print_table
    from stagewright.views.search import (
        UNTIL_STOPPED,
        expected_error,
        headroom,
        in_words,
        missing_hardware,
        tie,
    )

    ranking = result.ranking
    out, names = shared.console(), ranking.options.objectives
    first = "best"
    if len(names) > 1:
        out.print(
            f"Pareto front of {in_words(names)}: {len(ranking.best):,} of {ranking.simulated:,} "
            "simulated candidates, none of which another one beats in all of these"
        )
        first = f"the one with the best {in_words(names[:1])}"
    out.print(f"{first}: {result.describe()}")
    if ranking.stopped:
        out.print(f"stopped: {UNTIL_STOPPED}")
    print_table(result.best(), out)
    choices = result.choices()
    if len(choices):
        print_table(choices, out)
    for say in (headroom, tie, expected_error, missing_hardware):
        if sentence := say(ranking):
            out.print(sentence)
    out.print(
        f"{len(ranking):,} candidates, {ranking.simulated:,} of them simulated, in {seconds:.1f} s"
    )
    out.print(result.certainty)


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
