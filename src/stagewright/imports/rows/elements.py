"""Rows of element-wise operations, and of sums."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from stagewright.imports.rows.translation import Translation
from stagewright.imports.trace.recording import Ref, TracedNode, argument, words


def sum(t: Translation, node: TracedNode, sign: float = 1.0) -> None:
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


def difference(t: Translation, node: TracedNode) -> None:
    """A difference, as a sum with what is subtracted times -1."""
    if isinstance(node.args[0], Ref):
        sum(t, node, -1.0)
        return
    name = t.name(node.args[1])
    negative = t.elementwise(node, "scale", name, suffix=".negative", by=-1.0)
    t.elementwise(node, "shift", negative, by=_float(node.args[0]))


def product(t: Translation, node: TracedNode) -> None:
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
    """Whether a value is one number that no parameter has a part in."""
    return t.calls[name].op in ("constant", "buffer") and all(n == 1 for n in t.shape(name))


def _float(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 1.0


def quotient(t: Translation, node: TracedNode) -> None:
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


def power(t: Translation, node: TracedNode) -> None:
    """A power that is a function of ours, or bytes."""
    functions = {2: "square", 3: "cube", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
    power = node.args[1]
    if isinstance(node.args[0], Ref) and not isinstance(power, Ref) and power in functions:
        t.elementwise(node, "act", t.name(node.args[0]), fn=functions[power])
        return
    t.as_bytes["pow"] += 1
    t.bytes_only(node, *list(node.operands()))


def negative(t: Translation, node: TracedNode) -> None:
    """The value times -1."""
    t.elementwise(node, "scale", t.name(node.args[0]), by=-1.0)


def act(t: Translation, node: TracedNode) -> None:
    """our.act: an activation that rewriting has found."""
    t.elementwise(node, "act", t.name(node.args[0]), **node.kwargs)


def gelu(t: Translation, node: TracedNode) -> None:
    """GELU, or its approximation by tanh."""
    tanh = node.kwargs.get("approximate") == "tanh" or "tanh" in node.args
    t.elementwise(node, "act", t.name(node.args[0]), fn="gelu_tanh" if tanh else "gelu")


def glu(t: Translation, node: TracedNode) -> None:
    """our.glu: an activation times another value."""
    t.elementwise(node, "glu", *(t.name(a) for a in node.args), fn=node.kwargs["fn"])


def cast(t: Translation, node: TracedNode) -> None:
    """Another data type."""
    x = t.name(node.args[0])
    if t.calls[x].dtype == node.dtype:
        labels = tuple(range(len(node.shape)))
        t.emit(node, "view", [x], [labels], labels)
        return
    t.elementwise(node, "cast", x)


def dropout(t: Translation, node: TracedNode) -> None:
    """Dropout, with its mask."""
    x, rate = t.name(node.args[0]), float(node.args[1])
    mask = t.elementwise(node, "random_mask", x, suffix=".mask", dtype="uint8", rate=rate)
    t.elementwise(node, "dropout", x, mask, rate=rate)


def _reduction(t: Translation, node: TracedNode, *, mean: bool) -> None:
    x = t.name(node.args[0])
    rank = len(t.shape(x))
    given = argument(node, 1)
    listed = (given,) if isinstance(given, int) else words(given)
    dims = {int(d) % rank for d in listed or range(rank)}
    keeps = (
        bool(node.args[2]) if len(node.args) > 2 and not isinstance(node.args[2], str) else False
    )
    labels = tuple(range(rank))
    out = tuple(i for i in labels if i not in dims)
    shown = tuple(t.shape(x)[i] for i in out)
    keep = keeps and len(dims) > 0
    last = ".sum" if mean or keep else ""
    made = t.emit(node, "sum", [x], [labels], out, suffix=last, shape=shown)
    if mean:
        count = prod(int(n) for n in (t.shape(x)[i] for i in dims) if isinstance(n, int))
        made = t.emit(
            node, "scale", [made], [out], out, suffix=".mean" if keep else "", shape=shown,
            by=1 / count,
        )  # fmt: skip
    if keep:
        kept = tuple(f"one{i}" if i in dims else i for i in labels)
        t.emit(node, "view", [made], [out], kept)


def mean(t: Translation, node: TracedNode) -> None:
    """A mean over some dims."""
    _reduction(t, node, mean=True)


def total(t: Translation, node: TracedNode) -> None:
    """A sum over some dims."""
    _reduction(t, node, mean=False)
