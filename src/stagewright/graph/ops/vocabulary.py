"""Tables of embeddings, and the loss over the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stagewright.algebra.index import Dim, parse
from stagewright.graph.make import apply, elementwise, elementwise_whole
from stagewright.graph.node import Node
from stagewright.graph.ops.shared import (
    Context,
    first,
    no_gradient,
    probabilities,
    sum_to,
)
from stagewright.graph.table import Grads, Op, need


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


# ---- gradients and costs -------------------------------------------------------------------------


def _first_token_vjp(n: Node, g: Node) -> Grads:
    return (apply("first_token_bwd", "bm->bsm", g, out=n.srcs[0].shape, phase="backward"),)


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
    ins, out = str(n["spec"]).split("->")
    x, t = ins.split(",")
    spec = f"{out},{t}->{x}"
    return (apply("pick_bwd", spec, g, labels, out=logits.shape, phase="backward"), None)


def _nll_vjp(n: Node, g: Node) -> Grads:
    _top, total, _picked = n.srcs
    return (
        None,
        elementwise("divide", g, total, phase="backward"),
        elementwise("scale", g, phase="backward", by=-1.0),
    )


def _log_sum_exp_vjp(n: Node, g: Node) -> Grads:
    return (None, elementwise("divide", g, n.srcs[1], phase="backward"))


def _with_gradient_vjp(n: Node, g: Node) -> Grads:
    """Gradients: the incoming one, and for `x` its product with forward's derivative."""
    _, x, of_x = n.srcs
    value, of, by = str(n["spec"]).lower().split("->")[0].split(",")
    own: dict[str, Any] = {"phase": "backward", "dtype": x.dtype}
    return (g, apply("times", f"{value},{by}->{of}", g, of_x, out=x.shape, **own), None)


def _log_softmax_vjp(n: Node, g: Node) -> Grads:
    return (elementwise_whole("log_softmax_bwd", g, n, phase="backward"),)


def _log_probs_vjp(n: Node, g: Node) -> Grads:
    """Of x's own maximum and sum: g - softmax(x) * sum(g), and the sum of one that is picked is it.

    Then nothing of x is kept, and no sum goes over a split vocabulary (PyTorch's loss_parallel).
    """
    x, _, total = n.srcs
    spec, t = str(n["spec"]).split("->")[1], str(n["spec"]).split(",")[1]
    keep = tuple(range(len(t)))
    summed = g.srcs[0] if g.op == "pick_bwd" else sum_to(g, keep)
    source = total
    while source.op == "identity":
        (source,) = source.srcs
    if source.op != "exp_sum" or source.srcs[0] is not x:
        back = elementwise("scale", summed, phase="backward", by=-1.0)
        return (g, back, elementwise("divide", back, total, phase="backward"))
    own: dict[str, Any] = {"phase": "backward", "temporaries": 1}  # the exponentials
    return (apply("log_probs_bwd", f"{spec},{spec},{t}->{spec}", g, n, summed, **own), None, None)


ROWS: dict[str, Op] = {
    "embedding": Op(embedding, _embedding_vjp, flops=0, gathers=1),
    "embedding_bwd": Op(embedding_bwd, flops=0, multilinear=True, scatters=0, rewrites=True),
    "first_token": Op(first_token, _first_token_vjp, flops=0, fuses=True),
    "first_token_bwd": Op(first_token_bwd, flops=0, fuses=True),
    "log_softmax": Op(log_softmax, _log_softmax_vjp, flops=5, fuses=True),
    "log_softmax_bwd": Op(log_softmax_bwd, flops=4, fuses=True),
    "log_probs": Op(log_probs, _log_probs_vjp, flops=2, fuses=True),
    "log_probs_bwd": Op(log_probs_bwd, flops=3, fuses=True, attrs={"temporaries": need(int)}),
    "max": Op(maximum, no_gradient, fuses=True, reduction="max"),
    "exp_sum": Op(exp_sum, _exp_sum_vjp, flops=3, fuses=True),
    "exp_sum_bwd": Op(exp_sum_bwd, flops=3, fuses=True),
    "pick": Op(pick, _pick_vjp, flops=0, fuses=True),
    "pick_bwd": Op(pick_bwd, flops=0, fuses=True),
    "log_sum_exp": Op(log_sum_exp, _log_sum_exp_vjp, flops=2, fuses=True),
    "softmax_of_group": Op(softmax_of_group, no_gradient, flops=2, fuses=True),
    "with_gradient": Op(
        first,
        _with_gradient_vjp,
        flops=0,
        view=True,
        summary="A value as it is. A second one gets its gradient times a third, the derivative.",
    ),
    "nll": Op(nll, _nll_vjp, flops=3, fuses=True),
}
