"""The steps of orders, each behind what it needs, and how far several orders go alike.

>>> from stagewright.schedule.schedules import make
>>> few, many = make("1f1b", 2, 2), make("1f1b", 2, 8)
>>> [(len(of.shared), len(of.rest)) for of in stretches((few, many))]
[(6, 2), (24, 2)]
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np

from stagewright.arrays import Bool, Int
from stagewright.explore.actions import StepKind
from stagewright.schedule.actions import Order
from stagewright.schedule.columns import KINDS, OrderColumns

StepCounts: TypeAlias = "Mapping[tuple[StepKind, bool], int]"


class StepInTurn(NamedTuple):
    """A step, behind all that it needs."""

    rank: int
    number: int
    """Among the steps of all ranks, those of rank 0 first."""
    what: int
    """A number of `OrderedSteps.kinds`."""
    begin: int
    """Its first action, by number."""
    end: int


class OrderedSteps(NamedTuple):
    """The steps of an order, and the messages between their actions."""

    in_turn: Sequence[StepInTurn]
    kinds: Sequence[tuple[StepKind, bool, tuple[bool, ...]]]
    """What a step does, whether it does what happens once per step, and which of its actions wait
    for a message."""
    counts: tuple[StepCounts, ...]
    """By rank how many steps there are of each kind, complete and not."""
    ways: Sequence[tuple[int, int]]
    """The pairs of ranks between which messages are waited for: from one, by the other."""
    source: Sequence[int]
    """By action, the one on another rank that hands on what it needs; -1: none."""
    way: Sequence[int]
    """By action, on which of `ways` that comes."""
    wanted: Sequence[bool]
    """By action, whether one on another rank needs what it hands on."""
    begins: Sequence[int]
    """The first step of each rank, by number, and how many steps there are."""
    first_action: Sequence[int]
    """The first action of each rank, by number."""
    content: Int
    """What is equal for equal steps: [fields, steps]."""
    last: Bool
    """Which steps do what happens once per step with the last backward of a stage: [steps]."""

    def rank(self, action: int) -> int:
        """The rank of an action."""
        return bisect_right(self.first_action, action) - 1


@lru_cache(maxsize=256)
def ordered_steps(order: Order) -> OrderedSteps:
    """The steps of all ranks, each behind what it needs."""
    of = OrderColumns.of(order)
    in_turn, source = of.execution()
    begins, away = of.begins, source >= 0
    first, last = begins[:-1], begins[1:] - 1
    pair, rank = last > first, of.rank[first]
    did = len(KINDS) * of.stage + of.kind
    kinds = np.stack([did[first], np.where(pair, did[last], -1)])
    once = of.once_per_step[first] | of.once_per_step[last]
    marks = np.stack([once, away[first], away[last]])
    # Kinds are numbered as ranks come to them.
    _, begin, what = np.unique(
        np.concatenate([kinds, marks]), axis=1, return_index=True, return_inverse=True
    )
    order_of_kinds = np.argsort(begin)
    number = np.empty_like(begin)
    number[order_of_kinds] = np.arange(len(begin))
    what = number[what.ravel()]
    distinct: list[tuple[StepKind, bool, tuple[bool, ...]]] = []
    for nth in begin[order_of_kinds].tolist():
        actions = range(int(first[nth]), int(last[nth]) + 1)
        kind = tuple((int(of.stage[a]), KINDS[of.kind[a]]) for a in actions)
        distinct.append((kind, bool(once[nth]), tuple(bool(away[a]) for a in actions)))
    pairs, way = np.unique(
        np.stack([of.rank[source[away]], of.rank[away]]), axis=1, return_inverse=True
    )
    ways = np.zeros(len(of), dtype=np.int64)
    ways[away] = way.ravel()
    wanted = np.zeros(len(of), dtype=bool)
    wanted[source[away]] = True
    columns = rank, np.arange(len(rank)), what, first, last + 1
    begins = np.searchsorted(rank, np.arange(int(rank[-1]) + 2))
    content = np.concatenate([kinds, marks, of.microbatch[np.stack([first, last])]])
    ends = of.last_backward
    return OrderedSteps(
        [*map(StepInTurn, *(column[in_turn].tolist() for column in columns))],
        distinct,
        _counts(rank, what, distinct),
        [(a, b) for a, b in pairs.T.tolist()],
        source.tolist(),
        ways.tolist(),
        wanted.tolist(),
        begins.tolist(),
        first[begins[:-1]].tolist(),
        content,
        ends[first] | ends[last],
    )


def _counts(
    rank: Int, what: Int, kinds: Sequence[tuple[StepKind, bool, tuple[bool, ...]]]
) -> tuple[StepCounts, ...]:
    """How many steps of each kind each rank has, in the order in which it comes to them."""
    found: list[StepCounts] = []
    for own in np.split(what, np.flatnonzero(np.diff(rank)) + 1):
        numbers, first, often = np.unique(own, return_index=True, return_counts=True)
        counts: dict[tuple[StepKind, bool], int] = {}
        for nth in np.argsort(first).tolist():
            step, complete, _ = kinds[int(numbers[nth])]
            counts[step, complete] = counts.get((step, complete), 0) + int(often[nth])
        found.append(counts)
    return tuple(found)


def ways(order: Order) -> frozenset[tuple[int, int]]:
    """The pairs of ranks between which messages are waited for: from one, by the other."""
    return frozenset(ordered_steps(order).ways)


def step_counts(order: Order) -> tuple[StepCounts, ...]:
    """By rank how many steps there are of each kind, complete and not."""
    return ordered_steps(order).counts


class SharedStretch(NamedTuple):
    """A part of the longest of several orders that begin alike, and the end of one of them."""

    shared: Sequence[StepInTurn]
    """What it has in common with this order, behind the parts before."""
    rest: Sequence[StepInTurn]
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
        found.append(SharedStretch(shared, rest, [own - there for own, there in pairs]))
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
