"""The page of a search: the best, the front, parallel coordinates, and the sensitivities."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from stagewright.arrays import Float, Int
from stagewright.search.objectives import front
from stagewright.explore.answer.ranking import Ranking, nothing_found
from stagewright.search.run_file import (
    hardware_file,
    hardware_file_name,
    is_packaged,
    run_file,
)
from stagewright.search.sensitivity import sensitivities
from stagewright.search.candidates import HARDWARE
from stagewright.search.enumeration import Found
from stagewright.numbers import duration, many, quantity
from stagewright.run.sections.declare import text_of
from stagewright.texttable import Table
from stagewright.version import __version__
from stagewright.views import search as tables
from stagewright.views.pages.charts import Chart, chart, front_caption
from stagewright.views.pages.templates import render
from stagewright.views.pictures.chart import BYTES, SECONDS
from stagewright.views.pictures.points import Coordinate, Point, parallel, scatter

MOST_POINTS = 400
"""Candidates that are drawn: all of the best and of the front, and others evenly."""
_SCALES = 9
"""Settings of parallel coordinates at most: those with most values."""


class _Shown(NamedTuple):
    """A candidate as the page lists it."""

    link: str
    title: str
    run_file: str


def page(found: Found, ranking: Ranking, notes: tuple[str, ...]) -> str:
    """The page as HTML; the sensitivities of the best are simulated for it, if there is one."""
    rows, names = _drawn(ranking), ranking.how.objectives
    run, table = "", None
    if not len(ranking.best):
        run = str(nothing_found(ranking))
    else:
        best = int(ranking.best[0])
        machine, at = ranking.rows.machine(best), float(ranking.figures.seconds[best])
        first = f"The best {tables.in_words(names[:1])} of the front: " if names[1:] else ""
        run = f"{first}{ranking.rows.describe(best)} on {machine}: {duration(at)} per step"
        table = _sensitivity_table(ranking, best)
    stopped = f"stopped: {tables.UNTIL_STOPPED}" if ranking.stopped else ""
    what = f"the Pareto front of {tables.in_words(names)}" if names[1:] else "the best"
    return render(
        "search.html",
        title=f"{ranking.rows.model.name}: {what} of {many(found.of, 'candidate', 'candidates')}",
        run=run,
        certainty=tables.certainty(ranking),
        notes=[*notes, *filter(None, (stopped, tables.listed(ranking)))],
        best=tables.best(ranking),
        removed=tables.removed(found.removed),
        combinations=found.combinations,
        front=_front_chart(ranking, rows) if len(rows) else None,
        coordinates=_coordinates(ranking, rows) if len(rows) else None,
        sensitivity=table,
        shown=[_shown(ranking, row) for row in rows.tolist()],
        systems=_systems(ranking, rows),
        version=__version__,
        data={},
    )


def _sensitivity_table(of: Ranking, row: int) -> Table:
    slopes = sensitivities(of.rows, row)
    return Table(
        "Percent by which the best step gets longer where a figure grows by 1%",
        {"figure": [*slopes], "percent": [f"{slope:+.3f}" for slope in slopes.values()]},
        {"percent": ""},
    )


def _drawn(of: Ranking) -> Int:
    """The candidates that are drawn, ascending: all that the page names, and others evenly."""
    known = np.flatnonzero(~np.isnan(of.figures.seconds))
    values = np.stack([of.figures.seconds[known], of.figures.peak[known].astype(float)], axis=1)
    kept = {*of.best[: tables.shown(of)].tolist(), *known[front(values)].tolist()}
    others = known[np.linspace(0, len(known) - 1, min(MOST_POINTS, len(known))).astype(int)]
    return np.array(sorted(kept | {*others.tolist()}), dtype=np.int64)


def _words(of: Ranking, row: int) -> str:
    seconds, peak = float(of.figures.seconds[row]), int(of.figures.peak[row])
    how = "" if of.figures.exact[row] else ", estimated"
    settings = tables.words(of.rows, row)
    return f"{settings}: {duration(seconds)}, {quantity(peak, 'B')}{how}"


def _shown(of: Ranking, row: int) -> _Shown:
    return _Shown(f"run-{row}", _words(of, row), run_file(of.rows, row))


def _systems(of: Ranking, rows: Int) -> dict[str, str]:
    """The files of hardware that run files name, by name."""
    systems = {id(each): each for each in (of.rows.hardware(row) for row in rows.tolist())}
    return {
        hardware_file_name(each): hardware_file(each)
        for each in systems.values()
        if not is_packaged(each)
    }


def _front_chart(of: Ranking, rows: Int) -> Chart:
    figures = of.figures
    values: Float = np.stack([figures.seconds[rows], figures.peak[rows].astype(float)], axis=1)
    marked = front(values)
    points = [
        Point((peak, seconds), _words(of, row), f"run-{row}", bool(on))
        for (seconds, peak), row, on in zip(
            values.tolist(), rows.tolist(), marked.tolist(), strict=True
        )
    ]
    limits = sorted({int(size) for size in figures.device_memory[rows].tolist() if size})[:4]
    caption = front_caption("candidate", "both time and memory", "run")
    if limits:
        caption += (
            f" The dashed {'line is' if len(limits) == 1 else 'lines are'} the memory of a device."
        )
    return chart(
        lambda name, width: scatter(
            points, "Step time and memory", ("memory of the fullest rank", BYTES),
            ("step", SECONDS), width, limits,
        ),
        "front",
        caption,
    )  # fmt: skip


def _coordinates(of: Ranking, rows: Int) -> Chart:
    """A line for each candidate through its settings, and through its time."""
    every = [(name, column) for name, column in of.rows.columns.items() if len(column.values) > 1]
    most = sorted(every, key=lambda item: -len(item[1].values))[:_SCALES]
    names = [name for name, _ in every if name in {name for name, _ in most}]
    scales: list[Coordinate] = []
    shares: list[Float] = []
    for name in names:
        column = of.rows.columns[name]
        ordered = sorted(range(len(column.values)), key=lambda code: _order(column.values[code]))
        rank = np.empty(len(ordered))
        rank[ordered] = np.arange(len(ordered)) / max(len(ordered) - 1, 1)
        shares.append(rank[column.codes[rows]])
        words = [_value(name, column.values[code]) for code in ordered]
        scales.append(Coordinate(name, words if len(words) <= 14 else [words[0], words[-1]]))
    seconds = of.figures.seconds[rows]
    low, high = float(seconds.min()), float(seconds.max())
    shares.append((seconds - low) / ((high - low) or 1))
    scales.append(Coordinate("step", [duration(low), duration(high)]))
    best = set(of.best[:5].tolist())
    lines = [
        Point(tuple(float(share[nth]) for share in shares), _words(of, row), f"run-{row}",
              row in best)
        for nth, row in enumerate(rows.tolist())
    ]  # fmt: skip
    caption = "A line for each candidate through its settings to its time; the five best stand out."
    return chart(
        lambda name, width: parallel(lines, scales, "Settings of candidates", width),
        "settings",
        caption,
    )


def _order(value: Any) -> tuple[bool, Any]:
    """Numbers by size before all else by name."""
    number = isinstance(value, int | float)
    return (not number, value if number else _value("", value))


def _value(name: str, value: Any) -> str:
    if name == HARDWARE:
        return value.name
    return "on" if value is True else "off" if value is False else text_of(value)
