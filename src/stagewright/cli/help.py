"""Help in sections, with examples and with the rare options on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from stagewright.cli.names import offer_names
from stagewright.cli.shared import show_notes
from stagewright.cli.words import check_words, note_of_ignored, sort_words
from stagewright.errors import UserError, did_you_mean, hint_of_thousands

_ALL = "stagewright.help_all"
_RESTS = "stagewright.rests_of_names"
_OWN = "Options"
_UNBROKEN = "\u2011"
"""A hyphen at which no line is broken."""
_WIDEST = 40
"""Characters of a name that fit in a line of help; a longer name is cut while help is laid out."""
_CUT = 0xE000
"""The first of the characters that stand for what was cut off."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Entry(NamedTuple):
    """A command as its module in `cli.commands` declares it."""

    order: int
    """Commands are listed by this number: in the order of use."""
    command: click.Command
    examples: tuple[str, ...]
    """Lines for the end of the command's help; a test runs them all."""


class SectionOption(click.Option):
    """An option that help lists under a heading of its own; a rare one only if asked for all."""

    def __init__(self, *arguments: Any, section: str, rare: bool, **more: Any) -> None:
        """`section` is the heading."""
        super().__init__(*arguments, **more)
        self.section, self.rare = section, rare

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """The first name only."""
        return f"'{self.opts[0]}'"

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """The first name and the help; with all options, the names in other tools, too."""
        names, others = self.opts[:1], self.opts[1:]
        if self.secondary_opts:
            names = [f"--[no-]{names[0][2:]}"]
        words = f"[{'|'.join(self.type.choices)}]" if isinstance(self.type, Word) else ""
        head = names[0] if self.is_flag else f"{names[0]} {self.metavar or words}"
        text = self.help or ""
        if others and ctx.meta.get(_ALL):
            # No line ends within a name: `get_help` takes these hyphens back.
            rests: list[str] = ctx.meta.setdefault(_RESTS, [])
            whole: list[str] = []
            for name in others:
                rest = name[_WIDEST:]
                whole.append(name[:_WIDEST] + (chr(_CUT + len(rests)) if rest else ""))
                rests += [rest] if rest else []
            text += f" (also {', '.join(whole)})".replace("-", _UNBROKEN)
        return head, text


class Command(click.Command):
    """A command whose help has its own options first and those of a run in sections.

    Options of settings are made when the command is used: a hundred for each command would be most
    of the time of `stagewright --help`.
    """

    own: list[click.Parameter]
    settings: Callable[[], list[click.Parameter]] | None = None
    """Makes the options of settings; None: there are none, or they are made."""
    of_runs = False
    """Whether the command has settings of a run, as command lines of other tools have them."""

    @property
    def params(self) -> list[click.Parameter]:
        """All options, with `--help-all` if some of them are rare."""
        if self.settings is not None:
            settings, self.settings = self.settings(), None
            self.own = [*settings, *self.own, *_help_all(settings)]
            offer_names(self.own)
        return self.own

    @params.setter
    def params(self, own: list[click.Parameter]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        offer_names(own)
        self.own = own

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words, of which some are refused before click sees them."""
        if not ctx.resilient_parsing:
            if self.of_runs:
                args, ignored = sort_words(args, self)
                if ignored:
                    show_notes([note_of_ignored(ignored)])
            check_words(args, self)
        return super().parse_args(ctx, args)

    def get_help(self, ctx: click.Context) -> str:
        """The help, in which names are whole."""
        text = super().get_help(ctx).replace(_UNBROKEN, "-")
        for nth, rest in enumerate(ctx.meta.get(_RESTS, ())):
            text = text.replace(chr(_CUT + nth), rest)
        return text

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in sections."""
        sections: dict[str, list[tuple[str, str]]] = {_OWN: []}
        hidden = 0
        for parameter in self.get_params(ctx):
            if isinstance(parameter, click.Argument):
                continue  # the text above says what they are
            section = parameter.section if isinstance(parameter, SectionOption) else _OWN
            if isinstance(parameter, SectionOption) and parameter.rare and not ctx.meta.get(_ALL):
                hidden += 1
                continue
            record = parameter.get_help_record(ctx)
            if record is not None:
                sections.setdefault(section, []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
        if hidden:
            formatter.write_paragraph()
            formatter.write(f"{hidden} rare options and the names of other tools: --help-all\n")


def _help_all(settings: Iterable[click.Parameter]) -> list[click.Parameter]:
    if not any(isinstance(each, SectionOption) and each.rare for each in settings):
        return []
    return [
        click.Option(
            ["--help-all"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_print_all,
            help="Show rare options, and names of other tools, too.",
        )
    ]


def _print_all(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        context.meta[_ALL] = True
        click.echo(context.get_help(), color=context.color)
        context.exit()


def command(function: Callable[..., Any]) -> click.Command:
    """The command that a function is, with sections in its help."""
    made = click.command(cls=Command)(function)
    made.settings = getattr(function, "settings", None)
    made.of_runs = made.settings is not None
    return made


def examples_text(lines: Sequence[str]) -> str:
    """Examples as the end of a help."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


# ---- mistyped words ------------------------------------------------------------------------------

if TYPE_CHECKING:
    Choice = click.Choice[str]
else:
    Choice = click.Choice  # no generic before click 8.2


class WholeNumber(click.types.IntParamType):
    """A whole number, which is told apart from a word such as `8k`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number itself."""
        hint = hint_of_thousands(str(value))
        if hint:
            name = param.opts[0] if param else "value"
            raise UserError(f"{name} is {value!r}, wanted a whole number{hint}")
        return super().convert(value, param, ctx)


class Word(Choice):
    """One of several words; another is refused with the one that is meant.

    `instead` says what to use for words of other tools; those in `same` are taken as they are.
    """

    def __init__(
        self,
        words: Sequence[str],
        instead: Mapping[str, str] | None = None,
        same: Iterable[str] = (),
    ) -> None:
        """Words to choose from."""
        super().__init__(words)
        self.instead = instead or {}
        self.same = frozenset(same)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The word itself."""
        if value in self.choices or value in self.same:
            return str(value)
        name = param.opts[0] if param else "value"
        known = ", ".join(self.choices)
        use = self.instead.get(str(value))
        hint = f"; use {use}" if use else did_you_mean(str(value).lower(), self.choices)
        raise UserError(f"{name} is {str(value)[:60]!r}, wanted one of {known}{hint}")
