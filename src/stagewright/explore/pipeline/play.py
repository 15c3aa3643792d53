"""The time of a pipelined step for many configurations: a schedule's order over (max, +) on arrays.

Configurations that share an order (`schedule.schedules.make`) are played together: every moment is
an array [configurations]. Beyond a few times as many microbatches as ranks, each further round of
microbatches adds the same time (a (max, +) system becomes periodic), so the order is played with
few, and the rest is added.

>>> from stagewright.schedule.schedules import make
>>> from stagewright.explore.pipeline.effects import plain
>>> one = np.ones(1)
>>> def given(step, complete):
...     return plain(sum(one * {"F": 1, "B": 2}[kind] for stage, kind in step))
>>> found = play(make("1f1b", 4, 8), given, lambda a, b: 0 * one)
>>> float(found.gpu.max())  # (microbatches + ranks - 1) x 3
33.0
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from stagewright.arrays import Float, Int, distinct_columns
from stagewright.explore.actions import StepKind
from stagewright.explore.pipeline.effects import Effect, Move
from stagewright.explore.pipeline.launches import Effects, without_launches
from stagewright.explore.pipeline.ordered_steps import OrderedSteps, ordered_steps
from stagewright.explore.pipeline.rank_times import RankEnds, RankTimes
from stagewright.explore.pipeline.stretches import stretches
from stagewright.explore.pipeline.waves import Waves
from stagewright.schedule.actions import Order

Given = Callable[[StepKind, bool], Effect]
"""The effect of a step; and whether the step does what happens once per step."""


@dataclass(frozen=True, slots=True, eq=False)
class _Timed:
    """What the steps of orders and their messages take, found when it is first asked for."""

    effects: Effects
    message: Callable[[int, int], Float]
    moves: dict[tuple[int, tuple[bool, ...]], Move] = field(
        default_factory=dict[tuple[int, tuple[bool, ...]], Move]
    )
    """By id of an effect, and which of its step's actions wait for a message."""
    delays: dict[tuple[int, int], Float] = field(default_factory=dict[tuple[int, int], Float])

    def move(self, kind: StepKind, once: bool, comes: tuple[bool, ...]) -> Move:
        """A kind of step of an order."""
        effect = self.effects[kind, once]
        key = id(effect), comes
        if key not in self.moves:
            self.moves[key] = Move.of(effect, comes)
        return self.moves[key]

    def delay(self, way: tuple[int, int]) -> Float:
        """The seconds of a message."""
        if way not in self.delays:
            self.delays[way] = self.message(*way)
        return self.delays[way]

    def equally_timed(self, of: OrderedSteps, parts: Sequence[Waves]) -> tuple[Int, Int]:
        """Of configurations for which some steps of an order and its messages take as long, the
        first ones; and which of these each configuration is like."""
        kinds = dict.fromkeys(what for some in parts for what in some.kinds)
        seconds = [each for what in kinds for each in self.move(*of.kinds[what]).seconds]
        seconds += [self.delay(way) for way in of.ways]
        if not seconds:
            return np.zeros(1, dtype=np.int64), np.zeros(len(self.message(0, 0)), dtype=np.int64)
        return distinct_columns(np.stack([*{id(each): each for each in seconds}.values()]))

    def play(self, times: RankTimes, of: OrderedSteps, some: Waves, mine: Int) -> None:
        """Play some steps of an order, for configurations `mine` of all."""
        moves = {what: self.move(*of.kinds[what]) for what in some.kinds}
        delays = [self.delay(way) for way in of.ways]
        times.play(some, moves, delays, mine)


def play(order: Order, given: Given, message: Callable[[int, int], Float]) -> RankEnds:
    """Play an order: `message` are the seconds of a message from one rank to another.

    A step starts when its rank's kernels before it have ended, its message has arrived, and the
    host has launched it. Of two actions that overlap, each waits for a message of its own.
    """
    (found,) = play_each([order], given, message, [np.arange(len(message(0, 0)))])
    return found


def play_each(
    orders: Sequence[Order],
    given: Given,
    message: Callable[[int, int], Float],
    asked: Sequence[Int],
) -> list[RankEnds]:
    """Play orders of one pipeline, each with more microbatches than the one before it and for the
    configurations that are `asked` for, which are its columns.

    What orders begin with alike is played once, for one of the configurations for which all of it
    takes as long.
    """
    every, parts = [ordered_steps(order) for order in orders], stretches((*orders,))
    steps = dict.fromkeys((kind, once) for of in every for kind, once, _ in of.kinds)
    timed = _Timed(without_launches({step: given(*step) for step in steps}), message)
    longest = every[-1]
    first, like = timed.equally_timed(longest, [part.shared for part in parts])
    played = np.arange(len(first))
    state = RankTimes.start(len(orders[-1]), len(played))
    found: list[RankEnds] = []
    for nth, (of, part, own) in enumerate(zip(every, parts, asked, strict=True)):
        still = np.unique(like[np.concatenate(asked[nth:])])
        if len(still) < len(played):
            state, played = state.take(np.searchsorted(played, still)), still
        timed.play(state, longest, part.shared, first[played])
        end = state.take(np.searchsorted(played, like[own]))
        sent = {
            action + part.moved[longest.rank(action)]: column for action, column in end.sent.items()
        }
        end = end._replace(sent=sent)
        timed.play(end, of, part.rest, own)
        found.append(end.ends)
    return found
