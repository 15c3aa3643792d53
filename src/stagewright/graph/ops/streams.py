"""Several residual streams (arXiv 2512.24880) and keys of several positions (DeepSeek-V4)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from stagewright.graph.node import Node
from stagewright.graph.ops.shared import Context, joint_gradients, sigmoid
from stagewright.graph.table import Op, Sizes, choose, need

_FLOOR = 1e-6
"""Added to sums that weights are divided by."""
_STEP = 1e-20
"""Size of the complex step for derivatives, which are exact to the last digit."""


def stream_weights(ctx: Context, mixes: Any, scale: Any, base: Any) -> Any:
    """Weights of residual streams: of those that a layer reads, of its result, or of their mix.

    Of the numbers [B, S, K] that a token's streams make: the first N are weights with which it
    reads the N streams, the next N those with which it adds to them, the rest [N, N] mix them, a
    doubly stochastic matrix (arXiv 2512.24880, section 4).
    """
    return _weights(ctx, ctx.shape[2], mixes, scale, base)


def _weights(ctx: Context, n: int, mixes: Any, scale: Any, base: Any) -> Any:
    """The same of real or complex numbers, for `n` streams."""
    kind = ("read", "add", "mix").index(ctx["of"])
    own = slice(kind * n, kind * n + (n * n if kind == 2 else n))
    x = mixes[..., own] * scale[kind] + base[own]
    if kind < 2:
        return sigmoid(x) * (1 + kind) + (0 if kind else _FLOOR)
    x = x.reshape(*x.shape[:-1], n, n)
    e = np.exp(x - x.real.max(-1, keepdims=True))
    y = e / e.sum(-1, keepdims=True) + _FLOOR
    y = y / (y.sum(-2, keepdims=True) + _FLOOR)
    for _ in range(int(ctx["iterations"]) - 1):
        y = y / (y.sum(-1, keepdims=True) + _FLOOR)
        y = y / (y.sum(-2, keepdims=True) + _FLOOR)
    return y


def stream_weights_bwd(ctx: Context, g: Any, mixes: Any, scale: Any, base: Any) -> Any:
    operands: list[Any] = [mixes, scale, base]
    wrt = ctx["wrt"]
    out: Any = np.zeros(operands[wrt].shape)
    for k in range(out.shape[-1]):  # an element of the last dim at a time, of all tokens at once
        moved = [x.astype(complex) for x in operands]
        moved[wrt][..., k] += 1j * _STEP
        slope = (
            (g * _weights(ctx, int(g.shape[2]), *moved).imag / _STEP)
            .reshape(*mixes.shape[:2], -1)
            .sum(-1)
        )
        out[..., k] = slope if wrt == 0 else slope.sum()
    return out


def _windows(x: Any, each: int, width: int, fill: float) -> Any:
    """[B, keys, positions of a key, width] of [B, S, channels]: each key's own positions; with two
    halves of channels, the first of the positions before and the second of its own."""
    b, s, channels = x.shape
    own = x[:, : s // each * each].reshape(b, -1, each, channels)
    if channels == width:
        return own
    before: Any = np.full((*own.shape[:3], width), fill)
    before[:, 1:] = own[:, :-1, :, :width]
    return np.concatenate([before, own[..., width:]], axis=2)


def _shares(ctx: Context, gate: Any, bias: Any, width: int) -> Any:
    each, s = bias.shape[0], gate.shape[1]
    whole = gate + np.resize(bias, (s, gate.shape[-1]))
    x = _windows(whole, each, width, -np.inf)
    e = np.exp(x - x.max(2, keepdims=True))
    return e / e.sum(2, keepdims=True)


def compress(ctx: Context, rows: Any, gate: Any, bias: Any) -> Any:
    """One row of several positions: their sum, weighed channel by channel by a softmax of a gate.

    With twice as many channels as the result has, the positions before count, too, by the first
    half of the channels.
    """
    width = ctx.shape[-1]
    shares = _shares(ctx, gate, bias, width)
    return (shares * _windows(rows, bias.shape[0], width, 0.0)).sum(2)


def compress_bwd(ctx: Context, g: Any, rows: Any, gate: Any, bias: Any) -> Any:
    each, width = bias.shape[0], g.shape[-1]
    shares = _shares(ctx, gate, bias, width)
    of = shares * g[:, :, None]
    if ctx["wrt"]:
        values = _windows(rows, each, width, 0.0)
        of = of * (values - (shares * values).sum(2, keepdims=True))
    out: Any = np.zeros(rows.shape)
    own = out[:, : g.shape[1] * each].reshape(*g.shape[:2], each, -1)
    own[..., -width:] = of[:, :, -each:]
    if rows.shape[-1] != width:
        own[:, :-1, :, :width] = of[:, 1:, :each]
    if ctx["wrt"] < 2:
        return out
    return own.sum((0, 1))


def compress_served(
    ctx: Context, rows: Any, gate: Any, bias: Any, state: Any, requests: Any, positions: Any
) -> Any:
    """The rows that new tokens complete, or the state that is kept for the next tokens.

    The state [B, requests, 2, positions, channels] has rows and gates of the last positions.
    """
    kept: Any = np.array(state, dtype=float)
    each, many = bias.shape[0], state.shape[3]
    out: Any = np.zeros(ctx.shape)
    if ctx["part"] == "state":
        out = kept
    for b in range(len(rows)):
        done = 0
        for s in range(int(rows.shape[1])):
            r, at = requests[b, s], int(positions[b, s])
            kept[b, r, :, at % many] = rows[b, s], gate[b, s]
            if (at + 1) % each or ctx["part"] == "state":
                continue
            some: Any = np.arange(max(0, at + 1 - many), at + 1)
            own, by = kept[b, r][:, some % many]
            width = out.shape[-1]
            both = _windows(own[None], each, width, 0.0)[0, -1]
            shares = by + np.resize(bias, (len(some), by.shape[-1]))
            x = _windows(shares[None], each, width, -np.inf)[0, -1]
            e = np.exp(x - x.max(0))
            out[b, done] = (e / e.sum(0) * both).sum(0)
            done += 1
    return out


# ---- gradients and costs -------------------------------------------------------------------------

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
        stream_weights, joint_gradients, flops=_weights_flops, attrs=_WEIGHTS, fuses=True
    ),
    "stream_weights_bwd": Op(
        stream_weights_bwd,
        flops=_weights_flops,
        attrs={**_WEIGHTS, "wrt": need(int)},
        joint=True,
        fuses=True,
    ),
    "compress": Op(compress, joint_gradients, flops=_compress_flops),
    "compress_served": Op(
        compress_served,
        flops=_compress_flops,
        joint=True,
        attrs={"part": choose("state", "y")},
    ),
    "compress_bwd": Op(compress_bwd, flops=_compress_flops, attrs={"wrt": need(int)}, joint=True),
}
