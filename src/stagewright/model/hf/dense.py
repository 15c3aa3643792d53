"""The maps of further dense decoders: Llama's keys with other norms, biases, gates and windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from stagewright.model.architecture import LIMITS
from stagewright.model.hf.keys import Fields, Fixed, Keys, Map, Reader
from stagewright.model.hf.parts import (
    BIASED,
    DECODER,
    LATENT,
    LAYER_TYPES,
    bits,
    head_width,
    or_times_hidden,
    rotary_fraction,
    sizes,
    windows,
)
from stagewright.model.patterns import shortest

LAYER_NORM: Map = {"norm": Fixed("layernorm"), "norm_bias": Fixed(True)}
"""LayerNorms with a bias, instead of Llama's RMSNorms."""

UNGATED: Map = {"gated": Fixed(False)}
_BIASES = ("qkv_bias", "attention_output_bias", "mlp_bias")


def biases(key: str, *fields: str) -> Map:
    """Biases that one key switches; all of attention's and of the MLP's unless some are named."""
    return dict.fromkeys(fields or _BIASES, key)


def first_of(*keys: str, default: object) -> Reader:
    """The value of the first of several keys that a file has, or else a default."""

    def read(c: Keys) -> object:
        key = c.used(*keys)
        return c.get(key) if c.get(key) is not None else default

    return read


def local_and_nope(period: str = "sliding_window_pattern") -> Reader:
    """Windows where there is rope, and layers without positions that see all (Cohere 2, Exaone 4).

    Where there is no window, every layer sees all and has rope.
    """

    def read(c: Keys) -> Fields:
        window = c.optional("max_position_embeddings", "sliding_window")
        if window is None:
            c.seen.add("layer_types")
            return {"sliding_window": None, "mixers": ("global",)}
        kinds = _listed(c, period)
        mixers = ["local" if kind == "local" else "nope" for kind in kinds]
        inner = window if "local" in mixers else None
        return {"sliding_window": inner, "mixers": shortest(mixers)}

    return read


def _listed(c: Keys, period: str) -> Sequence[str]:
    """The kinds of layers, as the file lists them, or all but every so manieth with a window."""
    layers = c.fields["num_layers"]
    if c.get("layer_types") is None:
        often, last = c.get(period), layers
        if isinstance(often, str) and set(often) <= {"L", "G"} and often:
            return ["local" if often[i % len(often)] == "L" else "global" for i in range(last)]
        step = c.size("num_layers", period)
        return ["global" if (i + 1) % step == 0 else "local" for i in range(layers)]
    listed = [LAYER_TYPES.get(str(x), "") for x in c.items("layer_types")]
    if len(listed) != layers or "" in listed:
        c.reject("layer_types", f"{' or '.join(LAYER_TYPES)} for each of the {layers} layers")
    return listed


def _smollm_mixers(c: Keys) -> Fields:
    """Every fourth layer has no positions, or those that the file lists."""
    layers, step = c.fields["num_layers"], c.size("num_layers", "no_rope_layer_interval")
    turned = c.get("no_rope_layers") or [int((i + 1) % step != 0) for i in range(layers)]
    flags = bits(c, "no_rope_layers", turned, "without rope")
    read: Fields = windows(lambda c, i: False, used="use_sliding_window")(c)
    if read["sliding_window"] is not None:
        kinds = [read["mixers"][i % len(read["mixers"])] for i in range(layers)]
        if any(not x and k == "local" for x, k in zip(flags, kinds, strict=True)):
            c.reject("layer_types", "full_attention in layers without rope")
        mixers = [k if x else "nope" for x, k in zip(flags, kinds, strict=True)]
        return {"sliding_window": read["sliding_window"], "mixers": shortest(mixers)}
    return {"sliding_window": None, "mixers": shortest(["global" if x else "nope" for x in flags])}


def _parallel(key: str, norms: int) -> Reader:
    """A parallel block where a key says so; it has so many norms."""

    def read(c: Keys) -> Fields:
        parallel = c.flag(key)
        return {"parallel_block": parallel, "parallel_norms": norms if parallel else 1}

    return read


def _rotary_channels(key: str) -> Reader:
    """The part of a head that rope turns, as a number of channels."""

    def read(c: Keys) -> float:
        width = c.fields["kv_channels"]
        if c.get(key) is None:
            return 1.0
        return min(c.whole(key, 1, LIMITS["kv_channels"]), width) / width

    return read


def _neox_fraction(c: Keys) -> float:
    keys = ("rope_parameters.partial_rotary_factor", "rotary_pct", "partial_rotary_factor")
    return c.number(c.used(*keys), 0, 1)


def _helium_head(c: Keys) -> int:
    """The width of a head; Helium's output projection is square, whatever its heads are."""
    width = head_width(("num_attention_heads",), "head_dim")(c)
    hidden, heads = c.fields["hidden_size"], c.fields["num_attention_heads"]
    if width * heads != hidden:
        c.reject("head_dim", f"the hidden size {hidden} over the {heads} heads")
    return width


_OF_GPTJ = sizes(
    num_layers=("n_layer", "num_hidden_layers"),
    hidden_size=("n_embd", "hidden_size"),
    num_attention_heads=("n_head", "num_attention_heads"),
    max_position_embeddings=("n_positions", "max_position_embeddings"),
)

ARCEE: Map = {**BIASED, **UNGATED, "mlp_bias": "mlp_bias"}
NEMOTRON: Map = {**ARCEE, **LAYER_NORM, "rotary_fraction": rotary_fraction}
JAIS2: Map = {**ARCEE, **LAYER_NORM}
SEED_OSS: Map = {
    **DECODER,
    "qkv_bias": "attention_bias",
    "attention_output_bias": "attention_out_bias",
    "mlp_bias": "mlp_bias",
}
SMOLLM3: Map = {**BIASED, "mlp_bias": "mlp_bias", "mixers": _smollm_mixers}
ERNIE: Map = {**DECODER, **biases("use_bias")}
EXAONE4: Map = {
    **DECODER,
    "norm_placement": Fixed("output"),
    "qk_norm": Fixed(True),
    "mixers": local_and_nope(),
}
OLMO: Map = {**BIASED, "norm": Fixed("layernorm"), "norm_weight": Fixed(False)}
OLMO2: Map = {
    **BIASED,
    "norm_placement": Fixed("output"),
    "qk_norm": Fixed(True),
    "qk_norm_over_heads": Fixed(True),
}
OLMO3: Map = {**OLMO2, "mixers": windows(lambda c, i: (i + 1) % 4 > 0)}
COHERE: Map = {**BIASED, "norm": Fixed("layernorm"), "parallel_block": Fixed(True)}
COHERE2: Map = {**COHERE, "mixers": local_and_nope()}
GRANITE: Map = {**BIASED, "mlp_bias": "mlp_bias"}
STARCODER2: Map = {
    **DECODER,
    **LAYER_NORM,
    **UNGATED,
    **biases("use_bias"),
    "mixers": windows(lambda c, i: True, listed=False),
}
STABLELM: Map = {
    **DECODER,
    **LAYER_NORM,
    "qkv_bias": "use_qkv_bias",
    "parallel_block": _parallel("use_parallel_residual", 1),
    "rotary_fraction": rotary_fraction,
}
GPT_NEOX: Map = {
    **sizes(ffn_hidden_size="intermediate_size"),
    **LAYER_NORM,
    **UNGATED,
    "activation": "hidden_act",
    "qkv_bias": "attention_bias",
    "attention_output_bias": "attention_bias",
    "mlp_bias": Fixed(True),
    "parallel_block": _parallel("use_parallel_residual", 2),
    "rotary_fraction": _neox_fraction,
}
GPTJ: Map = {
    **_OF_GPTJ,
    **LAYER_NORM,
    **UNGATED,
    "ffn_hidden_size": or_times_hidden("n_inner", 4),
    "activation": "activation_function",
    "mlp_bias": Fixed(True),
    "lm_head_bias": Fixed(True),
    "parallel_block": Fixed(True),
    "rotary_fraction": _rotary_channels("rotary_dim"),
}
GPT_BIGCODE: Map = {
    **_OF_GPTJ,
    **UNGATED,
    **LAYER_NORM,
    **dict.fromkeys(_BIASES, Fixed(True)),
    "num_query_groups": lambda c: 1 if c.flag("multi_query") else c.fields["num_attention_heads"],
    "ffn_hidden_size": or_times_hidden("n_inner", 4),
    "activation": "activation_function",
    "position": Fixed("learned"),
}
BLOOM: Map = {
    **sizes(
        num_layers=("n_layer", "num_hidden_layers"),
        hidden_size=("hidden_size", "n_embed"),
        num_attention_heads=("n_head", "num_attention_heads"),
        max_position_embeddings=("seq_length", "max_position_embeddings"),
    ),
    **LAYER_NORM,
    **UNGATED,
    **dict.fromkeys(_BIASES, Fixed(True)),
    "ffn_hidden_size": or_times_hidden("n_inner", 4),
    "activation": Fixed("gelu_tanh"),
    "position": Fixed("alibi"),
    "embedding_norm": Fixed(True),
}
MPT: Map = {
    **sizes(
        num_layers="n_layers",
        hidden_size="d_model",
        num_attention_heads="n_heads",
        max_position_embeddings="max_seq_len",
    ),
    **UNGATED,
    "norm": Fixed("layernorm"),
    "ffn_hidden_size": lambda c: c.whole("expansion_ratio", 1, 64) * c.fields["hidden_size"],
    "activation": Fixed("gelu"),
    "position": lambda c: "alibi" if c.get("attn_config.alibi") is not False else "learned",
}
PHI: Map = {
    **DECODER,
    **LAYER_NORM,
    **UNGATED,
    **dict.fromkeys((*_BIASES, "lm_head_bias", "parallel_block"), Fixed(True)),
    "rotary_fraction": rotary_fraction,
}
GLM: Map = {**DECODER, "qkv_bias": "attention_bias", "rotary_fraction": rotary_fraction}
GLM4: Map = {**GLM, "norm_placement": Fixed("sandwich")}
HELIUM: Map = {
    **DECODER,
    "kv_channels": _helium_head,
    "qkv_bias": "attention_bias",
    "mlp_bias": "mlp_bias",
}
HYPERCLOVAX: Map = {
    **BIASED,
    "mlp_bias": "mlp_bias",
    "norm_placement": lambda c: "sandwich" if c.flag("use_post_norm") else "pre",
}
HUNYUAN: Map = {**BIASED, "qk_norm": first_of("use_qk_norm", default=True)}
NANOCHAT: Map = {
    **BIASED,
    **UNGATED,
    "norm_weight": Fixed(False),
    "qk_l2_norm": Fixed(True),
    "embedding_norm": Fixed(True),
    "logit_softcap": "final_logit_softcapping",
}
MINISTRAL: Map = {**DECODER, "mixers": windows(lambda c, i: True)}
LATENT_DENSE: Map = {**LATENT, "num_query_groups": lambda c: c.fields["num_attention_heads"]}
MINICPM3: Map = {**LATENT_DENSE, "mlp_bias": "mlp_bias"}
APERTUS: Map = {**BIASED, **UNGATED, "qk_norm": Fixed(True), "activation": Fixed("silu")}
MIMO: Map = {**DECODER, "qkv_bias": "attention_bias"}
VAULTGEMMA: Map = {
    **BIASED,
    "activation": "hidden_activation",
    "attention_softcap": "attn_logit_softcapping",
    "logit_softcap": "final_logit_softcapping",
    "mixers": windows(lambda c, i: (i + 1) % 2 > 0),
}
GEMMA1: Map = {**BIASED, "activation": ("hidden_activation", "hidden_act")}


def _neo_mixers(c: Keys) -> Fields:
    """Attention to all and within a window, as a list says."""
    layers = c.fields["num_layers"]
    names = {"global": "global", "local": "local"}
    listed = [names.get(str(x), "") for x in c.items("attention_layers")]
    if not listed and isinstance(c.get("attention_types"), list):
        listed = _expanded(c)
    if len(listed) != layers or "" in listed:
        c.reject("attention_layers", f"global or local for each of the {layers} layers")
    window = c.size("max_position_embeddings", "window_size") if "local" in listed else None
    return {"sliding_window": window, "mixers": shortest(listed)}


def _expanded(c: Keys) -> list[str]:
    """`[[["global", "local"], 12]]` as a list of layers."""
    kinds: list[str] = []
    for item in c.items("attention_types"):
        pair = cast("list[object]", item) if isinstance(item, list) else []
        if len(pair) != 2 or type(pair[1]) is not int or not isinstance(pair[0], list):
            c.reject("attention_types", "lists of kinds and how often they repeat")
        times = min(pair[1], LIMITS["num_layers"])
        kinds += [str(x) for x in cast("list[object]", pair[0])] * max(0, times)
    return kinds


GPT_NEO: Map = {
    **sizes(num_layers="num_layers", num_attention_heads="num_heads"),
    **LAYER_NORM,
    **UNGATED,
    **dict.fromkeys(("attention_output_bias", "mlp_bias"), Fixed(True)),
    "ffn_hidden_size": or_times_hidden("intermediate_size", 4),
    "activation": "activation_function",
    "position": Fixed("learned"),
    "mixers": _neo_mixers,
}
EXAONE: Map = {
    **BIASED,
    **{"num_layers": ("num_layers", "num_hidden_layers"), "activation": "activation_function"},
}
INTERNLM2: Map = {**DECODER, **biases("bias", "qkv_bias", "attention_output_bias")}
