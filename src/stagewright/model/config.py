"""What a model is made of: its sizes and its architecture, as presets or from a config.json.

A `ModelConfig` says nothing of parallelism, number formats or batch; it counts no parameters
either, the graph does. Every preset names the paper or the published file of its figures.

>>> resolve("llama3.1-70b").num_query_groups
8
>>> [resolve("gemma2-9b").layer(i).mixer for i in range(3)]
['local', 'global', 'local']
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from dataclasses import field as _field
from reprlib import repr as shown  # short whatever the value: the input of a user may be huge
from typing import Any, Literal, NamedTuple, get_args

from stagewright.algebra.notation import Tensor
from stagewright.errors import UserError, did_you_mean, divisors
from stagewright.model.presets import FAMILIES
from stagewright.model.shared_blocks import SharedBlocks
from stagewright.model.state_space import InnerNorms, StateSpace

Position = Literal["rope", "learned", "alibi", "relative", "none"]
Norm = Literal["rmsnorm", "layernorm"]
NormPlacement = Literal["pre", "post", "sandwich"]
Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "silu", "relu", "relu2"]
Attention = Literal["global", "local", "chunked", "nope"]
Recurrence = Literal["mamba", "mamba2", "lightning", "gated_delta", "kimi_delta"]
SideBySide = Literal["global+mamba2"]
FeedForward = Literal["dense", "experts", "none"]
Router = Literal["softmax", "sigmoid"]
ApplyProbs = Literal["experts", "input", "output"]

LIMITS = {
    "num_layers": 10_000,
    "hidden_size": 2**24,
    "ffn_hidden_size": 2**26,
    "num_attention_heads": 2**16,
    "num_query_groups": 2**16,
    "kv_channels": 2**16,
    "vocab_size": 2**28,
    "max_position_embeddings": 2**31,
}
"""The largest size of each kind that is believed: far above any model, far below an accident."""

MOST_EXPERTS = 2**16
_MOST = 2**31  # of the sizes that may be absent or zero
_COUNTS = (
    *((field, 1, most) for field, most in LIMITS.items()),
    ("position_offset", 0, _MOST),
    ("token_types", 0, _MOST),
    ("parallel_norms", 1, 2),
    ("mtp_num_layers", 0, 16),
    ("encoder_num_layers", 0, LIMITS["num_layers"]),
    ("relative_buckets", 0, 2**16),
    ("num_experts", 0, MOST_EXPERTS),
    ("top_k", 0, MOST_EXPERTS),
    ("moe_ffn_hidden_size", 0, LIMITS["ffn_hidden_size"]),
    ("shared_ffn_hidden_size", 0, LIMITS["ffn_hidden_size"]),
    ("first_dense_layers", 0, LIMITS["num_layers"]),
    ("moe_layer_freq", 1, LIMITS["num_layers"]),
    ("num_expert_groups", 1, MOST_EXPERTS),
    ("topk_groups", 1, MOST_EXPERTS),
    ("kv_lora_rank", 0, LIMITS["hidden_size"]),
    ("q_lora_rank", 0, LIMITS["hidden_size"]),
    ("qk_rope_head_dim", 0, LIMITS["kv_channels"]),
    ("v_head_dim", 0, LIMITS["kv_channels"]),
)
_OF_EXPERTS = {  # fields that mean nothing in a dense model, and what they are there
    **dict.fromkeys(("top_k", "moe_ffn_hidden_size", "shared_ffn_hidden_size"), 0),
    **{"first_dense_layers": 0, "moe_layer_freq": 1, "router": "softmax", "norm_topk_prob": True},
    **{"num_expert_groups": 1, "topk_groups": 1, "expert_bias": False, "shared_expert_gate": False},
    **{"apply_probs": "experts", "router_bias": False},
}
ATTENTIONS = frozenset(get_args(Attention))
RECURRENCES: tuple[Recurrence, ...] = get_args(Recurrence)
SIDE_BY_SIDE: Mapping[SideBySide, tuple[Attention, Recurrence]] = {
    "global+mamba2": ("global", "mamba2")
}
"""Mixers that are two: both read the layer's input, and their outputs are summed."""
_OF_ATTENTION = ("num_attention_heads", "num_query_groups", "kv_channels")
_STATE_COUNTS = (
    *(("heads", 1, _MOST), ("head_width", 1, LIMITS["kv_channels"]), ("groups", 1, _MOST)),
    *(("state", 1, LIMITS["kv_channels"]), ("conv", 0, 64), ("chunk", 1, _MOST)),
    *(("dt_rank", 0, LIMITS["hidden_size"]), ("gate_rank", 0, LIMITS["hidden_size"])),
)
_OF_LATENTS = ("q_lora_rank", "qk_rope_head_dim", "v_head_dim")
_CHOICES = {
    "position": get_args(Position),
    "norm": get_args(Norm),
    "norm_placement": get_args(NormPlacement),
    "activation": get_args(Activation),
    "router": get_args(Router),
    "apply_probs": get_args(ApplyProbs),
}
_FLAGS = (
    *("norm_bias", "parallel_block", "final_norm", "embedding_norm"),
    *("qkv_bias", "attention_output_bias", "mlp_bias", "qk_norm", "qk_l2_norm", "attention_gate"),
    *("attention_sinks", "gated", "norm_topk_prob", "expert_bias", "router_bias"),
    "shared_expert_gate",
    *("tied_embeddings", "lm_head_bias", "pooler", "mlm_transform", "causal", "encoder", "bare"),
)
_NOT_SHARED: Mapping[str, object] = {  # what models with shared blocks do not have
    **dict.fromkeys(("parallel_block", "qkv_bias", "attention_output_bias", "mlp_bias"), False),
    **dict.fromkeys(("qk_norm", "qk_l2_norm", "attention_sinks", "attention_gate", "bare"), False),
    **dict.fromkeys(("encoder_num_layers", "mtp_num_layers", "kv_lora_rank"), 0),
    **dict.fromkeys(("vision", "diffusion", "tower", "embedding_size"), None),
    "norm_placement": "pre",
}
_DROPOUTS = ("hidden_dropout", "attention_dropout", "embedding_dropout")


class Layer(NamedTuple):
    """What a layer is made of: how positions mix, and what works on each by itself.

    Each is one of ours, or the name of one of the model's `modules`.
    """

    mixer: str = "global"
    mlp: str = "dense"
    ahead: int = 0
    """Of multi-token prediction: how many tokens after the next one."""
    block: int = 0
    """The shared block before the mixer, counted from 1; 0: there is none."""


class Reach(NamedTuple):
    """Which of the positions before it a query sees: all, those of a window, or of its chunk."""

    window: int = 0
    """So many, itself included; 0: there is none."""
    chunk: int = 0
    """Positions are in chunks of so many, each by itself; 0: there are none."""

    @property
    def kind(self) -> str:
        """What tells caches and sizes of such layers from those of others."""
        return "_local" if self.window else "_chunked" if self.chunk else ""


@dataclass(frozen=True, slots=True, eq=False)
class Module:
    """A part of a layer that a user has written, as a `.stg` file or as a Python function.

    `build(builder, inputs by name)` writes down its nodes; what it calls its parameters and values
    is `NAME.theirs`. The first input is the hidden state; all others come from outside.
    """

    name: str
    build: Callable[[Any, Mapping[str, Any]], Any]
    inputs: tuple[tuple[str, tuple[Any, ...], str], ...] = (("x", ("B", "S", "M"), ""),)
    """Name, sizes of the dims and data type ("": that of the run)."""
    sizes: Mapping[str, int] = _field(default_factory=dict[str, int])
    """The numbers behind sizes that the model does not have."""
    table: Mapping[str, Tensor] = _field(default_factory=dict[str, Tensor])
    """Where its values and parameters live, by full name."""
    output: str = "y"
    text: str = ""
    """The `.stg` file it is from."""


@dataclass(frozen=True, slots=True)
class Vision:
    """Images as a sequence of square patches (ViT, arXiv 2010.11929), and what is made of them."""

    image_size: int
    patch_size: int
    channels: int = 3
    patch_bias: bool = True
    classes: int = 0
    """Of the classifier on the first position; 0: there is none, as in a tower."""

    @property
    def patches(self) -> int:
        """Positions of an image, besides the one that stands before them for all of it."""
        return (self.image_size // self.patch_size) ** 2


@dataclass(frozen=True, slots=True)
class Diffusion:
    """Noisy images as patches, modulated by step and class (DiT, arXiv 2212.09748)."""

    image_size: int
    """Of the latent image."""
    patch_size: int
    channels: int
    classes: int
    """That of no class included."""
    out_channels: int
    """Noise, and its variance where that is learned."""
    waves: int = 256
    """Sines and cosines of a step."""

    @property
    def patches(self) -> int:
        """Positions of an image; one more stands before them, for step and class."""
        return (self.image_size // self.patch_size) ** 2


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Tables looked up by features, MLPs around them (DLRM, arXiv 1906.00091)."""

    rows: tuple[int, ...]
    """Of each table."""
    dense: int
    """Numeric features."""
    bottom: tuple[int, ...]
    """Widths of the MLP over these; the last is the width of a row."""
    top: tuple[int, ...]
    """Widths of the MLP over the products of all pairs; the last is 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A transformer on one device. Sizes count elements; the defaults are Llama's choices.

    >>> tiny = PRESETS["llama2-7b"].with_overrides(num_layers=2)
    >>> tiny.num_layers, tiny.hidden_size
    (2, 4096)
    """

    name: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    """Width between the two (gated: three) matrices of the MLP; gate and up have it each."""
    num_attention_heads: int
    num_query_groups: int
    """Key/value heads: all heads (multi-head), one (multi-query) or a divisor (grouped-query)."""
    kv_channels: int
    """Width of one head; heads x kv_channels need not be hidden_size."""
    vocab_size: int
    """Rows of the embedding as published, before any padding for tensor parallelism."""
    max_position_embeddings: int
    """Longest sequence in tokens; the rows of the table where positions are learned."""

    position: Position = "rope"
    relative_buckets: int = 0
    """Distances that have a learned bias per head, of scores, where positions are relative (T5)."""
    position_offset: int = 0
    """Extra rows of the learned table (OPT: 2); it has max_position_embeddings + these."""
    rotary_fraction: float = 1.0
    """The part of each head that rope turns."""

    norm: Norm = "rmsnorm"
    norm_bias: bool = False
    norm_placement: NormPlacement = "pre"
    """Before each of attention and MLP, after its residual sum, or before and after (sandwich)."""
    parallel_block: bool = False
    """Attention and MLP both read the block's input, and their outputs are summed."""
    parallel_norms: int = 1
    """Of a parallel block: one norm for both halves, or one each (Falcon's newer decoder)."""
    final_norm: bool = True
    embedding_norm: bool = False

    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """An RMSNorm of kv_channels weights on every query head, and another on every key head."""
    qk_l2_norm: bool = False
    """Such a norm without weights, after rope and where there is rope (Llama 4)."""
    attention_sinks: bool = False
    """A learned score per head that takes its part of the softmax and has no value (gpt-oss)."""
    attention_gate: bool = False
    """What the heads return is weighed, channel by channel, by a sigmoid of the layer's input."""
    gated: bool = True
    """Three matrices, down(activation(gate) * up), instead of down(activation(up))."""
    activation: Activation = "silu"
    glu_linear_offset: float = 0.0
    """Of a gated MLP, added to what the gate weighs."""
    activation_func_clamp_value: float | None = None
    """Of a gated MLP: neither gate nor what it weighs is above this, nor the latter below minus."""

    num_experts: int = 0
    """Experts of a mixture-of-experts layer; 0: every layer is dense."""
    top_k: int = 0
    """Experts that each token goes to."""
    moe_ffn_hidden_size: int = 0
    """Width inside one expert."""
    shared_ffn_hidden_size: int = 0
    """Width of the experts that every token goes to, together."""
    first_dense_layers: int = 0
    """Layers before the first mixture-of-experts layer."""
    moe_layer_freq: int = 1
    """Of the layers after those, every how many has experts."""
    router: Router = "softmax"
    """How a token's scores become the weights of its experts."""
    norm_topk_prob: bool = True
    """The weights of a token's experts add up to one; otherwise they are those of all experts."""
    num_expert_groups: int = 1
    """Group-limited routing (DeepSeek-V2, V3): experts are in so many groups,"""
    topk_groups: int = 1
    """of which a token goes to so many."""
    apply_probs: ApplyProbs = "experts"
    """Where the weights are multiplied: what experts compute, their input or their output."""
    expert_bias: bool = False
    """Added to the scores that choose experts, to balance their load without a loss."""
    router_bias: bool = False
    """A learned bias of the scores, unlike `expert_bias`."""
    shared_expert_gate: bool = False
    """The shared experts' sum is weighed by a sigmoid of its own (Qwen2-MoE)."""

    kv_lora_rank: int = 0
    """Width of the latent that keys and values are made of (multi-head latent attention), or 0."""
    q_lora_rank: int = 0
    """Likewise of queries; 0: queries are made of the hidden state."""
    qk_rope_head_dim: int = 0
    """Of kv_channels, the part with rotary position, which all heads share for keys."""
    v_head_dim: int = 0
    """Width of a value head where it is not kv_channels."""

    mtp_num_layers: int = 0
    """Layers that predict one more token each (multi-token prediction, arXiv 2412.19437)."""
    tied_embeddings: bool = False
    """The output projection uses the embedding's matrix."""
    lm_head_bias: bool = False
    token_types: int = 0
    """Rows of a second, summed embedding (BERT's segments: 2)."""
    pooler: bool = False
    """BERT's square layer with tanh on the first token."""
    mlm_transform: bool = False
    """BERT's square layer, activation and norm before the output projection."""
    embedding_size: int | None = None
    """Width of the embedding where it is not hidden_size: bias-free projections in and out."""

    encoder_num_layers: int = 0
    """Layers of an encoder, whose output every layer attends to besides (T5, arXiv 1910.10683)."""
    causal: bool = True
    encoder: bool = False
    sliding_window: int | None = None
    """Positions a local layer's query sees, itself included."""
    attention_chunk_size: int | None = None
    """Positions of a chunk, of which a chunked layer's query sees its own (Llama 4)."""
    mixers: tuple[str, ...] = ("global",)
    """What mixes positions in each layer, repeated over them: attention (to all, to all without
    positions: nope, within a window or a chunk), a recurrence, both side by side or none."""
    state_space: StateSpace | None = None
    """Sizes of the recurrence, in a model that has one."""
    attention_softcap: float | None = None
    logit_softcap: float | None = None

    mlps: tuple[str, ...] = ()
    """What works on each position in each layer, repeated over them: dense, experts or none. Empty:
    experts where `num_experts`, `first_dense_layers` and `moe_layer_freq` have them, else dense."""
    modules: tuple[Module, ...] = ()
    """Users' own parts of layers, which `mixers` and `mlps` name."""
    shared_blocks: SharedBlocks | None = None
    """What some layers have before their mixers, and share."""
    bare: bool = False
    """Layers and nothing else: no norms and residual sums around, no embedding, no loss."""

    vision: Vision | None = None
    """Reads images and no text."""
    tower: ModelConfig | None = None
    """A vision model whose output stands before the text (LLaVA, arXiv 2310.03744)."""
    diffusion: Diffusion | None = None
    """Removes noise from images."""
    recommendation: Recommendation | None = None
    """No transformer at all: tables and MLPs."""

    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    embedding_dropout: float = 0.0

    source: str = ""
    """The address or the paper of the figures."""

    def __post_init__(self) -> None:
        """Refuse what no model can be."""
        self._check_values()
        self._check_combinations()

    @property
    def rotary_channels(self) -> int:
        """Channels of a head that rope turns."""
        return int(self.kv_channels * self.rotary_fraction)

    def layer(self, index: int) -> Layer:
        """What this layer is made of."""
        assert 0 <= index < self.num_layers, index
        mixer = self.mixers[index % len(self.mixers)]
        shared = self.shared_blocks.layers if self.shared_blocks else (0,)
        block = shared[index % len(shared)]
        if self.mlps:
            return Layer(mixer, self.mlps[index % len(self.mlps)], block=block)
        after = index - self.first_dense_layers
        routed = self.num_experts > 0 and after >= 0 and after % self.moe_layer_freq == 0
        return Layer(mixer, "experts" if routed else "dense", block=block)

    def reach(self, mixer: str) -> Reach:
        """How far a layer with this mixer looks back."""
        window = self.sliding_window if mixer == "local" else None
        chunk = self.attention_chunk_size if mixer == "chunked" else None
        return Reach(window or 0, chunk or 0)

    @property
    def reaches(self) -> tuple[Reach, ...]:
        """Those of all layers, that to all positions always among them and first."""
        return tuple(dict.fromkeys((Reach(), *map(self.reach, self.mixers))))

    @property
    def depth(self) -> int:
        """Layers in all, those of the tower or of the encoder first."""
        tower = self.tower.num_layers if self.tower else 0
        return tower + self.encoder_num_layers + self.num_layers

    @property
    def parts(self) -> frozenset[str]:
        """Everything that some layer is made of."""
        found = frozenset(x for i in range(self.num_layers) for x in self.layer(i)[:2])
        return found | {"global", "dense"} if self.shares else found

    @property
    def shares(self) -> bool:
        """Whether some layers have a shared block."""
        given = self.shared_blocks.layers if self.shared_blocks else ()
        return any(given[: self.num_layers])

    def with_module(
        self, function: Callable[[Any, Any], Any], *, mixers: bool = False, mlps: bool = False
    ) -> ModelConfig:
        """The same model with a Python function for each layer's mixer, or for its MLP, or both.

        `function(builder, h)` maps the hidden state [B, S, M] to what is added to it; `builder` is
        a `nn.builder.Builder`.
        """
        name = function.__name__
        module = Module(name, lambda builder, values: function(builder, *values.values()))
        return replace(
            self,
            modules=(*self.modules, module),
            mixers=(name,) if mixers else self.mixers,
            mlps=(name,) if mlps else self.mlps,
        )

    @property
    def kinds(self) -> frozenset[str]:
        """Every kind of mixer that some layer has, alone or beside another."""
        pairs: Mapping[str, tuple[str, ...]] = {**SIDE_BY_SIDE}
        return frozenset(kind for mixer in self.mixers for kind in pairs.get(mixer, (mixer,)))

    @property
    def attends(self) -> bool:
        """Whether some layers have attention."""
        return self.shared_blocks is not None or not ATTENTIONS.isdisjoint(self.kinds)

    @property
    def sees_all(self) -> bool:
        """Whether the attention of some layer sees all positions before it."""
        mixers = {self.layer(i).mixer for i in range(self.num_layers)}
        return any(self.reach(mixer) == Reach() for mixer in mixers & ATTENTIONS)

    @property
    def recurrence(self) -> Recurrence | None:
        """The kind of layer that carries a state, in a model that has some."""
        return next((kind for kind in RECURRENCES if kind in self.kinds), None)

    def with_overrides(
        self,
        num_layers: int | None = None,
        vocab_size: int | None = None,
        mtp_num_layers: int | None = None,
    ) -> ModelConfig:
        """The same model with fewer or more layers, another vocabulary, more tokens predicted."""
        given = {"num_layers": num_layers, "vocab_size": vocab_size}
        given["mtp_num_layers"] = mtp_num_layers
        return replace(self, **{name: n for name, n in given.items() if n is not None})

    def _reject(self, field: str, wanted: str) -> UserError:
        name = self.name if type(self.name) is str else shown(self.name)
        return UserError(f"model {name}: {field} is {shown(getattr(self, field))}, wanted {wanted}")

    def _check_values(self) -> None:
        for field in ("name", "source"):
            if type(getattr(self, field)) is not str:
                raise self._reject(field, "text")
        self._check_patterns()
        absent = () if self.attends else _OF_ATTENTION
        dense = "dense" in (self.mlps or ("dense",)) or self.shared_blocks
        absent += () if dense else ("ffn_hidden_size",)
        for field, least, most in _COUNTS:
            least = 0 if field in absent else least
            if not _whole(getattr(self, field), least, most):
                raise self._reject(field, f"a whole number from {least} to {most}")
        for field in ("embedding_size", "sliding_window", "attention_chunk_size"):
            if getattr(self, field) is not None and not _whole(getattr(self, field), 1, _MOST):
                raise self._reject(field, f"None or a whole number from 1 to {_MOST}")
        for field, choices in _CHOICES.items():
            if getattr(self, field) not in choices:
                raise self._reject(field, f"one of {', '.join(map(str, choices))}")
        for field in _FLAGS:
            if type(getattr(self, field)) is not bool:
                raise self._reject(field, "True or False")
        for field in _DROPOUTS:
            if not _number(getattr(self, field)) or not 0 <= getattr(self, field) < 1:
                raise self._reject(field, "a number from 0 to below 1")
        for field in ("attention_softcap", "logit_softcap", "activation_func_clamp_value"):
            cap = getattr(self, field)
            if cap is not None and not (_number(cap) and cap > 0):
                raise self._reject(field, "None or a number above 0")
        if not _number(self.glu_linear_offset):
            raise self._reject("glu_linear_offset", "a number")
        if not _number(self.rotary_fraction) or not 0 < self.rotary_fraction <= 1:
            raise self._reject("rotary_fraction", "a number above 0 and at most 1")

    def _check_patterns(self) -> None:
        own = tuple(m.name for m in self.modules)
        known = (*get_args(Attention), *RECURRENCES, *SIDE_BY_SIDE, "none", *own)
        self._check_kinds("mixers", known, least=1)
        self._check_kinds("mlps", (*get_args(FeedForward), *own), least=0)

    def _check_kinds(self, field: str, known: tuple[str, ...], least: int) -> None:
        kinds: tuple[object, ...] = getattr(self, field)
        right = type(kinds) is tuple and len(kinds) >= least
        if not right or any(kind not in known for kind in kinds):
            wanted = f"a tuple of {', '.join(map(repr, known))}" + ", not empty" * least
            raise self._reject(field, wanted)

    def _check_combinations(self) -> None:
        if self.attends:
            self._check_attention()
        self._check_state_space()
        self._check_shared_blocks()
        self._check_experts()
        if any(layer[:2] == ("none", "none") for layer in self._layers()):
            raise self._reject("mlps", "something in every layer whose mixer is none")
        if self.position_offset and self.position != "learned":
            raise self._reject("position_offset", "0 where positions are not learned")
        if self.norm_bias and self.norm == "rmsnorm":
            raise self._reject("norm_bias", "False: an rmsnorm has no bias")
        if self.parallel_block and self.norm_placement != "pre":
            raise self._reject("norm_placement", "pre in a parallel block")
        if self.parallel_norms == 2 and not self.parallel_block:
            raise self._reject("parallel_norms", "1 where the block is not parallel")
        self._check_encoder()
        alone = self.vision or self.diffusion or self.recommendation
        alone = alone or self.encoder_num_layers or self.embedding_size
        if self.mtp_num_layers and (self.encoder or self.bare or alone):
            raise self._reject("mtp_num_layers", "0 but in a language model that predicts tokens")
        if self.causal == self.encoder:
            raise self._reject("causal", f"{not self.encoder}, as encoder is {self.encoder}")
        for field in ("pooler", "mlm_transform"):
            if getattr(self, field) and not self.encoder:
                raise self._reject(field, "False in a decoder")
        if (self.sliding_window is not None) != ("local" in self.mixers):
            wanted = "a window if, and only if, mixers has local layers"
            raise self._reject("sliding_window", wanted)
        if (self.attention_chunk_size is not None) != ("chunked" in self.mixers):
            wanted = "a size if, and only if, mixers has chunked layers"
            raise self._reject("attention_chunk_size", wanted)
        if not self.gated and (self.glu_linear_offset or self.activation_func_clamp_value):
            field = "glu_linear_offset" if self.glu_linear_offset else "activation_func_clamp_value"
            raise self._reject(
                field, f"{0 if self.glu_linear_offset else None} in an MLP without gate"
            )

    def _check_encoder(self) -> None:
        """What an encoder before the layers needs, and relative positions."""
        relative = self.position == "relative"
        if relative != (self.relative_buckets > 0):
            raise self._reject("relative_buckets", "some if, and only if, positions are relative")
        if relative and not self.encoder_num_layers:
            raise self._reject("position", "another but in an encoder with a decoder")
        if not self.encoder_num_layers:
            return
        if {*self.mixers} != {"global"} or self.num_experts or self.modules or self.kv_lora_rank:
            raise self._reject("encoder_num_layers", "0 with layers other than attention and MLPs")
        if self.parallel_block or self.embedding_size or self.tower or self.pooler:
            raise self._reject("encoder_num_layers", "0 but in a decoder of usual layers")
        if self.position not in ("relative", "none"):
            raise self._reject("position", "relative or none with an encoder")

    def _check_attention(self) -> None:
        heads = self.num_attention_heads
        if heads % self.num_query_groups:
            wanted = f"a divisor of num_attention_heads {heads}: {divisors(heads)}"
            raise self._reject("num_query_groups", wanted)
        if self.kv_lora_rank:
            self._check_latents()
            return
        for field in _OF_LATENTS:
            if getattr(self, field):
                raise self._reject(field, "0 where kv_lora_rank is 0")
        rotated = self.rotary_channels
        if self.position == "rope" and (rotated < 2 or rotated % 2):
            raise self._reject(
                "kv_channels", f"one of which rope turns an even part, not {rotated} channels"
            )

    def _check_latents(self) -> None:
        """What multi-head latent attention is made of, and what it has no place for."""
        heads, rotated = self.num_attention_heads, self.qk_rope_head_dim
        if self.num_query_groups != heads:
            raise self._reject("num_query_groups", f"the {heads} heads of latent attention")
        if not 0 < rotated < self.kv_channels or rotated % 2:
            wanted = f"an even part of the {self.kv_channels} channels of a head (kv_channels)"
            raise self._reject("qk_rope_head_dim", wanted)
        if self.position not in ("rope", "none"):
            raise self._reject("position", "rope or none with latent attention")
        biases = ("qkv_bias", "attention_output_bias")
        others = ("qk_norm", "qk_l2_norm", "attention_sinks", "attention_gate", "parallel_block")
        for field in (*biases, *others):
            if getattr(self, field):
                raise self._reject(field, "False with latent attention")

    def _check_state_space(self) -> None:
        """What the model's recurrence is made of, and what another one has no place for."""
        state, kind = self.state_space, self.recurrence
        if len({*RECURRENCES} & self.kinds) > 1:
            raise self._reject("mixers", "one kind of recurrence in all layers that have one")
        given: object = state
        if isinstance(given, StateSpace) != (kind is not None) or (kind is None and state):
            raise self._reject("state_space", "sizes if, and only if, mixers has a recurrence")
        if state is None:
            return

        def reject(field: str, wanted: str) -> UserError:
            got = shown(getattr(state, field))
            return UserError(f"model {self.name}: state_space.{field} is {got}, wanted {wanted}")

        for field, least, most in _STATE_COUNTS:
            if not _whole(getattr(state, field), least, most):
                raise reject(field, f"a whole number from {least} to {most}")
        if state.inner_norms not in get_args(InnerNorms):
            raise reject("inner_norms", f"one of {', '.join(get_args(InnerNorms))}")
        for field in ("conv_bias", "gated_norm"):
            if type(getattr(state, field)) is not bool:
                raise reject(field, "True or False")
        if state.heads % state.groups:
            raise reject("groups", f"a divisor of heads {state.heads}: {divisors(state.heads)}")
        channels = ("head_width", "groups") if kind == "mamba" else ()
        for field in channels:
            if getattr(state, field) != 1:
                raise reject(field, "1 with mamba, whose channels are its heads")
        for field, of in (("dt_rank", "mamba"), ("gate_rank", "kimi_delta")):
            if (getattr(state, field) > 0) != (kind == of):
                raise reject(field, f"a width with {of}, and 0 with others")
        if state.inner_norms != "none" and kind != "mamba":
            raise reject("inner_norms", "none with anything but mamba")
        if not state.gated_norm and kind != "mamba2":
            raise reject("gated_norm", "True with anything but mamba2")

    def _check_shared_blocks(self) -> None:
        """Which layers have which block, and what the blocks have no place for."""
        shared = self.shared_blocks
        if shared is None:
            return
        if type(shared) is not SharedBlocks:
            raise self._reject("shared_blocks", "None, or blocks and the layers that share them")
        given: object = shared.layers
        most = LIMITS["num_layers"]
        if type(given) is not tuple or not all(_whole(n, 0, most) for n in shared.layers):
            raise self._reject("shared_blocks", "the number of a block for each layer, or 0")
        if {*shared.layers} | {0} != {*range(max(shared.layers, default=0) + 1)} or not any(
            shared.layers
        ):
            raise self._reject("shared_blocks", "blocks that are numbered 1, 2 and so on")
        if not _whole(shared.adapter_rank, 0, LIMITS["hidden_size"]):
            raise self._reject("shared_blocks", "a whole number as adapter_rank")
        adapts: object = shared.attention_adapter
        if type(adapts) is not bool or (adapts and not shared.adapter_rank):
            raise self._reject("shared_blocks", "attention_adapter with a rank, or without")
        if any(layer.block and layer.mixer == "none" for layer in self._layers()):
            raise self._reject("mixers", "some in every layer with a shared block")
        for field, absent in _NOT_SHARED.items():
            if getattr(self, field) != absent:
                raise self._reject(field, f"{absent} in a model with shared blocks")
        if self.position not in ("rope", "none"):
            raise self._reject("position", "rope or none in a model with shared blocks")

    def _layers(self) -> Iterator[Layer]:
        return map(self.layer, range(self.num_layers))

    def _check_experts(self) -> None:
        if not self.num_experts:
            for field, absent in _OF_EXPERTS.items():
                if getattr(self, field) != absent:
                    raise self._reject(field, f"{absent} where num_experts is 0")
            return
        if not 1 <= self.top_k <= self.num_experts:
            raise self._reject("top_k", f"a whole number from 1 to num_experts {self.num_experts}")
        if not self.moe_ffn_hidden_size:
            raise self._reject("moe_ffn_hidden_size", "the width of an expert, 1 or more")
        if self.parallel_block:
            raise self._reject("parallel_block", "False in a model with experts")
        if self.mlp_bias and self.shared_ffn_hidden_size:
            raise self._reject("mlp_bias", "False with shared experts")
        groups = self.num_expert_groups
        if self.num_experts % groups:
            wanted = f"a divisor of num_experts {self.num_experts}: {divisors(self.num_experts)}"
            raise self._reject("num_expert_groups", wanted)
        if self.topk_groups > groups:
            raise self._reject("topk_groups", f"at most num_expert_groups {groups}")
        chosen = self.topk_groups * (self.num_experts // groups)
        if self.top_k > chosen:
            raise self._reject("top_k", f"at most the {chosen} experts of a token's groups")
        if self.shared_expert_gate and not self.shared_ffn_hidden_size:
            raise self._reject("shared_expert_gate", "False without shared experts")


def resolve(name_or_path: str) -> ModelConfig:
    """The model of a preset's name, or of a config.json or a directory that holds one.

    A preset wins over a file of the same name; write `./gpt2` for the file.
    """
    from stagewright.model.hf.read import from_config  # hf reads files in terms of this module

    if name_or_path in PRESETS:
        return PRESETS[name_or_path]
    if name_or_path.endswith(".stg"):
        from stagewright.blocks.stg import load  # brings along the ops that modules are made of

        return load(name_or_path)
    if name_or_path and os.path.exists(name_or_path):
        return from_config(name_or_path)
    raise UserError(
        f"model {shown(name_or_path)} is neither a preset nor a path to a config.json or .stg file"
        f"{did_you_mean(name_or_path.lower(), PRESETS)}; "
        "run `stagewright models` for the presets, or give the path of a config.json or .stg file"
    )


def _whole(value: object, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _number(value: object) -> bool:
    """Whether this is a number one would write: NaN, infinity and 10**400 are not."""
    return isinstance(value, int | float) and type(value) is not bool and abs(value) < 1e9


_NESTED = {"vision": Vision, "diffusion": Diffusion, "recommendation": Recommendation}


def _presets() -> dict[str, ModelConfig]:
    found: dict[str, ModelConfig] = {}
    for style, rows in FAMILIES:
        for row in rows.strip().splitlines():
            name, *columns = row.split()
            sizes: dict[str, Any] = dict(zip(LIMITS, map(int, columns[: len(LIMITS)]), strict=True))
            for repository in columns[len(LIMITS) :]:
                sizes["source"] = f"https://huggingface.co/{repository}/blob/main/config.json"
            for field, kind in _NESTED.items():
                if field in style:
                    sizes[field] = kind(**style[field])
            if "tower" in style:
                sizes["tower"] = found[style["tower"]]
            found[name] = ModelConfig(name=name, **(style | sizes))
    return found


PRESETS: dict[str, ModelConfig] = _presets()
"""The models known by name, each as its paper or its published config.json has it."""
