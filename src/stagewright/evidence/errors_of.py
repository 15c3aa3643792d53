"""A measurement beside its prediction, and what the errors of many are like."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from stagewright.texttable import Table


class Outcome(NamedTuple):
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


class Summary(NamedTuple):
    """Of the errors of some outcomes."""

    source: str
    rows: int
    mape: float
    median: float  # of the sizes of errors
    bias: float  # mean error, signed
    worst: tuple[str, float]


def table(outcomes: Iterable[Outcome], title: str = "Predictions") -> Table:
    """Outcomes for people, and to convert."""
    some = [*outcomes]
    columns = {
        name: [getattr(o, name) for o in some] for name in Outcome._fields if name != "reason"
    }
    return Table(title, columns, {"measured": "figure", "predicted": "figure", "error": "error"})


def totals(outcomes: Iterable[Outcome]) -> Table:
    """The errors of each source."""
    found = summary(outcomes)
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


def summary(outcomes: Iterable[Outcome]) -> list[Summary]:
    """Per source, in the order of the outcomes, and in all."""
    by_source: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_source.setdefault(outcome.source, []).append(outcome)
    return [_summary(source, some) for source, some in by_source.items()]


def _summary(source: str, outcomes: list[Outcome]) -> Summary:
    errors = np.array([o.error for o in outcomes])
    worst = max(outcomes, key=lambda o: abs(o.error))
    return Summary(
        source,
        len(errors),
        float(np.abs(errors).mean()),
        float(np.median(np.abs(errors))),
        float(errors.mean()),
        (worst.row, worst.error),
    )
