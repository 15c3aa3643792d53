"""Ops once per step: gradients of copies, norms of gradients, optimizers."""

from __future__ import annotations

from typing import Any

import numpy as np

from stagewright.graph.ops.shared import Context, first, same
from stagewright.graph.table import Op, need


def norm2(ctx: Context, x: Any) -> Any:
    return (x * x).sum() * float(ctx.leads(ctx["alone"]))


def bias_update(ctx: Context, counts: Any, bias: Any) -> Any:
    """More for experts that got less than others (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""
    return bias + 1e-3 * np.sign(counts.mean() - counts)


_UPDATE = {"updates": need(int)}  # how many of its last operands it rewrites besides its result

ROWS: dict[str, Op] = {
    "tie": Op(same, linear=True, view=True),
    "accumulate": Op(same, linear=True, fuses=True, rewrites=True),
    "norm2": Op(norm2, flops=2, fuses=True, attrs={"alone": need(tuple)}),
    "adamw": Op(first, flops=14, attrs=_UPDATE, moments=("exp_avg", "exp_avg_sq")),
    "sgd": Op(first, flops=4, attrs=_UPDATE, moments=("momentum",)),
    "bias_update": Op(bias_update, flops=4),
}
