"""Simulation of a load on a deployment, until its limits are surely missed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stagewright.serving.deployment import Deployment
from stagewright.serving.metrics import RequestLimits, RequestTimes, Slo, Spread
from stagewright.serving.search.bounds import LoadTotals
from stagewright.serving.simulation import StopEarly
from stagewright.serving.workload import Records, Workload


@dataclass(frozen=True, slots=True)
class SimulatedLoad:
    """Metrics of a deployment under a load (s, tokens per second)."""

    instances: int
    gpus: int
    good: float
    """Share of all requests that keep the limits; at most this share where `stopped`."""
    stopped: bool
    """Too many requests had missed their limits before all were served."""
    meets: bool
    """Enough requests keep the limits."""
    ttft: Spread
    tpot: Spread
    output_rate: float
    """Output tokens per second of all instances, nan where `stopped`."""
    user_rate: float
    """Output tokens per second of the median user: 1 / median TPOT."""
    concurrency: int | None = None
    """Users of a closed loop."""
    prefill_instances: int = 0
    """Number of prefill instances besides."""

    @property
    def per_gpu(self) -> float:
        """Output tokens per second and GPU."""
        return self.output_rate / self.gpus


def too_many_missed(slo: Slo, misses: int) -> StopEarly:
    """Stop a simulation when more than `misses` requests have missed their limits."""

    def stop(work: Workload, records: Records, at: float) -> bool:
        known = RequestTimes.at_least(work, records, at)
        return int(known.missed(RequestLimits.of(work, slo)).any_limit.sum()) > misses

    return stop


class LoadResult(NamedTuple):
    """Metrics of a load on a deployment, and the limit it misses."""

    load: SimulatedLoad
    ttft_binds: bool
    """At least as many requests missed the TTFT limit as the TPOT limit."""


def simulate_load(
    deployment: Deployment, workload: Workload, load: LoadTotals, slo: Slo, instances: int
) -> LoadResult:
    """Simulate a workload until it ends, or too many requests have missed limits.

    Raises KeyboardInterrupt where the user stops it.
    """
    outcome, accepted = deployment.run(workload, stop_early=too_many_missed(slo, load.misses))
    if outcome.stopped:
        raise KeyboardInterrupt
    rejected = sum(accepted.rejected.values())
    unread = sum(workload.rejected.values())
    times, work = RequestTimes.of(outcome), outcome.workload
    limits, finish = RequestLimits.of(work, slo), np.array(outcome.records.finish)
    at = float(np.nanmax(finish)) if len(times.number) else 0.0
    missed = RequestTimes.at_least(work, outcome.records, at).missed(limits)
    good = int((~times.missed(limits).any_limit).sum())
    lost = int(missed.any_limit.sum()) + rejected
    total, may_miss = len(workload) + unread, load.misses + unread
    stopped = good + lost < total
    tpot = Spread.of(times.tpot[np.isfinite(times.tpot)])
    seconds, tokens = 1e-12, int(np.array(work.output)[times.number].sum())
    if len(times.number):
        arrival = np.array(outcome.records.arrival)[times.number]
        seconds = max(float((arrival + times.e2e).max()) - float(arrival.min()), 1e-12)
    simulated = SimulatedLoad(
        instances,
        deployment.gpus,
        1 - lost / total,
        stopped,
        lost <= may_miss,
        Spread.of(times.ttft),
        tpot,
        float("nan") if stopped else tokens / seconds,
        1 / tpot.p50 if tpot.p50 > 0 else float("nan"),
        workload.concurrency,
    )
    return LoadResult(simulated, bool(missed.ttft.sum() >= missed.tpot.sum()))
