"""Disaggregated deployments: the most promising pairs of layouts, and their simulation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import numpy as np

from stagewright.serving.deployment import Deployment, InstanceGroup
from stagewright.serving.disaggregation import Role
from stagewright.serving.metrics import Slo
from stagewright.serving.schedulers.static import Static
from stagewright.serving.search.bounds import LoadTotals, ReadyLayout

BUSY = 0.8
"""Share of time that a prefill instance computes, in the guess of their number."""
PAIR_ROLES: tuple[Role, Role] = ("prefill", "decode")
MAX_SIMULATIONS = 10
"""Largest number of simulations of a pair of layouts."""


class LayoutPair(NamedTuple):
    """Prefill layout and decode layout, and a guess of instances of each."""

    prompts: ReadyLayout
    decode: ReadyLayout
    counts: tuple[int, int]

    @property
    def layouts(self) -> tuple[ReadyLayout, ReadyLayout]:
        """Both layouts, prompts first."""
        return self.prompts, self.decode

    @property
    def gpus(self) -> int:
        """GPUs of the guess."""
        return sum(
            count * layout.group.gpus
            for count, layout in zip(self.counts, self.layouts, strict=True)
        )


def pairs_of(
    ready: Sequence[ReadyLayout], load: LoadTotals, slo: Slo, max_gpus: int
) -> list[LayoutPair]:
    """Pairs that may keep the limits, those whose guess has the fewest GPUs first.

    A guess is no bound: one with too many GPUs is reduced to `max_gpus`.
    """
    rate = len(load.prompt) / load.span if load.span else math.inf
    if not 0 < rate < math.inf:
        return []
    first = [
        (layout, count)
        for layout in ready
        if slo.ttft is None or layout.bounds.min_ttft <= slo.ttft
        for count in [_for_prompts(layout.group, load, rate)]
    ]
    last = [
        (layout, count)
        for layout in ready
        if slo.tpot is None or layout.bounds.min_tpot <= slo.tpot or not load.decodes
        if not isinstance(layout.group.scheduler, Static)
        for count in [_for_decode(layout.group, load, rate, slo)]
    ]
    pairs = [
        LayoutPair(one, two, (p, d))
        for (one, p), (two, d) in product(first, last)
        if one.group.settings == two.group.settings
        and one.group.instance.run.kv_cache_dtype == two.group.instance.run.kv_cache_dtype
    ]
    pairs.sort(key=lambda pair: pair.gpus)
    return [fitting for pair in pairs for fitting in _within(pair, max_gpus)]


def _within(pair: LayoutPair, max_gpus: int) -> Iterator[LayoutPair]:
    """Reduce the instances of a pair to the GPUs; yield nothing if one of each is too much."""
    first, last = (each.group.gpus for each in pair.layouts)
    if first + last > max_gpus:
        return
    share = min(1.0, max_gpus / pair.gpus)
    prompts = max(1, min(int(pair.counts[0] * share), (max_gpus - last) // first))
    decode = max(1, min(int(pair.counts[1] * share), (max_gpus - prompts * first) // last))
    yield pair if share == 1.0 else pair._replace(counts=(prompts, decode))


def _for_prompts(group: InstanceGroup, load: LoadTotals, rate: float) -> int:
    """Instances that compute prompts as fast as they come."""
    times = group.instance.times.with_host(group.host)
    prompt = float(load.prompt.mean())
    tokens = min(group.limits.tokens, max(1, int(prompt)))
    # Of all replicas, which all compute prompts.
    seconds = times.step(tokens, tokens * (tokens + 1) // 2, tokens, 1) * prompt / tokens
    return max(1, math.ceil(rate * seconds / BUSY / group.instance.replicas))


def _for_decode(group: InstanceGroup, load: LoadTotals, rate: float, slo: Slo) -> int:
    """Instances that decode as fast as prompts are done, within the limit per token."""
    times = group.instance.times.with_host(group.host)
    output = float(load.output.mean())
    context = int(load.prompt.mean() + output / 2)
    room = max(1, group.num_blocks * group.instance.cache.block_size // context)
    limit = max(1, min(group.limits.requests, room))
    counts = np.unique(np.geomspace(1, limit, 40).astype(int))
    length = 1.0 if group.drafts is None else group.drafts.length
    # Of all replicas, which have as many requests.
    steps = np.array([times.decode(n, n * context) for n in counts.tolist()]) / length
    rates = counts / (output * steps)
    if slo.tpot is not None and (steps <= slo.tpot).any():
        rates = rates[steps <= slo.tpot]
    return max(1, math.ceil(rate / float(rates.max()) / group.instance.replicas))


@dataclass(slots=True)
class CountAttempt:
    """Numbers of instances, and whether they keep the limits."""

    prompts: int
    decode: int
    meets: bool = False
    ttft_binds: bool = False
    """At least as many requests missed the TTFT limit as the TPOT limit."""


def counts_to_try(pair: LayoutPair, max_gpus: int) -> Iterator[CountAttempt]:
    """Numbers of instances to simulate: more until the limits are kept, then fewer."""
    prompts, decode = pair.counts
    first, last = (each.group.gpus for each in pair.layouts)
    simulations = 0
    while simulations < MAX_SIMULATIONS and prompts * first + decode * last <= max_gpus:
        attempt = CountAttempt(prompts, decode)
        yield attempt
        simulations += 1
        if attempt.meets:
            break
        if attempt.ttft_binds:
            prompts += max(1, prompts // 4)
        else:
            decode += max(1, decode // 4)
    else:
        return
    open_sides = {"prompts", "decode"}
    while open_sides and simulations < MAX_SIMULATIONS:
        side = max(open_sides, key=lambda name: (first if name == "prompts" else last, name))
        fewer = (prompts - (side == "prompts"), decode - (side == "decode"))
        if min(fewer) < 1:
            open_sides.remove(side)
            continue
        attempt = CountAttempt(*fewer)
        yield attempt
        simulations += 1
        if attempt.meets:
            prompts, decode = fewer
        else:
            open_sides.remove(side)


def pair_deployment(pair: LayoutPair, prompts: int, decode: int) -> Deployment:
    """Deployment of a pair of layouts with some numbers of instances."""
    groups = (
        replace(layout.group, role=role, settings=replace(layout.group.settings, instances=count))
        for layout, role, count in zip(pair.layouts, PAIR_ROLES, (prompts, decode), strict=True)
    )
    return Deployment(tuple(groups))
