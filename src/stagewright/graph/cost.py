"""Costs of a node: floating-point operations, and bytes of device memory.

`extent` says how large an index is on one rank: a whole number, or a fraction where experts share
tokens evenly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from stagewright.algebra.index import bind, parse, splits
from stagewright.algebra.size import Size, size
from stagewright.arrays import compressed_pairs
from stagewright.graph.node import BYTES, Node
from stagewright.graph.table import LEAVES, MOVES, OPS, batch_and_heads


class Work(NamedTuple):
    """Floating-point operations, and bytes read and written in device memory.

    What a kernel writes and reads again itself counts as written.
    """

    flops: Any
    reads: tuple[Any, ...]  # per operand
    written: Any


def extents(n: Node, extent: Callable[[Size, tuple[str, ...]], Any]) -> dict[str, Any]:
    """Letter -> size on one rank."""
    sizes, split_by = indices(n)
    return {x: extent(d, split_by.get(x, ())) for x, d in sizes.items()}


@lru_cache(maxsize=4096)  # of the nodes of a few blocks, each asked for several times
def indices(n: Node) -> tuple[dict[str, Size], dict[str, tuple[str, ...]]]:
    """Letter -> size, and letter -> axes that split it."""
    spec = parse(str(n["spec"]))
    out = {d[0]: axes for d, axes in zip(spec.out, n.layout.dims, strict=True) if len(d) == 1}
    split_by = {**out, **splits(spec, [s.layout.dims for s in n.srcs], out)}
    for d, axes in zip(spec.out, n.layout.dims, strict=True):
        if len(d) > 1 and d[0] in split_by:  # an index that occurs in the result only
            split_by.setdefault(d[1], axes[len(split_by[d[0]]) :])
    return bind(spec, [s.shape for s in n.srcs], n.shape), split_by


def local(n: Node, extent: Callable[[Size, tuple[str, ...]], Any]) -> Any:
    """Elements of `n` that one rank holds."""
    return math.prod(
        [extent(d, axes) for d, axes in zip(n.shape, n.layout.dims, strict=True)], start=1
    )


def flops(n: Node, extent: Callable[[Size, tuple[str, ...]], Any]) -> Any:
    """Operations of one rank: two per multiply-add over the points of the index space."""
    if n.op in MOVES or n.op in LEAVES or n.op == "identity":
        return 0
    row = OPS[n.op]
    here = extents(n, extent)
    if n.get("products") is not None:
        # Products over the width of queries and keys, and over that of values.
        over: Any = n["products"]
        width = over[0] * here["d"] + over[1] * here.get("v", here["d"])
        width = width + (1 if n.get("weighed") else 0)  # a head's score times its weight
        return 2 * width * batch_and_heads(here) * attended(n, extent)
    if callable(row.flops):
        return row.flops(n, here)
    same = row.rows[1] if row.rows else ()
    each = row.flops
    if n.op == "einsum" and not parse(str(n["spec"])).contracted:
        each = len(n.srcs) - 1  # products and no sums
    return math.prod([v for x, v in here.items() if x not in same], start=1) * each


def attended(n: Node, extent: Callable[[Size, tuple[str, ...]], Any]) -> Any:
    """Pairs of query and key one rank computes: a kernel skips blocks that a mask hides whole, and
    keys that an indexer did not choose."""
    sizes, split_by = indices(n)
    over = tuple(dict.fromkeys(split_by.get("q", ()) + split_by.get("k", ())))
    if n.get("pairs") is not None:  # of requests, each with a length of its own
        return extent(_size(n, "pairs"), over)
    q = extent(sizes["q"], over)  # all ranks that share a sequence do equal shares (zigzag order)
    k = extent(sizes["k"], ())
    window: Any = n.get("window") or n.get("top") or 0
    block: Any = n.get("top_block") or 1
    if not n.get("causal"):
        return q * k
    if n.get("compress") is not None:
        whole = extent(sizes["q"], ())
        return _with_compressed(n, whole) * q // whole
    chunk: Any = n.get("chunk") or 0
    if chunk and int(chunk) < k:
        whole, rest = divmod(k, int(chunk))
        return q * (whole * int(chunk) ** 2 + rest**2) // (2 * k)
    if window and int(window) < k:
        w = int(window)
        own = (k - w) * int(block) if block > 1 else 0  # half of a query's own block is behind it
        return q * (2 * w * k - w * w - own) // (2 * k)
    return q * k // 2


def _with_compressed(n: Node, q: int) -> int:
    """Pairs of a query and a compressed key, and those of the window beside these."""
    each, window = (int(n.get(x) or 0) for x in ("compress", "window"))  # pyright: ignore
    pairs = compressed_pairs(q, each, int(n.get("top") or 0))  # pyright: ignore
    inside = min(q, window)
    return pairs + inside * (inside + 1) // 2 + (q - inside) * window


def _size(n: Node, attr: str) -> Size:
    found: Any = n[attr]
    return size(found)


def _reads_in_part(n: Node, extent: Callable[[Size, tuple[str, ...]], Any]) -> list[Any]:
    """Bytes read per operand: of a cache only the keys that some query sees, of experts only the
    weights of those that some token goes to."""
    found: list[Any] = []
    for dims, s in zip(parse(str(n["spec"])).ins, n.srcs, strict=True):
        part: dict[tuple[str, ...], str] = {("k",): "keys"} if n.get("keys") is not None else {}
        part |= {("j",): "compressed_keys"} if n.get("compressed_keys") is not None else {}
        if n.get("touched") is not None and ("r",) not in dims:
            part = {("e",): "touched"}
        shape = [_size(n, part[x]) if x in part else d for x, d in zip(dims, s.shape, strict=True)]
        parts = [extent(d, axes) for d, axes in zip(shape, s.layout.dims, strict=True)]
        found.append(_bytes(math.prod(parts), s, extent))
    return found


def bytes_per_value(n: Node, extent: Callable[[Size, tuple[str, ...]], Any]) -> Any:
    """Bytes of an element; of a matrix in few bits, with the element's part of a group's scale."""
    of = n.binding.param
    stored = of.stored if of is not None else None
    if of is None or stored is None or stored.values != n.dtype or not stored.scale_bits:
        return BYTES[n.dtype]
    dims = [extent(d, axes) for d, axes in zip(n.shape, n.layout.dims, strict=True)]
    summed = of.inputs()
    inputs = math.prod([dims[i] for i in summed], start=1)
    outputs = math.prod(
        [d for i, d in enumerate(dims) if i not in summed and (i or not of.of_expert)], start=1
    )
    group = (stored.rows or outputs) * (stored.columns or inputs)
    return BYTES[n.dtype] + Fraction(stored.scale_bits, 8 * group)


def _bytes(elements: Any, n: Node, extent: Callable[[Size, tuple[str, ...]], Any]) -> Any:
    return _whole(_whole(elements) * bytes_per_value(n, extent))


def _whole(count: Any) -> Any:
    """Round up: rows that experts share evenly, and bytes, may be fractions."""
    if isinstance(count, float):
        return int(count)
    return math.ceil(count)


def traffic(n: Node, extent: Callable[[Size, tuple[str, ...]], Any]) -> Work:
    """FLOPs and bytes of one node alone; fusion removes what stays on chip."""
    if n.op in LEAVES or n.op == "identity":
        return Work(0, (), 0)
    written = _bytes(local(n, extent), n, extent)
    reads = [_bytes(local(s, extent), s, extent) for s in n.srcs]
    row = OPS.get(n.op)
    if row is not None and row.gathers is not None:
        reads[row.gathers] = _bytes(local(n, extent), n.srcs[row.gathers], extent)
    if row is not None and row.scatters is not None:
        new = n.srcs[row.scatters]
        rows = local(new, extent)
        if n.get("kept_tokens") is not None:  # of new tokens those that are kept here
            rows = rows // extent(new.shape[1], ()) * extent(_size(n, "kept_tokens"), ())
        written, reads[row.scatters] = _bytes(rows, n, extent), _bytes(rows, new, extent)
        # What is written in place is not read.
        reads = [0 if s.shape == n.shape else r for s, r in zip(n.srcs, reads, strict=True)]
    if n.get("keys") is not None or n.get("touched") is not None:
        reads = _reads_in_part(n, extent)
    if row is not None and row.rewrites:
        written = 2 * written
    if n.op == "index_topk":
        # Scores in fp32, of blocks the highest one, are written and read again by the selection.
        each = 8 * extents(n, extent).get("g", 1)
        block: Any = n.get("top_block") or 1
        written = written + -(-attended(n, extent) * each // int(block))
    if row is not None and row.scratch is not None:
        written = written + row.scratch(n, extents(n, extent))
    work = flops(n, extent)
    updated: Any = n.get("updates")
    if updated:  # optimizer: so many of its last operands are rewritten besides the result
        written = written + sum(reads[-int(updated) :])
    return Work(_whole(work), tuple(reads), _whole(written))
