"""Rows of products: matrices, einsum, convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stagewright.errors import UserError
from stagewright.imports.calls import Labels
from stagewright.imports.rows.translation import Translation
from stagewright.imports.trace.recording import Extent, TracedNode, words


def linear(t: Translation, node: TracedNode) -> None:
    """x W', with a bias if given."""
    x, w = (t.name(a) for a in node.args[:2])
    lead = tuple(range(len(t.shape(x)) - 1))
    bias = node.args[2] if len(node.args) > 2 else None
    ins, out = ((*lead, "i"), ("o", "i")), (*lead, "o")
    made = t.emit(node, "einsum", (x, w), ins, out, suffix=".product" if bias else "")
    if bias:
        t.elementwise(node, "add", made, t.name(bias))


def addmm(t: Translation, node: TracedNode) -> None:
    """A bias plus a product of two matrices."""
    bias, x, w = (t.name(a) for a in node.args[:3])
    made = t.emit(node, "einsum", (x, w), (("n", "i"), ("i", "o")), ("n", "o"), suffix=".product")
    t.elementwise(node, "add", made, bias)


def matmul(t: Translation, node: TracedNode) -> None:
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


def baddbmm(t: Translation, node: TracedNode) -> None:
    """A bias plus products of matrices."""
    bias, x, y = (t.name(a) for a in node.args[:3])
    ins = (0, "n", "i"), (0, "i", "o")
    made = t.emit(node, "einsum", (x, y), ins, (0, "n", "o"), suffix=".product")
    t.elementwise(node, "add", made, bias)


def einsum(t: Translation, node: TracedNode) -> None:
    """A contraction as the user writes it."""
    spec = str(node.args[0]).replace(" ", "")
    names: list[str] = [t.name(a) for a in words(node.args[1])]
    terms, out = _terms(spec, [len(t.shape(n)) for n in names])
    if any(len({*term}) < len(term) for term in terms):
        raise UserError(f"{node.source}: einsum {spec!r} takes a diagonal, which no op here does")
    while len(names) > 2:  # from the left, as PyTorch does where opt_einsum is not installed
        later = {x for term in (*terms[2:], out) for x in term}
        both = dict.fromkeys((*terms[0], *terms[1]))
        made = tuple(x for x in both if x in later)
        extents = {
            x: n for term, name in zip(terms[:2], names[:2], strict=True)
            for x, n in zip(term, t.shape(name), strict=True)
        }  # fmt: skip
        shape = tuple(extents[x] for x in made)
        first = t.emit(
            node, "einsum", names[:2], terms[:2], made, suffix=f".{len(names)}", shape=shape
        )
        names, terms = [first, *names[2:]], [made, *terms[2:]]
    t.emit(node, "einsum", names, terms, out)


def _terms(spec: str, ranks: Sequence[int]) -> tuple[list[Labels], Labels]:
    """The labels of an einsum's operands and of its result; dims that dots stand for are numbers.

    >>> _terms("...i,ij->...j", [3, 2])
    ([(0, 1, 'i'), ('i', 'j')], (0, 1, 'j'))
    """
    ins, arrow, out = spec.partition("->")
    written = ins.split(",")
    hidden = [n - len(w.replace("...", "")) for w, n in zip(written, ranks, strict=True)]
    most = max((n for w, n in zip(written, hidden, strict=True) if "..." in w), default=0)

    def labels(text: str, dots: int) -> Labels:
        before, found, after = text.partition("...")
        return (*before, *range(most - dots, most), *after) if found else tuple(text)

    if not arrow:
        once = sorted(c for c in {*ins} if c.isalpha() and ins.count(c) == 1)
        out = "..." * ("..." in ins) + "".join(once)
    return [labels(w, n) for w, n in zip(written, hidden, strict=True)], labels(out, most)


def convolution(t: Translation, node: TracedNode) -> None:
    """A convolution of any number of dims; `groups` are a dim of its own."""
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
    taps, made = tuple(f"t{c}" for c in places), tuple(f"o{c}" for c in places)
    channels, weight = t.shape(x)[1], t.shape(w)
    own: dict[str, Any] = {
        "stride": _one(stride, 1), "padding": _one(padding, 0), "dilation": _one(dilation, 1),
        "transposed": transposed,
    }  # fmt: skip
    lead: Labels = ("g",) if groups > 1 else ()
    source, matrix = x, w
    shape: tuple[Extent, ...] = node.shape
    if groups > 1:
        shown = (t.shape(x)[0], groups, int(channels) // groups, *t.shape(x)[2:])
        source = t.emit(node, "reshape", (x,), ((),), (), suffix=".groups", shape=shown)
        parts = (groups, int(weight[0]) // groups, *weight[1:])
        matrix = t.emit(node, "reshape", (w,), ((),), (), suffix=".weight", shape=parts,
                        dtype=t.calls[w].dtype)  # fmt: skip
        shape = (node.shape[0], groups, int(node.shape[1]) // groups, *node.shape[2:])
    of_weight = ("i", "o") if transposed else ("o", "i")
    ins = ("b", *lead, "i", *places), (*lead, *of_weight, *taps)
    suffix = ".conv" if groups > 1 or bias else ""
    result = t.emit(
        node, "conv", (source, matrix), ins, ("b", *lead, "o", *made), suffix=suffix, shape=shape,
        whole={*places, *taps, *made}, **own,
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
