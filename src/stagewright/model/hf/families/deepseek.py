"""DeepSeek: DeepSeek-MoE, V2, V3, V3.2 and V4; Kimi K2 (as V3) and Kimi-Linear of Moonshot AI."""

from __future__ import annotations

from stagewright.model.architecture import LIMITS, MAX_EXPERTS
from stagewright.model.hf import parts
from stagewright.model.hf.keys import Fields, Fixed, Keys, family
from stagewright.model.layers import StateSpace, shortest

# ---- DeepSeek-V4 ---------------------------------------------------------------------------------

_LAYER_TYPES: dict[object, str] = {
    "sliding_attention": "local",
    "compressed_sparse_attention": "compressed_indexed",
    "heavily_compressed_attention": "compressed",
}
_RATES: dict[str, tuple[str, str, int]] = {
    "compressed_indexed": ("compress_rate_csa", "compressed_sparse_attention", 4),
    "compressed": ("compress_rate_hca", "heavily_compressed_attention", 128),
}
"""Layers with compressed keys: transformers' older key of the rate, the newer one inside
`compress_rates`, and the rate of files without either."""


def _v4_layers(c: Keys) -> Fields:
    """Layers, and positions that have one key, as transformers or the published file says.

    The published `compress_ratios` has a number for each layer and each further token predicted.
    """
    layers = c.fields["num_layers"]
    rates: dict[str, int] = {}
    for kind, (older, newer, usual) in _RATES.items():
        key = c.used(f"compress_rates.{newer}", older)
        rates[kind] = c.integer(key, 2, 2**16) if c.has(key) else usual
    if c.get("layer_types") is not None:
        kinds = parts.listed(c, "layer_types", _LAYER_TYPES)
    elif c.get("compress_ratios") is not None:
        by_rate = {0: "local", **{rate: kind for kind, rate in rates.items()}}
        ratios = c.items("compress_ratios")[:layers]
        kinds = [by_rate[x] for x in ratios if isinstance(x, int) and x in by_rate]
        if not len(kinds) == len(ratios) == layers:
            wanted = f"{' or '.join(map(str, by_rate))} for each of the {layers} layers"
            c.reject("compress_ratios", wanted)
    else:  # as transformers' DeepseekV4Config has them
        pair = ("compressed", "compressed_indexed")
        kinds = [*["compressed"] * min(layers, 2), *(pair[i % 2] for i in range(layers - 2))]
    fields: Fields = {_RATES[kind][0]: rate if kind in kinds else 0 for kind, rate in rates.items()}
    if "compressed_indexed" not in kinds:
        fields |= dict.fromkeys(parts.INDEXER, 0)
    return fields | {"mixers": shortest(kinds)}


def _v4_rotary(c: Keys) -> float:
    """The part of a head that rope turns: its last channels."""
    width = c.fields["kv_channels"]
    if c.get("qk_rope_head_dim") is not None:
        return c.integer("qk_rope_head_dim", 2, width) / width
    keys = ("rope_parameters.main.partial_rotary_factor", "partial_rotary_factor")
    return c.number(c.used(*keys), 0, 1)


# ---- Kimi-Linear ---------------------------------------------------------------------------------


def _kimi_mixers(c: Keys) -> tuple[str, ...]:
    """Latent attention or delta attention, in lists of layers that count from 1."""
    layers = c.fields["num_layers"]
    linear = "linear_attn_config."
    full, delta = (
        {x for x in c.items(linear + key) if type(x) is int}
        for key in ("full_attn_layers", "kda_layers")
    )
    if full & delta or full | delta != {*range(1, layers + 1)}:
        words = f"with full_attn_layers each of the layers 1 to {layers} once"
        c.reject(f"{linear}kda_layers", words)
    return shortest(["global" if i + 1 in full else "kimi_delta" for i in range(layers)])


def _kimi_state(c: Keys) -> StateSpace:
    heads = c.integer("linear_attn_config.num_heads", 1, parts.MAX_STATE_COUNT)
    width = c.integer("linear_attn_config.head_dim", 1, LIMITS["kv_channels"])
    return StateSpace(
        heads=heads,
        head_width=width,
        groups=heads,
        state=width,
        conv=c.integer("linear_attn_config.short_conv_kernel_size", 1, 64),
        conv_bias=False,
        gate_rank=width,
        chunk=64,
    )


FAMILIES = {
    "DeepseekForCausalLM": family(
        "deepseek", parts.BIASED, parts.DEEPSEEK_EXPERTS, like="deepseek-moe-16b"
    ),
    "DeepseekV2ForCausalLM": family(
        "deepseek_v2", parts.LATENT, parts.DEEPSEEK_EXPERTS, like="deepseek-v2"
    ),
    "DeepseekV3ForCausalLM": family(
        "deepseek_v3 kimi_k2 kimi_k25", parts.LATENT, parts.DEEPSEEK_EXPERTS, like="deepseek-v3"
    ),
    "DeepseekV32ForCausalLM": family("deepseek_v32", parts.INDEXED, like="deepseek-v3.2"),
    "DeepseekV4ForCausalLM": family(
        "deepseek_v4",
        parts.sizes(),
        {name: name for name in parts.INDEXER},
        parts.experts("n_routed_experts", "moe_intermediate_size"),
        like="deepseek-v4-pro",
        ffn_hidden_size=Fixed(0),
        activation="hidden_act",
        attention_dropout="attention_dropout",
        num_query_groups=parts.query_groups("num_key_value_heads"),
        kv_channels="head_dim",
        rotary_fraction=_v4_rotary,
        q_lora_rank=parts.query_rank,
        o_groups="o_groups",
        o_lora_rank="o_lora_rank",
        attention_sinks=True,
        sliding_window="sliding_window",
        mixers=_v4_layers,
        residual_streams="hc_mult",
        sinkhorn_iterations="hc_sinkhorn_iters",
        shared_ffn_hidden_size=lambda c: (
            c.integer("n_shared_experts", 1, 1) * c.fields["moe_ffn_hidden_size"]
        ),
        router="scoring_func",
        norm_topk_prob="norm_topk_prob",
        expert_bias=True,
        activation_func_clamp_value=parts.number("swiglu_limit", 1e-3, 1e6),
        only={"attention_bias": False, "mlp_bias": False},
        unused="hc_eps num_hash_layers mlp_layer_types topk_method expert_dtype "
        "compress_rope_theta compress_ratios compress_rates qk_rope_head_dim "
        "routed_scaling_factor attention_bias mlp_bias",
        remark="layers that choose experts by a table of token ids are counted as if by scores",
    ),
    "KimiLinearForCausalLM": family(
        "kimi_linear",
        parts.LATENT,
        parts.experts("num_experts", "moe_intermediate_size", "num_experts_per_token"),
        like="kimi-linear-48b-a3b",
        max_position_embeddings=("max_position_embeddings", "model_max_length"),
        shared_ffn_hidden_size=lambda c: (
            c.integer("num_shared_experts", 0, MAX_EXPERTS) * c.fields["moe_ffn_hidden_size"]
        ),
        first_dense_layers=parts.integer("first_k_dense_replace", 0, LIMITS["num_layers"]),
        moe_layer_freq="moe_layer_freq",
        router="moe_router_activation_func",
        norm_topk_prob="moe_renormalize",
        expert_bias=True,
        mixers=_kimi_mixers,
        position=Fixed("none"),
        state_space=_kimi_state,
        only={"mla_use_nope": True},
        unused="head_dim",
    ),
}
