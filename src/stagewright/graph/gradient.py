"""Reverse mode, before any sharding: backward communication follows from the layouts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from stagewright.graph.make import add
from stagewright.graph.node import NO_NODES, Node, replace, toposort
from stagewright.graph.table import OPS


class Backward(NamedTuple):
    """Gradients in the order asked, nodes in execution order, and the value each belongs to."""

    gradients: tuple[Node, ...]
    order: tuple[Node, ...]
    primal: dict[Node, Node]  # gradient -> the value it is the gradient of


def backward(
    out: Node, seed: Node, wrt: Iterable[Node], others: Mapping[Node, Node] = NO_NODES
) -> Backward:
    """Gradients of `out` for each of `wrt`, given the gradient `seed` of `out` itself.

    `others` are more results, each with what is known of its gradient. A gradient is computed only
    for values that depend on some of `wrt`: what is frozen has none, and backward stops below the
    first value that trains.

    All contributions to one value are added at once, so that those of equal layout are reduced
    once. Weight gradients run after the gradients that others wait for, which leaves communication
    something to hide behind.
    """
    wrt = tuple(wrt)
    forward = toposort([*others, out])
    active = dependent(forward, wrt)
    seeds = {out: seed, **others}
    parts: dict[Node, list[Node]] = {n: [g] for n, g in seeds.items() if n in active}
    total: dict[Node, Node] = {}
    primal: dict[Node, Node] = {}
    order: list[Node] = []
    of: dict[Node, Node] = {}  # gradient of a weight -> the value the weight is multiplied with
    deferred: dict[Node, list[Node]] = {}  # value -> gradients of the weights it is multiplied with
    for n in reversed(forward):
        if n not in parts:
            continue
        here = parts[n]
        g = here[0]
        if len(here) > 1:
            g = add(*here, phase="backward", scope=n.scope, name=_named(n))
        for each in (*here, g):
            primal.setdefault(each, n)
        total[n] = g
        if not n.srcs:
            continue
        weight = _is_weight(n)
        if not weight:
            order.append(g)
        vjp = OPS[n.op].vjp
        if vjp is None:
            raise NotImplementedError(f"op {n.op!r} has no gradient in OPS")
        order += deferred.pop(n, [])
        partner = of.get(g) if weight else next((s for s in n.srcs if not _is_weight(s)), None)
        for src, found in zip(n.srcs, vjp(n, g), strict=True):
            if found is None or src not in active:
                continue
            if found is not g and not found.name:
                found = replace(found, name=_named(src), scope=n.scope)
            parts.setdefault(src, []).append(found)
            if partner is not None and _is_weight(src) and (weight or n.op == "einsum"):
                deferred.setdefault(partner, []).append(found)
                of[found] = partner
            else:
                order.append(found)
    order += [g for some in deferred.values() for g in some]
    missing = [w for w in wrt if w not in total]
    if missing:
        raise ValueError(f"the output does not depend on {missing}")
    gradients = tuple(total[w] for w in wrt)
    return Backward(gradients, (*order, *gradients), primal)


def dependent(order: Iterable[Node], wrt: Iterable[Node]) -> set[Node]:
    """`wrt`, and the values of `order`, inputs first, that depend on some of `wrt`."""
    active = set(wrt)
    for n in order:
        if not active.isdisjoint(n.srcs):
            active.add(n)
    return active


def _named(n: Node) -> str:
    return f"d_{n.name}" if n.name else ""


def _is_weight(n: Node) -> bool:
    """A parameter, perhaps gathered or cast."""
    while n.op in ("identity", "cast") and n.srcs:
        n = n.srcs[0]
    return n.op == "param"
