"""The maps of models with states: which key of a config.json is which field."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import cast

from stagewright.errors import divisors
from stagewright.model.architecture import LIMITS, MOST_EXPERTS
from stagewright.model.hf.keys import Fields, Fixed, Keys, Map
from stagewright.model.hf.parts import (
    BIASED,
    DECODER,
    LATENT,
    MOST,
    NO_EXPERTS,
    SHARED_EXPERTS,
    STATE_TYPES,
    StateKeys,
    bits,
    experts,
    head_width,
    indexed,
    listed_mixers,
    or_times_hidden,
    periodic_mixers,
    rotary_fraction,
    state_channels,
    state_heads,
    whole,
)
from stagewright.model.patterns import LETTERS, every, from_letters, shortest
from stagewright.model.shared_blocks import SharedBlocks
from stagewright.model.state_space import StateSpace


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
    state: StateSpace = state_heads(_BAMBA_KEYS)(c)
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
        "moe_latent_size": c.optional("hidden_size", "moe_latent_size") or 0,
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


_SAME = ("hidden_size", "vocab_size", "max_position_embeddings")
_PURE: Map = {
    "num_layers": "num_hidden_layers",
    **{name: name for name in _SAME},
    "tied_embeddings": "tie_word_embeddings",
}
"""Models of states alone, without attention and MLPs."""
_MAMBA_KEYS = ("time_step_rank", "conv_kernel", "state_size")
_JAMBA_KEYS = ("mamba_dt_rank", "mamba_d_conv", "mamba_d_state")
_BAMBA_KEYS = StateKeys(
    heads="mamba_n_heads",
    head_width="mamba_d_head",
    groups="mamba_n_groups",
    state="mamba_d_state",
    conv="mamba_d_conv",
    conv_bias="mamba_conv_bias",
    chunk="mamba_chunk_size",
    expand="mamba_expand",
)
_ZAMBA2_KEYS = StateKeys(
    heads="n_mamba_heads",
    head_width="",
    groups="mamba_ngroups",
    state="mamba_d_state",
    conv="mamba_d_conv",
    expand="mamba_expand",
)
_NEMOTRON_KEYS = StateKeys("mamba_num_heads", "mamba_head_dim", state="ssm_state_size")

MAMBA: Map = {**_PURE, "state_space": state_channels("", *_MAMBA_KEYS)}
FALCON_MAMBA: Map = {
    **_PURE,
    "state_space": state_channels("", *_MAMBA_KEYS, inner_norms="plain"),
}
MAMBA2: Map = {**_PURE, "state_space": state_heads(StateKeys())}
JAMBA: Map = {
    **DECODER,
    "state_space": state_channels("mamba_", *_JAMBA_KEYS, inner_norms="weighted"),
    "mixers": periodic_mixers("mamba"),
    "num_experts": _jamba_experts,
}
BAMBA: Map = {
    **BIASED,
    "mlp_bias": "mlp_bias",
    "mixers": _bamba_mixers,
    "state_space": state_heads(_BAMBA_KEYS),
    "rotary_fraction": rotary_fraction,
}
GRANITE_HYBRID: Map = {
    **BIASED,
    "mixers": listed_mixers("mamba2"),
    "state_space": state_heads(_BAMBA_KEYS),
    "position": _granite_position,
    "num_experts": _granite_experts,
}
ZAMBA2: Map = {
    **DECODER,
    "kv_channels": _zamba2_head,
    "ffn_hidden_size": or_times_hidden("intermediate_size", 4),
    "max_position_embeddings": _zamba2_longest,
    "shared_blocks": _zamba2_blocks,
    "state_space": state_heads(_ZAMBA2_KEYS),
    "position": lambda c: "rope" if c.flag("use_mem_rope") else "none",
}
FALCON_H1: Map = {**BIASED, "mlp_bias": "mlp_bias", "state_space": _falcon_h1_state}
NEMOTRON_H: Map = {
    **DECODER,
    "num_layers": _nemotron_depth,
    "tied_embeddings": Fixed(False),  # transformers never ties them
    # NVIDIA's own files have the second name.
    "kv_channels": head_width(("num_attention_heads",), "head_dim", "attention_head_dim"),
    "activation": "mlp_hidden_act",
    "state_space": state_heads(_NEMOTRON_KEYS),
    "mlps": _nemotron_layers,
}
MINIMAX: Map = {
    **DECODER,
    "mixers": _minimax_mixers,
    "state_space": _minimax_state,
    "rotary_fraction": _minimax_fraction,
    **experts("num_local_experts", "intermediate_size"),
}
KIMI_LINEAR: Map = {
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
}
# The gate is half of the projection of queries, and has its bias.
_QWEN_GATED: Map = {**BIASED, "attention_gate_bias": "attention_bias"}

QWEN3_NEXT: Map = {
    **_QWEN_GATED,
    **experts("num_experts", "moe_intermediate_size"),
    **SHARED_EXPERTS,
    "norm_topk_prob": "norm_topk_prob",
    "rotary_fraction": rotary_fraction,
    "mixers": _qwen3_next_mixers,
    "state_space": _qwen3_next_state,
}

_QWEN3_5: Map = {
    **_QWEN_GATED,
    "rotary_fraction": rotary_fraction,
    "mixers": _qwen3_next_mixers,
    "state_space": _qwen3_next_state,
}
QWEN3_5: Map = {**_QWEN3_5, **NO_EXPERTS, "shared_expert_gate": Fixed(False)}
QWEN3_5_MOE: Map = {
    **_QWEN3_5,
    "ffn_hidden_size": "moe_intermediate_size",  # no layer is dense
    **experts("num_experts", "moe_intermediate_size"),
    **SHARED_EXPERTS,
}
