"""What helps at the command line: examples below `--help`, hints for mistyped words, completion."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem, get_completion_class

from stagewright.errors import UserError, did_you_mean

SHELLS = ("bash", "zsh", "fish")

EXAMPLES: dict[str, tuple[str, ...]] = {
    "": (
        "stagewright show llama3.1-70b --tp 8 --pp 4 --dp 2",
        "stagewright generate llama3.1-70b --tp 8 --pp 4 --dp 2 -o traces",
        "stagewright simulate llama3.1-70b --tp 8 --pp 4 --hardware h100-sxm --nodes 8",
    ),
    "generate": (
        "stagewright generate llama3.1-70b --tp 8 --pp 4 --dp 2 -o traces",
        "stagewright generate path/to/config.json --zero 3 --dp 64 --ranks 0-7 -o few",
        "stagewright generate --config traces/manifest.json -o again",
    ),
    "show": (
        "stagewright show llama3.1-70b --tp 8 --pp 4 --dp 2 --sequence-parallel",
        "stagewright show llama3-8b --pp 4 --global-batch-size 8 --schedule-picture",
        "stagewright show deepseek-v3 --pp 16 --dp 8 --ep 8 --recompute full --json",
    ),
    "models": ("stagewright models", "stagewright models --json"),
    "verify": (
        "stagewright verify traces",
        "stagewright verify traces/workload --comm-group traces/comm_group.json --json",
    ),
    "inspect": (
        "stagewright inspect traces/workload.0.et",
        "stagewright inspect traces/workload.0.et --nodes 0-50",
    ),
    "diff": (
        "stagewright diff traces again",
        "stagewright diff traces/workload.0.et again/workload.0.et --json",
    ),
    "expand": (
        "stagewright generate palm-540b --tp 8 --pp 64 --dp 2048 --format bundle -o palm.bundle",
        "stagewright expand palm.bundle --ranks 0-7,131071 -o some",
    ),
    "hardware": ("stagewright hardware", "stagewright hardware h100-sxm --json"),
    "simulate": (
        "stagewright simulate llama3.1-70b --tp 8 --pp 4 --dp 2 --hardware h100-sxm",
        "stagewright simulate llama3.1-8b --dp 8 --zero 3 --hardware a100-sxm-80gb --json",
    ),
    "report": (
        "stagewright report llama3.1-70b --tp 8 --pp 4 --dp 2 -o run.html",
        "stagewright report llama3-8b --dp 8 --zero 3 --hardware h100-sxm -o run.html",
    ),
    "validate": (
        "stagewright validate --source nccl-tests",
        "stagewright validate --source korthikanti --json",
    ),
    "reproduce": (
        "stagewright reproduce stage-paper",
        "stagewright reproduce stage-paper -o stage-paper.md",
    ),
    "doctor": ("stagewright doctor", "stagewright doctor --no-speed --json"),
    "completion": (
        "stagewright completion bash >> ~/.bashrc",
        "stagewright completion fish > ~/.config/fish/completions/stagewright.fish",
    ),
}
"""Lines for the end of each command's help; a test runs them all, in this order, in one place."""


def add_examples(commands: click.Group) -> None:
    """Put the examples below the help of a group and its commands."""
    named = {"": commands, **commands.commands}
    for name, lines in EXAMPLES.items():
        text = "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])
        named[name].epilog = text


if TYPE_CHECKING:
    Choice = click.Choice[str]
else:
    Choice = click.Choice  # no generic before click 8.2


class Word(Choice):
    """One of several words; another is refused with the one that is meant."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The word itself."""
        if value in self.choices:
            return str(value)
        name = param.opts[0] if param else "value"
        known = ", ".join(self.choices)
        hint = did_you_mean(str(value).lower(), self.choices)
        raise UserError(f"{name} is {str(value)[:60]!r}, wanted one of {known}{hint}")


def no_such_option(error: click.NoSuchOption, commands: click.Group) -> str:
    """What to say of an option that a command does not have."""
    name, context = error.option_name, error.ctx
    flags = _flags(context.command) if context else []
    hint = did_you_mean(name, flags)
    if not hint:
        owners = [title for title, each in commands.commands.items() if name in _flags(each)]
        hint = f"; it is an option of {', '.join(owners)}" if owners else "; see --help"
    return f"no such option {name}{hint}"


def _flags(command: click.Command) -> list[str]:
    found = [flag for each in command.params for flag in (*each.opts, *each.secondary_opts)]
    return [flag for flag in found if flag.startswith("--")]


# ---- completion ----------------------------------------------------------------------------------


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
    """A text for which the shell offers names; where none begins so, files."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """The names that begin so."""
        names = sorted(NAMES[str(param.name)]())
        found = [CompletionItem(name) for name in names if name.startswith(incomplete)]
        return found or [CompletionItem(incomplete, type="file")]


def add_completion(commands: click.Group) -> None:
    """Let the shell complete names."""
    for command in commands.commands.values():
        for parameter in command.params:
            if parameter.name in NAMES and parameter.type is click.STRING:
                parameter.type = _Name()


@click.command()
@click.argument("shell", required=False, type=Word(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str | None) -> None:
    """Print what makes a shell complete commands, options and names: bash, zsh or fish.

    Without SHELL, that of the variable $SHELL.
    """
    name = shell or os.path.basename(os.environ.get("SHELL", ""))
    if name not in SHELLS:
        raise UserError(f"no completion for shell {name!r}; name one of {', '.join(SHELLS)}")
    found = get_completion_class(name)
    assert found is not None
    group = context.find_root().command
    click.echo(found(group, {}, "stagewright", "_STAGEWRIGHT_COMPLETE").source())
