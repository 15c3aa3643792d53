"""Small programs that stand for those of many pipelines: a first, a middle and a last stage.

What an action takes is linear in the layers of its stage, once there are a few. So a structure is
assembled with few layers for each stage (`lower.assembly`), and again with one layer more of each
variant; any pipeline's actions follow from the differences (`explore.responses`). The template has
three ranks, or one where the model is not split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stagewright.arrays import Int
from stagewright.lower.assembly.assemble import lower
from stagewright.lower.assembly.lowered_block import LoweredBlock, Placed
from stagewright.lower.assembly.optimizer_step import ClipNorm
from stagewright.lower.habits import Habits
from stagewright.lower.variants import BlockVariant, PlacedVariant
from stagewright.model.config import ModelConfig
from stagewright.parallel.degrees import parallelization
from stagewright.program.columns import Program
from stagewright.run.settings import Run
from stagewright.schedule.actions import Order
from stagewright.schedule.schedules import SCHEDULES, fewest, make

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
        return [[*self.before, *found[0]], *found[1:]] if count > 1 else [[*self.before, *found[0]]]


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """The programs of a structure: the base, and with one layer more of each variant on a stage."""

    run: Run
    """As it is resolved, with the ranks, chunks and microbatches of the template."""
    order: Order
    stages: int
    base: Program
    more: tuple[Program, ...]
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


def template_run(run: Run) -> Run:
    """A resolved run with the ranks, chunks and microbatches of its template."""
    schedule = str(run.schedule)
    chunks = SCHEDULES[schedule].chunks if schedule in SCHEDULES else 1
    pp = RANKS if run.pp > 1 else 1
    microbatches = max(4, fewest(schedule, pp)) if schedule in SCHEDULES else 4
    while not SCHEDULES[schedule].takes(pp, microbatches):
        microbatches += 1
    vpp = run.vpp if chunks is not None else min(run.vpp, 2)
    batch = (run.micro_batch_size or 1) * run.dp * microbatches
    changed = {
        "pp": pp,
        "vpp": vpp,
        "global_batch_size": batch,
        "microbatch_group_size_per_vp_stage": None,
    }
    return run.model_copy(update=changed)


def template(
    run: Run,
    model: ModelConfig,
    parts: Parts,
    blocks: Mapping[BlockVariant, LoweredBlock],
    clip: ClipNorm | None,
) -> Template:
    """The template of a resolved run, from the blocks that its pipeline is made of."""
    small = template_run(run)
    order = make(str(run.schedule), small.pp, small.microbatches, small.vpp)
    mesh, _ = parallelization(small, model)
    habits = Habits.of(small, order)
    stages = small.pp * small.vpp

    def program(more: BlockVariant | None) -> Program:
        placed = parts.stages(stages, more)
        placed[-1] += parts.after
        rows = [[Placed(blocks[v], i, v.name_at(i)) for v, i in stage] for stage in placed]
        return lower(rows, order, mesh, clip=clip, streams=run.streams, habits=habits)

    return Template(small, order, stages, program(None), tuple(program(v) for v in parts.layers))
