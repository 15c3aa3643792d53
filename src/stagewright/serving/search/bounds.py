"""What can be said of a layout without playing it: what it can never do, and a guess.

Each bound is sound for any scheduler: a request's tokens are made in steps, no step is shorter than
the shortest one, and an instance runs one step at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, Self

import numpy as np

from stagewright.arrays import Float, Int
from stagewright.serving.engines.plans import PlannedSteps
from stagewright.serving.metrics import Slo
from stagewright.serving.requests import Workload
from stagewright.serving.service import Service

_CHUNKS = 100
"""Numbers of tokens in a step of prompts that bounds look at."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadTotals:
    """A workload in the numbers that bounds are made of."""

    prompt: Int
    output: Int
    span: float
    """Seconds from the first arrival to the last; infinite where requests wait for others."""
    shared: bool
    """Whether prompts may be found in a cache, so that computing them may take nothing."""
    misses: int
    """Requests that may miss their limits."""

    @classmethod
    def of(cls, workload: Workload, share: float) -> Self:
        """Of requests whose `share` must keep the limits."""
        every = len(workload) + sum(workload.rejected.values())
        waits = workload.after is not None or workload.concurrency is not None
        may = every - math.ceil(share * every - 1e-9)
        return cls(
            np.array(workload.prompt, dtype=np.int64),
            np.array(workload.output, dtype=np.int64),
            math.inf if waits else max(workload.arrival, default=0.0),
            workload.chains is not None or workload.after is not None,
            may - sum(workload.rejected.values()),
        )

    def fewest(self, tokens: Int) -> float:
        """The sum without the largest, which may miss."""
        kept = max(0, len(tokens) - max(self.misses, 0))
        return float(np.sort(tokens)[:kept].sum())


@dataclass(frozen=True, slots=True, eq=False)
class LayoutBounds:
    """What is known of a layout before it is played."""

    shortest_step: float
    """Seconds of the shortest step of decode."""
    per_token: float
    """Seconds of an engine for an output token, at least."""
    per_prompt_token: float
    """Seconds of an engine for a token of a prompt, at least."""
    least_ttft: float
    """Seconds to the first token of the longest prompt that must keep its limit, alone."""
    least: int
    """Instances, at least; 0: no number of them keeps the limits."""
    why: str
    """Why no number of instances does."""
    guess: int
    """Instances that a steady state would need."""


class ReadyLayout(NamedTuple):
    """A layout that has step times."""

    row: int
    """Among the candidates."""
    service: Service
    """With one instance."""
    bounds: LayoutBounds


def layout_bounds(service: Service, load: LoadTotals, slo: Slo) -> LayoutBounds:
    """The bounds of a layout, and a guess of how many instances the load needs."""
    times = service.instance.times.of_replica(service.host)
    block = service.instance.cache.block_size
    shortest, mean_prompt = int(load.prompt.min()), float(load.prompt.mean())
    room = max(1, service.blocks * block // (shortest + 1))
    most = max(1, min(service.limits.requests, room))
    requests = np.arange(1, most + 1)
    replicas = service.instance.replicas

    def least(seconds: float, tokens: int, requests: int) -> float:
        """Of a step beside which other replicas that share its experts have nothing to do."""
        return times.of_all(PlannedSteps((1, seconds, 0.0), tokens, requests), tokens / replicas)[1]

    new = 1 + service.instance.run.num_speculative_tokens
    decode = np.array(
        [least(times.decode_once(n, n * (shortest + 1)), n * new, n) for n in requests.tolist()]
    )
    per_token = float((decode / requests).min())
    chunks = np.unique(np.geomspace(1, service.limits.tokens, _CHUNKS).astype(int)).tolist()
    # A step of so many tokens takes no less than one of fewer; of short prompts keys are fewest.
    prompts = [
        least(times.step(few, few, few, some), few, some) / many
        for few, many in pairwise(chunks)
        for some in (max(1, few // shortest),)
    ]
    per_prompt_token = 0.0 if load.shared else min(prompts)
    longest = int(np.sort(load.prompt)[max(0, len(load.prompt) - 1 - max(load.misses, 0))])
    least_ttft = 0.0
    if not load.shared and longest <= service.limits.tokens:
        pairs = longest * (longest + 1) // 2
        least_ttft = least(times.step(longest, pairs, longest, 1), longest, 1)
        least_ttft += service.host.before_prefill(longest)
    found = LayoutBounds(float(decode.min()), per_token, per_prompt_token, least_ttft, 0, "", 0)
    why = _never(found, load, slo)
    if why:
        return replace(found, why=why)
    busy = max(
        load.fewest(np.maximum(load.output - 1, 0)) * per_token,
        load.fewest(load.prompt) * per_prompt_token,
    )
    room_in_time = load.span + _slack(load, slo)
    fewest = max(1, math.ceil(busy / room_in_time / service.instance.replicas - 1e-9))
    guess = _guess(service, load, slo, requests, mean_prompt)
    return replace(found, least=fewest, guess=max(fewest, guess))


def _never(of: LayoutBounds, load: LoadTotals, slo: Slo) -> str:
    """Why no number of instances keeps the limits; empty: some may."""
    several = int((load.output > 1).sum())
    if slo.tpot is not None and of.shortest_step > slo.tpot and several > load.misses:
        return "a step of decode alone takes longer than --tpot"
    if slo.ttft is not None and of.least_ttft > slo.ttft:
        return "a prompt alone takes longer than --ttft"
    return ""


def _slack(load: LoadTotals, slo: Slo) -> float:
    """Seconds after the last arrival in which requests that keep their limits are done."""
    if slo.e2e is not None:
        return slo.e2e
    if slo.ttft is None or slo.tpot is None:
        return math.inf
    return slo.ttft + float(load.output.max()) * slo.tpot


def _guess(service: Service, load: LoadTotals, slo: Slo, requests: Int, prompt: float) -> int:
    """Instances of a steady state in which each request sees as many prompts as there are others.

    While a request gets its output, n requests get theirs and n prompts are computed beside them.
    """
    times = service.instance.times.with_host(service.host)
    output = float(load.output.mean())
    context = int(prompt + output / 2)
    some = np.unique(np.geomspace(1, len(requests), 40).astype(int))
    some = some[some * context <= service.blocks * service.instance.cache.block_size]
    if not len(some):
        some = np.array([1])
    tokens = min(service.limits.tokens, max(1, int(prompt)))
    chunk = times.step(tokens, tokens * (tokens + 1) // 2, tokens, 1) * prompt / tokens
    steps: Float = np.array([times.decode(n, n * context) for n in some.tolist()])
    alone = times.decode(1, context)
    tpot = steps + some / output * max(chunk - alone, 0.0)
    rate = some / (output * tpot)
    if slo.tpot is not None and (tpot <= slo.tpot).any():
        rate = rate[tpot <= slo.tpot]
    wanted = len(load.prompt) / load.span if load.span else math.inf
    per_instance = float(rate.max()) * service.instance.replicas
    return 1 if wanted == math.inf else max(1, math.ceil(wanted / per_instance))
