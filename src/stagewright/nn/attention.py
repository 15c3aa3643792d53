"""Attention over a sequence: multi-head, grouped-query, multi-query and latent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stagewright.ir import Node
from stagewright.nn.builder import Builder
from stagewright.nn.inference import cached_attention
from stagewright.ops import apply, einsum, identity, join
from stagewright.size import size


def global_attention(b: Builder, h: Node) -> Node:
    """Every position sees every other, or every earlier one."""
    return _kind(b)(b, h, 0)


def local_attention(b: Builder, h: Node) -> Node:
    """Every position sees the positions of its sliding window."""
    return _kind(b)(b, h, b.config.sliding_window or 0)


def _kind(b: Builder) -> Callable[[Builder, Node, int], Node]:
    return _latent if b.config.kv_lora_rank else _attention


def _attention(b: Builder, h: Node, window: int) -> Node:
    """Attention in general form: multi-head, grouped-query and multi-query differ in G alone."""
    c = b.config
    g = "A" if c.num_query_groups == c.num_attention_heads else "G"
    scope = "attention"
    weights = {"q": "A", "k": g, "v": g}
    heads: dict[str, Node] = {}
    for name, n in weights.items():
        x = n.lower()
        w = b.param(f"w{name}", "M", n, "D", scope=scope)
        heads[name] = b.linear(f"bsm,m{x}d->bs{x}d", h, w, name, scope=scope)
        if c.qkv_bias:
            heads[name] = b.bias(heads[name], f"b{name}", n, "D")
        if c.qk_norm and name != "v":
            heads[name] = b.norm(heads[name], f"{name}_norm", "D", fn="rmsnorm")
        if c.position == "rope" and name != "v":
            heads[name] = b.rope(heads[name], f"bs{x}D", f"{name}_rope")
    q, k, v = (identity(x, f"{n}_core", role="" if n == "q" else "keys") for n, x in heads.items())
    qd, kd = ("bq(gr)", "bkg") if g == "G" else ("bqa", "bka")
    o = identity(_core(b, q, k, v, window, qd, kd), "context", scope=scope)
    w = b.param("wo", "A", "D", "M", scope=scope)
    out = b.linear("bsad,adm->bsm", o, w, "attn_out", scope=scope)
    if not c.parallel_block:
        out = identity(out, "attn_reduced")
    return b.bias(out, "bo", "M") if c.attention_output_bias else out


def _latent(b: Builder, h: Node, window: int) -> Node:
    """Multi-head latent attention (arXiv 2405.04434, section 2.1), the form for training.

    Keys and values of all heads are made of one latent, and a rotary part of the keys is shared.
    """
    c = b.config
    scope = "attention"
    source, rank = h, "m"
    if c.q_lora_rank:
        source = einsum("bsm,mq->bsq", h, b.param("w_dq", "M", "Q", scope=scope), name="q_latent")
        source, rank = b.norm(source, "q_latent_norm", "Q"), "q"
    name = "w_uq" if c.q_lora_rank else "wq"
    w = b.param(name, rank.upper(), "A", "D", scope=scope)
    q = b.linear(f"bs{rank},{rank}ad->bsad", source, w, "q", scope=scope)
    q = b.rope(q, "bsaD", "q_rope")
    latent = einsum("bsm,mc->bsc", h, b.param("w_dkv", "M", "C", scope=scope), name="latent")
    latent = b.norm(latent, "latent_norm", "C")
    shared = einsum("bsm,mz->bsz", h, b.param("w_kr", "M", "Z", scope=scope), name="k_shared")
    shared = b.rope(shared, "bsZ", "k_shared_rope")
    k = b.linear("bsc,can->bsan", latent, b.param("w_uk", "C", "A", "N", scope=scope), "k")
    v = b.linear("bsc,cau->bsau", latent, b.param("w_uv", "C", "A", "U", scope=scope), "v")
    k = join(k, shared, "bsaN,bsZ->bsaD", size("D"), name="k_joined")
    q, k, v = (
        identity(x, f"{n}_core", role="" if n == "q" else "keys")
        for n, x in (("q", q), ("k", k), ("v", v))
    )
    o = identity(_core(b, q, k, v, window, "bqa", "bka", value="v"), "context", scope=scope)
    w = b.param("wo", "A", "U", "M", scope=scope)
    return identity(b.linear("bsau,aum->bsm", o, w, "attn_out", scope=scope), "attn_reduced")


def _core(
    b: Builder, q: Node, k: Node, v: Node, window: int, qd: str, kd: str, value: str = "d"
) -> Node:
    """softmax(q k / sqrt(d)) v, as one flash attention kernel (arXiv 2205.14135) or in parts.

    `qd` and `kd` are the indices of queries and keys but for the width, `value` that of values.
    """
    c = b.config
    scope = "attention.core"
    if b.recipe.inference:
        return cached_attention(b, q, k, v, window, qd, kd)
    if b.recipe.flash_attention:
        attrs: dict[str, Any] = {
            "causal": c.causal,
            "window": window,
            "softcap": c.attention_softcap or 0,
            "products": (1, 1),
            "role": "core",
        }
        wide = value.upper()
        spec = f"{qd}D,{kd}D,{kd}{wide}->{qd}{wide}"
        return apply("attention", spec, q, k, v, name="core", scope=scope, **attrs)
    heads = qd[2:]
    scores = einsum(f"{qd}d,{kd}d->b{heads}qk", q, k, name="scores", scope=scope)
    if c.attention_softcap:
        scores = b.act(scores, "softcap", cap=c.attention_softcap)
    width = c.kv_channels
    p = apply(
        "softmax",
        "baqK->baqK",
        scores,
        causal=c.causal,
        window=window,
        width=width,
        name="probs",
        scope=scope,
    )
    p = b.dropout(p, c.attention_dropout)
    return einsum(
        f"b{heads}qk,{kd}{value}->{qd}{value}", p, v, name="core", scope=scope, role="core"
    )
