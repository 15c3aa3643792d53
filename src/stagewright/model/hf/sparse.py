"""The maps of models whose attention reads the keys that an indexer chooses."""

from __future__ import annotations

from stagewright.model.architecture import LIMITS
from stagewright.model.hf.keys import Fields, Fixed, Keys, Map
from stagewright.model.hf.own import own_sizes
from stagewright.model.hf.parts import (
    BIASED,
    DECODER,
    DEEPSEEK_EXPERTS,
    LATENT,
    experts,
    number,
    query_groups,
    rotary_fraction,
    sizes,
)
from stagewright.model.layers import OwnSizes
from stagewright.model.patterns import shortest

_INDEXER = ("index_topk", "index_n_heads", "index_head_dim")


def _query_rank(c: Keys) -> int:
    """The rank of queries, which the indexer's are made of, too."""
    return c.size("hidden_size", "q_lora_rank")


def _listed_mlps(c: Keys) -> Fields:
    """MLPs as transformers 5 lists them besides the keys that say how many layers are dense."""
    return {} if c.get("mlp_layer_types") is None else _listed_experts(c)


def _shared_indexers(c: Keys) -> tuple[str, ...]:
    """Layers with an indexer, and layers that use the choice of the one before (GLM-5.2).

    Listed, or every so many layers after the first ones, as transformers' GlmMoeDsaConfig reads it.
    """
    layers = c.fields["num_layers"]
    key = "indexer_types" if c.get("indexer_types") is not None else "index_topk_pattern"
    given = c.get(key)
    if given is None:
        step = 1 if c.get("index_topk_freq") is None else c.size("num_layers", "index_topk_freq")
        offset = c.whole("index_skip_topk_offset", 0, layers)
        full = [max(i - offset + 1, 0) % step == 0 for i in range(layers)]
    else:
        words = {"full": True, "shared": False, "F": True, "S": False}
        listed = list(given) if isinstance(given, str) else c.items(key)
        full = [words[x] for x in listed if isinstance(x, str) and x in words]
        if not len(full) == len(listed) == layers or not full[0]:
            c.reject(key, f"full or shared for each of the {layers} layers, full for the first")
    return shortest(["indexed" if own else "index_shared" for own in full])


INDEXED: Map = {
    **LATENT,
    "q_lora_rank": _query_rank,
    **DEEPSEEK_EXPERTS,
    **{name: name for name in _INDEXER},
    "mlps": _listed_mlps,
}
"""DeepSeek-V3.2: DeepSeek-V3 with an indexer in every layer."""

INDEX_SHARED: Map = {**INDEXED, "mixers": _shared_indexers}
"""GLM-5: the same, where some layers may share the indexer of a layer before."""


_M3 = "sparse_attention_config"
_M3_KEYS = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}
"""transformers' names of MiniMax-M3's sparse attention, and those in the published file."""


def _listed(c: Keys, key: str, words: dict[object, str], wanted: str) -> list[str]:
    """A kind for each layer, as a list of the file has them."""
    listed, layers = c.items(key), c.fields["num_layers"]
    kinds = [words[x] for x in listed if isinstance(x, str | int) and x in words]
    if not len(kinds) == len(listed) == layers:
        c.reject(key, f"{wanted} for each of the {layers} layers")
    return kinds


def _blocks(c: Keys) -> Fields:
    """MiniMax-M3's layers that choose blocks of keys, as transformers or its file has them."""
    usual: dict[object, str] = {"minimax_m3_sparse": "indexed", "full_attention": "global"}
    flags: dict[object, str] = {1: "indexed", 0: "global"}
    if c.get("layer_types") is not None:
        kinds = _listed(c, "layer_types", usual, " or ".join(map(str, usual)))
    else:
        kinds = _listed(c, f"{_M3}.sparse_attention_freq", flags, "0 (full attention) or 1")
    fields: Fields = {"mixers": shortest(kinds)}
    if "indexed" not in kinds:
        return fields | dict.fromkeys(_INDEXER, 0) | {"index_block_size": 1}
    heads, width, block, blocks, local = (
        c.whole(c.used(f"{_M3}.{theirs}", name), 0, LIMITS["kv_channels"])
        for name, theirs in _M3_KEYS.items()
    )
    if local != 1:
        c.reject(c.used(f"{_M3}.sparse_local_block", "index_local_blocks"), "1, the query's own")
    return fields | {
        "index_n_heads": heads,
        "index_head_dim": width,
        "index_block_size": block,
        "index_topk": blocks * block,
    }


def _listed_experts(c: Keys) -> Fields:
    """Layers with experts, as transformers lists them, or a published file."""
    if c.get("mlp_layer_types") is not None:
        words: dict[object, str] = {"dense": "dense", "sparse": "experts"}
        return _in_order(_listed(c, "mlp_layer_types", words, "dense or sparse"))
    return _in_order(_listed(c, "moe_layer_freq", {0: "dense", 1: "experts"}, "0 or 1"))


def _in_order(kinds: list[str]) -> Fields:
    """Fields of the MLPs of all layers: usually the first layers are dense and no others."""
    first = next((i for i, kind in enumerate(kinds) if kind == "experts"), len(kinds))
    if "dense" not in kinds[first:]:
        return {"first_dense_layers": first, "mlps": ()}
    return {"mlps": shortest(kinds)}


MINIMAX_M3: Map = {
    **DECODER,
    **experts("num_local_experts", "intermediate_size"),
    "ffn_hidden_size": "dense_intermediate_size",
    "shared_ffn_hidden_size": "shared_intermediate_size",
    "router": Fixed("sigmoid"),
    "expert_bias": Fixed(True),
    "activation": Fixed("quick_gelu"),
    "activation_func_clamp_value": number("swiglu_limit", 1e-3, 1e6),
    "rotary_fraction": rotary_fraction,
    "mixers": _blocks,
    "mlps": _listed_experts,
}
"""MiniMax-M3: each key-value head reads blocks of keys that a head of an indexer chooses."""


def _windows(c: Keys) -> tuple[Fields, list[str]]:
    """MiMo-V2's layers with a window, which may have other key-value heads and sinks."""
    if c.get("layer_types") is not None:
        usual: dict[object, str] = {"full_attention": "global", "sliding_attention": "local"}
        kinds = _listed(c, "layer_types", usual, " or ".join(map(str, usual)))
    else:
        words: dict[object, str] = {0: "global", 1: "local"}
        kinds = _listed(c, "hybrid_layer_pattern", words, "0 (full attention) or 1 (a window)")
    before = c.optional("max_position_embeddings", "sliding_window_size")
    window = before + 1 if before else c.size("max_position_embeddings", "sliding_window")
    fields: Fields = {"mixers": shortest(kinds), "sliding_window": window}
    return fields if "local" in kinds else fields | {"sliding_window": None}, kinds


def _mimo_layers(c: Keys) -> Fields:
    """The layers of MiMo-V2: those with a window are as the keys that begin with `swa_` say."""
    fields, kinds = _windows(c)
    for theirs, ours, key in (
        ("swa_num_attention_heads", "num_attention_heads", "num_attention_heads"),
        ("swa_head_dim", "kv_channels", "head_dim"),
        ("swa_v_head_dim", "v_head_dim", "v_head_dim"),
    ):
        if c.optional("kv_channels", theirs) not in (None, c.fields[ours]):
            c.reject(theirs, f"{c.fields[ours]}, as {key}")
    groups = c.optional("num_query_groups", "swa_num_key_value_heads")
    groups = groups or 2 * c.fields["num_query_groups"]
    in_all, in_windows = (
        c.flag(key) for key in ("add_full_attention_sink_bias", "add_swa_attention_sink_bias")
    )
    if c.fields["num_attention_heads"] % groups:
        c.reject("swa_num_key_value_heads", "a divisor of the attention heads")
    own = OwnSizes(
        num_query_groups=groups if groups != c.fields["num_query_groups"] else None,
        attention_sinks=in_windows if in_windows != in_all else None,
    )
    of_layers = [own if kind == "local" else OwnSizes() for kind in kinds]
    return fields | {"attention_sinks": in_all} | own_sizes(of_layers)


def _choice_bias(c: Keys) -> bool:
    """Whether a bias balances experts, in a router without groups."""
    c.only("n_group", 1)
    return c.get("topk_method") == "noaux_tc"


MIMO_V2: Map = {
    **BIASED,
    **experts("n_routed_experts", "moe_intermediate_size"),
    "v_head_dim": lambda c: c.optional("kv_channels", "v_head_dim") or 0,
    "router": "scoring_func",
    "norm_topk_prob": "norm_topk_prob",
    "expert_bias": _choice_bias,
    "rotary_fraction": rotary_fraction,
    "attention_output_bias": Fixed(False),
    "own_sizes": _mimo_layers,
    "mlps": _listed_experts,
}
"""MiMo-V2: windows of 128 positions with sinks, and values narrower than keys."""

_COMPRESSED: dict[object, str] = {
    "sliding_attention": "local",
    "compressed_sparse_attention": "compressed_indexed",
    "heavily_compressed_attention": "compressed",
}
_RATES: dict[str, tuple[str, int]] = {
    "compressed_indexed": ("compress_rate_csa", 4),
    "compressed": ("compress_rate_hca", 128),
}
"""Of layers with compressed keys, transformers' older key of the rate, and what it is without."""


def _compressed_layers(c: Keys) -> Fields:
    """DeepSeek-V4's layers, and how many positions have one key, as transformers or its file says.

    The published `compress_ratios` has a number for each layer and each further token predicted.
    """
    layers = c.fields["num_layers"]
    rates = {
        kind: c.whole(c.used(f"compress_rates.{theirs}", _RATES[kind][0]), 2, 2**16)
        if c.has(c.used(f"compress_rates.{theirs}", _RATES[kind][0]))
        else _RATES[kind][1]
        for theirs, kind in _COMPRESSED.items()
        if isinstance(theirs, str) and kind in _RATES
    }
    if c.get("layer_types") is not None:
        kinds = _listed(c, "layer_types", _COMPRESSED, " or ".join(map(str, _COMPRESSED)))
    elif c.get("compress_ratios") is not None:
        of = {0: "local", **{rate: kind for kind, rate in rates.items()}}
        ratios = c.items("compress_ratios")[:layers]
        kinds = [of[x] for x in ratios if isinstance(x, int) and x in of]
        if not len(kinds) == len(ratios) == layers:
            wanted = f"{' or '.join(map(str, of))} for each of the {layers} layers"
            c.reject("compress_ratios", wanted)
    else:  # as transformers' DeepseekV4Config has them
        pair = ("compressed", "compressed_indexed")
        kinds = [*["compressed"] * min(layers, 2), *(pair[i % 2] for i in range(layers - 2))]
    fields: Fields = {_RATES[kind][0]: rate if kind in kinds else 0 for kind, rate in rates.items()}
    if "compressed_indexed" not in kinds:
        fields |= dict.fromkeys(_INDEXER, 0)
    return fields | {"mixers": shortest(kinds)}


def _last_channels(c: Keys) -> float:
    """The part of a head that rope turns."""
    width = c.fields["kv_channels"]
    if c.get("qk_rope_head_dim") is not None:
        return c.whole("qk_rope_head_dim", 2, width) / width
    keys = ("rope_parameters.main.partial_rotary_factor", "partial_rotary_factor")
    return c.number(c.used(*keys), 0, 1)


DEEPSEEK_V4: Map = {
    **sizes(),
    "ffn_hidden_size": Fixed(0),
    "activation": "hidden_act",
    "attention_dropout": "attention_dropout",
    "num_query_groups": query_groups("num_key_value_heads"),
    "kv_channels": "head_dim",
    "rotary_fraction": _last_channels,
    "q_lora_rank": _query_rank,
    "o_groups": "o_groups",
    "o_lora_rank": "o_lora_rank",
    "attention_sinks": Fixed(True),
    "sliding_window": "sliding_window",
    **{name: name for name in _INDEXER},
    "mixers": _compressed_layers,
    "residual_streams": "hc_mult",
    "sinkhorn_iterations": "hc_sinkhorn_iters",
    **experts("n_routed_experts", "moe_intermediate_size"),
    "shared_ffn_hidden_size": lambda c: (
        c.whole("n_shared_experts", 1, 1) * c.fields["moe_ffn_hidden_size"]
    ),
    "router": "scoring_func",
    "norm_topk_prob": "norm_topk_prob",
    "expert_bias": Fixed(True),
    "activation_func_clamp_value": number("swiglu_limit", 1e-3, 1e6),
}
"""DeepSeek-V4: several residual streams, and attention to a window and to compressed keys."""

V4_UNUSED = (
    *("hc_eps", "num_hash_layers", "mlp_layer_types", "topk_method", "expert_dtype"),
    *("compress_rope_theta", "compress_ratios", "compress_rates", "qk_rope_head_dim"),
    *("routed_scaling_factor", "attention_bias", "mlp_bias"),
)
"""Keys of DeepSeek-V4 that change neither sizes nor work: the first layers choose experts by a
table of token ids."""

MIMO_UNUSED = (
    *("sliding_window", "attention_chunk_size", "attention_value_scale", "topk_group"),
    *("topk_method", "swa_rope_theta"),
)

M3_UNUSED = (
    *("hidden_act", "use_gemma_norm", "use_qk_norm", "qk_norm_type", "rotary_dim"),
    *("n_shared_experts", "scoring_func", "use_routing_bias"),
)
"""Keys of MiniMax-M3's file that say what all files of the family have."""

UNUSED = (
    *("head_dim", "indexer_rope_interleave", "index_share_for_mtp_iteration"),
    *("index_topk_freq", "index_skip_topk_offset"),
)
"""Keys of GLM-5 that say nothing more: how rope pairs channels, and what `indexer_types` lists."""
