"""A layer: norms and residual sums around the mixer and MLP that `model.layers.Layer` names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from stagewright.algebra.size import Size
from stagewright.blocks.attention import attention
from stagewright.blocks.builder import Block, Builder, renamed, stream
from stagewright.blocks.experts import experts
from stagewright.blocks.families.drafts import beside_embedded
from stagewright.blocks.families.shared import with_shared
from stagewright.blocks.families.streams import read as read_streams
from stagewright.blocks.families.streams import stream_dims
from stagewright.blocks.families.streams import write as write_streams
from stagewright.blocks.mlp import mlp
from stagewright.blocks.recipe import Recipe
from stagewright.blocks.sizes import own_numbers
from stagewright.blocks.ssm import gated_delta, kimi_delta, lightning, mamba, mamba2
from stagewright.blocks.text.modules import bare, chained, module_named, part_of_layer
from stagewright.blocks.training import finish
from stagewright.graph.make import add, identity
from stagewright.graph.node import Node
from stagewright.model.config import ModelConfig
from stagewright.model.layers import ATTENTIONS, SIDE_BY_SIDE, Layer

Branch = Callable[[Builder, Node], Node]  # [B, S, M] -> [B, S, M]

_MIXERS: dict[str, Branch] = {
    **{name: partial(attention, mixer=name) for name in sorted(ATTENTIONS)},
    "mamba": mamba,
    "mamba2": mamba2,
    "lightning": lightning,
    "gated_delta": gated_delta,
    "kimi_delta": kimi_delta,
}


def _side_by_side(b: Builder, h: Node, kinds: Iterable[str]) -> Node:
    """The sum of several mixers' results on one input, after each result was reduced over tp.

    The parallel layers of Megatron-Bridge and vLLM's FalconH1ParallelHybrid do so.
    """
    return add(*(_MIXERS[kind](b, h) for kind in kinds), scope="attention", name="side_by_side")


MIXERS: dict[str, Branch] = _MIXERS | {
    name: partial(_side_by_side, kinds=kinds) for name, kinds in SIDE_BY_SIDE.items()
}
"""Mixers, which move information between positions, by `Layer.mixer`."""

FEED_FORWARDS: dict[str, Branch] = {"dense": mlp, "experts": experts, "dense+experts": experts}
"""MLPs, which work on each position by itself, by `Layer.mlp`."""


def layer(config: ModelConfig, recipe: Recipe, kind: Layer) -> Block:
    """One layer with its residual sums; a part called "none" is left out, norms and all."""
    if kind.sizes:
        differing = own_numbers(config, kind.sizes)
        block = layer(config.with_own_sizes(kind.sizes), recipe, kind._replace(sizes=0))

        def rename(symbol: Size) -> Size:
            return symbol.subs({s: f"{s}_of{kind.sizes}" for s in symbol.symbols if s in differing})

        return renamed(block, block.name, rename)
    if kind.module:
        return chained(config, recipe, kind)
    b = Builder(config, recipe)
    if config.bare:
        return bare(b, module_named(config, kind.mixer))
    x = stream(stream_dims(config.residual_streams), b.dtype)
    return finish("layer", b, x, body(b, x, kind))


def body(b: Builder, x: Node, kind: Layer, *, cross: Branch | None = None) -> Node:
    """A layer's new residual stream [B, S, M], or streams [B, S, Streams, M]; `cross` is attention
    to another sequence, which follows the mixer."""
    config = b.config
    modules = {m.name: partial(part_of_layer, m) for m in config.modules}
    mixer, mlp_ = (MIXERS | modules).get(kind.mixer), (FEED_FORWARDS | modules).get(kind.mlp)
    place = config.norm_placement
    if config.parallel_block:
        h = b.norm(x, "attn_norm", scope="attention")
        h2 = h if config.parallel_norms == 1 else b.norm(x, "mlp_norm", scope="mlp")
        parts = [part(b, x) for part, x in ((mixer, h), (mlp_, h2)) if part is not None]
        mixed = add(*parts, scope="mlp", name="mixed")
        y = add(x, b.dropout(identity(mixed, "branch"), config.hidden_dropout), name="y")
        return identity(y, "y")
    y = x
    branches = (
        ("attn", "attention", mixer),
        ("cross", "attention", cross),
        ("mlp", "mlp", mlp_),
    )
    for norm, scope, part in branches:
        if part is None:
            continue
        read, weights = read_streams(b, y, norm, scope)
        read = with_shared(b, read, kind.block) if kind.block and part is mixer else read
        h = read if place in ("post", "output") else b.norm(read, f"{norm}_norm", scope=scope)
        if part is mixer and config.draft_head.startswith("eagle3"):
            h = beside_embedded(b, h)
        mixture = norm == "mlp" and kind.mlp == "dense+experts"
        out = _beside(b, read, h) if mixture else part(b, h)
        out = identity(out, "branch", scope=scope)
        if place == "sandwich":
            out = b.norm(out, f"{norm}_post_norm", scope=scope)
        if place == "output":
            out = b.norm(out, f"{norm}_norm", scope=scope)
        y = write_streams(b, y, b.dropout(out, config.hidden_dropout), weights, norm, scope)
        if place == "post":
            y = b.norm(y, f"{norm}_norm", scope=scope)
    return identity(y, "y")


def _beside(b: Builder, x: Node, h: Node) -> Node:
    """Experts beside a dense MLP, each with norms of its own (Gemma 4's mixture).

    `x` is the residual stream, `h` what the MLP reads of it; the router reads the stream by itself.
    """
    scored = b.norm(x, "router_norm", scope="mlp")
    routed = experts(b, b.norm(x, "experts_norm", scope="mlp"), scored)
    routed = b.norm(routed, "experts_post_norm", scope="mlp")
    dense = b.norm(mlp(b, h), "dense_post_norm", scope="mlp")
    return add(dense, routed, name="dense_and_experts", scope="mlp")
