"""Steps of many configurations with one order of actions: their time, and where that goes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Float, Int, distinct_rows
from stagewright.explore.actions import ASIDE, GPU, HOST, LAUNCHES, STORED, StepKind
from stagewright.explore.pipeline import (
    Effect,
    RankEnd,
    StepCounts,
    effect,
    order_of,
    play,
    slowest_loop,
    step_counts,
    ways,
)
from stagewright.explore.responses import SUMS, Responses, response
from stagewright.explore.templates import Kinds
from stagewright.schedule.actions import Order
from stagewright.schedule.places import places
from stagewright.time.columns.neighbours import NeighbourMessages
from stagewright.time.expense.power import RUNNING_FRACTION


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What configurations that are played together have in common."""

    schedule: str
    pp: int
    vpp: int
    group: int | None
    played: int
    """Microbatches that are played; see `pipeline.rounds`."""
    before: int

    def order(self, microbatches: int) -> Order:
        """What each rank does with so many microbatches."""
        return order_of(self.schedule, self.pp, microbatches, self.vpp, self.group)


class _OrderFacts(NamedTuple):
    """What follows from a pipeline's order of actions."""

    kinds: Kinds
    """Of its stages and ranks."""
    ways: frozenset[tuple[int, int]]
    """The pairs of ranks between which messages are waited for."""
    counts: tuple[StepCounts, ...]
    """Steps of each kind by rank, of the microbatches that are played."""
    added: list[StepCounts]
    """Steps that a round of microbatches adds; none where all are played."""
    held: list[list[int]]
    """The stages of each rank."""


@lru_cache(maxsize=256)
def _facts(of: Pipeline) -> _OrderFacts:
    order = of.order(of.played)
    counts = step_counts(order)
    added: list[StepCounts] = [{} for _ in counts]
    if of.before:
        pairs = zip(counts, step_counts(of.order(of.before)), strict=True)
        added = [{k: n - before.get(k, 0) for k, n in now.items()} for now, before in pairs]
    held: list[list[int]] = [[] for _ in counts]
    for place in places(order):
        held[place.rank].append(place.stage)
    return _OrderFacts(Kinds.of(order), ways(order), counts, added, held)


@dataclass(frozen=True, slots=True, eq=False)
class Lot:
    """Configurations of one structure on one machine that are played together."""

    responses: Responses
    tuples: Int
    """Which numbers of the structure each has: [configurations]."""
    timed_as: Int
    """Equal where the actions take the same time (`Responses.classes`): [configurations]."""
    layers: Int
    """Of each variant on each stage: [variants, stages]."""
    microbatches: Int
    more: Float
    """Rounds that are added to those that are played: [configurations]."""
    messages: NeighbourMessages

    def distinct(self, ways: Collection[tuple[int, int]]) -> _DistinctLot:
        """The configurations whose actions and messages on these ways take other times."""
        first, of = distinct_rows([self.timed_as, self.messages.classes(ways)])
        own = self.tuples[first], self.timed_as[first], self.layers
        numbers = self.microbatches[first], self.more[first]
        return _DistinctLot(Lot(self.responses, *own, *numbers, self.messages.take(first)), of)


class _DistinctLot(NamedTuple):
    """Configurations whose actions take other times, and those of a lot that each stands for."""

    lot: Lot
    of: Int
    """Which of these each configuration is played as: [configurations]."""


class StepColumns(NamedTuple):
    """The steps of configurations: seconds, [configurations] each."""

    seconds: Float
    bubble: Float
    """Of the mean rank, as its waits are. Waiting for the messages of a pipeline is part of it."""
    exposed: dict[str, Float]
    launches: Float
    running: Float
    """Share of the step in which kernels of the mean GPU run, communication included."""
    drawn: Float
    """Mean power of these over TDP."""


class _Ends(NamedTuple):
    """When all is done, and when all actions are: [configurations]."""

    whole: Float
    actions: Float
    tail: Float
    """Seconds that the mean rank takes after its actions, without its waits for other ranks."""


def steps(of: Pipeline, lots: Sequence[Lot]) -> list[StepColumns]:
    """The steps of each lot."""
    played = _PlayedLots(of, lots)
    ends = played.ends(of.played)
    seconds = [end.whole for end in ends]
    if of.before:
        pairs = zip(ends, played.ends(of.before), strict=True)
        seconds = [_continued(played, nth, now, then) for nth, (now, then) in enumerate(pairs)]
    pairs = zip(seconds, ends, strict=True)
    return [played.parts(nth, each, end.tail) for nth, (each, end) in enumerate(pairs)]


def _continued(played: _PlayedLots, nth: int, now: _Ends, before: _Ends) -> Float:
    """The time with all rounds: each further one adds what the last one has added, or more."""
    of, lot = played.of, played.lots[nth]
    pace, host = played.pace(nth)
    period = np.maximum(now.whole - before.whole, (of.played - of.before) * pace)
    # What takes longer than the kernels beside it may fall behind only later.
    launched = lot.microbatches * host + (now.whole - now.actions)
    return np.maximum(now.whole + lot.more * np.maximum(period, 0.0), launched)


class _RankGroup(NamedTuple):
    """Ranks that do the same after all actions."""

    kind: int
    held: Float
    """Layers of each variant that each of them has."""
    ranks: list[int]


class _CountedStep(NamedTuple):
    """How often a step occurs on all ranks."""

    step: StepKind
    complete: bool
    played: int
    added: int
    """By each round that is added."""


class _PlayedLots:
    """Configurations in lots, played together: those that are played alike, once."""

    def __init__(self, of: Pipeline, lots: Sequence[Lot]) -> None:
        self.of, self.lots = of, lots
        self.facts = _facts(of)
        self.kinds = self.facts.kinds
        distinct = [lot.distinct(self.facts.ways) for lot in lots]
        self.few = [each.lot for each in distinct]
        self.each = [each.of for each in distinct]
        self.edges = np.cumsum([0, *(len(lot.tuples) for lot in self.few)])
        self._rows: list[dict[tuple[object, ...], Float]] = [{} for _ in lots]
        self._effects: dict[tuple[object, ...], Effect] = {}

    # ---- actions ---------------------------------------------------------------------------------

    def _key(self, nth: int, stage: int) -> tuple[int, tuple[int, ...]]:
        """What the actions of a stage are the same for, in one lot."""
        return self.kinds.stage(stage), tuple(self.lots[nth].layers[:, stage].tolist())

    def _step(self, lot: Lot, step: StepKind, complete: bool, rows: slice) -> Float:
        """Rows of a step (`responses.LinearResponse`) for a lot: [rows, configurations]."""
        kind = tuple((self.kinds.stage(stage), letter) for stage, letter in step)
        layers = lot.layers[:, [stage for stage, _ in step]]
        return lot.responses.at(kind, complete, lot.tuples, layers, rows)

    def _moments(self, nth: int, step: StepKind, complete: bool) -> Float:
        """The rows of a step's response: [rows, distinct configurations of a lot]."""
        key = *((self._key(nth, stage), letter) for stage, letter in step), complete
        if key not in self._rows[nth]:
            lot = self.few[nth]
            self._rows[nth][key] = self._step(lot, step, complete, lot.responses.moments)
        return self._rows[nth][key]

    def _given(self, step: StepKind, complete: bool) -> Effect:
        lots = range(len(self.few))
        of = tuple((tuple(self._key(nth, stage) for nth in lots), letter) for stage, letter in step)
        key = of, complete
        if key not in self._effects:
            every = [self._moments(nth, step, complete) for nth in lots]
            self._effects[key] = effect(response(np.concatenate(every, axis=1)))
        return self._effects[key]

    def _message(self, a: int, b: int) -> Float:
        return np.concatenate([lot.messages.seconds(a, b) for lot in self.few])

    def ends(self, microbatches: int) -> list[_Ends]:
        """The ends of steps of so many microbatches, by lot."""
        found = play(self.of.order(microbatches), self._given, self._message)
        result: list[_Ends] = []
        for nth in range(len(self.few)):
            mine = slice(int(self.edges[nth]), int(self.edges[nth + 1]))
            ends = [RankEnd(*(column[mine] for column in rank)) for rank in found.ranks]
            actions = _latest([of.gpu for of in ends])[self.each[nth]]
            whole, tail = self._end(nth, ends)
            result.append(_Ends(whole, actions, tail))
        return result

    def _times(self, nth: int) -> list[_CountedStep]:
        """How often the distinct steps of a lot occur."""
        found: dict[tuple[object, ...], _CountedStep] = {}
        for counts, added in zip(self.facts.counts, self.facts.added, strict=True):
            for (step, complete), count in counts.items():
                key = *((self._key(nth, stage), letter) for stage, letter in step), complete
                before = found.get(key, _CountedStep(step, complete, 0, 0))
                more = added.get((step, complete), 0)
                found[key] = before._replace(
                    played=before.played + count, added=before.added + more
                )
        return [*found.values()]

    def pace(self, nth: int) -> tuple[Float, Float]:
        """Seconds that a microbatch adds to many, at least: those of the busiest rank; and those of
        its host, of its communication along dp, or of its transfers to the host."""
        pp, lot = self.of.pp, self.few[nth]
        zero = np.zeros(len(lot.tuples))
        both: list[Float] = []
        beside: list[Float] = []
        for counts in self.facts.added:
            every = [
                (count / (self.of.played - self.of.before), response(self._moments(nth, *of)))
                for of, count in counts.items()
                if count
            ]
            both.append(sum((n * of.gpu[GPU] for n, of in every), zero))
            beside.append(sum((n * np.maximum(of.host[HOST], 0) for n, of in every), zero))
            beside.append(sum((n * np.maximum(of.aside[ASIDE], 0) for n, of in every), zero))
            beside.append(sum((n * np.maximum(of.stored[STORED], 0) for n, of in every), zero))
        pace, host = _latest(both), _latest(beside)
        if self.of.schedule == "1f1b":
            there = [2 * lot.messages.seconds(rank, rank + 1) for rank in range(pp - 1)]
            pace = slowest_loop(both, there)
        return pace[self.each[nth]], host[self.each[nth]]

    # ---- after all actions -----------------------------------------------------------------------

    def _groups(self, nth: int) -> list[_RankGroup]:
        """The ranks of a lot's pipelines."""
        found: dict[tuple[int, bytes], _RankGroup] = {}
        for rank in range(self.of.pp):
            held = self.lots[nth].layers[:, self.facts.held[rank]].sum(axis=1).astype(np.float64)
            kind = self.kinds.rank(rank)
            group = found.setdefault((kind, held.tobytes()), _RankGroup(kind, held, []))
            group.ranks.append(rank)
        return [*found.values()]

    def _section(self, nth: int, of: _RankGroup, number: int, rows: slice) -> Float:
        """Rows of a section of what ranks do after all actions: [rows, configurations]."""
        lot = self.lots[nth]
        section = lot.responses.tails[of.kind].sections[number]
        return section.at(lot.tuples, of.held, rows)

    def _end(self, nth: int, ends: list[RankEnd]) -> tuple[Float, Float]:
        """The end of the last task of all ranks, given when they are done with all actions; and the
        tail of the mean rank (`_Ends`).

        Of ranks that do the same the latest of each moment decides.
        """
        lot, each, groups = self.lots[nth], self.each[nth], self._groups(nth)
        moments = lot.responses.moments
        meetings = [lot.responses.tails[of.kind].meetings for of in groups]
        state = [
            RankEnd(*(_latest(every)[each] for every in zip(*of, strict=True)))
            for of in ([ends[rank] for rank in group.ranks] for group in groups)
        ]
        last = [_latest([of.gpu, of.aside, of.stored]) for of in state]
        waited = [of.gpu for of in state]
        reached = [0] * len(groups)
        for own, group in enumerate(groups):
            section = self._section(nth, group, 0, moments)
            state[own], last[own] = _after(state[own], section, last[own])
        for meeting in max(meetings, key=len):
            met = [
                own for own in range(len(groups))
                if reached[own] < len(meetings[own])
                and meetings[own][reached[own]].slot == meeting.slot
            ]  # fmt: skip
            ready = [
                np.maximum(state[own].gpu, state[own].aside) if meeting.aside else state[own].gpu
                for own in met
            ]
            took = meeting.seconds
            took = took[lot.tuples] if len(took) > 1 else took
            at = _latest(ready) + took
            for own, there in zip(met, ready, strict=True):
                waited[own] = waited[own] + (at - took - there)
                reached[own] += 1
                after = state[own]._replace(gpu=at)
                section = self._section(nth, groups[own], reached[own], moments)
                state[own], last[own] = _after(after, section, last[own])
        pairs = zip(groups, last, waited, strict=True)
        tails = [len(group.ranks) * (end - before) for group, end, before in pairs]
        return _latest(last), sum(tails, 0 * last[0]) / self.of.pp

    # ---- where the time goes ---------------------------------------------------------------------

    def parts(self, nth: int, seconds: Float, tail: Float) -> StepColumns:
        """The parts of steps that take so long, `tail` after all actions: of the mean rank."""
        lot = self.lots[nth]
        axes, rows = lot.responses.axes, lot.responses.sums
        sums = np.zeros((SUMS + len(axes), len(lot.tuples)))
        behind, host = np.zeros_like(sums), np.zeros(len(lot.tuples))
        for step, complete, played, added in self._times(nth):
            times = played + lot.more * added
            sums += times * self._step(lot, step, complete, rows)
            launched = response(self._moments(nth, step, complete)).host[HOST]
            host += times * np.maximum(launched, 0.0)[self.each[nth]]
        for group in self._groups(nth):
            for number in range(len(lot.responses.tails[group.kind].sections)):
                behind += len(group.ranks) * self._section(nth, group, number, rows)
        sums, behind, host = sums / self.of.pp, behind / self.of.pp, host / self.of.pp
        busy, drawn, *_ = sums + behind
        waits = dict(zip(axes, (sums + behind)[SUMS:], strict=True))
        rest = np.maximum(seconds - busy - sum(waits.values(), 0 * busy), 0.0)
        launches = waits.pop(LAUNCHES, np.zeros(len(lot.tuples)))
        waits.pop("pp", None)
        # Kernels wait for a host that takes longer than they do.
        slow = np.clip(host - (seconds - rest), 0.0, rest)
        launches, rest = launches + slow, rest - slow
        # Behind all actions, gradients and weights are waited for; with one rank, nothing but these
        # is between actions.
        late = np.maximum(tail - behind[0] - behind[SUMS:].sum(axis=0), 0.0)
        late = rest if self.of.pp == 1 else np.minimum(late, rest)
        waits["dp"] = waits.get("dp", 0.0) + late
        exposed = sum(waits.values(), 0 * busy)
        return StepColumns(
            seconds, rest - late, waits, launches,
            np.minimum((busy + exposed) / seconds, 1.0),
            (drawn + RUNNING_FRACTION * exposed) / seconds,
        )  # fmt: skip


def _latest(times: Sequence[Float]) -> Float:
    found = times[0]
    for other in times[1:]:
        found = np.maximum(found, other)
    return found


def _after(state: RankEnd, section: Float, last: Float) -> tuple[RankEnd, Float]:
    """A rank's moments after a section, and its last end."""
    of = response(section)
    inputs = (GPU, state.gpu), (ASIDE, state.aside), (HOST, state.host), (STORED, state.stored)

    def latest(field: Float) -> Float:
        return _latest([at + field[nth] for nth, at in inputs])

    chain = latest(of.chain)
    chain_stored = latest(of.chain_stored)
    after = RankEnd(
        latest(of.gpu),
        np.maximum(latest(of.aside), chain),
        latest(of.host),
        np.maximum(latest(of.stored), chain_stored),
    )
    return after, _latest([last, latest(of.end), chain, chain_stored])
