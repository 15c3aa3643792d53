"""The command line. Slow imports happen inside the commands, so that `--help` is quick."""

from __future__ import annotations

import gc
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

import stagewright
from stagewright.cli.command import examples_text
from stagewright.cli.commands import all_commands
from stagewright.cli.runs import INTERRUPTED
from stagewright.cli.words import no_such_option
from stagewright.errors import Stopped, UserError, did_you_mean, shorten
from stagewright.printable import printable

USER_ERROR = 2
BUG = 1
BROKEN_PIPE = 141
"""Exit code of programs that SIGPIPE ends."""

_OBJECTS = 10_000
"""Allocations between two collections of cyclic garbage; Python's default is 700.

Graphs and rows are many objects and hardly any cycles: with the default a search takes a tenth
longer."""

_FIRST_EXAMPLES = (
    "stagewright show llama3.1-70b --tp 8 --pp 4 --dp 2",
    "stagewright generate llama3.1-70b --tp 8 --pp 4 --dp 2 -o traces",
    "stagewright simulate llama3.1-70b --tp 8 --pp 8 --hardware h200 --nodes 8",
)


class _Commands(click.Group):
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in self.commands and not (name.startswith("-") or ctx.resilient_parsing):
            known = ", ".join(self.commands)
            hint = did_you_mean(name, self.commands)
            raise UserError(f"unknown command {name!r}; wanted one of {known}{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write all commands, with the whole sentence of each."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, of.get_short_help_str(200)) for name, of in self.commands.items()]
            )

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of use."""
        return list(self.commands)


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(stagewright.__version__, prog_name="stagewright")
@click.pass_context
def commands(context: click.Context) -> None:
    """What every GPU of a distributed LLM training or inference step will do, without GPUs."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


COMMANDS = all_commands()
for _command in COMMANDS:
    commands.add_command(_command)
commands.epilog = examples_text(_FIRST_EXAMPLES)

EXAMPLES = {"": _FIRST_EXAMPLES} | {str(of.name): of.examples for of in COMMANDS}
"""Lines below the help of each command; a test runs them all, in this order, in one place."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit.

    The code is 2 for errors of the user, 3 for a run that does not fit into the memory of a device
    (`cli.runs.code_of`), 1 for a bug, 130 for Ctrl-C, 141 if nobody reads stdout.
    """
    gc.set_threshold(_OBJECTS)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the shell's `>&-`
            setattr(sys, name, io.StringIO())
    sys.exit(_status(arguments))


def _status(arguments: Sequence[str] | None) -> int:
    try:
        code = commands.main(arguments, prog_name="stagewright", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except UserError as error:
        return _complain(str(error))
    except click.NoSuchOption as error:
        command = error.ctx.command if error.ctx else commands
        return _complain(no_such_option(error.option_name, command, commands.commands))
    except click.ClickException as error:
        return _complain(error.format_message())
    except click.Abort as stop:
        why = stop.__cause__
        print(why if isinstance(why, Stopped) else "stopped; nothing was written", file=sys.stderr)
        return INTERRUPTED
    except SystemExit as stop:
        if isinstance(stop.__context__, OSError):  # click's, where the reader of a pipe has gone
            return BROKEN_PIPE
        raise
    except OSError as error:
        return _complain(
            ": ".join(str(x) for x in (error.filename, error.strerror) if x) or str(error)
        )
    except MemoryError:
        return _complain("out of memory; try fewer microbatches, layers or workers")
    except Exception as error:
        if os.environ.get("STAGEWRIGHT_DEBUG"):
            raise
        _complain(
            f"this is a bug, please report it with the command you ran: {type(error).__name__}: "
            f"{error} (STAGEWRIGHT_DEBUG=1 shows where)"
        )
        return BUG


def _complain(message: str) -> int:
    line = shorten(" ".join(message.split()))
    print(f"stagewright: error: {printable(line)}", file=sys.stderr)
    return USER_ERROR
