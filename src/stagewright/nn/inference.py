"""What is other in inference: keys and values are kept in a cache, and there is only forward.

The tokens of all requests of a rank stand behind each other, as vLLM flattens them: B is the number
of such batches (one for each rank of data parallelism), S the new tokens of one. The tokens of
requests are in the L slots of a cache, which has I blocks; the leaf `token_slots` says where new
ones go, and `block_table` whose a block is. Requests have lengths of their own, so what attention
costs is not a product of dims: the pairs of a query and a key it sees, and the keys that are read,
are sizes by themselves (`batch.each`).
"""

from __future__ import annotations

from typing import Any

from stagewright.ir import Graph, Node, toposort
from stagewright.nn.builder import Block, Builder
from stagewright.ops import apply, identity, leaf
from stagewright.size import size


def finish(name: str, b: Builder, y: Node) -> Block:
    """A block that ends with its result, and with the caches it wrote into."""
    kept = {n.name: n for n in toposort([y]) if n.op == "cache"}
    outputs = {"y": y, **kept}
    return Block(name, Graph.of(toposort(outputs.values()), outputs), {})


def cached_attention(b: Builder, q: Node, k: Node, v: Node, window: int, qd: str, kd: str) -> Node:
    """Write new keys and values to the cache, and attend to what it holds: two kernels, as vLLM's.

    `qd` and `kd` are the indices of queries and keys but for the width.
    """
    assert b.recipe.inference
    kind = "_local" if window else ""
    slots = leaf("input", ("B", "S"), "int64", f"token_slots{kind}", role="input")
    table = leaf("input", ("B", f"I{kind}"), "int32", f"block_table{kind}", role="input")
    kept: list[Node] = []
    for name, new in (("k", k), ("v", v)):
        dims = ("B", f"L{kind}", *new.shape[2:])
        dtype = b.recipe.inference.cache_dtype
        old = leaf("state", dims, dtype, f"{name}_cache{kind}", role="cache", scope=new.scope)
        spec = f"{kd}d,bS{kd[2:]}d,bS->{kd}d"
        kept.append(apply("cache", spec, old, new, slots, name=f"{name}_cached"))
    whole = kd.replace("k", "K")  # softmax is over all keys of a request
    sums: dict[str, Any] = {n: size(f"{n}{kind}") for n in ("pairs", "keys", "requests")}
    return apply(
        "cached_attention",
        f"{qd}D,{whole}D,{whole}D,bq,bI->{qd}D",
        q,
        *kept,
        slots,
        table,
        name="core",
        scope="attention.core",
        window=window,
        softcap=b.config.attention_softcap or 0,
        products=(1, 1),
        **sums,
    )


def last_tokens(h: Node) -> Node:
    """The rows whose next token is predicted: of prompts the last, of verified drafts all."""
    rows = leaf("input", ("B", "O"), "int64", "logit_rows", role="input", scope=h.scope)
    return apply("take", "bSm,bo->bom", h, rows, name="last_tokens")


def gathered(logits: Node) -> Node:
    """Whole rows on every rank, where the sampler wants them (vLLM's LogitsProcessor)."""
    return identity(logits, "logits_gathered", scope=logits.scope)
