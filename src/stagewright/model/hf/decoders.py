"""The maps of transformers without states: which key of a config.json is which field.

Most are those of Llama, `DECODER`, with a few entries of their own.
"""

from __future__ import annotations

from stagewright.model.architecture import LIMITS
from stagewright.model.hf.keys import ACTIVATIONS, Fields, Fixed, Keys, Map
from stagewright.model.hf.parts import (
    BIASED,
    DECODER,
    DEEPSEEK_EXPERTS,
    LATENT,
    SHARED_EXPERTS,
    bits,
    experts,
    layer_types,
    number,
    or_times_hidden,
    query_groups,
    rotary_fraction,
    sizes,
    whole,
    windows,
)
from stagewright.model.patterns import shortest


def _opt_head(c: Keys) -> Fields:
    """OPT-350m alone has its norms behind, and an embedding narrower than the model."""
    pre, width = c.flag("do_layer_norm_before"), c.optional("hidden_size", "word_embed_proj_dim")
    return {
        "norm_placement": "pre" if pre else "post",
        "final_norm": pre and not c.flag("_remove_final_layer_norm"),
        "embedding_size": None if width == c.fields["hidden_size"] else width,
    }


def _falcon_block(c: Keys) -> Fields:
    """Falcon's newer decoder, which has `n_head_kv` in its first files, and the older one."""
    new = c.flag("new_decoder_architecture") or "n_head_kv" in c.values
    block: Fields = {"parallel_block": new or c.flag("parallel_attn"), "parallel_norms": 1}
    block["position"] = "alibi" if c.flag("alibi") else "rope"
    if not new:
        groups = 1 if c.flag("multi_query") else c.fields["num_attention_heads"]
        return block | {"num_query_groups": groups}
    given = c.get("num_ln_in_parallel_attn") is not None
    return block | {
        "num_query_groups": query_groups("n_head_kv", "num_kv_heads")(c),
        "parallel_norms": c.whole("num_ln_in_parallel_attn", 1, 2) if given else 2,
    }


def _qwen_dense_layers(c: Keys) -> Fields:
    """Layers are dense where listed, and otherwise but for every `decoder_sparse_step`-th."""
    step, value = c.size("num_layers", "decoder_sparse_step"), c.get("mlp_only_layers")
    first = len(c.items("mlp_only_layers"))
    if (value is not None and value != list(range(first))) or (first and step > 1):
        c.reject("mlp_only_layers", "the first layers in order, and none where layers alternate")
    return {"first_dense_layers": first or step - 1, "moe_layer_freq": step}


def _llama4_layers(c: Keys) -> Fields:
    """Chunks where there is rope, and neither in the other layers; experts where listed."""
    layers, period = c.fields["num_layers"], c.size("num_layers", "no_rope_layer_interval")
    turned = c.get("no_rope_layers") or [int((i + 1) % period != 0) for i in range(layers)]
    flags = bits(c, "no_rope_layers", turned, "without rope")
    chunk = c.optional("max_position_embeddings", "attention_chunk_size")
    known = ("full_attention", "chunked_attention")
    kinds = layer_types(c, ["chunked" if x and chunk else "global" for x in flags], known)
    for i, (kind, rope) in enumerate(zip(kinds, flags, strict=True)):
        if kind == "chunked" and not (rope and chunk):
            lacks = "rope" if chunk else "attention_chunk_size"
            c.reject("layer_types", f"full_attention in layer {i}, which has no {lacks}")
    mixers = [k if x else "nope" for k, x in zip(kinds, flags, strict=True)]
    step = c.size("num_layers", "interleave_moe_layer_step")
    fields: Fields = {
        "mixers": shortest(mixers),
        "attention_chunk_size": chunk if "chunked" in mixers else None,
    }
    if c.get("moe_layers") is None:
        return fields | {"first_dense_layers": step - 1, "moe_layer_freq": step}
    listed = c.items("moe_layers")
    if not listed or not all(type(i) is int and 0 <= i < layers for i in listed):
        c.reject("moe_layers", f"a list of layers below {layers}, not empty")
    kinds_of_mlp = ["experts" if i in listed else "dense" for i in range(layers)]
    return fields | {"mlps": shortest(kinds_of_mlp)}


def _t5_mlp(c: Keys) -> Fields:
    """T5's MLP, which is gated in version 1.1."""
    kind = c.text("feed_forward_proj")
    name = "gelu_new" if kind == "gated-gelu" else kind.removeprefix("gated-")
    if name not in ACTIVATIONS:
        known = (f"{way}{act}" for way in ("", "gated-") for act in ACTIVATIONS)
        c.reject("feed_forward_proj", f"one of {', '.join(known)}")
    return {"gated": kind.startswith("gated-"), "activation": ACTIVATIONS[name]}


_WINDOW = windows(lambda c, i: True, listed=False)
_QWEN_MOE_WINDOW = windows(lambda c, i: True, used="use_sliding_window", listed=False)
_QWEN_WINDOW = windows(
    lambda c, i: i >= c.whole("max_window_layers", 0, LIMITS["num_layers"]),
    used="use_sliding_window",
)
_GEMMA_WINDOW = windows(lambda c, i: (i + 1) % c.size("num_layers", "sliding_window_pattern") > 0)
_ALL_BIASES = ("qkv_bias", "attention_output_bias", "mlp_bias")

# GPT-2's own names of the sizes; transformers reads the usual ones as well.
GPT2: Map = {
    **sizes(
        num_layers=("n_layer", "num_hidden_layers"),
        hidden_size=("n_embd", "hidden_size"),
        num_attention_heads=("n_head", "num_attention_heads"),
        max_position_embeddings=("n_positions", "max_position_embeddings"),
    ),
    "ffn_hidden_size": or_times_hidden("n_inner", 4),
    "activation": "activation_function",
    "hidden_dropout": "resid_pdrop",
    "attention_dropout": "attn_pdrop",
    "embedding_dropout": "embd_pdrop",
}
LLAMA: Map = {**BIASED, "mlp_bias": "mlp_bias"}
MISTRAL: Map = {**DECODER, "mixers": _WINDOW}
MIXTRAL: Map = {**MISTRAL, **experts("num_local_experts", "intermediate_size")}
_PHI3_DROPOUTS = {"hidden_dropout": "resid_pdrop", "embedding_dropout": "embd_pdrop"}
PHI3: Map = {**MISTRAL, **_PHI3_DROPOUTS, "rotary_fraction": rotary_fraction}
QWEN2: Map = {**DECODER, "mixers": _QWEN_WINDOW}
QWEN3: Map = {**BIASED, "mixers": _QWEN_WINDOW}
OLMOE: Map = {
    **BIASED,
    **experts("num_experts", "intermediate_size"),
    "norm_topk_prob": "norm_topk_prob",
}
QWEN3_MOE: Map = {
    **BIASED,
    **experts("num_experts", "moe_intermediate_size"),
    "norm_topk_prob": "norm_topk_prob",
    "moe_layer_freq": _qwen_dense_layers,
    "mixers": _QWEN_MOE_WINDOW,
}
QWEN2_MOE: Map = {
    **QWEN3_MOE,
    **SHARED_EXPERTS,
    "qkv_bias": "qkv_bias",
    "attention_output_bias": Fixed(False),
}
GPT_OSS: Map = {
    **BIASED,
    **experts(
        *("num_local_experts", "intermediate_size", "num_experts_per_tok", "experts_per_token")
    ),
    "activation": Fixed("quick_gelu"),
    "activation_func_clamp_value": number("swiglu_limit", 1e-3, 1e6),
    "mixers": windows(lambda c, i: i % 2 == 0),
}
LLAMA4: Map = {
    **BIASED,
    **experts("num_local_experts", "intermediate_size"),
    "ffn_hidden_size": "intermediate_size_mlp",
    "shared_ffn_hidden_size": "intermediate_size",
    "router": Fixed("sigmoid"),
    "norm_topk_prob": Fixed(False),
    "qk_l2_norm": "use_qk_norm",
    "mixers": _llama4_layers,
}
DEEPSEEK: Map = {**BIASED, **DEEPSEEK_EXPERTS}
DEEPSEEK_LATENT: Map = {**LATENT, **DEEPSEEK_EXPERTS}
GLM4_MOE: Map = {
    **DECODER,
    **DEEPSEEK_EXPERTS,
    "qkv_bias": "attention_bias",
    "qk_norm": "use_qk_norm",
    "rotary_fraction": rotary_fraction,
}
DBRX: Map = {
    **sizes(
        num_layers="n_layers",
        hidden_size="d_model",
        num_attention_heads="n_heads",
        max_position_embeddings="max_seq_len",
    ),
    **experts("ffn_config.moe_num_experts", "ffn_config.ffn_hidden_size", "ffn_config.moe_top_k"),
    "ffn_hidden_size": "ffn_config.ffn_hidden_size",
    "num_query_groups": query_groups("attn_config.kv_n_heads"),
    "activation": "ffn_config.ffn_act_fn.name",
    "hidden_dropout": "resid_pdrop",
    "attention_dropout": "attn_config.attn_pdrop",
    "embedding_dropout": "emb_pdrop",
}
GEMMA: Map = {
    **BIASED,
    "activation": "hidden_activation",
    "attention_softcap": "attn_logit_softcapping",
    "logit_softcap": "final_logit_softcapping",
    "mixers": _GEMMA_WINDOW,
}
T5: Map = {
    "encoder_num_layers": "num_layers",
    "num_layers": lambda c: (
        c.optional("num_layers", "num_decoder_layers") or c.fields["encoder_num_layers"]
    ),
    "hidden_size": "d_model",
    "ffn_hidden_size": "d_ff",
    **dict.fromkeys(("num_attention_heads", "num_query_groups"), "num_heads"),
    "kv_channels": "d_kv",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "n_positions",
    "relative_buckets": whole("relative_attention_num_buckets", 2, 2**16),
    "tied_embeddings": "tie_word_embeddings",
    **dict.fromkeys(("hidden_dropout", "attention_dropout", "embedding_dropout"), "dropout_rate"),
    "activation": _t5_mlp,
}
FALCON: Map = {
    **sizes(
        num_layers=("num_hidden_layers", "n_layer"),
        num_attention_heads=("num_attention_heads", "n_head"),
    ),
    "num_query_groups": _falcon_block,
    "ffn_hidden_size": or_times_hidden("ffn_hidden_size", 4),
    **dict.fromkeys(_ALL_BIASES, "bias"),
    **{name: name for name in ("activation", "hidden_dropout", "attention_dropout")},
}
OPT: Map = {
    **sizes(ffn_hidden_size="ffn_dim"),
    **dict.fromkeys(_ALL_BIASES, "enable_bias"),
    "activation": "activation_function",
    "hidden_dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "norm_placement": _opt_head,
}
BERT: Map = {
    **sizes(ffn_hidden_size="intermediate_size"),
    "token_types": whole("type_vocab_size", 1, LIMITS["vocab_size"]),
    "activation": "hidden_act",
    **dict.fromkeys(("hidden_dropout", "embedding_dropout"), "hidden_dropout_prob"),
    "attention_dropout": "attention_probs_dropout_prob",
}
# With its pooler: the output projection, which it lacks, is the tied embedding.
BERT_POOLED: Map = {
    **BERT,
    **dict.fromkeys(("pooler", "tied_embeddings"), Fixed(True)),
    **dict.fromkeys(("mlm_transform", "lm_head_bias"), Fixed(False)),
}
