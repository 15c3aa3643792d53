"""Indexers that choose the keys of attention: what they compute, in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

from stagewright.graph.reference.attention import chosen_keys, owners
from stagewright.graph.reference.shared import Context, probabilities

NOT_SEEN = -1e30
"""The score of a key that a query does not see."""


def _products(ctx: Context, q: Any, k: Any) -> Any:
    return np.einsum("bqad,bkd->bqak", q, k) / np.sqrt(ctx["width"])


def _scores(ctx: Context, q: Any, k: Any, w: Any) -> Any:
    """Of every key for every query, [B, queries, keys]: a weighed sum over heads."""
    return np.einsum("bqak,bqa->bqk", np.maximum(_products(ctx, q, k), 0), w)


def _before(ctx: Context, queries: int, keys: int) -> Any:
    """Whether a key is no later than a query, [queries, keys]."""
    return np.arange(keys)[None, :] <= (ctx.start("q") + np.arange(queries))[:, None]


def index_topk(ctx: Context, q: Any, k: Any, w: Any, *served: Any) -> Any:
    """Numbers of the keys with the highest scores, [B, queries, top]; -1 where there are fewer.

    Of a cache: its slots, of those that hold tokens of the query's request up to its own.
    """
    scores = _scores(ctx, q, k, w)
    if served:
        slots, table = served
        asks, at = owners(ctx, table, slots)
        every: Any = np.arange(int(k.shape[1]))
        places: Any = np.broadcast_to(every[None, :], (len(table), every.size))
        holds, place = owners(ctx, table, places)
        seen = (asks[:, :, None] == holds[:, None, :]) & (place[:, None, :] <= at[:, :, None])
    else:
        seen = np.broadcast_to(_before(ctx, *scores.shape[1:]), scores.shape)
    order = np.argsort(np.where(seen, -scores, np.inf), axis=-1, kind="stable")
    order = np.where(np.take_along_axis(seen, order, axis=-1), order, -1)
    short = max(0, ctx.shape[-1] - order.shape[-1])
    return np.pad(order, ((0, 0), (0, 0), (0, short)), constant_values=-1)[..., : ctx.shape[-1]]


def _valid(ctx: Context, chosen: Any, keys: int) -> Any:
    """Whether a number is that of a key which the query sees, [B, queries, top]."""
    at = np.clip(chosen, 0, keys - 1).astype(int)
    before = np.broadcast_to(_before(ctx, chosen.shape[1], keys), (*chosen.shape[:2], keys))
    return at, (chosen >= 0) & np.take_along_axis(before, at, axis=-1)


def index_scores(ctx: Context, q: Any, k: Any, w: Any, chosen: Any) -> Any:
    """The scores of chosen keys, [B, queries, top]."""
    at, valid = _valid(ctx, chosen, k.shape[1])
    return np.where(valid, np.take_along_axis(_scores(ctx, q, k, w), at, axis=-1), NOT_SEEN)


def index_scores_bwd(ctx: Context, g: Any, q: Any, k: Any, w: Any, chosen: Any) -> Any:
    at, valid = _valid(ctx, chosen, k.shape[1])
    whole: Any = np.zeros((*q.shape[:2], k.shape[1]))
    b, s = np.ogrid[: q.shape[0], : q.shape[1]]
    np.add.at(whole, (b[..., None], s[..., None], at), np.where(valid, g, 0))
    x = _products(ctx, q, k)
    if ctx["wrt"] == "w":
        return np.einsum("bqk,bqak->bqa", whole, np.maximum(x, 0))
    dx = np.einsum("bqk,bqa,bqak->bqak", whole, w, x > 0) / np.sqrt(ctx["width"])
    if ctx["wrt"] == "q":
        return np.einsum("bqak,bkd->bqad", dx, k)
    return np.einsum("bqak,bqad->bkd", dx, q)


def index_target(ctx: Context, q: Any, k: Any, chosen: Any) -> Any:
    """How much attention each chosen key gets from the heads at hand, [B, queries, top]."""
    at, valid = _valid(ctx, chosen, k.shape[1])
    seen = chosen_keys(chosen, k.shape[1]) & _before(ctx, q.shape[1], k.shape[1])
    p = probabilities(_products(ctx, q, k) + np.where(seen, 0, NOT_SEEN)[:, :, None])
    return np.where(valid, np.take_along_axis(p.sum(2), at, axis=-1), 0)


def index_loss_bwd(ctx: Context, scores: Any, target: Any) -> Any:
    """The gradient of KL(target || softmax(scores)) of each query, whose target adds up to one."""
    total = target.sum(-1, keepdims=True)
    return ctx["coeff"] * (probabilities(scores) - target / np.maximum(total, 1e-30))
