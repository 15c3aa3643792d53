"""`stagewright report`: what a run is, computes, holds, sends and waits for, on one page."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import numpy as np

from stagewright.lower.compiled_run import CompiledRun
from stagewright.numbers import count, duration, plural, quantity, spans
from stagewright.program.columns import PHASES, RankClass
from stagewright.schedule.play import bubble
from stagewright.time import traffic
from stagewright.time.simulate.step import SimulatedStep
from stagewright.version import __version__
from stagewright.views import tables
from stagewright.views.advice import Remark, remarks
from stagewright.views.pages import memory as memory_page
from stagewright.views.pages.settings import settings
from stagewright.views.pages.shell import (
    Panel,
    Section,
    details,
    page_of,
    paragraph,
    picture,
    table,
    tabs,
)
from stagewright.views.pictures import bars, layer, matrix, memory, schedule, svg, timeline
from stagewright.views.summary import Summary, summary

POINTS = 160
"""Points of a picture of memory over time."""
MOST_CLASSES = 16
"""Pictures of memory over time; of more rank classes, the page shows some, evenly chosen."""


def page(compiled: CompiledRun, found: SimulatedStep | None = None) -> str:
    """The page of a run; with a simulation, the page also shows the step's time on a machine."""
    numbers = summary(compiled)
    data: dict[str, Any] = {}
    sections = [
        _remarks(remarks(compiled, found), found),
        *([_time(found)] if found else []),
        _memory(compiled, numbers, found, data),
        _compute(numbers),
        _communication(compiled, numbers, data),
        _schedule(compiled),
        _graphs(compiled),
        settings(compiled, found),
        _about(found),
    ]
    ranks = f"{numbers['world_size']:,} {'GPUs' if found else 'ranks'}"
    if found:
        ranks = ranks.replace("GPUs", f"x {found.machine.hardware.name}")
    if numbers["world_size"] == 1:
        ranks = f"1 x {found.machine.hardware.name}" if found else "1 rank"
    head = f"<p>{html.escape(compiled.run.describe())}</p>{_tiles(compiled, found)}"
    return page_of(f"{compiled.model.name} on {ranks}", head, sections, data)


def tiles(compiled: CompiledRun, found: SimulatedStep | None) -> list[tuple[str, str, str]]:
    """The key figures: name, value, and a remark."""
    run, active = compiled.run, compiled.active_parameters
    few = f"{count(active)} active per token" if active != compiled.parameters else ""
    figures = [("Parameters", count(compiled.parameters), few)]
    peak = max(sum(held.values()) for _, held in peaks(compiled, found))
    room = f"of {found.machine.hardware.memory_gb:g} GB" if found else "of the fullest rank"
    figures.append(("Memory at the peak", quantity(peak, "B"), room))
    if found:
        rate = found.tokens_per_second
        each = f"{rate / found.machine.gpus:,.0f} for each GPU"
        figures.append(("Step", duration(found.seconds), f"{found.tokens:,} tokens"))
        figures.append(("Tokens in a second", count(round(rate)), each))
        if run.mode == "train":
            figures.append(("MFU", f"{found.mfu:.1%}", f"causal {found.mfu_causal:.1%}"))
        causal = f"causal {found.hfu_causal:.1%}"
        counted = causal if run.mode == "train" else "what kernels execute"
        figures.append(("HFU", f"{found.hfu:.1%}", counted))
        spent = found.expense(found.cluster.price if found.cluster else None)
        if spent.usd_per_million_tokens is not None:
            price = f"{spent.usd_per_million_tokens:.3g} USD"
            figures.append(("A million tokens", price, f"{spent.joules_per_token:.3g} J a token"))
    elif run.mode == "train":
        many = plural(run.microbatches, "microbatch", "microbatches")
        figures.append(("Sequences in a step", f"{run.global_batch_size:,}", many))
    return figures


def _tiles(compiled: CompiledRun, found: SimulatedStep | None) -> str:
    body = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}"
        f"<small>{html.escape(more)}</small></dd></div>"
        for name, value, more in tiles(compiled, found)
    )
    return f'<dl class="tiles">{body}</dl>'


def _remarks(said: Sequence[Remark], found: SimulatedStep | None) -> Section:
    body = "".join(
        f'<li class="{r.level}"><b>{r.level.capitalize()}.</b> <b>{html.escape(r.about)}</b> '
        f"{html.escape(r.text[0].upper() + r.text[1:])}</li>"
        for r in said
    )
    body = f'<ul class="remarks">{body}</ul>' if body else paragraph("Nothing stands out.")
    if found is None:
        body += paragraph(
            "Without --hardware nothing is known of time, of MFU, of a device's memory or of the "
            "network; with it, this page tells of them, too."
        )
    return Section("remarks", "What to know", body)


def parts_of_time(found: SimulatedStep) -> svg.Picture:
    """The parts of the step as bars, for the mean GPU and for each kind of ranks."""
    mean, whole = found.mean, found.seconds
    shown = [("mean GPU", mean), *_some_lanes(found)]
    fills = {
        **svg.PHASES,
        **{f"{axis} exposed": fill for axis, fill in svg.axes(sorted(mean.communication)).items()},
        "bubble": svg.BUBBLE,
    }
    parts = [
        bars.StackedBar(
            name,
            {
                **{phase: each.kernels.get(phase, 0.0) / whole for phase in mean.kernels},
                **{f"{a} exposed": each.exposed.get(a, 0.0) / whole for a in mean.exposed},
                "bubble": each.bubble / whole,
            },
        )
        for name, each in shown
    ]
    return bars.picture(
        parts, fills, "where", "Where the time of a GPU goes", lambda share: f"{share:.1%}"
    )


def _time(found: SimulatedStep) -> Section:
    whole = found.seconds
    way = ", ".join(f"{name} {s / whole:.1%}" for name, s in found.critical_path.items())
    strips = timeline.picture(found.line)
    lanes = len(found.line.lanes)
    few = f" {timeline.MOST} of {lanes} kinds of ranks are shown." if lanes > timeline.MOST else ""
    body = (
        paragraph(str(found.machine))
        + picture(parts_of_time(found), "Parts of the step: kernels by phase, communication "
                  "that nothing hides by axis, and the bubble, in which a rank waits for others.")
        + details("The same as a table", table(tables.parts(found)))
        + picture(strips, "The step from left to right. A column is as high as its strip where "
                  "kernels, or transfers along an axis, run all of its time." + few)
        + table(tables.transfers(found))
        + paragraph(f"The critical path: {way}.")
    )  # fmt: skip
    return Section("time", "Time", body)


def _some_lanes(found: SimulatedStep) -> list[tuple[str, Any]]:
    """Kinds of ranks whose printed shares differ, each with its parts."""
    known: dict[tuple[str, ...], tuple[int, Any]] = {}
    ranks: dict[tuple[str, ...], list[int]] = {}
    for lane, each in zip(found.line.lanes, found.parts, strict=True):
        shares = [*each.kernels.values(), *each.exposed.values(), each.bubble]
        key = tuple(f"{s / found.seconds:.1%}" for s in shares)
        known.setdefault(key, (lane.of.pipeline_rank, each))
        ranks.setdefault(key, []).append(lane.of.pipeline_rank)
    return [
        (f"stage{'s' * (len(stages) > 1)} {spans(stages, 2)}", known[key][1])
        for key, some in ranks.items()
        for stages in [sorted({*some})]
    ]


def _memory(
    compiled: CompiledRun, numbers: Summary, found: SimulatedStep | None, data: dict[str, Any]
) -> Section:
    held = peaks(compiled, found)
    limit = None
    if found:
        room = found.machine.hardware.memory_gb
        limit = (room * 1e9, f"memory of a device: {room:g} GB")
    drawn = bars.picture(
        bars.merge_equal(held, "stage"), svg.CATEGORIES, "peak", "Memory at the peak by category",
        bars.show_bytes, limit,
    )  # fmt: skip
    body = picture(drawn, "Bytes of one rank while it holds the most, by category.")
    body += details("The same as a table", table(tables.memory(numbers)))
    if any(len(of.values.value) for of in compiled.program.classes):
        body += "<h3>Over the step</h3>" + _memory_over_time(compiled, found, data)
    body += paragraph(
        "Allocation is ideal: the context of the device, workspace of libraries and fragmentation "
        "come on top."
    )
    return Section("memory", "Memory", body)


def peaks(compiled: CompiledRun, found: SimulatedStep | None) -> list[tuple[int, dict[str, int]]]:
    """Pipeline ranks, and what is held at the peak by category: in the simulation if there is."""
    if found:
        lanes = zip(found.line.lanes, found.peaks, strict=True)
        return [(lane.of.pipeline_rank, peak) for lane, peak in lanes]
    return [
        (of.pipeline_rank, {k: v for k, v in of.memory.items() if k != "peak" and v})
        for of in compiled.program.classes
    ]


def _memory_over_time(
    compiled: CompiledRun, found: SimulatedStep | None, data: dict[str, Any]
) -> str:
    """A tab for each class of ranks, or lane of a simulation."""
    if found:
        of_class = [lane.of for lane in found.line.lanes]
        ranks = [lane.ranks for lane in found.line.lanes]
    else:
        of_class = [*compiled.program.classes]
        ranks = [of.ranks for of in of_class]
    chosen = timeline.chosen(len(of_class), MOST_CLASSES)
    levels = [
        memory.over_seconds(found.memory[nth], found.seconds, POINTS)
        if found
        else memory.over_rows(of_class[nth], POINTS)
        for nth in chosen
    ]
    capacity = round(found.machine.hardware.memory_gb * 1e9) if found else None
    most = max(max(each.total) for each in levels)
    panels: list[Panel] = []
    for nth, each in zip(chosen, levels, strict=True):
        name, of = f"held{nth}", of_class[nth]
        data[name] = memory.data(each)
        drawn = memory.picture(each, name, memory_page.label(of, each), most, capacity)
        order = "With tasks in the order of issue: " if found else ""
        peak = memory_page.peak_in_words(of)
        who = paragraph(f"Ranks {spans(ranks[nth].tolist())}. {order}{peak}")
        body = who + picture(drawn, live=name) + memory_page.alive(of)
        panels.append(Panel(_class_name(of, ranks[nth], of_class), body))
    some = ""
    if len(chosen) < len(of_class):
        some = paragraph(f"{len(chosen)} of {len(of_class)} classes of ranks are shown.")
    hint = paragraph(
        "Focus a picture and use the arrow keys, Home, End, or P for the peak; or point at it."
    )
    legend = memory.legend(levels, "held-legend")
    return some + hint + picture(legend) + tabs("over-time", "Classes of ranks", panels)


def _class_name(of: RankClass, ranks: Any, among: Sequence[RankClass]) -> str:
    alike = sum(each.pipeline_rank == of.pipeline_rank for each in among)
    more = f": {spans(ranks.tolist(), 1)}" if alike > 1 else ""
    return f"stage {of.pipeline_rank}{more}"


def _compute(numbers: Summary) -> Section:
    work = [
        (each["stage"], {phase: each["flops"][phase] for phase in PHASES})
        for each in numbers["rank_classes"]
    ]
    drawn = bars.picture(
        bars.merge_equal(work, "stage"), svg.PHASES, "flops", "FLOPs of a rank by phase",
        lambda flops: quantity(round(flops), "FLOP"),
    )  # fmt: skip
    body = picture(drawn, "FLOPs of one rank in a step, two for each multiply-add.")
    body += details("The same as a table", table(tables.compute(numbers)))
    return Section("compute", "Compute", body)


def _communication(compiled: CompiledRun, numbers: Summary, data: dict[str, Any]) -> Section:
    most: dict[str, dict[str, int]] = {}
    for each in numbers["rank_classes"]:
        mine: dict[str, dict[str, int]] = {}
        for row in [*each["collectives"], *each["sends"]]:
            phases = mine.setdefault(row["axis"], dict.fromkeys(PHASES, 0))
            phases[row["phase"]] += row["bytes"]
        for axis, phases in mine.items():
            if sum(phases.values()) > sum(most.get(axis, {}).values()):
                most[axis] = phases
    if not most:
        return Section("communication", "Communication", paragraph("Ranks send nothing."))
    drawn = bars.picture(
        [bars.StackedBar(axis, phases) for axis, phases in sorted(most.items())],
        svg.PHASES,
        "axes",
        "Bytes by axis and phase",
        bars.show_bytes,
    )
    body = picture(
        drawn,
        "Bytes in a step of the rank that has most along each axis: local inputs of collectives, "
        "and messages that it sends.",
    )
    body += details("By stage, phase and kind, as a table", table(tables.communication(numbers)))
    return Section("communication", "Communication", body + _matrices(compiled, data))


def _matrices(compiled: CompiledRun, data: dict[str, Any]) -> str:
    """Matrices of bytes between ranks: along all axes together, and along each axis."""
    program = compiled.program
    edges = traffic.blocks(program)
    axes = traffic.axes(program)
    size = int(edges[1])
    matrices = [traffic.matrix(program, axis, edges) for axis in axes]
    if len(matrices) > 1:
        total = np.sum([along.bytes for along in matrices], axis=0)
        matrices.insert(0, traffic.Matrix("all axes", edges, total))
    panels: list[Panel] = []
    for nth, along in enumerate(matrices):
        name = f"matrix{nth}"
        data[name] = matrix.data(along)
        label = f"Bytes from each rank to each other along {along.axis}"
        drawn = picture(matrix.picture(along, name, label), live=name)
        panels.append(Panel(along.axis, drawn))
    blocks = (
        f"A square stands for {size} x {size} ranks, neighbours in the order of ranks; what ranks "
        "of one block send each other is on the diagonal. "
        if size > 1
        else ""
    )
    how = (
        f"{blocks}Of a collective, each rank is taken to send every other member of its group the "
        "same part, as if all exchanged directly; a ring or a tree moves as many bytes between "
        "other pairs. Squares grow and darken with the logarithm of the bytes. Focus the picture "
        "and use the arrow keys, or point at it."
    )
    return "<h3>Who sends to whom</h3>" + paragraph(how) + tabs("matrix", "Axes", panels)


def _schedule(compiled: CompiledRun) -> Section:
    order, run = compiled.order, compiled.run
    if len(order) == 1 and run.microbatches == 1:
        text = "One rank holds all layers, and one microbatch passes through them."
        return Section("schedule", "Pipeline", paragraph(text))
    words = (
        f"{run.schedule}: {plural(run.microbatches, 'microbatch', 'microbatches')} through "
        f"{plural(run.virtual_stages, 'stage', 'stages')} on "
        f"{plural(len(order), 'pipeline rank', 'pipeline ranks')}. 2F0 is the forward pass of "
        "microbatch 0 through stage 2. If a backward pass takes as long as two forwards and "
        f"communication no time, ranks are idle {bubble(order):.1%} of the step."
    )
    return Section("schedule", "Pipeline", paragraph(words) + picture(schedule.picture(order)))


def _graphs(compiled: CompiledRun) -> Section:
    """Each distinct block, forward; and backward for who opens it."""
    mesh = compiled.program.mesh
    # What most layers are made of comes first.
    blocks = sorted(compiled.blocks, key=lambda name: not name.startswith("layer"))
    panels: list[Panel] = []
    for nth, name in enumerate(blocks):
        graph = compiled.blocks[name]
        body = picture(layer.picture(graph, mesh, f"graph{nth}"))
        if any(n.phase in ("recompute", "backward") for n in graph):
            drawn = layer.picture(graph, mesh, f"back{nth}", ("recompute", "backward"))
            body += details("Backward", picture(drawn), on_paper=False)
        panels.append(Panel(name, body))
    sizes = ", ".join(f"{axis}={size}" for axis, size in mesh.axes if size > 1)
    words = (
        "One layer and what is around it, as every rank computes it. What stands at an edge is "
        "where the value lives: [B/dp, S, M @ 1/tp] is split over dp in its first dim, and a sum "
        f"over tp that is not reduced yet. {f'The mesh: {sizes}.' if sizes else ''}"
    )
    return Section("layer", "Layer", paragraph(words) + tabs("graphs", "Blocks", panels))


def _about(found: SimulatedStep | None) -> Section:
    lines = [
        "FLOPs are two for each multiply-add; causal flash attention counts the blocks that it "
        "computes. Bytes of a collective are those of a rank's local input: of an all_gather the "
        "shard that it gives.",
        "All numbers are worked out from the model's shapes, the layouts and the schedule; none is "
        "measured.",
    ]
    if found:
        lines.append(
            "Times are of a simulation: kernels by a roofline fitted to published benchmarks, "
            "collectives by models of the network; `stagewright hardware "
            f"{found.machine.hardware.name}` tells where each figure is from, and `stagewright "
            "validate` how far predictions are from measurements."
        )
    lines.append(f"Made by Stagewright {__version__}.")
    return Section("about", "About", "".join(paragraph(each) for each in lines))
