"""A strategy: where each value of a block shall live, by what its weights declare and a plan.

Nothing else knows a strategy. Weights are split as they declare (`blocks`), their states and
gradients by ZeRO (`parameters`), activations by the rows of `activations`; a user's table goes
before all of these. Values that no row names follow their operands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import NamedTuple

from stagewright.algebra.layout import Layout, Mesh
from stagewright.algebra.notation import Tensor
from stagewright.algebra.size import size
from stagewright.errors import UserError, divisors
from stagewright.graph.node import Graph, Node
from stagewright.graph.parameter import Parameter
from stagewright.graph.roles import Role
from stagewright.graph.shard import Want
from stagewright.parallel.activations import STREAM, activation_rows, residual
from stagewright.parallel.context import score_dims
from stagewright.parallel.dispatch import expert_sums
from stagewright.parallel.parameters import ParameterShape, parameter_layout
from stagewright.parallel.plan import Dims, Plan

BATCH, WIDTH = size("B"), size("M")


def strategy(plan: Plan, sharded: Iterable[tuple[ParameterShape, Dims]] = ()) -> Want:
    """Where each value of a run lives, by name, role and declaration.

    `sharded` is what ZeRO splits: `parameters.sharded_dims` of the same graph.
    """
    table = {name: plan.layout(row) for name, row in plan.table.items()}
    rows, sums = activation_rows(plan), expert_sums(plan)
    return _Strategy(plan, cache(plan.used), dict(sharded), table, rows, sums)


class _Strategy(NamedTuple):
    """A plan with its tables by name."""

    plan: Plan
    used: Callable[[Parameter, int], Dims]
    sharded: Mapping[ParameterShape, Dims]
    table: Mapping[str, Layout]
    rows: Mapping[str, Dims]
    sums: Mapping[str, frozenset[str]]

    def __call__(self, n: Node, have: Layout | None) -> Layout | None:
        """The layout of a node; None: it follows its operands, which make it `have`."""
        plan, bound = self.plan, n.binding
        if bound.param:
            dims = self.used(bound.param, len(n.shape))
            return parameter_layout(n, bound.param, have, plan, dims, self.sharded)
        if n.role is Role.SQUARED_NORM:
            return None
        if bound.split_as:  # a state of each request
            return Layout((plan.data, (), *self.used(bound.split_as, len(n.shape) - 2)))
        if bound.asked:
            return _asked_layout(n, have, self.table.get(n.name), plan)
        if n.name in self.table and len(self.table[n.name].dims) == len(n.shape):
            return self.table[n.name]
        dims = self.rows.get(bound.like or n.name)
        if n.name in STREAM and len(n.shape) == 4:
            dims = residual(plan, 4)
        if n.name in STREAM and plan.sequence and len(n.shape) > 2 and n.shape[1] == WIDTH:
            raise _turned_stream(n)
        if dims is not None:
            left = have.partial & self.sums.get(n.name, frozenset()) if have else frozenset[str]()
            return Layout(dims, left) if len(dims) == len(n.shape) else None
        if bound.live_in and n.shape:
            return _live_in_layout(n, plan)
        outside = n.op == "input" and have is None
        if outside and n.shape[:1] == (BATCH,):
            return Layout((plan.data, *[()] * (len(n.shape) - 1)))
        return None


def _turned_stream(n: Node) -> UserError:
    shown = ", ".join(map(str, n.shape))
    return UserError(
        f"the stream {n.name} lies as [{shown}], with the width before the positions, as "
        "convolutions leave it: cp and sequence_parallel, which split the second dim, do not "
        "apply; leave them out"
    )


def _live_in_layout(n: Node, plan: Plan) -> Layout:
    """A value that other blocks hand to this one, or its gradient.

    A value without batch is a bias of scores, the same for all sequences; its gradients stay
    partial sums over data until they reach the block that made the value.
    """
    if n.shape[0] == BATCH:
        return Layout(residual(plan, len(n.shape)))
    return Layout(score_dims(plan), frozenset(plan.data if n.phase == "backward" else ()))


def names_in_table(
    graph: Graph, plan: Plan, mesh: Mesh, sizes: Mapping[str, int], whose: str
) -> set[str]:
    """The names in the plan's table that a single-device graph has, each checked against it.

    A UserError says which row has other dims than its value, or does not divide one; `whose` is the
    model's name.
    """
    found: set[str] = set()
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
        found.add(name)
        for dim, degrees, axes in zip(n.shape, row.axes, plan.layout(row).dims, strict=True):
            count, ranks = dim.value(sizes), mesh.size(*axes)
            if count % ranks:
                raise UserError(
                    f"{'*'.join(degrees)}={ranks} does not divide {dim} = {count} of {name} "
                    f"{shown}; use {divisors(count)}"
                )
    for name, shown in misfit.items():
        if name not in found:
            row = plan.table[name]
            raise UserError(
                f"{name} {row} has {len(row.dims)} dims, but in {whose} it is {shown}; name each"
            )
    return found


def _asked_layout(n: Node, have: Layout | None, to: Layout | None, plan: Plan) -> Layout | None:
    """The layout after a collective that a user's module names, which must have an effect."""
    if have is None:
        return to
    asked = n.binding.asked
    assert asked is not None
    kind, degrees, where = asked
    over = plan.layout(Tensor((), (), degrees)).partial
    there = have.partial if kind in ("all_reduce", "reduce_scatter") else have.axes() - have.partial
    if not over <= there:
        shown = have.show(tuple(map(str, n.shape)))
        lacks = "not a partial sum" if there is have.partial else "not split"
        raise UserError(
            f"{n.name}, {where}: {kind} of a value that is {lacks} over "
            f"{'+'.join(degrees)}, {shown}"
        )
    if to is not None:
        return to
    over = over or there
    if kind == "all_reduce":
        return Layout(have.dims, have.partial - over)
    return Layout(
        tuple(tuple(a for a in axes if a not in over) for axes in have.dims), have.partial
    )
