"""How many microbatches a rank has in flight while it does what: by schedule.

>>> [state for state in states(Pipeline("1f1b", 2), 4)[0] if state.at == ((0, BACKWARD),)]
[InFlight(at=((0, 'backward'),), others=(Others(stage=0, idle=0, kept=1, halved=0),), after=())]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from stagewright.schedule.actions import Order, ScheduleStep, flat, parts
from stagewright.schedule.pipeline import Pipeline
from stagewright.schedule.schedules import IN_TURN, make
from stagewright.schedule.traits import traits_of

FIRST_FORWARD, FORWARD, BACKWARD, LAST_BACKWARD = (
    "first forward", "forward", "backward", "last backward",
)  # fmt: skip
INPUT_HALF, WEIGHT_HALF, LAST_WEIGHT_HALF = "input half", "weight half", "last weight half"
STEP = "step"
"""Moments of a stage: actions whose rows differ, and the rows after all actions."""


Alike = tuple[int, ...]
"""By stage, a number: that of the first one of stages which hold as much. A state knows stages by
these numbers, so that it is the same for many of them."""
StepOf = tuple[tuple[int, str], ...]
"""Stage and kind of an action, or of a forward and a backward that overlap."""


_STEPS_BEFORE = 4
"""Steps of a rank whose communication may run on beside a later one: actions without layers, as
those of a stage that holds the embedding alone, are short."""


class Others(NamedTuple):
    """What stages of a rank that are alike have beside the action that runs."""

    stage: int
    """One of them."""
    idle: int
    """How many of them have no action that runs."""
    kept: int
    """Microbatches between a forward and a backward of any of them, but for those whose actions
    run."""
    halved: int
    """Likewise, between the halves of a backward."""


class InFlight(NamedTuple):
    """What a rank is at, and what else its stages have in flight, those that are alike together."""

    at: tuple[tuple[int, str], ...]
    """The stage whose rows run, and its moment; two where actions overlap, and none while the
    rank's rows after all actions run."""
    others: tuple[Others, ...]
    after: tuple[StepOf, ...] = ()
    """The steps before of the same rank whose communication may run on, and those behind them; or
    the last one; where they are asked for. The latest one is the last."""


@lru_cache(maxsize=512)
def states(
    of: Pipeline, microbatches: int, alike: Alike | None = None, after: str = ""
) -> tuple[tuple[InFlight, ...], ...] | None:
    """The states of the ranks of a pipeline, without those with less in flight than another one.

    `alike`: which stages hold as much; then of ranks whose stages are alike only the first one is
    there, where the schedule hands stages out in turn. Without it all ranks are. `after`: kinds of
    actions whose communication may run on: states are apart by the steps before. Returns None where
    all ranks share stages.
    """
    order = order_of_enough(of, microbatches)
    if alike is not None and not after and of.schedule in IN_TURN:
        # The first one of ranks whose stages are alike has the most in flight at every action.
        first: dict[tuple[int, ...], int] = {}
        for rank in range(of.pp):
            first.setdefault(alike[rank :: of.pp], rank)
        order = tuple(order[rank] for rank in first.values())
    elif traits_of(order).shared:
        return None
    return tuple(_of_rank(steps, alike, after) for steps in order)


@lru_cache(maxsize=1024)
def states_of_ends(
    of: Pipeline, microbatches: int, alike: Alike | None = None
) -> tuple[tuple[InFlight, ...], ...]:
    """As `states`, of the first and the last rank only; of a schedule whose ranks share nothing."""
    order = of.order(microbatches)
    return tuple(_of_rank(order[rank], alike) for rank in sorted({0, of.pp - 1}))


def forwards_of_first(
    of: Pipeline, microbatches: int, alike: Alike | None = None
) -> tuple[InFlight, ...]:
    """As `states`, of the forwards of the first rank only, and of what comes after all actions;
    nothing is said of the halves of backwards, nor of backwards that run beside."""
    every = _of_rank(of.order(microbatches)[0], alike)
    often = {own.stage: own.idle for own in every[-1].others}  # behind all actions
    found: dict[_At, set[tuple[int, ...]]] = {}
    for at, others, _ in every:
        forward = tuple(own for own in at if own[1] in (FIRST_FORWARD, FORWARD))
        if forward or not at:
            found.setdefault(forward, set()).add(tuple(own.kept for own in others))
    return tuple(
        InFlight(at, _others(often, at, (*most, *[0] * len(most))))
        for at, some in found.items()
        for most in largest(some)
    )


@lru_cache(maxsize=1)  # what follows from an order is asked for by one after another
def order_of_enough(of: Pipeline, microbatches: int) -> Order:
    """The order of a schedule with as many microbatches as show all its states."""
    return make(of.schedule, of.pp, of.enough(microbatches), of.vpp, group=of.group)


def _of_rank(
    steps: Sequence[ScheduleStep], alike: Alike | None = None, after: str = ""
) -> tuple[InFlight, ...]:
    actions = flat(steps)
    stages = sorted({a.stage for a in actions})
    named = {stage: stage if alike is None else alike[stage] for stage in stages}
    often = Counter(named.values())
    count, place = len(often), {name: nth for nth, name in enumerate(often)}
    first = {a.stage: a.microbatch for a in reversed(actions) if a.kind == "F"}
    last = {a.stage: (a.kind, a.microbatch) for a in actions if a.kind in "BW"}
    moments = {"B": (BACKWARD, LAST_BACKWARD), "W": (WEIGHT_HALF, LAST_WEIGHT_HALF)}
    held = [0] * 2 * count  # in flight, then between the halves of backwards
    found: dict[_AtAfter, set[tuple[int, ...]]] = {}
    before: tuple[StepOf, ...] = ()
    recent: tuple[StepOf, ...] = ()
    for step in steps:
        at: list[tuple[int, str]] = []
        begun: list[int] = []
        for stage, kind, microbatch in parts(step):
            name = named[stage]
            if kind == "F":
                begun.append(place[name])
                at.append((name, FIRST_FORWARD if first[stage] == microbatch else FORWARD))
            elif kind == "I":
                held[place[name]] -= 1
                begun.append(count + place[name])
                at.append((name, INPUT_HALF))
            else:
                held[place[name] + (0 if kind == "B" else count)] -= 1
                at.append((name, moments[kind][last[stage] == (kind, microbatch)]))
        found.setdefault((tuple(at), before), set()).add(tuple(held))
        for nth in begun:
            held[nth] += 1
        if after:
            own = tuple((named[a.stage], a.kind) for a in parts(step))
            recent = *recent[1 - _STEPS_BEFORE :], own
            lasting = [any(kind in after for _, kind in of) for of in recent]
            before = recent[lasting.index(True) if any(lasting) else -1 :]
    found[(), before] = {(0,) * 2 * count}
    return tuple(
        InFlight(at, _others(often, at, most), behind)
        for (at, behind), some in found.items()
        for most in largest(some)
    )


def _others(often: Mapping[int, int], at: _At, held: Sequence[int]) -> tuple[Others, ...]:
    """What stages have beside an action: how many of them are alike, and what these have in flight,
    then between the halves of backwards."""
    runs = Counter(name for name, _ in at)
    numbers = zip(often.items(), held[: len(often)], held[len(often) :], strict=True)
    return tuple(Others(name, n - runs[name], *counts) for (name, n), *counts in numbers)


_At = tuple[tuple[int, str], ...]
_AtAfter = tuple[_At, tuple[StepOf, ...]]
"""What a rank is at, and the steps before (`InFlight`)."""


def largest(some: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Of tuples that differ, those that no other one reaches in every number."""
    every = sorted(some, key=sum, reverse=True)
    if len(every) < 2:
        return every
    table = np.array(every)
    exceeded = np.tril((table[:, None] <= table).all(axis=2), -1).any(axis=1)  # by one before it
    return [every[nth] for nth in np.flatnonzero(~exceeded).tolist()]
