"""Alibaba: Qwen 1.5 to 3.6, with and without experts, and Qwen3-Next."""

from __future__ import annotations

from stagewright.model.architecture import LIMITS
from stagewright.model.hf import parts
from stagewright.model.hf.keys import Fields, Keys, Map, family
from stagewright.model.layers import StateSpace, every


def _dense_layers(c: Keys) -> Fields:
    """Layers are dense where listed, and otherwise but for every `decoder_sparse_step`-th."""
    step, value = c.size("num_layers", "decoder_sparse_step"), c.get("mlp_only_layers")
    first = len(c.items("mlp_only_layers"))
    if (value is not None and value != list(range(first))) or (first and step > 1):
        c.reject("mlp_only_layers", "the first layers in order, and none where layers alternate")
    return {"first_dense_layers": first or step - 1, "moe_layer_freq": step}


def _next_mixers(c: Keys) -> tuple[str, ...]:
    """Attention in every fourth layer or where listed."""
    if c.get("mlp_only_layers"):
        c.reject("mlp_only_layers", "none; dense layers are not supported")
    period = c.size("num_layers", "full_attention_interval")
    if c.get("layer_types") is not None:
        return parts.listed_mixers("gated_delta")(c)
    return every(period, period - 1, "gated_delta")


def _next_state(c: Keys) -> StateSpace:
    groups = c.integer("linear_num_key_heads", 1, parts.MAX_STATE_COUNT)
    heads = c.integer("linear_num_value_heads", 1, parts.MAX_STATE_COUNT)
    if heads % groups:
        c.reject("linear_num_key_heads", f"a divisor of the {heads} value heads")
    return StateSpace(
        heads=heads,
        head_width=c.integer("linear_value_head_dim", 1, LIMITS["kv_channels"]),
        groups=groups,
        state=c.integer("linear_key_head_dim", 1, LIMITS["kv_channels"]),
        conv=c.integer("linear_conv_kernel_dim", 1, 64),
        conv_bias=False,
        chunk=64,
    )


_WINDOW = parts.windows(
    lambda c, i: i >= c.integer("max_window_layers", 0, LIMITS["num_layers"]),
    used="use_sliding_window",
)
_MOE: Map = {
    **parts.BIASED,
    **parts.experts("num_experts", "moe_intermediate_size"),
    "norm_topk_prob": "norm_topk_prob",
    "moe_layer_freq": _dense_layers,
    "mixers": parts.windows(lambda c, i: True, used="use_sliding_window", from_list=False),
}
# The gate is half of the projection of queries, and has its bias.
_GATED: Map = {**parts.BIASED, "attention_gate_bias": "attention_bias"}
_NEXT_LAYERS: Map = {
    "rotary_fraction": parts.rotary_fraction,
    "mixers": _next_mixers,
    "state_space": _next_state,
}

FAMILIES = {
    "Qwen2ForCausalLM": family(
        "qwen2 qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text qwen2_5_omni_text",
        parts.DECODER,
        like="qwen2.5-7b",
        mixers=_WINDOW,
    ),
    "Qwen2MoeForCausalLM": family(
        "qwen2_moe",
        _MOE,
        parts.SHARED_EXPERTS,
        like="qwen2-57b-a14b",
        qkv_bias="qkv_bias",
        attention_output_bias=False,
    ),
    "Qwen3ForCausalLM": family(
        "qwen3 qwen3_vl qwen3_vl_text", parts.BIASED, like="qwen3-8b", mixers=_WINDOW
    ),
    "Qwen3MoeForCausalLM": family(
        "qwen3_moe qwen3_vl_moe qwen3_vl_moe_text qwen3_omni_moe_text",
        _MOE,
        like="qwen3-30b-a3b",
    ),
    "Qwen3NextForCausalLM": family(
        "qwen3_next",
        _GATED,
        parts.experts("num_experts", "moe_intermediate_size"),
        parts.SHARED_EXPERTS,
        _NEXT_LAYERS,
        like="qwen3-next-80b-a3b",
        norm_topk_prob="norm_topk_prob",
        only={"decoder_sparse_step": 1},
    ),
    "Qwen3_5ForCausalLM": family(
        "qwen3_5_text qwen3_5",
        _GATED,
        _NEXT_LAYERS,
        parts.NO_EXPERTS,
        like="qwen3-next-80b-a3b",
        shared_expert_gate=False,
        only={"attn_output_gate": True},
        unused="output_gate_type",
    ),
    "Qwen3_5MoeForCausalLM": family(
        "qwen3_5_moe_text qwen3_5_moe",
        _GATED,
        _NEXT_LAYERS,
        parts.experts("num_experts", "moe_intermediate_size"),
        parts.SHARED_EXPERTS,
        like="qwen3-next-80b-a3b",
        ffn_hidden_size="moe_intermediate_size",  # no layer is dense
        only={"attn_output_gate": True},
        unused="output_gate_type",
    ),
}
