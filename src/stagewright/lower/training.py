"""From a training run to the program of every rank: the whole pipeline on one screen.

A model is a chain of blocks of few variants. Each variant becomes one graph (`lower.blocks`: built,
recomputed, sharded) and, with numbers, a list of kernels and collectives; the schedule's order of
microbatches then makes these the program of every rank (`lower.assembly.assemble`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from stagewright.algebra.layout import MIRROR
from stagewright.lower.assembly.assemble import lower
from stagewright.lower.assembly.lowered_block import Placed
from stagewright.lower.assembly.optimizer_step import ClipNorm
from stagewright.lower.blocks import lower_block, shard_block
from stagewright.lower.compiled_run import CompiledRun
from stagewright.lower.frozen import count, mark_trained
from stagewright.lower.habits import Habits
from stagewright.lower.kernels import extent_of
from stagewright.lower.parameters import parameters
from stagewright.lower.recipe import recipe_of, sizes_of
from stagewright.lower.routing import ROWS, Load, Routing, Rows
from stagewright.lower.strategy_table import check_table, table_of
from stagewright.lower.variants import labels, place_blocks, tie_tables
from stagewright.model.config import ModelConfig
from stagewright.parallel.degrees import parallelization
from stagewright.parallel.plan import Plan
from stagewright.program.columns import Program
from stagewright.run.settings import Run
from stagewright.schedule.places import mirrored
from stagewright.schedule.schedules import make as make_order


def compile_training(run: Run, model: ModelConfig, table: Mapping[str, str]) -> CompiledRun:
    """A training step of a resolved run that has been checked; `table` as in `lower.compile`."""
    order = make_order(
        str(run.schedule), run.pp, run.microbatches, run.vpp, group=run.microbatch_group
    )
    mesh, plan = parallelization(run, model, mirrored=mirrored(order))
    plan = replace(plan, table=table_of(run, model, table))
    sizes = sizes_of(run, model, replicas=1 + mirrored(order))
    recipe = recipe_of(run, model)
    check_table(plan, run, model, sizes)
    tied = tie_tables(place_blocks(run, model), order, model)
    stages = mark_trained(tied, run, model, recipe)
    variants = dict.fromkeys(variant for stage in stages for variant, _ in stage)
    graphs = {v: shard_block(v, run, model, plan, sizes, recipe) for v in variants}
    habits = Habits.of(run, order)
    clip = _clip_norm(run, plan) if run.clip_grad else None

    def program(rows: Rows | None) -> Program:
        """The program of every rank if experts compute this many rows; None: a dense model."""
        shards = frozenset(plan.shard if plan.shard_rows else ())
        extent = extent_of(sizes, mesh, {ROWS: rows} if rows else None, shards)
        blocks = {v: lower_block(g, run, mesh, extent, v, habits) for v, g in graphs.items()}
        placed = [[Placed(blocks[v], i, v.name_at(i)) for v, i in stage] for stage in stages]
        return lower(placed, order, mesh, clip=clip, streams=run.streams, habits=habits)

    routing = Routing.of(run, model, plan, sizes["B"] * sizes["S"]) if model.num_experts else None
    load = Load.read(run.expert_load, routing, model) if routing and run.expert_load else None
    every = load.programs(program) if load else program(routing.even() if routing else None)
    trained = count(stages, run, model)
    texts = {label: graphs[v] for v, label in labels(variants).items()}
    total = parameters(model)
    return CompiledRun(run, model, *total, texts, order, every, load=load, trained=trained)


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
