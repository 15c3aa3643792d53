"""Simulation of a load on a deployment, as long as it takes to tell if the limits are kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from stagewright.errors import UserError
from stagewright.serving.deployment import Deployment
from stagewright.serving.metrics import (
    MissedLimits,
    RequestLimits,
    RequestTimes,
    ServingSummary,
    Slo,
)
from stagewright.serving.search.bounds import LoadTotals
from stagewright.serving.steadiness import arrival_window
from stagewright.serving.workload import Records, Workload

SPAN = 10.0
"""Mean times of a request for which requests must arrive; the warm-up then takes two."""
MAX_REQUESTS = 100_000
"""Largest number of requests of a load that is made longer."""


class ServingLoad(NamedTuple):
    """Requests to serve, and a function that draws more of them."""

    workload: Workload
    totals: LoadTotals
    drawn: int = 0
    """Number of requests, or sessions, that were drawn."""
    draw: Callable[[int], Workload] | None = None
    """Function of a number that draws as many, the first ones equal; None: there are no others."""

    def longer(self, factor: float) -> ServingLoad:
        """Draw `factor` times as many requests."""
        if self.draw is None:
            return self
        count = max(self.drawn, math.ceil(self.drawn * factor))
        workload = self.draw(count)
        return ServingLoad(workload, LoadTotals.of(workload, self.totals.share), count, self.draw)


@dataclass(frozen=True, slots=True)
class SimulatedLoad:
    """Metrics of a deployment under a load."""

    summary: ServingSummary
    """Summary of the simulation, up to its end where it was `stopped`."""
    good: float
    """Share of requests that keep the limits; at most this share where `stopped`."""
    stopped: bool
    """Too many requests had missed their limits before all were served."""
    meets: bool
    """Enough requests keep the limits, and the deployment is not overloaded."""
    binding: str
    """The limit that most requests missed: TTFT, TPOT or E2E; empty if none was missed."""
    too_short: float
    """Factor by which more requests are needed to tell; at most 1: these suffice."""
    concurrency: int | None
    """Users of a closed loop."""

    @property
    def gpus(self) -> int:
        """GPUs of all instances."""
        return self.summary.gpus

    @property
    def user_rate(self) -> float:
        """Output tokens per second of the median user: 1 / median TPOT."""
        return self.summary.user_rate

    @property
    def output_rate(self) -> float:
        """Output tokens per second of all instances, nan where `stopped`."""
        return math.nan if self.stopped else self.summary.output_rate

    @property
    def per_gpu(self) -> float:
        """Output tokens per second and GPU."""
        return self.output_rate / self.gpus


@dataclass(slots=True)
class _Missed:
    """Ends a simulation when more requests have missed their limits than may."""

    slo: Slo
    totals: LoadTotals
    missed_limits: MissedLimits | None = field(default=None, init=False)
    """Limits that were missed when the simulation ended; None: it went on to its end."""
    share: float = field(default=1.0, init=False)
    """Share of requests that may still keep the limits."""

    def __call__(self, work: Workload, records: Records, at: float) -> bool:
        """True if too many requests have missed, of the window and of all."""
        arrival = np.frombuffer(records.arrival)
        window = arrival_window(arrival[np.isfinite(arrival)], len(work))
        if window is None:
            return False
        times = RequestTimes.at_least(work, records, at)
        missed = times.missed(RequestLimits.of(work, self.slo))
        lost = missed.any_limit
        inside = lost & window.measures(arrival)
        whole = self.totals.may_miss(len(work), measured=False)
        if int(lost.sum()) <= whole or int(inside.sum()) <= self.totals.may_miss(len(work)):
            return False
        self.missed_limits, self.share = missed, 1 - float(lost.sum()) / len(work)
        return True


def simulate_load(deployment: Deployment, load: ServingLoad, slo: Slo) -> SimulatedLoad:
    """Simulate a workload until it ends, or too many requests have missed limits.

    Raises KeyboardInterrupt where the user stops it.
    """
    missed = _Missed(slo, load.totals)
    outcome, accepted = deployment.run(load.workload, stop_early=missed)
    if outcome.stopped:
        raise KeyboardInterrupt
    summary = deployment.summarize(outcome, accepted, slo).summary
    e2e, arrival = RequestTimes.of(outcome).e2e, np.frombuffer(outcome.records.arrival)
    longest = float(load.totals.longest_good(slo))
    wanted = SPAN * min(float(e2e.mean()) if len(e2e) else longest, longest)
    arrived = arrival[np.isfinite(arrival)]
    span = load.totals.span
    if math.isinf(span):  # requests wait for others; of a stopped run, as it would have gone on
        span = float(arrived.max() - arrived.min()) * len(arrival) / len(arrived)
    stopped = missed.missed_limits is not None
    return SimulatedLoad(
        summary,
        missed.share if stopped else summary.good,
        stopped,
        not stopped
        and summary.good >= load.totals.share - 1e-9
        and not summary.steadiness.overloaded,
        summary.binding if missed.missed_limits is None else missed.missed_limits.binding,
        wanted / span if span else math.inf,
        load.workload.concurrency,
    )


def simulate_long_enough(
    deployment: Deployment, load: ServingLoad, slo: Slo
) -> tuple[SimulatedLoad, ServingLoad]:
    """Simulate a load, longer if it takes more requests to tell; returns what was served, too."""
    while True:
        simulated = simulate_load(deployment, load, slo)
        max_factor = MAX_REQUESTS / max(1, len(load.workload))
        factor = min(simulated.too_short, max_factor)
        if load.draw is None or factor <= 1:
            return simulated, load
        try:
            load = load.longer(1.1 * factor)
        except UserError:  # more than a user can wait for
            return simulated, load
