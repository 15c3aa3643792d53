"""Indexers that choose the keys of attention (DeepSeek-V3.2, arXiv 2512.02556).

Queries of several heads, [B, S, heads, width], meet one key of each token; a token's score is the
sum over heads of weight x relu(query . key). Scores are [B, queries, groups, blocks of keys]: where
all heads of an indexer add up to one score of a key there is one group; a block has one key but
where `top_block` says how many.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stagewright.graph.make import apply
from stagewright.graph.node import Node
from stagewright.graph.ops.attention import chosen_keys, owners
from stagewright.graph.ops.shared import Context, first, no_gradient, probabilities
from stagewright.graph.table import NUMBER, SIZE, Grads, Op, Timing, may, need, own_attributes

NOT_SEEN = -1e30
"""The score of a key that a query does not see."""


def _products(ctx: Context, q: Any, k: Any) -> Any:
    return np.einsum("bqad,bkd->bqak", q, k) / np.sqrt(ctx["width"])


def _scores(ctx: Context, q: Any, k: Any, w: Any) -> Any:
    """Scores of every key, [B, queries, groups, keys]: summed over heads, or of each head."""
    x = _products(ctx, q, k)
    return x if w is None else np.einsum("bqak,bqa->bqk", np.maximum(x, 0), w)[:, :, None]


def _weights(ctx: Context, rest: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The weights of heads, where there are some, and the operands after them."""
    return (rest[0], rest[1:]) if ctx["weighed"] else (None, rest)


def _in_turn(ctx: Context, queries: int, keys: int, batch: int) -> tuple[Any, Any]:
    """The positions of queries [B, queries] and keys [B, keys] of whole sequences.

    A key of several positions is at the last of these.
    """
    at = ctx.start("q") + np.arange(queries)
    each = ctx.get("compress") or 1
    return np.tile(at, (batch, 1)), np.tile((np.arange(keys) + 1) * each - 1, (batch, 1))


def _blocks(ctx: Context, x: Any, seen: Any, place: Any, many: int) -> tuple[Any, Any]:
    """The highest score of each block, and which key has it; `seen` is [B, queries, keys]."""
    best: Any = np.full((*x.shape[:3], many), NOT_SEEN)
    which: Any = np.zeros(best.shape, dtype=int)
    for block in range(many):
        mine = seen & (place // _width(ctx) == block)[:, None, :]
        of = np.where(mine[:, :, None], x, NOT_SEEN)
        best[..., block], which[..., block] = of.max(-1), of.argmax(-1)
    return best, which


def _width(ctx: Context) -> int:
    return int(ctx.get("top_block") or 1)


def _one(ctx: Context, x: Any) -> Any:
    """Without groups, where all heads add up to one score."""
    return x[:, :, 0] if ctx["weighed"] else x


def index_topk(ctx: Context, q: Any, k: Any, *rest: Any) -> Any:
    """Numbers of the blocks of positions with the highest scores, [B, queries, (groups,) top].

    -1 stands where there are fewer. In inference keys are slots of a cache, of which those count
    that hold tokens of the query's request up to its own.
    """
    w, served = _weights(ctx, rest)
    x = _scores(ctx, q, k, w)
    if served:
        *who, table = served
        asks, at = who if ctx.get("compress") else owners(ctx, table, who[0])
        every: Any = np.arange(int(k.shape[1]))
        places: Any = np.broadcast_to(every[None, :], (len(table), every.size))
        holds, place = owners(ctx, table, places)
        each = ctx.get("compress") or 1
        place = (place + 1) * each - 1
        seen = (asks[:, :, None] == holds[:, None, :]) & (place[:, None, :] <= at[:, :, None])
    else:
        at, place = _in_turn(ctx, q.shape[1], k.shape[1], len(q))
        seen = place[:, None, :] <= at[:, :, None]
    many = int(at.max()) // _width(ctx) + 1
    scores, _ = _blocks(ctx, x, seen, place, many)
    valid = scores > NOT_SEEN
    if ctx.get("local"):  # a query's own block is always chosen
        np.put_along_axis(
            scores, at[:, :, None, None] // _width(ctx) + 0 * valid[..., :1], np.inf, -1
        )
    order = np.argsort(-scores, axis=-1, kind="stable")
    order = np.where(np.take_along_axis(valid, order, axis=-1), order, -1)
    top = ctx.shape[-1]
    short = [(0, 0)] * 3 + [(0, max(0, top - many))]
    return _one(ctx, np.pad(order, short, constant_values=-1)[..., :top])


def _chosen_scores(ctx: Context, q: Any, k: Any, w: Any, chosen: Any) -> tuple[Any, Any, Any]:
    """The scores of chosen blocks, the keys that have them, and whether the query sees them."""
    at, place = _in_turn(ctx, q.shape[1], k.shape[1], len(q))
    many = int(place.max()) // _width(ctx) + 1
    seen = place[:, None, :] <= at[:, :, None]
    scores, which = _blocks(ctx, _scores(ctx, q, k, w), seen, place, many)
    chosen = chosen[:, :, None] if chosen.ndim == 3 else chosen
    here = np.clip(chosen, 0, many - 1).astype(int)
    of = np.take_along_axis(scores, here, axis=-1)
    valid = (chosen >= 0) & (chosen < many) & (of > NOT_SEEN)
    return np.where(valid, of, NOT_SEEN), np.take_along_axis(which, here, axis=-1), valid


def index_scores(ctx: Context, q: Any, k: Any, *rest: Any) -> Any:
    """The scores of chosen keys or blocks, [B, queries, (groups,) top]."""
    w, (chosen,) = _weights(ctx, rest)
    return _one(ctx, _chosen_scores(ctx, q, k, w, chosen)[0])


def index_scores_bwd(ctx: Context, g: Any, q: Any, k: Any, *rest: Any) -> Any:
    w, (chosen,) = _weights(ctx, rest)
    _, keys, valid = _chosen_scores(ctx, q, k, w, chosen)
    g = g[:, :, None] if g.ndim == 3 else g
    whole: Any = np.zeros((*valid.shape[:3], k.shape[1]))
    b, s, h = np.ogrid[: valid.shape[0], : valid.shape[1], : valid.shape[2]]
    np.add.at(whole, (b[..., None], s[..., None], h[..., None], keys), np.where(valid, g, 0))
    dx = whole
    if w is not None:
        x = _products(ctx, q, k)
        if ctx["wrt"] == "w":
            return np.einsum("bqk,bqak->bqa", whole[:, :, 0], np.maximum(x, 0))
        dx = np.einsum("bqk,bqa,bqak->bqak", whole[:, :, 0], w, x > 0)
    dx = dx / np.sqrt(ctx["width"])
    if ctx["wrt"] == "q":
        return np.einsum("bqak,bkd->bqad", dx, k)
    return np.einsum("bqak,bqad->bkd", dx, q)


def index_target(ctx: Context, q: Any, k: Any, chosen: Any) -> Any:
    """Attention that each chosen key or block gets from the heads of this rank.

    The result is [B, queries, top], of all heads, or [B, queries, groups, top].
    """
    grouped = chosen.ndim == 4
    chosen = chosen if grouped else chosen[:, :, None]
    at, place = _in_turn(ctx, q.shape[1], k.shape[1], len(q))
    seen = (place[:, None, :] <= at[:, :, None])[:, :, None]
    seen = seen & chosen_keys(chosen, place, _width(ctx))
    k = k if grouped else k[:, :, None]
    q = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    x = np.einsum("bqgrd,bkgd->bqgrk", q, k) / np.sqrt(ctx["width"])
    p = probabilities(x + np.where(seen, 0, NOT_SEEN)[:, :, :, None]).sum(3)
    many = int(place.max()) // _width(ctx) + 1
    of = np.stack(
        [(p * (place // _width(ctx) == j)[:, None, None]).sum(-1) for j in range(many)], axis=-1
    )
    here = np.clip(chosen, 0, many - 1).astype(int)
    found = np.where((chosen >= 0) & (chosen < many), np.take_along_axis(of, here, axis=-1), 0)
    return found if grouped else found[:, :, 0]


def index_loss_bwd(ctx: Context, scores: Any, target: Any) -> Any:
    """The gradient of KL(target || softmax(scores)) of each query, whose target adds up to one."""
    total = target.sum(-1, keepdims=True)
    return ctx["coeff"] * (probabilities(scores) - target / np.maximum(total, 1e-30))


# ---- gradients and costs -------------------------------------------------------------------------


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
        index_topk,
        no_gradient,
        attrs={**_ALL, **_WEIGHED, **_SERVED},
        timing=Timing.SERVED_ATTENTION,
    ),
    "index_scores": Op(index_scores, _scores_vjp, attrs=_SCORES, timing=Timing.SERVED_ATTENTION),
    "index_scores_bwd": Op(
        index_scores_bwd,
        joint=True,
        attrs={**_SCORES, "wrt": need(str)},
        timing=Timing.SERVED_ATTENTION,
    ),
    "index_target": Op(index_target, no_gradient, attrs=_CHOSEN, timing=Timing.SERVED_ATTENTION),
    "index_loss": Op(
        first,
        _loss_vjp,
        flops=0,
        view=True,
        attrs=_COEFF,
        summary="A value, with the gradient of an indexer's loss beside it.",
    ),
    "index_loss_bwd": Op(index_loss_bwd, flops=8, fuses=True, attrs=_COEFF),
}
