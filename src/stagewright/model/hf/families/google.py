"""Google: BERT, T5, Gemma 1 to 4, VaultGemma."""

from __future__ import annotations

from stagewright.model.architecture import LIMITS
from stagewright.model.hf import parts
from stagewright.model.hf.keys import ACTIVATIONS, Fields, Fixed, Keys, Map, family
from stagewright.model.layers import OwnSizes

# ---- BERT and T5 ---------------------------------------------------------------------------------

_BERT: Map = {
    **parts.sizes(ffn_hidden_size="intermediate_size"),
    "token_types": parts.integer("type_vocab_size", 1, LIMITS["vocab_size"]),
    "activation": "hidden_act",
    **dict.fromkeys(("hidden_dropout", "embedding_dropout"), "hidden_dropout_prob"),
    "attention_dropout": "attention_probs_dropout_prob",
}
_ENCODER = {
    "is_decoder": False,
    "add_cross_attention": False,
    "position_embedding_type": "absolute",
}


def _t5_mlp(c: Keys) -> Fields:
    """T5's MLP, which is gated in version 1.1."""
    kind = c.text("feed_forward_proj")
    name = "gelu_new" if kind == "gated-gelu" else kind.removeprefix("gated-")
    if name not in ACTIVATIONS:
        known = (f"{gate}{act}" for gate in ("", "gated-") for act in ACTIVATIONS)
        c.reject("feed_forward_proj", f"one of {', '.join(known)}")
    return {"gated": kind.startswith("gated-"), "activation": ACTIVATIONS[name]}


# ---- Gemma ---------------------------------------------------------------------------------------

_SOFTCAPPED: Map = {
    **parts.BIASED,
    "activation": "hidden_activation",
    "attention_softcap": "attn_logit_softcapping",
    "logit_softcap": "final_logit_softcapping",
}
_GEMMA2: Map = {
    **_SOFTCAPPED,
    "mixers": parts.windows(
        lambda c, i: (i + 1) % c.size("num_layers", "sliding_window_pattern") > 0
    ),
}
_ONE_WAY = {"use_bidirectional_attention": False}


def _gemma4_layers(c: Keys) -> Fields:
    """Layers that see all have heads of their own width and number, and may have no values."""
    for key, what in (
        ("hidden_size_per_layer_input", "an embedding for each layer"),
        ("num_kv_shared_layers", "layers that share keys and values"),
    ):
        if c.get(key):
            c.reject(key, f"0; {what} is not supported")
    width = c.optional("kv_channels", "global_head_dim")
    same = c.flag("attention_k_eq_v")
    groups = c.optional("num_query_groups", "num_global_key_value_heads") if same else None
    turned = c.get("rope_parameters.full_attention.partial_rotary_factor")
    sees_all = OwnSizes(
        num_query_groups=groups if groups != c.fields["num_query_groups"] else None,
        kv_channels=width if width != c.fields["kv_channels"] else None,
        rotary_fraction=float(turned) if isinstance(turned, int | float) and turned < 1 else None,
        keys_are_values=same or None,
    )
    return parts.own_sizes(
        [sees_all if kind == "global" else OwnSizes() for kind in parts.mixers_of_layers(c)]
    )


def _gemma4_mlps(c: Keys) -> Fields:
    """Experts beside the MLP of every layer, each with norms of its own, or no experts."""
    if c.get("use_double_wide_mlp"):
        c.reject("use_double_wide_mlp", "false; MLPs of twice the width are not supported")
    if not c.flag("enable_moe_block"):
        return c.read_all(parts.NO_EXPERTS)
    width = ("moe_intermediate_size", "expert_intermediate_size")
    return {
        **c.read_all(parts.experts("num_experts", c.used(*width), "top_k_experts")),
        "expert_scale": True,
        "mlps": ("dense+experts",),
    }


FAMILIES = {
    "BertForMaskedLM": family("bert", _BERT, like="bert-base", only=_ENCODER),
    "BertModel": family(
        "bert",
        _BERT,
        like="bert-base",
        only=_ENCODER,
        pooler=True,
        tied_embeddings=True,  # for the output projection, which it lacks
        mlm_transform=False,
        lm_head_bias=False,
    ),
    "T5ForConditionalGeneration": family(
        "t5",
        like="t5-base",
        encoder_num_layers="num_layers",
        num_layers=lambda c: (
            c.optional("num_layers", "num_decoder_layers") or c.fields["encoder_num_layers"]
        ),
        hidden_size="d_model",
        ffn_hidden_size="d_ff",
        num_attention_heads="num_heads",
        num_query_groups="num_heads",
        kv_channels="d_kv",
        vocab_size="vocab_size",
        max_position_embeddings="n_positions",
        relative_buckets=parts.integer("relative_attention_num_buckets", 2, 2**16),
        tied_embeddings="tie_word_embeddings",
        hidden_dropout="dropout_rate",
        attention_dropout="dropout_rate",
        embedding_dropout="dropout_rate",
        activation=_t5_mlp,
    ),
    "GemmaForCausalLM": family(
        "gemma", parts.BIASED, activation=("hidden_activation", "hidden_act")
    ),
    "Gemma2ForCausalLM": family(
        "gemma2",
        _GEMMA2,
        like="gemma2-9b",
        only=_ONE_WAY,
        unused="hidden_act sliding_window_size",
    ),
    "Gemma3ForCausalLM": family("gemma3_text gemma3", _GEMMA2, like="gemma3-1b", only=_ONE_WAY),
    "Gemma4ForCausalLM": family(
        "gemma4_text gemma4",
        parts.BIASED,
        activation="hidden_activation",
        logit_softcap="final_logit_softcapping",
        norm_placement=Fixed("sandwich"),
        qk_norm=True,
        v_norm=True,
        mixers=parts.windows(lambda c, i: (i + 1) % 6 > 0),
        num_experts=_gemma4_mlps,
        own_sizes=_gemma4_layers,
        unused="vocab_size_per_layer_input use_bidirectional_attention",
    ),
    "VaultGemmaForCausalLM": family(
        "vaultgemma", _SOFTCAPPED, mixers=parts.windows(lambda c, i: (i + 1) % 2 > 0)
    ),
}
