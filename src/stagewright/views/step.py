"""A simulated step: its tables, and the lines and tables that `simulate` prints."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stagewright.errors import UserError
from stagewright.lower.compiled_run import CompiledRun
from stagewright.numbers import count, duration, plural, quantity, side_by_side
from stagewright.program.fit import Fit
from stagewright.run.experiment import describe
from stagewright.run.settings import usual_batch
from stagewright.texttable import Table
from stagewright.time.job import Goodput
from stagewright.time.simulate.breakdown import Breakdown
from stagewright.time.simulate.serving import Served, limiting
from stagewright.time.simulate.step import SimulatedStep, TracedStep
from stagewright.time.simulate.timeline import TICK, Lane
from stagewright.views.advice import remarks
from stagewright.views.summary import hold_line, stored_line
from stagewright.views.tables import of_class

_MOST_ROWS = 32
MOST_DAYS = 1e6
"""Days of a job that are still printed."""
_LAUNCHES = 0.005
"""The share of a step from which on waiting for the host has a column of its own."""


def parts(step: SimulatedStep | TracedStep) -> Table:
    """The parts of the mean GPU and of every lane, as shares of the step."""
    mean, whole = step.mean, step.seconds
    phases, axes = list(mean.kernels), list(mean.exposed)
    names = [*phases, *(f"{axis} exposed" for axis in axes), "bubble"]
    waits_for_host = any(of.launches / whole >= _LAUNCHES for of in step.parts)
    names += ["launches"] * waits_for_host

    def shares(parts: Breakdown) -> tuple[float, ...]:
        seconds = [parts.kernels.get(phase, 0.0) for phase in phases]
        seconds += [parts.exposed.get(axis, 0.0) for axis in axes]
        seconds += [parts.bubble, *[parts.launches] * waits_for_host]
        return tuple(s / whole for s in seconds)

    rows: list[tuple[Any, ...]] = [(f"mean of {step.machine.gpus}", *shares(mean))]
    pairs = zip(step.timeline.lanes, step.parts, strict=True)
    of_lanes = [(lane, shares(of)) for lane, of in pairs]
    by_print = itertools.groupby(of_lanes, key=lambda row: tuple(f"{s:.1%}" for s in row[1]))
    groups = [list(group) for _, group in by_print]
    if len(of_lanes) > 1:
        for group in groups[:_MOST_ROWS]:
            rows.append((lanes_in_words([lane for lane, _ in group]), *group[0][1]))
    if len(groups) > _MOST_ROWS:
        rows.append((f"... {len(groups) - _MOST_ROWS} more", *[None] * len(names)))
    units = dict.fromkeys(names, "share")
    table = Table.of_rows("where the time of a GPU goes", ["GPUs", *names], rows, units)
    tiny = [name for name in names if {*table.cells(name)} <= {"0.0%", ""}]
    return replace(table, secondary=tiny)


def lanes_in_words(lanes: Sequence[Lane]) -> str:
    """A name for consecutive lanes: a rank, or how many ranks of which pipeline ranks."""
    count = sum(len(lane.ranks) for lane in lanes)
    first, last = lanes[0].rank_class.pipeline_rank, lanes[-1].rank_class.pipeline_rank
    if count == 1:
        return f"rank {lanes[0].ranks[0]}"
    return f"{count} of pipeline rank {first}" + (f" to {last}" if last > first else "")


def transfers(step: SimulatedStep | TracedStep) -> Table:
    """Seconds that the mean GPU communicates along each axis, and the share that kernels hide."""
    mean = step.mean
    rows = [
        (axis, busy, exposed, max(0.0, 1 - exposed / busy))
        for axis, busy in mean.communication.items()
        for exposed in [mean.exposed.get(axis, 0.0)]
    ]
    units = {"busy": "s", "exposed": "s", "hidden": "whole share"}
    names = ("axis", "busy", "exposed", "hidden")
    return Table.of_rows("communication of the mean GPU", names, rows, units)


def tasks_in_time(step: SimulatedStep, lane: int) -> Table:
    """The tasks of a lane with the seconds at which each begins and ends, in the order of issue."""
    count = len(step.timeline.lanes)
    if not 0 <= lane < count:
        raise UserError(f"there is no lane {lane}; use 0 to {count - 1}")
    selected = step.timeline.lanes[lane]
    title = f"Tasks of {lanes_in_words([selected])}"
    table = of_class(title, step.timeline.program, selected.rank_class)
    rows = selected.issue.rows.tolist()
    columns = {name: [column[row] for row in rows] for name, column in table.columns.items()}
    begin, end = (selected.begin * TICK).tolist(), (selected.end * TICK).tolist()
    return Table(
        title, {**columns, "begin": begin, "end": end}, {**table.units, "begin": "s", "end": "s"}
    )


def power(step: SimulatedStep) -> Table:
    """Watts of the mean GPU, of the node with the highest peak and of all GPUs over the step."""
    of = step.power_over_time
    columns = {
        "begin": of.seconds.round(9).tolist(),
        "mean GPU": of.gpu.watts.round(2).tolist(),
        "node": of.node.watts.round(2).tolist(),
        "all GPUs": of.job.watts.round(2).tolist(),
    }
    return Table("Power", columns, {"begin": "s", "mean GPU": "W", "node": "W", "all GPUs": "W"})


# ---- text ----------------------------------------------------------------------------------------


def title(step: SimulatedStep) -> str:
    """Run with its execution, and the machine."""
    return f"{describe(step.compiled.run, step.timeline.execution)} on {step.machine}"


def step_text(step: SimulatedStep) -> Iterator[str | Table]:
    """A simulated step: its time, where it goes, memory, power, remarks."""
    run, fit = step.compiled.run, step.fit
    yield title(step)
    if not fit.fits:
        yield memory_line(fit)
    yield from assumed_batch(step.compiled)
    uses = f"HFU {step.hfu:.1%}"
    if run.mode == "train":
        uses = (
            f"MFU {step.mfu:.1%} (causal {step.mfu_causal:.1%}), "
            f"{uses} (causal {step.hfu_causal:.1%})"
        )
    rate = step.tokens_per_second
    text = f"{quantity(round(rate), 'tokens')}/s, {rate / step.machine.gpus:,.1f} per GPU"
    if step.groups:
        text = "one of prefill and one of decode, whose layers wait for their cache"
    yield f"step {duration(step.seconds)}: {text}; {uses}"
    if run.mode != "train":
        yield stored_line(step.compiled)
    yield from _serving_lines(step)
    yield parts(step)
    yield transfers(step)
    if fit.fits:
        yield memory_line(fit)
    if step.compiled.capacity is not None:
        yield hold_line(step.compiled.capacity)
    yield _critical_path(step.critical_path, step.seconds)
    expense = step.expense()
    usd = expense.usd_per_million_tokens
    yield (
        f"power: {expense.watts_per_gpu:,.0f} W per GPU, {expense.joules_per_token:.3g} J per token"
        + ("" if usd is None else f"; {usd:.3g} USD per million tokens")
    )
    yield from goodput_lines(step)
    yield from map(str, remarks(step.compiled, step))


def goodput_lines(step: SimulatedStep) -> Iterator[str]:
    """Useful share of the time of the job, and its days; nothing where not asked for."""
    of, job = step.goodput, step.job
    if of is not None:
        yield (
            f"goodput {of.useful_share:.1%}: {of.interruptions_per_day:,.3g} interruptions a day, "
            f"one in {duration(of.interruption_seconds)} ({of.per_1000_node_days:g} per 1,000 "
            f"node-days on {plural(of.nodes, 'node', 'nodes')}, at random), "
            f"{duration(of.detect)} to detect, {duration(of.restart)} to restart"
        )
        yield _checkpoint_line(of)
        if of.spares is None:
            yield "spares: always enough, assumed; --spares and --repair change this"
        else:
            yield (
                f"spares: {of.spares.in_repair:.3g} nodes are in repair on average; with "
                f"{of.spares.spares} spares the job waits {of.spares.shortage:.2%} of the time, "
                f"{of.spares.spares_needed} keep that below 1%"
            )
    if job is not None:
        if job.days > MOST_DAYS:
            yield f"{count(round(job.tokens))} tokens: not within a million days"
            return
        cost = ""
        if job.usd is not None:
            cost = f", {count(round(job.usd))} USD at {job.price:.3g} per GPU-hour"
        without = f"{job.days_without_failures:,.1f} days without failures"
        yield (
            f"{count(round(job.tokens))} tokens in steps of {step.tokens:,}: {job.days:,.1f} days"
            f"{cost}, {job.mwh:,.1f} MWh of the GPUs; "
            + (without if of else "without failures and checkpoints, which --failures adds")
        )


def _checkpoint_line(of: Goodput) -> str:
    if of.saving is None or of.period is None:
        return "replicas fail alone: no work is lost, and checkpoints are not counted"
    size, stall = quantity(of.checkpoint.bytes, "B"), duration(of.saving.stall)
    stored = f", stored after {duration(of.saving.write)}" if of.saving.asynchronous else ""
    best = "" if of.period == of.best_period else f"best {duration(of.best_period or 0)}; "
    return (
        f"checkpoint: {size} every {duration(of.period)}, a stall of {stall}{stored} "
        f"({best}Young {duration(of.young or 0)}, Daly {duration(of.daly or 0)})"
    )


def traced_text(step: TracedStep, description: str) -> Iterator[str | Table]:
    """A simulated step of a recorded graph."""
    yield f"{description}; on {step.machine}"
    yield f"step {duration(step.seconds)}"
    yield parts(step)
    yield transfers(step)
    yield memory_line(step.fit)
    yield _critical_path(step.critical_path, step.seconds)


def assumed_batch(compiled: CompiledRun) -> Iterator[str]:
    """The global batch, or the requests of a step, unless the user gave them."""
    run = compiled.run
    if run.mode != "train" and {"batch_size", "requests", "prefill"} <= compiled.assumed:
        yield (
            f"batch of {plural(run.batch_size or 0, 'request', 'requests')}, assumed: one for each "
            "of dp x pp; set --batch-size"
        )
    if run.mode == "train" and "global_batch_size" in compiled.assumed:
        searched = usual_batch(run, compiled.model, [run.world_size])
        yield (
            f"global batch {plural(run.global_batch_size or 0, 'sequence', 'sequences')}, assumed: "
            f"micro-batch-size {run.micro_batch_size} x dp {run.dp} x "
            f"{plural(run.microbatches, 'microbatch', 'microbatches')}, the fewest of its "
            f"schedule; a search assumes {searched:,}; set --global-batch-size"
        )


def memory_line(fit: Fit) -> str:
    """Peak memory of the fullest GPU, and whether it fits."""
    peak, capacity = side_by_side(fit.peak, fit.device_memory, "B")
    seconds = fit.fullest.seconds
    time = "" if seconds is None else f", after {duration(seconds)}"
    return (
        f"memory: at most {peak} of {capacity}{': ' * bool(fit.verdict)}{fit.verdict} "
        f"(pipeline rank {fit.fullest.rank_class.pipeline_rank}{time})"
    )


def _critical_path(path: Mapping[str, float], total: float) -> str:
    shares = [f"{name} {seconds / total:.1%}" for name, seconds in path.items() if total]
    return f"critical path: {', '.join(shares)}"


def _serving_lines(step: SimulatedStep) -> Iterator[str]:
    """Serving metrics of a step of inference: a line, or one for each of two groups."""
    if step.served is not None:
        yield f"{step.served.what}: {_rates(step.served)}"
    if not step.groups:
        return
    for group in step.groups:
        ranks = f"{group.first_rank}-{group.first_rank + group.gpus - 1}"
        memory = " of ".join(side_by_side(group.fit.peak, group.fit.device_memory, "B"))
        yield (
            f"{group.name} group: {plural(group.gpus, 'GPU', 'GPUs')} (ranks {ranks}), step "
            f"{duration(group.served.step_seconds)}, {_rates(group.served)}; memory {memory}"
            + ("" if group.fit.fits else ": it does not fit")
        )
    limit, balance = limiting(*(group.served for group in step.groups))
    if limit is None:
        yield f"limits: prefill while OSL is below {balance:,.1f}, decode above (--osl N)"
    else:
        yield f"limits: the {limit} group; both do as many requests at OSL {balance:,.1f}"


def _rates(served: Served) -> str:
    """Latencies and rates of requests."""
    words: list[str] = []
    if served.ttft_seconds is not None:
        words.append(f"TTFT {duration(served.ttft_seconds)} at ISL {served.isl:,.0f}")
    if served.tpot_seconds is not None:
        words.append(
            f"TPOT {duration(served.tpot_seconds)} at context {served.context_length:,.0f}"
        )
    words.append(plural(served.requests, "request", "requests"))
    if served.requests_per_second is not None:
        osl = "" if served.osl is None else f" at OSL {served.osl:,}"
        words.append(f"{served.requests_per_second:,.2f} requests/s{osl}")
    if served.output_tokens_per_second_per_user is not None:
        words.append(f"{served.output_tokens_per_second_per_user:,.1f} tokens/s per user")
    if served.what == "mixed":
        words.append(f"{served.output_tokens_per_second:,.1f} output tokens/s")
        words.append(f"{served.input_tokens_per_second:,.1f} input tokens/s")
    words.append(f"{served.tokens_per_second_per_gpu:,.1f} tokens/s per GPU")
    return ", ".join(words)
