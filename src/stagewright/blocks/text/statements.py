"""From the statements of a user's module to nodes: wherever a model uses the module, once more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stagewright.algebra.index import parse as parse_spec
from stagewright.algebra.notation import NotationError, Tensor, where
from stagewright.algebra.size import Size
from stagewright.blocks.builder import Builder
from stagewright.errors import UserError
from stagewright.graph.cost import flops
from stagewright.graph.make import apply, identity, leaf, letters
from stagewright.graph.node import Node
from stagewright.graph.roles import Asked, Binding, Role
from stagewright.graph.table import LEAVES, OPS, Op

COLLECTIVES = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "AllToAll": "all_to_all",
}
"""Collectives that a text may name though they follow from layouts, which have to agree."""


def _can_be_written(name: str, row: Op) -> bool:
    """Whether an op has a gradient, and needs no attribute that is a tuple, which no text says."""
    tuples = [of for of in row.attrs.values() if of.asked and of.types == (tuple,)]
    return (row.vjp is not None or name == "sum") and name not in LEAVES and not tuples


OPS_OF_TEXTS: Mapping[str, Op] = {
    name: row for name, row in OPS.items() if _can_be_written(name, row)
}
"""The ops that a text may name."""


class Reference(NamedTuple):
    """A name in the text, and where it stands: of a value, a size, a module or a setting."""

    name: str
    at: int


class Call(NamedTuple):
    """`op[spec; attributes](arguments)`, or `Collective[degrees](argument)`."""

    op: str
    at: int
    spec: str
    attributes: Mapping[str, Any]
    degrees: tuple[str, ...]
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
    """A module while it is read; once it is read, it makes nodes."""

    name: str
    text: str
    """The text of the file, and its path: for errors."""
    file: str
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

    def build(self, b: Builder, inputs: Mapping[str, Node]) -> Node:
        """The node of the module's output; `inputs` are those of the module, by name."""
        made = dict(inputs)
        for s in self.statements:
            try:
                made[s.name] = self._make(s, made, b)
            except NotationError as error:
                raise UserError(f"{self.file}, {where(self.text, error.at)}: {error}") from None
        return made[self.output]

    def _make(self, s: Statement, made: Mapping[str, Node], b: Builder) -> Node:
        full, out = f"{self.name}.{s.name}", self.shapes.get(s.name)
        if s.value is None:
            pairs = zip(self.shapes[s.name], self.table[full].axes, strict=True)
            dims = ("/".join((str(dim), *axes)) if axes else dim for dim, axes in pairs)
            return b.param(full, *dims, scope=self.name)
        moves = isinstance(s.value, Call) and s.value.op in COLLECTIVES
        value = self._value(s.value, made, full, None if moves else out)
        if out is not None and value.shape != out:
            got, wanted = (", ".join(map(str, shape)) for shape in (value.shape, out))
            raise NotationError(f"{s.name} is [{got}] here, wanted [{wanted}] as written", s.at)
        return value if value.name == full else identity(value, full)

    def _value(
        self,
        of: Reference | Call,
        made: Mapping[str, Node],
        name: str,
        out: tuple[Size, ...] | None = None,
    ) -> Node:
        """A value; what a call makes gets a name."""
        if isinstance(of, Reference):
            return made[of.name]
        xs = [
            self._value(a, made, f"{name}.{i}" if i else f"{name}.in")
            for i, a in enumerate(of.arguments)
        ]
        if of.op not in COLLECTIVES:
            try:
                return self._apply(of, xs, name, out)
            except (ValueError, AssertionError, IndexError) as error:
                raise NotationError(f"{of.op}: {error}", of.at) from None
        # The argument under a name and a layout: the collective has to lead there.
        if of.op in ("ReduceScatter", "AllToAll") and name not in self.table:
            example = "write where its value lives, such as y[B/dp, S, M/tp] = ..."
            raise NotationError(f"{of.op} leads where? {example}", of.at)
        asked = Asked(COLLECTIVES[of.op], of.degrees, where(self.text, of.at))
        return identity(xs[0], name, binding=Binding(asked=asked))

    def _apply(self, of: Call, xs: list[Node], name: str, out: tuple[Size, ...] | None) -> Node:
        dim = of.attributes.get("dim", 0)
        if not -len(xs[0].shape) <= dim < len(xs[0].shape):
            raise ValueError(f"no dim {dim} of [{', '.join(map(str, xs[0].shape))}]")
        spec = of.spec or _implied_spec(of, xs)
        parsed = parse_spec(spec)
        shown = {x for dims in parsed.ins for d in dims for x in d}
        hidden = out is not None and any(x not in shown for d in parsed.out for x in d)
        if of.op in ("einsum", "attention") and len({x.dtype for x in xs}) > 1:
            raise NotationError(f"{of.op} of {', '.join(x.dtype for x in xs)}; cast first", of.at)
        role = Role.CORE if of.op == "attention" else None
        made = apply(
            of.op, spec, *xs, out=out if hidden else None, scope=self.name, name=name, role=role,
            **of.attributes,
        )  # fmt: skip
        if not _is_form(made):
            shapes = ", ".join(f"[{', '.join(map(str, x.shape))}]" for x in xs)
            raise ValueError(f"cannot be {spec} of {shapes}; the reference of ops has its form")
        return made


def _is_form(n: Node) -> bool:
    """Whether an op can be written so: its gradient and its operations follow from the node."""
    vjp = OPS[n.op].vjp
    try:
        g = leaf("input", n.shape, n.dtype, "g", phase="backward")
        found = vjp(n, g) if vjp else n.srcs
        for each in (n, *(found if vjp else ())):
            if each is not None:
                flops(each, lambda dim, axes: 4)
    except (ValueError, LookupError, TypeError, ArithmeticError, AssertionError):
        return False
    return len(found) == len(n.srcs)


def _implied_spec(of: Call, xs: list[Node]) -> str:
    """The index expression of an op that a text need not spell out; of most ops, element-wise."""
    z = letters(xs[0])
    match of.op:
        case "norm" | "softmax" | "rope":
            # The last dim is not split; further operands have that dim alone.
            whole = z[-1:].upper()
            return f"{','.join([z[:-1] + whole, *[whole] * (len(xs) - 1)])}->{z[:-1]}{whole}"
        case "bias":
            return f"{z},{z[-len(xs[-1].shape) :]}->{z}"
        case "embedding":
            v, m = [x for x in "vmwuk" if x not in z][:2]
            return f"{z},{v}{m}->{z}{m}"
        case "pscan":
            # The dim of the scan is not split.
            dim = int(of.attributes["dim"]) % max(1, len(z))
            z = z[:dim] + z[dim].upper() + z[dim + 1 :]
            return f"{z},{z}->{z}"
        case "mean" | "sum":
            return f"{z}->"
        case op if OPS[op].fuses or op == "identity":
            return f"{','.join([z] * len(xs))}->{z}"
        case op:
            raise ValueError(f"{op}[] needs an index expression, such as einsum[bsm,mf->bsf]")
