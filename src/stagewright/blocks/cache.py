"""Attention in inference: keys and values, or latents, are kept in a cache of slots.

The tokens of all requests of a rank stand one behind the other, as vLLM flattens them: B is the
number of such batches (one for each rank of data parallelism), S the new tokens of one. A cache
[B, L, ...] has L slots for tokens, which are grouped in I blocks. Integer inputs say whose slots
they are: `token_slots` [B, S] has the slot of each new token, `block_table` [B, I] the request of
each block, and `key_slots` [B, keys] the slots that some new token sees. Requests have lengths of
their own, so what attention costs is no product of dims: the pairs of a query and a key that it
sees, and the keys that are read, are sizes by themselves, which `run.requests.loads` counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from stagewright.algebra.size import Size, size
from stagewright.blocks.builder import Builder
from stagewright.blocks.inference import OF_REQUESTS
from stagewright.graph.make import apply, identity, join, leaf
from stagewright.graph.node import Node
from stagewright.graph.roles import Binding, Role
from stagewright.model.layers import Reach


class HeadDims(NamedTuple):
    """The indices of attention's operands, in which groups of query heads share a key."""

    queries: str
    """Dims of queries and results without the width: `bqa`, or `bq(gr)` for r heads to a key."""
    keys: str
    """Dims of keys and values without the width: `bka`, `bkg`, or `bk` for one key of all heads."""
    value: str = "d"
    """The width of values."""


class Choice(NamedTuple):
    """The keys that queries attend to, as an indexer chose them."""

    chosen: Node
    """Numbers of positions, or of blocks of these, [B, S, Top] or, where each key-value head has
    its own, [B, S, G, Top]; -1 where there are fewer."""
    scores: Node | None = None
    """In training, of a layer's own indexer: the scores of what was chosen, of the same shape."""
    compress: int = 1
    """Positions that have one key."""

    @property
    def terms(self) -> str:
        """The index expression of what was chosen."""
        return "bqT" if len(self.chosen.shape) == 3 else "bqgT"


@dataclass(frozen=True, slots=True)
class AttentionOperands:
    """Operands of attention."""

    q: Node
    """Queries [B, S, heads, D]."""
    keys: tuple[Node, ...]
    """Keys and values; or latents alone, which are keys and, their first C channels, values."""
    dims: HeadDims
    bias: tuple[Node, ...] = ()
    """A bias of every score: [heads, queries, keys], or in inference a table by distance."""
    sinks: tuple[Node, ...] = ()
    """A score per head that takes its part of the softmax and has no value, [heads]."""
    chosen: Choice | None = None
    """The keys that an indexer chose for each query."""

    @property
    def numbers(self) -> tuple[Node, ...]:
        """The slots of the keys that an indexer chose, where there is one."""
        return (self.chosen.chosen,) if self.chosen else ()

    @property
    def latent(self) -> bool:
        """True if all heads read latents."""
        return len(self.keys) == 1

    def terms(self, keys: str) -> str:
        """The index expressions of keys and values, where their rows have the indices `keys`."""
        widths = ("D", self.dims.value.upper())[: len(self.keys)]
        return ",".join(keys + width for width in widths)


@dataclass(frozen=True, slots=True)
class KvCache:
    """One of the caches of a model; layers of equal reach have their tokens in equal slots.

    Layers with a window or chunks keep few tokens. Where ranks share the tokens of a request (DCP),
    they share those of layers that see all, and each rank has all tokens of the other layers (as
    vLLM's `dcp_world_size_for_kv_cache_spec` says).
    """

    suffix: str = ""
    """Ends the names of the cache's inputs and sizes, to tell the caches of one model apart."""
    striped: bool = False
    """The tokens of a request are spread over `Stripes` ranks."""
    compressed: bool = False
    """A slot is of a key of several tokens."""

    @staticmethod
    def of(b: Builder, reach: Reach) -> KvCache:
        """The cache of layers with this reach."""
        assert b.recipe.inference
        shared = b.recipe.inference.striped and not reach.kind
        return STRIPED if shared else KvCache(reach.kind, compressed=reach.compress > 1)

    def size(self, name: str) -> Size:
        """One of the cache's own sizes, such as L or I."""
        return size(f"{name}{self.suffix}")

    def state(self, name: str, rows: Sequence[str | Size], dtype: str, scope: str) -> Node:
        """Cache of tokens before this step: `k`, `v`, `latent` or `index`, [B, L,
        ...]."""
        row = "kv_cache" if name in ("k", "v") else "latent_cache"  # without heads
        bound = Binding(like=f"striped_{row}" if self.striped else row)
        dims = ("B", *(("Stripes",) if self.striped else ()), self.size("L"), *rows)
        name = f"{name}_cache{self.suffix}"
        return leaf("state", dims, dtype, name, role=Role.CACHE, scope=scope, binding=bound)

    def slots(self) -> Node:
        """The slot of each new token, [B, S], or of each key that new tokens complete."""
        new = self.size("stored") if self.compressed else "S"
        return _of_requests(f"token_slots{self.suffix}", new)

    def seen_slots(self) -> Node:
        """The slots that some new token sees, [B, keys]."""
        return _of_requests(f"key_slots{self.suffix}", self.size("keys"))

    def positions(self) -> Node:
        """The number of each key that new tokens complete in its request, [B, keys]."""
        return _of_requests(f"key_positions{self.suffix}", self.size("stored"))

    def block_table(self) -> Node:
        """The request of each block of slots, [B, I]."""
        return _of_requests(f"block_table{self.suffix}", self.size("I"), "int32")


def _of_requests(name: str, dim: str | Size, dtype: str = "int64") -> Node:
    """An integer input about a rank's requests, [B, dim]."""
    return leaf("input", ("B", dim), dtype, name, binding=OF_REQUESTS)


STRIPED = KvCache("_striped", striped=True)
SOURCE = KvCache("_source")
"""Cached keys and values of the encoder, which the decoder's cross attention reads."""


def cached(b: Builder, new: Mapping[str, Node], reach: Reach, dtype: str = "") -> list[Node]:
    """Caches [B, L, ...] with the rows of new tokens, [B, S, ...], written into their slots.

    They have the run's data type of caches, or another. A striped cache is [B, Stripes, L, ...]:
    each token is in one of the stripes.
    """
    assert b.recipe.inference
    cache = KvCache.of(b, reach)
    n = "n" if cache.striped else ""
    for name, x in new.items():
        stored = dtype or b.recipe.inference.cache_dtype
        old = cache.state(name, x.shape[2:], stored, x.scope)
        rest = "agd"[3 - len(x.shape[2:]) :]
        spec = f"b{n}k{rest},bS{rest},bS->b{n}k{rest}"
        attrs: dict[str, Any] = {"name": f"{name}_cached", "kept_tokens": cache.size("stored")}
        b.extra[attrs["name"]] = apply("cache", spec, old, x, cache.slots(), **attrs)
    return [b.extra[f"{name}_cached"] for name in new]


def cached_rows(b: Builder, kept: Node, new: Node, reach: Reach) -> tuple[Node, Node]:
    """The rows of a cache that some new token sees, in the computation's precision; their slots.

    From a striped cache, every rank gets the rows of cached tokens of all stripes, and the new rows
    stand behind them. Each stripe yields as many rows as the fullest one, so that some of a
    stripe's rows may be padding (vLLM's `padded_local_chunk_seq_lens`).
    """
    assert b.recipe.inference
    cache = KvCache.of(b, reach)
    if not cache.striped:
        at = cache.seen_slots()
        return apply("take", "bLw,bk->bkw", kept, at, dtype=b.dtype, name="seen"), at
    if not b.recipe.inference.prefix:
        return new, cache.slots()
    stripes, prefix = size("Stripes"), cache.size("prefix")
    at = leaf("input", ("B", stripes, prefix), "int64", "prefix_slots")
    rows = apply("take", "bnLw,bnK->b(nK)w", kept, at, dtype=b.dtype, name="prefix")
    count = stripes * prefix + size("S")
    slots = _of_requests("row_slots", count)
    return join(rows, new, "bPw,bSw->bKw", count, dim=1, name="seen"), slots


def served_attention(b: Builder, of: AttentionOperands, reach: Reach) -> Node:
    """Attention of new tokens, whose keys and values go into a cache, to all that the cache has.

    Where a cache is striped and no request has tokens in it yet, the new keys and values are all
    there is, and they need not be read from the cache.
    """
    assert b.recipe.inference
    names = ("latent",) if of.latent else ("k", "v")
    kept = tuple(cached(b, dict(zip(names, of.keys, strict=True)), reach))
    from_cache = replace(of, keys=kept)
    if not KvCache.of(b, reach).striped:
        return cached_attention(b, from_cache, reach)
    if b.recipe.inference.prefix:
        return striped_attention(b, from_cache, reach)
    return cached_attention(b, replace(of, bias=()), reach, rows=STRIPED.slots())


def source_attention(b: Builder, of: AttentionOperands) -> Node:
    """An encoder's attention: every token of a source sees the whole source of its request."""
    k, v = of.keys
    attrs: dict[str, Any] = {**_cost(b, "pairs_source"), "causal": False, "stripes": 1}
    attrs |= {"name": "core", "block": SOURCE.size("L") / SOURCE.size("I")}
    attrs |= {"bias": True} if of.bias else {}
    slots, table = _of_requests("source_slots", "S"), SOURCE.block_table()
    heads, g = _heads(of.q, k)
    spec = f"bq{heads}D,bK{g}D,bK{g}D,bq,bI,bK{f',z{heads}' if of.bias else ''}->bq{heads}D"
    return apply("varlen_attention", spec, of.q, k, v, slots, table, slots, *of.bias, **attrs)


def source_cached(b: Builder, name: str, new: Node | None, heads: str) -> Node:
    """Keys or values of the sources in their cache; `new` is None where a step makes none."""
    assert b.recipe.inference
    old = SOURCE.state(name, (heads, "D"), b.recipe.inference.cache_dtype, "attention")
    if new is None:
        return old
    at, named = _of_requests("source_slots", "Source"), f"cross_{name}_cached"
    spec = "bkgd,bSgd,bS->bkgd"
    b.extra[named] = apply("cache", spec, old, new, at, name=named, kept_tokens=size("Source"))
    return b.extra[named]


def cross_cached_attention(b: Builder, q: Node, k: Node, v: Node) -> Node:
    """Attention of new tokens to the source of their request, up to its last token."""
    attrs: dict[str, Any] = {**_cost(b, "pairs_cross"), "keys": size("Source"), "name": "core"}
    heads, g = _heads(q, k)
    spec = f"bq{heads}D,bK{g}D,bK{g}D,bq,bI->bq{heads}D"
    ends = _of_requests("source_ends", "S")
    return apply("cached_attention", spec, q, k, v, ends, SOURCE.block_table(), **attrs)


def _heads(q: Node, k: Node) -> tuple[str, str]:
    """The indices of the heads of queries and of keys."""
    return ("a", "a") if k.shape[2] == q.shape[2] else ("(gr)", "g")


def cached_attention(
    b: Builder, of: AttentionOperands, reach: Reach, rows: Node | None = None
) -> Node:
    """Attention of new tokens to what a cache holds, or to rows that are in the slots `rows`.

    A table of biases is looked up by distance, as TensorRT-LLM's kernels do ("implicit relative
    attention").
    """
    cache, (queries, keys, value) = KvCache.of(b, reach), of.dims
    at, slots = (",bK", (rows,)) if rows is not None else ("", ())
    heads = (f",z{queries[2:]}" if of.bias else "") + (f",{queries[2:]}" if of.sinks else "")
    heads += f",{of.chosen.terms}" if of.chosen else ""
    attrs = _cost(b, f"pairs{reach.kind}", latent=of.latent) | _seen_keys(b, reach)
    attrs |= {"name": "core"}
    attrs |= {"bias": True} if of.bias else {}
    attrs |= {"sinks": True} if of.sinks else {}
    attrs |= {"chosen": True} if of.chosen else {}
    attrs |= {"top_block": reach.block} if reach.block > 1 else {}
    attrs |= {} if cache.striped else {"keys": cache.size("keys")}
    terms = of.terms(keys.replace("k", "K"))  # softmax is over all keys of a request
    return apply(
        "cached_attention",
        f"{queries}D,{terms},bq,bI{at}{heads}->{queries}{value.upper()}",
        of.q,
        *of.keys,
        cache.slots(),
        cache.block_table(),
        *slots,
        *of.bias,
        *of.sinks,
        *of.numbers,
        out=(*of.q.shape[:-1], size("C")) if of.latent else None,
        **attrs,
    )


def striped_attention(b: Builder, of: AttentionOperands, reach: Reach) -> Node:
    """Attention to a striped cache: to each stripe by itself, and the results merged.

    A stripe counts as much as its sum of exponentials, so all ranks get the logarithms of these
    sums, and a query's result is a weighed sum over stripes (vLLM's `cp_lse_ag_out_rs` in
    vllm/v1/attention/ops/common.py).
    """
    queries, keys, value = of.dims
    rows, stripes, cache = queries.replace("(gr)", "a"), size("Stripes"), STRIPED
    q = identity(of.q, "q_striped")
    width = size("C") if of.latent else of.keys[1].shape[-1]
    operands = (q, *of.keys, cache.slots(), cache.block_table())
    terms = f"{queries}D,{of.terms(f'bnK{keys[2:]}')},bq,bI"
    attrs = _cost(b, "pairs_striped", latent=of.latent) | _seen_keys(b, reach)
    attrs |= {"keys": cache.size("keys")}
    out: tuple[Size, ...] = (stripes, *q.shape[:-1])
    of_sums: dict[str, Any] = attrs | {
        "out": out,
        "name": "row_sums",
        "dtype": "fp32",
        "sums": True,
    }
    of_sums |= {"products": (0, 0)}  # the kernel that makes the result yields the sums, too
    sums = apply("striped_attention", f"{terms}->n{queries}", *operands, **of_sums)
    attrs |= {"out": (*out, width), "name": "core"}
    o = apply("striped_attention", f"{terms}->n{queries}{value.upper()}", *operands, **attrs)
    heads = ",a" if of.sinks else ""
    spec = f"n{rows}v,M{rows}{heads}->{rows}v"
    merged = apply("merge_stripes", spec, o, sums, *of.sinks, name="merged", dtype=b.dtype)
    return identity(merged, "striped_context", scope="attention")


def _cost(b: Builder, pairs: str, *, latent: bool = False) -> dict[str, Any]:
    """The attributes that say what attention costs, and how its scores are made."""
    return {
        "pairs": size(pairs),
        "requests": size("requests"),
        "products": (1, 1),
        "dtype": b.dtype,
        "scope": "attention.core",
        "width": b.score_width,
        "latent": latent,
        "softcap": b.config.attention_softcap or 0,
    }


def _seen_keys(b: Builder, reach: Reach) -> dict[str, Any]:
    """The attributes that say which keys a query sees."""
    attrs: dict[str, Any] = {"window": reach.window}
    attrs |= {"chunk": reach.chunk} if reach.chunk else {}
    if KvCache.of(b, reach).striped:
        attrs |= {"stripes": size("Stripes"), "block": STRIPED.size("L") / STRIPED.size("I")}
    return attrs
