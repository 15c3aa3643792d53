"""Energy of a serving run: power of GPUs in steps, and of GPUs that wait.

Decode steps of a few sizes and one step of a prompt are compiled and simulated for the power of a
GPU (`time.power`); it is interpolated for other sizes. Durations are those of the engines'
logs. A step with prompts draws the power of prompts for as long as it exceeds its decode alone.
While a step waits for the host, the GPU is idle.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple, Self

import numpy as np

from stagewright.arrays import Float
from stagewright.lower.compile import compile
from stagewright.run.lengths import Group
from stagewright.serving.deployment import InstanceGroup, ServedRun
from stagewright.serving.engine import Engine
from stagewright.serving.host import NO_HOST
from stagewright.serving.instance import Instance
from stagewright.serving.metrics import logged_in
from stagewright.serving.steadiness import Window
from stagewright.serving.steps.step_times import StepTimes, batch_run
from stagewright.time.power import idle_watts
from stagewright.time.simulate.step import simulate

BATCHES = 4
"""Sizes of steps of decode that are simulated."""


class ServingExpense(NamedTuple):
    """Energy and cost of a run."""

    joules: float
    """Energy of all GPUs in the measured window (J)."""
    watts_per_gpu: float
    """Mean of a GPU and its share of the node."""
    joules_per_token: float
    """Energy per output token (J)."""
    usd_per_million_tokens: float | None
    """Cost of a million output tokens (USD); None without a price."""


@dataclass(frozen=True, slots=True)
class _Power:
    """Power of a GPU of an instance (W), and durations of its decode steps at a mean context."""

    times: StepTimes
    """Step times of the instance with its host."""
    context: int
    requests: Float
    """Numbers of requests in the decode steps that were simulated."""
    decode: Float
    """Power in these steps."""
    prompt: float
    idle: float

    @classmethod
    def of(cls, group: InstanceGroup, engines: Iterable[Engine], context: int) -> Self:
        """Power of GPUs in steps of the sizes that engines ran."""
        instance, times = group.instance, group.instance.times.with_host(group.host)
        run, replicas, hardware = instance.run, instance.replicas, instance.machine.hardware
        sizes = (float(e.step_log.steps()[:, 3].max(initial=1.0)) for e in engines)
        largest = max(1.0, *sizes)
        counts = np.unique(np.rint(np.geomspace(1, largest, BATCHES)).astype(int))
        new = 1 + run.num_speculative_tokens
        decode = [_watts(instance, Group(n * replicas, context, new)) for n in counts.tolist()]
        prompt = _watts(instance, Group(replicas, 0, min(2048, max(context, 16))))
        idle = idle_watts(hardware) + hardware.node_overhead_w
        return cls(times, context, counts.astype(float), np.array(decode), prompt, idle)

    def joules(self, engine: Engine, window: Window, seconds: float) -> float:
        """Energy in the window of one GPU that an engine holds for `seconds` of it (J).

        Steps are those between the samples next to the ends of the window: their power counts.
        """
        span = logged_in(engine, window)
        rows = engine.step_log.steps(span)
        if span is not None:
            between = max(span[1].seconds, window.ends) - span[0].seconds
            return self._busy_joules(rows, between * seconds / window.seconds) * (
                window.seconds / between
            )
        return self._busy_joules(rows, seconds)

    def _busy_joules(self, rows: Float, seconds: float) -> float:
        """Energy of steps, and of idle time up to `seconds` (J)."""
        first, last, steps, requests = (rows[:, n] for n in range(4))
        durations = (first + last) / 2 * steps
        decode = self._decode_seconds(self.times, requests)
        alone = np.where(steps > 1, durations, np.minimum(durations, decode))
        gpu = self._decode_seconds(self.times.with_host(NO_HOST), requests)
        computing = alone * np.divide(gpu, decode, out=np.ones_like(gpu), where=decode > gpu)
        power = np.interp(requests, self.requests, self.decode)
        with_prompts = float((durations - alone).sum())
        busy = float((computing * power).sum()) + with_prompts * self.prompt
        return busy + max(seconds - float(computing.sum()) - with_prompts, 0.0) * self.idle

    def _decode_seconds(self, times: StepTimes, requests: Float) -> Float:
        """Durations of decode steps with some numbers of requests; none takes no time."""
        counts, context = np.unique(requests).astype(int), self.context
        seconds = [times.decode(n, n * context) if n else 0.0 for n in counts.tolist()]
        return np.interp(requests, counts, seconds) if len(counts) else requests


def serving_expense(
    run: ServedRun, groups: Iterable[InstanceGroup], price: float | None = None
) -> ServingExpense:
    """Energy and cost of the measured window; `groups` in the order of their engines.

    `price` is in USD per GPU and hour; None takes each hardware's.
    """
    summary, work = run.summary, run.outcome.workload
    window = summary.window
    tokens = max(summary.output_rate * window.seconds, 1.0)
    prompt = max(1, round(float(np.mean(work.prompt))))
    context = prompt + round(float(np.mean(work.output)) / 2)
    joules, gpus, usd, first = 0.0, 0.0, 0.0, 0
    up = _seconds_up(run)
    for group in groups:
        instance, hardware = group.instance, group.instance.machine.hardware
        count = group.settings.instances * instance.replicas
        engines = run.outcome.engines[first : first + count]
        power = _Power.of(group, engines, context)
        per_hour = hardware.price_usd_per_gpu_hour if price is None else price
        for number, engine in enumerate(engines, first):
            seconds, share = up.get(number, window.seconds), instance.gpus / instance.replicas
            joules += power.joules(engine, window, seconds) * share
            gpus_up = share * (seconds / max(window.seconds, 1e-12))
            gpus += gpus_up
            usd += float("nan") if per_hour is None else per_hour * gpus_up
        first += count
    cost = usd * window.seconds / 3600 / tokens * 1e6
    return ServingExpense(
        joules,
        joules / max(window.seconds, 1e-12) / (gpus or 1),
        joules / tokens,
        None if math.isnan(cost) else cost,
    )


def _seconds_up(run: ServedRun) -> dict[int, float]:
    """Seconds of the window in which engines were up, by number; empty where all were."""
    if not run.outcome.up:
        return {}
    first, last, _ = run.summary.window
    seconds = dict.fromkeys(range(len(run.outcome.engines)), 0.0)
    for engine, begins, ends in run.outcome.up:
        seconds[engine] += max(0.0, min(ends, last) - max(begins, first))
    return seconds


@cache
def _watts(instance: Instance, group: Group) -> float:
    """Mean power of a GPU and its share of the node over a step (W)."""
    pp = instance.run.pp  # each batch of a pipeline has at least one request
    run = batch_run(instance.run, [replace(group, count=-(-group.count // pp) * pp)])
    return simulate(compile(run, instance.model), instance.machine).expense().watts_per_gpu
