"""Mixture of experts: routing, and copies of tokens to experts and back: rows and gradients."""

from __future__ import annotations

from stagewright.graph.make import COMBINE, DISPATCH, apply, elementwise_whole, letters, weigh
from stagewright.graph.node import Node
from stagewright.graph.ops.shared import no_gradient
from stagewright.graph.reference import experts as meaning
from stagewright.graph.reference import shared
from stagewright.graph.table import NUMBER, Grads, Op, Timing, choose, need, own_attributes


def _topk_vjp(n: Node, g: Node) -> Grads:
    logits = n.srcs[0]
    spec = f"{n['spec']}".split("->")[1]
    back = apply(
        "topk_bwd", f"{spec},{spec}->{spec}", g, logits, phase="backward", **own_attributes(n)
    )
    return (back, None)[: len(n.srcs)]


def _scores_vjp(n: Node, g: Node) -> Grads:
    return (elementwise_whole("scores_bwd", g, n.srcs[0], phase="backward", **own_attributes(n)),)


def _aux_loss_vjp(n: Node, g: Node) -> Grads:
    """The loss is of the scores, and stands beside the gates; counts have no gradient."""
    _, scores, counts = str(n["spec"]).split("->")[0].split(",")
    attrs = own_attributes(n)
    back = f"{counts}->{scores}"
    d_scores = apply(
        "aux_loss_bwd", back, n.srcs[2], out=g.shape, dtype=g.dtype, phase="backward", **attrs
    )
    return (g, d_scores, None)


def _z_loss_vjp(n: Node, g: Node) -> Grads:
    return (elementwise_whole("z_loss_bwd", g, n.srcs[0], phase="backward", **own_attributes(n)),)


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


def _row_gates_vjp(n: Node, g: Node) -> Grads:
    (gates,) = n.srcs
    own = own_attributes(n)
    return (apply("row_gates_bwd", "er->bse", g, out=gates.shape, phase="backward", **own),)


def _own_experts_vjp(n: Node, g: Node) -> Grads:
    return (apply("own_experts_bwd", "bsf->bsE", g, out=n.shape, phase="backward"),)


def _weigh_vjp(n: Node, g: Node) -> Grads:
    x, w = n.srcs
    z = letters(x)
    back = apply("weigh_bwd", f"{z},{z}->{z[:-1]}", g, x, dtype=w.dtype, phase="backward")
    return (weigh(g, w, phase="backward"), back)


# Copies of tokens stand in any order: a row is of one token.
_ROWS = ("r", ("b", "s"))
_TOP_K = {"top_k": need(int)}
_SCORES = {"fn": choose("softmax", "sigmoid", "sqrtsoftplus")}
_TOPK = {**_TOP_K, **_SCORES, "norm": need(bool)}
_COEFF = {"coeff": need(*NUMBER)}
_AUX = {**_COEFF, **_TOP_K}
_WEIGHTED = {**_TOP_K, "weighted": need(bool)}

ROWS: dict[str, Op] = {
    "topk": Op(meaning.topk, _topk_vjp, flops=8, fuses=True, attrs=_TOPK),
    "topk_bwd": Op(meaning.topk_bwd, flops=8, fuses=True, attrs=_TOPK),
    "scores": Op(meaning.scores, _scores_vjp, flops=5, fuses=True, attrs=_SCORES),
    "scores_bwd": Op(meaning.scores_bwd, flops=5, fuses=True, attrs=_SCORES),
    "count": Op(meaning.count, fuses=True),
    "aux_loss": Op(
        shared.first,
        _aux_loss_vjp,
        flops=2,
        fuses=True,
        attrs=_AUX,
        summary="The gates, with the gradient of the load-balancing loss.",
    ),
    "aux_loss_bwd": Op(meaning.aux_loss_bwd, fuses=True, attrs=_AUX),
    "z_loss": Op(
        shared.same,
        _z_loss_vjp,
        flops=3,
        fuses=True,
        attrs=_COEFF,
        summary="The router's logits, with the gradient of the z-loss.",
    ),
    "z_loss_bwd": Op(meaning.z_loss_bwd, flops=5, fuses=True, attrs=_COEFF),
    "routes": Op(
        shared.same, no_gradient, fuses=True, summary="The experts of each token; no gradient."
    ),
    "splits": Op(meaning.splits, rows=("o", ("b", "s")), fuses=True),
    "dispatch": Op(
        meaning.dispatch,
        _dispatch_vjp,
        flops=0,
        multilinear=True,
        rows=_ROWS,
        attrs=_WEIGHTED,
        timing=Timing.TO_EXPERTS,
    ),
    "combine": Op(
        meaning.combine,
        _combine_vjp,
        flops=2,
        multilinear=True,
        rows=_ROWS,
        attrs=_WEIGHTED,
        timing=Timing.FROM_EXPERTS,
    ),
    "combine_gates": Op(meaning.combine_gates, flops=2, rows=_ROWS, attrs=_WEIGHTED),
    "row_gates": Op(meaning.row_gates, _row_gates_vjp, flops=0, rows=_ROWS, attrs=_TOP_K),
    "row_gates_bwd": Op(meaning.row_gates_bwd, flops=0, multilinear=True, rows=_ROWS, attrs=_TOP_K),
    "own_experts": Op(meaning.own_experts, _own_experts_vjp, flops=0, fuses=True),
    "own_experts_bwd": Op(meaning.own_experts_bwd, flops=0, linear=True, fuses=True),
    "weigh": Op(meaning.weigh, _weigh_vjp, multilinear=True, fuses=True),
    "weigh_bwd": Op(meaning.weigh_bwd, flops=2, multilinear=True, fuses=True),
}
