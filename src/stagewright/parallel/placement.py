"""Strategy: layout of each value of a block, from declarations of its weights and a plan.

Only this module and `activations`, which has the rows of activations, know a strategy; others call
`strategy`. Weights are split as they declare (`blocks`), their states and gradients by ZeRO; a
user's table has precedence over all of these. Values that no row names follow their operands.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from typing import NamedTuple, Self

from stagewright.algebra.layout import Layout, Mesh
from stagewright.algebra.notation import Tensor
from stagewright.algebra.size import Size, size
from stagewright.errors import UserError, divisors
from stagewright.graph.node import Graph, Node
from stagewright.graph.parameter import Parameter
from stagewright.graph.roles import Role
from stagewright.graph.shard import Strategy
from stagewright.parallel.activations import (
    EXPERT_SUMS,
    STREAM,
    activation_layouts,
    residual,
    score_dims,
)
from stagewright.parallel.plan import Dims, Plan

BATCH, WIDTH = size("B"), size("M")


def strategy(plan: Plan, sharded: Iterable[tuple[ParameterShape, Dims]] = ()) -> Strategy:
    """Layout of each value of a run, by name, role and declaration.

    `sharded`: the dims that ZeRO splits, `zero_layouts` of the same graph.
    """
    table = {name: plan.layout(row) for name, row in plan.table.items()}
    activations, parameter_dims = activation_layouts(plan), cache(plan.parameter_dims)
    shards = dict(sharded)

    def layout(n: Node, have: Layout | None) -> Layout | None:
        """Layout of a node; None: it follows its operands, which give it `have`."""
        bound = n.binding
        if bound.param:
            dims = parameter_dims(bound.param, len(n.shape))
            return _parameter_layout(n, bound.param, have, plan, dims, shards)
        if n.role is Role.SQUARED_NORM:
            return None
        if bound.split_as:  # a state of each request
            return Layout((plan.data, (), *parameter_dims(bound.split_as, len(n.shape) - 2)))
        if bound.asked:
            return _asked_layout(n, have, table.get(n.name), plan)
        if n.name in table and len(table[n.name].dims) == len(n.shape):
            return table[n.name]
        dims = activations.get(bound.like or n.name)
        if n.name in STREAM and len(n.shape) == 4:
            dims = residual(plan, 4)
        if n.name in STREAM and plan.sequence and len(n.shape) > 2 and n.shape[1] == WIDTH:
            raise _turned_stream(n)
        if dims is not None:
            partial = frozenset(plan.combined) if n.name in EXPERT_SUMS else frozenset[str]()
            partial &= have.partial if have else frozenset()
            return Layout(dims, partial) if len(dims) == len(n.shape) else None
        if bound.live_in and n.shape:  # from another block, or its gradient
            if n.shape[0] == BATCH:
                return Layout(residual(plan, len(n.shape)))
            # A bias of scores, the same for all sequences. Its gradients stay partial sums over
            # data until they reach the block that made it.
            return Layout(score_dims(plan), frozenset(plan.data if n.phase == "backward" else ()))
        if n.op == "input" and have is None and n.shape[:1] == (BATCH,):
            return Layout((plan.data, *[()] * (len(n.shape) - 1)))
        return None

    return layout


def _turned_stream(n: Node) -> UserError:
    shown = ", ".join(map(str, n.shape))
    return UserError(
        f"the stream {n.name} lies as [{shown}], with the width before the positions, as "
        "convolutions leave it: cp and sequence_parallel, which split the second dim, do not "
        "apply; leave them out"
    )


# ---- parameters, gradients and optimizer states --------------------------------------------------


def _parameter_layout(
    n: Node,
    parameter: Parameter,
    have: Layout | None,
    plan: Plan,
    used: Dims,
    sharded: Mapping[ParameterShape, Dims],
) -> Layout | None:
    """Layout of a node that belongs to a parameter, by its role; None: it follows its operands.

    A parameter is split as it declares. ZeRO (arXiv 1910.02054) splits optimizer states, from stage
    2 gradients and in stage 3 stored parameters over one more dim; hybrid sharding, over some of
    the replicas. Gradients are reduced once a step, or in each microbatch.

    `have`: the layout that would follow; `used`: the layout in which the computation reads the
    parameter; `sharded`: result of `zero_layouts`.
    """
    ndim = len(n.shape)
    if not ndim:  # a count of steps
        return Layout(())
    if n.binding.buffer:
        return None if n.role is Role.COUNT else Layout(((),) * ndim)
    shard = sharded[ParameterShape.of(n.shape, parameter, used)] if plan.zero else used
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
    """Layout of a gradient between one microbatch and the optimizer.

    `used`: the layout in which the computation reads the parameter; `shard`: the optimizer's.
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
    """Properties of a parameter, besides numbers, that decide which dim ZeRO splits."""

    shape: tuple[Size, ...]
    used: Dims
    """Layout in which the computation reads the parameter."""
    rows: int
    of_expert: bool

    @classmethod
    def of(cls, shape: tuple[Size, ...], parameter: Parameter, used: Dims) -> Self:
        """Shape of a parameter."""
        return cls(shape, used, parameter.rows, parameter.of_expert)


def zero_layouts(
    graph: Graph, plan: Plan, mesh: Mesh, sizes: Mapping[str, int]
) -> tuple[tuple[ParameterShape, Dims], ...]:
    """Layouts of the parameters of a single-device graph as ZeRO shards them; empty without ZeRO.

    These are the only decisions of a strategy that depend on numbers; `sizes`: of the named dims.
    """
    if not plan.zero:
        return ()
    parameters = _parameters(graph)
    shapes = (
        ParameterShape.of(shape, p, plan.parameter_dims(p, len(shape))) for shape, p in parameters
    )
    return tuple((x, _with_shards(x, plan, mesh, sizes)) for x in dict.fromkeys(shapes))


@lru_cache(maxsize=256)
def _parameters(graph: Graph) -> Iterable[tuple[tuple[Size, ...], Parameter]]:
    """Parameters of a graph, each with the shapes of the values that belong to it."""
    bound = ((n.shape, n.binding) for n in graph)
    return tuple(dict.fromkeys((x, b.param) for x, b in bound if x and b.param and not b.buffer))


def _with_shards(x: ParameterShape, plan: Plan, mesh: Mesh, sizes: Mapping[str, int]) -> Dims:
    """Layout of a parameter with one more dim split than in `ParameterShape.used`.

    A dim that the ranks divide goes first, then one that no axis splits yet, then the largest.
    With `plan.shard_rows` it is the dim that PyTorch has first, as in FSDP2; and with
    `plan.shard_few_experts` the second, an expert's outputs, where ranks outnumber experts.
    """
    used = x.used
    sharding = tuple(a for a in plan.zero_axes if not any(a in axes for axes in used))
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


# ---- tables of the user --------------------------------------------------------------------------


def names_in_table(
    graph: Graph, plan: Plan, mesh: Mesh, sizes: Mapping[str, int], model_name: str
) -> set[str]:
    """Names in the plan's table that a single-device graph has.

    Raises UserError for a row that has other dims than its value, or does not divide one.
    """
    names: set[str] = set()
    misfit: dict[str, str] = {}
    for n in graph:
        name = n.binding.name or n.name
        row = plan.table.get(name)
        if row is None or n.phase == "optimizer":
            continue
        shown = f"[{', '.join(map(str, n.shape))}]"
        if len(row.dims) != len(n.shape):  # a weight and a value may share a name
            misfit[name] = shown
            continue
        names.add(name)
        for dim, degrees, axes in zip(n.shape, row.axes, plan.layout(row).dims, strict=True):
            count, ranks = dim.value(sizes), mesh.size(*axes)
            if count % ranks:
                raise UserError(
                    f"{'*'.join(degrees)}={ranks} does not divide {dim} = {count} of {name} "
                    f"{shown}; use {divisors(count)}"
                )
    for name, shown in misfit.items():
        if name not in names:
            row = plan.table[name]
            raise UserError(
                f"{name} {row} has {len(row.dims)} dims, but in {model_name} it is {shown}; "
                "name each"
            )
    return names


def _asked_layout(n: Node, have: Layout | None, to: Layout | None, plan: Plan) -> Layout | None:
    """Layout after a collective that a user's module names; UserError if it has no effect."""
    if have is None:
        return to
    asked = n.binding.asked
    assert asked is not None
    kind, degrees, where = asked
    over = plan.layout(Tensor((), (), degrees)).partial
    reduces = kind in ("all_reduce", "reduce_scatter")
    present = have.partial if reduces else have.axes() - have.partial
    if not over <= present:
        shown = have.show(tuple(map(str, n.shape)))
        lacks = "not a partial sum" if reduces else "not split"
        raise UserError(
            f"{n.name}, {where}: {kind} of a value that is {lacks} over "
            f"{'+'.join(degrees)}, {shown}"
        )
    if to is not None:
        return to
    over = over or present
    if kind == "all_reduce":
        return Layout(have.dims, have.partial - over)
    return Layout(
        tuple(tuple(a for a in axes if a not in over) for axes in have.dims), have.partial
    )
