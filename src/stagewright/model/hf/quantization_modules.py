"""The modules of published models, by which a quantization_config names matrices.

Modules are called as transformers calls them; `MODULES` says which of these a matrix of ours is
part of.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

_ATTENTION = ("self_attn", "attention", "attn", "self_attention", "mixer")
_LINEAR = ("linear_attn", "self_attn", "mamba", "mixer", "attention")
_MLP = ("mlp", "feed_forward", "mixer", "ffn")
EXPERTS = (*_MLP, "block_sparse_moe", "moe")
_SHARED = ("shared_experts", "shared_expert", "share_expert", "shared_mlp")


def _in(parents: Sequence[str], *names: str) -> tuple[str, ...]:
    return tuple(f"{parent}.{name}" for parent in parents for name in names)


def _of_experts(*names: str) -> tuple[str, ...]:
    """Modules of experts: one by one, of which the first stands for all, or all in one tensor."""
    return _in(EXPERTS, *(f"experts.{at}{name}" for at in ("0.", "") for name in names))


def _of_shared(*names: str) -> tuple[str, ...]:
    inside = _in(_in(EXPERTS, *_SHARED), *names)
    return (*inside, *_in(("share_expert", "shared_expert", "shared_mlp"), *names))


_UP = ("up_proj", "gate_up_proj", "w3", "fc1", "c_fc", "dense_h_to_4h", "v1")
_GATE = ("gate_proj", "gate_up_proj", "w1")
_DOWN = ("down_proj", "w2", "fc2", "c_proj", "dense_4h_to_h")
_QKV = ("qkv_proj", "query_key_value", "Wqkv", "c_attn", "W_pack")
_STATE_IN = ("in_proj", "in_proj_qkvz")

MODULES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "attention": {
        "wq": _in(_ATTENTION, "q_proj", *_QKV),
        "wk": _in(_ATTENTION, "k_proj", *_QKV),
        "wv": _in(_ATTENTION, "v_proj", *_QKV),
        "wg": _in(_ATTENTION, "g_proj", "gate_proj", "q_proj"),
        "wo": _in(_ATTENTION, "o_proj", "out_proj", "dense", "c_proj"),
        "w_dq": _in(_ATTENTION, "q_a_proj", "wq_a"),
        "w_uq": _in(_ATTENTION, "q_b_proj", "wq_b"),
        "w_dkv": _in(_ATTENTION, "kv_a_proj_with_mqa", "wkv_a"),
        "w_kr": _in(_ATTENTION, "kv_a_proj_with_mqa", "wkv_a"),
        "w_uk": _in(_ATTENTION, "kv_b_proj", "wkv_b"),
        "w_uv": _in(_ATTENTION, "kv_b_proj", "wkv_b"),
        "w_index_q": _in(_ATTENTION, "indexer.wq_b", "index_q_proj"),
        "w_index_k": _in(_ATTENTION, "indexer.wk", "index_k_proj"),
    },
    "mixer": {
        "mamba.w_x": _in(_LINEAR, *_STATE_IN),
        "mamba.w_z": _in(_LINEAR, *_STATE_IN),
        "mamba.w_out": _in(_LINEAR, "out_proj"),
        **{f"mamba2.w_{n}": _in(_LINEAR, *_STATE_IN) for n in ("z", "x", "b", "c", "dt")},
        "mamba2.w_out": _in(_LINEAR, "out_proj"),
        **{f"lightning.w_{n}": _in(_LINEAR, *_QKV) for n in "qkv"},
        "lightning.w_z": _in(_LINEAR, "output_gate"),
        "lightning.w_out": _in(_LINEAR, "out_proj"),
        **{f"delta.w_{n}": _in(_LINEAR, f"{n}_proj", "in_proj_qkv", "in_proj_qkvz") for n in "qkv"},
        "delta.w_z": _in(_LINEAR, "in_proj_z", "in_proj_qkvz"),
        "delta.w_beta": _in(_LINEAR, "in_proj_b", "in_proj_ba", "b_proj"),
        "delta.w_dt": _in(_LINEAR, "in_proj_a", "in_proj_ba"),
        "delta.w_out": _in(_LINEAR, "out_proj", "o_proj"),
    },
    "mlp": {
        "w_up": _in(_MLP, *_UP),
        "w_gate": _in(_MLP, *_GATE),
        "w_down": _in(_MLP, *_DOWN),
        "we_up": _of_experts(*_UP),
        "we_gate": _of_experts(*_GATE),
        "we_down": _of_experts(*_DOWN),
        "ws_up": _of_shared(*_UP),
        "ws_gate": _of_shared(*_GATE),
        "ws_down": _of_shared(*_DOWN),
        "w_latent": _in(EXPERTS, "fc1_latent_proj"),
        "w_latent_out": _in(EXPERTS, "fc2_latent_proj"),
    },
}
"""By scope and name of a matrix, the modules of a layer that it may be in, by family."""

SCOPES = {"attention": _ATTENTION, "mixer": _LINEAR, "mlp": _MLP}
"""The modules that other matrices of a scope are in."""

EXPERTS_ALONE = {
    name: tuple(f"experts.{at}{module}" for at in ("0.", "") for module in modules)
    for name, modules in (("we_up", _UP), ("we_gate", _GATE), ("we_down", _DOWN))
}
"""Modules of experts that stand beside an MLP, not in its place."""

ROUTED = ("we_up", "we_gate", "we_down")

_PREFIX = re.compile(
    r"(?:(?:model|language_model|text_model|backbone|transformer|llm|thinker|base_model)\.)+"
)
"""What stands before the layers in the names of modules."""

_PREFIXES = ("", "model.", "model.language_model.", "language_model.model.", "backbone.")

_NUMBERED = re.compile(r"layers\.(\d+)(?:\.(.+))?\Z")
"""A module of one layer: the layer's index and the module within."""


def _runs(name: str) -> list[str]:
    """The parts of a dotted name that stand behind each other.

    >>> _runs("a.b")
    ['a', 'a.b', 'b']
    """
    words = name.split(".")
    ends = range(len(words) + 1)
    return [".".join(words[i:j]) for i in ends for j in ends[i + 1 :]]


def _expression(pattern: str) -> str:
    """A regular expression of a pattern with wildcards; what is inside a module is meant, too."""
    text = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
    return rf"{text}(?:\..*)?\Z"


@dataclass(slots=True, eq=False)
class Modules:
    """Modules that are named by words in a row, with wildcards, or by regular expressions.

    >>> some = Modules.of(["lm_head", "model.layers.1.*", "gate", r"re:.*mlp\\.(up|down)_proj.*"])
    >>> some.has(1, "mlp.gate_proj"), some.has(12, "mlp.gate_proj"), some.has(2, "mlp.gate")
    (True, False, True)
    >>> some.has(2, "mlp.experts.0.up_proj"), some.has(2, "mlp.up_proj"), some.has(-1, "lm_head")
    (False, True, True)
    """

    words: set[str] = field(default_factory=set[str])
    """Names without wildcards that are of no one layer."""
    begins: set[str] = field(default_factory=set[str])
    """What these begin with."""
    expressions: list[re.Pattern[str]] = field(default_factory=list[re.Pattern[str]])
    """Those with wildcards, which may begin at any word of a name."""
    whole: list[re.Pattern[str]] = field(default_factory=list[re.Pattern[str]])
    """Regular expressions, which begin at the beginning of a name."""
    of_layers: dict[int, set[str]] = field(default_factory=dict[int, set[str]])
    """By layer, names of modules within; empty: the whole layer."""
    numbered: bool = False
    """Whether some expression is about layers by number."""
    every: bool = False
    """Whether all modules are meant."""

    @classmethod
    def of(cls, patterns: Iterable[str]) -> Modules:
        """The modules that some patterns name; what begins with `re:` is a regular expression."""
        modules = cls()
        for pattern in patterns:
            is_regex = pattern.startswith(("re:", ".*", "^"))
            if is_regex or re.search(r"[\\$(|+\[]", pattern):
                found = _compiled(pattern.removeprefix("re:"))
                modules.whole += [found] if found else []
                modules.numbered |= "layers" in pattern
                continue
            prefix = _PREFIX.match(pattern)
            name = pattern[prefix.end() :] if prefix else pattern
            if match := _NUMBERED.match(name):
                modules.of_layers.setdefault(int(match[1]), set()).add(match[2] or "")
            elif "*" in name or "?" in name:
                modules.expressions.append(re.compile(_expression(name)))
                modules.numbered |= "layers" in name
            else:
                modules.words.add(name)
                modules.begins.add(name.partition(".")[0])
        return modules

    def key(self, layer: int) -> object:
        """Equal for layers of which equal modules are named."""
        return frozenset(self.of_layers.get(layer, ())), layer if self.numbered else -1

    def has(self, layer: int, module: str) -> bool:
        """Whether a module of a layer is named; layer -1: a module outside of all layers."""
        if self.every:
            return True
        name = f"layers.{layer}.{module}" if layer >= 0 else module
        if not self.begins.isdisjoint(name.split(".")) and not self.words.isdisjoint(_runs(name)):
            return True
        if self.expressions:
            starts = [0, *(m.end() for m in re.finditer(r"\.", name))]
            if any(e.match(name, at) for e in self.expressions for at in starts):
                return True
        if any(found.match(prefix + name) for found in self.whole for prefix in _PREFIXES):
            return True
        own = self.of_layers.get(layer)
        if not own:
            return False
        parts = module.split(".")
        if any(".".join(parts[:n]) in own for n in range(len(parts) + 1)):
            return True
        return any(re.match(_expression(p), module) for p in own if "*" in p or "?" in p)


EVERY = Modules(every=True)


def _compiled(text: str) -> re.Pattern[str] | None:
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError):
        return None
