"""A serving run in the Trace Event Format (JSON), for https://ui.perfetto.dev.

A process for each engine: its requests as slices that may overlap (queue, prompt, decode, and the
transfer of the cache between pools), and counters of requests that run and wait and of blocks of
the cache. Times are microseconds in whole nanoseconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from stagewright.serving.engine import Engine
from stagewright.serving.simulation import Outcome
from stagewright.views.perfetto import event, write_events


def write_serving(outcome: Outcome, path: Path | str, title: str = "") -> None:
    """Write a run to a file; one that ends in `.gz` is compressed, which Perfetto reads."""
    write_events(serving_events(outcome), path, title)


def serving_events(outcome: Outcome) -> Iterator[str]:
    """Every event as JSON."""
    for pid, engine in enumerate(outcome.engines):
        yield event(ph="M", pid=pid, tid=0, name="process_name", args={"name": f"engine {pid}"})
        yield event(ph="M", pid=pid, tid=0, name="process_sort_index", args={"sort_index": pid})
        yield from _counters(pid, engine)
    for request in range(len(outcome.workload)):
        yield from _request(outcome, request)


def _request(outcome: Outcome, request: int) -> Iterator[str]:
    """The slices of a request, of which those that have not ended are left out."""
    records, engine = outcome.records, outcome.records.engine[request]
    arrival, scheduled = records.arrival[request], records.scheduled[request]
    first, finish = records.first[request], records.finish[request]
    whole = [("queue", arrival, scheduled), ("prompt", scheduled, first), ("decode", first, finish)]
    tokens = {
        "prompt": outcome.workload.prompt[request],
        "output": outcome.workload.output[request],
        "cached": records.cached[request],
        "preempted": records.preempted[request],
    }
    parts = [(f"request {request}", arrival, finish), *whole]
    if outcome.handover is not None:
        begins, arrives = outcome.handover.begins[request], outcome.handover.arrives[request]
        parts.append(("transfer of the cache", begins, arrives))
    for name, begin, end in parts:
        if not (math.isfinite(begin) and math.isfinite(end)):
            continue
        where = {"cat": "request", "id": request, "pid": max(engine, 0), "tid": 0, "name": name}
        yield event(ph="b", ts=_micro(begin), **where, args=tokens)
        yield event(ph="e", ts=_micro(max(begin, end)), **where)


def _counters(pid: int, engine: Engine) -> Iterator[str]:
    """The sampled state of an engine."""
    for seconds, waiting, running, blocks in zip(*engine.samples[:4], strict=True):
        ts = _micro(seconds)
        yield event(ph="C", pid=pid, ts=ts, name="running", args={"requests": running})
        yield event(ph="C", pid=pid, ts=ts, name="waiting", args={"requests": waiting})
        yield event(ph="C", pid=pid, ts=ts, name="KV cache", args={"blocks": blocks})


def _micro(seconds: float) -> float:
    """Microseconds in whole nanoseconds."""
    return round(seconds * 1e9) / 1e3
