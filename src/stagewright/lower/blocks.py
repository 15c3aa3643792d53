"""A block variant as a graph, pass by pass, and with numbers as kernels and collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, Self

from stagewright import blocks as nn
from stagewright.algebra.layout import Mesh
from stagewright.arithmetic import largest
from stagewright.errors import UserError
from stagewright.graph.node import Graph, Node
from stagewright.graph.recompute import remat
from stagewright.graph.roles import Role
from stagewright.graph.shard import shard
from stagewright.graph.verify import verify
from stagewright.lower import offload
from stagewright.lower.assembly.habit import MEGATRON_LM, Habit
from stagewright.lower.assembly.lifetimes import PERMANENT_BUFFERS, Use, permanent_bytes, uses
from stagewright.lower.assembly.lowered_block import LoweredBlock, weight_half
from stagewright.lower.kernels.extent import Extent, bytes_of
from stagewright.lower.kernels.kernel import Dependency, Kernel
from stagewright.lower.kernels.live_values import LiveValue, handed_on, interface
from stagewright.lower.kernels.lowering import KernelRules, kernels
from stagewright.lower.variants import BlockVariant
from stagewright.model.config import ModelConfig
from stagewright.model.layers import Layer
from stagewright.parallel.degrees import reduces_each_microbatch
from stagewright.parallel.placement import strategy
from stagewright.parallel.plan import Plan
from stagewright.run.rule import MOST_FLOPS
from stagewright.run.settings import Run

# ---- the graph of a block: built for one device, recomputed, sharded -----------------------------


class BlockContext(NamedTuple):
    """What the passes over the graph of a block depend on."""

    variant: BlockVariant
    run: Run
    plan: Plan
    sizes: Mapping[str, int]


def build_block(variant: BlockVariant, model: ModelConfig, recipe: nn.Recipe) -> nn.Block:
    """The block for one device: forward pass, and in training gradients and optimizer step."""
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


@lru_cache(maxsize=64)
def build_for_one_device(
    name: str, model: ModelConfig, recipe: nn.Recipe, layer: Layer
) -> nn.Block:
    """The same by name; the runs of a search share the blocks."""
    block = nn.BLOCKS[name](model, recipe, layer)
    verify(block.graph, "building, with gradients")
    return block


SAVED: Mapping[str, frozenset[str]] = {
    "qkv_proj": frozenset({"q_core", "k_core", "v_core"}),
    "context": frozenset({"core", "context"}),
    "out_proj": frozenset({"attn_reduced"}),
    "mlpwi": frozenset({"gate", "up"}),
    "mlpwo": frozenset({"mlp_out", "mlp_reduced"}),
}
"""The values of a layer that `recompute_save` names; what a layer has not is not kept.

MaxText's `checkpoint_name`: queries and keys as attention reads them, behind rotary positions.
"""


def recompute(block: nn.Block, context: BlockContext) -> nn.Block:
    """Backward computes or gathers again what the run does not keep for it."""
    variant, run, _, _ = context
    results: set[Node] = set()  # of forward, that backward makes again though they are kept
    # Compiled programs, which save values by name, make again what backward reads.
    as_read = run.recompute_early_stop or bool(run.recompute_save)
    if as_read or all(n.phase != "backward" for n in block.graph):
        pass
    elif variant.recomputed:
        results = {n for value, n in handed_on(block.graph).items() if not value.gradient}
    else:
        results = {n for n in block.graph if n.role is Role.CORE}
    graph, primal = remat(
        block.graph,
        lambda n: recompute_phase(n, run, variant),
        block.primal,
        rerun=results.__contains__,
    )
    if variant.recomputed and _keys_for_backward(run):
        again = {n: "backward" for n in graph if n.role is Role.KEYS and n.phase == "recompute"}
        graph, primal = remat(graph, again.get, primal, made_in="recompute")
    return replace(block, graph=graph, primal=primal)


def place(block: nn.Block, context: BlockContext) -> nn.Block:
    """Every value where the plan puts it, with the collectives that move it there."""
    _, run, plan, sizes = context
    graph = shard(
        block.graph,
        strategy(plan, sizes),
        block.primal,
        keep_gathered=run.activation_gather == "keep",
        inner=plan.inner,
        model_axes=plan.model_axes,
    )
    return replace(block, graph=graph, primal={})


BLOCK_PASSES: dict[str, Callable[[nn.Block, BlockContext], nn.Block]] = {
    "recomputation": recompute,
    "sharding": place,
}
"""What is done, in order, to a block built for one device; its graph is verified after each."""


def shard_block(
    variant: BlockVariant,
    run: Run,
    model: ModelConfig,
    plan: Plan,
    sizes: Mapping[str, int],
    recipe: nn.Recipe,
) -> Graph:
    """The graph of a block variant as each rank executes it, symbolic in its sizes."""
    block = build_block(variant, model, recipe)
    for name in BLOCK_PASSES:
        block = after_pass(name, block, BlockContext(variant, run, plan, sizes))
    return block.graph


def after_pass(name: str, block: nn.Block, context: BlockContext) -> nn.Block:
    """A block after one of `BLOCK_PASSES`, verified."""
    block = BLOCK_PASSES[name](block, context)
    verify(block.graph, name)
    return block


def recompute_phase(n: Node, run: Run, variant: BlockVariant) -> str | None:
    """The phase in which backward makes a forward value again; None where the value is kept."""
    if n.role is Role.DEQUANTIZED:  # is not kept: backward reads what is stored
        return "backward"
    if n.role in (Role.SENT, Role.USED, Role.LOW_PRECISION):  # a weight as the computation sees it
        gathered_again = run.zero == 3 and run.reshard_after_forward and not variant.root
        return "backward" if gathered_again else None
    if variant.recomputed:
        saved = any(n.name in SAVED[what] for what in run.recompute_save or ())
        return None if n.once or saved else "recompute"
    # Without context parallelism, an identity names a place where nothing moves.
    value = n.srcs[0] if n.op == "identity" and run.cp == 1 else n
    if value.role is Role.REMADE:  # by the kernels that are trained with
        return "backward"
    gathered_again = run.activation_gather == "again" and run.cp_comm_type == "all_gather"
    if n.role is Role.KEYS and (gathered_again or _keys_for_backward(run)):
        return "backward"
    if run.recompute != "selective":
        return None
    modules = {
        "core_attn": n.scope == "attention.core",
        "norm": n.op == "norm" and n.scope in ("attention", "mlp"),
        "activation": n.op in ("act", "glu") and n.scope == "mlp",
    }
    return "recompute" if any(modules[m] for m in run.recompute_modules) else None


def _keys_for_backward(run: Run) -> bool:
    """Whether the backward of attention itself gathers keys and values, as PyTorch's ring does."""
    gathered = run.cp > 1 and run.cp_comm_type == "all_gather"
    return gathered and run.cp_grad_comm_type == "ring"


# ---- the kernels of a block: the graph with numbers ----------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class NumberedBlock:
    """A sharded block with numbers, of which nothing is kept on the host yet.

    Variants of a layer share its tasks: whoever changes one works on a `copy`.
    """

    graph: Graph
    tasks: Sequence[Kernel]
    makers: Mapping[LiveValue, Dependency | None]
    """Which task makes each value that the block hands on."""
    size: Mapping[Node, int]
    """Bytes of each value on one rank."""
    handed_in: Mapping[str, tuple[int, str]]
    """As `LoweredBlock` has it."""
    habits: Habit

    def copy(self) -> Self:
        """The same with tasks of its own."""
        own = {t: replace(t, made=[*t.made], reads=[*t.reads]) for t in self.tasks}
        for t in own.values():
            t.deps = [own[d] if isinstance(d, Kernel) else d for d in t.deps]
            t.twin = own[t.twin] if t.twin else None
        makers = {v: own[t] if isinstance(t, Kernel) else t for v, t in self.makers.items()}
        return replace(self, tasks=[*own.values()], makers=makers)


def number_block(
    graph: Graph, run: Run, mesh: Mesh, extent: Extent, habits: Habit = MEGATRON_LM
) -> NumberedBlock:
    """The kernels, messages and bytes of a sharded block on one rank, for these sizes."""
    tasks, made_by = kernels(graph, extent, mesh, kernel_rules(run, habits))
    _check_numbers(tasks, run)
    makers = {value: made_by[n] for value, n in handed_on(graph).items()}
    size = _bytes_of_values(graph, mesh, extent, habits)
    return NumberedBlock(graph, tasks, makers, size, _handed_to(graph, extent), habits)


def lower_block(
    graph: Graph,
    run: Run,
    mesh: Mesh,
    extent: Extent,
    variant: BlockVariant,
    habits: Habit = MEGATRON_LM,
) -> LoweredBlock:
    """The kernels, messages and memory of a sharded block on one rank, for these sizes."""
    return place_values(number_block(graph, run, mesh, extent, habits), variant, run)


def place_values(block: NumberedBlock, variant: BlockVariant, run: Run) -> LoweredBlock:
    """A block with its memory: what is on the device, and what is copied to the host and back."""
    habits = block.habits
    allocation = habits.allocation(PERMANENT_BUFFERS)
    saved_on_host = variant.recomputed and run.recompute_save_on_host
    offloads = variant.activations_on_host or saved_on_host
    if offloads or variant.states_on_host:
        block = block.copy()
    graph, tasks, size = block.graph, block.tasks, block.size
    offloaded = frozenset[Node]()
    if offloads:
        all_of_it = variant.activations_on_host
        tasks, offloaded = offload.activations(graph, tasks, size, with_input=all_of_it)
    if variant.states_on_host:
        tasks = offload.states(tasks, size)
    tied = {n.binding.tied for n in graph if n.op == "param" and n.binding.tied}
    handed_back = [t for v, t in block.makers.items() if v.gradient and v.name not in tied]
    permanent = permanent_bytes(
        graph,
        size,
        elsewhere={tie.name for tie in variant.ties if not tie.owner},
        states_on_host=variant.states_on_host,
        allocation=allocation,
    ) | habits.permanent_bytes(graph, size)
    return LoweredBlock(
        graph,
        tasks,
        block.makers,
        handed_on(graph),
        block.handed_in,
        weight_half(tasks, handed_back),
        size,
        _uses(tasks, size, graph, habits),
        permanent,
        offloaded,
        allocation,
        variant.root,
    )


def kernel_rules(run: Run, habits: Habit = MEGATRON_LM) -> KernelRules:
    """Which operations of a run's blocks become one kernel."""
    return KernelRules(
        fuse=run.fuse,
        bucket=habits.bucket(run.bucket),
        key_grads=run.cp_grad_comm_type,
        adds_casts=run.zero == 3 and not reduces_each_microbatch(run),
        copies_slices=run.operators == "eager",
    )


def _uses(
    tasks: Sequence[Kernel], size: Mapping[Node, int], graph: Graph, habits: Habit
) -> dict[Kernel, Use]:
    """What each task makes and reads, and the bytes it needs while it runs."""
    found = uses(tasks, size, graph, habits.allocation(PERMANENT_BUFFERS))
    for t in tasks:
        if more := habits.scratch(t, size):
            found[t] = found[t]._replace(scratch=more + (found[t].scratch or 0))
    return found


def _check_numbers(tasks: Sequence[Kernel], run: Run) -> None:
    """Sums over a step must stay within 64 bits."""
    for t in tasks:
        if largest([t.flops, t.traffic, t.comm_bytes]) > MOST_FLOPS:
            raise UserError(
                f"{run.model}: {t.name} makes a kernel or message of more than {MOST_FLOPS} FLOPs "
                "or bytes on one rank; lower a size, or split it over more ranks"
            )


def _handed_to(graph: Graph, extent: Extent) -> dict[str, tuple[int, str]]:
    """Bytes and dtype, on one rank, of each value that blocks before this one hand to it."""
    return {
        value.name: (bytes_of(n, extent), n.dtype)
        for n in graph
        if (value := interface(n)) and not value.gradient
    }


def _bytes_of_values(graph: Graph, mesh: Mesh, extent: Extent, habits: Habit) -> dict[Node, int]:
    """Bytes that each value takes on one rank."""
    size = {n: bytes_of(n, extent.of(n)) for n in graph}
    for n in graph if extent.rows else ():  # gathered together with their padding
        if n.op == "all_gather" and n.role is Role.USED:
            axes: Any = n["axes"]
            size[n] = size[n.srcs[0]] * mesh.size(*axes)
    beside = {n: habits.bytes_beside(n, extent) for n in graph}
    return size | {n: size[n] + extra for n, extra in beside.items() if extra}
