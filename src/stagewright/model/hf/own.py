"""The maps of decoders some of whose layers have sizes of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from stagewright.model.hf.keys import Fields, Fixed, Json, Keys, Map
from stagewright.model.hf.mixtures import STEP3
from stagewright.model.hf.parts import BIASED, NO_EXPERTS, experts, windows
from stagewright.model.layers import OwnSizes
from stagewright.model.patterns import shortest


def own_sizes(of_layers: Sequence[OwnSizes]) -> Fields:
    """The fields of a model in which each layer has these sizes, where they differ from none."""
    kinds = [sizes for sizes in dict.fromkeys(of_layers) if sizes != OwnSizes()]
    numbers = [kinds.index(sizes) + 1 if sizes in kinds else 0 for sizes in of_layers]
    return {"own_sizes": tuple(kinds), "layers_with_own_sizes": shortest(numbers)}


def _mixers(c: Keys) -> list[str]:
    mixers = c.fields["mixers"]
    return [mixers[i % len(mixers)] for i in range(c.fields["num_layers"])]


# ---- Gemma 4 -------------------------------------------------------------------------------------


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
    return own_sizes([sees_all if kind == "global" else OwnSizes() for kind in _mixers(c)])


def _gemma4_mlps(c: Keys) -> Fields:
    """Experts beside the MLP of every layer, each with norms of its own, or no experts."""
    if c.get("use_double_wide_mlp"):
        c.reject("use_double_wide_mlp", "false; MLPs of twice the width are not supported")
    if not c.flag("enable_moe_block"):
        return c.read_all(NO_EXPERTS)
    width = ("moe_intermediate_size", "expert_intermediate_size")
    return {
        **c.read_all(experts("num_experts", c.used(*width), "top_k_experts")),
        "expert_scale": True,
        "mlps": ("dense+experts",),
    }


GEMMA4: Map = {
    **BIASED,
    "activation": "hidden_activation",
    "logit_softcap": "final_logit_softcapping",
    "norm_placement": Fixed("sandwich"),
    "qk_norm": Fixed(True),
    "v_norm": Fixed(True),
    "mixers": windows(lambda c, i: (i + 1) % 6 > 0),
    "num_experts": _gemma4_mlps,
    "own_sizes": _gemma4_layers,
}


# ---- DeciLM --------------------------------------------------------------------------------------


def _blocks(c: Keys) -> list[tuple[Json, Json]]:
    """Attention and MLP of each layer, as a search over architectures chose them."""
    layers, listed = c.fields["num_layers"], c.items("block_configs")
    blocks = [cast(Json, x) for x in listed if isinstance(x, dict)]
    pairs = [(x.get("attention"), x.get("ffn")) for x in blocks]
    right = [pair for pair in pairs if isinstance(pair[0], dict) and isinstance(pair[1], dict)]
    if not len(right) == len(listed) == layers:
        c.reject("block_configs", f"attention and ffn for each of the {layers} layers")
    return cast("list[tuple[Json, Json]]", right)


def _decilm_layers(c: Keys) -> Fields:
    """What each layer has: attention with so many heads to a key, an MLP of some width, or none."""
    heads, hidden = c.fields["num_attention_heads"], c.fields["hidden_size"]
    mixers: list[str] = []
    mlps: list[str] = []
    sizes: list[OwnSizes] = []
    for i, (attention, ffn) in enumerate(_blocks(c)):
        for part in (attention, ffn):
            asked = [k for k in ("replace_with_linear", "window_length", "sparsify") if part.get(k)]
            if asked:
                c.reject("block_configs", f"no {asked[0]} in layer {i}, which is not supported")
        group, times = attention.get("n_heads_in_group"), ffn.get("ffn_mult")
        attends, has_mlp = not attention.get("no_op"), not ffn.get("no_op")
        if attends and not (type(group) is int and 0 < group <= heads and heads % group == 0):
            c.reject("block_configs", f"n_heads_in_group in layer {i} that divides {heads} heads")
        wide = isinstance(times, int | float) and type(times) is not bool and 0 < times < 1000
        if has_mlp and not wide:
            c.reject("block_configs", f"ffn_mult in layer {i}, a number above 0")
        mixers.append("global" if attends else "none")
        mlps.append("dense" if has_mlp else "none")
        sizes.append(
            OwnSizes(
                num_query_groups=heads // cast(int, group) if attends else None,
                ffn_hidden_size=_width(cast(float, times), hidden) if has_mlp else None,
            )
        )
    groups = next((x.num_query_groups for x in sizes if x.num_query_groups), heads)
    width = next((x.ffn_hidden_size for x in sizes if x.ffn_hidden_size), hidden)
    differing = [
        OwnSizes(
            num_query_groups=x.num_query_groups if x.num_query_groups != groups else None,
            ffn_hidden_size=x.ffn_hidden_size if x.ffn_hidden_size != width else None,
        )
        for x in sizes
    ]
    return {
        "num_query_groups": groups,
        "ffn_hidden_size": width,
        "mixers": tuple(mixers),
        "mlps": tuple(mlps),
        **own_sizes(differing),
    }


def _width(times: float, hidden: int) -> int:
    """DeciLM's width of an MLP: two thirds of so many times the hidden size, a multiple of 256."""
    return -(-int(2 * times * hidden / 3) // 256) * 256


DECILM: Map = {
    **{k: v for k, v in BIASED.items() if k not in ("ffn_hidden_size", "num_query_groups")},
    "mlp_bias": "mlp_bias",
    "own_sizes": _decilm_layers,
}


# ---- Step-3.7 ------------------------------------------------------------------------------------


def _step_layers(c: Keys) -> Fields:
    """Layers with a window may have more query heads than the others."""
    key = c.used("num_sliding_attention_heads", "attention_other_setting.num_attention_heads")
    heads = c.optional("num_attention_heads", key)
    if heads is None or heads == c.fields["num_attention_heads"]:
        return {}
    own = OwnSizes(num_attention_heads=heads)
    return own_sizes([own if kind == "local" else OwnSizes() for kind in _mixers(c)])


STEP3_OWN: Map = {**STEP3, "own_sizes": _step_layers}
