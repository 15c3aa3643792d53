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

from stagewright.arrays import Bool, Float, Int
from stagewright.explore.templates import StructureTemplate, kind_of
from stagewright.lower.assembly.assemble import AssembledRank, Assembly
from stagewright.program.columns import CATEGORIES
from stagewright.schedule.in_flight import (
    BACKWARD,
    FIRST_FORWARD,
    FORWARD,
    LAST_BACKWARD,
    STEP,
    InFlight,
    largest,
    states,
)

Shape = tuple[str, int, int, int, int | None]
"""Of a pipeline: schedule, ranks, chunks of a rank, microbatches and their group."""

Spot = tuple[str, int]
"""Where in an action: in the first or in the last layer of a variant (`first`, `last`, its number),
or before, between or after all layers."""


# ---- the stages of a template --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class StageBytes:
    """Bytes of a template's stage by category and tuple: [categories, tuples] each."""

    kept: Float
    """What a microbatch in flight keeps between its forward and its backward."""
    held: Float
    """What the stage holds all the time, and for all microbatches."""
    updated: Float
    """What it holds while other stages of the rank are updated."""
    peaks: Mapping[tuple[str, Spot], Float]
    """By moment and place: the most that is there, without that of other microbatches."""

    def held_at(self) -> dict[tuple[str, Spot], Float]:
        """All of them, by what is held and at which place (`StageMemory`)."""
        beside = {KEPT: self.kept, HELD: self.held, UPDATED: self.updated}
        return {(what, _NOTHING): held for what, held in beside.items()} | {**self.peaks}


class _Sizes:
    """Sizes of values, each once: their bytes [tuples], by number."""

    def __init__(self, tuples: int) -> None:
        self.tuples = tuples
        self.numbers: dict[tuple[int, bytes], int] = {}
        self.rows: list[Float] = []
        self.category: list[int] = []

    def of(self, rank: AssembledRank) -> Int:
        """The number of each value's size and category."""
        known: dict[tuple[int, int], int] = {}
        found: list[int] = []
        for v in rank.values:
            category = CATEGORIES.index(v.category)
            key = category, id(v.size)
            if key not in known:
                known[key] = self._number(category, v.size)
            found.append(known[key])
        return np.array(found, dtype=np.int64)

    def _number(self, category: int, size: Any) -> int:
        bytes_ = np.broadcast_to(np.asarray(size, dtype=np.float64), self.tuples)
        key = category, bytes_.tobytes()
        if key not in self.numbers:
            self.numbers[key] = len(self.rows)
            self.rows.append(bytes_)
            self.category.append(category)
        return self.numbers[key]

    def bytes(self, counts: Int) -> Float:
        """Bytes by category of counts [rows, sizes]: [rows, categories, tuples]."""
        size = np.stack(self.rows)
        found = np.zeros((len(counts), len(CATEGORIES), self.tuples))
        category = np.array(self.category)
        for nth in range(len(CATEGORIES)):
            mine = np.flatnonzero(category == nth)
            mine = mine[mine < counts.shape[1]]
            if len(mine):
                found[:, nth] = counts[:, mine].astype(np.float64) @ size[mine]
        return found


def stage_bytes(rank: AssembledRank, variants: Sequence[Int], sizes: _Sizes) -> StageBytes:
    """The bytes of the one stage of a rank; `variants` are the layers of each variant."""
    actions, rows = rank.rows.actions, rank.rows
    begin = [int(b) for b in rows.begin]
    ends = [*begin[1:], rows.end]
    number = sizes.of(rank)
    live = _Live(rank, number, len(sizes.rows))
    forward = [i for i, a in enumerate(actions) if a.kind == "F"]
    backward = [i for i, a in enumerate(actions) if a.kind == "B"]
    moments = {FIRST_FORWARD: forward[0], LAST_BACKWARD: backward[-1]}
    steady = forward[0], backward[-1]
    if len(forward) > 1:
        moments |= {FORWARD: forward[1], BACKWARD: backward[1]}
        steady = forward[1], backward[1]
    peaks: dict[tuple[str, Spot], Float] = {}
    for moment, i in moments.items():
        counts = live.counts(begin[i], ends[i], actions[i].microbatch)
        peaks |= _peaks(moment, rank, begin[i], sizes.bytes(counts), variants)
    total = len(rank.of.tasks)
    if total > rows.end:
        counts = live.counts(rows.end, total, None)
        peaks |= _peaks(STEP, rank, rows.end, sizes.bytes(counts), variants)
    a, b = steady
    kept = live.through(ends[a] - 1, begin[b], actions[a].microbatch)
    held = live.through(begin[a], ends[b] - 1, -1)
    updated = live.through(rows.end, total - 1, None) if total > rows.end else held
    of = sizes.bytes(np.stack([kept, held, updated]))
    return StageBytes(of[0], of[1], of[2], peaks)


class _Live:
    """Which instances of values are there when."""

    def __init__(self, rank: AssembledRank, number: Int, count: int) -> None:
        values = rank.of.values
        self.number, self.count = number[values.value], count
        self.microbatch = values.microbatch
        self.first, self.last = values.first.astype(np.int64), values.last.astype(np.int64)

    def _mine(self, microbatch: int | None) -> Bool:
        """The instances of a microbatch and those for all; of None, all instances."""
        if microbatch is None:
            return np.ones(len(self.number), dtype=bool)
        return (self.microbatch == microbatch) | (self.microbatch < 0)

    def counts(self, begin: int, end: int, microbatch: int | None) -> Int:
        """Live instances of each size while each row runs: [rows, sizes]."""
        there = self._mine(microbatch) & (self.first < end) & (self.last >= begin)
        number = self.number[there]
        change = np.zeros((end - begin + 1, self.count), dtype=np.int64)
        np.add.at(change, (np.maximum(self.first[there], begin) - begin, number), 1)
        np.add.at(change, (np.minimum(self.last[there] + 1, end) - begin, number), -1)
        return change[:-1].cumsum(axis=0)

    def through(self, begin: int, end: int, microbatch: int | None) -> Int:
        """Instances of each size that are live from one row to another; those of a microbatch
        without those for all."""
        mine = self.microbatch == microbatch if microbatch is not None else self.first >= -1
        there = mine & (self.first <= begin) & (self.last >= end)
        return np.bincount(self.number[there], minlength=self.count)


def _peaks(
    moment: str, rank: AssembledRank, begin: int, held: Float, variants: Sequence[Int]
) -> dict[tuple[str, Spot], Float]:
    """The most that is held at each place of some rows, by category: [categories, tuples]."""
    layer = rank.of.tasks.layer[begin : begin + len(held)]
    of_layers = np.flatnonzero(layer >= 0)
    row = np.arange(len(held))
    spots: dict[Spot, Bool] = {}
    for nth, layers in enumerate(variants):
        spots["first", nth] = layer == layers.min()
        spots["last", nth] = layer == layers.max()
    if len(of_layers):
        spots["before", 0] = row < of_layers[0]
        spots["between", 0] = (layer < 0) & (row > of_layers[0]) & (row < of_layers[-1])
        spots["after", 0] = row > of_layers[-1]
    else:
        spots["before", 0] = layer < 0
    total = held.sum(axis=1)
    found: dict[tuple[str, Spot], Float] = {}
    for spot, there in spots.items():
        rows = np.flatnonzero(there)
        if len(rows):
            most = rows[total[rows].argmax(axis=0)]
            found[moment, spot] = held[most, :, np.arange(held.shape[2])].T
    return found


# ---- the peaks of a structure --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class ByLayers:
    """Bytes that grow with the layers of each variant on a stage."""

    base: Float
    """At the template's layers: [categories, tuples]."""
    more: Float
    """By variant, for each layer beyond those: [variants, categories, tuples]."""
    layers: int
    """Of each variant in the template."""

    def at(self, tuples: Int, layers: Sequence[int]) -> Float:
        """Of some tuples, with so many layers of each variant: [categories, tuples]."""
        found = self.base[:, tuples]
        for more, count in zip(self.more, layers, strict=True):
            if count != self.layers:
                found += (count - self.layers) * more[:, tuples]
        return found


KEPT, HELD, UPDATED = "kept", "held", "updated"


class Holding(NamedTuple):
    """Something that a stage holds."""

    what: str
    """`KEPT`, `HELD` or `UPDATED` (see `StageBytes`), or the moment whose peak it is."""
    kind: int
    """Of the stage: `templates.FIRST`, ..."""
    layers: tuple[int, ...]
    """Of each variant on the stage."""


@dataclass(frozen=True, slots=True, eq=False)
class Occupancy:
    """What ranks of a pipeline hold, in each state in which one may hold most."""

    holdings: tuple[Holding, ...]
    counts: Float
    """How often a state has each: [states, holdings]."""


@lru_cache(maxsize=512)
def occupancy(shape: Shape, layers: tuple[tuple[int, ...], ...]) -> Occupancy | None:
    """The states of a pipeline; `layers` of each variant by stage. None: see `in_flight.states`."""
    found = states(*shape)
    if found is None:
        return None
    number: dict[Holding, int] = {}
    rows: dict[frozenset[tuple[int, int]], None] = {}
    for state, stages in _distinct(found, layers):
        for row in _held(state, stages, layers):
            numbered = Counter[int]()
            for holding, count in row:
                numbered[number.setdefault(holding, len(number))] += count
            rows.setdefault(frozenset(numbered.items()))
    counts = np.zeros((len(rows), len(number)))
    for nth, row in enumerate(rows):
        for column, count in row:
            counts[nth, column] = count
    return Occupancy(tuple(number), counts)


def _distinct(
    ranks: Sequence[Sequence[InFlight]], layers: Sequence[tuple[int, ...]]
) -> Iterable[tuple[InFlight, Sequence[int]]]:
    """States of all ranks, of those with like stages only the ones that hold most."""
    known: dict[Any, dict[tuple[int, ...], tuple[InFlight, Sequence[int]]]] = {}
    for of_rank in ranks:
        stages = [stage for stage, _ in of_rank[0].others]
        like = [(kind_of(s, len(layers)), layers[s]) for s in stages]
        for state in of_rank:
            current = stages.index(state.stage) if state.stage >= 0 else -1
            key = current, state.moment, tuple(like)
            others = tuple(number for _, number in state.others)
            known.setdefault(key, {}).setdefault(others, (state, stages))
    for some in known.values():
        for others in largest(some):
            yield some[others]


def _held(
    state: InFlight, stages: Sequence[int], layers: Sequence[tuple[int, ...]]
) -> Iterable[list[tuple[Holding, int]]]:
    """What a rank holds in a state, and how often; after all actions, for each stage by itself."""

    def holding(what: str, stage: int) -> Holding:
        return Holding(what, kind_of(stage, len(layers)), layers[stage])

    if state.stage < 0:
        for s in stages:
            others = [(holding(UPDATED, o), 1) for o in stages if o != s]
            yield [*others, (holding(STEP, s), 1)]
        return
    kept = [(holding(KEPT, s), count) for s, count in state.others if count]
    held = [(holding(HELD, s), 1) for s, _ in state.others if s != state.stage]
    yield [*kept, *held, (holding(state.moment, state.stage), 1)]


_NOTHING: Spot = ("", 0)
"""The place of what is held at no place of an action."""
_NO_SUCH_MOMENT = -1e18
"""Bytes at a moment that a stage has not: less than any other."""

StageMemory = Mapping[tuple[str, Spot], ByLayers]
"""A kind of stage in any number of layers: what it holds (see `Holding`), and at which place."""


@dataclass(frozen=True, slots=True, eq=False)
class Peaks:
    """What the fullest rank holds at its peak, in any pipeline of a structure's blocks."""

    stages: Mapping[int, StageMemory]
    """By kind (`templates.FIRST`, ...)."""
    allowance: Int
    """Bytes that are set aside: [tuples]."""

    @classmethod
    def of(cls, template: StructureTemplate, tuples: int, allowance: int = 0) -> Peaks:
        """From the template of a structure of so many tuples."""
        sizes = _Sizes(tuples)
        every = [_all_stages(assembly, template, sizes) for assembly in
                 (template.base, *template.more)]  # fmt: skip
        stages: dict[int, StageMemory] = {}
        for p in range(template.stages):
            base, *more = (of_assembly[p].held_at() for of_assembly in every)
            stages[template.kind(p)] = {
                at: ByLayers(
                    held, np.stack([one.get(at, held) - held for one in more]), template.layers
                )
                for at, held in base.items()
            }
        return cls(stages, np.full(tuples, allowance))

    @classmethod
    def joined(cls, parts: Sequence[Peaks]) -> Peaks:
        """Those of several structures with as many variants: their tuples behind each other."""
        kinds = {
            kind: dict.fromkeys(at for part in parts for at in part.stages[kind])
            for kind in parts[0].stages
        }
        every = [
            {kind: _with_all(part.stages[kind], places) for kind, places in kinds.items()}
            for part in parts
        ]
        stages = {
            kind: {
                at: ByLayers(
                    np.concatenate([stages[kind][at].base for stages in every], axis=1),
                    np.concatenate([stages[kind][at].more for stages in every], axis=2),
                    every[0][kind][at].layers,
                )
                for at in places
            }
            for kind, places in kinds.items()
        }
        return cls(stages, np.concatenate([part.allowance for part in parts]))

    def at(self, found: Occupancy, tuples: Int) -> dict[str, Int]:
        """Bytes by category of configurations with these tuples, in a pipeline of these states."""
        each = np.stack([self._holding(one, tuples) for one in found.holdings])
        total = found.counts @ each.sum(axis=1)
        most = found.counts[total.argmax(axis=0)]
        best = np.einsum("ch,hkc->kc", most, each)
        by = {name: of.astype(np.int64) for name, of in zip(CATEGORIES, best, strict=True)}
        allowance = self.allowance[tuples]
        return by | ({"allowance": allowance} if allowance.any() else {})

    def _holding(self, one: Holding, tuples: Int) -> Float:
        """Bytes of what a stage holds: [categories, tuples]."""
        what, kind, layers = one
        best = np.full((len(CATEGORIES), len(tuples)), _NO_SUCH_MOMENT)
        most = np.full(len(tuples), _NO_SUCH_MOMENT)
        for (when, (where, nth)), of in self.stages[kind].items():
            if when != what or (where in ("first", "last") and not layers[nth]):
                continue
            held = of.at(tuples, layers)
            total = held.sum(axis=0)
            best = np.where(total > most, held, best)
            most = np.maximum(total, most)
        return best


def _with_all(stage: StageMemory, places: Iterable[tuple[str, Spot]]) -> StageMemory:
    """A stage's memory with places that only other structures' stages have."""
    like = next(iter(stage.values()))
    none = ByLayers(np.full_like(like.base, _NO_SUCH_MOMENT), 0 * like.more, like.layers)
    return {at: stage.get(at, none) for at in places}


def _all_stages(assembly: Assembly, template: StructureTemplate, sizes: _Sizes) -> list[StageBytes]:
    """The stages of one of a template's programs: one on each rank."""
    found: list[StageBytes] = []
    for rank in assembly.ranks:
        ((_, stage),) = rank.rows.stages.items()
        layers: dict[int, list[int]] = {}
        for placed in stage.blocks:
            if placed.layer >= 0:
                layers.setdefault(id(placed.block), []).append(placed.layer)
        variants = [np.array(of) for of in layers.values()]
        sizes.of(rank)  # all sizes first: counts have one length
        found.append(stage_bytes(rank, variants, sizes))
    return found
