"""How the config.json files of each architecture are read: a map of fields, and defaults.

Defaults are those of the configuration classes of transformers 4.57 (Qwen2-MoE and models with a
state: 5.23). To add a family of known layers, add a row of `FAMILIES`, which starts from a map such
as `DECODER`, and the preset that its files are like.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any, cast

from stagewright.errors import divisors
from stagewright.model.config import LIMITS, MOST_EXPERTS
from stagewright.model.hf.keys import ACTIVATIONS, Family, Fields, Fixed, Json, Keys, Map
from stagewright.model.hf.parts import (
    BIASED,
    DECODER,
    DEEPSEEK_EXPERTS,
    LATENT,
    MOST,
    NO_EXPERTS,
    STATE_TYPES,
    bits,
    experts,
    head_width,
    indexed,
    layer_types,
    listed_mixers,
    number,
    or_times_hidden,
    periodic_mixers,
    query_groups,
    rotary_fraction,
    sizes,
    state_channels,
    state_heads,
    whole,
    windows,
)
from stagewright.model.patterns import LETTERS, every, from_letters, shortest
from stagewright.model.shared_blocks import SharedBlocks
from stagewright.model.state_space import StateSpace

_SHARED_EXPERTS = {"shared_ffn_hidden_size": "shared_expert_intermediate_size"}


# ---- what no other family does -------------------------------------------------------------------


def _opt_head(c: Keys) -> Fields:
    """OPT-350m alone has its norms behind, and an embedding narrower than the model."""
    pre, width = c.flag("do_layer_norm_before"), c.optional("hidden_size", "word_embed_proj_dim")
    return {
        "norm_placement": "pre" if pre else "post",
        "final_norm": pre and not c.flag("_remove_final_layer_norm"),
        "embedding_size": None if width == c.fields["hidden_size"] else width,
    }


def _falcon_block(c: Keys) -> Fields:
    """Falcon's newer decoder, which has `n_head_kv` in its first files, and the older one."""
    new = c.flag("new_decoder_architecture") or "n_head_kv" in c.values
    block: Fields = {"parallel_block": new or c.flag("parallel_attn"), "parallel_norms": 1}
    block["position"] = "alibi" if c.flag("alibi") else "rope"
    if not new:
        groups = 1 if c.flag("multi_query") else c.fields["num_attention_heads"]
        return block | {"num_query_groups": groups}
    given = c.get("num_ln_in_parallel_attn") is not None
    return block | {
        "num_query_groups": query_groups("n_head_kv", "num_kv_heads")(c),
        "parallel_norms": c.whole("num_ln_in_parallel_attn", 1, 2) if given else 2,
    }


def _qwen_dense_layers(c: Keys) -> Fields:
    """Layers are dense where listed, and otherwise but for every `decoder_sparse_step`-th."""
    step, value = c.size("num_layers", "decoder_sparse_step"), c.get("mlp_only_layers")
    first = len(c.items("mlp_only_layers"))
    if (value is not None and value != list(range(first))) or (first and step > 1):
        c.reject("mlp_only_layers", "the first layers in order, and none where layers alternate")
    return {"first_dense_layers": first or step - 1, "moe_layer_freq": step}


def _llama4_layers(c: Keys) -> Fields:
    """Chunks where there is rope, and neither in the other layers; experts where listed."""
    layers, period = c.fields["num_layers"], c.size("num_layers", "no_rope_layer_interval")
    turned = c.get("no_rope_layers") or [int((i + 1) % period != 0) for i in range(layers)]
    flags = bits(c, "no_rope_layers", turned, "without rope")
    chunk = c.optional("max_position_embeddings", "attention_chunk_size")
    known = ("full_attention", "chunked_attention")
    kinds = layer_types(c, ["chunked" if x and chunk else "global" for x in flags], known)
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
    listed = c.items("moe_layers")
    if not listed or not all(type(i) is int and 0 <= i < layers for i in listed):
        c.reject("moe_layers", f"a list of layers below {layers}, not empty")
    kinds_of_mlp = ["experts" if i in listed else "dense" for i in range(layers)]
    return fields | {"mlps": shortest(kinds_of_mlp)}


def _t5_mlp(c: Keys) -> Fields:
    """T5's MLP, which is gated in version 1.1."""
    kind = c.text("feed_forward_proj")
    name = "gelu_new" if kind == "gated-gelu" else kind.removeprefix("gated-")
    if name not in ACTIVATIONS:
        known = (f"{way}{act}" for way in ("", "gated-") for act in ACTIVATIONS)
        c.reject("feed_forward_proj", f"one of {', '.join(known)}")
    return {"gated": kind.startswith("gated-"), "activation": ACTIVATIONS[name]}


def _jamba_experts(c: Keys) -> Fields:
    """Experts once in a period of layers, at an offset; one expert is none."""
    if c.get("num_experts") == 1:
        return c.read_all(NO_EXPERTS)
    often = c.size("num_layers", "expert_layer_period")
    return {
        **c.read_all(experts("num_experts", "intermediate_size")),
        "norm_topk_prob": False,
        "first_dense_layers": c.whole("expert_layer_offset", 0, often - 1),
        "moe_layer_freq": often,
    }


def _bamba_mixers(c: Keys) -> tuple[str, ...]:
    """Attention in the layers that are listed by index."""
    layers = c.fields["num_layers"]
    listed = indexed(c, "attn_layer_indices", layers)
    return shortest(["global" if i in listed else "mamba2" for i in range(layers)])


def _granite_experts(c: Keys) -> Fields:
    """Experts beside a shared MLP, which alone is there where there are no experts."""
    shared = c.size("ffn_hidden_size", "shared_intermediate_size")
    if c.get("num_local_experts") == 0:
        return c.read_all(NO_EXPERTS) | {"ffn_hidden_size": shared}
    fields = c.read_all(experts("num_local_experts", "intermediate_size"))
    return fields | {"shared_ffn_hidden_size": shared}


def _granite_position(c: Keys) -> str:
    position = c.get("position_embedding_type")
    if position not in ("rope", "nope", None):
        c.reject("position_embedding_type", '"rope", "nope" or null')
    return "rope" if position == "rope" else "none"


def _zamba2_head(c: Keys) -> int:
    """The width of a head: blocks read the residual stream and the embedded tokens."""
    both, heads = 2 * c.fields["hidden_size"], c.fields["num_attention_heads"]
    if both % heads:
        c.reject("num_attention_heads", f"a divisor of twice the hidden size, {divisors(both)}")
    return both // heads


def _zamba2_blocks(c: Keys) -> SharedBlocks:
    """Hybrid layers have one of the shared blocks before them, in turn."""
    layers, listed = c.fields["num_layers"], c.items("layers_block_type")
    hybrid = [x == "hybrid" for x in listed if isinstance(x, str) and x in STATE_TYPES | {"hybrid"}]
    if not len(hybrid) == len(listed) == layers or not any(hybrid):
        c.reject("layers_block_type", f'"mamba" or "hybrid" for each of the {layers} layers')
    blocks = c.whole("num_mem_blocks", 1, layers)
    counts = zip(accumulate(hybrid, initial=0), hybrid, strict=False)
    return SharedBlocks(
        layers=tuple(n % blocks + 1 if here else 0 for n, here in counts),
        adapter_rank=c.whole("adapter_rank", 1, LIMITS["hidden_size"]),
        attention_adapter=c.flag("use_shared_attention_adapter"),
    )


def _zamba2_longest(c: Keys) -> int:
    long = c.flag("use_long_context")
    return 16384 if long else c.size("max_position_embeddings", "max_position_embeddings")


def _falcon_h1_state(c: Keys) -> StateSpace:
    """Mamba-2's sizes, whose inner width has a key of its own."""
    heads, inner = c.whole("mamba_n_heads", 1, MOST), c.get("mamba_d_ssm")
    if inner is None:
        inner = c.whole("mamba_expand", 1, 64) * c.fields["hidden_size"]
    elif type(inner) is not int or inner % heads or inner < heads:
        c.reject("mamba_d_ssm", f"null or a multiple of the {heads} heads")
    inner = cast(int, inner)
    if c.get("mamba_d_head") == "auto":
        c = replace(c, values=c.values | {"mamba_d_head": inner // heads})
    state: StateSpace = state_heads(_BAMBA_STATE)(c)
    if inner != state.inner:
        c.reject("mamba_d_head", f"{inner} / {heads}, a part of the width inside")
    normed = c.flag("mamba_rms_norm")
    if normed:
        c.only("mamba_norm_before_gate", False)
    return replace(state, gated_norm=normed)


_NEMOTRON_TYPES = {
    "linear_attention": "M",
    "mamba": "M",
    "full_attention": "*",
    "attention": "*",
    "mlp": "-",
    "moe": "E",
}


def _nemotron_letters(c: Keys) -> str:
    """A letter per layer, as the first files have them; transformers 5 lists them in words."""
    if c.has("hybrid_override_pattern"):
        letters = c.text("hybrid_override_pattern")
        if not letters or not {*letters} <= LETTERS.keys():
            c.reject("hybrid_override_pattern", f"letters of {' '.join(LETTERS)}")
        return letters
    listed = c.items("layers_block_type")
    words = [_NEMOTRON_TYPES.get(x, "") if isinstance(x, str) else "" for x in listed]
    if not words or "" in words:
        c.reject("layers_block_type", f"a list of {', '.join(_NEMOTRON_TYPES)}")
    return "".join(words)


def _nemotron_depth(c: Keys) -> int:
    layers = len(_nemotron_letters(c))
    if c.values.get("num_hidden_layers", layers) != layers:
        c.reject("num_hidden_layers", f"{layers}, the length of the pattern")
    return replace(c, values={"num_hidden_layers": layers}).size("num_layers", "num_hidden_layers")


def _nemotron_layers(c: Keys) -> Fields:
    """A layer is a mixer or an MLP, not both."""
    if c.get("moe_latent_size") is not None:
        c.reject("moe_latent_size", "null; experts in a narrower space are not supported")
    letters = _nemotron_letters(c)
    fields = from_letters(letters) | ({} if "-" in letters else {"ffn_hidden_size": 0})
    if "E" not in letters:
        return fields | c.read_all(NO_EXPERTS)
    shared = c.whole("n_shared_experts", 0, MOST_EXPERTS)
    width = c.size("ffn_hidden_size", "moe_shared_expert_intermediate_size")
    return {
        **fields,
        **c.read_all(experts("n_routed_experts", "moe_intermediate_size")),
        "shared_ffn_hidden_size": shared * width,
        "router": "sigmoid",
        "norm_topk_prob": c.flag("norm_topk_prob"),
        "expert_bias": True,
    }


def _minimax_mixers(c: Keys) -> tuple[str, ...]:
    """Lightning or softmax attention, as MiniMax-01's files list them or transformers does."""
    if not c.has("attn_type_list"):
        return listed_mixers("lightning")(c)
    kinds = bits(c, "attn_type_list", c.get("attn_type_list"), "lightning")
    return shortest(["global" if x else "lightning" for x in kinds])


def _minimax_state(c: Keys) -> StateSpace:
    heads, width = c.fields["num_attention_heads"], c.fields["kv_channels"]
    chunk = c.whole("block_size", 1, MOST)
    return StateSpace(heads=heads, head_width=width, groups=heads, state=width, conv=0, chunk=chunk)


def _minimax_fraction(c: Keys) -> float:
    width, fraction = c.fields["kv_channels"], rotary_fraction(c)
    return c.whole("rotary_dim", 1, width) / width if c.has("rotary_dim") else fraction


def _qwen3_next_mixers(c: Keys) -> tuple[str, ...]:
    """Attention in every fourth layer or where listed."""
    if c.get("mlp_only_layers"):
        c.reject("mlp_only_layers", "none; dense layers are not supported")
    period = c.size("num_layers", "full_attention_interval")
    if c.get("layer_types") is not None:
        return listed_mixers("gated_delta")(c)
    return every(period, period - 1, "gated_delta")


def _qwen3_next_state(c: Keys) -> StateSpace:
    groups = c.whole("linear_num_key_heads", 1, MOST)
    heads = c.whole("linear_num_value_heads", 1, MOST)
    if heads % groups:
        c.reject("linear_num_key_heads", f"a divisor of the {heads} value heads")
    return StateSpace(
        heads=heads,
        head_width=c.whole("linear_value_head_dim", 1, LIMITS["kv_channels"]),
        groups=groups,
        state=c.whole("linear_key_head_dim", 1, LIMITS["kv_channels"]),
        conv=c.whole("linear_conv_kernel_dim", 1, 64),
        conv_bias=False,
        chunk=64,
    )


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
    heads = c.whole("linear_attn_config.num_heads", 1, MOST)
    width = c.whole("linear_attn_config.head_dim", 1, LIMITS["kv_channels"])
    return StateSpace(
        heads=heads,
        head_width=width,
        groups=heads,
        state=width,
        conv=c.whole("linear_attn_config.short_conv_kernel_size", 1, 64),
        conv_bias=False,
        gate_rank=width,
        chunk=64,
    )


def _kimi_shared(c: Keys) -> int:
    return c.whole("num_shared_experts", 0, MOST_EXPERTS) * c.fields["moe_ffn_hidden_size"]


_WINDOW = windows(lambda c, i: True, listed=False)
_QWEN_MOE_WINDOW = windows(lambda c, i: True, used="use_sliding_window", listed=False)
_QWEN_WINDOW = windows(
    lambda c, i: i >= c.whole("max_window_layers", 0, LIMITS["num_layers"]),
    used="use_sliding_window",
)
_GEMMA_WINDOW = windows(lambda c, i: (i + 1) % c.size("num_layers", "sliding_window_pattern") > 0)


# ---- maps ----------------------------------------------------------------------------------------

_GEMMA: Map = {
    **BIASED,
    "activation": "hidden_activation",
    "attention_softcap": "attn_logit_softcapping",
    "logit_softcap": "final_logit_softcapping",
}
_ALL_BIASES = ("qkv_bias", "attention_output_bias", "mlp_bias")
_FALCON: Map = {
    **sizes(
        num_layers=("num_hidden_layers", "n_layer"),
        num_attention_heads=("num_attention_heads", "n_head"),
    ),
    "ffn_hidden_size": or_times_hidden("ffn_hidden_size", 4),
    **dict.fromkeys(_ALL_BIASES, "bias"),
    "activation": "activation",
    "hidden_dropout": "hidden_dropout",
    "attention_dropout": "attention_dropout",
}
_BERT: Map = {
    **sizes(ffn_hidden_size="intermediate_size"),
    "token_types": whole("type_vocab_size", 1, LIMITS["vocab_size"]),
    "activation": "hidden_act",
    "hidden_dropout": "hidden_dropout_prob",
    "embedding_dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
}
_BERT_ONLY = {
    "is_decoder": False,
    "add_cross_attention": False,
    "position_embedding_type": "absolute",
}
_QWEN_EXPERTS: Map = {
    **BIASED,
    **experts("num_experts", "moe_intermediate_size"),
    "norm_topk_prob": "norm_topk_prob",
    "moe_layer_freq": _qwen_dense_layers,
    "mixers": _QWEN_MOE_WINDOW,
}
_LLAMA4: Map = {
    **BIASED,
    **experts("num_local_experts", "intermediate_size"),
    "ffn_hidden_size": "intermediate_size_mlp",
    "shared_ffn_hidden_size": "intermediate_size",
    "router": Fixed("sigmoid"),
    "norm_topk_prob": Fixed(False),
    "qk_l2_norm": "use_qk_norm",
}
_PURE: Map = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "tied_embeddings": "tie_word_embeddings",
}
"""Models of states alone, without attention and MLPs."""
_PURE_ONLY = {"use_bias": False, "hidden_act": "silu"}
_MAMBA_KEYS = ("time_step_rank", "conv_kernel", "state_size")
_MAMBA2_STATE = {
    "heads": "num_heads",
    "head_width": "head_dim",
    "groups": "n_groups",
    "state": "state_size",
    "conv": "conv_kernel",
    "conv_bias": "use_conv_bias",
    "chunk": "chunk_size",
    "expand": "expand",
}
_BAMBA_STATE = {
    "heads": "mamba_n_heads",
    "head_width": "mamba_d_head",
    "groups": "mamba_n_groups",
    "state": "mamba_d_state",
    "conv": "mamba_d_conv",
    "conv_bias": "mamba_conv_bias",
    "chunk": "mamba_chunk_size",
    "expand": "mamba_expand",
}
_ZAMBA2_STATE = {
    "heads": "n_mamba_heads",
    "groups": "mamba_ngroups",
    "state": "mamba_d_state",
    "conv": "mamba_d_conv",
    "conv_bias": "use_conv_bias",
    "chunk": "chunk_size",
    "expand": "mamba_expand",
}
_NEMOTRON_STATE = _MAMBA2_STATE | {
    "heads": "mamba_num_heads",
    "head_width": "mamba_head_dim",
    "state": "ssm_state_size",
}
_MINIMAX: Map = {
    **DECODER,
    "mixers": _minimax_mixers,
    "state_space": _minimax_state,
    "rotary_fraction": _minimax_fraction,
    **experts("num_local_experts", "intermediate_size"),
}


def _none_of(*keys: str) -> dict[str, Any]:
    return dict.fromkeys(keys, False)


# ---- defaults ------------------------------------------------------------------------------------

_TIED_DEFAULTS: Json = {"tie_word_embeddings": True}
_T5_DEFAULTS: Json = _TIED_DEFAULTS | {
    "vocab_size": 32128,
    "relative_attention_num_buckets": 32,
    "dropout_rate": 0.1,
    "feed_forward_proj": "relu",
    "n_positions": 512,
}
_LLAMA_DEFAULTS: Json = {"tie_word_embeddings": False, "hidden_act": "silu"}
_QWEN_DEFAULTS: Json = _LLAMA_DEFAULTS | {"use_sliding_window": False, "sliding_window": 4096}
_GEMMA_DEFAULTS: Json = _TIED_DEFAULTS | {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "sliding_window": 4096,
}
_GEMMA2_DEFAULTS: Json = _GEMMA_DEFAULTS | {
    "sliding_window_pattern": 2,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3_DEFAULTS: Json = _GEMMA_DEFAULTS | {
    "sliding_window_pattern": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
}
_GPT2_DEFAULTS: Json = _TIED_DEFAULTS | {
    "activation_function": "gelu_new",
    "resid_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "embd_pdrop": 0.1,
}
_OPT_DEFAULTS: Json = _TIED_DEFAULTS | {
    "activation_function": "relu",
    "do_layer_norm_before": True,
    "_remove_final_layer_norm": False,
    "enable_bias": True,
    "dropout": 0.1,
}
_REFINED_WEB_DEFAULTS: Json = _TIED_DEFAULTS | {
    "num_kv_heads": None,
    "max_position_embeddings": 2048,
    "new_decoder_architecture": False,
    "alibi": False,
    "bias": False,
    "activation": "gelu",
}
_QWEN3_MOE_DEFAULTS: Json = _QWEN_DEFAULTS | {
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
}
# Defaults of the class in transformers 5.23, those of Qwen1.5-MoE-A2.7B
_QWEN2_MOE_DEFAULTS: Json = _QWEN3_MOE_DEFAULTS | {
    "num_key_value_heads": 16,
    "shared_expert_intermediate_size": 5632,
    "moe_intermediate_size": 1408,
    "num_experts": 60,
    "num_experts_per_tok": 4,
}
# The class says 2048 for the width of an expert, the only model 1024: a file has to say
_OLMOE_DEFAULTS: Json = _LLAMA_DEFAULTS | {
    "vocab_size": 50304,
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
}
_GPT_OSS_DEFAULTS: Json = _LLAMA_DEFAULTS | {
    "head_dim": 64,
    "sliding_window": 128,
    "attention_bias": True,
    "swiglu_limit": 7.0,
    "max_position_embeddings": 131072,
}
_LLAMA4_DEFAULTS: Json = _LLAMA_DEFAULTS | {
    "head_dim": 128,
    "attention_bias": False,
    "intermediate_size_mlp": 16384,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
    "use_qk_norm": True,
    "max_position_embeddings": 131072,
}
_DEEPSEEK_DEFAULTS: Json = _LLAMA_DEFAULTS | {
    "num_key_value_heads": None,
    "attention_bias": False,
    "moe_layer_freq": 1,
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "topk_method": "greedy",
}
_BALANCED_DEFAULTS: Json = {
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
}
_DBRX_DEFAULTS: Json = {"tie_word_embeddings": False, "ffn_config.ffn_act_fn.name": "silu"}
_BERT_DEFAULTS: Json = _TIED_DEFAULTS | {
    "hidden_act": "gelu",
    "type_vocab_size": 2,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}

# A state-space model has no longest sequence; 2^20 stands for that.
_MAMBA_DEFAULTS: Json = {
    "hidden_act": "silu",
    "use_conv_bias": True,
    "expand": 2,
    "conv_kernel": 4,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2**20,
}
_MAMBA1_DEFAULTS: Json = _MAMBA_DEFAULTS | {"state_size": 16, "time_step_rank": "auto"}
_MAMBA2_DEFAULTS: Json = _MAMBA_DEFAULTS | {
    "state_size": 128,
    "chunk_size": 256,
    "tie_word_embeddings": False,
}
_DECODER_DEFAULTS: Json = {
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
}
_JAMBA_DEFAULTS: Json = _DECODER_DEFAULTS | {
    "num_key_value_heads": None,
    "mamba_conv_bias": True,
    "mamba_expand": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_dt_rank": "auto",
    "max_position_embeddings": 262144,
}
_BAMBA_DEFAULTS: Json = _DECODER_DEFAULTS | {
    "mamba_conv_bias": True,
    "mamba_expand": 2,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 256,
    "mlp_bias": False,
    "max_position_embeddings": 262144,
    "partial_rotary_factor": 0.5,
}
_ZAMBA2_DEFAULTS: Json = {
    "tie_word_embeddings": True,
    "hidden_act": "gelu",
    "num_key_value_heads": None,
    "max_position_embeddings": 4096,
    "mamba_d_state": 64,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_ngroups": 1,
    "chunk_size": 256,
    "use_conv_bias": True,
    "num_mem_blocks": 1,
    "adapter_rank": 128,
    "use_shared_attention_adapter": False,
    "use_mem_rope": False,
    "use_long_context": False,
}
_FALCON_H1_DEFAULTS: Json = _DECODER_DEFAULTS | {
    "num_key_value_heads": 8,
    "mamba_d_ssm": 1024,
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_norm_before_gate": True,
    "mamba_rms_norm": False,
    "mlp_bias": False,
}
_NEMOTRON_H_DEFAULTS: Json = _DECODER_DEFAULTS | {
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "use_conv_bias": True,
    "conv_kernel": 4,
    "chunk_size": 128,
    "intermediate_size": 21504,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
}
_MINIMAX_DEFAULTS: Json = _DECODER_DEFAULTS | {"block_size": 256, "partial_rotary_factor": 1.0}
_KIMI_LINEAR_DEFAULTS: Json = _DECODER_DEFAULTS | {
    "linear_attn_config.short_conv_kernel_size": 4,
    "num_key_value_heads": None,
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
}
_QWEN3_NEXT_DEFAULTS: Json = _DECODER_DEFAULTS | {
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "norm_topk_prob": True,
    "partial_rotary_factor": 0.25,
    "intermediate_size": 5632,
    "max_position_embeddings": 32768,
}


# ---- the architectures ---------------------------------------------------------------------------

FAMILIES: dict[str, Family] = {
    "GPT2LMHeadModel": Family(
        ("gpt2",),
        "gpt2",
        {
            # GPT-2's own names of the sizes; transformers reads the usual ones as well.
            **sizes(
                num_layers=("n_layer", "num_hidden_layers"),
                hidden_size=("n_embd", "hidden_size"),
                num_attention_heads=("n_head", "num_attention_heads"),
                max_position_embeddings=("n_positions", "max_position_embeddings"),
            ),
            "ffn_hidden_size": or_times_hidden("n_inner", 4),
            "activation": "activation_function",
            "hidden_dropout": "resid_pdrop",
            "attention_dropout": "attn_pdrop",
            "embedding_dropout": "embd_pdrop",
        },
        _GPT2_DEFAULTS,
        only=_none_of("add_cross_attention"),
    ),
    "LlamaForCausalLM": Family(
        ("llama",),
        "llama2-7b",
        {**BIASED, "mlp_bias": "mlp_bias"},
        _LLAMA_DEFAULTS
        | {"num_key_value_heads": None, "attention_bias": False, "mlp_bias": False}
        | {"max_position_embeddings": 2048},
    ),
    "MistralForCausalLM": Family(
        ("mistral",),
        "mistral-7b-v0.1",
        {**DECODER, "mixers": _WINDOW},
        _LLAMA_DEFAULTS | {"sliding_window": 4096},
    ),
    "Qwen2ForCausalLM": Family(
        ("qwen2",),
        "qwen2.5-7b",
        {**DECODER, "mixers": _QWEN_WINDOW},
        _QWEN_DEFAULTS | {"max_window_layers": 28},
    ),
    "Qwen3ForCausalLM": Family(
        ("qwen3",),
        "qwen3-8b",
        {**BIASED, "mixers": _QWEN_WINDOW},
        _QWEN_DEFAULTS | {"max_window_layers": 28, "head_dim": 128, "attention_bias": False},
    ),
    "MixtralForCausalLM": Family(
        ("mixtral",),
        "mixtral-8x7b",
        {**DECODER, **experts("num_local_experts", "intermediate_size"), "mixers": _WINDOW},
        _LLAMA_DEFAULTS,
    ),
    "Qwen3MoeForCausalLM": Family(
        ("qwen3_moe",),
        "qwen3-30b-a3b",
        _QWEN_EXPERTS,
        _QWEN3_MOE_DEFAULTS,
    ),
    "OlmoeForCausalLM": Family(
        ("olmoe",),
        "olmoe-1b-7b",
        {
            **BIASED,
            **experts("num_experts", "intermediate_size"),
            "norm_topk_prob": "norm_topk_prob",
        },
        _OLMOE_DEFAULTS,
    ),
    "Qwen2MoeForCausalLM": Family(
        ("qwen2_moe",),
        "qwen2-57b-a14b",
        {
            **_QWEN_EXPERTS,
            **_SHARED_EXPERTS,
            "qkv_bias": Fixed(True),
            "attention_output_bias": Fixed(False),
        },
        _QWEN2_MOE_DEFAULTS,
    ),
    "GptOssForCausalLM": Family(
        ("gpt_oss",),
        "gpt-oss-120b",
        {
            **BIASED,
            **experts(
                "num_local_experts",
                "intermediate_size",
                "num_experts_per_tok",
                "experts_per_token",
            ),
            "activation": Fixed("quick_gelu"),
            "activation_func_clamp_value": number("swiglu_limit", 1e-3, 1e6),
            "mixers": windows(lambda c, i: i % 2 == 0),
        },
        _GPT_OSS_DEFAULTS,
        only={"hidden_act": "silu", "swiglu_alpha": 1.702},
    ),
    "Llama4ForCausalLM": Family(
        ("llama4_text",), "llama4-scout", {**_LLAMA4, "mixers": _llama4_layers}, _LLAMA4_DEFAULTS
    ),
    "Llama4ForConditionalGeneration": Family(
        ("llama4",),
        "llama4-scout",
        {**_LLAMA4, "mixers": _llama4_layers},
        _LLAMA4_DEFAULTS,
        text="llama4_text",
    ),
    "DeepseekForCausalLM": Family(
        ("deepseek",), "deepseek-moe-16b", {**BIASED, **DEEPSEEK_EXPERTS}, _DEEPSEEK_DEFAULTS
    ),
    "DeepseekV2ForCausalLM": Family(
        ("deepseek_v2",),
        "deepseek-v2",
        {**LATENT, **DEEPSEEK_EXPERTS},
        _DEEPSEEK_DEFAULTS,
        only=_none_of("attention_bias"),
    ),
    "DeepseekV3ForCausalLM": Family(
        ("deepseek_v3", "kimi_k2"),
        "deepseek-v3",
        {**LATENT, **DEEPSEEK_EXPERTS},
        _DEEPSEEK_DEFAULTS | _BALANCED_DEFAULTS | {"n_group": 8, "topk_group": 4},
        only=_none_of("attention_bias"),
    ),
    "Glm4MoeForCausalLM": Family(
        ("glm4_moe",),
        "glm-4.5",
        {
            **DECODER,
            **DEEPSEEK_EXPERTS,
            "qkv_bias": "attention_bias",
            "qk_norm": "use_qk_norm",
            "rotary_fraction": rotary_fraction,
        },
        _DEEPSEEK_DEFAULTS
        | _BALANCED_DEFAULTS
        | {"use_qk_norm": False, "partial_rotary_factor": 0.5},
    ),
    "DbrxForCausalLM": Family(
        ("dbrx",),
        "dbrx",
        {
            **sizes(
                num_layers="n_layers",
                hidden_size="d_model",
                num_attention_heads="n_heads",
                max_position_embeddings="max_seq_len",
            ),
            **experts(
                "ffn_config.moe_num_experts", "ffn_config.ffn_hidden_size", "ffn_config.moe_top_k"
            ),
            "ffn_hidden_size": "ffn_config.ffn_hidden_size",
            "num_query_groups": query_groups("attn_config.kv_n_heads"),
            "activation": "ffn_config.ffn_act_fn.name",
            "hidden_dropout": "resid_pdrop",
            "attention_dropout": "attn_config.attn_pdrop",
            "embedding_dropout": "emb_pdrop",
        },
        _DBRX_DEFAULTS,
    ),
    "Gemma2ForCausalLM": Family(
        ("gemma2",),
        "gemma2-9b",
        {**_GEMMA, "mixers": _GEMMA_WINDOW},
        _GEMMA2_DEFAULTS,
        only=_none_of("use_bidirectional_attention"),
    ),
    "Gemma3ForCausalLM": Family(
        ("gemma3_text",),
        "gemma3-1b",
        {**_GEMMA, "mixers": _GEMMA_WINDOW},
        _GEMMA3_DEFAULTS,
        only=_none_of("use_bidirectional_attention"),
    ),
    "Gemma3ForConditionalGeneration": Family(
        ("gemma3",),
        "gemma3-4b",
        {**_GEMMA, "mixers": _GEMMA_WINDOW},
        _GEMMA3_DEFAULTS,
        only=_none_of("use_bidirectional_attention"),
        text="gemma3_text",
        shared=("tie_word_embeddings",),
    ),
    "Phi3ForCausalLM": Family(
        ("phi3",),
        "phi3-mini",
        {
            **DECODER,
            "rotary_fraction": rotary_fraction,
            "hidden_dropout": "resid_pdrop",
            "embedding_dropout": "embd_pdrop",
            "mixers": _WINDOW,
        },
        _LLAMA_DEFAULTS | {"num_key_value_heads": None, "partial_rotary_factor": 1.0},
    ),
    "T5ForConditionalGeneration": Family(
        ("t5",),
        "t5-base",
        {
            "encoder_num_layers": "num_layers",
            "num_layers": lambda c: (
                c.optional("num_layers", "num_decoder_layers") or c.fields["encoder_num_layers"]
            ),
            "hidden_size": "d_model",
            "ffn_hidden_size": "d_ff",
            "num_attention_heads": "num_heads",
            "num_query_groups": "num_heads",
            "kv_channels": "d_kv",
            "vocab_size": "vocab_size",
            "max_position_embeddings": "n_positions",
            "relative_buckets": whole("relative_attention_num_buckets", 2, 2**16),
            "tied_embeddings": "tie_word_embeddings",
            "hidden_dropout": "dropout_rate",
            "attention_dropout": "dropout_rate",
            "embedding_dropout": "dropout_rate",
            "activation": _t5_mlp,
        },
        _T5_DEFAULTS,
    ),
    "FalconForCausalLM": Family(
        ("falcon",),
        "falcon-7b",
        {**_FALCON, "num_query_groups": _falcon_block},
        _REFINED_WEB_DEFAULTS | {"multi_query": True, "parallel_attn": True},
    ),
    "RWForCausalLM": Family(
        ("RefinedWeb", "RefinedWebModel"),
        "falcon-7b",
        {**_FALCON, "num_query_groups": _falcon_block},
        _REFINED_WEB_DEFAULTS,
    ),
    "OPTForCausalLM": Family(
        ("opt",),
        "opt-125m",
        {
            **sizes(ffn_hidden_size="ffn_dim"),
            **dict.fromkeys(_ALL_BIASES, "enable_bias"),
            "activation": "activation_function",
            "hidden_dropout": "dropout",
            "attention_dropout": "attention_dropout",
            "norm_placement": _opt_head,
        },
        _OPT_DEFAULTS,
        only={"layer_norm_elementwise_affine": True},
    ),
    "BertForMaskedLM": Family(("bert",), "bert-base", _BERT, _BERT_DEFAULTS, only=_BERT_ONLY),
    "BertModel": Family(
        ("bert",),
        "bert-base",
        {
            **_BERT,
            # With its pooler: the output projection, which it lacks, is the tied embedding.
            "pooler": Fixed(True),
            "mlm_transform": Fixed(False),
            "lm_head_bias": Fixed(False),
            "tied_embeddings": Fixed(True),
        },
        _BERT_DEFAULTS,
        only=_BERT_ONLY,
    ),
    "MambaForCausalLM": Family(
        ("mamba",),
        "mamba-2.8b",
        {**_PURE, "state_space": state_channels("", *_MAMBA_KEYS)},
        _MAMBA1_DEFAULTS,
        only=_PURE_ONLY,
    ),
    "FalconMambaForCausalLM": Family(
        ("falcon_mamba",),
        "falcon-mamba-7b",
        {**_PURE, "state_space": state_channels("", *_MAMBA_KEYS, inner_norms="plain")},
        _MAMBA1_DEFAULTS,
        only=_PURE_ONLY,
    ),
    "Mamba2ForCausalLM": Family(
        ("mamba2",),
        "mamba-codestral-7b",
        {**_PURE, "state_space": state_heads(_MAMBA2_STATE)},
        _MAMBA2_DEFAULTS,
        only=_PURE_ONLY,
    ),
    "JambaForCausalLM": Family(
        ("jamba",),
        "jamba-v0.1",
        {
            **DECODER,
            "state_space": state_channels(
                *("mamba_", "mamba_dt_rank", "mamba_d_conv", "mamba_d_state"),
                inner_norms="weighted",
            ),
            "mixers": periodic_mixers("mamba"),
            "num_experts": _jamba_experts,
        },
        _JAMBA_DEFAULTS,
        only=_none_of("mamba_proj_bias"),
    ),
    "BambaForCausalLM": Family(
        ("bamba",),
        "bamba-9b",
        {
            **DECODER,
            "mixers": _bamba_mixers,
            "state_space": state_heads(_BAMBA_STATE),
            "rotary_fraction": rotary_fraction,
        },
        _BAMBA_DEFAULTS,
        only=_none_of("mamba_proj_bias", "attention_bias", "mlp_bias"),
    ),
    "GraniteMoeHybridForCausalLM": Family(
        ("granitemoehybrid",),
        "granite-4.0-h-tiny",
        {
            **DECODER,
            "mixers": listed_mixers("mamba2"),
            "state_space": state_heads(_BAMBA_STATE),
            "position": _granite_position,
            "num_experts": _granite_experts,
        },
        _BAMBA_DEFAULTS,
        only=_none_of("mamba_proj_bias", "attention_bias"),
    ),
    "Zamba2ForCausalLM": Family(
        ("zamba2",),
        "zamba2-2.7b",
        {
            **DECODER,
            "kv_channels": _zamba2_head,
            "ffn_hidden_size": or_times_hidden("intermediate_size", 4),
            "max_position_embeddings": _zamba2_longest,
            "shared_blocks": _zamba2_blocks,
            "state_space": state_heads(_ZAMBA2_STATE),
            "position": lambda c: "rope" if c.flag("use_mem_rope") else "none",
        },
        _ZAMBA2_DEFAULTS,
        only={"add_bias_linear": False, "use_shared_mlp_adapter": True},
    ),
    "FalconH1ForCausalLM": Family(
        ("falcon_h1",),
        "falcon-h1-7b",
        {**DECODER, "state_space": _falcon_h1_state},
        _FALCON_H1_DEFAULTS,
        only=_none_of("mamba_proj_bias", "projectors_bias", "attention_bias", "mlp_bias"),
    ),
    "NemotronHForCausalLM": Family(
        ("nemotron_h",),
        "nemotron-h-8b",
        {
            **DECODER,
            "num_layers": _nemotron_depth,
            # NVIDIA's own files have the second name.
            "kv_channels": head_width(("num_attention_heads",), "head_dim", "attention_head_dim"),
            "activation": "mlp_hidden_act",
            "state_space": state_heads(_NEMOTRON_STATE),
            "mlps": _nemotron_layers,
        },
        _NEMOTRON_H_DEFAULTS,
        only=_none_of("use_bias", "mamba_proj_bias", "attention_bias", "mlp_bias"),
    ),
    "MiniMaxText01ForCausalLM": Family(
        ("minimax_text_01",), "minimax-text-01", _MINIMAX, _MINIMAX_DEFAULTS
    ),
    "KimiLinearForCausalLM": Family(
        ("kimi_linear",),
        "kimi-linear-48b-a3b",
        {
            **LATENT,
            "max_position_embeddings": ("max_position_embeddings", "model_max_length"),
            **experts("num_experts", "moe_intermediate_size", "num_experts_per_token"),
            "shared_ffn_hidden_size": _kimi_shared,
            "first_dense_layers": whole("first_k_dense_replace", 0, LIMITS["num_layers"]),
            "moe_layer_freq": "moe_layer_freq",
            "router": "moe_router_activation_func",
            "norm_topk_prob": "moe_renormalize",
            "expert_bias": Fixed(True),
            "mixers": _kimi_mixers,
            "position": Fixed("none"),
            "state_space": _kimi_state,
        },
        _KIMI_LINEAR_DEFAULTS,
        only={"mla_use_nope": True, "attention_bias": False},
    ),
    "Qwen3NextForCausalLM": Family(
        ("qwen3_next",),
        "qwen3-next-80b-a3b",
        {
            **DECODER,
            **experts("num_experts", "moe_intermediate_size"),
            **_SHARED_EXPERTS,
            "norm_topk_prob": "norm_topk_prob",
            "rotary_fraction": rotary_fraction,
            "mixers": _qwen3_next_mixers,
            "state_space": _qwen3_next_state,
        },
        _QWEN3_NEXT_DEFAULTS,
        only={"attention_bias": False, "decoder_sparse_step": 1},
    ),
    "MiniMaxForCausalLM": Family(("minimax",), "minimax-text-01", _MINIMAX, _MINIMAX_DEFAULTS),
}
"""The architectures that can be read. Where a file names none, its model_type's first counts."""

_MISSING = {
    "SparseMixer routing": ("PhiMoEForCausalLM", "phimoe"),
    "sparse attention with an indexer": ("DeepseekV32ForCausalLM", "deepseek_v32"),
    "Mamba-1 in heads that have a B and a C each": ("ZambaForCausalLM", "zamba"),
    "block-sparse attention": ("Phi3SmallForCausalLM", "phi3small"),
    "an encoder with learned positions": ("BartForConditionalGeneration", "bart"),
}
MISSING = {name: what for what, names in _MISSING.items() for name in names}
"""What a `ModelConfig` lacks for other architectures and model types that people may try."""
