"""Runs of commands: from a command line to a compiled run and an exit code; ranks and traces."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import click

from stagewright.cli.output import show_notes
from stagewright.errors import UserError, either
from stagewright.printable import printable

if TYPE_CHECKING:
    from stagewright.executors import RayCluster
    from stagewright.lower.compiled_run import CompiledRun
    from stagewright.program.fit import Fit
    from stagewright.run.experiment import Experiment
    from stagewright.run.settings import Run


def load_experiment(
    model: str | None, config: str | None, settings: Mapping[str, Any]
) -> Experiment:
    """The run, the machine and the execution of a command line; options override the file."""
    from stagewright.api.experiments import load_experiment
    from stagewright.run.notes import notes

    given = {name: value for name, value in settings.items() if value is not None}
    if model is not None:
        given["model"] = model
    experiment = load_experiment(config, given)
    show_notes(notes(experiment))
    return experiment


# ---- launch files of other tools -----------------------------------------------------------------


def tool_of(model: str | None, name: str | None, tools: Collection[str]) -> str | None:
    """The tool that `--as` names; None: the name is a model's family, or absent."""
    from stagewright.model.presets import PRESETS

    if name is not None and name not in tools and model in PRESETS:
        raise UserError(
            f"--as {printable(name)}: wanted {either(tools)}, whose files are written; a model's "
            f"family is for config.json files, and {model} is a preset"
        )
    return name if name in tools else None


def kept(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    """Keep an option that the command's function does not get."""
    context.meta[f"stagewright.{parameter.name}"] = value


def option_kept(name: str) -> Any:
    """Value of an option that was kept, by its parameter's name; None: the command lacks it."""
    return click.get_current_context().meta.get(f"stagewright.{name}")


def launch_files(context: click.Context) -> None:
    """Give the launch files of a command line the values of `--set`, and show what was read.

    A variable is set in the files that name it, or in all if none does; values behind the name of a
    file take precedence.
    """
    from stagewright.files import read_text
    from stagewright.launch import files

    given, ignores = dict[str, str](), bool(option_kept("ignore_unknown"))
    for text in option_kept("set") or ():
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise UserError(f"--set: got {text!r}, wanted NAME=VALUE such as MODEL_SIZE=8b")
        given[name.strip()] = value
    words = [context.params.get(name) for name in ("config", "model", "a", "b")]
    names = [*filter(None, (*words, *context.params.get("others", ())))]
    paths = {name: path for name in names if (path := files.find(name))}
    absent = any(name.endswith(".sh") for name in names)  # the command says so
    if (given or ignores) and not paths and not absent:
        raise UserError("--set and --ignore-unknown are of a launch file; name one")
    texts = {name: read_text(path, "a launch script") for name, path in paths.items()}
    full: dict[str, str] = {}
    for name in paths:
        own = {pair.partition("=")[0] for pair in name.partition("?")[2].split("&")}
        values = {
            key: value
            for key, value in given.items()
            if key not in own
            and ({*"-."} & {*key} or files.names_variable(texts[name], key)
                 or not any(files.names_variable(text, key) for text in texts.values()))
        }  # fmt: skip
        full[name] = files.with_variables(name, values, ignore_unknown=ignores)
    for parameter, value in context.params.items():
        if isinstance(value, str) and parameter in ("config", "model", "a", "b"):
            context.params[parameter] = full.get(value, value)
        elif parameter == "others":
            context.params[parameter] = tuple(full.get(name, name) for name in value)
    if "config" in context.params:  # `diff` shows notes on both files beside each other
        for name in full.values():
            show_notes(files.read(name).summary(context.params))


def hardware_of(experiment: Experiment) -> str:
    """The hardware of a command that needs one; raises UserError without."""
    if experiment.cluster.hardware is None:
        raise UserError("Missing option '--hardware'; see `stagewright hardware` for names.")
    return experiment.cluster.hardware


def compile_run(
    run: Run, model: str | None, config: str | None, hardware: str | None = None
) -> CompiledRun:
    """Compile the run of a command line.

    If `config` is a manifest and no MODEL is given, its recorded model is compiled. Where the run
    names no `device_memory`, that of `hardware` counts.
    """
    from stagewright.lower.compile import compile
    from stagewright.trace.run_manifest import load_model

    in_manifest = load_model(config) if config is not None and model is None else None
    memory = None
    if hardware is not None:
        from stagewright.time.hardware import resolve

        memory = resolve(hardware).memory
    compiled = compile(run, in_manifest, device_memory=memory)
    show_notes(compiled.notes)
    return compiled


INTERRUPTED = 130
"""Exit code after Ctrl-C."""
DOES_NOT_FIT = 3
"""Exit code if a run does not fit into the memory of a device."""


def code_of(fit: Fit | None) -> int:
    """Exit code of a command with `--allow-oom`, with a message on stderr if it is 3.

    `fit`: None if the device is unknown.
    """
    from stagewright.numbers import side_by_side

    if fit is None or not fit.cannot_fit or option_kept("allow_oom"):
        return 0
    held, room = side_by_side(fit.peak, fit.device_memory, "B")
    click.echo(
        f"stagewright: does not fit: a device of {room} would have to hold {held} "
        f"(exit code {DOES_NOT_FIT}; 0 with --allow-oom)",
        err=True,
    )
    return DOES_NOT_FIT


def ray_cluster(engine: str, address: str | None) -> AbstractContextManager[RayCluster] | None:
    """The Ray cluster of `--engine ray`; None for another engine, which takes no `--address`."""
    from stagewright.executors import ray_cluster

    if engine == "ray":
        return ray_cluster(address)
    if address is not None:
        raise UserError("--address is of a Ray cluster; add --engine ray, or leave --address out")
    return None


def parse_range(text: str, option: str, example: str) -> tuple[int, int]:
    """A range of numbers such as `0-50`, or one number.

    >>> parse_range("3", "--nodes", "0-50"), parse_range("0 - 50", "--nodes", "0-50")
    ((3, 3), (0, 50))
    """
    first, _, last = (word.strip() for word in text.partition("-"))
    last = last or first
    if not all(re.fullmatch("[0-9]{1,9}", word) for word in (first, last)):
        raise UserError(f"{option}: cannot read {text.strip()!r}; wanted {example}")
    if int(first) > int(last):
        raise UserError(f"{option}: {text.strip()!r} runs backwards; use {last}-{first}")
    return int(first), int(last)


def parse_ranks(text: str, world_size: int) -> list[int]:
    """Ranks such as `0-7,12`, ascending and each once.

    >>> parse_ranks("12, 0-3,2", 16)
    [0, 1, 2, 3, 12]
    """
    ranks: set[int] = set()
    for part in text.split(","):
        first, last = parse_range(part, "--ranks", "ranks such as 0-7,12")
        if last >= world_size:
            raise UserError(f"--ranks: there is no rank {last}; use 0 to {world_size - 1}")
        ranks.update(range(first, last + 1))
    return sorted(ranks)


def describe_written(written: Mapping[str, Any], out: str, started: float) -> str:
    """One line on the traces that were written; `started`: seconds of the performance counter."""
    from stagewright.numbers import quantity
    from stagewright.program.columns import TaskKind

    counts = written["nodes"]  # of each class of ranks
    nodes = sum(row["files"] * row[kind.name.lower()] for row in counts for kind in TaskKind)
    ranks = sum(row["files"] for row in counts)
    size = quantity(sum(file["bytes"] for file in written["files"].values()), "B")
    seconds = time.perf_counter() - started
    return (
        f"{out}: {ranks} of {written['world_size']} ranks, {nodes} nodes, {size}, {seconds:.1f} s"
    )
