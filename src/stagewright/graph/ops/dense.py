"""Products, element-wise ops, norms and changes of width: rows and gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from stagewright.algebra.index import parse
from stagewright.graph.make import apply, cast, elementwise, identity, letters
from stagewright.graph.node import LOW, Node
from stagewright.graph.ops.shared import joint_gradients, no_gradient, not_differentiated, sum_to
from stagewright.graph.reference import dense as meaning
from stagewright.graph.reference import shared
from stagewright.graph.table import NUMBER, SIZE, Grads, Op, choose, may, need, own_attributes


def _low(n: Node) -> str:
    """The data type of both operands, where they were cast to a low one; else none."""
    dtype = n.srcs[0].dtype
    return dtype if dtype in LOW and all(s.dtype == dtype for s in n.srcs) else ""


def _rescaling(n: Node, here: Mapping[str, Any]) -> Any:
    """Bytes that a cast moves to find scales, and to write a copy in the other direction."""
    each: Any = n.get("rescaling") or 0
    return math.prod(here.values()) * each


def _einsum_vjp(n: Node, g: Node) -> Grads:
    spec = str(n["spec"])
    ins, out = spec.split("->")
    terms = ins.split(",")
    if low := _low(n):
        own = {k: v for k, v in n.attrs if k == "rescaling"}
        g = cast(g, low, phase="backward", scope=n.scope, **own)
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
    if n.get("detached"):
        return (None,)
    return (identity(g, f"d_{n.name}", phase="backward"),)


def _add_vjp(n: Node, g: Node) -> Grads:
    return (g,) * len(n.srcs)


def _cast_vjp(n: Node, g: Node) -> Grads:
    return (cast(g, n.srcs[0].dtype, phase="backward"),)


def _scale_vjp(n: Node, g: Node) -> Grads:
    return (elementwise("scale", g, phase="backward", by=n["by"]),)


def _dropout_vjp(n: Node, g: Node) -> Grads:
    return (elementwise("dropout", g, n.srcs[1], phase="backward", rate=n["rate"]), None)


def _act_vjp(n: Node, g: Node) -> Grads:
    kept = n if n.get("of_result") else n.srcs[0]
    return (elementwise("act_bwd", g, kept, phase="backward", **own_attributes(n)),)


def _glu_vjp(n: Node, g: Node) -> Grads:
    return tuple(
        elementwise("glu_bwd", g, *n.srcs, phase="backward", wrt=i, **own_attributes(n))
        for i in (0, 1)
    )


def _norm_vjp(n: Node, g: Node) -> Grads:
    x = n.srcs[0]
    z = letters(x)
    lead, m = z[:-1], z[-1]
    whole = m.upper()
    attrs = own_attributes(n)
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
    return (dx, dw, *([sum_to(g, (len(z) - 1,))] if len(n.srcs) == 3 else []))


def _bias_vjp(n: Node, g: Node) -> Grads:
    spec = parse(str(n["spec"]))
    keep = tuple(spec.ins[0].index(d) for d in spec.ins[1])
    return (g, sum_to(g, keep))


def _rope_vjp(n: Node, g: Node) -> Grads:
    at = n.srcs[1:]
    back = apply("rope", str(n["spec"]), g, *at, phase="backward", inverse=not n["inverse"])
    return (back, *[None] * len(at))


def _sum_vjp(n: Node, g: Node) -> Grads:
    whole, out = str(n["spec"]).split("->")
    return (apply("expand", f"{out}->{whole}", g, out=n.srcs[0].shape, phase="backward"),)


def _mean_vjp(n: Node, g: Node) -> Grads:
    return (apply("spread", "->" + letters(n.srcs[0]), g, out=n.srcs[0].shape, phase="backward"),)


def _mean_square_vjp(n: Node, g: Node) -> Grads:
    x, ms = str(n["spec"]).split("->")
    own: dict[str, Any] = {"phase": "backward", "temporaries": n.get("backward_temporaries", 0)}
    dtype = n.srcs[0].dtype
    return (apply("mean_square_bwd", f"{ms},{x}->{x}", g, n.srcs[0], dtype=dtype, **own),)


def _unit_vjp(n: Node, g: Node) -> Grads:
    ins, x = str(n["spec"]).split("->")
    return (apply("unit_bwd", f"{x},{ins}->{x}", g, n, n.srcs[1], phase="backward"), None)


def _repeat_vjp(n: Node, g: Node) -> Grads:
    ins, out = str(n["spec"]).split("->")
    shape = n.srcs[0].shape
    return (apply("repeat_bwd", f"{out}->{ins}", g, out=shape, phase="backward"),)


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
    own: dict[str, Any] = {k: v for k, v in own_attributes(n).items() if k != "view"}
    return (apply("pad", f"{out}->{ins}", g, out=n.srcs[0].shape, phase="backward", **own),)


def _pad_vjp(n: Node, g: Node) -> Grads:
    ins, out = str(n["spec"]).split("->")
    shape = n.srcs[0].shape
    return (apply("part", f"{out}->{ins}", g, out=shape, phase="backward", **own_attributes(n)),)


_ACT = {
    "fn": choose(*meaning.ACTIVATIONS, "softcap"),
    "cap": may(*NUMBER),
    "clamp": may(*NUMBER),
    "of_result": may(bool),  # backward keeps the result, and not the operand
}
_GLU = {"fn": choose(*meaning.ACTIVATIONS), "clamp": may(*NUMBER), "offset": may(*NUMBER)}
_RATE = {"rate": need(*NUMBER)}
_INVERSE = {"inverse": need(bool, implied=False)}
_NORM = {"fn": choose("rmsnorm", "layernorm", implied="rmsnorm")}
# Tensors of the size of the result that an eager kernel makes on the way.
_PRODUCT = {"temporaries": may(int), "backward_temporaries": may(int)}
_DIM = {"dim": need(int)}
_PART = {**_DIM, "first": need(bool)}

ROWS: dict[str, Op] = {
    "einsum": Op(
        meaning.einsum,
        _einsum_vjp,
        flops=2,
        multilinear=True,
        attrs={
            **_PRODUCT,
            "joint": may(tuple),
            "touched": may(*SIZE),
            "fused": may(str),
            "rescaling": may(Fraction, int),
        },
        summary="`rescaling`: that of the cast of the gradient, where operands are in few bits; "
        "`fused`: the product whose result this is a part of.",
    ),
    "times": Op(
        meaning.einsum,
        _einsum_vjp,
        flops=2,
        multilinear=True,
        fuses=True,
        attrs=_PRODUCT,
        summary="As einsum, element-wise: in one kernel with its neighbours.",
    ),
    "sum": Op(meaning.total, _sum_vjp, linear=True, fuses=True),
    "expand": Op(meaning.expand, flops=0, linear=True, fuses=True),
    "mean": Op(meaning.mean, _mean_vjp, linear=True, fuses=True),
    "spread": Op(meaning.spread, flops=0, fuses=True),
    "identity": Op(
        shared.same,
        _identity_vjp,
        flops=0,
        linear=True,
        attrs={"detached": may(bool)},
        summary="The same value, where a layout may be asked for.",
    ),
    "add": Op(meaning.add, _add_vjp, linear=True, fuses=True),
    "cast": Op(
        shared.same,
        _cast_vjp,
        linear=True,
        fuses=True,
        scratch=_rescaling,
        attrs={"rescaling": may(Fraction, int)},
        summary="The same value in another data type; `rescaling`: bytes per value that a kernel "
        "of its own moves to find scales and to write a transposed copy.",
    ),
    "scale": Op(meaning.scale, _scale_vjp, linear=True, fuses=True, attrs={"by": need(*NUMBER)}),
    "divide": Op(meaning.divide, fuses=True),
    "bias": Op(meaning.bias, _bias_vjp, linear=True, fuses=True),
    "act": Op(meaning.act, _act_vjp, flops=8, fuses=True, attrs=_ACT),
    "act_bwd": Op(meaning.act_bwd, flops=12, fuses=True, attrs=_ACT),
    "glu": Op(meaning.glu, _glu_vjp, flops=6, fuses=True, attrs=_GLU),
    "glu_bwd": Op(
        meaning.glu_bwd, flops=6, fuses=True, joint=True, attrs={**_GLU, "wrt": need(int)}
    ),
    "random_mask": Op(meaning.random_mask, no_gradient, fuses=True, attrs=_RATE),
    "dropout": Op(meaning.dropout, _dropout_vjp, flops=2, fuses=True, attrs=_RATE),
    "rope": Op(
        meaning.rope,
        _rope_vjp,
        flops=3,
        linear=True,
        fuses=True,
        attrs=_INVERSE,
    ),
    "norm": Op(meaning.norm, _norm_vjp, flops=5, fuses=True, attrs=_NORM),
    "norm_bwd": Op(meaning.norm_bwd, flops=9, fuses=True, attrs=_NORM),
    "norm_wgrad": Op(meaning.norm_wgrad, flops=3, fuses=True, attrs={"fn": may(str)}),
    "mean_square": Op(
        meaning.mean_square,
        _mean_square_vjp,
        flops=2,
        fuses=True,
        attrs={"backward_temporaries": may(int)},
    ),
    "mean_square_bwd": Op(
        meaning.mean_square_bwd, flops=2, fuses=True, attrs={"temporaries": need(int)}
    ),
    "rms_scale": Op(meaning.rms_scale, joint_gradients, flops=3, fuses=True),
    "rms_scale_bwd": Op(
        meaning.rms_scale_bwd, flops=3, fuses=True, joint=True, attrs={"wrt": need(int)}
    ),
    "inverse_norm": Op(meaning.inverse_norm, not_differentiated, flops=2, fuses=True),
    "unit": Op(meaning.unit, _unit_vjp, fuses=True),
    "unit_bwd": Op(meaning.unit_bwd, flops=5, fuses=True),
    "repeat": Op(meaning.repeat, _repeat_vjp, flops=0, linear=True, fuses=True),
    "repeat_bwd": Op(meaning.repeat_bwd, linear=True, fuses=True),
    "join": Op(meaning.join, _join_vjp, flops=0, linear=True, fuses=True, attrs=_DIM),
    "part": Op(
        meaning.part,
        _part_vjp,
        flops=0,
        linear=True,
        fuses=True,
        attrs={**_PART, "view": may(bool)},
        summary="The first or the last places of a dim; a `view` of them has no bytes of its own.",
    ),
    "pad": Op(meaning.pad, _pad_vjp, flops=0, linear=True, fuses=True, attrs=_PART),
}
