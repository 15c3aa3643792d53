"""The command line. Slow imports happen inside the commands, so that `--help` is quick."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

import stagewright
from stagewright.cli import doctor as cli_doctor
from stagewright.cli import help as cli_help
from stagewright.cli import report as cli_report
from stagewright.cli import reproduce as cli_reproduce
from stagewright.cli import simulate as cli_simulate
from stagewright.cli import time as cli_time
from stagewright.cli import trace as cli_trace
from stagewright.cli import write as cli_write
from stagewright.cli.options import option_of
from stagewright.cli.progress import shown, told
from stagewright.errors import Stopped, UserError, did_you_mean
from stagewright.run.sections import SETTINGS

if TYPE_CHECKING:
    from stagewright.lower.training import Compiled
    from stagewright.run.settings import Run
    from stagewright.views.summary import Recorded

USER_ERROR = 2
BUG = 1
INTERRUPTED = 130


_Command = TypeVar("_Command", bound=Callable[..., Any])


def _settings(command: _Command) -> _Command:
    """Give a command the model, the run file and every setting."""
    for setting in reversed([*SETTINGS.values()]):
        command = option_of(setting)(command)
    command = click.option(
        "--config", metavar="FILE", help="Run file (YAML), or an earlier run; options override it."
    )(command)
    return click.argument("model", required=False)(command)


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


@commands.command()
@_settings
@click.option("-o", "--out", required=True, metavar="DIR", help="Directory of the traces.")
@click.option(
    "--format",
    "format_",
    default="chakra",
    metavar="NAME",
    help="chakra, json, dot or bundle. [chakra]",
)
@click.option("--durations", metavar="FILE", help="CSV of measured kernels (see show --kernels).")
@click.option(
    "--astra-sim", is_flag=True, help="Also what ASTRA-sim needs to run them on --hardware."
)
@click.option("--hardware", metavar="NAME", help="For --astra-sim: GPU, or a .yaml file of one.")
@click.option("--ranks", metavar="LIST", help="Only these ranks, such as 0-7,12. [all]")
@cli_write.writing
def generate(
    model: str | None,
    config: str | None,
    out: str,
    format_: str,
    durations: str | None,
    astra_sim: bool,
    hardware: str | None,
    ranks: str | None,
    **settings: Any,
) -> None:
    """Write the trace of every rank.

    MODEL is a preset (see `stagewright models`) or the path of a Hugging Face config.json.
    """
    started = time.perf_counter()
    how = {name: settings.pop(name) for name in cli_write.HOW}
    run = _load(model, config, settings)
    chosen = None if ranks is None else parse_ranks(ranks, run.world_size)
    if not astra_sim and hardware is not None:
        raise UserError("--hardware is for --astra-sim; add that, or leave it out")
    if astra_sim and (hardware is None or format_ != "chakra" or chosen is not None):
        raise UserError("--astra-sim needs --hardware, and all ranks in --format chakra")
    with shown() as bar:
        bar.say("working out what ranks do")
        compiled = _compile(run, model, config)
        bar.say("checking it")
        written = stagewright.generate(
            compiled,
            out,
            format=format_,
            durations=durations,
            astra_sim=hardware,
            ranks=chosen,
            progress=bar,
            **how,
        )
    click.echo(told(written, out, time.perf_counter() - started))
    if durations is not None:
        from stagewright.time import measured

        click.echo(measured.describe(written["durations"]))


@commands.command()
@_settings
@click.option("--json", "as_json", is_flag=True, help="The summary as one JSON object.")
@click.option("--graph", is_flag=True, help="The sharded graph, as text.")
@click.option("--kernels", is_flag=True, help="The distinct kernels, as CSV to fill in durations.")
@click.option("--schedule-picture", is_flag=True, help="The pipeline schedule, as a picture.")
@click.option("--memory-plot", metavar="FILE", help="Memory over the step, as an HTML page.")
def show(
    model: str | None,
    config: str | None,
    as_json: bool,
    graph: bool,
    kernels: bool,
    schedule_picture: bool,
    memory_plot: str | None,
    **settings: Any,
) -> None:
    """Print what the ranks compute, communicate and hold.

    MODEL is a preset (see `stagewright models`), the path of a Hugging Face config.json, or a
    bundle, which is shown as it is: without settings.
    """
    from stagewright.trace.formats.bundle import is_bundle
    from stagewright.views.summary import recorded

    chosen = (as_json, graph, kernels, schedule_picture, memory_plot is not None)
    if sum(chosen) > 1:
        raise UserError(
            "--json, --graph, --kernels, --schedule-picture and --memory-plot exclude each other; "
            "use one"
        )
    if model is not None and is_bundle(model):
        if config is not None or any(value is not None for value in settings.values()):
            raise UserError(
                f"{model}: a bundle is shown as it is; for other settings: --config {model}"
            )
        if as_json or not any(chosen):
            _show_summary(recorded(model), as_json)
            return
        model, config = None, model
    compiled = _compile(_load(model, config, settings), model, config)
    if memory_plot is not None:
        from stagewright.files import write_text
        from stagewright.views.pages import memory as plot

        write_text(memory_plot, plot.page(compiled))
        click.echo(f"{memory_plot}: memory of {len(compiled.program.classes)} classes of ranks")
    elif graph:
        click.echo(compiled.graph_text())
    elif kernels:
        from stagewright.time.measured import to_csv

        click.echo(to_csv(compiled.program), nl=False)
    elif schedule_picture:
        from stagewright.schedule.schedules import text

        columns = _terminal_width() if sys.stdout.isatty() else None
        click.echo(text(compiled.order, columns))
    else:
        _show_summary(compiled, as_json)


def _show_summary(of: Compiled | Recorded, as_json: bool) -> None:
    from stagewright.views.summary import summary, tables

    result = summary(of)
    if as_json:
        _print_json(result)
    else:
        tables(result, _console())


_MODEL_COLUMNS = (
    ("layers", "num_layers"),
    ("hidden", "hidden_size"),
    ("MLP", "ffn_hidden_size"),
    ("heads", "num_attention_heads"),
    ("KV heads", "num_query_groups"),
    ("vocabulary", "vocab_size"),
    ("longest", "max_position_embeddings"),
)


@commands.command()
@click.option("--json", "as_json", is_flag=True, help="As one JSON object, with every field.")
def models(as_json: bool) -> None:
    """List the models known by name."""
    import dataclasses

    from stagewright.model.presets import PRESETS

    if as_json:
        _print_json({name: dataclasses.asdict(PRESETS[name]) for name in PRESETS})
        return
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("name", overflow="fold")
    for title, _ in _MODEL_COLUMNS:
        table.add_column(title, justify="right")
    for name, preset in PRESETS.items():
        table.add_row(name, *(str(getattr(preset, field)) for _, field in _MODEL_COLUMNS))
    _console().print(table)


def parse_ranks(text: str, world_size: int) -> list[int]:
    """Ranks such as `0-7,12`, ascending and each once.

    >>> parse_ranks("12, 0-3,2", 16)
    [0, 1, 2, 3, 12]
    """
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = (word.strip() for word in part.partition("-"))
        if not dash:
            last = first
        if not all(
            word.isdecimal() and word.isascii() and len(word) < 10 for word in (first, last)
        ):
            raise UserError(f"--ranks: cannot read {part.strip()!r}; wanted ranks such as 0-7,12")
        if int(first) > int(last):
            raise UserError(f"--ranks: {part.strip()!r} runs backwards; use {last}-{first}")
        if int(last) >= world_size:
            raise UserError(f"--ranks: there is no rank {int(last)}; use 0 to {world_size - 1}")
        found.update(range(int(first), int(last) + 1))
    return sorted(found)


def _load(model: str | None, config: str | None, settings: dict[str, Any]) -> Run:
    from stagewright.trace.recorded import load_run

    given = {name: value for name, value in settings.items() if value is not None}
    if model is not None:
        given["model"] = model
    return load_run(config, given)


def _compile(run: Run, model: str | None, config: str | None) -> Compiled:
    """Compile; a manifest of an earlier run brings its model along unless another is named."""
    from stagewright.lower.training import compile
    from stagewright.trace.recorded import recorded_model

    recorded = recorded_model(config) if config is not None and model is None else None
    return compile(run, recorded)


def _print_json(value: Any) -> None:
    import json

    click.echo(json.dumps(value, indent=2))


def _terminal_width() -> int:
    import shutil

    return shutil.get_terminal_size().columns


def _console() -> Any:
    from rich.console import Console

    # A pipe or a file has no width of its own: rich would take 80 and cut the tables.
    return Console(width=None if sys.stdout.isatty() else 160)


for each in (
    *(*cli_write.COMMANDS, *cli_trace.COMMANDS, *cli_time.COMMANDS, *cli_reproduce.COMMANDS),
):
    commands.add_command(each)
for made in (cli_simulate.command, cli_report.command):
    commands.add_command(made(_settings, _load, _compile))
for each in (cli_doctor.doctor, cli_help.completion):
    commands.add_command(each)
cli_help.add_examples(commands)
cli_help.add_completion(commands)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 2 for what the user can mend, 1 for a bug, 130 for Ctrl-C."""
    sys.exit(_status(arguments))


def _status(arguments: Sequence[str] | None) -> int:
    try:
        code = commands.main(arguments, prog_name="stagewright", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except UserError as error:
        return _complain(str(error))
    except click.NoSuchOption as error:
        return _complain(cli_help.no_such_option(error, commands))
    except click.ClickException as error:
        return _complain(error.format_message())
    except click.Abort as stop:
        why = stop.__cause__
        print(why if isinstance(why, Stopped) else "stopped; nothing was written", file=sys.stderr)
        return INTERRUPTED
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
    line = " ".join(message.split())
    print(f"stagewright: error: {line}", file=sys.stderr)
    return USER_ERROR
