"""The lightning indexer: which keys each query of a layer attends to (arXiv 2512.02556, section 2).

A few narrow heads score all tokens before a query, in fp8 where a model is served, and attention
reads the `Top` tokens with the highest scores. In training the indexer learns from the attention of
the tokens it chose, and nothing else of the model learns from its scores: its inputs are detached.
Its weights are whole on every rank, as in Megatron-LM, vLLM and SGLang.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from stagewright.algebra.size import Size, size
from stagewright.blocks.builder import Builder
from stagewright.blocks.cache import Choice, KvCache, cached
from stagewright.blocks.inference import token_requests
from stagewright.graph.make import apply, cast, identity, join, part
from stagewright.graph.node import Node
from stagewright.graph.roles import CHOSEN, Role
from stagewright.model.layers import Reach

OWN: dict[str, Any] = {"scope": "attention.indexer"}


class IndexerOperands(NamedTuple):
    """Operands of the scores of keys."""

    q: Node
    """Queries of some heads, [B, S, heads, width]."""
    k: Node
    """One key of each token, [B, S, width]."""
    weights: tuple[Node, ...] = ()
    """Weights of the heads, [B, S, heads], which add up to one score; else each head chooses."""
    compress: int = 1
    """Positions that have one key; then keys are [B, S / positions, width]."""

    @property
    def spec(self) -> tuple[str, str]:
        """The index expression of scores: of operands, and of what is chosen."""
        return ("bqAD,bKD,bqA", "bqT") if self.weights else ("bqgD,bKD", "bqgT")

    def out(self) -> tuple[Size, ...]:
        """The shape of what is chosen."""
        return (*self.q.shape[: 2 if self.weights else 3], size("Top"))


def choice(b: Builder, h: Node, latent: Node | None, mixer: str, *, rotary: bool) -> Choice:
    """The keys for a layer's queries: chosen by its own indexer, or by that of a layer before.

    `latent` is what queries are made of, [B, S, Q], where attention has latents.
    """
    if mixer == "index_shared":
        return Choice(b.take(CHOSEN, "B", "S", "Top", dtype="int32"))
    h = identity(h, "index_in", detached=True, **OWN)
    make = _of_hidden if latent is None else partial(_of_latent, latent=latent)
    of = make(b, h, rotary=rotary)
    of = of._replace(k=identity(of.k, "index_core", role=Role.KEYS))
    made = chosen_by(b, of, b.config.reach("indexed"))
    if "index_shared" in b.config.mixers:
        b.make(CHOSEN, made.chosen)
    return made


def chosen_by(b: Builder, of: IndexerOperands, reach: Reach) -> Choice:
    """The keys with the highest scores, of those that a layer with this reach may choose."""
    return _served(b, of, reach) if b.recipe.inference else _trained(b, of)


def _of_latent(b: Builder, h: Node, *, latent: Node, rotary: bool) -> IndexerOperands:
    """DeepSeek-V3.2: heads that add up to one score, and are whole on every rank."""
    latent = identity(latent, "index_latent", detached=True, **OWN)
    w = b.weight("w_index_q", "Q", "IndexHeads", "IndexWidth", scope="attention")
    q = b.linear("bsq,qad->bsad", latent, w, "index_q", trained=False, **OWN)
    w = b.weight("w_index_k", "M", "IndexWidth", scope="attention")
    k = b.linear("bsm,md->bsd", h, w, "index_k", trained=False, **OWN)
    norm = [b.param(f"index_k_norm.{name}", "IndexWidth", **OWN) for name in ("weight", "bias")]
    k = apply("norm", "bsD,D,D->bsD", k, *norm, fn="layernorm", name="index_k_norm_out")
    if rotary:
        q, k = _apply_rope(b, q, "index_q_rope"), _apply_rope(b, k, "index_k_rope")
    w = b.param("w_index_weights", "M", "IndexHeads", **OWN)
    weights = b.linear("bsm,ma->bsa", h, w, "index_weights", trained=False, **OWN)
    return IndexerOperands(q, k, (weights,))


def _of_hidden(b: Builder, h: Node, *, rotary: bool) -> IndexerOperands:
    """MiniMax-M3: a head for each key-value head, which chooses blocks of keys for that one."""
    w = b.weight("w_index_q", "M", "G/tp.kv", "IndexWidth", scope="attention")
    q = b.linear("bsm,mgd->bsgd", h, w, "index_q", trained=False, **OWN)
    q = b.norm(q, "index_q_norm", "IndexWidth", fn="rmsnorm")
    w = b.weight("w_index_k", "M", "IndexWidth", scope="attention")
    k = b.linear("bsm,md->bsd", h, w, "index_k", trained=False, **OWN)
    k = b.norm(k, "index_k_norm", "IndexWidth", fn="rmsnorm")
    if rotary:
        q, k = _apply_rope(b, q, "index_q_rope"), _apply_rope(b, k, "index_k_rope")
    return IndexerOperands(q, k)


def _apply_rope(b: Builder, x: Node, name: str) -> Node:
    """Rotary position on the first channels of [B, S, ..., IndexWidth], as many as attention's."""
    c, z = b.config, "bsa"[: len(x.shape) - 1]
    rotary = size("Z") if c.kv_lora_rank else size(c.rotary_channels)
    if not c.kv_lora_rank and c.rotary_channels == c.index_head_dim:
        return b.rope(x, f"{z}D", name)
    width = size("IndexWidth")
    first = part(x, f"{z}D->{z}Z", rotary, first=True, name=f"{name}_part")
    rest = part(x, f"{z}D->{z}N", width - rotary, first=False, name=f"{name}_rest")
    return join(
        b.rope(first, f"{z}Z", name), rest, f"{z}Z,{z}N->{z}D", width, name=f"{name}_joined"
    )


def _cost(b: Builder, of: IndexerOperands) -> dict[str, Any]:
    """The attributes that say what scoring costs, and how scores are made."""
    attrs: dict[str, Any] = {"width": b.config.index_head_dim, "weighed": bool(of.weights), **OWN}
    return {"causal": True, "products": (1, 0), **attrs, **_in_blocks(b, of.compress)}


def _in_blocks(b: Builder, compress: int) -> dict[str, Any]:
    """Attributes of a choice whose numbers are of blocks of positions, or of compressed keys."""
    if compress > 1:
        return {"top_block": compress, "compress": compress}
    block = b.config.index_block_size
    return {"top_block": block} if block > 1 else {}


def _local(b: Builder) -> dict[str, Any]:
    return {"local": True} if b.config.index_block_size > 1 else {}


def _trained(b: Builder, of: IndexerOperands) -> Choice:
    """Scores are made of all keys to choose some, and of these again, which are kept."""
    terms, result = of.spec
    operands = (of.q, of.k, *of.weights)
    attrs: dict[str, Any] = {
        "out": of.out(),
        "dtype": "int32",
        "name": CHOSEN,
        **_cost(b, of),
        **_local(b),
    }
    chosen = identity(apply("index_topk", f"{terms}->{result}", *operands, **attrs), CHOSEN)
    attrs = {"dtype": "fp32", "name": "index_scores", "top": b.config.index_topk, **_cost(b, of)}
    spec = f"{terms},{result}->{result}"
    scores = apply("index_scores", spec, *operands, chosen, **attrs)
    return Choice(chosen, scores, of.compress)


def _served(b: Builder, of: IndexerOperands, reach: Reach) -> Choice:
    """Keys go into a cache of their own.

    Keys of an indexer whose heads add up are stored in fp8 with a scale each, whatever the
    precision of the latents (vLLM's DeepseekV32IndexerCache).
    """
    assert b.recipe.inference
    low = b.dtype != "fp32" and bool(of.weights)
    reach = reach._replace(top=0) if of.compress > 1 else reach
    cache = KvCache.of(b, reach)
    (kept,) = cached(b, {"index": of.k}, reach, "fp8_r128" if low else "")
    q = cast(of.q, "fp8", name="index_q_low", **OWN) if low else of.q
    attrs: dict[str, Any] = {"out": of.out(), "dtype": "int32", "name": CHOSEN, **_local(b)}
    pairs, keys = ("pairs", "keys") if of.compress == 1 else map(cache.size, ("pairs", "keys"))
    attrs |= {"pairs": size(pairs), "keys": size(keys), "requests": size("requests")}
    terms, result = of.spec
    # A token has a slot where each position has a key; else its request and position say which.
    at = (token_requests(), b.positions()) if of.compress > 1 else (cache.slots(),)
    spec = f"{terms},{','.join(['bq'] * len(at))},bI->{result}"
    operands = (q, kept, *of.weights, *at, cache.block_table())
    chosen = apply("index_topk", spec, *operands, **attrs, **_cost(b, of))
    return Choice(identity(chosen, CHOSEN), compress=of.compress)


def with_loss(b: Builder, q: Node, keys: Node, of: Choice) -> Node:
    """Queries [B, S, A, D] as they are; in backward the indexer learns what they attend to.

    The loss is the divergence of the scores of what was chosen from the attention that this gets,
    over all heads (equation 4), which ranks of tp sum up (Megatron-LM's
    `compute_dsa_indexer_loss`), or over the heads of a key-value head that has its own choice.
    """
    if of.scores is None:
        return q
    attrs: dict[str, Any] = {"causal": True, "top": b.config.index_topk, "width": b.score_width}
    attrs |= {"products": (1, 0), "dtype": "fp32", "name": "index_target", **OWN}
    attrs |= _in_blocks(b, of.compress)
    grouped = of.terms == "bqgT"
    terms = "bq(gr)D,bKgD" if grouped else "bqaD,bKD"
    target = apply("index_target", f"{terms},{of.terms}->{of.terms}", q, keys, of.chosen, **attrs)
    spec = "bs(gr)d,bsgT,bsgT->bs(gr)d" if grouped else "bsad,bsT,bsT->bsad"
    fields: dict[str, Any] = {"coeff": b.recipe.index_loss, "name": "q_core"}
    return apply("index_loss", spec, q, of.scores, target, **fields)
