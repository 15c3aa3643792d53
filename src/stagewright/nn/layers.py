"""A layer: norms, residual sums, and in between what `models.Layer` names."""

from __future__ import annotations

from collections.abc import Callable

from stagewright.ir import Node
from stagewright.models import Layer, ModelConfig
from stagewright.nn.attention import global_attention, local_attention
from stagewright.nn.builder import Builder, Recipe
from stagewright.nn.mlp import experts, mlp
from stagewright.nn.training import Block, finish
from stagewright.ops import add, identity, leaf

Part = Callable[[Builder, Node], Node]  # [B, S, M] -> [B, S, M]

MIXERS: dict[str, Part] = {"global": global_attention, "local": local_attention}
"""What moves information between positions, by `Layer.mixer`."""

FEED_FORWARDS: dict[str, Part] = {"dense": mlp, "experts": experts}
"""What works on each position by itself, by `Layer.mlp`."""


def layer(config: ModelConfig, recipe: Recipe, what: Layer) -> Block:
    """One layer with its residual sums; a part called "none" is left out, norms and all."""
    b = Builder(config, recipe)
    x = leaf("input", ("B", "S", "M"), b.dtype, "x", role="input")
    place = config.norm_placement
    if config.parallel_block:
        h = b.norm(x, "attn_norm", scope="attention")
        h2 = h if config.parallel_norms == 1 else b.norm(x, "mlp_norm", scope="mlp")
        parts = MIXERS[what.mixer](b, h), FEED_FORWARDS[what.mlp](b, h2)
        mixed = add(*parts, scope="mlp", name="mixed")
        y = add(x, b.dropout(identity(mixed, "branch"), config.hidden_dropout), name="y")
        return finish("layer", b, x, identity(y, "y"))
    y = x
    branches = (
        ("attn", "attention", MIXERS.get(what.mixer)),
        ("mlp", "mlp", FEED_FORWARDS.get(what.mlp)),
    )
    for norm, scope, part in branches:
        if part is None:
            continue
        h = y if place == "post" else b.norm(y, f"{norm}_norm", scope=scope)
        out = identity(part(b, h), "branch", scope=scope)
        if place == "sandwich":
            out = b.norm(out, f"{norm}_post_norm", scope=scope)
        y = add(y, b.dropout(out, config.hidden_dropout), name=f"{norm}_residual", scope=scope)
        if place == "post":
            y = b.norm(y, f"{norm}_norm", scope=scope)
    return finish("layer", b, x, identity(y, "y"))
