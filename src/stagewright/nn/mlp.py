"""What follows attention: a dense MLP, or a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stagewright.ir import Node
from stagewright.nn.builder import Builder
from stagewright.ops import add, apply, cast, combine, dispatch, einsum, elementwise, identity
from stagewright.size import size


def mlp(b: Builder, h: Node) -> Node:
    """Up and down, or gate, up and down (arXiv 2002.05202)."""
    c = b.config
    names = {"up": "w_up", "gate": "w_gate", "down": "w_down"}
    out = _feed_forward(b, h, "bsm", "bsf", ("M", "F"), names, biased=c.mlp_bias)
    if not c.parallel_block:
        out = identity(out, "mlp_reduced")
    return b.bias(out, "b_down", "M") if c.mlp_bias else out


def _feed_forward(
    b: Builder,
    h: Node,
    rows: str,
    inner: str,
    dims: tuple[str, ...],
    names: Mapping[str, str],
    *,
    biased: bool = False,
    more: Mapping[str, Any] | None = None,
) -> Node:
    """The products of an MLP over any rows; `dims` are those of a weight that leads in.

    The products have the attributes `more`.
    """
    c = b.config
    scope = "mlp"
    lead = inner[0] if len(dims) == 3 else ""  # experts have weights of their own
    into = f"{rows},{lead}{rows[-1]}{inner[-1]}->{inner}"
    wide: dict[str, Node] = {}
    for part_ in ("up", "gate") if c.gated else ("up",):
        w = b.weight(names[part_], *dims, scope=scope)
        wide[part_] = b.linear(into, h, w, part_, scope=scope, **(more or {}))
        if biased:
            wide[part_] = b.bias(wide[part_], f"b_{part_}", dims[-1])
    if c.gated:
        a = elementwise("glu", wide["gate"], wide["up"], fn=c.activation, name="act", scope=scope)
    else:
        a = elementwise("act", wide["up"], fn=c.activation, name="act", scope=scope)
    w = b.weight(names["down"], *dims[:-2], dims[-1], dims[-2], scope=scope)
    outof = f"{inner},{lead}{inner[-1]}{rows[-1]}->{rows}"
    return b.linear(outof, a, w, "mlp_out", scope=scope, **(more or {}))


def experts(b: Builder, h: Node) -> Node:
    """Mixture of experts: route, copy tokens to their experts, and sum what comes back.

    GShard (arXiv 2006.16668) and Switch (arXiv 2101.03961), shared experts as in DeepSeekMoE (arXiv
    2401.06066). Tokens spread evenly over experts; R rows each, dropped or padded to a capacity.
    """
    c = b.config
    own: dict[str, Any] = {"scope": "mlp"}
    w = b.param("w_router", "M", "E", scope="mlp")
    logits = cast(einsum("bsm,me->bse", h, w, name="router", **own), "fp32", name="router32")
    routing: dict[str, Any] = {"top_k": c.top_k}
    held, more, sent = "E", dict[str, Any](), h
    if b.recipe.inference:  # experts may be there more than once
        sent = b.lowered(h, b.recipe.inference.weights)
        held = "H" if b.recipe.inference.redundant_experts else "E"
        more = {"touched": size("touched")}
    whose = (*h.shape[:2], size(held))
    gates = apply("topk", f"bsE->bs{held}", logits, out=whose, fn=c.router, name="gates", **routing)
    rows = identity(
        dispatch(sent, gates, size("R"), name="permuted", **own, **routing), "dispatched"
    )
    rows = identity(rows, "expert_in")
    names = {"up": "we_up", "gate": "we_gate", "down": "we_down"}
    out = _feed_forward(b, rows, "erm", "erx", (held, "M", "X"), names, more=more)
    out = identity(out, "expert_out")
    if b.recipe.inference:
        out = identity(out, "returning")
        routing |= {"in_part": True}
    out = combine(out, gates, h, name="moe_out", **own, **routing)
    if c.shared_ffn_hidden_size:
        names = {"up": "ws_up", "gate": "ws_gate", "down": "ws_down"}
        shared = _feed_forward(b, h, "bsm", "bsy", ("M", "Y"), names)
        out = add(out, shared, name="branch", **own)
    return identity(out, "mlp_reduced")
