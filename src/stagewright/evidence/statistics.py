"""Statistics of the errors of predictions, by group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from stagewright.evidence.rows import Prediction, Traits
from stagewright.texttable import Table


class ErrorSummary(NamedTuple):
    """The errors of the predictions of one group, such as one source."""

    source: str
    rows: int
    mape: float
    """Mean absolute error, relative to the measurement."""
    median: float
    """Median absolute error."""
    bias: float
    """Mean signed error."""
    worst: tuple[str, float]
    """The row with the largest absolute error, and its signed error."""
    p90: float = 0.0
    """Absolute error that nine tenths of the rows stay below."""


def _kind(t: Traits) -> str:
    return "LoRA" if t.adapters else "MoE" if t.experts else "dense"


TOKENS = ((1024, "up to 1,024"), (4096, "up to 4,096"), (16384, "up to 16,384"))
GPUS = ((8, "up to 8"), (64, "9 to 64"), (512, "65 to 512"))


def _bounded(value: int, bounds: tuple[tuple[int, str], ...]) -> str:
    """The range that a number lies in, in words."""
    for most, words in bounds:
        if value <= most:
            return words
    return f"above {bounds[-1][0]:,}"


SWEEP = "nanotron"
"""The source with more than half of all rows, which would hide the others in a mean."""
GROUPS: dict[str, Callable[[Prediction, Traits], str]] = {
    "source": lambda o, t: f"{o.source}, {_kind(t)}",
    "model": lambda o, t: f"{_kind(t)}, {SWEEP}" if o.source == SWEEP else _kind(t),
    "accelerator": lambda o, t: t.hardware,
    "accelerator and precision": lambda o, t: f"{t.hardware}, {t.precision}, {_kind(t)}",
    "GPUs": lambda o, t: _bounded(t.gpus, GPUS),
    "tokens of a kernel": lambda o, t: _bounded(t.tokens, TOKENS),
}
"""Groupings of training rows, a table for each."""
LOW = "under a tenth of the peak"


def table(predictions: Iterable[Prediction], title: str = "Predictions") -> Table:
    """The predictions as a table, one row each, without the reasons."""
    rows = [*predictions]
    names = ("source", "row", "quantity", "measured", "predicted", "error", "fitted")
    columns = {name: [getattr(row, name) for row in rows] for name in names}
    return Table(title, columns, {"measured": "figure", "predicted": "figure", "error": "error"})


def totals(predictions: Iterable[Prediction]) -> Table:
    """The errors of each source as a table: number of rows, mean, median, bias and worst error."""
    summaries = errors_by_source(predictions)
    columns = {
        "source": [s.source for s in summaries],
        "rows": [s.rows for s in summaries],
        "mean error": [s.mape for s in summaries],
        "median": [s.median for s in summaries],
        "bias": [s.bias for s in summaries],
        "worst": [f"{s.worst[1]:+.0%} {s.worst[0]}" for s in summaries],
    }
    units = {"rows": "", "mean error": "share", "median": "share", "bias": "error"}
    return Table("", columns, units)


class GroupErrors(NamedTuple):
    """The errors of one group, and those of its rows that no constant may be fitted to."""

    by: str
    """Grouping of rows, a key of `GROUPS`."""
    group: str
    every: ErrorSummary
    held_out: ErrorSummary | None
    """None: the group has no such row."""


def grouped(predictions: Iterable[Prediction], by: str) -> list[GroupErrors]:
    """The errors of time of training rows by one of `GROUPS`.

    Rows of low utilization are groups of their own, after the others.
    """
    groups: dict[tuple[bool, str], list[Prediction]] = {}
    for o in predictions:
        if o.traits is not None:
            low = o.traits.low_utilization
            name = GROUPS[by](o, o.traits)
            name = f"{name}, {LOW}" if low and by == "source" else LOW if low else name
            groups.setdefault((low, name), []).append(o)
    result: list[GroupErrors] = []
    for key in sorted(groups, key=lambda k: (k[0], _order(k[1]))):
        rows = groups[key]
        held = [o for o in rows if o.traits and o.traits.held_out]
        result.append(
            GroupErrors(by, key[1], _of_time(key[1], rows), _of_time("", held) if held else None)
        )
    return result


def _of_time(group: str, rows: Sequence[Prediction]) -> ErrorSummary:
    return _summary(group, rows, [o.error_of_time for o in rows])


def _order(group: str) -> tuple[int, str]:
    """Ranges in their order, other groups by name."""
    ranges = [words for _, words in (*TOKENS, *GPUS)]
    return (ranges.index(group) if group in ranges else len(ranges), group)


def errors_by_group(predictions: Sequence[Prediction], by: str) -> Table:
    """The errors of training rows by one of `GROUPS` as a table; all rows, then those held out."""
    groups = grouped(predictions, by)
    held = [g.held_out for g in groups]
    columns = {
        by: [g.group for g in groups],
        "rows": [g.every.rows for g in groups],
        "mean error": [g.every.mape for g in groups],
        "median": [g.every.median for g in groups],
        "p90": [g.every.p90 for g in groups],
        "bias": [g.every.bias for g in groups],
        "held out": [h.rows if h else 0 for h in held],
        "their mean": [h.mape if h else None for h in held],
        "their bias": [h.bias if h else None for h in held],
    }
    units = {"rows": "", "mean error": "share", "median": "share", "p90": "share", "bias": "error"}
    return Table(
        "", columns, units | {"held out": "", "their mean": "share", "their bias": "error"}
    )


def errors_by_source(predictions: Iterable[Prediction]) -> list[ErrorSummary]:
    """The errors of the predictions of each source, in the order of the predictions."""
    by_source: dict[str, list[Prediction]] = {}
    for prediction in predictions:
        by_source.setdefault(prediction.source, []).append(prediction)
    return [_summary(source, rows, [o.error for o in rows]) for source, rows in by_source.items()]


def _summary(group: str, rows: Sequence[Prediction], signed: Sequence[float]) -> ErrorSummary:
    errors = np.array(signed)
    worst = int(np.abs(errors).argmax())
    return ErrorSummary(
        group,
        len(errors),
        float(np.abs(errors).mean()),
        float(np.median(np.abs(errors))),
        float(errors.mean()),
        (rows[worst].row, float(errors[worst])),
        float(np.quantile(np.abs(errors), 0.9)),
    )
