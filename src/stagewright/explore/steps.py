"""Steps of many configurations with one order of actions: their time, and where that goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Bool, Float, Int
from stagewright.explore.actions import ASIDE, GPU, HOST, LAUNCHES, StepKind
from stagewright.explore.pipeline import (
    Effect,
    RankEnd,
    StepCounts,
    effect,
    order_of,
    play,
    slowest_loop,
    step_counts,
)
from stagewright.explore.responses import SUMS, RankTail, Responses, response
from stagewright.explore.templates import Kinds
from stagewright.schedule.actions import Order
from stagewright.schedule.places import places
from stagewright.time.collectives import messages_seconds
from stagewright.time.expense.power import RUNNING_FRACTION
from stagewright.time.network import Machine


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

    @property
    def kinds(self) -> Kinds:
        """The kinds of its stages and ranks."""
        return Kinds.of(self.order(self.played))

    def counts(self) -> tuple[StepCounts, ...]:
        """Steps of each kind by rank, of the microbatches that are played."""
        return step_counts(self.order(self.played))

    def added(self) -> list[StepCounts]:
        """Steps that a round of microbatches adds; none where all are played."""
        if not self.before:
            return [{} for _ in range(self.pp)]
        pairs = zip(self.counts(), step_counts(self.order(self.before)), strict=True)
        return [{of: n - before.get(of, 0) for of, n in now.items()} for now, before in pairs]


class NeighbourMessages(NamedTuple):
    """Messages between neighbouring ranks of pipelines."""

    size: Float
    """Bytes: [configurations]."""
    stride: Int
    """Distance between the ranks of two neighbouring stages: [configurations]."""
    beyond: Int
    """Ranks of a stage along axes slower than the pipeline's: [configurations]."""
    pp: int
    machine: Machine

    def seconds(self, a: int, b: int) -> Float:
        """Seconds of a message from rank `a` of the pipeline to rank `b`: [configurations]."""
        found = messages_seconds(self.size, 0, self.machine)
        if a == b:
            return 0 * found
        block = 1
        for level, tier in enumerate(self.machine.tiers[:-1], 1):
            block *= tier.size
            crosses = self._crosses(min(a, b), max(a, b), block)
            found = np.where(crosses, messages_seconds(self.size, level, self.machine), found)
        return found

    def _crosses(self, low: int, high: int, block: int) -> Bool:
        """Whether some of the ranks of two stages are in different blocks: [configurations]."""
        stride, whole = self.stride, self.pp * self.stride
        if high > low + 1:
            return (whole > block) | ((self.beyond > 1) & (block % whole != 0))
        found = np.zeros(len(stride), dtype=bool)
        # Where pipelines fill whole blocks, all lie as the first ones do.
        alike = np.where(whole % block == 0, 1, np.minimum(self.beyond, block))
        for nth in range(int(alike.max(initial=1))):
            at = low * stride + nth * whole
            border = (at // block + 1) * block
            found |= (border < at + 2 * stride) & (nth < alike)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Lot:
    """Configurations of one structure on one machine that are played together."""

    responses: Responses
    tuples: Int
    """Which numbers of the structure each has: [configurations]."""
    layers: Int
    """Of each variant on each stage: [variants, stages]."""
    microbatches: Int
    more: Float
    """Rounds that are added to those that are played: [configurations]."""
    messages: NeighbourMessages


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


def steps(of: Pipeline, lots: Sequence[Lot]) -> list[StepColumns]:
    """The steps of each lot."""
    played = _PlayedLots(of, lots)
    ends = played.ends(of.played)
    seconds = [end.whole for end in ends]
    if of.before:
        pairs = zip(ends, played.ends(of.before), strict=True)
        seconds = [_continued(played, nth, now, then) for nth, (now, then) in enumerate(pairs)]
    tails = [end.whole - end.actions for end in ends]
    pairs = zip(seconds, tails, strict=True)
    return [played.parts(nth, each, tail) for nth, (each, tail) in enumerate(pairs)]


def _continued(played: _PlayedLots, nth: int, now: _Ends, before: _Ends) -> Float:
    """The time with all rounds: each further one adds what the last one has added, or more."""
    of, lot = played.of, played.lots[nth]
    pace, host = played.pace(nth)
    period = np.maximum(now.whole - before.whole, (of.played - of.before) * pace)
    # What takes longer than the kernels beside it may fall behind only later.
    launched = lot.microbatches * host + (now.whole - now.actions)
    return np.maximum(now.whole + lot.more * np.maximum(period, 0.0), launched)


class _PlayedLots:
    """Configurations in lots, played together."""

    def __init__(self, of: Pipeline, lots: Sequence[Lot]) -> None:
        self.of, self.lots = of, lots
        self.kinds = of.kinds
        self.edges = np.cumsum([0, *(len(lot.tuples) for lot in lots)])
        self._rows: list[dict[tuple[object, ...], Float]] = [{} for _ in lots]
        self._effects: dict[tuple[object, ...], Effect] = {}

    # ---- actions ---------------------------------------------------------------------------------

    def _key(self, nth: int, stage: int) -> tuple[int, tuple[int, ...]]:
        """What the actions of a stage are the same for, in one lot."""
        return self.kinds.stage(stage), tuple(self.lots[nth].layers[:, stage].tolist())

    def _step(self, nth: int, step: StepKind, complete: bool) -> Float:
        """The rows of a step (`responses.LinearResponse`) for a lot: [rows, configurations]."""
        lot = self.lots[nth]
        key = *((self._key(nth, stage), letter) for stage, letter in step), complete
        if key not in self._rows[nth]:
            kind = tuple((self.kinds.stage(stage), letter) for stage, letter in step)
            layers = lot.layers[:, [stage for stage, _ in step]]
            self._rows[nth][key] = lot.responses.at(kind, complete, lot.tuples, layers)
        return self._rows[nth][key]

    def _moments(self, nth: int, step: StepKind, complete: bool) -> Float:
        return self.lots[nth].responses.moments(self._step(nth, step, complete))

    def _given(self, step: StepKind, complete: bool) -> Effect:
        lots = range(len(self.lots))
        of = tuple((tuple(self._key(nth, stage) for nth in lots), letter) for stage, letter in step)
        key = of, complete
        if key not in self._effects:
            every = [self._moments(nth, step, complete) for nth in lots]
            self._effects[key] = effect(response(np.concatenate(every, axis=1)))
        return self._effects[key]

    def _message(self, a: int, b: int) -> Float:
        return np.concatenate([lot.messages.seconds(a, b) for lot in self.lots])

    def ends(self, microbatches: int) -> list[_Ends]:
        """The ends of steps of so many microbatches, by lot."""
        found = play(self.of.order(microbatches), self._given, self._message)
        result: list[_Ends] = []
        for nth in range(len(self.lots)):
            mine = slice(int(self.edges[nth]), int(self.edges[nth + 1]))
            ends = [RankEnd(*(column[mine] for column in rank)) for rank in found.ranks]
            actions = _latest([of.gpu for of in ends])
            result.append(_Ends(self._end(nth, ends), actions))
        return result

    def pace(self, nth: int) -> tuple[Float, Float]:
        """Seconds that a microbatch adds to many, at least: those of the busiest rank; and those of
        its host, or of its communication along dp."""
        pp, lot = self.of.pp, self.lots[nth]
        zero = np.zeros(len(lot.tuples))
        both: list[Float] = []
        beside: list[Float] = []
        for counts in self.of.added():
            every = [
                (count / (self.of.played - self.of.before), response(self._moments(nth, *of)))
                for of, count in counts.items()
                if count
            ]
            both.append(sum((n * of.gpu[GPU] for n, of in every), zero))
            beside.append(sum((n * np.maximum(of.host[HOST], 0) for n, of in every), zero))
            beside.append(sum((n * np.maximum(of.aside[ASIDE], 0) for n, of in every), zero))
        if self.of.schedule != "1f1b":
            return _latest(both), _latest(beside)
        there = [2 * lot.messages.seconds(rank, rank + 1) for rank in range(pp - 1)]
        return slowest_loop(both, there), _latest(beside)

    # ---- after all actions -----------------------------------------------------------------------

    @cached_property
    def _held(self) -> list[list[int]]:
        """The stages of each rank."""
        found = places(self.of.order(self.of.played))
        return [[p.stage for p in found if p.rank == rank] for rank in range(self.of.pp)]

    def _tail(self, nth: int, rank: int) -> RankTail:
        return self.lots[nth].responses.tails[self.kinds.rank(rank)]

    def _sections(self, nth: int, rank: int) -> list[Float]:
        """The rows of what a rank does after all actions, by section."""
        lot = self.lots[nth]
        held = lot.layers[:, self._held[rank]].sum(axis=1)
        kind = self.kinds.rank(rank)
        found: list[Float] = []
        for n, section in enumerate(self._tail(nth, rank).sections):
            key = kind, tuple(held.tolist()), n
            if key not in self._rows[nth]:
                self._rows[nth][key] = section.at(lot.tuples, held)
            found.append(self._rows[nth][key])
        return found

    def _end(self, nth: int, state: list[RankEnd]) -> Float:
        """The end of the last task of all ranks, given when they are done with all actions."""
        lot, ranks = self.lots[nth], range(self.of.pp)
        sections = [self._sections(nth, rank) for rank in ranks]
        meetings = [self._tail(nth, rank).meetings for rank in ranks]
        last = [np.maximum(of.gpu, of.aside) for of in state]
        reached = [0] * self.of.pp
        for rank in ranks:
            section = lot.responses.moments(sections[rank][0])
            state[rank], last[rank] = _after(state[rank], section, last[rank])
        for meeting in max(meetings, key=len):
            met = [
                rank for rank in ranks
                if reached[rank] < len(meetings[rank])
                and meetings[rank][reached[rank]].slot == meeting.slot
            ]  # fmt: skip
            ready = [
                np.maximum(state[rank].gpu, state[rank].aside) if meeting.aside else state[rank].gpu
                for rank in met
            ]
            took = meeting.seconds
            at = _latest(ready) + (took[lot.tuples] if len(took) > 1 else took)
            for rank in met:
                reached[rank] += 1
                after = state[rank]._replace(gpu=at)
                section = lot.responses.moments(sections[rank][reached[rank]])
                state[rank], last[rank] = _after(after, section, last[rank])
        return _latest(last)

    # ---- where the time goes ---------------------------------------------------------------------

    def parts(self, nth: int, seconds: Float, tail: Float) -> StepColumns:
        """The parts of steps that take so long, `tail` after all actions: of the mean rank."""
        lot, axes = self.lots[nth], self.lots[nth].responses.axes
        sums = np.zeros((SUMS + len(axes), len(lot.tuples)))
        behind, host = np.zeros_like(sums), np.zeros(len(lot.tuples))
        for rank, (counts, added) in enumerate(zip(self.of.counts(), self.of.added(), strict=True)):
            for step, count in counts.items():
                times = count + lot.more * added.get(step, 0)
                sums += times * lot.responses.sums(self._step(nth, *step))
                launched = response(self._moments(nth, *step)).host[HOST]
                host += times * np.maximum(launched, 0.0) / self.of.pp
            for section in self._sections(nth, rank):
                behind += lot.responses.sums(section)
        sums, behind = sums / self.of.pp, behind / self.of.pp
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
    inputs = (GPU, state.gpu), (ASIDE, state.aside), (HOST, state.host)

    def latest(field: Float) -> Float:
        return _latest([at + field[nth] for nth, at in inputs])

    chain = latest(of.chain)
    after = RankEnd(latest(of.gpu), np.maximum(latest(of.aside), chain), latest(of.host))
    return after, _latest([last, latest(of.end), chain])
