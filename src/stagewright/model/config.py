"""What a model is made of: its sizes and its architecture.

A `ModelConfig` says nothing of parallelism, number formats or batch; it counts no parameters
either, the graph does. `presets` has published models, `catalog.resolve` reads others.

>>> from stagewright.model.presets import PRESETS
>>> PRESETS["llama3.1-70b"].num_query_groups
8
>>> [PRESETS["gemma2-9b"].layer(i).mixer for i in range(3)]
['local', 'global', 'local']
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from dataclasses import field as _field
from reprlib import repr as shown  # short whatever the value: the input of a user may be huge
from typing import Annotated, Any, Literal, NamedTuple, get_args

from stagewright.algebra.notation import Tensor
from stagewright.errors import UserError, divisors
from stagewright.model.fields import (
    FRACTION,
    POSITIVE,
    PROBABILITY,
    Count,
    Excludes,
    Needs,
    rules,
)
from stagewright.model.shared_blocks import SharedBlocks
from stagewright.model.state_space import StateSpace

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
ATTENTIONS = frozenset(get_args(Attention))
RECURRENCES: tuple[Recurrence, ...] = get_args(Recurrence)
SIDE_BY_SIDE: Mapping[SideBySide, tuple[Attention, Recurrence]] = {
    "global+mamba2": ("global", "mamba2")
}
"""Mixers that are two: both read the layer's input, and their outputs are summed."""
_OF_ATTENTION = ("num_attention_heads", "num_query_groups", "kv_channels")

_Layers = Annotated[int, Count(0, LIMITS["num_layers"])]
_Experts = Annotated[int, Count(0, MOST_EXPERTS)]
_Width = Annotated[int, Count(0, LIMITS["hidden_size"])]
_MlpWidth = Annotated[int, Count(0, LIMITS["ffn_hidden_size"])]
_HeadWidth = Annotated[int, Count(0, LIMITS["kv_channels"])]
_Window = Annotated[int | None, Count(1)]
_Probability = Annotated[float, PROBABILITY]


@dataclass(frozen=True, slots=True)
class Mechanism:
    """Something that a model has or has not, which decides what its fields may be."""

    present: Callable[[ModelConfig], bool]
    without: str
    """Ends a sentence about a field that `Needs` the mechanism."""
    beside: str
    """Ends a sentence about a field that `Excludes` the mechanism."""


MECHANISMS: Mapping[str, Mechanism] = {
    "experts": Mechanism(
        lambda m: m.num_experts > 0, "where num_experts is 0", "in a model with experts"
    ),
    "shared experts": Mechanism(
        lambda m: m.shared_ffn_hidden_size > 0, "without shared experts", "with shared experts"
    ),
    "latents": Mechanism(
        lambda m: m.kv_lora_rank > 0, "where kv_lora_rank is 0", "with latent attention"
    ),
    "norms of queries and keys": Mechanism(
        lambda m: m.qk_norm, "where qk_norm is False", "with norms of queries and keys"
    ),
    "shared blocks": Mechanism(
        lambda m: m.shared_blocks is not None,
        "without shared blocks",
        "in a model with shared blocks",
    ),
    "encoder": Mechanism(lambda m: m.encoder, "in a decoder", "in an encoder"),
    "gate": Mechanism(lambda m: m.gated, "in an MLP without gate", "in a gated MLP"),
    "parallel block": Mechanism(
        lambda m: m.parallel_block, "where the block is not parallel", "in a parallel block"
    ),
    "learned positions": Mechanism(
        lambda m: m.position == "learned",
        "where positions are not learned",
        "where positions are learned",
    ),
    "token prediction": Mechanism(
        lambda m: m.predicts_tokens,
        "but in a language model that predicts tokens",
        "in a language model that predicts tokens",
    ),
}
"""What `Needs` and `Excludes` in the annotations of `ModelConfig` name."""


class Layer(NamedTuple):
    """What a layer is made of: how positions mix, and the MLP that works on each position.

    Mixer and MLP are kinds that Stagewright has, or names of the model's `modules`.
    """

    mixer: str = "global"
    mlp: str = "dense"
    ahead: int = 0
    """In multi-token prediction: how many tokens after the next one the layer predicts."""
    block: int = 0
    """The shared block before the mixer, counted from 1; 0: there is no shared block."""


class Reach(NamedTuple):
    """Which of the positions before it a query sees: all, those of a window, or of its chunk."""

    window: int = 0
    """Positions of the sliding window, the query's own included; 0: there is no window."""
    chunk: int = 0
    """Positions of a chunk, outside which a query sees nothing; 0: there are no chunks."""

    @property
    def kind(self) -> str:
        """Suffix of this reach's cache and size names: `_local`, `_chunked` or none."""
        return "_local" if self.window else "_chunked" if self.chunk else ""


@dataclass(frozen=True, slots=True, eq=False)
class Module:
    """A part of a layer that a user has written, as a `.stg` file or as a Python function.

    `build(builder, inputs by name)` makes the nodes of the module, whose parameters and values are
    called `MODULE.name`. The first input is the hidden state; all others come from outside.
    """

    name: str
    build: Callable[[Any, Mapping[str, Any]], Any]
    inputs: tuple[tuple[str, tuple[Any, ...], str], ...] = (("x", ("B", "S", "M"), ""),)
    """Name, sizes of the dims and data type ("": that of the run)."""
    sizes: Mapping[str, int] = _field(default_factory=dict[str, int])
    """Numbers of the sizes that the module declares itself."""
    table: Mapping[str, Tensor] = _field(default_factory=dict[str, Tensor])
    """Layouts of the module's values and parameters, by full name."""
    output: str = "y"
    text: str = ""
    """The text of the `.stg` file that defines the module."""


@dataclass(frozen=True, slots=True)
class Vision:
    """Images as a sequence of square patches (ViT, arXiv 2010.11929), and what is made of them."""

    image_size: Annotated[int, Count(1)]
    patch_size: Annotated[int, Count(1)]
    channels: Annotated[int, Count(1)] = 3
    patch_bias: bool = True
    classes: Annotated[int, Count(0)] = 0
    """Classes of the classifier on the first position; 0: there is no classifier, as in a tower."""

    @property
    def patches(self) -> int:
        """Positions of an image, besides the one that stands before them for all of it."""
        return (self.image_size // self.patch_size) ** 2


@dataclass(frozen=True, slots=True)
class Diffusion:
    """Noisy images as patches, modulated by step and class (DiT, arXiv 2212.09748)."""

    image_size: Annotated[int, Count(1)]
    """Height and width of the latent image."""
    patch_size: Annotated[int, Count(1)]
    channels: Annotated[int, Count(1)]
    classes: Annotated[int, Count(1)]
    """Classes, the one that stands for no class included."""
    out_channels: Annotated[int, Count(1)]
    """Channels of the predicted noise, and of its variance where that is learned."""
    waves: Annotated[int, Count(1)] = 256
    """Sines and cosines that embed a time step."""

    @property
    def patches(self) -> int:
        """Positions of an image; one more stands before them, for step and class."""
        return (self.image_size // self.patch_size) ** 2


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Tables looked up by features, MLPs around them (DLRM, arXiv 1906.00091)."""

    rows: Annotated[tuple[int, ...], Count(1)]
    """Rows of each table."""
    dense: Annotated[int, Count(1)]
    """Number of numeric features."""
    bottom: Annotated[tuple[int, ...], Count(1)]
    """Widths of the MLP over the numeric features; the last is the width of a row."""
    top: Annotated[tuple[int, ...], Count(1)]
    """Widths of the MLP over the products of all pairs of rows; the last is 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A transformer on one device. Sizes count elements; the defaults are Llama's choices.

    >>> from stagewright.model.presets import PRESETS
    >>> tiny = PRESETS["llama2-7b"].with_overrides(num_layers=2)
    >>> tiny.num_layers, tiny.hidden_size
    (2, 4096)
    """

    name: str
    num_layers: Annotated[int, Count(1, LIMITS["num_layers"])]
    hidden_size: Annotated[int, Count(1, LIMITS["hidden_size"])]
    ffn_hidden_size: Annotated[int, Count(1, LIMITS["ffn_hidden_size"])]
    """Width between the two (gated: three) matrices of the MLP; gate and up have it each."""
    num_attention_heads: Annotated[int, Count(1, LIMITS["num_attention_heads"])]
    num_query_groups: Annotated[int, Count(1, LIMITS["num_query_groups"])]
    """Key/value heads: all heads (multi-head), one (multi-query) or a divisor (grouped-query)."""
    kv_channels: Annotated[int, Count(1, LIMITS["kv_channels"])]
    """Width of one head; heads x kv_channels need not be hidden_size."""
    vocab_size: Annotated[int, Count(1, LIMITS["vocab_size"])]
    """Rows of the embedding as published, before any padding for tensor parallelism."""
    max_position_embeddings: Annotated[int, Count(1, LIMITS["max_position_embeddings"])]
    """Longest sequence in tokens; the rows of the table where positions are learned."""

    position: Position = "rope"
    relative_buckets: Annotated[int, Count(0, 2**16)] = 0
    """Distances that have a learned bias per head, of scores, where positions are relative (T5)."""
    position_offset: Annotated[int, Count(0), Needs("learned positions")] = 0
    """Extra rows of the learned table (OPT: 2); it has max_position_embeddings + these."""
    rotary_fraction: Annotated[float, FRACTION] = 1.0
    """The part of each head that rope turns."""

    norm: Norm = "rmsnorm"
    norm_bias: bool = False
    norm_placement: Annotated[NormPlacement, Excludes("shared blocks")] = "pre"
    """Before each of attention and MLP, after its residual sum, or before and after (sandwich)."""
    parallel_block: Annotated[bool, Excludes("experts"), Excludes("latents", "shared blocks")] = (
        False
    )
    """Attention and MLP both read the block's input, and their outputs are summed."""
    parallel_norms: Annotated[int, Count(1, 2), Needs("parallel block")] = 1
    """Of a parallel block: one norm for both halves, or one each (Falcon's newer decoder)."""
    final_norm: bool = True
    embedding_norm: bool = False

    qkv_bias: Annotated[bool, Excludes("latents", "shared blocks")] = False
    attention_output_bias: Annotated[bool, Excludes("latents", "shared blocks")] = False
    mlp_bias: Annotated[bool, Excludes("shared experts", "shared blocks")] = False
    qk_norm: Annotated[bool, Excludes("latents", "shared blocks")] = False
    """An RMSNorm of kv_channels weights on every query head, and another on every key head."""
    qk_norm_over_heads: Annotated[bool, Needs("norms of queries and keys")] = False
    """Each of these two norms is over the channels of all its heads at once, and has a weight for
    each of them (OLMoE)."""
    qk_l2_norm: Annotated[bool, Excludes("latents", "shared blocks")] = False
    """Such a norm without weights, after rope and where there is rope (Llama 4)."""
    attention_sinks: Annotated[bool, Excludes("latents", "shared blocks")] = False
    """A learned score per head that takes its part of the softmax and has no value (gpt-oss)."""
    attention_gate: Annotated[bool, Excludes("latents", "shared blocks")] = False
    """What the heads return is weighed, channel by channel, by a sigmoid of the layer's input."""
    gated: bool = True
    """Three matrices, down(activation(gate) * up), instead of down(activation(up))."""
    activation: Activation = "silu"
    glu_linear_offset: Annotated[float, Needs("gate")] = 0.0
    """Of a gated MLP, added to what the gate weighs."""
    activation_func_clamp_value: Annotated[float | None, POSITIVE, Needs("gate")] = None
    """Of a gated MLP: neither gate nor what it weighs is above this, nor the latter below minus."""

    num_experts: _Experts = 0
    """Experts of a mixture-of-experts layer; 0: every layer is dense."""
    top_k: Annotated[_Experts, Needs("experts")] = 0
    """Experts that each token goes to."""
    moe_ffn_hidden_size: Annotated[_MlpWidth, Needs("experts")] = 0
    """Width inside one expert."""
    shared_ffn_hidden_size: Annotated[_MlpWidth, Needs("experts")] = 0
    """Width of the experts that every token goes to, together."""
    first_dense_layers: Annotated[_Layers, Needs("experts")] = 0
    """Layers before the first mixture-of-experts layer."""
    moe_layer_freq: Annotated[int, Count(1, LIMITS["num_layers"]), Needs("experts")] = 1
    """Of the layers after those, every how many has experts."""
    router: Annotated[Router, Needs("experts")] = "softmax"
    """How a token's scores become the weights of its experts."""
    norm_topk_prob: Annotated[bool, Needs("experts")] = True
    """The weights of a token's experts add up to one; otherwise they are those of all experts."""
    num_expert_groups: Annotated[int, Count(1, MOST_EXPERTS), Needs("experts")] = 1
    """Group-limited routing (DeepSeek-V2, V3): experts are in so many groups,"""
    topk_groups: Annotated[int, Count(1, MOST_EXPERTS), Needs("experts")] = 1
    """of which a token goes to so many."""
    apply_probs: Annotated[ApplyProbs, Needs("experts")] = "experts"
    """Where the weights are multiplied: what experts compute, their input or their output."""
    expert_bias: Annotated[bool, Needs("experts")] = False
    """Added to the scores that choose experts, to balance their load without a loss."""
    router_bias: Annotated[bool, Needs("experts")] = False
    """A learned bias of the scores, unlike `expert_bias`."""
    shared_expert_gate: Annotated[bool, Needs("experts", "shared experts")] = False
    """The shared experts' sum is weighed by a sigmoid of its own (Qwen2-MoE)."""

    kv_lora_rank: Annotated[_Width, Excludes("shared blocks")] = 0
    """Width of the latent that keys and values are made of (multi-head latent attention), or 0."""
    q_lora_rank: Annotated[_Width, Needs("latents")] = 0
    """Likewise of queries; 0: queries are made of the hidden state."""
    qk_rope_head_dim: Annotated[_HeadWidth, Needs("latents")] = 0
    """Of kv_channels, the part with rotary position, which all heads share for keys."""
    v_head_dim: Annotated[_HeadWidth, Needs("latents")] = 0
    """Width of a value head where it is not kv_channels."""

    mtp_num_layers: Annotated[
        int, Count(0, 16), Needs("token prediction"), Excludes("shared blocks")
    ] = 0
    """Layers that predict one more token each (multi-token prediction, arXiv 2412.19437)."""
    tied_embeddings: bool = False
    """The output projection uses the embedding's matrix."""
    lm_head_bias: bool = False
    token_types: Annotated[int, Count(0)] = 0
    """Rows of a second, summed embedding (BERT's segments: 2)."""
    pooler: Annotated[bool, Needs("encoder")] = False
    """BERT's square layer with tanh on the first token."""
    mlm_transform: Annotated[bool, Needs("encoder")] = False
    """BERT's square layer, activation and norm before the output projection."""
    embedding_size: Annotated[int | None, Count(1), Excludes("shared blocks")] = None
    """Width of the embedding where it is not hidden_size: bias-free projections in and out."""

    encoder_num_layers: Annotated[_Layers, Excludes("shared blocks")] = 0
    """Layers of an encoder, whose output every layer attends to besides (T5, arXiv 1910.10683)."""
    causal: bool = True
    encoder: bool = False
    sliding_window: _Window = None
    """Positions a local layer's query sees, itself included."""
    attention_chunk_size: _Window = None
    """Positions of a chunk, of which a chunked layer's query sees its own (Llama 4)."""
    mixers: tuple[str, ...] = ("global",)
    """What mixes positions in each layer, repeated over them: attention (to all, to all without
    positions: nope, within a window or a chunk), a recurrence, both side by side or none."""
    state_space: StateSpace | None = None
    """Sizes of the recurrence, in a model that has one."""
    attention_softcap: Annotated[float | None, POSITIVE] = None
    logit_softcap: Annotated[float | None, POSITIVE] = None

    mlps: tuple[str, ...] = ()
    """What works on each position in each layer, repeated over them: dense, experts or none. Empty:
    experts where `num_experts`, `first_dense_layers` and `moe_layer_freq` have them, else dense."""
    modules: tuple[Module, ...] = ()
    """Users' own parts of layers, which `mixers` and `mlps` name."""
    shared_blocks: SharedBlocks | None = None
    """What some layers have before their mixers, and share."""
    bare: Annotated[bool, Excludes("shared blocks")] = False
    """Layers and nothing else: no norms and residual sums around, no embedding, no loss."""

    vision: Annotated[Vision | None, Excludes("shared blocks")] = None
    """Reads images and no text."""
    tower: Annotated[ModelConfig | None, Excludes("shared blocks")] = None
    """A vision model whose output stands before the text (LLaVA, arXiv 2310.03744)."""
    diffusion: Annotated[Diffusion | None, Excludes("shared blocks")] = None
    """Removes noise from images."""
    recommendation: Recommendation | None = None
    """No transformer at all: tables and MLPs."""

    hidden_dropout: _Probability = 0.0
    attention_dropout: _Probability = 0.0
    embedding_dropout: _Probability = 0.0

    source: str = ""
    """The address or the paper of the figures."""

    def __post_init__(self) -> None:
        """Refuse what no model can be."""
        self._check_values()
        self._check_mechanisms()
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
        """Every mixer and every MLP that some layer has, those of shared blocks included."""
        kinds = frozenset(x for i in range(self.num_layers) for x in self.layer(i)[:2])
        return kinds | {"global", "dense"} if self.shares else kinds

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
        a `blocks.builder.Builder`.
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
    def predicts_tokens(self) -> bool:
        """Whether this is a decoder that reads and predicts text, with no encoder before it."""
        other = self.vision or self.diffusion or self.recommendation or self.encoder or self.bare
        return not (other or self.encoder_num_layers or self.embedding_size)

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

    def _reject_nested(self, field: str, inner: str, wanted: str) -> UserError:
        got = shown(getattr(getattr(self, field), inner))
        return UserError(f"model {self.name}: {field}.{inner} is {got}, wanted {wanted}")

    def _check_values(self) -> None:
        """Each field by itself: its type and its limits."""
        self._check_patterns()
        absent = () if self.attends else _OF_ATTENTION
        dense = "dense" in (self.mlps or ("dense",)) or self.shared_blocks
        absent += () if dense else ("ffn_hidden_size",)
        for field, rule in rules(ModelConfig).items():
            rule = replace(rule, count=Count(0, LIMITS[field])) if field in absent else rule
            if wanted := rule.wanted(getattr(self, field)):
                raise self._reject(field, wanted)
        for field, kind in NESTED.items():
            value: object = getattr(self, field)
            if value is None:
                continue
            if type(value) is not kind:
                raise self._reject(field, f"None or a {kind.__name__}")
            for inner, rule in rules(kind).items():
                if wanted := rule.wanted(getattr(value, inner)):
                    raise self._reject_nested(field, inner, wanted)

    def _check_patterns(self) -> None:
        names = tuple(m.name for m in self.modules)
        known = (*get_args(Attention), *RECURRENCES, *SIDE_BY_SIDE, "none", *names)
        self._check_kinds("mixers", known, least=1)
        self._check_kinds("mlps", (*get_args(FeedForward), *names), least=0)

    def _check_kinds(self, field: str, known: tuple[str, ...], least: int) -> None:
        kinds: tuple[object, ...] = getattr(self, field)
        right = type(kinds) is tuple and len(kinds) >= least
        if not right or any(kind not in known for kind in kinds):
            wanted = f"a tuple of {', '.join(map(repr, known))}" + ", not empty" * least
            raise self._reject(field, wanted)

    def _check_mechanisms(self) -> None:
        """A field has its default where it means nothing, as its annotation says."""
        present = {name: mechanism.present(self) for name, mechanism in MECHANISMS.items()}
        for field, rule in rules(ModelConfig).items():
            if getattr(self, field) == rule.default:
                continue
            for name in rule.needs:
                if not present[name]:
                    raise self._reject(field, f"{rule.default} {MECHANISMS[name].without}")
            for name in rule.excludes:
                if present[name]:
                    raise self._reject(field, f"{rule.default} {MECHANISMS[name].beside}")

    def _check_combinations(self) -> None:
        """Fields that have to agree with each other."""
        if self.attends:
            self._check_attention()
        self._check_state_space()
        self._check_shared_blocks()
        self._check_experts()
        if any(layer[:2] == ("none", "none") for layer in self._layers()):
            raise self._reject("mlps", "something in every layer whose mixer is none")
        if self.norm_bias and self.norm == "rmsnorm":
            raise self._reject("norm_bias", "False: an rmsnorm has no bias")
        if self.parallel_block and self.norm_placement != "pre":
            raise self._reject("norm_placement", "pre in a parallel block")
        self._check_encoder()
        if self.causal == self.encoder:
            raise self._reject("causal", f"{not self.encoder}, as encoder is {self.encoder}")
        if (self.sliding_window is not None) != ("local" in self.mixers):
            wanted = "a window if, and only if, mixers has local layers"
            raise self._reject("sliding_window", wanted)
        if (self.attention_chunk_size is not None) != ("chunked" in self.mixers):
            wanted = "a size if, and only if, mixers has chunked layers"
            raise self._reject("attention_chunk_size", wanted)

    def _check_encoder(self) -> None:
        """Relative positions, and an encoder whose output the layers attend to."""
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
        rotated = self.rotary_channels
        if self.position == "rope" and (rotated < 2 or rotated % 2):
            raise self._reject(
                "kv_channels", f"one of which rope turns an even part, not {rotated} channels"
            )

    def _check_latents(self) -> None:
        """Sizes of multi-head latent attention."""
        heads, rotated = self.num_attention_heads, self.qk_rope_head_dim
        if self.num_query_groups != heads:
            raise self._reject("num_query_groups", f"the {heads} heads of latent attention")
        if not 0 < rotated < self.kv_channels or rotated % 2:
            wanted = f"an even part of the {self.kv_channels} channels of a head (kv_channels)"
            raise self._reject("qk_rope_head_dim", wanted)
        if self.position not in ("rope", "none"):
            raise self._reject("position", "rope or none with latent attention")

    def _check_state_space(self) -> None:
        """Sizes of the recurrence, and those that only another recurrence has."""
        state, kind = self.state_space, self.recurrence
        if len({*RECURRENCES} & self.kinds) > 1:
            raise self._reject("mixers", "one kind of recurrence in all layers that have one")
        if (state is None) != (kind is None):
            raise self._reject("state_space", "sizes if, and only if, mixers has a recurrence")
        if state is None:
            return

        def reject(field: str, wanted: str) -> UserError:
            return self._reject_nested("state_space", field, wanted)

        if state.heads % state.groups:
            raise reject("groups", f"a divisor of heads {state.heads}: {divisors(state.heads)}")
        channels = ("head_width", "groups") if kind == "mamba" else ()
        for field in channels:
            if getattr(state, field) != 1:
                raise reject(field, "1 with mamba, whose channels are its heads")
        for field, recurrence in (("dt_rank", "mamba"), ("gate_rank", "kimi_delta")):
            if (getattr(state, field) > 0) != (kind == recurrence):
                raise reject(field, f"a width with {recurrence}, and 0 with others")
        if state.inner_norms != "none" and kind != "mamba":
            raise reject("inner_norms", "none with anything but mamba")
        if not state.gated_norm and kind != "mamba2":
            raise reject("gated_norm", "True with anything but mamba2")

    def _check_shared_blocks(self) -> None:
        """Which layers have which block."""
        shared = self.shared_blocks
        if shared is None:
            return
        if {*shared.layers} | {0} != {*range(max(shared.layers, default=0) + 1)} or not any(
            shared.layers
        ):
            raise self._reject("shared_blocks", "blocks that are numbered 1, 2 and so on")
        if shared.attention_adapter and not shared.adapter_rank:
            raise self._reject("shared_blocks", "attention_adapter with a rank, or without")
        if any(layer.block and layer.mixer == "none" for layer in self._layers()):
            raise self._reject("mixers", "some in every layer with a shared block")
        if self.position not in ("rope", "none"):
            raise self._reject("position", "rope or none in a model with shared blocks")

    def _check_experts(self) -> None:
        if not self.num_experts:
            return
        if not 1 <= self.top_k <= self.num_experts:
            raise self._reject("top_k", f"a whole number from 1 to num_experts {self.num_experts}")
        if not self.moe_ffn_hidden_size:
            raise self._reject("moe_ffn_hidden_size", "the width of an expert, 1 or more")
        groups = self.num_expert_groups
        if self.num_experts % groups:
            wanted = f"a divisor of num_experts {self.num_experts}: {divisors(self.num_experts)}"
            raise self._reject("num_expert_groups", wanted)
        if self.topk_groups > groups:
            raise self._reject("topk_groups", f"at most num_expert_groups {groups}")
        chosen = self.topk_groups * (self.num_experts // groups)
        if self.top_k > chosen:
            raise self._reject("top_k", f"at most the {chosen} experts of a token's groups")

    def _layers(self) -> Iterator[Layer]:
        return map(self.layer, range(self.num_layers))


NESTED: Mapping[str, type] = {
    "state_space": StateSpace,
    "shared_blocks": SharedBlocks,
    "vision": Vision,
    "diffusion": Diffusion,
    "recommendation": Recommendation,
}
"""Fields of a model with fields of their own; another is `tower`, a model."""
