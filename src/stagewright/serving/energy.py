"""Energy of a serving run: what its steps draw, and what GPUs draw that wait.

Steps of decode of a few sizes, and one of a prompt, are compiled and simulated, which says what a
GPU draws meanwhile (`time.power`). Steps of other sizes draw what lies between. The
seconds of steps are those that the engines noted; what a step with prompts takes longer than its
decode alone is taken to draw what prompts do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Float
from stagewright.lower.compile import compile
from stagewright.run.lengths import Group
from stagewright.serving.deployment import InstanceGroup, ServedRun
from stagewright.serving.engine import Engine
from stagewright.serving.instance import Instance
from stagewright.serving.steps.step_times import batch_run
from stagewright.time.power import idle_watts
from stagewright.time.simulate.step import simulate

BATCHES = 4
"""Sizes of steps of decode that are simulated."""


class ServingExpense(NamedTuple):
    """Energy and cost of a run."""

    joules: float
    """Energy of all GPUs from the first arrival to the last token (J)."""
    watts_per_gpu: float
    """Mean of a GPU and its share of the node."""
    joules_per_token: float
    """Energy per output token (J)."""
    usd_per_million_tokens: float | None
    """Cost of a million output tokens (USD); None without a price."""


@dataclass(frozen=True, slots=True)
class _Draws:
    """Power of a GPU by requests in a decode step, and in a prefill step (W)."""

    requests: Float
    decode: Float
    prompt: float
    idle: float

    def joules(self, engine: Engine, times: _StepSeconds, seconds: float) -> float:
        """Energy of one GPU that an engine holds for `seconds` (J)."""
        rows = engine.step_log.steps()
        first, last, steps, requests = (rows[:, n] for n in range(4))
        durations = (first + last) / 2 * steps
        decode_part = np.where(steps > 1, durations, np.minimum(durations, times.decode(requests)))
        power = np.interp(requests, self.requests, self.decode)
        busy = (
            float((decode_part * power).sum())
            + float((durations - decode_part).sum()) * self.prompt
        )
        return busy + max(seconds - float(durations.sum()), 0.0) * self.idle


class _StepSeconds(NamedTuple):
    """Seconds of steps, at a mean context."""

    instance: Instance
    context: int

    def decode(self, requests: Float) -> Float:
        """Durations of decode steps with some numbers of requests; none takes no time."""
        counts = np.unique(requests).astype(int)
        times, context = self.instance.times, self.context
        seconds = [times.decode(n, n * context) if n else 0.0 for n in counts.tolist()]
        return np.interp(requests, counts, seconds) if len(counts) else requests


def serving_expense(
    run: ServedRun, groups: Iterable[InstanceGroup], price: float | None = None
) -> ServingExpense:
    """Energy and cost of a run; `services` in the order of their engines.

    `price` is in USD per GPU and hour; None takes each hardware's.
    """
    summary, work = run.summary, run.outcome.workload
    tokens = max(summary.output_rate * summary.seconds, 1.0)
    prompt = max(1, round(float(np.mean(work.prompt))))
    context = prompt + round(float(np.mean(work.output)) / 2)
    joules, gpus, usd, first = 0.0, 0.0, 0.0, 0
    up = _seconds_up(run)
    for group in groups:
        instance, hardware = group.instance, group.instance.machine.hardware
        count = group.engines.instances * instance.replicas
        engines = run.outcome.engines[first : first + count]
        draws, times = _draws(instance, engines, context), _StepSeconds(instance, context)
        per_hour = hardware.price_usd_per_gpu_hour if price is None else price
        for number, engine in enumerate(engines, first):
            seconds, share = up.get(number, summary.seconds), instance.gpus / instance.replicas
            joules += draws.joules(engine, times, seconds) * share
            gpus_up = share * (seconds / max(summary.seconds, 1e-12))
            gpus += gpus_up
            usd += float("nan") if per_hour is None else per_hour * gpus_up
        first += count
    cost = usd * summary.seconds / 3600 / tokens * 1e6
    return ServingExpense(
        joules,
        joules / max(summary.seconds, 1e-12) / (gpus or 1),
        joules / tokens,
        None if cost != cost else cost,
    )


def _seconds_up(run: ServedRun) -> dict[int, float]:
    """Seconds in which engines were up, by number; empty where all were from first to last."""
    if not run.outcome.up:
        return {}
    first = min((at for at in run.outcome.records.arrival if at == at), default=0.0)
    last = first + run.summary.seconds
    seconds = dict.fromkeys(range(len(run.outcome.engines)), 0.0)
    for engine, begins, ends in run.outcome.up:
        seconds[engine] += max(0.0, min(ends, last) - max(begins, first))
    return seconds


def _draws(instance: Instance, engines: Iterable[Engine], context: int) -> _Draws:
    """Power of GPUs in steps of the sizes that engines ran."""
    max_requests = max(
        (float(e.step_log.steps()[:, 3].max(initial=1.0)) for e in engines), default=1.0
    )
    sizes = np.unique(np.rint(np.geomspace(1, max(max_requests, 1.0), BATCHES)).astype(int))
    new = 1 + instance.run.num_speculative_tokens
    decode = [_watts(instance, Group(n * instance.replicas, context, new)) for n in sizes.tolist()]
    prompt = _watts(instance, Group(instance.replicas, 0, min(2048, max(context, 16))))
    hardware = instance.machine.hardware
    idle = idle_watts(hardware) + hardware.node_overhead_w
    return _Draws(sizes.astype(float), np.array(decode), prompt, idle)


@cache
def _watts(instance: Instance, group: Group) -> float:
    """Mean power of a GPU and its share of the node over a step (W)."""
    requests = (
        -(-group.count // instance.run.pp) * instance.run.pp
    )  # a batch of a pipeline has one at least
    run = batch_run(
        instance.run, [group.__class__(requests, group.context_length, group.new_tokens)]
    )
    step = simulate(compile(run, instance.model), instance.machine)
    return step.expense().watts_per_gpu
