"""The command that runs a step on a machine."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from stagewright.cli_help import Word
from stagewright.cli_progress import shown
from stagewright.cli_trace import JSON
from stagewright.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from stagewright.compiler import Compiled
    from stagewright.network import Machine
    from stagewright.run import Run
    from stagewright.simulate import Simulation
    from stagewright.simulation.account import Parts
    from stagewright.simulation.timeline import Lane

_MOST_ROWS = 32  # of a table


def command(
    settings: Callable[[Callable[..., None]], Callable[..., None]],
    load: Callable[[str | None, str | None, dict[str, Any]], Run],
    compile: Callable[[Run, str | None, str | None], Compiled],
) -> click.Command:
    """`stagewright simulate`, given what all commands on a run share."""

    @settings
    @click.option("--hardware", required=True, metavar="NAME", help="GPU, or a .yaml file of one.")
    @click.option(
        "--nodes", type=click.IntRange(1), metavar="N", help="Without --dp: dp fills them."
    )
    @click.option(
        "--topology",
        type=Word(("two_tier", "fullflat")),
        default="two_tier",
        help="fullflat: the links within a node join all GPUs. [two_tier]",
    )
    @click.option("--algorithm", default="best", metavar="NAME", help="Of collectives. [best]")
    @click.option(
        "--no-overlap", metavar="LIST", help="Axes that kernels wait for: tp,cp,ep,dp,pp."
    )
    @click.option(
        "--prefetch", type=int, metavar="N", help="Blocks ahead weights are gathered. [1]"
    )
    @click.option(
        "--overlap-param-gather",
        is_flag=True,
        help="Sharded optimizer: gather parameters in the next forward pass.",
    )
    @click.option(
        "--overlap-slowdown",
        type=float,
        metavar="F",
        help="Kernels beside collectives take 1 + F times as long. [0]",
    )
    @click.option(
        "--straggler",
        "stragglers",
        multiple=True,
        metavar="RANK=F",
        help="Kernels of a rank take F times as long; may be repeated.",
    )
    @click.option("--price", type=float, metavar="USD", help="Per GPU-hour. [the hardware's]")
    @click.option("--perfetto", metavar="FILE", help="Write the timeline for ui.perfetto.dev.")
    @JSON
    def simulate(
        model: str | None,
        config: str | None,
        hardware: str,
        nodes: int | None,
        topology: str,
        algorithm: str,
        no_overlap: str | None,
        prefetch: int | None,
        overlap_param_gather: bool,
        overlap_slowdown: float | None,
        stragglers: Sequence[str],
        price: float | None,
        perfetto: str | None,
        as_json: bool,
        **given: Any,
    ) -> None:
        """Run a step on a machine: its time, and where it goes.

        MODEL is a preset (see `stagewright models`) or the path of a Hugging Face config.json.
        """
        from stagewright.simulate import simulate
        from stagewright.simulation.issue import Execution

        machine_of, run = _machine(hardware, topology, algorithm), load(model, config, given)
        run = filled(run, machine_of, nodes)
        axes = frozenset(word.strip() for word in (no_overlap or "").split(",") if word.strip())
        how = Execution(
            no_overlap=axes,
            prefetch=1 if prefetch is None else prefetch,
            overlap_param_gather=overlap_param_gather,
            slowdown=overlap_slowdown or 0.0,
        )
        factors = dict(straggler(text) for text in stragglers)
        compiled = compile(run, model, config)
        with shown("tasks") as told:
            found = simulate(compiled, machine_of(run.world_size), how, factors, progress=told)
        if perfetto is not None:
            from stagewright.formats.perfetto import write

            write(found.line, perfetto, f"{run.describe()} on {found.machine}")
        if as_json:
            told = found.summary() | {"power": found.expense(price)._asdict()}
            click.echo(json.dumps(told, indent=2))
        else:
            report(found, _console(), price)

    return click.command()(simulate)


def _machine(name: str, topology: Any, algorithm: Any) -> Callable[[int], Machine]:
    """A machine of so many GPUs."""
    from stagewright.hardware import resolve
    from stagewright.network import Machine

    hardware = resolve(name)
    return lambda gpus: Machine.of(hardware, gpus=gpus, topology=topology, algorithm=algorithm)


def filled(run: Run, machine_of: Callable[[int], Machine], nodes: int | None) -> Run:
    """The run on so many nodes: dp as large as they hold, unless it is given."""
    if nodes is None:
        return run
    gpus = nodes * machine_of(1).hardware.gpus_per_node
    others = run.world_size // run.dp
    if "dp" not in run.model_fields_set and gpus % others == 0:
        run = run.model_copy(update={"dp": gpus // others})
    if run.world_size != gpus:
        raise UserError(
            f"--nodes {nodes} means {gpus} GPUs, but tp={run.tp} x cp={run.cp} x dp={run.dp} x "
            f"pp={run.pp} makes {run.world_size} ranks; make them equal, or leave out --nodes"
        )
    return run


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
    from stagewright.report import quantity

    out.print(f"{found.compiled.run.describe()} on {found.machine}")
    uses = f"HFU {found.hfu:.1%}"
    if found.compiled.run.mode == "train":
        uses = f"MFU {found.mfu:.1%} (causal {found.mfu_causal:.1%}), {uses}"
    rate = found.tokens_per_second
    out.print(
        f"step {duration(found.seconds)}: {quantity(round(rate), 'tokens')}/s, "
        f"{rate / found.machine.gpus:,.1f} per GPU; {uses}"
    )
    out.print(_where(found))
    out.print(_communication(found.mean))
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
    from stagewright.report import quantity

    most = max(range(len(found.memory)), key=lambda nth: found.memory[nth].peak)
    lane, peak = found.line.lanes[most], found.memory[most].at_peak()
    room = round(found.machine.hardware.memory_gb * 1e9)
    fits = "" if peak["peak"] <= room else ": it does not fit"
    return (
        f"memory: at most {quantity(int(peak['peak']), 'B')} of {quantity(room, 'B')}{fits} "
        f"(pipeline rank {lane.of.pipeline_rank}, after {duration(peak['seconds'])})"
    )


def duration(seconds: float) -> str:
    """Seconds for people.

    >>> duration(12.3456), duration(0.0123456), duration(2.5e-5)
    ('12.35 s', '12.35 ms', '25.00 us')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.2f} {unit}"
    return f"{seconds / 1e-6:.2f} us"


def _table(title: str, columns: Sequence[str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for nth, column in enumerate(columns):
        table.add_column(column, justify="right" if nth else "left")
    return table


def _where(found: Simulation) -> Table:
    """The parts of the mean GPU and of every lane, as shares of the step."""
    mean, total = found.mean, found.seconds
    phases, axes = list(mean.kernels), list(mean.exposed)
    columns = [*phases, *(f"{axis} exposed" for axis in axes), "bubble"]
    table = _table("where the time of a GPU goes", ["GPUs", *columns])

    def cells(of: Parts) -> tuple[str, ...]:
        shares = [of.kernels.get(phase, 0.0) for phase in phases]
        shares += [of.exposed.get(axis, 0.0) for axis in axes]
        return tuple(f"{s / total:.1%}" for s in [*shares, of.bubble])

    table.add_row(f"mean of {found.machine.gpus}", *cells(mean))
    rows = [(lane, cells(of)) for lane, of in zip(found.line.lanes, found.parts, strict=True)]
    alike = [list(group) for _, group in itertools.groupby(rows, key=lambda row: row[1])]
    if len(rows) > 1:
        for group in alike[:_MOST_ROWS]:
            table.add_row(_told([lane for lane, _ in group]), *group[0][1])
    if len(alike) > _MOST_ROWS:
        table.add_row(f"... {len(alike) - _MOST_ROWS} more", *[""] * len(columns))
    return table


def _told(lanes: Sequence[Lane]) -> str:
    """Lanes, one after the other, as people call them."""
    count = sum(len(lane.ranks) for lane in lanes)
    first, last = lanes[0].of.pipeline_rank, lanes[-1].of.pipeline_rank
    if count == 1:
        return f"rank {lanes[0].ranks[0]}"
    return f"{count} of pipeline rank {first}" + (f" to {last}" if last > first else "")


def _communication(mean: Parts) -> Table:
    table = _table("communication of the mean GPU", ["axis", "busy", "exposed", "hidden"])
    for axis, busy in mean.communication.items():
        exposed = mean.exposed.get(axis, 0.0)
        hidden = max(0.0, 1 - exposed / busy)
        table.add_row(axis, duration(busy), duration(exposed), f"{hidden:.0%}")
    return table


def _console() -> Console:
    from rich.console import Console

    # A pipe or a file has no width of its own: rich would take 80 and cut the tables.
    return Console(width=None if sys.stdout.isatty() else 200, highlight=False)
