"""Ops that carry a state along the sequence: rows, gradients and costs.

Costs are those of the kernels that are trained with: selective_scan and SSD of state-spaces/mamba,
the chunk kernels of fla-org/flash-linear-attention. These work on chunks of L tokens in matrix
products, which are what is counted, and hand states on through device memory.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from stagewright.graph.make import apply
from stagewright.graph.node import Node
from stagewright.graph.ops.shared import joint_gradients, not_differentiated
from stagewright.graph.reference import state as meaning
from stagewright.graph.reference.dense import ACTIVATIONS
from stagewright.graph.table import NUMBER, Grads, Op, Sizes, Timing, choose, need, own_attributes


def _delta_rule_vjp(n: Node, g: Node) -> Grads:
    """The products inside chunks, operands after the gates, are made of the others."""
    found = joint_gradients(n, g)
    return (*found[:5], *[None] * (len(found) - 5))


def _pscan_vjp(n: Node, g: Node) -> Grads:
    ins, out = str(n["spec"]).split("->")
    spec = f"{out},{ins},{out}->{out}"
    own = own_attributes(n)
    return tuple(
        apply("pscan_bwd", spec, g, *n.srcs, n, phase="backward", wrt=i, **own) for i in (0, 1)
    )


def conv1d_flops(n: Node, here: Sizes) -> Any:
    """Two per tap; the backward makes the value before the activation again."""
    taps = here["t"]
    outputs = math.prod([size for letter, size in here.items() if letter != "t"], start=1)
    points = outputs * taps
    act = bool(n["fn"])
    match n.get("wrt"):
        case None:
            return 2 * points + 8 * act * outputs
        case 0:
            return (4 if act else 2) * points + 12 * act * outputs
        case 1:
            return 2 * points
        case _:
            return outputs


def scan_flops(n: Node, here: Sizes) -> Any:
    """9 per element of the state: the author's figure, state-spaces/mamba issue 110.

    3 to discretize, 4 to scan, 2 to read. The backward kernel (selective_scan_bwd_kernel.cuh)
    discretizes and scans again (7), scans the gradient (5), and has 3 for x, 7 for dt, 3, 2 and 1
    for A, B and C.
    """
    wrt: Any = n.get("wrt")
    each = (15, 7, 3, 2, 1)[int(wrt)] if wrt is not None else 9
    return each * math.prod([here[x] for x in "bsin"], start=1)


def conv1d_served_flops(n: Node, here: Sizes) -> Any:
    """FLOPs as in training; keeping states costs nothing."""
    if n["part"] == "state":
        return 0
    outputs = math.prod([size for letter, size in here.items() if letter not in "tur"], start=1)
    return 2 * outputs * here["t"] + 8 * bool(n["fn"]) * outputs


def scan_served_flops(n: Node, here: Sizes) -> Any:
    """FLOPs as in training: 9 per element of the state."""
    return 0 if n["part"] == "state" else scan_flops(n, here)


def served_flops(n: Node, here: Sizes) -> Any:
    """The kernels of prefill work on chunks, as in training; that of decode on single tokens.

    Per element of the state that one decays it (1), adds a product (2) and is read (2); by the
    delta rule it is read once more before that.
    """
    if n["part"] == "state":
        return 0
    heads = here["b"] * here["s"] * here["g"] * here["h"]
    delta = n["kernel"] in ("delta", "kimi")
    if not n["chunk"]:
        return (7 if delta else 5) * heads * here["n"] * here["p"]
    chunk: Any = n["chunk"]
    rows = (chunk + 16) * here["n"]
    within = (rows + chunk * chunk // 2 + (rows if n["kernel"] == "kimi" else 0)) if delta else 0
    return chunked_flops(n, here) + within * heads


def served_scratch(n: Node, here: Sizes) -> Any:
    """Bytes of intermediates of the kernels that work on chunks."""
    return chunked_scratch(n, here) if n["chunk"] and n["part"] == "y" else 0


class _Products(NamedTuple):
    """Matrix products of a chunk of L tokens: their number by what two of their three sides are."""

    keys: int = 0  # L x L x n
    values: int = 0  # L x L x p
    states: int = 0  # L x n x p
    lower: int = 0  # L x L x n, of which blocks of 16 above the diagonal are left out
    square: int = 0  # L x L x L


# Forward, and backward by gradient. Counted in ssd_combined.py and the kernels that it calls
# (state-spaces/mamba), and in simple_gla/chunk.py, gated_delta_rule/chunk.py and kda/chunk.py with
# theirs (flash-linear-attention): the states are made again, as are q k' and, by the delta rule,
# its effective keys and values.
_LINEAR: dict[int | None, _Products] = {
    None: _Products(keys=1, values=1, states=2),
    0: _Products(keys=1, values=1, states=2),
    1: _Products(keys=1, states=1),
    2: _Products(keys=1, values=1, states=2),
}


_SSD = _LINEAR | {4: _Products(values=1)}  # the decay's gradient by a product of its own


_DELTA: dict[int | None, _Products] = {
    None: _Products(keys=2, values=2, states=3),
    0: _Products(keys=1, values=1, states=3),
    1: _Products(keys=6, states=2, square=2),
    2: _Products(keys=2, values=4, states=3),
}


_KIMI: dict[int | None, _Products] = {
    None: _Products(keys=1, values=2, states=3),
    0: _Products(values=1, states=3, lower=1),
    1: _Products(keys=2, states=2, lower=3, square=2),
    2: _Products(keys=1, values=4, states=3),
}


_KERNELS = {"ssd": _SSD, "linear": _LINEAR, "delta": _DELTA, "kimi": _KIMI}


KERNELS = tuple(_KERNELS)
"""Kernels that may run an op of this module: its attribute `kernel`."""


def chunked_flops(n: Node, here: Sizes) -> Any:
    """Two per multiply-add of the products inside and between chunks.

    SSD has q k' once per group of heads, and its other kernels skip what the causal mask hides.
    """
    wrt: Any = n.get("wrt")
    count = _KERNELS[str(n["kernel"])].get(wrt, _Products())
    ssd = n["kernel"] == "ssd"
    chunk: Any = n["chunk"]
    tokens, key, value = here["b"] * here["s"], here["n"], here["p"]
    heads = tokens * here["g"] * here["h"]
    keys = 2 * count.keys * chunk * key * (tokens * here["g"] if ssd else heads)
    values = (1 if ssd else 2) * count.values * chunk * value * heads
    states = 2 * count.states * key * value * heads
    lower = count.lower * (chunk + 16) * key * heads
    return keys + values + states + lower + 2 * count.square * chunk * chunk * heads


def within_flops(n: Node, here: Sizes) -> Any:
    """The lower blocks of k k' or q k', and of an inverse L / 4 multiply-adds per element."""
    chunk: Any = n["chunk"]
    heads = here["b"] * here["s"] * here["g"] * here["h"]
    solve = chunk * chunk // 2 if n.op == "delta_inverse" else 0
    return ((chunk + 16) * here["n"] + solve) * heads


def chunked_scratch(n: Node, here: Sizes) -> Any:
    """Bytes of what kernels hand on through device memory, each written once and read once.

    SSD: states in fp32, then in 16 bit, and C B' in fp32; backward makes both again and has the
    gradients of both. The others: states in 16 bit, and by the delta rule effective keys (n), and
    values before and after the state's part (p each); in backward their gradients too.
    """
    wrt: Any = n.get("wrt")
    if wrt not in (None, 2):  # backward is one kernel with a row for each gradient
        return 0
    twice = 1 if wrt is None else 2
    chunk: Any = n["chunk"]
    tokens, key, value = here["b"] * here["s"], here["n"], here["p"]
    heads = tokens * here["g"] * here["h"]
    states = heads * key * value / chunk
    match n["kernel"]:
        case "ssd":
            return twice * (12 * states + 8 * chunk * tokens * here["g"])
        case "linear":
            return twice * 4 * states
        case _:
            return twice * 4 * (states + heads * (key + 2 * value))


_WRT = {"wrt": need(int)}
_DIM = {"dim": need(int)}
_CONV = {"fn": choose("", *ACTIVATIONS)}  # "": none
_CHUNK = {"chunk": need(int)}
_RECURRENCE = {**_CHUNK, "kernel": choose(*KERNELS), "scale": need(*NUMBER)}
_OF_REQUESTS = {"part": need(str)}  # "y", or the "state" after it
_CHUNKED: dict[str, Any] = {
    **{"flops": chunked_flops, "scratch": chunked_scratch, "timing": Timing.CHUNKED},
}
_SERVED: dict[str, Any] = {
    **{"flops": served_flops, "scratch": served_scratch, "joint": True},
    **{"attrs": {**_RECURRENCE, **_OF_REQUESTS}, "timing": Timing.CHUNKED},
}

ROWS: dict[str, Op] = {
    "conv1d": Op(meaning.conv1d, joint_gradients, flops=conv1d_flops, attrs=_CONV),
    "conv1d_bwd": Op(
        meaning.conv1d_bwd,
        flops=conv1d_flops,
        multilinear=True,
        joint=True,
        attrs={**_CONV, "wrt": need(int)},
    ),
    "scan": Op(meaning.scan, joint_gradients, flops=scan_flops),
    "scan_bwd": Op(meaning.scan_bwd, flops=scan_flops, joint=True, attrs=_WRT),
    "linear_attention": Op(
        meaning.linear_attention, joint_gradients, **_CHUNKED, attrs=_RECURRENCE
    ),
    "linear_attention_bwd": Op(
        meaning.linear_attention_bwd, **_CHUNKED, joint=True, attrs={**_RECURRENCE, **_WRT}
    ),
    "delta_rule": Op(meaning.delta_rule, _delta_rule_vjp, **_CHUNKED, attrs=_RECURRENCE),
    "delta_rule_bwd": Op(
        meaning.delta_rule_bwd, **_CHUNKED, joint=True, attrs={**_RECURRENCE, **_WRT}
    ),
    "delta_scores": Op(meaning.delta_scores, not_differentiated, flops=within_flops, attrs=_CHUNK),
    "delta_inverse": Op(
        meaning.delta_inverse, not_differentiated, flops=within_flops, attrs=_CHUNK
    ),
    "conv1d_served": Op(
        meaning.conv1d_served,
        flops=conv1d_served_flops,
        joint=True,
        attrs={**_CONV, **_OF_REQUESTS},
    ),
    "scan_served": Op(meaning.scan_served, flops=scan_served_flops, joint=True, attrs=_OF_REQUESTS),
    "linear_attention_served": Op(meaning.linear_attention_served, **_SERVED),
    "delta_rule_served": Op(meaning.linear_attention_served, **_SERVED),
    "pscan": Op(meaning.pscan, _pscan_vjp, flops=2, attrs=_DIM),
    "pscan_bwd": Op(meaning.pscan_bwd, flops=2, joint=True, attrs={**_DIM, **_WRT}),
}
