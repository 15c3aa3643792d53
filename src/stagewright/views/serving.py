"""What a cluster that serves requests does, as tables."""

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


def latencies(of: ServingSummary) -> Table:
    """Times of requests, a row for each kind."""
    columns: dict[str, list[Any]] = {"time": [], "": []}
    names = ("mean", "p50", "p90", "p99")
    columns |= {name: [] for name in names}
    rows: list[tuple[str, str, Spread | None]] = [
        (name, "in this stage", spread) for name, spread in of.stages.items()
    ]
    for time, words in _TIMES.items():
        name = time if time in ("queue", "transfer") else time.upper()
        rows.append((name, words, getattr(of, time)))
    for name, words, spread in rows:
        if spread is None or spread.mean != spread.mean:  # none: all outputs have one token
            continue
        columns["time"].append(name)
        columns[""].append(words)
        for name in names:
            columns[name].append(getattr(spread, name))
    return Table("Times of requests", columns, dict.fromkeys(names, "s"))


def compared(of: Sequence[ComparedFigure]) -> Table:
    """Means and percentiles of a log beside those of the same requests served here."""
    columns: dict[str, list[Any]] = {
        "time": [each.name.upper() for each in of],
        "figure": [each.figure for each in of],
    }
    return Table("Compared with the log", columns | _both(of), _SECONDS, grouped="time")


def compared_rates(of: Sequence[ComparedFigure]) -> Table:
    """Rates of a client's result beside those of the same load served here."""
    columns = {"rate": [each.name for each in of]} | _both(of)
    return Table("Rates over the whole run", columns, {**_SECONDS, **_RATES})


_SECONDS = {"measured": "s", "predicted": "s", "error": "error"}
_RATES = {"measured": "figure", "predicted": "figure"}


def _both(of: Sequence[ComparedFigure]) -> dict[str, list[Any]]:
    """Columns of measured and predicted figures."""
    return {
        "measured": [each.measured for each in of],
        "predicted": [each.predicted for each in of],
        "error": [each.error for each in of],
    }


def per_engine(of: ServedRun) -> Table:
    """Requests, preemptions and use of the cache, a row for each engine."""
    records = of.outcome.records
    engine, of_prompts = np.array(records.engine), np.array(records.engine)
    if of.outcome.handover is not None:
        of_prompts = np.array(of.outcome.handover.engine)
    preempted, cached = np.array(records.preempted), np.array(records.cached)
    prompt = np.array(of.outcome.workload.prompt)
    finish = np.array(records.finish)
    columns: dict[str, list[Any]] = {
        name: []
        for name in ("engine", "requests", "done", "preempted", "hits", "KV mean", "KV peak")
    }
    for nth, each in enumerate(of.outcome.engines):
        mine = (engine == nth) | (of_prompts == nth)
        share = np.array(each.samples.blocks) / each.kv_cache.size
        row = (
            nth,
            int(mine.sum()),
            int(np.isfinite(finish[mine]).sum()),
            int(preempted[mine].sum()),
            float(cached[mine].sum() / max(1, prompt[mine].sum())),
            float(share.mean()) if len(share) else 0.0,
            float(share.max()) if len(share) else 0.0,
        )
        for column, value in zip(columns.values(), row, strict=True):
            column.append(value)
    units = {"requests": "", "done": "", "preempted": "", "hits": "share"}
    return Table("Engines", columns, units | {"KV mean": "share", "KV peak": "share"})


def per_class(of: ServingSummary) -> Table:
    """Requests, times and goodput, a row for each class."""
    found = of.classes.values()
    columns: dict[str, list[Any]] = {
        "class": [*of.classes],
        "requests": [each.requests for each in found],
        "done": [each.done for each in found],
        "keep limits": [each.good for each in found],
    }
    for time in ("ttft", "tpot", "e2e"):
        for name in ("p50", "p99"):
            spreads = [getattr(getattr(each, time), name) for each in found]
            columns[f"{time.upper()} {name}"] = [None if s != s else s for s in spreads]
    units = {"requests": "", "done": "", "keep limits": "share"}
    return Table("Classes", columns, units | dict.fromkeys([*columns][4:], "s"))


def requests(of: ServedRun, slo: Slo) -> Table:
    """A row for each request that is done; seconds, tokens."""
    times = RequestTimes.of(of.outcome)
    work, records = of.outcome.workload, of.outcome.records
    rows = times.number

    def chosen(column: Any) -> list[Any]:
        return np.array(column)[rows].tolist()

    columns: dict[str, list[Any]] = {
        "request": rows.tolist(),
        "engine": chosen(records.engine),
        "arrival": chosen(records.arrival),
        "prompt": chosen(work.prompt),
        "output": chosen(work.output),
        "cached": chosen(records.cached),
        "preempted": chosen(records.preempted),
        "queue": times.queue.tolist(),
        "ttft": times.ttft.tolist(),
        "tpot": [None if t != t else t for t in times.tpot.tolist()],
        "e2e": times.e2e.tolist(),
        "good": (~times.missed(RequestLimits.of(work, slo)).any_limit).tolist(),
        "measured": of.summary.window.measures(np.array(records.arrival)[rows]).tolist(),
    }
    units: dict[str, str] = dict.fromkeys(("prompt", "output", "cached", "preempted"), "")
    units |= dict.fromkeys(("queue", "ttft", "tpot", "e2e"), "s")
    return Table("Requests", columns, units)
