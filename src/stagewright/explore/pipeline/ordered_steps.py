"""The steps of orders, each behind what it needs."""

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
