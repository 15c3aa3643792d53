"""Operations in place: what they write, into a view of a tensor too, becomes a value of its own."""

# torch has partial types: what comes from it is Any here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stagewright.imports.trace.nodes import TracedNodes, operation
from stagewright.imports.trace.recording import Ref, TracedNode, argument


def functional(program: Any) -> Any:
    """A program of `torch.export` without operations in place.

    PyTorch's own functionalization, which no other decomposition accompanies: attention and norms
    stay in one piece. A program without such operations stays as it is. Counters of steps, which
    batch norm keeps, are no operation of the model.
    """
    if not any(map(_writes, _calls(program.graph_module))):
        return program
    return program.run_decompositions({})


def _calls(graph_module: Any) -> Iterator[Any]:
    """The calls of a graph and of the graphs that it calls."""
    for node in graph_module.graph.nodes:
        if node.op == "call_function":
            yield node
        elif node.op == "get_attr" and hasattr(getattr(graph_module, node.target, None), "graph"):
            yield from _calls(getattr(graph_module, node.target))


def _writes(node: Any) -> bool:
    """Whether a call changes a tensor that another call made."""
    if not getattr(getattr(node.target, "_schema", None), "is_mutable", False):
        return False
    changed = node.args[0] if node.args else None
    shape = getattr(getattr(changed, "meta", {}).get("val"), "shape", None)
    counter = getattr(changed, "op", "") == "placeholder" and shape is not None and not len(shape)
    return not counter


# ---- tensors that are filled in parts ------------------------------------------------------------


def copies(graph: TracedNodes) -> None:
    """What is copied into a tensor is that tensor's value: as it is, cast or expanded."""
    names: dict[str, str] = {}
    for node in [*graph.of.values()]:
        into = "slice_scatter" if operation(node) == "slice_scatter" else "copy"
        source = graph.arg(node, 1)
        if operation(node) != into or source is None:
            continue
        if (source.shape, source.dtype) == (node.shape, node.dtype):
            names[node.name] = source.name
        elif into == "copy" and source.shape == node.shape:
            graph.put(node, "aten._to_copy.default", source.name)
        elif into == "copy" and source.dtype == node.dtype:
            graph.put(node, "aten.expand.default", source.name)
    graph.same(names)


def fills(graph: TracedNodes) -> None:
    """A tensor of which each part is written once is what was written, part behind part."""
    users = graph.users()
    for node in [*graph.of.values()]:
        kind = operation(node)
        if kind not in ("slice_scatter", "select_scatter") or any(
            operation(graph.of[n]) == kind and graph.arg(graph.of[n], 0) is node
            for n in users.get(node.name, ())
        ):
            continue
        parts = _parts(graph, node, kind)
        if parts is None:
            continue
        dim = int(argument(node, 2, 0)) % len(node.shape)
        op = "aten.cat.default" if kind == "slice_scatter" else "aten.stack.default"
        made = tuple(Ref(name) for name in parts)
        graph.of[node.name] = TracedNode(
            node.name, op, node.shape, node.dtype, (made, dim), {}, node.path, node.source
        )


def _parts(graph: TracedNodes, last: TracedNode, kind: str) -> list[str] | None:
    """What was written into a tensor by a chain of calls along a dim, in order; None unless all
    of the tensor was written."""
    dim = int(argument(last, 2, 0)) % len(last.shape)
    total, at = last.shape[dim], last
    found: dict[int, str] = {}
    ends: dict[int, int | None] = {}
    while operation(at) == kind and int(argument(at, 2, 0)) % len(last.shape) == dim:
        base, source = graph.arg(at, 0), graph.arg(at, 1)
        start = argument(at, 3, 0)
        if base is None or source is None or not isinstance(start, int) or start < 0:
            return None
        if kind == "slice_scatter" and argument(at, 5, 1) != 1:
            return None
        width = 1 if kind == "select_scatter" else source.shape[dim]
        reaches = kind == "slice_scatter" and _reaches(argument(at, 4), total)
        end = None if reaches else start + width if isinstance(width, int) else -1
        if found.setdefault(start, source.name) == source.name:
            ends.setdefault(start, end)
        at = base
    place: int | None = 0
    made: list[str] = []
    while place is not None and place != total:
        if place not in found:
            return None
        made.append(found[place])
        place = ends[place]
    return made if len(made) == len(found) else None


def _reaches(end: object, total: object) -> bool:
    """Whether a part of a dim goes to its end."""
    big = isinstance(end, int) and (end >= 2**62 or (isinstance(total, int) and end >= total))
    return end is None or big or end == total
