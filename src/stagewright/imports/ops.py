"""The table from operations of PyTorch to ops of Stagewright.

A row is a function that says what one recorded node is: `ROWS["aten.linear"]` for all overloads of
`aten.linear`. It makes an `OpCall` or several: an op with the labels of its operands' dims.
Element-wise operations that compute a function of ours have it in `FUNCTIONS`; those of
`BYTES_ONLY` are counted by the bytes that they read and write. To support a further operation, add
a row; `tests/slow/test_torch_table.py` computes each row in numpy beside PyTorch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from stagewright.algebra.size import is_whole, size
from stagewright.errors import UserError
from stagewright.imports.recording import Extent, Ref, TracedNode, argument, words
from stagewright.imports.rewrite import TracedGraph

Label = int | str
"""An index of one call: dims with the same label have the same extent, or an extent of 1."""
Labels = tuple[Label, ...]

LEAVES = frozenset({"param", "buffer", "input", "constant"})
VIEWS = frozenset({"view", "reshape"})
"""Calls that the axes of values replace."""


@dataclass(frozen=True, slots=True)
class OpCall:
    """One operation of the model.

    `view` renames, reorders, adds and drops dims; `reshape` splits and joins them. All others are
    ops that a `.stg` text may name.
    """

    name: str
    op: str
    shape: tuple[Extent, ...]
    dtype: str
    operands: tuple[str, ...] = ()
    ins: tuple[Labels, ...] = ()
    out: Labels = ()
    unsplit: frozenset[Label] = frozenset()
    """Labels whose dims must not be split over ranks."""
    attrs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    path: str = ""
    source: str = ""

    @property
    def is_statement(self) -> bool:
        """True for a call that becomes a statement of a text."""
        return self.op not in LEAVES and self.op not in VIEWS

    @property
    def where(self) -> str:
        """Line of the user's code, else the module, else the name: for errors."""
        return self.source or self.path or self.name

    @property
    def signature(self) -> tuple[object, ...]:
        """All but the names: equal for calls that do the same."""
        return (
            self.op, self.shape, self.dtype, self.ins, self.out, self.unsplit,
            tuple(sorted(self.attrs.items(), key=lambda item: item[0])),
        )  # fmt: skip


Row = Callable[["Translation", TracedNode], None]


class Translation:
    """Calls of a recording, in the making: one pass over its nodes."""

    def __init__(self, graph: TracedGraph, *, approximate: bool) -> None:
        """`approximate`: operations without a row are counted by their bytes."""
        self.graph, self.approximate = graph, approximate
        self.calls: dict[str, OpCall] = {}
        self.as_bytes: Counter[str] = Counter()
        self.unknown: Counter[str] = Counter()

    # ---- what rows use -------------------------------------------------------------------------

    def name(self, of: Any) -> str:
        """Name of an argument that has to be a tensor."""
        if not isinstance(of, Ref):
            raise UserError(f"an operand is {of!r}, wanted a tensor")
        return of.name

    def shape(self, name: str) -> tuple[Extent, ...]:
        """The dims of a value."""
        return self.calls[name].shape

    def emit(
        self,
        node: TracedNode,
        op: str,
        operands: Sequence[str],
        ins: Sequence[Labels],
        out: Labels,
        **how: Any,
    ) -> str:
        """Add a call and return its name; `how` are attributes of the op, and these keywords.

        `unsplit`: labels whose dims must not be split. `suffix`, `shape` and `dtype`: those of an
        intermediate value, which is not yet the node's result.
        """
        name, shape = node.name + how.pop("suffix", ""), how.pop("shape", None)
        dtype, unsplit = how.pop("dtype", "") or node.dtype, frozenset(how.pop("unsplit", ()))
        if dtype.startswith("complex") and op not in LEAVES and not self.approximate:
            raise UserError(
                f"{node.where}: {node.op} makes complex numbers, "
                "which have no cost here; write real and imaginary parts, or give --approximate, "
                "which counts a complex number as a real one"
            )
        self.calls[name] = OpCall(
            name, op, node.shape if shape is None else shape, dtype, tuple(operands), tuple(ins),
            out, unsplit, how, node.path, node.source,
        )  # fmt: skip
        return name

    def aligned(self, node: TracedNode, name: str) -> Labels:
        """The labels of an operand that is broadcast to the node's shape."""
        labels = tuple(range(len(node.shape)))
        return labels[len(labels) - len(self.shape(name)) :]

    def elementwise(
        self, node: TracedNode, op: str, *names: str, suffix: str = "", **attrs: Any
    ) -> str:
        """A call on operands that are broadcast to the node's shape."""
        ins = [self.aligned(node, name) for name in names]
        out = tuple(range(len(node.shape)))
        return self.emit(node, op, names, ins, out, suffix=suffix, **attrs)

    def bytes_only(self, node: TracedNode, *names: str, **how: Any) -> None:
        """A call that reads its operands and writes its result; all its dims are whole.

        Dims of operands that the result has are matched from the left, by extent.
        """
        out = tuple(range(len(node.shape)))
        ins: list[Labels] = []
        extra = len(out)
        for name in names:
            shape, position, labels = self.shape(name), 0, list[Label]()
            for extent in shape:
                match = next(
                    (i for i in range(position, len(out)) if node.shape[i] == extent), None
                )
                if match is None:
                    labels.append(extra)
                    extra += 1
                else:
                    labels.append(match)
                    position = match + 1
            ins.append(tuple(labels))
        batch = {0} if node.shape and isinstance(node.shape[0], str) else set[int]()
        unsplit = {x for labels in (*ins, out) for x in labels} - batch
        fn = node.op.split(".")[1] if "." in node.op else node.op
        if fn in CONSTANTS:
            how["constant"] = True
        self.emit(node, "opaque", names, ins, out, unsplit=unsplit, fn=fn, **how)

    # ---- the walk ------------------------------------------------------------------------------

    def run(self) -> dict[str, OpCall]:
        """All calls, in order."""
        for node in self.graph.nodes.values():
            self._node(node)
        return self.calls

    def _node(self, node: TracedNode) -> None:
        if node.op in LEAVES:
            self.emit(node, node.op, (), (), tuple(range(len(node.shape))), **node.kwargs)
            return
        words = node.op.split(".")
        key = ".".join(words[:2]) if words[0] in ("aten", "our") else node.op
        kind = words[1] if len(words) > 1 else node.op
        if key in ROWS:
            try:
                ROWS[key](self, node)
            except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
                raise UserError(
                    f"{node.where}: no row for {node.op} with such arguments "
                    f"({type(error).__name__}: {error}); write it in another form"
                ) from None
        elif words[0] == "aten" and kind in FUNCTIONS:
            self.elementwise(node, "act", *list(node.operands())[:1], fn=FUNCTIONS[kind])
        elif words[0] == "aten" and (kind in BYTES_ONLY or self.approximate):
            (self.as_bytes if kind in BYTES_ONLY else self.unknown)[kind] += 1
            if node.dtype or node.shape:
                self.bytes_only(node, *self._tensors(node))
        elif self.approximate:
            self.unknown[node.op] += 1
            self.bytes_only(node, *self._tensors(node))
        else:
            where = f"{node.source}: " if node.source else ""
            raise UserError(
                f"{where}no row for {node.op} (in {node.path or 'the module'}); give --approximate "
                "to count it by the bytes that it reads and writes"
            )

    def _tensors(self, node: TracedNode) -> list[str]:
        """Operands that are tensors."""
        return list(dict.fromkeys(n for n in node.operands() if n in self.calls))


def _linear(t: Translation, node: TracedNode) -> None:
    """x W', with a bias if given."""
    x, w = (t.name(a) for a in node.args[:2])
    lead = tuple(range(len(t.shape(x)) - 1))
    bias = node.args[2] if len(node.args) > 2 else None
    ins, out = ((*lead, "i"), ("o", "i")), (*lead, "o")
    product = t.emit(node, "einsum", (x, w), ins, out, suffix=".product" if bias else "")
    if bias:
        t.elementwise(node, "add", product, t.name(bias))


def _addmm(t: Translation, node: TracedNode) -> None:
    """A bias plus a product of two matrices."""
    bias, x, w = (t.name(a) for a in node.args[:3])
    product = t.emit(
        node, "einsum", (x, w), (("n", "i"), ("i", "o")), ("n", "o"), suffix=".product"
    )
    t.elementwise(node, "add", product, bias)


def _matmul(t: Translation, node: TracedNode) -> None:
    """A product of two values of any number of dims."""
    x, y = (t.name(a) for a in node.args[:2])
    a, b = len(t.shape(x)), len(t.shape(y))
    lead = tuple(range(max(a, b) - 2)) if min(a, b) > 1 else tuple(range(max(a, b) - 1))
    if a == 1 or b == 1:
        ins = ((*lead, "i") if a > 1 else ("i",), ("i",)) if b == 1 else (("i",), ("i", "o"))
        t.emit(node, "einsum", (x, y), ins, lead if b == 1 else ("o",))
        return
    of_x, of_y = lead[len(lead) - (a - 2) :], lead[len(lead) - (b - 2) :]
    ins = (*of_x, "n", "i"), (*of_y, "i", "o")
    t.emit(node, "einsum", (x, y), ins, (*lead, "n", "o"))


def _baddbmm(t: Translation, node: TracedNode) -> None:
    """A bias plus products of matrices."""
    bias, x, y = (t.name(a) for a in node.args[:3])
    ins = (0, "n", "i"), (0, "i", "o")
    product = t.emit(node, "einsum", (x, y), ins, (0, "n", "o"), suffix=".product")
    t.elementwise(node, "add", product, bias)


def _einsum(t: Translation, node: TracedNode) -> None:
    """A contraction as the user writes it."""
    spec = str(node.args[0]).replace(" ", "")
    names: list[str] = [t.name(a) for a in words(node.args[1])]
    terms, out = _einsum_labels(spec, [len(t.shape(n)) for n in names])
    if any(len({*term}) < len(term) for term in terms):
        raise UserError(f"{node.source}: einsum {spec!r} takes a diagonal, which no op here does")
    while len(names) > 2:  # from the left, as PyTorch does where opt_einsum is not installed
        needed = {x for term in (*terms[2:], out) for x in term}
        shared = dict.fromkeys((*terms[0], *terms[1]))
        labels = tuple(x for x in shared if x in needed)
        extents = {
            x: n for term, name in zip(terms[:2], names[:2], strict=True)
            for x, n in zip(term, t.shape(name), strict=True)
        }  # fmt: skip
        shape = tuple(extents[x] for x in labels)
        first = t.emit(
            node, "einsum", names[:2], terms[:2], labels, suffix=f".{len(names)}", shape=shape
        )
        names, terms = [first, *names[2:]], [labels, *terms[2:]]
    t.emit(node, "einsum", names, terms, out)


def _einsum_labels(spec: str, ranks: Sequence[int]) -> tuple[list[Labels], Labels]:
    """The labels of an einsum's operands and of its result; dims that dots stand for are numbers.

    >>> _einsum_labels("...i,ij->...j", [3, 2])
    ([(0, 1, 'i'), ('i', 'j')], (0, 1, 'j'))
    """
    ins, arrow, out = spec.partition("->")
    written = ins.split(",")
    hidden_dims = [n - len(w.replace("...", "")) for w, n in zip(written, ranks, strict=True)]
    num_hidden = max(
        (n for w, n in zip(written, hidden_dims, strict=True) if "..." in w), default=0
    )

    def labels(text: str, count: int) -> Labels:
        before, dots, after = text.partition("...")
        return (*before, *range(num_hidden - count, num_hidden), *after) if dots else tuple(text)

    if not arrow:
        once = sorted(c for c in {*ins} if c.isalpha() and ins.count(c) == 1)
        out = "..." * ("..." in ins) + "".join(once)
    return [labels(w, n) for w, n in zip(written, hidden_dims, strict=True)], labels(
        out, num_hidden
    )


def _convolution(t: Translation, node: TracedNode) -> None:
    """A convolution of any number of dims; `groups` are a separate dim."""
    x, w = (t.name(a) for a in node.args[:2])
    args = [*node.args, *[None] * 7]
    general = node.op.startswith("aten.convolution")
    bias, stride, padding, dilation = args[2:6]
    groups = args[8] if general and len(node.args) > 8 else args[6]
    transposed = bool(args[6]) if general else "transpose" in node.op
    if "transpose" in node.op:
        groups = args[6]
    groups = int(groups or 1)
    places = "hwd"[: len(t.shape(x)) - 2]
    taps, out_places = tuple(f"t{c}" for c in places), tuple(f"o{c}" for c in places)
    channels, weight = t.shape(x)[1], t.shape(w)
    window: dict[str, Any] = {
        "stride": _one(stride, 1), "padding": _one(padding, 0), "dilation": _one(dilation, 1),
        "transposed": transposed,
    }  # fmt: skip
    lead: Labels = ("g",) if groups > 1 else ()
    source, matrix = x, w
    shape: tuple[Extent, ...] = node.shape
    if groups > 1:
        grouped = (t.shape(x)[0], groups, int(channels) // groups, *t.shape(x)[2:])
        source = t.emit(node, "reshape", (x,), ((),), (), suffix=".groups", shape=grouped)
        parts = (groups, int(weight[0]) // groups, *weight[1:])
        matrix = t.emit(node, "reshape", (w,), ((),), (), suffix=".weight", shape=parts,
                        dtype=t.calls[w].dtype)  # fmt: skip
        shape = (node.shape[0], groups, int(node.shape[1]) // groups, *node.shape[2:])
    of_weight = ("i", "o") if transposed else ("o", "i")
    ins = ("b", *lead, "i", *places), (*lead, *of_weight, *taps)
    suffix = ".conv" if groups > 1 or bias else ""
    result = t.emit(
        node, "conv", (source, matrix), ins, ("b", *lead, "o", *out_places), suffix=suffix,
        shape=shape, unsplit={*places, *taps, *out_places}, **window,
    )  # fmt: skip
    if groups > 1:
        result = t.emit(node, "reshape", (result,), ((),), (), suffix=".joined" if bias else "")
    if bias:
        out = tuple(range(len(node.shape)))
        t.emit(node, "add", (result, t.name(bias)), (out, (1,)), out)


def _one(value: Any, default: int) -> int:
    """A number for all dims of a convolution; different ones count as the first."""
    if isinstance(value, tuple):
        return int(next(iter(words(value)), default))
    return default if value is None or isinstance(value, str) else int(value)


def _attention(t: Translation, node: TracedNode) -> None:
    """Attention in one piece; where key heads are fewer, each is repeated for its query heads."""
    q, k, v = (t.name(a) for a in node.args[:3])
    mask, window = node.kwargs.get("mask", "all"), int(node.kwargs.get("window", 0))
    if node.kwargs.get("is_causal"):
        mask = "causal"
    lead = tuple(range(len(t.shape(q)) - 3))
    if t.shape(k)[-3] != t.shape(q)[-3]:  # enable_gqa: query heads are groups of key heads
        heads, keys = int(t.shape(q)[-3]), int(t.shape(k)[-3])
        repeated_shape = (*t.shape(k)[:-3], keys, heads // keys, *t.shape(k)[-2:])
        labels = (*lead, "h", "k", "x")
        keys_and_values: list[str] = []
        for which, name in (("k", k), ("v", v)):
            repeated = (*t.shape(name)[:-3], keys, heads // keys, *t.shape(name)[-2:])
            repeated = t.emit(
                node, "view", (name,), (labels,), (*lead, "h", "r", "k", "x"),
                suffix=f".{which}", shape=repeated,
            )  # fmt: skip
            flat = (*repeated_shape[: len(lead)], heads, *t.shape(name)[-2:])
            keys_and_values.append(
                t.emit(node, "reshape", (repeated,), ((),), (), suffix=f".{which}s", shape=flat)
            )
        k, v = keys_and_values
    ins = (*lead, "h", "q", "d"), (*lead, "h", "k", "d"), (*lead, "h", "k", "v")
    operands = [q, k, v]
    if mask in ("given", "other"):
        t.as_bytes["a mask of attention that is data"] += 1
    t.emit(
        node, "attention", operands, ins, (*lead, "h", "q", "v"), unsplit=("d", "v"),
        causal=mask == "causal", window=window,
        **({"copied": True} if node.kwargs.get("copied") else {}),
    )  # fmt: skip


def _norm(t: Translation, node: TracedNode) -> None:
    """our.norm: over the last dim."""
    x, *weights = (t.name(a) for a in node.args)
    labels = tuple(range(len(node.shape)))
    t.emit(
        node, "norm", (x, *weights), (labels, *[labels[-1:]] * len(weights)), labels,
        unsplit=labels[-1:], **node.kwargs,
    )  # fmt: skip


def _layer_norm(t: Translation, node: TracedNode) -> None:
    """A norm over the last dim, with weight and bias if given."""
    x = t.name(node.args[0])
    weights = [t.name(a) for a in node.args[2:4] if isinstance(a, Ref)]
    if len(node.args[1]) != 1:
        t.as_bytes["layer_norm"] += 1
        t.bytes_only(node, x, *weights)
        return
    fn = "rmsnorm" if "rms_norm" in node.op else "layernorm"
    labels = tuple(range(len(node.shape)))
    t.emit(
        node, "norm", (x, *weights), (labels, *[labels[-1:]] * len(weights)), labels,
        unsplit=labels[-1:], fn=fn,
    )  # fmt: skip


def _group_norm(t: Translation, node: TracedNode) -> None:
    """A norm over groups of channels: its bytes, and a mean and a deviation of each group."""
    names = [a.name for a in node.args if isinstance(a, Ref)]
    t.as_bytes["group_norm"] += 1
    t.bytes_only(node, *names, beside=8 * int(node.args[1]))


def _embedding(t: Translation, node: TracedNode) -> None:
    """Rows of a table, by number."""
    table, ids = (t.name(a) for a in node.args[:2])
    at = tuple(range(len(t.shape(ids))))
    t.emit(node, "embedding", (ids, table), (at, ("v", "m")), (*at, "m"))


def _embedding_bag(t: Translation, node: TracedNode, call: TracedNode) -> None:
    """The first result of `embedding_bag`: rows of a table, summed over bags of equal length."""
    table, ids = (t.name(a) for a in call.args[:2])
    mode, weights = argument(call, 4, 0), argument(call, 6)
    count, bags = size(t.shape(ids)[0]), size(node.shape[0])
    if mode == 2 or weights is not None or not is_whole(count / bags):
        t.as_bytes["embedding_bag"] += 1
        t.bytes_only(node, table, ids)
        return
    length = count / bags
    if length is size(1):
        t.emit(node, "embedding", (ids, table), (("b",), ("v", "m")), ("b", "m"))
        return
    bag = int(str(length)) if length.is_number else str(length)
    grouped = (node.shape[0], bag)
    ids = t.emit(
        node, "reshape", (ids,), ((),), (), suffix=".bags", shape=grouped, dtype=t.calls[ids].dtype
    )
    rows = t.emit(
        node, "embedding", (ids, table), (("b", "l"), ("v", "m")), ("b", "l", "m"), suffix=".rows",
        shape=(*grouped, node.shape[1]),
    )  # fmt: skip
    total = ".sum" if mode == 1 else ""
    made = t.emit(node, "sum", (rows,), (("b", "l", "m"),), ("b", "m"), suffix=total)
    if mode == 1:
        t.elementwise(node, "scale", made, by=1 / bag if isinstance(bag, int) else 1.0)


def _rope(t: Translation, node: TracedNode) -> None:
    """our.rope: rotary position."""
    labels = tuple(range(len(node.shape)))
    t.emit(node, "rope", [t.name(node.args[0])], [labels], labels, unsplit=labels[-1:])


def _softmax(t: Translation, node: TracedNode) -> None:
    """A softmax over the last dim; a constant causal mask that was added is its attribute."""
    x, dim = t.name(node.args[0]), int(node.args[1]) % len(node.shape)
    labels = tuple(range(len(node.shape)))
    if dim != len(node.shape) - 1:
        t.as_bytes["softmax"] += 1
        t.bytes_only(node, x)
        return
    mask: dict[str, Any] = {}
    operand = t.calls[x]
    if operand.op == "add" and len(operand.operands) == 2:
        constant = t.calls[operand.operands[1]]
        while constant.op in VIEWS:
            constant = t.calls[constant.operands[0]]
        attrs = constant.attrs
        if constant.op == "constant" and attrs.get("mask") == "causal" and not attrs.get("hides"):
            x = operand.operands[0]
            mask = {"causal": True, "window": attrs.get("window", 0)}
    t.emit(node, "softmax", [x], [labels], labels, unsplit=labels[-1:], **mask)


def _cross_entropy(t: Translation, node: TracedNode) -> None:
    """The mean cross-entropy of scores and labels."""
    logits, labels = (t.name(a) for a in node.args[:2])
    rows = tuple(range(len(t.shape(labels))))
    t.emit(node, "cross_entropy", (logits, labels), ((*rows, "v"), rows), (), dtype="fp32")


def _experts(t: Translation, node: TracedNode) -> None:
    """our.experts: the parameters are operands that the text does not show."""
    x, *weights = (t.name(a) for a in node.args)
    labels = tuple(range(len(node.shape)))
    hidden = [tuple(f"{i}.{j}" for j in range(len(t.shape(w)))) for i, w in enumerate(weights)]
    t.emit(node, "experts", (x, *weights), (labels, *hidden), labels, **node.kwargs)


def _add(t: Translation, node: TracedNode, sign: float = 1.0) -> None:
    """A sum, of two values or of a value and a number; `alpha` weighs the second."""
    tensors = [a.name for a in node.args[:2] if isinstance(a, Ref)]
    alpha = float(node.kwargs.get("alpha") or (node.args[2] if len(node.args) > 2 else 1) or 1)
    if len(tensors) == 1:
        number = next(a for a in node.args[:2] if not isinstance(a, Ref))
        by = float(number) if isinstance(number, int | float) else 1.0
        t.elementwise(node, "shift", tensors[0], by=by * sign)
        return
    x, y = tensors
    if sign * alpha != 1:
        whose = replace(node, shape=t.shape(y), dtype=t.calls[y].dtype)
        y = t.elementwise(whose, "scale", y, suffix=".negative", by=sign * alpha)
    t.elementwise(node, "add", x, y)


def _subtract(t: Translation, node: TracedNode) -> None:
    """A difference, as a sum with what is subtracted times -1."""
    if isinstance(node.args[0], Ref):
        _add(t, node, -1.0)
        return
    name = t.name(node.args[1])
    negative = t.elementwise(node, "scale", name, suffix=".negative", by=-1.0)
    t.elementwise(node, "shift", negative, by=_float(node.args[0]))


def _multiply(t: Translation, node: TracedNode) -> None:
    """A product, of two values or of a value and a number."""
    tensors = [a.name for a in node.args[:2] if isinstance(a, Ref)]
    if len(tensors) == 1:
        number = next((a for a in node.args[:2] if not isinstance(a, Ref)), 1.0)
        t.elementwise(node, "scale", tensors[0], by=_float(number))
        return
    numbers = [n for n in tensors if _is_constant_number(t, n)]
    if numbers and len(numbers) < len(tensors):
        t.elementwise(node, "scale", next(n for n in tensors if n not in numbers), by=1.0)
        return
    t.elementwise(node, "times", *tensors)


def _is_constant_number(t: Translation, name: str) -> bool:
    """True for a constant or buffer of one element."""
    return t.calls[name].op in ("constant", "buffer") and all(n == 1 for n in t.shape(name))


def _float(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 1.0


def _divide(t: Translation, node: TracedNode) -> None:
    """A quotient, as a product with the reciprocal."""
    x, y = node.args[:2]
    if not isinstance(y, Ref):
        by = _float(y)
        t.elementwise(node, "scale", t.name(x), by=1 / by if by else 1.0)
        return
    whose = replace(node, shape=t.shape(y.name), dtype=t.calls[y.name].dtype)
    inverse = t.elementwise(whose, "act", y.name, suffix=".inverse", fn="reciprocal")
    if isinstance(x, Ref):
        t.elementwise(node, "times", x.name, inverse)
    else:
        t.elementwise(node, "scale", inverse, by=_float(x))


def _power(t: Translation, node: TracedNode) -> None:
    """A power that is a function of ours, or bytes."""
    functions = {2: "square", 3: "cube", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
    power = node.args[1]
    if isinstance(node.args[0], Ref) and not isinstance(power, Ref) and power in functions:
        t.elementwise(node, "act", t.name(node.args[0]), fn=functions[power])
        return
    t.as_bytes["pow"] += 1
    t.bytes_only(node, *list(node.operands()))


def _negate(t: Translation, node: TracedNode) -> None:
    """The value times -1."""
    t.elementwise(node, "scale", t.name(node.args[0]), by=-1.0)


def _act(t: Translation, node: TracedNode) -> None:
    """our.act: an activation that rewriting has found."""
    t.elementwise(node, "act", t.name(node.args[0]), **node.kwargs)


def _gelu(t: Translation, node: TracedNode) -> None:
    """GELU, or its approximation by tanh."""
    tanh = node.kwargs.get("approximate") == "tanh" or "tanh" in node.args
    t.elementwise(node, "act", t.name(node.args[0]), fn="gelu_tanh" if tanh else "gelu")


def _glu(t: Translation, node: TracedNode) -> None:
    """our.glu: an activation times another value."""
    t.elementwise(node, "glu", *(t.name(a) for a in node.args), fn=node.kwargs["fn"])


def _cast(t: Translation, node: TracedNode) -> None:
    """Another data type."""
    x = t.name(node.args[0])
    if t.calls[x].dtype == node.dtype:
        labels = tuple(range(len(node.shape)))
        t.emit(node, "view", [x], [labels], labels)
        return
    t.elementwise(node, "cast", x)


def _dropout(t: Translation, node: TracedNode) -> None:
    """Dropout, with its mask."""
    x, rate = t.name(node.args[0]), float(node.args[1])
    mask = t.elementwise(node, "random_mask", x, suffix=".mask", dtype="uint8", rate=rate)
    t.elementwise(node, "dropout", x, mask, rate=rate)


def _reduction(t: Translation, node: TracedNode, *, mean: bool) -> None:
    x = t.name(node.args[0])
    rank = len(t.shape(x))
    dims_argument = argument(node, 1)
    listed = (dims_argument,) if isinstance(dims_argument, int) else words(dims_argument)
    dims = {int(d) % rank for d in listed or range(rank)}
    keeps = (
        bool(node.args[2]) if len(node.args) > 2 and not isinstance(node.args[2], str) else False
    )
    labels = tuple(range(rank))
    out = tuple(i for i in labels if i not in dims)
    shape = tuple(t.shape(x)[i] for i in out)
    keep = keeps and len(dims) > 0
    last = ".sum" if mean or keep else ""
    result = t.emit(node, "sum", [x], [labels], out, suffix=last, shape=shape)
    if mean:
        count = prod(int(n) for n in (t.shape(x)[i] for i in dims) if isinstance(n, int))
        result = t.emit(
            node, "scale", [result], [out], out, suffix=".mean" if keep else "", shape=shape,
            by=1 / count,
        )  # fmt: skip
    if keep:
        with_ones = tuple(f"one{i}" if i in dims else i for i in labels)
        t.emit(node, "view", [result], [out], with_ones)


def _mean(t: Translation, node: TracedNode) -> None:
    """A mean over some dims."""
    _reduction(t, node, mean=True)


def _sum(t: Translation, node: TracedNode) -> None:
    """A sum over some dims."""
    _reduction(t, node, mean=False)


def _reshape(t: Translation, node: TracedNode) -> None:
    """Dims that are split and joined in order."""
    t.emit(node, "reshape", [t.name(node.args[0])], ((),), ())


def _view(t: Translation, node: TracedNode, labels: Labels, out: Labels) -> None:
    t.emit(node, "view", [t.name(node.args[0])], [labels], out)


def _transpose(t: Translation, node: TracedNode) -> None:
    """Two dims exchanged."""
    rank = len(node.shape)
    a, b = (int(d) % rank for d in (node.args[1:3] if len(node.args) > 2 else (0, rank - 1)))
    labels = list(range(rank))
    labels[a], labels[b] = labels[b], labels[a]
    _view(t, node, tuple(range(rank)), tuple(labels))


def _permute(t: Translation, node: TracedNode) -> None:
    """Dims in another order."""
    rank = len(node.shape)
    _view(t, node, tuple(range(rank)), tuple(int(d) % rank for d in node.args[1]))


def _expand(t: Translation, node: TracedNode) -> None:
    """Dims of 1 repeated, without a copy."""
    x = t.name(node.args[0])
    shape, grown = t.shape(x), len(node.shape) - len(t.shape(x))
    labels = tuple(range(grown, len(node.shape)))
    out = tuple(
        i if i >= grown and shape[i - grown] == node.shape[i] else f"new{i}"
        for i in range(len(node.shape))
    )
    _view(t, node, labels, out)


def _same(t: Translation, node: TracedNode) -> None:
    """The same value."""
    labels = tuple(range(len(node.shape)))
    _view(t, node, labels, labels)


def _part(
    t: Translation, node: TracedNode, x: str, dim: int, start: int, *, suffix: str = ""
) -> None:
    """The elements from `start` of a dim, as many as the node has there."""
    labels = tuple(range(len(node.shape)))
    out = tuple("p" if i == dim else i for i in labels)
    t.emit(node, "slice", [x], [labels], out, unsplit=(dim, "p"), dim=dim, start=start)


def _slice(t: Translation, node: TracedNode) -> None:
    """Some consecutive elements of a dim."""
    args = [*node.args, None, None, None, None][:5]
    x, dim = t.name(args[0]), int(args[1] or 0) % len(node.shape)
    if t.shape(x)[dim] == node.shape[dim]:
        _same(t, node)
        return
    start = _start(args[2], t.shape(x)[dim])
    _part(t, node, x, dim, start)


def _start(given: object, extent: Extent) -> int:
    """Start of a slice; a negative one counts from the end."""
    start = given if isinstance(given, int) else 0
    return start + extent if start < 0 and isinstance(extent, int) else start


def _select(t: Translation, node: TracedNode) -> None:
    """One element of a dim, which the result lacks."""
    x = t.name(node.args[0])
    dim = int(node.args[1]) % len(t.shape(x))
    one = (*node.shape[:dim], 1, *node.shape[dim:])
    start = _start(node.args[2], t.shape(x)[dim])
    labels = tuple(range(len(one)))
    result = x
    if t.shape(x)[dim] != 1:
        out = tuple("p" if i == dim else i for i in labels)
        result = t.emit(
            node, "slice", [x], [labels], out, suffix=".one", shape=one, unsplit=(dim, "p"),
            dim=dim, start=start,
        )  # fmt: skip
    t.emit(node, "view", [result], [labels], tuple(i for i in labels if i != dim))


PIECES = ("aten.split", "aten.split_with_sizes", "aten.chunk", "aten.unbind", "aten.tensor_split",
           "aten.unsafe_split", "aten.unsafe_chunk")  # fmt: skip


def _getitem(t: Translation, node: TracedNode) -> None:
    """One of the results of an operation with several."""
    source = t.graph.nodes[t.name(node.args[0])]
    kind, index = ".".join(source.op.split(".")[:2]), int(node.args[1])
    if kind == "aten.embedding_bag":
        if index == 0:
            _embedding_bag(t, node, source)
        return
    if kind not in PIECES:
        if node.dtype and kind != "getitem":
            fn = source.op.split(".")[1] if "." in source.op else source.op
            t.bytes_only(replace(node, op=f"aten.{fn}"), *list(source.operands()))
        return
    x = t.name(source.args[0])
    shape = t.shape(x)
    if kind == "aten.unbind":
        dim = int(argument(source, 1)) % len(shape) if len(source.args) > 1 else 0
        _select(t, replace(node, args=(Ref(x), dim, index)))
        return
    dim = int(source.args[2]) % len(shape) if len(source.args) > 2 else 0
    if kind == "aten.split_with_sizes" or words(argument(source, 1)):
        start = sum(int(n) for n in words(argument(source, 1))[:index] if isinstance(n, int))
    elif kind in ("aten.split", "aten.unsafe_split"):
        start = index * int(argument(source, 1))
    else:
        start = index * -(-int(shape[dim]) // int(argument(source, 1)))
    _part(t, node, x, dim, start)


def _parts(t: Translation, node: TracedNode) -> None:
    """Multi-output operations make no value; each output becomes a slice (`_getitem`)."""


def _cat(t: Translation, node: TracedNode) -> None:
    """Concatenation, two values at a time."""
    names = [t.name(a) for a in node.args[0]]
    names = [n for n in names if 0 not in t.shape(n)]
    dim = int(node.args[1]) % len(node.shape) if len(node.args) > 1 else 0
    while len(names) > 1:
        a, b, *rest = names
        labels = tuple(range(len(node.shape)))
        labels_a, labels_b = (tuple(f"{x}{i}" if i == dim else i for i in labels) for x in "ab")
        width = _sum_of_extents(t.shape(a)[dim], t.shape(b)[dim])
        shape = tuple(width if i == dim else n for i, n in enumerate(node.shape))
        suffix = f".{len(rest)}" if rest else ""
        result = t.emit(
            node, "join", (a, b), (labels_a, labels_b), labels, suffix=suffix, shape=shape,
            unsplit=(f"a{dim}", f"b{dim}", dim), dim=dim,
        )  # fmt: skip
        names = [result, *rest]
    if names[0] != node.name:
        labels = tuple(range(len(node.shape)))
        t.emit(node, "view", names, [labels], labels)


def _sum_of_extents(a: Extent, b: Extent) -> Extent:
    return a + b if isinstance(a, int) and isinstance(b, int) else f"{a} + {b}"


def _stack(t: Translation, node: TracedNode) -> None:
    """Concatenation along a new dim."""
    names = [t.name(a) for a in node.args[0]]
    dim = int(node.args[1]) % len(node.shape) if len(node.args) > 1 else 0
    grown: list[Ref] = []
    labels = tuple(range(len(node.shape) - 1))
    out = (*labels[:dim], "one", *labels[dim:])
    shape = tuple(1 if i == dim else n for i, n in enumerate(node.shape))
    for i, name in enumerate(names):
        grown.append(Ref(t.emit(node, "view", [name], [labels], out, suffix=f".v{i}", shape=shape)))
    _cat(t, replace(node, args=(tuple(grown), dim)))


FUNCTIONS: dict[str, str] = {
    "gelu": "gelu", "silu": "silu", "relu": "relu", "tanh": "tanh", "sigmoid": "sigmoid",
    "softplus": "softplus", "exp": "exp", "rsqrt": "rsqrt", "sqrt": "sqrt", "log": "log",
    "sin": "sin", "cos": "cos", "abs": "abs", "square": "square", "reciprocal": "reciprocal",
    "erf": "erf",
}  # fmt: skip
"""Operations of one value, and the function of our op `act`."""


CONSTANTS = frozenset({
    "empty_like", "full", "full_like", "new_full", "new_ones", "new_zeros", "ones", "ones_like",
    "rand_like", "randn_like", "zeros", "zeros_like",
})  # fmt: skip
"""Operations whose result no operand takes part in: they have no gradient."""

BYTES_ONLY = CONSTANTS | frozenset({
    "__and__", "__or__", "_unsafe_index", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "addcdiv",
    "addcmul", "all", "amax", "amin", "any", "argmax", "argsort", "avg_pool1d", "avg_pool2d",
    "batch_norm", "binary_cross_entropy", "binary_cross_entropy_with_logits", "bincount",
    "bitwise_and", "bitwise_not", "bucketize", "ceil", "celu", "channel_shuffle", "clamp",
    "clamp_max", "clamp_min", "constant_pad_nd", "copy", "cosine_similarity", "cumsum",
    "diagonal_scatter", "diff", "dist", "elu", "eq", "fill", "flip", "floor", "floor_divide",
    "gather", "ge", "glu", "grid_sampler", "group_norm", "gt", "hardswish", "hardtanh", "histc",
    "huber_loss", "index", "index_add", "index_copy", "index_fill", "index_put", "index_select",
    "instance_norm", "isinf", "isnan", "kl_div", "l1_loss", "le", "leaky_relu", "lerp",
    "log_softmax", "logaddexp", "logical_and", "logical_not", "logical_or", "logsumexp", "lt",
    "masked_fill", "masked_scatter", "max", "max_pool1d", "max_pool2d", "maximum", "min", "minimum",
    "mish", "mse_loss", "nan_to_num", "native_group_norm", "ne", "norm", "normalize", "one_hot",
    "pad", "pairwise_distance", "pixel_shuffle", "pixel_unshuffle", "pow", "prelu", "prod",
    "remainder", "repeat", "repeat_interleave", "roll", "round", "scatter", "scatter_add",
    "scatter_reduce", "searchsorted", "select_scatter", "selu", "sign", "slice_scatter",
    "smooth_l1_loss", "sort", "std", "threshold", "topk", "tril", "triu", "unfold", "unfold_copy",
    "unique_dim", "upsample_bilinear2d", "upsample_nearest1d", "upsample_nearest2d", "var", "where",
    "zero",
})  # fmt: skip
"""Operations without products, which are counted by the bytes that they read and write."""


ROWS: dict[str, Row] = {
    # Products.
    "aten.linear": _linear,
    "aten.addmm": _addmm,
    "aten.mm": _matmul,
    "aten.bmm": _matmul,
    "aten.matmul": _matmul,
    "aten.mv": _matmul,
    "aten.dot": _matmul,
    "aten.baddbmm": _baddbmm,
    "aten.einsum": _einsum,
    **dict.fromkeys(
        ("aten.conv1d", "aten.conv2d", "aten.conv3d", "aten.convolution", "aten.conv_transpose1d",
         "aten.conv_transpose2d"), _convolution),
    # Attention, norms, tables, losses.
    "aten.scaled_dot_product_attention": _attention,
    "aten.layer_norm": _layer_norm,
    "aten.rms_norm": _layer_norm,
    "aten.group_norm": _group_norm,
    "aten.embedding": _embedding,
    "aten.softmax": _softmax,
    "aten._softmax": _softmax,
    "aten.cross_entropy_loss": _cross_entropy,
    "our.norm": _norm,
    "our.rope": _rope,
    "our.act": _act,
    "our.glu": _glu,
    "our.experts": _experts,
    # Element-wise.
    "aten.add": _add,
    "aten.sub": _subtract,
    "aten.rsub": lambda t, node: _subtract(t, replace(node, args=node.args[1::-1])),
    "aten.mul": _multiply,
    "aten.div": _divide,
    "aten.true_divide": _divide,
    "aten.pow": _power,
    "aten.neg": _negate,
    "aten.gelu": _gelu,
    "aten.to": _cast,
    "aten._to_copy": _cast,
    "aten.type_as": _cast,
    "aten.dropout": _dropout,
    # Sums.
    "aten.mean": _mean,
    "aten.sum": _sum,
    # Changes of shape.
    "getitem": _getitem,
    **dict.fromkeys(
        ("aten.view", "aten.reshape", "aten.flatten", "aten.unflatten", "aten._unsafe_view",
         "aten.unsqueeze", "aten.squeeze"), _reshape),
    "aten.transpose": _transpose,
    "aten.t": _transpose,
    "aten.numpy_T": _transpose,
    "aten.permute": _permute,
    "aten.expand": _expand,
    "aten.expand_as": _expand,
    **dict.fromkeys(
        ("aten.contiguous", "aten.clone", "aten.alias", "aten.detach", "aten.lift_fresh_copy"),
        _same),
    "aten.slice": _slice,
    "aten.narrow": lambda t, node: _slice(t, node),
    "aten.select": _select,
    "aten.cat": _cat,
    "aten.concat": _cat,
    "aten.stack": _stack,
    **dict.fromkeys((*PIECES, "aten.embedding_bag"), _parts),
}  # fmt: skip
"""By operation, without its overload, what it is in ops of the table."""


def calls_of(graph: TracedGraph, *, approximate: bool) -> Translation:
    """The calls of a recording's nodes; `approximate` counts operations without a row by bytes."""
    translation = Translation(graph, approximate=approximate)
    translation.run()
    return translation
