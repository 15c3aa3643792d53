"""Predictions beside measurements, and statistics of their errors by group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from stagewright.evidence.groups import GPUS, TOKENS, Traits, bounded
from stagewright.texttable import Table

RATES = ("tokens_s_gpu", "tflops_gpu", "tflops_gpu_full")
"""Quantities that are larger where a step is shorter."""


class Prediction(NamedTuple):
    """A measurement and its prediction; `error` is predicted / measured - 1."""

    source: str
    row: str
    quantity: str
    measured: float
    predicted: float
    error: float
    fitted: str
    """Constants of Stagewright that were fitted to this row; empty: none."""
    reason: str
    """What the run assumes, or why the prediction misses the measurement."""
    traits: Traits | None = None
    """What the row is grouped by; None: of a kernel or a collective."""

    @property
    def error_of_time(self) -> float:
        """The error of the time: positive where the prediction is slow, whatever was measured."""
        rate = self.quantity in RATES
        return self.measured / self.predicted - 1 if rate else self.error


class _Compared(Protocol):
    """A prediction of any quantity beside its measurement."""

    @property
    def source(self) -> str: ...
    @property
    def row(self) -> str: ...
    @property
    def error(self) -> float: ...


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


SWEEP = "nanotron"
"""The source with more than half of all rows, which would hide the others in a mean."""
GROUPS: dict[str, Callable[[Prediction, Traits], str]] = {
    "source": lambda o, t: f"{o.source}, {_kind(t)}",
    "model": lambda o, t: f"{_kind(t)}, {SWEEP}" if o.source == SWEEP else _kind(t),
    "accelerator": lambda o, t: t.hardware,
    "accelerator and precision": lambda o, t: f"{t.hardware}, {t.precision}, {_kind(t)}",
    "GPUs": lambda o, t: bounded(t.gpus, GPUS),
    "tokens of a kernel": lambda o, t: bounded(t.tokens, TOKENS),
}
"""What training rows are grouped by, a table for each."""
LOW = "under a tenth of the peak"


def table(predictions: Iterable[Prediction], title: str = "Predictions") -> Table:
    """The predictions as a table, one row each, without the reasons."""
    rows = [*predictions]
    names = [name for name in Prediction._fields if name not in ("reason", "traits")]
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
    """What rows are grouped by, a key of `GROUPS`."""
    group: str
    every: ErrorSummary
    held_out: ErrorSummary | None
    """None: the group has no such row."""


def grouped(predictions: Iterable[Prediction], by: str) -> list[GroupErrors]:
    """The errors of time of training rows by one of `GROUPS`.

    Rows of low utilization stand by themselves, behind the others.
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
    return _statistics(group, [o.row for o in rows], [o.error_of_time for o in rows])


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


def errors_by_source(predictions: Iterable[_Compared]) -> list[ErrorSummary]:
    """The errors of the predictions of each source, in the order of the predictions."""
    by_source: dict[str, list[_Compared]] = {}
    for prediction in predictions:
        by_source.setdefault(prediction.source, []).append(prediction)
    return [_summarize(source, group) for source, group in by_source.items()]


def _summarize(source: str, predictions: Sequence[_Compared]) -> ErrorSummary:
    return _statistics(source, [o.row for o in predictions], [o.error for o in predictions])


def _statistics(group: str, rows: Sequence[str], signed: Sequence[float]) -> ErrorSummary:
    errors = np.array(signed)
    worst = int(np.abs(errors).argmax())
    return ErrorSummary(
        group,
        len(errors),
        float(np.abs(errors).mean()),
        float(np.median(np.abs(errors))),
        float(errors.mean()),
        (rows[worst], float(errors[worst])),
        float(np.quantile(np.abs(errors), 0.9)),
    )
