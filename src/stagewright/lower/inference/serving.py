"""From an inference step to the program of every rank: forward only, sizes that differ by rank.

As in `lower.training`, a block variant is one graph. The ranks of data parallelism serve different
requests: the step is lowered once per distinct batch, and `lower.inference.per_rank` merges these
programs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from stagewright.algebra.layout import Mesh
from stagewright.graph.node import Graph
from stagewright.lower.assembly.assemble import assemble
from stagewright.lower.assembly.lowered_block import LoweredBlock, StageBlock
from stagewright.lower.blocks import lower_block, shard_block
from stagewright.lower.compiled_run import CompiledRun
from stagewright.lower.inference.capacity import capacity
from stagewright.lower.inference.per_rank import merge_programs
from stagewright.lower.inference.serving_memory import ServingMemory
from stagewright.lower.kernels.extent import Extent, extent_of
from stagewright.lower.kernels.kernel import Kernel
from stagewright.lower.parameters import parameters
from stagewright.lower.recipe import recipe_of, sizes_of
from stagewright.lower.strategy_table import check_table, table_of
from stagewright.lower.variants import BlockVariant, PlacedVariant, labels, place_blocks
from stagewright.model.config import ModelConfig
from stagewright.parallel.degrees import parallelization
from stagewright.parallel.expert_sizes import BusiestRanks, mean_expert_sizes
from stagewright.parallel.plan import Plan
from stagewright.program.columns import Program
from stagewright.program.communicators import place_along
from stagewright.run.requests import loads
from stagewright.run.settings import Run
from stagewright.schedule.generators import forward_only

Sizes = Mapping[str, int]
"""Sizes that depend on the batch."""


@dataclass(frozen=True, slots=True, eq=False)
class ServingStep:
    """Blocks and layouts of a resolved inference run, for any batch."""

    run: Run
    model: ModelConfig
    mesh: Mesh
    plan: Plan
    sizes: Sizes
    """Sizes that do not depend on the batch."""
    stages: Sequence[Sequence[PlacedVariant]]
    graphs: Mapping[BlockVariant, Graph]
    busiest: BusiestRanks | None = None
    """None: all experts get equal numbers of tokens."""

    @classmethod
    def of(
        cls, run: Run, model: ModelConfig, table: Mapping[str, str], batches: Sequence[Sizes]
    ) -> Self:
        """Step of a run that has been checked; `table` as in `lower.compile`.

        Raises UserError where the table does not suit the sizes of `batches`.
        """
        mesh, plan = parallelization(run, model)
        plan = replace(plan, expert=_expert_axes(plan), table=table_of(run, model, table))
        sizes = sizes_of(run, model)
        for batch in batches:
            check_table(plan, mesh, run, model, {**sizes, **batch})
        stages = place_blocks(run, model)
        recipe = recipe_of(run, model)
        variants = dict.fromkeys(variant for stage in stages for variant, _ in stage)
        graphs = {v: shard_block(v, run, model, mesh, plan, sizes, recipe) for v in variants}
        busiest = BusiestRanks.of(run, model, mesh, plan)
        return cls(run, model, mesh, plan, sizes, stages, graphs, busiest)

    def extent(self, batch: Sizes) -> Extent:
        """Sizes of dims on a rank with a batch."""
        routed = batch.get("routed", 0)
        run, model, mesh, plan = self.run, self.model, self.mesh, self.plan
        means = mean_expert_sizes(run, model, mesh, plan, routed, self.busiest)
        return extent_of({**self.sizes, **batch}, mesh, means)

    def lower_blocks(self, batch: Sizes) -> dict[BlockVariant, LoweredBlock]:
        """Lower each block with a batch."""
        run, extent = self.run, self.extent(batch)
        return {v: lower_block(graph, run, extent, v) for v, graph in self.graphs.items()}


def compile_serving(run: Run, model: ModelConfig, table: Mapping[str, str]) -> CompiledRun:
    """Compile a step of a resolved, checked run; `table` as in `lower.compile`."""
    load = loads(run, model)
    step = ServingStep.of(run, model, table, load.sizes)
    mesh, plan, graphs, stages = step.mesh, step.plan, step.graphs, step.stages
    order = forward_only(run.pp, run.microbatches)

    programs: list[Program] = []  # of all ranks, if all of them serve one batch
    kernels: dict[BlockVariant, Sequence[Kernel]] = {}
    for batch in load.sizes:
        blocks = step.lower_blocks(batch)
        placed = [[StageBlock(blocks[v], i, v.name_at(i)) for v, i in stage] for stage in stages]
        programs.append(assemble(placed, order, mesh, streams=run.streams))
        kernels = {v: block.tasks for v, block in blocks.items()}
    memory = ServingMemory(stages, graphs, kernels, step.extent)

    def peak(other: Run) -> int:
        """Peak bytes of the fullest rank in another step on the same ranks."""
        other_load = loads(other, model)
        return max(
            memory.by_category(rank, [other_load.sizes[int(i)] for i in batches])["peak"]
            for batches in np.unique(other_load.of, axis=0)
            for rank in range(run.pp)
        )

    merged = merge_programs(
        programs,
        place_along(mesh, (*plan.data, *plan.stripes)),
        load.of,
        lambda rank, batches: memory.by_category(rank, [load.sizes[i] for i in batches]),
    )
    texts = {label: graphs[v] for v, label in labels([*graphs]).items()}
    fitting = capacity(run, peak) if run.device_memory else None
    return CompiledRun(run, model, *parameters(model), texts, order, merged, fitting)


def _expert_axes(plan: Plan) -> tuple[str, ...]:
    """Axes of expert parallelism; those over which tokens are exchanged are innermost.

    Ranks with the same tokens then share experts outside of the exchange: each rank gets back its
    part of the sum, and nothing is gathered.
    """
    same_tokens = [a for a in plan.expert if a not in plan.tokens]
    return *same_tokens, *(a for a in plan.expert if a not in same_tokens)
