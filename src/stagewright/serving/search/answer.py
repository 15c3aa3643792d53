"""Search for the cheapest deployments of a load: for each layout the fewest instances that keep the
limits, simulated long enough to tell, and of all the cheapest, simulated five times as long."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from stagewright.errors import UserError
from stagewright.run.sections.serving import EngineSection
from stagewright.searching.candidates import Candidates
from stagewright.searching.space import Removed
from stagewright.serving.deployment import Deployment, InstanceGroup
from stagewright.serving.kv_transfer import not_sent
from stagewright.serving.metrics import RequestLimits, Slo
from stagewright.serving.search.bounds import LayoutBounds, ReadyLayout, layout_bounds
from stagewright.serving.search.pairs import LayoutPair, counts_to_try, pair_deployment, pairs_of
from stagewright.serving.search.simulated import (
    ServingLoad,
    SimulatedLoad,
    simulate_load,
    simulate_long_enough,
)

FITS = "weights, activations and a request fit into the memory of a GPU"
ENOUGH = "so few GPUs can serve the load"
KEEPS = "as many requests as must keep the limits"
MODELED = "the layout has step times"
BEATEN = "no other choice has fewer GPUs and faster tokens than the layout could have"

CONFIRMATION = 5
"""Factor by which the winner's final simulation has more requests."""

SearchProgress = Callable[[int, int], None]
"""Called with the number of finished steps of the search, and of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingTarget:
    """Latency limits, GPUs and objective of a search."""

    slo: Slo
    share: float = 0.9
    """Share of requests that must keep the limits (SLO attainment of DistServe, arXiv 2401.09670,
    which takes 90%)."""
    max_gpus: int
    pairs: int = 4
    """Pairs of layouts for prompts and for decode that are simulated, the most promising ones."""
    by_cost: bool = False
    """Prefer the lowest cost per hour to the fewest GPUs."""


class ServingChoice(NamedTuple):
    """Deployment of a layout, or of two, simulated."""

    layout: int
    """Row of the layout, of the instances that decode, among the candidates."""
    deployment: Deployment
    simulated: SimulatedLoad
    usd_per_hour: float
    """nan without a price."""
    prompts: int | None = None
    """Row of the layout of instances that compute prompts, where `layout` only decodes."""
    pair: LayoutPair | None = None

    @property
    def usd_per_million(self) -> float:
        """USD per million output tokens."""
        return self.usd_per_hour / 3600 / self.simulated.output_rate * 1e6

    @property
    def tokens_per_user(self) -> float:
        """Output tokens per second of the median user; 0 of requests with a single token."""
        rate = self.simulated.user_rate
        return 0.0 if math.isnan(rate) else rate

    @property
    def kind(self) -> tuple[int, int | None, EngineSection]:
        """Layouts and settings of engines, whatever the number of instances."""
        return self.layout, self.prompts, replace(self.deployment.groups[-1].settings, instances=1)


class SmallerDeployment(NamedTuple):
    """A winner with an instance less, under the same load."""

    deployment: Deployment
    simulated: SimulatedLoad


@dataclass(frozen=True, eq=False)
class ServingRanking:
    """Result of a search for serving."""

    rows: Candidates
    """Layouts of one instance."""
    target: ServingTarget
    closed: bool
    """Loads are closed loops, of which the throughput per GPU counts, not the number of GPUs."""
    choices: Sequence[ServingChoice]
    """All simulated choices, in the order of layouts."""
    aggregated: Sequence[int]
    """Choices that keep the limits and that no other one dominates, the cheapest first: none has
    no more GPUs (or cost, or throughput per GPU) and faster tokens."""
    disaggregated: Sequence[int]
    """Choices with instances for prompts and for decode, as `aggregated`."""
    ties: Sequence[int]
    """Choices as cheap as the first, of other layouts, which have slower tokens."""
    smaller: Mapping[int, SmallerDeployment]
    """Deployments with an instance less than the first of each table, by choice; none of one
    instance."""
    dropped: Sequence[ServingChoice]
    """First choices that missed the limits under `CONFIRMATION` times as many requests."""
    confirmed: Mapping[int, SimulatedLoad]
    """Loads of `CONFIRMATION` times as many requests on the first of each table, by choice."""
    removed: Sequence[Removed]
    """Layouts that no number of instances can serve with, by reason."""
    candidates: int
    """Number of layouts with each number of instances (or of users)."""
    stopped: bool = False
    """Interrupted by the user."""
    closest: ServingChoice | None = None
    """Choice that comes closest if none keeps the limits, simulated to the end."""

    @property
    def best(self) -> list[int]:
        """Rows of both tables: first the table with the cheapest choice, and in it that choice."""
        tables = [self.aggregated, self.disaggregated]
        if all(tables) and self.cost(self.disaggregated[0]) < self.cost(self.aggregated[0]):
            tables.reverse()
        return [*tables[0], *tables[1]]

    def cost(self, choice: int) -> tuple[float, float, int]:
        """Sort key of a choice: its objective, then the slowness of its tokens; less is better."""
        cost = _cost(self.choices[choice], self.closed, self.target.by_cost)
        return (*cost, choice)


def _cost(choice: ServingChoice, closed: bool, by_cost: bool) -> tuple[float, float]:
    if closed:
        first = choice.usd_per_million if by_cost else -choice.simulated.per_gpu
    else:
        first = choice.usd_per_hour if by_cost else float(choice.simulated.gpus)
    return first, -choice.tokens_per_user


@dataclass(slots=True)
class _LayoutSearch:
    """State of a search."""

    rows: Candidates
    target: ServingTarget
    loads: list[ServingLoad]
    closed: bool
    loosest: Slo
    """Limits that no request of any class may exceed; `bounds` are computed from these."""
    choices: list[ServingChoice] = field(default_factory=list[ServingChoice])
    confirmed: dict[int, SimulatedLoad] = field(default_factory=dict[int, SimulatedLoad])
    """Loads of more requests on the winners, by choice."""
    dropped: list[ServingChoice] = field(default_factory=list[ServingChoice])
    refused: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    def refuse(self, why: str, example: str) -> None:
        self.refused.setdefault(why, []).append(example)

    def group(self, row: int, engines: EngineSection) -> InstanceGroup | None:
        """The group with one instance of a layout; None where it cannot be had."""
        rows = self.rows
        run, machine = rows.run(row), rows.machine(row)
        try:
            return InstanceGroup.of(run, rows.model, machine, engines, rows.execution(row))
        except UserError as error:
            self.refuse(FITS if "leave no room" in str(error) else MODELED, str(error))
            return None

    def prepare(self, row: int, engines: EngineSection) -> Iterator[ReadyLayout]:
        """Layout with its step times."""
        group = self.group(row, engines)
        if group is not None:
            bounds = layout_bounds(group, self.loads[0].totals, self.loosest)
            yield ReadyLayout(row, group, bounds)

    def may_serve(self, layout: ReadyLayout) -> bool:
        """True if some number of instances may serve the load; otherwise notes why not."""
        name, gpus = self.rows.describe(layout.row), layout.group.gpus
        if layout.bounds.reason:
            self.refuse(KEEPS, f"{name}: {layout.bounds.reason}")
        elif layout.bounds.min_instances * gpus > self.target.max_gpus:
            self.refuse(ENOUGH, f"{name} needs {layout.bounds.min_instances * gpus} GPUs or more")
        else:
            return True
        return False

    def search_closed_loop(self, layout: ReadyLayout) -> None:
        """More and more users on one instance, until too many requests miss their limits."""
        for index in range(len(self.loads)):
            if not self._add(layout.row, Deployment((layout.group,)), index).meets:
                return

    def search_fewest(self, layout: ReadyLayout) -> None:
        """Find the fewest instances that keep the limits, from the lower bound to all GPUs."""
        gpus = layout.group.gpus
        name = self.rows.describe(layout.row)
        if self._beaten(layout):
            self.refuse(BEATEN, f"{name} needs {layout.bounds.min_instances * gpus} GPUs or more")
            return
        limit = self.target.max_gpus // gpus
        met = False
        for attempt in _attempts(layout.bounds, limit):
            deployment = Deployment((with_instances(layout.group, attempt.count),))
            attempt.meets = self._add(layout.row, deployment).meets
            met |= attempt.meets
        if not met:
            self.refuse(KEEPS, f"{name}: not even with {limit * gpus} GPUs")

    def search_pairs(self, ready: Sequence[ReadyLayout]) -> None:
        """Prompts and decode on instances of their own: the most promising pairs of layouts.

        Unless the least cost is asked for, a pair is left when it has an instance of each more than
        the fewest GPUs that serve already.
        """
        target, load = self.target, self.loads[0]
        pairs = pairs_of(ready, load.totals, self.loosest, target.max_gpus)
        for pair in pairs[: target.pairs]:
            prefill_gpus, decode_gpus = (layout.group.gpus for layout in pair.layouts)
            gpus = [each.simulated.gpus for each in self.choices if each.simulated.meets]
            limit = target.max_gpus
            if gpus and not target.by_cost:
                limit = min(limit, min(gpus) + prefill_gpus + decode_gpus)
            for attempt in counts_to_try(pair, limit):
                deployment = pair_deployment(pair, attempt.prompts, attempt.decode)
                simulated = self._add(pair.decode.row, deployment, pair=pair)
                attempt.meets = simulated.meets
                attempt.ttft_binds = simulated.binding != "TPOT"

    def front(self, *, disaggregated: bool) -> list[int]:
        """Choices that keep the limits and that none dominates, the cheapest first."""
        meet = [
            index
            for index, each in enumerate(self.choices)
            if each.simulated.meets and (each.prompts is not None) == disaggregated
        ]
        meet.sort(key=self._cost)
        if not self.closed:  # of each kind the fewest instances
            cheapest = {self.choices[index].kind: index for index in reversed(meet)}
            meet = [index for index in meet if cheapest[self.choices[index].kind] == index]
        front: list[int] = []
        for index in meet:
            rate = self.choices[index].tokens_per_user
            if not front or rate > self.choices[front[-1]].tokens_per_user:
                front.append(index)
        return front

    def confirm(self, *, disaggregated: bool) -> None:
        """Let the winner serve more requests; the next one where it then misses the limits."""
        while front := self.front(disaggregated=disaggregated):
            winner = front[0]
            if self.loads[0].draw is None:
                return
            choice, load = self.choices[winner], self.loads[0].longer(CONFIRMATION)
            simulated = simulate_load(choice.deployment, load, self.target.slo)
            if simulated.meets:
                self.confirmed[winner] = simulated
                return
            self.choices[winner] = choice = choice._replace(simulated=simulated)
            self.dropped.append(choice)
            larger = self._neighbour(choice, 1)
            if larger is None or larger.gpus > self.target.max_gpus:
                continue
            alike = [other.deployment for other in self.choices if other.kind == choice.kind]
            if counts_of(larger) not in map(counts_of, alike):
                self._add(choice.layout, larger, pair=choice.pair)

    def smaller(self, choice: ServingChoice) -> SmallerDeployment | None:
        """The choice with an instance less, which serves the load to its end."""
        deployment = self._neighbour(choice, -1)
        if deployment is None:
            return None
        return SmallerDeployment(deployment, self._served_whole(deployment, self.loads[0]))

    def closest(self) -> ServingChoice | None:
        """The choice of which most requests keep the limits; None: none was simulated.

        Where a simulation was stopped, its share is a bound: those with the highest bounds serve
        the load to its end, until no other bound is above a share.
        """
        closest: ServingChoice | None = None
        for choice in sorted(self.choices, key=lambda each: -each.simulated.good):
            if closest is not None and closest.simulated.good >= choice.simulated.good:
                break
            if choice.simulated.stopped:
                users = choice.simulated.concurrency
                load = next(each for each in self.loads if each.workload.concurrency == users)
                simulated = self._served_whole(choice.deployment, load)
                choice = choice._replace(simulated=simulated)
            if closest is None or choice.simulated.good > closest.simulated.good:
                closest = choice
        return closest

    def _served_whole(self, deployment: Deployment, load: ServingLoad) -> SimulatedLoad:
        """Simulation that no number of missed limits ends."""
        load = load._replace(totals=replace(load.totals, share=0.0))
        return simulate_load(deployment, load, self.target.slo)

    def _neighbour(self, choice: ServingChoice, change: int) -> Deployment | None:
        """The deployment with an instance more or less: of a pair, of the larger kind.

        One more is of the kind whose limit binds.
        """
        groups = [*choice.deployment.groups]
        able = [n for n, group in enumerate(groups) if group.settings.instances + change >= 1]
        if not able:
            return None
        if change > 0 and len(groups) > 1:
            place = 1 if choice.simulated.binding == "TPOT" else 0
        else:
            place = max(able, key=lambda n: groups[n].instance.gpus)
        count = groups[place].settings.instances + change
        groups[place] = with_instances(groups[place], count)
        return replace(choice.deployment, groups=tuple(groups))

    def _beaten(self, layout: ReadyLayout) -> bool:
        """True if a simulated choice beats any number of these instances.

        It has no more GPUs, no higher price and faster tokens.
        """
        gpus = layout.bounds.min_instances * layout.group.gpus
        usd = self._price(layout.row) * gpus
        fastest = 1 / layout.bounds.min_tpot
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

    def _cost(self, index: int) -> tuple[float, float, int]:
        return (*_cost(self.choices[index], self.closed, self.target.by_cost), index)

    def _add(
        self, row: int, deployment: Deployment, load: int = 0, pair: LayoutPair | None = None
    ) -> SimulatedLoad:
        """Simulate a choice and keep it; later ones serve as many requests as it took."""
        simulated, self.loads[load] = simulate_long_enough(
            deployment, self.loads[load], self.target.slo
        )
        rows = [row] if pair is None else [pair.prompts.row, row]
        usd = sum(
            self._price(row) * group.gpus
            for row, group in zip(rows, deployment.groups, strict=True)
        )
        prompts = None if pair is None else pair.prompts.row
        self.choices.append(ServingChoice(row, deployment, simulated, usd, prompts, pair))
        return simulated


def counts_of(deployment: Deployment) -> tuple[int, ...]:
    """Instances of each group, those that compute prompts first."""
    return tuple(group.settings.instances for group in deployment.groups)


def with_instances(group: InstanceGroup, count: int) -> InstanceGroup:
    """The group with another number of instances."""
    return replace(group, settings=replace(group.settings, instances=count))


def search_serving(
    rows: Candidates,
    loads: Sequence[ServingLoad],
    target: ServingTarget,
    engines: Sequence[EngineSection],
    progress: SearchProgress | None = None,
) -> ServingRanking:
    """The cheapest choices for a load, of each layout with each of the settings of engines.

    One load with its own arrivals is simulated on as few instances of each layout as keep the
    limits; more instances are taken to be no worse. Several loads are closed loops of more and
    more users, simulated on one instance of each layout. Raises UserError where no layout exists.
    """
    closed = loads[0].workload.concurrency is not None
    loosest = RequestLimits.of(loads[0].workload, target.slo).loosest
    search = _LayoutSearch(rows, target, [*loads], closed, loosest)
    candidates, stopped = 0, False
    try:
        ready: list[ReadyLayout] = []
        for row in range(len(rows)):
            count = target.max_gpus // int(rows.world_size[row])
            candidates += (len(loads) if closed else count) * len(engines)
            for each in engines:
                ready += search.prepare(row, each)
            if progress is not None:
                progress(row + 1, 2 * len(rows))
        able = sorted(
            filter(search.may_serve, ready), key=lambda each: each.bounds.guess * each.group.gpus
        )
        for index, each in enumerate(able):
            if closed:
                search.search_closed_loop(each)
            else:
                search.search_fewest(each)
            if progress is not None:
                progress(len(rows) + index + 1, len(rows) + len(able))
        if not closed:
            search.confirm(disaggregated=False)
            if target.pairs and not not_sent(rows.model):
                search.search_pairs(ready)
                search.confirm(disaggregated=True)
    except KeyboardInterrupt:
        stopped = True
    if not search.choices and not stopped and not search.refused.keys() - {FITS, MODELED}:
        why = next(iter(search.refused.values()))[0]
        raise UserError(f"none of {len(rows)} layouts can serve; the first: {why}")
    removed = [Removed(why, len(examples), examples[0]) for why, examples in search.refused.items()]
    removed.sort(key=lambda each: -each.count)
    ranking = ServingRanking(
        rows, target, closed, search.choices, search.front(disaggregated=False),
        search.front(disaggregated=True), (), {}, search.dropped, search.confirmed, removed,
        candidates, stopped,
    )  # fmt: skip
    return _explain(ranking, search)


def _explain(ranking: ServingRanking, search: _LayoutSearch) -> ServingRanking:
    """The ranking with ties of the winner and deployments of an instance less, or the closest."""
    if not ranking.best:
        try:
            return ranking if ranking.stopped else replace(ranking, closest=search.closest())
        except KeyboardInterrupt:
            return replace(ranking, stopped=True)
    first, choices = ranking.best[0], ranking.choices
    ties = {
        each.kind: index
        for index, each in enumerate(choices)
        if each.simulated.meets
        and each.kind != choices[first].kind
        and ranking.cost(index)[0] == ranking.cost(first)[0]
    }
    ranking = replace(ranking, ties=[*ties.values()])
    if ranking.closed or ranking.stopped:
        return ranking
    smaller: dict[int, SmallerDeployment] = {}
    try:
        for winner in (*ranking.aggregated[:1], *ranking.disaggregated[:1]):
            found = search.smaller(choices[winner])
            if found is not None:
                smaller[winner] = found
    except KeyboardInterrupt:
        ranking = replace(ranking, stopped=True)
    return replace(ranking, smaller=smaller)


@dataclass(slots=True)
class _Attempt:
    """Number of instances, and whether it keeps the limits."""

    count: int
    meets: bool = False


def _attempts(bounds: LayoutBounds, limit: int) -> Iterator[_Attempt]:
    """Numbers of instances to simulate until the fewest are known; begins with the guess."""
    low, high, step = bounds.min_instances - 1, limit + 1, 1
    count = min(bounds.guess, limit)
    failed = 0
    while high - low > 1:
        attempt = _Attempt(count)
        yield attempt
        if attempt.meets:
            high = count
            count = (
                max(low + 1, high - step) if low == bounds.min_instances - 1 else (low + high) // 2
            )
            step *= 2
        else:
            low, failed = count, failed + 1
            # What fails twice may fail with any number: then the most tells.
            count = low + 1 if failed == 1 else limit if high > limit else (low + high) // 2
