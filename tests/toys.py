"""Small models that several files of tests use; those of single blocks are in `spmd.TINY`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from spmd import TINY, ZAMBA2
from stagewright.model.config import ModelConfig
from stagewright.model.layers import SharedBlocks

MOE = ModelConfig(
    name="moe",
    num_layers=2,
    hidden_size=8,
    ffn_hidden_size=16,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=4,
    vocab_size=16,
    max_position_embeddings=64,
    num_experts=4,
    top_k=2,
    moe_ffn_hidden_size=8,
)
T5: dict[str, Any] = {
    **{"num_layers": 2, "encoder_num_layers": 2, "hidden_size": 12, "ffn_hidden_size": 24},
    **{"num_attention_heads": 6, "num_query_groups": 6, "kv_channels": 4, "vocab_size": 24},
    **{"max_position_embeddings": 12, "position": "relative", "relative_buckets": 6},
    **{"tied_embeddings": True, "activation": "gelu_tanh"},
}
WITH_LIVE_VALUES: dict[str, ModelConfig] = {
    "mtp": replace(TINY["llama"], mtp_num_layers=1),
    "mtp, two": replace(TINY["gpt2"], name="mtp, two", mtp_num_layers=2, num_layers=1),
    "mtp, latent": replace(TINY["deepseek-lite"], mtp_num_layers=1, num_layers=1),
    "t5": ModelConfig(**T5 | {"name": "t5", "gated": False, "activation": "relu"}),
    "t5, 1.1": ModelConfig(**T5 | {"name": "t5, 1.1", "tied_embeddings": False}),
    "mtp, experts": replace(TINY["mixtral"], mtp_num_layers=1, num_layers=1),
    "zamba2": ZAMBA2,
    "zamba2, attention": replace(  # and what is shared before it
        TINY["nemotron-h"],
        **{"name": "zamba2, attention", "gated": False, "num_query_groups": 12},
        shared_blocks=SharedBlocks(layers=(1, 0, 1, 0)),
        mlps=("none", "dense", "dense", "dense"),
    ),
}
"""Models whose blocks pass on more than the hidden states."""
