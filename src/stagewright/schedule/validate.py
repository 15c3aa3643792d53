"""Whether an order does all the work of a pipeline, once, and can run to its end."""

from __future__ import annotations

import itertools

from stagewright.errors import UserError
from stagewright.schedule.actions import SLOTS, Action, Order, flat
from stagewright.schedule.places import mirrored
from stagewright.schedule.play import play


def validate(
    order: Order, stages: int, microbatches: int, shared: frozenset[int] = frozenset()
) -> None:
    """Raise a UserError unless `order` does every stage's work once and can run to its end.

    For every stage and microbatch there must be, on one rank, one F, and either one B or one I and
    one W; no rank may wait for ever; and ranks that hold the same stage must be in step. Of stages
    that all ranks have `shared`, every rank must run all actions, in one order.
    """
    _check_shared(order, shared)
    home: dict[tuple[int, int], int] = {}
    actions_of: dict[tuple[int, int], list[Action]] = {}
    for rank, steps in enumerate(order):
        if not steps:
            raise UserError(
                f"pipeline order: rank {rank} has no actions, wanted at least one stage on every "
                "rank; remove the rank, or move a stage to it"
            )
        for action in flat(steps):
            if rank and action.stage in shared:
                continue
            pair = action.stage, action.microbatch
            if home.setdefault(pair, rank) != rank:
                raise UserError(
                    f"pipeline order: {action} is on rank {rank}, but {actions_of[pair][0]} is on "
                    f"rank {home[pair]}; wanted one rank for a stage and microbatch; move it there"
                )
            actions_of.setdefault(pair, []).append(action)
    sizes = f"{stages} stages and {microbatches} microbatches, both counted from 0"
    advice = "; correct the order, or change pp, vpp or the batch sizes"
    for stage, microbatch in itertools.product(range(stages), range(microbatches)):
        actions = actions_of.pop((stage, microbatch), [])
        if sorted(a.kind for a in actions) not in (["B", "F"], ["F", "I", "W"]):
            raise UserError(
                f"pipeline order: stage {stage}, microbatch {microbatch} has "
                f"{', '.join(map(str, actions)) or 'no actions'}; wanted F and B, or F, I and W, "
                f"once for each of {sizes}{advice}"
            )
    if actions_of:
        extra = next(iter(actions_of.values()))[0]
        raise UserError(f"pipeline order: got {extra}, wanted only {sizes}{advice}")
    play(order, SLOTS)
    mirrored(order)


def _check_shared(order: Order, shared: frozenset[int]) -> None:
    """All ranks must run the actions of shared stages in one order: they meet in collectives."""
    first, *others = ([a for a in flat(steps) if a.stage in shared] for steps in order)
    for rank, actions in enumerate(others, 1):
        for mine, wanted in itertools.zip_longest(actions, first):
            if mine != wanted:
                raise UserError(
                    f"pipeline order: all ranks share stage {(mine or wanted).stage}, and rank "
                    f"{rank} has {mine or 'no action'} where rank 0 has {wanted or 'no action'}; "
                    "put actions of shared stages in one order on all ranks"
                )
