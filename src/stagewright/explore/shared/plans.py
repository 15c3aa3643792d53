"""Which stage of a pipeline holds what: pipelines are placed once for all runs that place alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Int
from stagewright.explore.pipeline import order_of
from stagewright.explore.shared.settings_read import BySettingsRead
from stagewright.explore.templates import Parts
from stagewright.lower.training import stages_of
from stagewright.lower.variants import BlockVariant
from stagewright.model.config import ModelConfig
from stagewright.run.settings import Run
from stagewright.schedule.actions import Order


class PipelineBlocks(NamedTuple):
    """The blocks of a pipeline's stages."""

    variants: tuple[BlockVariant, ...]
    """The distinct ones."""
    parts: Parts | None
    layers: Int
    """Of each variant of layers on each stage: [variants, stages]."""


class PipelineShape(NamedTuple):
    """A pipeline, whatever its microbatches."""

    schedule: str
    pp: int
    vpp: int
    group: int | None
    layers: tuple[tuple[int, ...], ...]
    """Of each variant, by stage."""


@dataclass(frozen=True, slots=True, eq=False)
class StagePlan:
    """The blocks of a pipeline: which stage holds what."""

    run: Run
    order: Order
    """With few microbatches."""
    parts: Parts | None
    layers: Int

    @property
    def shape(self) -> PipelineShape:
        """The shape of the pipeline."""
        run, layers = self.run, tuple(tuple(of) for of in self.layers.tolist())
        return PipelineShape(str(run.schedule), run.pp, run.vpp, run.microbatch_group, layers)


def stage_plan(run: Run, model: ModelConfig, shared: BySettingsRead) -> StagePlan:
    """Which stage holds what, of a run that is not resolved, with as few microbatches as it may."""
    run = run.model_copy(update={"global_batch_size": None}).resolved(model)
    order, (_, parts, layers) = pipeline_blocks(run, model, shared)
    return StagePlan(run, order, parts, layers)


def pipeline_blocks(
    run: Run, model: ModelConfig, shared: BySettingsRead
) -> tuple[Order, PipelineBlocks]:
    """The order of actions of a resolved run's pipeline, and its blocks."""
    pipeline = str(run.schedule), run.pp, run.microbatches, run.vpp, run.microbatch_group
    order = order_of(*pipeline)
    return order, shared.of(("blocks", pipeline), run, lambda run: _blocks(run, model, order))


def _blocks(run: Run, model: ModelConfig, order: Order) -> PipelineBlocks:
    stages = stages_of(run, model, order)
    parts = Parts.of(stages)
    layers = np.zeros((0, 0), dtype=np.int64) if parts is None else parts.counts(stages)
    return PipelineBlocks(
        tuple(dict.fromkeys(variant for stage in stages for variant, _ in stage)), parts, layers
    )
