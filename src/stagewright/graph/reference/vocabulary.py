"""Tables of embeddings, and the loss over the vocabulary: what they compute, in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

from stagewright.algebra.index import parse
from stagewright.graph.reference.shared import Context, probabilities


def _rows(ctx: Context, tokens: Any, rows: int) -> Any:
    """One-hot of the tokens over this rank's part of the vocabulary."""
    return (tokens[..., None] == ctx.start("v") + np.arange(rows)).astype(float)


def embedding(ctx: Context, tokens: Any, table: Any) -> Any:
    """Rows of a table, by number."""
    spec = parse(ctx["spec"])
    at, of, out = ("".join(d[0] for d in dims) for dims in (*spec.ins, spec.out))
    row = next(x for x in of if x not in out)
    rows = _rows(ctx, tokens, table.shape[of.index(row)])
    return np.einsum(f"{at}{row},{of}->{out}", rows, table)


def embedding_bwd(ctx: Context, g: Any, tokens: Any) -> Any:
    spec = parse(ctx["spec"])
    made, at, of = ("".join(d[0] for d in dims) for dims in (*spec.ins, spec.out))
    row = next(x for x in of if x not in made)
    rows = _rows(ctx, tokens, ctx.shape[of.index(row)])
    return np.einsum(f"{made},{at}{row}->{of}", g, rows)


def first_token(ctx: Context, x: Any) -> Any:
    """The first position of each sequence."""
    return x[:, 0] * float(ctx.start("s") == 0)


def first_token_bwd(ctx: Context, g: Any) -> Any:
    out = np.zeros(ctx.shape)
    if ctx.start("s") == 0:
        out[:, 0] = g
    return out


def maximum(ctx: Context, x: Any) -> Any:
    """The maximum over the last dim."""
    return x.max(-1)


def exp_sum(ctx: Context, x: Any, top: Any) -> Any:
    """The sum of the exponentials of a value minus its maximum."""
    return np.exp(x - top[..., None]).sum(-1)


def exp_sum_bwd(ctx: Context, g: Any, x: Any, top: Any) -> Any:
    return g[..., None] * np.exp(x - top[..., None])


def pick(ctx: Context, x: Any, labels: Any) -> Any:
    """The element of the last dim at a label."""
    return (x * _rows(ctx, labels, x.shape[-1])).sum(-1)


def pick_bwd(ctx: Context, g: Any, labels: Any) -> Any:
    return g[..., None] * _rows(ctx, labels, ctx.shape[-1])


def nll(ctx: Context, top: Any, summed: Any, picked: Any) -> Any:
    """Negative log-likelihood of a maximum, a sum of exponentials and a picked logit."""
    return np.log(summed) + top - picked


def log_softmax(ctx: Context, x: Any) -> Any:
    """The logarithm of softmax over the last dim."""
    return np.log(probabilities(x))


def log_softmax_bwd(ctx: Context, g: Any, y: Any) -> Any:
    return g - np.exp(y) * g.sum(-1, keepdims=True)


def log_probs(ctx: Context, x: Any, top: Any, total: Any) -> Any:
    """Logits minus the logarithm of the sum of their exponentials."""
    return x - (top + np.log(total))[..., None]


def log_probs_bwd(ctx: Context, g: Any, y: Any, summed: Any) -> Any:
    return g - np.exp(y) * summed[..., None]
