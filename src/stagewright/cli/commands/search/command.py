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
from stagewright.cli.commands.search.ending import end, end_without_best
from stagewright.cli.commands.search.options import search_options
from stagewright.cli.commands.search.outputs import Outputs, texts_of
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
    from stagewright.searching.enumeration import Found
    from stagewright.searching.figures import Figures
    from stagewright.searching.ranking import NothingFound, Wanted
    from stagewright.searching.request import SearchRequest
    from stagewright.searching.simulated import Progress

_TOOLS = ("megatron", "torchtitan")


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
    from stagewright.api.searched import wanted
    from stagewright.searching.simulated import step_of
    from stagewright.views.deviations import known
    from stagewright.views.search import without_objective

    outputs = _checked(out, (model, config, settings), settings)
    if settings.pop("serve"):
        pairs = _pairs(settings.pop("vary"))
        return search_serving(model, config, outputs, pairs, as_json=as_json, settings=settings)
    settings = without_serving(settings)
    why, place = settings.pop("why"), settings.pop("place")
    what = wanted(settings)
    engine = [settings.pop(name) for name in ("engine", "workers", "address")]
    tool = _tool(model, settings["as_family"])
    if tool:
        settings["as_family"] = None
    request = _request(model, config, settings)
    _check_place(place, what, request)
    outputs.check_hardware(fleet.hardware for fleet in request.space.fleets)
    shared.show_notes(request.notes)
    begin = time.perf_counter()
    with shown("candidates") as bar, _executor(*engine) as executor:
        result, none = _searched(request, what, executor, bar, why=why)
    shared.show_notes(without_objective(result.ranking))
    if none is not None:
        return end_without_best(result, none, out)
    if result.ranking.rows.model.num_experts:  # whose steps differ most from what was measured
        best = step_of(result.ranking.rows, result.row(1))
        shared.show_notes(known(best))
    seconds = time.perf_counter() - begin
    flags = partial(_flags, result, tool, place or 1) if tool else None
    return end(result, lambda: _report(result, seconds), out, place, as_json=as_json, flags=flags)


def _flags(result: Search, tool: str, place: int) -> Sequence[str]:
    """The flags of a framework; what it has no flags for is noted."""
    shared.show_notes(result.flag_notes(tool, place))
    return result.flags(tool, place)


def _checked(out: tuple[str, ...], given: object, settings: dict[str, Any]) -> Outputs:
    """Refuse before any work numbers below 1, and files that could not be written after it."""
    from stagewright.api.searched import check_count

    for name, option in {"top": "top", "most": "most", "place": "run"}.items():
        check_count(option, settings[name])
    outputs = Outputs(out, settings.pop("force"), [*texts_of(given)])
    outputs.check()
    return outputs


def _check_place(place: int | None, what: Wanted, request: SearchRequest) -> None:
    """Refuse before the search a row of the table that there will not be."""
    if place is not None and place > what.top:
        raise UserError(
            f"--run {place}: a search lists the best {what.top:,} (--top); give --run 1 to "
            f"{what.top:,}, or --top {place}"
        )


def _tool(model: str | None, name: str | None) -> str | None:
    """The framework whose flags are printed; None: the name is a model's family, or none."""
    from stagewright.model.presets import PRESETS

    if name is not None and name not in _TOOLS and model in PRESETS:
        raise UserError(
            f"--as {printable(name)}: wanted {either(_TOOLS)}, whose flags are printed; a model's "
            f"family is for config.json files, and {model} is a preset"
        )
    return name if name in _TOOLS else None


def _request(model: str | None, config: str | None, settings: dict[str, Any]) -> SearchRequest:
    """The space that the options and the run file ask for."""
    from stagewright.searching.request import asked

    vary, gpus = _pairs(settings.pop("vary")), settings.pop("gpus")
    families = settings.pop("space")
    hardware = hardware_names(settings.pop("hardware"))
    given = {name: value for name, value in settings.items() if value is not None}
    if model is not None:
        given["model"] = model
    return asked(given, config, hardware=hardware, gpus=gpus, vary=vary, families=families)


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
    """Who simulates; None: this process."""
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


def _searched(
    request: SearchRequest,
    what: Wanted,
    executor: Executor | None,
    bar: ProgressBar,
    *,
    why: bool,
) -> tuple[Search, NothingFound | None]:
    """The result, and why there is no best, where there is none; stderr shows progress."""
    from stagewright.api.searched import Search, searched
    from stagewright.searching.ranking import NothingFound

    bar.say("constraints ")
    try:
        found = request.space.candidates()
        _show_space(found, why=why)
        bar.say("estimates ")
        try:
            return searched(request, what, executor, _progress(bar), found), None
        except NothingFound as none:
            return Search(found, none.ranking, request.notes), none
    except KeyboardInterrupt:
        raise Stopped("stopped before any candidate was simulated; nothing was written") from None


_LINES_APART = 10.0
"""Seconds between lines of progress where stderr is no terminal."""


def _progress(bar: ProgressBar) -> Progress:
    """Shows the rate, and the best step so far; in lines where stderr is no terminal."""
    best, line = [float("inf")], [time.monotonic()]

    def progress(done: int, total: int, latest: Figures) -> None:
        for seconds, fits in zip(latest.seconds.tolist(), latest.fits.tolist(), strict=True):
            if fits and seconds < best[0]:
                best[0] = seconds
        found = "" if best[0] == float("inf") else f"best {duration(best[0])}"
        bar(done, total, more=found)
        if not sys.stderr.isatty() and time.monotonic() > line[0] + _LINES_APART:
            line[0] = time.monotonic()
            text = ", ".join(filter(None, (f"{done:,} candidates simulated", found)))
            click.echo(f"stagewright: {text}", err=True)

    return progress


_MANY = 20_000
"""Candidates whose estimates take so long that it is said, where stderr is no terminal."""


def _show_space(found: Found, *, why: bool) -> None:
    """Say on stderr how large the space is, and what has been removed from it."""
    combinations = many(found.combinations, "combination", "combinations")
    line = f"{combinations}: {len(found.rows):,} can be run"
    if found.removed and not why:
        line += f", {many(len(found.removed), 'rule', 'rules')} removed the others (--why)"
    if len(found.rows) > _MANY and not sys.stderr.isatty():
        line += "; estimating these"
    lines = [line]
    if why:
        lines += [
            f"{each.count:,} removed by the rule that {each.why} ({each.example})"
            for each in found.removed
        ]
    for text in lines:
        click.echo(f"stagewright: {printable(text)}", err=True)


def _report(result: Search, seconds: float) -> None:
    """Print the best, the price of other choices, and how sure that is."""
    from stagewright.texttable import print_table
    from stagewright.views.search import (
        UNTIL_STOPPED,
        choice,
        expected_error,
        headroom,
        in_words,
        missing_hardware,
    )

    ranking = result.ranking
    out, names = shared.console(), ranking.wanted.objectives
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
    for say in (headroom, choice, expected_error, missing_hardware):
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
