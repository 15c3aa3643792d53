"""`search --serve`: the fewest GPUs that serve a load within limits."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import click
from click.core import ParameterSource

from stagewright.cli import output, runs
from stagewright.cli.commands.search.files import check_files_of_instances, is_run_file, write_files
from stagewright.cli.progress import shown
from stagewright.errors import UserError

_OF_STEPS = (
    *("most", "exact", "all_variants", "why", "allow_oom", "space"),
    *("engine", "workers", "address"),
)
"""Options that only a search for a step has."""


def without_serving(settings: Mapping[str, Any]) -> dict[str, Any]:
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
    as_json: bool,
    settings: dict[str, Any],
) -> int:
    """Search, print the result and write files; returns the exit code."""
    from stagewright.api.searched_serving import asked_serving, searched_serving
    from stagewright.serving.command_lines import ENGINES, check_engine

    read = (model, config, {**settings})
    row, top = settings.pop("listed_row"), settings.pop("top")
    engine = settings.pop("as_family") if settings["as_family"] in ENGINES else None
    context = click.get_current_context()
    for name in _OF_STEPS:
        settings.pop(name)
        if context.get_parameter_source(name) == ParameterSource.COMMANDLINE:
            raise UserError(f"--{name.replace('_', '-')} is of a search for a step, not of --serve")
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
        check_engine(engine, [of.scheduler for of in question.engines])
    systems = [fleet.hardware for fleet in question.request.space.fleets]
    check_files_of_instances(out, read, systems)
    output.show_notes(question.request.notes)
    begin = time.perf_counter()
    with shown("steps of the search") as bar:
        result = searched_serving(question, bar)
    seconds = time.perf_counter() - begin
    found = bool(result.ranking.best)
    more: dict[str, Any] = {}
    if engine is not None and found:
        more["flags"] = result.commands(engine, row or 1)
    elif row is not None and found and not any(map(is_run_file, out)):
        more["run_file"] = result.run_file(row)
    output.print_result(
        (lambda: result.to_dict() | more) if as_json else partial(result.text, top, seconds)
    )
    if not as_json:
        output.print_texts(more.values())
    if errors := write_files(result, out, row or 1):
        raise UserError("; ".join(errors))
    if result.ranking.stopped:
        return runs.INTERRUPTED
    return 0 if found else runs.DOES_NOT_FIT
