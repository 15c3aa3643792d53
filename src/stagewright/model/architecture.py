"""The fields of a model and the properties that follow from them; `checks` has their rules."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from stagewright.model.fields import FRACTION, POSITIVE, PROBABILITY, Count, Excludes, Needs
from stagewright.model.layers import (
    ATTENTIONS,
    COMPRESSED,
    INDEXED,
    RECURRENCES,
    SIDE_BY_SIDE,
    DraftHead,
    Layer,
    Module,
    OwnSizes,
    Reach,
    Recurrence,
    SharedBlocks,
    StateSpace,
    Vision,
    module_of,
)
from stagewright.stored import Quantization

Position = Literal["rope", "learned", "alibi", "relative", "none"]
Norm = Literal["rmsnorm", "layernorm"]
NormPlacement = Literal["pre", "post", "sandwich", "output"]
Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "silu", "relu", "relu2"]
Router = Literal["softmax", "sigmoid", "sqrtsoftplus"]
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

MAX_EXPERTS = 2**16
_Layers = Annotated[int, Count(0, LIMITS["num_layers"])]
_Experts = Annotated[int, Count(0, MAX_EXPERTS)]
_Width = Annotated[int, Count(0, LIMITS["hidden_size"])]
_MlpWidth = Annotated[int, Count(0, LIMITS["ffn_hidden_size"])]
_HeadWidth = Annotated[int, Count(0, LIMITS["kv_channels"])]
_Window = Annotated[int | None, Count(1)]
_Probability = Annotated[float, PROBABILITY]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The sizes of a model and its mechanisms, unchecked; a `ModelConfig` is checked.

    Sizes count elements; the defaults are Llama's choices.
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
    norm_weight: bool = True
    """Norms have weights; without, they only normalize (OLMo)."""
    norm_placement: Annotated[NormPlacement, Excludes("shared blocks")] = "pre"
    """Before each of attention and MLP, after its residual sum, before and after (sandwich), or
    only behind what is added to the residual stream (output: OLMo 2, Exaone 4)."""
    residual_streams: Annotated[int, Count(1, 64), Excludes("shared blocks")] = 1
    """Copies of the residual stream, of which attention and MLP of each layer read a weighted sum
    and which they mix (manifold-constrained hyper-connections, arXiv 2512.24880)."""
    sinkhorn_iterations: Annotated[int, Count(1, 1000)] = 20
    """Steps that make the weights of the mix of several streams doubly stochastic."""
    parallel_block: Annotated[
        bool, Excludes("experts"), Excludes("latents", "shared blocks", "several streams")
    ] = False
    """Attention and MLP both read the block's input, and their outputs are summed."""
    parallel_norms: Annotated[int, Count(1, 2), Needs("parallel block")] = 1
    """Norms of a parallel block: one for both halves, or one each (Falcon's newer decoder)."""
    final_norm: bool = True
    embedding_norm: bool = False

    qkv_bias: Annotated[bool, Excludes("latents", "shared blocks")] = False
    attention_output_bias: Annotated[bool, Excludes("shared blocks")] = False
    mlp_bias: Annotated[bool, Excludes("shared experts", "shared blocks")] = False
    qk_norm: Annotated[bool, Excludes("latents", "shared blocks")] = False
    """An RMSNorm of kv_channels weights on every query head, and another on every key head."""
    qk_norm_over_heads: Annotated[bool, Needs("norms of queries and keys")] = False
    """Each of these two norms is over the channels of all its heads at once, and has a weight for
    each of them (OLMoE)."""
    qk_l2_norm: Annotated[bool, Excludes("latents", "shared blocks")] = False
    """Such a norm without weights, after rope and where there is rope (Llama 4)."""
    v_norm: Annotated[bool, Excludes("latents", "shared blocks")] = False
    """An RMSNorm without weights on every value head (Gemma 4)."""
    keys_are_values: Annotated[bool, Excludes("latents", "shared blocks")] = False
    """Values are the keys before their norm and rope: there is no matrix for values."""
    attention_sinks: Annotated[bool, Excludes("latents", "shared blocks")] = False
    """A learned score per head that takes its part of the softmax and has no value (gpt-oss)."""
    attention_gate: Annotated[bool, Excludes("latents", "shared blocks")] = False
    """A sigmoid of the layer's input multiplies the results of heads, channel by channel."""
    attention_gate_per_head: Annotated[bool, Needs("attention gate")] = False
    """The gate weighs whole heads, by a number for each (Step-3.7)."""
    attention_gate_bias: Annotated[bool, Needs("attention gate")] = False
    """The gate has a bias, as queries have where `qkv_bias` is set (Qwen3-Next)."""
    gated: bool = True
    """Three matrices, down(activation(gate) * up), instead of down(activation(up))."""
    activation: Activation = "silu"
    glu_linear_offset: Annotated[float, Needs("gate")] = 0.0
    """Offset of a gated MLP, added to the values that the gate multiplies."""
    activation_func_clamp_value: Annotated[float | None, POSITIVE, Needs("gate")] = None
    """Limit of a gated MLP: of the gate from above, of what it multiplies on both sides."""

    num_experts: _Experts = 0
    """Experts of a mixture-of-experts layer; 0: every layer is dense."""
    top_k: Annotated[_Experts, Needs("experts")] = 0
    """Experts that each token goes to."""
    moe_ffn_hidden_size: Annotated[_MlpWidth, Needs("experts")] = 0
    """Width inside one expert."""
    moe_latent_size: Annotated[_Width, Needs("experts")] = 0
    """Width of a space that experts work in, where it is not the model's: tokens are projected into
    it before they are sent, and results out of it (Nemotron 3 Super and Ultra)."""
    shared_ffn_hidden_size: Annotated[_MlpWidth, Needs("experts")] = 0
    """Width of the experts that every token goes to, together."""
    first_dense_layers: Annotated[_Layers, Needs("experts")] = 0
    """Layers before the first mixture-of-experts layer."""
    moe_layer_freq: Annotated[int, Count(1, LIMITS["num_layers"]), Needs("experts")] = 1
    """Period of layers with experts after those."""
    router: Annotated[Router, Needs("experts")] = "softmax"
    """Function that makes the weights of a token's experts of its scores."""
    norm_topk_prob: Annotated[bool, Needs("experts")] = True
    """The weights of a token's experts add up to one; otherwise they are those of all experts."""
    num_expert_groups: Annotated[int, Count(1, MAX_EXPERTS), Needs("experts")] = 1
    """Number of expert groups, for group-limited routing (DeepSeek-V2, V3)."""
    topk_groups: Annotated[int, Count(1, MAX_EXPERTS), Needs("experts")] = 1
    """Groups that a token may be routed to."""
    apply_probs: Annotated[ApplyProbs, Needs("experts")] = "experts"
    """Where the weights are multiplied: what experts compute, their input or their output."""
    expert_bias: Annotated[bool, Needs("experts")] = False
    """Added to the scores that choose experts, to balance their load without a loss."""
    expert_scale: Annotated[bool, Needs("experts")] = False
    """A learned factor of each expert's results (Gemma 4)."""
    router_bias: Annotated[bool, Needs("experts")] = False
    """A learned bias of the scores, unlike `expert_bias`."""
    shared_expert_gate: Annotated[bool, Needs("experts", "shared experts")] = False
    """The shared experts' sum is weighed by a sigmoid of its own (Qwen2-MoE)."""

    kv_lora_rank: Annotated[_Width, Excludes("shared blocks")] = 0
    """Width of the latent of keys and values (multi-head latent attention), or 0."""
    q_lora_rank: Annotated[_Width, Needs("latent queries")] = 0
    """Width of the latent of queries; 0: queries are projections of the hidden state."""
    latent_bias: Annotated[bool, Needs("latents")] = False
    """Projections to the latents and to the shared keys have biases."""
    qk_rope_head_dim: Annotated[_HeadWidth, Needs("latents")] = 0
    """Channels of kv_channels with rotary position, which all heads share for keys."""
    v_head_dim: Annotated[_HeadWidth, Excludes("shared blocks")] = 0
    """Width of a value head where it is not kv_channels."""

    o_groups: Annotated[int, Count(0, LIMITS["num_attention_heads"]), Excludes("latents")] = 0
    """Groups of heads, each of which is projected to o_lora_rank channels by itself, and these to
    the model's width. All heads read one row of each position as key and as value, which is
    normalized and turned in its last channels (DeepSeek-V4); 0: there are no groups."""
    o_lora_rank: Annotated[_Width, Needs("groups of heads")] = 0
    """Channels that a group's heads are projected to."""
    compress_rate_hca: Annotated[int, Count(0, 2**16), Needs("groups of heads")] = 0
    """Positions that have one compressed key in `compressed` layers, which a query sees all of."""
    compress_rate_csa: Annotated[int, Count(0, 2**16), Needs("groups of heads")] = 0
    """The same in `compressed_indexed` layers, whose indexer chooses index_topk compressed keys; a
    key is made of its positions and as many before them."""

    index_topk: Annotated[int, Count(0, 2**24)] = 0
    """Keys that each query reads, of all before it, where an indexer scores and chooses them
    (DeepSeek-V3.2, arXiv 2512.02556); 0: there is no indexer."""
    index_block_size: Annotated[int, Count(1, 2**16), Needs("indexer"), Excludes("latents")] = 1
    """Positions of a block. Keys are chosen in blocks, for each key-value head by a head of the
    indexer, the query's own block always among them (MiniMax-M3)."""
    index_n_heads: Annotated[int, Count(0, LIMITS["num_attention_heads"]), Needs("indexer")] = 0
    """Heads of the indexer's queries; its key has one."""
    index_head_dim: Annotated[_HeadWidth, Needs("indexer")] = 0
    """Width of the indexer's queries and keys."""
    mtp_num_layers: Annotated[
        int,
        Count(0, 16),
        Needs("token prediction"),
        Excludes("shared blocks", "own sizes", "several streams"),
    ] = 0
    """Layers that predict one more token each (multi-token prediction, arXiv 2412.19437)."""
    draft_head: Annotated[DraftHead, Needs("token prediction"), Excludes("own sizes")] = "none"
    """The model drafts tokens for another one, whose hidden states it reads."""
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
    """The mixer of each layer, repeated over the layers: attention (to all, to all without
    positions: nope, within a window or a chunk), a recurrence, both side by side or none."""
    state_space: StateSpace | None = None
    """Sizes of the recurrence, in a model that has one."""
    attention_softcap: Annotated[float | None, POSITIVE] = None
    logit_softcap: Annotated[float | None, POSITIVE] = None

    mlps: tuple[str, ...] = ()
    """The MLP of each layer, repeated over the layers: dense, experts or none. Empty: experts where
    `num_experts`, `first_dense_layers` and `moe_layer_freq` have them, else dense."""
    modules: tuple[Module, ...] = ()
    """Users' own parts of layers, which `mixers` and `mlps` name, or the blocks of `chain`."""
    chain: Annotated[tuple[str, ...], Excludes("shared blocks", "own sizes")] = ()
    """Modules that are all blocks, in order: `embed`, `32 layer`, `head`; else: none."""
    shared_blocks: SharedBlocks | None = None
    """Blocks before the mixers of some layers, which share them."""
    own_sizes: Annotated[tuple[OwnSizes, ...], Excludes("shared blocks")] = ()
    """Sizes in which some layers differ from the others (Gemma 4, DeciLM)."""
    layers_with_own_sizes: tuple[int, ...] = (0,)
    """Number of the `own_sizes` of each layer, from 1 and repeated over the layers; 0: none."""
    bare: Annotated[bool, Excludes("shared blocks")] = False
    """Layers and nothing else: no norms and residual sums around, no embedding, no loss."""

    vision: Annotated[Vision | None, Excludes("shared blocks")] = None
    """Reads images and no text."""
    tower: Annotated[Architecture | None, Excludes("shared blocks")] = None
    """A vision model whose output stands before the text (LLaVA, arXiv 2310.03744)."""

    hidden_dropout: _Probability = 0.0
    attention_dropout: _Probability = 0.0
    embedding_dropout: _Probability = 0.0

    quantization: Quantization | None = None
    """Storage of the matrices in the published checkpoint; None: in 16 bits."""

    source: str = ""
    """The address or the paper of the figures."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """Assumptions and omissions of the reader, for a model from a file."""

    @property
    def rotary_channels(self) -> int:
        """Channels of a head that rope turns."""
        return int(self.kv_channels * self.rotary_fraction)

    def layer(self, index: int) -> Layer:
        """The kinds and sizes of this layer."""
        assert 0 <= index < self.num_layers, index
        mixer, module = self.mixers[index % len(self.mixers)], module_of(self.chain, index)
        shared = self.shared_blocks.layers if self.shared_blocks else (0,)
        block = shared[index % len(shared)]
        sizes = self.layers_with_own_sizes[index % len(self.layers_with_own_sizes)]
        after = index - self.first_dense_layers
        routed = self.num_experts > 0 and after >= 0 and after % self.moe_layer_freq == 0
        mlps = self.mlps or ("experts" if routed else "dense",)
        return Layer(mixer, mlps[index % len(mlps)], block=block, sizes=sizes, module=module)

    @property
    def head_counts(self) -> tuple[tuple[int, int], ...]:
        """The numbers of heads and of key/value heads, of each kind of layer."""
        of_model = (self.num_attention_heads, self.num_query_groups)
        own = (
            (sizes.num_attention_heads or of_model[0], sizes.num_query_groups or of_model[1])
            for sizes in self.own_sizes
        )
        return tuple(dict.fromkeys((of_model, *own)))

    @property
    def shared_query_groups(self) -> int:
        """The key/value heads that tp may split in all layers: the gcd of the layers' numbers."""
        return math.gcd(*(groups for _, groups in self.head_counts))

    def reach(self, mixer: str) -> Reach:
        """The keys that queries of a layer with this mixer see."""
        window = self.sliding_window if mixer == "local" else None
        chunk = self.attention_chunk_size if mixer == "chunked" else None
        if mixer in INDEXED:
            return Reach(top=self.index_topk, block=self.index_block_size)
        if mixer == "compressed_indexed":
            return Reach(top=self.index_topk, compress=self.compress_rate_csa)
        if mixer == "compressed":
            return Reach(compress=self.compress_rate_hca)
        return Reach(window or 0, chunk or 0)

    def all_reaches(self, mixer: str) -> tuple[Reach, ...]:
        """The reach of a layer with this mixer, and those of its other keys: of a window next to
        compressed keys, and of all compressed keys that an indexer scores."""
        reach = self.reach(mixer)
        if mixer not in COMPRESSED:
            return (reach,)
        return (reach, reach._replace(top=0), self.reach("local"))

    @property
    def positions_of_a_key(self) -> int:
        """The number of positions of which sequences are multiples if all have a compressed key."""
        return math.lcm(self.compress_rate_hca or 1, self.compress_rate_csa or 1)

    @property
    def reaches(self) -> tuple[Reach, ...]:
        """The reaches of all layers; the one to all positions is always there and first."""
        of_layers = (reach for mixer in self.mixers for reach in self.all_reaches(mixer))
        return tuple(dict.fromkeys((Reach(), *of_layers)))

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
        """True if some layers have a shared block."""
        given = self.shared_blocks.layers if self.shared_blocks else ()
        return any(given[: self.num_layers])

    @property
    def kinds(self) -> frozenset[str]:
        """Every kind of mixer that some layer has, alone or beside another."""
        pairs: Mapping[str, tuple[str, ...]] = {**SIDE_BY_SIDE}
        return frozenset(kind for mixer in self.mixers for kind in pairs.get(mixer, (mixer,)))

    @property
    def attends(self) -> bool:
        """True if some layers have attention."""
        return self.shared_blocks is not None or not ATTENTIONS.isdisjoint(self.kinds)

    @property
    def predicts_tokens(self) -> bool:
        """True for a decoder that reads and predicts text, with no encoder before it."""
        other = self.vision or self.encoder or self.bare
        return not (other or self.encoder_num_layers or self.embedding_size)

    @property
    def sees_all(self) -> bool:
        """True if the attention of some layer sees all positions before it."""
        mixers = {*self.mixers[: self.num_layers]}
        return any(self.reach(mixer) == Reach() for mixer in mixers & ATTENTIONS)

    @property
    def recurrence(self) -> Recurrence | None:
        """The kind of layer that carries a state, in a model that has some."""
        return next((kind for kind in RECURRENCES if kind in self.kinds), None)


NESTED: Mapping[str, type] = {
    "state_space": StateSpace,
    "shared_blocks": SharedBlocks,
    "vision": Vision,
    "quantization": Quantization,
}
"""Fields of a model with fields of their own; another is `tower`, a model."""
