"""Expert parallelism: the layouts of token copies before, in and after a layer's experts."""

from __future__ import annotations

from typing import NamedTuple

from stagewright.parallel.plan import Axes, Dims, Plan


class _TokenAxes(NamedTuple):
    """How ranks with tokens of their own and ranks with experts of their own overlap."""

    away: Axes
    """Split tokens, but hold no experts of their own."""
    inside: Axes
    """Of these, the ranks that split each expert: they gather its rows and scatter its sums."""
    whole: Axes
    """The others of `away`: replicas of the same experts, for other tokens."""
    across: Axes
    """Split tokens and experts, innermost first."""


def expert_rows(plan: Plan) -> dict[str, Dims]:
    """The rows of a layer's experts, by the dispatcher (names as in Megatron-LM)."""
    # Tokens are gathered over the axes of `combined` before they are copied.
    away = tuple(a for a in plan.tokens if a not in (*plan.expert, *plan.combined))
    inside = tuple(a for a in away if a in plan.expert_tensor)
    whole = tuple(a for a in away if a not in inside)
    across = tuple(a for a in reversed(plan.expert) if a in plan.tokens)
    rows = _DISPATCHERS[plan.dispatcher](plan, _TokenAxes(away, inside, whole, across))
    if plan.combined:
        sequence = tuple(a for a in plan.sequence if a not in plan.combined)
        rows["routed"] = (plan.data, sequence, ())
    return rows


def expert_sums(plan: Plan) -> dict[str, frozenset[str]]:
    """The axes over which named rows of experts stay partial sums.

    Serving systems combine the copies of a token on each rank and sum tokens then, once a layer and
    together with the shared experts (vLLM's `FusedMoE` with `reduce_results=False`; SGLang and
    TensorRT-LLM likewise). In training copies are summed, as in Megatron-LM.
    """
    return dict.fromkeys(("expert_out", "returned"), frozenset(plan.combined))


def _gathered_rows(plan: Plan, axes: _TokenAxes) -> dict[str, Dims]:
    """Megatron-LM's allgather dispatcher: tokens are gathered over all ranks that hold experts."""
    data = tuple(a for a in plan.data if a in axes.whole)
    sequence = tuple(a for a in plan.sequence if a in axes.whole)
    known, rows = (data, sequence, ()), (plan.expert, axes.whole)
    return {
        **dict.fromkeys(("routed", "routes_known", "gates_known"), known),
        **dict.fromkeys(("routes_here", "gates_here"), (data, sequence, plan.expert)),
        **dict.fromkeys(("permuted", "expert_in"), (*rows, ())),
        **dict.fromkeys(("probs", "probs_in"), rows),
        "moe_reduced": (plan.data, plan.sequence, ()),
    }


def _exchanged_rows(plan: Plan, axes: _TokenAxes) -> dict[str, Dims]:
    """The all-to-all: from [E, rows of this rank's tokens] to [this rank's experts, their rows]."""
    away, inside, whole, across = axes
    sent, there, here = ((), away + across), (plan.expert, away), (plan.expert, whole)
    # Ranks that have the same tokens sum the results of their experts.
    back = tuple(a for a in plan.expert if a not in across), away + across
    return {
        "permuted": (*sent, ()),
        "returned": (*back, ()),
        **dict.fromkeys(("dispatched", "expert_out"), (*there, ())),
        "expert_in": (*here, ()),
        "probs": sent,
        "probs_dispatched": there,
        "probs_in": here,
        "splits": (whole + inside + across, ()),
        "splits_known": (whole + inside, across) if plan.counts_to_owners else (whole, ()),
    }


_DISPATCHERS = {"alltoall": _exchanged_rows, "allgather": _gathered_rows}
"""The rows of each `moe_token_dispatcher_type`; what a rank computes for it: `blocks.experts`."""
