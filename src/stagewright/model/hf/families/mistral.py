"""Mistral AI: Mistral, Ministral, Mixtral."""

from __future__ import annotations

from stagewright.model.hf.keys import family
from stagewright.model.hf.parts import DECODER, SAME_WINDOW, experts, windows

_MINISTRAL = {**DECODER, "mixers": windows(lambda c, i: True)}

FAMILIES = {
    "MistralForCausalLM": family(
        "mistral mistral3", DECODER, like="mistral-7b-v0.1", mixers=SAME_WINDOW
    ),
    "MinistralForCausalLM": family("ministral", _MINISTRAL),
    "Ministral3ForCausalLM": family("ministral3", _MINISTRAL),
    "MixtralForCausalLM": family(
        "mixtral",
        DECODER,
        experts("num_local_experts", "intermediate_size"),
        like="mixtral-8x7b",
        mixers=SAME_WINDOW,
    ),
}
