"""Disaggregated deployments: promising pairs of layouts, and the fewest instances of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from stagewright.serving.deployment import Deployment, InstanceGroup
from stagewright.serving.disaggregation import Role
from stagewright.serving.metrics import Slo
from stagewright.serving.schedulers.static import Static
from stagewright.serving.search.bounds import LoadTotals, ReadyLayout, decode_rate
from stagewright.serving.search.load import SimulatedLoad

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
        prompts, decode = self.counts
        return prompts * self.prompts.group.gpus + decode * self.decode.group.gpus


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
        (layout, _for_prompts(layout.group, load, rate))
        for layout in ready
        if slo.ttft is None or layout.bounds.min_ttft <= slo.ttft
    ]
    last = [
        (layout, _for_decode(layout.group, load, rate, slo))
        for layout in ready
        if slo.tpot is None or layout.bounds.min_tpot <= slo.tpot or not load.decodes
        if not isinstance(layout.group.scheduler, Static)
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
    context = int(load.prompt.mean() + load.output.mean() / 2)
    room = max(1, group.num_blocks * group.instance.cache.block_size // context)
    most = max(1, min(group.limits.requests, room))
    # Of all replicas, which have as many requests.
    decoded = decode_rate(group, load, slo, most)
    return max(1, math.ceil(rate / decoded / group.instance.replicas))


def find_fewest(
    pair: LayoutPair, max_gpus: int, simulate: Callable[[int, int], SimulatedLoad]
) -> None:
    """Simulate more instances of both layouts until the limits are kept, then fewer."""
    prompts, decode = pair.counts
    first, last = (each.group.gpus for each in pair.layouts)
    simulations, meets = 0, False
    while simulations < MAX_SIMULATIONS and prompts * first + decode * last <= max_gpus:
        load = simulate(prompts, decode)
        simulations, meets = simulations + 1, load.meets
        if meets:
            break
        if load.binding != "TPOT":
            prompts += max(1, prompts // 4)
        else:
            decode += max(1, decode // 4)
    sides = [True, False] if first >= last else [False, True]  # of prompts, the larger one first
    while meets and sides and simulations < MAX_SIMULATIONS:
        fewer = (prompts - 1, decode) if sides[0] else (prompts, decode - 1)
        if min(fewer) >= 1:
            simulations += 1
            if simulate(*fewer).meets:
                prompts, decode = fewer
                continue
        del sides[0]


def with_instances(group: InstanceGroup, count: int) -> InstanceGroup:
    """The group with another number of instances."""
    return replace(group, settings=replace(group.settings, instances=count))


def pair_deployment(pair: LayoutPair, prompts: int, decode: int) -> Deployment:
    """Deployment of a pair of layouts with some numbers of instances."""
    groups = (
        replace(with_instances(layout.group, count), role=role)
        for layout, role, count in zip(pair.layouts, PAIR_ROLES, (prompts, decode), strict=True)
    )
    return Deployment(tuple(groups))
