"""Where parameters, their gradients and their optimizer states live: declarations and ZeRO.

A parameter is split as it declares. ZeRO (arXiv 1910.02054) splits optimizer states, from stage 2
gradients and in stage 3 stored parameters over one more dim; hybrid sharding, over some of the
replicas. Gradients are reduced once a step, or in each microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stagewright.algebra.layout import Layout
from stagewright.algebra.size import Size
from stagewright.graph.node import Node
from stagewright.graph.parameter import Parameter
from stagewright.graph.roles import Role
from stagewright.parallel.plan import Dims, Plan
from stagewright.varying import divides, position_of_largest


def parameter_layout(
    n: Node, parameter: Parameter, have: Layout | None, plan: Plan, shards: ShardedDims
) -> Layout | None:
    """The layout of a node that belongs to a parameter, by its role; None: it follows its operands.

    `have` is the layout that would follow, `shards` says what ZeRO splits.
    """
    rank = len(n.shape)
    if not rank:  # a count of steps
        return Layout(())
    if n.binding.buffer:
        return None if n.role is Role.COUNT else Layout(((),) * rank)
    used = plan.used(parameter, rank)
    shard = shards.of(n.shape, parameter, used)
    # Of a partial sum one rank has the values, the others have zeros.
    sums = plan.layout(parameter.placement).partial & {*plan.combined}
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


@dataclass(frozen=True, slots=True)
class ShardedDims:
    """Which dim of each parameter ZeRO splits; parameters of one shape are decided once."""

    plan: Plan
    sizes: Mapping[str, int]
    """The number behind each named dim."""
    known: dict[tuple[object, ...], Dims] = field(default_factory=dict[tuple[object, ...], Dims])

    def of(self, shape: tuple[Size, ...], parameter: Parameter, used: Dims) -> Dims:
        """A parameter's layout, used as it is in `used`, with one more dim split.

        A dim that the ranks divide goes first, then one that no axis splits yet, then the largest.
        With `plan.shard_rows` it is the dim that PyTorch has first, as in FSDP2; and with
        `plan.shard_few_experts` the second, an expert's outputs, where ranks outnumber experts.
        """
        key = shape, used, parameter.rows, parameter.of_expert
        if key not in self.known:
            self.known[key] = self._with_shards(shape, parameter, used)
        return self.known[key]

    def _with_shards(self, shape: tuple[Size, ...], parameter: Parameter, used: Dims) -> Dims:
        plan = self.plan
        sharding = tuple(a for a in plan.shard if not any(a in axes for axes in used))
        if not sharding:
            return used
        if plan.shard_rows:
            best = parameter.rows % len(used)
            experts, ranks = shape[0].value(self.sizes), plan.mesh.size(*used[0], *sharding)
            if plan.shard_few_experts and parameter.of_expert and ranks > experts:
                best = len(used) - 1
        else:
            ranks = plan.mesh.size(*sharding)

            def merit(i: int) -> tuple[bool, bool, int]:
                local = -(-shape[i].value(self.sizes) // plan.mesh.size(*used[i]))
                return divides(ranks, local), not used[i], local

            best = position_of_largest([merit(i) for i in range(len(used))])
        return (*used[:best], used[best] + sharding, *used[best + 1 :])
