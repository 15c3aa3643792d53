"""Ops that carry a state along the sequence.

All of them are one recurrence. Per head, a state of `n` x `p` numbers decays, takes in the outer
product of a key and a value, and is read with a query:

    S[t] = exp(decay[t]) * S[t-1] + beta[t] * k[t] (x) u[t],    o[t] = S[t]' q[t]

with u = v, or, by the delta rule, v less what the decayed state already answers to k. Mamba's
selective scan (arXiv 2312.00752) has heads of width 1 and a decay per element of k; Mamba-2's SSD
(arXiv 2405.21060) a decay per head, keys B and queries C that a group of heads shares, and beta dt;
lightning attention (arXiv 2405.17381) a fixed decay; gated delta nets (arXiv 2412.06464) and Kimi's
delta attention (arXiv 2510.26692) the delta rule. Index letters: g groups, h heads of a group.

Costs are those of the kernels that are trained with: selective_scan and SSD of state-spaces/mamba,
the chunk kernels of fla-org/flash-linear-attention. These work on chunks of L tokens in matrix
products, which are what is counted, and hand states on through device memory.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from stagewright.graph.make import apply
from stagewright.graph.node import Node
from stagewright.graph.ops.dense import ACTIVATIONS
from stagewright.graph.ops.shared import Context, joint_gradients, not_differentiated
from stagewright.graph.table import NUMBER, Grads, Op, Sizes, Timing, choose, need, own_attributes


def _convolved(x: Any, w: Any, bias: tuple[Any, ...]) -> Any:
    """Every channel with its own taps, of which the last is for the position itself."""
    taps = w.shape[-1]
    padded = np.concatenate([np.zeros_like(x[:, :1]).repeat(taps - 1, axis=1), x], axis=1)
    length = x.shape[1]
    return sum((padded[:, j : j + length] * w[..., j] for j in range(taps)), start=sum(bias))


def conv1d(ctx: Context, x: Any, w: Any, *bias: Any) -> Any:
    """Causal convolution of each channel along the sequence, then an activation."""
    y = _convolved(x, w, bias)
    return ACTIVATIONS[ctx["fn"]].value(y) if ctx["fn"] else y


def conv1d_bwd(ctx: Context, g: Any, x: Any, w: Any, *bias: Any) -> Any:
    if ctx["fn"]:
        g = g * ACTIVATIONS[ctx["fn"]].slope(_convolved(x, w, bias))
    taps, length = w.shape[-1], x.shape[1]
    match ctx["wrt"]:
        case 0:
            return _convolved(g[:, ::-1], w, (np.zeros(()),))[:, ::-1]
        case 1:
            padded = np.concatenate([np.zeros_like(x[:, :1]).repeat(taps - 1, axis=1), x], axis=1)
            parts = [(padded[:, j : j + length] * g).sum((0, 1)) for j in range(taps)]
            return np.stack(parts, axis=-1)
        case _:
            return g.sum((0, 1))


class _Gates(NamedTuple):
    beta: Any  # [b, s, g, h]
    decay: Any  # [b, s, g, h, n]


def _recur(q: Any, k: Any, v: Any, gates: _Gates, delta: bool) -> tuple[Any, list[Any]]:
    """Values read at every position, and (decayed state, u, state) there."""
    state = np.zeros((*v.shape[:1], *v.shape[2:4], k.shape[-1], v.shape[-1]))
    read: list[Any] = []
    passed: list[Any] = []
    for t in range(v.shape[1]):
        decayed = np.exp(gates.decay[:, t])[..., None] * state
        u = v[:, t] - (np.einsum("bghnp,bgn->bghp", decayed, k[:, t]) if delta else 0)
        state = decayed + np.einsum("bgh,bgn,bghp->bghnp", gates.beta[:, t], k[:, t], u)
        passed.append((decayed, u, state))
        read.append(np.einsum("bghnp,bgn->bghp", state, q[:, t]))
    return np.stack(read, axis=1), passed


def _recur_bwd(
    g: Any, q: Any, k: Any, v: Any, gates: _Gates, delta: bool
) -> tuple[Any, Any, Any, Any, Any]:
    """Gradients of q, k, v, beta and decay."""
    _, passed = _recur(q, k, v, gates, delta)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    dbeta, ddecay = np.zeros_like(gates.beta), np.zeros_like(gates.decay)
    back = np.zeros_like(passed[0][0])
    for t in reversed(range(v.shape[1])):
        decayed, u, state = passed[t]
        dq[:, t] = np.einsum("bghnp,bghp->bgn", state, g[:, t])
        back = back + np.einsum("bgn,bghp->bghnp", q[:, t], g[:, t])
        answer = np.einsum("bghnp,bgn->bghp", back, k[:, t])
        dbeta[:, t] = (answer * u).sum(-1)
        dv[:, t] = du = gates.beta[:, t][..., None] * answer
        dk[:, t] = np.einsum("bghnp,bgh,bghp->bgn", back, gates.beta[:, t], u)
        if delta:
            dk[:, t] -= np.einsum("bghnp,bghp->bgn", decayed, du)
            back = back - np.einsum("bgn,bghp->bghnp", k[:, t], du)
        ddecay[:, t] = (back * decayed).sum(-1)
        back = np.exp(gates.decay[:, t])[..., None] * back
    return dq, dk, dv, dbeta, ddecay


def _gates(ctx: Context, k: Any, v: Any, given: tuple[Any, ...]) -> _Gates:
    """beta and decay; where they are not given, 1 and lightning attention's slope of each head."""
    shape = (*v.shape[:4], k.shape[-1])
    if given:
        beta, decay = given[:2]
        return _Gates(beta, np.broadcast_to(decay if decay.ndim == 5 else decay[..., None], shape))
    heads: Any = ctx.start("g") + np.arange(int(v.shape[2]))
    slope: Any = 2.0 ** (-8 * (heads + 1) / ctx.size("g"))
    return _Gates(np.ones(shape[:4]), np.broadcast_to(-slope[:, None, None], shape))


def linear_attention(ctx: Context, q: Any, k: Any, v: Any, *gates: Any) -> Any:
    """Linear attention with decay, in chunks (Mamba-2, Lightning Attention)."""
    return _recur(q * ctx["scale"], k, v, _gates(ctx, k, v, gates), False)[0]


def linear_attention_bwd(ctx: Context, g: Any, q: Any, k: Any, v: Any, *gates: Any) -> Any:
    return _gradient(ctx, False, g, q, k, v, gates)


def delta_rule(ctx: Context, q: Any, k: Any, v: Any, *gates: Any) -> Any:
    """The gated delta rule in chunks (Gated DeltaNet, Kimi Linear).

    The operands after the gates are products inside chunks, kept for backward.
    """
    return _recur(q * ctx["scale"], k, v, _gates(ctx, k, v, gates), True)[0]


def delta_rule_bwd(ctx: Context, g: Any, q: Any, k: Any, v: Any, *gates: Any) -> Any:
    return _gradient(ctx, True, g, q, k, v, gates)


def _gradient(ctx: Context, delta: bool, g: Any, q: Any, k: Any, v: Any, gates: Any) -> Any:
    wrt: int = ctx["wrt"]
    found = _recur_bwd(g, q * ctx["scale"], k, v, _gates(ctx, k, v, gates), delta)[wrt]
    if wrt == 0:
        return found * ctx["scale"]
    return found if wrt < 4 or gates[1].ndim == 5 else found.sum(-1)


def scan(ctx: Context, x: Any, dt: Any, a: Any, b: Any, c: Any) -> Any:
    """Mamba's selective scan: one group of heads of width 1."""
    return _recur(*_selective(x, dt, a, b, c), False)[0][:, :, 0, :, 0]


def _selective(x: Any, dt: Any, a: Any, b: Any, c: Any) -> tuple[Any, Any, Any, _Gates]:
    gates = _Gates(dt[:, :, None], (dt[..., None] * a)[:, :, None])
    return c[:, :, None], b[:, :, None], x[:, :, None, :, None], gates


def scan_bwd(ctx: Context, g: Any, x: Any, dt: Any, a: Any, b: Any, c: Any) -> Any:
    whole = g[:, :, None, :, None]
    dq, dk, dv, dbeta, ddecay = _recur_bwd(whole, *_selective(x, dt, a, b, c), False)
    rates = ddecay[:, :, 0]
    match ctx["wrt"]:
        case 0:
            return dv[:, :, 0, :, 0]
        case 1:
            return dbeta[:, :, 0] + (rates * a).sum(-1)
        case 2:
            return (rates * dt[..., None]).sum((0, 1))
        case 3:
            return dk[:, :, 0]
        case _:
            return dq[:, :, 0]


# A step of serving: tokens of several requests behind each other, [B, S], each of which goes on
# from the state that the step before left of its request, [B, requests, ...]. `part` says whether
# the result or the states after the step are asked for.


def conv1d_served(ctx: Context, x: Any, w: Any, *rest: Any) -> Any:
    *bias, state, ids = rest
    seen, y = np.array(state, dtype=float), np.zeros_like(x)
    for b, t in np.ndindex(*ids.shape):
        r = ids[b, t]
        window = np.concatenate([seen[b, r], x[b, t][..., None]], axis=-1)
        y[b, t] = (window * w).sum(-1) + sum(bias)
        seen[b, r] = window[..., 1:]
    if ctx["part"] == "state":
        return seen
    return ACTIVATIONS[ctx["fn"]].value(y) if ctx["fn"] else y


def _served(ctx: Context, q: Any, k: Any, v: Any, gates: _Gates, state: Any, ids: Any) -> Any:
    """Values read at every position, or the final states [b, r, g, h, n, p]."""
    delta = ctx.get("kernel") in ("delta", "kimi")
    now, read = np.array(state, dtype=float), np.zeros(v.shape)
    for b, t in np.ndindex(*ids.shape):
        r = ids[b, t]
        decayed = np.exp(gates.decay[b, t])[..., None] * now[b, r]
        u = v[b, t] - (np.einsum("ghnp,gn->ghp", decayed, k[b, t]) if delta else 0)
        now[b, r] = decayed + np.einsum("gh,gn,ghp->ghnp", gates.beta[b, t], k[b, t], u)
        read[b, t] = np.einsum("ghnp,gn->ghp", now[b, r], q[b, t])
    return now if ctx["part"] == "state" else read


def linear_attention_served(ctx: Context, q: Any, k: Any, v: Any, *rest: Any) -> Any:
    *gates, state, ids = rest
    return _served(ctx, q * ctx["scale"], k, v, _gates(ctx, k, v, tuple(gates)), state, ids)


def scan_served(ctx: Context, x: Any, dt: Any, a: Any, b: Any, c: Any, state: Any, ids: Any) -> Any:
    """Channels are heads of width 1, in one group."""
    q, k, v, gates = _selective(x, dt, a, b, c)
    found = _served(ctx, q, k, v, gates, state[:, :, None, :, :, None], ids)
    return found[:, :, 0, :, :, 0] if ctx["part"] == "state" else found[:, :, 0, :, 0]


def _within(ctx: Context, q: Any, k: Any, decay: Any) -> Any:
    """q k' inside each chunk, decayed from the key's position to the query's: [b, s, g, h, L]."""
    chunk = ctx.shape[-1]
    b, s, g, h = decay.shape[:4]
    assert s % chunk == 0, f"{s} tokens are not whole chunks of {chunk}"
    rates = np.broadcast_to(
        decay if decay.ndim == 5 else decay[..., None], (b, s, g, h, k.shape[-1])
    )
    rates = rates.reshape(b, s // chunk, chunk, g, h, -1).cumsum(2)
    since = np.exp(rates[:, :, :, None] - rates[:, :, None])
    qs, ks = (x.reshape(b, s // chunk, chunk, g, -1) for x in (q, k))
    return np.einsum("bcign,bcjgn,bcijghn->bcighj", qs, ks, since).reshape(b, s, g, h, chunk)


def delta_scores(ctx: Context, q: Any, k: Any, decay: Any) -> Any:
    """Scores of each query with the keys of its chunk up to its position."""
    chunk = ctx.shape[-1]
    at: Any = np.arange(int(q.shape[1]))
    seen: Any = np.arange(int(chunk))[None, :] <= (at % chunk)[:, None]
    return np.where(seen[:, None, None], _within(ctx, q, k, decay), 0.0)


def delta_inverse(ctx: Context, k: Any, beta: Any, decay: Any) -> Any:
    """The inverse of 1 + tril(beta k k') of each chunk, by rows (arXiv 2412.06464, section 3.3)."""
    chunk = ctx.shape[-1]
    at: Any = np.arange(int(k.shape[1]))
    below: Any = np.arange(int(chunk))[None, :] < (at % chunk)[:, None]
    rows = np.where(below[:, None, None], _within(ctx, k, k, decay) * beta[..., None], 0.0)
    b, s, g, h, _ = rows.shape
    blocks = rows.reshape(b, s // chunk, chunk, g, h, chunk).transpose(0, 1, 3, 4, 2, 5)
    inverse = np.linalg.inv(np.eye(chunk) + blocks)
    return inverse.transpose(0, 1, 4, 2, 3, 5).reshape(rows.shape)


def pscan(ctx: Context, a: Any, b: Any) -> Any:
    """A linear recurrence along `dim`: y[t] = a[t] * y[t-1] + b[t]."""
    out = np.zeros(b.shape)
    y, a, b = (np.moveaxis(x, ctx["dim"], 0) for x in (out, a, b))
    before: Any = 0.0
    for t in range(len(y)):
        before = y[t] = a[t] * before + b[t]
    return out


def pscan_bwd(ctx: Context, g: Any, a: Any, b: Any, y: Any) -> Any:
    """The scan backwards, of gradients; with respect to a (0) times the y before."""
    out = np.zeros(b.shape)
    g, a, y, d = (np.moveaxis(x, ctx["dim"], 0) for x in (g, a, y, out))
    after: Any = 0.0
    for t in reversed(range(len(g))):
        total = g[t] + after
        after = a[t] * total
        d[t] = total if ctx["wrt"] else total * (y[t - 1] if t else 0.0)
    return out


# ---- gradients and costs -------------------------------------------------------------------------


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
    "conv1d": Op(conv1d, joint_gradients, flops=conv1d_flops, attrs=_CONV),
    "conv1d_bwd": Op(
        conv1d_bwd,
        flops=conv1d_flops,
        multilinear=True,
        joint=True,
        attrs={**_CONV, "wrt": need(int)},
    ),
    "scan": Op(scan, joint_gradients, flops=scan_flops),
    "scan_bwd": Op(scan_bwd, flops=scan_flops, joint=True, attrs=_WRT),
    "linear_attention": Op(linear_attention, joint_gradients, **_CHUNKED, attrs=_RECURRENCE),
    "linear_attention_bwd": Op(
        linear_attention_bwd, **_CHUNKED, joint=True, attrs={**_RECURRENCE, **_WRT}
    ),
    "delta_rule": Op(delta_rule, _delta_rule_vjp, **_CHUNKED, attrs=_RECURRENCE),
    "delta_rule_bwd": Op(delta_rule_bwd, **_CHUNKED, joint=True, attrs={**_RECURRENCE, **_WRT}),
    "delta_scores": Op(delta_scores, not_differentiated, flops=within_flops, attrs=_CHUNK),
    "delta_inverse": Op(delta_inverse, not_differentiated, flops=within_flops, attrs=_CHUNK),
    "conv1d_served": Op(
        conv1d_served,
        flops=conv1d_served_flops,
        joint=True,
        attrs={**_CONV, **_OF_REQUESTS},
    ),
    "scan_served": Op(scan_served, flops=scan_served_flops, joint=True, attrs=_OF_REQUESTS),
    "linear_attention_served": Op(linear_attention_served, **_SERVED),
    "delta_rule_served": Op(linear_attention_served, **_SERVED),
    "pscan": Op(pscan, _pscan_vjp, flops=2, attrs=_DIM),
    "pscan_bwd": Op(pscan_bwd, flops=2, joint=True, attrs={**_DIM, **_WRT}),
}
