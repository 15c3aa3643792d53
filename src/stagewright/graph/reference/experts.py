"""Routing, and copies of tokens to experts and back: what they compute, in numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from stagewright.algebra.index import parse
from stagewright.graph.reference.dense import einsum
from stagewright.graph.reference.shared import Context, probabilities, sigmoid


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
