"""From a training run to the program of every rank: the whole pipeline on one screen.

A model is a chain of blocks of few variants. Each variant becomes one graph (`lower.blocks`: built,
recomputed, sharded) and, with numbers, a list of kernels and collectives; the schedule's order of
microbatches then makes these the program of every rank (`lower.assembly.assemble`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple, Self

from stagewright.algebra.layout import MIRROR, Mesh
from stagewright.blocks import Block, Recipe
from stagewright.graph.node import Graph
from stagewright.lower.assembly.assemble import Assembly, assemble
from stagewright.lower.assembly.lowered_block import LoweredBlock, Placed
from stagewright.lower.assembly.optimizer_step import ClipNorm
from stagewright.lower.blocks import (
    BlockContext,
    NumberedBlock,
    after_pass,
    build_block,
    lower_block,
    number_block,
    shard_block,
)
from stagewright.lower.compiled_run import CompiledRun
from stagewright.lower.frozen import count, mark_trained, trains_all
from stagewright.lower.habits import Habits
from stagewright.lower.kernels.extent import Extent, OwnRows, extent_of
from stagewright.lower.parameters import parameters
from stagewright.lower.pytorch.uneven_shards import by_rows
from stagewright.lower.recipe import recipe_of, sizes_of
from stagewright.lower.routing import ROWS, Load, Routing, Rows
from stagewright.lower.strategy_table import check_table, table_of
from stagewright.lower.variants import BlockVariant, PlacedVariant, labels, place_blocks, tie_tables
from stagewright.model.config import ModelConfig
from stagewright.parallel.degrees import parallelization
from stagewright.parallel.plan import Plan
from stagewright.program.columns import Program
from stagewright.run.settings import Run
from stagewright.schedule.actions import Order
from stagewright.schedule.places import mirrored
from stagewright.schedule.schedules import known_order
from stagewright.varying import first_of

STAGES = (
    "vpp", "schedule", "layers_per_stage", "first_stage_less_layers", "last_stage_less_layers",
    "pipeline_split", "microbatch_group_size_per_vp_stage",
)  # fmt: skip
"""Settings that decide which blocks are on which stage, and nothing of a block."""


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """A training step of a resolved run, before its graphs have numbers."""

    run: Run
    model: ModelConfig
    order: Order
    mesh: Mesh
    plan: Plan
    sizes: Mapping[str, int]
    recipe: Recipe
    stages: Sequence[Sequence[PlacedVariant]]
    """The blocks of each stage of the model."""
    habits: Habits

    @classmethod
    def of(cls, run: Run, model: ModelConfig, table: Mapping[str, str]) -> Self:
        """The step of a run that has been checked; `table` as in `lower.compile`."""
        step = cls.of_blocks(run, model, table)
        check_table(step.plan, run, model, step.sizes)
        return replace(step, stages=stages_of(run, model, step.order))

    @classmethod
    def of_blocks(cls, run: Run, model: ModelConfig, table: Mapping[str, str]) -> Self:
        """The step without stages: it shards and lowers blocks."""
        order = order_of(run)
        mesh, plan = parallelization(run, model, mirrored=mirrored(order))
        plan = replace(plan, table=table_of(run, model, table))
        sizes = sizes_of(run, model, replicas=1 + mirrored(order))
        recipe, habits = recipe_of(run, model), Habits.of(run, order)
        return cls(run, model, order, mesh, plan, sizes, recipe, (), habits)

    @property
    def variants(self) -> Sequence[BlockVariant]:
        """The distinct blocks of the model."""
        return [*dict.fromkeys(variant for stage in self.stages for variant, _ in stage)]

    def build(self, variant: BlockVariant) -> Block:
        """The block for one device."""
        return build_block(variant, self.model, self.recipe)

    def after_pass(self, name: str, variant: BlockVariant, block: Block) -> Block:
        """A block after one of `blocks.BLOCK_PASSES`."""
        context = BlockContext(variant, self.run, self._plan_of(variant), self.sizes)
        return after_pass(name, block, context)

    def shard(self, variant: BlockVariant) -> Graph:
        """The graph of a block as each rank executes it."""
        plan = self._plan_of(variant)
        return shard_block(variant, self.run, self.model, plan, self.sizes, self.recipe)

    def shard_once(self, variant: BlockVariant) -> Graph:
        """As `shard`; runs with other blocks on each stage, one after another, share graphs."""
        return _sharded(self._block(variant))

    def lower_once(self, variant: BlockVariant) -> LoweredBlock:
        """A block with numbers, of a dense model on ranks that are alike; runs share blocks."""
        return _lowered(self._block(variant), self.mesh, self.habits)

    def _block(self, variant: BlockVariant) -> _BlockOfRun:
        run = self.run.model_copy(update=dict.fromkeys(STAGES))
        sizes = tuple(self.sizes.items())
        return _BlockOfRun(variant, run, self.model, self._plan_of(variant), sizes, self.recipe)

    def _plan_of(self, variant: BlockVariant) -> Plan:
        if not variant.shared:
            return self.plan
        # Groups of the vocabulary are split by all of these axes, none is within a group.
        return replace(self.plan, vocabulary=("pp", *self.plan.tensor), inner=frozenset())

    @property
    def routing(self) -> Routing | None:
        """Which ranks exchange copies of tokens; None: a dense model."""
        if not self.model.num_experts:
            return None
        return Routing.of(self.run, self.model, self.plan, self.sizes["B"] * self.sizes["S"])

    def extent(self, rows: Rows | None, own: OwnRows | None = None) -> Extent:
        """How large dims are on a rank if experts compute this many rows; None: a dense model.

        `own` are the rank's rows of the weights that FSDP splits; None: the first rank's.
        """
        return _extent(self.sizes, self.mesh, self.plan, rows, own)

    def number_block(self, graph: Graph, extent: Extent) -> NumberedBlock:
        """A block with numbers."""
        return number_block(graph, self.run, self.mesh, extent, self.habits)

    def lower_block(self, variant: BlockVariant, graph: Graph, extent: Extent) -> LoweredBlock:
        """A block with numbers and its memory."""
        return lower_block(graph, self.run, self.mesh, extent, variant, self.habits)

    def assemble(
        self,
        blocks: Mapping[BlockVariant, LoweredBlock],
        layers: Mapping[int, Hashable] | None = None,
    ) -> Assembly:
        """The program of every rank; `layers` with other entries do not do the same."""
        placed = [[Placed(blocks[v], i, v.name_at(i)) for v, i in stage] for stage in self.stages]
        clip = _clip_norm(self.run, self.plan) if self.run.clip_grad else None
        # Ranks are numbered; of configurations with other numbers of ranks, those of the first one.
        mesh = replace(self.mesh, axes=tuple((a, first_of(size)) for a, size in self.mesh.axes))
        streams, habits = self.run.streams, self.habits
        return assemble(
            placed, self.order, mesh, clip=clip, streams=streams, habits=habits, layers=layers
        )


class _BlockOfRun(NamedTuple):
    """All that the graph of a block depends on; the run is without `STAGES`."""

    variant: BlockVariant
    run: Run
    model: ModelConfig
    plan: Plan
    sizes: tuple[tuple[str, int], ...]
    recipe: Recipe


@lru_cache(maxsize=32)  # the best runs of a search have few distinct blocks
def _sharded(of: _BlockOfRun) -> Graph:
    """The graph of a block."""
    return shard_block(of.variant, of.run, of.model, of.plan, dict(of.sizes), of.recipe)


@lru_cache(maxsize=32)
def _lowered(of: _BlockOfRun, mesh: Mesh, habits: Habits) -> LoweredBlock:
    """A block with numbers, where no rank has rows of its own."""
    extent = _extent(dict(of.sizes), mesh, of.plan)
    return lower_block(_sharded(of), of.run, mesh, extent, of.variant, habits)


def _extent(
    sizes: Mapping[str, int],
    mesh: Mesh,
    plan: Plan,
    rows: Rows | None = None,
    own: OwnRows | None = None,
) -> Extent:
    """As `TrainingStep.extent`."""
    shards = frozenset(plan.shard if plan.shard_rows else ())
    return extent_of(sizes, mesh, {ROWS: rows} if rows else None, shards, own)


def order_of(run: Run) -> Order:
    """The actions of each pipeline rank of a resolved run."""
    group = run.microbatch_group
    return known_order(str(run.schedule), run.pp, run.microbatches, run.vpp, group)


def stages_of(run: Run, model: ModelConfig, order: Order) -> list[list[PlacedVariant]]:
    """The blocks of each stage of a resolved run, with what of each block trains."""
    tied = tie_tables(place_blocks(run, model), order, model)
    return tied if trains_all(run) else mark_trained(tied, run, model, recipe_of(run, model))


def compile_training(run: Run, model: ModelConfig, table: Mapping[str, str]) -> CompiledRun:
    """A training step of a resolved run that has been checked; `table` as in `lower.compile`."""
    step = TrainingStep.of(run, model, table)
    graphs = {v: step.shard_once(v) for v in step.variants}
    routing = step.routing
    load = Load.read(run.expert_load, routing, model) if routing and run.expert_load else None

    def equal(rows: Rows | None, own: OwnRows | None) -> Program:
        """As `program`, of ranks that have these rows of the weights that FSDP splits."""
        if rows is None and own is None:
            return step.assemble({v: step.lower_once(v) for v in graphs}).program
        extent = step.extent(rows, own)
        blocks = {v: step.lower_block(v, g, extent) for v, g in graphs.items()}
        return step.assemble(blocks, load and load.of_layers).program

    def program(rows: Rows | None) -> Program:
        """The program of every rank if experts compute this many rows; None: a dense model."""
        plan = step.plan
        if not plan.shard_rows:
            return equal(rows, None)
        return by_rows(step.mesh, plan.shard, partial(equal, rows))

    every = load.programs(program) if load else program(routing.even() if routing else None)
    trained = count(step.stages, run, model)
    texts = {label: graphs[v] for v, label in labels(graphs).items()}
    total = parameters(model)
    return CompiledRun(run, model, *total, texts, step.order, every, load=load, trained=trained)


def _clip_norm(run: Run, plan: Plan) -> ClipNorm:
    """The axes over which the norm of all gradients is a sum; or, by `clip_grad_norm`, each norm.

    With `clip_grad_norm=vector`, ranks exchange the norm of each gradient, in its data type, over
    two groups of axes: those that shard gradients, and those that split tensors.
    """
    pipeline = {"pp"} if run.pp > 1 else set[str]()
    axes = tuple(sorted({*plan.model_axes, *pipeline} - {MIRROR}))  # ranks of MIRROR are pp's
    if run.clip_grad_norm != "vector":
        return ClipNorm(axes)
    of_gradients = run.params_dtype or "fp32"
    return ClipNorm(axes, (plan.shard if plan.zero else (), plan.tensor), of_gradients)
