"""MiniMax: MiniMax-01, M1, M2 and M3."""

from __future__ import annotations

from stagewright.model.architecture import LIMITS
from stagewright.model.hf import parts
from stagewright.model.hf.keys import Fields, Fixed, Keys, Map, family
from stagewright.model.layers import StateSpace, shortest


def _rotary(c: Keys) -> float:
    width = c.fields["kv_channels"]
    return (
        c.integer("rotary_dim", 1, width) / width
        if c.has("rotary_dim")
        else parts.rotary_fraction(c)
    )


# ---- MiniMax-01 and M1: lightning attention ------------------------------------------------------


def _lightning_mixers(c: Keys) -> tuple[str, ...]:
    """Lightning or softmax attention, as MiniMax-01's files list them or transformers does."""
    if not c.has("attn_type_list"):
        return parts.listed_mixers("lightning")(c)
    kinds = parts.bits(c, "attn_type_list", c.get("attn_type_list"), "lightning")
    return shortest(["global" if x else "lightning" for x in kinds])


def _lightning_state(c: Keys) -> StateSpace:
    heads, width = c.fields["num_attention_heads"], c.fields["kv_channels"]
    chunk = c.integer("block_size", 1, parts.MAX_STATE_COUNT)
    return StateSpace(heads=heads, head_width=width, groups=heads, state=width, conv=0, chunk=chunk)


_LIGHTNING: Map = {
    **parts.DECODER,
    "mixers": _lightning_mixers,
    "state_space": _lightning_state,
    "rotary_fraction": _rotary,
    **parts.experts("num_local_experts", "intermediate_size"),
}

# ---- M2: softmax attention -----------------------------------------------------------------------


def _softmax_mixers(c: Keys) -> tuple[str, ...]:
    """Softmax attention in every layer, also where a file lists the kinds of attention."""
    if c.get("attn_type_list") is not None and 0 in parts.bits(
        c, "attn_type_list", c.get("attn_type_list"), "lightning"
    ):
        c.reject("attn_type_list", "1 for every layer")
    return ("global",)


# ---- M3: each key-value head reads blocks of keys that a head of an indexer chooses --------------

_SPARSE = "sparse_attention_config"
_SPARSE_KEYS = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}
"""transformers' names of the sparse attention, and those in the published file."""


def _sparse_layers(c: Keys) -> Fields:
    """Layers that choose blocks of keys, as transformers or the published file has them."""
    if c.get("layer_types") is not None:
        words = {"minimax_m3_sparse": "indexed", "full_attention": "global"}
        kinds = parts.listed(c, "layer_types", words)
    else:
        flags = {1: "indexed", 0: "global"}
        kinds = parts.listed(
            c, f"{_SPARSE}.sparse_attention_freq", flags, "0 (full attention) or 1"
        )
    fields: Fields = {"mixers": shortest(kinds)}
    if "indexed" not in kinds:
        return fields | dict.fromkeys(parts.INDEXER, 0) | {"index_block_size": 1}
    heads, width, block, blocks, local = (
        c.integer(c.used(f"{_SPARSE}.{published}", name), 0, LIMITS["kv_channels"])
        for name, published in _SPARSE_KEYS.items()
    )
    if local != 1:
        c.reject(
            c.used(f"{_SPARSE}.sparse_local_block", "index_local_blocks"), "1, the query's own"
        )
    return fields | {
        "index_n_heads": heads,
        "index_head_dim": width,
        "index_block_size": block,
        "index_topk": blocks * block,
    }


FAMILIES = {
    "MiniMaxText01ForCausalLM": family("minimax_text_01", _LIGHTNING, like="minimax-text-01"),
    "MiniMaxForCausalLM": family("minimax", _LIGHTNING, like="minimax-text-01"),
    "MiniMaxM1ForCausalLM": family("minimax_m1", _LIGHTNING, like="minimax-text-01"),
    "MiniMaxM2ForCausalLM": family(
        "minimax_m2",
        parts.DECODER,
        parts.experts("num_local_experts", "intermediate_size"),
        parts.SIGMOID,
        qk_norm=True,
        qk_norm_over_heads=True,
        rotary_fraction=_rotary,
        mixers=_softmax_mixers,
        only={"scoring_func": "sigmoid", "use_qk_norm": True, "shared_intermediate_size": 0},
        unused="use_routing_bias",
    ),
    "MiniMaxM3SparseForCausalLM": family(
        "minimax_m3_vl minimax_m3_vl_text",
        parts.DECODER,
        parts.experts("num_local_experts", "intermediate_size"),
        parts.SIGMOID,
        like="minimax-m3",
        ffn_hidden_size="dense_intermediate_size",
        shared_ffn_hidden_size="shared_intermediate_size",
        activation=Fixed("quick_gelu"),
        activation_func_clamp_value=parts.number("swiglu_limit", 1e-3, 1e6),
        rotary_fraction=parts.rotary_fraction,
        mixers=_sparse_layers,
        mlps=parts.listed_mlps,
        only={"swiglu_alpha": 1.702, "scoring_func": "sigmoid", "attention_output_gate": False},
        unused="hidden_act use_gemma_norm use_qk_norm qk_norm_type rotary_dim "
        "n_shared_experts scoring_func use_routing_bias",
    ),
}
