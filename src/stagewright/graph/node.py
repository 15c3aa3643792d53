"""The graph: immutable, interned nodes in execution order. Passes rebuild it and never change it.

Two nodes with the same fields are the same object, so common subexpressions cannot exist and
equality is `is`. Side tables keyed by node hold what analyses find out.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any

from stagewright.algebra.layout import Layout
from stagewright.algebra.size import Size
from stagewright.graph.roles import UNBOUND, Binding, Role

PHASES = ("forward", "recompute", "backward", "optimizer")
"""When a value is computed within a step, in this order."""

BYTES: dict[str, int | Fraction] = {
    **{"fp32": 4, "bf16": 2, "fp8": 1, "int32": 4, "int64": 8, "uint8": 1},
    "fp8_r128": 1 + Fraction(4, 128),  # fp32 for 128 in a row (keys of DeepSeek-V3.2's indexer)
    **{"int8": 1, "fp6": Fraction(3, 4), "fp4": Fraction(1, 2), "int4": Fraction(1, 2)},
    **{"int3": Fraction(3, 8), "int2": Fraction(1, 4)},
    "mxfp8": 1 + Fraction(1, 32),  # a scale of a byte for 32 values
}
"""Bytes of a value by data type; scales of groups of weights are in `stored.Stored`."""


LOW = ("fp8", "mxfp8", "fp4", "int8")
"""Data types that operands of a product are cast to, and so are the gradients of its results."""

INTEGERS = frozenset({"int32", "int64", "uint8"})
"""Data types of which no value has a gradient."""


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True, repr=False)
class Node:
    """One value and how it comes about.

    `shape` is the logical shape: sharding changes `layout` and never `shape`. `phase` and `once`
    are part of the identity: the same expression in two phases is computed twice. `once` marks what
    happens once per step instead of once per microbatch. `name` is what strategies and people call
    the value. `attrs` are the op's own, as its row declares them; `role` and `binding` say what the
    value stands for in the model, whatever computes it.
    """

    op: str
    srcs: tuple[Node, ...]
    attrs: tuple[tuple[str, Hashable], ...]
    phase: str
    once: bool
    scope: str
    name: str
    shape: tuple[Size, ...]
    dtype: str
    layout: Layout
    role: Role | None = None
    binding: Binding = UNBOUND

    def __getitem__(self, attr: str) -> Hashable:
        for key, value in self.attrs:
            if key == attr:
                return value
        raise KeyError(f"{self.op} has no attribute {attr!r}")

    def get(self, attr: str, default: Hashable = None) -> Hashable:
        """The attribute's value, or `default`."""
        for key, value in self.attrs:
            if key == attr:
                return value
        return default

    def __repr__(self) -> str:
        return f"{self.name or self.op}: {self.layout.show(tuple(map(str, self.shape)))}"


NO_NODES: Mapping[Node, Node] = {}

_interned: weakref.WeakValueDictionary[tuple[object, ...], Node] = weakref.WeakValueDictionary()
_FIELDS = tuple(f.name for f in fields(Node))


def node(
    op: str,
    srcs: tuple[Node, ...],
    *,
    shape: tuple[Size, ...],
    dtype: str,
    layout: Layout,
    attrs: Mapping[str, Hashable] | None = None,
    phase: str = "forward",
    once: bool = False,
    scope: str = "",
    name: str = "",
    role: Role | None = None,
    binding: Binding = UNBOUND,
) -> Node:
    """The one node with these fields."""
    key = (
        op,
        srcs,
        tuple(sorted((attrs or {}).items())),
        phase,
        once,
        scope,
        name,
        shape,
        dtype,
        layout,
        role,
        binding,
    )
    return _intern(key)


def replace(old: Node, **changes: Any) -> Node:
    """`old` with some fields changed."""
    return _intern(tuple(changes[f] if f in changes else getattr(old, f) for f in _FIELDS))


def _intern(key: tuple[Any, ...]) -> Node:
    found = _interned.get(key)
    if found is None:
        found = _interned[key] = Node(*key)
    return found


def toposort(roots: Iterable[Node]) -> list[Node]:
    """Every node that the roots need, once, inputs first, in the order the roots ask for them."""
    order: dict[Node, None] = {}
    stack = [*roots]
    stack.reverse()
    while stack:
        waiting = [s for s in reversed(stack[-1].srcs) if s not in order]
        if waiting:
            stack += waiting
        else:
            order[stack.pop()] = None
    return list(order)


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes in execution order, and which of them the outside asks for, by name.

    Graphs of the same nodes with the same outputs are equal.
    """

    nodes: tuple[Node, ...]
    outputs: Mapping[str, Node] = field(hash=False)

    @classmethod
    def of(cls, order: Iterable[Node], outputs: Mapping[str, Node]) -> Graph:
        """A graph of all that the outputs need, executed in the given order as far as possible."""
        needed = set(toposort(outputs.values()))
        wanted = (n for n in (*order, *outputs.values()) if n in needed)
        return cls(tuple(toposort(wanted)), outputs)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def rebuild(
        self, fn: Callable[[Node, tuple[Node, ...]], Node]
    ) -> tuple[Graph, dict[Node, Node]]:
        """The one way to write a pass: `fn(old, new_srcs) -> new`, once per node, inputs first.

        Returns the new graph and the table from old to new nodes. New nodes that `fn` makes on the
        way are executed just before the one it returns.
        """
        new: dict[Node, Node] = {}
        for n in self.nodes:
            new[n] = fn(n, tuple(new[s] for s in n.srcs))
        outputs = {k: new[v] for k, v in self.outputs.items()}
        needed = set(toposort(outputs.values()))
        return Graph(tuple(n for n in toposort(new.values()) if n in needed), outputs), new


def text(graph: Graph) -> str:
    """The graph in the paper's notation, one line per node: deterministic and diffable."""
    labels: dict[Node, str] = {}
    used: dict[str, int] = {}
    lines: list[str] = []
    for n in graph:
        base = n.name or n.op
        used[base] = count = used.get(base, 0) + 1
        labels[n] = label = base if count == 1 else f"{base}.{count}"
        typed = n.layout.show(tuple(map(str, n.shape)))
        axes: Any = n.get("axes", ())
        detail = n.get("spec") or "+".join(axes) or ""
        args = ", ".join(labels[s] for s in n.srcs)
        when = "" if n.phase == "forward" else f"  ; {n.phase}"
        when += " once" if n.once else ""
        dtype = "" if n.dtype == "bf16" else f" {n.dtype}"
        lines.append(
            f"{label}: {typed}{dtype} = {n.op}{f'[{detail}]' if detail else ''}({args}){when}"
        )
    return "\n".join(lines)
