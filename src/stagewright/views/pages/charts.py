"""The charts of pages: each drawn once for every layout, of which the page shows one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from stagewright.lower.compiled_run import CompiledRun
from stagewright.numbers import spans
from stagewright.program.columns import PHASES, Program, RankClass
from stagewright.time.simulate.breakdown import Breakdown
from stagewright.time.simulate.step import SimulatedStep
from stagewright.views.pictures import bars, svg
from stagewright.views.pictures.chart import BYTES, FLOPS, SCREENS, SHARE, Measure
from stagewright.views.stages import stage_kind

if TYPE_CHECKING:
    from stagewright.views.summary import Summary


def front_caption(points: str, beaten_in: str, leads_to: str) -> str:
    """The caption of a chart of a search's front: what a point is, and what makes it a large one.

    >>> front_caption("candidate", "both time and memory", "run")
    'A point for each candidate; those on the front, which no other beats in both time and memory, \
are large. A click leads to the run.'
    """
    return (
        f"A point for each {points}; those on the front, which no other beats in {beaten_in}, are "
        f"large. A click leads to the {leads_to}."
    )


class Chart(NamedTuple):
    """A chart as a template takes it."""

    pictures: Sequence[tuple[str, svg.Picture]]
    """By the name of the layout; a chart of one layout scrolls where the screen is narrower."""
    caption: str = ""
    live: str = ""
    """The id of the line in which the script describes the place under the cursor."""
    zooms: bool = False


Draw = Callable[[str, int], svg.Picture]
"""Draws a chart, given the name that its ids begin with, and its units across."""


def chart(
    draw: Draw, name: str, caption: str = "", live: str = "", *, zooms: bool = False
) -> Chart:
    """A chart in every layout."""
    pictures = [(of.name, draw(f"{name}-{of.name}", of.width)) for of in SCREENS]
    return Chart(pictures, caption, live, zooms)


def _bars(
    rows: Sequence[bars.StackedBar],
    fills: Mapping[str, svg.Fill],
    label: str,
    measure: Measure,
    limit: bars.Limit | None = None,
) -> Draw:
    return lambda name, width: bars.picture(rows, fills, name, label, measure, limit, width)


def parts_of_time(found: SimulatedStep) -> Draw:
    """The parts of the step as bars, for the mean GPU and for groups of ranks that differ."""
    mean, whole = found.mean, found.seconds
    fills = {
        **svg.PHASES,
        **{f"{axis} exposed": fill for axis, fill in svg.axes(sorted(mean.communication)).items()},
        "bubble": svg.BUBBLE,
        "launches": svg.LAUNCHES,
    }
    parts = [
        bars.StackedBar(
            name,
            {
                **{phase: each.kernels.get(phase, 0.0) / whole for phase in mean.kernels},
                **{f"{a} exposed": each.exposed.get(a, 0.0) / whole for a in mean.exposed},
                "bubble": each.bubble / whole,
                **({"launches": each.launches / whole} if mean.launches else {}),
            },
        )
        for name, each in [("mean GPU", mean), *_some_lanes(found)]
    ]
    return _bars(parts, fills, "Where the time of a GPU goes", SHARE)


def _some_lanes(found: SimulatedStep) -> list[tuple[str, Breakdown]]:
    """Groups of ranks whose printed shares differ, each with its parts."""
    program = found.compiled.program
    known: dict[tuple[str, ...], Breakdown] = {}
    ranks: dict[tuple[str, ...], list[int]] = {}
    for lane, each in zip(found.timeline.lanes, found.parts, strict=True):
        shares = [*each.kernels.values(), *each.exposed.values(), each.bubble, each.launches]
        key = (stage_kind(program, lane.rank_class), *(f"{s / found.seconds:.1%}" for s in shares))
        known.setdefault(key, each)
        ranks.setdefault(key, []).append(lane.rank_class.pipeline_rank)
    return [(_named(key[0], sorted({*some})), known[key]) for key, some in ranks.items()]


def _named(kind: str, stages: Sequence[int]) -> str:
    return f"{kind}{'s' * (len(stages) > 1)} {spans(stages, 2)}"


def peaks(
    compiled: CompiledRun, found: SimulatedStep | None
) -> list[tuple[RankClass, dict[str, int]]]:
    """Classes of ranks, and what each holds at its peak by category: as simulated if it was."""
    if found:
        lanes = zip(found.timeline.lanes, found.memory_peaks, strict=True)
        return [(lane.rank_class, dict(peak.by_category)) for lane, peak in lanes]
    return [
        (of, {k: v for k, v in of.memory.items() if k != "peak" and v})
        for of in compiled.program.classes
    ]


def _by_stage(
    program: Program, rows: Sequence[tuple[RankClass, Mapping[str, float]]]
) -> list[bars.StackedBar]:
    """A bar for stages with equal parts."""
    kinds = dict.fromkeys(stage_kind(program, of) for of, _ in rows)
    return [
        bar
        for kind in kinds
        for bar in bars.merge_equal(
            [(of.pipeline_rank, parts) for of, parts in rows if stage_kind(program, of) == kind],
            kind,
        )
    ]


def peak_memory(compiled: CompiledRun, found: SimulatedStep | None, room: int | None) -> Draw:
    """Memory at the peak as bars, against the memory of a device."""
    limit = None
    if room is not None:
        limit = bars.Limit(room, f"device memory {BYTES.show(room)}")
    rows = _by_stage(compiled.program, peaks(compiled, found))
    return _bars(rows, svg.CATEGORIES, "Memory at the peak by category", BYTES, limit)


def work(compiled: CompiledRun, numbers: Summary) -> Draw:
    """FLOPs of a rank by phase as bars."""
    of_classes = [
        (of, {phase: each["flops"][phase] for phase in PHASES})
        for of, each in zip(compiled.program.classes, numbers["rank_classes"], strict=True)
    ]
    rows = _by_stage(compiled.program, of_classes)
    return _bars(rows, svg.PHASES, "FLOPs of a rank by phase", FLOPS)


def bytes_by_axis(numbers: Summary) -> Draw | None:
    """Bytes along each axis as bars, of the rank that sends most along it; None: all send none."""
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
        return None
    rows = [bars.StackedBar(axis, phases) for axis, phases in sorted(most.items())]
    return _bars(rows, svg.PHASES, "Bytes by axis and phase", BYTES)
