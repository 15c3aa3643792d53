"""How many microbatches a rank has in flight while it does what: by schedule.

>>> [state for state in states("1f1b", 2, 1, 4, None)[0] if state.at == ((0, BACKWARD),)]
[InFlight(at=((0, 'backward'),), others=((0, 1, 0),), after=())]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from stagewright.schedule.actions import Order, ScheduleStep, flat, parts
from stagewright.schedule.schedules import SCHEDULES, make
from stagewright.schedule.traits import traits_of

FIRST_FORWARD, FORWARD, BACKWARD, LAST_BACKWARD = (
    "first forward", "forward", "backward", "last backward",
)  # fmt: skip
INPUT_HALF, WEIGHT_HALF, LAST_WEIGHT_HALF = "input half", "weight half", "last weight half"
STEP = "step"
"""Moments of a stage: actions whose rows differ, and the rows after all actions."""


StepOf = tuple[tuple[int, str], ...]
"""Stage and kind of an action, or of a forward and a backward that overlap."""


_STEPS_BEFORE = 4
"""Steps of a rank whose communication may run on beside a later one: actions without layers, as
those of a stage that holds the embedding alone, are short."""


class InFlight(NamedTuple):
    """What a rank is at, and how many other microbatches each of its stages has in flight."""

    at: tuple[tuple[int, str], ...]
    """The stage whose rows run, and its moment; two where actions overlap, and none while the
    rank's rows after all actions run."""
    others: tuple[tuple[int, int, int], ...]
    """Stage; microbatches between its forward and its backward, and between the halves of its
    backward, but for those whose actions run."""
    after: tuple[StepOf, ...] = ()
    """The steps before of the same rank whose communication may run on, and those behind them; or
    the last one; where they are asked for. The latest one is the last."""


@lru_cache(maxsize=512)
def states(
    schedule: str,
    pp: int,
    vpp: int,
    microbatches: int,
    group: int | None,
    after: str = "",
) -> tuple[tuple[InFlight, ...], ...] | None:
    """The states of each pipeline rank, without those with less in flight than another one.

    `after`: kinds of actions whose communication may run on: states are apart by the steps
    before. None: all ranks share stages.
    """
    order = order_of_enough(schedule, pp, vpp, microbatches, group)
    if traits_of(order).shared:
        return None
    return tuple(_of_rank(steps, after) for steps in order)


@lru_cache(maxsize=1024)
def states_of_ends(
    schedule: str, pp: int, vpp: int, microbatches: int, group: int | None
) -> tuple[tuple[InFlight, ...], ...]:
    """As `states`, of the first and the last rank only; of a schedule whose ranks share nothing."""
    order = make(schedule, pp, microbatches, vpp, group=group)
    return tuple(_of_rank(order[rank]) for rank in sorted({0, pp - 1}))


def forwards_of_first(
    schedule: str, pp: int, vpp: int, microbatches: int, group: int | None
) -> tuple[InFlight, ...]:
    """As `states`, of the forwards of the first rank only, and of what comes after all actions;
    nothing is said of the halves of backwards, nor of backwards that run beside."""
    order = make(schedule, pp, microbatches, vpp, group=group)
    found: dict[tuple[tuple[int, str], ...], set[tuple[int, ...]]] = {}
    stages: list[int] = []
    for at, others, _ in _of_rank(order[0]):
        stages = [stage for stage, _, _ in others]
        forward = tuple((s, moment) for s, moment in at if moment in (FIRST_FORWARD, FORWARD))
        if forward or not at:
            found.setdefault(forward, set()).add(tuple(count for _, count, _ in others))
    return tuple(
        InFlight(at, tuple((s, count, 0) for s, count in zip(stages, counts, strict=True)))
        for at, some in found.items()
        for counts in largest(some)
    )


def enough(schedule: str, pp: int, vpp: int, microbatches: int, group: int | None) -> int:
    """Microbatches after which a schedule that alternates has no more of them in flight."""
    of = SCHEDULES.get(schedule)
    if of is None or of.forwards_first:
        return microbatches
    alike = group or (2 * pp if of.pairs_ranks else pp)
    most = max(2 * (min(vpp, 2) + 1), of.fills + 2)  # rounds: more chunks fill up in no more
    return min(microbatches, most * (group or pp) + microbatches % alike)


@lru_cache(maxsize=1)  # what follows from an order is asked for by one after another
def order_of_enough(
    schedule: str, pp: int, vpp: int, microbatches: int, group: int | None
) -> Order:
    """The order of a schedule with as many microbatches as show all its states."""
    return make(schedule, pp, enough(schedule, pp, vpp, microbatches, group), vpp, group=group)


def _of_rank(steps: Sequence[ScheduleStep], after: str = "") -> tuple[InFlight, ...]:
    actions = flat(steps)
    stages = sorted({a.stage for a in actions})
    count, place = len(stages), {stage: nth for nth, stage in enumerate(stages)}
    first = {a.stage: a.microbatch for a in reversed(actions) if a.kind == "F"}
    last = {a.stage: (a.kind, a.microbatch) for a in actions if a.kind in "BW"}
    moments = {"B": (BACKWARD, LAST_BACKWARD), "W": (WEIGHT_HALF, LAST_WEIGHT_HALF)}
    held = [0] * 2 * count  # by stage in flight, then between the halves of its backward
    found: dict[_AtAfter, set[tuple[int, ...]]] = {}
    before: tuple[StepOf, ...] = ()
    recent: tuple[StepOf, ...] = ()
    for step in steps:
        at: list[tuple[int, str]] = []
        begun: list[int] = []
        for stage, kind, microbatch in parts(step):
            if kind == "F":
                begun.append(place[stage])
                at.append((stage, FIRST_FORWARD if first[stage] == microbatch else FORWARD))
            elif kind == "I":
                held[place[stage]] -= 1
                begun.append(count + place[stage])
                at.append((stage, INPUT_HALF))
            else:
                held[place[stage] + (0 if kind == "B" else count)] -= 1
                at.append((stage, moments[kind][last[stage] == (kind, microbatch)]))
        found.setdefault((tuple(at), before), set()).add(tuple(held))
        for nth in begun:
            held[nth] += 1
        if after:
            recent = *recent[1 - _STEPS_BEFORE :], tuple((a.stage, a.kind) for a in parts(step))
            lasting = [any(kind in after for _, kind in of) for of in recent]
            before = recent[lasting.index(True) if any(lasting) else -1 :]
    found[(), before] = {(0,) * 2 * count}
    return tuple(
        InFlight(at, tuple(zip(stages, others[:count], others[count:], strict=True)), behind)
        for (at, behind), some in found.items()
        for others in largest(some)
    )


_AtAfter = tuple[tuple[tuple[int, str], ...], tuple[StepOf, ...]]
"""What a rank is at, and the steps before (`InFlight`)."""


def largest(some: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Of tuples that differ, those that no other one reaches in every number."""
    every = sorted(some, key=sum, reverse=True)
    if len(every) < 2:
        return every
    table = np.array(every)
    exceeded = np.tril((table[:, None] <= table).all(axis=2), -1).any(axis=1)  # by one before it
    return [every[nth] for nth in np.flatnonzero(~exceeded).tolist()]
