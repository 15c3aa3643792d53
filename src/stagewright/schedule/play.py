"""Orders in time: when each action starts and ends, who waits for whom, and how long ranks idle.

>>> from stagewright.schedule.text import from_csv
>>> order = from_csv("0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1I1,1W1")
>>> play(order, {"F": 1, "B": 3, "I": 2, "W": 1})[order[1][-1]]
(8, 9)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

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

_LINKS = 6  # ranks of a circular wait that an error names

Cost = Mapping[str, float] | Callable[[Action], float]
"""Time of an action: by kind, `{"F": 1, "B": 2}`, or by a function of the action.

A forward and a backward that overlap take as long as both, or what the mapping has for `"F&B"`.
"""


def play(order: Order, cost: Cost) -> dict[Action, tuple[float, float]]:
    """Start and end of every action if each rank works through its list as soon as it can.

    Communication takes no time here. Two that overlap start and end together, and so do the ranks
    that share a stage. An order that cannot complete is a UserError that says who waits for whom.
    Linear in the number of actions.

    >>> from stagewright.schedule.text import from_csv
    >>> play(from_csv("0F0,0B0\\n1F0,1B0"), {"F": 1, "B": 2})
    {0F0: (0, 1), 1F0: (1, 2), 1B0: (2, 4), 0B0: (4, 6)}
    """

    def price(step: ScheduleStep) -> float:
        if isinstance(step, Overlap) and not callable(cost) and "F&B" in cost:
            return cost["F&B"]
        return sum(cost(a) if callable(cost) else cost[a.kind] for a in parts(step))

    stages = stage_count(order)
    halves = halved(order)
    shared = shared_stages(order)
    came: dict[Action, list[float]] = {}  # when each rank came to an action that all ranks run
    times: dict[Action, tuple[float, float]] = {}
    reached = [0] * len(order)
    clock: list[float] = [0] * len(order)
    waiting: dict[Action, list[int]] = {}  # an action not done yet -> the ranks that wait for it
    runnable = list(reversed(range(len(order))))
    while runnable:
        rank = runnable.pop()
        steps, at, now = order[rank], reached[rank], clock[rank]
        while at < len(steps):
            step = steps[at]
            required = [need for a in parts(step) for need in needs(a, stages, halves)]
            missing = [need for need in required if need not in times]
            if missing:
                waiting.setdefault(missing[0], []).append(rank)
                break
            start = max([now, *[times[need][1] for need in required]])
            if step in times:  # all ranks have come to an action that they share
                now, at = times[parts(step)[0]][1], at + 1
                continue
            if isinstance(step, Action) and step.stage in shared:
                came.setdefault(step, []).append(start)
                if len(came[step]) < len(order):
                    waiting.setdefault(step, []).append(rank)
                    clock[rank] = now
                    break
                start = max(came[step])
            now = start + price(step)
            for action in parts(step):
                times[action] = (start, now)
                runnable += waiting.pop(action, ())
            at += 1
        reached[rank], clock[rank] = at, now
    if waiting:
        raise UserError(_deadlock(order, reached, waiting))
    return times


def _deadlock(order: Order, reached: list[int], waiting: dict[Action, list[int]]) -> str:
    """The error of a deadlock: which rank waits for which, until the circular wait closes."""
    needed_by = {rank: need for need, ranks in waiting.items() for rank in ranks}
    runs = {  # of ranks that share an action, one that has not come to it
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
    # Of the actions waited for, the one that no other must precede is what its rank put too late.
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
    """Per rank, the time of the step in which the rank runs no action: its bubble.

    >>> from stagewright.schedule.text import from_csv
    >>> idle(from_csv("0F0,0B0\\n1F0,1B0"), {"F": 1, "B": 2})
    [3, 3]
    """
    times = play(order, cost)
    end = max((end for _, end in times.values()), default=0)
    spans = [[times[parts(step)[0]] for step in steps] for steps in order]
    return [end - sum(stop - start for start, stop in of_rank) for of_rank in spans]


def bubble(order: Order) -> float:
    """The fraction of all ranks' time that is idle if a backward costs two forwards.

    >>> from stagewright.schedule.text import from_csv
    >>> bubble(from_csv("0F0,0B0\\n1F0,1B0"))
    0.5
    """
    end = max((end for _, end in play(order, SLOTS).values()), default=0)
    return sum(idle(order, SLOTS)) / (end * len(order)) if end else 0.0
