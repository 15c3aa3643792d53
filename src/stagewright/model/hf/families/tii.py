"""Technology Innovation Institute: Falcon, Falcon-Mamba, Falcon-H1."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from stagewright.model.hf import parts
from stagewright.model.hf.keys import Fields, Keys, Map, family
from stagewright.model.layers import StateSpace


def _block(c: Keys) -> Fields:
    """The newer decoder, which has `n_head_kv` in its first files, and the older one."""
    new = c.flag("new_decoder_architecture") or "n_head_kv" in c.values
    block: Fields = {"parallel_block": new or c.flag("parallel_attn"), "parallel_norms": 1}
    block["position"] = "alibi" if c.flag("alibi") else "rope"
    if not new:
        groups = 1 if c.flag("multi_query") else c.fields["num_attention_heads"]
        return block | {"num_query_groups": groups}
    given = c.get("num_ln_in_parallel_attn") is not None
    return block | {
        "num_query_groups": parts.query_groups("n_head_kv", "num_kv_heads")(c),
        "parallel_norms": c.integer("num_ln_in_parallel_attn", 1, 2) if given else 2,
    }


_FALCON: Map = {
    **parts.sizes(
        num_layers=("num_hidden_layers", "n_layer"),
        num_attention_heads=("num_attention_heads", "n_head"),
    ),
    "num_query_groups": _block,
    "ffn_hidden_size": parts.or_four_times_hidden("ffn_hidden_size"),
    **dict.fromkeys(parts.ALL_BIASES, "bias"),
    **{name: name for name in ("activation", "hidden_dropout", "attention_dropout")},
}


def _h1_state(c: Keys) -> StateSpace:
    """Mamba-2's sizes, whose inner width has a key of its own."""
    heads, inner = c.integer("mamba_n_heads", 1, parts.MAX_STATE_COUNT), c.get("mamba_d_ssm")
    if inner is None:
        inner = c.integer("mamba_expand", 1, 64) * c.fields["hidden_size"]
    elif type(inner) is not int or inner % heads or inner < heads:
        c.reject("mamba_d_ssm", f"null or a multiple of the {heads} heads")
    inner = cast(int, inner)
    if c.get("mamba_d_head") == "auto":
        c = replace(c, values=c.values | {"mamba_d_head": inner // heads})
    state: StateSpace = parts.state_heads(parts.BAMBA_KEYS)(c)
    if inner != state.inner:
        c.reject("mamba_d_head", f"{inner} / {heads}, a part of the width inside")
    normed = c.flag("mamba_rms_norm")
    if normed:
        c.only("mamba_norm_before_gate", False)
    return replace(state, gated_norm=normed)


FAMILIES = {
    "FalconForCausalLM": family(
        "falcon", _FALCON, like="falcon-7b", unused="multi_query parallel_attn num_kv_heads"
    ),
    "RWForCausalLM": family("RefinedWeb RefinedWebModel", _FALCON, like="falcon-7b"),
    "FalconMambaForCausalLM": family(
        "falcon_mamba",
        parts.PURE_STATES,
        like="falcon-mamba-7b",
        state_space=parts.state_channels("", *parts.MAMBA_KEYS, inner_norms="plain"),
        only={"use_bias": False, "hidden_act": "silu"},
    ),
    "FalconH1ForCausalLM": family(
        "falcon_h1",
        parts.LLAMA,
        like="falcon-h1-7b",
        state_space=_h1_state,
        only={"mamba_proj_bias": False, "projectors_bias": False},
    ),
}
