"""Single-device model code: the blocks of a model, each with gradients and optimizer step.

Nothing here knows of parallelism. Names of values are what a strategy may speak about. A model is a
chain of blocks that meet in the residual stream; blocks of equal shape are built once, however many
layers use them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from stagewright.blocks.builder import PRECISIONS, Block, Experts, Inference, Precision, Recipe, Tie
from stagewright.blocks.diffusion import conditioned_layer, denoiser, noisy_patches
from stagewright.blocks.encoder_decoder import (
    decoder_layer,
    encoder_end,
    encoder_layer,
    source_embedding,
)
from stagewright.blocks.ends import ORIGINAL, embedding, head, tied
from stagewright.blocks.layers import layer
from stagewright.blocks.mtp import final_norm, mtp, mtp_name
from stagewright.blocks.recommendation import ranking
from stagewright.blocks.shared import shared_tables
from stagewright.blocks.vision import classifier, patches, projector, tower
from stagewright.model.config import Diffusion, Layer, ModelConfig, Recommendation, Vision

__all__ = [
    "BLOCKS", "MADE_ON_EACH_STAGE", "PRECISIONS", "Block", "Experts", "Inference", "Precision",
    "Recipe", "Tie", "chain", "sizes", "tables", "uses",
]  # fmt: skip

Make = Callable[[ModelConfig, Recipe, Layer], Block]


def _in_tower(make: Make) -> Make:
    def made(config: ModelConfig, recipe: Recipe, what: Layer) -> Block:
        assert config.tower is not None
        return tower(make(config.tower, recipe, what))

    return made


BLOCKS: dict[str, Make] = {
    "embedding": lambda config, recipe, _: embedding(config, recipe),
    "layer": layer,
    "source_embedding": source_embedding,
    "encoder_layer": encoder_layer,
    "encoder_end": encoder_end,
    "decoder_layer": decoder_layer,
    "final_norm": final_norm,
    "mtp": mtp,
    "head": lambda config, recipe, _: head(config, recipe),
    "patches": patches,
    "classifier": classifier,
    "tower.patches": _in_tower(patches),
    "tower.layer": _in_tower(layer),
    "projector": projector,
    "noisy_patches": noisy_patches,
    "conditioned_layer": conditioned_layer,
    "denoiser": denoiser,
    "ranking": ranking,
}
"""What a model is a chain of, by name."""


class Part(NamedTuple):
    """A block in its place: which layer it is, counted through the model, or -1."""

    block: str
    number: int = -1
    layer: Layer = Layer()
    behind: bool = False
    """What is no layer goes with the layer before it, and not with the one after."""


def chain(config: ModelConfig) -> list[Part]:
    """The blocks of a model in order."""
    if config.recommendation:
        return [Part("ranking", 0)]
    tower = config.tower
    first = tower.num_layers if tower else 0
    if config.encoder_num_layers:
        return _encoder_decoder(config)
    layers = [Part("layer", first + i, config.layer(i)) for i in range(config.num_layers)]
    if config.bare:
        return layers
    if config.diffusion:
        layers = [part._replace(block="conditioned_layer") for part in layers]
        return [Part("noisy_patches"), *layers, Part("denoiser")]
    if config.vision:
        return [Part("patches"), *layers, *([Part("classifier")] if config.vision.classes else [])]
    begin, end = [Part("embedding")], [Part("head")]
    if config.mtp_num_layers:
        kind = config.layer(config.num_layers - 1)
        ahead = [kind._replace(ahead=k + 1) for k in range(config.mtp_num_layers)]
        end = [Part("final_norm", behind=True), *(Part("mtp", layer=each) for each in ahead), *end]
    if tower:
        towers = [part._replace(block=f"tower.{part.block}") for part in chain(tower)]
        begin = [*towers, Part("projector")]
    return [*begin, *layers, *end]


def _encoder_decoder(config: ModelConfig) -> list[Part]:
    """The encoder, and then the decoder: pipeline stages of either, or of both."""
    first = config.encoder_num_layers
    encoder = [Part("encoder_layer", i, Layer()) for i in range(first)]
    decoder = [Part("decoder_layer", first + i, config.layer(i)) for i in range(config.num_layers)]
    begin, between = [Part("source_embedding")], [Part("encoder_end", behind=True)]
    return [*begin, *encoder, *between, Part("embedding"), *decoder, Part("head")]


MADE_ON_EACH_STAGE = frozenset({"encoder_bias", "decoder_bias"})
"""What is handed on, but not from stage to stage."""


def uses(config: ModelConfig, block: str, layer: Layer) -> tuple[str, ...]:
    """What a block is handed besides the stream."""
    if block == "mtp":
        return (mtp_name(layer.ahead - 1),) if layer.ahead > 1 else ()
    if block in ("encoder_layer", "decoder_layer"):
        bias = (block.replace("layer", "bias"),) if config.position == "relative" else ()
        return bias if block == "encoder_layer" else ("memory", *bias)
    if block == "head":
        return tuple(mtp_name(k + 1) for k in range(config.mtp_num_layers))
    return (ORIGINAL,) if layer.block else ()


def tables(config: ModelConfig, block: str, layer: Layer, begins: frozenset[str]) -> list[str]:
    """Parameters of a block that are one with those of other blocks."""
    held = {
        **dict.fromkeys(("embedding", "projector", "source_embedding"), tied(config)),
        "mtp": "wte",
        "head": config.tied_embeddings,
    }
    if layer.block:
        return shared_tables(config, layer)
    biases = [f"{name.removesuffix('_bias')}.relative_bias" for name in sorted(begins)]
    return ["wte"] if held.get(block) else biases


def sizes(config: ModelConfig) -> dict[str, int]:
    """The numbers behind the dims of a model's blocks, but for those that a run decides.

    B sequences, S positions, V the padded vocabulary and R token copies per expert are a run's; so
    are the data-parallel parts of B, `dp_parts`, and all parts of B x S, `parts`.
    """
    found = {
        "M": config.hidden_size,
        "A": config.num_attention_heads,
        "G": config.num_query_groups,  # key-value heads
        "D": config.kv_channels,  # width of a head
        "F": config.ffn_hidden_size,
        "P": config.max_position_embeddings + config.position_offset,
        "T": config.token_types,
        "W": config.embedding_size or config.hidden_size,
        "E": config.num_experts,
        "X": config.moe_ffn_hidden_size,
        "Y": config.shared_ffn_hidden_size,
        "Q": config.q_lora_rank,
        "C": config.kv_lora_rank,
        "N": config.kv_channels - config.qk_rope_head_dim,  # of a head, without rotary position
        "Z": config.qk_rope_head_dim,
        "U": config.v_head_dim or config.kv_channels,
        "Rank": config.shared_blocks.adapter_rank if config.shared_blocks else 0,
        "Buckets": config.relative_buckets,
    } | _state_sizes(config)
    if config.vision:
        found |= _vision_sizes(config.vision, config.max_position_embeddings)
    if config.diffusion:
        found |= _diffusion_sizes(config.diffusion)
    if config.tower:
        found |= {f"tower_{name}": number for name, number in sizes(config.tower).items()}
    if config.recommendation:
        found |= _recommendation_sizes(config.recommendation)
    return found


def _state_sizes(config: ModelConfig) -> dict[str, int]:
    """The same of the layers that carry a state."""
    state = config.state_space
    if state is None:
        return {}
    return {
        "Inner": state.inner,
        "Group": state.groups,
        "Head": state.heads // state.groups,  # heads of a group
        "Width": state.head_width,
        "State": state.state,
        "Taps": state.conv,
        "Chunk": state.chunk,
        "DtRank": state.dt_rank,
        "Selection": state.dt_rank + 2 * state.state,  # what time steps, B and C are made of
        "GateRank": state.gate_rank,
    }


def _vision_sizes(v: Vision, positions: int) -> dict[str, int]:
    pixels = v.channels * v.patch_size**2
    return {"Patches": v.patches, "Pixels": pixels, "Classes": v.classes, "S": positions}


def _diffusion_sizes(d: Diffusion) -> dict[str, int]:
    area = d.patch_size**2
    found = {"Patches": d.patches, "S": d.patches + 1, "Pixels": d.channels * area}
    return found | {"Waves": d.waves, "Classes": d.classes, "Out": d.out_channels * area}


def _recommendation_sizes(r: Recommendation) -> dict[str, int]:
    vectors = len(r.rows) + 1
    found = {"Tables": len(r.rows), "Rows": -(-sum(r.rows) // len(r.rows)), "Dense": r.dense}
    found["Pairs"] = vectors * (vectors - 1) // 2
    for name, widths in (("Bottom", r.bottom), ("Top", r.top)):
        found |= {f"{name}{i}": width for i, width in enumerate(widths)}
    return found
