"""Where parameters, their gradients and their optimizer states live: declarations and ZeRO.

A parameter is split as it declares. ZeRO (arXiv 1910.02054) splits optimizer states, from stage 2
gradients and in stage 3 stored parameters over one more dim; hybrid sharding, over some of the
replicas. Gradients are reduced once a step, or in each microbatch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple, Self

from stagewright.algebra.layout import Layout, Mesh
from stagewright.algebra.size import Size
from stagewright.graph.node import Graph, Node
from stagewright.graph.parameter import Parameter
from stagewright.graph.roles import Role
from stagewright.parallel.plan import Dims, Plan


def parameter_layout(
    n: Node,
    parameter: Parameter,
    have: Layout | None,
    plan: Plan,
    used: Dims,
    sharded: Mapping[ParameterShape, Dims],
) -> Layout | None:
    """The layout of a node that belongs to a parameter, by its role; None: it follows its operands.

    `have` is the layout that would follow, `used` where the computation reads the parameter, and
    `sharded` what `sharded_dims` has found.
    """
    rank = len(n.shape)
    if not rank:  # a count of steps
        return Layout(())
    if n.binding.buffer:
        return None if n.role is Role.COUNT else Layout(((),) * rank)
    shard = sharded[ParameterShape.of(n.shape, parameter, used)] if plan.zero else used
    # Of a partial sum one rank has the values, the others have zeros.
    combined = {*plan.combined}
    sums = plan.layout(parameter.placement).partial & combined if combined else frozenset[str]()
    match n.role:
        case Role.USED:
            return Layout(used, sums)
        case Role.PARAMETER | Role.UPDATED:
            return Layout(shard if plan.zero == 3 else used, sums)
        case Role.STATE | Role.MASTER:
            return Layout(shard if plan.zero else used)
        case _:
            return _gradient_layout(n, used, shard, have, plan)


def _gradient_layout(
    n: Node, used: Dims, shard: Dims, have: Layout | None, plan: Plan
) -> Layout | None:
    """The layout of a gradient on its way from one microbatch to the optimizer.

    `used` is the layout in which the computation reads the parameter, `shard` the optimizer's.
    """
    replicas = frozenset((*plan.data, *plan.context))
    if n.role is Role.TABLE_GRADIENT:
        return Layout(used, replicas)
    if n.role is Role.WHOLE_GRADIENT:
        return Layout(((),) * len(n.shape), have.partial & replicas if have else frozenset())
    if have is None:
        return None
    match n.role:
        case Role.OWN_ROWS:
            return Layout(used, have.partial) if plan.reduce_each_microbatch else None
        case Role.SUM_OVER_MODEL:
            if n.once == plan.reduce_each_microbatch:
                return None
            return Layout(have.dims, have.partial & replicas)
        # Partial sums over other axes stay so for now.
        case Role.MICROBATCH_GRADIENT if plan.reduce_each_microbatch:
            return Layout(shard if plan.zero >= 2 else used, have.partial - replicas)
        case Role.STEP_GRADIENT:
            return Layout(shard if plan.zero else used, have.partial - replicas)
        case Role.REDUCED if plan.sum_as_read and plan.sequence_parallel:
            return None
        case Role.READ | Role.REDUCED:
            return Layout(have.dims)
        case _:
            return None


class ParameterShape(NamedTuple):
    """What the dim of a parameter that ZeRO splits depends on, besides numbers."""

    shape: tuple[Size, ...]
    used: Dims
    """Where the computation reads the parameter."""
    rows: int
    of_expert: bool

    @classmethod
    def of(cls, shape: tuple[Size, ...], parameter: Parameter, used: Dims) -> Self:
        """That of a parameter."""
        return cls(shape, used, parameter.rows, parameter.of_expert)


def sharded_dims(
    graph: Graph, plan: Plan, mesh: Mesh, sizes: Mapping[str, int]
) -> tuple[tuple[ParameterShape, Dims], ...]:
    """How ZeRO splits the parameters of a graph for one device; without ZeRO, nothing.

    These are the only decisions of a strategy that depend on numbers. `sizes` are those behind the
    named dims.
    """
    if not plan.zero:
        return ()
    parameters = _parameters(graph)
    shapes = (ParameterShape.of(shape, p, plan.used(p, len(shape))) for shape, p in parameters)
    return tuple((x, _with_shards(x, plan, mesh, sizes)) for x in dict.fromkeys(shapes))


@lru_cache(maxsize=256)
def _parameters(graph: Graph) -> Iterable[tuple[tuple[Size, ...], Parameter]]:
    """The parameters that a graph splits, and the shapes of what belongs to them."""
    bound = ((n.shape, n.binding) for n in graph)
    return tuple(dict.fromkeys((x, b.param) for x, b in bound if x and b.param and not b.buffer))


def _with_shards(x: ParameterShape, plan: Plan, mesh: Mesh, sizes: Mapping[str, int]) -> Dims:
    """A parameter's layout, used as it is in `ParameterShape.used`, with one more dim split.

    A dim that the ranks divide goes first, then one that no axis splits yet, then the largest.
    With `plan.shard_rows` it is the dim that PyTorch has first, as in FSDP2; and with
    `plan.shard_few_experts` the second, an expert's outputs, where ranks outnumber experts.
    """
    used = x.used
    sharding = tuple(a for a in plan.shard if not any(a in axes for axes in used))
    if not sharding:
        return used
    if plan.shard_rows:
        best = x.rows % len(used)
        experts, ranks = x.shape[0].value(sizes), mesh.size(*used[0], *sharding)
        if plan.shard_few_experts and x.of_expert and ranks > experts:
            best = len(used) - 1
    else:
        ranks = mesh.size(*sharding)

        def merit(i: int) -> tuple[bool, bool, int]:
            local = -(-x.shape[i].value(sizes) // mesh.size(*used[i]))
            return local % ranks == 0, not used[i], local

        best = max(range(len(used)), key=merit)
    return (*used[:best], used[best] + sharding, *used[best + 1 :])
