"""The page of requests served over time: times, limits, timelines, percentiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from stagewright.arrays import Float
from stagewright.numbers import duration, plural
from stagewright.serving.deployment import ServedRun
from stagewright.serving.energy import ServingExpense
from stagewright.serving.engine import Engine
from stagewright.serving.metrics import RequestTimes, Slo, Spread
from stagewright.texttable import Table
from stagewright.views import serving as tables
from stagewright.views.pages.html import Card, Cards, Chart, PageSection, Paragraph, render
from stagewright.views.pictures.curves import Curve, curves, distributions
from stagewright.views.pictures.scales import NUMBER, SECONDS, SHARE

POINTS = 300
"""Points of a curve over time."""
MIN_ATTAINMENT = 0.9
"""Share of requests below which goodput is a problem (DistServe's attainment)."""


def serving_page(
    served: ServedRun,
    spent: ServingExpense,
    slo: Slo,
    title: str,
    run: str,
    compared: Sequence[Table] = (),
    known: Sequence[str] = (),
) -> str:
    """The page as HTML; `run` is what was served, and on what, in words.

    `compared`: tables of a measured log next to this run. `known`: sentences on errors to expect.
    """
    times, summary = RequestTimes.of(served.outcome), served.summary
    measured = times.take(summary.window.measures(times.arrival))
    tpot = measured.tpot[np.isfinite(measured.tpot)]
    ttft = {"TTFT": measured.ttft, "waiting": measured.queue}
    overloaded = summary.steadiness.overloaded
    head = [
        run,
        Paragraph(f"**{summary.verdict}**", "verdict") if overloaded else summary.verdict,
        summary.measured_span,
        Cards(_cards(served, spent, slo)),
        *(f"Accuracy: {text}" for text in known),
    ]
    distributions = [
        _distribution("Time to the first token", ttft, slo.ttft),
        _distribution("Time per output token", {"TPOT": tpot}, slo.tpot),
        _distribution("Time to the last token", {"E2E": measured.e2e}, slo.e2e),
    ]
    latencies = replace(tables.latencies(summary), title="")
    classes = [tables.per_class(summary)] if summary.classes else []
    sections = [
        PageSection("times", "Times of requests", [latencies, *classes], "Times"),
        PageSection("percentiles", "Percentiles", distributions),
        PageSection("timelines", "Timelines", [_queue(served), _cache(served)]),
        PageSection("engines", "Engines", [replace(tables.per_engine(served), title="")]),
    ]
    if compared := [table for table in compared if len(table)]:
        text = (
            "The same requests, as measured and as served here; errors are of the predicted "
            "figures."
        )
        heading = "Compared with the measured log"
        sections.insert(0, PageSection("compared", heading, [text, *compared], "Measured"))
    return render(title, head, sections)


def _cards(served: ServedRun, spent: ServingExpense, slo: Slo) -> list[Card]:
    """The key figures, with the limits in numbers and the one that binds."""
    of = served.summary
    per_gpu = f"{of.output_rate / of.gpus:,.4g} per GPU, {of.user_rate:,.4g} per user"
    shown = [
        _limited("TTFT", of.ttft, slo.ttft),
        _limited("TPOT", of.tpot, slo.tpot),
    ]
    if slo.e2e is not None:
        shown.append(_limited("E2E", of.e2e, slo.e2e))
    shown.append(Card("Throughput", f"{of.output_rate:,.4g}", f"output tokens/s; {per_gpu}"))
    if slo != Slo() or of.classes:
        attained = f"{of.good:.1%} of requests keep the limits"
        binds = f"; {of.binding} binds" if of.binding else ""
        state = "problem" if of.good < MIN_ATTAINMENT else ""
        shown.append(Card("Goodput", f"{of.goodput:,.4g}/s", attained + binds, state))
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
    """A state of each engine at the times of the grid; 0 after its last one."""
    grid = _grid(engines)
    columns: list[Float] = []
    for engine in engines:
        seconds = np.array(engine.samples.seconds)
        values = np.array(getattr(engine.samples, name), dtype=np.float64)
        columns.append(
            np.interp(grid, seconds, values, left=0.0, right=0.0) if len(seconds) else 0.0 * grid
        )
    return columns


def _queue(served: ServedRun) -> Chart:
    engines = served.outcome.engines
    grid = _grid(engines).tolist()
    lines = [
        Curve(words, grid, np.sum(_sampled(engines, name), axis=0).tolist(), name)
        for name, words in (("running", "requests that run"), ("waiting", "requests that wait"))
    ]
    label = "Requests over time"
    caption = (
        f"Requests that run and wait, of {plural(len(engines), 'engine', 'engines')} in total."
    )
    picture = curves(lines, label, ("time", SECONDS), ("requests", NUMBER), _shaded(served))
    return Chart(picture, caption + _about_shade(served))


def _cache(served: ServedRun) -> Chart:
    engines = served.outcome.engines
    grid = _grid(engines).tolist()
    used = [
        values / engine.kv_cache.size
        for engine, values in zip(engines, _sampled(engines, "blocks"), strict=True)
    ]
    lines = [Curve("mean of engines", grid, np.mean(used, axis=0).tolist(), "cache")]
    if len(engines) > 1:
        fullest = np.max(used, axis=0).tolist()
        lines.append(Curve("fullest engine", grid, fullest, "fullest cache"))
    label, up = "Use of the KV cache over time", ("blocks in use", SHARE)
    caption = "Share of the blocks of the KV cache that requests use."
    picture = curves(lines, label, ("time", SECONDS), up, _shaded(served))
    return Chart(picture, caption + _about_shade(served))


def _shaded(served: ServedRun) -> tuple[float, float] | None:
    """Ends of the measured window; None where the whole run is measured."""
    begins, ends, whole = served.summary.window
    return None if whole else (begins, ends)


def _about_shade(served: ServedRun) -> str:
    shade = " Shaded: before and after the measured window."
    return "" if served.summary.window.whole else shade


def _distribution(label: str, times: dict[str, Float], limit: float | None) -> Chart:
    caption = f"{label}: share of the measured requests that take no longer."
    values = next(iter(times.values()))
    if limit is not None and len(values):
        kept = float((values <= limit).mean())
        caption += f" {kept:.1%} keep the limit of {duration(limit)}."
    return Chart(distributions(times, label, limit), caption)
