"""From a training run to the program of every rank: all steps on one screen.

A model is a chain of blocks of few variants. Each variant becomes one graph (`lower.blocks`: built,
recomputed, sharded) and, with numbers, a list of kernels and collectives; the schedule's order of
microbatches then makes these the program of every rank (`lower.assembly.assemble`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from stagewright.algebra.layout import MIRROR, Mesh
from stagewright.blocks import Recipe
from stagewright.graph.node import Graph
from stagewright.lower.assembly.assemble import assemble
from stagewright.lower.assembly.lowered_block import WHOLE, LoweredBlock, MessageParts, StageBlock
from stagewright.lower.assembly.optimizer_step import ClipNorm
from stagewright.lower.blocks import lower_block, shard_block
from stagewright.lower.compiled_run import CompiledRun
from stagewright.lower.fsdp import by_rows
from stagewright.lower.habits import Habits
from stagewright.lower.kernels.extent import Extent, LocalRows, Split, extent_of
from stagewright.lower.parameters import count_trained, mark_trained, parameters, trains_all
from stagewright.lower.recipe import recipe_of, sizes_of
from stagewright.lower.routing import ROWS, ExpertRows, Load, Routing
from stagewright.lower.strategy_table import check_table, table_of
from stagewright.lower.variants import BlockVariant, PlacedVariant, labels, place_blocks, tie_tables
from stagewright.model.config import ModelConfig
from stagewright.parallel.degrees import parallelization
from stagewright.parallel.plan import Plan
from stagewright.program.columns import Program
from stagewright.run.settings import Run
from stagewright.schedule.actions import Order, flat
from stagewright.schedule.places import mirrored
from stagewright.schedule.schedules import make


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """Training step of a resolved run, before its graphs have numbers."""

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
        """Step of a run that has been checked; `table` as in `lower.compile`."""
        order = order_of(run)
        mesh, plan = parallelization(run, model, mirrored=mirrored(order))
        plan = replace(plan, table=table_of(run, model, table))
        sizes = sizes_of(run, model, replicas=1 + mirrored(order))
        check_table(plan, mesh, run, model, sizes)
        recipe, habits = recipe_of(run, model), Habits.of(run, order)
        stages = stages_of(run, model, order)
        return cls(run, model, order, mesh, plan, sizes, recipe, stages, habits)

    @property
    def variants(self) -> Sequence[BlockVariant]:
        """Distinct blocks of the model."""
        return [*dict.fromkeys(variant for stage in self.stages for variant, _ in stage)]

    def shard(self, variant: BlockVariant) -> Graph:
        """Build the graph of a block as each rank executes it."""
        plan = self._plan_of(variant)
        run, model, recipe = self.run, self.model, self.recipe
        return shard_block(variant, run, model, self.mesh, plan, self.sizes, recipe)

    def _plan_of(self, variant: BlockVariant) -> Plan:
        if not variant.shared:
            return self.plan
        # No axis splits the inside of a key-value group here: all split rows of the vocabulary.
        return replace(self.plan, vocabulary=("pp", *self.plan.tensor), inner=frozenset())

    @property
    def routing(self) -> Routing | None:
        """Exchange of token copies between ranks; None: a dense model."""
        if not self.model.num_experts:
            return None
        tokens = self.sizes["B"] * self.sizes["S"]
        return Routing.of(self.run, self.model, self.mesh, self.plan, tokens)

    def extent(self, rows: ExpertRows | None, local_rows: LocalRows | None = None) -> Extent:
        """Sizes of dims on a rank; `rows`: rows of experts, None: a dense model.

        `local_rows`: the rank's rows of the weights that FSDP splits; None: the first rank's.
        """
        shards = frozenset(self.plan.zero_axes if self.plan.shard_rows else ())
        means = {ROWS: rows} if rows else None
        return extent_of(self.sizes, self.mesh, means, shards, local_rows)

    def lower(
        self, graphs: Mapping[BlockVariant, Graph], extent: Extent
    ) -> dict[BlockVariant, LoweredBlock]:
        """Lower the blocks of the step."""
        run, habits = self.run, self.habits
        return {v: lower_block(g, run, extent, v, habits) for v, g in graphs.items()}

    def uneven_splits(
        self, graphs: Mapping[BlockVariant, Graph], rows: ExpertRows | None
    ) -> Sequence[Split]:
        """Distinct splits by FSDP that do not divide."""
        blocks = self.lower(graphs, self.extent(rows, LocalRows(self.plan.zero_axes)))
        return [*dict.fromkeys(split for block in blocks.values() for split in block.uneven)]

    def assemble(
        self,
        blocks: Mapping[BlockVariant, LoweredBlock],
        layers: Mapping[int, Hashable] | None = None,
    ) -> Program:
        """Build the program of every rank; `layers`: extra key per layer (see `assemble`)."""
        placed = [
            [StageBlock(blocks[v], i, v.name_at(i)) for v, i in stage] for stage in self.stages
        ]
        clip = _clip_norm(self.run, self.plan) if self.run.clip_grad else None
        streams, habits = self.run.streams, self.habits
        return assemble(
            placed, self.order, self.mesh, clip=clip, streams=streams, habits=habits, layers=layers,
            message_parts=self._message_parts,
        )  # fmt: skip

    @property
    def _message_parts(self) -> MessageParts:
        """How ranks of tp share the messages between stages, which are equal on all of them."""
        run, axes = self.run, self.plan.tensor
        if not run.scatter_gather_tensors_in_pipeline or run.sequence_parallel_ranks > 1:
            return WHOLE
        return MessageParts(axes, self.mesh.size(*axes))


def order_of(run: Run) -> Order:
    """Actions of each pipeline rank of a resolved run.

    torch.distributed.pipelining runs the parts of an overlap one after the other, unless a function
    is registered for it (`_PipelineScheduleRuntime`); torchtitan has one for expert parallelism.
    """
    group = run.microbatch_group
    order = make(str(run.schedule), run.pp, run.microbatches, run.vpp, group=group)
    if run.pipeline_caches and run.ep == 1:
        return tuple(tuple(flat(steps)) for steps in order)
    return order


def stages_of(run: Run, model: ModelConfig, order: Order) -> list[list[PlacedVariant]]:
    """Blocks of each stage of a resolved run, with the parameters of each that train."""
    tied = tie_tables(place_blocks(run, model), order, model)
    return tied if trains_all(run) else mark_trained(tied, run, model, recipe_of(run, model))


def compile_training(run: Run, model: ModelConfig, table: Mapping[str, str]) -> CompiledRun:
    """Compile a training step of a resolved, checked run; `table` as in `lower.compile`."""
    step = TrainingStep.of(run, model, table)
    graphs = {v: step.shard(v) for v in step.variants}
    routing = step.routing
    load = Load.read(run.expert_load, routing, model) if routing and run.expert_load else None

    def program_with_rows(rows: ExpertRows | None, local_rows: LocalRows | None) -> Program:
        """Program of all ranks if each had these local rows of the weights that FSDP splits."""
        blocks = step.lower(graphs, step.extent(rows, local_rows))
        return step.assemble(blocks, load.of_layers if load else None)

    def program(rows: ExpertRows | None) -> Program:
        """Program of every rank; `rows`: rows of experts, None: a dense model."""
        plan = step.plan
        if not plan.shard_rows:
            return program_with_rows(rows, None)
        splits = step.uneven_splits(graphs, rows)
        return by_rows(step.mesh, plan.zero_axes, splits, partial(program_with_rows, rows))

    merged = load.programs(program) if load else program(routing.even() if routing else None)
    trained = count_trained(step.stages, run, model)
    texts = {label: graphs[v] for v, label in labels(graphs).items()}
    total = parameters(model)
    return CompiledRun(run, model, *total, texts, step.order, merged, load=load, trained=trained)


def _clip_norm(run: Run, plan: Plan) -> ClipNorm:
    """Axes over which norms of gradients are summed.

    With `clip_grad_norm=vector`, ranks exchange the norm of each gradient, in its data type, over
    two groups of axes: those that shard gradients, and those that split tensors.
    """
    pipeline = {"pp"} if run.pp > 1 else set[str]()
    axes = tuple(sorted({*plan.model_axes, *pipeline} - {MIRROR}))  # ranks of MIRROR are pp's
    if run.clip_grad_norm != "vector":
        return ClipNorm(axes)
    of_gradients = run.params_dtype or "fp32"
    return ClipNorm(axes, (plan.zero_axes if plan.zero else (), plan.tensor), of_gradients)
