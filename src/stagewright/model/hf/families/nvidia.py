"""NVIDIA: Nemotron, Nemotron-H, and Llama-Nemotron (DeciLM)."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from stagewright.model.architecture import MAX_EXPERTS
from stagewright.model.hf import parts
from stagewright.model.hf.keys import Fields, Json, Keys, family
from stagewright.model.layers import LETTERS, OwnSizes, from_letters

# ---- Nemotron-H ----------------------------------------------------------------------------------

_WORDS = {
    "linear_attention": "M",
    "mamba": "M",
    "full_attention": "*",
    "attention": "*",
    "mlp": "-",
    "moe": "E",
}


def _letters(c: Keys) -> str:
    """A letter per layer, as the first files have them; transformers 5 lists them in words."""
    if c.has("hybrid_override_pattern"):
        letters = c.text("hybrid_override_pattern")
        if not letters or not {*letters} <= LETTERS.keys():
            c.reject("hybrid_override_pattern", f"letters of {' '.join(LETTERS)}")
        return letters
    listed = c.items("layers_block_type")
    words = [_WORDS.get(x, "") if isinstance(x, str) else "" for x in listed]
    if not words or "" in words:
        c.reject("layers_block_type", f"a list of {', '.join(_WORDS)}")
    return "".join(words)


def _depth(c: Keys) -> int:
    layers = len(_letters(c))
    if c.values.get("num_hidden_layers", layers) != layers:
        c.reject("num_hidden_layers", f"{layers}, the length of the pattern")
    return replace(c, values={"num_hidden_layers": layers}).size("num_layers", "num_hidden_layers")


def _layers(c: Keys) -> Fields:
    """A layer is a mixer or an MLP, not both."""
    letters = _letters(c)
    fields = from_letters(letters) | ({} if "-" in letters else {"ffn_hidden_size": 0})
    if "E" not in letters:
        return fields | c.read_all(parts.NO_EXPERTS)
    shared = c.integer("n_shared_experts", 0, MAX_EXPERTS)
    width = c.size("ffn_hidden_size", "moe_shared_expert_intermediate_size")
    return {
        **fields,
        **c.read_all(parts.experts("n_routed_experts", "moe_intermediate_size")),
        "shared_ffn_hidden_size": shared * width,
        "moe_latent_size": c.optional("hidden_size", "moe_latent_size") or 0,
        "router": "sigmoid",
        "norm_topk_prob": c.flag("norm_topk_prob"),
        "expert_bias": True,
    }


# ---- Llama-Nemotron ------------------------------------------------------------------------------


def _blocks(c: Keys) -> list[tuple[Json, Json]]:
    """Attention and MLP of each layer, as a search over architectures chose them."""
    layers, listed = c.fields["num_layers"], c.items("block_configs")
    blocks = [cast(Json, x) for x in listed if isinstance(x, dict)]
    pairs = [(x.get("attention"), x.get("ffn")) for x in blocks]
    right = [pair for pair in pairs if isinstance(pair[0], dict) and isinstance(pair[1], dict)]
    if not len(right) == len(listed) == layers:
        c.reject("block_configs", f"attention and ffn for each of the {layers} layers")
    return cast("list[tuple[Json, Json]]", right)


def _searched_layers(c: Keys) -> Fields:
    """Attention and MLP of each layer, with their key-value heads and widths, or none."""
    heads, hidden = c.fields["num_attention_heads"], c.fields["hidden_size"]
    mixers: list[str] = []
    mlps: list[str] = []
    groups: list[int | None] = []
    widths: list[int | None] = []
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
        groups.append(heads // cast(int, group) if attends else None)
        widths.append(_width(cast(float, times), hidden) if has_mlp else None)
    usual_groups = next((n for n in groups if n), heads)
    usual_width = next((n for n in widths if n), hidden)
    differing = [
        OwnSizes(
            num_query_groups=n if n != usual_groups else None,
            ffn_hidden_size=width if width != usual_width else None,
        )
        for n, width in zip(groups, widths, strict=True)
    ]
    return {
        "num_query_groups": usual_groups,
        "ffn_hidden_size": usual_width,
        "mixers": tuple(mixers),
        "mlps": tuple(mlps),
        **parts.own_sizes(differing),
    }


def _width(times: float, hidden: int) -> int:
    """The width of an MLP: two thirds of `times` the hidden size, a multiple of 256."""
    return -(-int(2 * times * hidden / 3) // 256) * 256


FAMILIES = {
    "NemotronForCausalLM": family(
        "nemotron",
        parts.LLAMA,
        parts.UNGATED,
        parts.LAYER_NORM,
        rotary_fraction=parts.rotary_fraction,
    ),
    "NemotronHForCausalLM": family(
        "nemotron_h",
        parts.DECODER,
        like="nemotron-h-8b",
        num_layers=_depth,
        tied_embeddings=False,  # transformers never ties them
        # NVIDIA's own files have the second name.
        kv_channels=parts.head_width(("num_attention_heads",), "head_dim", "attention_head_dim"),
        activation="mlp_hidden_act",
        state_space=parts.state_heads(
            parts.StateKeys("mamba_num_heads", "mamba_head_dim", state="ssm_state_size")
        ),
        mlps=_layers,
        only=dict.fromkeys(("use_bias", "mamba_proj_bias", "attention_bias", "mlp_bias"), False),
        unused="hidden_act n_shared_experts norm_topk_prob moe_intermediate_size "
        "moe_shared_expert_intermediate_size n_routed_experts "
        "num_experts_per_tok",
    ),
    "DeciLMForCausalLM": family(
        "nemotron-nas deci",
        {k: v for k, v in parts.BIASED.items() if k not in ("ffn_hidden_size", "num_query_groups")},
        mlp_bias="mlp_bias",
        own_sizes=_searched_layers,
    ),
}
