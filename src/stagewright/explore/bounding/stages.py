"""Which stages the ranks of a pipeline hold, and how its schedule goes through them."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Int
from stagewright.explore.memory import Occupancy, occupancy_of_ends, occupancy_of_forwards
from stagewright.explore.pipeline import order_of
from stagewright.explore.shared.plans import PipelineShape
from stagewright.explore.templates import FIRST, LAST, MIDDLE, ONLY
from stagewright.schedule.in_flight import enough
from stagewright.schedule.places import places

IN_TURN: Final = ("1f1b", "gpipe", "interleaved", "looped-bfs")
"""Schedules that hand stages to ranks in turn, and in which a rank waits for a whole forward and a
whole backward of the stages before its first one."""
OVERLAPPING: Final = ("dualpipe", "dualpipev")
"""Schedules in which forwards and backwards run at once."""
TWICE: Final = "dualpipe"
"""The schedule whose stages are on two ranks."""


def held_by(shape: PipelineShape, stages: int) -> list[list[int]]:
    """The stages of each rank."""
    if shape.schedule in IN_TURN:
        return [[*range(rank, stages, shape.pp)] for rank in range(shape.pp)]
    order = order_of(shape.schedule, shape.pp, 2 * shape.pp, shape.vpp, None)
    found: list[set[int]] = [set() for _ in order]
    for place in places(order):
        found[place.rank].add(place.stage)
    return [sorted(own) for own in found]


def kind_of(stage: int, stages: int) -> int:
    """The kind of a stage in a template of 1F1B (`templates.FIRST`)."""
    if stages == 1:
        return ONLY
    return FIRST if stage == 0 else LAST if stage == stages - 1 else MIDDLE


def played(shape: PipelineShape, microbatches: NDArray[np.integer]) -> Int:
    """Microbatches after which the first rank has no more of them in flight."""
    if shape.schedule in IN_TURN:
        return np.minimum(microbatches, 2 * shape.pp).astype(np.int64)
    own = shape.schedule, shape.pp, shape.vpp
    distinct, of = np.unique(microbatches, return_inverse=True)
    return np.array([enough(*own, m, shape.group) for m in distinct.tolist()])[of]


def least_occupancy(
    shape: PipelineShape, microbatches: int, layers: tuple[tuple[int, ...], ...]
) -> Occupancy:
    """What ranks hold at least in a pipeline of so many microbatches; `layers` of each variant by
    stage."""
    like = occupancy_of_ends if shape.schedule in IN_TURN else occupancy_of_forwards
    return like((shape.schedule, shape.pp, shape.vpp, microbatches, shape.group), layers)
