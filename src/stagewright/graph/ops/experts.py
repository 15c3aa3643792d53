"""Mixture of experts: routing, and copies of tokens to experts and back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from stagewright.algebra.index import parse
from stagewright.graph.make import COMBINE, DISPATCH, apply, elementwise_whole, letters
from stagewright.graph.node import Node
from stagewright.graph.ops.dense import einsum
from stagewright.graph.ops.shared import (
    Context,
    first,
    no_gradient,
    probabilities,
    reversed_by,
    same,
    sigmoid,
)
from stagewright.graph.table import NUMBER, Grads, Op, Timing, choose, need, own_attributes


def _chosen(ctx: Context, experts: int = 0) -> Any:
    """1 where a token goes to an expert, [tokens, experts]: in turns, so that all ranks agree."""
    sequence: Any = ctx.start("b") + np.arange(int(ctx.shape_of("b")))
    place: Any = ctx.start("s") + np.arange(int(ctx.shape_of("s")))
    token: Any = (sequence[:, None] * ctx.size("s") + place).reshape(-1)
    many = experts or int(ctx.size("e"))
    here: Any = ctx.start("e") + np.arange(int(ctx.shape_of("e")))
    turn: Any = (np.arange(many) if experts else here)[None, :] - (token * ctx["top_k"])[:, None]
    return (turn % many < ctx["top_k"]).astype(float)


def _routes(ctx: Context, rows: int) -> Any:
    """1 where a row of an expert is a copy of a token, [experts, rows, tokens]."""
    chosen = _chosen(ctx)
    result: Any = np.zeros((chosen.shape[1], rows, chosen.shape[0]))
    for e in range(int(chosen.shape[1])):
        tokens: Any = np.flatnonzero(chosen[:, e])
        result[e, np.arange(int(tokens.size)), tokens] = 1
    return result


def _score(ctx: Context, logits: Any) -> Any:
    """Scores of each expert by itself, not a softmax over all."""
    return sigmoid(logits) if ctx["fn"] == "sigmoid" else np.sqrt(np.log1p(np.exp(logits)))


def _slope(ctx: Context, logits: Any) -> Any:
    """The derivative of the logarithm of the same."""
    if ctx["fn"] == "sigmoid":
        return 1 - sigmoid(logits)
    return sigmoid(logits) / (2 * np.log1p(np.exp(logits)))


def _gates(ctx: Context, logits: Any) -> Any:
    """Weights of the chosen experts, normalized or not."""
    chosen = _chosen(ctx, logits.shape[-1]).reshape(logits.shape)
    if not ctx["norm"]:
        return chosen * (probabilities(logits) if ctx["fn"] == "softmax" else _score(ctx, logits))
    weight = np.exp(logits) if ctx["fn"] == "softmax" else _score(ctx, logits)
    weight = weight * chosen
    return weight / weight.sum(-1, keepdims=True)


def topk(ctx: Context, logits: Any, *_: Any) -> Any:
    """The gates of the top_k experts of each token.

    Columns behind those of the last expert are the first once more.
    """
    return _gates(ctx, logits[..., np.arange(ctx.shape[-1]) % logits.shape[-1]])


def topk_bwd(ctx: Context, g: Any, logits: Any) -> Any:
    chosen = _chosen(ctx, logits.shape[-1]).reshape(logits.shape)
    if ctx["norm"]:
        y = _gates(ctx, logits)
        back = y * (g - (g * y).sum(-1, keepdims=True))
        return back if ctx["fn"] == "softmax" else back * _slope(ctx, logits)
    if ctx["fn"] != "softmax":
        return g * chosen * _score(ctx, logits) * _slope(ctx, logits)
    y = probabilities(logits)
    return y * (g * chosen - (g * chosen * y).sum(-1, keepdims=True))


def scores(ctx: Context, logits: Any) -> Any:
    """The scores of all experts, which add up to one; the load is balanced by them."""
    if ctx["fn"] == "softmax":
        return probabilities(logits)
    y = _score(ctx, logits)
    return y / y.sum(-1, keepdims=True)


def scores_bwd(ctx: Context, g: Any, logits: Any) -> Any:
    y = scores(ctx, logits)
    back = y * (g - (g * y).sum(-1, keepdims=True))
    return back if ctx["fn"] == "softmax" else back * _slope(ctx, logits)


def count(ctx: Context, gates: Any) -> Any:
    """Copies of tokens that each expert gets."""
    return einsum(ctx, (gates != 0).astype(float))


def aux_loss_bwd(ctx: Context, counts: Any) -> Any:
    """Gradient of E sum(f P): f the part of copies that go to an expert, P its mean score."""
    spec = parse(ctx["spec"])
    over = {x for d in spec.out for x in d} - {x for d in spec.ins[0] for x in d}
    tokens = math.prod(ctx.size(x) for x in over)
    slope = counts * (ctx["coeff"] * ctx.size("e") / (ctx["top_k"] * tokens**2))
    ones = np.ones(ctx.shape)
    ahead = slope[:, None, :] if len(spec.ins[0]) == 2 else slope
    each = ones.shape[0] // ahead.shape[0] if ahead.ndim == 3 else 1
    return ones * (np.repeat(ahead, each, axis=0) if ahead.ndim == 3 else ahead)


def z_loss_bwd(ctx: Context, g: Any, logits: Any) -> Any:
    """With the gradient of mean(log(sum(exp(logits)))^2) (ST-MoE, arXiv 2202.08906, equation 5)."""
    spec = parse(ctx["spec"])
    tokens = math.prod(ctx.size(x) for d in spec.out[:-1] for x in d)
    top = logits.max(-1, keepdims=True)
    total = np.log(np.exp(logits - top).sum(-1, keepdims=True)) + top
    return g + 2 * ctx["coeff"] * total * probabilities(logits) / tokens


def splits(ctx: Context, gates: Any) -> Any:
    """Copies that each expert gets from the tokens of a rank."""
    flat = (gates != 0).astype(float).reshape(ctx.shape[0], -1, gates.shape[-1])
    return flat.sum(1)


def _weights(ctx: Context, gates: Any) -> Any:
    flat = gates.reshape(-1, gates.shape[-1])
    return flat if ctx["weighted"] else np.ones_like(flat)


def dispatch(ctx: Context, x: Any, gates: Any) -> Any:
    """Copies of tokens, sorted by expert."""
    routes = _routes(ctx, ctx.shape[1])
    return np.einsum("ert,tm,te->erm", routes, x.reshape(-1, x.shape[-1]), _weights(ctx, gates))


def combine(ctx: Context, h: Any, gates: Any) -> Any:
    """The sum of the experts' rows of each token."""
    routes = _routes(ctx, h.shape[1])
    return np.einsum("ert,erm,te->tm", routes, h, _weights(ctx, gates)).reshape(ctx.shape)


def combine_gates(ctx: Context, tokens: Any, rows: Any, gates: Any) -> Any:
    flat = tokens.reshape(-1, tokens.shape[-1])
    routes = _routes(ctx, rows.shape[1])
    return np.einsum("ert,erm,tm->te", routes, rows, flat).reshape(gates.shape)


def row_gates(ctx: Context, gates: Any) -> Any:
    """The gate of each row of an expert."""
    flat = gates.reshape(-1, gates.shape[-1])
    return np.einsum("ert,te->er", _routes(ctx, ctx.shape[1]), flat)


def row_gates_bwd(ctx: Context, g: Any) -> Any:
    return np.einsum("ert,er->te", _routes(ctx, g.shape[1]), g).reshape(ctx.shape)


def own_experts(ctx: Context, x: Any) -> Any:
    """The columns of the experts that a rank holds."""
    first = ctx.start("f")
    return x[..., first : first + ctx.shape[-1]]


def own_experts_bwd(ctx: Context, g: Any) -> Any:
    out = np.zeros(ctx.shape)
    first = ctx.start("f")
    out[..., first : first + g.shape[-1]] = g
    return out


def weigh(ctx: Context, x: Any, w: Any) -> Any:
    """Every row times a weight of its own."""
    return x * w[..., None]


def weigh_bwd(ctx: Context, g: Any, x: Any) -> Any:
    return (g * x).sum(-1)


# ---- gradients and costs -------------------------------------------------------------------------


def _of_logits(n: Node, g: Node) -> Grads:
    """A kernel `<op>_bwd` on the gradient and the logits; further operands have no gradient."""
    attrs: dict[str, Any] = {"phase": "backward", **own_attributes(n)}
    back = elementwise_whole(f"{n.op}_bwd", g, n.srcs[0], **attrs)
    return (back, *[None] * (len(n.srcs) - 1))


def _aux_loss_vjp(n: Node, g: Node) -> Grads:
    """The loss is of the scores, and stands beside the gates; counts have no gradient."""
    _, scores, counts = str(n["spec"]).split("->")[0].split(",")
    attrs = own_attributes(n)
    back = f"{counts}->{scores}"
    d_scores = apply(
        "aux_loss_bwd", back, n.srcs[2], out=g.shape, dtype=g.dtype, phase="backward", **attrs
    )
    return (g, d_scores, None)


def _dispatch_vjp(n: Node, g: Node) -> Grads:
    """Tokens get back the sum of what became of their copies."""
    x, gates = n.srcs
    own = own_attributes(n)
    back = apply("combine", COMBINE, g, gates, out=x.shape, phase="backward", **own)
    return (back, _gates_back(n, x, g))


def _combine_vjp(n: Node, g: Node) -> Grads:
    h, gates = n.srcs
    own = own_attributes(n)
    rows = apply("dispatch", DISPATCH, g, gates, out=h.shape, phase="backward", **own)
    return (rows, _gates_back(n, g, h))


def _gates_back(n: Node, tokens: Node, rows: Node) -> Node | None:
    """The gradient of gates that rows were weighed with on their way."""
    if not n["weighted"]:
        return None
    spec = "bsm,erm,bse->bse"
    gates = n.srcs[1]
    return apply("combine_gates", spec, tokens, rows, gates, phase="backward", **own_attributes(n))


def _weigh_vjp(n: Node, g: Node) -> Grads:
    x, w = n.srcs
    z = letters(x)
    back = apply("weigh_bwd", f"{z},{z}->{z[:-1]}", g, x, dtype=w.dtype, phase="backward")
    return (apply("weigh", f"{z},{z[:-1]}->{z}", g, w, phase="backward"), back)


# Copies of tokens stand in any order: a row is of one token.
_ROWS = ("r", ("b", "s"))
_TOP_K = {"top_k": need(int)}
_SCORES = {"fn": choose("softmax", "sigmoid", "sqrtsoftplus")}
_TOPK = {**_TOP_K, **_SCORES, "norm": need(bool)}
_COEFF = {"coeff": need(*NUMBER)}
_AUX = {**_COEFF, **_TOP_K}
_WEIGHTED = {**_TOP_K, "weighted": need(bool)}

ROWS: dict[str, Op] = {
    "topk": Op(topk, _of_logits, flops=8, fuses=True, attrs=_TOPK),
    "topk_bwd": Op(topk_bwd, flops=8, fuses=True, attrs=_TOPK),
    "scores": Op(scores, _of_logits, flops=5, fuses=True, attrs=_SCORES),
    "scores_bwd": Op(scores_bwd, flops=5, fuses=True, attrs=_SCORES),
    "count": Op(count, fuses=True),
    "aux_loss": Op(
        first,
        _aux_loss_vjp,
        flops=2,
        fuses=True,
        attrs=_AUX,
        summary="The gates, with the gradient of the load-balancing loss.",
    ),
    "aux_loss_bwd": Op(aux_loss_bwd, fuses=True, attrs=_AUX),
    "z_loss": Op(
        same,
        _of_logits,
        flops=3,
        fuses=True,
        attrs=_COEFF,
        summary="The router's logits, with the gradient of the z-loss.",
    ),
    "z_loss_bwd": Op(z_loss_bwd, flops=5, fuses=True, attrs=_COEFF),
    "routes": Op(same, no_gradient, fuses=True, summary="The experts of each token; no gradient."),
    "splits": Op(splits, rows=("o", ("b", "s")), fuses=True),
    "dispatch": Op(
        dispatch,
        _dispatch_vjp,
        flops=0,
        multilinear=True,
        rows=_ROWS,
        attrs=_WEIGHTED,
        timing=Timing.TO_EXPERTS,
    ),
    "combine": Op(
        combine,
        _combine_vjp,
        flops=2,
        multilinear=True,
        rows=_ROWS,
        attrs=_WEIGHTED,
        timing=Timing.FROM_EXPERTS,
    ),
    "combine_gates": Op(combine_gates, flops=2, rows=_ROWS, attrs=_WEIGHTED),
    "row_gates": Op(row_gates, reversed_by("row_gates_bwd"), flops=0, rows=_ROWS, attrs=_TOP_K),
    "row_gates_bwd": Op(row_gates_bwd, flops=0, multilinear=True, rows=_ROWS, attrs=_TOP_K),
    "own_experts": Op(own_experts, reversed_by("own_experts_bwd"), flops=0, fuses=True),
    "own_experts_bwd": Op(own_experts_bwd, flops=0, linear=True, fuses=True),
    "weigh": Op(weigh, _weigh_vjp, multilinear=True, fuses=True),
    "weigh_bwd": Op(weigh_bwd, flops=2, multilinear=True, fuses=True),
}
