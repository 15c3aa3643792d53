"""Orders in time: start and end of each action, deadlocks, idle time, and validity of an order.

Costs are numbers, or numpy arrays of one shape: then many runs with one order are played at once.

>>> from stagewright.schedule.text import from_csv
>>> order = from_csv("0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1I1,1W1")
>>> play(order, {"F": 1, "B": 3, "I": 2, "W": 1})[order[1][-1]]
(8, 9)
>>> two = np.array([1.0, 2.0])
>>> play(order, {"F": two, "B": 3 * two, "I": 2 * two, "W": two})[order[1][-1]]
(array([ 8., 16.]), array([ 9., 18.]))
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial, reduce
from typing import Any, NamedTuple

import numpy as np

from stagewright.errors import UserError
from stagewright.schedule.actions import (
    SLOTS,
    Action,
    Order,
    Overlap,
    ScheduleStep,
    flat,
    halved,
    needs,
    parts,
    shared_stages,
    stage_count,
)
from stagewright.schedule.places import mirrored

_LINKS = 6  # ranks of a circular wait that an error names
_ALL_RANKS = -1

Cost = Mapping[str, Any] | Callable[[ScheduleStep], Any]
"""Time of a step: by kind of action, `{"F": 1, "B": 2}`, or by a function of the step.

A forward and a backward that overlap take as long as both, or what the mapping has for `"F&B"`.
"""


class PlannedStep(NamedTuple):
    """Step of an order, and the earlier steps that it waits for, by index."""

    step: ScheduleStep
    ranks: tuple[int, ...]
    """Rank that runs it; all ranks, where they share its stage."""
    previous: tuple[int, ...]
    """Last step of each of its ranks, and needed steps that all ranks run. Other needs on the same
    rank end before its last step."""
    received: tuple[int, ...]
    """Steps of other ranks whose results it needs."""


@lru_cache(maxsize=64)
def plan(order: Order) -> tuple[PlannedStep, ...]:
    """Sort the steps of an order so that each comes after all that it waits for.

    Raises UserError for an order that cannot complete: it says which rank waits for which. Linear
    in the number of actions.
    """
    stages, halves, shared = stage_count(order), halved(order), shared_stages(order)
    planned: list[PlannedStep] = []
    homes: list[int] = []  # by planned step: its rank, or _ALL_RANKS
    index: dict[Action, int] = {}
    arrivals: dict[ScheduleStep, int] = {}  # ranks that have reached a step of all ranks
    reached = [0] * len(order)
    last: list[int | None] = [None] * len(order)
    waiting: dict[Action, list[int]] = {}  # ranks that wait for an action
    runnable = list(reversed(range(len(order))))
    while runnable:
        rank = runnable.pop()
        steps, at = order[rank], reached[rank]
        while at < len(steps):
            step = steps[at]
            actions = parts(step)
            if actions[0] in index:  # a step of all ranks that the last one planned
                at += 1
                continue
            required = [need for action in actions for need in needs(action, stages, halves)]
            numbers = [index.get(need, -1) for need in required]
            if -1 in numbers:
                waiting.setdefault(required[numbers.index(-1)], []).append(rank)
                break
            ranks = (rank,)
            if actions[0].stage in shared:
                arrivals[step] = arrivals.get(step, 0) + 1
                if arrivals[step] < len(order):
                    waiting.setdefault(actions[0], []).append(rank)
                    break
                ranks = tuple(range(len(order)))
            previous = dict.fromkeys(n for r in ranks if (n := last[r]) is not None)
            received: dict[int, None] = {}
            for n in numbers:
                if homes[n] == _ALL_RANKS:
                    previous[n] = None
                elif homes[n] != rank:
                    received[n] = None
            number = len(planned)
            planned.append(PlannedStep(step, ranks, (*previous,), (*received,)))
            homes.append(rank if len(ranks) == 1 else _ALL_RANKS)
            for r in ranks:
                last[r] = number
            for action in actions:
                index[action] = number
                runnable += waiting.pop(action, ())
            at += 1
        reached[rank] = at
    if waiting:
        raise UserError(_deadlock(order, reached, waiting))
    return tuple(planned)


def ends(planned: Sequence[PlannedStep], cost: Cost, delay: Any = 0) -> list[Any]:
    """End of each planned step, if each rank works through its list as soon as it can.

    `delay`: time of a message from rank to rank, a number, an array, or a function of the step that
    receives it.
    """
    price = cost if callable(cost) else partial(_price, cost)
    step_ends: list[Any] = []
    for step, _, previous, received in planned:
        times = [step_ends[n] for n in previous]
        if received:
            message = delay(step) if callable(delay) else delay
            times += [step_ends[n] + message for n in received]
        start = reduce(_later, times) if times else 0
        step_ends.append(start + price(step))
    return step_ends


def _price(cost: Mapping[str, Any], step: ScheduleStep) -> Any:
    """Time of a step by the kinds of its actions."""
    if isinstance(step, Overlap):
        return cost["F&B"] if "F&B" in cost else cost[step.forward.kind] + cost[step.backward.kind]
    return cost[step.kind]


def _later(time: Any, other: Any) -> Any:
    """Maximum of two times; elementwise if one is an array."""
    has_array = np.ndarray in (type(time), type(other))
    maximum: Callable[[Any, Any], Any] = np.maximum if has_array else max
    return maximum(time, other)


def play(order: Order, cost: Cost) -> dict[Action, tuple[Any, Any]]:
    """Start and end of every action if each rank works through its list as soon as it can.

    Actions that overlap start and end together, and so do the ranks that share a stage. Messages
    take no time. Raises UserError for an order that cannot complete (`plan`).

    >>> from stagewright.schedule.text import from_csv
    >>> play(from_csv("0F0,0B0\\n1F0,1B0"), {"F": 1, "B": 2})
    {0F0: (0, 1), 1F0: (1, 2), 1B0: (2, 4), 0B0: (4, 6)}
    """
    planned = plan(order)
    price = cost if callable(cost) else partial(_price, cost)
    pairs = zip(planned, ends(planned, cost), strict=True)
    return {a: (end - price(of.step), end) for of, end in pairs for a in parts(of.step)}


def _deadlock(order: Order, reached: list[int], waiting: dict[Action, list[int]]) -> str:
    """Error message of a deadlock: which rank waits for which, until the circular wait closes."""
    needed_by = {rank: need for need, ranks in waiting.items() for rank in ranks}
    runs = {  # of ranks that share an action, one that has not reached it
        action: rank
        for rank, at in enumerate(reached)
        for action in flat(order[rank][at:])
        if needed_by.get(rank) != action or order[rank][at] != action
    }
    head = {rank: order[rank][reached[rank]] for rank in needed_by}
    chain: list[int] = []
    rank = min(needed_by)
    while rank not in chain:
        chain.append(rank)
        need = needed_by[rank]
        if need not in runs:
            return (
                f"deadlock in the pipeline order: rank {rank} waits at {head[rank]} for {need}, "
                f"which no rank runs; add {need} to the rank that holds stage {need.stage}"
            )
        rank = runs[need]
    circle = chain[chain.index(rank) :]
    # Of the actions waited for, one that no other must precede is too late on its rank.
    late = min(
        (needed_by[rank] for rank in circle),
        key=lambda a: (a.kind != "F", a.microbatch, a.stage if a.kind == "F" else -a.stage),
    )
    start = circle.index(runs[late])
    circle = circle[start:] + circle[:start]
    rank = circle[0]
    story = f"rank {rank} waits at {head[rank]} for {needed_by[rank]}"
    for before, after in itertools.pairwise(circle[:_LINKS]):
        if needed_by[before] == head[after]:
            story += f", which rank {after} cannot start: it waits for {needed_by[after]}"
        else:
            story += f", which rank {after} has not reached: it waits at {head[after]} "
            story += f"for {needed_by[after]}"
    if len(circle) > _LINKS:
        story += f", and so on round {len(circle)} ranks"
    elif len(circle) > 1:
        story += f", which rank {rank} has not reached"
    else:
        story += ", which comes later on the same rank"
    advice = f"move {late} before {head[rank]} on rank {rank}"
    return f"deadlock in the pipeline order: {story}; {advice}"


def idle(order: Order, cost: Cost) -> list[float]:
    """Time of the step in which a rank runs no action, by rank: its bubble.

    >>> from stagewright.schedule.text import from_csv
    >>> idle(from_csv("0F0,0B0\\n1F0,1B0"), {"F": 1, "B": 2})
    [3, 3]
    """
    times = play(order, cost)
    end = max((end for _, end in times.values()), default=0)
    spans = [[times[parts(step)[0]] for step in steps] for steps in order]
    return [end - sum(stop - start for start, stop in of_rank) for of_rank in spans]


def bubble(order: Order) -> float:
    """Fraction of all ranks' time that is idle if a backward costs two forwards.

    >>> from stagewright.schedule.text import from_csv
    >>> bubble(from_csv("0F0,0B0\\n1F0,1B0"))
    0.5
    """
    end = max((end for _, end in play(order, SLOTS).values()), default=0)
    return sum(idle(order, SLOTS)) / (end * len(order)) if end else 0.0


# ---- validity ------------------------------------------------------------------------------------


def validate(order: Order, stages: int, microbatches: int) -> None:
    """Raise UserError unless `order` does every stage's work once and can run to its end.

    For every stage and microbatch there must be, on one rank, one F, and either one B or one I and
    one W; no rank may wait for ever; and ranks that hold the same stage must run the same actions.
    """
    home: dict[tuple[int, int], int] = {}
    actions_of: dict[tuple[int, int], list[Action]] = {}
    for rank, steps in enumerate(order):
        if not steps:
            raise UserError(
                f"pipeline order: rank {rank} has no actions, wanted at least one stage on every "
                "rank; remove the rank, or move a stage to it"
            )
        for action in flat(steps):
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
