"""Options of commands that write traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

_Command = TypeVar("_Command", bound=Callable[..., Any])


_FORCED = "stagewright.force"
_REPLACE = "Replace the output of an earlier run."


def _note_force(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    context.meta[_FORCED] = value


def _check_file(
    context: click.Context, parameter: click.Parameter, given: str | tuple[str, ...] | None
) -> str | tuple[str, ...] | None:
    """Refuse before any work what could not be written after it: a file, or several."""
    if given is not None and not context.resilient_parsing:
        from stagewright.files import check_output_file

        for path in (given,) if isinstance(given, str) else given:
            check_output_file(path, force=bool(context.meta.get(_FORCED)))
    return given


def forced() -> bool:
    """True if the command may replace existing outputs."""
    return bool(click.get_current_context().meta.get(_FORCED))


def output_file(*names: str, forces: bool = True, **more: Any) -> Callable[[_Command], _Command]:
    """Give a command the option of a file that it writes, and the option to replace that.

    A command that writes several files `forces` with one of them only.
    """

    def give(command: _Command) -> _Command:
        if not forces:
            return click.option(*names, metavar="FILE", callback=_check_file, **more)(command)
        command = click.option(
            "--force",
            is_flag=True,
            is_eager=True,  # known when the file is looked at
            expose_value=False,
            callback=_note_force,
            help=_REPLACE,
        )(command)
        return click.option(*names, metavar="FILE", callback=_check_file, **more)(command)

    return give


OPTIONS = (
    click.option("--force", is_flag=True, help=_REPLACE),
    click.option(
        "--workers",
        type=click.IntRange(1),
        metavar="N",
        help="Threads that write traces. [one per core]",
    ),
)
"""Fields of `write.WriteOptions`, but for progress."""


def writing(command: _Command) -> _Command:
    """Give a command the options that say how it writes."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command
