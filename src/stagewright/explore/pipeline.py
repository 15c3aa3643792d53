"""The time of a pipelined step for many configurations: a schedule's order over (max, +) on arrays.

Configurations that share an order (`schedule.schedules.make`) are played together: every moment is
an array [configurations]. Beyond a few times as many microbatches as ranks, each further round of
microbatches adds the same time (a (max, +) system becomes periodic), so the order is played with
few, and the rest is added.

>>> from stagewright.schedule.schedules import make
>>> one = np.ones(1)
>>> def given(step, complete):
...     return plain(sum(one * {"F": 1, "B": 2}[kind] for stage, kind in step))
>>> found = play(make("1f1b", 4, 8), given, lambda a, b: 0 * one)
>>> float(max(of.gpu[0] for of in found.ranks))  # (microbatches + ranks - 1) x 3
33.0
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self, TypeAlias

import numpy as np

from stagewright.arrays import Float, Int, distinct_columns
from stagewright.explore.actions import (
    ASIDE,
    GPU,
    GRADIENT,
    HOST,
    MESSAGE,
    NEVER,
    STORED,
    Response,
    StepKind,
)  # fmt: skip
from stagewright.explore.shared.ordered_steps import (
    OrderedSteps,
    StepInTurn,
    ordered_steps,
    stretches,
)
from stagewright.schedule.actions import Order
from stagewright.schedule.schedules import SCHEDULES

Part: TypeAlias = "tuple[tuple[Float, tuple[int, ...]], ...]"
"""Seconds [configurations], and the inputs of a `Response` that they are behind; inputs without an
effect are left out."""


class Effect(NamedTuple):
    """A `Response` by its parts."""

    gpu: Part
    aside: Part
    """Empty: it leaves what runs on beside as it is."""
    host: Part
    """Empty: it leaves the host as it is."""
    stored: Part
    """Empty: it leaves transfers to the host as they are."""
    sent: tuple[Part, ...]
    """By action of a step."""


def plain(seconds: Float) -> Effect:
    """A step that takes so long, and whose launches take no time."""
    ends = ((seconds, (GPU, MESSAGE, GRADIENT)),)
    return Effect(ends, (), (), (), (ends, ends))


def effect(of: Response) -> Effect:
    """The parts of a response that are not `NEVER`."""
    gpu = _part(of.gpu)
    sent = [of.sent] if of.sent_gradient is None else [of.sent, of.sent_gradient]
    parts = tuple(gpu if np.array_equal(each, of.gpu) else _part(each) for each in sent)
    stored = _changed(_part(np.maximum(of.stored, of.chain_stored)), STORED)
    return Effect(
        gpu, _changed(_part(of.late), ASIDE), _changed(_part(of.host), HOST), stored, parts
    )


def _part(columns: Float) -> Part:
    """The inputs that have an effect, those of equal seconds together."""
    found: list[tuple[Float, tuple[int, ...]]] = []
    for nth, column in enumerate(columns):
        if not (column > NEVER / 2).any():
            continue
        for place, (seconds, inputs) in enumerate(found):
            if np.array_equal(seconds, column):
                found[place] = seconds, (*inputs, nth)
                break
        else:
            found.append((column, (nth,)))
    return tuple(found)


def _changed(part: Part, own: int) -> Part:
    """A part, empty where it is its own input and no later."""
    same = len(part) == 1 and part[0][1] == (own,) and not part[0][0].any()
    return () if same else part


class RankEnd(NamedTuple):
    """When a rank is done with all actions: inputs of what comes after, [configurations]."""

    gpu: Float
    aside: Float
    host: Float
    stored: Float


class Pipelined(NamedTuple):
    """The ends of all ranks."""

    ranks: list[RankEnd]


Given = Callable[[StepKind, bool], Effect]
"""The effect of a step; and whether the step does what happens once per step."""


class _Taken:
    """The elements of columns that some configurations have, taken once of each column."""

    def __init__(self, some: Int) -> None:
        self.some = some
        self.known: dict[int, tuple[Float, Float]] = {}

    def of(self, column: Float) -> Float:
        """Those of a column."""
        if id(column) not in self.known:  # no other has its id while it is held
            self.known[id(column)] = column, column[self.some]
        return self.known[id(column)][1]


class _Move(NamedTuple):
    """An effect of a step that some inputs come to: each of its parts as seconds behind inputs."""

    joined: tuple[tuple[int, ...], ...]
    """Inputs of which the latest counts: they are further inputs."""
    gpu: Sequence[tuple[Float, int]]
    aside: Sequence[tuple[Float, int]]
    host: Sequence[tuple[Float, int]]
    stored: Sequence[tuple[Float, int]]
    sent: Sequence[Sequence[tuple[Float, int]] | None]
    """By action of the step; None: as `gpu`."""

    def every(self) -> Iterator[tuple[Float, int]]:
        """All of its parts."""
        for part in (self.gpu, self.aside, self.host, self.stored, *self.sent):
            yield from part or ()

    def take(self, taken: _Taken) -> Self:
        """That of some configurations."""

        def of(part: Sequence[tuple[Float, int]]) -> Sequence[tuple[Float, int]]:
            return [(taken.of(seconds), nth) for seconds, nth in part]

        own = of(self.gpu), of(self.aside), of(self.host), of(self.stored)
        sent = [None if part is None else of(part) for part in self.sent]
        return type(self)(self.joined, *own, sent)

    @classmethod
    def of(cls, effect: Effect, messages: tuple[bool, ...]) -> Self:
        """An effect; to which actions of the step do messages come?"""
        there = {GPU, ASIDE, HOST, STORED}
        there |= {MESSAGE + nth for nth, comes in enumerate(messages) if comes}
        joined: list[tuple[int, ...]] = []

        def behind(part: Part) -> Sequence[tuple[Float, int]]:
            found: list[tuple[Float, int]] = []
            for seconds, inputs in part:
                own = tuple(nth for nth in inputs if nth in there)
                if len(own) > 1 and own not in joined:
                    joined.append(own)
                if own:
                    joint = GRADIENT + 1 + joined.index(own) if len(own) > 1 else own[0]
                    found.append((seconds, joint))
            return found

        own = behind(effect.gpu), behind(effect.aside), behind(effect.host), behind(effect.stored)
        sent = [None if part is effect.gpu else behind(part) for part in effect.sent]
        return cls(tuple(joined), *own, sent)


@dataclass(frozen=True, slots=True, eq=False)
class _Timed:
    """What the steps of orders and their messages take, found when it is first asked for."""

    given: Given
    message: Callable[[int, int], Float]
    moves: dict[tuple[int, tuple[bool, ...]], tuple[Effect, _Move]] = field(
        default_factory=dict[tuple[int, tuple[bool, ...]], "tuple[Effect, _Move]"]
    )
    """Each with its effect: while that is held, no other has the id in the key."""
    delays: dict[tuple[int, int], Float] = field(default_factory=dict[tuple[int, int], Float])

    def move(self, kind: StepKind, once: bool, comes: tuple[bool, ...]) -> _Move:
        """A kind of step of an order."""
        effect = self.given(kind, once)
        key = id(effect), comes
        if key not in self.moves:
            self.moves[key] = effect, _Move.of(effect, comes)
        return self.moves[key][1]

    def delay(self, way: tuple[int, int]) -> Float:
        """The seconds of a message."""
        if way not in self.delays:
            self.delays[way] = self.message(*way)
        return self.delays[way]

    def equally_timed(self, of: OrderedSteps, some: Sequence[StepInTurn]) -> tuple[Int, Int]:
        """Of configurations for which some steps of an order and its messages take as long, the
        first ones; and which of these each configuration is like."""
        moves = [self.move(*of.kinds[what]) for what in {step.what: None for step in some}]
        seconds = [seconds for move in moves for seconds, _ in move.every()]
        seconds += [self.delay(way) for way in of.ways]
        if not seconds:
            return np.zeros(1, dtype=np.int64), np.zeros(len(self.message(0, 0)), dtype=np.int64)
        return distinct_columns(np.stack([*{id(each): each for each in seconds}.values()]))


class _RankTimes(NamedTuple):
    """What the ranks have come to: seconds [configurations] by rank."""

    gpu: list[Float]
    aside: list[Float]
    host: list[Float]
    stored: list[Float]
    sent: dict[int, Float]
    """What actions have handed on to others that have not been done yet, by number."""

    @classmethod
    def start(cls, ranks: int, configurations: int) -> Self:
        """Nothing has been done."""
        gpu, aside, host, stored = ([np.zeros(configurations)] * ranks for _ in range(4))
        return cls(gpu, aside, host, stored, {})

    def take(self, some: Int) -> Self:
        """That of some configurations."""
        taken = _Taken(some)
        gpu, aside, host, stored = ([*map(taken.of, ranks)] for ranks in self[:4])
        sent = {action: taken.of(column) for action, column in self.sent.items()}
        return type(self)(gpu, aside, host, stored, sent)

    def play(self, of: OrderedSteps, some: Sequence[StepInTurn], timed: _Timed, mine: Int) -> None:
        """Play some steps of an order, for configurations `mine` of all."""
        gpu, aside, host, stored, sent = self
        zero = np.zeros(len(mine))
        scratch = np.empty_like(zero)
        taken = _Taken(mine)
        moves: dict[int, _Move] = {}
        for what in {step.what for step in some}:
            moves[what] = timed.move(*of.kinds[what]).take(taken)
        delays = [taken.of(timed.delay(way)) for way in of.ways]
        source, way, wanted = of.source, of.way, of.wanted

        def moved(part: Sequence[tuple[Float, int]]) -> Float:
            """The latest of the inputs of a step, each after its seconds."""
            seconds, nth = part[0]
            found = inputs[nth] + seconds
            for seconds, nth in part[1:]:
                np.add(inputs[nth], seconds, out=scratch)
                np.maximum(found, scratch, out=found)
            return found

        for rank, _, what, begin, end in some:
            move = moves[what]
            inputs = [gpu[rank], aside[rank], host[rank], stored[rank], zero, zero]
            for nth, action in enumerate(range(begin, end), MESSAGE):
                if source[action] >= 0:
                    inputs[nth] = sent.pop(source[action]) + delays[way[action]]
            for joined in move.joined:
                inputs.append(latest([inputs[nth] for nth in joined]))
            if move.gpu:
                gpu[rank] = moved(move.gpu)
            for action, part in zip(range(begin, end), move.sent, strict=False):
                if wanted[action]:
                    sent[action] = gpu[rank] if part is None else moved(part)
            if move.aside:
                aside[rank] = np.maximum(aside[rank], moved(move.aside))
            if move.host:
                host[rank] = moved(move.host)
            if move.stored:
                stored[rank] = np.maximum(stored[rank], moved(move.stored))


def play(order: Order, given: Given, message: Callable[[int, int], Float]) -> Pipelined:
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
) -> list[Pipelined]:
    """Play orders of one pipeline, each with more microbatches than the one before it and for the
    configurations that are `asked` for, which are its columns.

    What orders begin with alike is played once, for one of the configurations for which all of it
    takes as long.
    """
    timed = _Timed(given, message)
    every, parts = [ordered_steps(order) for order in orders], stretches((*orders,))
    longest = every[-1]
    first, like = timed.equally_timed(longest, [step for part in parts for step in part.shared])
    played = np.arange(len(first))
    state = _RankTimes.start(len(orders[-1]), len(played))
    found: list[Pipelined] = []
    for nth, (of, part, own) in enumerate(zip(every, parts, asked, strict=True)):
        still = np.unique(like[np.concatenate(asked[nth:])])
        if len(still) < len(played):
            state, played = state.take(np.searchsorted(played, still)), still
        state.play(longest, part.shared, timed, first[played])
        end = state.take(np.searchsorted(played, like[own]))
        sent = {
            action + part.moved[longest.rank(action)]: column for action, column in end.sent.items()
        }
        end = end._replace(sent=sent)
        end.play(of, part.rest, timed, own)
        found.append(Pipelined([RankEnd(*each) for each in zip(*end[:4], strict=True)]))
    return found


def latest(times: Sequence[Float]) -> Float:
    """The latest of some moments."""
    found = times[0]
    for other in times[1:]:
        found = np.maximum(found, other)
    return found


class Rounds(NamedTuple):
    """How many microbatches are played for a number of them, and what is added for the rest."""

    played: int
    before: int
    """A round fewer, for the time of a round; 0: nothing is added."""
    more: float
    """Rounds that are added."""


def rounds(schedule: str, pp: int, microbatches: int, group: int | None = None) -> Rounds:
    """The microbatches to play: no more than it takes until each further round of them, as many as
    there are ranks or as are in a group, adds the same time."""
    of, alike = SCHEDULES.get(schedule), group or pp
    if of is None or microbatches <= (of.fills + 2) * alike:
        return Rounds(microbatches, 0, 0.0)
    most = (of.fills + 2) * alike
    step = 2 * alike if of.pairs_ranks else alike
    played = most - step + (microbatches - most) % step
    played += step if played <= most - step else 0
    return Rounds(played, played - step, (microbatches - played) / step)


def slowest_loop(both: Sequence[Float], there: Sequence[Float]) -> Float:
    """Seconds that each further microbatch adds to 1F1B once the slowest part has set the pace.

    `both` are the seconds of a forward and a backward on each rank, `there` those of a message from
    each rank to the next one and of one back. Neighbouring ranks a to b pass microbatches round: of
    b - a + 1 in flight each is computed on all of them and travels there and back.
    """
    found = both[0]
    for first in range(len(both)):
        loop = both[first]
        found = np.maximum(found, loop)
        for last in range(first + 1, len(both)):
            loop = loop + both[last] + there[last - 1]
            found = np.maximum(found, loop / (last - first + 1))
    return found
