"""Meta: Llama, Llama 4, OPT, CWM."""

from __future__ import annotations

from stagewright.model.hf import parts
from stagewright.model.hf.keys import Fields, Fixed, Keys, family
from stagewright.model.layers import shortest


def _llama4_layers(c: Keys) -> Fields:
    """Chunks where there is rope, and neither in the other layers; experts where listed."""
    layers, flags = c.fields["num_layers"], parts.turned_layers(c)
    chunk = c.optional("max_position_embeddings", "attention_chunk_size")
    known = ("full_attention", "chunked_attention")
    kinds = parts.layer_types(c, ["chunked" if x and chunk else "global" for x in flags], known)
    for i, (kind, rope) in enumerate(zip(kinds, flags, strict=True)):
        if kind == "chunked" and not (rope and chunk):
            lacks = "rope" if chunk else "attention_chunk_size"
            c.reject("layer_types", f"full_attention in layer {i}, which has no {lacks}")
    mixers = [k if x else "nope" for k, x in zip(kinds, flags, strict=True)]
    step = c.size("num_layers", "interleave_moe_layer_step")
    fields: Fields = {
        "mixers": shortest(mixers),
        "attention_chunk_size": chunk if "chunked" in mixers else None,
    }
    if c.get("moe_layers") is None:
        return fields | {"first_dense_layers": step - 1, "moe_layer_freq": step}
    routed = c.items("moe_layers")
    if not routed or not all(type(i) is int and 0 <= i < layers for i in routed):
        c.reject("moe_layers", f"a list of layers below {layers}, not empty")
    mlps = ["experts" if i in routed else "dense" for i in range(layers)]
    return fields | {"mlps": shortest(mlps)}


def _opt_head(c: Keys) -> Fields:
    """OPT-350m alone has its norms behind, and an embedding narrower than the model."""
    pre, width = c.flag("do_layer_norm_before"), c.optional("hidden_size", "word_embed_proj_dim")
    return {
        "norm_placement": "pre" if pre else "post",
        "final_norm": pre and not c.flag("_remove_final_layer_norm"),
        "embedding_size": None if width == c.fields["hidden_size"] else width,
    }


FAMILIES = {
    "LlamaForCausalLM": family("llama", parts.LLAMA),
    "Llama4ForCausalLM": family(
        "llama4_text llama4",
        parts.BIASED,
        parts.experts("num_local_experts", "intermediate_size"),
        like="llama4-scout",
        ffn_hidden_size="intermediate_size_mlp",
        shared_ffn_hidden_size="intermediate_size",
        router=Fixed("sigmoid"),
        norm_topk_prob=False,
        qk_l2_norm="use_qk_norm",
        mixers=_llama4_layers,
    ),
    "OPTForCausalLM": family(
        "opt",
        parts.sizes(ffn_hidden_size="ffn_dim"),
        dict.fromkeys(parts.ALL_BIASES, "enable_bias"),
        like="opt-125m",
        activation="activation_function",
        hidden_dropout="dropout",
        attention_dropout="attention_dropout",
        norm_placement=_opt_head,
        only={"layer_norm_elementwise_affine": True},
    ),
    "CwmForCausalLM": family("cwm", parts.DECODER, mixers=parts.windows(lambda c, i: True)),
}
