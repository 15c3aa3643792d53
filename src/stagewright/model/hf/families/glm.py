"""Zhipu AI (Z.ai): GLM-4 to GLM-5.2."""

from __future__ import annotations

from stagewright.model.hf import parts
from stagewright.model.hf.keys import Fixed, Keys, Map, family
from stagewright.model.layers import shortest


def _shared_indexers(c: Keys) -> tuple[str, ...]:
    """Layers with an indexer, and layers that use the choice of the one before (GLM-5.2).

    Listed, or one in a period after the first ones, as transformers' GlmMoeDsaConfig reads it.
    """
    layers = c.fields["num_layers"]
    key = "indexer_types" if c.get("indexer_types") is not None else "index_topk_pattern"
    given = c.get(key)
    if given is None:
        step = 1 if c.get("index_topk_freq") is None else c.size("num_layers", "index_topk_freq")
        offset = c.integer("index_skip_topk_offset", 0, layers)
        full = [max(i - offset + 1, 0) % step == 0 for i in range(layers)]
    else:
        words = {"full": True, "shared": False, "F": True, "S": False}
        kinds = list(given) if isinstance(given, str) else c.items(key)
        full = [words[x] for x in kinds if isinstance(x, str) and x in words]
        if not len(full) == len(kinds) == layers or not full[0]:
            c.reject(key, f"full or shared for each of the {layers} layers, full for the first")
    return shortest(["indexed" if x else "index_shared" for x in full])


_GLM: Map = {
    **parts.DECODER,
    "qkv_bias": "attention_bias",
    "rotary_fraction": parts.rotary_fraction,
}

FAMILIES = {
    "GlmForCausalLM": family("glm", _GLM),
    "Glm4ForCausalLM": family(
        "glm4 glm4v glm4v_text glm_ocr_text", _GLM, norm_placement=Fixed("sandwich")
    ),
    "Glm4MoeForCausalLM": family(
        "glm4_moe glm4v_moe glm4v_moe_text",
        parts.DECODER,
        parts.DEEPSEEK_EXPERTS,
        like="glm-4.5",
        qkv_bias="attention_bias",
        qk_norm="use_qk_norm",
        rotary_fraction=parts.rotary_fraction,
        unused="decoder_sparse_step",
    ),
    "Glm4MoeLiteForCausalLM": family(
        "glm4_moe_lite",
        parts.LATENT,
        parts.sigmoid_experts("n_routed_experts", "n_shared_experts"),
        num_query_groups=parts.all_heads,
        norm_topk_prob="norm_topk_prob",
        num_expert_groups=parts.expert_groups,
    ),
    "GlmMoeDsaForCausalLM": family(
        "glm_moe_dsa",
        parts.INDEXED,
        like="glm-5",
        mixers=_shared_indexers,
        unused="head_dim indexer_rope_interleave index_share_for_mtp_iteration "
        "index_topk_freq index_skip_topk_offset",
    ),
}
