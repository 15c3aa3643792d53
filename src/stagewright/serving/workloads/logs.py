"""Logs of servers: requests as in a trace, and what their users saw."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shown
from typing import Any

import numpy as np

from stagewright.arrays import Float
from stagewright.errors import UserError
from stagewright.serving.workload import Workload
from stagewright.serving.workloads.traces import (
    NEGATIVE,
    NO_TOKENS,
    TraceRow,
    cells_of_trace,
    row_of_trace,
    text_of_trace,
    workload_of_rows,
)

_TTFT = {"ttft": 1.0, "ttft_s": 1.0, "time_to_first_token": 1.0, "ttft_ms": 1e-3}
_E2E = {
    **{"e2e": 1.0, "latency": 1.0, "e2e_latency": 1.0, "request_latency": 1.0, "e2e_s": 1.0},
    **{"e2e_ms": 1e-3, "latency_ms": 1e-3},
}
"""Names of columns: seconds of one."""


@dataclass(frozen=True, eq=False)
class RequestLog:
    """A log: its requests, and the time of each in seconds, nan where it is not known."""

    workload: Workload
    ttft: Float
    """Seconds to the first token."""
    tpot: Float
    """Seconds per token from the first token to the last."""
    e2e: Float
    """Seconds to the last token."""


def read_log(path: str | Path) -> RequestLog:
    """Read a log in JSONL or CSV: a trace with `ttft`, and `e2e` or `latency`.

    Times are seconds, of columns whose names end in `_ms` milliseconds. A row without times is a
    request that nobody answered: it is served, and counts nowhere else. Raises UserError for what
    is no log, with the line.
    """
    rejected: Counter[str] = Counter()
    rows: list[tuple[TraceRow, float, float]] = []
    for where, cells in cells_of_trace(text_of_trace(path), path):
        row = row_of_trace(cells, where)
        ttft, e2e = _time(cells, _TTFT, where), _time(cells, _E2E, where)
        if e2e < ttft:
            raise UserError(f"{where}: the last token comes before the first: {e2e:g} < {ttft:g} s")
        if row.prompt < 1 or row.output < 1:
            rejected[NO_TOKENS] += 1
        elif row.at < 0:
            rejected[NEGATIVE] += 1
        else:
            rows.append((row, ttft, e2e))
    rows.sort(key=lambda each: each[0].at)
    ttft, e2e = (np.array([each[n] for each in rows], dtype=np.float64) for n in (1, 2))
    if not np.isfinite(ttft).any() and not np.isfinite(e2e).any():
        raise UserError(
            f"{path}: has no times; wanted columns arrival, prompt and output as in a trace, and "
            "ttft or e2e (seconds)"
        )
    requests = [each[0] for each in rows]
    output = np.array([row.output for row in requests], dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot = np.where(output > 1, (e2e - ttft) / (output - 1), np.nan)
    return RequestLog(workload_of_rows(path, requests, rejected), ttft, tpot, e2e)


def _time(cells: Mapping[str, Any], names: Mapping[str, float], where: str) -> float:
    """Seconds; nan where the row has none."""
    name = next((name for name in names if name in cells), None)
    if name is None or cells[name] in ("", None):
        return math.nan
    try:
        value = float(cells[name])
    except (TypeError, ValueError):
        value = -1.0
    if math.isnan(value):
        return value
    if not 0 <= value < math.inf or isinstance(cells[name], bool):
        raise UserError(f"{where}: {name} is {shown(cells[name])}, wanted a time of 0 or more")
    return value * names[name]
