"""Lower bounds of a layout's latencies without simulation, and a guess of instances.

A bound is sound for any scheduler: a request's tokens are made in steps, of which none gives it
more than one token and its drafts, and no step is shorter than the shortest one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from stagewright.arrays import Float, Int
from stagewright.numbers import plural
from stagewright.serving.batch import BatchPlan, DecodeRun
from stagewright.serving.deployment import InstanceGroup
from stagewright.serving.metrics import Slo
from stagewright.serving.steadiness import WARM_UP
from stagewright.serving.steps.step_times import StepTimes
from stagewright.serving.workload import Workload

_FEW_KEYS = (16, 32, 64, 128, 256)
"""Few keys of a decoding request, next to which new tokens count."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadTotals:
    """Totals of a workload that bounds need."""

    prompt: Int
    output: Int
    span: float
    """Seconds from the first arrival to the last; infinite where requests wait for others."""
    shared: bool
    """Prompts may be cached, so that computing them may take no time."""
    share: float
    """Share of requests that must keep the limits."""
    requests: int
    """All requests, those included that were rejected when the workload was read."""

    @classmethod
    def of(cls, workload: Workload, share: float) -> Self:
        """Totals of a workload whose `share` must keep the limits."""
        waits = workload.predecessor is not None or workload.concurrency is not None
        return cls(
            np.array(workload.prompt, dtype=np.int64),
            np.array(workload.output, dtype=np.int64),
            math.inf if waits else max(workload.arrival, default=0.0),
            workload.chains is not None or workload.predecessor is not None,
            share,
            len(workload) + sum(workload.rejected.values()),
        )

    def may_miss(self, accepted: int, *, measured: bool = True) -> int:
        """Requests that may miss their limits, of those accepted that are measured, or of all."""
        count = accepted - int(accepted * WARM_UP) if measured else accepted
        wanted = self.share * count * self.requests / max(1, accepted)
        return count - math.ceil(wanted - 1e-9)

    @property
    def misses(self) -> int:
        """Requests that may miss their limits: those of the warm-up, and some that are measured."""
        return int(len(self.prompt) * WARM_UP) + self.may_miss(len(self.prompt))

    def longest_good(self, slo: Slo) -> float:
        """Seconds that a request of mean length takes at most if it keeps the limits."""
        if slo.e2e is not None:
            return slo.e2e
        if slo.ttft is None or slo.tpot is None:
            return math.inf
        return slo.ttft + float(self.output.mean()) * slo.tpot

    @property
    def decodes(self) -> bool:
        """True if a request that must keep its limits has several output tokens."""
        return int((self.output > 1).sum()) > self.misses


@dataclass(frozen=True, slots=True, eq=False)
class LayoutBounds:
    """Bounds of a layout."""

    min_tpot: float
    """Lower bound of the seconds between the tokens of a request."""
    min_ttft: float
    """Seconds to the first token of the longest prompt that must keep its limit, alone."""
    reason: str
    """Reason why no number of instances keeps the limits; empty if some may."""
    guess: int
    """Instances that a steady state would need."""


class ReadyLayout(NamedTuple):
    """Layout with step times."""

    row: int
    """Among the candidates."""
    group: InstanceGroup
    """One instance of the layout."""
    bounds: LayoutBounds


def layout_bounds(group: InstanceGroup, load: LoadTotals, slo: Slo) -> LayoutBounds:
    """Bounds of a layout, and a guess of how many instances the load needs."""
    times, replicas = group.instance.times.of_replica(group.host), group.instance.replicas
    block, drafts = group.instance.cache.block_size, group.drafts
    shortest = int(load.prompt.min())
    # Requests that share blocks may be as many as a step may have.
    room = group.limits.requests if load.shared else group.num_blocks * block // (shortest + 1)
    max_requests = max(1, min(group.limits.requests, room))
    new = 1 + group.instance.run.num_speculative_tokens
    # Of several queries some see no more than each other, beside which more keys take no longer.
    keys = [shortest + new, *(few for few in _FEW_KEYS if shortest + new < few and new > 1)]
    min_tpot = min(
        _alone(times, replicas, times.decode(n, n * each), n * new, n)
        for n in range(1, max_requests + 1)
        for each in keys
    ) / (1 if drafts is None else drafts.max_tokens)
    longest = int(np.sort(load.prompt)[max(0, len(load.prompt) - 1 - max(load.misses, 0))])
    min_ttft = 0.0
    if not load.shared and longest <= group.limits.tokens:
        min_ttft = prompt_seconds(group, longest) + group.host.seconds_to_router(longest)
    reason = _too_long(group, load)
    if not reason and slo.tpot is not None and min_tpot > slo.tpot and load.decodes:
        reason = "a step of decode alone takes longer than --tpot"
    elif not reason and slo.ttft is not None and min_ttft > slo.ttft:
        reason = "a prompt alone takes longer than --ttft"
    return LayoutBounds(min_tpot, min_ttft, reason, _guess(group, load, slo, max_requests))


def _too_long(group: InstanceGroup, load: LoadTotals) -> str:
    """Reason why instances cannot serve enough requests; empty if they can."""
    max_output = group.max_model_len - load.prompt
    tokens = load.prompt + np.minimum(load.output, max_output) - 1
    fits = (max_output > 0) & (load.prompt <= group.max_prompt)
    fits &= tokens <= group.max_request_tokens
    lost = int((~fits).sum())
    if lost <= load.may_miss(len(load.prompt), measured=False):
        return ""
    return f"an instance can never serve {plural(lost, 'request', 'requests')}, so long are they"


def _guess(group: InstanceGroup, load: LoadTotals, slo: Slo, most: int) -> int:
    """Instances of a steady state with as many prefills as finished requests.

    While a request gets its output, n requests get theirs and n prompts are computed beside them;
    those of all replicas, where these wait for each other.
    """
    prompt, times = float(load.prompt.mean()), group.instance.times.with_host(group.host)
    context = int(prompt + float(load.output.mean()) / 2)
    tokens = min(group.limits.tokens, max(1, int(prompt)))
    chunk = prompt_seconds(group, tokens) * prompt / tokens
    prefill = max(chunk - times.decode(1, context), 0.0)
    replicas = group.instance.replicas
    rate = decode_rate(
        group, load, slo, most, prefill * (replicas if group.instance.barrier else 1)
    )
    wanted = len(load.prompt) / load.span if load.span else math.inf
    return 1 if wanted == math.inf else max(1, math.ceil(wanted / (rate * replicas)))


def decode_rate(
    group: InstanceGroup, load: LoadTotals, slo: Slo, most: int, prefill: float = 0.0
) -> float:
    """Requests per second of one replica in the best batch of up to `most` that keeps the limit.

    `prefill`: seconds by which a prompt beside it makes a step longer; each request has one.
    """
    times, drafts = group.instance.times.with_host(group.host), group.drafts
    output = float(load.output.mean())
    context = int(float(load.prompt.mean()) + output / 2)
    counts = np.unique(np.geomspace(1, most, 40).astype(int))
    counts = counts[counts * context <= group.num_blocks * group.instance.cache.block_size]
    if not len(counts):
        counts = np.array([1])
    length = 1.0 if drafts is None else drafts.length
    steps: Float = np.array([times.decode(n, n * context) for n in counts.tolist()]) / length
    tpot = steps + counts / output * prefill
    rates = counts / (output * tpot)
    if slo.tpot is not None and (tpot <= slo.tpot).any():
        rates = rates[tpot <= slo.tpot]
    return float(rates.max())


def prompt_seconds(group: InstanceGroup, tokens: int) -> float:
    """Seconds of a step with tokens of one prompt, while other replicas are idle."""
    times = group.instance.times.of_replica(group.host)
    seconds = times.step(tokens, tokens * (tokens + 1) // 2, tokens, 1)
    return _alone(times, group.instance.replicas, seconds, tokens, 1)


def _alone(times: StepTimes, replicas: int, seconds: float, tokens: int, requests: int) -> float:
    """Seconds of a step of one replica while all others are idle."""
    plan = BatchPlan(DecodeRun(1, seconds, 0.0), tokens, requests)
    return times.group_runs([plan], tokens / replicas)[0].seconds
