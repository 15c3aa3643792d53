"""Tables of embeddings, and the loss over the vocabulary: rows and gradients."""

from __future__ import annotations

from typing import Any

from stagewright.graph.make import apply, elementwise, elementwise_whole
from stagewright.graph.node import Node
from stagewright.graph.ops.shared import no_gradient, sum_to
from stagewright.graph.reference import shared
from stagewright.graph.reference import vocabulary as meaning
from stagewright.graph.table import Grads, Op, need


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
    "embedding": Op(meaning.embedding, _embedding_vjp, flops=0, gathers=1),
    "embedding_bwd": Op(
        meaning.embedding_bwd, flops=0, multilinear=True, scatters=0, rewrites=True
    ),
    "first_token": Op(meaning.first_token, _first_token_vjp, flops=0, fuses=True),
    "first_token_bwd": Op(meaning.first_token_bwd, flops=0, fuses=True),
    "log_softmax": Op(meaning.log_softmax, _log_softmax_vjp, flops=5, fuses=True),
    "log_softmax_bwd": Op(meaning.log_softmax_bwd, flops=4, fuses=True),
    "log_probs": Op(meaning.log_probs, _log_probs_vjp, flops=2, fuses=True),
    "log_probs_bwd": Op(
        meaning.log_probs_bwd, flops=3, fuses=True, attrs={"temporaries": need(int)}
    ),
    "max": Op(meaning.maximum, no_gradient, fuses=True, reduction="max"),
    "exp_sum": Op(meaning.exp_sum, _exp_sum_vjp, flops=3, fuses=True),
    "exp_sum_bwd": Op(meaning.exp_sum_bwd, flops=3, fuses=True),
    "pick": Op(meaning.pick, _pick_vjp, flops=0, fuses=True),
    "pick_bwd": Op(meaning.pick_bwd, flops=0, fuses=True),
    "log_sum_exp": Op(meaning.log_sum_exp, _log_sum_exp_vjp, flops=2, fuses=True),
    "softmax_of_group": Op(meaning.softmax_of_group, no_gradient, flops=2, fuses=True),
    "with_gradient": Op(
        shared.first,
        _with_gradient_vjp,
        flops=0,
        view=True,
        summary="A value as it is. A second one gets its gradient times a third, the derivative.",
    ),
    "nll": Op(meaning.nll, _nll_vjp, flops=3, fuses=True),
}
