"""Errors of `serve --compare`: a server's log, or a client's result, and its simulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Float
from stagewright.errors import UserError
from stagewright.serving.metrics import RequestTimes
from stagewright.serving.simulation import Outcome
from stagewright.serving.workloads.clients import figures_of, rates_of
from stagewright.serving.workloads.traces import read_file, summary_of

FIGURES = {"mean": None, "p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
"""Figures of request times: the mean, and percentiles."""
TIMES = ("ttft", "tpot", "e2e")


class ComparedFigure(NamedTuple):
    """Measured and predicted figure: of request times (s), or a rate (1/s)."""

    name: str
    """ttft, tpot or e2e; requests/s or output tokens/s."""
    figure: str
    """The mean or a percentile; empty for a rate."""
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted over measured, less 1; nan where nothing was measured."""
        return self.predicted / self.measured - 1 if self.measured else float("nan")


@dataclass(frozen=True, eq=False)
class MeasuredRun:
    """Figures and times of a log, or of the result of a benchmark client (s)."""

    figures: Mapping[tuple[str, str], float]
    """Figures by name of the time (ttft, tpot, e2e) and of the figure (mean, p50, ...)."""
    times: Mapping[str, Float]
    """Times of requests by name, in order of arrival, nan where unknown; empty where only figures
    are known."""
    rates: Mapping[str, float]
    """Requests/s and output tokens/s, as far as the result of a client has them."""


def measured_run(path: str | Path) -> MeasuredRun:
    """Read a trace with `ttft`, and `e2e` or `latency`, or the result of a benchmark client.

    A request without times is one that nobody answered: it is served, and counts nowhere else.
    Raises UserError for a file without times.
    """
    summary = summary_of(path)
    if summary is not None:
        return MeasuredRun(figures_of(summary), {}, rates_of(summary))
    file = read_file(path)
    rows = file.rows
    ttft, e2e = (np.array([getattr(row, name) for row in rows]) for name in ("ttft", "e2e"))
    further_tokens = np.array([row.output - 1 for row in rows], dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot = np.where(further_tokens > 0, (e2e - ttft) / further_tokens, np.nan)
    times: dict[str, Float] = {"ttft": ttft, "tpot": tpot, "e2e": e2e}
    figures = {
        (time, figure): figure_of(known, figure)
        for time, column in times.items()
        if len(known := column[np.isfinite(column)])
        for figure in FIGURES
    }
    if not figures:
        raise UserError(
            f"{path}: has no times; wanted columns arrival, prompt and output as in a trace, and "
            "ttft or e2e (seconds)"
        )
    return MeasuredRun(figures, times, file.rates)


def compare(log: MeasuredRun, outcome: Outcome, requests: int) -> list[ComparedFigure]:
    """Figures of request times, measured and predicted.

    Requests without a time in the log do not count; where some were rejected here, all do. Raises
    UserError if the workload had fewer `requests` than the log.
    """
    logged = max(map(len, log.times.values()), default=0)
    if requests < logged:
        raise UserError(
            f"the log has {logged} requests, {requests} were served; leave out --num-prompts, so "
            "that the same requests are compared"
        )
    times, figures = RequestTimes.of(outcome), log.figures
    compared: list[ComparedFigure] = []
    for time in TIMES:
        predicted = getattr(times, time)
        finite = np.isfinite(predicted)
        measured = log.times.get(time)
        if measured is not None and len(measured) == len(outcome.workload):
            finite &= np.isfinite(measured[times.number])
        if finite.any():
            compared += [
                ComparedFigure(
                    time, figure, figures[time, figure], figure_of(predicted[finite], figure)
                )
                for figure in FIGURES
                if (time, figure) in figures
            ]
    return compared


def compare_rates(log: MeasuredRun, outcome: Outcome) -> list[ComparedFigure]:
    """Rates that the log has, measured and predicted, from the first arrival to the last token."""
    times = RequestTimes.of(outcome)
    if not len(times.number):
        return []
    seconds = float(times.finish.max() - np.nanmin(outcome.records.arrival))
    totals = {"requests/s": len(times.number), "output tokens/s": int(times.output.sum())}
    return [
        ComparedFigure(rate, "", measured, totals[rate] / seconds)
        for rate, measured in log.rates.items()
    ]


def figure_of(values: Float, figure: str) -> float:
    """The mean or a percentile of values."""
    share = FIGURES[figure]
    return float(values.mean() if share is None else np.quantile(values, share))
