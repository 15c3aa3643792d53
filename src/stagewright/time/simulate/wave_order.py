"""Levels of fragments: the longest path to each through the messages and rendezvous before it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Int


class Wait(NamedTuple):
    """A rank class that waits for another one."""

    class_id: int
    other: int
    fragment_index: int
    """Fragment of `other` that sends a message; of `class_id` if it is a rendezvous."""
    is_rendezvous: bool


class Deadlock(Exception):
    """A circular wait, or a wait for a class that has ended."""

    def __init__(self, waits: Sequence[Wait]) -> None:
        """`waits`: each for the class of the next one."""
        super().__init__(waits)
        self.waits = waits


def fragment_levels(
    slots: Sequence[Sequence[int]], deps: Sequence[Mapping[int, Sequence[tuple[int, int]]]],
    rendezvous_class: Sequence[Int],
) -> list[Int]:  # fmt: skip
    """Level of each fragment of each class: one after the levels it depends on.

    A fragment depends on the one before it on its class. `slots`: communicator of a rendezvous, -1
    for other fragments. `deps`: by fragment, classes and fragments that send to it.
    `rendezvous_class`: by communicator and class, the first class of its rendezvous. Raises
    Deadlock.
    """
    count = len(slots)
    stops = [
        [*sorted({i for i, slot in enumerate(of_class) if slot >= 0} | {*deps[c]}), len(of_class)]
        for c, of_class in enumerate(slots)
    ]
    levels = [[-1] * len(fragments) for fragments in slots]
    next_fragment, level, next_stop = [0] * count, [0] * count, [0] * count
    num_arrivals: dict[tuple[int, int], int] = defaultdict(int)
    arrivals: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    waiting: list[dict[int, list[int]]] = [{} for _ in range(count)]
    blocked_on: dict[int, Wait | tuple[int, int, int]] = {}
    ready = [*range(count)][::-1]

    def advance(c: int, end: int) -> None:
        """Give consecutive levels to the fragments of a class up to `end`."""
        begin = next_fragment[c]
        levels[c][begin:end] = range(level[c], level[c] + end - begin)
        level[c] += end - begin
        next_fragment[c] = end
        for fragment in [f for f in waiting[c] if f < end]:
            ready.extend(waiting[c].pop(fragment))

    def message_wait(c: int, stop: int) -> Wait | None:
        """Raise the level of a class above those of its messages, or return one that is missing."""
        latest = level[c]
        for other, fragment in deps[c].get(stop, ()):
            if levels[other][fragment] < 0:
                return Wait(c, other, fragment, False)
            latest = max(latest, levels[other][fragment] + 1)
        level[c] = latest
        return None

    while ready:
        c = ready.pop()
        blocked_on.pop(c, None)
        while True:
            stop = stops[c][next_stop[c]]
            advance(c, stop)
            if stop == len(levels[c]):
                break
            if (wait := message_wait(c, stop)) is not None:
                waiting[wait.other].setdefault(wait.fragment_index, []).append(c)
                blocked_on[c] = wait
                break
            slot = slots[c][stop]
            if slot < 0:
                next_stop[c] += 1
                advance(c, stop + 1)
                continue
            members = rendezvous_class[slot]
            key = slot, int(members[c]), num_arrivals[c, slot]
            arrived = arrivals[key]
            arrived.append(c)
            if len(arrived) < int((members == members[c]).sum()):
                blocked_on[c] = key
                break
            latest = max(level[member] for member in arrived)
            for member in arrived:
                level[member] = latest
                num_arrivals[member, slot] += 1
                next_stop[member] += 1
                blocked_on.pop(member, None)
                advance(member, next_fragment[member] + 1)
                if member != c:
                    ready.append(member)

    unfinished = [c for c in range(count) if next_fragment[c] < len(levels[c])]
    if not unfinished:
        return [np.array(of_class, dtype=np.int64) for of_class in levels]
    waits: list[Wait] = []
    c = unfinished[0]
    while c in blocked_on and all(c != wait.class_id for wait in waits):
        wait = blocked_on[c]
        if not isinstance(wait, Wait):
            members = np.flatnonzero(rendezvous_class[wait[0]] == wait[1]).tolist()
            missing = next(other for other in members if other not in arrivals[wait])
            wait = Wait(c, missing, next_fragment[c], True)
        waits.append(wait)
        c = wait.other
    raise Deadlock(waits)
