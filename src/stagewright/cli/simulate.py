"""The command that runs a step on a machine, and the options of machines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

import stagewright
from stagewright.cli.help import Word
from stagewright.cli.progress import shown
from stagewright.cli.trace import JSON
from stagewright.errors import UserError
from stagewright.numbers import duration, quantity

if TYPE_CHECKING:
    from rich.console import Console

    from stagewright.lower.training import Compiled
    from stagewright.run.settings import Run
    from stagewright.time.simulate.step import Simulation

_Command = TypeVar("_Command", bound=Callable[..., Any])

_MACHINE = (
    click.option(
        "--nodes", type=click.IntRange(1), metavar="N", help="Without --dp: dp fills them."
    ),
    click.option(
        "--topology",
        type=Word(("two_tier", "fullflat")),
        default="two_tier",
        help="fullflat: the links within a node join all GPUs. [two_tier]",
    ),
    click.option("--algorithm", default="best", metavar="NAME", help="Of collectives. [best]"),
    click.option(
        "--no-overlap", metavar="LIST", help="Axes that kernels wait for: tp,cp,ep,dp,pp."
    ),
    click.option(
        "--prefetch", type=int, metavar="N", help="Blocks ahead weights are gathered. [1]"
    ),
    click.option(
        "--overlap-param-gather",
        is_flag=True,
        help="Sharded optimizer: gather parameters in the next forward pass.",
    ),
    click.option(
        "--tp-comm-overlap",
        is_flag=True,
        help="Collectives over tp in pieces, beside the products that they feed or follow.",
    ),
    click.option(
        "--overlap-moe-expert-parallel-comm",
        is_flag=True,
        help="One microbatch computes while tokens of another go to experts.",
    ),
    click.option(
        "--moe-flex-dispatcher",
        is_flag=True,
        help="A token goes once to each rank with experts for it (DeepEP, HybridEP).",
    ),
    click.option(
        "--overlap-slowdown",
        type=float,
        metavar="F",
        help="Kernels beside collectives take 1 + F times as long. [0]",
    ),
    click.option(
        "--straggler",
        "stragglers",
        multiple=True,
        metavar="RANK=F",
        help="Kernels of a rank take F times as long; may be repeated.",
    ),
)

MACHINE = (
    *("nodes", "topology", "algorithm", "no_overlap", "prefetch", "overlap_param_gather"),
    *("tp_comm_overlap", "overlap_moe_expert_parallel_comm", "moe_flex_dispatcher"),
    *("overlap_slowdown", "stragglers"),
)
"""Names of options that mean something on hardware only."""


def on_machine(*, required: bool) -> Callable[[_Command], _Command]:
    """Give a command `--hardware` and the options that say how a step runs on it."""

    def give(command: _Command) -> _Command:
        for option in reversed(_MACHINE):
            command = option(command)
        text = "GPU, or a .yaml file of one."
        return click.option("--hardware", required=required, metavar="NAME", help=text)(command)

    return give


def taken(given: dict[str, Any]) -> dict[str, Any]:
    """These options out of all that are given, as `stagewright.simulate` has them."""
    names = ("nodes", "topology", "algorithm", "overlap_param_gather", "tp_comm_overlap")
    names += ("overlap_moe_expert_parallel_comm", "moe_flex_dispatcher")
    how = {name: given.pop(name) for name in names}
    words = (given.pop("no_overlap") or "").split(",")
    how["no_overlap"] = [word.strip() for word in words if word.strip()]
    how["stragglers"] = dict(straggler(text) for text in given.pop("stragglers"))
    for name in ("prefetch", "overlap_slowdown"):
        value = given.pop(name)
        if value is not None:
            how[name] = value
    return how


def simulated(
    run: Run, compile: Callable[[Run], Compiled], hardware: str, how: dict[str, Any]
) -> Simulation:
    """A run on hardware, with its progress shown."""
    from stagewright.api import fill_nodes

    nodes = how.pop("nodes")
    compiled = compile(fill_nodes(run, hardware, nodes))
    with shown("tasks") as told:
        return stagewright.simulate(compiled, hardware, progress=told, **how)


def command(
    settings: Callable[[Callable[..., None]], Callable[..., None]],
    load: Callable[[str | None, str | None, dict[str, Any]], Run],
    compile: Callable[[Run, str | None, str | None], Compiled],
) -> click.Command:
    """`stagewright simulate`, given what all commands on a run share."""

    @settings
    @on_machine(required=True)
    @click.option("--price", type=float, metavar="USD", help="Per GPU-hour. [the hardware's]")
    @click.option("--perfetto", metavar="FILE", help="Write the timeline for ui.perfetto.dev.")
    @JSON
    def simulate(
        model: str | None,
        config: str | None,
        hardware: str,
        price: float | None,
        perfetto: str | None,
        as_json: bool,
        **given: Any,
    ) -> None:
        """Run a step on a machine: its time, and where it goes.

        MODEL is a preset (see `stagewright models`) or the path of a Hugging Face config.json.
        """
        how = taken(given)
        run = load(model, config, given)
        found = simulated(run, lambda run: compile(run, model, config), hardware, how)
        if perfetto is not None:
            from stagewright.views.perfetto import write

            write(found.line, perfetto, f"{found.compiled.run.describe()} on {found.machine}")
        if as_json:
            told = found.summary() | {"power": found.expense(price)._asdict()}
            click.echo(json.dumps(told, indent=2))
        else:
            report(found, _console(), price)

    return click.command()(simulate)


def straggler(text: str) -> tuple[int, float]:
    """A rank and its factor.

    >>> straggler("5=1.2")
    (5, 1.2)
    """
    rank, _, factor = text.partition("=")
    try:
        return int(rank), float(factor)
    except ValueError:
        raise UserError(f"--straggler: got {text!r}, wanted RANK=FACTOR such as 5=1.2") from None


# ---- for people ----------------------------------------------------------------------------------


def report(found: Simulation, out: Console, price: float | None = None) -> None:
    """Print a simulation."""
    from stagewright.views.tables import parts, rich, transfers

    out.print(f"{found.compiled.run.describe()} on {found.machine}")
    uses = f"HFU {found.hfu:.1%}"
    if found.compiled.run.mode == "train":
        uses = f"MFU {found.mfu:.1%} (causal {found.mfu_causal:.1%}), {uses}"
    rate = found.tokens_per_second
    out.print(
        f"step {duration(found.seconds)}: {quantity(round(rate), 'tokens')}/s, "
        f"{rate / found.machine.gpus:,.1f} per GPU; {uses}"
    )
    out.print(rich(parts(found)))
    out.print(rich(transfers(found)))
    if any(of.peak for of in found.memory):
        out.print(_memory(found))
    total = found.seconds
    way = ", ".join(f"{name} {s / total:.1%}" for name, s in found.critical_path.items())
    out.print(f"critical path: {way}")
    spent = found.expense(price)
    usd = spent.usd_per_million_tokens
    out.print(
        f"power: {spent.watts_per_gpu:,.0f} W per GPU, {spent.joules_per_token:.3g} J per token"
        + ("" if usd is None else f"; {usd:.3g} USD per million tokens")
    )


def _memory(found: Simulation) -> str:
    """The most that any GPU holds, and whether that fits."""

    most = max(range(len(found.memory)), key=lambda nth: found.memory[nth].peak)
    lane, peak = found.line.lanes[most], found.memory[most].at_peak()
    room = round(found.machine.hardware.memory_gb * 1e9)
    fits = "" if peak["peak"] <= room else ": it does not fit"
    return (
        f"memory: at most {quantity(int(peak['peak']), 'B')} of {quantity(room, 'B')}{fits} "
        f"(pipeline rank {lane.of.pipeline_rank}, after {duration(peak['seconds'])})"
    )


def _console() -> Console:
    from rich.console import Console

    # A pipe or a file has no width of its own: rich would take 80 and cut the tables.
    return Console(width=None if sys.stdout.isatty() else 200, highlight=False)
