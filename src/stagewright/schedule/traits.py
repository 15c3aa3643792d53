"""What an order of actions has that others have not: what decides how its steps are made."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from stagewright.schedule.actions import Order, Overlap, halved
from stagewright.schedule.places import places


class OrderTraits(NamedTuple):
    """What an order has.

    >>> from stagewright.schedule.schedules import make
    >>> [traits_of(make(name, 2, 4, 2)).folded for name in ("interleaved", "zbv")]
    [False, True]
    """

    halves: bool
    """Some backwards are done in halves."""
    overlaps: bool
    """Some forwards and backwards run at once."""
    folded: bool
    """Stages that follow each other are on one rank, where a V turns."""
    doubled: bool
    """Stages are on two ranks."""
    shared: bool
    """All ranks hold a part of a stage."""


PLAIN = OrderTraits(halves=False, overlaps=False, folded=False, doubled=False, shared=False)
"""What orders of 1F1B and its relatives have."""


@lru_cache(maxsize=256)
def traits_of(order: Order) -> OrderTraits:
    """What an order has."""
    home = places(order)
    alone = len({place.stage for place in home}) == len(home)
    return OrderTraits(
        halves=bool(halved(order)),
        overlaps=any(isinstance(step, Overlap) for steps in order for step in steps),
        folded=len(order) > 1 and any(p.rank in (p.before, p.after) for p in home),
        doubled=not alone and not any(place.shared for place in home),
        shared=any(place.shared for place in home),
    )
