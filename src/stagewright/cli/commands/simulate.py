"""The command that runs a step on a machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import stagewright
from stagewright.cli import shared
from stagewright.cli.help import Entry, command
from stagewright.cli.options import ALLOW_OOM, JSON, experiment_options
from stagewright.cli.progress import shown
from stagewright.cli.writing import output_file
from stagewright.errors import UserError
from stagewright.numbers import duration, plural, quantity, side_by_side

if TYPE_CHECKING:
    from rich.console import Console

    from stagewright.program.fit import Fit
    from stagewright.run.experiment import Experiment
    from stagewright.time.simulate.serving import Served
    from stagewright.time.simulate.step import SimulatedStep


@command
@experiment_options()
@output_file("--perfetto", help="Write the timeline for ui.perfetto.dev.")
@ALLOW_OOM
@JSON
def simulate(
    model: str | None,
    config: str | None,
    perfetto: str | None,
    as_json: bool,
    **settings: Any,
) -> int:
    """Run a step on a machine: its time, and where it goes.

    MODEL is a preset (see `stagewright models`), the path of a Hugging Face config.json, or an id
    of the hub that is in its local cache; or the bundle of a graph that `import` has read, which
    takes --hardware alone. A run file given by --config may hold all that options
    say. The exit code is 3 if the step does not fit into the memory of a device.
    """
    from stagewright.trace.formats.archive import is_bundle

    if model is not None and is_bundle(model):
        return _traced(model, config, settings, perfetto, as_json)
    experiment = shared.load_experiment(model, config, settings)
    if experiment.cluster.hardware is None:
        raise UserError("Missing option '--hardware'; see `stagewright hardware` for names.")
    simulation = run_experiment(experiment, model, config)
    if perfetto is not None:
        from stagewright.views.perfetto import write

        title = _title(simulation)
        write(simulation.timeline, perfetto, title)
    price = experiment.cluster.price
    if as_json:
        from stagewright.views.summary import held_in_memory

        serves = simulation.compiled.run.mode != "train"
        found = simulation.summary() | (held_in_memory(simulation.compiled) if serves else {})
        shared.print_json(found | {"power": simulation.expense(price)._asdict()})
    else:
        report(simulation, shared.console(), price)
    return shared.code_of(simulation.fit)


def _traced(
    path: str, config: str | None, settings: dict[str, Any], perfetto: str | None, as_json: bool
) -> int:
    """A step of the program of a bundle that a graph of PyTorch was made into."""
    from stagewright.api.traced import simulate_traced
    from stagewright.texttable import print_table
    from stagewright.time.hardware import resolve
    from stagewright.time.network import Machine
    from stagewright.trace.formats.bundle import Bundle
    from stagewright.trace.traced import read_traced
    from stagewright.views.step_tables import parts, transfers

    traced = read_traced(Bundle(path))
    if traced is None:
        raise UserError(f"{path}: is a bundle of a run; simulate the run: --config {path}")
    given = [name for name, value in settings.items() if value is not None and name != "hardware"]
    if given or config is not None:
        named = ", ".join(["--config"] * (config is not None) + given)
        raise UserError(f"{path}: a recorded graph is as it is; drop all but --hardware: {named}")
    if settings.get("hardware") is None:
        raise UserError("Missing option '--hardware'; see `stagewright hardware` for names.")
    machine = Machine.of(resolve(settings["hardware"]), gpus=traced.program.mesh.world_size)
    with shown("tasks") as bar:
        found = simulate_traced(traced.program, traced.name, machine, bar)
    if perfetto is not None:
        from stagewright.views.perfetto import write

        write(found.timeline, perfetto, f"{traced.describe()}; on {machine}")
    if as_json:
        shared.print_json(found.summary())
        return shared.code_of(found.fit)
    out = shared.console()
    out.print(f"{traced.describe()}; on {machine}")
    out.print(f"step {duration(found.seconds)}")
    print_table(parts(found), out)
    print_table(transfers(found), out)
    out.print(memory_line(found.fit))
    way = found.critical_path.items()
    shares = ", ".join(f"{name} {s / found.seconds:.1%}" for name, s in way if found.seconds)
    out.print(f"critical path: {shares}")
    return shared.code_of(found.fit)


def run_experiment(experiment: Experiment, model: str | None, config: str | None) -> SimulatedStep:
    """A run on its hardware, with progress shown."""
    compiled = shared.compile_run(experiment.run, model, config, experiment.cluster.hardware)
    with shown("tasks") as bar:
        simulation = stagewright.simulate(
            compiled, experiment.cluster, execution=experiment.execution, progress=bar
        )
    shared.show_notes(simulation.notes)
    return simulation


def _title(simulation: SimulatedStep) -> str:
    """Run with its execution, and the machine."""
    from stagewright.run.experiment import describe

    run, execution = simulation.compiled.run, simulation.timeline.execution
    return f"{describe(run, execution)} on {simulation.machine}"


# ---- for people ----------------------------------------------------------------------------------


def report(simulation: SimulatedStep, out: Console, price: float | None = None) -> None:
    """Print a simulation."""
    from stagewright.texttable import print_table
    from stagewright.views.advice import remarks
    from stagewright.views.step_tables import parts, transfers
    from stagewright.views.summary import hold_line, stored_line

    out.print(_title(simulation))
    if not simulation.fit.fits:
        out.print(memory_line(simulation.fit))
    uses = f"HFU {simulation.hfu:.1%}"
    if simulation.compiled.run.mode == "train":
        uses = (
            f"MFU {simulation.mfu:.1%} (causal {simulation.mfu_causal:.1%}), "
            f"{uses} (causal {simulation.hfu_causal:.1%})"
        )
    rate = simulation.tokens_per_second
    what = f"{quantity(round(rate), 'tokens')}/s, {rate / simulation.machine.gpus:,.1f} per GPU"
    if simulation.groups:
        what = "one of prefill and one of decode, whose layers wait for their cache"
    out.print(f"step {duration(simulation.seconds)}: {what}; {uses}")
    if simulation.compiled.run.mode != "train":
        out.print(stored_line(simulation.compiled))
    for line in serving_lines(simulation):
        out.print(line)
    print_table(parts(simulation), out)
    print_table(transfers(simulation), out)
    if simulation.fit.fits:
        out.print(memory_line(simulation.fit))
    if simulation.compiled.capacity is not None:
        out.print(hold_line(simulation.compiled.capacity))
    total = simulation.seconds
    way = ", ".join(f"{name} {s / total:.1%}" for name, s in simulation.critical_path.items())
    out.print(f"critical path: {way}")
    spent = simulation.expense(price)
    usd = spent.usd_per_million_tokens
    out.print(
        f"power: {spent.watts_per_gpu:,.0f} W per GPU, {spent.joules_per_token:.3g} J per token"
        + ("" if usd is None else f"; {usd:.3g} USD per million tokens")
    )
    for remark in remarks(simulation.compiled, simulation):
        out.print(str(remark))


def serving_lines(simulation: SimulatedStep) -> Iterator[str]:
    """A step of inference in the words of serving: a line, or one for each of two groups."""
    from stagewright.time.simulate.serving import limiting

    if simulation.served is not None:
        yield f"{simulation.served.what}: {_rates(simulation.served)}"
    if not simulation.groups:
        return
    for group in simulation.groups:
        ranks = f"{group.first_rank}-{group.first_rank + group.gpus - 1}"
        held = " of ".join(side_by_side(group.fit.peak, group.fit.device_memory, "B"))
        over = "" if group.fit.fits else ": it does not fit"
        yield (
            f"{group.name} group: {plural(group.gpus, 'GPU', 'GPUs')} (ranks {ranks}), step "
            f"{duration(group.served.step_seconds)}, {_rates(group.served)}; memory {held}{over}"
        )
    limit, balance = limiting(*(group.served for group in simulation.groups))
    if limit is None:
        yield f"limits: prefill while OSL is below {balance:,.1f}, decode above (--osl N)"
    else:
        yield f"limits: the {limit} group; both do as many requests at OSL {balance:,.1f}"


def _rates(of: Served) -> str:
    """Times and rates of requests."""
    words: list[str] = []
    if of.ttft_seconds is not None:
        words.append(f"TTFT {duration(of.ttft_seconds)} at ISL {of.isl:,.0f}")
    if of.tpot_seconds is not None:
        words.append(f"TPOT {duration(of.tpot_seconds)} at context {of.context_length:,.0f}")
    words.append(plural(of.requests, "request", "requests"))
    if of.requests_per_second is not None:
        osl = "" if of.osl is None else f" at OSL {of.osl:,}"
        words.append(f"{of.requests_per_second:,.2f} requests/s{osl}")
    if of.output_tokens_per_second_per_user is not None:
        words.append(f"{of.output_tokens_per_second_per_user:,.1f} tokens/s per user")
    if of.what == "mixed":
        words.append(f"{of.output_tokens_per_second:,.1f} output tokens/s")
        words.append(f"{of.input_tokens_per_second:,.1f} input tokens/s")
    words.append(f"{of.tokens_per_second_per_gpu:,.1f} tokens/s per GPU")
    return ", ".join(words)


def memory_line(fit: Fit) -> str:
    """The most that any GPU holds, and whether that fits."""
    held, room = side_by_side(fit.peak, fit.device_memory, "B")
    seconds = fit.fullest.seconds
    when = "" if seconds is None else f", after {duration(seconds)}"
    return (
        f"memory: at most {held} of {room}{'' if fit.fits else ': it does not fit'} "
        f"(pipeline rank {fit.fullest.rank_class.pipeline_rank}{when})"
    )


ENTRY = Entry(
    40,
    simulate,
    (
        "stagewright simulate llama3.1-70b --tp 8 --pp 8 --dp 2 --hardware h200",
        "stagewright simulate llama3.1-8b --dp 8 --zero 3 --hardware a100-sxm-80gb --json",
    ),
)
