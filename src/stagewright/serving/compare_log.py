"""Comparison of a server's log with the same requests simulated."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stagewright.arrays import Float
from stagewright.serving.metrics import RequestTimes
from stagewright.serving.simulation import Outcome
from stagewright.serving.workloads.logs import RequestLog

FIGURES = {"mean": None, "p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
"""Figures of request times: the mean, and percentiles."""


class ComparedTime(NamedTuple):
    """Measured and predicted figure of request times (s)."""

    time: str
    """ttft, tpot or e2e."""
    figure: str
    """mean, or a percentile."""
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted over measured, less 1; nan where nothing was measured."""
        return self.predicted / self.measured - 1 if self.measured else float("nan")


def compare(log: RequestLog, outcome: Outcome) -> list[ComparedTime]:
    """Each figure of each time that the log has, measured and predicted.

    Requests without a time in the log do not count; where some were rejected here, all do.
    """
    times = RequestTimes.of(outcome)
    all_served = len(outcome.workload) == len(log.workload)
    pairs = {
        "ttft": (log.ttft, times.ttft),
        "tpot": (log.tpot, times.tpot),
        "e2e": (log.e2e, times.e2e),
    }
    compared: list[ComparedTime] = []
    for name, (measured, predicted) in pairs.items():
        finite = np.isfinite(predicted)
        if all_served:
            finite &= np.isfinite(measured[times.number])
        of_log, ours = measured[np.isfinite(measured)], predicted[finite]
        if len(of_log) and len(ours):
            compared += [
                ComparedTime(name, figure, figure_of(of_log, figure), figure_of(ours, figure))
                for figure in FIGURES
            ]
    return compared


def figure_of(values: Float, figure: str) -> float:
    """The mean or a percentile of values."""
    share = FIGURES[figure]
    return float(values.mean() if share is None else np.quantile(values, share))
