"""Readers of config.json files of models whose layers carry a state.

Not read: what scales values without adding any (multipliers of Granite, MiniMax and Falcon-H1,
limits of time steps) and where transformers would run another kernel.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import cast

from stagewright.errors import divisors
from stagewright.model.config import LIMITS, MOST_EXPERTS, Recurrence
from stagewright.model.hf.keys import (
    Architecture,
    Fields,
    Json,
    Keys,
    decoder,
    expert_sizes,
    latent_attention,
    rotary_fraction,
)
from stagewright.model.patterns import LETTERS, every, from_letters, shortest
from stagewright.model.shared_blocks import SharedBlocks
from stagewright.model.state_space import StateSpace

_MOST = 2**24
_ATTENTION = frozenset({"full_attention", "attention"})
_STATE = frozenset({"linear_attention", "mamba"})


def _listed(c: Keys, key: str, layers: int, state: Recurrence) -> Fields:
    """Mixers as a list names them: attention, or the model's recurrence."""
    value = c.values.get(key)
    listed = cast("list[object]", value) if isinstance(value, list) else []
    kinds = [
        "global" if x in _ATTENTION else state
        for x in listed
        if isinstance(x, str) and x in _ATTENTION | _STATE
    ]
    if not len(kinds) == len(listed) == layers:
        c.reject(
            key, f"attention or {state} for each of the {layers} layers, in transformers' words"
        )
    return {"mixers": shortest(kinds)}


def _pure(c: Keys) -> Fields:
    """A model without attention and MLPs: its layers, widths and vocabulary."""
    c.only("use_bias", False)
    c.only("hidden_act", "silu")
    names = {"num_layers": "num_hidden_layers"}
    fields = ("num_layers", "hidden_size", "vocab_size", "max_position_embeddings")
    sizes: Fields = {field: c.size(field, names.get(field, field)) for field in fields}
    return sizes | {"tied_embeddings": c.flag("tie_word_embeddings")}


def _channels(c: Keys, prefix: str, rank: str, conv: str, state: str) -> StateSpace:
    """Mamba-1's sizes, whose keys Jamba gives a prefix."""
    hidden = c.size("hidden_size", "hidden_size")
    auto = c.values.get(rank) == "auto"
    inner = c.optional("ffn_hidden_size", "intermediate_size") if not prefix else None
    return StateSpace(
        heads=inner or c.whole(f"{prefix}expand", 1, 64) * hidden,
        state=c.whole(state, 1, LIMITS["kv_channels"]),
        conv=c.whole(conv, 1, 64),
        conv_bias=c.flag("mamba_conv_bias" if prefix else "use_conv_bias"),
        dt_rank=-(-hidden // 16) if auto else c.whole(rank, 1, LIMITS["hidden_size"]),
    )


def _mamba(c: Keys) -> Fields:
    return _pure(c) | {
        "state_space": _channels(c, "", "time_step_rank", "conv_kernel", "state_size")
    }


def _falcon_mamba(c: Keys) -> Fields:
    fields = _mamba(c)
    return fields | {"state_space": replace(fields["state_space"], inner_norms="plain")}


def _heads(c: Keys, names: dict[str, str], bias: str) -> StateSpace:
    """Mamba-2's sizes under the keys of a family; the width inside is heads x width of a head."""
    heads = c.whole(names["heads"], 1, _MOST)
    width = names["head_width"]
    if c.values.get(width) == "auto":
        inner = c.whole(names["expand"], 1, 64) * c.size("hidden_size", "hidden_size")
        if inner % heads:
            c.reject(names["heads"], f"a divisor of the width inside, {inner}")
        head_width = inner // heads
    else:
        head_width = c.whole(width, 1, LIMITS["kv_channels"])
    groups = c.whole(names["groups"], 1, _MOST)
    if heads % groups:
        c.reject(names["groups"], f"a divisor of the {heads} heads")
    return StateSpace(
        heads=heads,
        head_width=head_width,
        groups=groups,
        state=c.whole(names["state"], 1, LIMITS["kv_channels"]),
        conv=c.whole(names["conv"], 1, 64),
        conv_bias=c.flag(bias),
        chunk=c.whole(names["chunk"], 1, _MOST),
    )


_MAMBA2_KEYS = {
    "heads": "num_heads",
    "head_width": "head_dim",
    "groups": "n_groups",
    "state": "state_size",
    "conv": "conv_kernel",
    "chunk": "chunk_size",
    "expand": "expand",
}
_BAMBA_KEYS = {
    "heads": "mamba_n_heads",
    "head_width": "mamba_d_head",
    "groups": "mamba_n_groups",
    "state": "mamba_d_state",
    "conv": "mamba_d_conv",
    "chunk": "mamba_chunk_size",
    "expand": "mamba_expand",
}
_ZAMBA2_KEYS = {
    "heads": "n_mamba_heads",
    "head_width": "mamba_headdim",
    "groups": "mamba_ngroups",
    "state": "mamba_d_state",
    "conv": "mamba_d_conv",
    "chunk": "chunk_size",
    "expand": "mamba_expand",
}
_NEMOTRON_KEYS = _MAMBA2_KEYS | {
    "heads": "mamba_num_heads",
    "head_width": "mamba_head_dim",
    "state": "ssm_state_size",
}


def _mamba2(c: Keys) -> Fields:
    return _pure(c) | {"state_space": _heads(c, _MAMBA2_KEYS, "use_conv_bias")}


def _jamba(c: Keys) -> Fields:
    """Attention and experts each once in a period of layers, at an offset."""
    c.only("mamba_proj_bias", False)
    state = _channels(c, "mamba_", "mamba_dt_rank", "mamba_d_conv", "mamba_d_state")
    fields = decoder(c)
    period = c.size("num_layers", "attn_layer_period")
    offset = c.whole("attn_layer_offset", 0, period - 1)
    fields |= {
        "mixers": every(period, offset, "mamba"),
        "state_space": replace(state, inner_norms="weighted"),
    }
    if c.values.get("num_experts") == 1:
        return fields | {"num_experts": 0} | _DENSE
    often = c.size("num_layers", "expert_layer_period")
    return fields | {
        **expert_sizes(c, "num_experts", "intermediate_size"),
        "norm_topk_prob": False,
        "first_dense_layers": c.whole("expert_layer_offset", 0, often - 1),
        "moe_layer_freq": often,
    }


_DENSE: Fields = {
    "top_k": 0,
    "moe_ffn_hidden_size": 0,
    "shared_ffn_hidden_size": 0,
    "first_dense_layers": 0,
    "moe_layer_freq": 1,
    "router": "softmax",
    "norm_topk_prob": True,
    "expert_bias": False,
}


def _bamba(c: Keys) -> Fields:
    for key in ("mamba_proj_bias", "attention_bias", "mlp_bias"):
        c.only(key, False)
    fields = decoder(c)
    layers = fields["num_layers"]
    value = c.values.get("attn_layer_indices")
    listed = cast("list[object]", value) if isinstance(value, list) else [value][value is None :]
    if not all(type(i) is int and 0 <= i < layers for i in listed):
        c.reject("attn_layer_indices", f"a list of layers below {layers}")
    kinds = ["global" if i in listed else "mamba2" for i in range(layers)]
    state = _heads(c, _BAMBA_KEYS, "mamba_conv_bias")
    turned = rotary_fraction(c)
    return fields | {"mixers": shortest(kinds), "state_space": state, "rotary_fraction": turned}


def _granite_hybrid(c: Keys) -> Fields:
    """Granite 4: experts beside a shared MLP, which alone is there where there are no experts."""
    c.only("mamba_proj_bias", False)
    c.only("attention_bias", False)
    fields = decoder(c)
    shared = c.size("ffn_hidden_size", "shared_intermediate_size")
    experts: Fields = {"num_experts": 0, "ffn_hidden_size": shared} | _DENSE
    if c.values.get("num_local_experts") != 0:
        experts = expert_sizes(c, "num_local_experts", "intermediate_size")
        experts |= {"shared_ffn_hidden_size": shared}
    rope = c.values.get("position_embedding_type") == "rope"
    if not rope and c.values.get("position_embedding_type") not in (None, "nope"):
        c.reject("position_embedding_type", '"rope", "nope" or null')
    return fields | {
        **_listed(c, "layer_types", fields["num_layers"], "mamba2"),
        **experts,
        "state_space": _heads(c, _BAMBA_KEYS, "mamba_conv_bias"),
        "position": "rope" if rope else "none",
    }


def _zamba2(c: Keys) -> Fields:
    """Mamba-2 alone, but that a hybrid layer has before it one of the shared blocks, in turn."""
    c.only("add_bias_linear", False)
    c.only("use_shared_mlp_adapter", True)
    both = 2 * c.size("hidden_size", "hidden_size")  # the stream and the embedded tokens
    heads = c.size("num_attention_heads", "num_attention_heads")
    if both % heads:
        c.reject("num_attention_heads", f"a divisor of twice the hidden size, {divisors(both)}")
    sizes: Json = {"head_dim": both // heads, "mamba_headdim": "auto"}
    if c.values.get("intermediate_size") is None:
        sizes["intermediate_size"] = 2 * both
    if c.flag("use_long_context"):
        sizes["max_position_embeddings"] = 16384
    c = replace(c, values=c.values | sizes)
    fields = decoder(c)
    rank = c.whole("adapter_rank", 1, LIMITS["hidden_size"])
    adapts = c.flag("use_shared_attention_adapter")
    shared = SharedBlocks(
        layers=_in_turn(c, fields["num_layers"]), adapter_rank=rank, attention_adapter=adapts
    )
    return fields | {
        "shared_blocks": shared,
        "state_space": _heads(c, _ZAMBA2_KEYS, "use_conv_bias"),
        "position": "rope" if c.flag("use_mem_rope") else "none",
    }


def _in_turn(c: Keys, layers: int) -> tuple[int, ...]:
    """The shared block of each layer, 0 where it has none."""
    value = c.values.get("layers_block_type")
    listed = cast("list[object]", value) if isinstance(value, list) else []
    hybrid = [x == "hybrid" for x in listed if isinstance(x, str) and x in _STATE | {"hybrid"}]
    if not len(hybrid) == len(listed) == layers or not any(hybrid):
        c.reject("layers_block_type", f'"mamba" or "hybrid" for each of the {layers} layers')
    blocks = c.whole("num_mem_blocks", 1, layers)
    return tuple(
        n % blocks + 1 if here else 0
        for n, here in zip(accumulate(hybrid, initial=0), hybrid, strict=False)
    )


def _falcon_h1(c: Keys) -> Fields:
    """Attention and Mamba-2 side by side in every layer."""
    for key in ("mamba_proj_bias", "projectors_bias", "attention_bias", "mlp_bias"):
        c.only(key, False)
    fields = decoder(c)
    heads = c.whole("mamba_n_heads", 1, _MOST)
    inner = c.values.get("mamba_d_ssm")
    if inner is None:
        inner = c.whole("mamba_expand", 1, 64) * fields["hidden_size"]
    elif type(inner) is not int or inner % heads or inner < heads:
        c.reject("mamba_d_ssm", f"null or a multiple of the {heads} heads")
    if c.values.get("mamba_d_head") == "auto":
        c = replace(c, values=c.values | {"mamba_d_head": inner // heads})
    state = _heads(c, _BAMBA_KEYS, "mamba_conv_bias")
    if inner != state.inner:
        c.reject("mamba_d_head", f"{inner} / {heads}, a part of the width inside")
    normed = c.flag("mamba_rms_norm")
    if normed:
        c.only("mamba_norm_before_gate", False)
    return fields | {"state_space": replace(state, gated_norm=normed)}


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
    if "hybrid_override_pattern" in c.values:
        letters = c.text("hybrid_override_pattern")
        wrong = next((x for x in letters if x not in LETTERS), None)
        if wrong is not None or not letters:
            c.reject("hybrid_override_pattern", f"letters of {' '.join(LETTERS)}")
        return letters
    value = c.values.get("layers_block_type")
    listed = cast("list[object]", value) if isinstance(value, list) else []
    letters = [_NEMOTRON_TYPES.get(x, "") if isinstance(x, str) else "" for x in listed]
    if not letters or "" in letters:
        c.reject("layers_block_type", f"a list of {', '.join(_NEMOTRON_TYPES)}")
    return "".join(letters)


def _nemotron_h(c: Keys) -> Fields:
    """A layer is a mixer or an MLP, not both; no positions."""
    for key in ("use_bias", "mamba_proj_bias", "attention_bias", "mlp_bias"):
        c.only(key, False)
    if c.values.get("moe_latent_size") is not None:
        c.reject("moe_latent_size", "null; experts in a narrower space are not supported")
    letters = _nemotron_letters(c)
    key = c.used("head_dim", "attention_head_dim")
    given = {"num_hidden_layers": len(letters), "head_dim": c.values.get(key)}
    if c.values.get("num_hidden_layers", len(letters)) != len(letters):
        c.reject("num_hidden_layers", f"{len(letters)}, the length of the pattern")
    c = Keys(c.file, c.values | given, c.prefix)
    fields = decoder(c, "mlp_hidden_act")
    if "-" not in letters:
        fields["ffn_hidden_size"] = 0
    experts: Fields = {"num_experts": 0} | _DENSE
    if "E" in letters:
        experts = expert_sizes(c, "n_routed_experts", "moe_intermediate_size")
        many = c.whole("n_shared_experts", 0, MOST_EXPERTS)
        width = c.size("ffn_hidden_size", "moe_shared_expert_intermediate_size")
        experts |= {
            "shared_ffn_hidden_size": many * width,
            "router": "sigmoid",
            "norm_topk_prob": c.flag("norm_topk_prob"),
            "expert_bias": True,
        }
    state = _heads(c, _NEMOTRON_KEYS, "use_conv_bias")
    return fields | experts | from_letters(letters) | {"state_space": state}


def _minimax(c: Keys) -> Fields:
    """MiniMax-01, and as transformers calls it: lightning attention of as many heads."""
    fields = decoder(c)
    layers, heads, width = (fields[x] for x in ("num_layers", "num_attention_heads", "kv_channels"))
    if "attn_type_list" in c.values:
        value = c.values["attn_type_list"]
        kinds = cast("list[object]", value) if isinstance(value, list) else []
        if len(kinds) != layers or not all(type(x) is int and x in (0, 1) for x in kinds):
            c.reject("attn_type_list", f"0 (lightning) or 1 for each of the {layers} layers")
        mixers: Fields = {"mixers": shortest(["global" if x else "lightning" for x in kinds])}
    else:
        mixers = _listed(c, "layer_types", layers, "lightning")
    turned = rotary_fraction(c)
    if "rotary_dim" in c.values:
        turned = c.whole("rotary_dim", 1, width) / width
    state = StateSpace(
        heads=heads,
        head_width=width,
        groups=heads,
        state=width,
        conv=0,
        chunk=c.whole("block_size", 1, _MOST),
    )
    return (
        fields
        | mixers
        | {"state_space": state, "rotary_fraction": turned}
        | expert_sizes(c, "num_local_experts", "intermediate_size")
    )


def _qwen3_next(c: Keys) -> Fields:
    """Gated delta nets, and gated attention in every fourth layer or where listed."""
    c.only("attention_bias", False)
    c.only("decoder_sparse_step", 1)
    if c.values.get("mlp_only_layers"):
        c.reject("mlp_only_layers", "none; dense layers are not supported")
    fields = decoder(c)
    layers = fields["num_layers"]
    period = c.size("num_layers", "full_attention_interval")
    mixers: Fields = {"mixers": every(period, period - 1, "gated_delta")}
    if c.values.get("layer_types") is not None:
        mixers = _listed(c, "layer_types", layers, "gated_delta")
    groups = c.whole("linear_num_key_heads", 1, _MOST)
    heads = c.whole("linear_num_value_heads", 1, _MOST)
    if heads % groups:
        c.reject("linear_num_key_heads", f"a divisor of the {heads} value heads")
    return fields | {
        **mixers,
        **expert_sizes(c, "num_experts", "moe_intermediate_size"),
        "shared_ffn_hidden_size": c.size("ffn_hidden_size", "shared_expert_intermediate_size"),
        "norm_topk_prob": c.flag("norm_topk_prob"),
        "rotary_fraction": rotary_fraction(c),
        "state_space": StateSpace(
            heads=heads,
            head_width=c.whole("linear_value_head_dim", 1, LIMITS["kv_channels"]),
            groups=groups,
            state=c.whole("linear_key_head_dim", 1, LIMITS["kv_channels"]),
            conv=c.whole("linear_conv_kernel_dim", 1, 64),
            conv_bias=False,
            chunk=64,
        ),
    }


def _kimi_linear(c: Keys) -> Fields:
    """Kimi's delta attention, and latent attention without positions; layers count from 1."""
    c.only("mla_use_nope", True)
    longest = c.used("max_position_embeddings", "model_max_length")
    c = replace(c, values=c.values | {"max_position_embeddings": c.values.get(longest)})
    fields = latent_attention(c)
    layers = fields["num_layers"]
    experts = expert_sizes(c, "num_experts", "moe_intermediate_size", "num_experts_per_token")
    shared = c.whole("num_shared_experts", 0, MOST_EXPERTS) * experts["moe_ffn_hidden_size"]
    linear = c.inside("linear_attn_config", {"short_conv_kernel_size": 4})
    found: dict[str, set[object]] = {}
    for key in ("full_attn_layers", "kda_layers"):
        value = linear.values.get(key)
        listed = cast("list[object]", value) if isinstance(value, list) else []
        found[key] = {x for x in listed if type(x) is int}
    full, kda = found.values()
    if full & kda or full | kda != {*range(1, layers + 1)}:
        linear.reject("kda_layers", f"with full_attn_layers each of the layers 1 to {layers} once")
    heads = linear.whole("num_heads", 1, _MOST)
    width = linear.whole("head_dim", 1, LIMITS["kv_channels"])
    return fields | {
        **experts,
        "shared_ffn_hidden_size": shared,
        "first_dense_layers": c.whole("first_k_dense_replace", 0, LIMITS["num_layers"]),
        "moe_layer_freq": c.size("num_layers", "moe_layer_freq"),
        "router": c.router("moe_router_activation_func"),
        "norm_topk_prob": c.flag("moe_renormalize"),
        "expert_bias": True,
        "mixers": shortest(["global" if i + 1 in full else "kimi_delta" for i in range(layers)]),
        "position": "none",
        "state_space": StateSpace(
            heads=heads,
            head_width=width,
            groups=heads,
            state=width,
            conv=linear.whole("short_conv_kernel_size", 1, 64),
            conv_bias=False,
            gate_rank=width,
            chunk=64,
        ),
    }


# Defaults of transformers' configuration classes (5.23). A state-space model has no longest
# sequence; 2^20 stands for that.
_MAMBA: Json = {
    "hidden_act": "silu",
    "use_bias": False,
    "use_conv_bias": True,
    "expand": 2,
    "conv_kernel": 4,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2**20,
}
_MAMBA1: Json = _MAMBA | {"state_size": 16, "time_step_rank": "auto", "intermediate_size": None}
_MAMBA2: Json = _MAMBA | {"state_size": 128, "chunk_size": 256, "tie_word_embeddings": False}
_DECODER: Json = {
    "tie_word_embeddings": False,
    "head_dim": None,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "attention_bias": False,
}
_JAMBA: Json = _DECODER | {
    "num_key_value_heads": None,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
    "mamba_expand": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_dt_rank": "auto",
    "max_position_embeddings": 262144,
}
_BAMBA: Json = _DECODER | {
    "mamba_proj_bias": False,
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
_ZAMBA2: Json = {
    "tie_word_embeddings": True,
    "hidden_act": "gelu",
    "attention_dropout": 0.0,
    "num_key_value_heads": None,
    "intermediate_size": None,
    "max_position_embeddings": 4096,
    "mamba_d_state": 64,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_ngroups": 1,
    "chunk_size": 256,
    "use_conv_bias": True,
    "add_bias_linear": False,
    "num_mem_blocks": 1,
    "adapter_rank": 128,
    "use_shared_mlp_adapter": True,
    "use_shared_attention_adapter": False,
    "use_mem_rope": False,
    "use_long_context": False,
}
_FALCON_H1: Json = _DECODER | {
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
    "mamba_proj_bias": False,
    "mamba_norm_before_gate": True,
    "mamba_rms_norm": False,
    "projectors_bias": False,
    "mlp_bias": False,
}
_NEMOTRON_H: Json = _DECODER | {
    "use_bias": False,
    "mamba_proj_bias": False,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "use_conv_bias": True,
    "conv_kernel": 4,
    "chunk_size": 128,
    "intermediate_size": 21504,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
}
_MINIMAX: Json = _DECODER | {"block_size": 256, "partial_rotary_factor": 1.0}
_KIMI_LINEAR: Json = _DECODER | {
    "num_key_value_heads": None,
    "moe_layer_freq": 1,
    "mla_use_nope": True,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
}
_QWEN3_NEXT: Json = _DECODER | {
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "norm_topk_prob": True,
    "partial_rotary_factor": 0.25,
    "intermediate_size": 5632,
    "max_position_embeddings": 32768,
}

STATE_ARCHITECTURES: dict[str, Architecture] = {
    "MambaForCausalLM": Architecture(("mamba",), "mamba-2.8b", _mamba, _MAMBA1),
    "FalconMambaForCausalLM": Architecture(
        ("falcon_mamba",), "falcon-mamba-7b", _falcon_mamba, _MAMBA1
    ),
    "Mamba2ForCausalLM": Architecture(("mamba2",), "mamba-codestral-7b", _mamba2, _MAMBA2),
    "JambaForCausalLM": Architecture(("jamba",), "jamba-v0.1", _jamba, _JAMBA),
    "BambaForCausalLM": Architecture(("bamba",), "bamba-9b", _bamba, _BAMBA),
    "GraniteMoeHybridForCausalLM": Architecture(
        ("granitemoehybrid",), "granite-4.0-h-tiny", _granite_hybrid, _BAMBA
    ),
    "Zamba2ForCausalLM": Architecture(("zamba2",), "zamba2-2.7b", _zamba2, _ZAMBA2),
    "FalconH1ForCausalLM": Architecture(("falcon_h1",), "falcon-h1-7b", _falcon_h1, _FALCON_H1),
    "NemotronHForCausalLM": Architecture(
        ("nemotron_h",), "nemotron-h-8b", _nemotron_h, _NEMOTRON_H
    ),
    "MiniMaxText01ForCausalLM": Architecture(
        ("minimax_text_01",), "minimax-text-01", _minimax, _MINIMAX
    ),
    "KimiLinearForCausalLM": Architecture(
        ("kimi_linear",), "kimi-linear-48b-a3b", _kimi_linear, _KIMI_LINEAR
    ),
    "Qwen3NextForCausalLM": Architecture(
        ("qwen3_next",), "qwen3-next-80b-a3b", _qwen3_next, _QWEN3_NEXT
    ),
    "MiniMaxForCausalLM": Architecture(("minimax",), "minimax-text-01", _minimax, _MINIMAX),
}
"""As `hf.ARCHITECTURES`, of which these are part."""
