"""Number of parameters of a model."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import lru_cache

from stagewright.lower.blocks import build_block
from stagewright.lower.recipe import recipe_of, sizes_of
from stagewright.lower.variants import place_blocks, tie_tables
from stagewright.model.config import ModelConfig
from stagewright.run.settings import Run
from stagewright.schedule.schedules import make as make_order


def published_sizes(model: ModelConfig) -> dict[str, int]:
    """Sizes of a model's parameters as published: without padding."""
    seq_length = model.max_position_embeddings if model.vision else 1
    run = Run(model=model.name).model_copy(update={"seq_length": seq_length})
    return sizes_of(run, model)


@lru_cache(maxsize=16)
def parameters(model: ModelConfig) -> tuple[int, int]:
    """Number of parameters as published: all, and those that one token uses.

    Without padding; tied weights count once. Of a layer's experts, a token uses `top_k`.
    """
    run, sizes = Run(model=model.name), published_sizes(model)
    one_stage = run.model_copy(update={"layers_per_stage": (model.depth,)})
    (stage,) = tie_tables(place_blocks(one_stage, model), make_order("1f1b", 1, 1, 1), model)
    recipe = replace(recipe_of(run, model), parameters_alone=True)
    total = active = 0
    for variant, count in Counter(variant for variant, _ in stage).items():
        graph = build_block(variant, model, recipe).graph
        for n in graph:
            number = count * math.prod(d.value(sizes) for d in n.shape)
            total += number
            routed = n.binding.param is not None and n.binding.param.of_expert
            active += number * model.top_k // model.num_experts if routed else number
    return total, active
