"""Attention to a window and to compressed keys of all positions before it (DeepSeek-V4).

A position has one row, which all heads read as key and as value. Several positions together have
one row more, a sum that a gate weighs. A query sees the rows of its window, and of the compressed
rows all whose positions lie before it (`compressed`), or those that an indexer chooses of these
(`compressed_indexed`). Names of transformers' `DeepseekV4Attention` stand in the comments.
"""

from __future__ import annotations

from typing import Any

from stagewright.algebra.size import Size, size
from stagewright.blocks.builder import Builder
from stagewright.blocks.cache import Choice, KvCache, cached
from stagewright.blocks.indexer import OWN as INDEXER
from stagewright.blocks.indexer import IndexerOperands, chosen_by, with_loss
from stagewright.blocks.inference import state_of, token_requests
from stagewright.graph.make import apply, identity, join, part
from stagewright.graph.node import Node
from stagewright.graph.roles import Role
from stagewright.model.layers import Reach

OWN: dict[str, Any] = {"scope": "attention"}
ONLY: dict[str, Any] = {**OWN, "trained": False}


def attention_of_groups(b: Builder, h: Node, mixer: str) -> Node:
    """Attention whose heads share the rows of keys, [B, S, M]; see the module."""
    c = b.config
    w = b.weight("w_dq", "M", "Q", **OWN)
    latent = b.linear("bsm,mq->bsq", h, w, "q_latent", **ONLY)  # q_a_proj
    latent = b.norm(latent, "q_latent_norm", "Q")
    w = b.weight("w_uq", "Q", "A/tp", "D", **OWN)
    q = b.linear("bsq,qad->bsad", latent, w, "q", **OWN)  # q_b_proj
    q = apply("norm", "bsaD->bsaD", q, fn="rmsnorm", name="q_norm_out", **OWN)
    q = identity(_apply_rope(b, q, "a", "D", "q_rope"), "q_core")
    w = b.weight("w_kv", "M", "D", **OWN)
    row = b.norm(b.linear("bsm,md->bsd", h, w, "kv", **ONLY), "kv_norm", "D")  # kv_proj
    row = identity(_apply_rope(b, row, "", "D", "kv_rope"), "latent_core", role=Role.KEYS)
    o = identity(_core(b, q, row, h, latent, mixer), "context", **OWN)
    # Values are turned, too: the result is turned back by the query's position.
    o = _apply_rope(b, o, "a", "D", "context_rope", inverse=True)
    w = b.weight("wo_a", "Groups/tp", size("A") / size("Groups"), "D", "Low", **OWN)
    low = b.linear("bs(gr)d,grdl->bsgl", o, w, "attn_low", **OWN)  # o_a_proj
    w = b.weight("wo_b", "Groups/tp", "Low", "M", **OWN)
    out = identity(b.linear("bsgl,glm->bsm", low, w, "attn_out", **OWN), "attn_reduced")
    return b.bias(out, "bo", "M") if c.attention_output_bias else out


def _core(b: Builder, q: Node, row: Node, h: Node, latent: Node, mixer: str) -> Node:
    """softmax(q k / sqrt(width)) v over the window's rows and compressed ones, [B, S, A, D]."""
    c = b.config
    reach, window = c.reach(mixer), c.reach("local")
    sinks = (b.param("sinks", "A/tp.caches", **OWN),) if c.attention_sinks else ()
    rows, chosen = (), None
    if mixer != "local":
        rows = (compressed_rows(b, h, "compressor", "D", reach, twice=reach.top > 0),)
        if reach.top:
            chosen = _choice(b, h, latent, reach)
            q = with_loss(b, q, rows[0], chosen)
    numbers = (chosen.chosen,) if chosen else ()
    if b.recipe.inference:
        return _served(b, (q, row, *rows), sinks, numbers, reach)
    attrs: dict[str, Any] = {"window": window.window, "causal": True, "width": b.score_width}
    attrs |= {"compress": reach.compress} if rows else {}
    attrs |= {"top": reach.top} if chosen else {}
    attrs |= {"products": (1, 1), "softcap": 0, "name": "core", "scope": "attention.core"}
    terms = ["bqaD", "bKD"]
    for name, more, term in (
        ("compressed", rows, "bJD"),
        ("sinks", sinks, "a"),
        ("chosen", numbers, "bqT"),
    ):
        if more:
            attrs[name] = True
            terms.append(term)
    spec = f"{','.join(terms)}->bqaD"
    return apply("attention", spec, q, row, *rows, *sinks, *numbers, role=Role.CORE, **attrs)


def _served(
    b: Builder,
    of: tuple[Node, ...],
    sinks: tuple[Node, ...],
    numbers: tuple[Node, ...],
    reach: Reach,
) -> Node:
    """Attention of new tokens to the caches of a window's rows and of compressed ones."""
    q, row, *compressed = of
    window = b.config.reach("local")
    (kept,) = cached(b, {"latent": row}, window)
    cache = KvCache.of(b, window)
    attrs: dict[str, Any] = {"pairs": cache.size("pairs"), "requests": size("requests")}
    attrs |= {"keys": cache.size("keys"), "window": window.window, "latent": True}
    terms: list[str] = ["bqaD", "bKD", "bq", "bI"]
    more: list[Node] = []
    if compressed:
        all_of = reach._replace(top=0)
        (rows,) = cached(b, {"compressed": compressed[0]}, all_of)
        pairs, keys = (size(f"{name}{reach.kind}") for name in ("pairs", "keys"))
        attrs |= {"pairs": attrs["pairs"] + pairs, "compressed_keys": keys}
        attrs |= {"compress": reach.compress, "compressed": True, "table": True}
        terms += ["bJD", "bZ"]
        more += [rows, KvCache.of(b, all_of).block_table()]
    for name, operands, term in (("sinks", sinks, "a"), ("chosen", numbers, "bqT")):
        if operands:
            attrs[name] = True
            terms.append(term)
    attrs |= {"products": (1, 1), "width": b.score_width, "softcap": 0}
    attrs |= {"dtype": b.dtype, "scope": "attention.core", "name": "core"}
    at = (cache.slots(), cache.block_table())
    spec = f"{','.join(terms)}->bqaD"
    return apply("cached_attention", spec, q, kept, *at, *more, *sinks, *numbers, **attrs)


def compressed_rows(
    b: Builder, h: Node, name: str, width: str, reach: Reach, *, twice: bool, **scope: Any
) -> Node:
    """One row of `width` for several positions, [B, S / positions, width]; in inference, those that
    new tokens complete.

    `twice`: the positions before count, too, with channels of their own.
    """
    attrs = scope or OWN
    channels: Size = size(width) * 2 if twice else size(width)
    made: list[Node] = []
    for kind in ("kv", "gate"):  # published in 16 bits beside matrices in fp8
        w = b.param(f"w_{name}_{kind}", "M", channels, **attrs)
        made.append(b.linear("bsm,me->bse", h, w, f"{name}_{kind}", trained=False, **attrs))
    bias = b.param(f"{name}_bias", size(reach.compress), channels, **attrs)
    out = (h.shape[0], h.shape[1] / reach.compress, size(width))
    at = None
    if b.recipe.inference:
        cache = KvCache.of(b, reach._replace(top=0))
        out, at = (h.shape[0], cache.size("stored"), size(width)), cache.positions()
        rows = _completed(b, (*made, bias), name, out, reach.compress * (2 if twice else 1), attrs)
    else:
        rows = apply("compress", "bSE,bSE,RE->bTD", *made, bias, out=out, name=name, **attrs)
    rows = b.norm(rows, f"{name}_norm", width, fn="rmsnorm")
    # A row turns by its number; the model's by its first position, which costs the same.
    rows = _apply_rope(b, rows, "", width, f"{name}_rope", at=at)
    return identity(rows, f"{name}_core", role=Role.KEYS)


def _completed(
    b: Builder,
    made: tuple[Node, ...],
    name: str,
    out: tuple[Size, ...],
    positions: int,
    attrs: dict[str, Any],
) -> Node:
    """Rows that new tokens complete with those that the state keeps of each request, in fp32.

    As many positions as a row is made of are kept (vLLM's `CompressorStateCache`).
    """
    channels = made[0].shape[2]
    dims = (size(2), size(positions), channels)
    state = state_of(b, name, *dims, dtype="fp32", scope=str(attrs["scope"]))
    operands = (*made, state, token_requests(), b.positions())
    terms = "bSE,bSE,RE,bUVPE,bS,bS"
    new: dict[str, Any] = {**attrs, "name": state.name, "dtype": "fp32", "part": "state"}
    kept = apply("compress_served", f"{terms}->bUVPE", *operands, role=Role.CACHE, **new)
    b.extra[state.name] = kept
    return apply(
        "compress_served", f"{terms}->bTD", *operands, out=out, name=name, part="y", **attrs
    )


def _choice(b: Builder, h: Node, latent: Node, reach: Reach) -> Choice:
    """The compressed rows that a query reads; the indexer compresses keys of its own."""
    h = identity(h, "index_in", detached=True, **INDEXER)
    latent = identity(latent, "index_latent", detached=True, **INDEXER)
    w = b.weight("w_index_q", "Q", "IndexHeads", "IndexWidth", scope="attention")
    q = b.linear("bsq,qad->bsad", latent, w, "index_q", trained=False, **INDEXER)
    q = _apply_rope(b, q, "a", "IndexWidth", "index_q_rope")
    k = compressed_rows(b, h, "index", "IndexWidth", reach, twice=True, **INDEXER)
    w = b.param("w_index_weights", "M", "IndexHeads", **INDEXER)
    weights = b.linear("bsm,ma->bsa", h, w, "index_weights", trained=False, **INDEXER)
    return chosen_by(b, IndexerOperands(q, k, (weights,), reach.compress), reach)


def _apply_rope(
    b: Builder,
    x: Node,
    heads: str,
    width: str,
    name: str,
    *,
    inverse: bool = False,
    at: Node | None = None,
) -> Node:
    """Rotary position on the last channels of [B, S, (heads,) width]."""
    c, z = b.config, f"bs{heads}"
    whole = size(width)
    rotary = size(c.rotary_channels)
    if c.position != "rope":
        return x
    first = part(x, f"{z}D->{z}N", whole - rotary, first=True, name=f"{name}_plain")
    last = part(x, f"{z}D->{z}Z", rotary, first=False, name=f"{name}_part")
    last = b.rope(last, f"{z}Z", name, inverse=inverse, at=at)
    return join(first, last, f"{z}N,{z}Z->{z}D", whole, name=f"{name}_joined")
