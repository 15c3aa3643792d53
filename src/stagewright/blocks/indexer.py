"""The lightning indexer: which keys each query of a layer attends to (arXiv 2512.02556, section 2).

A few narrow heads score all tokens before a query, in fp8 where a model is served, and attention
reads the `Top` tokens with the highest scores. In training the indexer learns from the attention of
the tokens it chose, and nothing else of the model learns from its scores: its inputs are detached.
Its weights are whole on every rank, as in Megatron-LM, vLLM and SGLang.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from stagewright.algebra.size import size
from stagewright.blocks.builder import Builder
from stagewright.blocks.cache import KvCache, cached
from stagewright.graph.make import apply, cast, identity, join, part
from stagewright.graph.node import Node
from stagewright.graph.roles import CHOSEN, Role
from stagewright.model.layers import Reach

OWN: dict[str, Any] = {"scope": "attention.indexer"}


class IndexerOperands(NamedTuple):
    """What scores of keys are computed of."""

    q: Node
    """Queries of some heads, [B, S, heads, width]."""
    k: Node
    """One key of each token, [B, S, width]."""
    weights: Node
    """Weights of the heads, [B, S, heads]."""


class Choice(NamedTuple):
    """The keys that queries attend to."""

    chosen: Node
    """Numbers of keys, or slots of a cache, [B, S, Top]; -1 where there are fewer."""
    scores: Node | None = None
    """In training, of a layer's own indexer: the scores of these keys, [B, S, Top]."""


def choice(b: Builder, h: Node, latent: Node, mixer: str, *, turned: bool) -> Choice:
    """The keys for a layer's queries: chosen by its own indexer, or by that of a layer before.

    `latent` is what queries are made of, [B, S, Q].
    """
    if mixer == "index_shared":
        return Choice(b.take(CHOSEN, "B", "S", "Top", dtype="int32"))
    h = identity(h, "index_in", detached=True, **OWN)
    latent = identity(latent, "index_latent", detached=True, **OWN)
    w = b.weight("w_index_q", "Q", "IndexHeads", "IndexWidth", **OWN)
    q = b.linear("bsq,qad->bsad", latent, w, "index_q", trained=False, **OWN)
    w = b.weight("w_index_k", "M", "IndexWidth", **OWN)
    k = b.linear("bsm,md->bsd", h, w, "index_k", trained=False, **OWN)
    norm = [b.param(f"index_k_norm.{name}", "IndexWidth", **OWN) for name in ("weight", "bias")]
    k = apply("norm", "bsD,D,D->bsD", k, *norm, fn="layernorm", name="index_k_norm_out")
    if turned:
        q, k = _turned(b, q, "index_q_rope"), _turned(b, k, "index_k_rope")
    w = b.param("w_index_weights", "M", "IndexHeads", **OWN)
    weights = b.linear("bsm,ma->bsa", h, w, "index_weights", trained=False, **OWN)
    k = identity(k, "index_core", role=Role.KEYS)
    made = (_served if b.recipe.inference else _trained)(b, IndexerOperands(q, k, weights))
    if "index_shared" in b.config.mixers:
        b.make(CHOSEN, made.chosen)
    return made


def _turned(b: Builder, x: Node, name: str) -> Node:
    """Rotary position on the first Z channels of [B, S, ..., IndexWidth]."""
    z = "bsa"[: len(x.shape) - 1]
    width = size("IndexWidth")
    first = part(x, f"{z}D->{z}Z", size("Z"), first=True, name=f"{name}_part")
    rest = part(x, f"{z}D->{z}N", width - size("Z"), first=False, name=f"{name}_rest")
    turned = b.rope(first, f"{z}Z", name)
    return join(turned, rest, f"{z}Z,{z}N->{z}D", width, name=f"{name}_joined")


def _cost(b: Builder) -> dict[str, Any]:
    """The attributes that say what scoring costs, and how scores are made."""
    own: dict[str, Any] = {"causal": True, "width": b.config.index_head_dim}
    return {**own, "products": (1, 0), "weighed": True, **OWN}


def _trained(b: Builder, of: IndexerOperands) -> Choice:
    """Scores are made of all keys to choose some, and of these again, which are kept."""
    out = (*of.q.shape[:2], size("Top"))
    spec = "bqAD,bKD,bqA->bqT"
    chosen = apply("index_topk", spec, *of, out=out, dtype="int32", name=CHOSEN, **_cost(b))
    chosen = identity(chosen, CHOSEN)
    own: dict[str, Any] = {"dtype": "fp32", "name": "index_scores", **_cost(b)}
    own |= {"top": b.config.index_topk}
    scores = apply("index_scores", "bqAD,bKD,bqA,bqT->bqT", *of, chosen, **own)
    return Choice(chosen, scores)


def _served(b: Builder, of: IndexerOperands) -> Choice:
    """Keys go into a cache of their own, in fp8 with a scale for each (vLLM's
    DeepseekV32IndexerCache), whatever the precision of the latents."""
    assert b.recipe.inference
    low = b.dtype != "fp32"
    reach = Reach(top=b.config.index_topk)
    cache = KvCache.of(b, reach)
    (kept,) = cached(b, {"index": of.k}, reach, "fp8_r128" if low else "fp32")
    q = cast(of.q, "fp8", name="index_q_low", **OWN) if low else of.q
    own: dict[str, Any] = {"out": (*q.shape[:2], size("Top")), "dtype": "int32", "name": CHOSEN}
    own |= {"pairs": size("pairs"), "keys": size("keys"), "requests": size("requests")}
    spec = "bqAD,bKD,bqA,bq,bI->bqT"
    where = (cache.slots(), cache.block_table())
    chosen = apply("index_topk", spec, q, kept, of.weights, *where, **own, **_cost(b))
    return Choice(identity(chosen, CHOSEN))


def with_loss(b: Builder, q: Node, keys: Node, of: Choice) -> Node:
    """Queries [B, S, A, D] as they are; in backward the indexer learns what they attend to.

    The loss is the divergence of the scores of chosen keys from the attention that these get, over
    all heads (equation 4), which ranks of tp sum up (Megatron-LM's `compute_dsa_indexer_loss`).
    """
    if of.scores is None:
        return q
    own: dict[str, Any] = {"causal": True, "top": b.config.index_topk, "width": b.score_width}
    own |= {"products": (1, 0), "dtype": "fp32", "name": "index_target", **OWN}
    target = apply("index_target", "bqaD,bKD,bqT->bqT", q, keys, of.chosen, **own)
    spec = "bsad,bsT,bsT->bsad"
    fields: dict[str, Any] = {"coeff": b.recipe.index_loss, "name": "q_core"}
    return apply("index_loss", spec, q, of.scores, target, **fields)
