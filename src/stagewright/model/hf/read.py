"""Read a model from the config.json that Hugging Face publishes with its weights.

Each architecture has a row in `ARCHITECTURES`: the function that says which keys mean what, a
preset of the family for what its files do not say (norms, gates), and the keys that may be left
out, with the defaults of transformers 4.57's configuration classes. All other keys are required.
Number formats (`torch_dtype`, `dtype`, quantization) belong to a run and are not read; neither are
losses that balance experts, factors that scale their weights, nor layers for multi-token
prediction.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

from stagewright.errors import did_you_mean
from stagewright.model.config import (
    LIMITS,
    Attention,
)
from stagewright.model.hf.keys import (
    ACTIVATIONS,
    Architecture,
    Fields,
    Json,
    Keys,
    decoder,
    deepseek_experts,
    deepseek_latent,
    expert_sizes,
    query_groups,
    rotary_fraction,
    usual_sizes,
)
from stagewright.model.hf.state import STATE_ARCHITECTURES
from stagewright.model.patterns import shortest

LAYER_TYPES: dict[str, Attention] = {
    "full_attention": "global",
    "sliding_attention": "local",
    "chunked_attention": "chunked",
}
"""transformers' names of the layer kinds, and ours."""


def read(file: str, data: Json) -> tuple[str, Fields]:
    """The preset that a file's model is like, and the fields in which the file says otherwise."""
    architecture = _architecture(Keys(file, data))
    return architecture.like, architecture.read(Keys(file, architecture.defaults | data))


def _window(c: Keys, kinds: list[Attention]) -> Fields:
    """The sliding window and the shortest pattern that repeats into these layers."""
    window = c.optional("max_position_embeddings", "sliding_window")
    if window is None or "local" not in kinds:
        return {"sliding_window": None, "mixers": ("global",)}
    return {"sliding_window": window, "mixers": shortest(kinds)}


def _layer_types(
    c: Keys,
    layers: int,
    unlisted: list[Attention],
    known: tuple[str, ...] = ("full_attention", "sliding_attention"),
) -> list[Attention]:
    """The kind of every layer, as the file lists them or else these."""
    value = c.values.get("layer_types")
    if value is None:
        return unlisted
    listed = cast("list[object]", value) if isinstance(value, list) else []
    kinds: list[Attention] = [LAYER_TYPES[x] for x in listed if isinstance(x, str) and x in known]
    if not len(kinds) == len(listed) == layers:
        c.reject("layer_types", f"{' or '.join(known)} for each of the {layers} layers")
    return kinds


def _biased_decoder(c: Keys, activation: str = "hidden_act") -> Fields:
    bias = c.flag("attention_bias")
    return decoder(c, activation) | {"qkv_bias": bias, "attention_output_bias": bias}


def _llama(c: Keys) -> Fields:
    return _biased_decoder(c) | {"mlp_bias": c.flag("mlp_bias")}


def _mistral(c: Keys) -> Fields:
    fields = decoder(c)
    return fields | _window(c, ["local"] * fields["num_layers"])


def _phi3(c: Keys) -> Fields:
    return _mistral(c) | {
        "rotary_fraction": rotary_fraction(c),
        "hidden_dropout": c.dropout("resid_pdrop"),
        "embedding_dropout": c.dropout("embd_pdrop"),
    }


def _qwen_window(c: Keys, layers: int) -> Fields:
    if not c.flag("use_sliding_window"):
        return _window(c, ["global"])
    full = c.whole("max_window_layers", 0, LIMITS["num_layers"])
    unlisted: list[Attention] = ["global" if i < full else "local" for i in range(layers)]
    return _window(c, _layer_types(c, layers, unlisted))


def _qwen2(c: Keys) -> Fields:
    fields = decoder(c)
    return fields | _qwen_window(c, fields["num_layers"])


def _qwen3(c: Keys) -> Fields:
    fields = _biased_decoder(c)
    return fields | _qwen_window(c, fields["num_layers"])


def _gemma2(c: Keys) -> Fields:
    """Also Gemma 3, with its own defaults."""
    fields = _biased_decoder(c, "hidden_activation")
    c.only("use_bidirectional_attention", False)
    layers, every = fields["num_layers"], c.size("num_layers", "sliding_window_pattern")
    unlisted: list[Attention] = ["local" if (i + 1) % every else "global" for i in range(layers)]
    return fields | {
        **_window(c, _layer_types(c, layers, unlisted)),
        "attention_softcap": c.softcap("attn_logit_softcapping"),
        "logit_softcap": c.softcap("final_logit_softcapping"),
    }


def _gemma3_multimodal(c: Keys) -> Fields:
    """The text part. Its file writes only what differs from the defaults of the text's class."""
    nested = c.values.get("text_config")
    if not isinstance(nested, dict):
        c.reject("text_config", "an object")
    tied = {"tie_word_embeddings": c.values["tie_word_embeddings"]}
    text = Keys(c.file, _GEMMA3 | tied | cast(Json, nested), "text_config.")
    text.only("model_type", "gemma3_text")
    return _gemma2(text)


def _gpt2(c: Keys) -> Fields:
    """GPT-2's own names of the sizes; transformers reads the usual ones as well."""
    c.only("add_cross_attention", False)
    fields = usual_sizes(
        c,
        num_layers=("n_layer", "num_hidden_layers"),
        hidden_size=("n_embd", "hidden_size"),
        num_attention_heads=("n_head", "num_attention_heads"),
        max_position_embeddings=("n_positions", "max_position_embeddings"),
    )
    return fields | {
        "ffn_hidden_size": c.optional("ffn_hidden_size", "n_inner") or 4 * fields["hidden_size"],
        "activation": c.activation("activation_function"),
        "hidden_dropout": c.dropout("resid_pdrop"),
        "attention_dropout": c.dropout("attn_pdrop"),
        "embedding_dropout": c.dropout("embd_pdrop"),
    }


def _opt(c: Keys) -> Fields:
    """OPT-350m alone has its norms behind, and an embedding narrower than the model."""
    c.only("layer_norm_elementwise_affine", True)
    fields = usual_sizes(c, ffn_hidden_size=("ffn_dim",))
    pre, bias = c.flag("do_layer_norm_before"), c.flag("enable_bias")
    width = c.optional("hidden_size", "word_embed_proj_dim")
    return fields | {
        "norm_placement": "pre" if pre else "post",
        "final_norm": pre and not c.flag("_remove_final_layer_norm"),
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": bias,
        "embedding_size": None if width == fields["hidden_size"] else width,
        "activation": c.activation("activation_function"),
        "hidden_dropout": c.dropout("dropout"),
        "attention_dropout": c.dropout("attention_dropout"),
    }


def _falcon(c: Keys) -> Fields:
    """Falcon, and RefinedWeb as its first files call it, whose newer decoder has `n_head_kv`."""
    fields = usual_sizes(
        c,
        num_layers=("num_hidden_layers", "n_layer"),
        num_attention_heads=("num_attention_heads", "n_head"),
    )
    heads, bias = fields["num_attention_heads"], c.flag("bias")
    new = c.flag("new_decoder_architecture") or "n_head_kv" in c.values
    if not new:
        groups, norms = 1 if c.flag("multi_query") else heads, 1
    else:
        groups = query_groups(c, heads, "n_head_kv", "num_kv_heads")
        norms = 2
        if c.values.get("num_ln_in_parallel_attn") is not None:
            norms = c.whole("num_ln_in_parallel_attn", 1, 2)
    width = c.optional("ffn_hidden_size", "ffn_hidden_size")
    return fields | {
        "num_query_groups": groups,
        "ffn_hidden_size": width or 4 * fields["hidden_size"],
        "position": "alibi" if c.flag("alibi") else "rope",
        "parallel_block": new or c.flag("parallel_attn"),
        "parallel_norms": norms,
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": bias,
        "activation": c.activation("activation"),
        "hidden_dropout": c.dropout("hidden_dropout"),
        "attention_dropout": c.dropout("attention_dropout"),
    }


def _bert(c: Keys) -> Fields:
    """BERT with its masked-language-model head."""
    c.only("is_decoder", False)
    c.only("add_cross_attention", False)
    c.only("position_embedding_type", "absolute")
    dropout = c.dropout("hidden_dropout_prob")
    return usual_sizes(c, ffn_hidden_size=("intermediate_size",)) | {
        "token_types": c.whole("type_vocab_size", 1, LIMITS["vocab_size"]),
        "activation": c.activation("hidden_act"),
        "hidden_dropout": dropout,
        "embedding_dropout": dropout,
        "attention_dropout": c.dropout("attention_probs_dropout_prob"),
    }


def _bert_backbone(c: Keys) -> Fields:
    """BERT with its pooler: the output projection, which it lacks, is the tied embedding."""
    backbone = {"pooler": True, "mlm_transform": False, "lm_head_bias": False}
    return _bert(c) | backbone | {"tied_embeddings": True}


def _mixtral(c: Keys) -> Fields:
    return _mistral(c) | expert_sizes(c, "num_local_experts", "intermediate_size")


def _qwen3_moe(c: Keys) -> Fields:
    """Layers are dense where listed, and otherwise but for every `decoder_sparse_step`-th."""
    fields = _biased_decoder(c)
    layers, step = fields["num_layers"], c.size("num_layers", "decoder_sparse_step")
    value = c.values.get("mlp_only_layers")
    dense = cast("list[object]", value) if isinstance(value, list) else []
    first = len(dense)
    if (value is not None and value != list(range(first))) or (first and step > 1):
        c.reject("mlp_only_layers", "the first layers in order, and none where layers alternate")
    return fields | {
        **_window(c, ["local" if c.flag("use_sliding_window") else "global"] * layers),
        **expert_sizes(c, "num_experts", "moe_intermediate_size"),
        "norm_topk_prob": c.flag("norm_topk_prob"),
        "first_dense_layers": first or step - 1,
        "moe_layer_freq": step,
    }


def _qwen2_moe(c: Keys) -> Fields:
    """Biases of queries, keys and values always; shared experts with a gate."""
    return _qwen3_moe(c) | {
        "qkv_bias": True,
        "attention_output_bias": False,
        "shared_ffn_hidden_size": c.size("ffn_hidden_size", "shared_expert_intermediate_size"),
    }


def _gpt_oss(c: Keys) -> Fields:
    """Every second layer has a window where the file does not list them."""
    fields = _biased_decoder(c)
    layers = fields["num_layers"]
    unlisted: list[Attention] = ["global" if i % 2 else "local" for i in range(layers)]
    c.only("hidden_act", "silu")
    c.only("swiglu_alpha", 1.702)
    return fields | {
        **_window(c, _layer_types(c, layers, unlisted)),
        **expert_sizes(c, "num_local_experts", "intermediate_size", _used_experts(c)),
        "activation": "quick_gelu",
        "activation_func_clamp_value": c.number("swiglu_limit", 1e-3, 1e6),
    }


def _used_experts(c: Keys) -> str:
    return c.used("num_experts_per_tok", "experts_per_token")


def _llama4(c: Keys) -> Fields:
    """Chunks where there is rope, and neither in the other layers; experts where listed."""
    fields = _biased_decoder(c)
    layers = fields["num_layers"]
    every = c.size("num_layers", "no_rope_layer_interval")
    turned = c.values.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(layers)]
    flags = cast("list[object]", turned) if isinstance(turned, list) else []
    if len(flags) != layers or not all(type(x) is int and x in (0, 1) for x in flags):
        c.reject("no_rope_layers", f"0 (without rope) or 1 for each of the {layers} layers")
    chunk = c.optional("max_position_embeddings", "attention_chunk_size")
    unlisted: list[Attention] = ["chunked" if x and chunk else "global" for x in flags]
    kinds = _layer_types(c, layers, unlisted, ("full_attention", "chunked_attention"))
    for i, (kind, rope) in enumerate(zip(kinds, flags, strict=True)):
        if kind == "chunked" and not (rope and chunk):
            lacks = "rope" if chunk else "attention_chunk_size"
            c.reject("layer_types", f"full_attention in layer {i}, which has no {lacks}")
    mixers = [k if x else "nope" for k, x in zip(kinds, flags, strict=True)]
    return fields | {
        **expert_sizes(c, "num_local_experts", "intermediate_size"),
        **_interleaved(c, layers),
        "ffn_hidden_size": c.size("ffn_hidden_size", "intermediate_size_mlp"),
        "shared_ffn_hidden_size": c.size("ffn_hidden_size", "intermediate_size"),
        "router": "sigmoid",
        "norm_topk_prob": False,
        "mixers": shortest(mixers),
        "attention_chunk_size": chunk if "chunked" in mixers else None,
        "qk_l2_norm": c.flag("use_qk_norm"),
    }


def _interleaved(c: Keys, layers: int) -> Fields:
    """Experts in every so many layers, or in those that the file lists."""
    step = c.size("num_layers", "interleave_moe_layer_step")
    value = c.values.get("moe_layers")
    if value is None:
        return {"first_dense_layers": step - 1, "moe_layer_freq": step}
    listed = cast("list[object]", value) if isinstance(value, list) else []
    if not listed or not all(type(i) is int and 0 <= i < layers for i in listed):
        c.reject("moe_layers", f"a list of layers below {layers}, not empty")
    return {"mlps": shortest(["experts" if i in listed else "dense" for i in range(layers)])}


def _llama4_multimodal(c: Keys) -> Fields:
    """The text part; nothing is said of the vision tower."""
    text = c.inside("text_config", _LLAMA4)
    text.only("model_type", "llama4_text")
    return _llama4(text)


def _deepseek(c: Keys) -> Fields:
    return _biased_decoder(c) | deepseek_experts(c)


def _glm4_moe(c: Keys) -> Fields:
    return decoder(c) | {
        **deepseek_experts(c),
        "qkv_bias": c.flag("attention_bias"),
        "qk_norm": c.flag("use_qk_norm"),
        "rotary_fraction": rotary_fraction(c),
    }


def _dbrx(c: Keys) -> Fields:
    """DBRX's own names, in three objects."""
    attention, experts = (
        c.inside("attn_config", _DBRX_ATTENTION),
        c.inside("ffn_config", _DBRX_EXPERTS),
    )
    fields = usual_sizes(
        c,
        num_layers=("n_layers",),
        hidden_size=("d_model",),
        num_attention_heads=("n_heads",),
        max_position_embeddings=("max_seq_len",),
    )
    fields |= expert_sizes(experts, "moe_num_experts", "ffn_hidden_size", "moe_top_k")
    return fields | {
        "ffn_hidden_size": fields["moe_ffn_hidden_size"],
        "num_query_groups": query_groups(attention, fields["num_attention_heads"], "kv_n_heads"),
        "activation": experts.inside("ffn_act_fn", {}).activation("name"),
        "hidden_dropout": c.dropout("resid_pdrop"),
        "attention_dropout": attention.dropout("attn_pdrop"),
        "embedding_dropout": c.dropout("emb_pdrop"),
    }


def _t5(c: Keys) -> Fields:
    """T5, and 1.1, whose MLPs are gated."""
    layers = c.size("num_layers", "num_layers")
    heads, dropout = c.size("num_attention_heads", "num_heads"), c.dropout("dropout_rate")
    kind = c.text("feed_forward_proj")
    gated = kind.startswith("gated-")
    name = "gelu_new" if kind == "gated-gelu" else kind.removeprefix("gated-")
    if name not in ACTIVATIONS:
        known = (f"{way}{act}" for way in ("", "gated-") for act in ACTIVATIONS)
        c.reject("feed_forward_proj", f"one of {', '.join(known)}")
    return {
        "num_layers": c.optional("num_layers", "num_decoder_layers") or layers,
        "encoder_num_layers": layers,
        "hidden_size": c.size("hidden_size", "d_model"),
        "ffn_hidden_size": c.size("ffn_hidden_size", "d_ff"),
        "num_attention_heads": heads,
        "num_query_groups": heads,
        "kv_channels": c.size("kv_channels", "d_kv"),
        "vocab_size": c.size("vocab_size", "vocab_size"),
        "max_position_embeddings": c.size("max_position_embeddings", "n_positions"),
        "relative_buckets": c.whole("relative_attention_num_buckets", 2, 2**16),
        "gated": gated,
        "activation": ACTIVATIONS[name],
        "tied_embeddings": c.flag("tie_word_embeddings"),
        "hidden_dropout": dropout,
        "attention_dropout": dropout,
        "embedding_dropout": dropout,
    }


_TIED: Json = {"tie_word_embeddings": True}
_T5: Json = _TIED | {
    "vocab_size": 32128,
    "relative_attention_num_buckets": 32,
    "dropout_rate": 0.1,
    "feed_forward_proj": "relu",
    "n_positions": 512,
}
_LLAMA: Json = {
    "tie_word_embeddings": False,
    "head_dim": None,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
}
_QWEN: Json = _LLAMA | {"use_sliding_window": False, "sliding_window": 4096}
_GEMMA: Json = _TIED | {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "sliding_window": 4096,
}
_GEMMA2: Json = _GEMMA | {
    "sliding_window_pattern": 2,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3: Json = _GEMMA | {
    "sliding_window_pattern": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
}
_GPT2: Json = _TIED | {
    "activation_function": "gelu_new",
    "resid_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "embd_pdrop": 0.1,
}
_OPT: Json = _TIED | {
    "activation_function": "relu",
    "do_layer_norm_before": True,
    "_remove_final_layer_norm": False,
    "enable_bias": True,
    "dropout": 0.1,
    "attention_dropout": 0.0,
}
_REFINED_WEB: Json = _TIED | {
    "num_kv_heads": None,
    "max_position_embeddings": 2048,
    "new_decoder_architecture": False,
    "alibi": False,
    "bias": False,
    "activation": "gelu",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
_FALCON: Json = _REFINED_WEB | {"multi_query": True, "parallel_attn": True}
_MIXTRAL: Json = _LLAMA | {"sliding_window": None}
_QWEN3_MOE: Json = _QWEN | {
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "norm_topk_prob": False,
}
# Defaults of the class in transformers 5.23, those of Qwen1.5-MoE-A2.7B
_QWEN2_MOE: Json = _QWEN3_MOE | {
    "num_key_value_heads": 16,
    "shared_expert_intermediate_size": 5632,
    "moe_intermediate_size": 1408,
    "num_experts": 60,
    "num_experts_per_tok": 4,
}
_GPT_OSS: Json = _LLAMA | {
    "head_dim": 64,
    "sliding_window": 128,
    "attention_bias": True,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "max_position_embeddings": 131072,
}
_LLAMA4: Json = _LLAMA | {
    "head_dim": 128,
    "attention_bias": False,
    "intermediate_size_mlp": 16384,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
    "use_qk_norm": True,
    "max_position_embeddings": 131072,
}
_DEEPSEEK: Json = _LLAMA | {
    "num_key_value_heads": None,
    "attention_bias": False,
    "moe_layer_freq": 1,
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "topk_method": "greedy",
}
_NOAUX: Json = {"scoring_func": "sigmoid", "norm_topk_prob": True, "topk_method": "noaux_tc"}
_DEEPSEEK_V3 = _DEEPSEEK | _NOAUX | {"n_group": 8, "topk_group": 4}
_GLM4_MOE = _DEEPSEEK | _NOAUX | {"use_qk_norm": False, "partial_rotary_factor": 0.5}
_DBRX_ATTENTION: Json = {"attn_pdrop": 0.0}
_DBRX_EXPERTS: Json = {"ffn_act_fn": {"name": "silu"}}
_DBRX: Json = {"tie_word_embeddings": False, "resid_pdrop": 0.0, "emb_pdrop": 0.0}
_BERT: Json = _TIED | {
    "hidden_act": "gelu",
    "type_vocab_size": 2,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}

ARCHITECTURES: dict[str, Architecture] = {
    "GPT2LMHeadModel": Architecture(("gpt2",), "gpt2", _gpt2, _GPT2),
    "LlamaForCausalLM": Architecture(
        ("llama",),
        "llama2-7b",
        _llama,
        _LLAMA
        | {"num_key_value_heads": None, "attention_bias": False, "mlp_bias": False}
        | {"max_position_embeddings": 2048},
    ),
    "MistralForCausalLM": Architecture(
        ("mistral",), "mistral-7b-v0.1", _mistral, _LLAMA | {"sliding_window": 4096}
    ),
    "Qwen2ForCausalLM": Architecture(
        ("qwen2",), "qwen2.5-7b", _qwen2, _QWEN | {"max_window_layers": 28}
    ),
    "Qwen3ForCausalLM": Architecture(
        ("qwen3",),
        "qwen3-8b",
        _qwen3,
        _QWEN | {"max_window_layers": 28, "head_dim": 128, "attention_bias": False},
    ),
    "MixtralForCausalLM": Architecture(("mixtral",), "mixtral-8x7b", _mixtral, _MIXTRAL),
    "Qwen3MoeForCausalLM": Architecture(("qwen3_moe",), "qwen3-30b-a3b", _qwen3_moe, _QWEN3_MOE),
    "Qwen2MoeForCausalLM": Architecture(("qwen2_moe",), "qwen2-57b-a14b", _qwen2_moe, _QWEN2_MOE),
    "GptOssForCausalLM": Architecture(("gpt_oss",), "gpt-oss-120b", _gpt_oss, _GPT_OSS),
    "Llama4ForCausalLM": Architecture(("llama4_text",), "llama4-scout", _llama4, _LLAMA4),
    "Llama4ForConditionalGeneration": Architecture(
        ("llama4",), "llama4-scout", _llama4_multimodal, {}
    ),
    "DeepseekForCausalLM": Architecture(("deepseek",), "deepseek-moe-16b", _deepseek, _DEEPSEEK),
    "DeepseekV2ForCausalLM": Architecture(
        ("deepseek_v2",), "deepseek-v2", deepseek_latent, _DEEPSEEK
    ),
    "DeepseekV3ForCausalLM": Architecture(
        ("deepseek_v3", "kimi_k2"), "deepseek-v3", deepseek_latent, _DEEPSEEK_V3
    ),
    "Glm4MoeForCausalLM": Architecture(("glm4_moe",), "glm-4.5", _glm4_moe, _GLM4_MOE),
    "DbrxForCausalLM": Architecture(("dbrx",), "dbrx", _dbrx, _DBRX),
    "Gemma2ForCausalLM": Architecture(("gemma2",), "gemma2-9b", _gemma2, _GEMMA2),
    "Gemma3ForCausalLM": Architecture(("gemma3_text",), "gemma3-1b", _gemma2, _GEMMA3),
    "Gemma3ForConditionalGeneration": Architecture(
        ("gemma3",), "gemma3-4b", _gemma3_multimodal, _GEMMA3
    ),
    "Phi3ForCausalLM": Architecture(
        ("phi3",),
        "phi3-mini",
        _phi3,
        _LLAMA
        | {"num_key_value_heads": None, "partial_rotary_factor": 1.0}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0},
    ),
    "T5ForConditionalGeneration": Architecture(("t5",), "t5-base", _t5, _T5),
    "FalconForCausalLM": Architecture(("falcon",), "falcon-7b", _falcon, _FALCON),
    "RWForCausalLM": Architecture(
        ("RefinedWeb", "RefinedWebModel"), "falcon-7b", _falcon, _REFINED_WEB
    ),
    "OPTForCausalLM": Architecture(("opt",), "opt-125m", _opt, _OPT),
    "BertForMaskedLM": Architecture(("bert",), "bert-base", _bert, _BERT),
    "BertModel": Architecture(("bert",), "bert-base", _bert_backbone, _BERT),
    **STATE_ARCHITECTURES,
}
"""The architectures that can be read. Where a file names none, its model_type's first counts."""

_MISSING = {
    "norms of queries and keys over all heads at once": ("OlmoeForCausalLM", "olmoe"),
    "SparseMixer routing": ("PhiMoEForCausalLM", "phimoe"),
    "sparse attention with an indexer": ("DeepseekV32ForCausalLM", "deepseek_v32"),
    "Mamba-1 in heads that have a B and a C each": ("ZambaForCausalLM", "zamba"),
    "block-sparse attention": ("Phi3SmallForCausalLM", "phi3small"),
    "an encoder with learned positions": (*("BartForConditionalGeneration", "bart"),),
}
MISSING = {name: what for what, names in _MISSING.items() for name in names}
"""What a `ModelConfig` lacks for other architectures and model types that people may try."""


def _architecture(c: Keys) -> Architecture:
    """The row for this file, by its architecture or else its model_type."""
    listed = c.values.get("architectures")
    if not listed:  # missing, null or empty
        model_type = c.text("model_type")
        for row in ARCHITECTURES.values():
            if model_type in row.model_types:
                return row
        known = [name for row in ARCHITECTURES.values() for name in row.model_types]
        c.reject("model_type", _one_of(model_type, known))
    name = cast("list[object]", listed)[0] if isinstance(listed, list) else None
    if not isinstance(name, str):
        c.reject("architectures", "a list of names")
    if name not in ARCHITECTURES:
        c.reject("architectures", _one_of(name, ARCHITECTURES))
    row = ARCHITECTURES[name]
    if c.values.get("model_type") is not None and c.text("model_type") not in row.model_types:
        c.reject("model_type", f"{' or '.join(row.model_types)}, as architectures names {name}")
    return row


def _one_of(got: str, known: Collection[str]) -> str:
    """The known names, and what is missing for this one or else a name like it."""
    names = f"one of {', '.join(dict.fromkeys(known))}"
    if got in MISSING:
        return f"{names}; missing for {got}: {MISSING[got]}"
    return names + did_you_mean(got[:80], known)
