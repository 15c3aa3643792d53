"""The page of a search: the best, the price of other choices, time and memory, sensitivities."""

from __future__ import annotations

import numpy as np

from stagewright.arrays import Float, Int
from stagewright.numbers import duration, many, quantity
from stagewright.searching.objectives import front
from stagewright.searching.ranking import Ranking, nothing_found
from stagewright.searching.run_file import hardware_file, hardware_file_name, is_packaged, run_file
from stagewright.searching.sensitivity import sensitivities
from stagewright.searching.space import Enumeration
from stagewright.texttable import Table
from stagewright.version import __version__
from stagewright.views import search as tables
from stagewright.views.pages.cards import Card
from stagewright.views.pages.charts import Chart, chart, front_caption
from stagewright.views.pages.templates import render
from stagewright.views.pictures.chart import BYTES, SECONDS
from stagewright.views.pictures.points import Point, scatter

MOST_POINTS = 400
"""Candidates in the chart: all that are listed and those of the front, and others evenly."""
SLOWEST = 3.0
"""Candidates that take this many times as long as the best are beyond the edge of the chart."""
LARGEST = 1.25
"""The same of those that need this many times the memory of the device."""


def page(enumeration: Enumeration, ranking: Ranking, notes: tuple[str, ...]) -> str:
    """The page as HTML; the sensitivities of the best are simulated for it, if there is one."""
    points, names, linked = _points(ranking), ranking.options.objectives, ranking.listed
    sentences = [f"stopped: {tables.UNTIL_STOPPED}"] if ranking.stopped else []
    best = int(ranking.best[0]) if len(ranking.best) else None
    if best is None:
        run = str(nothing_found(ranking))
    else:
        first = f"The best {tables.in_words(names[:1])} of the front: " if names[1:] else ""
        run = f"{first}{ranking.candidates.describe(best)} on {ranking.candidates.machine(best)}"
        linked = np.unique(np.concatenate([linked, points[_on_front(ranking, points)]]))
        sentences += [tables.tie(ranking), tables.headroom(ranking)]
    sentences.append(tables.expected_error(ranking))
    what = f"Pareto front of {tables.in_words(names)}" if names[1:] else "best execution"
    return render(
        "search.html",
        title=f"{ranking.candidates.model.name}: {what} on {_machines(ranking)}",
        run=run,
        cards=[] if best is None else _cards(ranking),
        certainty=tables.certainty(ranking),
        notes=[*notes, *filter(None, sentences)],
        best=tables.best(ranking),
        choices=None if best is None else tables.choices(ranking),
        removed=tables.removed(enumeration.removed),
        combinations=enumeration.combinations,
        front=_front_chart(ranking, points, {*linked.tolist()}) if len(points) else None,
        sensitivity=None if best is None else _sensitivity_table(ranking, best),
        shown=[
            (f"run-{row}", _words(ranking, row), run_file(ranking.candidates, row))
            for row in linked.tolist()
        ],
        systems=_systems(ranking, linked),
        version=__version__,
        data={},
    )


def _machines(ranking: Ranking) -> str:
    """The hardware and its number, where all candidates have the same."""
    rows = ranking.candidates
    worlds = np.unique(rows.world_size).tolist()
    names = list(dict.fromkeys(hardware.name for hardware in rows.columns["hardware"].values))
    gpus = f"{worlds[0]:,}" if len(worlds) == 1 else f"{worlds[0]:,} to {worlds[-1]:,}"
    return f"{gpus} {names[0] if len(names) == 1 else 'GPUs'}"


def _cards(ranking: Ranking) -> list[Card]:
    """Key figures of the best."""
    row, figures = int(ranking.best[0]), ranking.figures
    memory = f"of {quantity(int(figures.device_memory[row]), 'B')}"
    cards = [
        Card("Step time", duration(float(figures.seconds[row])), f"{figures.tokens[row]:,} tokens"),
        Card("Peak memory per GPU", quantity(int(figures.peak[row]), "B"), memory),
        Card(
            "Simulated",
            f"{ranking.simulated:,}",
            f"of {many(len(ranking), 'candidate', 'candidates')}",
        ),
    ]
    if not np.isnan(figures.mfu[row]):
        causal = f"causal attention {figures.mfu_causal[row]:.1%}"
        rate = f"{figures.tflops[row]:,.0f} TFLOP/s per GPU, {causal}"
        cards.insert(1, Card("MFU", f"{figures.mfu[row]:.1%}", rate))
    return cards


def _sensitivity_table(ranking: Ranking, row: int) -> Table:
    changes = sensitivities(ranking.candidates, row)
    return Table(
        "Change of the best step",
        {
            "figure": [*changes],
            "1% worse": [f"{change.worse:+.3%}" for change in changes.values()],
            "1% better": [f"{change.better:+.3%}" for change in changes.values()],
        },
        {"1% worse": "", "1% better": ""},
    )


def _points(ranking: Ranking) -> Int:
    """The candidates of the chart, ascending: those that are not far from the best."""
    figures = ranking.figures
    known = ~np.isnan(figures.seconds)
    if len(ranking.best):
        per_token = figures.seconds / np.maximum(figures.tokens, 1)
        known &= per_token <= SLOWEST * per_token[ranking.best[0]]
        known &= figures.peak <= LARGEST * figures.device_memory
    rows = np.flatnonzero(known)
    kept = {*ranking.listed.tolist(), *rows[_on_front(ranking, rows)].tolist()}
    others = rows[np.linspace(0, len(rows) - 1, min(MOST_POINTS, len(rows))).astype(int)]
    return np.array(sorted(kept | {*others.tolist()}), dtype=np.int64)


def _values(ranking: Ranking, rows: Int) -> Float:
    """Seconds and peak memory of some candidates: [candidates, 2]."""
    figures = ranking.figures
    return np.stack([figures.seconds[rows], figures.peak[rows].astype(np.float64)], axis=1)


def _on_front(ranking: Ranking, rows: Int) -> Int:
    """Positions of candidates that no other beats in both time and memory."""
    return np.flatnonzero(front(_values(ranking, rows))) if len(rows) else rows


def _words(ranking: Ranking, row: int) -> str:
    seconds, peak = float(ranking.figures.seconds[row]), int(ranking.figures.peak[row])
    mark = "" if ranking.figures.simulated[row] else ", estimated"
    settings = tables.words(ranking.candidates, row)
    return f"{settings}: {duration(seconds)}, {quantity(peak, 'B')}{mark}"


def _systems(ranking: Ranking, rows: Int) -> dict[str, str]:
    """Hardware files that run files refer to, by name."""
    candidates, files = ranking.candidates, dict[str, str]()
    for index in rows.tolist():
        hardware = candidates.hardware(index)
        name = hardware_file_name(hardware)
        if name not in files and not is_packaged(hardware):
            files[name] = hardware_file(candidates, index)
    return files


def _front_chart(ranking: Ranking, rows: Int, linked: set[int]) -> Chart:
    """Time and memory of candidates; a click leads to the run files of those that have one."""
    figures = ranking.figures
    marked = {*_on_front(ranking, rows).tolist()}
    points = [
        Point((peak, seconds), _words(ranking, row), f"run-{row}" * (row in linked), n in marked)
        for n, ((seconds, peak), row) in enumerate(
            zip(_values(ranking, rows).tolist(), rows.tolist(), strict=True)
        )
    ]
    limits = sorted({int(size) for size in figures.device_memory[rows].tolist() if size})[:4]
    caption = front_caption("candidate near the best", "both time and memory", "run")
    if limits:
        lines = "line is" if len(limits) == 1 else "lines are"
        caption += f" The dashed {lines} the memory of a device."
    return chart(
        lambda name, width: scatter(
            points, "Step time and memory", ("memory of the fullest rank", BYTES),
            ("step", SECONDS), width, limits,
        ),
        "front",
        caption,
    )  # fmt: skip
