"""The page of requests served over time: times, timelines, percentiles, and requests as bars."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stagewright.arrays import Float
from stagewright.numbers import duration, plural
from stagewright.serving.deployment import ServedRun
from stagewright.serving.energy import ServingExpense
from stagewright.serving.engine import Engine
from stagewright.serving.metrics import RequestTimes, ServingSummary, Slo
from stagewright.version import __version__
from stagewright.views import serving as tables
from stagewright.views.pages.cards import Card
from stagewright.views.pages.charts import Chart, chart
from stagewright.views.pages.templates import render
from stagewright.views.pictures.chart import SECONDS, SHARE, Measure
from stagewright.views.pictures.curves import (
    MOST_BARS,
    Curve,
    RequestBar,
    curves,
    percentiles,
    requests_over_time,
)

POINTS = 300
"""Moments of a timeline."""


def _number(value: float) -> str:
    return f"{value:,.4g}"


_REQUESTS = Measure("", _number)


def serving_page(of: ServedRun, spent: ServingExpense, slo: Slo, title: str, run: str) -> str:
    """The page as HTML; `run` is what was served, and on what, in words."""
    times = RequestTimes.of(of.outcome)
    return render(
        "serving.html",
        title=title,
        run=run,
        cards=_cards(of.summary, spent),
        latencies=tables.latencies(of.summary),
        queue=_queue(of.outcome.engines),
        cache=_cache(of.outcome.engines),
        first=_percentiles(
            "first", "Time to the first token", {"TTFT": times.ttft, "queue": times.queue}, slo.ttft
        ),
        per_token=_percentiles(
            "token", "Time per output token", {"TPOT": times.tpot[np.isfinite(times.tpot)]},
            slo.tpot,
        ),
        whole=_percentiles("whole", "Time to the last token", {"E2E": times.e2e}, slo.e2e),
        requests=_requests(of, times),
        engines=tables.per_engine(of),
        version=__version__,
        data={},
    )  # fmt: skip


def _cards(of: ServingSummary, spent: ServingExpense) -> list[Card]:
    """The key figures."""
    per_gpu = f"{of.output_rate / of.gpus:,.4g} per GPU, {of.user_rate:,.4g} per user"
    shown = [
        Card("TTFT", duration(of.ttft.p50), f"median; {duration(of.ttft.p99)} at p99"),
        Card("TPOT", duration(of.tpot.p50), f"median; {duration(of.tpot.p99)} at p99"),
        Card("Throughput", f"{of.output_rate:,.4g}", f"output tokens/s; {per_gpu}"),
        Card("Goodput", f"{of.goodput:,.4g}/s", f"{of.good:.1%} of requests keep the limits"),
        Card("KV cache", f"{of.kv_mean:.1%}", f"in use on average, {of.kv_peak:.1%} at most"),
        Card("Energy", f"{spent.joules_per_token:.3g} J", "per output token"),
    ]
    usd = spent.usd_per_million_tokens
    if usd is not None:
        shown.append(Card("Cost", f"{usd:.3g} USD", "per million output tokens"))
    return shown


def _grid(engines: Sequence[Engine]) -> Float:
    last = max(
        (engine.samples.seconds[-1] for engine in engines if engine.samples.seconds), default=1.0
    )
    return np.linspace(0.0, last, POINTS)


def _sampled(engines: Sequence[Engine], name: str) -> list[Float]:
    """A state of each engine at the moments of the grid; none after its last one."""
    grid = _grid(engines)
    found: list[Float] = []
    for engine in engines:
        seconds = np.array(engine.samples.seconds)
        values = np.array(getattr(engine.samples, name), dtype=np.float64)
        found.append(
            np.interp(grid, seconds, values, left=0.0, right=0.0) if len(seconds) else 0.0 * grid
        )
    return found


def _queue(engines: Sequence[Engine]) -> Chart:
    grid = _grid(engines).tolist()
    some = [
        Curve(words, grid, np.sum(_sampled(engines, name), axis=0).tolist())
        for name, words in (("running", "requests that run"), ("waiting", "requests that wait"))
    ]
    return chart(
        lambda name, width: curves(
            some, "Requests over time", ("seconds", SECONDS), ("requests", _REQUESTS), width
        ),
        "queue",
        f"Requests that run and wait, of {plural(len(engines), 'engine', 'engines')} together.",
    )


def _cache(engines: Sequence[Engine]) -> Chart:
    grid = _grid(engines).tolist()
    used = [
        values / engine.blocks.size
        for engine, values in zip(engines, _sampled(engines, "blocks"), strict=True)
    ]
    some = [Curve("mean of engines", grid, np.mean(used, axis=0).tolist())]
    if len(engines) > 1:
        some.append(Curve("fullest engine", grid, np.max(used, axis=0).tolist()))
    return chart(
        lambda name, width: curves(
            some, "Use of the KV cache over time", ("seconds", SECONDS),
            ("blocks that requests hold", SHARE), width,
        ),
        "cache",
        "Share of the blocks of the KV cache that requests hold.",
    )  # fmt: skip


def _percentiles(name: str, label: str, times: dict[str, Float], limit: float | None) -> Chart:
    some = [percentiles(words, values) for words, values in times.items()]
    if limit is not None:
        some.append(Curve("limit", [0.0, 1.0], [limit, limit]))
    return chart(
        lambda _, width: curves(
            some, label, ("share of requests", SHARE), ("seconds", SECONDS), width
        ),
        name,
        f"{label}: so large a share of the requests has no longer one.",
    )


def _requests(of: ServedRun, times: RequestTimes) -> Chart:
    records = of.outcome.records
    count = len(times.number)
    some = np.unique(np.linspace(0, max(count - 1, 0), min(count, MOST_BARS)).astype(np.int64))
    rows: list[int] = times.number[some].tolist()
    bars: list[RequestBar] = []
    for row in rows:
        begins = (
            records.arrival[row], records.scheduled[row], records.first[row], records.finish[row],
        )  # fmt: skip
        bars.append(RequestBar(f"request {row}", begins))
    return chart(
        lambda name, width: requests_over_time(bars, name, "Requests over time", width),
        "requests",
        f"{plural(len(bars), 'request', 'requests')} of {count:,}, evenly by arrival: until the "
        "first step, until the first token, until the last.",
    )
