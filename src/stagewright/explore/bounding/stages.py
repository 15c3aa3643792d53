"""Which stages the ranks of a pipeline hold, and how its schedule goes through them."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Int
from stagewright.explore.occupancy import (
    Occupancy,
    enough,
    occupancy_of_ends,
    occupancy_of_forwards,
)
from stagewright.explore.templates import Kinds
from stagewright.schedule.pipeline import Pipeline
from stagewright.schedule.places import places
from stagewright.schedule.schedules import IN_TURN
from stagewright.schedule.traits import PLAIN

OVERLAPPING: Final = ("dualpipe", "dualpipev")
"""Schedules in which forwards and backwards run at once."""
TWICE: Final = "dualpipe"
"""The schedule whose stages are on two ranks."""


def held_by(of: Pipeline, stages: int) -> list[list[int]]:
    """The stages of each rank."""
    if of.schedule in IN_TURN:
        return [[*range(rank, stages, of.pp)] for rank in range(of.pp)]
    order = of.order(2 * of.pp)
    found: list[set[int]] = [set() for _ in order]
    for place in places(order):
        found[place.rank].add(place.stage)
    return [sorted(own) for own in found]


def kind_of(stage: int, stages: int) -> int:
    """The kind of a stage in a template of 1F1B (`templates.FIRST`)."""
    return Kinds(PLAIN, stages, stages).stage(stage)


def played(of: Pipeline, microbatches: NDArray[np.integer]) -> Int:
    """Microbatches after which the first rank has no more of them in flight."""
    if of.schedule in IN_TURN and of.group is None:
        return np.minimum(microbatches, 2 * of.pp).astype(np.int64)
    return enough(of, microbatches)


def least_occupancy(
    of: Pipeline, microbatches: int, layers: tuple[tuple[int, ...], ...]
) -> Occupancy:
    """What ranks hold at least in a pipeline of so many microbatches; `layers` of each variant by
    stage."""
    like = occupancy_of_ends if of.schedule in IN_TURN else occupancy_of_forwards
    return like(of, microbatches, layers)
