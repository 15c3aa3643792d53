"""What the fields of a model may be: each by itself, by the model's mechanisms, and together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from reprlib import repr as shown  # short whatever the value: the input of a user may be huge
from typing import get_args

from stagewright.errors import UserError, divisors
from stagewright.model.architecture import LIMITS, NESTED, Architecture
from stagewright.model.fields import Count, rules
from stagewright.model.layers import (
    ATTENTIONS,
    COMPRESSED,
    INDEXED,
    RECURRENCES,
    SIDE_BY_SIDE,
    Attention,
    ChainLink,
    FeedForward,
    Layer,
    Module,
    OwnSizes,
)

_OF_ATTENTION = ("num_attention_heads", "num_query_groups", "kv_channels")


@dataclass(frozen=True, slots=True)
class Mechanism:
    """Something that a model has or has not, which decides what its fields may be."""

    present: Callable[[Architecture], bool]
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
    "latent queries": Mechanism(
        lambda m: m.kv_lora_rank > 0 or m.o_groups > 0,
        "where kv_lora_rank and o_groups are 0",
        "where queries may be made of a latent",
    ),
    "several streams": Mechanism(
        lambda m: m.residual_streams > 1,
        "where residual_streams is 1",
        "with several residual streams",
    ),
    "groups of heads": Mechanism(
        lambda m: m.o_groups > 0, "where o_groups is 0", "where o_groups is not 0"
    ),
    "indexer": Mechanism(
        lambda m: m.index_topk > 0, "where index_topk is 0", "in a model with an indexer"
    ),
    "norms of queries and keys": Mechanism(
        lambda m: m.qk_norm, "where qk_norm is False", "with norms of queries and keys"
    ),
    "attention gate": Mechanism(
        lambda m: m.attention_gate, "where attention_gate is False", "with a gate of attention"
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
    "own sizes": Mechanism(
        lambda m: bool(m.own_sizes),
        "where all layers have the same sizes",
        "where some layers have sizes of their own",
    ),
    "token prediction": Mechanism(
        lambda m: m.predicts_tokens,
        "but in a language model that predicts tokens",
        "in a language model that predicts tokens",
    ),
}
"""What `Needs` and `Excludes` in the annotations of `Architecture` name."""


def check(m: Architecture) -> None:
    """Raise UserError for what no model can be."""
    _check_values(m)
    _check_mechanisms(m)
    _check_combinations(m)


def _check_values(m: Architecture) -> None:
    """Each field by itself: its type and its limits."""
    _check_patterns(m)
    absent = () if m.attends else _OF_ATTENTION
    dense = "dense" in (m.mlps or ("dense",)) or m.shared_blocks
    absent += () if dense else ("ffn_hidden_size",)
    for field, rule in rules(type(m)).items():
        rule = replace(rule, count=Count(0, LIMITS[field])) if field in absent else rule
        if wanted := rule.wanted(getattr(m, field)):
            raise _reject(m, field, wanted)
    for field, kind in NESTED.items():
        value: object = getattr(m, field)
        if value is None:
            continue
        if type(value) is not kind:
            raise _reject(m, field, f"None or a {kind.__name__}")
        for inner, rule in rules(kind).items():
            if wanted := rule.wanted(getattr(value, inner)):
                raise _reject_nested(m, field, inner, wanted)


def kinds(field: str, modules: Iterable[Module]) -> tuple[str, ...]:
    """What a layer's mixer (`mixers`) or MLP (`mlps`) may be, in a model with these modules."""
    of = (*get_args(Attention), *RECURRENCES, *SIDE_BY_SIDE, "none")
    own = (module.name for module in modules)
    return (*(of if field == "mixers" else get_args(FeedForward)), *own)


def _check_patterns(m: Architecture) -> None:
    _check_kinds(m, "mixers", least=1)
    _check_kinds(m, "mlps", least=0)


def _check_kinds(m: Architecture, field: str, least: int) -> None:
    given: tuple[object, ...] = getattr(m, field)
    known = kinds(field, m.modules)
    right = type(given) is tuple and len(given) >= least
    if not right or any(kind not in known for kind in given):
        wanted = f"a tuple of {', '.join(map(repr, known))}" + ", not empty" * least
        raise _reject(m, field, wanted)


def _check_mechanisms(m: Architecture) -> None:
    """A field has its default where it means nothing, as its annotation says."""
    present = {name: mechanism.present(m) for name, mechanism in MECHANISMS.items()}
    for field, rule in rules(type(m)).items():
        if getattr(m, field) == rule.default:
            continue
        for name in rule.needs:
            if not present[name]:
                raise _reject(m, field, f"{rule.default} {MECHANISMS[name].without}")
        for name in rule.excludes:
            if present[name]:
                raise _reject(m, field, f"{rule.default} {MECHANISMS[name].beside}")


def _check_combinations(m: Architecture) -> None:
    """Fields that have to agree with each other."""
    if m.attends:
        _check_attention(m)
    _check_state_space(m)
    _check_shared_blocks(m)
    _check_experts(m)
    _check_own_sizes(m)
    _check_chain(m)
    if not m.chain and any(layer[:2] == ("none", "none") for layer in _layers(m)):
        raise _reject(m, "mlps", "something in every layer whose mixer is none")
    if m.norm_bias and m.norm == "rmsnorm":
        raise _reject(m, "norm_bias", "False: an rmsnorm has no bias")
    if m.norm_bias and not m.norm_weight:
        raise _reject(m, "norm_bias", "False where norms have no weights")
    if m.parallel_block and m.norm_placement != "pre":
        raise _reject(m, "norm_placement", "pre in a parallel block")
    _check_encoder(m)
    if m.causal == m.encoder:
        raise _reject(m, "causal", f"{not m.encoder}, as encoder is {m.encoder}")
    with_window = not {"local", *COMPRESSED}.isdisjoint(m.mixers)
    if (m.sliding_window is not None) != with_window:
        wanted = "a window if, and only if, mixers has layers with one"
        raise _reject(m, "sliding_window", wanted)
    if (m.attention_chunk_size is not None) != ("chunked" in m.mixers):
        wanted = "a size if, and only if, mixers has chunked layers"
        raise _reject(m, "attention_chunk_size", wanted)
    _check_indexer(m)
    _check_groups_of_heads(m)


def _check_chain(m: Architecture) -> None:
    """A model that is a chain of modules."""
    known = {module.name for module in m.modules}
    try:
        links = [ChainLink.read(text) for text in m.chain]
    except (ValueError, AttributeError):
        links = [ChainLink("")]
    if not links:
        return
    if any(link.module not in known for link in links):
        wanted = "modules of this file, with a number before those that are layers: embed, 32 layer"
        raise _reject(m, "chain", wanted)
    if links[0].layers:
        raise _reject(
            m, "chain", "a first module without a number: it reads what comes from outside"
        )
    layers = sum(link.layers for link in links)
    if m.num_layers != max(layers, 1):
        raise _reject(m, "num_layers", f"the {max(layers, 1)} layers of the chain")


def _check_groups_of_heads(m: Architecture) -> None:
    """Attention whose heads all read one row of each position, and compressed rows."""
    for field, mixer in (
        ("compress_rate_hca", "compressed"),
        ("compress_rate_csa", "compressed_indexed"),
    ):
        if (getattr(m, field) > 0) != (mixer in m.mixers):
            raise _reject(m, field, f"a number if, and only if, mixers has {mixer} layers")
    if not m.o_groups:
        return
    others = {*m.mixers} & ATTENTIONS - {"local", *COMPRESSED}
    if others or not m.q_lora_rank or not m.o_lora_rank or m.num_query_groups != 1:
        wanted = "0 but with q_lora_rank, o_lora_rank, one key-value head, and layers of windows"
        raise _reject(m, "o_groups", wanted)
    if m.num_attention_heads % m.o_groups:
        heads = m.num_attention_heads
        raise _reject(m, "o_groups", f"a divisor of the {heads} heads: {divisors(heads)}")


def _check_indexer(m: Architecture) -> None:
    """Which layers have an indexer, and its sizes."""
    if (m.index_topk > 0) != (not {*INDEXED, "compressed_indexed"}.isdisjoint(m.mixers)):
        raise _reject(m, "index_topk", "some if, and only if, mixers has indexed layers")
    if not m.index_topk:
        return
    if not m.index_n_heads:
        raise _reject(m, "index_n_heads", "the number of the indexer's heads, 1 or more")
    turned = m.qk_rope_head_dim if m.kv_lora_rank else m.rotary_channels
    if m.index_head_dim < turned:
        wanted = f"at least the {turned} channels with position"
        raise _reject(m, "index_head_dim", wanted)
    if m.kv_lora_rank and not m.q_lora_rank:
        raise _reject(m, "q_lora_rank", "the width of the latent that index queries are made of")
    if not (m.kv_lora_rank or m.o_groups) and m.index_n_heads != m.num_query_groups:
        wanted = f"one head for each of the {m.num_query_groups} key-value heads"
        raise _reject(m, "index_n_heads", wanted)
    if m.index_topk % m.index_block_size:
        raise _reject(m, "index_topk", f"whole blocks of {m.index_block_size}")
    kinds = (layer.mixer for layer in _layers(m))
    if next((kind for kind in kinds if kind in INDEXED), None) == "index_shared":
        raise _reject(m, "mixers", "an indexed layer before the first index_shared one")


def _check_encoder(m: Architecture) -> None:
    """Relative positions, and an encoder whose output the layers attend to."""
    relative = m.position == "relative"
    if relative != (m.relative_buckets > 0):
        raise _reject(m, "relative_buckets", "some if, and only if, positions are relative")
    if relative and not m.encoder_num_layers:
        raise _reject(m, "position", "another but in an encoder with a decoder")
    if not m.encoder_num_layers:
        return
    if {*m.mixers} != {"global"} or m.num_experts or m.modules or m.kv_lora_rank:
        raise _reject(m, "encoder_num_layers", "0 with layers other than attention and MLPs")
    if m.parallel_block or m.embedding_size or m.tower or m.pooler:
        raise _reject(m, "encoder_num_layers", "0 but in a decoder of usual layers")
    if m.position not in ("relative", "none"):
        raise _reject(m, "position", "relative or none with an encoder")


def _check_attention(m: Architecture) -> None:
    heads = m.num_attention_heads
    if heads % m.num_query_groups:
        wanted = f"a divisor of num_attention_heads {heads}: {divisors(heads)}"
        raise _reject(m, "num_query_groups", wanted)
    if m.kv_lora_rank:
        _check_latents(m)
        return
    rotated = m.rotary_channels
    if m.position == "rope" and (rotated < 2 or rotated % 2):
        raise _reject(
            m, "kv_channels", f"one of which rope turns an even part, not {rotated} channels"
        )


def _check_latents(m: Architecture) -> None:
    """Sizes of multi-head latent attention."""
    heads, rotated = m.num_attention_heads, m.qk_rope_head_dim
    if m.num_query_groups != heads:
        raise _reject(m, "num_query_groups", f"the {heads} heads of latent attention")
    if not 0 < rotated < m.kv_channels or rotated % 2:
        wanted = f"an even part of the {m.kv_channels} channels of a head (kv_channels)"
        raise _reject(m, "qk_rope_head_dim", wanted)
    if m.position not in ("rope", "none"):
        raise _reject(m, "position", "rope or none with latent attention")


def _check_state_space(m: Architecture) -> None:
    """Sizes of the recurrence, and those that only another recurrence has."""
    state, kind = m.state_space, m.recurrence
    if len({*RECURRENCES} & m.kinds) > 1:
        raise _reject(m, "mixers", "one kind of recurrence in all layers that have one")
    if (state is None) != (kind is None):
        raise _reject(m, "state_space", "sizes if, and only if, mixers has a recurrence")
    if state is None:
        return

    def reject(field: str, wanted: str) -> UserError:
        return _reject_nested(m, "state_space", field, wanted)

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


def _check_shared_blocks(m: Architecture) -> None:
    """Which layers have which block."""
    shared = m.shared_blocks
    if shared is None:
        return
    if {*shared.layers} | {0} != {*range(max(shared.layers, default=0) + 1)} or not any(
        shared.layers
    ):
        raise _reject(m, "shared_blocks", "blocks that are numbered 1, 2 and so on")
    if shared.attention_adapter and not shared.adapter_rank:
        raise _reject(m, "shared_blocks", "attention_adapter with a rank, or without")
    if any(layer.block and layer.mixer == "none" for layer in _layers(m)):
        raise _reject(m, "mixers", "some in every layer with a shared block")
    if m.position not in ("rope", "none"):
        raise _reject(m, "position", "rope or none in a model with shared blocks")


def _check_own_sizes(m: Architecture) -> None:
    """Which layers have which sizes of their own, and that a model may have each of them."""
    numbers, sizes = m.layers_with_own_sizes, m.own_sizes
    if type(sizes) is not tuple or any(type(x) is not OwnSizes for x in sizes):
        raise _reject(m, "own_sizes", "a tuple of OwnSizes")
    if type(numbers) is not tuple or not numbers or not {*numbers} <= {*range(len(sizes) + 1)}:
        raise _reject(m, "layers_with_own_sizes", f"numbers from 0 to {len(sizes)}, not empty")
    if sizes and (m.encoder_num_layers or m.vision or m.bare):
        raise _reject(m, "own_sizes", "none but in a decoder")
    for of in sizes:
        for field, rule in rules(OwnSizes).items():
            if wanted := rule.wanted(getattr(of, field)):
                raise _reject(m, "own_sizes", f"{field} {wanted}")
        heads = of.num_attention_heads or m.num_attention_heads
        groups = of.num_query_groups or m.num_query_groups
        if m.attends and heads % groups:
            raise _reject(m, "own_sizes", f"key/value heads that divide the {heads} heads")


def _check_experts(m: Architecture) -> None:
    if not m.num_experts:
        return
    if not 1 <= m.top_k <= m.num_experts:
        raise _reject(m, "top_k", f"a whole number from 1 to num_experts {m.num_experts}")
    if not m.moe_ffn_hidden_size:
        raise _reject(m, "moe_ffn_hidden_size", "the width of an expert, 1 or more")
    groups = m.num_expert_groups
    if m.num_experts % groups:
        wanted = f"a divisor of num_experts {m.num_experts}: {divisors(m.num_experts)}"
        raise _reject(m, "num_expert_groups", wanted)
    if m.topk_groups > groups:
        raise _reject(m, "topk_groups", f"at most num_expert_groups {groups}")
    chosen = m.topk_groups * (m.num_experts // groups)
    if m.top_k > chosen:
        raise _reject(m, "top_k", f"at most the {chosen} experts of a token's groups")


def _reject(m: Architecture, field: str, wanted: str) -> UserError:
    name = m.name if type(m.name) is str else shown(m.name)
    return UserError(f"model {name}: {field} is {shown(getattr(m, field))}, wanted {wanted}")


def _reject_nested(m: Architecture, field: str, inner: str, wanted: str) -> UserError:
    got = shown(getattr(getattr(m, field), inner))
    return UserError(f"model {m.name}: {field}.{inner} is {got}, wanted {wanted}")


def _layers(m: Architecture) -> Iterator[Layer]:
    return map(m.layer, range(m.num_layers))
