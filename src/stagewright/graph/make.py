"""The ways to make nodes: an op of the table, a leaf, a move, and what is said often."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import lru_cache
from typing import Any

from stagewright.algebra.index import Spec, bind, layout_of, parse, splits
from stagewright.algebra.layout import Layout, Move, layout_after, replicated
from stagewright.algebra.size import Size, product, size
from stagewright.graph.node import Node, node
from stagewright.graph.roles import UNBOUND, Binding, Role
from stagewright.graph.table import OPS, check_attributes


def apply(
    op: str,
    spec: str,
    *srcs: Node,
    dtype: str = "",
    out: tuple[Size, ...] | None = None,
    split: Mapping[str, tuple[str, ...]] | None = None,
    phase: str = "forward",
    once: bool = False,
    scope: str | None = None,
    name: str = "",
    role: Role | None = None,
    binding: Binding = UNBOUND,
    **attrs: Any,
) -> Node:
    """A node of the table, in the scope of its first operand where none is given.

    `out` is the shape of the result, for indices that no operand shows (a gradient scattered into
    a table), and `split` says which axes split them.
    """
    parsed = parse(spec)
    sizes = bind(parsed, [s.shape for s in srcs], out)
    if unknown := [x for dim in parsed.out for x in dim if x not in sizes]:
        known = ", ".join(sorted(sizes))
        raise ValueError(f"{spec}: no operand has the index {unknown[0]!r}, only {known}")
    scope = srcs[0].scope if scope is None else scope
    attrs = {"spec": spec, **attrs}
    shape = tuple(sizes[d[0]] if len(d) == 1 else product(sizes[x] for x in d) for d in parsed.out)
    check_attributes(op, attrs)
    layout = infer(op, parsed, [s.layout for s in srcs], attrs, split)
    return node(
        op, srcs, shape=shape, dtype=dtype or srcs[0].dtype, layout=layout, attrs=attrs,
        phase=phase, once=once, scope=scope, name=name, role=role, binding=binding,
    )  # fmt: skip


def infer(
    op: str,
    spec: Spec,
    layouts: list[Layout],
    attrs: Mapping[str, Hashable],
    out_split: Mapping[str, tuple[str, ...]] | None = None,
) -> Layout:
    """The layout of the result, like its shape; operands that disagree are an error, not a guess.

    `out_split` says how indices are split that occur in the output only.
    """
    row = OPS[op]
    split_by = {**(out_split or {}), **splits(spec, [x.dims for x in layouts], out_split)}
    for letter in spec.whole:
        if split_by.get(letter):
            raise ValueError(
                f"{op}: needs all of index {letter!r}, which is split by {split_by[letter]}"
            )
    sums = {x.partial for x in layouts} or {frozenset[str]()}
    if row.multilinear and sum(1 for x in layouts if x.partial) == 1:
        sums = {x.partial for x in layouts if x.partial}
    elif sums != {frozenset()} and not (row.linear and len(sums) == 1):
        raise ValueError(
            f"{op}: reduce the partial sum of its operands first: {[str(x) for x in layouts]}"
        )
    if row.rows is not None:
        r, of = row.rows
        if {a for x in of for a in split_by.get(x, ())} != set(split_by.get(r, ())):
            raise ValueError(f"{op}: index {r!r} is split by {split_by.get(r)}, the tokens are not")
    dims = layout_of(spec.out, split_by)
    in_output = {a for axes in dims for a in axes}
    lost = {a for x in spec.contracted for a in split_by.get(x, ())} - in_output
    if "alone" in attrs:  # sum over all ranks, equal copies counted once
        alone: Any = attrs["alone"]
        lost |= set(alone)
    reduction = row.reduction if lost else next((x.reduction for x in layouts if x.partial), "sum")
    return Layout(dims, frozenset(lost) | next(iter(sums)), reduction)


def move(
    n: Node, step: Move, *, phase: str, once: bool, name: str = "", role: Role | None = None
) -> Node:
    """One collective or slice; `role` is that of the value that is moved there."""
    attrs: dict[str, Hashable] = {"axes": step.axes, "src": step.src, "dst": step.dst}
    return node(
        step.kind,
        (n,),
        shape=n.shape,
        dtype=n.dtype,
        layout=layout_after(n.layout, step),
        attrs=attrs,
        phase=phase,
        once=once,
        scope=n.scope,
        name=name or n.name,
        role=role,
    )


def leaf(
    op: str,
    dims: tuple[Size | str | int, ...],
    dtype: str,
    name: str,
    *,
    phase: str = "forward",
    once: bool = False,
    scope: str = "",
    role: Role | None = None,
    binding: Binding = UNBOUND,
) -> Node:
    """A value from outside: "input", "param" or "state"."""
    shape = tuple(size(d) for d in dims)
    layout = replicated(len(dims))
    return node(
        op, (), shape=shape, dtype=dtype, layout=layout,
        phase=phase, once=once, scope=scope, name=name, role=role, binding=binding,
    )  # fmt: skip


def letters(n: Node) -> str:
    """A letter per dim of an element-wise operand: those of its sizes where each has its own."""
    return _letters(n.shape)


@lru_cache(maxsize=1024)
def _letters(shape: tuple[Size, ...]) -> str:
    names = [str(d).lower() for d in shape]
    if all(len(x) == 1 and x.isalpha() for x in names) and len(set(names)) == len(names):
        return "".join(names)
    return "zyxwvut"[: len(shape)]


def elementwise(op: str, *srcs: Node, **fields: Any) -> Node:
    """An op on operands of one shape."""
    x = letters(srcs[0])
    return apply(op, ",".join([x] * len(srcs)) + "->" + x, *srcs, **fields)


def elementwise_whole(op: str, *srcs: Node, **fields: Any) -> Node:
    """An op on operands of one shape that needs all of their last dim."""
    x = letters(srcs[0])
    x = x[:-1] + x[-1].upper()
    return apply(op, ",".join([x] * len(srcs)) + "->" + x, *srcs, **fields)


def einsum(spec: str, *srcs: Node, **fields: Any) -> Node:
    """A contraction of one or two operands."""
    return apply("einsum", spec, *srcs, **fields)


def add(*srcs: Node, **fields: Any) -> Node:
    """The sum of any number of operands of one shape."""
    return srcs[0] if len(srcs) == 1 else elementwise("add", *srcs, **fields)


def cast(n: Node, dtype: str, **fields: Any) -> Node:
    """The same values in another precision."""
    return n if n.dtype == dtype else elementwise("cast", n, dtype=dtype, **fields)


def identity(n: Node, name: str, **fields: Any) -> Node:
    """A place that a strategy may speak about; costs nothing and disappears when nothing moves."""
    return elementwise("identity", n, name=name, **fields)


def join(a: Node, b: Node, spec: str, width: Size, *, dim: int = -1, **fields: Any) -> Node:
    """The operands behind each other along `dim`, `width` in all; what lacks dims is repeated."""
    dims = parse(spec)
    sizes = bind(dims, [a.shape, b.shape])
    out = [sizes.get(d[0], width) for d in dims.out]
    return apply("join", spec, a, b, out=tuple(out), dim=dim, **fields)


def part(x: Node, spec: str, width: Size, *, first: bool, dim: int = -1, **fields: Any) -> Node:
    """The first or last `width` of one dim."""
    dims = parse(spec)
    sizes = bind(dims, [x.shape])
    out = tuple(sizes.get(d[0], width) for d in dims.out)
    return apply("part", spec, x, out=out, first=first, dim=dim, **fields)


# Copies of tokens are rows, so many for each expert: [B, S, M] and who goes where, [B, S, E], to
# [E, rows, M]. They stand in any order.
DISPATCH = "bsm,bse->erm"
COMBINE = "erm,bse->bsm"


def dispatch(x: Node, gates: Node, rows: Size, *, weighted: bool = False, **fields: Any) -> Node:
    """Copies of tokens, `rows` for each expert: [B, S, M], [B, S, E] -> [E, rows, M].

    `weighted`: times their gates.
    """
    out = (gates.shape[2], rows, x.shape[2])
    return apply("dispatch", DISPATCH, x, gates, out=out, weighted=weighted, **fields)


def combine(h: Node, gates: Node, *, weighted: bool = False, **fields: Any) -> Node:
    """Every token's sum of its experts' rows: [E, rows, M], [B, S, E] -> [B, S, M].

    `weighted`: times their gates.
    """
    return apply("combine", COMBINE, h, gates, weighted=weighted, **fields)


def row_gates(gates: Node, rows: Size, **fields: Any) -> Node:
    """The gate of every row: [B, S, E] -> [E, rows]."""
    return apply("row_gates", "bse->er", gates, out=(gates.shape[2], rows), **fields)


def own_experts(x: Node, **fields: Any) -> Node:
    """The columns of the experts at hand, of all: [B, S, E] to the same, split or not.

    Its gradient is a sum over those who hold different experts, unlike that of a slice.
    """
    return apply("own_experts", "bsE->bsf", x, out=x.shape, **fields)


def weigh(x: Node, w: Node, **fields: Any) -> Node:
    """Every row times its weight, one for all of its last dim."""
    z = letters(x)
    return apply("weigh", f"{z},{z[:-1]}->{z}", x, w, **fields)
