"""Layers that carry a state along the sequence: Mamba, Mamba-2, linear attention, delta rules.

Fused kernels make values with the role `REMADE` again in backward instead of keeping them: results
of convolutions, and time steps (mamba_inner_fn and mamba_split_conv1d_scan_combined of
state-spaces/mamba). States are not kept for backward either, and are never whole in memory.
"""

from __future__ import annotations

from typing import Any

from stagewright.algebra.size import size
from stagewright.blocks.builder import Builder
from stagewright.blocks.inference import state_of, with_state
from stagewright.graph.make import add, apply, cast, einsum, elementwise, identity, letters, part
from stagewright.graph.node import Node
from stagewright.graph.roles import Role

SCOPE = "mixer"
INNER = "Inner/tp"
"""Channels of Mamba."""
GROUPS, HEADS = "Group/tp.groups", ("Group/tp.groups", "Head/tp.heads")
"""Groups of heads that share keys and queries; groups, and the heads in each."""


def mamba(b: Builder, h: Node) -> Node:
    """Mamba (arXiv 2312.00752, section 3.4): the channels are projected to time steps, B and C."""
    x, z = (identity(_into(b, h, "bsm,mi->bsi", "mamba", n, INNER), "channels_core") for n in "xz")
    x = _conv(b, x, "bSi", "mamba.conv", INNER, role=Role.REMADE)
    w = _param(b, "mamba.w_select", INNER, "Selection")
    made = identity(einsum("bsi,ij->bsj", x, w, name="select", scope=SCOPE), "selection")
    state, both = size("State"), 2 * size("State")
    attrs: dict[str, Any] = {"scope": SCOPE}
    rest = part(made, "bsJ->bsK", both, first=False, name="bc", **attrs)
    sources = {
        "dt": part(made, "bsJ->bsR", size("DtRank"), first=True, name="dt_low", **attrs),
        "b": part(rest, "bsK->bsN", state, first=True, name="b", **attrs),
        "c": part(rest, "bsK->bsN", state, first=False, name="c", **attrs),
    }
    dims = {"dt": "DtRank", "b": "State", "c": "State"}
    sources = {n: _inner_norm(b, s, n, dims[n]) for n, s in sources.items()}
    w = _param(b, "mamba.w_dt", "DtRank", INNER)
    dt = einsum("bsr,ri->bsi", sources["dt"], w, name="time_steps", role=Role.REMADE, **attrs)
    dt = _softplus(b, dt, "mamba.dt_bias", INNER)
    a = _decay_rate(b, "mamba.a_log", INNER, "State")
    operands = (x, dt, a, sources["b"], sources["c"])
    spec = "bSi,bSi,in,bSn,bSn->bSi"
    if b.recipe.inference:
        kept = state_of(b, "mamba", INNER, "State")
        own_core = {"name": "core", "scope": f"{SCOPE}.core", "dtype": x.dtype}
        y = with_state(b, "scan_served", spec, operands, kept, **own_core)
    elif b.recipe.flash_attention:
        y = apply("scan", spec, *operands, name="core", role=Role.CORE, scope=f"{SCOPE}.core")
    else:
        y = _plain_scan(*operands)
    skip = _times("bsi,i->bsi", x, _param(b, "mamba.d", INNER), name="skip")
    y = add(y, skip, name="skipped", **attrs)
    y = elementwise("glu", z, y, fn="silu", name="gated", role=Role.REMADE, **attrs)
    y = identity(y, "channels_context", scope=SCOPE)
    return _out(b, y, "bsi,im->bsm", "mamba", INNER)


def mamba2(b: Builder, h: Node) -> Node:
    """Mamba-2 (arXiv 2405.21060, section 7), as Megatron-LM's MambaMixer has it.

    The result is gated and then normed, over the heads of a group.
    """
    z, x = (identity(_heads(b, h, "mamba2", n), "heads_core") for n in "zx")
    keys = {n: identity(_keys(b, h, "mamba2", n), "groups_core") for n in "bc"}
    dt = identity(_rates(b, h, "mamba2", "dt"), "rates_core")
    x = _conv(b, x, "bSghp", "mamba2.conv_x", *HEADS, "Width", role=Role.REMADE)
    keys = {
        n: _conv(b, k, "bSgn", f"mamba2.conv_{n}", GROUPS, "State", role=Role.REMADE)
        for n, k in keys.items()
    }
    dt = _softplus(b, dt, "mamba2.dt_bias", *HEADS)
    a = _decay_rate(b, "mamba2.a_log", *HEADS)
    decay = _times("bsgh,gh->bsgh", dt, a, name="decay", role=Role.REMADE)
    y = _chunked(b, "linear_attention", "ssd", keys["c"], keys["b"], x, dt, decay)
    skip = _times("bsghp,gh->bsghp", x, _param(b, "mamba2.d", *HEADS), name="skip")
    y = elementwise("glu", z, add(y, skip, name="skipped", scope=SCOPE), fn="silu", name="gated")
    y = identity(y, "heads_context")
    state = b.config.state_space
    assert state is not None
    y = _group_norm(b, y, "bsghp->bsg", "mamba2.norm") if state.gated_norm else y
    return _heads_out(b, y, "mamba2")


def lightning(b: Builder, h: Node) -> Node:
    """Lightning attention as in MiniMax-01 (arXiv 2501.08313, section 2.2): fixed decays."""
    q, k = (identity(b.act(_keys(b, h, "lightning", n), "silu"), "groups_core") for n in "qk")
    v = identity(b.act(_heads(b, h, "lightning", "v"), "silu"), "heads_core")
    o = identity(_chunked(b, "linear_attention", "linear", q, k, v), "heads_context")
    o = _group_norm(b, o, "bsghp->bs", "lightning.norm")
    z = _heads(b, h, "lightning", "z")
    return _heads_out(b, elementwise("glu", z, o, fn="sigmoid", name="gated"), "lightning")


def gated_delta(b: Builder, h: Node) -> Node:
    """Gated delta net (arXiv 2412.06464) as in Qwen3-Next, with an output gate per head."""
    q, k, v = _delta_operands(b, h)
    rates = {n: identity(_rates(b, h, "delta", n), "rates_core") for n in ("beta", "dt")}
    dt = _softplus(b, rates["dt"], "delta.dt_bias", *HEADS)
    a = _decay_rate(b, "delta.a_log", *HEADS)
    decay = _times("bsgh,gh->bsgh", dt, a, name="decay")
    beta = _beta(rates["beta"])
    o = _delta_rule(b, "delta", q, k, v, beta, decay)
    o = b.norm(identity(o, "heads_context"), "delta.norm", "Width", fn="rmsnorm")
    z = _heads(b, h, "delta", "z")
    return _heads_out(b, elementwise("glu", z, o, fn="silu", name="gated"), "delta")


def kimi_delta(b: Builder, h: Node) -> Node:
    """Kimi's delta attention (arXiv 2510.26692, section 3): a decay for every element of a key."""
    q, k, v = _delta_operands(b, h)
    low = einsum("bsm,mr->bsr", h, _param(b, "delta.w_f_down", "M", "GateRank"), name="f_low")
    w = _param(b, "delta.w_f_up", "GateRank", *HEADS, "State")
    f = identity(einsum("bsr,rghn->bsghn", low, w, name="f", scope=SCOPE), "heads_core")
    dt = _softplus(b, f, "delta.f_bias", *HEADS, "State")
    a = _decay_rate(b, "delta.a_log", *HEADS)
    decay = _times("bsghn,gh->bsghn", dt, a, name="decay", role=Role.REMADE)
    beta = _beta(identity(_rates(b, h, "delta", "beta"), "rates_core"))
    o = _delta_rule(b, "kimi", q, k, v, beta, decay)
    o = b.norm(identity(o, "heads_context"), "delta.norm", "Width", fn="rmsnorm")
    low = einsum("bsm,mr->bsr", h, _param(b, "delta.w_g_down", "M", "GateRank"), name="g_low")
    w = _param(b, "delta.w_g_up", "GateRank", *HEADS, "Width")
    z = einsum("bsr,rghp->bsghp", low, w, name="z", scope=SCOPE)
    return _heads_out(b, elementwise("glu", z, o, fn="sigmoid", name="gated"), "delta")


# ---- parts ---------------------------------------------------------------------------------------


def _param(b: Builder, name: str, *dims: str) -> Node:
    return b.param(name, *dims, scope=SCOPE)


def _into(b: Builder, h: Node, spec: str, kind: str, name: str, *dims: str) -> Node:
    """A projection of the residual stream."""
    w = b.weight(f"{kind}.w_{name}", "M", *dims, scope=SCOPE)
    return b.linear(spec, h, w, f"{kind}.{name}", scope=SCOPE, joint="in_proj")


def _heads(b: Builder, h: Node, kind: str, name: str) -> Node:
    return _into(b, h, "bsm,mghp->bsghp", kind, name, *HEADS, "Width")


def _keys(b: Builder, h: Node, kind: str, name: str) -> Node:
    return _into(b, h, "bsm,mgn->bsgn", kind, name, GROUPS, "State")


def _rates(b: Builder, h: Node, kind: str, name: str) -> Node:
    return _into(b, h, "bsm,mgh->bsgh", kind, name, *HEADS)


def _heads_out(b: Builder, y: Node, kind: str) -> Node:
    """The output projection of heads, [B, S, M]."""
    return _out(b, y, "bsghp,ghpm->bsm", kind, *HEADS, "Width")


def _out(b: Builder, y: Node, spec: str, kind: str, *dims: str) -> Node:
    w = b.weight(f"{kind}.w_out", *dims, "M", scope=SCOPE)
    out = b.linear(spec, y, w, "mixer_out", scope=SCOPE)
    return identity(out, "attn_reduced")


def _conv(
    b: Builder, x: Node, x_spec: str, name: str, *dims: str, role: Role | None = None
) -> Node:
    """The causal convolution with silu, one kernel (Dao-AILab/causal-conv1d)."""
    state = b.config.state_space
    assert state is not None
    if not state.conv:
        return x
    channels = x_spec[2:]
    weight = _param(b, f"{name}.weight", *dims, "Taps")
    operands = [x, weight]
    spec = f"{x_spec},{channels}T"
    if state.conv_bias:
        operands.append(_param(b, f"{name}.bias", *dims))
        spec += f",{channels}"
    if b.recipe.inference:
        kept = state_of(b, name, *dims, size("Taps") - 1, table=f"{name}.weight")
        attrs = {"fn": "silu", "name": name, "scope": SCOPE}
        return with_state(b, "conv1d_served", f"{spec}->{x_spec}", operands, kept, **attrs)
    spec = f"{spec}->{x_spec}"
    return apply("conv1d", spec, *operands, name=name, role=role, scope=SCOPE, fn="silu")


def _softplus(b: Builder, x: Node, bias: str, *dims: str) -> Node:
    """softplus(x + bias) in fp32: time steps, which are positive."""
    attrs: dict[str, Any] = {"scope": SCOPE}
    x = cast(x, "fp32", name=f"{x.name}32", role=Role.REMADE, **attrs)
    z = letters(x)
    spec = f"{z},{z[-len(dims) :]}->{z}"
    x = apply("bias", spec, x, _param(b, bias, *dims), name="biased", role=Role.REMADE, **attrs)
    return elementwise("act", x, fn="softplus", name="rate", role=Role.REMADE, **attrs)


def _beta(x: Node) -> Node:
    """The strength, from 0 to 1, with which the delta rule writes a value: sigmoid(x) in fp32."""
    x = cast(x, "fp32", name=f"{x.name}32", scope=SCOPE)
    return elementwise("act", x, fn="sigmoid", name="beta", scope=SCOPE)


def _decay_rate(b: Builder, name: str, *dims: str) -> Node:
    """The rates A = -exp(A_log) at which states decay, in fp32."""
    w = _param(b, name, *dims)
    return elementwise("act", w, fn="neg_exp", dtype="fp32", name="rates", scope=SCOPE)


def _times(spec: str, x: Node, y: Node, **fields: Any) -> Node:
    """An element-wise product; dims that `y` lacks are broadcast."""
    return apply("times", spec, x, y, scope=SCOPE, **fields)


def _inner_norm(b: Builder, x: Node, name: str, dim: str) -> Node:
    """The norm that some families have on time steps, B and C, [B, S, dim]."""
    state = b.config.state_space
    assert state is not None
    match state.inner_norms:
        case "weighted":
            return b.norm(x, f"mamba.{name}_norm", dim, fn="rmsnorm")
        case "plain":
            return b.norm_over(x, "bsn->bs")
        case _:
            return x


def _plain_scan(x: Node, dt: Node, a: Node, b: Node, c: Node) -> Node:
    """The scan with its states in memory: Table X of STAGE's paper (arXiv 2511.10480)."""
    attrs: dict[str, Any] = {"scope": f"{SCOPE}.core"}
    rates = apply("times", "bsi,in->bsin", dt, a, **attrs, name="da")
    decay = elementwise("act", rates, fn="exp", **attrs, name="decay")
    db = apply("times", "bsi,bsn->bsin", dt, b, **attrs, name="db")
    fed = apply("times", "bsin,bsi->bsin", db, x, **attrs, name="fed")
    states = apply("pscan", "bSin,bSin->bSin", decay, fed, **attrs, dim=1, name="states")
    return einsum("bsin,bsn->bsi", states, c, dtype=x.dtype, **attrs, name="core", role=Role.CORE)


def _group_norm(b: Builder, x: Node, spec: str, name: str) -> Node:
    """RMSNorm with a weight per channel, over the dims that `spec` sums away."""
    return b.norm_over(x, spec, _param(b, f"{name}.weight", *HEADS, "Width"))


def _unit(x: Node) -> Node:
    """Keys or queries scaled to length 1; backward reads the result and the inverse lengths."""
    attrs: dict[str, Any] = {"scope": SCOPE}
    r = apply("inverse_norm", "bsgN->bsg", x, dtype="fp32", name="inverse_norm", **attrs)
    return apply("unit", "bsgN,bsg->bsgN", x, r, name="unit", **attrs)


def _chunked(b: Builder, op: str, kernel: str, q: Node, k: Node, v: Node, *gates: Node) -> Node:
    """A recurrence in chunks, [B, S, groups, heads, width]; `kernel` names what computes it.

    `gates` are its rates, and what the delta rule's kernels keep of each chunk.
    """
    state = b.config.state_space
    assert state is not None
    n = "N" if op == "delta_rule" else "n"
    terms = [f"bSg{n}", f"bSg{n}", "bSghp"]
    terms += [f"bSgh{'' if i < 2 else 'L'}" for i in range(len(gates))]
    if len(gates) > 1 and len(gates[1].shape) == 5:
        terms[4] = f"bSgh{n}"
    scale = 1.0 if kernel in ("ssd", "linear") else state.state**-0.5
    attrs: dict[str, Any] = {"kernel": kernel, "chunk": state.chunk, "scale": scale}
    spec = f"{','.join(terms)}->bSghp"
    if served := b.recipe.inference:
        kept = state_of(b, kernel, *HEADS, "State", "Width")
        attrs |= {"chunk": 0} if served.decode else {}
        core = {"name": "core", "scope": f"{SCOPE}.core", "dtype": v.dtype}
        return with_state(b, f"{op}_served", spec, (q, k, v, *gates), kept, **core, **attrs)
    attrs |= {"dtype": v.dtype, "name": "core", "scope": f"{SCOPE}.core"}
    return apply(op, spec, q, k, v, *gates, role=Role.CORE, **attrs)


def _delta_operands(b: Builder, h: Node) -> tuple[Node, Node, Node]:
    """Queries and keys of length 1 and values, each after its convolution."""
    q, k = (identity(_keys(b, h, "delta", n), "groups_core") for n in "qk")
    v = identity(_heads(b, h, "delta", "v"), "heads_core")
    q, k = (
        _unit(_conv(b, x, "bSgn", f"delta.conv_{n}", GROUPS, "State"))
        for n, x in (("q", q), ("k", k))
    )
    return q, k, _conv(b, v, "bSghp", "delta.conv_v", *HEADS, "Width")


def _delta_rule(
    b: Builder, kernel: str, q: Node, k: Node, v: Node, beta: Node, decay: Node
) -> Node:
    """The delta rule, and the products inside chunks that its kernels keep for backward."""
    state = b.config.state_space
    assert state is not None
    if b.recipe.inference:
        return _chunked(b, "delta_rule", kernel, q, k, v, beta, decay)
    attrs: dict[str, Any] = {"chunk": state.chunk, "scope": f"{SCOPE}.core", "dtype": v.dtype}
    rates = "bSghN" if len(decay.shape) == 5 else "bSgh"
    shape = (*beta.shape, size("Chunk"))
    spec = f"bSgN,bSgh,{rates}->bSghL"
    kept = [apply("delta_inverse", spec, k, beta, decay, out=shape, name="inverse", **attrs)]
    if kernel == "kimi":
        spec = f"bSgN,bSgN,{rates}->bSghL"
        kept.append(apply("delta_scores", spec, q, k, decay, out=shape, name="scores", **attrs))
    return _chunked(b, "delta_rule", kernel, q, k, v, beta, decay, *kept)
