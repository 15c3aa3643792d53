"""The architectures of config.json files that can be read: a row each.

A row names the model types of the files, the preset that says what the files do not, and the map of
fields. The keys that files of a model type may leave out are in `data/config_defaults.yaml`. To add
a family of known layers, add a map, a row, and its defaults. Maps are in these modules:

- `decoders`: transformers without states, most of them Llama's map with a few entries of their own
- `dense`: further dense decoders, with other norms, biases, gates and windows
- `mixtures`: further mixtures of experts
- `own`: decoders some of whose layers have sizes of their own
- `sparse`: models whose attention reads the keys that an indexer chooses
- `states`: models with states
- `common`: no family, but classes that nobody knows, by the names that most files share
- `parts`: what maps share, and readers of fields that are more than a key
"""

from __future__ import annotations

from stagewright.model.hf import decoders, dense, mixtures, own, sparse, states
from stagewright.model.hf.keys import Family, Map


def _none_of(*keys: str) -> dict[str, bool]:
    return dict.fromkeys(keys, False)


_ENCODER = {**_none_of("is_decoder", "add_cross_attention"), "position_embedding_type": "absolute"}
_OF_STATES = {"use_bias": False, "hidden_act": "silu"}
_ONE_WAY = _none_of("use_bidirectional_attention")
_GEMMA_UNUSED = ("hidden_act", "sliding_window_size")
_FALCON_UNUSED = ("multi_query", "parallel_attn", "num_kv_heads")
_UNBIASED = _none_of("mamba_proj_bias", "attention_bias", "mlp_bias")


_OF_QWEN3_5 = {"attn_output_gate": True}
_BAILING_UNUSED = ("moe_shared_expert_intermediate_size",)
_PHI4_PARTS = "only the text model is counted, without vision, speech and their adapters"
_COHERE_UNUSED = (
    *("layer_switch", "order_of_interleaved_layers", "position_embedding_type", "rotary_pct"),
    *("use_embedding_sharing", "use_gated_activation", "use_parallel_block"),
    "use_parallel_embedding",
)
_HUNYUAN_UNUSED = (
    *("attention_head_dim", "use_mixed_mlp_moe", "norm_type", "num_experts_per_tok"),
    "moe_random_routing_dropped_token",
)
_SPARSE_MIXER = (
    "experts are chosen by a softmax; SparseMixer's masks, which cost little, are not counted"
)
_XIELU = "xIELU is counted as SiLU, without the two numbers that each layer learns for it"


def _like_llama(
    model_types: tuple[str, ...],
    fields: Map,
    remark: str = "",
    unused: tuple[str, ...] = (),
    **only: bool | float | str,
) -> Family:
    """A family whose map says all in which its models differ from Llama's."""
    return Family(model_types, "llama2-7b", fields, only=only, unused=unused, remark=remark)


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
    "DeepseekV2ForCausalLM": Family(("deepseek_v2",), "deepseek-v2", decoders.DEEPSEEK_LATENT),
    "DeepseekV3ForCausalLM": Family(
        ("deepseek_v3", "kimi_k2", "kimi_k25"),
        "deepseek-v3",
        decoders.DEEPSEEK_LATENT,
    ),
    "DeepseekV32ForCausalLM": Family(("deepseek_v32",), "deepseek-v3.2", sparse.INDEXED),
    "DeepseekV4ForCausalLM": Family(
        ("deepseek_v4",),
        "deepseek-v4-pro",
        sparse.DEEPSEEK_V4,
        only={"attention_bias": False, "mlp_bias": False},
        unused=sparse.V4_UNUSED,
        remark="layers that choose experts by a table of token ids are counted as if by scores",
    ),
    "GlmMoeDsaForCausalLM": Family(
        ("glm_moe_dsa",),
        "glm-5",
        sparse.INDEX_SHARED,
        unused=sparse.UNUSED,
    ),
    "MiMoV2FlashForCausalLM": Family(
        ("mimo_v2_flash",),
        "mimo-v2-flash",
        sparse.MIMO_V2,
        only={"n_shared_experts": 0},
        unused=sparse.MIMO_UNUSED,
    ),
    "MiniMaxM3SparseForCausalLM": Family(
        ("minimax_m3_vl", "minimax_m3_vl_text"),
        "minimax-m3",
        sparse.MINIMAX_M3,
        only={"swiglu_alpha": 1.702, "scoring_func": "sigmoid", "attention_output_gate": False},
        unused=sparse.M3_UNUSED,
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
    "BambaForCausalLM": Family(
        ("bamba",), "bamba-9b", states.BAMBA, only=_none_of("mamba_proj_bias")
    ),
    "GraniteMoeHybridForCausalLM": Family(
        ("granitemoehybrid",),
        "granite-4.0-h-tiny",
        states.GRANITE_HYBRID,
        only=_none_of("mamba_proj_bias"),
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
        only=_none_of("mamba_proj_bias", "projectors_bias"),
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
        only={"mla_use_nope": True},
        unused=("head_dim",),
    ),
    "Qwen3NextForCausalLM": Family(
        ("qwen3_next",),
        "qwen3-next-80b-a3b",
        states.QWEN3_NEXT,
        only={"decoder_sparse_step": 1},
    ),
    "MiniMaxForCausalLM": Family(("minimax",), "minimax-text-01", states.MINIMAX),
    "ArceeForCausalLM": _like_llama(("arcee",), dense.ARCEE),
    "SeedOssForCausalLM": _like_llama(("seed_oss",), dense.SEED_OSS),
    "SmolLM3ForCausalLM": _like_llama(("smollm3",), dense.SMOLLM3),
    "Ernie4_5ForCausalLM": _like_llama(("ernie4_5", "paddleocr_vl_text"), dense.ERNIE),
    "Exaone4ForCausalLM": _like_llama(("exaone4", "exaone4_5", "exaone4_5_text"), dense.EXAONE4),
    "OlmoForCausalLM": _like_llama(("olmo",), dense.OLMO),
    "Olmo2ForCausalLM": _like_llama(("olmo2",), dense.OLMO2),
    "Olmo3ForCausalLM": _like_llama(("olmo3",), dense.OLMO3),
    "CohereForCausalLM": _like_llama(("cohere",), dense.COHERE, use_qk_norm=False),
    "Cohere2ForCausalLM": _like_llama(
        ("cohere2", "cohere2_vision"), dense.COHERE2, unused=_COHERE_UNUSED
    ),
    "GraniteForCausalLM": _like_llama(("granite",), dense.GRANITE),
    "Starcoder2ForCausalLM": _like_llama(("starcoder2",), dense.STARCODER2),
    "StableLmForCausalLM": _like_llama(("stablelm",), dense.STABLELM, qk_layernorm=False),
    "GPTNeoXForCausalLM": _like_llama(("gpt_neox",), dense.GPT_NEOX),
    "GPTJForCausalLM": _like_llama(("gptj",), dense.GPTJ),
    "CodeGenForCausalLM": _like_llama(("codegen",), dense.GPTJ),
    "GPTBigCodeForCausalLM": _like_llama(("gpt_bigcode",), dense.GPT_BIGCODE),
    "BloomForCausalLM": _like_llama(("bloom",), dense.BLOOM),
    "MptForCausalLM": _like_llama(("mpt",), dense.MPT, no_bias=True),
    "PhiForCausalLM": _like_llama(("phi",), dense.PHI, qk_layernorm=False),
    "NemotronForCausalLM": _like_llama(("nemotron",), dense.NEMOTRON),
    "GlmForCausalLM": _like_llama(("glm",), dense.GLM),
    "Glm4ForCausalLM": _like_llama(("glm4", "glm4v", "glm4v_text", "glm_ocr_text"), dense.GLM4),
    "HeliumForCausalLM": _like_llama(("helium",), dense.HELIUM),
    "HyperCLOVAXForCausalLM": _like_llama(("hyperclovax",), dense.HYPERCLOVAX),
    "HunYuanDenseV1ForCausalLM": _like_llama(
        ("hunyuan_v1_dense", "hunyuan_vl", "hunyuan_vl_text"), dense.HUNYUAN
    ),
    "NanoChatForCausalLM": _like_llama(("nanochat",), dense.NANOCHAT),
    "Jais2ForCausalLM": _like_llama(("jais2",), dense.JAIS2),
    "MinistralForCausalLM": _like_llama(("ministral",), dense.MINISTRAL),
    "Ministral3ForCausalLM": _like_llama(("ministral3",), dense.MINISTRAL),
    "CwmForCausalLM": _like_llama(("cwm",), dense.MINISTRAL),
    "MiMoForCausalLM": _like_llama(
        ("mimo",), dense.MIMO, unused=("sliding_window",), use_sliding_window=False
    ),
    "VaultGemmaForCausalLM": _like_llama(("vaultgemma",), dense.VAULTGEMMA),
    "GemmaForCausalLM": _like_llama(("gemma",), dense.GEMMA1),
    "MiniCPM3ForCausalLM": _like_llama(("minicpm3",), dense.MINICPM3),
    "YoutuForCausalLM": _like_llama(("youtu",), dense.LATENT_DENSE),
    "ApertusForCausalLM": _like_llama(("apertus",), dense.APERTUS, _XIELU, hidden_act="xielu"),
    "MiniMaxM2ForCausalLM": _like_llama(
        ("minimax_m2",),
        mixtures.MINIMAX_M2,
        unused=("use_routing_bias",),
        scoring_func="sigmoid",
        use_qk_norm=True,
        shared_intermediate_size=0,
    ),
    "Ernie4_5_MoeForCausalLM": _like_llama(
        ("ernie4_5_moe", "ernie4_5_moe_vl", "ernie4_5_vl_moe_text"),
        mixtures.ERNIE_MOE,
        unused=("moe_use_aux_free", "moe_capacity", "moe_gate"),
        use_bias=False,  # transformers has such biases in shared experts and none in routed ones
    ),
    "HunYuanMoEV1ForCausalLM": _like_llama(
        ("hunyuan_v1_moe",), mixtures.HUNYUAN_MOE, unused=_HUNYUAN_UNUSED
    ),
    "PhimoeForCausalLM": _like_llama(("phimoe",), mixtures.PHIMOE, _SPARSE_MIXER),
    "PhiMoEForCausalLM": _like_llama(("phimoe",), mixtures.PHIMOE, _SPARSE_MIXER),
    "FlexOlmoForCausalLM": _like_llama(("flex_olmo",), mixtures.FLEX_OLMO),
    "GraniteMoeForCausalLM": _like_llama(("granitemoe",), mixtures.GRANITE_MOE),
    "GraniteMoeSharedForCausalLM": _like_llama(("granitemoeshared",), mixtures.GRANITE_MOE),
    "Dots1ForCausalLM": _like_llama(("dots1",), mixtures.DOTS),
    "HYV3ForCausalLM": _like_llama(("hy_v3",), mixtures.HUNYUAN3, mlp_bias=False),
    "SolarOpenForCausalLM": _like_llama(("solar_open",), mixtures.SOLAR_OPEN),
    "ExaoneMoeForCausalLM": _like_llama(("exaone_moe",), mixtures.EXAONE_MOE),
    "AfmoeForCausalLM": _like_llama(("afmoe",), mixtures.AFMOE),
    "Glm4MoeLiteForCausalLM": _like_llama(("glm4_moe_lite",), mixtures.GLM4_LITE),
    "AriaTextForCausalLM": _like_llama(("aria_text",), mixtures.ARIA),
    "MellumForCausalLM": _like_llama(("mellum",), mixtures.MELLUM),
    "LagunaForCausalLM": _like_llama(("laguna",), mixtures.LAGUNA),
    "Step3p7FlashForCausalLM": _like_llama(
        ("step3p7", "step3p5"),
        own.STEP3_OWN,
        unused=("n_shared_experts", "use_moe_router_bias"),
        attention_bias=False,
        mlp_bias=False,
        scoring_func="sigmoid",
    ),
    "GPTNeoForCausalLM": _like_llama(("gpt_neo",), dense.GPT_NEO),
    "ExaoneForCausalLM": _like_llama(("exaone",), dense.EXAONE),
    "InternLM2ForCausalLM": _like_llama(("internlm2",), dense.INTERNLM2),
    "MiniCPMForCausalLM": _like_llama(("minicpm",), decoders.LLAMA),
    "YiForCausalLM": _like_llama(("Yi",), decoders.LLAMA),
    "BailingMoeForCausalLM": _like_llama(
        ("bailing_moe",), mixtures.BAILING, unused=_BAILING_UNUSED
    ),
    "BailingMoeV2ForCausalLM": _like_llama(
        ("bailing_moe_v2", "bailing_moe"), mixtures.BAILING, unused=_BAILING_UNUSED
    ),
    "Phi4MMForCausalLM": Family(
        ("phi4mm", "phi4_multimodal"), "phi3-mini", decoders.PHI3, remark=_PHI4_PARTS
    ),
    "MiniMaxM1ForCausalLM": Family(("minimax_m1",), "minimax-text-01", states.MINIMAX),
    "Gemma4ForCausalLM": _like_llama(
        ("gemma4_text", "gemma4"),
        own.GEMMA4,
        unused=("vocab_size_per_layer_input", "use_bidirectional_attention"),
    ),
    "DeciLMForCausalLM": _like_llama(("nemotron-nas", "deci"), own.DECILM),
    "Qwen3_5ForCausalLM": Family(
        ("qwen3_5_text", "qwen3_5"),
        "qwen3-next-80b-a3b",
        states.QWEN3_5,
        only=_OF_QWEN3_5,
        unused=("output_gate_type",),
    ),
    "Qwen3_5MoeForCausalLM": Family(
        ("qwen3_5_moe_text", "qwen3_5_moe"),
        "qwen3-next-80b-a3b",
        states.QWEN3_5_MOE,
        only=_OF_QWEN3_5,
        unused=("output_gate_type",),
    ),
}
"""The architectures that can be read. Where a file names none, its model_type's first counts."""

_MISSING = {
    "Mamba-1 in heads that have a B and a C each": ("ZambaForCausalLM", "zamba"),
    "block-sparse attention": ("Phi3SmallForCausalLM", "phi3small"),
    "an encoder with learned positions": ("BartForConditionalGeneration", "bart"),
    "residual sums that attend to the layers before (attention residuals)": (
        *("KimiK3ForConditionalGeneration", "KimiK3ForCausalLM", "kimi_k3"),
    ),
    "short convolutions": (
        *("Lfm2ForCausalLM", "lfm2", "Lfm2MoeForCausalLM", "lfm2_moe", "Lfm3ForCausalLM", "lfm3"),
    ),
    "two attentions in each layer and experts that do nothing": (
        *("LongcatFlashForCausalLM", "LongcatFlashNgramForCausalLM", "longcat_flash"),
    ),
    "attention that is a mixture of experts": ("JetMoeForCausalLM", "jetmoe"),
    "a recurrence of gated linear units": ("RecurrentGemmaForCausalLM", "recurrent_gemma"),
    "a recurrence of RWKV": ("RwkvForCausalLM", "rwkv", "RWKV7ForCausalLM", "rwkv7"),
    "a recurrence of xLSTM": ("xLSTMForCausalLM", "xlstm"),
    "an embedding for each layer": (
        *("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration", "gemma3n_text", "gemma3n"),
    ),
    "norms inside attention and MLP": ("BitNetForCausalLM", "bitnet"),
    "differences of two attentions": ("DiffLlamaForCausalLM", "diffllama"),
    "attention to images inside the decoder": (
        *("MllamaForConditionalGeneration", "MllamaForCausalLM", "mllama", "mllama_text_model"),
    ),
    "norms of queries and keys with a bias": ("PersimmonForCausalLM", "persimmon"),
    "a norm behind its experts": ("AXK1ForCausalLM", "axk1", "AXK1"),
    "lightning attention beside latent attention": (
        *("BailingHybridForCausalLM", "bailing_hybrid", "BailingMoeV2_5ForCausalLM"),
    ),
    "layers that are run several times": ("HrmTextForCausalLM", "hrm_text"),
    "retrieved keys as experts": ("DogeForCausalLM", "doge"),
    "gated delta nets with other norms and gates": ("OlmoHybridForCausalLM", "olmo_hybrid"),
    "parts that no other family has": (
        *("AXK2ForCausalLM", "axk2", "BeamForCausalLM", "beam", "BioGptForCausalLM", "biogpt"),
        *("Cohere2MoeForCausalLM", "cohere2_moe", "Dots3NoteForCausalLM", "dots3_note"),
        *("Dots3NoteForConditionalGeneration", "dots3_note_text", "FlintForCausalLM", "flint"),
        *("Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration"),
        *("gemma4_unified", "gemma4_unified_text", "GraniteSWAForCausalLM", "granite_swa"),
        *("GraniteMoeSWAForCausalLM", "granitemoe_swa", "HYV4ForCausalLM", "hy_v4"),
        *("ModernBertDecoderForCausalLM", "modernbert-decoder"),
    ),
}
MISSING = {name: what for what, names in _MISSING.items() for name in names}
"""What a `ModelConfig` lacks for other architectures and model types that people may try."""
