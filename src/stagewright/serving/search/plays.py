"""A load played on some instances of a layout, no longer than it takes to see it fail."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from stagewright.arrays import Float
from stagewright.serving.cluster import Outcome
from stagewright.serving.metrics import RequestLimits, RequestTimes, Slo, Spread
from stagewright.serving.requests import Accepted, Workload, accept
from stagewright.serving.search.bounds import LoadTotals
from stagewright.serving.service import Service


@dataclass(frozen=True, slots=True)
class PlayedLoad:
    """What users of some instances see. Seconds, tokens per second."""

    instances: int
    gpus: int
    good: float
    """Share of all requests that keep the limits; at most this share where `stopped`."""
    stopped: bool
    """Whether too many requests had missed their limits before all were served."""
    meets: bool
    """Whether as many keep the limits as must."""
    ttft: Spread
    tpot: Spread
    output_rate: float
    """Output tokens per second of all instances, nan where `stopped`."""
    user_rate: float
    """Output tokens per second of the median user: 1 / median TPOT."""
    concurrency: int | None = None
    """Users of a closed loop."""
    prefill_instances: int = 0
    """Besides, of instances that compute prompts only."""

    @property
    def per_gpu(self) -> float:
        """Output tokens per second and GPU."""
        return self.output_rate / self.gpus


@dataclass(slots=True)
class SeenRequests:
    """Times of requests on the instances that have been played so far."""

    ttft: list[Float]
    tpot: list[Float]
    good: int = 0
    lost: int = 0
    tokens: int = 0
    begin: float = float("inf")
    end: float = 0.0
    cut: bool = False
    """Whether the rest need not be known."""

    @classmethod
    def nothing(cls) -> Self:
        """No instance has been played."""
        return cls([], [])

    def add(self, outcome: Outcome, accepted: Accepted, slo: Slo) -> bool:
        """Count the requests of an instance; raises KeyboardInterrupt where somebody stopped it.

        Returns whether no fewer of them missed the limit of the first token than that of others.
        """
        if outcome.stopped:
            raise KeyboardInterrupt
        times = RequestTimes.of(outcome)
        work, finish = outcome.workload, np.array(outcome.records.finish)
        limits = RequestLimits.of(work, slo)
        self.good += int((~times.missed(limits).lost).sum())
        at = float(np.nanmax(finish)) if len(times.number) else 0.0
        of = RequestTimes.at_least(work, outcome.records, at).missed(limits)
        self.lost += int(of.lost.sum()) + sum(accepted.rejected.values())
        self.ttft.append(times.ttft)
        self.tpot.append(times.tpot[np.isfinite(times.tpot)])
        if len(times.number):
            arrival = np.array(outcome.records.arrival)[times.number]
            self.begin = min(self.begin, float(arrival.min()))
            self.end = max(self.end, float((arrival + times.e2e).max()))
            self.tokens += int(np.array(work.output)[times.number].sum())
        return bool(of.late.sum() >= of.slow.sum())

    def load(self, every: int, may: int, gpus: int) -> PlayedLoad:
        """What users saw, of so many requests, of which some may miss their limits; of one
        instance."""
        stopped = self.cut or self.good + self.lost < every
        tpot = Spread.of(np.concatenate(self.tpot))
        seconds = max(self.end - self.begin, 1e-12)
        return PlayedLoad(
            1,
            gpus,
            1 - self.lost / every,
            stopped,
            self.lost <= may,
            Spread.of(np.concatenate(self.ttft)),
            tpot,
            float("nan") if stopped else self.tokens / seconds,
            1 / tpot.p50 if tpot.p50 > 0 else float("nan"),
        )


def play(service: Service, workload: Workload, load: LoadTotals, slo: Slo) -> PlayedLoad:
    """Play a workload on the instances of a service.

    Requests that are dealt in turn and do not depend on others are played instance by instance, and
    no further than the one with which too many have missed their limits.
    """
    seen = SeenRequests.nothing()
    lost = sum(workload.rejected.values())
    accepted = accept(workload, service.max_model_len, service.room, service.most_prompt)
    dealt = replace(accepted.workload, rejected=dict(accepted.rejected))
    for alone, part in _parts(service, dealt):
        seen.add(*alone.run(part), slo)
        if seen.lost > load.misses + lost:
            break
    found = seen.load(len(workload) + lost, load.misses + lost, service.gpus)
    count = service.engines.instances
    return replace(found, instances=count, concurrency=workload.concurrency)


def _parts(service: Service, workload: Workload) -> Iterator[tuple[Service, Workload]]:
    """Instances that can be played by themselves, with the requests of each."""
    count, replicas = service.engines.instances, service.instance.replicas
    depends = workload.after is not None or workload.concurrency is not None
    if count == 1 or depends or service.engines.router != "round_robin":
        yield service, workload
        return
    alone = replace(service, engines=replace(service.engines, instances=1))
    for nth in range(min(count, -(-len(workload) // replicas))):
        yield alone, _dealt(workload, nth, count, replicas)


def _dealt(of: Workload, nth: int, instances: int, replicas: int) -> Workload:
    """The requests that an instance gets when they are dealt in turn to all ranks of dp."""
    rows = [
        at
        for first in range(nth * replicas, len(of), instances * replicas)
        for at in range(first, min(first + replicas, len(of)))
    ]

    def ints(column: array[int]) -> array[int]:
        return array("i", map(column.__getitem__, rows))

    return Workload(
        of.name,
        array("d", map(of.arrival.__getitem__, rows)),
        ints(of.prompt),
        ints(of.output),
        None if of.chains is None else [of.chains[row] for row in rows],
        session=None if of.session is None else ints(of.session),
        rejected=of.rejected if nth == 0 else {},
        classes=of.classes,
        class_of=None if of.class_of is None else ints(of.class_of),
    )
