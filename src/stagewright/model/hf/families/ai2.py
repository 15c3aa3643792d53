"""Allen Institute for AI: OLMo 1 to 3, OLMoE, FlexOlmo."""

from __future__ import annotations

from stagewright.model.hf.keys import Fixed, Map, family
from stagewright.model.hf.parts import BIASED, experts, windows

_OLMO2: Map = {
    **BIASED,
    "norm_placement": Fixed("output"),
    "qk_norm": Fixed(True),
    "qk_norm_over_heads": Fixed(True),
}
_EXPERTS: Map = {
    **experts("num_experts", "intermediate_size"),
    "norm_topk_prob": "norm_topk_prob",
}

FAMILIES = {
    "OlmoForCausalLM": family("olmo", BIASED, norm=Fixed("layernorm"), norm_weight=Fixed(False)),
    "Olmo2ForCausalLM": family("olmo2", _OLMO2),
    "Olmo3ForCausalLM": family("olmo3", _OLMO2, mixers=windows(lambda c, i: (i + 1) % 4 > 0)),
    "OlmoeForCausalLM": family("olmoe", BIASED, _EXPERTS, like="olmoe-1b-7b"),
    "FlexOlmoForCausalLM": family("flex_olmo", _OLMO2, _EXPERTS),
}
