"""Decoders of classes that nobody knows, read by the names that most config.json files share."""

from __future__ import annotations

from collections.abc import Sequence

from stagewright.model.architecture import LIMITS, MAX_EXPERTS
from stagewright.model.hf.keys import ACTIVATIONS, Fields, Keys, Map
from stagewright.model.hf.parts import (
    LATENT,
    NO_EXPERTS,
    head_width,
    query_groups,
    windows,
)

LIKE = "llama2-7b"


def _names(words: str) -> tuple[str, ...]:
    return tuple(words.split())


_LAYERS = _names("num_hidden_layers n_layers n_layer num_layers")
_HIDDEN = _names("hidden_size n_embd d_model hidden_dim")
_HEADS = _names("num_attention_heads n_heads n_head num_heads")
_GROUPS = _names(
    "num_key_value_heads num_kv_heads n_kv_heads n_head_kv num_query_groups multi_query_group_num"
)
_WIDTH = _names("intermediate_size ffn_hidden_size ffn_dim n_inner d_ff")
_VOCABULARY = _names("vocab_size padded_vocab_size")
_LONGEST = _names(
    "max_position_embeddings n_positions max_seq_len max_sequence_length seq_length "
    "model_max_length"
)
_ACTIVATION = _names("hidden_act hidden_activation activation_function activation")
_EXPERTS = _names("num_experts num_local_experts n_routed_experts moe_num_experts")
_EXPERT_WIDTH = _names(
    "moe_intermediate_size expert_intermediate_size expert_ffn_hidden_size "
    "moe_ffn_hidden_size intermediate_size ffn_hidden_size ffn_dim n_inner d_ff"
)
_TOP_K = _names(
    "num_experts_per_tok num_experts_per_token experts_per_token moe_topk moe_k "
    "top_k_experts moe_top_k num_selected_experts"
)
_SHARED = _names("n_shared_experts num_shared_experts moe_num_shared_experts num_shared_expert")
_SHARED_WIDTH = _names(
    "shared_expert_intermediate_size moe_shared_expert_intermediate_size "
    "shared_intermediate_size share_expert_dim"
)
_FIRST_DENSE = _names("first_k_dense_replace num_dense_layers moe_layer_start_index")
_BIAS = _names("attention_bias qkv_bias use_qkv_bias use_bias bias attention_qkv_bias")
_OUTPUT_BIAS = _names("attention_bias use_bias bias attention_output_bias")
_MLP_BIAS = _names("mlp_bias use_bias bias")
_QK_NORM = _names("use_qk_norm qk_norm qk_layernorm use_qk_layernorm")


def by_common_names(c: Keys) -> tuple[str, Fields, str]:
    """The preset, the fields, and what was assumed; a UserError where the names are not there."""
    unsaid: list[str] = []
    fields = c.read_all(
        {
            "num_layers": _LAYERS,
            "hidden_size": _HIDDEN,
            "num_attention_heads": _HEADS,
            "vocab_size": _VOCABULARY,
            "max_position_embeddings": lambda c: _longest(c, unsaid),
            "kv_channels": head_width(_HEADS, "head_dim", "attention_head_dim", "kv_channels"),
            "ffn_hidden_size": _WIDTH,
            "activation": lambda c: _activation(c, unsaid),
            "tied_embeddings": lambda c: _flag(c, ("tie_word_embeddings",)),
        }
    )
    fields |= c.read_all(_LATENTS if c.get("kv_lora_rank") else _HEADS_MAP)
    fields |= _experts(c)
    qkv, norms = _flag(c, _BIAS), _flag(c, _QK_NORM)
    fields["attention_output_bias"] = _flag(c, _OUTPUT_BIAS)
    if c.get("kv_lora_rank"):
        fields["latent_bias"] = qkv
    else:
        fields["qkv_bias"], fields["qk_norm"] = qkv, norms
    if not fields["shared_ffn_hidden_size"]:
        fields["mlp_bias"] = _flag(c, _MLP_BIAS)
    assumed = [
        "RMSNorms before attention and MLP",
        "a gated MLP",
        "rope",
        "no biases" if not qkv else "biases as its keys say",
        "norms of queries and keys" if norms else "no norms of queries and keys",
        *unsaid,
    ]
    return LIKE, fields, ", ".join(assumed)


def _groups(c: Keys) -> int:
    return query_groups(*_GROUPS)(c) if c.has(c.used(*_GROUPS)) else c.fields["num_attention_heads"]


_HEADS_MAP: Map = {
    "num_query_groups": _groups,
    "mixers": windows(lambda c, i: False),
}
_LATENTS: Map = {
    **{
        name: LATENT[name]
        for name in ("qk_rope_head_dim", "kv_channels", "kv_lora_rank", "v_head_dim")
    },
    "num_query_groups": lambda c: c.fields["num_attention_heads"],
    "q_lora_rank": lambda c: c.optional("hidden_size", "q_lora_rank") or 0,
}


def _longest(c: Keys, unsaid: list[str]) -> int:
    if c.has(c.used(*_LONGEST)):
        return c.size("max_position_embeddings", *_LONGEST)
    unsaid.append("at most 4096 positions")
    return 4096


def _activation(c: Keys, unsaid: list[str]) -> str:
    if c.has(c.used(*_ACTIVATION)):
        return c.word(c.used(*_ACTIVATION), ACTIVATIONS)
    unsaid.append("silu")
    return "silu"


def _flag(c: Keys, keys: Sequence[str]) -> bool:
    """A switch that is off where no key sets it."""
    key = c.used(*keys)
    return c.get(key) is not None and c.flag(key)


def _experts(c: Keys) -> Fields:
    """Experts under any of their names; none where no key counts them."""
    count = c.used(*_EXPERTS)
    if not c.get(count) or c.get(count) == 1:
        return c.read_all(NO_EXPERTS)
    fields = c.read_all(
        {
            **NO_EXPERTS,
            "num_experts": count,
            "top_k": _TOP_K,
            "moe_ffn_hidden_size": _EXPERT_WIDTH,
        }
    )
    shared, first, score = c.used(*_SHARED), c.used(*_FIRST_DENSE), c.get("scoring_func")
    if c.get(shared):
        number = c.integer(shared, 0, MAX_EXPERTS)
        fields["shared_ffn_hidden_size"] = number * fields["moe_ffn_hidden_size"]
    if c.get(c.used(*_SHARED_WIDTH)):
        fields["shared_ffn_hidden_size"] = c.size("ffn_hidden_size", *_SHARED_WIDTH)
    if c.get(first):
        fields["first_dense_layers"] = c.integer(first, 0, LIMITS["num_layers"])
    if score == "sigmoid":
        fields["router"] = "sigmoid"
    if c.get("norm_topk_prob") is not None:
        fields["norm_topk_prob"] = c.flag("norm_topk_prob")
    return fields
