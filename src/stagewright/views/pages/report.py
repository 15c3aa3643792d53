"""The page of a run, and its key figures.

The page says first whether the run fits and its key figures, then what to know of it, then where
time, memory, FLOPs and bytes go.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stagewright.lower.compiled_run import CompiledRun
from stagewright.numbers import count, duration, plural, quantity
from stagewright.program.fit import Fit
from stagewright.time.simulate.serving import Served, ServingGroup
from stagewright.time.simulate.step import SimulatedStep
from stagewright.views import step as step_tables
from stagewright.views import tables
from stagewright.views.advice import remarks
from stagewright.views.pages import charts, settings
from stagewright.views.pages.html import (
    HINT,
    Card,
    Cards,
    Details,
    PageSection,
    Paragraph,
    Part,
    Remarks,
    Tabs,
    render,
)
from stagewright.views.summary import Summary, summary
from stagewright.views.tables import stage_name

# ---- the page of a run ---------------------------------------------------------------------------


def page(compiled: CompiledRun, step: SimulatedStep | None = None) -> str:
    """The page of a run; with a simulation, the page also shows the step's time on a machine."""
    numbers, fit = summary(compiled), fit_of(compiled, step)
    data: dict[str, Any] = {}
    unfit = fit is not None and not fit.fits
    head: list[Part] = [compiled.run.describe()]
    if fit is not None and unfit:
        stage = stage_name(compiled.program, fit.fullest.rank_class)
        need, has = (quantity(size, "B") for size in (fit.peak, fit.device_memory))
        device = step.machine.hardware.name if step else "the device"
        grey = " Figures in grey are of a step that cannot run." if step else ""
        why = f"**Out of memory.** Ranks of {stage} need {need}; {device} has {has}.{grey}"
        head.append(Paragraph(why, "verdict"))
    sections = [
        PageSection("remarks", "What to know", [*_to_know(compiled, step)]),
        *([PageSection("time", "Time", _time(step), moot=unfit)] if step else []),
        PageSection("memory", "Memory", _memory(compiled, step, numbers, data)),
        PageSection("compute", "Compute", [charts.work(compiled, numbers)]),
        PageSection("communication", "Communication", _communication(compiled, numbers)),
        PageSection(
            "schedule",
            "Pipeline",
            [
                charts.schedule_of(compiled)
                or "One rank holds all layers, and one microbatch passes through them."
            ],
        ),
        PageSection("run", "Run", settings.repeat(compiled, step)),
        PageSection("about", "About", [*_about(step)]),
    ]
    return render(heading(compiled, step), [*head, Cards(cards(compiled, step))], sections, data)


def heading(compiled: CompiledRun, step: SimulatedStep | None) -> str:
    """The model and the machine, and that the run does not fit where it does not."""
    world = compiled.program.mesh.world_size
    where = plural(world, "rank", "ranks") if world < 1000 else f"{world:,} ranks"
    if step:
        where = f"{world:,} x {step.machine.hardware.name}"
    fit = fit_of(compiled, step)
    if fit is not None and fit.cannot_fit:
        return f"{compiled.model.name} does not fit on {where}"
    return f"{compiled.model.name} on {where}"


def fit_of(compiled: CompiledRun, step: SimulatedStep | None) -> Fit | None:
    """The fit into a device; None where nothing says which device it is."""
    return compiled.fit if step is None else step.fit


def _to_know(compiled: CompiledRun, step: SimulatedStep | None) -> Iterator[Part]:
    known = remarks(compiled, step)
    yield Remarks(known) if known else "Nothing stands out."
    if step is None:
        device = "" if compiled.fit else ", and nothing says whether the run fits a device"
        yield (
            "This page was made without --hardware, so it has no step time, no MFU and no network"
            f"{device}."
        )


def _time(step: SimulatedStep) -> list[Part]:
    path = ", ".join(f"{name} {s / step.seconds:.1%}" for name, s in step.critical_path.items())
    return [
        str(step.machine),
        charts.time(step),
        Paragraph("Timeline", tag="h3"),
        charts.timeline_of(step),
        "`stagewright simulate --perfetto FILE` writes the timeline for ui.perfetto.dev, which "
        "zooms to single kernels.",
        *filter(len, [step_tables.transfers(step)]),
        f"Critical path: {path}.",
        Paragraph("Power", tag="h3"),
        charts.power(step)._replace(numbers=None),
        *([Paragraph("The whole job", tag="h3")] if step.goodput or step.job else []),
        *step_tables.goodput_lines(step),
    ]


def _memory(
    compiled: CompiledRun, step: SimulatedStep | None, numbers: Summary, data: dict[str, Any]
) -> list[Part]:
    parts: list[Part] = [charts.peak_memory(compiled, step, numbers)]
    if charts.varies(compiled):
        legend, panels = charts.memory_over_time(compiled, step, data)
        parts.append(Paragraph("Over the step", tag="h3"))
        classes = len(step.timeline.lanes if step else compiled.program.classes)
        if len(panels) < classes:
            parts.append(f"{len(panels)} of {classes} groups of ranks are shown.")
        parts += [HINT, legend, Tabs("over-time", "Groups of ranks", panels)]
    return [
        *parts,
        "Allocation is ideal: the context of the device, workspaces of libraries and fragmentation "
        "come on top.",
    ]


def _communication(compiled: CompiledRun, numbers: Summary) -> list[Part]:
    chart = charts.bytes_by_axis(numbers)
    if chart is None:
        return ["Ranks send nothing."]
    return [
        chart,
        Details("By stage, phase and kind, as a table", [tables.communication(numbers)]),
        "The ranks that exchange most, over all axes; collectives count as if their ranks "
        "exchanged data directly.",
        charts.largest_exchanges(compiled),
    ]


def _about(step: SimulatedStep | None) -> Iterator[str]:
    yield (
        "FLOPs are two for each multiply-add; causal flash attention counts the blocks that it "
        "computes. Bytes of a collective are those of a rank's local input: of an all_gather, the "
        "shard that the rank contributes."
    )
    yield (
        "All numbers are computed from the model's shapes, the layouts and the schedule; none is "
        "measured."
    )
    if step:
        yield (
            "Times are simulated: kernels by a roofline fitted to published benchmarks, "
            "collectives by models of the network. `stagewright hardware "
            f"{step.machine.hardware.name}` names the source of each figure; `stagewright "
            "validate` compares predictions with measurements."
        )


# ---- key figures ---------------------------------------------------------------------------------


def cards(compiled: CompiledRun, step: SimulatedStep | None) -> list[Card]:
    """The key figures; those of a run that does not fit are moot, memory comes first."""
    fit = fit_of(compiled, step)
    fits = fit is None or not fit.cannot_fit
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
    spent = step.expense()
    if spent.usd_per_million_tokens is not None:
        per_token = f"per million tokens, at {step.price:.3g} USD per GPU-hour"
        shown.append(Card("Cost", f"{spent.usd_per_million_tokens:.3g} USD", per_token))
    shown.append(Card("Energy", f"{spent.joules_per_token:.3g} J", "per token"))
    if step.goodput is not None:
        a_day = f"{step.goodput.interruptions_per_day:,.3g} interruptions a day"
        shown.append(Card("Goodput", f"{step.goodput.useful_share:.1%}", a_day))
    if step.job is not None and step.job.days <= step_tables.MOST_DAYS:
        tokens = f"for {count(round(step.job.tokens))} tokens"
        shown.append(Card("Days", f"{step.job.days:,.1f}", tokens))
    return shown


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
