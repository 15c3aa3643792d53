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


Row = Callable[["Translation", TracedNode], object]


class Translation:
    """Calls of a recording, by one pass over its nodes."""

    def __init__(self, graph: TracedGraph, *, approximate: bool) -> None:
        """`approximate`: operations without a row are counted by their bytes."""
        self.graph, self.approximate = graph, approximate
        self.calls: dict[str, OpCall] = {}
        self.as_bytes: Counter[str] = Counter()
        self.unknown: Counter[str] = Counter()
        for node in graph.nodes.values():
            self._node(node)

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

    def elementwise(
        self, node: TracedNode, op: str, *names: str, suffix: str = "", **attrs: Any
    ) -> str:
        """A call on operands that are broadcast to the node's shape; by default all of the node."""
        names = names or tuple(node.operands())
        out = tuple(range(len(node.shape)))
        ins = [out[len(out) - len(self.shape(name)) :] for name in names]
        return self.emit(node, op, names, ins, out, suffix=suffix, **attrs)

    def over_last_dim(self, node: TracedNode, op: str, x: str, *weights: str, **attrs: Any) -> None:
        """A call that needs all of the last dim, with weights along it."""
        labels = tuple(range(len(node.shape)))
        ins = (labels, *[labels[-1:]] * len(weights))
        self.emit(node, op, (x, *weights), ins, labels, unsplit=labels[-1:], **attrs)

    def view(self, node: TracedNode, out: Labels, *, name: str = "", ins: Labels = ()) -> str:
        """The dims of an operand, numbered or labelled `ins`, in the order `out`."""
        name = name or self.name(node.args[0])
        return self.emit(node, "view", [name], [ins or tuple(range(len(self.shape(name))))], out)

    def same(self, node: TracedNode) -> None:
        """The same value."""
        self.view(node, tuple(range(len(node.shape))))

    def reshape(self, node: TracedNode, name: str = "", **how: Any) -> str:
        """Dims that are split and joined in order."""
        return self.emit(node, "reshape", (name or self.name(node.args[0]),), ((),), (), **how)

    def part(self, node: TracedNode, x: str, dim: int, start: int, **how: Any) -> str:
        """The elements from `start` of a dim, as many as the result has there."""
        labels = tuple(range(len(self.shape(x))))
        out = tuple("p" if i == dim else i for i in labels)
        unsplit = (dim, "p")
        return self.emit(
            node, "slice", [x], [labels], out, unsplit=unsplit, dim=dim, start=start, **how
        )

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
    ins, out = ((*lead, "i"), ("o", "i")), (*lead, "o")
    _product(t, node, (x, w), ins, out, argument(node, 2))


def _matmul(t: Translation, node: TracedNode) -> None:
    """A product of two values of any number of dims, behind a bias if it is added (addmm)."""
    *bias, x, y = node.args[: 3 if "add" in node.op else 2]
    x, y = t.name(x), t.name(y)
    a, b = len(t.shape(x)), len(t.shape(y))
    lead = tuple(range(max(a, b) - 2)) if min(a, b) > 1 else tuple(range(max(a, b) - 1))
    if a == 1 or b == 1:
        ins = ((*lead, "i") if a > 1 else ("i",), ("i",)) if b == 1 else (("i",), ("i", "o"))
        out = lead if b == 1 else ("o",)
    else:
        of_x, of_y = lead[len(lead) - (a - 2) :], lead[len(lead) - (b - 2) :]
        ins, out = ((*of_x, "n", "i"), (*of_y, "i", "o")), (*lead, "n", "o")
    _product(t, node, (x, y), ins, out, *bias)


def _product(
    t: Translation,
    node: TracedNode,
    operands: Sequence[str],
    ins: Sequence[Labels],
    out: Labels,
    bias: Any = None,
) -> None:
    """A product, plus a bias if given."""
    product = t.emit(node, "einsum", operands, ins, out, suffix=".product" if bias else "")
    if bias:
        t.elementwise(node, "add", product, t.name(bias))


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
        source = t.reshape(node, x, suffix=".groups", shape=grouped)
        parts = (groups, int(weight[0]) // groups, *weight[1:])
        matrix = t.reshape(node, w, suffix=".weight", shape=parts, dtype=t.calls[w].dtype)
        shape = (node.shape[0], groups, int(node.shape[1]) // groups, *node.shape[2:])
    of_weight = ("i", "o") if transposed else ("o", "i")
    ins = ("b", *lead, "i", *places), (*lead, *of_weight, *taps)
    suffix = ".conv" if groups > 1 or bias else ""
    result = t.emit(
        node, "conv", (source, matrix), ins, ("b", *lead, "o", *out_places), suffix=suffix,
        shape=shape, unsplit={*places, *taps, *out_places}, **window,
    )  # fmt: skip
    if groups > 1:
        result = t.reshape(node, result, suffix=".joined" if bias else "")
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
    heads, keys = t.shape(q)[-3], t.shape(k)[-3]
    if keys != heads:  # enable_gqa: query heads are groups of key heads
        copies = int(heads) // int(keys)
        k, v = (_repeated(t, node, name, which, copies) for name, which in ((k, "k"), (v, "v")))
    ins = (*lead, "h", "q", "d"), (*lead, "h", "k", "d"), (*lead, "h", "k", "v")
    if mask in ("given", "other"):
        t.as_bytes["a mask of attention that is data"] += 1
    t.emit(
        node, "attention", (q, k, v), ins, (*lead, "h", "q", "v"), unsplit=("d", "v"),
        causal=mask == "causal", window=window,
        **({"copied": True} if node.kwargs.get("copied") else {}),
    )  # fmt: skip


def _repeated(t: Translation, node: TracedNode, name: str, which: str, copies: int) -> str:
    """Keys or values [..., heads, S, D] with `copies` of each head."""
    *lead, heads, length, width = t.shape(name)
    labels = (*range(len(lead)), "h", "k", "x")
    out = (*labels[:-2], "r", *labels[-2:])
    shape = (*lead, heads, copies, length, width)
    made = t.emit(node, "view", (name,), (labels,), out, suffix=f".{which}", shape=shape)
    return t.reshape(node, made, suffix=f".{which}s", shape=(*lead, heads * copies, length, width))


def _layer_norm(t: Translation, node: TracedNode) -> None:
    """A norm over the last dim, with weight and bias if given."""
    x = t.name(node.args[0])
    weights = [t.name(a) for a in node.args[2:4] if isinstance(a, Ref)]
    if len(node.args[1]) != 1:
        t.as_bytes["layer_norm"] += 1
        t.bytes_only(node, x, *weights)
        return
    fn = "rmsnorm" if "rms_norm" in node.op else "layernorm"
    t.over_last_dim(node, "norm", x, *weights, fn=fn)


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
    ids = t.reshape(node, ids, suffix=".bags", shape=grouped, dtype=t.calls[ids].dtype)
    rows = t.emit(
        node, "embedding", (ids, table), (("b", "l"), ("v", "m")), ("b", "l", "m"), suffix=".rows",
        shape=(*grouped, node.shape[1]),
    )  # fmt: skip
    total = ".sum" if mode == 1 else ""
    made = t.emit(node, "sum", (rows,), (("b", "l", "m"),), ("b", "m"), suffix=total)
    if mode == 1:
        t.elementwise(node, "scale", made, by=1 / bag if isinstance(bag, int) else 1.0)


def _softmax(t: Translation, node: TracedNode) -> None:
    """A softmax over the last dim; a constant causal mask that was added is its attribute."""
    x, dim = t.name(node.args[0]), int(node.args[1]) % len(node.shape)
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
    t.over_last_dim(node, "softmax", x, **mask)


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
    tensors, number = _tensors_and_number(node)
    if len(tensors) == 1:
        t.elementwise(node, "shift", *tensors, by=number * sign)
        return
    x, y = tensors
    alpha = float(node.kwargs.get("alpha") or argument(node, 2, 1) or 1)
    if sign * alpha != 1:
        whose = replace(node, shape=t.shape(y), dtype=t.calls[y].dtype)
        y = t.elementwise(whose, "scale", y, suffix=".negative", by=sign * alpha)
    t.elementwise(node, "add", x, y)


def _tensors_and_number(node: TracedNode) -> tuple[list[str], float]:
    """The operands of a sum or product; the number is 1 where it is none, or not known."""
    tensors = [a.name for a in node.args[:2] if isinstance(a, Ref)]
    numbers = [float(a) for a in node.args[:2] if isinstance(a, int | float)]
    return tensors, numbers[0] if numbers else 1.0


def _subtract(t: Translation, node: TracedNode) -> None:
    """A difference, as a sum with what is subtracted times -1."""
    if isinstance(node.args[0], Ref):
        _add(t, node, -1.0)
        return
    (name,), number = _tensors_and_number(node)
    negative = t.elementwise(node, "scale", name, suffix=".negative", by=-1.0)
    t.elementwise(node, "shift", negative, by=number)


def _multiply(t: Translation, node: TracedNode) -> None:
    """A product, of two values or of a value and a number; a constant of one element is one."""
    tensors, number = _tensors_and_number(node)
    if len(tensors) == 2:
        tensors = [n for n in tensors if not _is_constant_number(t, n)] or tensors
    if len(tensors) == 1:
        t.elementwise(node, "scale", *tensors, by=number)
    else:
        t.elementwise(node, "times", *tensors)


def _is_constant_number(t: Translation, name: str) -> bool:
    """True for a constant or buffer of one element."""
    return t.calls[name].op in ("constant", "buffer") and all(n == 1 for n in t.shape(name))


def _divide(t: Translation, node: TracedNode) -> None:
    """A quotient, as a product with the reciprocal."""
    x, y = node.args[:2]
    tensors, number = _tensors_and_number(node)
    if not isinstance(y, Ref):
        t.elementwise(node, "scale", t.name(x), by=1 / number if number else 1.0)
        return
    whose = replace(node, shape=t.shape(y.name), dtype=t.calls[y.name].dtype)
    inverse = t.elementwise(whose, "act", y.name, suffix=".inverse", fn="reciprocal")
    if len(tensors) == 2:
        t.elementwise(node, "times", tensors[0], inverse)
    else:
        t.elementwise(node, "scale", inverse, by=number)


def _power(t: Translation, node: TracedNode) -> None:
    """A power that is a function of ours, or bytes."""
    functions = {2: "square", 3: "cube", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
    power = node.args[1]
    if isinstance(node.args[0], Ref) and not isinstance(power, Ref) and power in functions:
        t.elementwise(node, "act", t.name(node.args[0]), fn=functions[power])
        return
    t.as_bytes["pow"] += 1
    t.bytes_only(node, *list(node.operands()))


def _gelu(t: Translation, node: TracedNode) -> None:
    """GELU, or its approximation by tanh."""
    tanh = node.kwargs.get("approximate") == "tanh" or "tanh" in node.args
    t.elementwise(node, "act", t.name(node.args[0]), fn="gelu_tanh" if tanh else "gelu")


def _cast(t: Translation, node: TracedNode) -> None:
    """Another data type."""
    x = t.name(node.args[0])
    if t.calls[x].dtype == node.dtype:
        t.same(node)
    else:
        t.elementwise(node, "cast", x)


def _dropout(t: Translation, node: TracedNode) -> None:
    """Dropout, with its mask."""
    x, rate = t.name(node.args[0]), float(node.args[1])
    mask = t.elementwise(node, "random_mask", x, suffix=".mask", dtype="uint8", rate=rate)
    t.elementwise(node, "dropout", x, mask, rate=rate)


def _sum(t: Translation, node: TracedNode) -> None:
    """A sum or mean over some dims."""
    x, mean = t.name(node.args[0]), "mean" in node.op
    rank = len(t.shape(x))
    dims_argument = argument(node, 1)
    listed = (dims_argument,) if isinstance(dims_argument, int) else words(dims_argument)
    dims = {int(d) % rank for d in listed or range(rank)}
    keep = argument(node, 2, False) is True and len(dims) > 0
    labels = tuple(range(rank))
    out = tuple(i for i in labels if i not in dims)
    shape = tuple(t.shape(x)[i] for i in out)
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
        t.view(node, with_ones, name=result, ins=out)


def _transpose(t: Translation, node: TracedNode) -> None:
    """Two dims exchanged."""
    rank = len(node.shape)
    a, b = (int(d) % rank for d in (node.args[1:3] if len(node.args) > 2 else (0, rank - 1)))
    labels = list(range(rank))
    labels[a], labels[b] = labels[b], labels[a]
    t.view(node, tuple(labels))


def _permute(t: Translation, node: TracedNode) -> None:
    """Dims in another order."""
    t.view(node, tuple(int(d) % len(node.shape) for d in node.args[1]))


def _expand(t: Translation, node: TracedNode) -> None:
    """Dims of 1 repeated, without a copy."""
    x = t.name(node.args[0])
    shape, grown = t.shape(x), len(node.shape) - len(t.shape(x))
    labels = tuple(range(grown, len(node.shape)))
    out = tuple(
        i if i >= grown and shape[i - grown] == node.shape[i] else f"new{i}"
        for i in range(len(node.shape))
    )
    t.view(node, out, ins=labels)


def _slice(t: Translation, node: TracedNode) -> None:
    """Some consecutive elements of a dim."""
    args = [*node.args, None, None, None, None][:5]
    x, dim = t.name(args[0]), int(args[1] or 0) % len(node.shape)
    if t.shape(x)[dim] == node.shape[dim]:
        t.same(node)
    else:
        t.part(node, x, dim, _start(args[2], t.shape(x)[dim]))


def _start(given: object, extent: Extent) -> int:
    """Start of a slice; a negative one counts from the end."""
    start = given if isinstance(given, int) else 0
    return start + extent if start < 0 and isinstance(extent, int) else start


def _select(t: Translation, node: TracedNode) -> None:
    """One element of a dim, which the result lacks."""
    x = t.name(node.args[0])
    dim = int(node.args[1]) % len(t.shape(x))
    labels, result = tuple(range(len(t.shape(x)))), x
    if t.shape(x)[dim] != 1:
        one = (*node.shape[:dim], 1, *node.shape[dim:])
        start = _start(node.args[2], t.shape(x)[dim])
        result = t.part(node, x, dim, start, suffix=".one", shape=one)
    t.view(node, tuple(i for i in labels if i != dim), name=result)


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
    t.part(node, x, dim, start)


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
        t.view(node, tuple(range(len(node.shape))), name=names[0])


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
    **dict.fromkeys(
        ("aten.mm", "aten.bmm", "aten.matmul", "aten.mv", "aten.dot", "aten.addmm", "aten.baddbmm"),
        _matmul),
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
    "our.norm": lambda t, node: t.over_last_dim(node, "norm", *node.operands(), **node.kwargs),
    "our.rope": lambda t, node: t.over_last_dim(node, "rope", *node.operands()),
    "our.act": lambda t, node: t.elementwise(node, "act", **node.kwargs),
    "our.glu": lambda t, node: t.elementwise(node, "glu", **node.kwargs),
    "our.experts": _experts,
    # Element-wise.
    "aten.add": _add,
    "aten.sub": _subtract,
    "aten.rsub": lambda t, node: _subtract(t, replace(node, args=node.args[1::-1])),
    "aten.mul": _multiply,
    "aten.div": _divide,
    "aten.true_divide": _divide,
    "aten.pow": _power,
    "aten.neg": lambda t, node: t.elementwise(node, "scale", by=-1.0),
    "aten.gelu": _gelu,
    "aten.to": _cast,
    "aten._to_copy": _cast,
    "aten.type_as": _cast,
    "aten.dropout": _dropout,
    # Sums.
    "aten.mean": _sum,
    "aten.sum": _sum,
    # Changes of shape.
    "getitem": _getitem,
    **dict.fromkeys(
        ("aten.view", "aten.reshape", "aten.flatten", "aten.unflatten", "aten._unsafe_view",
         "aten.unsqueeze", "aten.squeeze"), Translation.reshape),
    "aten.transpose": _transpose,
    "aten.t": _transpose,
    "aten.numpy_T": _transpose,
    "aten.permute": _permute,
    "aten.expand": _expand,
    "aten.expand_as": _expand,
    **dict.fromkeys(
        ("aten.contiguous", "aten.clone", "aten.alias", "aten.detach", "aten.lift_fresh_copy"),
        Translation.same),
    "aten.slice": _slice,
    "aten.narrow": _slice,
    "aten.select": _select,
    "aten.cat": _cat,
    "aten.concat": _cat,
    "aten.stack": _stack,
    **dict.fromkeys((*PIECES, "aten.embedding_bag"), _parts),
}  # fmt: skip
"""By operation, without its overload, what it is in ops of the table."""
