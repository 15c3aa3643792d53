"""Expert parallelism: where copies of tokens are before, in and behind the experts of a layer."""

from __future__ import annotations

from stagewright.parallel.plan import Axes, Dims, Plan


def expert_rows(plan: Plan) -> dict[str, Dims]:
    """The rows of a layer's experts, by the dispatcher (names as in Megatron-LM).

    Ranks of `tokens` have tokens of their own. Those of `away` have tokens of their own, but no
    experts; of these, the ranks of `inside` split each expert, and gather its rows before the
    products, and scatter the sums after. `across` have tokens and experts of their own.
    """
    away = tuple(a for a in plan.tokens if a not in plan.expert)
    inside = tuple(a for a in away if a in plan.expert_tensor)
    whole = tuple(a for a in away if a not in inside)
    across = tuple(a for a in reversed(plan.expert) if a in plan.tokens)  # innermost first
    if plan.dispatcher == "allgather":
        return _gathered_rows(plan, whole)
    return _exchanged_rows(plan, away, inside, whole, across)


def _gathered_rows(plan: Plan, whole: Axes) -> dict[str, Dims]:
    """Megatron-LM's allgather dispatcher: tokens are gathered over all ranks that hold experts."""
    data, rest = (tuple(a for a in axes if a in whole) for axes in (plan.data, plan.sequence))
    known, rows = (data, rest, ()), (plan.expert, whole)
    return {
        **dict.fromkeys(("routed", "routes_known", "gates_known"), known),
        **dict.fromkeys(("routes_here", "gates_here"), (data, rest, plan.expert)),
        **dict.fromkeys(("permuted", "expert_in"), (*rows, ())),
        **dict.fromkeys(("probs", "probs_in"), rows),
        "moe_reduced": (plan.data, plan.sequence, ()),
    }


def _exchanged_rows(
    plan: Plan, away: Axes, inside: Axes, whole: Axes, across: Axes
) -> dict[str, Dims]:
    """The all-to-all: from [E, rows of this rank's tokens] to [this rank's experts, their rows]."""
    sent, there, here = ((), away + across), (plan.expert, away), (plan.expert, whole)
    # Ranks that have the same tokens sum up what their experts make of them.
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
        "splits_known": (whole, ()),
    }
