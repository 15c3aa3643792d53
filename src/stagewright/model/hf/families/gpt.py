"""GPT-2 and gpt-oss of OpenAI, and what followed GPT-2: GPT-J, GPT-Neo, GPT-NeoX, CodeGen, BLOOM,
GPT-BigCode and StarCoder2."""

from __future__ import annotations

from typing import cast

from stagewright.model.architecture import LIMITS
from stagewright.model.hf import parts
from stagewright.model.hf.keys import Fields, Fixed, Keys, Map, family
from stagewright.model.layers import shortest

# GPT-2's own names of the sizes; transformers reads the usual ones as well.
_SIZES = parts.sizes(
    num_layers=("n_layer", "num_hidden_layers"),
    hidden_size=("n_embd", "hidden_size"),
    num_attention_heads=("n_head", "num_attention_heads"),
    max_position_embeddings=("n_positions", "max_position_embeddings"),
)


def _rotary_dim(c: Keys) -> float:
    """The part of a head that rope turns, as a number of channels."""
    width = c.fields["kv_channels"]
    if c.get("rotary_dim") is None:
        return 1.0
    return min(c.integer("rotary_dim", 1, LIMITS["kv_channels"]), width) / width


def _neox_fraction(c: Keys) -> float:
    keys = ("rope_parameters.partial_rotary_factor", "rotary_pct", "partial_rotary_factor")
    return c.number(c.used(*keys), 0, 1)


def _neo_mixers(c: Keys) -> Fields:
    """Attention to all and within a window, as a list says."""
    layers = c.fields["num_layers"]
    kinds = c.items("attention_layers")
    if not kinds and isinstance(c.get("attention_types"), list):
        kinds = _repeated(c)
    mixers = [x for x in kinds if x in ("global", "local")]
    if not len(mixers) == len(kinds) == layers:
        c.reject("attention_layers", f"global or local for each of the {layers} layers")
    window = c.size("max_position_embeddings", "window_size") if "local" in mixers else None
    return {"sliding_window": window, "mixers": shortest(mixers)}


def _repeated(c: Keys) -> list[object]:
    """`[[["global", "local"], 12]]` as a list of layers."""
    kinds: list[object] = []
    for item in c.items("attention_types"):
        pair = cast("list[object]", item) if isinstance(item, list) else []
        if len(pair) != 2 or type(pair[1]) is not int or not isinstance(pair[0], list):
            c.reject("attention_types", "lists of kinds and how often they repeat")
        kinds += cast("list[object]", pair[0]) * max(0, min(pair[1], LIMITS["num_layers"]))
    return kinds


_GPTJ: Map = {
    **_SIZES,
    **parts.LAYER_NORM,
    **parts.UNGATED,
    "ffn_hidden_size": parts.or_four_times_hidden("n_inner"),
    "activation": "activation_function",
    "mlp_bias": True,
    "lm_head_bias": True,
    "parallel_block": True,
    "rotary_fraction": _rotary_dim,
}

FAMILIES = {
    "GPT2LMHeadModel": family(
        "gpt2",
        _SIZES,
        like="gpt2",
        ffn_hidden_size=parts.or_four_times_hidden("n_inner"),
        activation="activation_function",
        hidden_dropout="resid_pdrop",
        attention_dropout="attn_pdrop",
        embedding_dropout="embd_pdrop",
        only={"add_cross_attention": False},
    ),
    "GptOssForCausalLM": family(
        "gpt_oss",
        parts.BIASED,
        parts.experts(
            *("num_local_experts", "intermediate_size"),
            *("num_experts_per_tok", "experts_per_token"),
        ),
        like="gpt-oss-120b",
        activation=Fixed("quick_gelu"),
        activation_func_clamp_value=parts.number("swiglu_limit", 1e-3, 1e6),
        mixers=parts.windows(lambda c, i: i % 2 == 0),
        only={"hidden_act": "silu", "swiglu_alpha": 1.702},
    ),
    "GPTJForCausalLM": family("gptj", _GPTJ),
    "CodeGenForCausalLM": family("codegen", _GPTJ),
    "GPTNeoForCausalLM": family(
        "gpt_neo",
        parts.sizes(num_layers="num_layers", num_attention_heads="num_heads"),
        parts.LAYER_NORM,
        parts.UNGATED,
        dict.fromkeys(("attention_output_bias", "mlp_bias"), True),
        ffn_hidden_size=parts.or_four_times_hidden("intermediate_size"),
        activation="activation_function",
        position=Fixed("learned"),
        mixers=_neo_mixers,
    ),
    "GPTNeoXForCausalLM": family(
        "gpt_neox",
        parts.sizes(ffn_hidden_size="intermediate_size"),
        parts.LAYER_NORM,
        parts.UNGATED,
        activation="hidden_act",
        qkv_bias="attention_bias",
        attention_output_bias="attention_bias",
        mlp_bias=True,
        parallel_block=parts.parallel("use_parallel_residual", 2),
        rotary_fraction=_neox_fraction,
    ),
    "BloomForCausalLM": family(
        "bloom",
        parts.sizes(
            num_layers=("n_layer", "num_hidden_layers"),
            hidden_size=("hidden_size", "n_embed"),
            num_attention_heads=("n_head", "num_attention_heads"),
            max_position_embeddings=("seq_length", "max_position_embeddings"),
        ),
        parts.LAYER_NORM,
        parts.UNGATED,
        dict.fromkeys(parts.ALL_BIASES, True),
        ffn_hidden_size=parts.or_four_times_hidden("n_inner"),
        activation=Fixed("gelu_tanh"),
        position=Fixed("alibi"),
        embedding_norm=True,
    ),
    "GPTBigCodeForCausalLM": family(
        "gpt_bigcode",
        _SIZES,
        parts.UNGATED,
        parts.LAYER_NORM,
        dict.fromkeys(parts.ALL_BIASES, True),
        num_query_groups=lambda c: 1 if c.flag("multi_query") else c.fields["num_attention_heads"],
        ffn_hidden_size=parts.or_four_times_hidden("n_inner"),
        activation="activation_function",
        position=Fixed("learned"),
    ),
    "Starcoder2ForCausalLM": family(
        "starcoder2",
        parts.DECODER,
        parts.LAYER_NORM,
        parts.UNGATED,
        dict.fromkeys(parts.ALL_BIASES, "use_bias"),
        mixers=parts.SAME_WINDOW,
    ),
}
