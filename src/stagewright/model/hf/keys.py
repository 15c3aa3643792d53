"""What the readers of config.json files are written with: keys by name, and what families share.

Errors name the file and the key.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from reprlib import repr as shown  # short and shallow whatever the file holds
from typing import Any, NamedTuple, NoReturn, cast

from stagewright.errors import UserError, divisors
from stagewright.model.config import LIMITS, MOST_EXPERTS, Activation, Router

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "relu2": "relu2",
}
"""transformers' names of the activations, and ours."""


ROUTERS: dict[str, Router] = {"softmax": "softmax", "sigmoid": "sigmoid"}
"""DeepSeek's names of the functions that make weights of a router's scores, and ours."""


CHOICES = ("greedy", "group_limited_greedy", "noaux_tc")
"""DeepSeek's ways to choose a token's experts."""

Json = dict[str, object]


Fields = dict[str, Any]
"""Fields of `ModelConfig`."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a file. What is not as it must be is an error that names the key."""

    file: str
    values: Json
    prefix: str = ""

    def reject(self, key: str, wanted: str) -> NoReturn:
        """Raise the error about a key."""
        value = self.values.get(key)
        if key not in self.values:
            got = "missing"
        elif value is None or isinstance(value, bool):
            got = json.dumps(value)
        else:
            got = shown(value)
        raise UserError(f"{self.file}: {self.prefix}{key} is {got}, wanted {wanted}")

    def used(self, *keys: str) -> str:
        """The one of several names of one thing that the file uses."""
        return next((key for key in keys if key in self.values), keys[0])

    def whole(self, key: str, least: int, most: int) -> int:
        """A whole number within limits."""
        value = self.values.get(key)
        if type(value) is not int or not least <= value <= most:
            self.reject(key, f"a whole number from {least} to {most}")
        return value

    def size(self, field: str, *keys: str) -> int:
        """A size that a field may have, under one of these keys."""
        return self.whole(self.used(*keys), 1, LIMITS[field])

    def optional(self, field: str, *keys: str) -> int | None:
        """The same, or None where the key is null or missing."""
        key = self.used(*keys)
        return None if self.values.get(key) is None else self.size(field, key)

    def flag(self, key: str) -> bool:
        """True or false."""
        value = self.values.get(key)
        if not isinstance(value, bool):
            self.reject(key, "true or false")
        return value

    def number(self, key: str, least: float, most: float) -> float:
        """Any number within limits."""
        value = self.values.get(key)
        if isinstance(value, int | float) and type(value) is not bool and least <= value <= most:
            return float(value)
        self.reject(key, f"a number from {least} to {most}")

    def dropout(self, key: str) -> float:
        """A probability; null means none, as in transformers."""
        return 0.0 if self.values.get(key) is None else self.number(key, 0, 0.999)

    def softcap(self, key: str) -> float | None:
        """A cap above 0; null means none."""
        return None if self.values.get(key) is None else self.number(key, 1e-3, 1e6)

    def activation(self, key: str) -> Activation:
        """One of transformers' activations."""
        value = self.values.get(key)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            self.reject(key, f"one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[value]

    def text(self, key: str) -> str:
        """A text."""
        value = self.values.get(key)
        if not isinstance(value, str):
            self.reject(key, "text")
        return value

    def router(self, key: str) -> Router:
        """One of DeepSeek's functions that make weights of scores."""
        value = self.values.get(key)
        if not isinstance(value, str) or value not in ROUTERS:
            self.reject(key, f"one of {', '.join(ROUTERS)}")
        return ROUTERS[value]

    def inside(self, key: str, defaults: Json) -> Keys:
        """The keys of an object in the file."""
        value = self.values.get(key)
        if not isinstance(value, dict):
            self.reject(key, "an object")
        return Keys(self.file, defaults | cast(Json, value), f"{self.prefix}{key}.")

    def only(self, key: str, value: bool | float | str) -> None:
        """Refuse a key that asks for something no `ModelConfig` is."""
        got = self.values.get(key)
        if got is not None and (type(got) is not type(value) or got != value):
            self.reject(key, f"{json.dumps(value)}; nothing else is supported")


class Architecture(NamedTuple):
    """How files of one architecture are read."""

    model_types: tuple[str, ...]
    like: str
    """The preset that says what the files do not."""
    read: Callable[[Keys], Fields]
    defaults: Json


def usual_sizes(c: Keys, **names: tuple[str, ...]) -> Fields:
    """What all files say, under the usual keys or these; as many key/value heads as heads."""
    usual = {
        "num_layers": ("num_hidden_layers",),
        "hidden_size": ("hidden_size",),
        "num_attention_heads": ("num_attention_heads",),
        "vocab_size": ("vocab_size",),
        "max_position_embeddings": ("max_position_embeddings",),
    }
    keys = usual | names
    fields: Fields = {field: c.size(field, *keys[field]) for field in keys}
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    width = c.optional("kv_channels", "head_dim")
    if width is None and hidden % heads:
        key = c.used(*keys["num_attention_heads"])
        c.reject(key, f"a divisor of the hidden size {hidden}: {divisors(hidden)}")
    return fields | {
        "num_query_groups": heads,
        "kv_channels": width or hidden // heads,
        "tied_embeddings": c.flag("tie_word_embeddings"),
    }


def query_groups(c: Keys, heads: int, *keys: str) -> int:
    """Key/value heads; as many as there are heads where the key is null."""
    key = c.used(*keys)
    groups = heads if c.values.get(key, 0) is None else c.size("num_query_groups", key)
    if heads % groups:
        c.reject(key, f"a divisor of the {heads} attention heads: {divisors(heads)}")
    return groups


def decoder(c: Keys, activation: str = "hidden_act") -> Fields:
    """The keys that Llama introduced and most decoders took over."""
    fields = usual_sizes(c, ffn_hidden_size=("intermediate_size",))
    return fields | {
        "num_query_groups": query_groups(c, fields["num_attention_heads"], "num_key_value_heads"),
        "activation": c.activation(activation),
        "attention_dropout": c.dropout("attention_dropout"),
    }


def rotary_fraction(c: Keys) -> float:
    """The part of each head that rope turns."""
    rope = c.values.get("rope_parameters")  # where transformers 5 writes the fraction
    if isinstance(rope, dict) and "partial_rotary_factor" in rope:
        c = c.inside("rope_parameters", {})
    return c.number("partial_rotary_factor", 0, 1)


def expert_sizes(c: Keys, count: str, width: str, top_k: str = "num_experts_per_tok") -> Fields:
    """Experts under the keys of a family; without shared experts, and in every layer."""
    return {
        "num_experts": c.whole(count, 1, MOST_EXPERTS),
        "top_k": c.whole(top_k, 1, MOST_EXPERTS),
        "moe_ffn_hidden_size": c.size("ffn_hidden_size", width),
        "shared_ffn_hidden_size": 0,
        "first_dense_layers": 0,
        "moe_layer_freq": 1,
        "router": "softmax",
        "norm_topk_prob": True,
        "num_expert_groups": 1,
        "topk_groups": 1,
        "expert_bias": False,
    }


def deepseek_experts(c: Keys) -> Fields:
    """DeepSeek's keys, which GLM took over: shared experts, and dense layers first."""
    fields = expert_sizes(c, "n_routed_experts", "moe_intermediate_size")
    shared = c.values.get("n_shared_experts")
    if shared is not None or "n_shared_experts" not in c.values:
        shared = c.whole("n_shared_experts", 0, MOST_EXPERTS)
    every = c.size("num_layers", "moe_layer_freq")
    first = c.whole("first_k_dense_replace", 0, LIMITS["num_layers"])
    return fields | {
        "shared_ffn_hidden_size": (shared or 0) * fields["moe_ffn_hidden_size"],
        # layer i has experts if it is none of the first and `every` divides i
        "first_dense_layers": -(-first // every) * every,
        "moe_layer_freq": every,
        "router": c.router("scoring_func"),
        "norm_topk_prob": c.flag("norm_topk_prob"),
        **_choice(c, fields["num_experts"]),
    }


def _choice(c: Keys, experts: int) -> Fields:
    """How experts are chosen: of all or of the best groups, with or without a balancing bias."""
    method = c.text("topk_method")
    if method not in CHOICES:
        c.reject("topk_method", f"one of {', '.join(CHOICES)}")
    groups = 1 if c.values.get("n_group") is None else c.whole("n_group", 1, MOST_EXPERTS)
    if method == "greedy" or groups == 1:
        return {"expert_bias": method == "noaux_tc"}
    if experts % groups:
        c.reject("n_group", f"a divisor of the {experts} experts: {divisors(experts)}")
    return {
        "expert_bias": method == "noaux_tc",
        "num_expert_groups": groups,
        "topk_groups": c.whole("topk_group", 1, groups),
    }


def deepseek_latent(c: Keys) -> Fields:
    """Also Kimi-K2."""
    return latent_attention(c) | deepseek_experts(c)


def latent_attention(c: Keys) -> Fields:
    """DeepSeek's keys. The width of a head is that of its queries: without and with position."""
    c.only("attention_bias", False)
    rotary = c.whole("qk_rope_head_dim", 2, LIMITS["kv_channels"] // 2)
    width = rotary + c.whole("qk_nope_head_dim", 1, LIMITS["kv_channels"] // 2)
    c = replace(c, values=c.values | {"head_dim": width})
    fields = decoder(c)
    heads = fields["num_attention_heads"]
    if fields["num_query_groups"] != heads:
        c.reject("num_key_value_heads", f"the {heads} attention heads")
    if "q_lora_rank" not in c.values:
        c.reject("q_lora_rank", "a whole number, or null for queries without a latent")
    return fields | {
        "kv_lora_rank": c.size("hidden_size", "kv_lora_rank"),
        "q_lora_rank": c.optional("hidden_size", "q_lora_rank") or 0,
        "qk_rope_head_dim": rotary,
        "v_head_dim": c.size("kv_channels", "v_head_dim"),
    }
