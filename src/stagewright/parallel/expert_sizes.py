"""How many tokens each expert of an inference step computes, and how many experts have any."""

from __future__ import annotations

import math
from fractions import Fraction

from stagewright.algebra.size import Size, size
from stagewright.model.config import ModelConfig
from stagewright.parallel.plan import Plan
from stagewright.run.settings import Run
from stagewright.varying import in_steps


def mean_expert_sizes(
    run: Run, model: ModelConfig, plan: Plan, routed: int
) -> dict[Size, Fraction]:
    """Means of the sizes that routing decides, for `routed` tokens on all ranks, spread evenly.

    `R` is the number of rows of each expert, `touched` the number of experts with any
    token. A token leaves out an expert with probability p = 1 - top_k / experts, and n tokens all
    leave it out with probability p^n.
    """
    if not model.num_experts:
        return {}
    experts = model.num_experts + run.num_redundant_experts
    # Ranks that hold the same experts share the tokens; those that split an expert have the same.
    held = plan.expert + plan.expert_tensor
    tokens = routed / plan.mesh.size(*(a for a in plan.tokens if a not in held))
    share = Fraction(1)
    if model.top_k < experts:
        none = math.log1p(-model.top_k / experts)
        share = in_steps(lambda n: -math.expm1(n * none), tokens, 2**32)  # equal on all machines
    rows = routed * model.top_k * Fraction(1, experts)
    return {size("R"): rows, size("touched"): experts * share}
