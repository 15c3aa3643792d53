"""Attention over a sequence: multi-head, grouped-query, multi-query and latent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from stagewright.algebra.size import size
from stagewright.blocks.builder import Builder
from stagewright.blocks.cache import (
    AttentionOperands,
    Choice,
    HeadDims,
    cached,
    cached_attention,
    cached_rows,
    cross_cached_attention,
    served_attention,
    source_attention,
    source_cached,
)
from stagewright.blocks.families.compressed import attention_of_groups
from stagewright.blocks.indexer import choice, with_loss
from stagewright.graph.make import (
    apply,
    cast,
    einsum,
    elementwise,
    identity,
    join,
    letters,
    part,
    weigh,
)
from stagewright.graph.node import Node
from stagewright.graph.roles import Role
from stagewright.model.layers import Reach


def attention(b: Builder, h: Node, mixer: str = "global") -> Node:
    """Attention of a layer, by the model's kind: multi-head, grouped-query, latent or of groups."""
    rotary = b.config.position == "rope" and mixer != "nope"
    if b.config.o_groups:
        return attention_of_groups(b, h, mixer)
    if b.config.kv_lora_rank:
        return _latent(b, h, mixer, rotary)
    return _attention(b, h, mixer, rotary)


def _attention(b: Builder, h: Node, mixer: str, rotary: bool) -> Node:
    """Attention in general form: multi-head, grouped-query and multi-query differ in G alone."""
    c = b.config
    reach = c.reach(mixer)
    g = "A" if c.num_query_groups == c.num_attention_heads else "G"
    scope = "attention"
    weights = {"q": "A/tp", "k": f"{g}/tp.kv", "v": f"{g}/tp.kv"}
    wide = "U" if c.v_head_dim else "D"  # values may have a width of their own
    u = wide.lower()
    heads: dict[str, Node] = {}
    if c.keys_are_values:
        del weights["v"]
    for name, n in weights.items():
        x, d = n[0].lower(), u if name == "v" else "d"
        w = b.weight(f"w{name}", h.shape[-1], n, d.upper(), scope=scope)
        heads[name] = b.linear(f"bsm,m{x}{d}->bs{x}{d}", h, w, name, scope=scope, joint="qkv")
        if b.block and c.shared_blocks and c.shared_blocks.attention_adapter:
            spec = f"bsr,r{x}d->bs{x}d"
            heads[name] = b.adapted(heads[name], h, f"{name}_narrow", name, spec, n, "D")
        if c.qkv_bias:
            heads[name] = b.bias(heads[name], f"b{name}", n, d.upper())
        if c.keys_are_values and name == "k":
            heads["v"] = heads["k"]
        if c.v_norm and "v" in heads and name != "q":
            heads["v"] = _value_norm(b, heads["v"], x)
        if c.qk_norm and name != "v":
            heads[name] = _head_norm(b, heads[name], f"{name}_norm", n)
        if rotary and name != "v":
            heads[name] = _apply_rope(b, heads[name], x, f"{name}_rope")
            if c.qk_l2_norm:
                z = f"bs{x}D"
                attrs: dict[str, Any] = {
                    "fn": "rmsnorm",
                    "name": f"{name}_norm_out",
                    "scope": scope,
                }
                heads[name] = apply("norm", f"{z}->{z}", heads[name], **attrs)
    chosen = choice(b, h, None, mixer, rotary=rotary) if reach.top else None
    if b.recipe.operators.repeat_kv and g == "G" and not chosen:
        heads |= {n: b.repeated(heads[n], n, heads["q"]) for n in "kv"}
        g = "A"
    q, k, v = (_core_operand(name, x) for name, x in heads.items())
    bias = (relative_bias(b),) if c.position == "relative" else ()
    q = with_loss(b, q, k, chosen) if chosen else q
    dims = _head_dims(g)._replace(value="v" if c.v_head_dim else "d")
    operands = AttentionOperands(q, (k, v), dims, bias, _sinks(b), chosen)
    o = identity(_core(b, operands, reach), "context", scope=scope)
    if c.attention_gate_per_head:
        w = b.weight("wg", "M", "A/tp", scope=scope)
        gate = b.linear("bsm,ma->bsa", h, w, "gate", joint="qkv")
        gate = b.bias(gate, "bg", "A/tp") if c.attention_gate_bias else gate
        o = weigh(o, b.act(gate, "sigmoid"), name="gated", scope=scope)
    elif c.attention_gate:
        w = b.weight("wg", "M", "A/tp", wide, scope=scope)
        gate = b.linear(f"bsm,ma{u}->bsa{u}", h, w, "gate", joint="qkv")
        gate = b.bias(gate, "bg", "A/tp", wide) if c.attention_gate_bias else gate
        o = elementwise("glu", gate, o, fn="sigmoid", name="gated", scope=scope)
    w = b.weight("wo", "A/tp", wide, "M", scope=scope)
    out = b.linear(f"bsa{u},a{u}m->bsm", o, w, "attn_out", scope=scope)
    if not c.parallel_block:
        out = identity(out, "attn_reduced")
    return b.bias(out, "bo", "M") if c.attention_output_bias else out


def _value_norm(b: Builder, x: Node, head: str) -> Node:
    """RMSNorm without weights of each value head [B, S, heads, D]."""
    z = f"bs{head}D"
    return apply("norm", f"{z}->{z}", x, fn="rmsnorm", name="v_norm_out", scope="attention")


def _head_norm(b: Builder, x: Node, name: str, heads: str) -> Node:
    """RMSNorm of queries or keys [B, S, heads, D]: of each head, or of all heads at once."""
    if not b.config.qk_norm_over_heads:
        return b.norm(x, name, "D", fn="rmsnorm")
    dims, weight = letters(x), b.param(f"{name}.weight", heads, "D", scope=x.scope)
    return b.norm_over(x, f"{dims}->{dims[:2]}", weight, name=f"{name}_out")


def relative_bias(b: Builder) -> Node:
    """A bias of every score by the distance between key and query, [A, S, S].

    The first layer of each stage makes it for the layers behind it (Megatron-LM's T5Model, too, has
    the table on each stage). In inference it is the table itself, [Buckets, A].
    """
    stack = "encoder" if b.config.encoder else "decoder"
    name = f"{stack}_bias"
    attrs: dict[str, Any] = {"scope": "attention"}
    table = f"{stack}.relative_bias"
    if b.recipe.inference:  # by distance, while scores are made
        return b.param(table, "Buckets", "A/tp", tied=table, **attrs)
    if name not in b.recipe.begins:
        return b.take(name, "A", "S", "S")
    table = b.param(table, "Buckets", "A/tp", tied=table, **attrs)
    shape = (size("A"), size("S"), size("S"))
    causal = b.config.causal
    made = apply("relative_bias", "Va->aqJ", table, out=shape, causal=causal, name=name, **attrs)
    return b.make(name, made)


def cross_attention(b: Builder, h: Node) -> Node:
    """Attention of the decoder's queries to keys and values of the encoder's output."""
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
    operands = AttentionOperands(q, (k, v), _head_dims(g), sinks=_sinks(b))
    return _crossed(b, _core(b, operands, Reach(), causal=False))


def _head_dims(g: str) -> HeadDims:
    """The indices of queries and keys: of groups of query heads to a key, or one head to a key."""
    return HeadDims("bq(gr)", "bkg") if g == "G" else HeadDims("bqa", "bka")


def _sinks(b: Builder) -> tuple[Node, ...]:
    """The learned score of each head that has no value, where a model has such scores."""
    return (b.param("sinks", "A/tp.caches", scope="attention"),) if b.config.attention_sinks else ()


def _crossed(b: Builder, o: Node) -> Node:
    """The output projection of cross attention, [B, S, M]."""
    w = b.weight("cross.wo", "A/tp", "D", "M", scope="attention")
    out = b.linear("bsad,adm->bsm", identity(o, "cross_context"), w, "cross_out", scope="attention")
    return identity(out, "attn_reduced")


def _core_operand(name: str, x: Node) -> Node:
    """Queries, keys or values where context parallelism has them for attention."""
    place = f"{name}_repeated_core" if x.op == "repeat" else f"{name}_core"
    return identity(x, place, role=None if name == "q" else Role.KEYS)


def _apply_rope(b: Builder, x: Node, head: str, name: str) -> Node:
    """Rotary position on the first channels of every head, [B, S, heads, D]."""
    c, z = b.config, f"bs{head}"
    rotary = c.rotary_channels
    if rotary == c.kv_channels:
        return b.rope(x, f"{z}D", name)
    first = part(x, f"{z}D->{z}Z", size(rotary), first=True, name=f"{name}_part")
    rest = size(c.kv_channels - rotary)
    plain = part(x, f"{z}D->{z}N", rest, first=False, name=f"{name}_rest")
    joined = f"{z}Z,{z}N->{z}D"
    return join(b.rope(first, f"{z}Z", name), plain, joined, size("D"), name=f"{name}_joined")


UP: dict[str, Any] = {"scope": "attention.up"}
"""From latents to queries, keys and values; norms of latents belong to the products after them
(Megatron-LM's `TELayerNormColumnParallelLinear`)."""


def _latent(b: Builder, h: Node, mixer: str, rotary: bool) -> Node:
    """Multi-head latent attention (arXiv 2405.04434, section 2.1).

    Keys and values of all heads are made of one latent, and a rotary part of the keys is shared.
    Where an indexer chooses what a query reads, all heads read the same latents of these tokens
    (arXiv 2512.02556, figure 2).
    """
    c = b.config
    reach = c.reach(mixer)
    scope = "attention"
    source, rank = h, "m"
    if c.q_lora_rank:
        w = b.weight("w_dq", "M", "Q", scope=scope)
        # Engines hold the three matrices that lead down side by side: `fused_qkv_a_proj` of vLLM,
        # `fused_qkv_a_proj_with_mqa` of SGLang and TensorRT-LLM.
        beside = "kv_down" if b.recipe.inference else ""
        source = b.linear("bsm,mq->bsq", h, w, "q_latent", trained=False, joint=beside)
        source = b.bias(source, "b_dq", "Q") if c.latent_bias else source
        source, rank = b.norm(source, "q_latent_norm", "Q", **UP), "q"
    name = "w_uq" if c.q_lora_rank else "wq"
    w = b.weight(name, rank.upper(), "A/tp", "D", scope=scope)
    q = b.linear(f"bs{rank},{rank}ad->bsad", source, w, "q", **UP)
    plain = part(q, "bsaD->bsaN", size("N"), first=True, name="q_plain")
    turned = part(q, "bsaD->bsaZ", size("Z"), first=False, name="q_turned")
    w = b.weight("w_dkv", "M", "C", scope=scope)
    latent = b.linear("bsm,mc->bsc", h, w, "latent", trained=False, joint="kv_down")
    latent = b.bias(latent, "b_dkv", "C") if c.latent_bias else latent
    latent = b.norm(latent, "latent_norm", "C", **UP)
    w = b.weight("w_kr", "M", "Z", scope=scope)
    shared = b.linear("bsm,mz->bsz", h, w, "k_shared", trained=False, joint="kv_down")
    shared = b.bias(shared, "b_kr", "Z") if c.latent_bias else shared
    if rotary:
        turned = b.rope(turned, "bsaZ", "q_rope")
        shared = b.rope(shared, "bsZ", "k_shared_rope", **UP)
    # The absorbed form multiplies by weights in the computation's format, as vLLM stores them.
    up = b.param if b.recipe.absorb else b.weight
    w_uk = up("w_uk", "C", "A/tp", "N", scope=scope)
    w_uv = up("w_uv", "C", "A/tp", "U", scope=scope)
    operands = LatentOperands(plain, turned, latent, shared, w_uk, w_uv)
    if reach.top:
        chosen = choice(b, h, source, mixer, rotary=rotary)
        o = _absorbed(b, operands, reach, chosen)
    else:
        o = (_absorbed if b.recipe.absorb else _naive)(b, operands, reach)
    w = b.weight("wo", "A/tp", "U", "M", scope=scope)
    out = identity(b.linear("bsau,aum->bsm", o, w, "attn_out", scope=scope), "attn_reduced")
    return b.bias(out, "bo", "M") if c.attention_output_bias else out


class LatentOperands(NamedTuple):
    """Operands of multi-head latent attention; a head has N + Z = D channels."""

    plain: Node
    """The part of the queries without position, [B, S, A, N]."""
    turned: Node
    """The part of the queries with rotary position, [B, S, A, Z]."""
    latent: Node
    """The latent of keys and values of all heads, [B, S, C]."""
    shared: Node
    """The part of the keys with rotary position, which all heads share, [B, S, Z]."""
    w_uk: Node
    """From latents to the other part of the keys, [C, A, N]."""
    w_uv: Node
    """From latents to values, [C, A, U]."""


def _naive(b: Builder, of: LatentOperands, reach: Reach) -> Node:
    """Keys and values of every head: the form for training, [B, S, A, U].

    In inference the cache holds latents and shared keys all the same, and keys and values of all
    tokens that are seen are made again.
    """
    latent, shared = of.latent, of.shared
    q = join(of.plain, of.turned, "bsaN,bsaZ->bsaD", size("D"), name="q_joined")
    rows: Node | None = None
    if b.recipe.inference:
        new = identity(_cache_rows(latent, shared), "latent_core", role=Role.KEYS)
        (kept,) = cached(b, {"latent": new}, reach)
        seen, rows = cached_rows(b, kept, new, reach)
        latent = part(seen, "bsD->bsC", size("C"), first=True, name="latent_seen")
        shared = part(seen, "bsD->bsZ", size("Z"), first=False, name="shared_seen")
    up: dict[str, Any] = {**UP, "joint": "kv_up"}
    k = b.linear("bsc,can->bsan", latent, of.w_uk, "k", **up)
    v = b.linear("bsc,cau->bsau", latent, of.w_uv, "v", **up)
    k = join(k, shared, "bsaN,bsZ->bsaD", size("D"), name="k_joined")
    if b.recipe.inference:
        operands = AttentionOperands(q, (k, v), HeadDims("bqa", "bka", "v"))
        return identity(cached_attention(b, operands, reach, rows), "context", scope="attention")
    q, k, v = (
        identity(x, f"{n}_core", role=None if n == "q" else Role.KEYS)
        for n, x in (("q", q), ("k", k), ("v", v))
    )
    operands = AttentionOperands(q, (k, v), HeadDims("bqa", "bka", "v"), sinks=_sinks(b))
    return identity(_core(b, operands, reach), "context", scope="attention")


def _absorbed(b: Builder, of: LatentOperands, reach: Reach, chosen: Choice | None = None) -> Node:
    """Queries and results in the space of the latents, which all heads read as keys and values.

    The products with w_uk and w_uv move from every key to every query (the same, section 2.1.2):
    the form for decoding, where the cache holds latents and shared keys only.
    """
    width = size("C") + size("Z")
    q = b.linear("bsan,can->bsac", of.plain, of.w_uk, "q_absorbed", scope="attention")
    q = identity(join(q, of.turned, "bsaC,bsaZ->bsaD", width, name="q_joined"), "q_core")
    keys = identity(_cache_rows(of.latent, of.shared), "latent_core", role=Role.KEYS)
    operands = AttentionOperands(q, (keys,), HeadDims("bqa", "bk", "v"), sinks=_sinks(b))
    if chosen:
        operands = replace(operands, q=with_loss(b, q, keys, chosen), chosen=chosen)
    o = identity(_core(b, operands, reach), "context", scope="attention")
    return b.linear("bsac,cau->bsau", o, of.w_uv, "absorbed", scope="attention")


def _cache_rows(latent: Node, shared: Node) -> Node:
    """Tokens' rows of the cache: their latents and the key that all heads share, [B, S, C + Z]."""
    return join(latent, shared, "bsC,bsZ->bsD", size("C") + size("Z"), name="k_joined")


def _core(b: Builder, of: AttentionOperands, reach: Reach, *, causal: bool = True) -> Node:
    """softmax(q k / sqrt(width)) v, as one flash attention kernel (arXiv 2205.14135) or in parts.

    The result is [B, S, heads, width of a value].
    """
    if b.recipe.inference:
        return source_attention(b, of) if b.config.encoder else served_attention(b, of, reach)
    mask: dict[str, Any] = {
        "window": reach.window,
        "width": b.score_width,
        "causal": causal and b.config.causal,
    }
    chunk = _chunk(reach, b.recipe.document if mask["causal"] else 0)
    mask |= {"chunk": chunk} if chunk else {}
    mask |= {"top": reach.top} if reach.top else {}
    mask |= {"top_block": reach.block} if reach.block > 1 else {}
    # Scores of all keys are not made where few of them are read.
    return (_flash if b.recipe.flash_attention or of.chosen else _in_parts)(b, of, mask)


def _chunk(reach: Reach, document: int) -> int:
    """Positions outside which a query sees nothing: of its chunk or its document; 0: of none.

    Where a query sees fewer than a document has, ends of documents count for nothing.
    """
    seen = reach.window or reach.top * reach.block
    lengths = [reach.chunk, 0 if seen and seen <= document else document]
    return min((length for length in lengths if length), default=0)


def _flash(b: Builder, of: AttentionOperands, mask: dict[str, Any]) -> Node:
    """Attention as one kernel, which does not write the scores."""
    queries, keys, value = of.dims
    out = (*of.q.shape[:-1], size("C")) if of.latent else None
    attrs: dict[str, Any] = {**mask, "softcap": b.config.attention_softcap or 0}
    attrs |= {"products": (1, 1), "out": out, "name": "core", "scope": "attention.core"}
    # Chosen keys are anywhere: every rank has all.
    terms = [f"{queries}D", of.terms(keys.replace("k", "K") if of.chosen else keys)]
    # A query's bias is of all keys, also of those that other ranks still have.
    for name, more, term in (
        ("bias", of.bias, f"{queries[2:]}qJ"),
        ("sinks", of.sinks, queries[2:]),
        ("chosen", of.numbers, of.chosen.terms if of.chosen else ""),
    ):
        if more:
            attrs[name] = True
            terms.append(term)
    spec = f"{','.join(terms)}->{queries}{value.upper()}"
    read = (*(b.attended(x) for x in (of.q, *of.keys)), *of.bias, *of.sinks, *of.numbers)
    return cast(apply("attention", spec, *read, role=Role.CORE, **attrs), b.dtype, name="core")


def _in_parts(b: Builder, of: AttentionOperands, mask: dict[str, Any]) -> Node:
    """Attention as two matrix products and what is between them, on scores [B, heads, S, S]."""
    queries, keys, value = of.dims
    heads, scope, k = queries[2:], "attention.core", of.keys[0]
    v = part(k, f"{keys}D->{keys}C", size("C"), first=True, name="v") if of.latent else of.keys[1]
    scores = einsum(f"{queries}d,{keys}d->b{heads}qk", of.q, k, name="scores", scope=scope)
    for bias in of.bias:
        scores = apply("bias", f"b{heads}qk,{heads}qk->b{heads}qk", scores, bias, name="biased")
    if b.config.attention_softcap:
        scores = b.act(scores, "softcap", cap=b.config.attention_softcap)
    spec = "baqK,a->baqK" if of.sinks else "baqK->baqK"
    low = scores.dtype
    if b.recipe.operators.eager:
        scores = cast(scores, "fp32", name="scores32", scope=scope)
    p = apply("softmax", spec, scores, *of.sinks, name="probs", scope=scope, **mask)
    p = cast(p, low, name="probs_low", scope=scope)
    p = b.dropout(p, b.config.attention_dropout)
    spec = f"b{heads}qk,{keys}{value}->{queries}{value}"
    return einsum(spec, p, v, name="core", scope=scope, role=Role.CORE)
