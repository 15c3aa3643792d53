"""Recomputation: values that backward computes or gathers again instead of saving them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from stagewright.graph.node import Graph, Node, replace, toposort


def remat(
    graph: Graph,
    again: Callable[[Node], str | None],
    primal: Mapping[Node, Node],
    *,
    rerun: Callable[[Node], bool] = lambda _: False,
    made_in: str = "forward",
) -> tuple[Graph, dict[Node, Node]]:
    """Backward uses copies of the forward nodes for which `again` names a phase to make them in.

    `made_in` is the phase of the nodes that are copied: those that a pass before this one has
    copied may be copied once more.

    Copies run just before their first user. `rerun` marks results that are made again whole though
    forward's are kept, as by frameworks that call a module's forward again for its inner values:
    their copies run before backward first reads something that they are made of. What is kept by
    another name, as an identity that backward reads, is not made again. Returns the graph and
    `primal` for its nodes.
    """
    copy: dict[Node, Node] = {}
    forced: list[Node] = []
    read = {s for n in graph if n.phase != "forward" for s in n.srcs}
    named = {n.srcs[0] for n in read if n.op == "identity" and n.srcs and not again(n)}
    for n in graph:
        if n.phase == made_in and n.srcs and (phase := again(n)):
            copy[n] = replace(n, srcs=tuple(copy.get(s, s) for s in n.srcs), phase=phase)
            if rerun(n):
                forced.append(n)
    if not copy:
        return graph, dict(primal)
    kept = {*forced, *named}

    def visit(old: Node, srcs: tuple[Node, ...]) -> Node:
        if old.phase != made_in:
            pairs = zip(old.srcs, srcs, strict=True)
            srcs = tuple(s if o in kept else copy.get(o, s) for o, s in pairs)
        return replace(old, srcs=srcs)

    new, table = graph.rebuild(visit)
    outputs = {**new.outputs, **{f"rerun.{i}": copy[n] for i, n in enumerate(forced)}}
    order: list[Node] = []
    copies = set(copy.values())
    waiting = [(copy[n], _copies_with_operands(copy[n], copies)) for n in forced]
    for n in new:
        if n.phase != "forward":
            order += [c for c, made_of in waiting if not made_of.isdisjoint((n, *n.srcs))]
        order.append(n)
    return Graph.of([*order, *outputs.values()], outputs), {
        table[g]: table[p] for g, p in primal.items() if g in table and p in table
    }


def _copies_with_operands(result: Node, copies: set[Node]) -> set[Node]:
    """The copies that a copy needs, and all that they read."""
    found = [n for n in toposort([result]) if n in copies]
    return {*found, *(s for n in found for s in n.srcs)}
