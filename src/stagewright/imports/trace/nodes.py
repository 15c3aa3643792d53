"""The nodes of a recording while chains of them are replaced by one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stagewright.imports.trace.recording import Ref, TracedNode


class TracedNodes:
    """The nodes of a recording while it is rewritten."""

    def __init__(self, nodes: Iterable[TracedNode], outputs: Sequence[str]) -> None:
        """`outputs` are read from outside."""
        self.of = {node.name: node for node in nodes}
        self.outputs = tuple(outputs)

    def users(self) -> dict[str, list[str]]:
        """By name, the nodes that read it."""
        found: dict[str, list[str]] = {}
        for node in self.of.values():
            for name in dict.fromkeys(node.operands()):
                found.setdefault(name, []).append(node.name)
        return found

    def arg(self, node: TracedNode, nth: int) -> TracedNode | None:
        """The node that is an argument; None for a number."""
        of = node.args[nth] if nth < len(node.args) else None
        return self.of.get(of.name) if isinstance(of, Ref) else None

    def put(self, node: TracedNode, op: str, *operands: str, **kwargs: Any) -> None:
        """Make a node another operation."""
        self.of[node.name] = replace(node, op=op, args=tuple(map(Ref, operands)), kwargs=kwargs)

    def same(self, names: Mapping[str, str]) -> None:
        """Read other nodes in place of some."""
        final = {name: _last(name, names) for name in names}
        self.of = {k: node.renamed(final) for k, node in self.of.items() if k not in names}
        self.outputs = tuple(final.get(n, n) for n in self.outputs)

    def prune(self) -> None:
        """Drop what no output depends on; parameters stay only where something reads them."""
        needed, todo = set[str](), [*self.outputs]
        while todo:
            name = todo.pop()
            if name not in needed:
                needed.add(name)
                todo += self.of[name].operands()
        self.of = {k: node for k, node in self.of.items() if k in needed}

    def plain(self, node: TracedNode | None, *also: str) -> TracedNode | None:
        """What a node is made of by changes of shape and data type alone."""
        while node is not None and operation(node) in (*PLAIN, *also):
            node = self.arg(node, 0)
        return node

    def plain_view(self, node: TracedNode | None) -> TracedNode | None:
        """What a node is one view of, where nothing but the number of its dims differs."""
        if operation(node) in ("view", "reshape", "_unsafe_view"):
            node = self.arg(node, 0) if node else None
        return node


PLAIN = ("to", "view", "reshape", "unsqueeze", "squeeze", "contiguous", "expand", "transpose",
          "flatten", "_to_copy", "clone", "type_as", "alias", "permute")  # fmt: skip
CASTS = ("to", "_to_copy", "type_as")
"""Changes of data type."""


def _last(name: str, names: Mapping[str, str]) -> str:
    while name in names:
        name = names[name]
    return name


def operation(node: TracedNode | None) -> str:
    """The name of an operation without its library and overload: `mul` of `aten.mul.Tensor`."""
    if node is None:
        return ""
    words = node.op.split(".")
    return words[1] if len(words) > 1 else node.op


def other_factor(graph: TracedNodes, node: TracedNode, name: str) -> TracedNode | None:
    """The factor of a product besides the one of this name."""
    others = [a for a in node.args[:2] if isinstance(a, Ref) and a.name != name]
    return graph.of.get(others[0].name) if len(others) == 1 else None


_GATES = {"silu": "silu", "gelu": "gelu", "sigmoid": "sigmoid", "relu": "relu"}


def activation_of(node: TracedNode | None) -> str | None:
    """The name of a node's activation, where it is one that gates."""
    if node is None:
        return None
    if node.op == "our.act" and node.kwargs.get("fn") in ("gelu_tanh", "silu"):
        return str(node.kwargs["fn"])
    fn = _GATES.get(operation(node)) if node.op.startswith("aten.") else None
    tanh = node.kwargs.get("approximate") == "tanh" or "tanh" in node.args
    return "gelu_tanh" if fn == "gelu" and tanh else fn
