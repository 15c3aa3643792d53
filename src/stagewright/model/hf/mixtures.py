"""The maps of further mixtures of experts."""

from __future__ import annotations

from stagewright.model.architecture import LIMITS, MOST_EXPERTS
from stagewright.model.hf.dense import LAYER_NORM, OLMO2, biases, local_and_nope
from stagewright.model.hf.keys import Fields, Fixed, Keys, Map, Reader
from stagewright.model.hf.parts import (
    BIASED,
    DECODER,
    LATENT,
    bits,
    experts,
    rotary_fraction,
    windows,
)
from stagewright.model.patterns import shortest

SIGMOID: Map = {"router": Fixed("sigmoid"), "expert_bias": Fixed(True)}
"""DeepSeek-V3's way to choose experts: sigmoids, and a bias that balances the experts' load."""


def number_of_shared(*keys: str) -> Reader:
    """The width of shared experts together, which are as wide as the others; none where null."""

    def read(c: Keys) -> int:
        key = c.used(*keys)
        number = 0 if c.get(key) is None else c.whole(key, 0, MOST_EXPERTS)
        return number * c.fields["moe_ffn_hidden_size"]

    return read


def dense_first(*keys: str) -> Reader:
    """The dense layers: as many first ones as a key says, or as `mlp_layer_types` lists them."""

    def read(c: Keys) -> Fields:
        layers = c.fields["num_layers"]
        if c.get("mlp_layer_types") is None:
            key = c.used(*keys)
            if not keys or c.get(key) is None:
                return {"first_dense_layers": 0}
            return {"first_dense_layers": c.whole(key, 0, LIMITS["num_layers"])}
        names = {"dense": "dense", "sparse": "experts"}
        listed = [names.get(str(x), "") for x in c.items("mlp_layer_types")]
        if len(listed) != layers or "" in listed:
            c.reject("mlp_layer_types", f"dense or sparse for each of the {layers} layers")
        first = listed.index("experts") if "experts" in listed else layers
        if all(kind == "experts" for kind in listed[first:]) and first < layers:
            return {"first_dense_layers": first}
        return {"mlps": shortest(listed)}

    return read


def _groups(c: Keys) -> Fields:
    """Group-limited routing, where there is more than one group."""
    groups = c.get("n_group")
    if groups is None or groups == 1:
        return {"num_expert_groups": 1, "topk_groups": 1}
    count = c.whole("n_group", 1, c.fields["num_experts"])
    return {"num_expert_groups": count, "topk_groups": c.whole("topk_group", 1, count)}


def _minimax_fraction(c: Keys) -> float:
    width = c.fields["kv_channels"]
    return c.whole("rotary_dim", 1, width) / width if c.has("rotary_dim") else rotary_fraction(c)


def _minimax_mixers(c: Keys) -> tuple[str, ...]:
    """Softmax attention in every layer, also where a file lists the kinds of attention."""
    if c.get("attn_type_list") is not None and 0 in bits(
        c, "attn_type_list", c.get("attn_type_list"), "lightning"
    ):
        c.reject("attn_type_list", "1 for every layer")
    return ("global",)


def _ernie_experts(c: Keys) -> Fields:
    """Experts from one layer to another, every so manieth; none where their number is 0."""
    layers = c.fields["num_layers"]
    start = c.whole("moe_layer_start_index", 0, layers)
    end = c.get("moe_layer_end_index")
    last = layers - 1 if end in (None, -1) else c.whole("moe_layer_end_index", 0, 10**5)
    often = c.size("num_layers", "moe_layer_interval")
    kinds = [
        "experts" if start <= i <= last and (i + 1) % often == 0 else "dense" for i in range(layers)
    ]
    return {"mlps": shortest(kinds)}


def _listed_numbers(key: str, most: int) -> Reader:
    """A whole number, or a list that has the same number for every layer (Hunyuan)."""

    def read(c: Keys) -> int:
        value = c.get(key)
        if isinstance(value, list):
            numbers = {x for x in c.items(key) if type(x) is int and 0 <= x <= most}
            if len(numbers) != 1 or len(c.items(key)) < 1:
                c.reject(key, "one number for all layers")
            return numbers.pop()
        return c.whole(key, 0, most)

    return read


def _hunyuan_shared(c: Keys) -> int:
    """Shared experts, which have the width of the MLP each; one where the file does not say."""
    number = 1
    if c.get("num_shared_expert") is not None:
        number = _listed_numbers("num_shared_expert", MOST_EXPERTS)(c)
    return number * c.fields["ffn_hidden_size"]


def _hunyuan_width(c: Keys) -> int:
    if c.get("moe_intermediate_size") is None:
        return c.size("ffn_hidden_size", "intermediate_size")
    return _listed_numbers("moe_intermediate_size", LIMITS["ffn_hidden_size"])(c)


def _granite_shared(c: Keys) -> int:
    if not c.get("shared_intermediate_size"):
        return 0
    return c.size("ffn_hidden_size", "shared_intermediate_size")


MINIMAX_M2: Map = {
    **DECODER,
    **experts("num_local_experts", "intermediate_size"),
    **SIGMOID,
    "qk_norm": Fixed(True),
    "qk_norm_over_heads": Fixed(True),
    "rotary_fraction": _minimax_fraction,
    "mixers": _minimax_mixers,
}
ERNIE_MOE: Map = {
    **DECODER,
    **experts("moe_num_experts", "moe_intermediate_size", "moe_k"),
    "expert_bias": Fixed(True),
    "shared_ffn_hidden_size": number_of_shared("moe_num_shared_experts"),
    "mlps": _ernie_experts,
}
HUNYUAN_MOE: Map = {
    **BIASED,
    "qk_norm": lambda c: True if c.get("use_qk_norm") is None else c.flag("use_qk_norm"),
    **experts("num_experts", "moe_intermediate_size"),
    "moe_ffn_hidden_size": _hunyuan_width,
    "top_k": _listed_numbers("moe_topk", MOST_EXPERTS),
    "shared_ffn_hidden_size": _hunyuan_shared,
}
PHIMOE: Map = {
    **BIASED,
    **LAYER_NORM,
    **experts("num_local_experts", "intermediate_size"),
    "lm_head_bias": "lm_head_bias",
    "mixers": windows(lambda c, i: True, listed=False),
}
FLEX_OLMO: Map = {**OLMO2, **experts("num_experts", "intermediate_size")} | {
    "norm_topk_prob": "norm_topk_prob"
}
GRANITE_MOE: Map = {
    **BIASED,
    **experts("num_local_experts", "intermediate_size"),
    "shared_ffn_hidden_size": _granite_shared,
}
DOTS: Map = {
    **BIASED,
    **experts("n_routed_experts", "moe_intermediate_size"),
    **SIGMOID,
    "qk_norm": Fixed(True),
    "norm_topk_prob": "norm_topk_prob",
    "shared_ffn_hidden_size": number_of_shared("n_shared_experts"),
    "first_dense_layers": dense_first("first_k_dense_replace"),
    "num_expert_groups": _groups,
    "mixers": windows(lambda c, i: i >= c.whole("max_window_layers", 0, 10**4)),
}
HUNYUAN3: Map = {
    **BIASED,
    **experts("num_experts", "moe_intermediate_size"),
    **SIGMOID,
    "qk_norm": Fixed(True),
    "shared_ffn_hidden_size": number_of_shared("num_shared_experts"),
    "first_dense_layers": dense_first("first_k_dense_replace"),
}
SOLAR_OPEN: Map = {
    **DECODER,
    "ffn_hidden_size": ("intermediate_size", "moe_intermediate_size"),
    **experts("n_routed_experts", "moe_intermediate_size"),
    **SIGMOID,
    "qkv_bias": "attention_bias",
    "norm_topk_prob": "norm_topk_prob",
    "shared_ffn_hidden_size": number_of_shared("n_shared_experts"),
    "first_dense_layers": dense_first("first_k_dense_replace"),
    "num_expert_groups": _groups,
    "rotary_fraction": rotary_fraction,
}
EXAONE_MOE: Map = {
    **DECODER,
    **experts("num_experts", "moe_intermediate_size"),
    **SIGMOID,
    "qk_norm": Fixed(True),
    "norm_topk_prob": "norm_topk_prob",
    "shared_ffn_hidden_size": number_of_shared("num_shared_experts"),
    "first_dense_layers": dense_first("first_k_dense_replace"),
    "num_expert_groups": _groups,
    "mixers": local_and_nope(),
}
AFMOE: Map = {
    **BIASED,
    **experts("num_experts", "moe_intermediate_size"),
    **SIGMOID,
    "qk_norm": Fixed(True),
    "attention_gate": Fixed(True),
    "norm_placement": Fixed("sandwich"),
    "shared_ffn_hidden_size": number_of_shared("num_shared_experts"),
    "first_dense_layers": dense_first("num_dense_layers"),
    "mixers": local_and_nope("global_attn_every_n_layers"),
}
GLM4_LITE: Map = {
    **LATENT,
    "num_query_groups": lambda c: c.fields["num_attention_heads"],
    **experts("n_routed_experts", "moe_intermediate_size"),
    **SIGMOID,
    "norm_topk_prob": "norm_topk_prob",
    "shared_ffn_hidden_size": number_of_shared("n_shared_experts"),
    "first_dense_layers": dense_first("first_k_dense_replace"),
    "num_expert_groups": _groups,
}
ARIA: Map = {
    **BIASED,
    "mlp_bias": "mlp_bias",
    **experts("moe_num_experts", "intermediate_size", "moe_topk"),
    "shared_ffn_hidden_size": number_of_shared("moe_num_shared_experts"),
}
MELLUM: Map = {
    **BIASED,
    **experts("num_experts", "moe_intermediate_size"),
    "qk_norm": Fixed(True),
    "norm_topk_prob": "norm_topk_prob",
    "first_dense_layers": dense_first("first_k_dense_replace"),
    "mixers": windows(lambda c, i: False),
}
LAGUNA: Map = {
    **BIASED,
    **experts("num_experts", "moe_intermediate_size"),
    **SIGMOID,
    "qk_norm": Fixed(True),
    "attention_gate": Fixed(True),
    "attention_gate_per_head": lambda c: c.get("gating") is True or c.get("gating") == "per-head",
    "shared_ffn_hidden_size": "shared_expert_intermediate_size",
    "first_dense_layers": dense_first("first_k_dense_replace"),
    "mixers": windows(lambda c, i: False),
}
STEP3: Map = {
    **LAGUNA,
    "num_query_groups": ("num_key_value_heads", "num_attention_groups"),
    "num_experts": ("n_routed_experts", "num_experts", "moe_num_experts"),
    "top_k": ("num_experts_per_tok", "moe_top_k"),
    "attention_gate_per_head": Fixed(True),
    "shared_ffn_hidden_size": ("share_expert_dim", "share_expert_dims"),
}


def _bailing_router(c: Keys) -> Fields:
    """Ling 2.0 scores with sigmoids and balances with a bias; Ling 1 with a softmax."""
    sigmoid = c.get("score_function") == "sigmoid"
    return {
        "router": "sigmoid" if sigmoid else "softmax",
        "expert_bias": sigmoid and c.get("moe_router_enable_expert_bias") is not False,
        "qk_norm": c.get("use_qk_norm") is True,
    }


BAILING: Map = {
    **DECODER,
    **biases("use_qkv_bias", "qkv_bias"),
    **biases("use_bias", "attention_output_bias"),
    **experts("num_experts", "moe_intermediate_size"),
    "norm_topk_prob": "norm_topk_prob",
    "shared_ffn_hidden_size": number_of_shared("num_shared_experts"),
    "first_dense_layers": dense_first("first_k_dense_replace"),
    "router": _bailing_router,
    "num_expert_groups": _groups,
    "rotary_fraction": rotary_fraction,
}
