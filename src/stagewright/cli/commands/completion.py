"""The command that lets a shell complete words, and the names that it offers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem, get_completion_class

from stagewright.cli.help import Entry, Word, command
from stagewright.errors import UserError

SHELLS = ("bash", "zsh", "fish")


def _models() -> Iterable[str]:
    from stagewright.model.presets import PRESETS

    return PRESETS


def _hardware() -> Iterable[str]:
    from stagewright.time.hardware import names

    return names()


def _schedules() -> Iterable[str]:
    from stagewright.schedule.schedules import SCHEDULES

    return SCHEDULES


def _formats() -> Iterable[str]:
    from stagewright.trace.templates import FORMATS

    return (*FORMATS, "bundle")


NAMES: dict[str, Callable[[], Iterable[str]]] = {
    "model": _models,
    "hardware": _hardware,
    "name": _hardware,
    "schedule": _schedules,
    "format_": _formats,
}
"""By parameter: the names that it takes beside the paths of files."""


class _Name(click.types.StringParamType):
    """Text for which the shell offers names; where no name begins as typed, files."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """The names that begin as typed."""
        names = sorted(NAMES[str(param.name)]())
        items = [CompletionItem(name) for name in names if name.startswith(incomplete)]
        return items or [CompletionItem(incomplete, type="file")]


def add_completion(commands: click.Group) -> None:
    """Let the shell complete names."""
    for subcommand in commands.commands.values():
        for parameter in subcommand.params:
            if parameter.name in NAMES and parameter.type is click.STRING:
                parameter.type = _Name()


@command
@click.argument("shell", required=False, type=Word(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str | None) -> None:
    """Print what makes a shell complete commands, options and names: bash, zsh or fish.

    Without SHELL, that of the variable $SHELL.
    """
    name = shell or os.path.basename(os.environ.get("SHELL", ""))
    if name not in SHELLS:
        raise UserError(f"no completion for shell {name!r}; name one of {', '.join(SHELLS)}")
    shell_class = get_completion_class(name)
    assert shell_class is not None
    group = context.find_root().command
    click.echo(shell_class(group, {}, "stagewright", "_STAGEWRIGHT_COMPLETE").source())


ENTRY = Entry(
    140,
    completion,
    (
        "stagewright completion bash >> ~/.bashrc",
        "stagewright completion fish > ~/.config/fish/completions/stagewright.fish",
    ),
)
