"""Context parallelism: where queries, keys, values and states are while a layer mixes tokens.

In the rest of a layer, each rank of cp holds a part of the sequence.
"""

from __future__ import annotations

from stagewright.parallel.plan import Dims, Plan


def context_rows(plan: Plan) -> dict[str, Dims]:
    """The rows of attention and of state-space layers; none without context parallelism."""
    return attention_rows(plan) | state_rows(plan) if plan.context else {}


def attention_rows(plan: Plan) -> dict[str, Dims]:
    """Where queries, keys and values are while attention runs, by `cp_comm_type`.

    p2p: keys stay split like queries and go round the ring (arXiv 2310.01889); all_gather: every
    rank has all keys (Llama 3, arXiv 2407.21783, section 3.3.2); a2a: whole sequences of fewer
    heads (Ulysses, arXiv 2309.14509). Keys that are copied for each query head (`repeat_kv`) are
    copied before they move.
    """
    heads = (plan.data, plan.context, plan.tensor, ())
    keys = (plan.data, plan.context, tuple(a for a in plan.tensor if a in plan.key_value), ())
    latents, whole_latents = (plan.data, plan.context, ()), (plan.data, (), ())
    if plan.cp_comm_type == "all_gather":
        whole = (plan.data, (), *keys[2:])
        rows = {"k_core": whole, "v_core": whole}
        repeated = (plan.data, (), plan.tensor, ())
    elif plan.cp_comm_type == "a2a":
        few = (plan.data, (), plan.tensor + plan.context, ())
        few_keys = (plan.data, (), tuple(a for a in few[2] if a in plan.key_value), ())
        rows = {"q_core": few, "k_core": few_keys, "v_core": few_keys, "context": heads}
        repeated = few
    else:
        rows = {"q_core": heads, "k_core": keys, "v_core": keys}
        repeated = heads
    rows |= dict.fromkeys(("k_repeated_core", "v_repeated_core"), repeated)
    rows |= {f"cross_{name}": dims for name, dims in rows.items()}
    rows |= dict.fromkeys(("encoder_bias", "decoder_bias"), score_dims(plan))
    rows |= {"index_core": whole_latents}
    return rows | {"latent_core": latents if plan.cp_comm_type == "p2p" else whole_latents}


def score_dims(plan: Plan) -> Dims:
    """Where scores [heads, queries, keys] live: with the queries, or with the heads in Ulysses."""
    if plan.cp_comm_type == "a2a":
        return (plan.tensor + plan.context, (), ())
    return (plan.tensor, plan.context, ())


def state_rows(plan: Plan) -> dict[str, Dims]:
    """Whole sequences of fewer heads while a state runs along them, as in Megatron-LM's Mamba.

    A group of heads that is on several ranks is gathered there: the same bytes as Megatron-LM's
    all-to-all of repeated groups.
    """
    groups, heads = plan.of_heads(plan.tensor + plan.context)
    few = plan.tensor + plan.context
    return {
        **dict.fromkeys(("channels_core", "time_steps"), (plan.data, (), few)),
        "channels_context": (plan.data, plan.context, plan.tensor),
        "heads_core": (plan.data, (), groups, heads, ()),
        "groups_core": (plan.data, (), groups, ()),
        "rates_core": (plan.data, (), groups, heads),
        "heads_context": (plan.data, plan.context, *plan.of_heads(plan.tensor), ()),
    }
