"""Requests served over time: tables, and the lines and tables that `serve` prints."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from stagewright.numbers import duration, finite, plural, quantity
from stagewright.serving.compare_log import ComparedFigure
from stagewright.serving.deployment import InstanceGroup, ServedRun
from stagewright.serving.disaggregation import RemoteKvEngine
from stagewright.serving.energy import ServingExpense
from stagewright.serving.metrics import RequestLimits, RequestTimes, ServingSummary, Slo, Spread
from stagewright.texttable import Table
from stagewright.views.accuracy import decoding
from stagewright.views.deviations import known_of_serving

_TIMES = {
    "queue": "sending to first step",
    "transfer": "of the KV cache",
    "ttft": "to the first token",
    "tpot": "per token after it",
    "itl": "between two tokens",
    "e2e": "to the last token",
}


def latencies(summary: ServingSummary) -> Table:
    """Times of requests, a row for each kind."""
    spreads: list[tuple[str, str, Spread | None]] = [
        (name, "in this stage", spread) for name, spread in summary.stages.items()
    ]
    for time, words in _TIMES.items():
        name = time if time in ("queue", "transfer") else time.upper()
        spreads.append((name, words, getattr(summary, time)))
    figures = ("mean", "p50", "p90", "p99")
    rows = [
        (name, words, *(getattr(spread, figure) for figure in figures))
        for name, words, spread in spreads
        if spread and not math.isnan(spread.mean)  # no TPOT: outputs have one token
    ]
    return Table.of_rows(
        "Times of requests", ("time", "", *figures), rows, dict.fromkeys(figures, "s")
    )


def compared(figures: Sequence[ComparedFigure]) -> Table:
    """Means and percentiles of a log next to those of the same requests served here."""
    names = ("time", "figure", *_COMPARED)
    rows = [(figure.name.upper(), figure.figure, *_compared(figure)) for figure in figures]
    return Table.of_rows("Compared with the log", names, rows, _COMPARED, "time")


def compared_rates(figures: Sequence[ComparedFigure]) -> Table:
    """Rates of a client's result next to those of the same load served here."""
    units = {**_COMPARED, "measured": "figure", "predicted": "figure"}
    rows = [(figure.name, *_compared(figure)) for figure in figures]
    return Table.of_rows("Rates over the whole run", ("rate", *_COMPARED), rows, units)


_COMPARED = {"measured": "s", "predicted": "s", "error": "error"}


def _compared(figure: ComparedFigure) -> tuple[float, float, float | None]:
    """Measured, predicted, error; no error where nothing was measured."""
    return figure.measured, figure.predicted, finite(figure.error)


def per_engine(served: ServedRun) -> Table:
    """Requests, preemptions and use of the cache, a row for each engine."""
    records, handover = served.outcome.records, served.outcome.handover
    engine = np.array(records.engine)
    of_prompts = engine if handover is None else np.array(handover.engine)
    preempted, cached = np.array(records.preempted), np.array(records.cached)
    prompt = np.array(served.outcome.workload.prompt)
    done = np.isfinite(np.array(records.finish))
    rows: list[tuple[Any, ...]] = []
    for index, each in enumerate(served.outcome.engines):
        selected = (engine == index) | (of_prompts == index)
        share = np.array(each.samples.blocks or [0]) / each.kv_cache.size
        rows.append(
            (
                index,
                each.role if isinstance(each, RemoteKvEngine) else "both",
                int(selected.sum()),
                int(done[selected].sum()),
                int(preempted[selected].sum()),
                float(cached[selected].sum() / max(1, prompt[selected].sum())),
                float(share.mean()),
                float(share.max()),
            )
        )
    units = dict.fromkeys(("requests", "done", "preempted"), "")
    units |= dict.fromkeys(("hits", "KV mean", "KV peak"), "share")
    table = Table.of_rows("Engines", ("engine", "for", *units), rows, units)
    return table if handover is not None else table.only("engine", *units)


def per_class(summary: ServingSummary) -> Table:
    """Requests, times and goodput, a row for each class."""
    times = [(time, name) for time in ("ttft", "tpot", "e2e") for name in ("p50", "p99")]
    rows = [
        (
            name,
            of_class.requests,
            of_class.done,
            of_class.good,
            *(finite(getattr(getattr(of_class, time), figure)) for time, figure in times),
        )
        for name, of_class in summary.classes.items()
    ]
    units = {"requests": "", "done": "", "keep limits": "share"}
    units |= {f"{time.upper()} {name}": "s" for time, name in times}
    return Table.of_rows("Classes", ("class", *units), rows, units)


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
        "tpot": [*map(finite, times.tpot.tolist())],
        "e2e": times.e2e.tolist(),
        "good": (~times.missed(RequestLimits.of(work, slo)).any_limit).tolist(),
        "measured": served.summary.window.measures(times.arrival).tolist(),
    }
    units: dict[str, str] = dict.fromkeys(("prompt", "output", "cached", "preempted"), "")
    units |= dict.fromkeys(("queue", "ttft", "tpot", "e2e"), "s")
    return Table("Requests", columns, units)


# ---- text ----------------------------------------------------------------------------------------

MAX_ENGINES = 64
"""Engines that are printed one by one."""


def group_words(group: InstanceGroup) -> str:
    """A group of instances in words."""
    count = group.settings.instances
    purpose = "" if group.role == "both" else f" for {group.role}"
    text = f"{layout_words(group)} on {group.instance.machine}"
    if count == 1 and not purpose:
        return text
    return f"{plural(count, 'instance', 'instances')}{purpose}, each {text}"


def layout_words(group: InstanceGroup) -> str:
    """The model, and settings of its layout that are not their default."""
    run = group.instance.run
    # `describe` leaves out the default mode; the run's own is that of no step (`Instance.run`).
    return run.model_copy(update={"mode": "train"}).describe()


def serving_text(
    run: ServedRun,
    groups: Sequence[InstanceGroup],
    slo: Slo,
    expense: ServingExpense,
    description: str,
) -> Iterator[str | Table]:
    """Requests over time, served by groups of instances."""
    summary, workload = run.summary, run.outcome.workload
    group = decoding(groups)
    yield f"{description}; {plural(summary.gpus, 'GPU', 'GPUs')}"
    tokens = quantity(group.num_blocks * group.instance.cache.block_size, "tokens")
    yield (
        f"KV cache of an engine: {tokens} ({group.num_blocks:,} blocks of "
        f"{group.instance.cache.block_size}); a step: at most {group.limits.tokens:,} tokens, "
        f"{group.limits.requests:,} requests"
    )
    yield (
        f"{plural(summary.requests, 'request', 'requests')} in {duration(summary.seconds)}, "
        f"{summary.measured_span}"
    )
    yield summary.verdict
    yield (
        f"throughput: {summary.request_rate:,.2f} requests/s, "
        f"{summary.output_rate:,.1f} output tokens/s, "
        f"{summary.output_rate / summary.gpus:,.1f} per GPU"
        + (f", {summary.user_rate:,.1f} per user" if np.isfinite(summary.user_rate) else "")
    )
    yield latencies(summary)
    if limits := _limits(run, slo):
        yield (
            f"goodput: {summary.goodput:,.2f} requests/s; {summary.good:.1%} of requests keep "
            f"{limits}"
            + (f"; {summary.binding} binds" if summary.binding and not summary.classes else "")
        )
        yield from _best_latencies(run, slo)
    if summary.classes:
        yield per_class(summary)
    if workload.predecessor is not None:
        rate = RequestTimes.of(run.outcome).interactivity
        yield (
            f"interactivity: {rate:,.1f} tokens/s per user, end to end (1 / p90 of E2E per output "
            "token)"
        )
    yield (
        f"queue: {summary.mean_waiting:,.2f} requests wait and {summary.mean_running:,.2f} run, on "
        f"average; {plural(summary.preemptions, 'preemption', 'preemptions')}"
    )
    yield (
        f"KV cache: {summary.kv_mean:.1%} in use on average, {summary.kv_peak:.1%} at most; "
        f"{summary.hit_rate:.1%} of prompt tokens were in it"
    )
    usd = expense.usd_per_million_tokens
    yield (
        f"power: {expense.watts_per_gpu:,.0f} W per GPU, {expense.joules_per_token:,.4g} J per "
        f"output token" + ("" if usd is None else f"; {usd:,.4g} USD per million output tokens")
    )
    if 1 < len(run.outcome.engines) <= MAX_ENGINES:
        yield per_engine(run)
    yield from (f"note: {text}" for text in accuracy_notes(groups))


def accuracy_notes(groups: Sequence[InstanceGroup]) -> list[str]:
    """Notes on the errors to expect."""
    return [f"Accuracy: {text}" for text in known_of_serving(groups)]


def _limits(run: ServedRun, slo: Slo) -> str:
    """Latency limits in words; empty if there are none."""
    if any(of.limited for of in run.outcome.workload.classes):
        return "the limits of their class"
    limits = {"TTFT": slo.ttft, "TPOT": slo.tpot, "E2E": slo.e2e}
    return ", ".join(f"{name} <= {duration(s)}" for name, s in limits.items() if s is not None)


def _best_latencies(run: ServedRun, slo: Slo) -> Iterator[str]:
    """The lowest latencies of all requests, if no request keeps the limits."""
    if run.summary.good or any(of.limited for of in run.outcome.workload.classes):
        return
    times = RequestTimes.of(run.outcome)
    lowest = {
        name: float(np.nanmin(values))
        for name in ("ttft", "tpot", "e2e")
        if getattr(slo, name) is not None and np.isfinite(values := getattr(times, name)).any()
    }
    if lowest:
        words = ", ".join(f"{name.upper()} {duration(seconds)}" for name, seconds in lowest.items())
        hint = ", but no request has all of these" if len(lowest) > 1 else ""
        yield f"the least of all requests: {words}{hint}"


def _beyond_measured_hosts(run: ServedRun, groups: Sequence[InstanceGroup]) -> Iterator[str]:
    """Notes on steps with more requests than hosts were measured with; `groups` in order.

    There is none where the GPU would hide a host that takes longer with more requests.
    """
    first = 0
    for group in groups:
        host, engines = group.host, run.outcome.engines[first : first + group.num_engines]
        first += group.num_engines
        known = host.max_requests
        steps = np.concatenate([engine.step_log.steps() for engine in engines])
        steps = steps[steps[:, 3] > known]
        unbounded = host.per_step + host.per_request_step * steps[:, 3]
        if len(steps) and not (host.overlaps_gpu and (unbounded <= steps[:, 0]).all()):
            yield (
                f"steps have up to {int(steps[:, 3].max()):,} requests; the host of "
                f"{group.scheduler_name} was measured with up to {known:,}, and is assumed to take "
                "no longer beyond these"
            )


def serving_notes(run: ServedRun, groups: Sequence[InstanceGroup]) -> Iterator[str]:
    """Notes on requests left out or cut short, and on assumptions."""
    summary = run.summary
    group = decoding(groups)
    for reason, count in summary.rejected.items():
        yield f"{plural(count, 'request', 'requests')} rejected: {reason}"
    if summary.shortened:
        outputs = plural(summary.shortened, "output", "outputs")
        yield f"{outputs} cut at max_model_len {group.max_model_len}"
    method = group.settings.speculative_method
    if method == "mtp":
        model = group.instance.model.name
        yield f"drafts come from a layer like the last one of {model}, used for each draft"
    elif group.drafts is not None and group.instance.drafter is None and method != "ngram":
        yield "speculative drafts are assumed free; set --speculative-method to time them"
    yield from _beyond_measured_hosts(run, groups)
    left = plural(summary.unfinished, "request was", "requests were")
    if run.outcome.stopped:
        yield (
            f"stopped: {left} not done; the numbers are of the others, and engines may have come "
            "to different times"
        )
    elif summary.unfinished:
        scheduler = group.scheduler
        pauses = getattr(scheduler, "capacity_scheduler_policy", "") == "max_utilization"
        unchunked = not getattr(scheduler, "enable_chunked_prefill", True)
        why = (
            "; TensorRT-LLM computes a paused request of more than "
            f"{group.limits.tokens:,} tokens again only with --enable-chunked-prefill"
        )
        yield f"{left} never done: the scheduler left them waiting" + why * (pauses and unchunked)
