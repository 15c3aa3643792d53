"""How far several orders go alike.

>>> from stagewright.schedule.schedules import make
>>> few, many = make("1f1b", 2, 2), make("1f1b", 2, 8)
>>> [(len(of.shared), len(of.rest)) for of in stretches((few, many))]
[(6, 2), (24, 2)]
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from stagewright.explore.pipeline.ordered_steps import OrderedSteps, ordered_steps
from stagewright.explore.pipeline.waves import Waves
from stagewright.schedule.actions import Order


class SharedStretch(NamedTuple):
    """A part of the longest of several orders that begin alike, and the end of one of them."""

    shared: Waves
    """What it has in common with this order, behind the parts before."""
    rest: Waves
    """What this order does behind all that it has in common with the longest."""
    moved: Sequence[int]
    """By rank, what leads from the numbers of the longest order's actions to this one's."""


@lru_cache(maxsize=64)
def stretches(orders: tuple[Order, ...]) -> tuple[SharedStretch, ...]:
    """How orders of one pipeline go, each with more microbatches than the one before."""
    every = [ordered_steps(order) for order in orders]
    longest = every[-1]
    # What one has in common with the longest, all that follow have.
    alike = np.minimum.accumulate([_steps_in_common(of, longest) for of in every[::-1]])[::-1]
    found: list[SharedStretch] = []
    before: list[int] = [0] * len(longest.first_action)
    for of, until in zip(every, alike.tolist(), strict=True):
        shared = [
            step for step in longest.in_turn
            if before[step.rank] <= step.number - longest.begins[step.rank] < until[step.rank]
        ]  # fmt: skip
        rest = [s for s in of.in_turn if s.number - of.begins[s.rank] >= until[s.rank]]
        pairs = zip(of.first_action, longest.first_action, strict=True)
        moved = [own - there for own, there in pairs]
        found.append(SharedStretch(Waves.of(longest, shared), Waves.of(of, rest), moved))
        before = until
    return tuple(found)


def _steps_in_common(of: OrderedSteps, longest: OrderedSteps) -> list[int]:
    """With how many steps each rank begins that are those of another order, up to the first last
    backward of a stage; each step that others need for these is among them."""
    found: list[int] = []
    for rank, (mine, theirs) in enumerate(zip(of.begins, longest.begins[:-1], strict=False)):
        count = min(of.begins[rank + 1] - mine, longest.begins[rank + 1] - theirs)
        own, other = slice(mine, mine + count), slice(theirs, theirs + count)
        same = (of.content[:, own] == longest.content[:, other]).all(axis=0) & ~of.last[own]
        found.append(count if same.all() else int(same.argmin()))
    done: set[int] = set()
    for rank, number, _, begin, end in of.in_turn:
        nth = number - of.begins[rank]
        if nth >= found[rank]:
            continue
        if all(of.source[action] < 0 or of.source[action] in done for action in range(begin, end)):
            done.update(range(begin, end))
        else:
            found[rank] = nth
    return found
