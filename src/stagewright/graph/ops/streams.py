"""Several residual streams (arXiv 2512.24880) and keys of several positions (DeepSeek-V4)."""

from __future__ import annotations

import math

from stagewright.graph.node import Node
from stagewright.graph.ops.shared import joint_gradients
from stagewright.graph.reference import streams as meaning
from stagewright.graph.table import Op, Sizes, choose, need

_WEIGHTS = {"of": choose("read", "add", "mix"), "iterations": need(int, implied=20)}


def _weights_flops(n: Node, here: Sizes) -> object:
    """A sigmoid of each weight; of a mix, two sums and two quotients in each iteration."""
    rows = math.prod([here[x] for x in "bs"])
    count = here["n"] * here.get("l", 1)
    each = 8 if n["of"] != "mix" else 4 * int(n["iterations"])  # pyright: ignore
    return rows * count * each * (1 if n.op == "stream_weights" else 2)


def _compress_flops(n: Node, here: Sizes) -> object:
    """FLOPs per element of the rows: an exponential and a product; in backward twice that."""
    return math.prod([here[x] for x in "bse"]) * (12 if n.op == "compress_bwd" else 8)


ROWS: dict[str, Op] = {
    "stream_weights": Op(
        meaning.stream_weights, joint_gradients, flops=_weights_flops, attrs=_WEIGHTS, fuses=True
    ),
    "stream_weights_bwd": Op(
        meaning.stream_weights_bwd,
        flops=_weights_flops,
        attrs={**_WEIGHTS, "wrt": need(int)},
        joint=True,
        fuses=True,
    ),
    "compress": Op(meaning.compress, joint_gradients, flops=_compress_flops),
    "compress_served": Op(
        meaning.compress_served,
        flops=_compress_flops,
        joint=True,
        attrs={"part": choose("state", "y")},
    ),
    "compress_bwd": Op(
        meaning.compress_bwd, flops=_compress_flops, attrs={"wrt": need(int)}, joint=True
    ),
}
