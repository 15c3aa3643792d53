"""Attention and its caches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from stagewright.algebra.index import parse
from stagewright.graph.make import apply
from stagewright.graph.node import Node
from stagewright.graph.ops.shared import Context, probabilities, reversed_by
from stagewright.graph.table import (
    NUMBER,
    SIZE,
    Grads,
    Op,
    Timing,
    batch_and_heads,
    may,
    need,
    own_attributes,
)


def _mask(ctx: Context, queries: int, keys: int) -> Any:
    """0 where a query sees a key, -inf elsewhere."""
    q = ctx.start("q") + np.arange(queries)[:, None]
    k = ctx.start("k") + np.arange(keys)[None, :]
    seen = np.ones((queries, keys), dtype=bool)
    if ctx.get("causal"):
        seen &= k <= q
    if ctx.get("window"):
        seen &= k > q - ctx["window"]
    if ctx.get("chunk"):
        seen &= k // ctx["chunk"] == q // ctx["chunk"]
    return np.where(seen, 0.0, -np.inf)


def chosen_keys(chosen: Any, place: Any, block: int) -> Any:
    """Mask of the keys that a query may see: [B, queries, (groups,) keys].

    `chosen` has numbers of blocks of positions, [B, queries, (groups,) top], -1 where a query has
    fewer; `place` the positions of keys, [B, keys].
    """
    of = (place // block).reshape(len(place), *[1] * (chosen.ndim - 2), -1, 1)
    return (chosen[..., None, :] == of).any(-1)


def _seen_by_heads(chosen: Any) -> Any:
    """The same beside scores [B, groups, heads of a group, queries, keys]."""
    return chosen[:, None, None] if chosen.ndim == 3 else np.moveaxis(chosen, 2, 1)[:, :, None]


def softmax(ctx: Context, x: Any, sinks: Any = None) -> Any:
    """Softmax over the last dim, with a causal mask where asked for."""
    scores = x / math.sqrt(ctx["width"]) + _mask(ctx, x.shape[-2], x.shape[-1])
    return probabilities(scores, None if sinks is None else sinks[:, None, None])


def sinks_bwd(ctx: Context, g: Any, y: Any) -> Any:
    return -((1 - y.sum(-1)) * (g * y).sum(-1)).sum((0, 2))


def softmax_bwd(ctx: Context, g: Any, y: Any) -> Any:
    return y * (g - (g * y).sum(-1, keepdims=True)) / math.sqrt(ctx["width"])


def _width(ctx: Context, q: Any) -> float:
    """Divisor of scores: a head of latents is wider than the head it stands for."""
    return math.sqrt(ctx.get("width", q.shape[-1]))


def attention(ctx: Context, q: Any, *keys: Any) -> Any:
    """Fused attention of queries, keys and values (FlashAttention)."""
    keys, more = _split_operands(ctx, keys)
    return _attend(ctx, q, *_rows(keys, more, ctx.shape[-1]), more)[1]


MORE = ("compressed", "table", "bias", "sinks", "chosen")
"""Optional operands after keys and values, in order; an attribute of the same name selects each."""


def _split_operands(
    ctx: Context, operands: tuple[Any, ...]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Keys and values, and what follows them: a bias of scores, the scores of sinks."""
    names = [name for name in MORE if ctx.get(name)]
    first = len(operands) - len(names)
    return operands[:first], dict(zip(names, operands[first:], strict=True))


def _rows(keys: tuple[Any, ...], more: dict[str, Any], width: int) -> tuple[Any, Any]:
    """Keys and values of heads, compressed ones behind the others."""
    if "compressed" in more:
        keys = (np.concatenate([keys[0], more["compressed"]], axis=1),)
    return _heads(*keys, width=width)


def _heads(k: Any, *v: Any, width: int) -> tuple[Any, Any]:
    """Keys and values of heads; latents, which all share, are keys and their beginning values."""
    return (k, v[0]) if v else (k[:, :, None], k[:, :, None, :width])


def _grouped(q: Any, k: Any) -> Any:
    b, s, a, d = q.shape
    return q.reshape(b, s, k.shape[2], a // k.shape[2], d)


def _attend(ctx: Context, q: Any, k: Any, v: Any, more: dict[str, Any]) -> tuple[Any, Any]:
    x = np.einsum("bqgrd,bkgd->bgrqk", _grouped(q, k), k) / _width(ctx, q)
    if "bias" in more:
        x = x + more["bias"].reshape(1, k.shape[2], -1, *more["bias"].shape[1:])
    sinks = _per_head(more.get("sinks"), k)
    mask = _seen(ctx, q, int(k.shape[1]), more)
    p = probabilities(_cap(ctx, x) + mask, sinks)
    return p, np.einsum("bgrqk,bkgd->bqgrd", p, v).reshape(*q.shape[:3], v.shape[-1])


def _seen(ctx: Context, q: Any, keys: int, more: dict[str, Any]) -> Any:
    """0 where a query sees a key, -inf elsewhere, of every shape that scores may be added to."""
    compressed = int(more["compressed"].shape[1]) if "compressed" in more else 0
    mask = _mask(ctx, q.shape[1], keys - compressed)
    block = ctx.get("compress") or ctx.get("top_block") or 1
    place: Any = ctx.start("k") + np.arange(keys)
    window = mask
    if compressed:  # a row is seen behind the last of its positions
        at: Any = ctx.start("q") + np.arange(int(q.shape[1]))
        place = (np.arange(compressed) + 1) * block - 1
        mask = np.where(place <= at[:, None], 0.0, -np.inf)
    if "chosen" in more:
        own = chosen_keys(more["chosen"], np.tile(place, (len(q), 1)), block)
        mask = mask + np.where(_seen_by_heads(own), 0, -np.inf)
    if not compressed:
        return mask
    beside = np.broadcast_to(window, (*mask.shape[:-2], *window.shape))
    return np.concatenate([beside, mask], axis=-1)


def _per_head(sinks: Any, k: Any) -> Any:
    """Beside scores [sequences, groups, heads of a group, queries, keys]."""
    return None if sinks is None else sinks.reshape(1, k.shape[2], -1, 1, 1)


def _cap(ctx: Context, x: Any) -> Any:
    return ctx["softcap"] * np.tanh(x / ctx["softcap"]) if ctx.get("softcap") else x


def attention_bwd(ctx: Context, g: Any, o: Any, q: Any, *keys: Any) -> Any:
    keys, more = _split_operands(ctx, keys)
    k, v = _rows(keys, more, g.shape[-1])
    p, _ = _attend(ctx, q, k, v, more)
    g5, q5 = _grouped(g, k), _grouped(q, k)
    dv = np.einsum("bgrqk,bqgrd->bkgd", p, g5)
    if ctx["wrt"] == "v":
        return dv
    dp = np.einsum("bqgrd,bkgd->bgrqk", g5, v)
    if ctx["wrt"] == "sinks":
        return -((1 - p.sum(-1)) * (dp * p).sum(-1)).sum((0, 3)).reshape(-1)
    dx = p * (dp - (dp * p).sum(-1, keepdims=True))
    if ctx.get("softcap"):
        x = np.einsum("bqgrd,bkgd->bgrqk", q5, k) / _width(ctx, q)
        dx = dx * (1 - np.tanh(x / ctx["softcap"]) ** 2)
    if ctx["wrt"] == "bias":
        return dx.sum(0).reshape(-1, *dx.shape[-2:])
    dx = dx / _width(ctx, q)
    if ctx["wrt"] == "q":
        return np.einsum("bgrqk,bkgd->bqgrd", dx, k).reshape(q.shape)
    dk = np.einsum("bgrqk,bqgrd->bkgd", dx, q5)
    if len(keys) == 2:
        return dk
    dk[..., : v.shape[-1]] += dv
    many = keys[0].shape[1]
    return dk[:, many:, 0] if ctx["wrt"] == "compressed" else dk[:, :many, 0]


def _buckets(ctx: Context, queries: int, keys: int, many: int) -> Any:
    """Rows of a table of biases, one-hot [queries, keys, rows]: near distances have their own.

    T5 (arXiv 1910.10683, section 2.1) spaces far ones logarithmically; here all far ones are one.
    """
    ahead = np.arange(keys)[None, :] - ctx.start("q") - np.arange(queries)[:, None]
    return (_bucket(ctx["causal"], ahead, many)[..., None] == np.arange(many)).astype(float)


def _bucket(causal: bool, ahead: Any, many: int) -> Any:
    half = many if causal else many // 2
    return np.minimum(np.abs(ahead), half - 1) + (0 if causal else half) * (ahead > 0)


def relative_bias(ctx: Context, table: Any) -> Any:
    """T5's bias of each head by the distance of query and key."""
    _, q, k = ctx.shape
    return np.einsum("va,qkv->aqk", table, _buckets(ctx, q, k, len(table)))


def relative_bias_bwd(ctx: Context, g: Any) -> Any:
    return np.einsum("aqk,qkv->va", g, _buckets(ctx, g.shape[1], g.shape[2], ctx.shape[0]))


# The cache of keys and values. Its slots are in blocks, a block is of one request. The table holds,
# per block, the request and the position of its first token as one number.
FAR = 2**32


def owners(ctx: Context, table: Any, slots: Any, letters: str = "ki") -> tuple[Any, Any]:
    """Request and position that slots hold; the sizes of `letters` are those of slots and blocks.

    Stripes are behind each other: the tokens of a block are dealt to them in turn.
    """
    striped = ctx.get("block") is not None
    many, blocks = letters
    width = ctx.value("block") if striped else ctx.size(many) // ctx.size(blocks)
    stripe, here = np.divmod(slots, width * table.shape[1])
    request, first = np.divmod(np.take_along_axis(table, here // width, axis=1), FAR)
    return request, first + here % width * (ctx.value("stripes") if striped else 1) + stripe


def cached_attention(ctx: Context, q: Any, *rest: Any) -> Any:
    """A token sees what the cache holds of its request up to its own position.

    Rows gathered from the cache come with their slots; there are as many as slots where this runs.
    """
    rest, more = _split_operands(ctx, rest)
    many = 1 if ctx.get("latent") else 2
    slots, table, *gathered = rest[many:]
    places = ctx.start("k") + np.arange(int(rest[0].shape[1]))[None, :]
    places = gathered[0] if gathered else places
    k, v = _heads(*rest[:many], width=ctx.shape[-1])
    asks, at = owners(ctx, table, slots)
    holds, place = owners(ctx, table, np.broadcast_to(places, (len(table), places.shape[-1])))
    seen = asks[:, :, None] == holds[:, None, :]
    ahead = place[:, None, :] - at[:, :, None]
    causal = ctx.get("causal", True)
    if causal:
        seen &= ahead <= 0
    if ctx.get("window"):
        seen &= place[:, None, :] > at[:, :, None] - ctx["window"]
    if ctx.get("chunk"):
        seen &= place[:, None, :] // ctx["chunk"] == at[:, :, None] // ctx["chunk"]
    bias: Any = 0.0
    if "compressed" in more:
        return _with_compressed(ctx, q, rest[0], seen, (asks, at), more)
    if "chosen" in more:
        own = chosen_keys(more["chosen"], place, ctx.get("top_block") or 1)
        bias = np.where(_seen_by_heads(own), 0, -np.inf)
    if "bias" in more:  # [sequences, queries, keys, heads]
        bias = more["bias"][_bucket(causal, np.clip(ahead, -(2**20), 2**20), len(more["bias"]))]
        bias = np.moveaxis(bias, 3, 1).reshape(len(q), k.shape[2], -1, *bias.shape[1:3])
    p = probabilities(_scores(ctx, q, k, seen) + bias, _per_head(more.get("sinks"), k))
    return np.einsum("bgrqk,bkgd->bqgrd", p, v).reshape(*q.shape[:3], v.shape[-1])


def _with_compressed(
    ctx: Context, q: Any, rows: Any, seen: Any, who: tuple[Any, Any], more: dict[str, Any]
) -> Any:
    """Attention to the rows of a window, and to compressed rows in a cache of their own."""
    asks, at = who
    every: Any = np.arange(int(more["compressed"].shape[1]))
    places: Any = np.broadcast_to(every[None, :], (len(q), every.size))
    holds, number = owners(ctx, more["table"], places, "jz")
    place = (number + 1) * ctx["compress"] - 1
    behind = (asks[:, :, None] == holds[:, None, :]) & (place[:, None, :] <= at[:, :, None])
    if "chosen" in more:
        behind &= chosen_keys(more["chosen"], place, ctx["compress"])
    k = np.concatenate([rows, more["compressed"]], axis=1)[:, :, None]
    x = _scores(ctx, q, k, np.concatenate([seen, behind], axis=2))
    p = probabilities(x, _per_head(more.get("sinks"), k))
    return np.einsum("bgrqk,bkgd->bqgrd", p, k).reshape(*q.shape[:3], k.shape[-1])


def _scores(ctx: Context, q: Any, k: Any, seen: Any) -> Any:
    x = np.einsum("bqgrd,bkgd->bgrqk", _grouped(q, k), k) / math.sqrt(ctx["width"])
    return _cap(ctx, x) + np.where(seen, 0.0, -np.inf)[:, None, None]


def striped_attention(ctx: Context, q: Any, *rest: Any) -> Any:
    """The same to the keys of each stripe alone; or logarithms of its sums of exponentials."""
    *caches, slots, table = rest
    asks, at = owners(ctx, table, slots)
    width = 1 if ctx.get("sums") else ctx.shape[-1]
    found: list[Any] = []
    for nth in range(int(caches[0].shape[1])):
        k, v = _heads(*(x[:, nth] for x in caches), width=width)
        many = int(k.shape[1])
        places = (ctx.start("n") + nth) * many + np.arange(many)[None, :]
        holds, place = owners(ctx, table, np.broadcast_to(places, (len(table), many)))
        seen = (asks[:, :, None] == holds[:, None, :]) & (place[:, None, :] <= at[:, :, None])
        e = np.exp(_scores(ctx, q, k, seen))
        total = e.sum(-1)  # [sequences, groups, heads of a group, queries]; 0 where it sees none
        if ctx.get("sums"):
            with np.errstate(divide="ignore"):
                found.append(np.log(np.moveaxis(total, 3, 1)).reshape(q.shape[:3]))
            continue
        o = np.einsum("bgrqk,bkgd->bqgrd", e / np.maximum(total, 1e-300)[..., None], v)
        found.append(o.reshape(*q.shape[:3], v.shape[-1]))
    return np.stack(found)


def merge_stripes(ctx: Context, o: Any, sums: Any, sinks: Any = None) -> Any:
    """Sum of the stripes' results, each weighted by its part of the sum of exponentials."""
    whole = np.exp(sums).sum(0) + (0.0 if sinks is None else np.exp(sinks))
    own = sums[ctx.start("n") :][: len(o)]
    return (o * (np.exp(own) / whole)[..., None]).sum(0)


def cache(ctx: Context, old: Any, new: Any, slots: Any) -> Any:
    """The cache with new rows in their slots."""
    out: Any = np.array(old, dtype=float)
    striped = parse(ctx["spec"]).out[1] == ("n",)
    table = out if striped else out[:, None]
    stripe, at = np.divmod(slots, ctx.size("k"))
    stripe, at = stripe - (ctx.start("n") if striped else 0), at - ctx.start("k")
    here = (stripe >= 0) & (stripe < table.shape[1]) & (at >= 0) & (at < table.shape[2])
    for b, s in zip(*np.nonzero(here), strict=True):
        table[b, stripe[b, s], at[b, s]] = new[b, s]
    return out


def take(ctx: Context, x: Any, rows: Any) -> Any:
    return np.take_along_axis(x, rows[..., None], axis=rows.ndim - 1).reshape(ctx.shape)


# ---- gradients and costs -------------------------------------------------------------------------


def _row_sums(n: Node, here: Mapping[str, Any]) -> Any:
    """Bytes of the logarithm of each row's sum of exponentials, which flash attention leaves for
    its backward (arXiv 2307.08691, algorithm 1)."""
    return 4 * batch_and_heads(here) * here["q"]


def _forward_again(n: Node, here: Mapping[str, Any]) -> Any:
    """Bytes of forward that its backward reads besides its operands (algorithm 2): the sums of
    rows. Once, in the one kernel that makes all gradients."""
    return _row_sums(n, here) if n["wrt"] == "q" else 0


def _merge_flops(n: Node, here: Mapping[str, Any]) -> Any:
    """A product for each channel of each stripe, and of each row the weights of all stripes."""
    rows = math.prod(v for x, v in here.items() if x not in "nmv")
    return rows * (here["n"] * here["v"] + 4 * here["m"])


def _attention_vjp(n: Node, g: Node) -> Grads:
    ins, out = str(n["spec"]).split("->")
    # Flash attention's backward does five products where forward does two (arXiv 2205.14135,
    # section 3.2): scores again and dP for dq, with dQ; dK; dV. One kernel: the rows are joint.
    # Latents that are keys and values get both gradients.
    more = {name: (0, 0) for name in MORE if n.get(name)}
    values = {"k": (1, 0), "v": (0, 1)} if len(n.srcs) - len(more) == 3 else {"k": (1, 1)}
    rows = {"q": (2, 1), **values, **more}
    found: list[Node | None] = []
    for (wrt, products), term, s in zip(rows.items(), ins.split(","), n.srcs, strict=True):
        if wrt == "chosen":
            found.append(None)
            continue
        attrs: dict[str, Any] = {**own_attributes(n), "products": products, "wrt": wrt}
        # Its own result is an operand: with the gradient it gives the sum of dP * P of each row.
        spec = f"{out},{out},{ins}->{term}"
        back = apply("attention_bwd", spec, g, n, *n.srcs, out=s.shape, phase="backward", **attrs)
        found.append(back)
    return tuple(found)


def _softmax_vjp(n: Node, g: Node) -> Grads:
    ins, x = str(n["spec"]).split("->")
    back = apply("softmax_bwd", f"{x},{x}->{x}", g, n, phase="backward", width=n["width"])
    if len(n.srcs) == 1:
        return (back,)
    heads = ins.split(",")[1]
    return (back, apply("sinks_bwd", f"{x},{x}->{heads}", g, n, phase="backward"))


# Which keys a query sees; and per key, what scores are divided by and limited to.
# `top`: so many of them, those that an indexer chose, in blocks of `top_block`. `compress`: so many
# positions have one compressed key; beside a window, of all positions before it.
_SEEN = {
    "causal": may(bool),
    "window": may(int),
    "chunk": may(int),
    "top": may(int),
    "top_block": may(int),
    "compress": may(int),
}
_SCORES = {
    "width": may(int), "softcap": may(*NUMBER),
    **dict.fromkeys(MORE, may(bool)),
}  # fmt: skip
# Products over the widths of keys and of values, which the kernel makes for each pair.
_ATTENTION = {**_SEEN, **_SCORES, "products": may(tuple)}
# What a text in the paper's notation need not write: plain causal attention, a product for each.
_IMPLIED = {
    "causal": may(bool, implied=True),
    "window": may(int, implied=0),
    "softcap": may(*NUMBER, implied=0),
    "products": may(tuple, implied=(1, 1)),
}
_CACHED = {
    **_ATTENTION, "latent": may(bool), "requests": need(*SIZE),
    # Of query and key; keys that are read, and of compressed ones.
    "pairs": need(*SIZE), "keys": may(*SIZE), "compressed_keys": may(*SIZE),
    "stripes": may(*SIZE), "block": may(*SIZE),
}  # fmt: skip
_SOFTMAX = {
    **_SEEN,
    "causal": may(bool, implied=False),
    "window": may(int, implied=0),
    "width": need(int, implied=1),
}
_CAUSAL = {"causal": need(bool)}

ROWS: dict[str, Op] = {
    "attention": Op(
        attention,
        _attention_vjp,
        ring=("q", "k"),
        scratch=_row_sums,
        attrs={**_ATTENTION, **_IMPLIED},
        timing=Timing.ATTENTION,
    ),
    "attention_bwd": Op(
        attention_bwd,
        ring=("q", "k"),
        joint=True,
        scratch=_forward_again,
        attrs={**_ATTENTION, "wrt": need(str)},
        timing=Timing.ATTENTION_BACKWARD,
    ),
    "cached_attention": Op(cached_attention, attrs=_CACHED, timing=Timing.CACHED_ATTENTION),
    "varlen_attention": Op(cached_attention, attrs=_CACHED, timing=Timing.SERVED_ATTENTION),
    "striped_attention": Op(
        striped_attention,
        joint=True,
        attrs={**_CACHED, "sums": may(bool)},
        timing=Timing.SERVED_ATTENTION,
    ),
    "merge_stripes": Op(merge_stripes, flops=_merge_flops),
    "relative_bias": Op(
        relative_bias, reversed_by("relative_bias_bwd"), flops=0, gathers=0, attrs=_CAUSAL
    ),
    "relative_bias_bwd": Op(relative_bias_bwd, multilinear=True, attrs=_CAUSAL),
    "softmax": Op(softmax, _softmax_vjp, flops=5, fuses=True, attrs=_SOFTMAX),
    "softmax_bwd": Op(softmax_bwd, flops=4, fuses=True, attrs={"width": need(int)}),
    "sinks_bwd": Op(sinks_bwd, flops=4, fuses=True),
    "cache": Op(cache, flops=0, fuses=True, scatters=1, attrs={"kept_tokens": may(*SIZE)}),
    "take": Op(take, flops=0, gathers=0),
}
