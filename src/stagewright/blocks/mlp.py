"""What follows attention: an MLP, over tokens or over the rows of experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from stagewright.blocks.builder import Builder
from stagewright.graph.make import elementwise, identity
from stagewright.graph.node import Node


def mlp(b: Builder, h: Node) -> Node:
    """Up and down, or gate, up and down (arXiv 2002.05202)."""
    c = b.config
    names = {"up": "w_up", "gate": "w_gate", "down": "w_down"}
    out = feed_forward(b, h, "bsm", "bsf", ("M", "F/tp"), names, biased=c.mlp_bias)
    if not c.parallel_block:
        out = identity(out, "mlp_reduced")
    return b.bias(out, "b_down", "M") if c.mlp_bias else out


def feed_forward(
    b: Builder,
    h: Node,
    rows: str,
    inner: str,
    dims: tuple[str, ...],
    names: Mapping[str, str],
    *,
    biased: bool = False,
    weigh: Callable[[Node], Node] = lambda a: a,
    more: Mapping[str, Any] | None = None,
) -> Node:
    """The products of an MLP over any rows; `dims` are those of a weight that leads in.

    `weigh` is done to what is between them; the products have the attributes `more`.
    """
    c = b.config
    scope = "mlp"
    lead = inner[0] if len(dims) == 3 else ""  # experts have weights of their own
    into = f"{rows},{lead}{rows[-1]}{inner[-1]}->{inner}"
    wide: dict[str, Node] = {}
    for part_ in ("up", "gate") if c.gated else ("up",):
        w = b.weight(names[part_], *dims, scope=scope)
        joint = names["up"] if c.gated else ""
        wide[part_] = b.linear(into, h, w, part_, scope=scope, joint=joint, **(more or {}))
        if b.block and c.shared_blocks and c.shared_blocks.adapter_rank:
            wide[part_] = b.adapted(wide[part_], h, "mlp_narrow", part_, "bsr,rf->bsf", "F/tp")
        if biased:
            name = "b" + names[part_].removeprefix("w")
            wide[part_] = b.bias(wide[part_], name, *dims[:-2], dims[-1])
    if c.gated:
        own: dict[str, Any] = {"fn": c.activation, "name": "act", "scope": scope}
        if c.glu_linear_offset:
            own["offset"] = c.glu_linear_offset
        if c.activation_func_clamp_value is not None:
            own["clamp"] = c.activation_func_clamp_value
        if b.recipe.eager and own.keys() == {"fn", "name", "scope"}:
            a = b.act(wide["gate"], c.activation)
            # Autograd keeps both factors until it has made the gradients of both.
            kept: dict[str, Any] = {"name": "act", "backward_temporaries": 1}
            a = elementwise("times", a, wide["up"], scope=scope, **kept)
        else:
            a = elementwise("glu", wide["gate"], wide["up"], **own)
    else:
        a = elementwise("act", wide["up"], fn=c.activation, name="act", scope=scope)
    w = b.weight(names["down"], *dims[:-2], dims[-1], dims[-2], scope=scope)
    outof = f"{inner},{lead}{inner[-1]}{rows[-1]}->{rows}"
    return b.linear(outof, weigh(a), w, "mlp_out", scope=scope, **(more or {}))
