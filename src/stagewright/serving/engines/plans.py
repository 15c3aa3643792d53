"""What replicas that step together do next, from what each of them would do alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

Plan = tuple[int, float, float]
"""Steps, seconds of the first, and by how much each further one is longer."""


class PlannedSteps(NamedTuple):
    """What a replica with a batch would do alone."""

    plan: Plan
    tokens: int
    """New tokens of a step."""
    requests: int


OfAll = Callable[[Sequence[PlannedSteps], float], Sequence[Plan]]
"""Replicas' plans where all replicas have so many tokens in the mean (`StepTimes.plans_of_all`)."""


def plan_of_all(active: Sequence[PlannedSteps], of_all: OfAll | None, replicas: int) -> Plan:
    """The steps of all replicas: those of the slowest, as long as that one stays the slowest.

    `active` are the replicas with a batch, at least one, of so many `replicas`. Without `of_all`
    the steps of a replica do not depend on the tokens of others.
    """
    if of_all is None:
        plans: Sequence[Plan] = [each.plan for each in active]
    else:
        tokens = 0
        for each in active:
            tokens += each.tokens
        plans = of_all(active, tokens / replicas)
    if len(plans) == 1:
        return plans[0]
    steps, first, grows = plans[0]
    for some, seconds, more in plans:
        if some < steps:
            steps = some
        if seconds > first or (seconds == first and more > grows):
            first, grows = seconds, more
    for _, least, faster in plans if steps > 1 else ():
        if faster > grows:  # that replica is the slowest from some step on
            steps = min(steps, int((first - least) / (faster - grows)) + 1)
    return steps, first, grows
