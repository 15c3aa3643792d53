"""Readers of fields that are more than a key, and the maps that families share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

from stagewright.errors import divisors
from stagewright.model.architecture import LIMITS, MOST_EXPERTS
from stagewright.model.hf.keys import Fields, Fixed, Keys, Map, Reader
from stagewright.model.layers import Attention, Recurrence
from stagewright.model.patterns import every, shortest
from stagewright.model.state_space import StateSpace

LAYER_TYPES: dict[str, Attention] = {
    "full_attention": "global",
    "sliding_attention": "local",
    "chunked_attention": "chunked",
}
"""transformers' names of the layer kinds, and ours."""

CHOICES = ("greedy", "group_limited_greedy", "noaux_tc")
"""DeepSeek's ways to choose a token's experts."""

ATTENTION_TYPES = frozenset({"full_attention", "attention"})
STATE_TYPES = frozenset({"linear_attention", "mamba"})
MOST = 2**24
"""The largest count of state heads, groups and chunks that is believed."""


# ---- readers of one field ------------------------------------------------------------------------


def whole(key: str, least: int, most: int) -> Reader:
    """A whole number within limits other than the field's."""
    return lambda c: c.whole(key, least, most)


def number(key: str, least: float, most: float) -> Reader:
    """A number within limits other than the field's."""
    return lambda c: c.number(key, least, most)


def or_times_hidden(key: str, times: int) -> Reader:
    """The width of the MLP, or a multiple of the hidden size where the key is null or missing."""
    return lambda c: c.optional("ffn_hidden_size", key) or times * c.fields["hidden_size"]


def head_width(heads: tuple[str, ...], *keys: str) -> Reader:
    """The width of a head, or the hidden size over the heads where the key is null or missing."""

    def read(c: Keys) -> int:
        width = c.optional("kv_channels", *keys)
        hidden, count = c.fields["hidden_size"], c.fields["num_attention_heads"]
        if width is None and hidden % count:
            c.reject(c.used(*heads), f"a divisor of the hidden size {hidden}: {divisors(hidden)}")
        return width or hidden // count

    return read


def query_groups(*keys: str) -> Reader:
    """Key/value heads; as many as there are heads where the key is null."""

    def read(c: Keys) -> int:
        key, heads = c.used(*keys), c.fields["num_attention_heads"]
        null = c.has(key) and c.get(key) is None
        groups = heads if null else c.size("num_query_groups", key)
        if heads % groups:
            c.reject(key, f"a divisor of the {heads} attention heads: {divisors(heads)}")
        return groups

    return read


def rotary_fraction(c: Keys) -> float:
    """The part of each head that rope turns; transformers 5 writes it in `rope_parameters`."""
    return c.number(c.used("rope_parameters.partial_rotary_factor", "partial_rotary_factor"), 0, 1)


# ---- maps that families share --------------------------------------------------------------------


def sizes(**names: str | tuple[str, ...]) -> Map:
    """The sizes in all files, under the usual keys or these; as many key/value heads as heads."""
    usual: dict[str, str | tuple[str, ...]] = {
        "num_layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "num_attention_heads": "num_attention_heads",
        "vocab_size": "vocab_size",
        "max_position_embeddings": "max_position_embeddings",
    }
    keys = usual | names
    heads = keys["num_attention_heads"]
    return {
        **keys,
        "kv_channels": head_width((heads,) if isinstance(heads, str) else heads, "head_dim"),
        "num_query_groups": lambda c: c.fields["num_attention_heads"],
        "tied_embeddings": "tie_word_embeddings",
    }


DECODER: Map = {
    **sizes(ffn_hidden_size="intermediate_size"),
    "num_query_groups": query_groups("num_key_value_heads"),
    "activation": "hidden_act",
    "attention_dropout": "attention_dropout",
}
"""The keys that Llama introduced and most decoders took over."""

BIASED: Map = {**DECODER, **dict.fromkeys(("qkv_bias", "attention_output_bias"), "attention_bias")}
"""Biases of all four projections of attention, or of none."""

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of experts, of which transformers 5 may write another than older files."""

NO_EXPERTS: Map = {
    "num_experts": Fixed(0),
    "top_k": Fixed(0),
    "moe_ffn_hidden_size": Fixed(0),
    "shared_ffn_hidden_size": Fixed(0),
    "first_dense_layers": Fixed(0),
    "moe_layer_freq": Fixed(1),
    "router": Fixed("softmax"),
    "norm_topk_prob": Fixed(True),
    "num_expert_groups": Fixed(1),
    "topk_groups": Fixed(1),
    "expert_bias": Fixed(False),
}


def experts(count: str, width: str, *top_k: str) -> Map:
    """Experts under the keys of a family; without shared experts, and in every layer."""
    return {
        **NO_EXPERTS,
        "num_experts": (count, *(key for key in EXPERT_COUNTS if key != count)),
        "top_k": (*top_k, "num_experts_per_tok"),
        "moe_ffn_hidden_size": width,
    }


def _deepseek_choice(c: Keys) -> Fields:
    """Shared experts, dense layers first, and how a token's experts are chosen."""
    shared = 0
    if c.get("n_shared_experts") is not None or "n_shared_experts" not in c.values:
        shared = c.whole("n_shared_experts", 0, MOST_EXPERTS)
    step = c.fields["moe_layer_freq"]
    first = c.whole("first_k_dense_replace", 0, LIMITS["num_layers"])
    method = c.text("topk_method")
    if method not in CHOICES:
        c.reject("topk_method", f"one of {', '.join(CHOICES)}")
    fields: Fields = {
        "shared_ffn_hidden_size": shared * c.fields["moe_ffn_hidden_size"],
        # layer i has experts if it is none of the first and `step` divides i
        "first_dense_layers": -(-first // step) * step,
        "expert_bias": method == "noaux_tc",
    }
    groups = 1 if c.get("n_group") is None else c.whole("n_group", 1, MOST_EXPERTS)
    if method == "greedy" or groups == 1:
        return fields
    count = c.fields["num_experts"]
    if count % groups:
        c.reject("n_group", f"a divisor of the {count} experts: {divisors(count)}")
    return fields | {
        "num_expert_groups": groups,
        "topk_groups": c.whole("topk_group", 1, groups),
    }


SHARED_EXPERTS = {"shared_ffn_hidden_size": "shared_expert_intermediate_size"}
"""Qwen's key of shared experts."""

DEEPSEEK_EXPERTS: Map = {
    **experts("n_routed_experts", "moe_intermediate_size"),
    "moe_layer_freq": "moe_layer_freq",
    "router": "scoring_func",
    "norm_topk_prob": "norm_topk_prob",
    "expert_bias": _deepseek_choice,  # the last of these fields, as it needs the others
}
"""DeepSeek's keys, which GLM took over."""


def _latent_groups(c: Keys) -> int:
    heads = c.fields["num_attention_heads"]
    if query_groups("num_key_value_heads")(c) != heads:
        c.reject("num_key_value_heads", f"the {heads} attention heads")
    return heads


def _query_rank(c: Keys) -> int:
    if "q_lora_rank" not in c.values:
        c.reject("q_lora_rank", "a whole number, or null for queries without a latent")
    return c.optional("hidden_size", "q_lora_rank") or 0


LATENT: Map = {
    "qk_rope_head_dim": whole("qk_rope_head_dim", 2, LIMITS["kv_channels"] // 2),
    **DECODER,
    # The width of a head is that of its queries: without and with position.
    "kv_channels": lambda c: (
        c.fields["qk_rope_head_dim"] + c.whole("qk_nope_head_dim", 1, LIMITS["kv_channels"] // 2)
    ),
    "num_query_groups": _latent_groups,
    "kv_lora_rank": "kv_lora_rank",
    "q_lora_rank": _query_rank,
    "v_head_dim": "v_head_dim",
    **dict.fromkeys(("latent_bias", "attention_output_bias"), "attention_bias"),
}
"""DeepSeek's latent attention; also Kimi's. What makes queries, keys and values of the latents, and
queries without a latent, never have biases."""


# ---- kinds of layers -----------------------------------------------------------------------------


def windows(is_local: Callable[[Keys, int], bool], used: str = "", listed: bool = True) -> Reader:
    """The sliding window, and the pattern of layers with it: these layers, or as the file lists.

    `used` is a key that says whether there is a window at all.
    """

    def read(c: Keys) -> Fields:
        kinds: list[Attention] = []
        if not used or c.flag(used):
            layers = range(c.fields["num_layers"])
            kinds = ["local" if is_local(c, i) else "global" for i in layers]
            kinds = layer_types(c, kinds) if listed else kinds
        c.seen.add("sliding_window")
        positions = None
        if "local" in kinds:
            positions = c.optional("max_position_embeddings", "sliding_window")
        if positions is None:
            return {"sliding_window": None, "mixers": ("global",)}
        return {"sliding_window": positions, "mixers": shortest(kinds)}

    return read


def layer_types(
    c: Keys,
    unlisted: list[Attention],
    known: tuple[str, ...] = ("full_attention", "sliding_attention"),
) -> list[Attention]:
    """The kind of every layer, as the file lists them or else these."""
    if c.get("layer_types") is None:
        return unlisted
    listed, layers = c.items("layer_types"), c.fields["num_layers"]
    kinds: list[Attention] = [LAYER_TYPES[x] for x in listed if isinstance(x, str) and x in known]
    if not len(kinds) == len(listed) == layers:
        c.reject("layer_types", f"{' or '.join(known)} for each of the {layers} layers")
    return kinds


def listed_mixers(state: Recurrence) -> Reader:
    """Mixers as `layer_types` names them: attention, or the model's recurrence."""

    def read(c: Keys) -> tuple[str, ...]:
        listed, layers = c.items("layer_types"), c.fields["num_layers"]
        kinds = [
            "global" if x in ATTENTION_TYPES else state
            for x in listed
            if isinstance(x, str) and x in ATTENTION_TYPES | STATE_TYPES
        ]
        if not len(kinds) == len(listed) == layers:
            words = f"attention or {state} for each of the {layers} layers, in transformers' words"
            c.reject("layer_types", words)
        return shortest(kinds)

    return read


def periodic_mixers(state: Recurrence) -> Reader:
    """Attention once in a period of layers, at an offset (Jamba)."""

    def read(c: Keys) -> tuple[str, ...]:
        period = c.size("num_layers", "attn_layer_period")
        return every(period, c.whole("attn_layer_offset", 0, period - 1), state)

    return read


def indexed(c: Keys, key: str, layers: int) -> list[object]:
    """A list of layers by their index; empty where the key is null or missing."""
    value = c.get(key)
    listed = c.items(key) if isinstance(value, list) else [value][value is None :]
    if not all(type(i) is int and 0 <= i < layers for i in listed):
        c.reject(key, f"a list of layers below {layers}")
    return listed


def bits(c: Keys, key: str, value: object, meaning: str) -> list[int]:
    """0 or 1 for each layer."""
    layers = c.fields["num_layers"]
    listed = cast("list[object]", value) if isinstance(value, list) else []
    if len(listed) != layers or not all(type(x) is int and x in (0, 1) for x in listed):
        c.reject(key, f"0 ({meaning}) or 1 for each of the {layers} layers")
    return cast("list[int]", listed)


# ---- states --------------------------------------------------------------------------------------


def state_channels(prefix: str, rank: str, conv: str, state: str, **more: Any) -> Reader:
    """Mamba-1's sizes, whose keys Jamba gives a prefix."""

    def read(c: Keys) -> StateSpace:
        hidden = c.size("hidden_size", "hidden_size")
        auto = c.get(rank) == "auto"
        inner = c.optional("ffn_hidden_size", "intermediate_size") if not prefix else None
        return StateSpace(
            heads=inner or c.whole(f"{prefix}expand", 1, 64) * hidden,
            state=c.whole(state, 1, LIMITS["kv_channels"]),
            conv=c.whole(conv, 1, 64),
            conv_bias=c.flag("mamba_conv_bias" if prefix else "use_conv_bias"),
            dt_rank=-(-hidden // 16) if auto else c.whole(rank, 1, LIMITS["hidden_size"]),
            **more,
        )

    return read


class StateKeys(NamedTuple):
    """The keys of Mamba-2's sizes; the defaults are Mamba-2's own."""

    heads: str = "num_heads"
    head_width: str = "head_dim"
    """Empty: the width is the inner one over the heads."""
    groups: str = "n_groups"
    state: str = "state_size"
    conv: str = "conv_kernel"
    conv_bias: str = "use_conv_bias"
    chunk: str = "chunk_size"
    expand: str = "expand"


def state_heads(keys: StateKeys) -> Reader:
    """Mamba-2's sizes under the keys of a family; the inner width is heads x width of a head."""

    def read(c: Keys) -> StateSpace:
        heads = c.whole(keys.heads, 1, MOST)
        if not keys.head_width or c.get(keys.head_width) == "auto":
            width = c.whole(keys.expand, 1, 64) * c.fields["hidden_size"]
            if width % heads:
                c.reject(keys.heads, f"a divisor of the width inside, {width}")
            head = width // heads
        else:
            head = c.whole(keys.head_width, 1, LIMITS["kv_channels"])
        groups = c.whole(keys.groups, 1, MOST)
        if heads % groups:
            c.reject(keys.groups, f"a divisor of the {heads} heads")
        return StateSpace(
            heads=heads,
            head_width=head,
            groups=groups,
            state=c.whole(keys.state, 1, LIMITS["kv_channels"]),
            conv=c.whole(keys.conv, 1, 64),
            conv_bias=c.flag(keys.conv_bias),
            chunk=c.whole(keys.chunk, 1, MOST),
        )

    return read
