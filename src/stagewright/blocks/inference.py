"""Blocks in inference: only forward, with states and weights that stay in memory.

Attention over a KV cache is in `blocks.cache`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stagewright.algebra.size import Size
from stagewright.blocks.builder import Block, Builder, sizes_of
from stagewright.graph.make import apply, identity, leaf
from stagewright.graph.node import Graph, Node, toposort
from stagewright.graph.parameter import Parameter
from stagewright.graph.roles import Binding, Role

OF_REQUESTS = Binding(like="token_slots")
"""Binding of an integer input about a rank's requests, [B, ...]."""


def finish(name: str, b: Builder, y: Node | None) -> Block:
    """A block without backward: its outputs are its result, its caches and its live-outs.

    Weights that nothing in the step is computed with are outputs, too: they stay in memory.
    """
    outputs = ({} if y is None else {"y": y}) | b.extra | b.made
    used = toposort(outputs.values())
    outputs |= {f"held.{n}": p for n, p in b.params.items() if p not in set(used)}
    return Block(name, Graph.of(toposort(outputs.values()), outputs), {})


def idle(block: Block) -> Block:
    """A block of which nothing runs in this step; its weights stay in memory."""
    weights = {f"held.{n.name}": n for n in block.graph if n.op == "param"}
    return Block(block.name, Graph.of(weights.values(), weights), {})


def with_state(
    b: Builder, op: str, spec: str, srcs: Sequence[Node], state: Node, **fields: Any
) -> Node:
    """The result of a recurrence that starts from each request's state and writes the new state.

    `spec` is the recurrence's own index expression. Two operands come after those that it names:
    the states [B, requests, ...] and the request of each token, `token_requests` [B, S].
    """
    ids = token_requests()
    ins, out = spec.split("->")
    state_term = "br" + {4: "in", 6: "ghnp"}[len(state.shape)] if op != "conv1d_served" else ""
    state_term = state_term or f"br{ins.split(',')[0][2:]}u"
    operands = (*srcs, state, ids)
    terms = f"{ins},{state_term},bS"
    new: dict[str, Any] = {**fields, "name": state.name, "dtype": state.dtype, "part": "state"}
    b.extra[state.name] = apply(op, f"{terms}->{state_term}", *operands, role=Role.CACHE, **new)
    return apply(op, f"{terms}->{out}", *operands, part="y", **fields)


def token_requests() -> Node:
    """The request of each new token, [B, S]."""
    return leaf("input", ("B", "S"), "int64", "token_requests", binding=OF_REQUESTS)


def state_of(
    b: Builder, name: str, *dims: str | Size, table: str = "", dtype: str = "", scope: str = "mixer"
) -> Node:
    """The state [B, requests, ...] that a layer keeps of each request.

    `dims` are declared as those of a parameter. Where a user's table places the parameter `table`,
    the state is split as that parameter.
    """
    declared = Parameter.declare(table or f"{name}_state", *dims)
    shape = ("B", "requests", *sizes_of(dims, declared))
    attrs: dict[str, Any] = {"binding": Binding(split_as=declared), "scope": scope}
    return leaf("state", shape, dtype or b.dtype, f"{name}_state", role=Role.CACHE, **attrs)


def last_tokens(h: Node) -> Node:
    """The rows of `h` whose next token is predicted, [B, O, M]: the last of each prompt, and all
    tokens of a draft that is verified."""
    rows = leaf("input", ("B", "O"), "int64", "logit_rows", scope=h.scope, binding=OF_REQUESTS)
    return apply("take", "bSm,bo->bom", h, rows, name="last_tokens")


def gathered(logits: Node) -> Node:
    """Logits over the whole vocabulary on every rank, as the sampler reads them (vLLM's
    LogitsProcessor)."""
    return identity(logits, "logits_gathered", scope=logits.scope)
