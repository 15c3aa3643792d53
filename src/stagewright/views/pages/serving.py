"""The page of requests served over time: times, timelines, percentiles, and requests as bars."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stagewright.arrays import Float
from stagewright.numbers import duration, plural
from stagewright.serving.deployment import ServedRun
from stagewright.serving.energy import ServingExpense
from stagewright.serving.engine import Engine
from stagewright.serving.metrics import RequestTimes, Slo, Spread
from stagewright.version import __version__
from stagewright.views import serving as tables
from stagewright.views.pages.cards import Card
from stagewright.views.pages.charts import Chart, chart
from stagewright.views.pages.templates import render
from stagewright.views.pictures.chart import SECONDS, SHARE, Measure
from stagewright.views.pictures.curves import (
    INKS,
    MOST_BARS,
    Curve,
    RequestBar,
    curves,
    distributions,
    requests_over_time,
)

POINTS = 300
"""Moments of a timeline."""
FEW = 0.9
"""Share of requests below which goodput is a problem (DistServe's attainment)."""


def _number(value: float) -> str:
    return f"{value:,.4g}"


_REQUESTS = Measure("", _number)


def serving_page(of: ServedRun, spent: ServingExpense, slo: Slo, title: str, run: str) -> str:
    """The page as HTML; `run` is what was served, and on what, in words."""
    times = RequestTimes.of(of.outcome)
    arrival = np.array(of.outcome.records.arrival)[times.number]
    measured = times.take(of.summary.window.measures(arrival))
    finite = measured.tpot[np.isfinite(measured.tpot)]
    return render(
        "serving.html",
        title=title,
        run=run,
        measured=of.summary.measured_span,
        verdict=of.summary.verdict,
        overloaded=of.summary.steadiness.overloaded,
        cards=_cards(of, spent, slo),
        latencies=tables.latencies(of.summary),
        queue=_queue(of),
        cache=_cache(of),
        first=_distribution(
            "first", "Time to the first token", {"TTFT": measured.ttft, "queue": measured.queue},
            slo.ttft,
        ),
        per_token=_distribution("token", "Time per output token", {"TPOT": finite}, slo.tpot),
        whole=_distribution("whole", "Time to the last token", {"E2E": measured.e2e}, slo.e2e),
        requests=_requests(of, times),
        engines=tables.per_engine(of),
        version=__version__,
        data={},
    )  # fmt: skip


def _cards(run: ServedRun, spent: ServingExpense, slo: Slo) -> list[Card]:
    """The key figures, with the limits in numbers and the one that binds."""
    of = run.summary
    per_gpu = f"{of.output_rate / of.gpus:,.4g} per GPU, {of.user_rate:,.4g} per user"
    shown = [
        _limited("TTFT", of.ttft, slo.ttft),
        _limited("TPOT", of.tpot, slo.tpot),
    ]
    if slo.e2e is not None:
        shown.append(_limited("E2E", of.e2e, slo.e2e))
    shown.append(Card("Throughput", f"{of.output_rate:,.4g}", f"output tokens/s; {per_gpu}"))
    if slo != Slo() or of.classes:
        kept = f"{of.good:.1%} of requests keep the limits"
        binds = f"; {of.binding} binds" if of.binding else ""
        state = "problem" if of.good < FEW else ""
        shown.append(Card("Goodput", f"{of.goodput:,.4g}/s", kept + binds, state))
    shown += [
        Card("KV cache", f"{of.kv_mean:.1%}", f"in use on average, {of.kv_peak:.1%} at most"),
        Card("Energy", f"{spent.joules_per_token:.3g} J", "per output token"),
    ]
    usd = spent.usd_per_million_tokens
    if usd is not None:
        shown.append(Card("Cost", f"{usd:.3g} USD", "per million output tokens"))
    return shown


def _limited(name: str, times: Spread, limit: float | None) -> Card:
    """A latency beside its limit; red where more than a tenth of the requests miss it."""
    more = f"median; {duration(times.p90)} at p90, {duration(times.p99)} at p99"
    state = ""
    if limit is not None:
        more += f"; limit {duration(limit)}"
        state = "problem" if times.p90 > limit else ""
    value = duration(times.p50) if times.p50 == times.p50 else "none"
    return Card(name, value, more, state)


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


def _queue(of: ServedRun) -> Chart:
    engines = of.outcome.engines
    grid = _grid(engines).tolist()
    lines = [
        Curve(words, grid, np.sum(_sampled(engines, name), axis=0).tolist(), INKS[ink])
        for name, words, ink in (
            ("running", "requests that run", "running"), ("waiting", "requests that wait", "queue"),
        )
    ]  # fmt: skip
    return chart(
        lambda _, width: curves(
            lines, "Requests over time", ("time", SECONDS), ("requests", _REQUESTS), width,
            _shaded(of),
        ),
        "queue",
        f"Requests that run and wait, of {plural(len(engines), 'engine', 'engines')} together."
        + _ABOUT_SHADE * (not of.summary.window.whole),
    )  # fmt: skip


_ABOUT_SHADE = " Shaded: before and after the measured window."


def _shaded(of: ServedRun) -> tuple[float, float] | None:
    """Ends of the measured window; None where the whole run is measured."""
    begins, ends, whole = of.summary.window
    return None if whole else (begins, ends)


def _cache(of: ServedRun) -> Chart:
    engines = of.outcome.engines
    grid = _grid(engines).tolist()
    used = [
        values / engine.kv_cache.size
        for engine, values in zip(engines, _sampled(engines, "blocks"), strict=True)
    ]
    lines = [Curve("mean of engines", grid, np.mean(used, axis=0).tolist(), INKS["cache"])]
    if len(engines) > 1:
        fullest = np.max(used, axis=0).tolist()
        lines.append(Curve("fullest engine", grid, fullest, INKS["fullest cache"]))
    return chart(
        lambda _, width: curves(
            lines, "Use of the KV cache over time", ("time", SECONDS),
            ("blocks that requests hold", SHARE), width, _shaded(of),
        ),
        "cache",
        "Share of the blocks of the KV cache that requests hold."
        + _ABOUT_SHADE * (not of.summary.window.whole),
    )  # fmt: skip


def _distribution(name: str, label: str, times: dict[str, Float], limit: float | None) -> Chart:
    caption = f"{label}: share of the measured requests that take no longer."
    of = next(iter(times.values()))
    if limit is not None and len(of):
        kept = float((of <= limit).mean())
        caption += f" {kept:.1%} keep the limit of {duration(limit)}."
    return chart(lambda _, width: distributions(times, label, limit, width), name, caption)


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
