"""What the stages of a template hold, and when: the bytes of a structure's tuples in columns.

The live ranges are those of the template's program. What is there while an action runs has its peak
in the first or in the last layer of a kind, or outside of the layers (`Spot`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from stagewright.arrays import Bool, Float, Int, distinct_columns, is_any, product
from stagewright.explore.templates import RETURN, StructureTemplate
from stagewright.explore.timed_memory.live import Live
from stagewright.lower.assembly.assemble import AssembledRank
from stagewright.program.columns import CATEGORIES
from stagewright.schedule.actions import Action
from stagewright.schedule.in_flight import (
    BACKWARD,
    FIRST_FORWARD,
    FORWARD,
    INPUT_HALF,
    LAST_BACKWARD,
    LAST_WEIGHT_HALF,
    STEP,
    WEIGHT_HALF,
)
from stagewright.time.cost import needless

Spot = tuple[str, int, int]
"""Where in an action: in the `first`, in the `last` or in the `next` to last layer of a variant, or
`before`, `between` or `after` all layers; the number of the variant; and which of two actions that
overlap. In the next to last one a backward still has what it reduces of the last one."""
NOWHERE: Spot = ("", 0, 0)
"""The place of what is held at no place of an action."""
KEPT, HALVED, HELD, UPDATED = "kept", "halved", "held", "updated"
PAIR = "pair"
"""The moment of a forward and a backward that overlap."""

_CATEGORY = {name: nth for nth, name in enumerate(CATEGORIES)}


@dataclass(frozen=True, slots=True, eq=False)
class StageBytes:
    """Bytes of a template's stage by category and tuple: [categories, tuples] each."""

    kept: Float
    """What a microbatch in flight keeps between its forward and its backward."""
    halved: Float
    """What a microbatch keeps between the halves of its backward."""
    held: Float
    """What the stage holds all the time, and for all microbatches."""
    updated: Float
    """What it holds while other stages of the rank are updated."""
    peaks: Mapping[tuple[str, Spot], Float]
    """By moment and place: the most that is there, without that of other microbatches."""

    def held_at(self) -> dict[tuple[str, Spot], Float]:
        """All of them, by what is held and at which place."""
        beside = {KEPT: self.kept, HALVED: self.halved, HELD: self.held, UPDATED: self.updated}
        return {(what, NOWHERE): held for what, held in beside.items()} | {**self.peaks}


class Sizes:
    """Sizes of values, each once: their bytes [tuples], by number."""

    def __init__(self, tuples: int) -> None:
        """Of so many tuples, none yet."""
        self.tuples = tuples
        self.numbers: dict[tuple[int, bytes], int] = {}
        self.rows: list[Float] = []
        self.category: list[int] = []
        self._every = np.zeros((0, tuples))
        self._known: dict[tuple[int, int], int] = {}
        self._of: dict[int, Int] = {}
        self._of_categories: list[tuple[int, Int, Float]] = []
        """Each category, the numbers of its sizes, and these: [sizes, tuples]."""

    def of(self, rank: AssembledRank) -> Int:
        """The number of each value's size and category; ranks outlive the sizes."""
        if id(rank) not in self._of:
            self._of[id(rank)] = self._numbers(rank)
        return self._of[id(rank)]

    def _numbers(self, rank: AssembledRank) -> Int:
        known = self._known
        found: list[int] = []
        for v in rank.values:
            category = _CATEGORY[v.category]
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

    def join_tuples(self) -> Int:
        """Once the sizes of all ranks are known, let tuples whose sizes are all equal be one case;
        returns the case of each tuple."""
        every = np.stack(self.rows)
        first, of = distinct_columns(every)
        every = every[:, first]
        self.rows, self._every = [*every], every
        self.tuples = len(first)
        category = np.array(self.category)
        for nth in np.unique(category).tolist():
            mine = np.flatnonzero(category == nth)
            self._of_categories.append((nth, mine, every[mine]))
        return of

    def total(self, counts: Int) -> Float:
        """Bytes of all categories of counts [rows, sizes]: [rows, tuples]."""
        return product(counts, self._every)

    def bytes(self, counts: Int) -> Float:
        """Bytes by category of counts [rows, sizes]: [rows, categories, tuples]."""
        found = np.zeros((len(counts), len(CATEGORIES), self.tuples))
        for nth, mine, size in self._of_categories:
            found[:, nth] = product(counts[:, mine], size)
        return found


class MomentRows(NamedTuple):
    """Rows of an action of a stage, or of two that overlap, or those after all actions."""

    begin: int
    end: int
    of: Sequence[tuple[int, int | None]]
    """Stages and microbatches whose values count (`Live.counts`)."""
    elsewhere: Int
    """Of these what is counted elsewhere: instances by size."""


class TemplateRank:
    """A rank of a template's program: its stages, and what is live when."""

    def __init__(self, rank: AssembledRank, template: StructureTemplate, sizes: Sizes) -> None:
        """A rank of one of a template's programs; `sizes` has the sizes of all of its values."""
        self.rank, self.sizes = rank, sizes
        self.kinds = template.kinds
        self.live = Live(rank, sizes.of(rank), len(sizes.rows))
        self.runs = ~needless(rank.of.tasks)
        rows = rank.rows
        self.actions = rows.actions
        self.begin = [int(b) for b in rows.begin]
        later = *self.begin, rows.end
        self.ends = [next(b for b in later[i:] if b > begin) for i, begin in enumerate(self.begin)]
        self.variant_count = len(template.layers)
        self.variants: dict[int, dict[int, Int]] = {}
        """By stage and number of a variant its layers."""
        for number, stage in rows.stages.items():
            layers: dict[int, list[int]] = {}
            for placed in stage.blocks:
                if placed.layer >= 0:
                    variant = template.number_of(placed.block)
                    layers.setdefault(variant, []).append(placed.layer)
            self.variants[number] = {variant: np.array(of) for variant, of in layers.items()}

    def certain(self) -> Self:
        """The same with what is there at least (`Live.certain`)."""
        found = copy(self)
        found.live = self.live.certain(self.rank.of.tasks)
        return found

    def layers_of(self, stages: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """The layers of each variant on some stages."""
        count = self.variant_count
        return tuple(tuple(len(self.variants[s].get(v, ())) for v in range(count)) for s in stages)

    def _numbers(self, stage: int, kind: str) -> list[int]:
        """The actions of a kind of a stage."""
        return [i for i, a in enumerate(self.actions) if a[:2] == (stage, kind)]

    def _action(self, stage: int, kind: str, microbatch: int) -> int:
        """The number of an action."""
        return self.actions.index(Action(stage, kind, microbatch))

    def _usual(self, stage: int) -> int:
        """A microbatch whose actions do nothing that happens once per step, if there is one."""
        forward = self._numbers(stage, "F")
        return self.actions[forward[min(1, len(forward) - 1)]].microbatch

    def _backward(self, stage: int) -> int:
        """The backward of the usual microbatch, or its first half."""
        m = self._usual(stage)
        return next(
            i for i, a in enumerate(self.actions) if a[::2] == (stage, m) and a.kind in "BI"
        )

    def _moments(self, stage: int) -> dict[str, int]:
        """An action for each moment of a stage that there is, but for those that overlap."""
        alone = {i for i, b in enumerate(self.begin) if self.begin.count(b) == 1}
        found: dict[str, int] = {}
        kinds = {
            "F": (FIRST_FORWARD, FORWARD), "B": (BACKWARD, LAST_BACKWARD), "I": (INPUT_HALF, ""),
            "W": (WEIGHT_HALF, LAST_WEIGHT_HALF),
        }  # fmt: skip
        complete = {i for (_, half), i in self.rank.rows.once.items() if half != 1}
        for kind, names in kinds.items():
            mine = [i for i in self._numbers(stage, kind) if i in alone]
            usual = [i for i in mine if i not in complete]
            once = [i for i in mine if i in complete]
            if kind == "F":
                found |= dict(zip(names, [*once, *usual][:2], strict=False))
                continue
            if kind == "W":  # what all microbatches use is still there
                last = max(self._numbers(stage, "I"), default=-1)
                usual = [i for i in usual if i < last] or usual
            if usual:
                found[names[0]] = usual[min(1, len(usual) - 1)]
            if once:
                found[names[1]] = once[-1]
        return found

    def _mates(self, stage: int) -> list[int]:
        """The stage itself, and the one that hands it values on the same rank."""
        return [stage, stage - 1] if self.kinds.stage(stage) == RETURN else [stage]

    def _kept(self, stage: int) -> Int:
        """What a microbatch keeps between its forward and its backward: instances by size."""
        m = self._usual(stage)
        forward, backward = self._action(stage, "F", m), self._backward(stage)
        mates = self._mates(stage)
        return self.live.through(self.ends[forward] - 1, self.begin[backward], m, mates) - sum(
            (self._kept(mate) for mate in mates[1:]), 0 * self.live.none
        )

    def _halved(self, stage: int) -> Int:
        """What a microbatch keeps between the halves of its backward: instances by size."""
        if not (inputs := self._numbers(stage, "I")):
            return self.live.none
        i = inputs[min(1, len(inputs) - 1)]
        m = self.actions[i].microbatch
        weights = self.begin[self._action(stage, "W", m)]
        return self.live.through(self.ends[i] - 1, weights, m, [stage])

    def _in_flight(self, stage: int, microbatch: int, row: int) -> Int:
        """What a microbatch has of a stage that is between two of its actions while a row runs."""
        of = zip(self.begin, self.actions, strict=True)
        later = {a.kind for at, a in of if a[::2] == (stage, microbatch) and at > row}
        if later == {"W"}:
            return self._halved(stage)
        return self._kept(stage) if later else self.live.none

    @property
    def stages(self) -> Sequence[tuple[int, ...]]:
        """The stages of the rank, and those of each pair of actions that overlap."""
        pairs = dict.fromkeys((a.stage, b.stage) for _, a, b in self._pairs())
        return [*((stage,) for stage in self.variants), *pairs]

    def held_at(self, stages: tuple[int, ...]) -> Mapping[tuple[str, Spot], Float]:
        """What one of `stages` holds, by what that is and at which place."""
        return self._stage(*stages).held_at() if len(stages) == 1 else self._pair(*stages)

    def moment(self, what: str, stages: tuple[int, ...]) -> MomentRows | None:
        """The rows of a moment of a stage, or of the last pair of actions of two."""
        if what == STEP:
            begin, total = self.rank.rows.end, len(self.rank.of.tasks)
            of = [(stage, None) for stage in stages]
            return MomentRows(begin, total, of, self.live.none) if total > begin else None
        if what != PAIR:
            i = self._moments(stages[0]).get(what)
            return None if i is None else self._of_action(stages[0], i)
        *_, (i, a, b) = (of for of in self._pairs() if (of[1].stage, of[2].stage) == stages)
        of = [(s, x.microbatch) for x in (a, b) for s in self._mates(x.stage)]
        kept = (self._kept(mate) for x in (a, b) for mate in self._mates(x.stage)[1:])
        return MomentRows(self.begin[i], self.ends[i], of, sum(kept, self.live.none))

    def step(self, kinds: tuple[str, ...], stages: tuple[int, ...]) -> MomentRows | None:
        """The rows of a usual action of a stage, or of the last pair of actions of two."""
        if len(kinds) > 1:
            return self.moment(PAIR, stages)
        mine = [i for i in self._numbers(stages[0], *kinds) if self.begin.count(self.begin[i]) == 1]
        return self._of_action(stages[0], mine[min(1, len(mine) - 1)]) if mine else None

    def _of_action(self, stage: int, i: int) -> MomentRows:
        """The rows of an action of a stage."""
        mates, m = self._mates(stage), self.actions[i].microbatch
        elsewhere = self.live.none
        for mate in mates[1:]:  # counted with those that are in flight
            elsewhere = elsewhere + self._in_flight(mate, m, self.begin[i])
            elsewhere = elsewhere + self.live.always(self.begin[i], mate)
        return MomentRows(self.begin[i], self.ends[i], [(mate, m) for mate in mates], elsewhere)

    def _stage(self, stage: int) -> StageBytes:
        """The bytes of a stage."""
        live, rows = self.live, self.rank.rows
        peaks: dict[tuple[str, Spot], Float] = {}
        for moment, i in self._moments(stage).items():
            peaks |= self._peaks(moment, self._of_action(stage, i), (stage,))
        total = len(self.rank.of.tasks)
        if (step := self.moment(STEP, (stage,))) is not None:
            peaks |= self._peaks(STEP, step, (stage,))
        first, last = self._action(stage, "F", self._usual(stage)), self._backward(stage)
        held = live.through(self.begin[first], self.ends[last] - 1, -1, [stage])
        updated = live.through(rows.end, total - 1, None, [stage]) if total > rows.end else held
        of = self.sizes.bytes(np.stack([self._kept(stage), self._halved(stage), held, updated]))
        return StageBytes(of[0], of[1], of[2], of[3], peaks)

    def _pairs(self) -> Iterator[tuple[int, Action, Action]]:
        """The forwards and backwards that overlap, and the number of the first of the two."""
        for i, (a, b) in enumerate(itertools.pairwise(self.actions)):
            if self.begin[i] == self.begin[i + 1]:
                yield i, a, b

    def _pair(self, *stages: int) -> dict[tuple[str, Spot], Float]:
        """The peaks of the last pair of actions of two stages."""
        of = self.moment(PAIR, stages)
        return {} if of is None else self._peaks(PAIR, of, stages)

    def _peaks(
        self, moment: str, of: MomentRows, stages: Sequence[int]
    ) -> dict[tuple[str, Spot], Float]:
        """The most that is held at each place of a moment, by category: [categories, tuples].

        Rows that take no time do not count: what is freed behind them is gone when what they make
        is there.
        """
        counts = self.live.counts(of.begin, of.end, of.of) - of.elsewhere
        total, most = self.sizes.total(counts), dict[Spot, Int]()
        for spot, there in self.spots(of.begin, of.end, stages).items():
            rows = np.flatnonzero(there & self.runs[of.begin : of.end])
            if len(rows):
                most[spot] = rows[total[rows].argmax(axis=0)]
        if not most:
            return {}
        # Few rows have the most of some tuple: only of these, bytes are told by category.
        fullest = np.flatnonzero(np.bincount(np.concatenate([*most.values()])))
        held, tuples = self.sizes.bytes(counts[fullest]), np.arange(self.sizes.tuples)
        return {
            (moment, spot): held[np.searchsorted(fullest, rows), :, tuples].T
            for spot, rows in most.items()
        }

    def spots(self, begin: int, end: int, stages: Sequence[int]) -> dict[Spot, Bool]:
        """Which of the rows from `begin` to `end` are where in the step of some stages."""
        tasks = self.rank.of.tasks
        layer = tasks.layer[begin:end]
        mine = is_any(tasks.stage[begin:end], stages)
        inside = np.flatnonzero((layer >= 0) & mine)
        row = np.arange(end - begin)
        spots: dict[Spot, Bool] = {}
        for of, stage in enumerate(stages):
            for nth, layers in self.variants[stage].items():
                spots["first", nth, of] = layer == layers.min()
                spots["last", nth, of] = layer == layers.max()
                if len(layers) > 1:
                    spots["next", nth, of] = layer == np.sort(layers)[-2]
        if len(inside):
            spots["before", 0, 0] = mine & (row < inside[0])
            spots["between", 0, 0] = mine & (layer < 0) & (row > inside[0]) & (row < inside[-1])
            spots["after", 0, 0] = mine & (row > inside[-1])
        else:
            spots["before", 0, 0] = mine & (layer < 0)
        return spots


def of_pairs(
    programs: Sequence[Sequence[TemplateRank]], kinds: tuple[int, ...]
) -> dict[tuple[tuple[int, ...], ...], Mapping[tuple[str, Spot], Float]]:
    """What two stages of these kinds hold whose actions overlap, by their layers."""
    found: dict[tuple[tuple[int, ...], ...], Mapping[tuple[str, Spot], Float]] = {}
    for rank in itertools.chain.from_iterable(programs):
        for of in rank.stages:
            layers = rank.layers_of(of)
            own = tuple(rank.kinds.stage(s) for s in of)
            if len(of) > 1 and own == kinds and layers not in found:
                found[layers] = rank.held_at(of)
    return found


def template_ranks(
    template: StructureTemplate, tuples: int
) -> tuple[list[list[TemplateRank]], Int]:
    """The ranks of each program of a template of a structure of so many tuples; and the case of
    each tuple, as many have the same bytes: [tuples]."""
    sizes = Sizes(tuples)
    assemblies = template.assemblies
    for assembly in assemblies:  # all sizes first: counts have one length
        for rank in assembly.ranks:
            sizes.of(rank)
    cases = sizes.join_tuples()
    every = [
        [TemplateRank(rank, template, sizes) for rank in assembly.ranks] for assembly in assemblies
    ]
    return every, cases
