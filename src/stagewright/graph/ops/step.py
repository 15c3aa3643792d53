"""Ops once per step: gradients of copies, norms of gradients, optimizers."""

from __future__ import annotations

from stagewright.graph.reference import shared
from stagewright.graph.reference import step as meaning
from stagewright.graph.table import Op, need

_UPDATE = {"updates": need(int)}  # how many of its last operands it rewrites besides its result

ROWS: dict[str, Op] = {
    "tie": Op(shared.same, linear=True, view=True),
    "accumulate": Op(shared.same, linear=True, fuses=True, rewrites=True),
    "norm2": Op(meaning.norm2, flops=2, fuses=True, attrs={"alone": need(tuple)}),
    "adamw": Op(shared.first, flops=14, attrs=_UPDATE, moments=("exp_avg", "exp_avg_sq")),
    "sgd": Op(shared.first, flops=4, attrs=_UPDATE, moments=("momentum",)),
    "bias_update": Op(meaning.bias_update, flops=4),
}
