"""What the fullest rank holds at its peak, for many configurations of one structure.

The live ranges are those of a template (`explore.templates`); bytes are columns. While an action of
a stage runs, a rank holds what it holds all the time, what every other microbatch in flight keeps
for its backward, and what this action has at the moment. The last has its peak in the first or in
the last layer of a kind, or outside of the layers; at each of these places it is linear in the
layers of the stage, as is all the rest. How many microbatches are in flight, the schedule says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from stagewright.arrays import Float, Int, distinct_values
from stagewright.explore.template_memory import (
    HALVED,
    HELD,
    KEPT,
    PAIR,
    UPDATED,
    Spot,
    TemplateRank,
    of_pairs,
)
from stagewright.explore.templates import Kinds, StructureTemplate, mean_layers, nearest
from stagewright.program.columns import CATEGORIES
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
from stagewright.schedule.traits import PLAIN

Shape = tuple[str, int, int, int, int | None]
"""Of a pipeline: schedule, ranks, chunks of a rank, microbatches and their group."""


@dataclass(frozen=True, slots=True, eq=False)
class ByLayers:
    """Bytes that grow with the layers of each variant on a stage."""

    base: Float
    """At the template's layers: [categories, cases]."""
    more: Float
    """By variant, for each layer beyond those: [variants, categories, cases]."""
    layers: tuple[int, ...]
    """Of each variant in the template."""
    few: Mapping[tuple[float, ...], Float]
    """As `base`, at other layers of each variant (`templates.Kind.few`)."""
    pairs: Mapping[tuple[tuple[int, ...], ...], Float]
    """Likewise, of two stages with these layers (`templates.Kind.pairs`)."""

    def at(
        self,
        cases: Int,
        layers: Sequence[float],
        other: tuple[tuple[int, ...], Float] | None = None,
    ) -> Float:
        """Of some cases, with so many layers of each variant: [categories, cases].

        `other`: instead of the bytes at the template's layers, those at others, of these cases.
        """
        has = nearest(layers, self.few, self.layers)
        found = self.few.get(has, self.base)[:, cases]
        if other is not None:
            has, found = other[0], other[1].copy()
        for more, count, own in zip(self.more, layers, has, strict=True):
            if count != own:
                found += (count - own) * more[:, cases]
        return found


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


@lru_cache(maxsize=512)
def occupancy(
    shape: Shape, layers: tuple[tuple[int, ...], ...], after: str = ""
) -> Occupancy | None:
    """What ranks hold in the states of a pipeline (`in_flight.states`, also of `after`); `layers`
    are those of each stage, by variant. None: the schedule is one in which all ranks share stages.
    """
    found = states(*shape, after)
    if found is None:
        return None
    return _occupancy(found, Kinds.of(order_of_enough(*shape)), layers)


@lru_cache(maxsize=1024)
def occupancy_of_ends(shape: Shape, layers: tuple[tuple[int, ...], ...]) -> Occupancy:
    """As `occupancy`, with the states of the first and the last rank only.

    Of a schedule that hands stages to ranks in turn, with all microbatches that `shape` has.
    """
    _, pp, vpp, *_ = shape
    return _occupancy(states_of_ends(*shape), Kinds(PLAIN, pp, pp * vpp), layers)


@lru_cache(maxsize=1024)
def occupancy_of_forwards(shape: Shape, layers: tuple[tuple[int, ...], ...]) -> Occupancy:
    """As `occupancy`, of some of what the first rank holds: in its forwards, and when all actions
    are done, without what microbatches keep between the halves of their backwards."""
    _, pp, *_ = shape
    found = forwards_of_first(*shape)
    return _occupancy([found], Kinds(PLAIN, pp, len(layers)), layers)


def _occupancy(
    found: Sequence[Sequence[InFlight]], kinds: Kinds, layers: tuple[tuple[int, ...], ...]
) -> Occupancy:
    of = _Stages(kinds, layers)
    number: dict[Holding, int] = {}
    of_stages: dict[_HeldAt, int] = {}
    rows: dict[frozenset[tuple[int, int]], None] = {}
    for state, stages in of.distinct(found):
        for row in of.held(state, stages):
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


class _Stages(NamedTuple):
    """The stages of a pipeline."""

    kinds: Kinds
    layers: Sequence[tuple[int, ...]]
    """Of each variant, by stage."""

    def distinct(
        self, ranks: Sequence[Sequence[InFlight]]
    ) -> Iterable[tuple[InFlight, Sequence[int]]]:
        """States of all ranks, of those with like stages only the ones that hold most."""
        known: dict[Any, dict[tuple[int, ...], tuple[InFlight, Sequence[int]]]] = {}
        for of_rank in ranks:
            stages = [stage for stage, _, _ in of_rank[0].others]
            like = [(self.kinds.stage(s), self.layers[s]) for s in stages]
            for state in of_rank:
                steps = (
                    tuple((stages.index(s), x) for s, x in of) for of in (state.at, *state.after)
                )
                key = *steps, tuple(like)
                others = tuple(number for _, *numbers in state.others for number in numbers)
                known.setdefault(key, {}).setdefault(others, (state, stages))
        for some in known.values():
            for others in largest(some):
                yield some[others]

    def held(self, state: InFlight, stages: Sequence[int]) -> Iterable[list[tuple[_HeldAt, int]]]:
        """What a rank holds in a state, and how often; after all actions, for each stage by
        itself."""
        if not state.at:
            for s in stages:
                others = [((UPDATED, (o,), ()), 1) for o in stages if o != s]
                yield [*others, ((STEP, (s,), state.after), 1)]
            return
        current = tuple(s for s, _ in state.at)
        kept = [((KEPT, (s,), ()), count) for s, count, _ in state.others if count]
        halved = [((HALVED, (s,), ()), count) for s, _, count in state.others if count]
        held = [((HELD, (s,), ()), 1) for s in stages if s not in current]
        moment = PAIR if len(current) > 1 else state.at[0][1]
        yield [*kept, *halved, *held, ((moment, current, state.after), 1)]

    def holding(self, held: _HeldAt) -> Holding:
        """What it is, whichever stages have it."""
        what, stages, after = held
        kinds = tuple(self.kinds.stage(s) for s in stages)
        before = tuple(
            tuple(ActionOf(self.kinds.stage(s), self.layers[s], x) for s, x in step)
            for step in after
        )
        return Holding(what, kinds, tuple(self.layers[s] for s in stages), before)


_NO_SUCH_MOMENT = -1e18
"""Bytes at a moment that a stage has not: less than any other."""

StageMemory = Mapping[tuple[str, Spot], ByLayers]
"""Stages of a kind in any number of layers: what they hold (see `Holding`), and at which place."""
StagesMemory = Mapping[tuple[int, ...], StageMemory]


@dataclass(frozen=True, slots=True, eq=False)
class Peaks:
    """What the fullest rank holds at its peak, in any pipeline of a structure's blocks."""

    stages: StagesMemory
    """By kind (`templates.FIRST`, ...), or the kinds of two whose actions overlap. Many tuples have
    the same bytes: they are one case."""
    cases: Int
    """Which case each tuple has: [tuples]."""
    allowance: Int
    """Bytes that are set aside: [tuples]."""

    @classmethod
    def of(
        cls,
        template: StructureTemplate,
        every: Sequence[Sequence[TemplateRank]],
        cases: Int,
        allowance: int = 0,
    ) -> Peaks:
        """From the ranks of a template, and the case of each tuple (`template_ranks`)."""
        stages: dict[tuple[int, ...], StageMemory] = {}
        for ranks in zip(*every, strict=True):
            for of in ranks[0].stages:
                kinds = tuple(template.kinds.stage(s) for s in of)
                if kinds not in stages:
                    known = 1 + len(template.more) + len(template.few)
                    held = [rank.held_at(of) for rank in ranks[:known]]
                    pairs = of_pairs(every[known:], kinds) if len(of) > 1 else {}
                    stages[kinds] = _by_layers(template, kinds, held, pairs)
        return cls(stages, cases, np.full(len(cases), allowance))

    @classmethod
    def concatenated(cls, every: Sequence[Peaks]) -> Peaks:
        """Those of several structures with as many variants: their tuples behind each other."""
        begin: dict[int, int] = {}
        parts: list[StagesMemory] = []
        count = 0
        for of in every:
            if id(of.stages) not in begin:
                begin[id(of.stages)] = count
                parts.append(of.stages)
                count += next(iter(next(iter(of.stages.values())).values())).base.shape[1]
        cases = np.concatenate([of.cases + begin[id(of.stages)] for of in every])
        allowance = np.concatenate([of.allowance for of in every])
        return cls(_concatenated(parts), cases, allowance)

    def at(self, found: Occupancy, tuples: Int) -> dict[str, Int]:
        """Bytes by category of configurations with these tuples, in a pipeline of these states."""
        cases, of_row = distinct_values(self.cases[tuples])
        each = np.stack([self.holding(one, cases) for one in found.holdings])
        total = found.counts @ each.sum(axis=1)
        most = found.counts[total.argmax(axis=0)]
        best = np.einsum("ch,hkc->kc", most, each).astype(np.int64)
        by = {name: of[of_row] for name, of in zip(CATEGORIES, best, strict=True)}
        allowance = self.allowance[tuples]
        return by | ({"allowance": allowance} if allowance.any() else {})

    def least(self, found: Occupancy, tuples: Int, scale: Float) -> Float:
        """Bytes of the fullest rank if of each category there is but a part: [configurations].

        `scale` is that part: [categories, configurations].
        """
        each = np.stack([self.holding(one, self.cases[tuples], scale) for one in found.holdings])
        total = found.counts @ (each * scale).sum(axis=1)
        return total.max(axis=0) + self.allowance[tuples]

    def holding(
        self,
        one: Holding,
        cases: Int,
        scale: Float | None = None,
        played: tuple[tuple[int, ...], Mapping[Spot, Float]] | None = None,
    ) -> Float:
        """Bytes of what a stage holds, where it has most: [categories, cases].

        `played`: the bytes of a moment at places where they are not those in the order of issue,
        in a program with these layers of each variant (`explore.timed_memory`).
        """
        what, kinds, layers, _ = one
        best = np.full((len(CATEGORIES), len(cases)), _NO_SUCH_MOMENT)
        most = np.full(len(cases), _NO_SUCH_MOMENT)
        for (when, spot), of in self.stages[kinds].items():
            where, nth, action = spot
            if when != what or (where in ("first", "last") and not layers[action][nth]):
                continue
            other = (played[0], played[1][spot]) if played and spot in played[1] else None
            if layers in of.pairs:
                held = of.pairs[layers][:, cases] if other is None else other[1]
            else:
                held = of.at(cases, mean_layers(layers), other)
            total = (held if scale is None else held * scale).sum(axis=0)
            best = np.where(total > most, held, best)
            most = np.maximum(total, most)
        return best


def _concatenated(parts: Sequence[StagesMemory]) -> StagesMemory:
    """What stages of several structures hold: their cases behind each other."""
    kinds = {kind: dict.fromkeys(at for part in parts for at in part[kind]) for kind in parts[0]}
    every = [
        {kind: _with_all(part[kind], places) for kind, places in kinds.items()} for part in parts
    ]
    return {
        kind: {
            at: ByLayers(
                np.concatenate([stages[kind][at].base for stages in every], axis=1),
                np.concatenate([stages[kind][at].more for stages in every], axis=2),
                (like := every[0][kind][at]).layers,
                {
                    layers: np.concatenate([s[kind][at].few[layers] for s in every], axis=1)
                    for layers in like.few
                },
                _joined_pairs([stages[kind][at] for stages in every]),
            )
            for at in places
        }
        for kind, places in kinds.items()
    }


def _joined_pairs(every: Sequence[ByLayers]) -> dict[tuple[tuple[int, ...], ...], Float]:
    """What pairs hold in several structures, their cases behind each other; nobody asks for pairs
    that a structure has not."""
    names = dict.fromkeys(layers for one in every for layers in one.pairs)
    none = [np.full_like(one.base, _NO_SUCH_MOMENT) for one in every]
    return {
        layers: np.concatenate(
            [one.pairs.get(layers, no) for one, no in zip(every, none, strict=True)], axis=1
        )
        for layers in names
    }


def _by_layers(
    template: StructureTemplate,
    kinds: tuple[int, ...],
    held: Sequence[Mapping[tuple[str, Spot], Float]],
    pairs: Mapping[tuple[tuple[int, ...], ...], Mapping[tuple[str, Spot], Float]],
) -> StageMemory:
    """What stages hold in each program of a template, as a function of their layers."""
    base, others = held[0], held[1:]
    more = others[: len(template.more)]
    few = {
        layers: alone
        for layers, alone in zip(template.few, others[len(more) :], strict=True)
        if template.stands_for(layers, kinds)
    }
    none = np.full_like(next(iter(base.values())), _NO_SUCH_MOMENT)
    return {
        at: ByLayers(
            (own := base.get(at, none)),
            np.stack([one.get(at, own) - own for one in more]),
            template.layers,
            {layers: alone.get(at, none) for layers, alone in few.items()},
            {layers: pair.get(at, none) for layers, pair in pairs.items()},
        )
        for at in dict.fromkeys(at for one in (base, *few.values(), *pairs.values()) for at in one)
    }


def _with_all(stage: StageMemory, places: Iterable[tuple[str, Spot]]) -> StageMemory:
    """A stage's memory with places that only other structures' stages have."""
    like = next(iter(stage.values()))
    base = np.full_like(like.base, _NO_SUCH_MOMENT)
    none = ByLayers(base, 0 * like.more, like.layers, dict.fromkeys(like.few, base), {})
    return {at: stage.get(at, none) for at in places}
