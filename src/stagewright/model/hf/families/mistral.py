"""Mistral AI: Mistral, Ministral, Mixtral."""

from __future__ import annotations

from stagewright.model.hf import parts
from stagewright.model.hf.keys import family

_MINISTRAL = {**parts.DECODER, "mixers": parts.windows(lambda c, i: True)}

FAMILIES = {
    "MistralForCausalLM": family(
        "mistral mistral3", parts.DECODER, like="mistral-7b-v0.1", mixers=parts.SAME_WINDOW
    ),
    "MinistralForCausalLM": family("ministral", _MINISTRAL),
    "Ministral3ForCausalLM": family("ministral3", _MINISTRAL),
    "MixtralForCausalLM": family(
        "mixtral",
        parts.DECODER,
        parts.experts("num_local_experts", "intermediate_size"),
        like="mixtral-8x7b",
        mixers=parts.SAME_WINDOW,
    ),
}
