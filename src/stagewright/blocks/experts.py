"""A mixture of experts: who goes where, copies of tokens to their experts, and what comes back.

GShard (arXiv 2006.16668) and Switch (arXiv 2101.03961), shared experts as in DeepSeekMoE (arXiv
2401.06066). Options have the names that Megatron-LM gives them. Rows are copies of tokens, R for
each expert; who gets more or fewer of them than others is not the graph's business but a number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from stagewright.algebra.size import Size, size
from stagewright.blocks.builder import Builder
from stagewright.blocks.mlp import Matrices, feed_forward
from stagewright.graph.make import (
    add,
    apply,
    cast,
    combine,
    dispatch,
    einsum,
    elementwise,
    elementwise_whole,
    identity,
    own_experts,
    row_gates,
    weigh,
)
from stagewright.graph.node import Binding, Node

COUNTS = "splits"
"""Output of a layer whose ranks exchange the counts of tokens before dispatch."""
OWN: dict[str, Any] = {"scope": "mlp.moe"}
SHARED: dict[str, Any] = {"scope": "mlp.moe.shared"}

COUNTED: dict[str, tuple[str, tuple[Size, ...]]] = {
    "aux_loss": ("(ji)sE->jE", (size("dp_parts"), size("E"))),
    "seq_aux_loss": ("bsE->bE", (size("B"), size("E"))),
    "global_aux_loss": ("bsE->E", (size("E"),)),
}
"""By load balancing loss, what the copies of each expert are counted over (a data-parallel rank's
microbatch, a sequence, or all tokens), and the shape of the counts."""


def experts(b: Builder, h: Node, scored: Node | None = None) -> Node:
    """Routed experts, and shared ones that every token goes to; the router reads `scored`, or h."""
    c = b.config
    routed = h
    if b.recipe.inference:  # a place to gather the tokens of ranks that split each expert
        routed = identity(h, h.name, binding=Binding(like="routed"))
        scored = scored and identity(scored, scored.name, binding=Binding(like="routed"))
    gates = _router(b, routed if scored is None else scored)
    if c.expert_scale:
        scale = b.param("w_expert_scale", "E", **OWN)
        gates = apply("times", "bse,e->bse", gates, scale, name="gates_scaled", **OWN)
    exchange = DISPATCHERS[b.recipe.experts.dispatcher]
    rows = routed
    if c.moe_latent_size:
        into = b.weight("w_latent", "M", "Latent", scope="mlp")
        rows = b.linear("bsm,ml->bsl", routed, into, "latent_tokens", **OWN)
    out = exchange(b, rows, gates)
    if c.moe_latent_size:
        outof = b.weight("w_latent_out", "Latent", "M", scope="mlp")
        out = b.linear("bsl,lm->bsm", out, outof, "moe_wide", **OWN)
    if c.shared_ffn_hidden_size:
        matrices = Matrices("ws_up", "ws_gate", "ws_down", ("M", "Y/tp"), "bsm", "bsy")
        shared = feed_forward(b, h, matrices, **SHARED)
        if not b.recipe.inference:  # engines sum it over tp with the results of routed experts
            shared = identity(shared, "mlp_reduced", **SHARED)
        if c.shared_expert_gate:
            w = b.param("w_shared_gate", "M", **SHARED)
            score = einsum("bsm,m->bs", h, w, name="shared_gate", **SHARED)
            shared = weigh(shared, b.act(score, "sigmoid"), name="shared_weighed", **SHARED)
        out = add(out, shared, name="branch", **OWN)
    return identity(out, "mlp_reduced", **OWN)


def _router(b: Builder, h: Node) -> Node:
    """Each token's weights of its experts, 0 for all others, [B, S, E]."""
    c, r = b.config, b.recipe.experts
    w = b.param("w_router", "M", "E", **OWN)
    if r.router_fp32:
        h, w = cast(h, "fp32", name="router_in", **OWN), cast(w, "fp32", name="w_router", **OWN)
    logits = einsum("bsm,me->bse", h, w, name="router", **OWN)
    if c.router_bias:
        logits = b.bias(logits, "b_router", "E")
    if r.z_loss:
        logits = elementwise_whole("z_loss", logits, coeff=r.z_loss, name="z_loss")
    bias = [b.buffer("router_bias", "E", **OWN)] if r.expert_bias else []
    held = _held(b)
    spec = ",".join(["bsE", "E"][: 1 + len(bias)]) + f"->bs{held}"
    chosen: dict[str, Any] = {"fn": c.router, "top_k": c.top_k, "norm": c.norm_topk_prob}
    whose = (*logits.shape[:2], size(held))
    gates = apply("topk", spec, logits, *bias, out=whose, name="gates", **chosen)
    for each in bias:
        counts = apply("count", "bsE->E", gates, dtype="fp32", name="tokens_per_expert", **OWN)
        b.counted[each.name] = counts
    if r.exchange_counts:
        out = (size("parts"), size("E"))
        counts = apply("splits", "bsE->oE", gates, out=out, dtype="int64", name="splits", **OWN)
        b.extra[COUNTS] = identity(counts, "splits_known")
    return _balanced(b, logits, gates) if r.aux_loss else gates


def _balanced(b: Builder, logits: Node, gates: Node) -> Node:
    """The gates; the gradient of a load balancing loss is added to theirs in backward."""
    r = b.recipe.experts
    spec, out = COUNTED[r.load_balancing_type]
    counts = apply("count", spec, gates, out=out, dtype="int64", name="balance_counts", **OWN)
    scores = elementwise_whole("scores", logits, fn=b.config.router, name="scores")
    tokens, of = spec.split("->")
    attrs: dict[str, Any] = {"coeff": r.aux_loss, "top_k": b.config.top_k, "name": "aux_loss"}
    return apply("aux_loss", f"{tokens},{tokens},{of}->{tokens}", gates, scores, counts, **attrs)


def _held(b: Builder) -> str:
    """The dim of experts that ranks hold: H, with the redundant ones, or E."""
    served = b.recipe.inference
    return "H" if served and served.redundant_experts else "E"


def _width(b: Builder) -> str:
    """The dim of the experts' rows: the model's width, or that of the narrower space."""
    return "Latent" if b.config.moe_latent_size else "M"


def _exchanged(b: Builder, h: Node, gates: Node) -> Node:
    """Copies of tokens go to their experts and results come back: two all-to-alls over ep.

    The gates weigh rows before they are sent, or results after they are back, or the experts' inner
    values: then the gates are sent to the experts, too.
    """
    served = b.recipe.inference
    where = b.recipe.experts.apply_probs
    if served and where == "experts":
        where = "output"  # as in vLLM and DeepEP
    attrs: dict[str, Any] = {**OWN, "top_k": b.config.top_k}
    held = b.recipe.stored("we_up", "mlp")
    sent = b.lowered(h, held) if held and held.product == "fp8" else h
    rows = dispatch(sent, gates, size("R"), weighted=where == "input", name="permuted", **attrs)
    rows = identity(identity(rows, "dispatched"), "expert_in")
    probs = going = None
    if where == "experts":
        probs = identity(row_gates(gates, size("R"), name="probs", **attrs), "probs")
        going = identity(probs, "probs_dispatched")
        probs = identity(going, "probs_in")
    out = identity(_experts(b, rows, probs), "expert_out")
    if b.config.mlp_bias:
        out = _biased(b, out, going)
    out = identity(out, "returned")
    return combine(out, gates, weighted=where == "output", name="moe_out", **attrs)


def _gathered(b: Builder, h: Node, gates: Node) -> Node:
    """Every rank gathers the tokens of all ranks that share the experts; results are summed."""
    attrs: dict[str, Any] = {**OWN, "top_k": b.config.top_k}
    routes = elementwise("routes", gates, dtype="uint8", name="routes", **OWN)
    routes = own_experts(identity(routes, "routes_known"), name="routes_here", **OWN)
    known = own_experts(identity(gates, "gates_known"), name="gates_here", **OWN)
    rows = dispatch(identity(h, "routed", **OWN), routes, size("R"), name="permuted", **attrs)
    rows = identity(rows, "expert_in")
    probs = identity(row_gates(known, size("R"), name="probs", **attrs), "probs_in")
    out = identity(_experts(b, rows, probs), "expert_out")
    if b.config.mlp_bias:
        out = _biased(b, out, probs)
    return identity(combine(out, routes, name="moe_out", **attrs), "moe_reduced")


def _experts(b: Builder, rows: Node, probs: Node | None) -> Node:
    """The products of the experts, [E, R, M], their inner values weighed by `probs`."""

    def weighed(a: Node) -> Node:
        return weigh(a, probs, name="weighed", scope=a.scope) if probs else a

    dims = (f"{_held(b)}/ep", _width(b), "X/etp")
    matrices = Matrices("we_up", "we_gate", "we_down", dims, "erm", "erx", b.config.mlp_bias)
    attrs = {"touched": size("touched")} if b.recipe.inference else None
    return feed_forward(b, rows, matrices, scope="mlp.moe.experts", weigh=weighed, attrs=attrs)


def _biased(b: Builder, out: Node, probs: Node | None) -> Node:
    """Results of experts plus their bias, which `probs` weighs as it weighs the results
    (Megatron-LM's `TEGroupedMLP._apply_bias`)."""
    if b.recipe.inference:  # of ranks that split an expert the first one adds it, as in vLLM
        return b.bias(out, "be_down", f"{_held(b)}/ep", f"{_width(b)} @ 1/etp")
    if probs is None:
        return b.bias(out, "be_down", f"{_held(b)}/ep", _width(b))
    bias = b.param("be_down", f"{_held(b)}/ep", _width(b), **OWN)
    return add(out, einsum("er,em->erm", probs, bias, name="bias", **OWN), name="biased", **OWN)


DISPATCHERS: Mapping[str, Callable[[Builder, Node, Node], Node]] = {
    "alltoall": _exchanged,
    "allgather": _gathered,
}
"""Computation between the gates and the sum of experts' results, by
`moe_token_dispatcher_type`; the layouts of the same rows are in `parallel.activations`."""
