"""Recording of a traced pass: operations, shapes, and the lines of code that they come from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple, TypeVar, cast

from stagewright.errors import UserError

_Node = TypeVar("_Node")

VERSION = 2
"""Version of the JSON of recordings; others are refused."""


class Ref(NamedTuple):
    """An operand: the name of another node."""

    name: str


Extent = int | str
"""A dim: a number, or an expression in symbols of the trace such as `s72*s70`."""


@dataclass(frozen=True, slots=True, eq=False)
class TracedNode:
    """One node of a trace.

    `op` is "param", "buffer", "input" or "constant" for leaves (a constant depends on shapes
    alone), else the name of the operation, such as `aten.linear.default`.
    """

    name: str
    op: str
    shape: tuple[Extent, ...] = ()
    dtype: str = ""
    args: tuple[Any, ...] = ()
    """Numbers, words, None, tuples of these, and `Ref`s."""
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    path: str = ""
    """Path of the module, such as `model.layers.0.mlp`; of a parameter its name."""
    source: str = ""
    """File and line of the user's code."""

    @property
    def where(self) -> str:
        """Line of the user's code, else the module, else the name: for errors."""
        return self.source or self.path or self.name

    def operands(self) -> Iterator[str]:
        """The names of the nodes that it reads, in order."""
        yield from refs((*self.args, *self.kwargs.values()))

    def renamed(self, names: Mapping[str, str]) -> TracedNode:
        """The same node, reading others."""
        return replace(
            self,
            args=cast("tuple[Any, ...]", mapped(self.args, names)),
            kwargs={k: mapped(v, names) for k, v in self.kwargs.items()},
        )


def words(value: Any) -> tuple[Any, ...]:
    """The items of an argument that is a tuple; none of anything else."""
    return cast("tuple[Any, ...]", value) if isinstance(value, tuple) else ()


def argument(node: TracedNode, nth: int, default: Any = None) -> Any:
    """An argument by its place, or `default` where the call has fewer."""
    return node.args[nth] if nth < len(node.args) else default


def refs(value: Any) -> Iterator[str]:
    """The names of the nodes in an argument."""
    if isinstance(value, Ref):
        yield value.name
    elif isinstance(value, tuple):
        for each in cast("tuple[Any, ...]", value):
            yield from refs(each)


def mapped(value: Any, names: Mapping[str, str]) -> Any:
    """An argument with other names of nodes."""
    if isinstance(value, Ref):
        return Ref(names.get(value.name, value.name))
    if isinstance(value, tuple):
        return tuple(mapped(each, names) for each in cast("tuple[Any, ...]", value))
    return value


class ProcessGroup(NamedTuple):
    """A group of ranks that collectives of a graph name."""

    ranks: tuple[int, ...]
    dim: str
    """The dim of the device mesh that the group is along; empty where none is known."""


@dataclass(frozen=True, slots=True)
class Process:
    """The rank whose graph was recorded, the number of ranks, and its groups by name."""

    rank: int
    world_size: int
    groups: Mapping[str, ProcessGroup]


@dataclass(frozen=True, slots=True)
class Recording:
    """A traced pass: its nodes, each after those that it reads, and what it returns.

    It is the forward pass of a whole module; or, where there is a `process`, forward, loss and
    backward of one rank, on the rank's own parts of all tensors.
    """

    name: str
    nodes: tuple[TracedNode, ...]
    outputs: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """Assumptions that were made while recording."""
    process: Process | None = None

    @property
    def parameters(self) -> int:
        """The number of values in all parameters, each tensor counted once."""
        return sum(prod(map(int, node.shape)) for node in self.nodes if node.op == "param")

    def to_json(self) -> str:
        """The recording as text, a node a line."""
        rows = [json.dumps(_node_to_json(node), separators=(",", ":")) for node in self.nodes]
        head: dict[str, Any] = {"version": VERSION, "name": self.name}
        head |= {"outputs": list(self.outputs), "notes": list(self.notes)}
        if self.process:
            groups = {name: [list(g.ranks), g.dim] for name, g in self.process.groups.items()}
            head["process"] = [self.process.rank, self.process.world_size, groups]
        return json.dumps(head)[:-1] + ', "nodes": [\n' + ",\n".join(rows) + "\n]}\n"

    @classmethod
    def from_json(cls, text: str, file: str = "recording") -> Recording:
        """The recording of a text; a UserError for any other text."""
        try:
            data = json.loads(text)
            if data["version"] != VERSION:
                raise UserError(
                    f"{file}: version {data['version']}, wanted {VERSION}; record again"
                )
            nodes = tuple(_node_from_json(row) for row in data["nodes"])
            outputs, notes = tuple(data["outputs"]), tuple(map(str, data["notes"]))
            _check_order(nodes, outputs)
            return cls(str(data["name"]), nodes, outputs, notes, _process(data.get("process")))
        except KeyError as error:
            raise UserError(
                f"{file}: no recording of a module: it lacks {error}; record again"
            ) from None
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{file}: no recording of a module: {error}; record again") from None


def _check_order(nodes: Sequence[TracedNode], outputs: Sequence[str]) -> None:
    """Raise ValueError unless each node comes once and after the nodes that it reads."""
    known = set[str]()
    for node in nodes:
        if node.name in known:
            raise ValueError(f"node {node.name} comes twice")
        unknown = next((name for name in node.operands() if name not in known), None)
        if unknown is not None:
            raise ValueError(f"{node.name} reads {unknown}, which is no node before it")
        known.add(node.name)
    if not outputs:
        raise ValueError("it has no outputs")
    if not known.issuperset(outputs):
        raise ValueError(f"the output {min({*outputs} - known)} is no node")


def _process(value: Any) -> Process | None:
    if value is None:
        return None
    rank, world_size, groups = value
    members = {
        str(name): ProcessGroup(tuple(map(int, ranks)), str(dim))
        for name, (ranks, dim) in groups.items()
    }
    return Process(int(rank), int(world_size), members)


def _node_to_json(node: TracedNode) -> list[Any]:
    return [
        node.name, node.op, list(node.shape), node.dtype, _to_json(node.args),
        {k: _to_json(v) for k, v in node.kwargs.items()}, node.path, node.source,
    ]  # fmt: skip


def _node_from_json(row: list[Any]) -> TracedNode:
    name, op, shape, dtype, args, kwargs, path, source = row
    words = name, op, dtype, path, source
    extents = all(isinstance(n, str) or (isinstance(n, int) and n >= 0) for n in shape)
    if not extents or not isinstance(args, list) or not all(isinstance(x, str) for x in words):
        raise ValueError(f"cannot read the node {json.dumps(row)[:80]}")
    return TracedNode(
        name, op, tuple(shape), dtype, _from_json(args),
        {k: _from_json(v) for k, v in kwargs.items()}, path, source,
    )  # fmt: skip


def _to_json(value: Any) -> Any:
    if isinstance(value, Ref):
        return {"ref": value.name}
    if isinstance(value, tuple):
        return [_to_json(each) for each in cast("tuple[Any, ...]", value)]
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return {"float": str(value)}
    return value


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        given = cast("dict[str, str]", value)
        return Ref(given["ref"]) if "ref" in given else float(given["float"])
    if isinstance(value, list):
        return tuple(_from_json(each) for each in cast("list[Any]", value))
    return value


def reachable(names: Iterable[_Node], operands: Callable[[_Node], Iterable[_Node]]) -> set[_Node]:
    """Some nodes, and all that they depend on."""
    found, pending = set[_Node](), [*names]
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending += operands(name)
    return found


def first_of(words: Sequence[str], most: int) -> str:
    """Words for a note: the first of them, and how many there are besides."""
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def operation(node: TracedNode | None) -> str:
    """The name of an operation without its library and overload: `mul` of `aten.mul.Tensor`."""
    if node is None:
        return ""
    words = node.op.split(".")
    return words[1] if len(words) > 1 else node.op
