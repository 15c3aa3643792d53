"""Allen Institute for AI: OLMo 1 to 3, OLMoE, FlexOlmo."""

from __future__ import annotations

from stagewright.model.hf import parts
from stagewright.model.hf.keys import Fixed, Map, family

_OLMO2: Map = {
    **parts.BIASED,
    "norm_placement": Fixed("output"),
    "qk_norm": True,
    "qk_norm_over_heads": True,
}
_EXPERTS: Map = {
    **parts.experts("num_experts", "intermediate_size"),
    "norm_topk_prob": "norm_topk_prob",
}

FAMILIES = {
    "OlmoForCausalLM": family("olmo", parts.BIASED, norm=Fixed("layernorm"), norm_weight=False),
    "Olmo2ForCausalLM": family("olmo2", _OLMO2),
    "Olmo3ForCausalLM": family("olmo3", _OLMO2, mixers=parts.windows(lambda c, i: (i + 1) % 4 > 0)),
    "OlmoeForCausalLM": family("olmoe", parts.BIASED, _EXPERTS, like="olmoe-1b-7b"),
    "FlexOlmoForCausalLM": family("flex_olmo", _OLMO2, _EXPERTS),
}
