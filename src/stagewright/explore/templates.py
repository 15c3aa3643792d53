"""Small programs that stand for those of many pipelines: a first, a middle and a last stage.

What an action takes is linear in the layers of its stage, once there are a few. So a structure is
assembled with few layers for each stage (`lower.assembly`), and again with one layer more of each
variant; any pipeline's actions follow from the differences (`explore.responses`). The template has
three ranks, or one where the model is not split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Int
from stagewright.lower.assembly.assemble import Assembly
from stagewright.lower.assembly.lowered_block import LoweredBlock
from stagewright.lower.habits import Habits
from stagewright.lower.training import TrainingStep
from stagewright.lower.variants import BlockVariant, PlacedVariant
from stagewright.parallel.degrees import parallelization
from stagewright.run.settings import Run
from stagewright.schedule.actions import Order
from stagewright.schedule.schedules import make

ONLY, FIRST, MIDDLE, LAST = range(4)
"""Kinds of stages: the whole model, or which part of it."""
RANKS = 3
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
        variants = tuple(dict.fromkeys(variant for variant, _ in inside))
        if any(index < 0 for _, index in inside) or any(v.begins or v.ends for v in variants):
            return None
        return cls(tuple(every[: layers[0]]), variants, tuple(every[layers[-1] + 1 :]))

    def counts(self, stages: Sequence[Sequence[PlacedVariant]]) -> Int:
        """Layers of each variant on each stage: [variants, stages]."""
        found = [[sum(v == one for v, _ in stage) for stage in stages] for one in self.layers]
        return np.array(found, dtype=np.int64)

    def stages(self, count: int, more: BlockVariant | None) -> list[list[PlacedVariant]]:
        """The stages of a template, with one layer more of a variant on each."""
        each = [v for v in self.layers for _ in range(_LAYERS + (v == more))]
        found = [[(v, s * len(each) + n) for n, v in enumerate(each)] for s in range(count)]
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

    @property
    def layers(self) -> int:
        """Layers of each variant on each stage of the base."""
        return _LAYERS

    def kind(self, stage: int) -> int:
        """The kind of one of the template's stages."""
        return kind_of(stage, self.stages)


def kind_of(stage: int, stages: int) -> int:
    """Which part of a model a stage of so many is."""
    if stages == 1:
        return ONLY
    return FIRST if stage == 0 else LAST if stage == stages - 1 else MIDDLE


def unlike(run: Run, parts: Parts, layers: Int) -> str:
    """Why a template does not stand for the pipeline of a resolved run; empty: it does.

    `layers` are those of each variant on each stage.
    """
    if run.pipeline_caches and run.pp > 1:
        return "pipeline_caches: buffers for each microbatch"
    if run.ddp_bucket_cap_mb and not run.zero and run.dp * run.cp > 1:
        return "ddp_bucket_cap_mb: buckets across layers"
    if len({variant.training for variant in parts.layers}) > 1:
        return "layers that train differently"
    if run.zero > 1 and int(layers.sum(axis=0).min()) < _LAYERS:  # communicates with microbatches
        return f"zero={run.zero} with fewer than two layers on a stage"
    return ""


class Kind(NamedTuple):
    """What the pipelines of a structure must have in common to share a template."""

    splits: bool
    """Whether the model is split into stages."""
    several: bool
    """Whether there are several microbatches."""
    parts: Parts


def template(
    step: TrainingStep, of: Kind, blocks: Mapping[BlockVariant, LoweredBlock]
) -> StructureTemplate:
    """The template of pipelines, from the blocks that they are made of.

    `step` is that of any pipeline of these blocks, with numbers of one configuration or of many.
    """
    pp, microbatches = RANKS if of.splits else 1, 3 if of.several else 1
    run = step.run
    batch = (run.micro_batch_size or 1) * run.dp * microbatches
    changed = {"pp": pp, "vpp": 1, "global_batch_size": batch, "schedule": "1f1b"}
    run = run.model_copy(update=changed | {"microbatch_group_size_per_vp_stage": None})
    order = make("1f1b", pp, microbatches)
    mesh, _ = parallelization(run, step.model)

    def assembly(more: BlockVariant | None) -> Assembly:
        placed = of.parts.stages(pp, more)
        placed[-1] += of.parts.after
        habits = Habits.of(run, order)
        small = replace(step, run=run, order=order, mesh=mesh, stages=placed, habits=habits)
        return small.assemble(blocks)

    return StructureTemplate(run, order, pp, assembly(None), tuple(map(assembly, of.parts.layers)))
