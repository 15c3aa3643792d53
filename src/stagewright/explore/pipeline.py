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

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np

from stagewright.arrays import Float
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
from stagewright.schedule.actions import (
    Action,
    Order,
    ScheduleStep,
    flat,
    halved,
    needs,
    parts,
    stage_count,
)
from stagewright.schedule.schedules import SCHEDULES, make

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
    late = np.maximum(of.aside, of.chain)
    stored = _changed(_part(np.maximum(of.stored, of.chain_stored)), STORED)
    return Effect(gpu, _changed(_part(late), ASIDE), _changed(_part(of.host), HOST), stored, parts)


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


class _AwaitedMessage(NamedTuple):
    """What a step waits for from another rank."""

    action: int
    """The number of the action that sends."""
    source: int
    target: int


class _OrderedStep(NamedTuple):
    """A step in an order of execution that every step's needs precede."""

    rank: int
    kind: StepKind
    complete: bool
    messages: tuple[_AwaitedMessage | None, ...]
    """By action of the step."""
    numbers: tuple[int, ...]
    """By action of the step the number under which its message is waited for; -1: none is."""


def step_kind(step: ScheduleStep) -> StepKind:
    """The kind of a step: of two that overlap, the forward first."""
    return tuple((a.stage, a.kind) for a in parts(step))


@lru_cache(maxsize=256)
def _steps(order: Order) -> tuple[_OrderedStep, ...]:
    """The steps of all ranks, each behind what it needs."""
    stages, halves = stage_count(order), halved(order)
    rank_of = {(a.stage, a.microbatch): r for r, steps in enumerate(order) for a in flat(steps)}
    complete = {a for steps in order for a in once_per_step(steps)}
    every = [a for steps in order for a in flat(steps)]
    if len({*every}) < len(every):
        raise ValueError("several ranks do the same action")
    needed = {a: needs(a, stages, halves) for a in every}
    away: dict[Action, Action] = {}
    for a, some in needed.items():
        home = rank_of[a.stage, a.microbatch]
        for need in some:
            if rank_of[need.stage, need.microbatch] != home:
                away[a] = need
    wanted = {*away.values()}
    number: dict[Action, int] = {}
    found: list[_OrderedStep] = []
    reached = [0] * len(order)
    waiting: dict[Action, list[int]] = {}
    runnable = [*range(len(order))]
    while runnable:
        rank = runnable.pop()
        row = order[rank]
        while reached[rank] < len(row):
            actions = parts(row[reached[rank]])
            missing = [need for a in actions for need in needed[a] if need not in number]
            if missing:
                waiting.setdefault(missing[0], []).append(rank)
                break
            messages: list[_AwaitedMessage | None] = []
            for a in actions:
                number[a] = len(number)
                source = away.get(a)
                home = -1 if source is None else rank_of[source.stage, source.microbatch]
                messages.append(
                    None if source is None else _AwaitedMessage(number[source], home, rank)
                )
            numbers = tuple(number[a] if a in wanted else -1 for a in actions)
            kind, once = step_kind(row[reached[rank]]), not complete.isdisjoint(actions)
            found.append(_OrderedStep(rank, kind, once, tuple(messages), numbers))
            reached[rank] += 1
            for a in actions:
                runnable += waiting.pop(a, [])
    if waiting:
        raise ValueError("the order cannot complete")
    return tuple(found)


def ways(order: Order) -> frozenset[tuple[int, int]]:
    """The pairs of ranks between which messages are waited for: from one, by the other."""
    every = (message for step in _steps(order) for message in step.messages)
    return frozenset((each.source, each.target) for each in every if each is not None)


def once_per_step(steps: Iterable[ScheduleStep]) -> set[Action]:
    """The actions of a rank that do what happens once per step: the first forward of each stage and
    its last backward."""
    firsts: dict[int, Action] = {}
    lasts: dict[int, Action] = {}
    for a in flat(steps):
        if a.kind == "F":
            firsts.setdefault(a.stage, a)
        elif a.kind in "BW":
            lasts[a.stage] = a
    return {*firsts.values(), *lasts.values()}


StepCounts: TypeAlias = "Mapping[tuple[StepKind, bool], int]"


@lru_cache(maxsize=256)
def step_counts(order: Order) -> tuple[StepCounts, ...]:
    """By rank how many steps there are of each kind, complete and not."""
    found: list[StepCounts] = []
    for steps in order:
        once = once_per_step(steps)
        found.append(Counter((step_kind(s), not once.isdisjoint(parts(s))) for s in steps))
    return tuple(found)


def play(order: Order, given: Given, message: Callable[[int, int], Float]) -> Pipelined:
    """Play an order: `message` are the seconds of a message from one rank to another.

    A step starts when its rank's kernels before it have ended, its message has arrived, and the
    host has launched it. Of two actions that overlap, each waits for a message of its own.
    """
    known: dict[tuple[StepKind, bool], Effect] = {}
    zero = 0 * message(0, 0)
    gpu: list[Float] = [zero] * len(order)
    host: list[Float] = [zero] * len(order)
    aside: list[Float] = [zero] * len(order)
    stored: list[Float] = [zero] * len(order)
    sent: dict[int, Float] = {}
    way: dict[tuple[int, int], Float] = {}
    for rank, kind, complete, messages, numbers in _steps(order):
        of = known.get((kind, complete))
        if of is None:
            of = known[kind, complete] = given(kind, complete)
        arrivals: list[Float | None] = [None, None]
        for nth, each in enumerate(messages):
            if each is not None:
                if each[1:] not in way:
                    way[each[1:]] = message(*each[1:])
                arrivals[nth] = sent.pop(each.action) + way[each[1:]]
        inputs = gpu[rank], aside[rank], host[rank], stored[rank], *arrivals
        end = _latest(of.gpu, inputs)
        late, launched = _latest(of.aside, inputs), _latest(of.host, inputs)
        for nth, number in enumerate(numbers):
            if number >= 0:
                out = end if of.sent[nth] is of.gpu else _latest(of.sent[nth], inputs)
                assert out is not None, "what is sent has been made from something"
                sent[number] = out
        gpu[rank] = gpu[rank] if end is None else end
        aside[rank] = aside[rank] if late is None else np.maximum(aside[rank], late)
        copied = _latest(of.stored, inputs)
        stored[rank] = stored[rank] if copied is None else np.maximum(stored[rank], copied)
        host[rank] = host[rank] if launched is None else launched
    return Pipelined([RankEnd(*of) for of in zip(gpu, aside, host, stored, strict=True)])


def _latest(part: Part, inputs: Sequence[Float | None]) -> Float | None:
    """The latest of the inputs that there are, each after its seconds."""
    found: Float | None = None
    for seconds, of in part:
        at: Float | None = None
        for nth in of:
            one = inputs[nth]
            if one is not None:
                at = one if at is None else np.maximum(at, one)
        if at is not None:
            time = at + seconds
            found = time if found is None else np.maximum(found, time, out=found)
    return found


class Rounds(NamedTuple):
    """How many microbatches are played for a number of them, and what is added for the rest."""

    played: int
    before: int
    """A round fewer, for the time of a round; 0: nothing is added."""
    more: float
    """Rounds that are added."""


def rounds(schedule: str, pp: int, microbatches: int) -> Rounds:
    """The microbatches to play: at most so many times pp that a round adds the same time."""
    of = SCHEDULES.get(schedule)
    if of is None or microbatches <= (of.fills + 2) * pp:
        return Rounds(microbatches, 0, 0.0)
    most = (of.fills + 2) * pp
    step = 2 * pp if of.pairs_ranks else pp
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


@lru_cache(maxsize=256)
def order_of(name: str, pp: int, microbatches: int, vpp: int, group: int | None) -> Order:
    """`schedule.schedules.make`, of orders that were asked for before."""
    return make(name, pp, microbatches, vpp, group=group)
