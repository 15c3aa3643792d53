"""Tables of requests served over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stagewright.serving.compare_log import ComparedFigure
from stagewright.serving.deployment import ServedRun
from stagewright.serving.metrics import RequestLimits, RequestTimes, ServingSummary, Slo, Spread
from stagewright.texttable import Table

_TIMES = {
    "queue": "until the first step",
    "transfer": "of the KV cache",
    "ttft": "to the first token",
    "tpot": "per token after it",
    "itl": "between two tokens",
    "e2e": "to the last token",
}


def latencies(summary: ServingSummary) -> Table:
    """Times of requests, a row for each kind."""
    columns: dict[str, list[Any]] = {"time": [], "": []}
    names = ("mean", "p50", "p90", "p99")
    columns |= {name: [] for name in names}
    rows: list[tuple[str, str, Spread | None]] = [
        (name, "in this stage", spread) for name, spread in summary.stages.items()
    ]
    for time, words in _TIMES.items():
        name = time if time in ("queue", "transfer") else time.upper()
        rows.append((name, words, getattr(summary, time)))
    for name, words, spread in rows:
        if spread is None or spread.mean != spread.mean:  # none: all outputs have one token
            continue
        columns["time"].append(name)
        columns[""].append(words)
        for name in names:
            columns[name].append(getattr(spread, name))
    return Table("Times of requests", columns, dict.fromkeys(names, "s"))


def compared(figures: Sequence[ComparedFigure]) -> Table:
    """Means and percentiles of a log next to those of the same requests served here."""
    columns: dict[str, list[Any]] = {
        "time": [figure.name.upper() for figure in figures],
        "figure": [figure.figure for figure in figures],
    }
    return Table("Compared with the log", columns | _both(figures), _SECONDS, grouped="time")


def compared_rates(figures: Sequence[ComparedFigure]) -> Table:
    """Rates of a client's result next to those of the same load served here."""
    columns = {"rate": [figure.name for figure in figures]} | _both(figures)
    return Table("Rates over the whole run", columns, {**_SECONDS, **_RATES})


_SECONDS = {"measured": "s", "predicted": "s", "error": "error"}
_RATES = {"measured": "figure", "predicted": "figure"}


def _both(figures: Sequence[ComparedFigure]) -> dict[str, list[Any]]:
    """Columns of measured and predicted figures."""
    return {
        "measured": [figure.measured for figure in figures],
        "predicted": [figure.predicted for figure in figures],
        "error": [figure.error for figure in figures],
    }


def per_engine(served: ServedRun) -> Table:
    """Requests, preemptions and use of the cache, a row for each engine."""
    records = served.outcome.records
    engine, of_prompts = np.array(records.engine), np.array(records.engine)
    if served.outcome.handover is not None:
        of_prompts = np.array(served.outcome.handover.engine)
    preempted, cached = np.array(records.preempted), np.array(records.cached)
    prompt = np.array(served.outcome.workload.prompt)
    finish = np.array(records.finish)
    columns: dict[str, list[Any]] = {
        name: []
        for name in ("engine", "requests", "done", "preempted", "hits", "KV mean", "KV peak")
    }
    for index, each in enumerate(served.outcome.engines):
        selected = (engine == index) | (of_prompts == index)
        share = np.array(each.samples.blocks) / each.kv_cache.size
        row = (
            index,
            int(selected.sum()),
            int(np.isfinite(finish[selected]).sum()),
            int(preempted[selected].sum()),
            float(cached[selected].sum() / max(1, prompt[selected].sum())),
            float(share.mean()) if len(share) else 0.0,
            float(share.max()) if len(share) else 0.0,
        )
        for column, value in zip(columns.values(), row, strict=True):
            column.append(value)
    units = {"requests": "", "done": "", "preempted": "", "hits": "share"}
    return Table("Engines", columns, units | {"KV mean": "share", "KV peak": "share"})


def per_class(summary: ServingSummary) -> Table:
    """Requests, times and goodput, a row for each class."""
    classes = summary.classes.values()
    columns: dict[str, list[Any]] = {
        "class": [*summary.classes],
        "requests": [of_class.requests for of_class in classes],
        "done": [of_class.done for of_class in classes],
        "keep limits": [of_class.good for of_class in classes],
    }
    for time in ("ttft", "tpot", "e2e"):
        for name in ("p50", "p99"):
            spreads = [getattr(getattr(of_class, time), name) for of_class in classes]
            columns[f"{time.upper()} {name}"] = [None if s != s else s for s in spreads]
    units = {"requests": "", "done": "", "keep limits": "share"}
    return Table("Classes", columns, units | dict.fromkeys([*columns][4:], "s"))


def requests(served: ServedRun, slo: Slo) -> Table:
    """A row for each request that is done; seconds, tokens."""
    times = RequestTimes.of(served.outcome)
    work, records = served.outcome.workload, served.outcome.records
    rows = times.number

    def chosen(column: Any) -> list[Any]:
        return np.array(column)[rows].tolist()

    columns: dict[str, list[Any]] = {
        "request": rows.tolist(),
        "engine": chosen(records.engine),
        "arrival": times.arrival.tolist(),
        "prompt": chosen(work.prompt),
        "output": chosen(work.output),
        "cached": chosen(records.cached),
        "preempted": chosen(records.preempted),
        "queue": times.queue.tolist(),
        "ttft": times.ttft.tolist(),
        "tpot": [None if t != t else t for t in times.tpot.tolist()],
        "e2e": times.e2e.tolist(),
        "good": (~times.missed(RequestLimits.of(work, slo)).any_limit).tolist(),
        "measured": served.summary.window.measures(times.arrival).tolist(),
    }
    units: dict[str, str] = dict.fromkeys(("prompt", "output", "cached", "preempted"), "")
    units |= dict.fromkeys(("queue", "ttft", "tpot", "e2e"), "s")
    return Table("Requests", columns, units)
