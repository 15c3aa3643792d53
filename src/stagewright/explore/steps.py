"""A step of many configurations of one structure and pipeline: its time, and where that goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Float, Int
from stagewright.explore.actions import ASIDE, GPU, HOST, LAUNCHES
from stagewright.explore.pipeline import (
    Effect,
    Pipelined,
    RankEnd,
    effect,
    order_of,
    play,
    rounds,
)
from stagewright.explore.responses import BUSY, RankTail, Responses, response
from stagewright.explore.templates import MIDDLE, ONLY, kind_of
from stagewright.schedule.actions import Action, flat
from stagewright.schedule.places import places
from stagewright.schedule.schedules import SCHEDULES


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What configurations that are played together have in common."""

    schedule: str
    pp: int
    vpp: int
    microbatches: int
    group: int | None = None


class Steps(NamedTuple):
    """The steps of configurations, [configurations] each: seconds."""

    seconds: Float
    bubble: Float
    """Of the mean rank, as its waits are."""
    exposed: dict[str, Float]
    launches: Float


def steps(
    of: Pipeline,
    responses: Responses,
    tuples: Int,
    layers: Int,
    message: Callable[[int, int], Float],
) -> Steps:
    """The steps of configurations with these tuples of a structure's numbers.

    `layers` are those of each variant on each stage, [variants, stages, configurations]. `message`
    are the seconds of a message from one rank to another, [configurations].
    """
    play_ = _Play(of, responses, tuples, layers, message)
    schedule = SCHEDULES.get(of.schedule)
    plan = rounds(of.schedule, of.pp, of.microbatches, schedule.fills if schedule else 1)
    seconds = play_.seconds(plan.played)
    if plan.before:
        period = seconds - play_.seconds(plan.before)
        seconds = seconds + plan.more * np.maximum(period, 0.0)
        seconds = np.maximum(seconds, play_.busiest())
    return play_.steps(seconds)


class _Play:
    """Actions and tails of configurations, gathered when they are asked for."""

    def __init__(
        self, of: Pipeline, responses: Responses, tuples: Int, layers: Int,
        message: Callable[[int, int], Float],
    ) -> None:  # fmt: skip
        self.of, self.responses, self.tuples = of, responses, tuples
        self.layers, self.message = layers, message
        self.stages = of.pp * of.vpp
        self._rows: dict[tuple[int, str, bool, bytes], Float] = {}
        self._effects: dict[tuple[int, str, bool, bytes], Effect] = {}

    def rows(self, stage: int, kind: str, complete: bool) -> tuple[tuple[object, ...], Float]:
        """The rows of an action, equal for stages of equal kind and layers."""
        layers = self.layers[:, stage]
        key = kind_of(stage, self.stages), kind, complete, layers.tobytes()
        if key not in self._rows:
            self._rows[key] = self.responses.actions[key[:3]].at(self.tuples, layers)
        return key, self._rows[key]

    def given(self, a: Action, complete: bool) -> Effect:
        key, rows = self.rows(a.stage, a.kind, complete)
        if key not in self._effects:
            self._effects[key] = effect(response(rows))  # pyright: ignore[reportArgumentType]
        return self._effects[key]  # pyright: ignore[reportArgumentType]

    def seconds(self, microbatches: int) -> Float:
        """The seconds of a step of so many microbatches."""
        of = self.of
        order = order_of(of.schedule, of.pp, microbatches, of.vpp, of.group)
        return self._ends(play(order, self.given, self.message))

    def busiest(self) -> Float:
        """The least time of a step: its way to a rank and back, and all that the rank computes."""
        of = self.of
        if of.vpp > 1:
            return np.zeros(len(self.tuples))
        way = np.zeros(len(self.tuples))
        least = way
        kinds = [k for s, k, c in self.responses.actions if s != MIDDLE and not c and k != "F"]
        for rank in range(of.pp):
            both = self._gpu(rank, "F") + sum(self._gpu(rank, k) for k in dict.fromkeys(kinds))
            least = np.maximum(least, way + of.microbatches * both)
            if rank + 1 < of.pp:
                there = self.message(rank, rank + 1) + self.message(rank + 1, rank)
                way = way + self._gpu(rank, "F") + there
        return least

    def _gpu(self, stage: int, kind: str) -> Float:
        return self.rows(stage, kind, False)[1][GPU]

    # ---- after all actions -----------------------------------------------------------------------

    def tail(self, rank: int) -> RankTail:
        """What a rank does after all actions."""
        return self.responses.tails[ONLY if self.of.pp == 1 else kind_of(rank, self.of.pp)]

    def _held(self, rank: int) -> Int:
        """Layers of each variant on a rank: [variants, configurations]."""
        stages = [p.stage for p in places(order_of(
            self.of.schedule, self.of.pp, self._least(), self.of.vpp, self.of.group
        )) if p.rank == rank]  # fmt: skip
        return self.layers[:, stages].sum(axis=1)

    def _least(self) -> int:
        schedule = SCHEDULES.get(self.of.schedule)
        return rounds(
            self.of.schedule, self.of.pp, self.of.microbatches, schedule.fills if schedule else 1
        ).played

    def _sections(self, rank: int) -> list[Float]:
        key: tuple[int, str, bool, bytes] = (
            ONLY if self.of.pp == 1 else kind_of(rank, self.of.pp),
            "tail",
            True,
            (held := self._held(rank)).tobytes(),
        )
        tail = self.tail(rank)
        found: list[Float] = []
        for n, section in enumerate(tail.sections):
            each = (*key[:1], f"tail{n}", *key[2:])
            if each not in self._rows:
                self._rows[each] = section.at(self.tuples, held)
            found.append(self._rows[each])
        return found

    def _ends(self, pipelined: Pipelined) -> Float:
        """The end of the last task of all ranks."""
        state = pipelined.ranks
        sections = [self._sections(rank) for rank in range(self.of.pp)]
        last = [np.maximum(of.gpu, of.aside) for of in state]
        reached = [0] * self.of.pp
        state = list(state)
        ready: list[Float] = []
        for rank in range(self.of.pp):
            state[rank], last[rank] = _after(state[rank], sections[rank][0], last[rank])
        order = max((self.tail(rank).meetings for rank in range(self.of.pp)), key=len)
        for meeting in order:
            ranks = [
                rank for rank in range(self.of.pp)
                if reached[rank] < len(self.tail(rank).meetings)
                and self.tail(rank).meetings[reached[rank]].slot == meeting.slot
            ]  # fmt: skip
            ready = [
                np.maximum(state[rank].gpu, state[rank].aside) if meeting.aside
                else state[rank].gpu
                for rank in ranks
            ]  # fmt: skip
            at = ready[0]
            for other in ready[1:]:
                at = np.maximum(at, other)
            took = self.tail(ranks[0]).meetings[reached[ranks[0]]].seconds
            at = at + (took[self.tuples] if len(took) > 1 else took)
            for rank in ranks:
                reached[rank] += 1
                met = state[rank]._replace(gpu=at)
                state[rank], last[rank] = _after(met, sections[rank][reached[rank]], last[rank])
        end = last[0]
        for other in last[1:]:
            end = np.maximum(end, other)
        return end

    # ---- where the time goes ---------------------------------------------------------------------

    def steps(self, seconds: Float) -> Steps:
        """The parts of steps that take so long: of the mean rank."""
        axes = self.responses.axes
        sums = np.zeros((1 + len(axes), len(self.tuples)))
        order = order_of(self.of.schedule, self.of.pp, self._least(), self.of.vpp, self.of.group)
        for rank, row in enumerate(order):
            for stage, kind in sorted({(a.stage, a.kind) for a in flat(row)}):
                once = self.rows(stage, kind, True)[1][BUSY:]
                sums += once + (self.of.microbatches - 1) * self.rows(stage, kind, False)[1][BUSY:]
            for section in self._sections(rank):
                sums += section[BUSY:]
        sums /= self.of.pp
        waits = dict(zip(axes, sums[1:], strict=True))
        launches = waits.pop(LAUNCHES, np.zeros(len(self.tuples)))
        return Steps(seconds, np.maximum(seconds - sums.sum(axis=0), 0.0), waits, launches)


def _after(state: RankEnd, section: Float, last: Float) -> tuple[RankEnd, Float]:
    """A rank's moments after a section, and its last end."""
    of = response(section)
    inputs = state.gpu, state.aside, state.host

    def latest(field: Float) -> Float:
        found = inputs[GPU] + field[GPU]
        for nth in (ASIDE, HOST):
            found = np.maximum(found, inputs[nth] + field[nth])
        return found

    end = np.maximum(last, latest(of.end))
    return RankEnd(latest(of.gpu), latest(of.aside), latest(of.host)), end
