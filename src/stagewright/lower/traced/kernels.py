"""Costs of the nodes of a recorded graph: products and attention by shape, others by bytes.

FLOPs are those of products, convolutions and attention, as PyTorch's FlopCounterMode counts them,
except that masked pairs of causal attention are not counted, as in all of Stagewright.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

from stagewright.imports.trace.recording import Ref, TracedNode, argument, words
from stagewright.program.columns import Shape
from stagewright.program.shapes import GEMM

VIEWS = frozenset(
    {"view", "_unsafe_view", "reshape", "_reshape_alias", "t", "transpose", "permute", "expand",
     "unsqueeze", "squeeze", "slice", "select", "narrow", "split", "split_with_sizes", "chunk",
     "unbind", "alias", "detach", "as_strided", "diagonal", "unfold", "lift_fresh", "view_as",
     "view_as_complex", "view_as_real", "getitem", "wait_tensor", "lift_fresh_copy"}
)  # fmt: skip
"""Operations that only change the view."""

MAKES = frozenset(
    {"zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones",
     "new_full", "rand", "rand_like", "randn", "randn_like", "arange", "scalar_tensor", "fill"}
)  # fmt: skip
"""Operations that write values and read nothing."""

EMPTY = frozenset({"empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided"})
"""Operations that only allocate."""

Dims = tuple[int, ...]


class Costs(NamedTuple):
    """Op of a kernel as in `graph.table`, FLOPs, and shape if it is timed by shape."""

    op: str
    flops: int = 0
    shape: Shape | None = None


Shapes = Callable[[Any], Dims]
"""Function from a tensor argument to its dims."""


def costs_of(node: TracedNode, kind: str, dims: Shapes) -> Costs:
    """Costs of a node; `kind`: its operation without library and overload."""
    row = _ROWS.get(kind)
    if row is not None:
        return row(node, dims)
    if kind.startswith("_scaled_dot_product"):
        return _attention(node, kind, dims)
    return Costs(kind)


def _gemm(batch: int, m: int, n: int, k: int) -> Costs:
    extents = (("batch", batch), ("m", m), ("n", n), ("k", k))
    return Costs("einsum", 2 * batch * m * n * k, Shape(GEMM, extents))


def _product(first: int) -> Callable[[TracedNode, Shapes], Costs]:
    """Product of matrices whose operands begin with argument `first`."""

    def row(node: TracedNode, dims: Shapes) -> Costs:
        a, b = dims(node.args[first]), dims(node.args[first + 1])
        return _gemm(prod(a[:-2]), a[-2], b[-1], a[-1])

    return row


def _grouped(node: TracedNode, dims: Shapes) -> Costs:
    """Grouped product: rows of each expert times its matrix; for its gradient, one per expert."""
    a, b = dims(node.args[0]), dims(node.args[1])
    if len(b) == 3:
        experts = b[0]
        rows = prod(a[:-1])
        costs = _gemm(experts, -(-rows // experts), b[-1], a[-1])
        return costs._replace(flops=2 * rows * b[-1] * a[-1])
    experts = node.shape[0] if len(node.shape) == 3 else 1
    costs = _gemm(int(experts), a[0], b[-1], -(-a[-1] // int(experts)))
    return costs._replace(flops=2 * a[0] * a[-1] * b[-1])


def _vector(node: TracedNode, dims: Shapes) -> Costs:
    a, b = dims(node.args[0]), dims(node.args[1])
    return _gemm(1, prod(a[:-1]), prod(b[1:]), a[-1])


def _convolution(node: TracedNode, dims: Shapes) -> Costs:
    x, w = dims(node.args[0]), dims(node.args[1])
    transposed = len(node.args) > 6 and bool(node.args[6])
    result = x if transposed else tuple(map(int, node.shape))
    work = 2 * prod(result) * prod(w[1:])
    columns = w[0]
    shape = (
        ("batch", 1),
        ("m", prod(result) // max(1, result[1])),
        ("n", columns),
        ("k", prod(w[1:])),
    )
    return Costs("conv", work, Shape(GEMM, shape))


def _convolution_backward(node: TracedNode, dims: Shapes) -> Costs:
    grad, x, w = (dims(node.args[i]) for i in range(3))
    transposed = bool(node.args[7]) if len(node.args) > 7 else False
    mask = words(argument(node, len(node.args) - 1)) or (True, True, True)
    products = sum(map(bool, mask[:2]))
    work = 2 * prod(x if transposed else grad) * prod(w[1:]) * products
    shape = (
        ("batch", products), ("m", prod(grad) // max(1, grad[1])), ("n", w[0]), ("k", prod(w[1:])),
    )  # fmt: skip
    return Costs("conv_bwd", work, Shape(GEMM, shape))


_CAUSAL: Mapping[str, int] = {
    "_scaled_dot_product_flash_attention": 4,
    "_scaled_dot_product_flash_attention_for_cpu": 4,
    "_scaled_dot_product_efficient_attention": 6,
    "_scaled_dot_product_cudnn_attention": 6,
    "_scaled_dot_product_flash_attention_backward": 10,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 7,
    "_scaled_dot_product_efficient_attention_backward": 11,
    "_scaled_dot_product_cudnn_attention_backward": 14,
}
"""Index of the argument `is_causal` (native_functions.yaml of PyTorch 2.13)."""


def _attention(node: TracedNode, kind: str, dims: Shapes) -> Costs:
    """Fused attention: two products per pair of query and key, in backward five."""
    backward = kind.endswith("backward")
    q, k, v = (dims(a) for a in node.args[backward : 3 + backward])
    at = _CAUSAL.get(kind, len(node.args))
    causal = bool(node.args[at] if len(node.args) > at else node.kwargs.get("is_causal"))
    pairs = prod(q[:-1]) * k[-2]
    width = 3 * q[-1] + 2 * v[-1] if backward else q[-1] + v[-1]
    op = "attention_bwd" if backward else "attention"
    extents = (
        ("batch", prod(q[:-3])), ("heads", q[-3]), ("kv_heads", k[-3]), ("q", q[-2]), ("k", k[-2]),
        ("d", q[-1]), ("v", v[-1]), ("causal", int(causal)), ("window", 0),
    )  # fmt: skip
    return Costs(op, 2 * pairs * width // (2 if causal else 1), Shape(op, extents))


_ROWS: Mapping[str, Callable[[TracedNode, Shapes], Costs]] = {
    "mm": _product(0),
    "bmm": _product(0),
    "addmm": _product(1),
    "baddbmm": _product(1),
    "mv": _vector,
    "dot": _vector,
    "_grouped_mm": _grouped,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
}


def first_operand(node: TracedNode) -> str:
    """Name of the first argument if it is a value, else empty."""
    first = node.args[0] if node.args else None
    return first.name if isinstance(first, Ref) else ""
