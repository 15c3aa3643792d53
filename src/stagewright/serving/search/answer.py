"""The search itself: for each layout the fewest instances that keep the limits, and of all the
cheapest; beside it the front of tokens per GPU over tokens per user."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from stagewright.errors import UserError
from stagewright.run.sections.serving import EngineSection
from stagewright.searching.candidates import Candidates
from stagewright.searching.objectives import front
from stagewright.searching.space import Removed
from stagewright.serving.deployment import Deployment, InstanceGroup
from stagewright.serving.instance import instance
from stagewright.serving.kv_transfer import not_sent
from stagewright.serving.metrics import RequestLimits, Slo
from stagewright.serving.schedulers.named import BatchLimits, batch_limits, scheduler_of
from stagewright.serving.search.bounds import (
    LayoutBounds,
    LoadTotals,
    ReadyLayout,
    layout_bounds,
)
from stagewright.serving.search.pairs import pairs_of, simulate_pair, tried_counts
from stagewright.serving.search.simulated import SimulatedLoad, simulate_load
from stagewright.serving.speculative import drafter_of
from stagewright.serving.workload import Workload

FITS = "weights, activations and a request fit into the memory of a GPU"
ENOUGH = "so few GPUs can serve the load"
KEEPS = "as many requests as must keep the limits"
MODELED = "the layout has step times"
BEATEN = "no other choice has fewer GPUs and faster tokens than the layout could have"

SearchProgress = Callable[[int, int], None]
"""Called with the number of finished steps of the search, and of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingTarget:
    """Latency limits, GPUs and objective of a search."""

    slo: Slo
    share: float = 0.9
    """Share of requests that must keep the limits (SLO attainment of DistServe, arXiv 2401.09670,
    which takes 90%)."""
    most_gpus: int
    pairs: int = 4
    """Pairs of layouts for prompts and for decode that are simulated, the most promising ones."""
    by_cost: bool = False
    """Prefer the lowest cost per hour to the fewest GPUs."""


class ServingChoice(NamedTuple):
    """Layout and number of instances, simulated."""

    layout: int
    """Row of the layout among the candidates."""
    simulated: SimulatedLoad
    usd_per_hour: float
    """nan without a price."""
    prompts: int | None = None
    """The row of the layout of instances that compute prompts, where `layout` only decodes."""

    @property
    def usd_per_million(self) -> float:
        """USD per million output tokens."""
        return self.usd_per_hour / 3600 / self.simulated.output_rate * 1e6


@dataclass(frozen=True, eq=False)
class ServingRanking:
    """Result of a search for serving."""

    rows: Candidates
    """Layouts of one instance."""
    target: ServingTarget
    choices: Sequence[ServingChoice]
    """All simulated choices, in the order of layouts."""
    best: Sequence[int]
    """Cheapest choice of each layout that keeps the limits; the best first."""
    front: Sequence[int]
    """Choices that keep the limits and that no other choice dominates, the slowest user first.

    Both output tokens per second and GPU, and those of a user count."""
    removed: Sequence[Removed]
    """Layouts that no number of instances can serve with, by reason."""
    candidates: int
    """Number of layouts with each number of instances (or of users)."""
    stopped: bool = False
    """Interrupted by the user."""


@dataclass(slots=True)
class _LayoutSearch:
    """State of a search."""

    rows: Candidates
    target: ServingTarget
    engines: EngineSection
    load: LoadTotals
    loosest: Slo
    """Limits that no request may exceed, of whichever class: what bounds are of."""
    choices: list[ServingChoice] = field(default_factory=list[ServingChoice])
    refused: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    def refuse(self, why: str, example: str) -> None:
        self.refused.setdefault(why, []).append(example)

    def group(self, row: int) -> InstanceGroup | None:
        """The group with one instance of a layout; None where it cannot be had."""
        rows, engines = self.rows, self.engines
        run, machine = rows.run(row), rows.machine(row)
        limits: BatchLimits = batch_limits(engines, machine.hardware)
        try:
            execution, share = rows.execution(row), engines.gpu_memory_utilization
            served = instance(
                run, rows.model, machine, execution, most_tokens=limits.tokens,
                most_requests=limits.requests, gpu_memory_utilization=share,
                drafter=drafter_of(engines, run, rows.model),
            )  # fmt: skip
        except UserError as error:
            self.refuse(FITS if "leave no room" in str(error) else MODELED, str(error))
            return None
        ahead = engines.async_scheduling and run.pp == 1
        scheduler = scheduler_of(replace(engines, async_scheduling=ahead), limits)
        return InstanceGroup(served, engines, limits, scheduler)

    def prepared(self, row: int) -> Iterator[ReadyLayout]:
        """Layout with its step times."""
        group = self.group(row)
        if group is not None:
            bounds = layout_bounds(group, self.load, self.loosest)
            yield ReadyLayout(row, group, bounds)

    def able(self, layout: ReadyLayout) -> bool:
        """True if some number of instances may serve the load."""
        name, gpus = self.rows.describe(layout.row), layout.group.gpus
        if layout.bounds.why:
            self.refuse(KEEPS, f"{name}: {layout.bounds.why}")
        elif layout.bounds.least * gpus > self.target.most_gpus:
            self.refuse(ENOUGH, f"{name} needs {layout.bounds.least * gpus} GPUs or more")
        else:
            return True
        return False

    def search_closed_loop(
        self, layout: ReadyLayout, workloads: Sequence[Workload], loads: Sequence[LoadTotals]
    ) -> None:
        """More and more users on one instance, until too many requests miss their limits."""
        for work, load in zip(workloads, loads, strict=True):
            if not self._simulate(layout, layout.group, work, load).meets:
                return

    def search_fewest(self, layout: ReadyLayout, work: Workload) -> None:
        """The fewest instances that keep the limits, between the bound and the most."""
        gpus = layout.group.gpus
        name = self.rows.describe(layout.row)
        if self._beaten(layout):
            self.refuse(BEATEN, f"{name} needs {layout.bounds.least * gpus} GPUs or more")
            return
        limit = self.target.most_gpus // gpus
        met = False
        for attempt in _tried(layout.bounds, limit):
            engines = replace(layout.group.engines, instances=attempt.count)
            group = replace(layout.group, engines=engines)
            attempt.meets = self._simulate(layout, group, work, self.load).meets
            met |= attempt.meets
        if not met:
            self.refuse(KEEPS, f"{name}: not with {limit * gpus} GPUs, either")

    def search_pairs(self, ready: Sequence[ReadyLayout], work: Workload) -> None:
        """Prompts and decode on instances of their own: the most promising pairs of layouts.

        Unless the least cost is asked for, a pair is left when it has an instance of each more than
        the fewest GPUs that serve already.
        """
        target = self.target
        for pair in pairs_of(ready, self.load, self.loosest, target.most_gpus)[: target.pairs]:
            prefill_gpus, decode_gpus = (of.group.gpus for of in pair.layouts)
            gpus = [each.simulated.gpus for each in self.choices if each.simulated.meets]
            limit = target.most_gpus
            if gpus and not target.by_cost:
                limit = min(limit, min(gpus) + prefill_gpus + decode_gpus)
            for each in tried_counts(pair, limit):
                simulated = simulate_pair(pair, each, work, self.load, target.slo)
                usd = self._price(pair.prompts.row) * each.prompts * prefill_gpus
                usd += self._price(pair.decode.row) * each.decode * decode_gpus
                self.choices.append(
                    ServingChoice(pair.decode.row, simulated, usd, pair.prompts.row)
                )

    def _beaten(self, layout: ReadyLayout) -> bool:
        """True if a simulated choice beats any number of these instances.

        It has no more GPUs, no higher price and faster tokens.
        """
        gpus = layout.bounds.least * layout.group.gpus
        usd = self._price(layout.row) * gpus
        fastest = 1 / layout.bounds.least_tpot
        return any(
            choice.simulated.meets
            and choice.simulated.gpus <= gpus
            and not choice.usd_per_hour > usd
            and choice.simulated.user_rate >= fastest
            for choice in self.choices
        )

    def _price(self, row: int) -> float:
        """USD per GPU and hour; nan if unknown."""
        price = self.rows.cluster(row).price
        if price is None:
            price = self.rows.hardware(row).price_usd_per_gpu_hour
        return float("nan") if price is None else price

    def _simulate(
        self, layout: ReadyLayout, group: InstanceGroup, workload: Workload, load: LoadTotals
    ) -> SimulatedLoad:
        """Play and keep a choice."""
        count = group.engines.instances
        simulated, _ = simulate_load(Deployment((group,)), workload, load, self.target.slo, count)
        self.choices.append(
            ServingChoice(layout.row, simulated, self._price(layout.row) * simulated.gpus)
        )
        return simulated


def search_serving(
    rows: Candidates,
    workloads: Sequence[Workload],
    target: ServingTarget,
    engines: EngineSection,
    progress: SearchProgress | None = None,
) -> ServingRanking:
    """The cheapest choices for a load.

    One workload with its own arrivals is simulated on as few instances of each layout as keep the
    limits; more instances are taken to be no worse. Several workloads are closed loops of more and
    more users, simulated on one instance of each layout. Raises UserError where no layout exists.
    """
    loads = [LoadTotals.of(work, target.share) for work in workloads]
    search = _LayoutSearch(
        rows, target, engines, loads[0], RequestLimits.of(workloads[0], target.slo).loosest
    )
    closed = workloads[0].concurrency is not None
    candidates, stopped = 0, False
    try:
        ready: list[ReadyLayout] = []
        for row in range(len(rows)):
            count = target.most_gpus // int(rows.world_size[row])
            candidates += len(workloads) if closed else count
            ready += search.prepared(row)
            if progress is not None:
                progress(row + 1, 2 * len(rows))
        able = sorted(
            filter(search.able, ready), key=lambda each: each.bounds.guess * each.group.gpus
        )
        for index, each in enumerate(able):
            if closed:
                search.search_closed_loop(each, workloads, loads)
            else:
                search.search_fewest(each, workloads[0])
            if progress is not None:
                progress(len(rows) + index + 1, len(rows) + len(able))
        if not closed and target.pairs and not not_sent(rows.model):
            search.search_pairs(ready, workloads[0])
    except KeyboardInterrupt:
        stopped = True
    if not search.choices and not stopped and not search.refused.keys() - {FITS, MODELED}:
        why = next(iter(search.refused.values()))[0]
        raise UserError(f"none of {len(rows)} layouts can serve; the first: {why}")
    best, on_front = _ranked(search, closed)
    removed = [Removed(why, len(examples), examples[0]) for why, examples in search.refused.items()]
    removed.sort(key=lambda each: -each.count)
    return ServingRanking(
        rows, target, search.choices, best, on_front, removed, candidates, stopped
    )


@dataclass(slots=True)
class _Try:
    """Number of instances, and whether it keeps the limits."""

    count: int
    meets: bool = False


def _tried(bounds: LayoutBounds, limit: int) -> Iterator[_Try]:
    """Numbers of instances to play until the fewest are known; begins with the guess."""
    low, high, step = bounds.least - 1, limit + 1, 1
    count = min(bounds.guess, limit)
    failed = 0
    while high - low > 1:
        attempt = _Try(count)
        yield attempt
        if attempt.meets:
            high = count
            count = max(low + 1, high - step) if low == bounds.least - 1 else (low + high) // 2
            step *= 2
        else:
            low, failed = count, failed + 1
            # What fails twice may fail with any number: then the most tells.
            count = low + 1 if failed == 1 else limit if high > limit else (low + high) // 2


def _ranked(of: _LayoutSearch, closed: bool) -> tuple[list[int], list[int]]:
    """The cheapest choice of each layout, the best first; and the front."""
    meets = [nth for nth, each in enumerate(of.choices) if each.simulated.meets]

    def cost(nth: int) -> tuple[float, float, int]:
        each = of.choices[nth]
        simulated = each.simulated
        if closed:
            first = each.usd_per_million if of.target.by_cost else -simulated.per_gpu
        else:
            first = each.usd_per_hour if of.target.by_cost else simulated.gpus
        return first, -simulated.user_rate, nth

    cheapest: dict[tuple[int, int | None], int] = {}
    for nth in sorted(meets, key=cost):
        cheapest.setdefault((of.choices[nth].layout, of.choices[nth].prompts), nth)
    rates = [(of.choices[n].simulated.per_gpu, of.choices[n].simulated.user_rate) for n in meets]
    on_front: list[int] = []
    if rates:
        chosen = front(-np.nan_to_num(np.array(rates)))
        on_front = [nth for nth, on in zip(meets, chosen.tolist(), strict=True) if on]
        on_front.sort(key=lambda nth: of.choices[nth].simulated.user_rate)
    return list(cheapest.values()), on_front
