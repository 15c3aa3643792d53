"""`search --serve`: the fewest GPUs that serve a load within limits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from stagewright.cli import shared
from stagewright.cli.commands.search.outputs import end
from stagewright.cli.progress import shown
from stagewright.errors import UserError

if TYPE_CHECKING:
    from stagewright.api.searched_serving import ServingSearch
    from stagewright.time.hardware import Hardware

_OWN = frozenset({"gpus", "attainment", "pairs", "objective", "top"})
"""Options of a search that are no settings, and that a search for serving has."""


def without_serving(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a search for the best step; UserError where one of serving is given."""
    from stagewright.run.sections import EXPERIMENT
    from stagewright.run.sections.foreign import OTHERS
    from stagewright.run.sections.serving import SERVING

    own = ({*SERVING} - {*EXPERIMENT} - {*OTHERS}) | {"attainment", "pairs"}
    for name in own:
        if settings.get(name) is not None:
            flag = SERVING[name].flag if name in SERVING else f"--{name}"
            raise UserError(f"{flag} is of requests over time; add --serve, or leave it out")
    return {name: value for name, value in settings.items() if name not in own}


def hardware_names(texts: Sequence[str] | None) -> list[str]:
    """The names in all `--hardware`, several in one with commas; UserError for an empty one."""
    names = [name.strip() for text in texts or () for name in text.split(",")]
    if not all(names):
        raise UserError("--hardware: a name is empty; wanted names such as h100-sxm,h200")
    return names


def search_serving(
    model: str | None,
    config: str | None,
    out: Sequence[str],
    vary: Mapping[str, str],
    *,
    check: Callable[[Iterable[Hardware]], None],
    as_json: bool,
    settings: dict[str, Any],
) -> int:
    """Search, and print what was found; `check` checks files of hardware."""
    from stagewright.api.searched_serving import asked_serving, searched_serving
    from stagewright.serving.command_lines import check_engine

    listed_row, top = settings.pop("listed_row"), settings.pop("top")
    engine = _engine(settings)
    _refuse_others(settings)
    objectives: tuple[str, ...] = settings.pop("objective")
    if len(objectives) > 1:
        raise UserError("--objective: with --serve wanted one, gpus or cost")
    given = {name: value for name, value in settings.items() if value is not None}
    if objectives:
        given["objective"] = objectives[0]
    if "output_length" in given:  # --osl, which is a setting of one step, too
        given["osl"] = given.pop("output_length")
    if model is not None:
        given["model"] = model
    hardware = hardware_names(given.pop("hardware", ()))
    question = asked_serving(given, config, hardware=hardware, vary=vary)
    if engine is not None:
        check_engine(engine, [each.scheduler for each in question.engines])
    check(fleet.hardware for fleet in question.request.space.fleets)
    shared.show_notes(question.request.notes)
    begin = time.perf_counter()
    with shown("steps of the search") as bar:
        result = searched_serving(question, bar)
    seconds = time.perf_counter() - begin
    flags = None
    if engine is not None and result.ranking.best:
        flags = partial(result.commands, engine, listed_row or 1)
    report = partial(_report, result, seconds, top)
    code = end(result, report, out, listed_row, as_json=as_json, flags=flags)
    return code if code or result.ranking.best else shared.DOES_NOT_FIT


def _engine(settings: dict[str, Any]) -> str | None:
    """Engine whose command lines are printed, taken out of settings; None: `--as` is a family."""
    from stagewright.serving.command_lines import ENGINES

    return settings.pop("as_family") if settings["as_family"] in ENGINES else None


def _refuse_others(settings: dict[str, Any]) -> None:
    """Take out options of a search for the best step; UserError where one of them is given."""
    from stagewright.run.sections import EXPERIMENT
    from stagewright.run.sections.foreign import OTHERS
    from stagewright.run.sections.other_names import SWITCHES
    from stagewright.run.sections.serving import SERVING

    known = {*EXPERIMENT, *OTHERS, *SWITCHES, *SERVING, *_OWN}
    context = click.get_current_context()
    for name in [name for name in settings if name not in known]:
        settings.pop(name)
        if context.get_parameter_source(name) == ParameterSource.COMMANDLINE:
            raise UserError(f"--{name.replace('_', '-')} is of a search for a step, not of --serve")


def _report(result: ServingSearch, seconds: float, top: int | None) -> None:
    """Print the winner, the tables of what none dominates, and what was removed."""
    from stagewright.texttable import print_table
    from stagewright.views.search_serving import UNTIL_STOPPED

    of, out = result.ranking, shared.console()
    out.print(result.load)
    out.print(f"best: {result.describe()}")
    if of.stopped and of.best:
        out.print(f"stopped: {UNTIL_STOPPED}")
    for remark in result.remarks():
        out.print(remark)
    for table in result.best(top):
        print_table(table, out)
    if result.all_removed:
        print_table(result.removed(), out)
    out.print(
        f"{of.candidates:,} candidates ({len(of.rows):,} layouts), of which {len(of.choices):,} "
        f"were simulated, in {seconds:.1f} s"
    )
