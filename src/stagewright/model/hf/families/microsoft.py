"""Microsoft: Phi."""

from __future__ import annotations

from stagewright.model.hf import parts
from stagewright.model.hf.keys import Map, family

_PHI3: Map = {
    **parts.DECODER,
    "mixers": parts.SAME_WINDOW,
    "hidden_dropout": "resid_pdrop",
    "embedding_dropout": "embd_pdrop",
    "rotary_fraction": parts.rotary_fraction,
}
_PHIMOE = family(
    "phimoe",
    parts.BIASED,
    parts.LAYER_NORM,
    parts.experts("num_local_experts", "intermediate_size"),
    lm_head_bias="lm_head_bias",
    mixers=parts.SAME_WINDOW,
    remark="experts are chosen by a softmax; SparseMixer's masks, which cost little, are not "
    "counted",
)

FAMILIES = {
    "PhiForCausalLM": family(
        "phi",
        parts.DECODER,
        parts.LAYER_NORM,
        parts.UNGATED,
        dict.fromkeys((*parts.ALL_BIASES, "lm_head_bias", "parallel_block"), True),
        rotary_fraction=parts.rotary_fraction,
        only={"qk_layernorm": False},
    ),
    "Phi3ForCausalLM": family("phi3", _PHI3, like="phi3-mini"),
    "Phi4MMForCausalLM": family(
        "phi4mm phi4_multimodal",
        _PHI3,
        like="phi3-mini",
        remark="only the text model is counted, without vision, speech and their adapters",
    ),
    "PhimoeForCausalLM": _PHIMOE,
    "PhiMoEForCausalLM": _PHIMOE,  # Microsoft's own files
}
