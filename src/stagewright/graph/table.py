"""The op table: one row per op; shape, layout, FLOPs, bytes follow from a node's index expression.

An index kept in the output passes its split on; an index summed away turns its split into a partial
sum; an upper-case index may not be split. The rows are in `graph.ops`, by family, each with its
gradient; importing any module of `graph` fills `OPS` with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple

from stagewright.algebra.size import Size
from stagewright.graph.node import Node

Grads = tuple[Node | None, ...]
Sizes = Mapping[str, Any]  # letter of an index expression -> size on one rank
Cost = Callable[[Node, Sizes], Any]


class Attribute(NamedTuple):
    """Type and limits of an attribute of an op."""

    types: tuple[type, ...]
    required: bool = True
    implied: Any = None
    """The value where a text names the op without the attribute; None: there is no such value."""
    choices: tuple[str, ...] = ()
    """The words that the attribute may be; empty: any value of its types."""

    def __str__(self) -> str:
        if self.choices:
            return f"one of {', '.join(filter(None, self.choices))}"
        return " or ".join(t.__name__ for t in self.types)

    @property
    def asked(self) -> bool:
        """True if a text that names the op must give the attribute."""
        return self.required and self.implied is None

    def accepts(self, value: object) -> bool:
        """True if a node may have this value; a whole number may stand for any number."""
        kind = type(value)
        known = kind in self.types or (kind is int and float in self.types)
        return known and (not self.choices or value in self.choices)


def need(*types: type, implied: Any = None) -> Attribute:
    """An attribute that every node of the op has."""
    return Attribute(types, implied=implied)


def choose(*words: str, implied: str | None = None) -> Attribute:
    """An attribute that every node of the op has: one of some words."""
    return Attribute((str,), implied=implied, choices=words)


def may(*types: type, implied: Any = None) -> Attribute:
    """An attribute that a node of the op may have."""
    return Attribute(types, required=False, implied=implied)


NUMBER = (int, float)
SIZE = (Size, int)


class Timing(Enum):
    """Model of `time.roofline` that gives the duration of a kernel."""

    MEMORY = "memory"
    """Its bytes at the memory's rate, or its operations off the tensor cores."""
    PRODUCT = "product"
    """A matrix product."""
    ATTENTION = "attention"
    """Fused attention of sequences of one length, forward."""
    ATTENTION_BACKWARD = "attention backward"
    SERVED_ATTENTION = "served attention"
    """Attention of requests that have lengths of their own."""
    CACHED_ATTENTION = "cached attention"
    """The same, to a cache of keys and values."""
    CHUNKED = "chunked"
    """Matrix products inside and between chunks of tokens."""
    TO_EXPERTS = "to experts"
    """Copies of tokens, sorted by expert."""
    FROM_EXPERTS = "from experts"
    """The sum of what experts make of a token's copies."""


class Op(NamedTuple):
    """One row: what is particular to an op. Everything else its index expression says."""

    run: Callable[..., Any]  # numpy meaning, called as run(ctx, *local_arrays)
    # (node, gradient of its output) -> gradients of its inputs
    vjp: Callable[[Node, Node], Grads] | None = None
    # per point of the index space, or of a node, from the size of each letter
    flops: float | Cost = 1
    linear: bool = False  # a partial sum of all operands may flow through
    multilinear: bool = False  # a partial sum of one operand may flow through
    fuses: bool = False  # element-wise: joins its neighbours in one kernel
    joint: bool = False  # nodes of this op on the same operands are one kernel
    ring: tuple[str, str] | None = None  # letters that one axis may split at once (ring attention)
    rewrites: bool = False  # adds to what is there: reads and writes its output
    gathers: int | None = None  # this operand is a table; of it, it reads the rows it returns
    scatters: int | None = None  # its result is a table; of it, it writes the rows of this operand
    reduction: str = "sum"  # how the parts over a split contracted index combine
    scratch: Cost | None = None  # bytes that go through device memory besides operands, result
    # An index whose points are those of others, in any order: rows of tokens, grouped by expert.
    rows: tuple[str, tuple[str, ...]] | None = None
    attrs: Mapping[str, Attribute] = {}  # besides the index expression, `spec`
    timing: Timing = Timing.MEMORY
    view: bool = False  # its result has no bytes of its own
    summary: str = ""  # what it computes, where `run` is shared with other ops

    @property
    def sentence(self) -> str:
        """Description of the op."""
        return self.summary or (self.run.__doc__ or "").partition("\n")[0]

    moments: tuple[str, ...] = ()  # an optimizer: the states that it keeps of each parameter


OPS: dict[str, Op] = {}
"""All ops, by name."""


def is_view(n: Node) -> bool:
    """True for a value that shares the bytes of its operand."""
    return n.op in OPS and (OPS[n.op].view or bool(n.get("view")))


COLLECTIVE_OPS = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all"})
MOVES = COLLECTIVE_OPS | {"slice"}
LEAVES = frozenset({"input", "param", "state"})

_STEP = {"axes": need(tuple), "src": need(int, str, type(None)), "dst": need(int, type(None))}


def attributes_of(op: str) -> Mapping[str, Attribute]:
    """Attributes of an op, a move or a kind of leaf; raises KeyError for any other name.

    `axes`, `src` and `dst` of a move are those of `algebra.layout.Move`.
    """
    if op in OPS:
        return OPS[op].attrs
    if op in MOVES:
        return _STEP
    return {} if op in LEAVES else OPS[op].attrs


def check_attributes(op: str, attrs: Mapping[str, object]) -> None:
    """Raise ValueError where a node's attributes are not those that its op declares."""
    declared = attributes_of(op)
    for name, value in attrs.items():
        if name == "spec" and op in OPS:
            continue
        attribute = declared.get(name)
        if attribute is None:
            known = f"wanted one of {', '.join(declared)}" if declared else "wanted none"
            raise ValueError(f"{op}: no attribute {name!r}, {known}")
        if not attribute.accepts(value):
            raise ValueError(f"{op}: attribute {name} is {value!r}, wanted {attribute}")
    for name, attribute in declared.items():
        if attribute.required and name not in attrs:
            raise ValueError(f"{op}: attribute {name} is missing, wanted {attribute}")


def own_attributes(n: Node) -> dict[str, Any]:
    """A node's attributes but its index expression: those that its gradient's op is told, too."""
    return {k: v for k, v in n.attrs if k != "spec"}


# The letters of attention's index expressions that are no batch and no heads: positions of queries
# and keys (and of a bias, `j`; of keys that an indexer chose, `t`), widths of keys and of values,
# blocks of a cache's table, and rows of a table of biases. Heads are `a`, or groups `g` and heads
# of a group `r`; stripes are `n`.
_POSITIONS_AND_WIDTHS = frozenset("qkjtdviz")
_BATCH_AND_HEADS = "bagr"


def heads(sizes: Sizes) -> dict[str, Any]:
    """Letters of heads among those of an attention."""
    return {x: n for x, n in sizes.items() if x != "b" and x not in _POSITIONS_AND_WIDTHS}


def batch_and_heads(sizes: Sizes) -> Any:
    """Number of heads of sequences of an attention; stripes count, as each has its own sums."""
    return math.prod([n for x, n in sizes.items() if x not in _POSITIONS_AND_WIDTHS], start=1)


def served_heads(sizes: Sizes) -> list[Any]:
    """The extents of batch and heads, without stripes: all of these work on one query at once."""
    return [sizes[x] for x in _BATCH_AND_HEADS if x in sizes]
