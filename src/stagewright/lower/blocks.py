"""Build, recompute and shard the graph of a block variant; lower it to kernels and collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, Self

from stagewright import blocks as model_blocks
from stagewright.algebra.layout import Mesh
from stagewright.blocks.experts import COUNTS
from stagewright.errors import UserError
from stagewright.graph.node import Graph, Node
from stagewright.graph.recompute import remat
from stagewright.graph.roles import Role
from stagewright.graph.shard import shard
from stagewright.graph.verify import verify
from stagewright.lower import offload
from stagewright.lower.assembly.habit import MEGATRON_LM, Habit
from stagewright.lower.assembly.lowered_block import (
    PERMANENT_BUFFERS,
    LoweredBlock,
    Use,
    permanent_bytes,
    uses,
    weight_half,
)
from stagewright.lower.kernels.extent import Extent, bytes_of
from stagewright.lower.kernels.kernel import LoweredTask
from stagewright.lower.kernels.live_values import interface, outputs
from stagewright.lower.kernels.lowering import KernelRules, tasks_of
from stagewright.lower.variants import BlockVariant
from stagewright.model.config import ModelConfig
from stagewright.model.layers import Layer
from stagewright.parallel.degrees import reduces_each_microbatch
from stagewright.parallel.placement import ParameterShape, strategy, zero_layouts
from stagewright.parallel.plan import Dims, Plan
from stagewright.run.rule import MOST_FLOPS
from stagewright.run.settings import Run

# ---- the graph of a block: built for one device, recomputed, sharded -----------------------------


MEMOIZED = 256
"""Entries per cache of graphs and lowered blocks: a run needs a dozen, a search some hundred."""


def build_block(
    variant: BlockVariant, model: ModelConfig, recipe: model_blocks.Recipe
) -> model_blocks.Block:
    """Build the block for one device: forward, and in training gradients and optimizer step."""
    recipe = replace(
        recipe,
        ties=variant.ties,
        begins=variant.begins,
        ends=variant.ends,
        training=variant.training,
        root=variant.root,
        shared_vocabulary=variant.shared,
    )
    if variant.root and recipe.gather_root_once:
        recipe = replace(recipe, gather_once=True)
    if recipe.inference:
        served = replace(recipe.inference, weights=variant.weights)
        recipe = replace(recipe, inference=served)
    return build_for_one_device(variant.block, model, recipe, variant.layer)


@lru_cache(maxsize=MEMOIZED)
def build_for_one_device(
    name: str, model: ModelConfig, recipe: model_blocks.Recipe, layer: Layer
) -> model_blocks.Block:
    """Like `build_block`, by name."""
    block = model_blocks.BLOCKS[name](model, recipe, layer)
    verify(block.graph, "building, with gradients")
    return block


SAVED: Mapping[str, frozenset[str]] = {
    "qkv_proj": frozenset({"q_core", "k_core", "v_core"}),
    "context": frozenset({"core", "context"}),
    "out_proj": frozenset({"attn_reduced"}),
    "mlpwi": frozenset({"gate", "up"}),
    "mlpwo": frozenset({"mlp_out", "mlp_reduced"}),
}
"""Values that `recompute_save` names, where a layer has them.

MaxText's `checkpoint_name`: queries and keys as attention reads them, after rotary positions.
"""


class Recomputation(NamedTuple):
    """Values that backward of a block computes or gathers again instead of reading saved ones."""

    block: bool
    """Recompute all of forward, except `saved`."""
    saved: frozenset[str]
    """Names of values saved for backward."""
    as_read: bool
    """Recompute only what backward reads, not the results of the block or of its modules."""
    modules: frozenset[str]
    """Parts that are recomputed if `block` is not set, as in `recompute_modules`."""
    weights: bool
    """Gather weights that ZeRO shards again."""
    keys: bool
    """Gather keys and values of context parallelism again."""
    keys_in_backward: bool
    """The backward of attention itself gathers keys and values, as PyTorch's ring does."""
    moved: bool
    """Context parallelism moves values at identities."""

    @classmethod
    def of(cls, run: Run, variant: BlockVariant) -> Self:
        """Recomputation of a block variant of a run."""
        gathered = run.cp_comm_type == "all_gather"
        return cls(
            variant.recomputed,
            frozenset(name for what in run.recompute_save or () for name in SAVED[what]),
            # Compiled programs, which save values by name, recompute what backward reads.
            run.recompute_early_stop or bool(run.recompute_save),
            frozenset(run.recompute_modules if run.recompute == "selective" else ()),
            run.zero == 3 and run.reshard_after_forward and not variant.root,
            gathered and run.activation_gather == "again",
            gathered and run.cp > 1 and run.cp_grad_comm_type == "ring",
            run.cp > 1,
        )

    def phase(self, n: Node) -> str | None:
        """Phase in which backward recomputes a forward value; None: it is saved."""
        if n.role is Role.DEQUANTIZED:  # not saved: backward reads what is stored
            return "backward"
        if n.role in (Role.SENT, Role.USED, Role.LOW_PRECISION):  # a weight as it is computed with
            return "backward" if self.weights else None
        if self.block:
            return None if n.once or n.name in self.saved else "recompute"
        # Without context parallelism, identities move nothing, and belong where their source does.
        alias = n.op == "identity" and not self.moved and n.scope == n.srcs[0].scope
        value = n.srcs[0] if alias else n
        if value.role is Role.REMADE:  # by the kernels of training
            return "backward"
        if n.role is Role.KEYS and (self.keys or self.keys_in_backward):
            return "backward"
        return "recompute" if any(MODULES[name].holds(n) for name in self.modules) else None


class RecomputedModule(NamedTuple):
    """Part of a layer that `recompute_modules` names: what it holds of a block's values."""

    scopes: frozenset[str]
    """Scopes of its values."""
    ops: frozenset[str] = frozenset()
    """Operations of its values; empty: all."""
    keeps_result: bool = False
    """Forward's result is kept, and backward runs the whole module again, to its end. Else the
    result is not kept, and backward makes again what it reads."""

    def holds(self, n: Node) -> bool:
        """It computes this value."""
        return n.scope in self.scopes and (not self.ops or n.op in self.ops)

    def results(self, graph: Graph) -> set[Node]:
        """Values that the rest of the forward pass reads."""
        forward = [n for n in graph if n.phase == "forward"]
        inside = {n for n in forward if n.srcs and self.holds(n)}
        return {s for n in forward if n not in inside for s in n.srcs if s in inside}


_ROUTED, _SHARED, _DENSE = "mlp.moe.experts", "mlp.moe.shared", "mlp.dense"
MODULES: Mapping[str, RecomputedModule] = {
    "core_attn": RecomputedModule(frozenset({"attention.core"}), keeps_result=True),
    "norm": RecomputedModule(frozenset({"attention", "mlp"}), ops=frozenset({"norm"})),
    "activation": RecomputedModule(
        frozenset({"mlp", _DENSE, _ROUTED, _SHARED}), ops=frozenset({"act", "glu"})
    ),
    "moe_act": RecomputedModule(frozenset({_ROUTED}), ops=frozenset({"act", "glu", "weigh"})),
    "mla_up_proj": RecomputedModule(frozenset({"attention.up"})),
    "mlp": RecomputedModule(frozenset({_DENSE}), keeps_result=True),
    "moe": RecomputedModule(frozenset({"mlp.moe", _ROUTED, _SHARED}), keeps_result=True),
    "shared_experts": RecomputedModule(frozenset({_SHARED}), keeps_result=True),
}
"""Modules by the name that `recompute_modules` has for them, with the collectives inside.

As in Megatron-LM (NVIDIA/Megatron-LM@d98e8a64, megatron/core/transformer): results of `layernorm`,
`moe_act` and `mla_up_proj` are discarded (`CheckpointWithoutOutput`), those of `core_attn`, `mlp`,
`moe` and `shared_experts` are not (a checkpoint as PyTorch's).
"""


def recompute(block: model_blocks.Block, rules: Recomputation) -> model_blocks.Block:
    """Recompute in backward the values that are not saved."""
    graph = block.graph
    results = set[Node]()  # results of forward that backward recomputes though they are saved
    trained = any(n.phase == "backward" for n in graph)
    if trained and not rules.as_read and rules.block:
        results |= {n for value, n in outputs(graph).items() if not value.gradient}
    elif trained and not rules.as_read:
        kept = (m for name in sorted(rules.modules) if (m := MODULES[name]).keeps_result)
        results |= {n for module in kept for n in module.results(graph)}
    if trained and not rules.saved and COUNTS in graph.outputs:
        results.add(graph.outputs[COUNTS])  # a checkpoint exchanges them again
    rerun = results.__contains__
    graph, primal = remat(graph, rules.phase, block.primal, rerun=rerun)
    if rules.block and rules.keys_in_backward:
        keys = {n: "backward" for n in graph if n.role is Role.KEYS and n.phase == "recompute"}
        graph, primal = remat(graph, keys.get, primal, made_in="recompute")
    return replace(block, graph=graph, primal=primal)


def shard_block(
    variant: BlockVariant,
    run: Run,
    model: ModelConfig,
    mesh: Mesh,
    plan: Plan,
    sizes: Mapping[str, int],
    recipe: model_blocks.Recipe,
) -> Graph:
    """Build the graph of a block variant as each rank executes it, symbolic in its sizes.

    Runs share graphs: those of equal choices, with the same axes of more than one rank and the same
    dims split by ZeRO, are equal.
    """
    block = build_block(variant, model, recipe)
    return sharded(
        block,
        Recomputation.of(run, variant),
        plan,
        zero_layouts(block.graph, plan, mesh, sizes),
        keep_gathered=run.activation_gather == "keep",
    )


@lru_cache(maxsize=MEMOIZED)
def sharded(
    block: model_blocks.Block,
    rules: Recomputation,
    plan: Plan,
    zero: tuple[tuple[ParameterShape, Dims], ...],
    *,
    keep_gathered: bool,
) -> Graph:
    """Apply all passes to a block; the arguments are all that they read."""
    block = recompute(block, rules)
    verify(block.graph, "recomputation")
    graph = shard(
        block.graph,
        strategy(plan, zero),
        block.primal,
        keep_gathered=keep_gathered,
        inner=plan.inner,
        model_axes=plan.model_axes,
    )
    return verify(graph, "sharding")


# ---- the kernels of a block: the graph with numbers ----------------------------------------------


class ValueLocations(NamedTuple):
    """Location of the values of a block variant."""

    activations_on_host: bool
    """Values saved for backward are in host memory."""
    input_on_host: bool
    """The input of the block is in host memory, too."""
    states_on_host: bool
    elsewhere: frozenset[str]
    """Tables of which another block of the rank owns the tensor."""
    root: bool

    @classmethod
    def of(cls, run: Run, variant: BlockVariant) -> Self:
        """Locations for a block variant of a run."""
        saved_on_host = variant.recomputed and run.recompute_save_on_host
        return cls(
            variant.activations_on_host or saved_on_host,
            variant.activations_on_host,
            variant.states_on_host,
            frozenset(tie.name for tie in variant.ties if not tie.owner),
            variant.root,
        )


def lower_block(
    graph: Graph,
    run: Run,
    extent: Extent,
    variant: BlockVariant,
    habits: Habit = MEGATRON_LM,
) -> LoweredBlock:
    """Lower a sharded block to kernels, collectives and memory of one rank, for these sizes.

    Runs share blocks: equal blocks are one object.
    """
    rules, locations = kernel_rules(run, habits), ValueLocations.of(run, variant)
    block = lowered(graph, rules, locations, extent.of_graph(graph), habits)
    _check_numbers(block.tasks, run)
    return block


@lru_cache(maxsize=MEMOIZED)
def lowered(
    graph: Graph, rules: KernelRules, locations: ValueLocations, extent: Extent, habits: Habit
) -> LoweredBlock:
    """Lower a block; the arguments are all that it depends on."""
    mesh = extent.mesh
    allocation = habits.allocation(PERMANENT_BUFFERS)
    tasks, made_by = tasks_of(graph, extent, mesh, rules)
    makers = {value: made_by[n] for value, n in outputs(graph).items()}
    size = _bytes_of_values(graph, mesh, extent, habits)
    offloaded = frozenset[Node]()
    if locations.activations_on_host:
        with_input = locations.input_on_host
        tasks, offloaded = offload.activations(graph, tasks, size, with_input=with_input)
    if locations.states_on_host:
        tasks = offload.states(tasks, size)
    tied = {n.binding.tied for n in graph if n.op == "param" and n.binding.tied}
    input_gradients = [t for v, t in makers.items() if v.gradient and v.name not in tied]
    permanent = permanent_bytes(
        graph,
        size,
        elsewhere=locations.elsewhere,
        states_on_host=locations.states_on_host,
        allocation=allocation,
    ) | habits.permanent_bytes(graph, size)
    return LoweredBlock(
        graph=graph,
        tasks=tasks,
        makers=makers,
        outputs=outputs(graph),
        inputs=_inputs(graph, extent),
        weight_half=weight_half(tasks, input_gradients),
        size=size,
        uses=_uses(tasks, size, graph, habits),
        permanent=permanent,
        uneven=tuple(extent.optimizer.uneven) if extent.optimizer else (),
        offloaded=offloaded,
        allocation=allocation,
        root=locations.root,
    )


def kernel_rules(run: Run, habits: Habit = MEGATRON_LM) -> KernelRules:
    """Rules of a run for fusing operations into kernels."""
    return KernelRules(
        fuse=run.fuse,
        bucket=habits.bucket(run.bucket),
        key_grads=run.cp_grad_comm_type,
        adds_casts=run.zero == 3 and not reduces_each_microbatch(run),
        copies_slices=run.operators == "eager",
    )


def _uses(
    tasks: Sequence[LoweredTask], size: Mapping[Node, int], graph: Graph, habits: Habit
) -> dict[LoweredTask, Use]:
    """Values that each task allocates and touches, and its scratch bytes."""
    by_task = uses(tasks, size, graph, habits.allocation(PERMANENT_BUFFERS))
    for t in tasks:
        if scratch := habits.scratch(t, size):
            by_task[t] = by_task[t]._replace(scratch=scratch + (by_task[t].scratch or 0))
    return by_task


def _check_numbers(tasks: Sequence[LoweredTask], run: Run) -> None:
    """Raise UserError where sums over a step could exceed 64 bits."""
    for t in tasks:
        if max(t.flops, t.traffic, t.comm_bytes) > MOST_FLOPS:
            raise UserError(
                f"{run.model}: {t.name} makes a kernel or message of more than {MOST_FLOPS} FLOPs "
                "or bytes on one rank; lower a size, or split it over more ranks"
            )


def _inputs(graph: Graph, extent: Extent) -> dict[str, tuple[int, str]]:
    """Bytes and dtype, on one rank, of each value from earlier blocks."""
    return {
        value.name: (bytes_of(n, extent), n.dtype)
        for n in graph
        if (value := interface(n)) and not value.gradient
    }


def _bytes_of_values(graph: Graph, mesh: Mesh, extent: Extent, habits: Habit) -> dict[Node, int]:
    """Bytes of each value on one rank."""
    size = {n: bytes_of(n, extent.of(n)) for n in graph}
    for n in graph if extent.row_axes else ():  # gathered with their padding
        if n.op == "all_gather" and n.role is Role.USED:
            axes: Any = n["axes"]
            size[n] = size[n.srcs[0]] * mesh.size(*axes)
    workspace = {n: habits.workspace_bytes(n, extent) for n in graph}
    return size | {n: size[n] + extra for n, extra in workspace.items() if extra}
