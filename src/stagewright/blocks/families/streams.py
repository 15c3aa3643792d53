"""Several residual streams that learned weights mix: hyper-connections (arXiv 2409.19606).

The weights of a token follow from its streams, and those of the mix are doubly stochastic
(manifold-constrained hyper-connections, arXiv 2512.24880): DeepSeek-V4's are those of transformers'
`DeepseekV4HyperConnection`. What the norm of all streams divides by is applied to the product
behind it, as the paper's kernels do (section 4.3.1).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from stagewright.algebra.size import Size, size
from stagewright.blocks.builder import Builder
from stagewright.graph.make import add, apply, einsum
from stagewright.graph.node import Node

STREAMS = size("Streams")
"""Number of streams."""


def stream_dims(streams: int) -> tuple[str | Size, ...]:
    """The dims of the residual stream: of all streams, where there are several."""
    return ("B", "S", "Streams", "M") if streams > 1 else ("B", "S", "M")


class Weights(NamedTuple):
    """Weights with which a part of a layer adds to the streams."""

    add: Node
    """Weights with which the part's result is added to each stream, [B, S, Streams]."""
    mix: Node
    """Weights of each old stream in each new one, [B, S, Streams, Streams]."""


def copied(b: Builder, x: Node) -> Node:
    """The streams that the first layer reads: copies of the embedded tokens."""
    if b.config.residual_streams == 1:
        return x
    attrs: dict[str, Any] = {"name": "streams", "scope": "embedding"}
    return apply("repeat", "bsm->bsnm", x, out=(*x.shape[:2], STREAMS, x.shape[2]), **attrs)


def read(b: Builder, x: Node, name: str, scope: str) -> tuple[Node, Weights | None]:
    """The input of a part of a layer, and the weights with which its result is added."""
    if b.config.residual_streams == 1:
        return x, None
    numbers, scale, base = _numbers(b, x, f"{name}_streams", "StreamWeights", 3, scope)
    weights = (
        _weights(b, numbers, scale, base, of=of, name=f"{name}_{of}", scope=scope)
        for of in ("read", "add", "mix")
    )
    first, *others = weights
    return _collapsed(b, first, x, name, scope), Weights(*others)


def write(b: Builder, x: Node, out: Node, weights: Weights | None, name: str, scope: str) -> Node:
    """The streams after a part of a layer: mixed, and its result added to each."""
    attrs: dict[str, Any] = {"scope": scope}
    if weights is None:
        return add(x, out, name=f"{name}_residual", **attrs)
    attrs["dtype"] = b.dtype
    added = apply("times", "bsn,bsm->bsnm", weights.add, out, name=f"{name}_added", **attrs)
    mixed = apply("times", "bsln,bslm->bsnm", weights.mix, x, name=f"{name}_mixed", **attrs)
    return add(mixed, added, name=f"{name}_residual", scope=scope)


def collapsed(b: Builder, x: Node) -> Node:
    """The sum of the streams, weighed by weights of their own, that the output projection reads."""
    if b.config.residual_streams == 1:
        return x
    numbers, scale, base = _numbers(b, x, "head_streams", "Streams", 1, "head")
    first = _weights(b, numbers, scale, base, of="read", name="head_read", scope="head")
    return _collapsed(b, first, x, "head", "head")


def _numbers(
    b: Builder, x: Node, name: str, count: str, scales: int, scope: str
) -> tuple[Node, Node, Node]:
    """Operands of the weights: numbers of each token's streams [B, S, K], in fp32, and
    parameters that scale and shift these."""
    attrs: dict[str, Any] = {"scope": scope}
    fn = b.param(f"{name}.fn", "Streams", "M", count, **attrs)
    made = einsum("bsnm,nmk->bsk", x, fn, name=name, dtype="fp32", **attrs)
    square = apply("mean_square", "bsnm->bs", x, dtype="fp32", name=f"{name}_square", **attrs)
    made = apply("rms_scale", "bsk,bs->bsk", made, square, name=f"{name}_scaled", **attrs)
    scale = b.param(f"{name}.scale", size(scales), **attrs)
    return made, scale, b.param(f"{name}.base", count, **attrs)


def _weights(
    b: Builder, numbers: Node, scale: Node, base: Node, *, of: str, name: str, scope: str
) -> Node:
    rows = numbers.shape[:2]
    out = (*rows, STREAMS, STREAMS) if of == "mix" else (*rows, STREAMS)
    attrs: dict[str, Any] = {"of": of, "iterations": b.config.sinkhorn_iterations, "scope": scope}
    spec = f"bsK,F,K->bs{'LN' if of == 'mix' else 'N'}"
    return apply("stream_weights", spec, numbers, scale, base, out=out, name=name, **attrs)


def _collapsed(b: Builder, weights: Node, x: Node, name: str, scope: str) -> Node:
    attrs: dict[str, Any] = {"dtype": b.dtype, "scope": scope}
    return apply("times", "bsn,bsnm->bsm", weights, x, name=f"{name}_in", **attrs)
