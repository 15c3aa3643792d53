"""Goodput of a long job: the share of time that remains useful with checkpoints and failures.

Symbols, in seconds: M, mean time between interruptions of the job; T, period between the starts of
two checkpoints; C, stall of training by a checkpoint; W, time until it is stored; D, time until
a failure is detected and its machine is replaced; R, time to restart, until the first step runs.

- Interruptions are independent and exponentially distributed (no wear, no bursts). A job on N nodes
  with r interruptions per 1,000 node-days has M = 1,000 days / (N r). Rates need not scale linearly
  to the largest jobs: Llama 3's gives 30 minutes on 12,500 nodes, where 18 follow from what was
  reported of 100,000 GPUs (arXiv 2602.00277: 44% useful, 10 minutes a failure).
- The expected time of a period, with failures during restarts, is (M + D) e^(R/M) (e^(T/M) - 1)
  (Bougeret et al., SC'11; Daly 2006 has it with D = 0), of which T - C are useful. The best period
  is its optimum, exact also where T approaches M. Young: sqrt(2 M C) + C. Daly, as Aupy, Robert and
  Vivien have it (arXiv 1302.3752): sqrt(2 (M + D + R) C) + C.
- An asynchronous checkpoint stalls training while it is copied to the memory of the host. A failure
  before it is stored falls back to the checkpoint before: W more are lost in the mean, as if R were
  longer. A period is at least W: one checkpoint is stored at a time.
- Replicas that fail alone (torchft, FT-HSDP): a failure stalls all for `replica_recovery`, then one
  of `replicas` is missing for D + R. No work is lost, since the others keep the state.

>>> fleet = Failures(interruption_seconds=60150, detect=60, restart=600)  # of Aupy et al., Table 2
>>> best = best_period(fleet, Saving(stall=600, write=600))
>>> round(best), round(young(fleet, 600)), round(daly(fleet, 600))
(8701, 9096, 9142)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

DAY = 86_400.0


def interruption_seconds(nodes: int, per_1000_node_days: float) -> float:
    """Mean time between interruptions of a job in seconds; infinite without failures.

    >>> round(interruption_seconds(2048, 3.79) / 3600, 2)  # Llama 3 405B: 419 in 54 days
    3.09
    """
    rate = nodes * per_1000_node_days / 1000
    return DAY / rate if rate else math.inf


@dataclass(frozen=True, slots=True)
class Failures:
    """Interruptions of a job, and what each costs, in seconds."""

    interruption_seconds: float
    """Mean time between two, of the whole job."""
    detect: float
    """Until a failure is known and its machine replaced."""
    restart: float
    """Until the first step: processes, communicators, reading the checkpoint."""


@dataclass(frozen=True, slots=True)
class Saving:
    """A checkpoint in seconds."""

    stall: float
    """Training waits this long."""
    write: float
    """Until it is stored."""
    asynchronous: bool = False
    """Training goes on after the stall, while it is stored."""

    @property
    def shortest_period(self) -> float:
        """Shortest time between the starts of two."""
        return self.write if self.asynchronous else self.stall


def useful_share(period: float, failures: Failures, saving: Saving) -> float:
    """Share of time that computes steps which are kept, with a checkpoint every `period` seconds.

    >>> round(useful_share(8701, Failures(60150, 60, 600), Saving(600, 600)), 4)
    0.8559
    """
    mean, work = failures.interruption_seconds, period - saving.stall
    if math.isinf(mean):
        return work / period
    lost = failures.restart + (saving.write if saving.asynchronous else 0.0)
    exponent = (lost + period) / mean
    if exponent > 700:  # beyond the range of floating point: nothing is ever finished
        return 0.0
    expected = (mean + failures.detect) * math.exp(lost / mean) * math.expm1(period / mean)
    return work / expected


def best_period(failures: Failures, saving: Saving) -> float:
    """Period with the largest useful share, in seconds, by golden section.

    Infinite without failures; the shortest possible if a checkpoint does not stall training.
    """
    low, mean = saving.shortest_period, failures.interruption_seconds
    if math.isinf(mean):
        return math.inf
    if not saving.stall:
        return low
    high = max(low, young(failures, saving.stall)) + mean
    ratio = (math.sqrt(5) - 1) / 2
    while high - low > 1e-6 * high:
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if useful_share(left, failures, saving) >= useful_share(right, failures, saving):
            high = right
        else:
            low = left
    return (low + high) / 2


def young(failures: Failures, stall: float) -> float:
    """Period by Young (1974), in seconds."""
    return math.sqrt(2 * failures.interruption_seconds * stall) + stall


def daly(failures: Failures, stall: float) -> float:
    """Period by Daly's higher-order estimate as cited by Aupy et al., in seconds."""
    mean = failures.interruption_seconds + failures.detect + failures.restart
    return math.sqrt(2 * mean * stall) + stall


def replicated_share(failures: Failures, replicas: int, stall: float) -> float:
    """Useful share where replicas fail alone: each failure stalls all, then one is missing.

    >>> round(replicated_share(Failures(18 * 60, 0, 600), 100_000, stall=180), 2)  # FT-HSDP
    0.83
    """
    lost = stall + (failures.detect + failures.restart) / replicas
    return max(0.0, 1 - lost / failures.interruption_seconds)


def broken_machines(nodes: int, per_1000_node_days: float, repair_hours: float) -> float:
    """Mean number of machines in repair, each of which a spare replaces."""
    return nodes * per_1000_node_days / 1000 * repair_hours / 24


def shortage(broken: float, spares: int) -> float:
    """Probability that more machines are in repair than there are spares: Poisson.

    >>> round(shortage(broken=1.0, spares=2), 4)
    0.0803
    """
    kept = itertools.islice(_poisson(broken), spares + 1)
    return max(0.0, 1 - sum(kept))


def _poisson(mean: float) -> Iterator[float]:
    """Probabilities of 0, 1, 2, ... events, until nothing is left."""
    for count in itertools.count():
        log = count * math.log(mean) - mean - math.lgamma(count + 1) if mean else -math.inf
        term = math.exp(log) if mean else float(count == 0)
        if count > mean and term < 1e-18:
            return
        yield term


def spares_needed(broken: float, shortage_at_most: float = 0.01) -> int:
    """Fewest spares with which a job lacks a machine at most this share of time.

    >>> spares_needed(1.0)
    4
    """
    for spares, kept in enumerate(itertools.accumulate(_poisson(broken))):
        if 1 - kept <= shortage_at_most:
            return spares
    raise AssertionError("probabilities add up to 1")
