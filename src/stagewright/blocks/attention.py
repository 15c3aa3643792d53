"""Attention over a sequence: multi-head, grouped-query, multi-query and latent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stagewright.algebra.size import size
from stagewright.blocks.builder import Builder
from stagewright.blocks.inference import (
    HeadDims,
    cached,
    cached_attention,
    cached_rows,
    cross_cached_attention,
    served_attention,
    source_attention,
    source_cached,
)
from stagewright.graph.make import apply, cast, einsum, elementwise, identity, join, letters, part
from stagewright.graph.node import Node
from stagewright.graph.roles import Role
from stagewright.model.config import Reach


def attention(b: Builder, h: Node, mixer: str = "global") -> Node:
    """Every position sees every other, or every earlier one, as far as the mixer reaches."""
    form = _latent if b.config.kv_lora_rank else _attention
    turned = b.config.position == "rope" and mixer != "nope"
    return form(b, h, b.config.reach(mixer), turned)


def _attention(b: Builder, h: Node, reach: Reach, turned: bool) -> Node:
    """Attention in general form: multi-head, grouped-query and multi-query differ in G alone."""
    c = b.config
    g = "A" if c.num_query_groups == c.num_attention_heads else "G"
    scope = "attention"
    weights = {"q": "A/tp", "k": f"{g}/tp.kv", "v": f"{g}/tp.kv"}
    heads: dict[str, Node] = {}
    for name, n in weights.items():
        x = n[0].lower()
        w = b.weight(f"w{name}", h.shape[-1], n, "D", scope=scope)
        heads[name] = b.linear(f"bsm,m{x}d->bs{x}d", h, w, name, scope=scope, joint="qkv")
        if b.block and c.shared_blocks and c.shared_blocks.attention_adapter:
            spec = f"bsr,r{x}d->bs{x}d"
            heads[name] = b.adapted(heads[name], h, f"{name}_narrow", name, spec, n, "D")
        if c.qkv_bias:
            heads[name] = b.bias(heads[name], f"b{name}", n, "D")
        if c.qk_norm and name != "v":
            heads[name] = _head_norm(b, heads[name], f"{name}_norm", n)
        if turned and name != "v":
            heads[name] = _partly_turned(b, heads[name], x, f"{name}_rope")
            if c.qk_l2_norm:
                z = f"bs{x}D"
                own: dict[str, Any] = {"fn": "rmsnorm", "name": f"{name}_norm_out", "scope": scope}
                heads[name] = apply("norm", f"{z}->{z}", heads[name], **own)
    q, k, v = (
        identity(x, f"{n}_core", role=None if n == "q" else Role.KEYS) for n, x in heads.items()
    )
    if b.recipe.repeat_kv and g == "G":
        k, v = (_repeated(x, name, q) for x, name in ((k, "k"), (v, "v")))
        g = "A"
    dims = HeadDims("bq(gr)", "bkg") if g == "G" else HeadDims("bqa", "bka")
    bias = [relative_bias(b)] if c.position == "relative" else []
    o = identity(_core(b, q, (k, v), reach, dims, bias=bias), "context", scope=scope)
    if c.attention_gate:
        w = b.weight("wg", "M", "A/tp", "D", scope=scope)
        gate = b.linear("bsm,mad->bsad", h, w, "gate", joint="qkv")
        o = elementwise("glu", gate, o, fn="sigmoid", name="gated", scope=scope)
    w = b.weight("wo", "A/tp", "D", "M", scope=scope)
    out = b.linear("bsad,adm->bsm", o, w, "attn_out", scope=scope)
    if not c.parallel_block:
        out = identity(out, "attn_reduced")
    return b.bias(out, "bo", "M") if c.attention_output_bias else out


def _head_norm(b: Builder, x: Node, name: str, heads: str) -> Node:
    """RMSNorm of queries or keys [B, S, heads, D]: of each head, or of all heads at once."""
    if not b.config.qk_norm_over_heads:
        return b.norm(x, name, "D", fn="rmsnorm")
    dims, weight = letters(x), b.param(f"{name}.weight", heads, "D", scope=x.scope)
    return b.norm_over(x, f"{dims}->{dims[:2]}", weight, name=f"{name}_out")


def relative_bias(b: Builder) -> Node:
    """A bias of every score by how far the key is from the query, [A, S, S].

    The first layer of a stage makes it for all of its stack (Megatron-LM's T5Model, too, has the
    table on each stage).
    """
    stack = "encoder" if b.config.encoder else "decoder"
    name = f"{stack}_bias"
    own: dict[str, Any] = {"scope": "attention"}
    table = f"{stack}.relative_bias"
    if b.recipe.inference:  # by distance, while scores are made
        return b.param(table, "Buckets", "A/tp", tied=table, **own)
    if name not in b.recipe.begins:
        return b.take(name, "A", "S", "S")
    table = b.param(table, "Buckets", "A/tp", tied=table, **own)
    shape = (size("A"), size("S"), size("S"))
    causal = b.config.causal
    made = apply("relative_bias", "Va->aqJ", table, out=shape, causal=causal, name=name, **own)
    return b.make(name, made)


def cross_attention(b: Builder, h: Node) -> Node:
    """Queries of the decoder, keys and values of what the encoder made of its sequence."""
    c, scope = b.config, "attention"
    served = b.recipe.inference
    memory = None if served and served.decode else b.take("memory", "B", "Source", "M")
    g = "A" if c.num_query_groups == c.num_attention_heads else "G"
    heads: dict[str, Node] = {}
    for name, of, n, at in (("q", h, "A", "s"), ("k", memory, g, "t"), ("v", memory, g, "t")):
        by = "tp" if name == "q" else "tp.kv"
        w = b.weight(f"cross.w{name}", "M", f"{n}/{by}", "D", scope=scope)
        spec = f"b{at}m,m{n.lower()}d->b{at}{n.lower()}d"
        if of is not None:
            joint = "" if name == "q" else "cross_kv"
            heads[name] = b.linear(spec, of, w, f"cross_{name}", scope=scope, joint=joint)
    if served:
        k, v = (source_cached(b, name, heads.get(name), g) for name in ("k", "v"))
        return _crossed(b, cross_cached_attention(b, heads["q"], k, v))
    q, k, v = (
        identity(x, f"cross_{n}_core", role=None if n == "q" else Role.KEYS)
        for n, x in heads.items()
    )
    dims = HeadDims("bq(gr)", "bkg") if g == "G" else HeadDims("bqa", "bka")
    return _crossed(b, _core(b, q, (k, v), Reach(), dims, causal=False))


def _crossed(b: Builder, o: Node) -> Node:
    """What is added to the stream of what the decoder has seen of the encoder's sequence."""
    w = b.weight("cross.wo", "A/tp", "D", "M", scope="attention")
    out = b.linear("bsad,adm->bsm", identity(o, "cross_context"), w, "cross_out", scope="attention")
    return identity(out, "attn_reduced")


def _repeated(x: Node, name: str, q: Node) -> Node:
    """Every key-value head for each of its queries' heads, [B, S, A, D]."""
    own: dict[str, Any] = {"name": f"{name}_repeated", "scope": x.scope}
    return apply("repeat", "bsgd->bs(gr)d", x, out=q.shape, **own)


def _partly_turned(b: Builder, x: Node, head: str, name: str) -> Node:
    """Rotary position on the first channels of every head, [B, S, heads, D]."""
    c, z = b.config, f"bs{head}"
    turned = c.rotary_channels
    if turned == c.kv_channels:
        return b.rope(x, f"{z}D", name)
    first = part(x, f"{z}D->{z}Z", size(turned), first=True, name=f"{name}_part")
    rest = size(c.kv_channels - turned)
    plain = part(x, f"{z}D->{z}N", rest, first=False, name=f"{name}_rest")
    joined = f"{z}Z,{z}N->{z}D"
    return join(b.rope(first, f"{z}Z", name), plain, joined, size("D"), name=f"{name}_joined")


def _latent(b: Builder, h: Node, reach: Reach, rotary: bool) -> Node:
    """Multi-head latent attention (arXiv 2405.04434, section 2.1).

    Keys and values of all heads are made of one latent, and a rotary part of the keys is shared.
    """
    c = b.config
    scope = "attention"
    source, rank = h, "m"
    if c.q_lora_rank:
        w = b.weight("w_dq", "M", "Q", scope=scope)
        source = b.linear("bsm,mq->bsq", h, w, "q_latent", trained=False)
        source, rank = b.norm(source, "q_latent_norm", "Q"), "q"
    name = "w_uq" if c.q_lora_rank else "wq"
    w = b.weight(name, rank.upper(), "A/tp", "D", scope=scope)
    q = b.linear(f"bs{rank},{rank}ad->bsad", source, w, "q", scope=scope)
    plain = part(q, "bsaD->bsaN", size("N"), first=True, name="q_plain")
    turned = part(q, "bsaD->bsaZ", size("Z"), first=False, name="q_turned")
    w = b.weight("w_dkv", "M", "C", scope=scope)
    latent = b.linear("bsm,mc->bsc", h, w, "latent", trained=False, joint="kv_down")
    latent = b.norm(latent, "latent_norm", "C")
    w = b.weight("w_kr", "M", "Z", scope=scope)
    shared = b.linear("bsm,mz->bsz", h, w, "k_shared", trained=False, joint="kv_down")
    if rotary:
        turned = b.rope(turned, "bsaZ", "q_rope")
        shared = b.rope(shared, "bsZ", "k_shared_rope")
    # Absorbed, they are multiplied as they are computed with (vLLM keeps them so, too).
    up = b.param if b.recipe.absorb else b.weight
    w_uk = up("w_uk", "C", "A/tp", "N", scope=scope)
    w_uv = up("w_uv", "C", "A/tp", "U", scope=scope)
    form = _absorbed if b.recipe.absorb else _naive
    o = form(b, plain, turned, latent, shared, w_uk, w_uv, reach)
    w = b.weight("wo", "A/tp", "U", "M", scope=scope)
    return identity(b.linear("bsau,aum->bsm", o, w, "attn_out", scope=scope), "attn_reduced")


def _naive(
    b: Builder, plain: Node, turned: Node, latent: Node, shared: Node,
    w_uk: Node, w_uv: Node, reach: Reach,
) -> Node:  # fmt: skip
    """Keys and values of every head: the form for training, [B, S, A, U].

    A cache holds latents and shared keys all the same: each that is seen is multiplied again.
    """
    q = join(plain, turned, "bsaN,bsaZ->bsaD", size("D"), name="q_joined")
    rows: Node | None = None
    if b.recipe.inference:
        new = identity(_joined(latent, shared), "latent_core", role=Role.KEYS)
        (kept,) = cached(b, {"latent": new}, reach)
        seen, rows = cached_rows(b, kept, new, reach)
        latent = part(seen, "bsD->bsC", size("C"), first=True, name="latent_seen")
        shared = part(seen, "bsD->bsZ", size("Z"), first=False, name="shared_seen")
    up: dict[str, Any] = {"scope": "attention", "joint": "kv_up"}
    k = b.linear("bsc,can->bsan", latent, w_uk, "k", **up)
    v = b.linear("bsc,cau->bsau", latent, w_uv, "v", **up)
    k = join(k, shared, "bsaN,bsZ->bsaD", size("D"), name="k_joined")
    if b.recipe.inference:
        o = cached_attention(b, q, (k, v), reach, HeadDims("bqa", "bka", "v"), rows=rows)
        return identity(o, "context", scope="attention")
    q, k, v = (
        identity(x, f"{n}_core", role=None if n == "q" else Role.KEYS)
        for n, x in (("q", q), ("k", k), ("v", v))
    )
    o = _core(b, q, (k, v), reach, HeadDims("bqa", "bka", "v"))
    return identity(o, "context", scope="attention")


def _absorbed(
    b: Builder, plain: Node, turned: Node, latent: Node, shared: Node,
    w_uk: Node, w_uv: Node, reach: Reach,
) -> Node:  # fmt: skip
    """Queries and results in the space of the latents, which all heads read as keys and values.

    The products with w_uk and w_uv move from every key to every query (the same, section 2.1.2):
    the form for decoding, where the cache holds latents and shared keys only.
    """
    width = size("C") + size("Z")
    q = b.linear("bsan,can->bsac", plain, w_uk, "q_absorbed", scope="attention")
    q = identity(join(q, turned, "bsaC,bsaZ->bsaD", width, name="q_joined"), "q_core")
    keys = identity(_joined(latent, shared), "latent_core", role=Role.KEYS)
    o = _core(b, q, (keys,), reach, HeadDims("bqa", "bk", "v"))
    o = identity(o, "context", scope="attention")
    return b.linear("bsac,cau->bsau", o, w_uv, "absorbed", scope="attention")


def _joined(latent: Node, shared: Node) -> Node:
    """What the cache holds of a token: its latent, and the key that all heads share."""
    return join(latent, shared, "bsC,bsZ->bsD", size("C") + size("Z"), name="k_joined")


def _core(
    b: Builder, q: Node, keys: tuple[Node, ...], reach: Reach, dims: HeadDims, *,
    causal: bool = True, bias: Sequence[Node] = (),
) -> Node:  # fmt: skip
    """softmax(q k / sqrt(d)) v, as one flash attention kernel (arXiv 2205.14135) or in parts.

    `keys` are keys and values, or latents that are keys and, their first channels, values.
    """
    qd, kd, value = dims
    c, heads = b.config, qd[2:]
    scope = "attention.core"
    sinks = [b.param("sinks", "A/tp.caches", scope="attention")] if c.attention_sinks else []
    if b.recipe.inference:
        if c.encoder:
            return source_attention(b, q, *keys, bias=bias)
        return served_attention(b, q, keys, reach, dims, bias, sinks)
    mask: dict[str, Any] = {
        "window": reach.window,
        "width": b.score_width,
        "causal": causal and c.causal,
    }
    mask |= {"chunk": reach.chunk} if reach.chunk else {}
    out = None if len(keys) == 2 else (*q.shape[:-1], size("C"))
    if b.recipe.flash_attention:
        softcap = c.attention_softcap or 0
        attrs: dict[str, Any] = {**mask, "softcap": softcap, "products": (1, 1)}
        attrs |= {"out": out, "name": "core", "scope": scope}
        wide = value.upper()
        terms = [f"{qd}D", *(kd + x for x in ("D", wide)[: len(keys)])]
        # A query's bias is of all keys, also of those that are on their way.
        for name, more, term in (("bias", bias, f"{heads}qJ"), ("sinks", sinks, heads)):
            if more:
                attrs[name] = True
                terms.append(term)
        spec = f"{','.join(terms)}->{qd}{wide}"
        return apply("attention", spec, q, *keys, *bias, *sinks, role=Role.CORE, **attrs)
    k = keys[0]
    v = keys[1] if len(keys) == 2 else part(k, f"{kd}D->{kd}C", size("C"), first=True, name="v")
    scores = einsum(f"{qd}d,{kd}d->b{heads}qk", q, k, name="scores", scope=scope)
    for each in bias:
        scores = apply("bias", f"b{heads}qk,{heads}qk->b{heads}qk", scores, each, name="biased")
    if c.attention_softcap:
        scores = b.act(scores, "softcap", cap=c.attention_softcap)
    spec = "baqK,a->baqK" if sinks else "baqK->baqK"
    low = scores.dtype
    if b.recipe.eager:
        scores = cast(scores, "fp32", name="scores32", scope=scope)
    p = apply("softmax", spec, scores, *sinks, name="probs", scope=scope, **mask)
    p = cast(p, low, name="probs_low", scope=scope)
    p = b.dropout(p, c.attention_dropout)
    return einsum(
        f"b{heads}qk,{kd}{value}->{qd}{value}", p, v, name="core", scope=scope, role=Role.CORE
    )
