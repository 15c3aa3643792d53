"""Names that a shell completes, beside the paths of files."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem


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


def offer_names(parameters: Iterable[click.Parameter]) -> None:
    """Let the shell complete the names that parameters take."""
    for parameter in parameters:
        if parameter.name in NAMES and parameter.type is click.STRING:
            parameter.type = _Name()
