"""Types of options: numbers, words and names, with hints for mistyped values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from stagewright.cli.output import show_notes
from stagewright.errors import UserError, did_you_mean, hint_of_thousands

if TYPE_CHECKING:
    Choice = click.Choice[str]
    ParamType = click.ParamType[Any]
else:
    Choice, ParamType = click.Choice, click.ParamType  # no generics before click 8.2

_PLAIN = re.compile(r"[+\-0-9.a-z]*", re.IGNORECASE)
"""Numbers as people write them: int() also takes `1_0` and digits of other scripts."""


class _NumberType(ParamType):
    """A number in ASCII digits."""

    read: type[int] | type[float]
    wanted: str

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read the number; raises a UserError for any other text."""
        try:
            if isinstance(value, str) and not _PLAIN.fullmatch(value.strip()):
                raise ValueError
            return self.read(value)
        except ValueError:
            name = param.opts[0] if param else "value"
            hint = hint_of_thousands(str(value)) if self.read is int else ""
            text = f"{name} is {str(value)[:60]!r}, wanted {self.wanted}{hint}"
            raise UserError(text) from None


class WholeNumber(_NumberType):
    """A whole number, at least `least`."""

    name, read, wanted = "integer", int, "a whole number"

    def __init__(self, least: int | None = None) -> None:
        """Without `least`, any whole number."""
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read the number; raises a UserError for a smaller one."""
        number = super().convert(value, param, ctx)
        if self.least is not None and number < self.least:
            name = param.opts[0] if param else "value"
            raise UserError(f"{name} is {number}, wanted {self.least} or more")
        return number


class RealNumber(_NumberType):
    """A number."""

    name, read, wanted = "float", float, "a number"


class Word(Choice):
    """One of several words; another is refused with the one that is meant."""

    def __init__(
        self,
        words: Sequence[str],
        instead: Mapping[str, str] | None = None,
        same: Iterable[str] = (),
    ) -> None:
        """`instead`: what to use for words of other tools; `same`: other words that are taken."""
        super().__init__(words)
        self.instead = instead or {}
        self.same = frozenset(same)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The word itself."""
        if value in self.choices or value in self.same:
            return str(value)
        name = param.opts[0] if param else "value"
        use = self.instead.get(str(value))
        hint = f"; use {use}" if use else did_you_mean(str(value).lower(), self.choices)
        known = ", ".join(self.choices)
        raise UserError(f"{name} is {str(value)[:60]!r}, wanted one of {known}{hint}")


# ---- names ---------------------------------------------------------------------------------------


def _names(parameter: str) -> Iterable[str]:
    """Names that a parameter takes besides paths of files."""
    match parameter:
        case "model":
            from stagewright.model.presets import PRESETS

            return PRESETS
        case "schedule":
            from stagewright.schedule.schedules import SCHEDULES

            return SCHEDULES
        case "format_":
            from stagewright.trace.templates import FORMATS

            return (*FORMATS, "bundle")
        case _:
            from stagewright.time.hardware import names

            return names()


class Name(click.types.StringParamType):
    """A name of a list, which the shell completes; else the path of a file."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """The names that begin as typed; without any, files."""
        names = _names(str(param.name))
        items = [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete)]
        return items or [CompletionItem(incomplete, type="file")]


class HardwareName(Name):
    """Names of hardware, between commas; a beginning that only one has stands for it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The full names; notes say which are meant."""
        from stagewright.time.hardware import full_name, is_path

        text = super().convert(value, param, ctx)
        if is_path(text):
            return text
        words = [word.strip() for word in text.split(",")]
        names = [word if not word or is_path(word) else full_name(word) for word in words]
        show_notes(
            f"hardware {word} is {name}"
            for word, name in zip(words, names, strict=True)
            if word != name
        )
        return ",".join(names)


_NAMED = ("model", "hardware", "prefill_hardware", "name", "schedule", "format_")


def name_parameters(parameters: Iterable[click.Parameter]) -> None:
    """Give parameters that take names their type."""
    for parameter in parameters:
        if parameter.name in _NAMED and parameter.type is click.STRING:
            parameter.type = HardwareName() if parameter.name == "hardware" else Name()
