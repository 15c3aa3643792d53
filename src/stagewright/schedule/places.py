"""Location of each virtual stage: its ranks, and those before and after it, from an order."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from stagewright.errors import UserError
from stagewright.schedule.actions import Action, Order, ScheduleStep, flat, parts, shared_stages


class Place(NamedTuple):
    """Stage on a rank, and the ranks of the stages before and after; None at the model's ends."""

    stage: int
    rank: int
    before: int | None
    after: int | None
    shared: bool = False
    """True if every rank holds a part of the stage. Values from the stage of one rank then go to
    all ranks; each rank has the values that the stages around a shared stage need. Between two
    shared stages, each rank passes on its own part."""


@lru_cache(maxsize=64)  # the pipelines of a search, each of which many runs have
def places(order: Order) -> tuple[Place, ...]:
    """Places of all stages, sorted by rank and stage.

    A stage may be on several ranks, each with other microbatches, as in DualPipe. Raises UserError
    unless all microbatches of a stage on a rank come from one rank and go on to one.

    >>> from stagewright.schedule.text import from_csv
    >>> [tuple(p)[:3] for p in places(from_csv("0F0,3F0,3B0,0B0\\n1F0,2F0,2B0,1B0"))]
    [(0, 0, None), (3, 0, 1), (1, 1, 0), (2, 1, 1)]
    """
    shared = shared_stages(order)
    rank_of = {
        (a.stage, a.microbatch): rank
        for rank, steps in enumerate(order)
        for a in flat(steps)
        if a.stage not in shared
    }
    by_stage: dict[tuple[int, int], tuple[Place, int]] = {}
    for (stage, microbatch), rank in rank_of.items():
        before, after = (
            rank if n in shared else rank_of.get((n, microbatch)) for n in (stage - 1, stage + 1)
        )
        place = Place(stage, rank, before, after)
        first, other = by_stage.setdefault((rank, stage), (place, microbatch))
        if first != place:
            raise UserError(
                f"pipeline order: microbatches {other} and {microbatch} both pass through stage "
                f"{stage} on rank {rank}, but come from or go on to different ranks; wanted one "
                "way through the ranks for all microbatches of a stage on a rank"
            )
    rank_of_stage = {stage: rank for (stage, _), rank in rank_of.items()}
    for stage in shared:
        for rank in range(len(order)):
            before, after = (
                rank if n in shared else rank_of_stage.get(n) for n in (stage - 1, stage + 1)
            )
            by_stage[rank, stage] = Place(stage, rank, before, after, shared=True), 0
    return tuple(by_stage[key][0] for key in sorted(by_stage))


def mirrored(order: Order) -> bool:
    """Return True if each stage is on two ranks, r and pp - 1 - r, as in DualPipe.

    Such pairs reduce gradients together, so they must do the same in the same order, each with
    other microbatches. Raises UserError for any other order with a stage on several ranks.
    """
    holders: dict[int, list[int]] = {}
    for place in places(order):
        if place.shared:
            continue
        holders.setdefault(place.stage, []).append(place.rank)
    if all(len(ranks) == 1 for ranks in holders.values()):
        return False
    last = len(order) - 1
    for stage, ranks in holders.items():
        if len(ranks) != 2 or sum(ranks) != last:
            raise UserError(
                f"pipeline order: stage {stage} is on rank{'s' * (len(ranks) > 1)} "
                f"{', '.join(map(str, ranks))}; wanted every stage on one rank, or every stage on "
                f"two, r and {last} - r, as in DualPipe"
            )
    for rank in range(len(order) // 2):
        if _pattern(order[rank]) != _pattern(order[last - rank]):
            raise UserError(
                f"pipeline order: ranks {rank} and {last - rank} hold the same stages but do not "
                "do the same in the same order; make their rows equal but for the microbatches"
            )
    return True


def _pattern(steps: Iterable[ScheduleStep]) -> list[list[tuple[int, str, int]]]:
    """Steps with the microbatches of each stage numbered in the order in which they occur."""
    numbers: dict[int, dict[int, int]] = {}

    def number(a: Action) -> int:
        of_stage = numbers.setdefault(a.stage, {})
        return of_stage.setdefault(a.microbatch, len(of_stage))

    return [[(a.stage, a.kind, number(a)) for a in parts(step)] for step in steps]
