"""Shape of a kernel, from which its duration is computed or looked up.

>>> from stagewright.graph.make import einsum, leaf
>>> x, w = leaf("input", ("B", "S", "M"), "bf16", "x"), leaf("param", ("M", "F"), "bf16", "w")
>>> sizes = {"B": 2, "S": 1024, "M": 4096, "F": 16384}
>>> print(shape_of([einsum("bsm,mf->bsf", x, w)], lambda dim, axes: dim.value(sizes)))
gemm batch=1 m=2048 n=16384 k=4096
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from typing import Any, cast

import numpy as np

from stagewright.algebra.index import parse
from stagewright.algebra.size import Size, size
from stagewright.arrays import Bool
from stagewright.graph.cost import extents, flops, indices
from stagewright.graph.node import Node
from stagewright.graph.table import OPS, Timing, heads
from stagewright.program.columns import Shape, TaskKind, Tasks

GEMM = "gemm"
"""Kernel name of all products of two operands."""


def ops_of(joined: str) -> tuple[str, ...]:
    """Ops that a kernel fuses, from its name in columns: joined by `+`."""
    return tuple(joined.split("+"))


def shape_mask(tasks: Tasks, predicate: Callable[[Shape], bool]) -> Bool:
    """Mask of tasks whose shape fulfils a condition; without a shape none does."""
    return np.array([*map(predicate, tasks.shapes), False], dtype=bool)[tasks.shape]


def op_mask(tasks: Tasks, predicate: Callable[[Set[str]], bool]) -> Bool:
    """Mask of kernels whose fused ops fulfil a condition."""
    matches = [predicate(frozenset(ops_of(name))) for name in tasks.ops]
    return np.array([*matches, False], dtype=bool)[tasks.op] & (tasks.kind == TaskKind.COMPUTE)


def shape_of(cluster: Sequence[Node], extent: Callable[[Size, tuple[str, ...]], Any]) -> Shape:
    """Shape of a kernel of fused nodes; the first node decides the kind of kernel."""
    n = cluster[0]
    exact = extents(n, extent)
    if n.get("touched") is not None:
        exact = _of_touched(n, exact, extent)
    # Experts may have unequal numbers of rows: the largest counts.
    sizes = {x: math.ceil(size_) for x, size_ in exact.items()}
    if n.op == "einsum" and len(n.srcs) == 2:
        joint: Any = n.get("joint") or ()
        return Shape(GEMM, _gemm(n, sizes), joint, _head_width(n, sizes))
    if OPS[n.op].timing is Timing.PRODUCT:
        return Shape(GEMM, _of_flops(n, sizes, flops(n, extent)))
    if OPS[n.op].timing in (Timing.ATTENTION, Timing.ATTENTION_BACKWARD):
        return Shape(n.op, _attention(n, sizes))
    ops = "+".join(dict.fromkeys(m.op for m in cluster))
    marks = {name: int(cast("int", n.get(name) or 0)) for name in ("chunk", "latent", "window")}
    return Shape(ops, (*sizes.items(), *((name, mark) for name, mark in marks.items() if mark)))


def _of_touched(
    n: Node, exact: dict[str, Any], extent: Callable[[Size, tuple[str, ...]], Any]
) -> dict[str, Any]:
    """Count only the experts that some token is routed to, and their rows."""
    _, split_by = indices(n)
    touched: Any = n["touched"]
    experts = max(1, math.ceil(extent(size(touched), split_by.get("e", ()))))
    rows = {"r": exact["r"] * exact["e"] / experts} if "r" in exact else {}
    return {**exact, "e": experts, **rows} if experts < exact["e"] else exact


def _gemm(n: Node, sizes: dict[str, int]) -> tuple[tuple[str, int], ...]:
    """Contraction as a matrix product; the operand with the first output index has the rows."""
    spec = parse(str(n["spec"]))
    first, second = ({x for dim in dims for x in dim} for dims in spec.ins)
    output = [x for dim in spec.out for x in dim]
    outer = [x for x in output if (x in first) != (x in second)]
    if outer and outer[0] in second:
        first, second = second, first
    role = {
        x: "batch" if x in first and x in second else "m" if x in first else "n" for x in output
    }
    return tuple(
        (name, math.prod(size for x, size in sizes.items() if role.get(x, "k") == name))
        for name in ("batch", "m", "n", "k")
    )


def _head_width(n: Node, sizes: dict[str, int]) -> int:
    """Head width of unfused products of attention; 0 of other products."""
    return sizes.get("d", sizes.get("v", 0)) if n.scope == "attention.core" else 0


def _of_flops(n: Node, sizes: dict[str, int], work: Any) -> tuple[tuple[str, int], ...]:
    """Convolution as a matrix product of equal FLOPs, and of the result's rows and columns."""
    spec = parse(str(n["spec"]))
    second = {x for dim in spec.ins[1] for x in dim}
    output = [x for dim in spec.out for x in dim]
    columns = math.prod([sizes[x] for x in output if x in second], start=1)
    rows = math.prod([sizes[x] for x in output if x not in second], start=1)
    k = max(1, math.ceil(work) // max(1, 2 * rows * columns))
    return (("batch", 1), ("m", rows), ("n", columns), ("k", k))


def _attention(n: Node, sizes: dict[str, int]) -> tuple[tuple[str, int], ...]:
    operands = parse(str(n["spec"])).ins
    keys = {x for dim in next(dims for dims in operands if ("k",) in dims) for x in dim}
    by_head = heads(sizes)
    # `top`: number of keys that an indexer selects, wherever they are.
    window: Any = n.get("window") or n.get("top") or 0
    if n.get("compress") is not None:  # compressed keys in addition to those of the window
        ratio: Any = n["compress"]
        compressed: Any = n.get("top") or sizes["q"] // int(ratio)
        window = int(window) + int(compressed)
    chunk: Any = n.get("chunk") or 0
    return (
        ("batch", sizes.get("b", 1)),
        ("heads", math.prod(by_head.values())),
        ("kv_heads", math.prod(size for x, size in by_head.items() if x in keys)),
        ("q", sizes["q"]),
        ("k", sizes["k"]),
        ("d", sizes["d"]),
        ("v", sizes.get("v", sizes["d"])),
        ("causal", int(bool(n.get("causal")))),
        ("window", int(window)),
        *((("chunk", int(chunk)),) if chunk else ()),
    )
