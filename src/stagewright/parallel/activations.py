"""Layouts of named activations; values that no row names follow their operands.

Each function returns rows: the axes that split each dim of a value, by name. Names that begin with
`d_` are gradients (`graph.gradient`). Columns and rows of matrix products and the residual stream
are those of Megatron-LM (arXiv 1909.08053; with sequence parallelism, 2205.05198).
"""

from __future__ import annotations

from collections.abc import Collection

from stagewright.parallel.plan import Axes, Dims, Plan

STREAM = frozenset({"x", "y", "dy", "dx"})
"""Residual stream, which may be several: [B, S, Streams, M]."""

_LIKE_RESIDUAL = (*STREAM, "attn_reduced", "mlp_reduced", "branch", "embedded", "d_norm_out")
"""Values with the layout of the residual stream; `Builder.eager_norm` makes `norm_out`."""

_INPUT_GRADS = tuple(f"d_{name}_in" for name in ("q", "k", "v", "up", "gate", "logits"))
"""Gradients of the inputs f"{name}_in" that `Builder.linear` makes if the recipe reduces the
gradient of each product (`of_each_linear`)."""


def _among(axes: Axes, others: Collection[str]) -> Axes:
    return tuple(a for a in axes if a in others)


def _without(axes: Axes, others: Collection[str]) -> Axes:
    return tuple(a for a in axes if a not in others)


def residual(plan: Plan, ndim: int = 3) -> Dims:
    """Layout of the residual stream [B, S, M], or of several streams of `ndim` dims."""
    return (plan.data, plan.sequence, *[()] * (ndim - 2))


def activation_layouts(plan: Plan) -> dict[str, Dims]:
    """Layout of each named activation, by name."""
    gathered = (plan.data, plan.context, ())
    tokens = ("tokens", "token_types", "labels", "max", "exp_sum", "picked")
    rows: dict[str, Dims] = {
        **dict.fromkeys(tokens, gathered[:2]),
        "positions": (plan.context,),
        **dict.fromkeys(_LIKE_RESIDUAL, residual(plan)),
        **dict.fromkeys((*_INPUT_GRADS, "eh_gathered", "logits_whole"), gathered),
        # Every rank of tp scores all keys for the same queries (Megatron-LM's DSAIndexer).
        **dict.fromkeys(("index_in", "index_latent", "chosen"), gathered),
        # The narrow channels of an adapter are on every rank of tp.
        "lora_low": gathered,
        "selection": (plan.data, (), ()),
    }
    for name in ("group_lse", "group_picked"):
        dims = (*gathered[:2], plan.vocabulary)
        rows |= {name: dims, f"d_{name}": dims}
    if plan.gather_adapters:
        rows |= {"lora_out": gathered}
    if plan.embedding_all_reduce and plan.sequence_parallel:
        rows |= {"word": gathered, "d_scatter": gathered}
    rows |= _cache_rows(plan) | _expert_rows(plan)
    return rows | _attention_rows(plan) | _state_rows(plan) if plan.context else rows


def _cache_rows(plan: Plan) -> dict[str, Dims]:
    """Inference: a cache has a rank's requests and its key-value heads, as in vLLM.

    Ranks that share a key-value head, or latents, have a copy each; or they share the tokens of a
    request in a striped cache, and queries of their heads go to all of them. Logits are gathered
    for the sampler.
    """
    requests = (plan.data, ())
    heads = _among(plan.tensor, plan.key_value)
    return {
        "token_slots": requests,
        "token_positions": (plan.data, plan.context),
        "kv_cache": (*requests, heads, ()),
        "latent_cache": (*requests, ()),
        "striped_kv_cache": (plan.data, plan.stripes, (), heads, ()),
        "striped_latent_cache": (plan.data, plan.stripes, (), ()),
        "prefix_slots": (plan.data, plan.stripes, ()),
        "q_striped": (*requests, _without(plan.tensor, plan.stripes), ()),
        "striped_context": (plan.data, plan.context, plan.tensor, ()),
        "logits_gathered": (*requests, ()),
    }


# ---- context parallelism: a layer mixes tokens; elsewhere each rank has a part of the sequence ---


def _attention_rows(plan: Plan) -> dict[str, Dims]:
    """Queries, keys and values while attention runs, by `cp_comm_type`.

    p2p: keys stay split like queries and go round the ring (arXiv 2310.01889); all_gather: every
    rank has all keys (Llama 3, arXiv 2407.21783, section 3.3.2); a2a: whole sequences of fewer
    heads (Ulysses, arXiv 2309.14509). Keys that are copied for each query head (`repeat_kv`) are
    copied before they move.
    """
    heads = (plan.data, plan.context, plan.tensor, ())
    key_heads = _among(plan.tensor, plan.key_value)
    if plan.cp_comm_type == "all_gather":
        keys, repeated = (plan.data, (), key_heads, ()), (plan.data, (), plan.tensor, ())
        rows: dict[str, Dims] = {}
    elif plan.cp_comm_type == "a2a":
        repeated = (plan.data, (), plan.tensor + plan.context, ())
        keys = (plan.data, (), _among(repeated[2], plan.key_value), ())
        rows = {"q_core": repeated, "context": heads}
    else:
        keys, repeated = (plan.data, plan.context, key_heads, ()), heads
        rows = {"q_core": heads}
    rows |= {"k_core": keys, "v_core": keys}
    rows |= {"k_repeated_core": repeated, "v_repeated_core": repeated}
    rows |= {f"cross_{name}": dims for name, dims in rows.items()}
    rows |= dict.fromkeys(("encoder_bias", "decoder_bias"), score_dims(plan))
    latents = (plan.data, plan.context if plan.cp_comm_type == "p2p" else (), ())
    return rows | {"index_core": (plan.data, (), ()), "latent_core": latents}


def score_dims(plan: Plan) -> Dims:
    """Layout of scores [heads, queries, keys]: that of queries, or in Ulysses that of heads."""
    if plan.cp_comm_type == "a2a":
        return (plan.tensor + plan.context, (), ())
    return (plan.tensor, plan.context, ())


def _state_rows(plan: Plan) -> dict[str, Dims]:
    """Whole sequences of fewer heads while a state runs along them, as in Megatron-LM's Mamba.

    A group of heads that is on several ranks is gathered there: the same bytes as Megatron-LM's
    all-to-all of repeated groups.
    """
    split = plan.tensor + plan.context
    groups, heads = plan.of_heads(split)
    return {
        **dict.fromkeys(("channels_core", "time_steps"), (plan.data, (), split)),
        "channels_context": (plan.data, plan.context, plan.tensor),
        "heads_core": (plan.data, (), groups, heads, ()),
        "groups_core": (plan.data, (), groups, ()),
        "rates_core": (plan.data, (), groups, heads),
        "heads_context": (plan.data, plan.context, *plan.of_heads(plan.tensor), ()),
    }


# ---- expert parallelism: copies of tokens before, in and after a layer's experts -----------------


def _expert_rows(plan: Plan) -> dict[str, Dims]:
    """Copies of tokens, by dispatcher (`moe_token_dispatcher_type`, as in Megatron-LM).

    The computation of each dispatcher is in `blocks.experts`.
    """
    # Ranks with different tokens and the same experts. Tokens are gathered over the axes of
    # `combined` before they are copied.
    away = _without(plan.tokens, (*plan.expert, *plan.combined))
    rows = (_gathered_rows if plan.dispatcher == "allgather" else _exchanged_rows)(plan, away)
    if plan.combined:
        rows["routed"] = (plan.data, _without(plan.sequence, plan.combined), ())
    return rows


def _gathered_rows(plan: Plan, away: Axes) -> dict[str, Dims]:
    """Rows of the allgather dispatcher: tokens are gathered over all ranks that have experts."""
    replicas = _without(away, plan.expert_tensor)
    tokens = (_among(plan.data, replicas), _among(plan.sequence, replicas))
    rows = (plan.expert, replicas)
    return {
        **dict.fromkeys(("routed", "routes_known", "gates_known"), (*tokens, ())),
        **dict.fromkeys(("routes_here", "gates_here"), (*tokens, plan.expert)),
        **dict.fromkeys(("permuted", "expert_in"), (*rows, ())),
        **dict.fromkeys(("probs", "probs_in"), rows),
        "moe_reduced": residual(plan),
    }


def _exchanged_rows(plan: Plan, away: Axes) -> dict[str, Dims]:
    """Rows of the all-to-all dispatcher.

    Copies go from [E, rows of this rank's tokens] to [this rank's experts, their rows].
    """
    across = _among(plan.expert[::-1], plan.tokens)
    inside = _among(away, plan.expert_tensor)  # these split each expert: they gather its rows
    replicas = _without(away, inside)
    sent, dispatched = ((), away + across), (plan.expert, away)
    gathered = (plan.expert, replicas)
    # Ranks that have the same tokens sum the results of their experts.
    returned = (_without(plan.expert, across), away + across)
    counts = replicas + inside
    return {
        "permuted": (*sent, ()),
        "returned": (*returned, ()),
        **dict.fromkeys(("dispatched", "expert_out"), (*dispatched, ())),
        "expert_in": (*gathered, ()),
        "probs": sent,
        "probs_dispatched": dispatched,
        "probs_in": gathered,
        "splits": (counts + across, ()),
        "splits_known": (counts, across) if plan.counts_to_owners else (replicas, ()),
    }


EXPERT_SUMS = ("expert_out", "returned")
"""Rows of experts that stay partial sums over the axes `Plan.combined`, in inference.

Serving systems combine the copies of a token on each rank and sum tokens then, once a layer and
together with the shared experts (vLLM's `FusedMoE` with `reduce_results=False`; SGLang and
TensorRT-LLM likewise). In training copies are summed, as in Megatron-LM."""
