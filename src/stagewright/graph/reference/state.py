"""Ops that carry a state along the sequence: what they compute, in numpy.

All of them are one recurrence. Per head, a state of `n` x `p` numbers decays, takes in the outer
product of a key and a value, and is read with a query:

    S[t] = exp(decay[t]) * S[t-1] + beta[t] * k[t] (x) u[t],    o[t] = S[t]' q[t]

with u = v, or, by the delta rule, v less what the decayed state already answers to k. Mamba's
selective scan (arXiv 2312.00752) has heads of width 1 and a decay per element of k; Mamba-2's SSD
(arXiv 2405.21060) a decay per head, keys B and queries C that a group of heads shares, and beta dt;
lightning attention (arXiv 2405.17381) a fixed decay; gated delta nets (arXiv 2412.06464) and Kimi's
delta attention (arXiv 2510.26692) the delta rule. Index letters: g groups, h heads of a group.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from stagewright.graph.reference.dense import ACTIVATIONS
from stagewright.graph.reference.shared import Context


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
