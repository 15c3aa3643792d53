"""All candidates of a search as columns: their settings and figures, for CSV, JSON and Parquet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from stagewright.arrays import Int
from stagewright.run.sections import EXPERIMENT
from stagewright.run.sections.declare import text_of
from stagewright.searching.candidates import ABSENT, HARDWARE, Candidates
from stagewright.searching.machines import specs_of
from stagewright.searching.ranking import Ranking
from stagewright.texttable import Table
from stagewright.time.hardware import Hardware


class ColumnMeaning(NamedTuple):
    """What a column of all candidates holds."""

    unit: str
    meaning: str


COLUMNS: Mapping[str, ColumnMeaning] = {
    "SETTING": ColumnMeaning("", "a setting in which candidates differ"),
    "hardware": ColumnMeaning("", "the name of the hardware, where there are several"),
    "hardware.FIGURE": ColumnMeaning(
        "as its name says", "a figure of the hardware that `--vary` varies"
    ),
    "gpus": ColumnMeaning("", "GPUs: tp x cp x dp x pp"),
    "global_batch_size": ColumnMeaning("sequences", "the batch of a training step"),
    "seconds": ColumnMeaning("s", "time of a step"),
    "tokens": ColumnMeaning("", "new tokens of a step, over all GPUs"),
    "tokens_per_second": ColumnMeaning("1/s", "tokens over seconds, of all GPUs together"),
    "mfu": ColumnMeaning(
        "fraction", "model FLOPs utilization, 0 to 1, attention counted in full; training only"
    ),
    "mfu_causal": ColumnMeaning("fraction", "the same, attention counted without masked pairs"),
    "tflops": ColumnMeaning("TFLOP/s", "model FLOPs per second of a GPU, as `mfu` counts them"),
    "bubble": ColumnMeaning(
        "s",
        "the part of a step in which the mean GPU waits for other pipeline ranks (printed tables "
        "show shares)",
    ),
    "launches": ColumnMeaning(
        "s", "the part in which it waits for the host's launches; of simulated candidates alone"
    ),
    "exposed_AXIS": ColumnMeaning(
        "s",
        "the part of a step in which the mean GPU waits for communication along an axis, or "
        "(`exposed_dp+tp`) along several at once; of estimates along dp, or (`exposed_layers`) "
        "within layers",
    ),
    "peak": ColumnMeaning(
        "B", "what the fullest rank holds at its peak: the sum of all `memory_...`"
    ),
    "memory_CATEGORY": ColumnMeaning(
        "B", "tensors of one category at that peak; `memory_allowance` where a run has one"
    ),
    "device_memory": ColumnMeaning("B", "what a rank may hold"),
    "fits": ColumnMeaning("bool", "whether peak is at most device_memory"),
    "joules": ColumnMeaning("J", "energy of a step over all GPUs"),
    "usd": ColumnMeaning("USD", "cost of a step over all GPUs, where a price is known"),
    "simulated": ColumnMeaning(
        "bool", "true: the figures are those of `simulate`; false: all of them are estimates"
    ),
    "estimated_seconds": ColumnMeaning(
        "s", "the estimate of a step's time, also of simulated ones"
    ),
    "best": ColumnMeaning(
        "", "the place in the table of the best, from 1; with several objectives, on their front"
    ),
    "lower_bound": ColumnMeaning("s", "with `--exact`: a lower bound of the time of a step"),
}
"""Columns of `every` by name, in their order; words in capitals stand for several."""


def every(ranking: Ranking, indices: Int | None = None) -> Table:
    """Table of all candidates, or of some: settings that differ, and metrics (`COLUMNS`)."""
    rows = np.arange(len(ranking)) if indices is None else indices
    candidates, figures = ranking.candidates.take(rows), ranking.figures.take(rows)
    columns: dict[str, Any] = {}
    for name, column in candidates.columns.items():
        if len(column.values) > 1:
            cells = [_cell(name, value) for value in column.values]
            columns[name] = [cells[code] for code in column.codes.tolist()]
    columns |= _varied(candidates)
    evaluated = ~np.isnan(figures.seconds)

    def numbers(values: Any, *, present: Any = None) -> list[Any]:
        """Values, None where they are absent."""
        mask = ~np.isnan(values) if present is None else present
        pairs = zip(values.tolist(), mask.tolist(), strict=True)
        return [value if is_present else None for value, is_present in pairs]

    columns["gpus"] = candidates.world_size.tolist()
    if candidates.base.run.mode == "train":
        batch = candidates.numbers("global_batch_size")
        columns.setdefault("global_batch_size", numbers(batch, present=batch != ABSENT))
    place = {index: n + 1 for n, index in enumerate(ranking.listed.tolist())}
    exposed, memory = figures.exposed.items(), figures.memory.items()
    columns |= {
        "seconds": numbers(figures.seconds),
        "tokens": numbers(figures.tokens, present=evaluated),
        "tokens_per_second": numbers(figures.tokens_per_second),
        "mfu": numbers(figures.mfu),
        "mfu_causal": numbers(figures.mfu_causal),
        "tflops": numbers(figures.tflops),
        "bubble": numbers(figures.bubble),
        "launches": [ranking.launches.get(index) for index in rows.tolist()],
        **{f"exposed_{axis}": numbers(column, present=evaluated) for axis, column in exposed},
        "peak": numbers(figures.peak, present=evaluated),
        **{f"memory_{name}": numbers(column, present=evaluated) for name, column in memory},
        "device_memory": numbers(figures.device_memory, present=evaluated),
        "fits": numbers(figures.fits, present=evaluated),
        "joules": numbers(figures.joules),
        "usd": numbers(figures.usd),
        "simulated": figures.simulated.tolist(),
        "estimated_seconds": numbers(ranking.estimates.seconds[rows]),
        "best": [place.get(index) for index in rows.tolist()],
    }
    if ranking.bounds is not None:
        columns["lower_bound"] = numbers(ranking.bounds[rows])
    return Table("Candidates", columns)


def _varied(candidates: Candidates) -> dict[str, list[float | None]]:
    """Varied specs of the hardware, a column for each."""
    column = candidates.columns[HARDWARE]
    systems: tuple[Hardware, ...] = column.values
    if len(systems) < 2:
        return {}
    paths = dict.fromkeys(p for system in systems for p in candidates.varied.get(system.name, ()))
    specs = [specs_of(system) for system in systems]
    codes: list[int] = column.codes.tolist()
    return {f"hardware.{path}": [specs[code].get(path) for code in codes] for path in paths}


def _cell(name: str, value: Any) -> Any:
    if name == HARDWARE:
        return value.name
    return text_of(value) if EXPERIMENT[name].kind in (tuple, frozenset) else value
