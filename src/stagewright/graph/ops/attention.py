"""Attention and its caches: rows, gradients and costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from stagewright.graph.make import apply
from stagewright.graph.node import Node
from stagewright.graph.reference import attention as meaning
from stagewright.graph.table import (
    NUMBER,
    SIZE,
    Grads,
    Op,
    Timing,
    batch_and_heads,
    may,
    need,
    own_attributes,
)


def _row_sums(n: Node, here: Mapping[str, Any]) -> Any:
    """Bytes of the logarithm of each row's sum of exponentials, which flash attention leaves for
    its backward (arXiv 2307.08691, algorithm 1)."""
    return 4 * batch_and_heads(here) * here["q"]


def _forward_again(n: Node, here: Mapping[str, Any]) -> Any:
    """Bytes of forward that its backward reads besides its operands (algorithm 2): the sums of
    rows. Once, in the one kernel that makes all gradients."""
    return _row_sums(n, here) if n["wrt"] == "q" else 0


def _merge_flops(n: Node, here: Mapping[str, Any]) -> Any:
    """A product for each channel of each stripe, and of each row the weights of all stripes."""
    rows = math.prod(v for x, v in here.items() if x not in "nmv")
    return rows * (here["n"] * here["v"] + 4 * here["m"])


def _attention_vjp(n: Node, g: Node) -> Grads:
    ins, out = str(n["spec"]).split("->")
    # Flash attention's backward does five products where forward does two (arXiv 2205.14135,
    # section 3.2): scores again and dP for dq, with dQ; dK; dV. One kernel: the rows are joint.
    # Latents that are keys and values get both gradients.
    more = {name: (0, 0) for name in meaning.MORE if n.get(name)}
    values = {"k": (1, 0), "v": (0, 1)} if len(n.srcs) - len(more) == 3 else {"k": (1, 1)}
    rows = {"q": (2, 1), **values, **more}
    found: list[Node | None] = []
    for (wrt, products), term, s in zip(rows.items(), ins.split(","), n.srcs, strict=True):
        if wrt == "chosen":
            found.append(None)
            continue
        attrs: dict[str, Any] = {**own_attributes(n), "products": products, "wrt": wrt}
        # Its own result is an operand: with the gradient it gives the sum of dP * P of each row.
        spec = f"{out},{out},{ins}->{term}"
        back = apply("attention_bwd", spec, g, n, *n.srcs, out=s.shape, phase="backward", **attrs)
        found.append(back)
    return tuple(found)


def _relative_bias_vjp(n: Node, g: Node) -> Grads:
    ins, out = str(n["spec"]).split("->")
    own: dict[str, Any] = {"causal": n["causal"], "phase": "backward"}
    return (apply("relative_bias_bwd", f"{out}->{ins}", g, out=n.srcs[0].shape, **own),)


def _softmax_vjp(n: Node, g: Node) -> Grads:
    ins, x = str(n["spec"]).split("->")
    back = apply("softmax_bwd", f"{x},{x}->{x}", g, n, phase="backward", width=n["width"])
    if len(n.srcs) == 1:
        return (back,)
    heads = ins.split(",")[1]
    return (back, apply("sinks_bwd", f"{x},{x}->{heads}", g, n, phase="backward"))


# Which keys a query sees; and per key, what scores are divided by and limited to.
# `top`: so many of them, those that an indexer chose, in blocks of `top_block`. `compress`: so many
# positions have one compressed key; beside a window, of all positions before it.
_SEEN = {
    "causal": may(bool),
    "window": may(int),
    "chunk": may(int),
    "top": may(int),
    "top_block": may(int),
    "compress": may(int),
}
_SCORES = {
    "width": may(int), "softcap": may(*NUMBER),
    **dict.fromkeys(meaning.MORE, may(bool)),
}  # fmt: skip
# Products over the widths of keys and of values, which the kernel makes for each pair.
_ATTENTION = {**_SEEN, **_SCORES, "products": may(tuple)}
# What a text in the paper's notation need not write: plain causal attention, a product for each.
_IMPLIED = {
    "causal": may(bool, implied=True),
    "window": may(int, implied=0),
    "softcap": may(*NUMBER, implied=0),
    "products": may(tuple, implied=(1, 1)),
}
_CACHED = {
    **_ATTENTION, "latent": may(bool), "requests": need(*SIZE),
    # Of query and key; keys that are read, and of compressed ones.
    "pairs": need(*SIZE), "keys": may(*SIZE), "compressed_keys": may(*SIZE),
    "stripes": may(*SIZE), "block": may(*SIZE),
}  # fmt: skip
_SOFTMAX = {
    **_SEEN,
    "causal": may(bool, implied=False),
    "window": may(int, implied=0),
    "width": need(int, implied=1),
}
_CAUSAL = {"causal": need(bool)}

ROWS: dict[str, Op] = {
    "attention": Op(
        meaning.attention,
        _attention_vjp,
        ring=("q", "k"),
        scratch=_row_sums,
        attrs={**_ATTENTION, **_IMPLIED},
        timing=Timing.ATTENTION,
    ),
    "attention_bwd": Op(
        meaning.attention_bwd,
        ring=("q", "k"),
        joint=True,
        scratch=_forward_again,
        attrs={**_ATTENTION, "wrt": need(str)},
        timing=Timing.ATTENTION_BACKWARD,
    ),
    "cached_attention": Op(meaning.cached_attention, attrs=_CACHED, timing=Timing.CACHED_ATTENTION),
    "varlen_attention": Op(meaning.cached_attention, attrs=_CACHED, timing=Timing.SERVED_ATTENTION),
    "striped_attention": Op(
        meaning.striped_attention,
        joint=True,
        attrs={**_CACHED, "sums": may(bool)},
        timing=Timing.SERVED_ATTENTION,
    ),
    "merge_stripes": Op(meaning.merge_stripes, flops=_merge_flops),
    "relative_bias": Op(
        meaning.relative_bias, _relative_bias_vjp, flops=0, gathers=0, attrs=_CAUSAL
    ),
    "relative_bias_bwd": Op(meaning.relative_bias_bwd, multilinear=True, attrs=_CAUSAL),
    "softmax": Op(meaning.softmax, _softmax_vjp, flops=5, fuses=True, attrs=_SOFTMAX),
    "softmax_bwd": Op(meaning.softmax_bwd, flops=4, fuses=True, attrs={"width": need(int)}),
    "sinks_bwd": Op(meaning.sinks_bwd, flops=4, fuses=True),
    "cache": Op(meaning.cache, flops=0, fuses=True, scatters=1, attrs={"kept_tokens": may(*SIZE)}),
    "take": Op(meaning.take, flops=0, gathers=0),
}
