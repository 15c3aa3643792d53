"""Small models that several files of tests use; those of single blocks are in `spmd.TINY`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from spmd import TINY, ZAMBA2
from stagewright.model.config import ModelConfig
from stagewright.model.layers import SharedBlocks, Vision

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
_LATENT: dict[str, Any] = {"num_query_groups": 4, "kv_channels": 6, "qk_rope_head_dim": 2}
_LATENT |= {"kv_lora_rank": 4, "v_head_dim": 4}
_BIASES = dict.fromkeys(("mlp_bias", "router_bias", "attention_sinks"), True)
WITH_EXPERTS = {
    "moe": MOE,
    "sigmoid": replace(MOE, router="sigmoid"),
    "shared": replace(MOE, shared_ffn_hidden_size=8, router="sigmoid"),
    "mla": replace(MOE, **_LATENT, q_lora_rank=4, shared_ffn_hidden_size=8),
    "mla, whole queries": replace(MOE, **_LATENT),
    "biased": replace(MOE, **_BIASES, num_attention_heads=8, router="sigmoid"),
}
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
_SMALL: dict[str, Any] = {"num_layers": 2, "hidden_size": 8, "ffn_hidden_size": 16}
_SMALL |= {"num_attention_heads": 4, "num_query_groups": 4, "kv_channels": 2, "vocab_size": 16}
_ENCODER = {"max_position_embeddings": 5, "causal": False, "encoder": True, "position": "none"}
_ENCODER |= {"norm": "layernorm", "norm_bias": True, "qkv_bias": True, "gated": False}
_ENCODER |= dict.fromkeys(("attention_output_bias", "mlp_bias"), True) | {"activation": "gelu"}
VIT = ModelConfig(name="vit", **_SMALL, **_ENCODER, vision=Vision(4, 2, classes=8))
_TOWER = replace(VIT, name="tower", hidden_size=12, vision=Vision(4, 2, patch_bias=False))
_TOWER = replace(_TOWER, num_layers=1, embedding_norm=True, kv_channels=3)
OF_IMAGES = {
    "vit": VIT,
    "llava": ModelConfig(name="llava", **_SMALL, max_position_embeddings=12, tower=_TOWER),
}
TOYS = WITH_EXPERTS | WITH_LIVE_VALUES | OF_IMAGES
TOYS["dense first"] = replace(TOYS["mla"], first_dense_layers=1)
