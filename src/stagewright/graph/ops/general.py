"""Convolutions, and ops of which only the bytes count: what imported modules have besides."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from stagewright.algebra.index import Spec, parse
from stagewright.graph.make import apply
from stagewright.graph.node import INTEGERS, Node
from stagewright.graph.ops.shared import Context, same_gradient
from stagewright.graph.table import NUMBER, Grads, Op, Sizes, Timing, may, need, own_attributes


def shift(ctx: Context, x: Any) -> Any:
    """The value plus a number."""
    return x + ctx["by"]


def slid(spec: Spec) -> tuple[str, str, str]:
    """Letters of a convolution's index expression: input positions, taps, and output positions."""
    x, w = ({d[0] for d in dims} for dims in spec.ins)
    out = [d[0] for d in spec.out]
    places = [d[0] for d in spec.ins[0] if d[0] not in w and d[0] not in out]
    taps = [d[0] for d in spec.ins[1] if d[0] not in x and d[0] not in out]
    made = [c for c in out if c not in x and c not in w]
    return "".join(places), "".join(taps), "".join(made)


def _slides(ctx: Context, places: int, taps: int, made: int) -> Any:
    """[taps, places, made]: 1 where a tap is at a place of the input for a place of the result."""
    t, h, p = np.ogrid[:taps, :places, :made]
    stride, padding, dilation = ctx["stride"], ctx["padding"], ctx["dilation"]
    if ctx["transposed"]:
        return (p == h * stride - padding + t * dilation).astype(float)
    return (h == p * stride - padding + t * dilation).astype(float)


def conv(ctx: Context, x: Any, w: Any) -> Any:
    """A convolution over the dims that only `x` has; `transposed`: the gradient of one."""
    spec = parse(ctx["spec"])
    return _contract(ctx, spec, (x, w), ("x", "w"), "y")


def conv_bwd(ctx: Context, g: Any, other: Any) -> Any:
    ins, out = str(ctx["spec"]).lower().split("->")
    y, other_term = ins.split(",")
    forward = f"{out},{other_term}->{y}" if ctx["wrt"] == 0 else f"{other_term},{out}->{y}"
    spec = parse(forward)
    names = ("y", "w") if ctx["wrt"] == 0 else ("y", "x")
    return _contract(ctx, spec, (g, other), names, "x" if ctx["wrt"] == 0 else "w")


def _contract(
    ctx: Context, spec: Spec, of: tuple[Any, Any], names: tuple[str, str], to: str
) -> Any:
    """One of input, weight and result of a convolution, from the other two."""
    terms = {"x": spec.ins[0], "w": spec.ins[1], "y": spec.out}
    words = {name: "".join(d[0] for d in dims) for name, dims in terms.items()}
    extents: dict[str, int] = {}
    for name, value in zip((*names, to), (*of, np.empty(ctx.shape)), strict=True):
        extents |= dict(zip(words[name], value.shape, strict=True))
    operands, text = [*of], [words[name] for name in names]
    for h, t, p in zip(*slid(spec), strict=True):
        operands.append(_slides(ctx, extents[h], extents[t], extents[p]))
        text.append(t + h + p)
    return np.einsum(f"{','.join(text)}->{words[to]}", *operands, optimize=True)


def opaque(ctx: Context, *xs: Any) -> Any:
    """Anything that costs the bytes of its operands and its result; in numbers, their sum."""
    ins, out = str(ctx["spec"]).lower().split("->")
    total = np.zeros(ctx.shape)
    for term, x in zip(ins.split(","), xs, strict=True):
        total = total + _spread(ctx, term, out, x)
    return total


def opaque_bwd(ctx: Context, g: Any, *xs: Any) -> Any:
    ins, out = str(ctx["spec"]).lower().split("->")
    return _spread(ctx, ins.split(",")[0], out, g) * np.ones(ctx.shape)


def _spread(ctx: Context, term: str, out: str, x: Any) -> Any:
    """A value summed over what the result lacks, and repeated along what it lacks itself."""
    kept = "".join(c for c in out if c in term)
    summed = np.einsum(f"{term}->{kept}", x)
    shape = [n if c in term else 1 for c, n in zip(out, ctx.shape, strict=True)]
    return summed.reshape(shape) + np.zeros(ctx.shape)


# ---- gradients and costs -------------------------------------------------------------------------


def _conv_flops(n: Node, here: Sizes) -> Any:
    """Two per multiply-add: of each channel of input and result, at each tap of each place of the
    result; of a transposed convolution, of each place of its input."""
    ins, out = str(n["spec"]).lower().split("->")
    first, second = ins.split(",")
    spec = {None: n["spec"], 0: f"{out},{second}->{first}", 1: f"{second},{out}->{first}"}
    wrt: Any = n.get("wrt")
    places, _, made = slid(parse(str(spec[wrt])))
    left_out = made if n["transposed"] else places
    return 2 * math.prod([size for x, size in here.items() if x not in left_out], start=1)


def _conv_vjp(n: Node, g: Node) -> Grads:
    ins, out = str(n["spec"]).split("->")
    first, second = ins.split(",")
    x, w = n.srcs
    own: dict[str, Any] = {**own_attributes(n), "phase": "backward"}
    dx = apply("conv_bwd", f"{out},{second}->{first}", g, w, out=x.shape, wrt=0, **own)
    dw = apply("conv_bwd", f"{out},{first}->{second}", g, x, out=w.shape, wrt=1, **own)
    return (dx, dw)


def _opaque_vjp(n: Node, g: Node) -> Grads:
    """A kernel for the gradient of each operand of real numbers, which reads all operands."""
    ins, out = str(n["spec"]).split("->")
    terms = ins.split(",")
    if n.get("constant"):
        return (None,) * len(n.srcs)
    found: list[Node | None] = []
    for i, (term, s) in enumerate(zip(terms, n.srcs, strict=True)):
        if s.dtype in INTEGERS or n.dtype in INTEGERS:
            found.append(None)
            continue
        own: dict[str, Any] = {**own_attributes(n), "phase": "backward", "dtype": s.dtype}
        spec = ",".join([out, *terms]) + f"->{term}"
        found.append(apply("opaque_bwd", spec, g, *n.srcs, out=s.shape, wrt=i, **own))
    return tuple(found)


_WINDOW = {
    "stride": need(int, implied=1),
    "padding": need(int, implied=0),
    "dilation": need(int, implied=1),
    "transposed": need(bool, implied=False),
}
_WRT = {"wrt": need(int)}
_OPAQUE = {
    "fn": need(str),
    "constant": may(bool),  # no operand takes part in the result, which has no gradient
    "beside": may(int),  # bytes of statistics saved for backward for each of the batch
}

ROWS: dict[str, Op] = {
    "shift": Op(shift, same_gradient, fuses=True, attrs={"by": need(*NUMBER)}),
    "conv": Op(
        conv, _conv_vjp, flops=_conv_flops, multilinear=True, attrs=_WINDOW,
        timing=Timing.PRODUCT,
    ),
    "conv_bwd": Op(
        conv_bwd, flops=_conv_flops, multilinear=True, attrs={**_WINDOW, **_WRT},
        timing=Timing.PRODUCT,
    ),
    "opaque": Op(opaque, _opaque_vjp, attrs=_OPAQUE),
    "opaque_bwd": Op(opaque_bwd, joint=True, attrs={**_OPAQUE, **_WRT}),
}  # fmt: skip
