"""Convolutions, and ops of which only the bytes count: what imported modules have besides."""

from __future__ import annotations

import math
from typing import Any

from stagewright.algebra.index import parse
from stagewright.graph.make import apply
from stagewright.graph.node import INTEGERS, Node
from stagewright.graph.reference import general as meaning
from stagewright.graph.table import NUMBER, Grads, Op, Sizes, Timing, may, need, own_attributes


def _conv_flops(n: Node, here: Sizes) -> Any:
    """Two per multiply-add: of each channel of input and result, at each tap of each place of the
    result; of a transposed convolution, of each place of its input."""
    ins, out = str(n["spec"]).lower().split("->")
    first, second = ins.split(",")
    spec = {None: n["spec"], 0: f"{out},{second}->{first}", 1: f"{second},{out}->{first}"}
    wrt: Any = n.get("wrt")
    places, _, made = meaning.slid(parse(str(spec[wrt])))
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


def _shift_vjp(n: Node, g: Node) -> Grads:
    return (g,)


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
    "shift": Op(meaning.shift, _shift_vjp, fuses=True, attrs={"by": need(*NUMBER)}),
    "conv": Op(
        meaning.conv, _conv_vjp, flops=_conv_flops, multilinear=True, attrs=_WINDOW,
        timing=Timing.PRODUCT,
    ),
    "conv_bwd": Op(
        meaning.conv_bwd, flops=_conv_flops, multilinear=True, attrs={**_WINDOW, **_WRT},
        timing=Timing.PRODUCT,
    ),
    "opaque": Op(meaning.opaque, _opaque_vjp, attrs=_OPAQUE),
    "opaque_bwd": Op(meaning.opaque_bwd, joint=True, attrs={**_OPAQUE, **_WRT}),
}  # fmt: skip
