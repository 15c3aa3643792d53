"""The MLP of a layer, over tokens or over the rows of experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stagewright.blocks.builder import Builder
from stagewright.graph.make import elementwise, identity
from stagewright.graph.node import Node


@dataclass(frozen=True, slots=True)
class Matrices:
    """The weights of an MLP by name, and the indices of what they multiply."""

    up: str
    gate: str
    down: str
    dims: tuple[str, ...]
    """Dims of up and gate, as declared: the model's width and the inner one; experts lead."""
    rows: str
    """Indices of the MLP's input and result, `bsm`; of experts' `erm`."""
    inner: str
    """Indices of what is between up and down, `bsf`."""
    biased: bool = False
    """Up and gate have biases; that of down is added where ranks' results are summed."""


def mlp(b: Builder, h: Node) -> Node:
    """Up and down, or gate, up and down (arXiv 2002.05202)."""
    c = b.config
    matrices = Matrices("w_up", "w_gate", "w_down", ("M", "F/tp"), "bsm", "bsf", c.mlp_bias)
    out = feed_forward(b, h, matrices, scope="mlp.dense")
    if not c.parallel_block:
        out = identity(out, "mlp_reduced")
    return b.bias(out, "b_down", "M") if c.mlp_bias else out


def feed_forward(
    b: Builder,
    h: Node,
    matrices: Matrices,
    *,
    scope: str,
    weigh: Callable[[Node], Node] = lambda a: a,
    attrs: Mapping[str, Any] | None = None,
) -> Node:
    """The matrix products of an MLP over the rows of `h`, and the activation between them.

    `scope` names the module; `weigh` is applied to the activation's result; `attrs` are attributes
    of all products.
    """
    c = b.config
    rows, inner = matrices.rows, matrices.inner
    lead = inner[0] if len(matrices.dims) == 3 else ""  # experts have weights of their own
    into = f"{rows},{lead}{rows[-1]}{inner[-1]}->{inner}"
    wide: dict[str, Node] = {}
    for part_ in ("up", "gate") if c.gated else ("up",):
        name = matrices.up if part_ == "up" else matrices.gate
        w = b.weight(name, *matrices.dims, scope="mlp")
        joint = matrices.up if c.gated else ""
        wide[part_] = b.linear(into, h, w, part_, scope=scope, joint=joint, **(attrs or {}))
        if b.block and c.shared_blocks and c.shared_blocks.adapter_rank:
            wide[part_] = b.adapted(wide[part_], h, "mlp_narrow", part_, "bsr,rf->bsf", "F/tp")
        if matrices.biased:
            bias = "b" + name.removeprefix("w")
            wide[part_] = b.bias(wide[part_], bias, *matrices.dims[:-2], matrices.dims[-1])
    if c.gated:
        act_attrs: dict[str, Any] = {"fn": c.activation, "name": "act", "scope": scope}
        if c.glu_linear_offset:
            act_attrs["offset"] = c.glu_linear_offset
        if c.activation_func_clamp_value is not None:
            act_attrs["clamp"] = c.activation_func_clamp_value
        if b.recipe.operators.eager and act_attrs.keys() == {"fn", "name", "scope"}:
            a = b.act(wide["gate"], c.activation)
            # Autograd keeps both factors until the gradients of both are made.
            kept: dict[str, Any] = {"name": "act", "backward_temporaries": 1}
            a = elementwise("times", a, wide["up"], scope=scope, **kept)
        else:
            a = elementwise("glu", wide["gate"], wide["up"], **act_attrs)
    else:
        a = elementwise("act", wide["up"], fn=c.activation, name="act", scope=scope)
    w = b.weight(
        matrices.down, *matrices.dims[:-2], matrices.dims[-1], matrices.dims[-2], scope="mlp"
    )
    outof = f"{inner},{lead}{inner[-1]}{rows[-1]}->{rows}"
    return b.linear(outof, weigh(a), w, "mlp_out", scope=scope, **(attrs or {}))
