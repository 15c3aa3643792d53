"""Tables, text and page of a measured step beside a simulated one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from stagewright.numbers import duration, plural, spans
from stagewright.recorded.compare import ComparedSide, StepComparison, Total
from stagewright.recorded.rank import FAMILIES, chips_differ
from stagewright.recorded.steps import COMMUNICATION, IDLE, RecordedStep, window_notes
from stagewright.texttable import Table
from stagewright.views.pages.html import Chart, PageSection, Paragraph, Part, render
from stagewright.views.pages.html import sentence as page_sentence
from stagewright.views.pictures.colours import AXES, WAITING, WORK
from stagewright.views.pictures.svg import Fill
from stagewright.views.pictures.timeline import Strip, StripRow, picture_of_parts

FILLS: Mapping[str, Fill] = {
    "products": WORK["forward"],
    "attention": WORK["backward"],
    "norms": WORK["recompute"],
    "elementwise": WORK["decode"],
    "copies": WORK["optimizer"],
    "other kernels": Fill("#5B7FA6", "\\"),
    "transfers": AXES["tp"],
    "waiting": WAITING["bubble"],
    "launches": WAITING["launches"],
    "synchronisation": Fill("#D55E00", "-"),
    "idle": Fill("currentColor", "x", 0.1),
}
"""Parts of a step."""
_ROWS = 15
"""Rows of a table in text."""
_MATCHED = 0.25
"""Share of matched products below which a note asks for the model: a layer of Llama that fuses
query, key and value, and gate and up, on one side only, still has a third."""
_UNFUSED = 2.0
"""Multiple of the simulated kernels from which on operators are called unfused."""
_RANKS = 8
"""Ranks whose timelines are drawn."""


def sentence(comparison: StepComparison) -> str:
    """The step's difference as a sum of parts, in percent of the simulated step.

    Parts are rounded so that they add up.
    """
    ours = comparison.simulated.seconds
    total = comparison.measured.seconds - ours
    tenths = _rounded({p: s / ours * 1000 for p, s in comparison.difference.items()})
    shown = {part: tenth for part, tenth in tenths.items() if tenth}
    order = sorted(shown, key=lambda part: (-abs(shown[part]), part))
    parts = ", ".join(f"{part} {shown[part] / 10:+.1f}" for part in order)
    equal = f"{duration(comparison.measured.seconds)} measured, {duration(ours)} simulated"
    if not shown:
        return f"step {equal}: equal in all parts"
    return f"step {equal}: {sum(shown.values()) / 10:+.1f}% = {parts}" + (
        "" if total else " (which cancel)"
    )


def _rounded(values: Mapping[str, float]) -> dict[str, int]:
    """Whole numbers that add up to the rounded sum: those that lose most by it are rounded up."""
    floors = {key: int(value // 1) for key, value in values.items()}
    missing = round(sum(values.values())) - sum(floors.values())
    order = sorted(values, key=lambda key: (floors[key] - values[key], key))
    return {key: floors[key] + (key in order[:missing]) for key in values}


def text(comparison: StepComparison) -> Iterator[str | Table]:
    """Lines and tables of `stagewright compare`."""
    yield describe(comparison.measured)
    yield sentence(comparison)
    for name, make in TABLES.items():
        table = make(comparison)
        if len(table):
            limit = None if name in ("families", "idle") else _ROWS
            yield _first(table, limit)


def _first(table: Table, limit: int | None) -> Table:
    if limit is None or len(table) <= limit:
        return table
    columns = {name: values[:limit] for name, values in table.columns.items()}
    return Table(f"{table.title} (first {limit} of {len(table)})", columns, table.units)


def describe(side: ComparedSide) -> str:
    """Ranks, device and step of a recording."""
    first = side.steps[0]
    trace, ranks = first.trace, [step.trace.rank for step in side.steps]
    of = f" of {trace.world_size}" if trace.world_size else ""
    names = f"rank{'s' * (len(ranks) > 1)} {spans(ranks)}{of}"
    return f"measured: {names}, {trace.device or 'a device'}, {first.name or 'the whole trace'}"


def families(comparison: StepComparison) -> Table:
    """Kernels by family; times of kernels that run at once add up."""
    measured, simulated = comparison.measured.families, comparison.simulated.families
    names = [name for name in FAMILIES if name in measured or name in simulated]
    return _pairs("kernels by family", "family", names, measured, simulated)


def kernels(comparison: StepComparison) -> Table:
    """The mean product and attention of each size that both sides have; longest in total first."""
    measured, simulated = comparison.measured.kernels, comparison.simulated.kernels
    names = [name for name in measured if name in simulated]
    means = [{name: side[name].mean for name in names} for side in (measured, simulated)]
    return _pairs("one product or attention of each size on both sides", "kernel", names, *means)


def _pairs(
    title: str,
    label: str,
    names: list[str],
    measured: Mapping[str, Total],
    simulated: Mapping[str, Total],
) -> Table:
    rows: list[tuple[Any, ...]] = []
    for name in names:
        a, b = measured.get(name, Total()), simulated.get(name, Total())
        rows.append((name, a.number, a.seconds, b.number, b.seconds, _ratio(a, b)))
    columns = [label, "number", "measured", "number sim.", "simulated", "ratio"]
    units = {"number": "figure", "measured": "s", "number sim.": "figure", "simulated": "s"}
    return Table.of_rows(title, columns, rows, {**units, "ratio": "figure"})


def _ratio(measured: Total, simulated: Total) -> float | None:
    """Simulated over measured time; None where one side has none."""
    both = measured.seconds and simulated.seconds
    return simulated.seconds / measured.seconds if both else None


def transfers(comparison: StepComparison) -> Table:
    """Collectives and messages of both, with the waiting of each side."""
    measured, simulated = comparison.measured.transfers, comparison.simulated.transfers
    keys = sorted(
        {*measured, *simulated},
        key=lambda key: (-max(m.get(key, Total()).seconds for m in (measured, simulated)), key),
    )
    rows: list[tuple[Any, ...]] = []
    for kind, ranks, size in keys:
        a, b = (side.get((kind, ranks, size), Total()) for side in (measured, simulated))
        row = (a.number, a.seconds, a.waiting, b.number, b.seconds, b.waiting)
        rows.append((kind, ranks, size or None, *row, _ratio(a.mean, b.mean)))
    columns = [
        *("kind", "ranks", "size", "number", "measured", "waiting", "number sim."),
        *("simulated", "waiting sim.", "ratio"),
    ]
    units = {"ranks": "count", "size": "B", "number": "figure", "number sim.": "figure"}
    units |= dict.fromkeys(("measured", "waiting", "simulated", "waiting sim."), "s")
    return Table.of_rows("collectives and messages", columns, rows, {**units, "ratio": "figure"})


def idle(comparison: StepComparison) -> Table:
    """Time in which no kernel computes, by cause."""
    rows: list[tuple[Any, ...]] = []
    for cause in (*COMMUNICATION, *IDLE):
        a, b = (side.parts[cause] for side in (comparison.measured, comparison.simulated))
        if a or b:
            shares = a / comparison.measured.seconds, b / comparison.simulated.seconds
            rows.append((cause, a, shares[0], b, shares[1]))
    columns = ["no kernel computes", "measured", "share", "simulated", "share sim."]
    units = {"measured": "s", "share": "share", "simulated": "s", "share sim.": "share"}
    return Table.of_rows("idle time of the GPU by cause", columns, rows, units)


def unmatched(comparison: StepComparison) -> Table:
    """Products, attention and transfers that one side has and the other has not."""
    rows: list[tuple[Any, ...]] = []
    for name, side, other in (
        ("measured", comparison.measured, comparison.simulated),
        ("simulated", comparison.simulated, comparison.measured),
    ):
        rows += [
            (name, kernel, total.number, total.seconds)
            for kernel, total in side.kernels.items()
            if kernel not in other.kernels
        ]
        rows += [
            (name, f"{kind} of {size:,} B over {ranks}", total.number, total.seconds)
            for (kind, ranks, size), total in side.transfers.items()
            if (kind, ranks, size) not in other.transfers
        ]
    rows.sort(key=lambda row: -row[3])
    units = {"number": "figure", "time": "s"}
    return Table.of_rows("on one side only", ["side", "kernel", "number", "time"], rows, units)


def notes(comparison: StepComparison) -> list[str]:
    """What the recording lacks, and where the two sides are not of one run."""
    steps = comparison.measured.steps
    texts = [note for step in steps if not step.name for note in window_notes(step.trace)]
    texts += [note for step in steps for note in step.trace.notes]
    texts += _differences(comparison)
    bounds = comparison.measured.upper_bounds
    if bounds:
        texts.append(
            f"{plural(bounds, 'transfer includes', 'transfers include')} waiting: traces of the "
            "other ranks would tell them apart"
        )
    return list(dict.fromkeys(texts))


def _differences(comparison: StepComparison) -> Iterator[str]:
    """Why the sides may not be of one run: other GPU, products, or operators that are not fused."""
    devices = [s.steps[0].trace.device for s in (comparison.measured, comparison.simulated)]
    if chips_differ(*devices):
        yield f"traces are of {devices[0]}, the simulation is of {devices[1]}"
    matched = comparison.matched_products
    if matched is not None and matched < _MATCHED:
        yield (
            f"{matched:.0%} of the measured products' time has a simulated product of the same "
            "size: check model, batch and layout"
        )
    ours, theirs = comparison.simulated.brief_kernels, comparison.measured.brief_kernels
    if ours and theirs > _UNFUSED * ours:
        yield (
            f"the measured step launches unfused operators: {theirs:,.0f} norms and element-wise "
            f"kernels, {ours:,.0f} simulated"
        )


def page(comparison: StepComparison, title: str) -> str:
    """A page with the tables, and both steps on one scale."""
    longest = max(comparison.measured.seconds, comparison.simulated.seconds)
    pairs = zip(comparison.measured.steps, comparison.simulated.steps, strict=True)
    rows = [
        StripRow(f"{name}, rank {step.trace.rank}", _strips(step))
        for pair in list(pairs)[:_RANKS]
        for name, step in zip(("measured", "simulated"), pair, strict=True)
    ]
    head: list[Part] = [
        Paragraph(f"{page_sentence(sentence(comparison))}.", "verdict"),
        *(
            f"{page_sentence(text)}."
            for text in (describe(comparison.measured), *notes(comparison))
        ),
    ]
    parts = (
        "A column is divided as its time is: each moment belongs to one part. Transfers and "
        "waiting are those that no kernel hides."
    )
    tables = [table for make in TABLES.values() if len(table := make(comparison))]
    sections = [
        PageSection("time", "Time", [Chart(picture_of_parts(rows, FILLS, longest * 1e9)), parts]),
        PageSection("tables", "Tables", tables),
    ]
    return render(title, head, sections)


def _strips(step: RecordedStep) -> list[Strip]:
    """The parts of a step, in nanoseconds from its begin."""
    times: dict[str, list[tuple[int, int]]] = {part: [] for part in FILLS}
    for begin, end, part in step.segments:
        times[part].append((begin - step.begin, end - step.begin))
    return [Strip(part, *np.array(pairs).T) for part, pairs in times.items() if pairs]


TABLES: Mapping[str, Callable[[StepComparison], Table]] = {
    "families": families,
    "kernels": kernels,
    "transfers": transfers,
    "idle": idle,
    "unmatched": unmatched,
}
"""Tables of a comparison, by name."""
