"""From the statements of a user's module to nodes: wherever a model uses the module, once more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from stagewright.algebra.index import parse as parse_spec
from stagewright.algebra.notation import DEGREES, NotationError, Tensor, where
from stagewright.algebra.size import Size
from stagewright.blocks.builder import Builder
from stagewright.errors import UserError, did_you_mean
from stagewright.graph.make import apply, identity, letters
from stagewright.graph.node import Node
from stagewright.graph.roles import Asked, Binding, Role
from stagewright.graph.table import OPS

COLLECTIVES = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "AllToAll": "all_to_all",
}
"""Collectives that a text may name though they follow from layouts, which have to agree."""


class Reference(NamedTuple):
    """A name in the text, and where it stands: of a value, a size, a module or a setting."""

    name: str
    at: int


class Call(NamedTuple):
    """`op[bracket](arguments)`."""

    op: str
    at: int
    bracket: str
    bracket_at: int
    arguments: tuple[Reference | Call, ...]


class Statement(NamedTuple):
    """`name = value`, or a parameter (no value)."""

    name: str
    at: int
    value: Reference | Call | None


Input = tuple[str, tuple[Size, ...], str]
"""Name, shape and data type ("": that of the run) of what a module is given."""


@dataclass(slots=True)
class Draft:
    """A module while it is read."""

    name: str
    inputs: list[Input] = field(default_factory=list[Input])
    sizes: dict[str, Size] = field(default_factory=dict[str, Size])
    numbers: dict[str, int] = field(default_factory=dict[str, int])
    table: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    statements: list[Statement] = field(default_factory=list[Statement])
    shapes: dict[str, tuple[Size, ...]] = field(default_factory=dict[str, tuple[Size, ...]])
    known: set[str] = field(default_factory=set[str])
    output: str = ""

    def place(self, name: str, layout: Tensor, shape: tuple[Size, ...]) -> None:
        """Say where a value lives, and its shape."""
        self.table[f"{self.name}.{name}"], self.shapes[name] = layout, shape


def read_value(word: str) -> Any:
    """What a text writes as a number, as true or false, or as a word."""
    if word in ("true", "false"):
        return word == "true"
    for kind in (int, float):
        try:
            return kind(word) if len(word) < 40 else word
        except ValueError:
            pass
    return word


def build(
    draft: Draft,
    output: str,
    text: str,
    file: str,
    b: Builder,
    values: Mapping[str, Node],
) -> Node:
    """The nodes of a module; `values` are its inputs by name."""
    scope = _StatementNodes(dict(values), draft.shapes, draft.table, draft.name, text, b)
    for s in draft.statements:
        try:
            scope.run(s)
        except NotationError as error:
            raise UserError(f"{file}, {where(text, error.at)}: {error}") from None
    return scope.values[output]


@dataclass(slots=True)
class _StatementNodes:
    """The values of a module's statements so far."""

    values: dict[str, Node]
    shapes: Mapping[str, tuple[Size, ...]]
    table: Mapping[str, Tensor]
    module: str
    text: str
    b: Builder

    def run(self, s: Statement) -> None:
        full = f"{self.module}.{s.name}"
        if s.value is None:
            placement = self.table[full]
            pairs = zip(self.shapes[s.name], placement.axes, strict=True)
            dims = ("/".join((str(dim), *axes)) if axes else dim for dim, axes in pairs)
            self.values[s.name] = self.b.param(full, *dims, scope=self.module)
            return
        out = self.shapes.get(s.name)
        collective = isinstance(s.value, Call) and s.value.op in COLLECTIVES
        made = self.value(s.value, full, None if collective else out)
        if out is not None and made.shape != out:
            got, wanted = (", ".join(map(str, shape)) for shape in (made.shape, out))
            raise NotationError(f"{s.name} is [{got}] here, wanted [{wanted}] as written", s.at)
        self.values[s.name] = made if made.name == full else identity(made, full)

    def value(self, of: Reference | Call, name: str, out: tuple[Size, ...] | None = None) -> Node:
        """A value; what a call makes gets a name."""
        if isinstance(of, Reference):
            return self.values[of.name]
        arguments = [
            self.value(a, f"{name}.{i}" if i else f"{name}.in") for i, a in enumerate(of.arguments)
        ]
        if of.op in COLLECTIVES:
            return self.collective(of, arguments, name)
        try:
            return self.op(of, arguments, name, out)
        except (ValueError, KeyError, IndexError, TypeError, AssertionError) as error:
            raise NotationError(f"{of.op}: {error}", of.at) from None

    def collective(self, of: Call, arguments: list[Node], name: str) -> Node:
        """The argument under a name and a layout, and the collective that has to lead there."""
        degrees = tuple(word.strip() for word in of.bracket.split(",") if word.strip())
        for degree in degrees:
            if degree not in DEGREES:
                hint = did_you_mean(degree, DEGREES)
                raise NotationError(f"{degree!r} is no parallel degree{hint}", of.bracket_at)
        if len(arguments) != 1:
            raise NotationError(f"{of.op} moves one value, got {len(arguments)}", of.at)
        if of.op in ("ReduceScatter", "AllToAll") and name not in self.table:
            raise NotationError(
                f"{of.op} leads where? write where its value lives, such as y[B/dp, S, M/tp] = ...",
                of.at,
            )
        asked = Asked(COLLECTIVES[of.op], degrees, where(self.text, of.at))
        return identity(arguments[0], name, binding=Binding(asked=asked))

    def op(self, of: Call, xs: list[Node], name: str, out: tuple[Size, ...] | None) -> Node:
        spec, _, more = of.bracket.partition(";") if "->" in of.bracket else ("", "", of.bracket)
        declared = OPS[of.op].attrs.items()
        attributes: dict[str, Any] = {
            name: attribute.implied for name, attribute in declared if attribute.implied is not None
        }
        for part in more.split(","):
            key, equals, value = (word.strip() for word in part.partition("="))
            if part.strip():
                attributes[key] = read_value(value) if equals else True
        spec = spec.strip() or _SPECS.get(of.op, _elementwise)(xs, attributes)
        parsed = parse_spec(spec)
        shown = {x for dims in parsed.ins for d in dims for x in d}
        hidden = out is not None and any(x not in shown for d in parsed.out for x in d)
        if of.op in ("einsum", "attention") and len({x.dtype for x in xs}) > 1:
            raise NotationError(f"{of.op} of {', '.join(x.dtype for x in xs)}; cast first", of.at)
        given = partial(apply, of.op, spec, *xs, out=out if hidden else None)
        role = Role.CORE if of.op == "attention" else None
        return given(scope=self.module, name=name, role=role, **attributes)


def _elementwise(xs: list[Node], attributes: dict[str, Any]) -> str:
    x = letters(xs[0])
    return ",".join([x] * len(xs)) + "->" + x


def _along_last(xs: list[Node], attributes: dict[str, Any]) -> str:
    """The last dim is not split; further operands have that dim alone."""
    z = letters(xs[0])
    whole = z[-1].upper()
    x = z[:-1] + whole
    return ",".join([x, *[whole] * (len(xs) - 1)]) + "->" + x


def _trailing(xs: list[Node], attributes: dict[str, Any]) -> str:
    z = letters(xs[0])
    return f"{z},{z[-len(xs[1].shape) :]}->{z}"


def _lookup(xs: list[Node], attributes: dict[str, Any]) -> str:
    z = letters(xs[0])
    free = [x for x in "vmwuk" if x not in z]
    return f"{z},{free[0]}{free[1]}->{z}{free[1]}"


def _scan(xs: list[Node], attributes: dict[str, Any]) -> str:
    """The dim of the scan is not split."""
    z = letters(xs[0])
    dim = int(attributes["dim"])
    z = z[:dim] + z[dim].upper() + z[dim + 1 :]
    return f"{z},{z}->{z}"


_SPECS: Mapping[str, Callable[[list[Node], dict[str, Any]], str]] = {
    "norm": _along_last,
    "softmax": _along_last,
    "rope": _along_last,
    "bias": _trailing,
    "embedding": _lookup,
    "pscan": _scan,
    **dict.fromkeys(("mean", "sum"), lambda xs, attributes: f"{letters(xs[0])}->"),
}
"""The index expressions of ops that a file need not spell out; all others are element-wise."""
