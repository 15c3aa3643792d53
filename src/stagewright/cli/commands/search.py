"""The command that searches the best execution of a model on a machine, or for a load."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import click
from click.core import ParameterSource

from stagewright.cli import output, runs
from stagewright.cli.command import command
from stagewright.cli.option_types import RealNumber, WholeNumber, Word
from stagewright.cli.options import ADDRESS, FORCE, JSON, WORKERS, check_output, search_settings
from stagewright.cli.progress import shown
from stagewright.errors import Stopped, UserError
from stagewright.numbers import duration, plural
from stagewright.printable import printable

if TYPE_CHECKING:
    from stagewright.api.searched import Search
    from stagewright.api.searched_serving import ServingSearch
    from stagewright.cli.progress import ProgressBar
    from stagewright.executors import Executor
    from stagewright.searching.candidates import Candidates
    from stagewright.searching.figures import Figures
    from stagewright.searching.ranking import NothingFound, SearchOptions
    from stagewright.searching.request import SearchRequest
    from stagewright.searching.space import Enumeration
    from stagewright.time.hardware import Hardware


@command(
    45,
    "stagewright search llama3-8b --gpus 8 --hardware h100-sxm --zero 1 --pp 1",
    "stagewright search llama3.1-8b --serve --hardware h100-sxm --rate 60 --isl 1024 --osl 128 "
    "--ttft 300 --tpot 12",
    "stagewright search gpt2 --gpus 4 --hardware h100-sxm,h200 --tp 1 --pp 1 --zero 1 --vary "
    "memory.gb=80,141 --recompute none --objective time --objective memory",
)
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
    file given by --config may hold lists, too. `--as megatron` (torchtitan, deepspeed, accelerate)
    prints the best as a file of that tool.

    With --serve: layouts, and numbers of instances of each, that serve requests over time as
    `serve` does; --attainment of all requests keep --ttft, --tpot and --e2e.
    """
    files = _Files(out, (model, config, {**settings}))
    settings["vary"] = _pairs(settings["vary"])
    kind = _search_serving if settings.pop("serve") else _search_steps
    return kind(model, config, files, as_json=as_json, settings=settings)


def _search_steps(
    model: str | None, config: str | None, files: _Files, *, as_json: bool, settings: dict[str, Any]
) -> int:
    """Search the best step, print the result and write files; returns the exit code."""
    from stagewright.api.searched import pop_search_options
    from stagewright.run import tool_files
    from stagewright.searching.request import search_request
    from stagewright.searching.simulated import step_of
    from stagewright.views.deviations import known_deviations
    from stagewright.views.search import without_objective

    settings = _without_serving(settings)
    why, row = settings.pop("why"), settings.pop("listed_row")
    options = pop_search_options(settings)
    executor = _executor(*(settings.pop(name) for name in ("engine", "workers", "address")))
    tool = runs.tool_of(model, settings["as_family"], tool_files.TOOLS)
    if tool:
        settings["as_family"] = None
    families, gpus = settings.pop("space"), settings.pop("gpus")
    hardware, vary = _hardware_names(settings.pop("hardware")), settings.pop("vary")
    request = search_request(
        {**settings, "model": model}, config,
        hardware=hardware, gpus=gpus, vary=vary, families=families, tool=tool,
    )  # fmt: skip
    if row is not None and row > options.top:
        raise UserError(
            f"--run {row}: a search lists the best {options.top:,} (--top); give --run 1 to "
            f"{options.top:,}, or --top {row}"
        )
    files.check_beside(fleet.hardware for fleet in request.space.fleets)
    output.show_notes(request.notes)
    begin = time.perf_counter()
    with shown("candidates", lines=True) as bar, executor as pool:
        result, nothing = _run_with_progress(request, options, pool, bar, why=why)
    seconds = time.perf_counter() - begin
    output.show_notes(without_objective(result.ranking))
    if nothing is not None:
        return _end_without_best(result, nothing, files)
    candidates = result.ranking.candidates
    output.show_notes(known_deviations(step_of(candidates, result.index(1))))
    more: dict[str, Any] = {}
    errors: list[str] = []
    try:
        if tool is not None:
            output.show_notes(tool_files.notes(candidates.trained(result.index(row or 1)), tool))
            more["flags"] = result.flags(tool, row or 1)
        elif row is not None and not files.has_run_file:
            more["run_file"] = result.run_file(row)
    except UserError as error:  # a row that is not listed; the result is shown all the same
        errors.append(str(error))
    return _end(result, partial(result.text, seconds), more, files, row, errors, as_json=as_json)


_ONLY_STEPS = (
    *("most", "exact", "all_variants", "allow_oom", "space", "engine", "workers", "address"),
)
"""Options that only a search for a step has."""


def _search_serving(
    model: str | None, config: str | None, files: _Files, *, as_json: bool, settings: dict[str, Any]
) -> int:
    """Search the fewest GPUs for a load, print the result and write files; the exit code."""
    from stagewright.api.searched_serving import asked_serving, searched_serving
    from stagewright.serving.command_lines import check_engine
    from stagewright.serving.schedulers.named import ENGINES

    row, top, why = (settings.pop(name) for name in ("listed_row", "top", "why"))
    engine = settings.pop("as_family") if settings["as_family"] in ENGINES else None
    context = click.get_current_context()
    for name in _ONLY_STEPS:
        settings.pop(name)
        if context.get_parameter_source(name) == ParameterSource.COMMANDLINE:
            raise UserError(f"--{name.replace('_', '-')} is of a search for a step, not of --serve")
    given = {name: value for name, value in settings.items() if value is not None}
    objectives: tuple[str, ...] = given.pop("objective")
    if len(objectives) > 1:
        raise UserError("--objective: with --serve wanted one, gpus or cost")
    given |= {"objective": objectives[0]} if objectives else {}
    if "output_length" in given:  # --osl, which is a setting of one step, too
        given["osl"] = given.pop("output_length")
    if model is not None:
        given["model"] = model
    hardware, vary = _hardware_names(given.pop("hardware", ())), given.pop("vary")
    question = asked_serving(given, config, hardware=hardware, vary=vary)
    if engine is not None:
        check_engine(engine, [of.scheduler for of in question.engines])
    files.check_beside((of.hardware for of in question.request.space.fleets), serving=True)
    output.show_notes(question.request.notes)
    begin = time.perf_counter()
    with shown("steps of the search", lines=True) as bar:
        bar.say("bounds of layouts, then simulations of the cheapest that may keep the limits")
        result = searched_serving(question, bar)
    seconds = time.perf_counter() - begin
    more: dict[str, Any] = {}
    if result.ranking.best and engine is not None:
        more["flags"] = result.commands(engine, row or 1)
    elif result.ranking.best and row is not None and not files.has_run_file:
        more["run_file"] = result.run_file(row)
    text = partial(result.text, top, seconds, why=why)
    return _end(result, text, more, files, row, [], as_json=as_json)


# ---- settings ------------------------------------------------------------------------------------


def _without_serving(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a search for the best step; UserError if one of serving is given."""
    from stagewright.launch.names import OTHERS
    from stagewright.run.sections import EXPERIMENT
    from stagewright.run.sections.serving import SERVING

    own = ({*SERVING} - {*EXPERIMENT} - {*OTHERS}) | {"attainment", "pairs"}
    for name in own:
        if settings.get(name) is not None:
            flag = SERVING[name].flag if name in SERVING else f"--{name}"
            raise UserError(f"{flag} is of requests over time; add --serve, or leave it out")
    return {name: value for name, value in settings.items() if name not in own}


def _hardware_names(texts: Sequence[str] | None) -> list[str]:
    """The names in all `--hardware`, several in one with commas; UserError for an empty one."""
    names = [name.strip() for text in texts or () for name in text.split(",")]
    if not all(names):
        raise UserError("--hardware: a name is empty; wanted names such as h100-sxm,h200")
    return names


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


def _run_with_progress(
    request: SearchRequest,
    options: SearchOptions,
    executor: Executor | None,
    bar: ProgressBar,
    *,
    why: bool,
) -> tuple[Search, NothingFound | None]:
    """Result, and the error if nothing was found; stderr shows progress and the best so far."""
    from stagewright.api.searched import Search, run_search
    from stagewright.searching.estimate import estimate
    from stagewright.searching.ranking import NothingFound

    best = float("inf")

    def estimates(candidates: Candidates, executor: Executor | None) -> Figures:
        count = plural(len(candidates), "candidate", "candidates")
        bar.say(f"estimating {count}")
        figures = estimate(candidates, executor)
        bar.say(f"estimated {count}; simulating the best")
        return figures

    def progress(done: int, total: int, latest: Figures) -> None:
        nonlocal best
        best = min(best, float(latest.seconds[latest.fits].min(initial=float("inf"))))
        bar(done, total, more="" if best == float("inf") else f"best {duration(best)}")

    try:
        enumeration = request.space.enumerate()
        _show_space(enumeration, why=why)
        try:
            return run_search(request, options, executor, progress, enumeration, estimates), None
        except NothingFound as error:
            return Search(enumeration, error.ranking, request.notes), error
    except KeyboardInterrupt:
        raise Stopped("stopped before any candidate was simulated; nothing was written") from None


def _show_space(enumeration: Enumeration, *, why: bool) -> None:
    """Print the size of the space to stderr, and the combinations that constraints removed."""
    removed, count = enumeration.removed, len(enumeration.candidates)
    combinations = plural(enumeration.combinations, "combination", "combinations")
    line = f"{combinations}: {count:,} can be run"
    if removed and not why:
        line += f", {plural(len(removed), 'rule', 'rules')} removed the others (--why)"
    lines = [line]
    if why:
        lines += [
            f"{r.count:,} removed by the rule that {r.requirement} ({r.example})" for r in removed
        ]
    for text in lines:
        click.echo(f"stagewright: {printable(text)}", err=True)


# ---- results -------------------------------------------------------------------------------------


class _Files:
    """Files of a search: checked before it, written after it."""

    def __init__(self, paths: Sequence[str], given: object) -> None:
        """Raise a UserError for a file that cannot be written, or must not be replaced.

        `given`: settings, some texts of which are paths of files that the search reads.
        """
        from stagewright.api.result import OF_SEARCH, check_package, check_suffix

        self.paths = paths
        self._read = (
            {os.path.realpath(path) for path in _files_read(given)} if paths else set[str]()
        )
        self._outputs: dict[str, str] = {}
        for path in paths:
            check_suffix(path, OF_SEARCH)
            check_package(path)
        self._check(paths)

    def _check(self, paths: Iterable[str]) -> None:
        from stagewright.files import check_can_be_written

        for path in paths:
            if os.path.realpath(path) in self._read:
                raise UserError(
                    f"{path}: would replace a file that this search reads; choose another name"
                )
        for path in paths:
            check_output(path, self._outputs)
            check_can_be_written(path)

    def check_beside(self, systems: Iterable[Hardware], *, serving: bool = False) -> None:
        """Check files next to run files, too: hardware that needs one, and groups of instances."""
        from stagewright.searching.run_file import beside, is_packaged

        own = not all(map(is_packaged, systems))
        others = ["hardware"] * own + ["pools"] * serving + ["prefill.hardware"] * (own and serving)
        run_files = [path for path in self.paths if _is_run_file(path)]
        self._check([str(beside(path, what)) for path in run_files for what in others])

    @property
    def has_run_file(self) -> bool:
        """True if a run is written to a file, so that it is not printed."""
        return any(map(_is_run_file, self.paths))

    def write(self, result: Search | ServingSearch, row: int, *, runs: bool = True) -> list[str]:
        """Write each of the files that can be written; returns the errors of the others."""
        from stagewright.files import replaced_together

        until = ", as far as the search had come" if result.ranking.stopped else ""
        errors: list[str] = []
        written: list[str] = []
        try:
            with replaced_together():
                for path in self.paths:
                    if _is_run_file(path) and not runs:
                        continue
                    try:
                        written.append(", ".join(result.write(path, row)))
                    except UserError as error:
                        errors.append(str(error))
                    except OSError as error:
                        errors.append(f"{path}: cannot be written: {error.strerror or error}")
        except KeyboardInterrupt:
            raise Stopped("stopped; no file was written") from None
        for names in written:
            click.echo(f"stagewright: wrote {names}{until}", err=True)
        return errors


def _is_run_file(path: str) -> bool:
    """True if a run is written there, and not all candidates."""
    from stagewright.api.result import RUN_FILE, suffix_of

    return suffix_of(path) == RUN_FILE


def _files_read(given: object) -> Iterator[str]:
    """Files that some texts name, and those that these name: run files, hardware and its base."""
    from stagewright.run.files import read_settings

    seen, remaining = set[str](), [*_texts_in(given)]
    while remaining:
        path = remaining.pop()
        if path in seen or not os.path.isfile(path):
            continue
        seen.add(path)
        yield path
        if path.lower().endswith((".yaml", ".yml", ".json")):
            try:
                texts = [*_texts_in(read_settings(path))]
            except UserError:
                continue  # the search reports it
            remaining += texts + [os.path.join(os.path.dirname(path), text) for text in texts]


def _texts_in(value: object) -> Iterator[str]:
    """All texts in a value of settings, at any depth, and their parts between commas and `=`."""
    if isinstance(value, str):
        yield from (value, *(part.strip() for part in value.replace("=", ",").split(",")))
    elif isinstance(value, Mapping):
        yield from _texts_in([*cast("Mapping[Any, Any]", value).values()])
    elif isinstance(value, list | tuple | set | frozenset):
        for item in cast("Iterable[Any]", value):
            yield from _texts_in(item)


def _end(
    result: Search | ServingSearch,
    text: partial[Any],
    more: Mapping[str, Any],
    files: _Files,
    row: int | None,
    errors: Sequence[str],
    *,
    as_json: bool,
) -> int:
    """Print the result, write the files; returns the exit code."""
    output.print_result(
        (lambda: {**result.to_dict(), **more}) if as_json else text, to_stderr="flags" in more
    )
    errors = [*errors, *files.write(result, row or 1)]
    if not as_json:
        output.print_texts(more.values())
    if errors:
        raise UserError("; ".join(dict.fromkeys(errors)))
    if result.ranking.stopped:
        return runs.INTERRUPTED
    return 0 if len(result.ranking.best) else runs.DOES_NOT_FIT


def _end_without_best(result: Search, why: NothingFound, files: _Files) -> int:
    """Write the files of all candidates, and say why nothing was found; returns the exit code."""
    errors = [*files.write(result, 1, runs=False), str(why)]
    errors += [
        f"{path}: not written, since there is no run to write"
        for path in filter(_is_run_file, files.paths)
    ]
    stopped, text = result.ranking.stopped, "; ".join(dict.fromkeys(errors))
    if not why.too_large and not stopped:
        raise UserError(text)
    click.echo(f"stagewright: {'' if stopped else 'error: '}{printable(text)}", err=True)
    return runs.INTERRUPTED if stopped else runs.DOES_NOT_FIT
