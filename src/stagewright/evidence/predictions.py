"""A measurement beside its prediction, and what the errors of many are like."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

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
    """Constants of ours that this row has fitted; empty: none."""
    reason: str
    """What is assumed, or why the prediction is off."""


class ErrorSummary(NamedTuple):
    """Of the errors of some predictions."""

    source: str
    rows: int
    mape: float
    median: float  # of the sizes of errors
    bias: float  # mean error, signed
    worst: tuple[str, float]


def table(predictions: Iterable[Prediction], title: str = "Predictions") -> Table:
    """Predictions for people, and to convert."""
    some = [*predictions]
    columns = {
        name: [getattr(o, name) for o in some] for name in Prediction._fields if name != "reason"
    }
    return Table(title, columns, {"measured": "figure", "predicted": "figure", "error": "error"})


def totals(predictions: Iterable[Prediction]) -> Table:
    """The errors of each source."""
    found = summary(predictions)
    columns = {
        "source": [s.source for s in found],
        "rows": [s.rows for s in found],
        "mean error": [s.mape for s in found],
        "median": [s.median for s in found],
        "bias": [s.bias for s in found],
        "worst": [f"{s.worst[1]:+.0%} {s.worst[0]}" for s in found],
    }
    units = {"rows": "", "mean error": "share", "median": "share", "bias": "error"}
    return Table("", columns, units)


def summary(predictions: Iterable[Prediction]) -> list[ErrorSummary]:
    """Per source, in the order of the predictions, and in all."""
    by_source: dict[str, list[Prediction]] = {}
    for prediction in predictions:
        by_source.setdefault(prediction.source, []).append(prediction)
    return [_summary(source, some) for source, some in by_source.items()]


def _summary(source: str, predictions: list[Prediction]) -> ErrorSummary:
    errors = np.array([o.error for o in predictions])
    worst = max(predictions, key=lambda o: abs(o.error))
    return ErrorSummary(
        source,
        len(errors),
        float(np.abs(errors).mean()),
        float(np.median(np.abs(errors))),
        float(errors.mean()),
        (worst.row, worst.error),
    )
