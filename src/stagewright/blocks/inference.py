"""What is other in inference: keys and values are kept in a cache, and there is only forward.

The tokens of all requests of a rank stand behind each other, as vLLM flattens them: B is the number
of such batches (one for each rank of data parallelism), S the new tokens of one. The tokens of
requests are in the L slots of a cache, which has I blocks; the leaf `token_slots` says where new
ones go, `block_table` whose a block is, and `key_slots` which slots some new token sees. Requests
have lengths of their own, so what attention costs is not a product of dims: the pairs of a query
and a key it sees, and the keys that are read, are sizes by themselves (`lengths.attention_sums`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from stagewright.algebra.size import Size, size
from stagewright.blocks.builder import Block, Builder, sizes_of
from stagewright.graph.make import apply, identity, join, leaf
from stagewright.graph.node import Graph, Node, toposort
from stagewright.graph.parameter import Parameter
from stagewright.graph.roles import Binding, Role
from stagewright.model.config import Reach


class HeadDims(NamedTuple):
    """The indices of attention's operands, in which groups of query heads share a key."""

    queries: str
    """Of queries and results, but for the width: `bqa`, or `bq(gr)` for r heads to a key."""
    keys: str
    """Of keys and values, but for the width: `bka`, `bkg`, or `bk` for one key of all heads."""
    value: str = "d"
    """The width of values."""


def finish(name: str, b: Builder, y: Node | None) -> Block:
    """A block that ends with its result, with the caches it wrote into and what it hands on.

    Weights that nothing in the step is computed with are held all the same.
    """
    outputs = ({} if y is None else {"y": y}) | b.extra | b.made
    used = toposort(outputs.values())
    outputs |= {f"held.{n}": p for n, p in b.params.items() if p not in set(used)}
    return Block(name, Graph.of(toposort(outputs.values()), outputs), {})


def idle(block: Block) -> Block:
    """What is held of a block of which nothing runs: its weights."""
    weights = {f"held.{n.name}": n for n in block.graph if n.op == "param"}
    return Block(block.name, Graph.of(weights.values(), weights), {})


def kind_of(b: Builder, reach: Reach) -> str:
    """What tells caches of such layers, and what attention over them costs, from those of others.

    Ranks may share the tokens of a request (`_striped`). Layers with a window or chunks keep few,
    and each rank all of these (as vLLM's `dcp_world_size_for_kv_cache_spec` says).
    """
    assert b.recipe.inference
    return "_striped" if b.recipe.inference.striped and not reach.kind else reach.kind


def cached(b: Builder, new: Mapping[str, Node], reach: Reach) -> list[Node]:
    """Caches with the rows of new tokens, [B, S, ...], written into their slots, [B, L, ...].

    Striped, [B, Stripes, L, ...], a token is in one of the stripes.
    """
    assert b.recipe.inference
    kind = kind_of(b, reach)
    stripes, n = (("Stripes",), "n") if kind == "_striped" else ((), "")
    for name, x in new.items():
        dims = ("B", *stripes, f"L{kind}", *x.shape[2:])
        dtype = b.recipe.inference.cache_dtype
        old = leaf("state", dims, dtype, f"{name}_cache{kind}", role=Role.CACHE, scope=x.scope)
        rest = "agd"[3 - len(x.shape[2:]) :]
        spec = f"b{n}k{rest},bS{rest},bS->b{n}k{rest}"
        own: dict[str, Any] = {"name": f"{name}_cached", "stored": size(f"stored{kind}")}
        b.extra[own["name"]] = apply("cache", spec, old, x, _slots(kind), **own)
    return [b.extra[f"{name}_cached"] for name in new]


def cached_rows(b: Builder, kept: Node, new: Node, reach: Reach) -> tuple[Node, Node]:
    """The rows of a cache that some new token sees, in the precision of the computation; their
    slots.

    Of stripes those of cached tokens, from all, and the new ones behind them. Each stripe yields as
    many, so that some of them may be none (vLLM's `padded_local_chunk_seq_lens`).
    """
    assert b.recipe.inference
    kind = kind_of(b, reach)
    if kind != "_striped":
        at = leaf("input", ("B", f"keys{kind}"), "int64", f"key_slots{kind}")
        return apply("take", "bLw,bk->bkw", kept, at, dtype=b.dtype, name="seen"), at
    if not b.recipe.inference.prefix:
        return new, _slots(kind)
    stripes, prefix = size("Stripes"), size(f"prefix{kind}")
    at = leaf("input", ("B", stripes, prefix), "int64", "prefix_slots")
    rows = apply("take", "bnLw,bnK->b(nK)w", kept, at, dtype=b.dtype, name="prefix")
    many = stripes * prefix + size("S")
    slots = leaf("input", ("B", many), "int64", "row_slots")
    return join(rows, new, "bPw,bSw->bKw", many, dim=1, name="seen"), slots


def served_attention(
    b: Builder, q: Node, keys: Sequence[Node], reach: Reach, dims: HeadDims,
    bias: Sequence[Node], sinks: Sequence[Node],
) -> Node:  # fmt: skip
    """Attention to keys and values, or latents, that go into a cache and to those that are there.

    Where stripes have the cache, and only new tokens are seen, these need not be read from it.
    """
    assert b.recipe.inference
    names = ("k", "v") if len(keys) == 2 else ("latent",)
    kept = cached(b, dict(zip(names, keys, strict=True)), reach)
    if kind_of(b, reach) != "_striped":
        return cached_attention(b, q, kept, reach, dims, bias=bias, sinks=sinks)
    if b.recipe.inference.prefix:
        return striped_attention(b, q, kept, reach, dims, sinks)
    rows = _slots("_striped")
    return cached_attention(b, q, keys, reach, dims, rows=rows, sinks=sinks)


def source_attention(b: Builder, q: Node, k: Node, v: Node, bias: Sequence[Node]) -> Node:
    """Every token of a source sees all of its request: attention to sequences of any length."""
    own: dict[str, Any] = _seen(b, "_source", (k, v)) | {
        "causal": False,
        "stripes": 1,
        "name": "core",
    }
    own |= {"block": size("L_source") / size("I_source")}
    own |= {"bias": True} if bias else {}
    slots, table = _where("_source", "source_slots")
    heads, g = _heads(q, k)
    spec = f"bq{heads}D,bK{g}D,bK{g}D,bq,bI,bK{f',z{heads}' if bias else ''}->bq{heads}D"
    return apply("varlen_attention", spec, q, k, v, slots, table, slots, *bias, **own)


def source_cached(b: Builder, name: str, new: Node | None, heads: str) -> Node:
    """Keys or values of a request's source in their cache, where a step does not make them."""
    assert b.recipe.inference
    dims = ("B", "L_source", heads, "D")
    dtype, named = b.recipe.inference.cache_dtype, f"{name}_cache_source"
    old = leaf("state", dims, dtype, named, role=Role.CACHE, scope="attention")
    if new is None:
        return old
    at = leaf("input", ("B", "Source"), "int64", "source_slots")
    named, spec = f"cross_{name}_cached", "bkgd,bSgd,bS->bkgd"
    b.extra[named] = apply("cache", spec, old, new, at, name=named, stored=size("Source"))
    return b.extra[named]


def cross_cached_attention(b: Builder, q: Node, k: Node, v: Node) -> Node:
    """Attention of new tokens to the source of their request, in its cache, up to its last one."""
    own: dict[str, Any] = _seen(b, "_cross", (k, v)) | {"keys": size("Source"), "name": "core"}
    heads, g = _heads(q, k)
    spec = f"bq{heads}D,bK{g}D,bK{g}D,bq,bI->bq{heads}D"
    return apply("cached_attention", spec, q, k, v, *_where("_source", "source_ends"), **own)


def _heads(q: Node, k: Node) -> tuple[str, str]:
    """Letters of the heads of queries and of keys."""
    return ("a", "a") if k.shape[2] == q.shape[2] else ("(gr)", "g")


def cached_attention(
    b: Builder, q: Node, keys: Sequence[Node], reach: Reach, dims: HeadDims, *,
    rows: Node | None = None, bias: Sequence[Node] = (), sinks: Sequence[Node] = (),
) -> Node:  # fmt: skip
    """Attention of new tokens to what a cache holds, or to rows that are in the slots `rows`.

    Latents are keys and, their first channels, values. A table of biases is looked up by distance,
    as TensorRT-LLM's kernels do ("implicit relative attention").
    """
    qd, kd, value = dims
    whole = kd.replace("k", "K")  # softmax is over all keys of a request
    at, places = (",bK", (rows,)) if rows is not None else ("", ())
    heads = (f",z{qd[2:]}" if bias else "") + (f",{qd[2:]}" if sinks else "")
    own: dict[str, Any] = _seen(b, reach.kind, keys) | _reaching(b, reach) | {"name": "core"}
    own |= {"bias": True} if bias else {}
    own |= {"sinks": True} if sinks else {}
    own |= {"keys": size(f"keys{reach.kind}")} if kind_of(b, reach) != "_striped" else {}
    return apply(
        "cached_attention",
        f"{qd}D,{_terms(keys, whole, value)},bq,bI{at}{heads}->{qd}{value.upper()}",
        q,
        *keys,
        *_where(kind_of(b, reach)),
        *places,
        *bias,
        *sinks,
        out=None if len(keys) == 2 else (*q.shape[:-1], size("C")),
        **own,
    )


def striped_attention(
    b: Builder, q: Node, keys: Sequence[Node], reach: Reach, dims: HeadDims,
    sinks: Sequence[Node] = (),
) -> Node:  # fmt: skip
    """The same where stripes hold a request's tokens: attention to each, and all put together.

    A stripe counts as much as its sum of exponentials. So all get the logarithms of these, and a
    query's result is a sum (vLLM's `cp_lse_ag_out_rs`, vllm/v1/attention/ops/common.py).
    """
    qd, kd, value = dims
    kind, rows = kind_of(b, reach), qd.replace("(gr)", "a")
    stripes = size("Stripes")
    q = identity(q, "q_striped")
    wide = keys[1].shape[-1] if len(keys) == 2 else size("C")
    operands = (q, *keys, *_where(kind))
    terms = f"{qd}D,{_terms(keys, f'bnK{kd[2:]}', value)},bq,bI"
    own: dict[str, Any] = _seen(b, kind, keys) | _reaching(b, reach) | {"keys": size(f"keys{kind}")}
    out: tuple[Size, ...] = (stripes, *q.shape[:-1])
    of: dict[str, Any] = own | {"out": out, "name": "row_sums", "dtype": "fp32", "sums": True}
    of |= {"products": (0, 0)}  # by the kernel that makes the result
    sums = apply("striped_attention", f"{terms}->n{qd}", *operands, **of)
    own |= {"out": (*out, wide), "name": "core"}
    o = apply("striped_attention", f"{terms}->n{qd}{value.upper()}", *operands, **own)
    heads = ",a" if sinks else ""
    spec = f"n{rows}v,M{rows}{heads}->{rows}v"
    merged = apply("merge_stripes", spec, o, sums, *sinks, name="merged", dtype=b.dtype)
    return identity(merged, "striped_context", scope="attention")


def _terms(keys: Sequence[Node], of: str, value: str) -> str:
    return ",".join(of + x for x in ("D", value.upper())[: len(keys)])


def _seen(b: Builder, kind: str, keys: Sequence[Node]) -> dict[str, Any]:
    """What attention costs, and how scores are made."""
    c = b.config
    own: dict[str, Any] = {"pairs": size(f"pairs{kind}"), "requests": size("requests")}
    own |= {"products": (1, 1), "dtype": b.dtype, "scope": "attention.core"}
    own |= {"width": b.score_width, "latent": len(keys) == 1}
    return own | {"softcap": c.attention_softcap or 0}


def _reaching(b: Builder, reach: Reach) -> dict[str, Any]:
    """Which keys are seen."""
    own: dict[str, Any] = {"window": reach.window}
    own |= {"chunk": reach.chunk} if reach.chunk else {}
    if kind_of(b, reach) == "_striped":
        own |= {"stripes": size("Stripes"), "block": size("L_striped") / size("I_striped")}
    return own


def _where(kind: str, slots: str = "") -> tuple[Node, Node]:
    """The slots of new tokens, and whose a block of the cache is."""
    table = leaf("input", ("B", f"I{kind}"), "int32", f"block_table{kind}")
    if slots:
        return leaf("input", ("B", "S"), "int64", slots), table
    return _slots(kind), table


def _slots(kind: str) -> Node:
    return leaf("input", ("B", "S"), "int64", f"token_slots{kind}")


def with_state(
    b: Builder, op: str, spec: str, srcs: Sequence[Node], state: Node, **fields: Any
) -> Node:
    """An op that goes on from what a layer kept of each request, and keeps what it is then.

    `spec` is that of the op but for the states, [B, requests, ...], and whose each token is.
    """
    ids = leaf("input", ("B", "S"), "int64", "token_requests")
    ins, out = spec.split("->")
    own = "br" + {4: "in", 6: "ghnp"}[len(state.shape)] if op != "conv1d_served" else ""
    own = own or f"br{ins.split(',')[0][2:]}u"
    operands = (*srcs, state, ids)
    terms = f"{ins},{own},bS"
    new: dict[str, Any] = {**fields, "name": state.name, "dtype": state.dtype, "part": "state"}
    b.extra[state.name] = apply(op, f"{terms}->{own}", *operands, role=Role.CACHE, **new)
    return apply(op, f"{terms}->{out}", *operands, part="y", **fields)


def state_of(b: Builder, name: str, *dims: str | Size, table: str = "") -> Node:
    """What a layer keeps of each request, its dims declared as those of a parameter.

    Where a user's table places the parameter `table`, the state goes with that parameter.
    """
    declared = Parameter.declare(table or f"{name}_state", *dims)
    shape = ("B", "requests", *sizes_of(dims, declared))
    own: dict[str, Any] = {"binding": Binding(split_as=declared), "scope": "mixer"}
    return leaf("state", shape, b.dtype, f"{name}_state", role=Role.CACHE, **own)


def last_tokens(h: Node) -> Node:
    """The rows whose next token is predicted: of prompts the last, of verified drafts all."""
    rows = leaf("input", ("B", "O"), "int64", "logit_rows", scope=h.scope)
    return apply("take", "bSm,bo->bom", h, rows, name="last_tokens")


def gathered(logits: Node) -> Node:
    """Whole rows on every rank, where the sampler wants them (vLLM's LogitsProcessor)."""
    return identity(logits, "logits_gathered", scope=logits.scope)
