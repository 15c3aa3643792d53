"""Rules of the fields of a model: each by itself, by the model's mechanisms, and together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
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

Rules = Iterator[tuple[object, str, str]]
"""Rows of what makes a model impossible, the field that is named, and what it should hold.

A row is looked at when those before it are right, so that it may rely on them."""


def check(m: Architecture) -> None:
    """Raise UserError for what no model can be."""
    for rows in RULES:
        for wrong, field, wanted in rows(m):
            if wrong:
                name = m.name if type(m.name) is str else shown(m.name)
                got = shown(attrgetter(field)(m))
                raise UserError(f"model {name}: {field} is {got}, wanted {wanted}")


# ---- each field by itself ------------------------------------------------------------------------


def kinds(field: str, modules: Iterable[Module]) -> tuple[str, ...]:
    """The kinds of mixers (`mixers`) or MLPs (`mlps`), in a model with these modules."""
    mixers = (*get_args(Attention), *RECURRENCES, *SIDE_BY_SIDE, "none")
    usual = mixers if field == "mixers" else get_args(FeedForward)
    return (*usual, *(module.name for module in modules))


def _kinds(m: Architecture) -> Rules:
    for field, end in (("mixers", ", not empty"), ("mlps", "")):
        given: tuple[object, ...] = getattr(m, field)
        known = kinds(field, m.modules)
        wrong = (
            type(given) is not tuple or (end and not given) or any(x not in known for x in given)
        )
        yield wrong, field, f"a tuple of {', '.join(map(repr, known))}{end}"


def _values(m: Architecture) -> Rules:
    """Types and limits; sizes of attention and of dense MLPs may be 0 where there are none."""
    absent = () if m.attends else ("num_attention_heads", "num_query_groups", "kv_channels")
    dense = "dense" in (m.mlps or ("dense",)) or m.shared_blocks
    absent += () if dense else ("ffn_hidden_size",)
    for field, rule in rules(type(m)).items():
        rule = replace(rule, count=Count(0, LIMITS[field])) if field in absent else rule
        wanted = rule.wanted(getattr(m, field))
        yield wanted, field, wanted
    for field, kind in NESTED.items():
        value: object = getattr(m, field)
        if value is None:
            continue
        yield type(value) is not kind, field, f"None or a {kind.__name__}"
        for inner, rule in rules(kind).items():
            wanted = rule.wanted(getattr(value, inner))
            yield wanted, f"{field}.{inner}", wanted


# ---- fields that belong to a mechanism -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mechanism:
    """Something that a model has or has not, which decides what its fields may be."""

    present: Callable[[Architecture], object]
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
"""The mechanisms that `Needs` and `Excludes` name in the annotations of `Architecture`."""


def _mechanisms(m: Architecture) -> Rules:
    """A field has its default where it means nothing, as its annotation says."""
    present = {name: mechanism.present(m) for name, mechanism in MECHANISMS.items()}
    for field, rule in rules(type(m)).items():
        if getattr(m, field) == rule.default:
            continue
        for name in rule.needs:
            yield not present[name], field, f"{rule.default} {MECHANISMS[name].without}"
        for name in rule.excludes:
            yield present[name], field, f"{rule.default} {MECHANISMS[name].beside}"


# ---- fields that have to agree with each other ---------------------------------------------------


def _attention(m: Architecture) -> Rules:
    heads, groups, rotated = m.num_attention_heads, m.num_query_groups, m.rotary_channels
    if not m.attends:
        return
    wanted = f"a divisor of num_attention_heads {heads}: {divisors(heads)}"
    yield heads % groups, "num_query_groups", wanted
    if not m.kv_lora_rank:
        wanted = f"one of which rope turns an even part, not {rotated} channels"
        yield m.position == "rope" and (rotated < 2 or rotated % 2), "kv_channels", wanted
        return
    yield groups != heads, "num_query_groups", f"the {heads} heads of latent attention"
    turned, wanted = m.qk_rope_head_dim, f"an even part of the {m.kv_channels} channels of a head"
    wrong = not 0 < turned < m.kv_channels or turned % 2
    yield wrong, "qk_rope_head_dim", f"{wanted} (kv_channels)"
    wrong = m.position not in ("rope", "none")
    yield wrong, "position", "rope or none with latent attention"


def _state_space(m: Architecture) -> Rules:
    """Sizes of the recurrence, and those that only another recurrence has."""
    state, kind = m.state_space, m.recurrence
    several = len({*RECURRENCES} & m.kinds) > 1
    yield several, "mixers", "one kind of recurrence in all layers that have one"
    wanted = "sizes if, and only if, mixers has a recurrence"
    yield (state is None) != (kind is None), "state_space", wanted
    if state is None:
        return
    wanted = f"a divisor of heads {state.heads}: {divisors(state.heads)}"
    yield state.heads % state.groups, "state_space.groups", wanted
    for field in ("head_width", "groups"):
        wrong = kind == "mamba" and getattr(state, field) != 1
        yield wrong, f"state_space.{field}", "1 with mamba, whose channels are its heads"
    for field, recurrence in (("dt_rank", "mamba"), ("gate_rank", "kimi_delta")):
        wrong = (getattr(state, field) > 0) != (kind == recurrence)
        yield wrong, f"state_space.{field}", f"a width with {recurrence}, and 0 with others"
    wrong = state.inner_norms != "none" and kind != "mamba"
    yield wrong, "state_space.inner_norms", "none with anything but mamba"
    wrong = not state.gated_norm and kind != "mamba2"
    yield wrong, "state_space.gated_norm", "True with anything but mamba2"


def _shared_blocks(m: Architecture) -> Rules:
    shared = m.shared_blocks
    if shared is None:
        return
    numbers = {*shared.layers}
    wrong = not any(numbers) or numbers | {0} != {*range(max(numbers) + 1)}
    yield wrong, "shared_blocks", "blocks that are numbered 1, 2 and so on"
    wrong = shared.attention_adapter and not shared.adapter_rank
    yield wrong, "shared_blocks", "attention_adapter with a rank, or without"
    wrong = any(layer.block and layer.mixer == "none" for layer in _layers(m))
    yield wrong, "mixers", "some in every layer with a shared block"
    wrong = m.position not in ("rope", "none")
    yield wrong, "position", "rope or none in a model with shared blocks"


def _experts(m: Architecture) -> Rules:
    count, groups = m.num_experts, m.num_expert_groups
    if not count:
        return
    yield not 1 <= m.top_k <= count, "top_k", f"a whole number from 1 to num_experts {count}"
    yield not m.moe_ffn_hidden_size, "moe_ffn_hidden_size", "the width of an expert, 1 or more"
    wanted = f"a divisor of num_experts {count}: {divisors(count)}"
    yield count % groups, "num_expert_groups", wanted
    yield m.topk_groups > groups, "topk_groups", f"at most num_expert_groups {groups}"
    reachable = m.topk_groups * (count // groups)
    yield m.top_k > reachable, "top_k", f"at most the {reachable} experts of a token's groups"


def _own_sizes(m: Architecture) -> Rules:
    """Layers with sizes of their own, each of which a model may have."""
    numbers, listed = m.layers_with_own_sizes, m.own_sizes
    wrong = type(listed) is not tuple or any(type(sizes) is not OwnSizes for sizes in listed)
    yield wrong, "own_sizes", "a tuple of OwnSizes"
    wrong = type(numbers) is not tuple or not numbers or not {*numbers} <= {*range(len(listed) + 1)}
    yield wrong, "layers_with_own_sizes", f"numbers from 0 to {len(listed)}, not empty"
    yield (
        listed and (m.encoder_num_layers or m.vision or m.bare),
        "own_sizes",
        "none but in a decoder",
    )
    for sizes in listed:
        for field, rule in rules(OwnSizes).items():
            wanted = rule.wanted(getattr(sizes, field))
            yield wanted, "own_sizes", f"{field} {wanted}"
        heads = sizes.num_attention_heads or m.num_attention_heads
        wrong = m.attends and heads % (sizes.num_query_groups or m.num_query_groups)
        yield wrong, "own_sizes", f"key/value heads that divide the {heads} heads"


def _chain(m: Architecture) -> Rules:
    known = {module.name for module in m.modules}
    try:
        links = [ChainLink.read(text) for text in m.chain]
    except (ValueError, AttributeError):
        links = [ChainLink("")]
    if not links:
        return
    wanted = "modules of this file, with a number before those that are layers: embed, 32 layer"
    yield any(link.module not in known for link in links), "chain", wanted
    wanted = "a first module without a number: it reads what comes from outside"
    yield links[0].layers, "chain", wanted
    layers = max(sum(link.layers for link in links), 1)
    yield m.num_layers != layers, "num_layers", f"the {layers} layers of the chain"


def _layer(m: Architecture) -> Rules:
    wrong = not m.chain and any(layer[:2] == ("none", "none") for layer in _layers(m))
    yield wrong, "mlps", "something in every layer whose mixer is none"
    wrong = m.norm_bias and m.norm == "rmsnorm"
    yield wrong, "norm_bias", "False: an rmsnorm has no bias"
    yield m.norm_bias and not m.norm_weight, "norm_bias", "False where norms have no weights"
    wrong = m.parallel_block and m.norm_placement != "pre"
    yield wrong, "norm_placement", "pre in a parallel block"


def _encoder(m: Architecture) -> Rules:
    """Relative positions, and an encoder whose output the layers attend to."""
    relative, layers = m.position == "relative", m.encoder_num_layers
    wrong = relative != (m.relative_buckets > 0)
    yield wrong, "relative_buckets", "some if, and only if, positions are relative"
    yield relative and not layers, "position", "another but in an encoder with a decoder"
    wrong = {*m.mixers} != {"global"} or m.num_experts or m.modules or m.kv_lora_rank
    wanted = "0 with layers other than attention and MLPs"
    yield layers and wrong, "encoder_num_layers", wanted
    wrong = m.parallel_block or m.embedding_size or m.tower or m.pooler
    yield layers and wrong, "encoder_num_layers", "0 but in a decoder of usual layers"
    wrong = layers and m.position not in ("relative", "none")
    yield wrong, "position", "relative or none with an encoder"
    yield m.causal == m.encoder, "causal", f"{not m.encoder}, as encoder is {m.encoder}"


def _windows(m: Architecture) -> Rules:
    wrong = (m.sliding_window is not None) != _has_mixer(m, "local", *COMPRESSED)
    yield wrong, "sliding_window", "a window if, and only if, mixers has layers with one"
    wrong = (m.attention_chunk_size is not None) != _has_mixer(m, "chunked")
    yield wrong, "attention_chunk_size", "a size if, and only if, mixers has chunked layers"


def _indexer(m: Architecture) -> Rules:
    wrong = (m.index_topk > 0) != _has_mixer(m, *INDEXED, "compressed_indexed")
    yield wrong, "index_topk", "some if, and only if, mixers has indexed layers"
    if not m.index_topk:
        return
    wanted = "the number of the indexer's heads, 1 or more"
    yield not m.index_n_heads, "index_n_heads", wanted
    turned = m.qk_rope_head_dim if m.kv_lora_rank else m.rotary_channels
    wanted = f"at least the {turned} channels with position"
    yield m.index_head_dim < turned, "index_head_dim", wanted
    wanted = "the width of the latent that index queries are made of"
    yield m.kv_lora_rank and not m.q_lora_rank, "q_lora_rank", wanted
    wrong = not (m.kv_lora_rank or m.o_groups) and m.index_n_heads != m.num_query_groups
    wanted = f"one head for each of the {m.num_query_groups} key-value heads"
    yield wrong, "index_n_heads", wanted
    blocks = f"whole blocks of {m.index_block_size}"
    yield m.index_topk % m.index_block_size, "index_topk", blocks
    first = next((layer.mixer for layer in _layers(m) if layer.mixer in INDEXED), "")
    wanted = "an indexed layer before the first index_shared one"
    yield first == "index_shared", "mixers", wanted


def _groups_of_heads(m: Architecture) -> Rules:
    """Attention whose heads all read one row of each position, and compressed rows."""
    for field, mixer in (
        ("compress_rate_hca", "compressed"),
        ("compress_rate_csa", "compressed_indexed"),
    ):
        wrong = (getattr(m, field) > 0) != _has_mixer(m, mixer)
        yield wrong, field, f"a number if, and only if, mixers has {mixer} layers"
    if not m.o_groups:
        return
    others = {*m.mixers} & ATTENTIONS - {"local", *COMPRESSED}
    wrong = others or not m.q_lora_rank or not m.o_lora_rank or m.num_query_groups != 1
    wanted = "0 but with q_lora_rank, o_lora_rank, one key-value head, and layers of windows"
    yield wrong, "o_groups", wanted
    heads = m.num_attention_heads
    yield heads % m.o_groups, "o_groups", f"a divisor of the {heads} heads: {divisors(heads)}"


RULES: tuple[Callable[[Architecture], Rules], ...] = (
    *(_kinds, _values, _mechanisms),
    *(_attention, _state_space, _shared_blocks, _experts, _own_sizes, _chain, _layer, _encoder),
    *(_windows, _indexer, _groups_of_heads),
)


def _has_mixer(m: Architecture, *kinds: str) -> bool:
    return not {*kinds}.isdisjoint(m.mixers)


def _layers(m: Architecture) -> Iterator[Layer]:
    return map(m.layer, range(m.num_layers))
