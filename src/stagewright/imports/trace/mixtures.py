"""Mixtures of experts: what stands between a hidden state and the sum over its experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from stagewright.imports.trace.kept import GROUPED, kept_bytes
from stagewright.imports.trace.nodes import (
    PLAIN,
    TracedNodes,
    activation_of,
    operation,
    other_factor,
)
from stagewright.imports.trace.recording import TracedNode


def experts(graph: TracedNodes) -> None:
    """Routed experts: from the hidden state to the sum of what the chosen experts make of it.

    Anchors are the products of sorted rows with the matrices of all experts (`_grouped_mm`).
    """
    products = [n for n in graph.of.values() if operation(n) in GROUPED]
    done: set[str] = set()
    for up in products:
        if up.name in done or up.name not in graph.of:
            continue
        found = _mixture(graph, up)
        if found is not None:
            done |= found


def _mixture(graph: TracedNodes, up: TracedNode) -> set[str] | None:
    """Replace one mixture; the names of its grouped products."""
    users = graph.users()
    rows = graph.plain(graph.arg(up, 0))
    weight = _matrix(graph, up)
    if operation(rows) != "index" or rows is None or weight is None:
        return None
    h = graph.plain(graph.arg(rows, 0))
    others = [n for n in _after(graph, users, up.name) if operation(graph.of[n]) in GROUPED]
    downs = [graph.of[n] for n in others]
    down = downs[-1] if downs else None
    gates = [n for n in downs if n is not down]
    if h is None or down is None:
        return None
    matrices = [weight, *filter(None, (_matrix(graph, n) for n in (*gates, down)))]
    end = _sum_of_experts(graph, users, down, h)
    top = next((n for n in reversed([*_cone(graph, end)]) if operation(n) == "topk"), None)
    if end is None or top is None:
        return None
    cone = _cone(graph, end, h.name)
    router = [n for n in cone if operation(n) in ("linear", "mm", "matmul", "addmm")]
    if len(router) != 1:
        return None
    experts = int(weight.shape[0])
    kinds = {operation(n) for n in cone}
    chosen = [n for n in cone if operation(n) == "topk"]
    act = next((n.kwargs["fn"] for n in cone if n.op == "our.glu"), None)
    inner = int(last.shape[-1]) if (last := _matrix(graph, down)) else 0
    divides = any(operation(n) == "div" and operation(graph.plain(graph.arg(n, 1), "add")) == "sum"
                  for n in cone)  # fmt: skip
    after_topk = chosen[-1].name if chosen else ""
    softmaxes = [n for n in cone if operation(n) == "softmax" and after_topk in _names(graph, n)]
    groups, limit = _groups(graph, chosen, experts)
    own: dict[str, Any] = {
        "num_experts": experts,
        "top_k": int(chosen[-1].args[1]),
        "moe_ffn_hidden_size": inner,
        "router": "sigmoid" if "sigmoid" in kinds else "softmax",
        "norm_topk_prob": divides or bool(softmaxes),
        "gated": act is not None,
        "activation": act or next((fn for n in cone if (fn := activation_of(n))), "silu"),
        "expert_bias": any(n.op == "buffer" and n.shape == (experts,) for n in cone),
        "router_bias": len(router[0].args) > 2 or operation(router[0]) == "addmm",
        "num_expert_groups": groups,
        "topk_groups": limit,
    }
    own |= _as_written(graph, users, cone, h, {*others, up.name, rows.name}, down)
    every = (m.name for m in (*_router_weights(graph, router[0]), *matrices))
    names = tuple(dict.fromkeys(every))
    shared = _shared_expert(graph, users, end, h)
    if shared is not None:
        sum_of, width, more = shared
        own |= {"shared_ffn_hidden_size": width}
        names += more
        end = sum_of
    graph.put(end, "our.experts", h.name, *names, **own)
    graph.of[end.name] = replace(graph.of[end.name], dtype=h.dtype)
    return {up.name, *others}


def _as_written(
    graph: TracedNodes,
    users: Mapping[str, list[str]],
    cone: Sequence[TracedNode],
    h: TracedNode,
    grouped: set[str],
    down: TracedNode,
) -> dict[str, Any]:
    """What autograd keeps of routing, and whether the results of experts are weighed.

    `grouped` are the products of experts and the first one's rows; values of as many rows are kept
    by the ops that stand for experts.
    """
    inside = {n.name for n in cone if len(n.shape) == 2 and n.shape[0] == down.shape[0]}
    inside -= {n.name for n in cone if n.shape[-1:] == (1,)}
    kept = kept_bytes(graph, cone, h, grouped | inside)
    if kept is None:
        return {}
    weighed = any(operation(graph.of[n]) == "mul" for n in _first_users(graph, users, down))
    own: dict[str, Any] = {"_kept": kept.each, "_kept_once": kept.once}
    return own | ({"_weights": "output"} if weighed else {})


def _first_users(graph: TracedNodes, users: Mapping[str, list[str]], node: TracedNode) -> list[str]:
    """What reads a node, behind changes of shape and data type."""
    found: list[str] = []
    for name in users.get(node.name, ()):
        plain = operation(graph.of[name]) in PLAIN
        found += _first_users(graph, users, graph.of[name]) if plain else [name]
    return found


def _matrix(graph: TracedNodes, product: TracedNode) -> TracedNode | None:
    """The parameter of a grouped product, [experts, out, in] or the like."""
    found = graph.plain(graph.arg(product, 1))
    return found if found is not None and found.op == "param" else None


def _router_weights(graph: TracedNodes, node: TracedNode) -> list[TracedNode]:
    found = (graph.plain(graph.of[n]) for n in node.operands())
    return [n for n in found if n is not None and n.op == "param"]


def _groups(graph: TracedNodes, chosen: Sequence[TracedNode], experts: int) -> tuple[int, int]:
    """Group-limited routing: groups of experts, and how many of them a token may go to."""
    if len(chosen) < 2:
        return 1, 1
    for node in chosen[:-1]:
        source = graph.arg(node, 0)
        width = source.shape[-1] if source else 0
        if isinstance(width, int) and width < experts and source and len(source.shape) == 2:
            return width, int(node.args[1])
    return 1, 1


def _names(graph: TracedNodes, node: TracedNode) -> set[str]:
    return {n.name for n in _cone(graph, node)}


def _cone(graph: TracedNodes, end: TracedNode | None, stop: str = "") -> list[TracedNode]:
    """What a node is made of, itself last, not beyond the node called `stop`."""
    seen: dict[str, TracedNode] = {}
    todo = [end.name] if end else []
    while todo:
        name = todo.pop()
        if name in seen or name == stop:
            continue
        seen[name] = graph.of[name]
        todo += graph.of[name].operands()
    return [n for n in graph.of.values() if n.name in seen]


def _after(graph: TracedNodes, users: Mapping[str, list[str]], name: str) -> list[str]:
    """The nodes that depend on a node, up to the end of its layer's grouped products, in order."""
    seen, todo = set[str](), [name]
    while todo:
        for user in users.get(todo.pop(), ()):
            node = graph.of[user]
            rows = node.shape[0] if node.shape else 0
            if user not in seen and (rows == graph.of[name].shape[0] or node.op == "getitem"
                                     or not node.shape):  # fmt: skip
                seen.add(user)
                todo.append(user)
    return [n for n in graph.of if n in seen]


def _sum_of_experts(
    graph: TracedNodes, users: Mapping[str, list[str]], down: TracedNode, h: TracedNode
) -> TracedNode | None:
    """The first node behind the last product with the shape of the hidden state."""
    node, rows = down, down.shape[0]
    for _ in range(40):
        behind = [graph.of[n] for n in users.get(node.name, ())]
        if not behind:
            return None
        node = behind[0]
        if node.shape == h.shape and node.shape[0] != rows:
            return node
    return None


def _shared_expert(
    graph: TracedNodes, users: Mapping[str, list[str]], end: TracedNode, h: TracedNode
) -> tuple[TracedNode, int, tuple[str, ...]] | None:
    """A gated MLP of the same hidden state that is added to the experts' sum."""
    behind = [graph.of[n] for n in users.get(end.name, ())]
    if len(behind) != 1 or operation(behind[0]) != "add":
        return None
    other = other_factor(graph, behind[0], end.name)
    last = graph.plain(other)
    if operation(last) != "linear" or last is None:
        return None
    glu = graph.plain(graph.arg(last, 0))
    if glu is None or glu.op != "our.glu":
        return None
    parts = [graph.plain(graph.of[n]) for n in glu.operands()]
    if any(operation(p) != "linear" for p in parts):
        return None
    if any(graph.plain(graph.arg(p, 0)) is not h for p in parts if p):
        return None
    weights = [graph.arg(p, 1) for p in (*parts, last) if p]
    return behind[0], int(glu.shape[-1]), tuple(w.name for w in weights if w)
