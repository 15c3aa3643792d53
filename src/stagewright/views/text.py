"""Results as the commands print them: lines and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from stagewright.lower.compiled_run import CompiledRun
from stagewright.numbers import duration, plural, quantity, side_by_side
from stagewright.program.fit import Fit
from stagewright.run.experiment import describe
from stagewright.searching.ranking import Ranking
from stagewright.serving.deployment import InstanceGroup, ServedRun
from stagewright.serving.energy import ServingExpense
from stagewright.serving.metrics import RequestTimes, Slo
from stagewright.serving.search.answer import ServingRanking
from stagewright.texttable import Table
from stagewright.time.simulate.serving import Served, limiting
from stagewright.time.simulate.step import SimulatedStep, TracedStep
from stagewright.views import search as search_views
from stagewright.views import search_serving as serving_views
from stagewright.views import serving as serving_tables
from stagewright.views.advice import remarks
from stagewright.views.deviations import ESTIMATED, SOURCE, is_estimated
from stagewright.views.step_tables import parts, transfers
from stagewright.views.summary import hold_line, stored_line

MAX_ENGINES = 64
"""Engines that are printed one by one."""

Item = str | Table
"""A line, or a table."""


def title(step: SimulatedStep) -> str:
    """Run with its execution, and the machine."""
    return f"{describe(step.compiled.run, step.timeline.execution)} on {step.machine}"


def step_text(step: SimulatedStep, price: float | None = None) -> Iterator[Item]:
    """A simulated step: its time, where it goes, memory, power, remarks."""
    run, fit = step.compiled.run, step.fit
    yield title(step)
    if not fit.fits:
        yield memory_line(fit)
    yield from assumed_batch(step.compiled)
    uses = f"HFU {step.hfu:.1%}"
    if run.mode == "train":
        uses = (
            f"MFU {step.mfu:.1%} (causal {step.mfu_causal:.1%}), "
            f"{uses} (causal {step.hfu_causal:.1%})"
        )
    rate = step.tokens_per_second
    text = f"{quantity(round(rate), 'tokens')}/s, {rate / step.machine.gpus:,.1f} per GPU"
    if step.groups:
        text = "one of prefill and one of decode, whose layers wait for their cache"
    yield f"step {duration(step.seconds)}: {text}; {uses}"
    if run.mode != "train":
        yield stored_line(step.compiled)
    yield from _serving_lines(step)
    yield parts(step)
    yield transfers(step)
    if fit.fits:
        yield memory_line(fit)
    if step.compiled.capacity is not None:
        yield hold_line(step.compiled.capacity)
    yield _critical_path(step.critical_path, step.seconds)
    expense = step.expense(price)
    usd = expense.usd_per_million_tokens
    yield (
        f"power: {expense.watts_per_gpu:,.0f} W per GPU, {expense.joules_per_token:.3g} J per token"
        + ("" if usd is None else f"; {usd:.3g} USD per million tokens")
    )
    yield from map(str, remarks(step.compiled, step))


def traced_text(step: TracedStep, description: str) -> Iterator[Item]:
    """A simulated step of a recorded graph."""
    yield f"{description}; on {step.machine}"
    yield f"step {duration(step.seconds)}"
    yield parts(step)
    yield transfers(step)
    yield memory_line(step.fit)
    yield _critical_path(step.critical_path, step.seconds)


def assumed_batch(compiled: CompiledRun) -> Iterator[str]:
    """The global batch, unless the user gave it."""
    run = compiled.run
    if run.mode == "train" and run.unresolved().global_batch_size is None:
        yield (
            f"global batch {plural(run.global_batch_size or 0, 'sequence', 'sequences')}, assumed: "
            f"micro-batch-size {run.micro_batch_size} x dp {run.dp} x "
            f"{plural(run.microbatches, 'microbatch', 'microbatches')}; set --global-batch-size"
        )


def memory_line(fit: Fit) -> str:
    """Peak memory of the fullest GPU, and whether it fits."""
    peak, capacity = side_by_side(fit.peak, fit.device_memory, "B")
    seconds = fit.fullest.seconds
    time = "" if seconds is None else f", after {duration(seconds)}"
    return (
        f"memory: at most {peak} of {capacity}{'' if fit.fits else ': it does not fit'} "
        f"(pipeline rank {fit.fullest.rank_class.pipeline_rank}{time})"
    )


def _critical_path(path: Mapping[str, float], total: float) -> str:
    shares = [f"{name} {seconds / total:.1%}" for name, seconds in path.items() if total]
    return f"critical path: {', '.join(shares)}"


def _serving_lines(step: SimulatedStep) -> Iterator[str]:
    """Serving metrics of a step of inference: a line, or one for each of two groups."""
    if step.served is not None:
        yield f"{step.served.what}: {_rates(step.served)}"
    if not step.groups:
        return
    for group in step.groups:
        ranks = f"{group.first_rank}-{group.first_rank + group.gpus - 1}"
        memory = " of ".join(side_by_side(group.fit.peak, group.fit.device_memory, "B"))
        yield (
            f"{group.name} group: {plural(group.gpus, 'GPU', 'GPUs')} (ranks {ranks}), step "
            f"{duration(group.served.step_seconds)}, {_rates(group.served)}; memory {memory}"
            + ("" if group.fit.fits else ": it does not fit")
        )
    limit, balance = limiting(*(group.served for group in step.groups))
    if limit is None:
        yield f"limits: prefill while OSL is below {balance:,.1f}, decode above (--osl N)"
    else:
        yield f"limits: the {limit} group; both do as many requests at OSL {balance:,.1f}"


def _rates(served: Served) -> str:
    """Latencies and rates of requests."""
    words: list[str] = []
    if served.ttft_seconds is not None:
        words.append(f"TTFT {duration(served.ttft_seconds)} at ISL {served.isl:,.0f}")
    if served.tpot_seconds is not None:
        words.append(
            f"TPOT {duration(served.tpot_seconds)} at context {served.context_length:,.0f}"
        )
    words.append(plural(served.requests, "request", "requests"))
    if served.requests_per_second is not None:
        osl = "" if served.osl is None else f" at OSL {served.osl:,}"
        words.append(f"{served.requests_per_second:,.2f} requests/s{osl}")
    if served.output_tokens_per_second_per_user is not None:
        words.append(f"{served.output_tokens_per_second_per_user:,.1f} tokens/s per user")
    if served.what == "mixed":
        words.append(f"{served.output_tokens_per_second:,.1f} output tokens/s")
        words.append(f"{served.input_tokens_per_second:,.1f} input tokens/s")
    words.append(f"{served.tokens_per_second_per_gpu:,.1f} tokens/s per GPU")
    return ", ".join(words)


# ---- requests over time --------------------------------------------------------------------------


def group_words(group: InstanceGroup) -> str:
    """A group of instances in words."""
    count = group.engines.instances
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
) -> Iterator[Item]:
    """Requests over time; `group` is the first group that decodes."""
    summary, workload = run.summary, run.outcome.workload
    yield description
    tokens = quantity(group.blocks * group.instance.cache.block_size, "tokens")
    yield (
        f"KV cache of an engine: {tokens} ({group.blocks:,} blocks of "
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
    yield serving_tables.latencies(summary)
    if limits := _limits(run, slo):
        yield (
            f"goodput: {summary.goodput:,.2f} requests/s; {summary.good:.1%} of requests keep "
            f"{limits}"
            + (f"; {summary.binding} binds" if summary.binding and not summary.classes else "")
        )
        yield from _best_latencies(run, slo)
    if summary.classes:
        yield serving_tables.per_class(summary)
    if workload.after is not None:
        rate = RequestTimes.of(run.outcome).interactivity(workload)
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
        yield serving_tables.per_engine(run)


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


def serving_notes(run: ServedRun, groups: tuple[InstanceGroup, ...]) -> Iterator[str]:
    """Notes on requests left out or cut short, and on assumptions."""
    summary = run.summary
    group = next(group for group in groups if group.role != "prefill")
    for reason, count in summary.rejected.items():
        yield f"{plural(count, 'request', 'requests')} rejected: {reason}"
    if summary.shortened:
        outputs = plural(summary.shortened, "output", "outputs")
        yield f"{outputs} cut at max_model_len {group.max_model_len}"
    method = group.engines.speculative_method
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


# ---- searches ------------------------------------------------------------------------------------


def search_text(ranking: Ranking, description: str, seconds: float | None = None) -> Iterator[Item]:
    """The best of a search, the price of other choices, and how certain the result is."""
    names = ranking.options.objectives
    if len(names) > 1:
        yield (
            f"Pareto front of {search_views.in_words(names)}: {len(ranking.best):,} of "
            f"{ranking.simulated:,} simulated candidates, none of which another one beats in all "
            "of these"
        )
        yield f"the one with the best {search_views.in_words(names[:1])}: {description}"
    else:
        yield f"best: {description}"
    if ranking.stopped:
        yield f"stopped: {search_views.UNTIL_STOPPED}"
    yield search_views.best(ranking)
    if len(choices := search_views.choices(ranking)):
        yield choices
    for sentence in (
        search_views.headroom,
        search_views.tie,
        search_views.expected_error,
        search_views.missing_hardware,
    ):
        if text := sentence(ranking):
            yield text
    yield (
        f"{len(ranking):,} candidates, {ranking.simulated:,} of them simulated"
        + ("" if seconds is None else f", in {seconds:.1f} s")
    )
    yield search_views.certainty(ranking)


def serving_search_text(
    ranking: ServingRanking,
    load: str,
    removed: Table | None,
    limit: int | None = None,
    seconds: float | None = None,
) -> Iterator[Item]:
    """The winner of a search for serving, the choices that none dominates, and what was removed."""
    yield load
    yield f"best: {serving_views.answer(ranking)}"
    if ranking.stopped and ranking.best:
        yield f"stopped: {serving_views.UNTIL_STOPPED}"
    yield from serving_views.remarks(ranking)
    yield from serving_views.tables_of_best(ranking, limit)
    if removed is not None:
        yield removed
    yield (
        f"{ranking.candidates:,} candidates ({len(ranking.rows):,} layouts), "
        f"{len(ranking.choices):,} of them simulated"
        + ("" if seconds is None else f", in {seconds:.1f} s")
    )
