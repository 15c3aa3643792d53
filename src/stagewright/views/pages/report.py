"""`stagewright report`: what a run is, computes, holds, sends and waits for, on one page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from stagewright.graph.node import Graph
from stagewright.lower.compiled_run import CompiledRun
from stagewright.numbers import plural, quantity
from stagewright.schedule.play import bubble
from stagewright.texttable import Table
from stagewright.time.simulate.step import SimulatedStep
from stagewright.version import __version__
from stagewright.views import step_tables, tables
from stagewright.views.advice import remarks
from stagewright.views.pages import charts, memory, settings
from stagewright.views.pages.cards import cards, fit_shown, heading
from stagewright.views.pages.charts import Chart, chart
from stagewright.views.pages.templates import render
from stagewright.views.pages.traffic import TrafficMatrices, exchange
from stagewright.views.pictures import layer, schedule, timeline
from stagewright.views.stages import stage_name
from stagewright.views.summary import Summary, summary

FLOPS = "FLOPs of one rank in a step, two for each multiply-add."
"""The caption of the chart of FLOPs."""


def page(compiled: CompiledRun, found: SimulatedStep | None = None) -> str:
    """The page of a run; with a simulation, the page also shows the step's time on a machine."""
    numbers = summary(compiled)
    data: dict[str, Any] = {}
    fit = fit_shown(compiled, found)
    return render(
        "report.html",
        title=heading(compiled, found),
        run=compiled.run.describe(),
        fit=fit,
        fullest=stage_name(compiled.program, fit.fullest.rank_class) if fit else "",
        cards=cards(compiled, found),
        remarks=remarks(compiled, found),
        time=_time(found, data) if found else None,
        memory=_memory(compiled, numbers, found, data),
        compute=(
            chart(charts.work(compiled, numbers), "flops", FLOPS, zooms=True),
            tables.compute(numbers),
        ),
        communication=_communication(compiled, numbers, data),
        pipeline=_pipeline(compiled),
        layers=_layers(compiled),
        asked=settings.asked(compiled, found),
        hardware=found.machine.hardware.name if found else "",
        version=__version__,
        quantity=quantity,
        data=data,
    )  # fmt: skip


class _TimeOnPage(NamedTuple):
    machine: str
    parts: Chart
    table: Table
    timeline: Chart
    transfers: Table
    critical_path: str


def _time(found: SimulatedStep, data: dict[str, Any]) -> _TimeOnPage:
    whole = found.seconds
    way = ", ".join(f"{name} {s / whole:.1%}" for name, s in found.critical_path.items())
    lanes = len(found.timeline.lanes)
    few = f" {timeline.MOST} of {lanes} groups are shown." if lanes > timeline.MOST else ""
    data["timeline"] = timeline.data(found.timeline)
    return _TimeOnPage(
        str(found.machine),
        chart(
            charts.parts_of_time(found),
            "where",
            "Share of the step: kernels by phase, communication that no kernel hides (exposed) by "
            "axis, the bubble, in which a rank waits for other ranks, and launches, in which it "
            "waits for its host.",
            zooms=True,
        ),
        step_tables.parts(found),
        chart(
            lambda name, width: timeline.picture(found.timeline, name, width),
            "timeline",
            "One step from left to right, a lane for each group of ranks with equal timing. The "
            "height of a column is the share of its time in which kernels, or transfers along an "
            f"axis, run.{few}",
            live="timeline",
            zooms=True,
        ),
        step_tables.transfers(found),
        way,
    )


class _MemoryOnPage(NamedTuple):
    peaks: Chart
    table: Table
    over_time: memory.OverTime | None


def _memory(
    compiled: CompiledRun, numbers: Summary, found: SimulatedStep | None, data: dict[str, Any]
) -> _MemoryOnPage:
    fit = fit_shown(compiled, found)
    drawn = charts.peak_memory(compiled, found, fit.device_memory if fit else None)
    varies = any(len(of.values.value) for of in compiled.program.classes)
    return _MemoryOnPage(
        chart(drawn, "peak", "Bytes of one rank at its peak, by category.", zooms=True),
        tables.memory(numbers),
        memory.over_time(compiled, found, data) if varies else None,
    )


class _CommunicationOnPage(NamedTuple):
    by_axis: Chart
    table: Table
    exchange: TrafficMatrices


def _communication(
    compiled: CompiledRun, numbers: Summary, data: dict[str, Any]
) -> _CommunicationOnPage | None:
    drawn = charts.bytes_by_axis(numbers)
    if drawn is None:
        return None
    caption = (
        "Bytes per step of the rank that communicates most along each axis: local inputs of "
        "collectives, and messages that the rank sends."
    )
    return _CommunicationOnPage(
        chart(drawn, "axes", caption, zooms=True),
        tables.communication(numbers),
        exchange(compiled, data),
    )


def _pipeline(compiled: CompiledRun) -> tuple[str, Chart | None]:
    order, run = compiled.order, compiled.run
    if len(order) == 1 and run.microbatches == 1:
        return "One rank holds all layers, and one microbatch passes through them.", None
    words = (
        f"Schedule {run.schedule}: {plural(run.microbatches, 'microbatch', 'microbatches')} pass "
        f"through {plural(run.virtual_stages, 'stage', 'stages')} on "
        f"{plural(len(order), 'pipeline rank', 'pipeline ranks')}. 2F0 is the forward pass of "
        "microbatch 0 through stage 2. With backward passes twice as long as forward passes, and "
        f"communication that takes no time, ranks are idle {bubble(order):.1%} of the step."
    )
    drawn = chart(lambda name, width: schedule.picture(order, name, width), "schedule")
    return words, drawn


class _LayerPanel(NamedTuple):
    title: str
    forward: Chart
    backward: Chart | None


def _layers(compiled: CompiledRun) -> tuple[str, Sequence[_LayerPanel]]:
    """The mesh in words, and each distinct block."""
    mesh = compiled.program.mesh

    def graph(of: Graph, name: str, *phases: str) -> Chart:
        return Chart([("natural", layer.picture(of, mesh, name, phases))])

    # What most layers are made of comes first.
    blocks = sorted(compiled.blocks, key=lambda name: not name.startswith("layer"))
    shown: list[_LayerPanel] = []
    for nth, name in enumerate(blocks):
        of = compiled.blocks[name]
        back = None
        if any(n.phase in ("recompute", "backward") for n in of):
            back = graph(of, f"back{nth}", "recompute", "backward")
        shown.append(_LayerPanel(name, graph(of, f"graph{nth}", "forward"), back))
    return ", ".join(f"{axis}={size}" for axis, size in mesh.axes if size > 1), shown
