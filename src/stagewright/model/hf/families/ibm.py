"""IBM: Granite 3 and 4, and Bamba."""

from __future__ import annotations

from stagewright.model.hf import parts
from stagewright.model.hf.keys import Fields, Keys, Map, family
from stagewright.model.layers import shortest


def _bamba_mixers(c: Keys) -> tuple[str, ...]:
    """Attention in the layers that are listed by index."""
    layers = c.fields["num_layers"]
    listed = parts.indexed(c, "attn_layer_indices", layers)
    return shortest(["global" if i in listed else "mamba2" for i in range(layers)])


def _shared_width(c: Keys) -> int:
    if not c.get("shared_intermediate_size"):
        return 0
    return c.size("ffn_hidden_size", "shared_intermediate_size")


def _hybrid_experts(c: Keys) -> Fields:
    """Experts beside a shared MLP, which alone is there where there are no experts."""
    shared = c.size("ffn_hidden_size", "shared_intermediate_size")
    if c.get("num_local_experts") == 0:
        return c.read_all(parts.NO_EXPERTS) | {"ffn_hidden_size": shared}
    fields = c.read_all(parts.experts("num_local_experts", "intermediate_size"))
    return fields | {"shared_ffn_hidden_size": shared}


def _hybrid_position(c: Keys) -> str:
    position = c.get("position_embedding_type")
    if position not in ("rope", "nope", None):
        c.reject("position_embedding_type", '"rope", "nope" or null')
    return "rope" if position == "rope" else "none"


_MOE: Map = {
    **parts.BIASED,
    **parts.experts("num_local_experts", "intermediate_size"),
    "shared_ffn_hidden_size": _shared_width,
}
_NO_PROJECTION_BIAS = {"mamba_proj_bias": False}

FAMILIES = {
    "GraniteForCausalLM": family("granite", parts.LLAMA),
    "GraniteMoeForCausalLM": family("granitemoe", _MOE),
    "GraniteMoeSharedForCausalLM": family("granitemoeshared", _MOE),
    "GraniteMoeHybridForCausalLM": family(
        "granitemoehybrid",
        parts.BIASED,
        like="granite-4.0-h-tiny",
        mixers=parts.listed_mixers("mamba2"),
        state_space=parts.state_heads(parts.BAMBA_KEYS),
        position=_hybrid_position,
        num_experts=_hybrid_experts,
        only=_NO_PROJECTION_BIAS,
    ),
    "BambaForCausalLM": family(
        "bamba",
        parts.LLAMA,
        like="bamba-9b",
        mixers=_bamba_mixers,
        state_space=parts.state_heads(parts.BAMBA_KEYS),
        rotary_fraction=parts.rotary_fraction,
        only=_NO_PROJECTION_BIAS,
    ),
}
