"""How many tokens each expert of an inference step computes, and how many experts have any.

Tokens are spread evenly unless `expert_load` says otherwise. The ranks of expert parallelism wait
for each other after every layer with experts, so that each is then taken to have the work of the
busiest one: its mean over layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Self

import numpy as np

from stagewright.algebra.layout import Mesh
from stagewright.algebra.size import Size, size
from stagewright.arrays import Float
from stagewright.model.config import ModelConfig
from stagewright.model.layers import ROUTED
from stagewright.parallel.plan import Plan
from stagewright.run.expert_load import lines_of
from stagewright.run.settings import Run

PARTS = 2**32
"""Shares are whole numbers of such parts, equal on all machines."""


@dataclass(frozen=True, eq=False)
class BusiestRanks:
    """The experts of the rank that gets most copies of tokens in each layer, by `expert_load`."""

    chosen: Sequence[Float]
    """By layer the share of tokens that choose each of the rank's experts, 0 to 1."""
    top_k: int

    @classmethod
    def of(cls, run: Run, model: ModelConfig, mesh: Mesh, plan: Plan) -> Self | None:
        """Those of a resolved run; None: all experts get as many tokens."""
        if run.expert_load is None:
            return None
        layers = [i for i in range(model.num_layers) if model.layer(i).mlp in ROUTED]
        ranks = mesh.size(*plan.expert)
        chosen: list[Float] = []
        for line in lines_of(run.expert_load, model, layers, ranks):
            of_rank = np.array(line).reshape(ranks, -1) * (model.top_k / sum(line))
            chosen.append(np.minimum(of_rank[of_rank.sum(axis=1).argmax()], 1.0))
        return cls(chosen, model.top_k)

    def rows(self, ranks: int) -> Fraction:
        """Copies that the busiest of the ranks gets, over the mean of all."""
        mean = sum(float(of.sum()) for of in self.chosen) / len(self.chosen) / self.top_k
        return _in_parts(ranks * mean)

    def touched(self, tokens: float) -> float:
        """Share of the rank's experts that any of so many tokens chooses, 0 to 1."""
        none = [np.mean((1 - of) ** tokens) for of in self.chosen]
        return float(1 - np.mean(none))


def mean_expert_sizes(
    run: Run,
    model: ModelConfig,
    mesh: Mesh,
    plan: Plan,
    routed: int,
    busiest: BusiestRanks | None = None,
) -> dict[Size, Fraction]:
    """Means of the sizes that routing decides, for `routed` tokens on all ranks.

    `R` is the number of rows of each expert, `touched` the number of experts with any
    token. A token leaves out an expert with probability p = 1 - top_k / experts, and n tokens all
    leave it out with probability p^n. Tokens are spread evenly, or as on the `busiest` ranks.
    """
    if not model.num_experts:
        return {}
    experts = model.num_experts + run.num_redundant_experts
    # Ranks that hold the same experts share the tokens; those that split an expert have the same.
    held = plan.expert + plan.expert_tensor
    tokens = routed / mesh.size(*(a for a in plan.tokens if a not in held))
    share = Fraction(1)
    rows = routed * model.top_k * Fraction(1, experts)
    if busiest is not None:
        share = _in_parts(busiest.touched(tokens))
        rows = rows * busiest.rows(mesh.size(*plan.expert))
    elif model.top_k < experts:
        none = math.log1p(-model.top_k / experts)
        share = _in_parts(-math.expm1(tokens * none))
    return {size("R"): rows, size("touched"): experts * share}


def _in_parts(share: float) -> Fraction:
    """The share as a whole number of parts, of which `PARTS` are 1."""
    return Fraction(round(share * PARTS), PARTS)
