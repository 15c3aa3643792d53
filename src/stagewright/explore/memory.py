"""What the fullest rank holds at its peak, for many configurations of one structure.

The live ranges are those of a template (`explore.templates`); bytes are columns. While an action of
a stage runs, a rank holds what it holds all the time, what every other microbatch in flight keeps
for its backward, and what this action has at the moment. The last has its peak in the first or in
the last layer of a kind, or outside of the layers; at each of these places it is linear in the
layers of the stage, as is all the rest. How many microbatches are in flight, the schedule says
(`explore.occupancy`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from stagewright.arrays import Float, Int, distinct_values, product
from stagewright.explore.occupancy import Holding, Occupancy
from stagewright.explore.template_memory import Spot, TemplateRank, of_pairs
from stagewright.explore.templates import StructureTemplate, mean_layers, nearest
from stagewright.program.columns import CATEGORIES


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


_NO_SUCH_MOMENT = -1e18
"""Bytes at a moment that a stage has not: less than any other."""

_LEAST_LAYERS = {"first": 1, "last": 1, "next": 2}
"""Layers of a variant that a stage has at least where it has such a place (`Spot`)."""

_REMEMBERED = 4096
"""Cases of which it is remembered what stages hold: some hundred kinds of bytes for each."""

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
    _known: dict[Holding, Float] = field(default_factory=dict[Holding, Float])
    """What stages hold, of all cases (`_held`)."""

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
                count += of.distinct
        cases = np.concatenate([of.cases + begin[id(of.stages)] for of in every])
        allowance = np.concatenate([of.allowance for of in every])
        return cls(_concatenated(parts), cases, allowance)

    @property
    def distinct(self) -> int:
        """How many cases there are."""
        return next(iter(next(iter(self.stages.values())).values())).base.shape[1]

    def at(self, found: Occupancy, tuples: Int) -> dict[str, Int]:
        """Bytes by category of configurations with these tuples, in a pipeline of these states."""
        cases, of_row = distinct_values(self.cases[tuples])
        each = np.stack([self._held(one, cases) for one in found.holdings])
        total = product(found.counts, each.sum(axis=1))
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
        total = product(found.counts, (each * scale).sum(axis=1))
        return total.max(axis=0) + self.allowance[tuples]

    def _held(self, one: Holding, cases: Int) -> Float:
        """As `holding`. Pipelines of many shapes have stages alike, for other cases each time: what
        these hold is found once for all cases, if there are not too many to remember it."""
        if self.distinct > _REMEMBERED:
            return self.holding(one, cases)
        if one not in self._known:
            self._known[one] = self.holding(one, np.arange(self.distinct))
        return self._known[one].take(cases, axis=1)

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
            least = _LEAST_LAYERS.get(where, 0)
            if when != what or (least and layers[action][nth] < least):
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

    def grown(at: tuple[str, Spot]) -> Float:
        """What each layer more adds. The layer next to the last grows as the last one does: among
        the base's two layers it is the first as well, so that it cannot be told by itself."""
        what, (where, nth, action) = at
        like = (what, ("last", nth, action)) if where == "next" else at
        own = base.get(like, none)
        return np.stack([one.get(like, own) - own for one in more])

    return {
        at: ByLayers(
            base.get(at, none),
            grown(at),
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
