"""Energy of a serving run: what its steps draw, and what GPUs draw that wait.

Steps of decode of a few sizes, and one of a prompt, are compiled and simulated, which says what a
GPU draws meanwhile (`time.expense.power`). Steps of other sizes draw what lies between. The
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
from stagewright.time.expense.power import idle_watts
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
        first, last, steps, many = (rows[:, n] for n in range(4))
        whole = (first + last) / 2 * steps
        alone = np.where(steps > 1, whole, np.minimum(whole, times.decode(many)))
        drawn = np.interp(many, self.requests, self.decode)
        busy = float((alone * drawn).sum()) + float((whole - alone).sum()) * self.prompt
        return busy + max(seconds - float(whole.sum()), 0.0) * self.idle


class _StepSeconds(NamedTuple):
    """Seconds of steps, at a mean context."""

    instance: Instance
    context: int

    def decode(self, requests: Float) -> Float:
        """Durations of decode steps with some numbers of requests; none takes no time."""
        known = np.unique(requests).astype(int)
        times, context = self.instance.times, self.context
        seconds = [times.decode(n, n * context) if n else 0.0 for n in known.tolist()]
        return np.interp(requests, known, seconds) if len(known) else requests


def serving_expense(
    of: ServedRun, services: Iterable[InstanceGroup], price: float | None = None
) -> ServingExpense:
    """Energy and cost of a run; `services` in the order of their engines.

    `price` is in USD per GPU and hour; None takes each hardware's.
    """
    summary, work = of.summary, of.outcome.workload
    tokens = max(summary.output_rate * summary.seconds, 1.0)
    prompt = max(1, round(float(np.mean(work.prompt))))
    context = prompt + round(float(np.mean(work.output)) / 2)
    joules, gpus, usd, nth = 0.0, 0.0, 0.0, 0
    up = _seconds_up(of)
    for service in services:
        made, hardware = service.instance, service.instance.machine.hardware
        count = service.engines.instances * made.replicas
        mine = of.outcome.engines[nth : nth + count]
        draws, times = _draws(made, mine, context), _StepSeconds(made, context)
        per_hour = hardware.price_usd_per_gpu_hour if price is None else price
        for number, engine in enumerate(mine, nth):
            seconds, share = up.get(number, summary.seconds), made.gpus / made.replicas
            joules += draws.joules(engine, times, seconds) * share
            held = share * (seconds / max(summary.seconds, 1e-12))
            gpus += held
            usd += float("nan") if per_hour is None else per_hour * held
        nth += count
    cost = usd * summary.seconds / 3600 / tokens * 1e6
    return ServingExpense(
        joules,
        joules / max(summary.seconds, 1e-12) / (gpus or 1),
        joules / tokens,
        None if cost != cost else cost,
    )


def _seconds_up(of: ServedRun) -> dict[int, float]:
    """Seconds in which engines were up, by number; empty where all were from first to last."""
    if not of.outcome.up:
        return {}
    first = min((at for at in of.outcome.records.arrival if at == at), default=0.0)
    last = first + of.summary.seconds
    found = dict.fromkeys(range(len(of.outcome.engines)), 0.0)
    for engine, begins, ends in of.outcome.up:
        found[engine] += max(0.0, min(ends, last) - max(begins, first))
    return found


def _draws(of: Instance, engines: Iterable[Engine], context: int) -> _Draws:
    """Power of GPUs in steps of the sizes that engines ran."""
    most = max((float(e.step_log.steps()[:, 3].max(initial=1.0)) for e in engines), default=1.0)
    sizes = np.unique(np.rint(np.geomspace(1, max(most, 1.0), BATCHES)).astype(int))
    new = 1 + of.run.num_speculative_tokens
    decode = [_watts(of, Group(n * of.replicas, context, new)) for n in sizes.tolist()]
    prompt = _watts(of, Group(of.replicas, 0, min(2048, max(context, 16))))
    hardware = of.machine.hardware
    idle = idle_watts(hardware) + hardware.node_overhead_w
    return _Draws(sizes.astype(float), np.array(decode), prompt, idle)


@cache
def _watts(of: Instance, group: Group) -> float:
    """Mean power of a GPU and its share of the node over a step (W)."""
    many = -(-group.count // of.run.pp) * of.run.pp  # a batch of a pipeline has one at least
    run = batch_run(of.run, [group.__class__(many, group.context_length, group.new_tokens)])
    step = simulate(compile(run, of.model), of.machine)
    return step.expense().watts_per_gpu
