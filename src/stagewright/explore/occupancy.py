"""What the ranks of a pipeline hold of its stages, in each state in which one may hold most.

>>> found = occupancy(Pipeline("1f1b", 2), 4, ((2,), (2,)))
>>> [f"{count:g} x {of.what}" for of, count in zip(found.holdings, found.counts[2]) if count]
['1 x kept', '1 x backward']
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Float, Int, distinct_values
from stagewright.explore.template_memory import HALVED, HELD, KEPT, PAIR, UPDATED
from stagewright.explore.templates import Kinds
from stagewright.schedule.in_flight import (
    STEP,
    InFlight,
    StepOf,
    forwards_of_first,
    largest,
    order_of_enough,
    states,
    states_of_ends,
)
from stagewright.schedule.pipeline import Pipeline
from stagewright.schedule.schedules import IN_TURN
from stagewright.schedule.traits import PLAIN, traits_of


class Holding(NamedTuple):
    """Something that a stage holds, or two stages together whose actions overlap."""

    what: str
    """A field of `StageBytes`, such as `KEPT`, or the moment whose peak it is."""
    kinds: tuple[int, ...]
    """Of the stages: `templates.FIRST`, ..."""
    layers: tuple[tuple[int, ...], ...]
    """Of each variant, by stage."""
    after: tuple[tuple[ActionOf, ...], ...] = ()
    """The actions of the steps before this one, the latest last, where they are asked for."""


class ActionOf(NamedTuple):
    """An action of a stage: which kind of stage, layers of each variant, and kind of action."""

    stage: int
    layers: tuple[int, ...]
    kind: str


_HeldAt = tuple[str, tuple[int, ...], tuple[StepOf, ...]]
"""What is held (`Holding.what`), by which stages, and behind which steps."""


@dataclass(frozen=True, slots=True, eq=False)
class Occupancy:
    """What ranks of a pipeline hold, in each state in which one may hold most."""

    holdings: tuple[Holding, ...]
    counts: Float
    """How often a state has each: [states, holdings]."""


def enough(of: Pipeline, microbatches: NDArray[np.integer]) -> Int:
    """`Pipeline.enough` of an array of microbatches."""
    distinct, each = distinct_values(microbatches)
    return np.array([of.enough(count) for count in distinct.tolist()])[each]


@lru_cache(maxsize=512)
def occupancy(
    of: Pipeline, microbatches: int, layers: tuple[tuple[int, ...], ...], after: str = ""
) -> Occupancy | None:
    """What ranks hold in the states of a pipeline (`in_flight.states`, also of `after`); `layers`
    are those of each stage, by variant. None: the schedule is one in which all ranks share stages.
    """
    alternates = of.schedule in IN_TURN
    traits = PLAIN if alternates else traits_of(order_of_enough(of, microbatches))
    stages = _Stages.of(Kinds(traits, of.pp, len(layers)), layers)
    found = states(of, microbatches, stages.first_equal, after)
    return None if found is None else _occupancy(found, stages)


@lru_cache(maxsize=1024)
def occupancy_of_ends(
    of: Pipeline, microbatches: int, layers: tuple[tuple[int, ...], ...]
) -> Occupancy:
    """As `occupancy`, with the states of the first and the last rank only.

    Of a schedule that hands stages to ranks in turn, with all of the microbatches.
    """
    stages = _Stages.of(Kinds(PLAIN, of.pp, of.pp * of.vpp), layers)
    return _occupancy(states_of_ends(of, microbatches, stages.first_equal), stages)


@lru_cache(maxsize=1024)
def occupancy_of_forwards(
    of: Pipeline, microbatches: int, layers: tuple[tuple[int, ...], ...]
) -> Occupancy:
    """As `occupancy`, of some of what the first rank holds: in its forwards, and when all actions
    are done, without what microbatches keep between the halves of their backwards."""
    stages = _Stages.of(Kinds(PLAIN, of.pp, len(layers)), layers)
    return _occupancy([forwards_of_first(of, microbatches, stages.first_equal)], stages)


def _occupancy(found: Iterable[Iterable[InFlight]], of: _Stages) -> Occupancy:
    number: dict[Holding, int] = {}
    of_stages: dict[_HeldAt, int] = {}
    rows: dict[frozenset[tuple[int, int]], None] = {}
    for state in _distinct(found):
        for row in _held(state):
            numbered = Counter[int]()
            for held, count in row:
                if held not in of_stages:
                    of_stages[held] = number.setdefault(of.holding(held), len(number))
                numbered[of_stages[held]] += count
            rows.setdefault(frozenset(numbered.items()))
    counts = np.zeros((len(rows), len(number)))
    for nth, row in enumerate(rows):
        for column, count in row:
            counts[nth, column] = count
    return Occupancy(tuple(number), counts)


def _distinct(ranks: Iterable[Iterable[InFlight]]) -> Iterable[InFlight]:
    """States of all ranks, of those with like stages only the ones that hold most."""
    known: dict[Any, dict[tuple[int, ...], InFlight]] = {}
    for state in (state for of_rank in ranks for state in of_rank):
        idle = tuple((own.stage, own.idle) for own in state.others)
        most = tuple(count for own in state.others for count in (own.kept, own.halved))
        known.setdefault((state.at, state.after, idle), {}).setdefault(most, state)
    for some in known.values():
        for most in largest(some):
            yield some[most]


def _held(state: InFlight) -> Iterable[list[tuple[_HeldAt, int]]]:
    """What a rank holds in a state, and how often; after all actions, for each of its stages that
    differ by itself."""
    if not state.at:
        for s, *_ in state.others:
            others = [((UPDATED, (o,), ()), idle - (o == s)) for o, idle, *_ in state.others]
            yield [*(own for own in others if own[1]), ((STEP, (s,), state.after), 1)]
        return
    every = [
        ((what, (own.stage,), ()), count)
        for own in state.others
        for what, count in ((KEPT, own.kept), (HALVED, own.halved), (HELD, own.idle))
        if count
    ]
    current = tuple(s for s, _ in state.at)
    moment = PAIR if len(current) > 1 else state.at[0][1]
    yield [*every, ((moment, current, state.after), 1)]


class _Stages(NamedTuple):
    """The stages of a pipeline."""

    kinds: Sequence[int]
    """By stage."""
    layers: Sequence[tuple[int, ...]]
    """Of each variant, by stage."""

    @classmethod
    def of(cls, kinds: Kinds, layers: Sequence[tuple[int, ...]]) -> Self:
        """Those of a pipeline whose stages have these layers."""
        return cls([kinds.stage(stage) for stage in range(len(layers))], layers)

    @property
    def first_equal(self) -> tuple[int, ...]:
        """By stage, the first one that holds as much."""
        first: dict[tuple[int, tuple[int, ...]], int] = {}
        every = zip(self.kinds, self.layers, strict=True)
        return tuple(first.setdefault(own, stage) for stage, own in enumerate(every))

    def holding(self, held: _HeldAt) -> Holding:
        """What it is, whichever stages have it."""
        what, stages, after = held
        kinds = tuple(self.kinds[s] for s in stages)
        before = tuple(
            tuple(ActionOf(self.kinds[s], self.layers[s], x) for s, x in step) for step in after
        )
        return Holding(what, kinds, tuple(self.layers[s] for s in stages), before)
