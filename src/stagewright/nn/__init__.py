"""Single-device model code: the blocks of a model, each with gradients and optimizer step.

Nothing here knows of parallelism. Names of values are what a strategy may speak about. A model is a
chain of blocks that meet in the residual stream; blocks of equal shape are built once, however many
layers use them.
"""

from __future__ import annotations

from collections.abc import Callable

from stagewright.models import Layer, ModelConfig
from stagewright.nn.builder import PRECISIONS, Block, Inference, Precision, Recipe
from stagewright.nn.ends import embedding, head
from stagewright.nn.layers import layer

__all__ = [
    "BLOCKS", "PRECISIONS", "Block", "Inference", "Precision", "Recipe", "chain", "sizes",
]  # fmt: skip

Make = Callable[[ModelConfig, Recipe, Layer], Block]

BLOCKS: dict[str, Make] = {
    "embedding": lambda config, recipe, _: embedding(config, recipe),
    "layer": layer,
    "head": lambda config, recipe, _: head(config, recipe),
}
"""What a model is a chain of, by name."""


def chain(config: ModelConfig) -> list[tuple[str, int]]:
    """The blocks of a model in order, and which layer each is: -1 for what is none."""
    layers = [("layer", i) for i in range(config.num_layers)]
    return layers if config.bare else [("embedding", -1), *layers, ("head", -1)]


def sizes(config: ModelConfig) -> dict[str, int]:
    """The numbers behind the dims of a model's blocks, but for those that a run decides.

    B sequences, S positions, V the padded vocabulary and R token copies per expert are a run's.
    """
    return {
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
    }
