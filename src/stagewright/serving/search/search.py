"""Search for the cheapest deployments of a load.

For each layout the fewest instances that keep the limits are found, with prompts and decode on the
same instances, then on instances of their own (`pairs`). Each number is simulated for long enough
to tell (`load`). `bounds` exclude layouts and numbers of instances before. Of all the cheapest is
simulated again with `CONFIRMATION` times as many requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from stagewright.errors import UserError
from stagewright.run.sections.serving import EngineSection
from stagewright.searching.candidates import Candidates
from stagewright.searching.ranking import TIE
from stagewright.searching.space import Removed
from stagewright.serving.deployment import Deployment, InstanceGroup
from stagewright.serving.kv_transfer import not_sent
from stagewright.serving.metrics import RequestLimits, Slo
from stagewright.serving.search.bounds import ReadyLayout, layout_bounds
from stagewright.serving.search.load import (
    ServingLoad,
    SimulatedLoad,
    simulate_load,
    simulate_long_enough,
)
from stagewright.serving.search.pairs import find_fewest, pair_deployment, pairs_of, with_instances

FITS = "weights, activations and a request fit into the memory of a GPU"
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

    layouts: tuple[int, ...]
    """Row of each group's layout among the candidates: that for prompts first, if there are two."""
    deployment: Deployment
    simulated: SimulatedLoad
    usd_per_hour: float
    """nan without a price."""

    @property
    def layout(self) -> int:
        """Row of the layout of instances that decode."""
        return self.layouts[-1]

    @property
    def prompts(self) -> int | None:
        """Row of the layout of instances that compute prompts, where others decode."""
        return self.layouts[0] if len(self.layouts) > 1 else None

    @property
    def counts(self) -> tuple[int, ...]:
        """Instances of each group, those that compute prompts first."""
        return counts_of(self.deployment)

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
    def kind(self) -> tuple[tuple[int, ...], EngineSection]:
        """Layouts and settings of engines, whatever the number of instances."""
        return self.layouts, replace(self.deployment.groups[-1].settings, instances=1)


@dataclass(eq=False)
class ServingRanking:
    """Result of a search for serving, or its state until then."""

    rows: Candidates
    """Layouts of one instance."""
    target: ServingTarget
    loads: list[ServingLoad]
    """One load with its own arrivals, or closed loops of more and more users."""
    choices: list[ServingChoice] = field(default_factory=list[ServingChoice])
    """All simulated choices, in the order of simulation."""
    confirmed: set[int] = field(default_factory=set[int])
    """Choices whose figures are of `CONFIRMATION` times as many requests: at least the first of
    each table."""
    dropped: list[ServingChoice] = field(default_factory=list[ServingChoice])
    """First choices that missed the limits under `CONFIRMATION` times as many requests."""
    smaller: dict[int, ServingChoice] = field(default_factory=dict[int, ServingChoice])
    """What the load does to an instance less than the first of each table, by choice; of a single
    instance of each group, to the choice with fewer GPUs that came closest, if there is one."""
    refused: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """Layouts that no number of instances can serve with, by reason."""
    candidates: int = 0
    """Number of layouts with each number of instances (or of users)."""
    stopped: bool = False
    """Interrupted by the user."""
    closest: ServingChoice | None = None
    """Choice that comes closest if none keeps the limits, simulated to the end."""

    @property
    def closed(self) -> bool:
        """True for closed loops: the throughput per GPU counts, not the number of GPUs."""
        return self.loads[0].workload.concurrency is not None

    @property
    def removed(self) -> list[Removed]:
        """Number of refused layouts by reason, and an example."""
        rows = [Removed(why, len(examples), examples[0]) for why, examples in self.refused.items()]
        return sorted(rows, key=lambda row: -row.count)

    @property
    def aggregated(self) -> list[int]:
        """Choices that keep the limits and that no other one dominates, the cheapest first.

        None has no more GPUs (or cost, or throughput per GPU) and faster tokens.
        """
        return self.front(disaggregated=False)

    @property
    def disaggregated(self) -> list[int]:
        """Choices with instances for prompts and for decode, as `aggregated`."""
        return self.front(disaggregated=True)

    @property
    def best(self) -> list[int]:
        """Rows of both tables: first the table with the cheapest choice, and in it that choice."""
        tables = [table for table in (self.aggregated, self.disaggregated) if table]
        tables.sort(key=lambda table: self.cost(table[0]))
        return [choice for table in tables for choice in table]

    @property
    def ties(self) -> list[int]:
        """Choices as cheap as the first, of other layouts, which have slower tokens."""
        best = self.best
        cheapest = {
            choice.kind: index
            for index, choice in enumerate(self.choices)
            if choice.simulated.meets and self.cost(index)[0] == self.cost(best[0])[0]
        }
        for index in best[:1]:
            cheapest.pop(self.choices[index].kind)
        return [*cheapest.values()]

    def cost(self, index: int) -> tuple[float, float, int]:
        """Sort key of a choice: its objective, then the slowness of its tokens; less is better."""
        choice, by_cost = self.choices[index], self.target.by_cost
        if self.closed:
            first = choice.usd_per_million if by_cost else -choice.simulated.per_gpu
        else:
            first = choice.usd_per_hour if by_cost else float(choice.simulated.gpus)
        return first, -choice.tokens_per_user, index

    def front(self, *, disaggregated: bool) -> list[int]:
        """Choices that keep the limits and that none dominates, the cheapest first."""
        meet = [
            index
            for index, choice in enumerate(self.choices)
            if choice.simulated.meets and (choice.prompts is not None) == disaggregated
        ]
        meet.sort(key=self.cost)
        if not self.closed:  # of each kind the fewest instances
            cheapest = {self.choices[index].kind: index for index in reversed(meet)}
            meet = [index for index in meet if cheapest[self.choices[index].kind] == index]
        # Runs of different length differ by a little: a costlier choice must be faster by more.
        faster = 1.0 if self.closed else 1.0 + TIE
        front: list[int] = []
        for index in meet:
            rate = self.choices[index].tokens_per_user
            if not front or rate > faster * self.choices[front[-1]].tokens_per_user:
                front.append(index)
        return front


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
    ranking = ServingRanking(rows, target, [*loads])
    search = _LayoutSearch(ranking, RequestLimits.of(loads[0].workload, target.slo).loosest)
    try:
        search.run(engines, progress)
        if not ranking.best:
            ranking.closest = search.closest()
        elif not ranking.closed:
            for winner in (*ranking.aggregated[:1], *ranking.disaggregated[:1]):
                search.simulate_smaller(winner)
    except KeyboardInterrupt:
        ranking.stopped = True
    if not (ranking.choices or ranking.stopped) and not ranking.refused.keys() - {FITS, MODELED}:
        why = next(iter(ranking.refused.values()))[0]
        raise UserError(f"none of {len(rows)} layouts can serve; the first: {why}")
    return ranking


@dataclass(slots=True)
class _LayoutSearch:
    """Simulations of a search, which fill its ranking."""

    ranking: ServingRanking
    loosest: Slo
    """Limits that no request of any class may exceed; `bounds` are computed from these."""

    def run(self, engines: Sequence[EngineSection], progress: SearchProgress | None) -> None:
        """Simulate deployments of all layouts, and confirm the cheapest."""
        ranking, rows = self.ranking, self.ranking.rows
        ready: list[ReadyLayout] = []
        for row in range(len(rows)):
            count = ranking.target.max_gpus // int(rows.world_size[row])
            ranking.candidates += (len(ranking.loads) if ranking.closed else count) * len(engines)
            for settings in engines:
                if (group := self._group(row, settings)) is not None:
                    bounds = layout_bounds(group, ranking.loads[0].totals, self.loosest)
                    ready.append(ReadyLayout(row, group, bounds))
            if progress is not None:
                progress(row + 1, 2 * len(rows))
        able = sorted(
            filter(self._may_serve, ready), key=lambda each: each.bounds.guess * each.group.gpus
        )
        search = self._search_closed_loop if ranking.closed else self._search_fewest
        for index, layout in enumerate(able):
            search(layout)
            if progress is not None:
                progress(len(rows) + index + 1, len(rows) + len(able))
        if not ranking.closed:
            self._confirm(disaggregated=False)
            if ranking.target.pairs and not not_sent(rows.model):
                self._search_pairs(ready)
                self._confirm(disaggregated=True)

    def _refuse(self, why: str, example: str) -> None:
        self.ranking.refused.setdefault(why, []).append(example)

    def _group(self, row: int, settings: EngineSection) -> InstanceGroup | None:
        """The group with one instance of a layout; None where it is not possible."""
        rows = self.ranking.rows
        try:
            return InstanceGroup.of(
                rows.run(row), rows.model, rows.machine(row), settings, rows.execution(row)
            )
        except UserError as error:
            self._refuse(FITS if "leave no room" in str(error) else MODELED, str(error))
            return None

    def _may_serve(self, layout: ReadyLayout) -> bool:
        """True if some number of instances may serve the load; otherwise notes why not."""
        if layout.bounds.reason:
            name = self.ranking.rows.describe(layout.row)
            self._refuse(KEEPS, f"{name}: {layout.bounds.reason}")
        return not layout.bounds.reason

    def _search_closed_loop(self, layout: ReadyLayout) -> None:
        """More and more users on one instance, until too many requests miss their limits."""
        for index in range(len(self.ranking.loads)):
            if not self._add((layout.row,), Deployment((layout.group,)), index).meets:
                return

    def _search_fewest(self, layout: ReadyLayout) -> None:
        """Find the fewest instances that keep the limits, up to all GPUs."""
        name = self.ranking.rows.describe(layout.row)
        if self._beaten(layout):
            self._refuse(BEATEN, name)
            return
        limit = self.ranking.target.max_gpus // layout.group.gpus

        def meets(count: int) -> bool:
            deployment = Deployment((with_instances(layout.group, count),))
            return self._add((layout.row,), deployment).meets

        if not _find_fewest(layout.bounds.guess, limit, meets):
            self._refuse(KEEPS, f"{name}: not even with {limit * layout.group.gpus} GPUs")

    def _search_pairs(self, ready: Sequence[ReadyLayout]) -> None:
        """Prompts and decode on instances of their own: the most promising pairs of layouts.

        Unless the least cost is asked for, a pair is left when it has an instance of each more than
        the fewest GPUs that serve already.
        """
        target, load = self.ranking.target, self.ranking.loads[0]
        pairs = pairs_of(ready, load.totals, self.loosest, target.max_gpus)
        for pair in pairs[: target.pairs]:
            gpus = [c.simulated.gpus for c in self.ranking.choices if c.simulated.meets]
            limit = target.max_gpus
            if gpus and not target.by_cost:
                limit = min(limit, min(gpus) + sum(each.group.gpus for each in pair.layouts))
            rows = pair.prompts.row, pair.decode.row

            def simulate(prompts: int, decode: int) -> SimulatedLoad:
                return self._add(rows, pair_deployment(pair, prompts, decode))  # noqa: B023

            find_fewest(pair, limit, simulate)

    def _confirm(self, *, disaggregated: bool) -> None:
        """Let winners serve more requests, until the first choice is one that was confirmed.

        Its figures are then those of the longer run. Another choice comes first where it then
        misses the limits, or has slower tokens.
        """
        ranking = self.ranking
        while front := ranking.front(disaggregated=disaggregated):
            winner = front[0]
            if ranking.loads[0].draw is None or winner in ranking.confirmed:
                return
            choice, load = ranking.choices[winner], ranking.loads[0].longer(CONFIRMATION)
            simulated = simulate_load(choice.deployment, load, ranking.target.slo)
            ranking.choices[winner] = choice = choice._replace(simulated=simulated)
            if simulated.meets:
                ranking.confirmed.add(winner)
                continue
            ranking.dropped.append(choice)
            larger = _neighbour(choice, 1)
            if larger is None or larger.gpus > ranking.target.max_gpus:
                continue
            tried = [other.counts for other in ranking.choices if other.kind == choice.kind]
            if counts_of(larger) not in tried:
                self._add(choice.layouts, larger)

    def simulate_smaller(self, winner: int) -> None:
        """Serve the load to its end on a choice with an instance less, or with fewer GPUs."""
        choices = self.ranking.choices
        choice = choices[winner]
        deployment = _neighbour(choice, -1)
        if deployment is None:
            fewer = [c for c in choices if c.simulated.gpus < choice.simulated.gpus]
            if not fewer:
                return
            choice = max(fewer, key=lambda each: each.simulated.good)
            deployment = choice.deployment
        simulated = self._served_whole(deployment, self.ranking.loads[0])
        self.ranking.smaller[winner] = self._choice(choice.layouts, deployment, simulated)

    def closest(self) -> ServingChoice | None:
        """The choice of which most requests keep the limits; None: none was simulated.

        Where a simulation was stopped, its share is a bound: those with the highest bounds serve
        the load to its end, until no other bound is above a share.
        """
        closest: ServingChoice | None = None
        for choice in sorted(self.ranking.choices, key=lambda each: -each.simulated.good):
            if closest is not None and closest.simulated.good >= choice.simulated.good:
                break
            if choice.simulated.stopped:
                users = choice.simulated.concurrency
                load = next(x for x in self.ranking.loads if x.workload.concurrency == users)
                simulated = self._served_whole(choice.deployment, load)
                choice = choice._replace(simulated=simulated)
            if closest is None or choice.simulated.good > closest.simulated.good:
                closest = choice
        return closest

    def _served_whole(self, deployment: Deployment, load: ServingLoad) -> SimulatedLoad:
        """Simulation that no number of missed limits ends."""
        load = load._replace(totals=replace(load.totals, share=0.0))
        return simulate_load(deployment, load, self.ranking.target.slo)

    def _beaten(self, layout: ReadyLayout) -> bool:
        """True if a simulated choice beats any number of these instances.

        It has no more GPUs, no higher price and faster tokens.
        """
        gpus = layout.group.gpus
        usd = self._price(layout.row) * gpus
        fastest = 1 / layout.bounds.min_tpot
        return any(
            choice.simulated.meets
            and choice.simulated.gpus <= gpus
            and not choice.usd_per_hour > usd
            and choice.simulated.user_rate >= fastest
            for choice in self.ranking.choices
        )

    def _price(self, row: int) -> float:
        """USD per GPU and hour; nan if unknown."""
        rows = self.ranking.rows
        price = rows.cluster(row).price
        if price is None:
            price = rows.hardware(row).price_usd_per_gpu_hour
        return math.nan if price is None else price

    def _add(
        self, layouts: tuple[int, ...], deployment: Deployment, load: int = 0
    ) -> SimulatedLoad:
        """Simulate a choice and keep it; later ones serve as many requests as it took."""
        ranking = self.ranking
        simulated, ranking.loads[load] = simulate_long_enough(
            deployment, ranking.loads[load], ranking.target.slo
        )
        ranking.choices.append(self._choice(layouts, deployment, simulated))
        return simulated

    def _choice(
        self, layouts: tuple[int, ...], deployment: Deployment, simulated: SimulatedLoad
    ) -> ServingChoice:
        """A simulated deployment with its price."""
        usd = sum(
            self._price(row) * group.gpus
            for row, group in zip(layouts, deployment.groups, strict=True)
        )
        return ServingChoice(layouts, deployment, simulated, usd)


def counts_of(deployment: Deployment) -> tuple[int, ...]:
    """Instances of each group, those that compute prompts first."""
    return tuple(group.settings.instances for group in deployment.groups)


def _neighbour(choice: ServingChoice, change: int) -> Deployment | None:
    """The deployment with an instance more or less: of a pair, of the larger kind.

    One more is of the kind whose limit binds.
    """
    groups = [*choice.deployment.groups]
    able = [n for n, count in enumerate(choice.counts) if count + change >= 1]
    if not able:
        return None
    if change > 0 and len(groups) > 1:
        place = 1 if choice.simulated.binding == "TPOT" else 0
    else:
        place = max(able, key=lambda n: groups[n].instance.gpus)
    groups[place] = with_instances(groups[place], choice.counts[place] + change)
    return replace(choice.deployment, groups=tuple(groups))


def _find_fewest(guess: int, limit: int, meets: Callable[[int], bool]) -> bool:
    """Simulate numbers of instances until the fewest that meet are known; begins with the guess.

    True if some number up to `limit` meets.
    """
    low, high, step, failed = 0, limit + 1, 1, 0
    count = min(guess, limit)
    while high - low > 1:
        if meets(count):
            high = count
            count = (low + high) // 2 if low else max(1, high - step)
            step *= 2
        else:
            low, failed = count, failed + 1
            # What fails twice may fail with any number: then the most tells.
            count = low + 1 if failed == 1 else limit if high > limit else (low + high) // 2
    return high <= limit
