"""Small programs that stand for those of many pipelines: a first, a middle and a last stage.

What an action takes is linear in the layers of its stage, once there are a few. So a structure is
assembled with few layers for each stage (`lower.assembly`), and again with one layer more of each
variant; any pipeline's actions follow from the differences (`explore.responses`). The template has
three ranks, or one where the model is not split, and a schedule of the same shape.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np

from stagewright.arrays import Int
from stagewright.lower.assembly.assemble import Assembly
from stagewright.lower.assembly.lowered_block import LoweredBlock
from stagewright.lower.habits import Habits
from stagewright.lower.training import TrainingStep
from stagewright.lower.variants import BlockVariant, PlacedVariant
from stagewright.parallel.degrees import parallelization
from stagewright.run.settings import Run
from stagewright.schedule.actions import Order, parts, stage_count
from stagewright.schedule.places import mirrored
from stagewright.schedule.schedules import SCHEDULES, fewest, make
from stagewright.schedule.traits import OrderTraits, traits_of

ONLY, FIRST, MIDDLE, LAST, TURN, RETURN = range(6)
"""Kinds of stages: the whole model, or which part of it; where a V turns, its last stage on the way
out and its first one back, which are on one rank. Kinds of ranks are the first four."""
_LAYERS = 2
"""Layers of each variant on each stage of the base template."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The blocks of a model: those before all layers, the variants of layers, those after."""

    before: tuple[PlacedVariant, ...]
    layers: tuple[BlockVariant, ...]
    after: tuple[PlacedVariant, ...]

    @classmethod
    def of(cls, stages: Sequence[Sequence[PlacedVariant]]) -> Parts | None:
        """The parts of a placed model; None where templates cannot stand for it.

        They cannot where blocks that are no layers lie between layers, nor where the first or the
        last user of a value on a stage differs from other layers.
        """
        every = [placed for stage in stages for placed in stage]
        layers = [n for n, (_, index) in enumerate(every) if index >= 0]
        inside = every[layers[0] : layers[-1] + 1]
        # In the order that stages have them: those that a stage offloads or recomputes come first,
        # whichever layers of the model they are.
        place: dict[BlockVariant, int] = {}
        for stage in stages:
            own = [variant for variant, index in stage if index >= 0]
            for variant in dict.fromkeys(own):
                place[variant] = min(place.get(variant, len(every)), own.index(variant))
        variants = tuple(sorted(place, key=lambda variant: place[variant]))
        if any(index < 0 for _, index in inside) or any(v.begins or v.ends for v in variants):
            return None
        return cls(tuple(every[: layers[0]]), variants, tuple(every[layers[-1] + 1 :]))

    def counts(self, stages: Sequence[Sequence[PlacedVariant]]) -> Int:
        """Layers of each variant on each stage: [variants, stages]."""
        found = [[sum(v == one for v, _ in stage) for stage in stages] for one in self.layers]
        return np.array(found, dtype=np.int64)

    def stages(
        self, layers: Sequence[Sequence[int]], least: Sequence[int]
    ) -> list[list[PlacedVariant]]:
        """The stages of a template, with so many layers of each variant on each.

        A stage between others is never empty: without layers it has the `least`.
        """
        found: list[list[PlacedVariant]] = []
        for stage, asked in enumerate(layers):
            own = asked if any(asked) or stage in (0, len(layers) - 1) else least
            each = [v for v, n in zip(self.layers, own, strict=True) for _ in range(n)]
            begin = sum(map(len, found))
            found.append([(v, begin + n) for n, v in enumerate(each)])
        return [[*self.before, *found[0]], *found[1:]]


@dataclass(frozen=True, slots=True, eq=False)
class StructureTemplate:
    """The programs of a structure: the base, and with one layer more of each variant on a stage."""

    run: Run
    """As it is resolved, with the ranks, chunks and microbatches of the template."""
    order: Order
    stages: int
    base: Assembly
    more: tuple[Assembly, ...]
    """By variant of layers."""
    layers: tuple[int, ...]
    """Of each variant on each stage of the base."""
    pairs: Mapping[tuple[tuple[int, ...], ...], Assembly]
    """With the very layers of stages whose actions overlap, by the layers of each variant on each
    stage (`Kind.pairs`)."""
    few: Mapping[tuple[int, ...], Assembly]
    """With fewer layers of some variant on each stage, by the layers of each (`Kind.few`). Those
    without layers say nothing of stages between others."""

    blocks: tuple[LoweredBlock, ...]
    """By variant of layers."""

    def number_of(self, block: LoweredBlock) -> int:
        """The number of the variant that a block of a layer has."""
        return next(nth for nth, own in enumerate(self.blocks) if own is block)

    def stands_for(self, few: tuple[int, ...], kinds: Iterable[int]) -> bool:
        """Whether stages of these kinds are those of the program of `few`."""
        return any(few) or all(kind in (FIRST, LAST) for kind in kinds)

    @property
    def assemblies(self) -> tuple[Assembly, ...]:
        """All programs: the base, those with one layer more, those with fewer, those of pairs."""
        return self.base, *self.more, *self.few.values(), *self.pairs.values()

    @property
    def stage_layers(self) -> list[tuple[tuple[int, ...], ...]]:
        """Of each program, the layers of each variant on each stage."""
        own = self.layers
        more = [
            tuple(count + (nth == one) for nth, count in enumerate(own)) for one in range(len(own))
        ]
        return [*((layers,) * self.stages for layers in (own, *more, *self.few)), *self.pairs]

    @property
    def kinds(self) -> Kinds:
        """The kinds of the template's stages and ranks."""
        return Kinds.of(self.order)


class Kinds(NamedTuple):
    """The kinds of stages and ranks of a pipeline."""

    traits: OrderTraits
    pp: int
    stages: int

    @classmethod
    def of(cls, order: Order) -> Self:
        """Those of an order's pipeline."""
        return cls(traits_of(order), len(order), stage_count(order))

    def stage(self, stage: int) -> int:
        """The kind of a stage."""
        if self.stages == 1:
            return ONLY
        if self.traits.folded and stage in (self.pp - 1, self.pp):
            return TURN if stage < self.pp else RETURN
        return FIRST if stage == 0 else LAST if stage == self.stages - 1 else MIDDLE

    def rank(self, rank: int) -> int:
        """The kind of a rank of the pipeline."""
        if self.pp == 1:
            return ONLY
        if rank == 0 or (self.traits.doubled and rank == self.pp - 1):
            return FIRST
        return LAST if rank == self.pp - 1 and not self.traits.doubled else MIDDLE


def unlike(run: Run, order: Order, parts: Parts | None) -> str:
    """Why a template does not stand for the pipeline of a resolved run; empty: it does."""
    if parts is None:
        return "blocks between layers"
    of = traits_of(order)
    if run.schedule not in SCHEDULES or of.shared:
        return f"schedule {run.schedule}"
    if of.folded and run.pp == 1:
        return f"schedule {run.schedule} on one rank"
    if run.pipeline_caches and run.pp > 1:
        return "pipeline_caches: buffers for each microbatch"
    if run.bucket == "rank" and run.dp * run.cp > 1:
        return "bucket=rank: gradients of all layers in one message"
    if run.ddp_bucket_cap_mb and not run.zero and run.dp * run.cp > 1:
        return "ddp_bucket_cap_mb: buckets across layers"
    if len({variant.training for variant in parts.layers}) > 1:
        return "layers that train differently"
    return ""


class Kind(NamedTuple):
    """What the pipelines of a structure must have in common to share a template."""

    schedule: str
    """A schedule of the same shape (`alike`)."""
    ranks: int
    several: bool
    """Whether there are several microbatches."""
    parts: Parts
    layers: tuple[int, ...]
    """Of each variant on each stage of the base."""
    few: tuple[tuple[int, ...], ...]
    """Likewise, of programs for stages with fewer layers of some variant than the base."""
    pairs: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """Of each variant on each stage, of programs for pairs of stages whose actions overlap: where
    one is while the other one is at its first layer, follows from the layers of both."""

    @property
    def chunks(self) -> int:
        """Stages of a rank."""
        return SCHEDULES[self.schedule].chunks or 1

    @property
    def microbatches(self) -> int:
        """As many as it takes for every kind of action to occur behind another one."""
        if not self.several:
            return 1
        if self.schedule == "1f1b":
            return 3
        # The half of a backward that makes gradients of weights also occurs before the last half of
        # the other kind, and each pair of actions twice.
        least = fewest(self.schedule, self.ranks)
        return max(4, least + (1 if least == self.ranks else 2))

    @classmethod
    def of(cls, run: Run, order: Order, parts: Parts, layers: Int, *, several: bool) -> Self:
        """The kind of template for a resolved run with this order, or one of fewer microbatches.

        `layers` are those of each variant on each stage.
        """
        of = traits_of(order)
        # With fewer ranks, some kinds of actions would only occur once, or not at all.
        schedule, most = "1f1b", 3
        if of.halves:
            schedule = "zb-h1"
        if of.folded:
            schedule, most = ("dualpipev", 4) if of.overlaps else ("zbv", 3)
        if of.doubled:
            schedule, most = "dualpipe", 6
        two = of.doubled and run.pp == 2  # both ranks hold all stages
        ranks = run.pp if run.pp == 1 or two else most
        own = cls(schedule, ranks, several, parts, *_layers_of_programs(run, layers))
        return own._replace(pairs=own._pairs(order, layers)) if of.overlaps and several else own

    def _pairs(self, order: Order, layers: Int) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """The layers of the stages of programs for pairs of an order's stages."""
        kinds, by_stage = Kinds.of(order), [tuple(of) for of in layers.T.tolist()]
        found: dict[int, dict[tuple[tuple[int, ...], ...], None]] = {}
        for stage, other in dict.fromkeys(_overlapping(order)):
            own = by_stage[stage], by_stage[other]
            if set(own) != {self.layers}:
                found.setdefault(kinds.stage(stage), {})[own] = None
        small = make(self.schedule, self.ranks, self.microbatches, self.chunks)
        of_small, pairs = Kinds.of(small), [*dict.fromkeys(_overlapping(small))]
        programs: list[tuple[tuple[int, ...], ...]] = []
        for nth in range(max(map(len, found.values()), default=0)):
            stages = [self.layers] * stage_count(small)
            for stage, other in pairs:
                some = [*found.get(of_small.stage(stage), ())]
                if some:
                    stages[stage], stages[other] = some[min(nth, len(some) - 1)]
            programs.append(tuple(stages))
        return tuple(programs)

    @classmethod
    def plain(cls, run: Run, parts: Parts, layers: Int) -> Self:
        """The kind of template for a resolved run, as if it had many microbatches in 1F1B."""
        ranks = 1 if run.pp == 1 else 3
        return cls("1f1b", ranks, True, parts, *_layers_of_programs(run, layers))


def _overlapping(order: Order) -> Iterator[tuple[int, int]]:
    """The stages whose actions overlap, the one that is farther from the output first."""
    for rank in order:
        for step in rank:
            of = sorted(action.stage for action in parts(step))
            if len(of) > 1:
                yield of[0], of[1]


def _layers_of_programs(
    run: Run, layers: Int
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """The layers of a stage of the base, by variant; and those of other programs.

    Transfers of every microbatch run beside the layers behind them, so that what few layers take
    does not follow from what more of them take: they have a program of their own. So have stages
    without layers, which have nothing that is reduced beside layers.
    """
    usual = (_LAYERS,) * len(layers)
    every = {tuple(of) for of in np.minimum(layers.T, _LAYERS).tolist()}
    if run.zero < 2 and not run.cpu_offloading_num_layers:
        return usual, tuple(of for of in every if not any(of))
    base = tuple(map(max, zip(*every, strict=True)))
    return base, tuple(sorted(every - {base}))


def mean_layers(stages: Sequence[Sequence[float]]) -> Sequence[float]:
    """Layers of each variant on a stage, or on the mean of two whose actions overlap: templates of
    such pairs have equal stages."""
    return stages[0] if len(stages) == 1 else [sum(of) / 2 for of in zip(*stages, strict=True)]


def nearest(
    layers: Sequence[float], few: Collection[tuple[float, ...]], base: tuple[int, ...]
) -> tuple[float, ...]:
    """The layers of each variant in the program that stands for stages with so many of them: one of
    `few` (`Kind.few`), or the base."""
    least = tuple(min(count, _LAYERS) for count in layers)
    return least if least in few else base


class TemplatePrograms:
    """The programs of a structure's templates, each once; kinds of pipelines share some."""

    def __init__(self, step: TrainingStep, blocks: Mapping[BlockVariant, LoweredBlock]) -> None:
        """None yet, of the blocks that the structure's pipelines are made of.

        `step` is that of any of these, with numbers of one configuration or of many.
        """
        self.step, self.blocks = step, blocks
        self._made: dict[Hashable, Assembly] = {}

    def template(self, of: Kind) -> StructureTemplate:
        """The template of pipelines of a kind."""
        run, stages = self.step.run, of.ranks * of.chunks
        batch = (run.micro_batch_size or 1) * run.dp * of.microbatches
        changed = {"pp": of.ranks, "vpp": of.chunks, "global_batch_size": batch}
        changed |= {"schedule": of.schedule, "microbatch_group_size_per_vp_stage": None}
        run = run.model_copy(update=changed)
        order = make(of.schedule, of.ranks, of.microbatches, of.chunks)

        def assembly(layers: Sequence[Sequence[int]]) -> Assembly:
            least = () if all(map(any, layers)) else of.layers
            key = of.schedule, of.ranks, of.microbatches, of.parts, (*map(tuple, layers),), least
            if key not in self._made:
                placed = of.parts.stages(layers, of.layers)
                placed[-1] += of.parts.after
                self._made[key] = self._assembly(run, order, placed)
            return self._made[key]

        variants = range(len(of.layers))
        more = [
            assembly([[n + (v == one) for v, n in enumerate(of.layers)]] * stages)
            for one in variants
        ]
        few = {layers: assembly([layers] * stages) for layers in of.few}
        pairs = {layers: assembly(layers) for layers in of.pairs}
        base = assembly([of.layers] * stages)
        own = tuple(self.blocks[variant] for variant in of.parts.layers)
        return StructureTemplate(run, order, stages, base, (*more,), of.layers, pairs, few, own)

    def _assembly(
        self, run: Run, order: Order, stages: Sequence[Sequence[PlacedVariant]]
    ) -> Assembly:
        mesh, _ = parallelization(run, self.step.model, mirrored=mirrored(order))
        habits = Habits.of(run, order)
        small = replace(self.step, run=run, order=order, mesh=mesh, stages=stages, habits=habits)
        return small.assemble(self.blocks)
