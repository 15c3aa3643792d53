"""Invariants of a graph between passes; a violation is a fault of the previous pass.

Everything that a node says is held against the op table: a pass that makes an ill-formed node is
named, before another pass reads it. Nodes are immutable, so one that was found well-formed is not
looked at again: each pass pays for the nodes that it made.
"""

from __future__ import annotations

import weakref
from typing import Any

from stagewright.algebra.index import parse
from stagewright.algebra.layout import Move, collective, layout_after
from stagewright.graph.node import BYTES, PHASES, Graph, Node
from stagewright.graph.roles import Role
from stagewright.graph.table import LEAVES, MOVES, OPS, check_attributes


class InvalidGraph(AssertionError):
    """A graph that a pass of this package must not have made."""


_OF_PARAMETERS = frozenset(
    {
        Role.PARAMETER, Role.SENT, Role.USED, Role.WHOLE_GRADIENT, Role.OWN_ROWS,
        Role.SUM_OVER_MODEL, Role.MICROBATCH_GRADIENT, Role.ACCUMULATED, Role.STEP_GRADIENT,
        Role.REDUCED, Role.READ, Role.TABLE_GRADIENT, Role.TIED, Role.STATE, Role.MASTER,
        Role.UPDATED, Role.COUNT, Role.COUNTED,
    }
)  # fmt: skip
_PHASES = frozenset(PHASES)
_well_formed: weakref.WeakSet[Node] = weakref.WeakSet()


def verify(graph: Graph, after: str = "") -> Graph:
    """The graph itself; raises InvalidGraph, which names the pass `after` which it is found.

    Inputs run before their users, every output is there, and each node is well-formed: op, phase
    and dtype are known, attributes are as its op's row declares them, operands and shape are as its
    index expression says, a move leads where its step says,
    and what stands for a parameter says which.
    """
    seen: set[Node] = set()
    for n in graph:
        if not seen.issuperset(n.srcs):
            raise _invalid(n, "runs before one of its inputs", after)
        if n not in _well_formed:
            try:
                _check(n)
            except ValueError as error:
                raise _invalid(n, str(error), after) from None
            _well_formed.add(n)
        seen.add(n)
    for name, n in graph.outputs.items():
        if n not in seen:
            raise _invalid(n, f"is output {name!r} and no node of the graph", after)
    return graph


def _invalid(n: Node, what: str, after: str) -> InvalidGraph:
    where = f" (after {after})" if after else ""
    return InvalidGraph(f"{n.op} {n.name!r}, {n.phase}: {what}{where}")


def _check(n: Node) -> None:
    """Raise ValueError unless a node is well-formed."""
    if n.op not in OPS and n.op not in MOVES and n.op not in LEAVES:
        raise ValueError("no such op in the table")
    if n.phase not in _PHASES:
        raise ValueError(f"phase {n.phase!r}, wanted one of {', '.join(PHASES)}")
    if n.dtype not in BYTES:
        raise ValueError(f"dtype {n.dtype!r}, wanted one of {', '.join(BYTES)}")
    if n.role in _OF_PARAMETERS and not n.binding.param and n.op not in MOVES:
        raise ValueError(f"role {n.role.value!r} of no parameter; set its binding")
    check_attributes(n.op, dict(n.attrs))
    if len(n.shape) != len(n.layout.dims):
        raise ValueError(f"has {len(n.shape)} dims and a layout of {len(n.layout.dims)}")
    if n.op in MOVES:
        _check_move(n)
    elif n.op not in LEAVES:
        _check_operands(n)
    elif n.srcs:
        raise ValueError("comes from outside, and has inputs")


def _check_move(n: Node) -> None:
    if len(n.srcs) != 1 or (n.srcs[0].shape, n.srcs[0].dtype) != (n.shape, n.dtype):
        raise ValueError("moves one value, and changes neither its shape nor its dtype")
    axes: Any = n["axes"]
    src: Any = n["src"]
    dst: Any = n["dst"]
    (old,) = n.srcs
    if collective(src, dst) != n.op:
        raise ValueError(f"is no way from {src} to {dst}")
    if layout_after(old.layout, Move(n.op, axes, src, dst)) != n.layout:
        raise ValueError(f"does not lead here from {old}")


def _check_operands(n: Node) -> None:
    spec = parse(str(n["spec"]))
    wanted = [len(dims) for dims in (*spec.ins, spec.out)]
    got = [len(s.shape) for s in (*n.srcs, n)]
    if got != wanted:
        raise ValueError(f"operands and result have {got} dims, its expression {wanted}")
