"""Commands with help in sections, examples, and all options on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from stagewright.cli.option_types import Word, name_parameters
from stagewright.cli.output import show_notes
from stagewright.cli.runs import launch_files
from stagewright.cli.words import note_of_ignored, read_words

_ALL = "stagewright.help_all"


class SectionOption(click.Option):
    """An option in a section of the help; unless `common`, only `--help-all` lists it."""

    def __init__(self, *arguments: Any, section: str, common: bool, **more: Any) -> None:
        """Arguments are those of click's `Option`."""
        super().__init__(*arguments, **more)
        self.section, self.common = section, common

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """The first name only."""
        return f"'{self.opts[0]}'"

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """The first name and the help."""
        name = f"--[no-]{self.opts[0][2:]}" if self.secondary_opts else self.opts[0]
        words = f"[{'|'.join(self.type.choices)}]" if isinstance(self.type, Word) else ""
        return (name if self.is_flag else f"{name} {self.metavar or words}"), self.help or ""


class Command(click.Command):
    """A command with its own options first in the help, and settings in sections.

    Options of settings are made when the command is used: a hundred for each command would be most
    of the time of `stagewright --help`.
    """

    order: int
    """Commands are listed by this number: in the order of use."""
    examples: tuple[str, ...]
    """Lines for the end of the command's help; a test runs them all."""
    own: list[click.Parameter]
    settings: Callable[[], list[click.Parameter]] | None = None
    """Makes the options of settings; None: there are none, or they are made."""
    of_runs = False
    """True if the command has settings of a run, as command lines of other tools have them."""

    @property
    def params(self) -> list[click.Parameter]:
        """All parameters."""
        if self.settings is not None:
            settings, self.settings = self.settings(), None
            self.own = [*settings, *self.own, _HELP_ALL]
            name_parameters(settings)
        return self.own

    @params.setter
    def params(self, own: list[click.Parameter]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        name_parameters(own)
        self.own = own

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words, of which some are refused before click sees them."""
        if not ctx.resilient_parsing:
            args, ignored = read_words(args, self, of_runs=self.of_runs)
            if ignored:
                show_notes([note_of_ignored(ignored)])
        rest = super().parse_args(ctx, args)
        if self.of_runs and not ctx.resilient_parsing:
            launch_files(ctx)
        return rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in sections; with `--help-all` all, and their names in other tools."""
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        hidden = 0
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx)
            if record is None or isinstance(option, click.Argument):
                continue  # the text above describes arguments
            rows = sections["Options"]
            if isinstance(option, SectionOption):
                if not (ctx.meta.get(_ALL) or option.common):
                    hidden += 1
                    continue
                rows = sections.setdefault(option.section, [])
            rows.append(record)
            if isinstance(option, SectionOption) and ctx.meta.get(_ALL):
                rows += [(f"  {name}", "") for name in option.opts[1:]]
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
        if hidden:
            formatter.write_paragraph()
            formatter.write(f"{hidden} more options, and names of other tools: --help-all\n")


def _print_all(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        context.meta[_ALL] = True
        click.echo(context.get_help(), color=context.color)
        context.exit()


_HELP_ALL = click.Option(
    ["--help-all"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_all,
    help="Show all options, with their names in other tools.",
)


def command(
    order: int, *examples: str, name: str | None = None
) -> Callable[[Callable[..., Any]], Command]:
    """Make a function a command, which is listed by its `order`, with examples in its help."""

    def make(function: Callable[..., Any]) -> Command:
        made = click.command(name, cls=Command, epilog=examples_text(examples))(function)
        made.order, made.examples = order, examples
        made.settings = getattr(function, "settings", None)
        made.of_runs = made.settings is not None
        return made

    return make


def examples_text(lines: Sequence[str]) -> str:
    """Examples as the end of a help."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])
