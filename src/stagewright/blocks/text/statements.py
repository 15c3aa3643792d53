"""Builds the nodes of a user's module from its statements, at each use of the module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stagewright.algebra.index import bind
from stagewright.algebra.index import parse as parse_spec
from stagewright.algebra.notation import NotationError, Tensor, where
from stagewright.algebra.size import Size, product
from stagewright.blocks.builder import Builder
from stagewright.blocks.ends import token_loss
from stagewright.blocks.experts import experts
from stagewright.blocks.text.operators import Written, copy_of, experts_as_written, without_writing
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


OPS_OF_TEXTS: Mapping[str, Op] = {
    name: row
    for name, row in OPS.items()
    if (row.vjp is not None or name == "sum") and name not in LEAVES
    if not any(of.asked and of.types == (tuple,) for of in row.attrs.values())
}
"""The ops that a text may name: with a gradient, and without required tuples, which a text cannot
say."""

OPS_OF_ONE_FORM = frozenset({"norm", "glu", "act"})
"""Ops that an eager framework may run as several, where their index expression is the usual one."""


class Reference(NamedTuple):
    """A name in the text, and where it stands: of a value, a size, a module or a setting."""

    name: str
    at: int


class Call(NamedTuple):
    """`op[spec; attributes](arguments)`, `Collective[degrees](argument)` or `part[word](...)`."""

    op: str
    at: int
    spec: str
    attributes: Mapping[str, Any]
    degrees: tuple[str, ...]
    arguments: tuple[Reference | Call, ...]
    letters: Mapping[str, Size] = {}
    """Sizes of letters of the result that no operand shows."""


class Statement(NamedTuple):
    """`name = value`, or a parameter (no value)."""

    name: str
    at: int
    value: Reference | Call | None
    scope: str = ""
    """The part of a layer that it belongs to, such as `attention`; empty: the module."""


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
    hands: list[str] = field(default_factory=list[str])
    shared: list[str] = field(default_factory=list[str])
    scope: str = ""

    @property
    def tables(self) -> frozenset[str]:
        """The parameters whose rows are looked up by number."""
        calls = [s.value for s in self.statements if isinstance(s.value, Call)]
        made = (c.arguments[1] for c in calls if c.op == "embedding" and len(c.arguments) > 1)
        return frozenset(of.name for of in made if isinstance(of, Reference))

    def _is_linear(self, of: Call) -> bool:
        """True for the product of a value with a parameter, without a data type."""
        parameters = {s.name for s in self.statements if s.value is None}
        return (
            of.op == "einsum"
            and not of.attributes.keys() - {"by", "fused"}
            and len(of.arguments) == 2
            and isinstance(of.arguments[0], Reference)
            and of.arguments[0].name not in parameters
            and isinstance(of.arguments[1], Reference)
            and of.arguments[1].name in parameters
        )

    def _readers(self, of: Call) -> int:
        """Number of products with parameters that read the same value as this one."""
        x = of.arguments[0]
        name = x.name if isinstance(x, Reference) else ""
        return sum(
            1
            for call in _calls(s.value for s in self.statements)
            if self._is_linear(call)
            and isinstance(call.arguments[0], Reference)
            and call.arguments[0].name == name
        )

    def place(self, name: str, layout: Tensor, shape: tuple[Size, ...]) -> None:
        """Set the layout and shape of a value."""
        self.table[f"{self.name}.{name}"], self.shapes[name] = layout, shape

    def build(self, b: Builder, inputs: Mapping[str, Node]) -> Node:
        """The node of the module's output; `inputs` are those of the module, by name."""
        made = dict(inputs)
        for s in self.statements:
            try:
                made[s.name] = self._make(s, made, b)
            except NotationError as error:
                raise UserError(f"{self.file}, {where(self.text, error.at)}: {error}") from None
            if s.name in self.hands:
                b.make(s.name, made[s.name])
        return made[self.output]

    def _make(self, s: Statement, made: Mapping[str, Node], b: Builder) -> Node:
        full, out = f"{self.name}.{s.name}", self.shapes.get(s.name)
        if s.value is None:
            pairs = zip(self.shapes[s.name], self.table[full].axes, strict=True)
            dims = ("/".join((str(dim), *axes)) if axes else dim for dim, axes in pairs)
            scope = s.scope or self.name
            if s.name in self.shared:
                return b.param(s.name, *dims, scope=scope, tied=s.name, rows=0)
            return b.param(full, *dims, scope=scope, rows=0 if s.name in self.tables else -1)
        moves = isinstance(s.value, Call) and s.value.op in COLLECTIVES
        value = self._value(s.value, made, full, s.scope or self.name, b, None if moves else out)
        if out is not None and value.shape != out:
            got, wanted = (", ".join(map(str, shape)) for shape in (value.shape, out))
            raise NotationError(f"{s.name} is [{got}] here, wanted [{wanted}] as written", s.at)
        return value if value.name == full else identity(value, full)

    def _value(
        self,
        of: Reference | Call,
        made: Mapping[str, Node],
        name: str,
        scope: str,
        b: Builder,
        out: tuple[Size, ...] | None = None,
    ) -> Node:
        """A value; what a call makes gets a name."""
        if isinstance(of, Reference):
            return made[of.name]
        xs = [
            self._value(a, made, f"{name}.{i}" if i else f"{name}.in", scope, b)
            for i, a in enumerate(of.arguments)
        ]
        if of.op in PARTS:
            try:
                return PARTS[of.op](b, of.spec, *xs)
            except (ValueError, TypeError, AssertionError) as error:
                raise NotationError(f"{of.op}: {error}", of.at) from None
        if of.op not in COLLECTIVES:
            try:
                if self._is_linear(of) and b.config.chain:
                    joint = f"{self.name}.{xs[0].name}" if self._readers(of) > 1 else ""
                    x, w = xs
                    fused = f"{self.name}.{of.attributes.get('fused')}"
                    if b.recipe.operators.eager and "fused" in of.attributes:
                        return b.linear(of.spec, x, w, name, scope=scope, joint=fused, fused=fused)
                    return b.linear(of.spec, x, w, name, scope=scope, joint=joint)
                written = of.op == "attention" and bool(of.attributes.get("operators"))
                if (written and b.recipe.operators.eager) or (
                    of.op == "attention" and b.recipe.operators.repeat_kv
                ):
                    of, xs = _with_keys_for_each_query(of, xs, b)
                if b.recipe.operators.eager:
                    usual = of.op in OPS_OF_ONE_FORM and of.spec == _implied_spec(of, xs)
                    chain = Written(b, of.attributes, name, scope)
                    eager = chain.make(of.op, "" if usual else of.spec, xs)
                    if eager is not None:
                        return eager
                own = {"dtype": b.dtype} if of.op == "embedding" else {}
                own |= without_writing(of.op, of.attributes)
                own |= {"view": True} if of.op == "part" and b.recipe.operators.eager else {}
                result = self._apply(of, xs, name, scope, out, own)
                copied = of.attributes.get("copied") and b.recipe.operators.eager
                return copy_of(result) if copied else result
            except (ValueError, AssertionError, IndexError) as error:
                raise NotationError(f"{of.op}: {error}", of.at) from None
        # The argument under a name and a layout: the collective has to lead there.
        if of.op in ("ReduceScatter", "AllToAll") and name not in self.table:
            example = "write where its value lives, such as y[B/dp, S, M/tp] = ..."
            raise NotationError(f"{of.op} leads where? {example}", of.at)
        asked = Asked(COLLECTIVES[of.op], of.degrees, where(self.text, of.at))
        return identity(xs[0], name, binding=Binding(asked=asked))

    def _apply(
        self,
        of: Call,
        xs: list[Node],
        name: str,
        scope: str,
        out: tuple[Size, ...] | None,
        attributes: Mapping[str, Any],
    ) -> Node:
        dim = of.attributes.get("dim", 0)
        rank = len(parse_spec(of.spec).out) if of.op == "join" and of.spec else len(xs[0].shape)
        if "dim" in of.attributes and not -rank <= dim < rank:
            raise ValueError(f"no dim {dim} of [{', '.join(map(str, xs[0].shape))}]")
        spec = of.spec or _implied_spec(of, xs)
        parsed = parse_spec(spec)
        shown = {x for dims in parsed.ins for d in dims for x in d}
        hidden = out is not None and any(x not in shown for d in parsed.out for x in d)
        if of.letters:
            sizes = {**bind(parsed, [x.shape for x in xs]), **of.letters}
            out, hidden = tuple(product(sizes[x] for x in d) for d in parsed.out), True
        if of.op in ("einsum", "attention") and len({x.dtype for x in xs}) > 1:
            raise NotationError(f"{of.op} of {', '.join(x.dtype for x in xs)}; cast first", of.at)
        role = None
        if of.op == "attention":
            role, scope = Role.CORE, "attention.core"
            xs = [
                _operand_of_attention(x, which) for x, which in zip(xs, "qkv", strict=False)
            ] + xs[3:]
        made = apply(
            of.op, spec, *xs, out=out if hidden else None, scope=scope, name=name, role=role,
            **attributes,
        )  # fmt: skip
        if not _is_form(made):
            shapes = ", ".join(f"[{', '.join(map(str, x.shape))}]" for x in xs)
            raise ValueError(f"cannot be {spec} of {shapes}; the reference of ops has its form")
        return made


def _calls(of: Iterable[Reference | Call | None]) -> Iterator[Call]:
    """All calls in some values, and in their arguments."""
    for each in of:
        if isinstance(each, Call):
            yield each
            yield from _calls(each.arguments)


def _with_keys_for_each_query(of: Call, xs: list[Node], b: Builder) -> tuple[Call, list[Node]]:
    """Attention whose heads of queries share keys, on a copy of the keys for each, as in presets.

    Such attention is `bq(gr)D,bkgD,bkgD->bq(gr)D`.
    """
    terms = parse_spec(of.spec).ins
    if [len(dims) for dims in terms] != [4, 4, 4]:
        return of, xs
    q, k, v = (dims[2] for dims in terms)
    if len(q) != 2 or k != q[:1] or v != k:
        return of, xs
    copies = [b.repeated(x, n, xs[0]) for n, x in zip("kv", xs[1:], strict=True)]
    spec = of.spec.replace(f"({''.join(q)})", "a").replace(k[0], "a")
    return of._replace(spec=spec), [xs[0], *copies]


def _operand_of_attention(x: Node, which: str) -> Node:
    """Queries, keys or values where context parallelism has them for attention."""
    place = f"{which}_repeated_core" if x.op == "repeat" else f"{which}_core"
    role = None if which == "q" else Role.KEYS
    return identity(x, x.name, role=role, binding=Binding(like=place)) if len(x.shape) == 4 else x


def _at(b: Builder, place: str, x: Node) -> Node:
    """A value where strategies have the value that is called `place`."""
    if not place:
        raise ValueError("which place? write a name such as at[branch](x)")
    return identity(x, x.name, binding=Binding(like=place))


def _experts(b: Builder, said: str, x: Node) -> Node:
    """The model's mixture of experts, as its fields describe the experts."""
    if not b.config.num_experts:
        raise ValueError("the model has no num_experts")
    return experts(experts_as_written(b, said), x)


def _cross_entropy(b: Builder, _: str, logits: Node, labels: Node) -> Node:
    """The mean over tokens of the cross-entropy of logits over the last dim."""
    return token_loss(b, logits, labels)


PARTS: Mapping[str, Callable[..., Node]] = {
    "at": _at,
    "experts": _experts,
    "cross_entropy": _cross_entropy,
}
"""Parts of several ops that a text writes like one; presets have them, too."""


def _is_form(n: Node) -> bool:
    """True if the op supports this form: its gradient and FLOPs can be derived."""
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
