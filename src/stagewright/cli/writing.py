"""Options of commands that write traces."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

from stagewright.cli.help import Word
from stagewright.errors import UserError

_Command = TypeVar("_Command", bound=Callable[..., Any])


def _shard(
    context: click.Context, parameter: click.Parameter, text: str | None
) -> tuple[int, int] | None:
    """`3/8` as two numbers."""
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text.strip())
    if match is None:
        raise UserError(f"--shard: got {text!r}, wanted a share such as 3/8")
    return int(match[1]), int(match[2])


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
    """Whether the command that runs may replace what stands where it writes."""
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
    click.option(
        "--resume", is_flag=True, help="Continue the output of a stopped run; keep it if stopped."
    ),
    click.option(
        "--shard",
        metavar="I/N",
        callback=_shard,
        help="Write share I of N only, as in a job array; the last share completes the output.",
    ),
    click.option(
        "--engine",
        type=Word(("local", "ray")),
        default="local",
        help="Writers: threads of this process, or a Ray cluster. [local]",
    ),
    click.option(
        "--address", metavar="ADDRESS", help="Address of the Ray cluster: host:port, or auto."
    ),
)
"""Fields of `write.How`, but for progress."""

HOW = ("force", "workers", "resume", "shard", "engine", "address")


def check_lasting(out: str) -> None:
    """Refuse a store that ends with this process."""
    if out.startswith("memory:"):
        raise UserError(f"{out}: is gone when this command ends; name a directory, or a store")


def writing(command: _Command) -> _Command:
    """Give a command the options that say how it writes."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command
