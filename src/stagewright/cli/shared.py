"""Parts of commands: the run of a command line, ranks, where tables and JSON are printed."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import click

from stagewright.errors import UserError
from stagewright.printable import printable, printable_lines

if TYPE_CHECKING:
    from rich.console import Console

    from stagewright.lower.compiled_run import CompiledRun
    from stagewright.program.fit import Fit
    from stagewright.run.experiment import Experiment
    from stagewright.run.settings import Run


def load_experiment(
    model: str | None, config: str | None, settings: Mapping[str, Any]
) -> Experiment:
    """The run, the machine and the execution of a command line; options go before the file."""
    from stagewright.run.notes import notes
    from stagewright.trace.recorded import load_experiment

    given = {name: value for name, value in settings.items() if value is not None}
    if model is not None:
        given["model"] = model
    experiment = load_experiment(config, given, _gpus_per_node)
    show_notes(notes(experiment))
    return experiment


def _gpus_per_node(hardware: str | None) -> int:
    from stagewright.api.experiments import gpus_per_node

    return gpus_per_node(hardware)


def compile_run(
    run: Run, model: str | None, config: str | None, hardware: str | None = None
) -> CompiledRun:
    """Compile; a manifest of an earlier run brings its model along unless another is named.

    Where the run names no `device_memory`, that of `hardware` counts.
    """
    from stagewright.lower import weight_storage
    from stagewright.lower.compile import compile
    from stagewright.run.notes import beyond_positions
    from stagewright.trace.recorded import recorded_model

    recorded = recorded_model(config) if config is not None and model is None else None
    memory = None
    if hardware is not None:
        from stagewright.time.hardware import resolve

        memory = resolve(hardware).memory
    compiled = compile(run, recorded, device_memory=memory)
    show_notes(beyond_positions(compiled.run, compiled.model))
    show_notes((*compiled.model.notes, *weight_storage.notes(compiled.run, compiled.model)))
    return compiled


def show_notes(notes: Iterable[str]) -> None:
    """Print what was assumed or passed over, beside the result."""
    for note in notes:
        click.echo(f"stagewright: note: {printable(note)}", err=True)


INTERRUPTED = 130
"""The exit code after Ctrl-C, with what was known by then."""
DOES_NOT_FIT = 3
"""The exit code where a run does not fit into the memory of a device."""


ALLOW_OOM = "stagewright.allow_oom"
"""Where the context of a command notes the option of this name."""


def note_allow_oom(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    """Keep the option for `code_of`."""
    context.meta[ALLOW_OOM] = value


def code_of(fit: Fit | None) -> int:
    """The exit code of a command with `--allow-oom` that has shown a run; stderr tells why it is 3.

    `fit` is None where nothing says which device the run is for.
    """
    from stagewright.numbers import side_by_side

    if fit is None or fit.fits or click.get_current_context().meta[ALLOW_OOM]:
        return 0
    held, room = side_by_side(fit.peak, fit.device_memory, "B")
    click.echo(
        f"stagewright: does not fit: a device of {room} would have to hold {held} "
        f"(exit code {DOES_NOT_FIT}; 0 with --allow-oom)",
        err=True,
    )
    return DOES_NOT_FIT


def parse_ranks(text: str, world_size: int) -> list[int]:
    """Ranks such as `0-7,12`, ascending and each once.

    >>> parse_ranks("12, 0-3,2", 16)
    [0, 1, 2, 3, 12]
    """
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = (word.strip() for word in part.partition("-"))
        if not dash:
            last = first
        if not all(
            word.isdecimal() and word.isascii() and len(word) < 10 for word in (first, last)
        ):
            raise UserError(f"--ranks: cannot read {part.strip()!r}; wanted ranks such as 0-7,12")
        if int(first) > int(last):
            raise UserError(f"--ranks: {part.strip()!r} runs backwards; use {last}-{first}")
        if int(last) >= world_size:
            raise UserError(f"--ranks: there is no rank {int(last)}; use 0 to {world_size - 1}")
        ranks.update(range(int(first), int(last) + 1))
    return sorted(ranks)


def say(text: str) -> None:
    """Print lines for people: what a terminal takes for a command is printed as text."""
    click.echo(printable_lines(text))


def print_json(value: object) -> None:
    """Print a result as JSON, which has no word for a number that is not finite: null."""
    try:
        text = json.dumps(value, indent=2, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), indent=2, allow_nan=False)
    click.echo(text)


def _finite(value: Any) -> Any:
    """A value with None for each number in it that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        entries = cast("Mapping[Any, Any]", value)
        return {key: _finite(item) for key, item in entries.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in cast("list[Any]", value)]
    return value


def console() -> Console:
    """Where tables are printed: as wide as the terminal, or COLUMNS; without both, 80.

    Lines of text are not broken in a pipe or a file, which a search goes through line by line.
    """
    from stagewright.cli.console import PlainTextConsole

    return PlainTextConsole(
        markup=False, emoji=False, highlight=False, soft_wrap=not sys.stdout.isatty()
    )
