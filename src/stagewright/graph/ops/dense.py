"""Products, element-wise ops, norms and changes of width."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from stagewright.algebra.index import bind, parse
from stagewright.graph.make import apply, cast, elementwise, identity, letters
from stagewright.graph.node import LOW, Node
from stagewright.graph.ops.shared import (
    Context,
    joint_gradients,
    no_gradient,
    not_differentiated,
    reversed_by,
    same,
    same_gradient,
    sigmoid,
    sum_to,
)
from stagewright.graph.table import NUMBER, SIZE, Grads, Op, choose, may, need, own_attributes

_erf = np.vectorize(math.erf)


def add(ctx: Context, *xs: Any) -> Any:
    """The sum of values of one shape."""
    return sum(xs[1:], start=xs[0])


def scale(ctx: Context, x: Any) -> Any:
    """The value times a number."""
    return x * ctx["by"]


def divide(ctx: Context, x: Any, y: Any) -> Any:
    return x / y


def einsum(ctx: Context, *xs: Any) -> Any:
    """Products of operands, summed over the letters that the result lacks.

    Dims such as `(gr)` are split, contracted and joined again."""
    spec = parse(ctx["spec"])
    sizes = bind(spec, [x.shape for x in xs], ctx.shape)
    flat = [
        x.reshape([sizes[a] for d in dims for a in d]) for x, dims in zip(xs, spec.ins, strict=True)
    ]
    ins = ",".join("".join(a for d in dims for a in d) for dims in spec.ins)
    out = np.einsum(f"{ins}->{''.join(a for d in spec.out for a in d)}", *flat)
    return out.reshape([math.prod(sizes[a] for a in d) for d in spec.out])


def total(ctx: Context, x: Any) -> Any:
    """The sum over the letters that the result lacks."""
    return einsum(ctx, x)


def mean(ctx: Context, x: Any) -> Any:
    """The mean of all elements."""
    return einsum(ctx, x) / ctx.count


def spread(ctx: Context, g: Any) -> Any:
    return np.full(ctx.shape, g / ctx.count)


def expand(ctx: Context, x: Any) -> Any:
    """The same value at every point of the dims that the operand lacks."""
    spec = parse(ctx["spec"])
    there = [d in spec.ins[0] for d in spec.out]
    shape = [n if had else 1 for n, had in zip(ctx.shape, there, strict=True)]
    return np.broadcast_to(x.reshape(shape), ctx.shape)


def bias(ctx: Context, x: Any, b: Any) -> Any:
    """A value plus a vector, the same at every position."""
    return x + _fit(ctx, 1, b)


_Function = Callable[[Any], Any]


class Activation(NamedTuple):
    """A function of every element, and its derivative."""

    value: _Function
    slope: _Function


def _normal(x: Any) -> Any:
    """The distribution function of the standard normal distribution."""
    return 0.5 * (1 + _erf(x / math.sqrt(2)))


def _gelu_slope(x: Any) -> Any:
    return _normal(x) + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _gelu_tanh(x: Any) -> Any:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _gelu_tanh_slope(x: Any) -> Any:
    t = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    inner = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner


def _swish(by: float) -> Activation:
    """x * sigmoid(by * x)."""

    def value(x: Any) -> Any:
        return x * sigmoid(by * x)

    def slope(x: Any) -> Any:
        s = sigmoid(by * x)
        return s + by * x * s * (1 - s)

    return Activation(value, slope)


_FUNCTIONS: dict[str, tuple[_Function, _Function]] = {
    "gelu": (lambda x: x * _normal(x), _gelu_slope),
    "gelu_tanh": (_gelu_tanh, _gelu_tanh_slope),
    "silu": _swish(1.0),
    "quick_gelu": _swish(1.702),
    "relu": (lambda x: np.maximum(x, 0), lambda x: (x > 0).astype(float)),
    "relu2": (lambda x: np.maximum(x, 0) ** 2, lambda x: 2 * np.maximum(x, 0)),
    "tanh": (np.tanh, lambda x: 1 - np.tanh(x) ** 2),
    "sigmoid": (sigmoid, lambda x: sigmoid(x) * (1 - sigmoid(x))),
    "softplus": (lambda x: np.log1p(np.exp(x)), sigmoid),
    "log": (np.log, lambda x: 1 / x),
    "sqrt": (np.sqrt, lambda x: 0.5 / np.sqrt(x)),
    "rsqrt": (lambda x: 1 / np.sqrt(x), lambda x: -0.5 * x**-1.5),
    "reciprocal": (lambda x: 1 / x, lambda x: -1 / (x * x)),
    "square": (lambda x: x * x, lambda x: 2 * x),
    "cube": (lambda x: x**3, lambda x: 3 * x * x),
    "abs": (np.abs, np.sign),
    "sin": (np.sin, np.cos),
    "cos": (np.cos, lambda x: -np.sin(x)),
    "erf": (_erf, lambda x: 2 / math.sqrt(math.pi) * np.exp(-x * x)),
    "exp": (np.exp, np.exp),
    "neg_exp": (lambda x: -np.exp(x), lambda x: -np.exp(x)),
}

SLOPES_OF_RESULTS: dict[str, _Function] = {
    "tanh": lambda y: 1 - y * y,
    "sigmoid": lambda y: y * (1 - y),
    "relu": lambda y: (y > 0).astype(float),
    "exp": lambda y: y,
    "sqrt": lambda y: 0.5 / y,
    "rsqrt": lambda y: -0.5 * y**3,
    "reciprocal": lambda y: -y * y,
}
"""Functions whose derivative follows from their result, which PyTorch keeps for backward instead of
the operand (derivatives.yaml of PyTorch 2.13)."""


ACTIVATIONS = {name: Activation(*pair) for name, pair in _FUNCTIONS.items()}


def _act(ctx: Context, x: Any) -> Any:
    """An activation; one with a limit is flat above it."""
    if ctx["fn"] == "softcap":
        return ctx["cap"] * np.tanh(x / ctx["cap"])
    most = ctx.get("clamp")
    return ACTIVATIONS[ctx["fn"]].value(x if most is None else np.minimum(x, most))


def _slope(ctx: Context, x: Any) -> Any:
    """The derivative of the same."""
    if ctx["fn"] == "softcap":
        return 1 - np.tanh(x / ctx["cap"]) ** 2
    slope, most = ACTIVATIONS[ctx["fn"]].slope, ctx.get("clamp")
    return slope(x) if most is None else slope(np.minimum(x, most)) * (x < most)


def act(ctx: Context, x: Any) -> Any:
    """An activation; clamp limits its argument, cap is the limit of softcap."""
    return _act(ctx, x)


def act_bwd(ctx: Context, g: Any, x: Any) -> Any:
    return g * (SLOPES_OF_RESULTS[ctx["fn"]](x) if ctx.get("of_result") else _slope(ctx, x))


def _weighed(ctx: Context, up: Any) -> Any:
    """Factor that a gate multiplies: within limits, and with an offset."""
    most = ctx.get("clamp")
    return (up if most is None else np.clip(up, -most, most)) + ctx.get("offset", 0.0)


def glu(ctx: Context, gate: Any, up: Any) -> Any:
    """A gate: the activation of the first operand times the second."""
    return _act(ctx, gate) * _weighed(ctx, up)


def glu_bwd(ctx: Context, g: Any, gate: Any, up: Any) -> Any:
    if ctx["wrt"] == 0:
        return g * _weighed(ctx, up) * _slope(ctx, gate)
    most = ctx.get("clamp")
    return g * _act(ctx, gate) * (1.0 if most is None else np.abs(up) <= most)


def random_mask(ctx: Context, x: Any) -> Any:
    """Ones, and zeros with the probability rate.

    Pseudo-random by global position, so that every layout draws the same mask.
    """
    grid: Any = np.zeros(x.shape)
    for i, dim in enumerate(parse(ctx["spec"]).out):
        shape = [1] * x.ndim
        shape[i] = n = int(x.shape[i])
        at: Any = ctx.start(dim[0]) + np.arange(n)
        grid = grid * 31.7 + at.reshape(shape)
    return (np.sin(grid * 12.9898 + 78.233) * 43758.5453 % 1 >= ctx["rate"]).astype(float)


def dropout(ctx: Context, x: Any, mask: Any) -> Any:
    """A value times a random mask, over 1 - rate."""
    return x * mask / (1 - ctx["rate"])


def rope(ctx: Context, x: Any, at: Any = None) -> Any:
    """Rotate pairs of the last dim by an angle that grows with the position (RoPE).

    Positions are `at`, [sequences, places], or the places in dim 1.
    """
    length, half = int(x.shape[1]), int(x.shape[-1]) // 2
    at = ctx.start("s") + np.arange(length)[None, :] if at is None else at
    sign = -1 if ctx["inverse"] else 1
    angle = at[..., None] * 100.0 ** (-np.arange(half) / max(half, 1)) * sign
    angle = angle.reshape(-1, length, *[1] * (x.ndim - 3), half)
    cos, sin = np.cos(angle), np.sin(angle)
    a, b = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos, x[..., 2 * half :]], axis=-1)


def _standard(ctx: Context, x: Any) -> tuple[Any, Any]:
    y = x - x.mean(-1, keepdims=True) if ctx["fn"] == "layernorm" else x
    r = 1 / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-5)
    return y * r, r


def norm(ctx: Context, x: Any, w: Any = 1.0, b: Any = 0.0) -> Any:
    """RMSNorm or LayerNorm over the last dim, with a weight and a bias if given."""
    return _standard(ctx, x)[0] * w + b


def norm_bwd(ctx: Context, g: Any, x: Any, w: Any = 1.0) -> Any:
    y, r = _standard(ctx, x)
    h = g * w
    dx = h - y * (h * y).mean(-1, keepdims=True)
    return r * (dx - h.mean(-1, keepdims=True) if ctx["fn"] == "layernorm" else dx)


def norm_wgrad(ctx: Context, g: Any, x: Any) -> Any:
    y, _ = _standard(ctx, x)
    return (g * y).reshape(-1, g.shape[-1]).sum(0)


def repeat(ctx: Context, x: Any) -> Any:
    """Copies along dim 2: of key-value heads for their query heads, or of the whole value.

    The latter where the result has a dim more.
    """
    if x.ndim < len(ctx.shape):
        return np.repeat(x[:, :, None], ctx.shape[2], 2)
    return np.repeat(x, ctx.shape[2] // x.shape[2], 2)


def repeat_bwd(ctx: Context, g: Any) -> Any:
    if len(ctx.shape) < g.ndim:
        return g.sum(2)
    return g.reshape(*ctx.shape[:3], -1, ctx.shape[3]).sum(3)


def join(ctx: Context, a: Any, b: Any) -> Any:
    """Two values behind each other along `dim` of the result; what lacks dims is repeated."""
    spec = parse(ctx["spec"])
    found: list[Any] = []
    for x, dims in zip((a, b), spec.ins, strict=True):
        own = [d for d in dims if d not in spec.out]
        order = [d if d in dims else None for d in spec.out]
        order[ctx["dim"]] = own[0] if own else None
        x = np.transpose(x, [dims.index(d) for d in order if d is not None])
        x = x[tuple(slice(None) if d is not None else None for d in order)]
        shape = list(ctx.shape)
        shape[ctx["dim"]] = x.shape[ctx["dim"]]
        found.append(np.broadcast_to(x, shape))
    return np.concatenate(found, axis=ctx["dim"])


def part(ctx: Context, x: Any) -> Any:
    """The first or the last part along `dim`, summed over the dims that the result lacks."""
    spec = parse(ctx["spec"])
    own = [i for i, d in enumerate(spec.out) if d not in spec.ins[0]]
    width = ctx.shape[own[0]] if own else 1
    dim = ctx["dim"] % x.ndim
    x = x[(slice(None),) * dim + (slice(width) if ctx["first"] else slice(-width, None),)]
    lost = tuple(
        i for i, d in enumerate(spec.ins[0]) if d not in spec.out and (i != dim or not own)
    )
    return x.sum(lost)


def pad(ctx: Context, g: Any) -> Any:
    """A value with zeros behind it along dim, or before it if first is false."""
    out = np.zeros(ctx.shape)
    dim = ctx["dim"] % out.ndim
    if g.ndim < out.ndim:
        g = np.expand_dims(g, dim)
    width = g.shape[dim]
    out[(slice(None),) * dim + (slice(width) if ctx["first"] else slice(-width, None),)] = g
    return out


def _fit(ctx: Context, i: int, x: Any, like: int = 0) -> Any:
    """Operand `i` with dims of size 1 for the indices that only operand `like` has."""
    spec = parse(ctx["spec"])
    have, want = list(spec.ins[i]), list(spec.ins[like])
    order = [have.index(d) for d in want if d in have]
    return np.transpose(x, order)[tuple(slice(None) if d in have else None for d in want)]


def mean_square(ctx: Context, x: Any) -> Any:
    """The mean square over the letters that the result lacks."""
    spec = parse(ctx["spec"])
    lost = tuple(i for i, d in enumerate(spec.ins[0]) if d not in spec.out)
    return (x * x).sum(lost) / ctx.count


def mean_square_bwd(ctx: Context, g: Any, x: Any) -> Any:
    spec = parse(ctx["spec"])
    count = math.prod(ctx.size(d[0]) for d in spec.ins[1] if d not in spec.ins[0])
    return 2 / count * x * _fit(ctx, 0, g, like=1)


def rms_scale(ctx: Context, x: Any, ms: Any, *weight: Any) -> Any:
    """x over its root mean square, times a weight if there is one."""
    y = x / np.sqrt(_fit(ctx, 1, ms) + 1e-5)
    return y * _fit(ctx, 2, weight[0]) if weight else y


def rms_scale_bwd(ctx: Context, g: Any, x: Any, ms: Any, *weight: Any) -> Any:
    spec = parse(ctx["spec"])
    scaled = g * _fit(ctx, 3, weight[0]) if weight else g
    root = 1 / np.sqrt(_fit(ctx, 2, ms) + 1e-5)
    if ctx["wrt"] == 0:
        return scaled * root
    lost = tuple(i for i, d in enumerate(spec.ins[0]) if d not in spec.out)
    if ctx["wrt"] == 1:
        return (-0.5 * scaled * x * root**3).sum(lost)
    return (g * x * root).sum(lost)


def inverse_norm(ctx: Context, x: Any) -> Any:
    """One over the length of each row of the last dim."""
    return 1 / np.sqrt((x * x).sum(-1) + 1e-6)


def unit(ctx: Context, x: Any, r: Any) -> Any:
    """Rows of length 1; `r` is their inverse length, of which x is not differentiated again."""
    return x * r[..., None]


def unit_bwd(ctx: Context, g: Any, y: Any, r: Any) -> Any:
    return r[..., None] * (g - y * (g * y).sum(-1, keepdims=True))


# ---- gradients and costs -------------------------------------------------------------------------


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


def _mean_square_vjp(n: Node, g: Node) -> Grads:
    x, ms = str(n["spec"]).split("->")
    own: dict[str, Any] = {"phase": "backward", "temporaries": n.get("backward_temporaries", 0)}
    dtype = n.srcs[0].dtype
    return (apply("mean_square_bwd", f"{ms},{x}->{x}", g, n.srcs[0], dtype=dtype, **own),)


def _unit_vjp(n: Node, g: Node) -> Grads:
    ins, x = str(n["spec"]).split("->")
    return (apply("unit_bwd", f"{x},{ins}->{x}", g, n, n.srcs[1], phase="backward"), None)


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


_ACT = {
    "fn": choose(*ACTIVATIONS, "softcap"),
    "cap": may(*NUMBER),
    "clamp": may(*NUMBER),
    "of_result": may(bool),  # backward keeps the result, and not the operand
}
_GLU = {"fn": choose(*ACTIVATIONS), "clamp": may(*NUMBER), "offset": may(*NUMBER)}
_RATE = {"rate": need(*NUMBER)}
_INVERSE = {"inverse": need(bool, implied=False)}
_NORM = {"fn": choose("rmsnorm", "layernorm", implied="rmsnorm")}
# Tensors of the size of the result that an eager kernel makes on the way.
_PRODUCT = {"temporaries": may(int), "backward_temporaries": may(int)}
_DIM = {"dim": need(int)}
_PART = {**_DIM, "first": need(bool)}

ROWS: dict[str, Op] = {
    "einsum": Op(
        einsum,
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
        einsum,
        _einsum_vjp,
        flops=2,
        multilinear=True,
        fuses=True,
        attrs=_PRODUCT,
        summary="As einsum, element-wise: in one kernel with its neighbours.",
    ),
    "sum": Op(total, reversed_by("expand"), linear=True, fuses=True),
    "expand": Op(expand, flops=0, linear=True, fuses=True),
    "mean": Op(mean, reversed_by("spread"), linear=True, fuses=True),
    "spread": Op(spread, flops=0, fuses=True),
    "identity": Op(
        same,
        _identity_vjp,
        flops=0,
        linear=True,
        attrs={"detached": may(bool)},
        summary="The same value, where a layout may be asked for.",
    ),
    "add": Op(add, same_gradient, linear=True, fuses=True),
    "cast": Op(
        same,
        _cast_vjp,
        linear=True,
        fuses=True,
        scratch=_rescaling,
        attrs={"rescaling": may(Fraction, int)},
        summary="The same value in another data type; `rescaling`: bytes per value that a kernel "
        "of its own moves to find scales and to write a transposed copy.",
    ),
    "scale": Op(scale, _scale_vjp, linear=True, fuses=True, attrs={"by": need(*NUMBER)}),
    "divide": Op(divide, fuses=True),
    "bias": Op(bias, _bias_vjp, linear=True, fuses=True),
    "act": Op(act, _act_vjp, flops=8, fuses=True, attrs=_ACT),
    "act_bwd": Op(act_bwd, flops=12, fuses=True, attrs=_ACT),
    "glu": Op(glu, _glu_vjp, flops=6, fuses=True, attrs=_GLU),
    "glu_bwd": Op(glu_bwd, flops=6, fuses=True, joint=True, attrs={**_GLU, "wrt": need(int)}),
    "random_mask": Op(random_mask, no_gradient, fuses=True, attrs=_RATE),
    "dropout": Op(dropout, _dropout_vjp, flops=2, fuses=True, attrs=_RATE),
    "rope": Op(
        rope,
        _rope_vjp,
        flops=3,
        linear=True,
        fuses=True,
        attrs=_INVERSE,
    ),
    "norm": Op(norm, _norm_vjp, flops=5, fuses=True, attrs=_NORM),
    "norm_bwd": Op(norm_bwd, flops=9, fuses=True, attrs=_NORM),
    "norm_wgrad": Op(norm_wgrad, flops=3, fuses=True, attrs={"fn": may(str)}),
    "mean_square": Op(
        mean_square,
        _mean_square_vjp,
        flops=2,
        fuses=True,
        attrs={"backward_temporaries": may(int)},
    ),
    "mean_square_bwd": Op(mean_square_bwd, flops=2, fuses=True, attrs={"temporaries": need(int)}),
    "rms_scale": Op(rms_scale, joint_gradients, flops=3, fuses=True),
    "rms_scale_bwd": Op(rms_scale_bwd, flops=3, fuses=True, joint=True, attrs={"wrt": need(int)}),
    "inverse_norm": Op(inverse_norm, not_differentiated, flops=2, fuses=True),
    "unit": Op(unit, _unit_vjp, fuses=True),
    "unit_bwd": Op(unit_bwd, flops=5, fuses=True),
    "repeat": Op(repeat, reversed_by("repeat_bwd"), flops=0, linear=True, fuses=True),
    "repeat_bwd": Op(repeat_bwd, linear=True, fuses=True),
    "join": Op(join, _join_vjp, flops=0, linear=True, fuses=True, attrs=_DIM),
    "part": Op(
        part,
        reversed_by("pad", but="view"),
        flops=0,
        linear=True,
        fuses=True,
        attrs={**_PART, "view": may(bool)},
        summary="The first or the last places of a dim; a `view` of them has no bytes of its own.",
    ),
    "pad": Op(pad, reversed_by("part"), flops=0, linear=True, fuses=True, attrs=_PART),
}
