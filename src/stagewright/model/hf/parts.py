"""Maps that several families share, and readers of fields that are more than a key."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from stagewright.errors import divisors
from stagewright.model.architecture import LIMITS, MAX_EXPERTS, Architecture
from stagewright.model.fields import rules
from stagewright.model.hf.keys import Fields, Fixed, Keys, Map, Reader
from stagewright.model.layers import Attention, OwnSizes, Recurrence, StateSpace, every, shortest

LAYER_TYPES: dict[str, Attention] = {
    "full_attention": "global",
    "sliding_attention": "local",
    "chunked_attention": "chunked",
}
"""transformers' names of the layer kinds, and ours."""

CHOICES = ("greedy", "group_limited_greedy", "noaux_tc")
"""DeepSeek's ways to choose a token's experts."""

MAX_STATE_COUNT = 2**24
"""The largest count of state heads, groups and chunks that is believed."""


# ---- readers of one field ------------------------------------------------------------------------


def integer(key: str, least: int, most: int) -> Reader:
    """A whole number within limits other than the field's."""
    return lambda c: c.integer(key, least, most)


def number(key: str, least: float, most: float) -> Reader:
    """A number within limits other than the field's."""
    return lambda c: c.number(key, least, most)


def or_four_times_hidden(key: str) -> Reader:
    """The width of the MLP, or four hidden sizes where the key is null or missing."""
    return lambda c: c.optional("ffn_hidden_size", key) or 4 * c.fields["hidden_size"]


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


def all_heads(c: Keys) -> int:
    """The number of heads, for key/value heads, whatever the file says."""
    return c.fields["num_attention_heads"]


def rotary_fraction(c: Keys) -> float:
    """The part of each head that rope turns; transformers 5 writes it in `rope_parameters`."""
    return c.number(c.used("rope_parameters.partial_rotary_factor", "partial_rotary_factor"), 0, 1)


def parallel(key: str, norms: int) -> Reader:
    """A parallel block where a key says so; `norms` is their number."""

    def read(c: Keys) -> Fields:
        is_parallel = c.flag(key)
        return {"parallel_block": is_parallel, "parallel_norms": norms if is_parallel else 1}

    return read


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
        "num_query_groups": all_heads,
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

LLAMA: Map = {**BIASED, "mlp_bias": "mlp_bias"}

LAYER_NORM: Map = {"norm": Fixed("layernorm"), "norm_bias": True}
"""LayerNorms with a bias, instead of Llama's RMSNorms."""

UNGATED: Map = {"gated": False}

ALL_BIASES = ("qkv_bias", "attention_output_bias", "mlp_bias")

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of experts, of which transformers 5 may write another than older files."""

_OF_EXPERTS = (
    *("num_experts", "top_k", "moe_ffn_hidden_size", "shared_ffn_hidden_size"),
    *("first_dense_layers", "moe_layer_freq", "router", "norm_topk_prob", "num_expert_groups"),
    *("topk_groups", "expert_bias"),
)
NO_EXPERTS: Map = {name: Fixed(rules(Architecture)[name].default) for name in _OF_EXPERTS}


def experts(count: str, width: str, *top_k: str) -> Map:
    """Experts under the keys of a family; without shared experts, and in every layer."""
    return {
        **NO_EXPERTS,
        "num_experts": (count, *(key for key in EXPERT_COUNTS if key != count)),
        "top_k": (*top_k, "num_experts_per_tok"),
        "moe_ffn_hidden_size": width,
    }


SIGMOID: Map = {"router": Fixed("sigmoid"), "expert_bias": True}
"""DeepSeek-V3's way to choose experts: sigmoids, and a bias that balances the experts' load."""


def number_of_shared(*keys: str) -> Reader:
    """The width of shared experts together, which are as wide as the others; none where null."""

    def read(c: Keys) -> int:
        key = c.used(*keys)
        number = 0 if c.get(key) is None else c.integer(key, 0, MAX_EXPERTS)
        return number * c.fields["moe_ffn_hidden_size"]

    return read


def listed_mlps(c: Keys) -> Fields:
    """Dense and other MLPs, as transformers lists them, or as flags of a published file.

    Usually the first layers are dense and no others.
    """
    if c.get("mlp_layer_types") is not None:
        kinds = listed(c, "mlp_layer_types", {"dense": "dense", "sparse": "experts"})
    else:
        kinds = listed(c, "moe_layer_freq", {0: "dense", 1: "experts"}, "0 or 1")
    first = kinds.index("experts") if "experts" in kinds else len(kinds)
    if "dense" in kinds[first:] or first == len(kinds):
        return {"mlps": shortest(kinds)}
    return {"first_dense_layers": first, "mlps": ()}


def dense_first(key: str) -> Reader:
    """The dense layers: as many first ones as a key says, or as `mlp_layer_types` lists them."""

    def read(c: Keys) -> Fields:
        if c.get("mlp_layer_types") is not None:
            return listed_mlps(c)
        first = 0 if c.get(key) is None else c.integer(key, 0, LIMITS["num_layers"])
        return {"first_dense_layers": first}

    return read


def sigmoid_experts(count: str, shared: str, first: str = "first_k_dense_replace") -> Map:
    """Experts as in DeepSeek-V3: routed by sigmoids, with shared ones, after some dense layers."""
    return {
        **experts(count, "moe_intermediate_size"),
        **SIGMOID,
        "shared_ffn_hidden_size": number_of_shared(shared),
        "first_dense_layers": dense_first(first),
    }


def expert_groups(c: Keys) -> Fields:
    """Group-limited routing, where there is more than one group."""
    groups = c.get("n_group")
    if groups is None or groups == 1:
        return {"num_expert_groups": 1, "topk_groups": 1}
    count = c.integer("n_group", 1, c.fields["num_experts"])
    return {"num_expert_groups": count, "topk_groups": c.integer("topk_group", 1, count)}


def _deepseek_choice(c: Keys) -> Fields:
    """Shared experts, dense layers first, and how a token's experts are chosen."""
    shared = 0
    if c.get("n_shared_experts") is not None or "n_shared_experts" not in c.values:
        shared = c.integer("n_shared_experts", 0, MAX_EXPERTS)
    step = c.fields["moe_layer_freq"]
    first = c.integer("first_k_dense_replace", 0, LIMITS["num_layers"])
    method = c.text("topk_method")
    if method not in CHOICES:
        c.reject("topk_method", f"one of {', '.join(CHOICES)}")
    fields: Fields = {
        "shared_ffn_hidden_size": shared * c.fields["moe_ffn_hidden_size"],
        # layer i has experts if it is none of the first and `step` divides i
        "first_dense_layers": -(-first // step) * step,
        "expert_bias": method == "noaux_tc",
    }
    groups = 1 if c.get("n_group") is None else c.integer("n_group", 1, MAX_EXPERTS)
    if method == "greedy" or groups == 1:
        return fields
    count = c.fields["num_experts"]
    if count % groups:
        c.reject("n_group", f"a divisor of the {count} experts: {divisors(count)}")
    return fields | {
        "num_expert_groups": groups,
        "topk_groups": c.integer("topk_group", 1, groups),
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
    "qk_rope_head_dim": integer("qk_rope_head_dim", 2, LIMITS["kv_channels"] // 2),
    **DECODER,
    # The width of a head is that of its queries: without and with position.
    "kv_channels": lambda c: (
        c.fields["qk_rope_head_dim"] + c.integer("qk_nope_head_dim", 1, LIMITS["kv_channels"] // 2)
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


def listed(
    c: Keys, key: str, words: Mapping[Any, Any], wanted: str = "", end: str = ""
) -> list[Any]:
    """The kind of every layer, of which a list has the words."""
    values, layers = c.items(key), c.fields["num_layers"]
    kinds = [words[x] for x in values if isinstance(x, str | int) and x in words]
    if not len(kinds) == len(values) == layers:
        wanted = wanted or " or ".join(map(str, words))
        c.reject(key, f"{wanted} for each of the {layers} layers{end}")
    return kinds


def windows(
    is_local: Callable[[Keys, int], bool], used: str = "", from_list: bool = True
) -> Reader:
    """The sliding window, and the pattern of layers with it: these layers, or as the file lists.

    `used` is a key that says whether there is a window at all.
    """

    def read(c: Keys) -> Fields:
        kinds: list[Attention] = []
        if not used or c.flag(used):
            layers = range(c.fields["num_layers"])
            kinds = ["local" if is_local(c, i) else "global" for i in layers]
            kinds = layer_types(c, kinds) if from_list else kinds
        c.seen.add("sliding_window")
        positions = None
        if "local" in kinds:
            positions = c.optional("max_position_embeddings", "sliding_window")
        if positions is None:
            return {"sliding_window": None, "mixers": ("global",)}
        return {"sliding_window": positions, "mixers": shortest(kinds)}

    return read


SAME_WINDOW = windows(lambda c, i: True, from_list=False)
"""A window in every layer, if there is one."""


def layer_types(
    c: Keys,
    unlisted: list[Attention],
    known: tuple[str, ...] = ("full_attention", "sliding_attention"),
) -> list[Attention]:
    """The kind of every layer, as the file lists them or else these."""
    if c.get("layer_types") is None:
        return unlisted
    return listed(c, "layer_types", {name: LAYER_TYPES[name] for name in known})


def local_and_nope(period: str = "sliding_window_pattern") -> Reader:
    """Windows where there is rope, and layers without positions that see all (Cohere 2, Exaone 4).

    Where there is no window, every layer sees all and has rope. Layers are as `layer_types` lists
    them, as a pattern of L and G has them, or all but every `period`-th has a window.
    """

    def read(c: Keys) -> Fields:
        window = c.optional("max_position_embeddings", "sliding_window")
        if window is None:
            c.seen.add("layer_types")
            return {"sliding_window": None, "mixers": ("global",)}
        layers = range(c.fields["num_layers"])
        kinds: list[str]
        if c.get("layer_types") is not None:
            kinds = listed(c, "layer_types", LAYER_TYPES)
        elif isinstance(pattern := c.get(period), str) and pattern and {*pattern} <= {"L", "G"}:
            kinds = ["local" if pattern[i % len(pattern)] == "L" else "global" for i in layers]
        else:
            step = c.size("num_layers", period)
            kinds = ["global" if (i + 1) % step == 0 else "local" for i in layers]
        mixers = ["local" if kind == "local" else "nope" for kind in kinds]
        inner = window if "local" in mixers else None
        return {"sliding_window": inner, "mixers": shortest(mixers)}

    return read


def turned_layers(c: Keys) -> list[int]:
    """1 for each layer with rope: those that a list says, or all but one in a period."""
    layers, period = c.fields["num_layers"], c.size("num_layers", "no_rope_layer_interval")
    flags = c.get("no_rope_layers") or [int((i + 1) % period != 0) for i in range(layers)]
    return bits(c, "no_rope_layers", flags, "without rope")


def own_sizes(of_layers: Sequence[OwnSizes]) -> Fields:
    """The fields of a model in which each layer has these sizes, where they differ from none."""
    kinds = [sizes for sizes in dict.fromkeys(of_layers) if sizes != OwnSizes()]
    numbers = [kinds.index(sizes) + 1 if sizes in kinds else 0 for sizes in of_layers]
    return {"own_sizes": tuple(kinds), "layers_with_own_sizes": shortest(numbers)}


def mixers_of_layers(c: Keys) -> list[str]:
    """The mixer of every layer, of the pattern that has been read."""
    mixers = c.fields["mixers"]
    return [mixers[i % len(mixers)] for i in range(c.fields["num_layers"])]


def listed_mixers(state: Recurrence) -> Reader:
    """Mixers as `layer_types` names them: attention, or the model's recurrence."""
    words = dict.fromkeys(("full_attention", "attention"), "global")
    words |= dict.fromkeys(("linear_attention", "mamba"), state)

    def read(c: Keys) -> tuple[str, ...]:
        wanted = f"attention or {state}"
        return shortest(listed(c, "layer_types", words, wanted, ", in transformers' words"))

    return read


def periodic_mixers(state: Recurrence) -> Reader:
    """Attention once in a period of layers, at an offset (Jamba)."""

    def read(c: Keys) -> tuple[str, ...]:
        period = c.size("num_layers", "attn_layer_period")
        return every(period, c.integer("attn_layer_offset", 0, period - 1), state)

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
            heads=inner or c.integer(f"{prefix}expand", 1, 64) * hidden,
            state=c.integer(state, 1, LIMITS["kv_channels"]),
            conv=c.integer(conv, 1, 64),
            conv_bias=c.flag("mamba_conv_bias" if prefix else "use_conv_bias"),
            dt_rank=-(-hidden // 16) if auto else c.integer(rank, 1, LIMITS["hidden_size"]),
            **more,
        )

    return read


class StateKeys(NamedTuple):
    """The keys of Mamba-2's sizes; the defaults are those of `Mamba2ForCausalLM`."""

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
        heads = c.integer(keys.heads, 1, MAX_STATE_COUNT)
        if not keys.head_width or c.get(keys.head_width) == "auto":
            width = c.integer(keys.expand, 1, 64) * c.fields["hidden_size"]
            if width % heads:
                c.reject(keys.heads, f"a divisor of the width inside, {width}")
            head = width // heads
        else:
            head = c.integer(keys.head_width, 1, LIMITS["kv_channels"])
        groups = c.integer(keys.groups, 1, MAX_STATE_COUNT)
        if heads % groups:
            c.reject(keys.groups, f"a divisor of the {heads} heads")
        return StateSpace(
            heads=heads,
            head_width=head,
            groups=groups,
            state=c.integer(keys.state, 1, LIMITS["kv_channels"]),
            conv=c.integer(keys.conv, 1, 64),
            conv_bias=c.flag(keys.conv_bias),
            chunk=c.integer(keys.chunk, 1, MAX_STATE_COUNT),
        )

    return read


BAMBA_KEYS = StateKeys(
    heads="mamba_n_heads",
    head_width="mamba_d_head",
    groups="mamba_n_groups",
    state="mamba_d_state",
    conv="mamba_d_conv",
    conv_bias="mamba_conv_bias",
    chunk="mamba_chunk_size",
    expand="mamba_expand",
)
"""The keys of Bamba, which Granite and Falcon-H1 took over."""

PURE_STATES: Map = {
    "num_layers": "num_hidden_layers",
    **{name: name for name in ("hidden_size", "vocab_size", "max_position_embeddings")},
    "tied_embeddings": "tie_word_embeddings",
}
"""Models of states alone, without attention and MLPs."""

MAMBA_KEYS = ("time_step_rank", "conv_kernel", "state_size")
"""Keys of Mamba-1's sizes, as `state_channels` takes them."""


# ---- indexers ------------------------------------------------------------------------------------

INDEXER = ("index_topk", "index_n_heads", "index_head_dim")


def query_rank(c: Keys) -> int:
    """The rank of queries, which the indexer's are made of, too."""
    return c.size("hidden_size", "q_lora_rank")


INDEXED: Map = {
    **LATENT,
    "q_lora_rank": query_rank,
    **DEEPSEEK_EXPERTS,
    **{name: name for name in INDEXER},
    "mlps": lambda c: {} if c.get("mlp_layer_types") is None else listed_mlps(c),
}
"""DeepSeek-V3.2: DeepSeek-V3 with an indexer in every layer; GLM-5 took the keys over."""
