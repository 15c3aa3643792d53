"""The time of a pipelined step for many configurations: a schedule's order over (max, +) on arrays.

Configurations that share an order (`schedule.schedules.make`) are played together: every moment is
an array [configurations]. Beyond a few times as many microbatches as ranks, each further round of
microbatches adds the same time (a (max, +) system becomes periodic), so the order is played with
few, and the rest is added.

>>> from stagewright.schedule.schedules import make
>>> one = np.ones(1)
>>> def given(a, complete):
...     return plain(one * {"F": 1, "B": 2}[a.kind])
>>> found = play(make("1f1b", 4, 8), given, lambda a, b: 0 * one)
>>> float(max(of.gpu[0] for of in found.ranks))  # (microbatches + ranks - 1) x 3
33.0
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np

from stagewright.arrays import Float
from stagewright.explore.actions import NEVER, Response
from stagewright.schedule.actions import Action, Order, flat, halved, needs, stage_count
from stagewright.schedule.places import places
from stagewright.schedule.schedules import make

Part: TypeAlias = "tuple[Float | None, Float | None, Float | None, Float | None]"
"""By input of a `Response` the seconds from it, [configurations]; None: it has no effect."""


class Effect(NamedTuple):
    """A `Response` by its parts."""

    gpu: Part
    aside: Part
    host: Part
    sent: Part


def plain(seconds: Float) -> Effect:
    """An action that takes so long, and whose launches take no time."""
    ends = seconds, None, None, seconds
    none = None, None, None, None
    return Effect(ends, none, none, ends)


def effect(of: Response) -> Effect:
    """The parts of a response that are not `NEVER`."""

    def part(columns: Float) -> Part:
        a, b, c, d = (column if (column > NEVER / 2).any() else None for column in columns)
        return a, b, c, d

    return Effect(part(of.gpu), part(np.maximum(of.aside, of.chain)), part(of.host), part(of.sent))


class RankEnd(NamedTuple):
    """When a rank is done with all actions: inputs of what comes after, [configurations]."""

    gpu: Float
    aside: Float
    host: Float


class Pipelined(NamedTuple):
    """The ends of all ranks."""

    ranks: list[RankEnd]


Given = Callable[[Action, bool], Effect]
"""The effect of an action; and whether the action does what happens once per step."""


class _OrderedAction(NamedTuple):
    """An action in an order of execution that every action's needs precede."""

    rank: int
    action: Action
    complete: bool
    source: int
    """The action, by number, whose message is waited for; -1: none."""
    source_rank: int
    sends: bool


@lru_cache(maxsize=256)
def _steps(order: Order) -> tuple[_OrderedAction, ...]:
    """The actions of all ranks, each behind what it needs."""
    stages, halves = stage_count(order), halved(order)
    rank_of = {place.stage: place.rank for place in places(order)}
    if len(rank_of) < sum(len({a.stage for a in flat(steps)}) for steps in order):
        raise ValueError("a stage is on several ranks")
    rows = [flat(steps) for steps in order]
    complete: set[Action] = set()
    for row in rows:
        firsts: dict[int, Action] = {}
        lasts: dict[int, Action] = {}
        for a in row:
            if a.kind == "F":
                firsts.setdefault(a.stage, a)
            elif a.kind in "BW":
                lasts[a.stage] = a
        complete |= {*firsts.values(), *lasts.values()}
    number: dict[Action, int] = {}
    found: list[_OrderedAction] = []
    reached = [0] * len(rows)
    waiting: dict[Action, list[int]] = {}
    runnable = [*range(len(rows))]
    wanted: set[Action] = set()
    while runnable:
        rank = runnable.pop()
        row = rows[rank]
        while reached[rank] < len(row):
            a = row[reached[rank]]
            missing = [need for need in needs(a, stages, halves) if need not in number]
            if missing:
                waiting.setdefault(missing[0], []).append(rank)
                break
            away = [n for n in needs(a, stages, halves) if rank_of[n.stage] != rank]
            wanted |= {*away}
            source = number[away[0]] if away else -1
            number[a] = len(found)
            source_rank = rank_of[away[0].stage] if away else -1
            found.append(_OrderedAction(rank, a, a in complete, source, source_rank, False))
            reached[rank] += 1
            runnable += waiting.pop(a, [])
    if waiting:
        raise ValueError("the order cannot complete")
    return tuple(step._replace(sends=step.action in wanted) for step in found)


def play(order: Order, given: Given, message: Callable[[int, int], Float]) -> Pipelined:
    """Play an order: `message` are the seconds of a message from one rank to another.

    An action starts when its rank's kernels before it have ended, its message has arrived, and the
    host has launched it.
    """
    known: dict[tuple[int, str, bool], Effect] = {}
    zero = 0 * message(0, 0)
    gpu: list[Float] = [zero] * len(order)
    host: list[Float] = [zero] * len(order)
    aside: list[Float] = [zero] * len(order)
    sent: dict[int, Float] = {}
    messages: dict[tuple[int, int], Float] = {}
    for nth, (rank, a, complete, source, source_rank, sends) in enumerate(_steps(order)):
        key = a.stage, a.kind, complete
        of = known.get(key)
        if of is None:
            of = known[key] = given(a, complete)
        arrival = None
        if source >= 0:
            way = source_rank, rank
            if way not in messages:
                messages[way] = message(*way)
            arrival = sent.pop(source) + messages[way]
        inputs = gpu[rank], aside[rank], host[rank], arrival
        end = _latest(of.gpu, inputs)
        late, launched = _latest(of.aside, inputs), _latest(of.host, inputs)
        if sends:
            out = _latest(of.sent, inputs)
            assert out is not None, "what is sent has been made from something"
            sent[nth] = out
        gpu[rank] = gpu[rank] if end is None else end
        aside[rank] = aside[rank] if late is None else np.maximum(aside[rank], late)
        host[rank] = host[rank] if launched is None else launched
    return Pipelined([RankEnd(*of) for of in zip(gpu, aside, host, strict=True)])


def _latest(part: Part, inputs: Part) -> Float | None:
    """The latest of the inputs that there are, each after its seconds."""
    found: Float | None = None
    for seconds, at in zip(part, inputs, strict=True):
        if seconds is not None and at is not None:
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


def rounds(schedule: str, pp: int, microbatches: int, fills: int) -> Rounds:
    """The microbatches to play: at most so many times pp that a round adds the same time."""
    most = (fills + 2) * pp
    if microbatches <= most or schedule.endswith(".csv"):
        return Rounds(microbatches, 0, 0.0)
    step = 2 * pp if schedule == "dualpipe" else pp
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
