"""Requests over time as `serve` prints them: lines and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from stagewright.numbers import duration, plural, quantity
from stagewright.serving.deployment import InstanceGroup, ServedRun
from stagewright.serving.energy import ServingExpense
from stagewright.serving.metrics import RequestTimes, Slo
from stagewright.texttable import Table
from stagewright.views.deviations import ESTIMATED, SOURCE, is_estimated
from stagewright.views.serving import latencies, per_class, per_engine

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
    return group.instance.run.model_copy(update={"mode": "train"}).describe()


def serving_text(
    run: ServedRun, group: InstanceGroup, slo: Slo, expense: ServingExpense, description: str
) -> Iterator[str | Table]:
    """Requests over time; `group` is the first group that decodes."""
    summary, workload = run.summary, run.outcome.workload
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


def serving_notes(run: ServedRun, groups: Sequence[InstanceGroup]) -> Iterator[str]:
    """Notes on requests left out or cut short, and on assumptions."""
    summary = run.summary
    group = next(group for group in groups if group.role != "prefill")
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
    if any(is_estimated(of.instance.machine.hardware) for of in groups):
        yield f"{ESTIMATED} ({SOURCE})"
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
