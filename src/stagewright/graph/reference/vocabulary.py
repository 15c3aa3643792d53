"""Tables of embeddings, and the loss over the vocabulary: what they compute, in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stagewright.algebra.index import Dim, parse
from stagewright.graph.reference.shared import Context, probabilities


def _rows(ctx: Context, tokens: Any, rows: int) -> Any:
    """One-hot of the tokens over this rank's part of the vocabulary, which may be in groups."""
    start = ctx.start("v")
    if "(gv)" in ctx["spec"]:
        start += ctx.start("g") * ctx.size("v")
    return (tokens[..., None] == start + np.arange(rows)).astype(float)


def _letters(dims: Sequence[Dim]) -> str:
    return "".join(x for dim in dims for x in dim)


def _row(of_table: Sequence[Dim], of_rows: str) -> tuple[int, str]:
    """The dim of a table that counts its rows, and its letters: those of rows lack one of them."""
    nth = next(i for i, dim in enumerate(of_table) if not set(dim) <= set(of_rows))
    return nth, "".join(of_table[nth])


def embedding(ctx: Context, tokens: Any, table: Any) -> Any:
    """Rows of a table, by number."""
    spec = parse(ctx["spec"])
    at, out = _letters(spec.ins[0]), _letters(spec.out)
    nth, row = _row(spec.ins[1], out)
    rows = _rows(ctx, tokens, table.shape[nth])
    sizes = [*map(ctx.shape_of, row[:-1]), -1]
    rows = rows.reshape(*rows.shape[:-1], *sizes)
    table = table.reshape(*table.shape[:nth], *sizes, *table.shape[nth + 1 :])
    return np.einsum(f"{at}{row},{_letters(spec.ins[1])}->{out}", rows, table)


def embedding_bwd(ctx: Context, g: Any, tokens: Any) -> Any:
    spec = parse(ctx["spec"])
    made, at = map(_letters, spec.ins)
    nth, row = _row(spec.out, made)
    rows = _rows(ctx, tokens, ctx.shape[nth])
    rows = rows.reshape(*rows.shape[:-1], *map(ctx.shape_of, row[:-1]), -1)
    return np.einsum(f"{made},{at}{row}->{_letters(spec.out)}", g, rows).reshape(ctx.shape)


def first_token(ctx: Context, x: Any) -> Any:
    """The first position of each sequence."""
    return x[:, 0] * float(ctx.start("s") == 0)


def first_token_bwd(ctx: Context, g: Any) -> Any:
    out = np.zeros(ctx.shape)
    if ctx.start("s") == 0:
        out[:, 0] = g
    return out


def _grouped(x: Any, shape: Sequence[int]) -> Any:
    """A value whose last dim is one group, or in the groups of a result of this shape."""
    return x.reshape(*shape, -1)


def maximum(ctx: Context, x: Any) -> Any:
    """The maximum over the last dim, or over each of its groups."""
    return _grouped(x, ctx.shape).max(-1)


def exp_sum(ctx: Context, x: Any, top: Any) -> Any:
    """The sum of the exponentials of a value, or of a group of it, minus its maximum."""
    return np.exp(_grouped(x, top.shape) - top[..., None]).sum(-1)


def exp_sum_bwd(ctx: Context, g: Any, x: Any, top: Any) -> Any:
    return (g[..., None] * np.exp(_grouped(x, top.shape) - top[..., None])).reshape(x.shape)


def log_sum_exp(ctx: Context, top: Any, summed: Any) -> Any:
    """The logarithm of a sum of exponentials, from the sum relative to a maximum."""
    return np.log(summed) + top


def softmax_of_group(ctx: Context, x: Any, lse: Any) -> Any:
    """Exponentials of a value minus the logarithm of the sum of them in each group."""
    return np.exp(_grouped(x, lse.shape) - lse[..., None]).reshape(x.shape)


def pick(ctx: Context, x: Any, labels: Any) -> Any:
    """The element of the last dim at a label; of its groups, 0 where the label is in another."""
    return _grouped(x * _rows(ctx, labels, x.shape[-1]), ctx.shape).sum(-1)


def pick_bwd(ctx: Context, g: Any, labels: Any) -> Any:
    rows = _rows(ctx, labels, ctx.shape[-1])
    return (g[..., None] * _grouped(rows, g.shape)).reshape(rows.shape)


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
