"""The page of a run, the page of its memory, and a run as a notebook shows it.

A page says first whether the run fits and its key figures, then what to know of it, then where
time, memory, FLOPs and bytes go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from stagewright.errors import UserError
from stagewright.lower.compiled_run import CompiledRun
from stagewright.numbers import count, duration, plural, quantity
from stagewright.program.fit import Fit
from stagewright.texttable import SHOWN, Table
from stagewright.time.simulate.serving import Served, ServingGroup
from stagewright.time.simulate.step import SimulatedStep
from stagewright.views import step_tables, tables
from stagewright.views.advice import remarks
from stagewright.views.pages import charts, settings
from stagewright.views.pages.html import Card, Chart, render
from stagewright.views.summary import Summary, summary
from stagewright.views.tables import stage_name

# ---- the page of a run ---------------------------------------------------------------------------


def page(compiled: CompiledRun, step: SimulatedStep | None = None) -> str:
    """The page of a run; with a simulation, the page also shows the step's time on a machine."""
    numbers = summary(compiled)
    data: dict[str, Any] = {}
    fit = fit_of(compiled, step)
    pipeline = charts.schedule_of(compiled)
    return render(
        "report.html",
        title=heading(compiled, step),
        run=compiled.run.describe(),
        fit=fit,
        fullest=stage_name(compiled.program, fit.fullest.rank_class) if fit else "",
        cards=cards(compiled, step),
        remarks=remarks(compiled, step),
        time=_time(step) if step else None,
        memory=_memory(compiled, step, numbers, data),
        compute=charts.work(compiled, numbers),
        communication=_communication(compiled, numbers),
        pipeline=pipeline,
        mesh=", ".join(f"{axis}={size}" for axis, size in compiled.program.mesh.axes if size > 1),
        asked=settings.asked(compiled, step),
        hardware=step.machine.hardware.name if step else "",
        quantity=quantity,
        data=data,
    )


class _TimeOnPage(NamedTuple):
    machine: str
    parts: Chart
    timeline: Chart
    transfers: Table
    critical_path: str


def _time(step: SimulatedStep) -> _TimeOnPage:
    path = ", ".join(f"{name} {s / step.seconds:.1%}" for name, s in step.critical_path.items())
    return _TimeOnPage(
        str(step.machine),
        charts.time(step),
        charts.timeline_of(step),
        step_tables.transfers(step),
        path,
    )


class _MemoryOnPage(NamedTuple):
    peaks: Chart
    over_time: charts.MemoryOverTime | None


def _memory(
    compiled: CompiledRun, step: SimulatedStep | None, numbers: Summary, data: dict[str, Any]
) -> _MemoryOnPage:
    varies = charts.varies(compiled)
    return _MemoryOnPage(
        charts.peak_memory(compiled, step, numbers),
        charts.memory_over_time(compiled, step, data) if varies else None,
    )


class _CommunicationOnPage(NamedTuple):
    by_axis: Chart
    table: Table
    largest: Table


def _communication(compiled: CompiledRun, numbers: Summary) -> _CommunicationOnPage | None:
    chart = charts.bytes_by_axis(numbers)
    if chart is None:
        return None
    return _CommunicationOnPage(
        chart, tables.communication(numbers), charts.largest_exchanges(compiled)
    )


def heading(compiled: CompiledRun, step: SimulatedStep | None) -> str:
    """The model and the machine, and that the run does not fit where it does not."""
    world = compiled.program.mesh.world_size
    where = plural(world, "rank", "ranks") if world < 1000 else f"{world:,} ranks"
    if step:
        where = f"{world:,} x {step.machine.hardware.name}"
    fit = fit_of(compiled, step)
    if fit is not None and not fit.fits:
        return f"{compiled.model.name} does not fit on {where}"
    return f"{compiled.model.name} on {where}"


def fit_of(compiled: CompiledRun, step: SimulatedStep | None) -> Fit | None:
    """The fit into a device; None where nothing says which device it is."""
    return compiled.fit if step is None else step.fit


# ---- the page of memory --------------------------------------------------------------------------


def memory_page(compiled: CompiledRun) -> str:
    """The page of a training run's memory; UserError for inference, whose memory is constant."""
    if compiled.run.mode != "train":
        raise UserError(
            f"--memory-plot is for training, got mode={compiled.run.mode}, where all is held all "
            "the time; drop it"
        )
    data: dict[str, Any] = {}
    shown = charts.memory_over_time(compiled, None, data, points=charts.POINTS, limit=None)
    return render(
        "memory.html",
        title=f"Memory of a rank over one step: {compiled.model.name}",
        run=compiled.run.describe(),
        shown=shown,
        data=data,
    )


# ---- notebooks -----------------------------------------------------------------------------------


def compiled_html(compiled: CompiledRun) -> str:
    """A compiled run as HTML: its memory and schedule."""
    numbers = summary(compiled)
    pictures = [("Memory of a rank at its peak", charts.peak_memory(compiled, None))]
    pipeline = charts.schedule_of(compiled)
    if pipeline is not None and len(compiled.order) > 1:
        pictures.append(("Pipeline", pipeline))
    shown = tables.compute(numbers), tables.memory(numbers), tables.communication(numbers)
    return _notebook(compiled, None, pictures, [table for table in shown if len(table)])


def simulation_html(step: SimulatedStep) -> str:
    """A simulated step as HTML: where its time goes."""
    pictures = [
        ("Where the time of a GPU goes", charts.time(step)),
        ("Timeline", charts.timeline_of(step)),
    ]
    shown = [step_tables.parts(step), step_tables.transfers(step)]
    return _notebook(step.compiled, step, pictures, shown)


def _notebook(
    compiled: CompiledRun,
    step: SimulatedStep | None,
    pictures: Sequence[tuple[str, Chart]],
    shown: Sequence[Table],
) -> str:
    return render(
        "notebook.html",
        run=compiled.run.describe(),
        machine=str(step.machine) if step else "",
        cards=cards(compiled, step),
        remarks=[r for r in remarks(compiled, step) if r.level != "note"],
        pictures=pictures,
        tables=shown,
        most=SHOWN,
    )


# ---- key figures ---------------------------------------------------------------------------------


def cards(compiled: CompiledRun, step: SimulatedStep | None) -> list[Card]:
    """The key figures; those of a run that does not fit are moot, memory comes first."""
    fit = fit_of(compiled, step)
    fits = fit is None or fit.fits
    peak = max(sum(parts.values()) for _, parts in charts.peaks(compiled, step))
    room = "on the fullest rank" if fit is None else f"of {quantity(fit.device_memory, 'B')}"
    state = "" if fits else "problem"
    memory = Card("Peak memory per GPU", quantity(peak, "B"), room, state)
    active = compiled.active_parameters
    few = f"{count(active)} active per token" if active != compiled.parameters else ""
    if compiled.trained:
        few = f"{count(compiled.trained.trainable)} of them, or of adapters, train"
    size = Card("Parameters", count(compiled.parameters), few)
    others = _timed(compiled, step) if step else _batch(compiled)
    if fits:
        return [size, memory, *others]
    return [memory, size, *(card._replace(state="moot") for card in others)]


def _batch(compiled: CompiledRun) -> list[Card]:
    run = compiled.run
    if run.mode != "train":
        return []
    many = plural(run.microbatches, "microbatch per rank", "microbatches per rank")
    return [Card("Global batch size", f"{run.global_batch_size:,}", many)]


def _timed(compiled: CompiledRun, step: SimulatedStep) -> list[Card]:
    trains = compiled.run.mode == "train"
    if step.served is not None:
        shown = _served(step.served)
    elif step.groups:
        # HFU and cost of both in turn are of no server, which runs the groups side by side.
        return [card for group in step.groups for card in _of_group(group)]
    else:
        rate = step.tokens_per_second
        per_gpu = _rate(rate / step.machine.gpus)
        shown = [
            Card("Step time", duration(step.seconds), f"{step.tokens:,} tokens"),
            Card("Throughput", _rate(rate), f"tokens/s; {per_gpu} per GPU"),
        ]
    if trains:
        shown.append(Card("MFU", f"{step.mfu:.1%}", f"causal attention {step.mfu_causal:.1%}"))
    executed = f"causal attention {step.hfu_causal:.1%}"
    shown.append(
        Card("HFU", f"{step.hfu:.1%}", executed if trains else "of FLOPs that kernels execute")
    )
    asked = step.cluster.price if step.cluster else None
    spent = step.expense(asked)
    if spent.usd_per_million_tokens is not None:
        price = asked if asked is not None else step.machine.hardware.price_usd_per_gpu_hour
        per_token = f"per million tokens, at {price:g} USD per GPU-hour"
        shown.append(Card("Cost", f"{spent.usd_per_million_tokens:.3g} USD", per_token))
    return [*shown, Card("Energy", f"{spent.joules_per_token:.3g} J", "per token")]


def _served(of: Served) -> list[Card]:
    """The figures of a step of inference, in the words of serving."""
    per_gpu = f"{_rate(of.tokens_per_second_per_gpu)} per GPU"
    if of.ttft_seconds is not None:
        rate = _rate(of.input_tokens_per_second)
        return [
            Card("TTFT", duration(of.ttft_seconds), f"{of.requests:,} prompts of {of.isl:,.0f}"),
            Card("Throughput", rate, f"input tokens/s; {per_gpu}"),
        ]
    shown: list[Card] = []
    if of.tpot_seconds is not None and of.output_tokens_per_second_per_user is not None:
        user = f"{_rate(of.output_tokens_per_second_per_user)} tokens/s per user"
        shown.append(Card("TPOT", duration(of.tpot_seconds), user))
    rate = _rate(of.output_tokens_per_second)
    shown.append(Card("Throughput", rate, f"output tokens/s; {per_gpu}"))
    if of.requests_per_second is not None:
        shown.append(Card("Requests", f"{of.requests_per_second:.3g}/s", f"OSL {of.osl:,}"))
    return shown


def _of_group(group: ServingGroup) -> list[Card]:
    """The figures of one of the two groups of a disaggregated step."""
    name = group.name.capitalize()
    gpus = plural(group.gpus, "GPU", "GPUs")
    first, *others = _served(group.served)
    first = first._replace(more=f"{first.more}; {gpus}")
    return [card._replace(name=f"{name}: {card.name}") for card in (first, *others)]


def _rate(per_second: float) -> str:
    return count(round(per_second)) if per_second >= 100 else f"{per_second:.3g}"
