"""The command that lets a shell complete words."""

from __future__ import annotations

import os

import click
from click.shell_completion import get_completion_class

from stagewright.cli.help import Entry, Word, command
from stagewright.errors import UserError

SHELLS = ("bash", "zsh", "fish")


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
