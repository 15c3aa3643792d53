"""Which stage of a pipeline holds what: pipelines are placed once for all runs that place alike."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Int
from stagewright.explore.shared.settings_read import BySettingsRead
from stagewright.explore.templates import Kind, Parts, unlike
from stagewright.lower.training import stages_of
from stagewright.lower.variants import BlockVariant
from stagewright.model.config import ModelConfig
from stagewright.run.settings import Run
from stagewright.schedule.actions import Order
from stagewright.schedule.pipeline import Pipeline


class PipelineBlocks(NamedTuple):
    """The blocks of a pipeline's stages."""

    variants: tuple[BlockVariant, ...]
    """The distinct ones."""
    parts: Parts | None
    layers: Int
    """Of each variant of layers on each stage: [variants, stages]."""


class PipelineShape(NamedTuple):
    """A pipeline, and how many layers its stages have."""

    pipeline: Pipeline
    layers: tuple[tuple[int, ...], ...]
    """Of each variant, by stage."""

    @property
    def by_stage(self) -> tuple[tuple[int, ...], ...]:
        """Layers of each stage, by variant."""
        return tuple(zip(*self.layers, strict=True))


@dataclass(frozen=True, eq=False)
class StagePlan:
    """The blocks of a pipeline: which stage holds what."""

    run: Run
    order: Order
    """With few microbatches."""
    parts: Parts | None
    layers: Int
    _shapes: dict[int | None, PipelineShape] = field(
        default_factory=dict[int | None, PipelineShape]
    )

    @cached_property
    def unlike(self) -> str:
        """Why a template does not stand for the pipeline; empty: it does."""
        return unlike(self.run, self.order, self.parts)

    @cached_property
    def kinds(self) -> dict[bool, Kind]:
        """The kind of template of those pipelines for which one stands: by whether there are
        several microbatches."""
        assert self.parts is not None, "blocks between layers"
        of = self.run, self.order, self.parts, self.layers
        return {several: Kind.of(*of, several=several) for several in (False, True)}

    def shape(self, microbatches: int) -> PipelineShape:
        """The shape of the pipeline with so many microbatches, which may decide how these are
        grouped."""
        run, group = self.run, self.run.group_of(microbatches)
        if group not in self._shapes:
            layers = tuple(tuple(of) for of in self.layers.tolist())
            pipeline = Pipeline(str(run.schedule), run.pp, run.vpp, group)
            self._shapes[group] = PipelineShape(pipeline, layers)
        return self._shapes[group]


def stage_plan(run: Run, model: ModelConfig, shared: BySettingsRead) -> StagePlan:
    """Which stage holds what, of a run that is not resolved, with as few microbatches as it may."""
    run = run.model_copy(update={"global_batch_size": None}).resolved(model)
    order, (_, parts, layers) = pipeline_blocks(run, model, shared)
    return StagePlan(run, order, parts, layers)


def pipeline_blocks(
    run: Run, model: ModelConfig, shared: BySettingsRead
) -> tuple[Order, PipelineBlocks]:
    """The order of actions of a resolved run's pipeline, and its blocks."""
    pipeline = Pipeline(str(run.schedule), run.pp, run.vpp, run.microbatch_group)
    order = pipeline.order(run.microbatches)
    what = "blocks", pipeline, run.microbatches
    return order, shared.of(what, run, lambda run: _blocks(run, model, order))


def _blocks(run: Run, model: ModelConfig, order: Order) -> PipelineBlocks:
    stages = stages_of(run, model, order)
    parts = Parts.of(stages)
    layers = np.zeros((0, 0), dtype=np.int64) if parts is None else parts.counts(stages)
    return PipelineBlocks(
        tuple(dict.fromkeys(variant for stage in stages for variant, _ in stage)), parts, layers
    )
