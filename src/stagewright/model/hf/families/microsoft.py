"""Microsoft: Phi."""

from __future__ import annotations

from stagewright.model.hf.keys import Fixed, Map, family
from stagewright.model.hf.parts import (
    ALL_BIASES,
    BIASED,
    DECODER,
    LAYER_NORM,
    SAME_WINDOW,
    UNGATED,
    experts,
    rotary_fraction,
)

_PHI3: Map = {
    **DECODER,
    "mixers": SAME_WINDOW,
    "hidden_dropout": "resid_pdrop",
    "embedding_dropout": "embd_pdrop",
    "rotary_fraction": rotary_fraction,
}
_PHIMOE = family(
    "phimoe",
    BIASED,
    LAYER_NORM,
    experts("num_local_experts", "intermediate_size"),
    lm_head_bias="lm_head_bias",
    mixers=SAME_WINDOW,
    remark="experts are chosen by a softmax; SparseMixer's masks, which cost little, are not "
    "counted",
)

FAMILIES = {
    "PhiForCausalLM": family(
        "phi",
        DECODER,
        LAYER_NORM,
        UNGATED,
        dict.fromkeys((*ALL_BIASES, "lm_head_bias", "parallel_block"), Fixed(True)),
        rotary_fraction=rotary_fraction,
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
