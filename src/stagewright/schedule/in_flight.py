"""How many microbatches a rank has in flight while it does what: by schedule.

>>> [state for state in states("1f1b", 2, 1, 4, None)[0] if state.moment == BACKWARD]
[InFlight(stage=0, moment='backward', others=((0, 1),))]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from stagewright.schedule.actions import Action, Order, Overlap, flat
from stagewright.schedule.places import places
from stagewright.schedule.schedules import make

FIRST_FORWARD, FORWARD, BACKWARD, LAST_BACKWARD, STEP = (
    "first forward", "forward", "backward", "last backward", "step",
)  # fmt: skip
"""Moments of a stage: actions whose rows differ, and the rows after all actions."""


class InFlight(NamedTuple):
    """What a rank is at, and how many other microbatches each of its stages has in flight."""

    stage: int
    """The stage whose rows run; -1: the rank's rows after all actions."""
    moment: str
    others: tuple[tuple[int, int], ...]
    """Stage, microbatches in flight but for the one whose action runs."""


@lru_cache(maxsize=512)
def states(
    schedule: str, pp: int, vpp: int, microbatches: int, group: int | None
) -> tuple[tuple[InFlight, ...], ...] | None:
    """The states of each pipeline rank, without those with less in flight than another one.

    None: the schedule overlaps actions, splits backwards, holds stages twice or has neighbouring
    stages on one rank.
    """
    order = make(schedule, pp, enough(schedule, pp, vpp, microbatches, group), vpp, group=group)
    if not _is_plain(order):
        return None
    return tuple(_of_rank([*flat(steps)]) for steps in order)


def enough(schedule: str, pp: int, vpp: int, microbatches: int, group: int | None) -> int:
    """Microbatches after which a schedule that alternates has no more of them in flight."""
    if schedule not in ("1f1b", "interleaved") or group is not None:
        return microbatches
    rounds = 2 * (vpp + 1)
    return min(microbatches, rounds * pp + microbatches % pp)


def _is_plain(order: Order) -> bool:
    if any(isinstance(step, Overlap) for steps in order for step in steps):
        return False
    if any(a.kind not in "FB" for steps in order for a in flat(steps)):
        return False
    home = places(order)
    if len({p.stage for p in home}) < len(home):
        return False
    return len(order) == 1 or all(p.rank not in (p.before, p.after) for p in home)


def _of_rank(actions: Sequence[Action]) -> tuple[InFlight, ...]:
    stages = sorted({a.stage for a in actions})
    first = {a.stage: i for i, a in reversed([*enumerate(actions)]) if a.kind == "F"}
    last = {a.stage: i for i, a in enumerate(actions) if a.kind == "B"}
    flight = dict.fromkeys(stages, 0)
    found: dict[tuple[int, str], set[tuple[int, ...]]] = {}
    for i, a in enumerate(actions):
        if a.kind == "B":
            flight[a.stage] -= 1
            moment = LAST_BACKWARD if last[a.stage] == i else BACKWARD
        else:
            moment = FIRST_FORWARD if first[a.stage] == i else FORWARD
        found.setdefault((a.stage, moment), set()).add(tuple(flight.values()))
        if a.kind == "F":
            flight[a.stage] += 1
    found[-1, STEP] = {(0,) * len(stages)}
    return tuple(
        InFlight(stage, moment, tuple(zip(stages, others, strict=True)))
        for (stage, moment), some in found.items()
        for others in largest(some)
    )


def largest(some: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The tuples that no other one exceeds in every number."""
    kept: list[tuple[int, ...]] = []
    for one in sorted(some, key=sum, reverse=True):
        if not any(all(a <= b for a, b in zip(one, other, strict=True)) for other in kept):
            kept.append(one)
    return kept
