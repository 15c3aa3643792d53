"""The architectures of config.json files that can be read: a row each.

A row names the model types of the files, the preset that says what the files do not, and the map of
fields (`decoders`, `states`). The keys that files of a model type may leave out are in
`data/config_defaults.yaml`. To add a family of known layers, add a map, a row, and its defaults.
"""

from __future__ import annotations

from stagewright.model.hf import decoders, sparse, states
from stagewright.model.hf.keys import Family


def _none_of(*keys: str) -> dict[str, bool]:
    return dict.fromkeys(keys, False)


_ENCODER = {**_none_of("is_decoder", "add_cross_attention"), "position_embedding_type": "absolute"}
_OF_STATES = {"use_bias": False, "hidden_act": "silu"}
_ONE_WAY = _none_of("use_bidirectional_attention")
_GEMMA_UNUSED = ("hidden_act", "sliding_window_size")
_FALCON_UNUSED = ("multi_query", "parallel_attn", "num_kv_heads")
_UNBIASED = _none_of("mamba_proj_bias", "attention_bias", "mlp_bias")

FAMILIES: dict[str, Family] = {
    "GPT2LMHeadModel": Family(
        ("gpt2",), "gpt2", decoders.GPT2, only=_none_of("add_cross_attention")
    ),
    "LlamaForCausalLM": Family(("llama",), "llama2-7b", decoders.LLAMA),
    "MistralForCausalLM": Family(("mistral", "mistral3"), "mistral-7b-v0.1", decoders.MISTRAL),
    "Qwen2ForCausalLM": Family(
        (
            "qwen2",
            "qwen2_vl",
            "qwen2_vl_text",
            "qwen2_5_vl",
            "qwen2_5_vl_text",
            "qwen2_5_omni_text",
        ),
        "qwen2.5-7b",
        decoders.QWEN2,
    ),
    "Qwen3ForCausalLM": Family(("qwen3", "qwen3_vl", "qwen3_vl_text"), "qwen3-8b", decoders.QWEN3),
    "MixtralForCausalLM": Family(("mixtral",), "mixtral-8x7b", decoders.MIXTRAL),
    "Qwen3MoeForCausalLM": Family(
        ("qwen3_moe", "qwen3_vl_moe", "qwen3_vl_moe_text", "qwen3_omni_moe_text"),
        "qwen3-30b-a3b",
        decoders.QWEN3_MOE,
    ),
    "OlmoeForCausalLM": Family(("olmoe",), "olmoe-1b-7b", decoders.OLMOE),
    "Qwen2MoeForCausalLM": Family(("qwen2_moe",), "qwen2-57b-a14b", decoders.QWEN2_MOE),
    "GptOssForCausalLM": Family(
        ("gpt_oss",),
        "gpt-oss-120b",
        decoders.GPT_OSS,
        only={"hidden_act": "silu", "swiglu_alpha": 1.702},
    ),
    "Llama4ForCausalLM": Family(("llama4_text", "llama4"), "llama4-scout", decoders.LLAMA4),
    "DeepseekForCausalLM": Family(("deepseek",), "deepseek-moe-16b", decoders.DEEPSEEK),
    "DeepseekV2ForCausalLM": Family(
        ("deepseek_v2",), "deepseek-v2", decoders.DEEPSEEK_LATENT, only=_none_of("attention_bias")
    ),
    "DeepseekV3ForCausalLM": Family(
        ("deepseek_v3", "kimi_k2", "kimi_k25"),
        "deepseek-v3",
        decoders.DEEPSEEK_LATENT,
        only=_none_of("attention_bias"),
    ),
    "DeepseekV32ForCausalLM": Family(
        ("deepseek_v32",), "deepseek-v3.2", sparse.INDEXED, only=_none_of("attention_bias")
    ),
    "GlmMoeDsaForCausalLM": Family(
        ("glm_moe_dsa",),
        "glm-5",
        sparse.INDEX_SHARED,
        only=_none_of("attention_bias"),
        unused=sparse.UNUSED,
    ),
    "Glm4MoeForCausalLM": Family(
        ("glm4_moe", "glm4v_moe", "glm4v_moe_text"),
        "glm-4.5",
        decoders.GLM4_MOE,
        unused=("decoder_sparse_step",),
    ),
    "DbrxForCausalLM": Family(("dbrx",), "dbrx", decoders.DBRX),
    "Gemma2ForCausalLM": Family(
        ("gemma2",), "gemma2-9b", decoders.GEMMA, only=_ONE_WAY, unused=_GEMMA_UNUSED
    ),
    "Gemma3ForCausalLM": Family(
        ("gemma3_text", "gemma3"), "gemma3-1b", decoders.GEMMA, only=_ONE_WAY
    ),
    "Phi3ForCausalLM": Family(("phi3",), "phi3-mini", decoders.PHI3),
    "T5ForConditionalGeneration": Family(("t5",), "t5-base", decoders.T5),
    "FalconForCausalLM": Family(("falcon",), "falcon-7b", decoders.FALCON, unused=_FALCON_UNUSED),
    "RWForCausalLM": Family(("RefinedWeb", "RefinedWebModel"), "falcon-7b", decoders.FALCON),
    "OPTForCausalLM": Family(
        ("opt",), "opt-125m", decoders.OPT, only={"layer_norm_elementwise_affine": True}
    ),
    "BertForMaskedLM": Family(("bert",), "bert-base", decoders.BERT, only=_ENCODER),
    "BertModel": Family(("bert",), "bert-base", decoders.BERT_POOLED, only=_ENCODER),
    "MambaForCausalLM": Family(("mamba",), "mamba-2.8b", states.MAMBA, only=_OF_STATES),
    "FalconMambaForCausalLM": Family(
        ("falcon_mamba",), "falcon-mamba-7b", states.FALCON_MAMBA, only=_OF_STATES
    ),
    "Mamba2ForCausalLM": Family(("mamba2",), "mamba-codestral-7b", states.MAMBA2, only=_OF_STATES),
    "JambaForCausalLM": Family(
        ("jamba",), "jamba-v0.1", states.JAMBA, only=_none_of("mamba_proj_bias")
    ),
    "BambaForCausalLM": Family(("bamba",), "bamba-9b", states.BAMBA, only=_UNBIASED),
    "GraniteMoeHybridForCausalLM": Family(
        ("granitemoehybrid",),
        "granite-4.0-h-tiny",
        states.GRANITE_HYBRID,
        only=_none_of("mamba_proj_bias", "attention_bias"),
    ),
    "Zamba2ForCausalLM": Family(
        ("zamba2",),
        "zamba2-2.7b",
        states.ZAMBA2,
        only={"add_bias_linear": False, "use_shared_mlp_adapter": True},
        unused=(
            *("attention_head_dim", "attention_hidden_size", "ffn_hidden_size", "kv_channels"),
            *("hybrid_layer_ids", "mamba_headdim", "num_query_groups"),
        ),
    ),
    "FalconH1ForCausalLM": Family(
        ("falcon_h1",),
        "falcon-h1-7b",
        states.FALCON_H1,
        only=_none_of("mamba_proj_bias", "projectors_bias", "attention_bias", "mlp_bias"),
    ),
    "NemotronHForCausalLM": Family(
        ("nemotron_h",),
        "nemotron-h-8b",
        states.NEMOTRON_H,
        only={**_none_of("use_bias"), **_UNBIASED},
        unused=(
            *("hidden_act", "n_shared_experts", "norm_topk_prob", "moe_intermediate_size"),
            *("moe_shared_expert_intermediate_size", "n_routed_experts", "num_experts_per_tok"),
        ),
    ),
    "MiniMaxText01ForCausalLM": Family(("minimax_text_01",), "minimax-text-01", states.MINIMAX),
    "KimiLinearForCausalLM": Family(
        ("kimi_linear",),
        "kimi-linear-48b-a3b",
        states.KIMI_LINEAR,
        only={"mla_use_nope": True, "attention_bias": False},
        unused=("head_dim",),
    ),
    "Qwen3NextForCausalLM": Family(
        ("qwen3_next",),
        "qwen3-next-80b-a3b",
        states.QWEN3_NEXT,
        only={"attention_bias": False, "decoder_sparse_step": 1},
    ),
    "MiniMaxForCausalLM": Family(("minimax",), "minimax-text-01", states.MINIMAX),
}
"""The architectures that can be read. Where a file names none, its model_type's first counts."""

_MISSING = {
    "SparseMixer routing": ("PhiMoEForCausalLM", "phimoe"),
    "Mamba-1 in heads that have a B and a C each": ("ZambaForCausalLM", "zamba"),
    "block-sparse attention": ("Phi3SmallForCausalLM", "phi3small"),
    "an encoder with learned positions": ("BartForConditionalGeneration", "bart"),
}
MISSING = {name: what for what, names in _MISSING.items() for name in names}
"""What a `ModelConfig` lacks for other architectures and model types that people may try."""
