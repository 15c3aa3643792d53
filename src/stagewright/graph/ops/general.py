"""Convolutions, and ops of which only the bytes count: what imported modules have besides."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    """A kernel for the gradient of each operand of real numbers, which reads what is kept."""
    ins, out = str(n["spec"]).split("->")
    terms = ins.split(",")
    if n.get("keeps") == "constant":  # no operand has a part in its values
        return (None,) * len(n.srcs)
    kept = _saved_operands(n, terms, out)
    found: list[Node | None] = []
    for i, (term, s) in enumerate(zip(terms, n.srcs, strict=True)):
        if s.dtype in INTEGERS or n.dtype in INTEGERS:
            found.append(None)
            continue
        own: dict[str, Any] = {**own_attributes(n), "phase": "backward", "dtype": s.dtype}
        spec = ",".join([out, *(at for _, at in kept)]) + f"->{term}"
        operands = [x for x, _ in kept]
        found.append(apply("opaque_bwd", spec, g, *operands, out=s.shape, wrt=i, **own))
    return tuple(found)


def _saved_operands(n: Node, terms: Sequence[str], out: str) -> list[tuple[Node, str]]:
    """Operands that backward of an opaque op reads, and their indices; by default all."""
    if n.get("keeps") is None:
        return list(zip(n.srcs, terms, strict=True))
    at = {str(i): (s, term) for i, (s, term) in enumerate(zip(n.srcs, terms, strict=True))}
    known = {**at, "result": (n, out)}
    return [known[word] for word in str(n["keeps"]).split("&") if word in known]


_WINDOW = {
    "stride": need(int, implied=1),
    "padding": need(int, implied=0),
    "dilation": need(int, implied=1),
    "transposed": need(bool, implied=False),
}
_WRT = {"wrt": need(int)}
_OPAQUE = {
    "fn": need(str),
    # What backward reads, as in `0&result`, or `nothing`; of a `constant` there is no gradient.
    "keeps": may(str, int),
    "indices": may(bool),  # besides, an int64 for each element of the result is kept
    "beside": may(int),  # and so many bytes for each of the batch
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
