"""What is other in inference: keys and values are kept in a cache, and there is only forward.

The tokens of all requests of a rank stand behind each other, as vLLM flattens them: B is the number
of such batches (one for each rank of data parallelism), S the new tokens of one. The tokens of
requests are in the L slots of a cache, which has I blocks; the leaf `token_slots` says where new
ones go, `block_table` whose a block is, and `key_slots` which slots some new token sees. Requests
have lengths of their own, so what attention costs is not a product of dims: the pairs of a query
and a key it sees, and the keys that are read, are sizes by themselves (`batch.each`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stagewright.ir import Graph, Node, toposort
from stagewright.models import Reach
from stagewright.nn.builder import Block, Builder
from stagewright.ops import apply, identity, leaf
from stagewright.size import Size, size


def finish(name: str, b: Builder, y: Node) -> Block:
    """A block that ends with its result, and with the caches it wrote into."""
    kept = {n.name: n for n in toposort([y]) if n.op == "cache"}
    outputs = {"y": y, **kept, **b.extra}
    return Block(name, Graph.of(toposort(outputs.values()), outputs), {})


def cached(b: Builder, new: Mapping[str, Node], reach: Reach) -> list[Node]:
    """Caches with the rows of new tokens, [B, S, ...], written into their slots, [B, L, ...]."""
    assert b.recipe.inference
    kind = reach.kind
    kept: list[Node] = []
    for name, x in new.items():
        dims = ("B", f"L{kind}", *x.shape[2:])
        dtype = b.recipe.inference.cache_dtype
        old = leaf("state", dims, dtype, f"{name}_cache{kind}", role="cache", scope=x.scope)
        rest = "agd"[3 - len(x.shape[2:]) :]
        spec = f"bk{rest},bS{rest},bS->bk{rest}"
        kept.append(apply("cache", spec, old, x, _slots(kind), name=f"{name}_cached"))
    return kept


def cached_rows(b: Builder, kept: Node, reach: Reach) -> Node:
    """The rows of a cache that some new token sees, in the precision of the computation."""
    return apply("take", "bLw,bk->bkw", kept, _keys(reach.kind), dtype=b.dtype, name="seen")


def cached_attention(
    b: Builder, q: Node, keys: Sequence[Node], reach: Reach, qd: str, kd: str, value: str, *,
    gathered: bool = False, sinks: Sequence[Node] = (),
) -> Node:  # fmt: skip
    """Attention of new tokens to what a cache holds, or to rows that are `gathered` from it.

    `qd` and `kd` are the indices of queries and keys but for the width, `value` that of values.
    Latents are keys and, their first channels, values.
    """
    kind, c = reach.kind, b.config
    table = leaf("input", ("B", f"I{kind}"), "int32", f"block_table{kind}", role="input")
    whole = kd.replace("k", "K")  # softmax is over all keys of a request
    wide = value.upper()
    of = ",".join(whole + x for x in ("D", wide)[: len(keys)])
    at, places = (",bK", (_keys(kind),)) if gathered else ("", ())
    heads = f",{qd[2:]}" if sinks else ""
    own: dict[str, Any] = {"chunk": reach.chunk} if reach.chunk else {}
    own |= {"sinks": True} if sinks else {}
    sums: dict[str, Any] = {n: size(f"{n}{kind}") for n in ("pairs", "keys", "requests")}
    return apply(
        "cached_attention",
        f"{qd}D,{of},bq,bI{at}{heads}->{qd}{wide}",
        q,
        *keys,
        _slots(kind),
        table,
        *places,
        *sinks,
        out=None if len(keys) == 2 else (*q.shape[:-1], size("C")),
        dtype=b.dtype,
        name="core",
        scope="attention.core",
        window=reach.window,
        width=c.kv_channels,
        latent=len(keys) == 1,
        softcap=c.attention_softcap or 0,
        products=(1, 1),
        **sums,
        **own,
    )


def _slots(kind: str) -> Node:
    return leaf("input", ("B", "S"), "int64", f"token_slots{kind}", role="input")


def _keys(kind: str) -> Node:
    return leaf("input", ("B", f"keys{kind}"), "int64", f"key_slots{kind}", role="input")


def with_state(
    b: Builder, op: str, spec: str, srcs: Sequence[Node], state: Node, **fields: Any
) -> Node:
    """An op that goes on from what a layer kept of each request, and keeps what it is then.

    `spec` is that of the op but for the states, [B, requests, ...], and whose each token is.
    """
    ids = leaf("input", ("B", "S"), "int64", "token_requests", role="input")
    ins, out = spec.split("->")
    own = "br" + {4: "in", 6: "ghnp"}[len(state.shape)] if op != "conv1d_served" else ""
    own = own or f"br{ins.split(',')[0][2:]}u"
    operands = (*srcs, state, ids)
    terms = f"{ins},{own},bS"
    new: dict[str, Any] = {**fields, "name": state.name, "dtype": state.dtype, "role": "cache"}
    b.extra[state.name] = apply(op, f"{terms}->{own}", *operands, part="state", **new)
    return apply(op, f"{terms}->{out}", *operands, part="y", **fields)


def state_of(b: Builder, name: str, of: str, *dims: str | Size) -> Node:
    """What a layer keeps of each request, split over ranks as the parameter `of` is."""
    own = {"role": "cache", "of": of, "scope": "mixer"}
    return leaf("state", ("B", "requests", *dims), b.dtype, f"{name}_state", **own)


def last_tokens(h: Node) -> Node:
    """The rows whose next token is predicted: of prompts the last, of verified drafts all."""
    rows = leaf("input", ("B", "O"), "int64", "logit_rows", role="input", scope=h.scope)
    return apply("take", "bSm,bo->bom", h, rows, name="last_tokens")


def gathered(logits: Node) -> Node:
    """Whole rows on every rank, where the sampler wants them (vLLM's LogitsProcessor)."""
    return identity(logits, "logits_gathered", scope=logits.scope)
