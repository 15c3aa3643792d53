"""The op table: one row per op; shape, layout, FLOPs, bytes follow from a node's index expression.

An index kept in the output passes its split on; an index summed away turns its split into a partial
sum; an upper-case index may not be split. `OPS` at the end of the file is the table; above it are
the ways to make nodes, and the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from stagewright.algebra.index import Spec, bind, layout_of, parse, splits
from stagewright.algebra.layout import Layout, Step, duplicated, layout_after
from stagewright.algebra.size import Size, product, size
from stagewright.graph import reference as meaning
from stagewright.graph import reference_state as scan
from stagewright.graph.node import BYTES, Node, node
from stagewright.graph.roles import UNBOUND, Binding, Role

Grads = tuple["Node | None", ...]


class Op(NamedTuple):
    """One row: what is particular to an op. Everything else its index expression says."""

    run: Callable[..., Any]  # numpy meaning, called as run(ctx, *local_arrays)
    # (node, gradient of its output) -> gradients of its inputs
    vjp: Callable[[Node, Node], Grads] | None = None
    # per point of the index space, or of a node, from the size of each letter
    flops: float | scan.Cost = 1
    linear: bool = False  # a partial sum of all operands may flow through
    multilinear: bool = False  # a partial sum of one operand may flow through
    fuses: bool = False  # element-wise: joins its neighbours in one kernel
    joint: bool = False  # nodes of this op on the same operands are one kernel
    ring: tuple[str, str] | None = None  # letters that one axis may split at once (ring attention)
    rewrites: bool = False  # adds to what is there: reads and writes its output
    gathers: int | None = None  # this operand is a table; of it, it reads the rows it returns
    scatters: int | None = None  # its result is a table; of it, it writes the rows of this operand
    reduction: str = "sum"  # how the parts over a split contracted index combine
    scratch: scan.Cost | None = None  # bytes that go through device memory besides operands, result
    # An index whose points are those of others, in any order: rows of tokens, grouped by expert.
    rows: tuple[str, tuple[str, ...]] | None = None


COLLECTIVE_OPS = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all"})
MOVES = COLLECTIVE_OPS | {"slice"}
LEAVES = frozenset({"input", "param", "state"})


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
    scope = srcs[0].scope if scope is None else scope
    attrs = {"spec": spec, **attrs}
    shape = tuple(product(sizes[x] for x in d) for d in parsed.out)
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
    n: Node, step: Step, *, phase: str, once: bool, name: str = "", role: Role | None = None
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
    layout = duplicated(len(dims))
    return node(
        op, (), shape=shape, dtype=dtype, layout=layout,
        phase=phase, once=once, scope=scope, name=name, role=role, binding=binding,
    )  # fmt: skip


def letters(n: Node) -> str:
    """A letter per dim of an element-wise operand: those of its sizes where each has its own."""
    names = [str(d).lower() for d in n.shape]
    if all(len(x) == 1 and x.isalpha() for x in names) and len(set(names)) == len(names):
        return "".join(names)
    return "zyxwvut"[: len(n.shape)]


def elementwise(op: str, *srcs: Node, **fields: Any) -> Node:
    """An op on operands of one shape."""
    x = letters(srcs[0])
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


# What a node costs. `extent` says how large an index is on one rank: symbolically for closed forms,
# as an integer when lowering.


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
        return 2 * width * _heads(here) * _attended(n, extent)
    if callable(row.flops):
        return row.flops(n, here)
    same = row.rows[1] if row.rows else ()
    each = row.flops
    if n.op == "einsum" and not parse(str(n["spec"])).contracted:
        each = len(n.srcs) - 1  # products and no sums
    return math.prod([v for x, v in here.items() if x not in same], start=1) * each


def _heads(here: Mapping[str, Any]) -> Any:
    """Batch and heads, of the letters of an attention: what is no position, width or table row."""
    return math.prod([v for x, v in here.items() if x not in "qkdvizj"], start=1)


def _row_sums(n: Node, here: Mapping[str, Any]) -> Any:
    """Bytes of the logarithm of each row's sum of exponentials, which flash attention leaves for
    its backward (arXiv 2307.08691, algorithm 1)."""
    return 4 * _heads(here) * here["q"]


def _forward_again(n: Node, here: Mapping[str, Any]) -> Any:
    """Bytes of forward that its backward reads besides its operands (algorithm 2): the output, and
    the sums of rows. Once, in the one kernel that makes all gradients."""
    if n["wrt"] != "q":
        return 0
    width = here.get("v", here["d"])
    return _row_sums(n, here) + _heads(here) * here["q"] * width * BYTES[n.srcs[0].dtype]


def _attended(n: Node, extent: Callable[[Size, tuple[str, ...]], Any]) -> Any:
    """Pairs of query and key one rank computes: a kernel skips blocks that a mask hides whole."""
    sizes, split_by = indices(n)
    over = tuple(dict.fromkeys(split_by.get("q", ()) + split_by.get("k", ())))
    if n.get("pairs") is not None:  # of requests, each with a length of its own
        return extent(_size(n, "pairs"), over)
    q = extent(sizes["q"], over)  # all ranks that share a sequence do equal shares (zigzag order)
    k = extent(sizes["k"], ())
    window: Any = n.get("window") or 0
    if not n.get("causal"):
        return q * k
    chunk: Any = n.get("chunk") or 0
    if isinstance(k, int) and chunk and int(chunk) < k:
        whole, rest = divmod(k, int(chunk))
        return q * (whole * int(chunk) ** 2 + rest**2) // (2 * k)
    if isinstance(k, int) and window and int(window) < k:
        w = int(window)
        return q * (2 * w * k - w * w) // (2 * k)
    return q * k // 2 if isinstance(k, int) else q * k / 2


def _merge_flops(n: Node, here: Mapping[str, Any]) -> Any:
    """A product for each channel of each stripe, and of each row the weights of all stripes."""
    rows = math.prod(v for x, v in here.items() if x not in "nmv")
    return rows * (here["n"] * here["v"] + 4 * here["m"])


def _size(n: Node, attr: str) -> Size:
    found: Any = n[attr]
    return size(found)


def _reads_in_part(n: Node, extent: Callable[[Size, tuple[str, ...]], Any]) -> list[Any]:
    """Bytes read per operand: of a cache only the keys that some query sees, of experts only the
    weights of those that some token goes to."""
    found: list[Any] = []
    for dims, s in zip(parse(str(n["spec"])).ins, n.srcs, strict=True):
        part: dict[tuple[str, ...], str] = {("k",): "keys"} if n.get("keys") is not None else {}
        if n.get("touched") is not None and ("r",) not in dims:
            part = {("e",): "touched"}
        shape = [_size(n, part[x]) if x in part else d for x, d in zip(dims, s.shape, strict=True)]
        parts = [extent(d, axes) for d, axes in zip(shape, s.layout.dims, strict=True)]
        found.append(_bytes(math.prod(parts), s.dtype))
    return found


def _bytes(elements: Any, dtype: str) -> Any:
    return _whole(_whole(elements) * BYTES[dtype])


def _whole(count: Any) -> Any:
    """As a whole number: a fraction, of rows that experts share evenly or of bytes, rounded up."""
    if isinstance(count, float):
        return int(count)
    return math.ceil(count) if isinstance(count, Fraction) else count


def traffic(n: Node, extent: Callable[[Size, tuple[str, ...]], Any]) -> Work:
    """FLOPs and bytes of one node alone; fusion removes what stays on chip."""
    if n.op in LEAVES or n.op == "identity":
        return Work(0, (), 0)
    written = _bytes(local(n, extent), n.dtype)
    reads = [_bytes(local(s, extent), s.dtype) for s in n.srcs]
    row = OPS.get(n.op)
    if row is not None and row.gathers is not None:
        reads[row.gathers] = _bytes(local(n, extent), n.srcs[row.gathers].dtype)
    if row is not None and row.scatters is not None:
        new = n.srcs[row.scatters]
        rows = local(new, extent)
        if n.get("stored") is not None:  # of new tokens those that are kept here
            rows = rows // extent(new.shape[1], ()) * extent(_size(n, "stored"), ())
        written, reads[row.scatters] = _bytes(rows, n.dtype), _bytes(rows, new.dtype)
        # What is written in place is not read.
        reads = [0 if s.shape == n.shape else r for s, r in zip(n.srcs, reads, strict=True)]
    if n.get("keys") is not None or n.get("touched") is not None:
        reads = _reads_in_part(n, extent)
    if row is not None and row.rewrites:
        written = 2 * written
    if row is not None and row.scratch is not None:
        written = written + row.scratch(n, extents(n, extent))
    work = flops(n, extent)
    updated: Any = n.get("updates")
    if updated:  # optimizer: so many of its last operands are rewritten besides the result
        written = written + sum(reads[-int(updated) :])
    return Work(_whole(work), tuple(reads), _whole(written))


# Gradients.


def _fp8(n: Node) -> bool:
    return all(s.dtype == "fp8" for s in n.srcs)


def _einsum_vjp(n: Node, g: Node) -> Grads:
    spec = str(n["spec"])
    ins, out = spec.split("->")
    terms = ins.split(",")
    if _fp8(n):
        g = cast(g, "fp8", phase="backward", scope=n.scope)
    found: list[Node | None] = []
    for i, term in enumerate(terms):
        others = [t for j, t in enumerate(terms) if j != i]
        operands = [s for j, s in enumerate(n.srcs) if j != i]
        back = ",".join([out, *others]) + "->" + term
        own: dict[str, Any] = {"phase": "backward", "dtype": n.dtype}
        if i == len(terms) - 1 and n.get("backward_temporaries"):
            own["temporaries"] = n["backward_temporaries"]
        joint: Any = n.get("joint")
        if joint:
            own["joint"] = (joint[0], ("input", "weight")[i])
        found.append(apply(n.op, back, g, *operands, out=n.srcs[i].shape, **own))
    return tuple(found)


def _identity_vjp(n: Node, g: Node) -> Grads:
    return (identity(g, f"d_{n.name}", phase="backward"),)


def _add_vjp(n: Node, g: Node) -> Grads:
    return (g,) * len(n.srcs)


def _cast_vjp(n: Node, g: Node) -> Grads:
    return (cast(g, n.srcs[0].dtype, phase="backward"),)


def _scale_vjp(n: Node, g: Node) -> Grads:
    return (elementwise("scale", g, phase="backward", by=n["by"]),)


def _no_vjp(n: Node, g: Node) -> Grads:
    return (None,)


def _dropout_vjp(n: Node, g: Node) -> Grads:
    return (elementwise("dropout", g, n.srcs[1], phase="backward", rate=n["rate"]), None)


def _act_vjp(n: Node, g: Node) -> Grads:
    return (elementwise("act_bwd", g, n.srcs[0], phase="backward", **_attrs(n)),)


def _glu_vjp(n: Node, g: Node) -> Grads:
    return tuple(
        elementwise("glu_bwd", g, *n.srcs, phase="backward", wrt=i, **_attrs(n)) for i in (0, 1)
    )


def _norm_vjp(n: Node, g: Node) -> Grads:
    x = n.srcs[0]
    z = letters(x)
    lead, m = z[:-1], z[-1]
    whole = m.upper()
    attrs = _attrs(n)
    if len(n.srcs) == 1:
        spec = f"{lead}{whole}"
        return (apply("norm_bwd", f"{spec},{spec}->{spec}", g, x, phase="backward", **attrs),)
    w = n.srcs[1]
    dx = apply(
        "norm_bwd",
        f"{lead}{whole},{lead}{whole},{whole}->{lead}{whole}",
        g,
        x,
        w,
        phase="backward",
        **attrs,
    )
    dw = apply(
        "norm_wgrad", f"{lead}{whole},{lead}{whole}->{whole}", g, x, phase="backward", **attrs
    )
    return (dx, dw, *([_sum_to(g, (len(z) - 1,))] if len(n.srcs) == 3 else []))


def _sum_to(g: Node, keep: tuple[int, ...]) -> Node:
    z = letters(g)
    return apply("sum", f"{z}->{''.join(z[i] for i in keep)}", g, phase="backward")


def _bias_vjp(n: Node, g: Node) -> Grads:
    spec = parse(str(n["spec"]))
    keep = tuple(spec.ins[0].index(d) for d in spec.ins[1])
    return (g, _sum_to(g, keep))


def _rope_vjp(n: Node, g: Node) -> Grads:
    at = n.srcs[1:]
    back = apply("rope", str(n["spec"]), g, *at, phase="backward", inverse=not n["inverse"])
    return (back, *[None] * len(at))


def _attention_vjp(n: Node, g: Node) -> Grads:
    ins, out = str(n["spec"]).split("->")
    # Flash attention's backward does five products where forward does two (arXiv 2205.14135,
    # section 3.2): scores again and dP for dq, with dQ; dK; dV. One kernel: the rows are joint.
    # Latents that are keys and values get both gradients.
    more = {name: (0, 0) for name in ("bias", "sinks") if n.get(name)}
    values = {"k": (1, 0), "v": (0, 1)} if len(n.srcs) - len(more) == 3 else {"k": (1, 1)}
    rows = {"q": (2, 1), **values, **more}
    found: list[Node | None] = []
    for (wrt, products), term, s in zip(rows.items(), ins.split(","), n.srcs, strict=True):
        attrs: dict[str, Any] = {**_attrs(n), "products": products, "wrt": wrt}
        spec = f"{out},{ins}->{term}"
        back = apply("attention_bwd", spec, g, *n.srcs, out=s.shape, phase="backward", **attrs)
        found.append(back)
    return tuple(found)


def _joint_vjp(n: Node, g: Node) -> Grads:
    """One kernel for all operands, and a row of `<op>_bwd` for the gradient of each."""
    ins, out = str(n["spec"]).split("->")
    return tuple(
        apply(
            f"{n.op}_bwd",
            f"{out},{ins}->{term}",
            g,
            *n.srcs,
            phase="backward",
            dtype=n.srcs[i].dtype,
            wrt=i,
            **_attrs(n),
        )
        for i, term in enumerate(ins.split(","))
    )


def _delta_rule_vjp(n: Node, g: Node) -> Grads:
    """The products inside chunks, operands after the gates, are made of the others."""
    found = _joint_vjp(n, g)
    return (*found[:5], *[None] * (len(found) - 5))


def _made_of_vjp(n: Node, g: Node) -> Grads:
    raise AssertionError(
        f"{n} is no variable of its own: its user differentiates what it is made of"
    )


def _mean_square_vjp(n: Node, g: Node) -> Grads:
    x, ms = str(n["spec"]).split("->")
    own: dict[str, Any] = {"phase": "backward", "temporaries": n.get("backward_temporaries", 0)}
    dtype = n.srcs[0].dtype
    return (apply("mean_square_bwd", f"{ms},{x}->{x}", g, n.srcs[0], dtype=dtype, **own),)


def _unit_vjp(n: Node, g: Node) -> Grads:
    ins, x = str(n["spec"]).split("->")
    return (apply("unit_bwd", f"{x},{ins}->{x}", g, n, n.srcs[1], phase="backward"), None)


def _relative_bias_vjp(n: Node, g: Node) -> Grads:
    ins, out = str(n["spec"]).split("->")
    own: dict[str, Any] = {"causal": n["causal"], "phase": "backward"}
    return (apply("relative_bias_bwd", f"{out}->{ins}", g, out=n.srcs[0].shape, **own),)


def _softmax_vjp(n: Node, g: Node) -> Grads:
    ins, x = str(n["spec"]).split("->")
    back = apply("softmax_bwd", f"{x},{x}->{x}", g, n, phase="backward", width=n["width"])
    if len(n.srcs) == 1:
        return (back,)
    heads = ins.split(",")[1]
    return (back, apply("sinks_bwd", f"{x},{x}->{heads}", g, n, phase="backward"))


def _log_softmax_vjp(n: Node, g: Node) -> Grads:
    return (elementwise_whole("log_softmax_bwd", g, n, phase="backward"),)


def _log_probs_vjp(n: Node, g: Node) -> Grads:
    """Of x's own maximum and sum: g - softmax(x) * sum(g), and the sum of one that is picked is it.

    Then nothing of x is kept, and no sum goes over a split vocabulary (PyTorch's loss_parallel).
    """
    x, _, total = n.srcs
    spec, t = str(n["spec"]).split("->")[1], str(n["spec"]).split(",")[1]
    keep = tuple(range(len(t)))
    summed = g.srcs[0] if g.op == "pick_bwd" else _sum_to(g, keep)
    source = total
    while source.op == "identity":
        (source,) = source.srcs
    if source.op != "exp_sum" or source.srcs[0] is not x:
        back = elementwise("scale", summed, phase="backward", by=-1.0)
        return (g, back, elementwise("divide", back, total, phase="backward"))
    own: dict[str, Any] = {"phase": "backward", "temporaries": 1}  # the exponentials
    return (apply("log_probs_bwd", f"{spec},{spec},{t}->{spec}", g, n, summed, **own), None, None)


def _repeat_vjp(n: Node, g: Node) -> Grads:
    ins, out = str(n["spec"]).split("->")
    shape = n.srcs[0].shape
    return (apply("repeat_bwd", f"{out}->{ins}", g, out=shape, phase="backward"),)


def _embedding_vjp(n: Node, g: Node) -> Grads:
    tokens, table = n.srcs
    ins, out = str(n["spec"]).split("->")
    t, w = ins.split(",")
    return (
        None,
        apply("embedding_bwd", f"{out},{t}->{w}", g, tokens, out=table.shape, phase="backward"),
    )


def _exp_sum_vjp(n: Node, g: Node) -> Grads:
    # The maximum cancels in log(sum(exp(x - max))) + max: it needs no gradient.
    logits, top = n.srcs
    x, t = str(n["spec"]).split("->")[0].split(",")
    return (apply("exp_sum_bwd", f"{t},{x},{t}->{x}", g, logits, top, phase="backward"), None)


def _pick_vjp(n: Node, g: Node) -> Grads:
    logits, labels = n.srcs
    x, t = str(n["spec"]).split("->")[0].split(",")
    spec = f"{t},{t}->{x}"
    return (apply("pick_bwd", spec, g, labels, out=logits.shape, phase="backward"), None)


def _nll_vjp(n: Node, g: Node) -> Grads:
    _top, total, _picked = n.srcs
    return (
        None,
        elementwise("divide", g, total, phase="backward"),
        elementwise("scale", g, phase="backward", by=-1.0),
    )


def _mean_vjp(n: Node, g: Node) -> Grads:
    return (apply("spread", "->" + letters(n.srcs[0]), g, out=n.srcs[0].shape, phase="backward"),)


def _first_token_vjp(n: Node, g: Node) -> Grads:
    return (apply("first_token_bwd", "bm->bsm", g, out=n.srcs[0].shape, phase="backward"),)


def _topk_vjp(n: Node, g: Node) -> Grads:
    logits = n.srcs[0]
    spec = f"{n['spec']}".split("->")[1]
    back = apply("topk_bwd", f"{spec},{spec}->{spec}", g, logits, phase="backward", **_attrs(n))
    return (back, None)[: len(n.srcs)]


def _scores_vjp(n: Node, g: Node) -> Grads:
    return (elementwise_whole("scores_bwd", g, n.srcs[0], phase="backward", **_attrs(n)),)


def _aux_loss_vjp(n: Node, g: Node) -> Grads:
    """The loss is of the scores, and stands beside the gates; counts have no gradient."""
    _, scores, counts = str(n["spec"]).split("->")[0].split(",")
    attrs = _attrs(n)
    back = f"{counts}->{scores}"
    d_scores = apply(
        "aux_loss_bwd", back, n.srcs[2], out=g.shape, dtype=g.dtype, phase="backward", **attrs
    )
    return (g, d_scores, None)


def _z_loss_vjp(n: Node, g: Node) -> Grads:
    return (elementwise_whole("z_loss_bwd", g, n.srcs[0], phase="backward", **_attrs(n)),)


def elementwise_whole(op: str, *srcs: Node, **fields: Any) -> Node:
    """An op on operands of one shape that needs all of their last dim."""
    x = letters(srcs[0])
    x = x[:-1] + x[-1].upper()
    return apply(op, ",".join([x] * len(srcs)) + "->" + x, *srcs, **fields)


# Copies of tokens are rows, so many for each expert: [B, S, M] and who goes where, [B, S, E], to
# [E, rows, M]. They stand in any order.
_ROWS = ("r", ("b", "s"))
_DISPATCH = "bsm,bse->erm"
_COMBINE = "erm,bse->bsm"


def _dispatch_vjp(n: Node, g: Node) -> Grads:
    """Tokens get back the sum of what became of their copies."""
    x, gates = n.srcs
    own = _attrs(n)
    back = apply("combine", _COMBINE, g, gates, out=x.shape, phase="backward", **own)
    return (back, _gates_back(n, x, g))


def _combine_vjp(n: Node, g: Node) -> Grads:
    h, gates = n.srcs
    own = _attrs(n)
    rows = apply("dispatch", _DISPATCH, g, gates, out=h.shape, phase="backward", **own)
    return (rows, _gates_back(n, g, h))


def _gates_back(n: Node, tokens: Node, rows: Node) -> Node | None:
    """The gradient of gates that rows were weighed with on their way."""
    if not n["weighted"]:
        return None
    spec = "bsm,erm,bse->bse"
    gates = n.srcs[1]
    return apply("combine_gates", spec, tokens, rows, gates, phase="backward", **_attrs(n))


def dispatch(x: Node, gates: Node, rows: Size, *, weighted: bool = False, **fields: Any) -> Node:
    """Copies of tokens, `rows` for each expert: [B, S, M], [B, S, E] -> [E, rows, M].

    `weighted`: times their gates.
    """
    out = (gates.shape[2], rows, x.shape[2])
    return apply("dispatch", _DISPATCH, x, gates, out=out, weighted=weighted, **fields)


def combine(h: Node, gates: Node, *, weighted: bool = False, **fields: Any) -> Node:
    """Every token's sum of its experts' rows: [E, rows, M], [B, S, E] -> [B, S, M].

    `weighted`: times their gates.
    """
    return apply("combine", _COMBINE, h, gates, weighted=weighted, **fields)


def row_gates(gates: Node, rows: Size, **fields: Any) -> Node:
    """The gate of every row: [B, S, E] -> [E, rows]."""
    return apply("row_gates", "bse->er", gates, out=(gates.shape[2], rows), **fields)


def _row_gates_vjp(n: Node, g: Node) -> Grads:
    (gates,) = n.srcs
    own = _attrs(n)
    return (apply("row_gates_bwd", "er->bse", g, out=gates.shape, phase="backward", **own),)


def own_experts(x: Node, **fields: Any) -> Node:
    """The columns of the experts at hand, of all: [B, S, E] to the same, split or not.

    Its gradient is a sum over those who hold different experts, unlike that of a slice.
    """
    return apply("own_experts", "bsE->bsf", x, out=x.shape, **fields)


def _own_experts_vjp(n: Node, g: Node) -> Grads:
    return (apply("own_experts_bwd", "bsf->bsE", g, out=n.shape, phase="backward"),)


def weigh(x: Node, w: Node, **fields: Any) -> Node:
    """Every row times its weight, one for all of its last dim."""
    z = letters(x)
    return apply("weigh", f"{z},{z[:-1]}->{z}", x, w, **fields)


def _weigh_vjp(n: Node, g: Node) -> Grads:
    x, w = n.srcs
    z = letters(x)
    back = apply("weigh_bwd", f"{z},{z}->{z[:-1]}", g, x, dtype=w.dtype, phase="backward")
    return (weigh(g, w, phase="backward"), back)


def _pscan_vjp(n: Node, g: Node) -> Grads:
    ins, out = str(n["spec"]).split("->")
    spec = f"{out},{ins},{out}->{out}"
    own = _attrs(n)
    return tuple(
        apply("pscan_bwd", spec, g, *n.srcs, n, phase="backward", wrt=i, **own) for i in (0, 1)
    )


def _join_vjp(n: Node, g: Node) -> Grads:
    """Each operand's part of the joint dim, summed over the dims that it lacks."""
    ins, out = str(n["spec"]).split("->")
    own: dict[str, Any] = {"dim": n["dim"]}
    found: list[Node | None] = []
    for i, (term, s) in enumerate(zip(ins.split(","), n.srcs, strict=True)):
        found.append(
            apply("part", f"{out}->{term}", g, out=s.shape, phase="backward", first=i == 0, **own)
        )
    return tuple(found)


def _part_vjp(n: Node, g: Node) -> Grads:
    ins, out = str(n["spec"]).split("->")
    return (apply("pad", f"{out}->{ins}", g, out=n.srcs[0].shape, phase="backward", **_attrs(n)),)


def _pad_vjp(n: Node, g: Node) -> Grads:
    ins, out = str(n["spec"]).split("->")
    shape = n.srcs[0].shape
    return (apply("part", f"{out}->{ins}", g, out=shape, phase="backward", **_attrs(n)),)


def _modulate_vjp(n: Node, g: Node) -> Grads:
    ins, out = str(n["spec"]).split("->")
    _, rows = ins.split(",")
    x, by = n.srcs
    own = _attrs(n)
    back: dict[str, Any] = own | {"shift": -1}
    dx = apply("modulate", str(n["spec"]), g, by, phase="backward", **back)
    spec = f"{out},{out}->{rows}"
    return (dx, apply("modulate_wgrad", spec, g, x, out=by.shape, phase="backward", **own))


def _triangle_vjp(n: Node, g: Node) -> Grads:
    ins, out = str(n["spec"]).split("->")
    return (apply("triangle_bwd", f"{out}->{ins}", g, out=n.srcs[0].shape, phase="backward"),)


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


def _attrs(n: Node) -> dict[str, Any]:
    return {k: v for k, v in n.attrs if k != "spec"}


_m = meaning
_SERVED: dict[str, Any] = {
    **{"flops": scan.served_flops, "scratch": scan.served_scratch, "joint": True}
}
_CHUNKED: dict[str, Any] = {"flops": scan.chunked_flops, "scratch": scan.chunked_scratch}
OPS: dict[str, Op] = {
    # contractions
    "einsum": Op(_m.einsum, _einsum_vjp, flops=2, multilinear=True),
    "attention": Op(_m.attention, _attention_vjp, ring=("q", "k"), scratch=_row_sums),
    "attention_bwd": Op(_m.attention_bwd, ring=("q", "k"), joint=True, scratch=_forward_again),
    "cached_attention": Op(_m.cached_attention),
    "varlen_attention": Op(_m.cached_attention),
    "striped_attention": Op(_m.striped_attention, joint=True),
    "merge_stripes": Op(_m.merge_stripes, flops=_merge_flops),
    "relative_bias": Op(_m.relative_bias, _relative_bias_vjp, flops=0, gathers=0),
    "relative_bias_bwd": Op(_m.relative_bias_bwd, multilinear=True),
    "sum": Op(_m.total, linear=True, fuses=True),
    "mean": Op(_m.mean, _mean_vjp, linear=True, fuses=True),
    # element-wise
    "identity": Op(_m.same, _identity_vjp, flops=0, linear=True),
    "add": Op(_m.add, _add_vjp, linear=True, fuses=True),
    "cast": Op(_m.same, _cast_vjp, linear=True, fuses=True),
    "scale": Op(_m.scale, _scale_vjp, linear=True, fuses=True),
    "divide": Op(_m.divide, fuses=True),
    "bias": Op(_m.bias, _bias_vjp, fuses=True),
    "modulate": Op(_m.modulate, _modulate_vjp, flops=2, fuses=True),
    "modulate_wgrad": Op(_m.modulate_wgrad, flops=3, fuses=True),
    "act": Op(_m.act, _act_vjp, flops=8, fuses=True),
    "act_bwd": Op(_m.act_bwd, flops=12, fuses=True),
    "glu": Op(_m.glu, _glu_vjp, flops=6, fuses=True),
    "glu_bwd": Op(_m.glu_bwd, flops=6, fuses=True, joint=True),
    "random_mask": Op(_m.random_mask, _no_vjp, fuses=True),
    "dropout": Op(_m.dropout, _dropout_vjp, flops=2, fuses=True),
    "rope": Op(_m.rope, _rope_vjp, flops=3, linear=True, fuses=True),
    "times": Op(_m.einsum, _einsum_vjp, flops=2, multilinear=True, fuses=True),
    # a state along the sequence
    "conv1d": Op(scan.conv1d, _joint_vjp, flops=scan.conv1d_flops),
    "conv1d_bwd": Op(scan.conv1d_bwd, flops=scan.conv1d_flops, multilinear=True, joint=True),
    "scan": Op(scan.scan, _joint_vjp, flops=scan.scan_flops),
    "scan_bwd": Op(scan.scan_bwd, flops=scan.scan_flops, joint=True),
    "linear_attention": Op(scan.linear_attention, _joint_vjp, **_CHUNKED),
    "linear_attention_bwd": Op(scan.linear_attention_bwd, **_CHUNKED, joint=True),
    "delta_rule": Op(scan.delta_rule, _delta_rule_vjp, **_CHUNKED),
    "delta_rule_bwd": Op(scan.delta_rule_bwd, **_CHUNKED, joint=True),
    "delta_scores": Op(scan.delta_scores, _made_of_vjp, flops=scan.within_flops),
    "delta_inverse": Op(scan.delta_inverse, _made_of_vjp, flops=scan.within_flops),
    # the same from states that are kept of requests
    "conv1d_served": Op(scan.conv1d_served, flops=scan.conv1d_served_flops, joint=True),
    "scan_served": Op(scan.scan_served, flops=scan.scan_served_flops, joint=True),
    "linear_attention_served": Op(scan.linear_attention_served, **_SERVED),
    "delta_rule_served": Op(scan.linear_attention_served, **_SERVED),
    # norms whose dims may be split
    "mean_square": Op(scan.mean_square, _mean_square_vjp, flops=2, fuses=True),
    "mean_square_bwd": Op(scan.mean_square_bwd, flops=2, fuses=True),
    "rms_scale": Op(scan.rms_scale, _joint_vjp, flops=3, fuses=True),
    "rms_scale_bwd": Op(scan.rms_scale_bwd, flops=3, fuses=True, joint=True),
    "inverse_norm": Op(scan.inverse_norm, _made_of_vjp, flops=2, fuses=True),
    "unit": Op(scan.unit, _unit_vjp, fuses=True),
    "unit_bwd": Op(scan.unit_bwd, flops=5, fuses=True),
    # rows that need a whole dim
    "norm": Op(_m.norm, _norm_vjp, flops=5, fuses=True),
    "norm_bwd": Op(_m.norm_bwd, flops=9, fuses=True),
    "norm_wgrad": Op(_m.norm_wgrad, flops=3, fuses=True),
    "softmax": Op(_m.softmax, _softmax_vjp, flops=5, fuses=True),
    "log_softmax": Op(_m.log_softmax, _log_softmax_vjp, flops=5, fuses=True),
    "log_probs": Op(_m.log_probs, _log_probs_vjp, flops=2, fuses=True),
    "log_probs_bwd": Op(_m.log_probs_bwd, flops=3, fuses=True),
    "log_softmax_bwd": Op(_m.log_softmax_bwd, flops=4, fuses=True),
    "softmax_bwd": Op(_m.softmax_bwd, flops=4, fuses=True),
    "sinks_bwd": Op(_m.sinks_bwd, flops=4, fuses=True),
    # mixture of experts
    "topk": Op(_m.topk, _topk_vjp, flops=8, fuses=True),
    "topk_bwd": Op(_m.topk_bwd, flops=8, fuses=True),
    "scores": Op(_m.scores, _scores_vjp, flops=5, fuses=True),
    "scores_bwd": Op(_m.scores_bwd, flops=5, fuses=True),
    "count": Op(_m.count, fuses=True),
    "aux_loss": Op(_m.first, _aux_loss_vjp, flops=2, fuses=True),
    "aux_loss_bwd": Op(_m.aux_loss_bwd, fuses=True),
    "z_loss": Op(_m.same, _z_loss_vjp, flops=3, fuses=True),
    "z_loss_bwd": Op(_m.z_loss_bwd, flops=5, fuses=True),
    "routes": Op(_m.same, _no_vjp, fuses=True),
    "splits": Op(_m.splits, rows=("o", ("b", "s")), fuses=True),
    "dispatch": Op(_m.dispatch, _dispatch_vjp, flops=0, multilinear=True, rows=_ROWS),
    "combine": Op(_m.combine, _combine_vjp, flops=2, multilinear=True, rows=_ROWS),
    "combine_gates": Op(_m.combine_gates, flops=2, rows=_ROWS),
    "row_gates": Op(_m.row_gates, _row_gates_vjp, flops=0, rows=_ROWS),
    "row_gates_bwd": Op(_m.row_gates_bwd, flops=0, multilinear=True, rows=_ROWS),
    "own_experts": Op(_m.own_experts, _own_experts_vjp, flops=0, fuses=True),
    "own_experts_bwd": Op(_m.own_experts_bwd, flops=0, linear=True, fuses=True),
    "weigh": Op(_m.weigh, _weigh_vjp, multilinear=True, fuses=True),
    "weigh_bwd": Op(_m.weigh_bwd, flops=2, multilinear=True, fuses=True),
    # along one dim, each from the one before
    "pscan": Op(_m.pscan, _pscan_vjp, flops=2),
    "pscan_bwd": Op(_m.pscan_bwd, flops=2, joint=True),
    # requests
    "cache": Op(_m.cache, flops=0, fuses=True, scatters=1),
    "take": Op(_m.take, flops=0, gathers=0),
    # widths
    "repeat": Op(_m.repeat, _repeat_vjp, flops=0, linear=True, fuses=True),
    "repeat_bwd": Op(_m.repeat_bwd, linear=True, fuses=True),
    "join": Op(_m.join, _join_vjp, flops=0, linear=True, fuses=True),
    "part": Op(_m.part, _part_vjp, flops=0, linear=True, fuses=True),
    "pad": Op(_m.pad, _pad_vjp, flops=0, linear=True, fuses=True),
    "triangle": Op(_m.triangle, _triangle_vjp, flops=0, linear=True),
    "triangle_bwd": Op(_m.triangle_bwd, flops=0, linear=True),
    # vocabulary and positions
    "first_token": Op(_m.first_token, _first_token_vjp, flops=0, fuses=True),
    "first_token_bwd": Op(_m.first_token_bwd, flops=0, fuses=True),
    "embedding": Op(_m.embedding, _embedding_vjp, flops=0, gathers=1),
    "embedding_bwd": Op(_m.embedding_bwd, flops=0, multilinear=True, scatters=0, rewrites=True),
    "max": Op(_m.maximum, _no_vjp, fuses=True, reduction="max"),
    "exp_sum": Op(_m.exp_sum, _exp_sum_vjp, flops=3, fuses=True),
    "exp_sum_bwd": Op(_m.exp_sum_bwd, flops=3, fuses=True),
    "pick": Op(_m.pick, _pick_vjp, flops=0, fuses=True),
    "pick_bwd": Op(_m.pick_bwd, flops=0, fuses=True),
    "nll": Op(_m.nll, _nll_vjp, flops=3, fuses=True),
    "spread": Op(_m.spread, flops=0, fuses=True),
    # once per step
    "tie": Op(_m.same, linear=True),
    "accumulate": Op(_m.same, linear=True, fuses=True, rewrites=True),
    "norm2": Op(_m.norm2, flops=2, fuses=True),
    "adamw": Op(_m.first, flops=14),
    "sgd": Op(_m.first, flops=4),
    "bias_update": Op(_m.bias_update, flops=4),
}
