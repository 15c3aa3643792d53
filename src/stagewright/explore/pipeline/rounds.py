"""How few microbatches tell the time of many: a (max, +) system becomes periodic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Float
from stagewright.schedule.schedules import SCHEDULES


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
