"""Steps of many configurations with one order of actions: their time, and where that goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Float, Int
from stagewright.explore.actions import ASIDE, GPU, HOST, LAUNCHES
from stagewright.explore.pipeline import Effect, RankEnd, effect, order_of, play, slowest_loop
from stagewright.explore.responses import BUSY, RankTail, Responses, response
from stagewright.explore.templates import kind_of
from stagewright.schedule.actions import Action, Order, flat
from stagewright.schedule.places import places
from stagewright.time.collectives import messages_seconds
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
    def stages(self) -> int:
        """Virtual stages of the model."""
        return 1 + max(a.stage for row in self.order(self.played) for a in flat(row))


class NeighbourMessages(NamedTuple):
    """Messages between neighbouring ranks of pipelines."""

    size: Float
    """Bytes: [configurations]."""
    stride: Int
    """Distance between the ranks of two neighbouring stages: [configurations]."""
    pp: int
    machine: Machine

    def seconds(self, a: int, b: int) -> Float:
        """Seconds of a message from rank `a` of the pipeline to rank `b`: [configurations]."""
        found = messages_seconds(self.size, 0, self.machine)
        if a == b:
            return 0 * found
        block, low, stride = 1, min(a, b), self.stride
        for level, tier in enumerate(self.machine.tiers[:-1], 1):
            block *= tier.size
            # Some of the ranks of a stage and their peers are on either side of a border.
            border = (low * stride // block + 1) * block
            near = border < (low + 2) * stride
            crosses = near if abs(a - b) == 1 else self.pp * stride > block
            found = np.where(crosses, messages_seconds(self.size, level, self.machine), found)
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
    return [played.parts(nth, each) for nth, each in enumerate(seconds)]


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
        self.stages = of.stages
        self.edges = np.cumsum([0, *(len(lot.tuples) for lot in lots)])
        self._rows: list[dict[tuple[object, ...], Float]] = [{} for _ in lots]
        self._effects: dict[tuple[object, ...], Effect] = {}

    # ---- actions ---------------------------------------------------------------------------------

    def _key(self, nth: int, stage: int) -> tuple[int, tuple[int, ...]]:
        """What the actions of a stage are the same for, in one lot."""
        return kind_of(stage, self.stages), tuple(self.lots[nth].layers[:, stage].tolist())

    def _action(self, nth: int, stage: int, kind: str, complete: bool) -> Float:
        """The rows of an action (`responses.LinearResponse`) for a lot: [rows, configurations]."""
        lot, of = self.lots[nth], self._key(nth, stage)
        key = (*of, kind, complete)
        if key not in self._rows[nth]:
            linear = lot.responses.actions[of[0], kind, complete]
            self._rows[nth][key] = linear.at(lot.tuples, lot.layers[:, stage])
        return self._rows[nth][key]

    def _given(self, a: Action, complete: bool) -> Effect:
        key = (*(self._key(nth, a.stage) for nth in range(len(self.lots))), a.kind, complete)
        if key not in self._effects:
            every = [
                self._action(nth, a.stage, a.kind, complete)[:BUSY]
                for nth in range(len(self.lots))
            ]  # fmt: skip
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
        kinds = [
            sorted({(a.stage, a.kind) for a in flat(row)}) for row in self.of.order(self.of.played)
        ]
        zero = np.zeros(len(lot.tuples))
        every = [[response(self._action(nth, *k, False)[:BUSY]) for k in of] for of in kinds]
        both = [sum((a.gpu[GPU] for a in of), zero) for of in every]
        sums = [
            sum((np.maximum(column, 0) for column in columns), zero)
            for of in every
            for columns in ([a.host[HOST] for a in of], [a.aside[ASIDE] for a in of])
        ]
        host = _latest(sums)
        if self.of.schedule != "1f1b":
            return _latest(both), host
        there = [2 * lot.messages.seconds(rank, rank + 1) for rank in range(pp - 1)]
        return slowest_loop(both, there), host

    # ---- after all actions -----------------------------------------------------------------------

    @cached_property
    def _held(self) -> list[list[int]]:
        """The stages of each rank."""
        found = places(self.of.order(self.of.played))
        return [[p.stage for p in found if p.rank == rank] for rank in range(self.of.pp)]

    def _tail(self, nth: int, rank: int) -> RankTail:
        return self.lots[nth].responses.tails[kind_of(rank, self.of.pp)]

    def _sections(self, nth: int, rank: int) -> list[Float]:
        """The rows of what a rank does after all actions, by section."""
        lot = self.lots[nth]
        held = lot.layers[:, self._held[rank]].sum(axis=1)
        kind = kind_of(rank, self.of.pp)
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
            state[rank], last[rank] = _after(state[rank], sections[rank][0], last[rank])
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
                state[rank], last[rank] = _after(after, sections[rank][reached[rank]], last[rank])
        return _latest(last)

    # ---- where the time goes ---------------------------------------------------------------------

    def parts(self, nth: int, seconds: Float) -> StepColumns:
        """The parts of steps that take so long: of the mean rank."""
        lot, axes = self.lots[nth], self.lots[nth].responses.axes
        sums = np.zeros((1 + len(axes), len(lot.tuples)))
        for rank, row in enumerate(self.of.order(self.of.played)):
            for stage, kind in sorted({(a.stage, a.kind) for a in flat(row)}):
                sums += self._action(nth, stage, kind, True)[BUSY:]
                sums += (lot.microbatches - 1) * self._action(nth, stage, kind, False)[BUSY:]
            for section in self._sections(nth, rank):
                sums += section[BUSY:]
        sums /= self.of.pp
        waits = dict(zip(axes, sums[1:], strict=True))
        launches = waits.pop(LAUNCHES, np.zeros(len(lot.tuples)))
        waits.pop("pp", None)
        rest = np.maximum(seconds - sums.sum(axis=0), 0.0)
        if self.of.pp == 1:  # nothing but gradients and weights is waited for between actions
            waits["dp"] = waits.get("dp", 0.0) + rest
            rest = 0 * rest
        return StepColumns(seconds, rest, waits, launches)


def _latest(times: Sequence[Float]) -> Float:
    found = times[0]
    for other in times[1:]:
        found = np.maximum(found, other)
    return found


def _after(state: RankEnd, section: Float, last: Float) -> tuple[RankEnd, Float]:
    """A rank's moments after a section, and its last end."""
    of = response(section[:BUSY])
    inputs = (GPU, state.gpu), (ASIDE, state.aside), (HOST, state.host)

    def latest(field: Float) -> Float:
        return _latest([at + field[nth] for nth, at in inputs])

    chain = latest(of.chain)
    after = RankEnd(latest(of.gpu), np.maximum(latest(of.aside), chain), latest(of.host))
    return after, _latest([last, latest(of.end), chain])
