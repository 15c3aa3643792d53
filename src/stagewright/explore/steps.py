"""Steps of many configurations with one order of actions: their time, and where that goes."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Float, Int, distinct_rows, latest
from stagewright.explore.actions import ASIDE, GPU, HOST, LAUNCHES, MESSAGE, NEVER, StepKind
from stagewright.explore.pipeline.effects import Effect, effect
from stagewright.explore.pipeline.ordered_steps import StepCounts, step_counts, ways
from stagewright.explore.pipeline.play import play_each
from stagewright.explore.pipeline.rounds import slowest_loop
from stagewright.explore.responses import SUMS, LiveResponse, Responses, seconds_behind
from stagewright.explore.shared.after_actions import AfterActions, Ends
from stagewright.explore.shared.played import EqualRows
from stagewright.explore.templates import Kinds
from stagewright.schedule.pipeline import Pipeline
from stagewright.schedule.places import places
from stagewright.time.columns.neighbours import NeighbourMessages
from stagewright.time.expense.power import RUNNING_FRACTION


class _OrderFacts(NamedTuple):
    """What follows from a pipeline's order of actions, with so many microbatches."""

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
def _facts(of: Pipeline, played: int, before: int) -> _OrderFacts:
    order = of.order(played)
    counts = step_counts(order)
    added: list[StepCounts] = [{} for _ in counts]
    if before:
        pairs = zip(counts, step_counts(of.order(before)), strict=True)
        added = [{k: n - then.get(k, 0) for k, n in now.items()} for now, then in pairs]
    held: list[list[int]] = [[] for _ in counts]
    for place in places(order):
        held[place.rank].append(place.stage)
    return _OrderFacts(Kinds.of(order), ways(order), counts, added, held)


class EquallyPlayed(NamedTuple):
    """Those of some configurations of which the same number of microbatches is played."""

    played: int
    """Microbatches that are played; see `pipeline.rounds`."""
    before: int
    of: Int
    """Which tuple each configuration has: [configurations]."""
    microbatches: Int
    """[configurations]."""
    more: Float
    """Rounds that are added to those that are played: [configurations]."""

    @property
    def counts(self) -> list[int]:
        """The microbatches of all that is played."""
        return [count for count in (self.played, self.before) if count]


@dataclass(frozen=True, slots=True, eq=False)
class PlayedConfigurations:
    """Configurations in one pipeline on one machine whose actions have the same `Responses`.

    Those with the same tuple of the structure's numbers differ in their microbatches alone.
    """

    responses: Responses
    tuples: Int
    """The tuples that they have, as numbers of those in `responses`: [tuples]."""
    timed_as: Int
    """Equal where the actions take the same time (`Responses.classes`): [tuples]."""
    messages: NeighbourMessages
    """Of each tuple."""
    layers: Int
    """Of each variant on each stage: [variants, stages]."""
    parts: Sequence[EquallyPlayed]

    def playing(self, count: int) -> Int:
        """The tuples of configurations of which so many microbatches are played, by number."""
        mine = np.zeros(len(self.tuples), dtype=bool)
        for part in self.parts:
            if count in part.counts:
                mine[part.of] = True
        return np.flatnonzero(mine)

    def distinct(self, ways: Collection[tuple[int, int]]) -> _DistinctTuples:
        """The tuples whose actions and messages on these ways take other times."""
        first, of = distinct_rows([self.timed_as, self.messages.classes(ways)])
        return _DistinctTuples(self.tuples[first], self.messages.take(first), of)


class _DistinctTuples(NamedTuple):
    """Tuples whose actions take other times, and those of a set that each stands for."""

    tuples: Int
    messages: NeighbourMessages
    of: Int
    """Which of these each tuple of the set is played as: [tuples of the set]."""


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


def steps(of: Pipeline, sets: Sequence[PlayedConfigurations]) -> list[list[StepColumns]]:
    """The steps of each part of each set of configurations; the sets are played together."""
    alike: dict[Hashable, list[int]] = {}
    for nth, configurations in enumerate(sets):  # only those that have the same actions
        alike.setdefault(frozenset(configurations.responses.actions), []).append(nth)
    found: dict[int, list[StepColumns]] = {}
    for numbers in alike.values():
        played = _PlayedTogether(of, [sets[nth] for nth in numbers]).steps()
        found |= dict(zip(numbers, played, strict=True))
    return [found[nth] for nth in range(len(sets))]


class _CountedStep(NamedTuple):
    """How often a step occurs on all ranks."""

    step: StepKind
    complete: bool
    played: int
    added: int
    """By each round that is added."""


class _PlayedTogether:
    """Sets of configurations that are played together: those that take the same time, once."""

    def __init__(self, of: Pipeline, sets: Sequence[PlayedConfigurations]) -> None:
        self.of, self.sets = of, sets
        self.counts = sorted({m for each in sets for part in each.parts for m in part.counts})
        facts = [_facts(of, count, 0) for count in self.counts]
        self.kinds, self.held = facts[-1].kinds, facts[-1].held
        ways = {way for each in facts for way in each.ways}
        self.distinct = [each.distinct(ways) for each in sets]
        self._rows: list[dict[tuple[object, ...], EqualRows]] = [{} for _ in sets]

    # ---- actions ---------------------------------------------------------------------------------

    def _key(self, nth: int, stage: int) -> tuple[int, tuple[int, ...]]:
        """What the actions of a stage are the same for, in one set."""
        return self.kinds.stage(stage), tuple(self.sets[nth].layers[:, stage].tolist())

    def _step(
        self, nth: int, tuples: Int, step: StepKind, complete: bool, rows: slice
    ) -> EqualRows:
        """Rows of a step (`responses.LinearResponse`) for tuples of a set."""
        configurations = self.sets[nth]
        kind = tuple((self.kinds.stage(stage), letter) for stage, letter in step)
        layers = configurations.layers[:, [stage for stage, _ in step]]
        return configurations.responses.at(kind, complete, tuples, layers, rows)

    def _moments(self, nth: int, step: StepKind, complete: bool) -> EqualRows:
        """The rows of a step's response, of the distinct tuples of a set."""
        key = *((self._key(nth, stage), letter) for stage, letter in step), complete
        if key not in self._rows[nth]:
            tuples, rows = self.distinct[nth].tuples, self.sets[nth].responses.moments
            self._rows[nth][key] = self._step(nth, tuples, step, complete, rows)
        return self._rows[nth][key]

    def _behind(self, nth: int, step: StepKind, complete: bool, moment: int) -> Float:
        """Seconds by which a step puts off a moment of its rank where nothing else is late: 0 at
        least, [distinct tuples of a set]."""
        rows = self._moments(nth, step, complete)
        return np.maximum(seconds_behind(rows, moment, moment), 0.0)

    def steps(self) -> list[list[StepColumns]]:
        """The steps of each part of each set."""
        effects: dict[tuple[object, ...], Effect] = {}
        sets = range(len(self.sets))

        def given(step: StepKind, complete: bool) -> Effect:
            of = [(tuple(self._key(nth, stage) for nth in sets), letter) for stage, letter in step]
            key = *of, complete
            if key not in effects:
                every = [self._moments(nth, step, complete) for nth in sets]
                effects[key] = effect(LiveResponse.of(EqualRows.concatenated(every)))
            return effects[key]

        def message(a: int, b: int) -> Float:
            return np.concatenate([each.messages.seconds(a, b) for each in self.distinct])

        edges: Int = np.cumsum([0, *(len(each.tuples) for each in self.distinct)])
        playing = [[each.playing(count) for count in self.counts] for each in self.sets]
        asked = [
            [begin + np.unique(each.of[some]) for some in tuples]
            for each, tuples, begin in zip(self.distinct, playing, edges.tolist(), strict=False)
        ]
        of_counts = [np.concatenate(mine) for mine in zip(*asked, strict=True)]
        orders = [self.of.order(count) for count in self.counts]
        played = play_each(orders, given, message, of_counts)
        found: list[list[StepColumns]] = []
        for nth, each in enumerate(self.distinct):
            configurations = self.sets[nth]
            after = AfterActions(
                configurations.responses, configurations.tuples, configurations.layers,
                self.of.pp, self.kinds, self.held,
            )  # fmt: skip
            ends: dict[int, Ends] = {}
            numbers: Int = edges[nth] + each.of
            for count, some, mine, of in zip(
                self.counts, playing[nth], of_counts, played, strict=True
            ):
                if len(some):
                    at: Int = np.searchsorted(mine, numbers[some])
                    ends[count] = after.ends(some, at, of)
            found.append(self._parts(nth, after, ends))
        return found

    def _times(self, nth: int, part: EquallyPlayed) -> dict[tuple[object, ...], _CountedStep]:
        """How often the distinct steps of a part of a set occur, by what they are the same for."""
        found: dict[tuple[object, ...], _CountedStep] = {}
        facts = _facts(self.of, part.played, part.before)
        for counts, added in zip(facts.counts, facts.added, strict=True):
            for (step, complete), count in counts.items():
                key = *((self._key(nth, stage), letter) for stage, letter in step), complete
                before = found.get(key, _CountedStep(step, complete, 0, 0))
                more = added.get((step, complete), 0)
                found[key] = before._replace(
                    played=before.played + count, added=before.added + more
                )
        return found

    def _pace(self, nth: int, part: EquallyPlayed) -> tuple[Float, Float]:
        """Seconds that a microbatch adds to many, at least: those of the busiest rank; and those of
        its host, or of its transfers on streams of a kind: [tuples]."""
        pp, distinct = self.of.pp, self.distinct[nth]
        zero = np.zeros(len(distinct.tuples))
        both: list[Float] = []
        beside: list[Float] = []
        for counts in _facts(self.of, part.played, part.before).added:
            often = [
                (count / (part.played - part.before), of) for of, count in counts.items() if count
            ]
            each = [
                sum((n * self._behind(nth, *of, moment) for n, of in often), zero)
                for moment in range(MESSAGE)
            ]
            both.append(each[0])
            beside += each[1:]
        pace, host = latest(both), latest(beside)
        if self.of.schedule == "1f1b":
            there = [2 * distinct.messages.seconds(rank, rank + 1) for rank in range(pp - 1)]
            pace = slowest_loop(both, there)
        return pace[distinct.of], host[distinct.of]

    # ---- where the time goes ---------------------------------------------------------------------

    def _parts(self, nth: int, after: AfterActions, ends: Mapping[int, Ends]) -> list[StepColumns]:
        """The steps of each part of a set."""
        responses, tuples = self.sets[nth].responses, self.sets[nth].tuples
        each = self.distinct[nth].of
        behind = after.sums()
        beside = any(
            (seconds_behind(rows, GPU, ASIDE) > NEVER / 2).any()
            for rows in self._rows[nth].values()
        )
        every: dict[tuple[object, ...], Float] = {}
        found: list[StepColumns] = []
        for part in self.sets[nth].parts:
            # Of the microbatches that are played, and of a round that is added; the last row is the
            # host's.
            sums = np.zeros((len(behind) + 1, len(tuples)))
            of_round = np.zeros_like(sums)
            for key, (step, complete, played, added) in self._times(nth, part).items():
                if key not in every:
                    launched = self._behind(nth, step, complete, HOST)[each]
                    own = self._step(nth, tuples, step, complete, responses.sums).expanded()
                    every[key] = np.concatenate([own, launched[None]])
                sums += played * every[key]
                if added:
                    of_round += added * every[key]
            sums /= self.of.pp
            sums[:-1] += behind
            now = ends[part.played]
            seconds = self._seconds(nth, part, now, ends.get(part.before))
            late = np.maximum(now.tail - behind[0] - behind[SUMS:].sum(axis=0), 0.0)
            of_steps = sums[:, part.of]
            if part.before:
                of_steps += part.more * (of_round / self.of.pp)[:, part.of]
            found.append(
                self._columns(responses.axes, seconds, late[part.of], of_steps, beside=beside)
            )
        return found

    def _seconds(self, nth: int, part: EquallyPlayed, now: Ends, before: Ends | None) -> Float:
        """The time with all rounds: each further one adds what the last one has added, or more."""
        if before is None:
            return now.whole[part.of]
        pace, host = self._pace(nth, part)
        period = np.maximum(now.whole - before.whole, (part.played - part.before) * pace)
        # What takes longer than the kernels beside it may fall behind only later.
        launched = part.microbatches * host[part.of] + (now.whole - now.actions)[part.of]
        more = part.more * np.maximum(period, 0.0)[part.of]
        return np.maximum(now.whole[part.of] + more, launched)

    def _columns(
        self, axes: Sequence[str], seconds: Float, late: Float, sums: Float, *, beside: bool
    ) -> StepColumns:
        """Steps that take so long, `late` of it behind all actions, from the sums of their parts:
        of the mean rank. `beside`: kernels may wait for communication of an action before."""
        busy, drawn, *others, host = sums
        # What further layers take less may be more than there is.
        waits = {axis: np.maximum(wait, 0.0) for axis, wait in zip(axes, others, strict=True)}
        rest = np.maximum(seconds - busy - sum(waits.values(), 0 * busy), 0.0)
        launches = waits.pop(LAUNCHES, np.zeros(len(seconds)))
        waits.pop("pp", None)
        # Behind all actions, gradients and weights are waited for.
        late = np.minimum(late, rest)
        rest = rest - late
        # Kernels wait for a host that takes longer than they do.
        slow = np.clip(host - (seconds - rest - late), 0.0, rest)
        launches, rest = launches + slow, rest - slow
        if self.of.pp == 1:  # nothing else is between actions
            if beside:
                late = late + rest
            else:
                launches = launches + rest
            rest = np.zeros_like(rest)
        waits["dp"] = waits.get("dp", 0.0) + late
        exposed = sum(waits.values(), 0 * busy)
        return StepColumns(
            seconds, rest, waits, launches,
            np.minimum((busy + exposed) / seconds, 1.0),
            (drawn + RUNNING_FRACTION * exposed) / seconds,
        )  # fmt: skip
