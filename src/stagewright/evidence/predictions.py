"""Predictions beside measurements, and statistics of their errors by source."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np

from stagewright.texttable import Table


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


class _Compared(Protocol):
    """A prediction of any quantity beside its measurement."""

    @property
    def source(self) -> str: ...
    @property
    def row(self) -> str: ...
    @property
    def error(self) -> float: ...


class ErrorSummary(NamedTuple):
    """The errors of the predictions of one source."""

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


def table(predictions: Iterable[Prediction], title: str = "Predictions") -> Table:
    """The predictions as a table, one row each, without the reasons."""
    rows = [*predictions]
    names = [name for name in Prediction._fields if name != "reason"]
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


def errors_by_source(predictions: Iterable[_Compared]) -> list[ErrorSummary]:
    """The errors of the predictions of each source, in the order of the predictions."""
    by_source: dict[str, list[_Compared]] = {}
    for prediction in predictions:
        by_source.setdefault(prediction.source, []).append(prediction)
    return [_summarize(source, group) for source, group in by_source.items()]


def _summarize(source: str, predictions: list[_Compared]) -> ErrorSummary:
    errors = np.array([prediction.error for prediction in predictions])
    worst = max(predictions, key=lambda prediction: abs(prediction.error))
    return ErrorSummary(
        source,
        len(errors),
        float(np.abs(errors).mean()),
        float(np.median(np.abs(errors))),
        float(errors.mean()),
        (worst.row, worst.error),
    )
