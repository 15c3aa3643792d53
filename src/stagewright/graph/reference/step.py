"""Meaning of ops once per step, in numpy: norms of gradients, biases of experts."""

from __future__ import annotations

from typing import Any

import numpy as np

from stagewright.graph.reference.shared import Context


def norm2(ctx: Context, x: Any) -> Any:
    return (x * x).sum() * float(ctx.leads(ctx["alone"]))


def bias_update(ctx: Context, counts: Any, bias: Any) -> Any:
    """More for experts that got less than others (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""
    return bias + 1e-3 * np.sign(counts.mean() - counts)
