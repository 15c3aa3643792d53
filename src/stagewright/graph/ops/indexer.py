"""Indexers that choose the keys of attention (DeepSeek-V3.2, arXiv 2512.02556): rows, gradients.

Queries of several heads, [B, S, heads, width], meet one key of each token; a token's score is the
sum over heads of weight x relu(query . key).
"""

from __future__ import annotations

from typing import Any

from stagewright.graph.make import apply
from stagewright.graph.node import Node
from stagewright.graph.ops.shared import no_gradient
from stagewright.graph.reference import indexer as meaning
from stagewright.graph.reference import shared
from stagewright.graph.table import NUMBER, SIZE, Grads, Op, Timing, may, need, own_attributes


def _scores_vjp(n: Node, g: Node) -> Grads:
    """Scores are made again, then one product each for queries and keys: one joint kernel."""
    ins, out = str(n["spec"]).split("->")
    rows = {"q": (2, 0), "k": (1, 0), **({"w": (0, 0)} if n["weighed"] else {})}
    found: list[Node | None] = []
    for (wrt, products), term, s in zip(rows.items(), ins.split(","), n.srcs, strict=False):
        attrs: dict[str, Any] = {**own_attributes(n), "products": products, "wrt": wrt}
        spec = f"{out},{ins}->{term}"
        own: dict[str, Any] = {"out": s.shape, "dtype": s.dtype, "phase": "backward"}
        found.append(apply("index_scores_bwd", spec, g, *n.srcs, **own, **attrs))
    return (*found, None)


def _loss_vjp(n: Node, g: Node) -> Grads:
    """The loss stands beside a value, whose gradient passes; targets are not trained."""
    _, scores, target = n.srcs
    x = str(n["spec"]).split(",")[1]  # heads may be split, as they are in the value
    attrs = own_attributes(n)
    back = apply("index_loss_bwd", f"{x},{x}->{x}", scores, target, phase="backward", **attrs)
    return (g, back, None)


_ALL = {
    **dict.fromkeys(("causal", "local"), may(bool)),
    **{"width": need(int), "products": need(tuple), "top_block": may(int), "compress": may(int)},
}
_WEIGHED = {"weighed": need(bool)}
_CHOSEN = {**_ALL, "top": need(int)}
_SCORES = {**_CHOSEN, **_WEIGHED}
_SERVED = {"pairs": may(*SIZE), "keys": may(*SIZE), "requests": may(*SIZE)}
_COEFF = {"coeff": need(*NUMBER)}

ROWS: dict[str, Op] = {
    "index_topk": Op(
        meaning.index_topk,
        no_gradient,
        attrs={**_ALL, **_WEIGHED, **_SERVED},
        timing=Timing.SERVED_ATTENTION,
    ),
    "index_scores": Op(
        meaning.index_scores, _scores_vjp, attrs=_SCORES, timing=Timing.SERVED_ATTENTION
    ),
    "index_scores_bwd": Op(
        meaning.index_scores_bwd,
        joint=True,
        attrs={**_SCORES, "wrt": need(str)},
        timing=Timing.SERVED_ATTENTION,
    ),
    "index_target": Op(
        meaning.index_target, no_gradient, attrs=_CHOSEN, timing=Timing.SERVED_ATTENTION
    ),
    "index_loss": Op(
        shared.first,
        _loss_vjp,
        flops=0,
        view=True,
        attrs=_COEFF,
        summary="A value, with the gradient of an indexer's loss beside it.",
    ),
    "index_loss_bwd": Op(meaning.index_loss_bwd, flops=8, fuses=True, attrs=_COEFF),
}
