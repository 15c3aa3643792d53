"""Parallelism as tables: which axes split which dims of which named values.

Nothing else knows a strategy. A strategy answers one question: where shall this value live? The
rows for activations and weights follow Megatron-LM (arXiv 1909.08053, 2205.05198), the rows for
optimizer states, gradients and stored parameters follow ZeRO (arXiv 1910.02054). Values that no row
names follow their operands.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from stagewright.algebra.layout import Layout
from stagewright.algebra.notation import Tensor
from stagewright.algebra.size import size
from stagewright.errors import UserError, divisors
from stagewright.graph.node import Graph, Node
from stagewright.graph.parameter import Parameter
from stagewright.graph.roles import Role
from stagewright.graph.shard import Want
from stagewright.parallel.plan import Dims, Plan

_INPUT_GRADS = tuple(f"d_{name}_in" for name in ("q", "k", "v", "up", "gate", "logits"))
BATCH = size("B")


def strategy(plan: Plan, sizes: Mapping[str, int]) -> Want:
    """The table as a function; `sizes`, the numbers behind the dims, tell what splits evenly."""
    sequence = plan.context + (plan.tensor if plan.sequence_parallel else ())
    residual = (plan.data, sequence, ())
    whole = (plan.data, plan.context, ())
    rows: dict[str, Dims] = {
        "tokens": whole[:2],
        "token_types": whole[:2],
        "labels": whole[:2],
        "eh_gathered": whole,
        "positions": (plan.context,),
        # Tables of a recommendation model: all of the batch is looked up, by columns of the rows.
        "indices": ((), ()),
        "found": ((), (), plan.columns),
        "rows_found": (plan.data, (), ()),
        "selection": (plan.data, (), ()),
        "max": whole[:2],
        "exp_sum": whole[:2],
        "picked": whole[:2],
        **dict.fromkeys(
            ("x", "y", "dy", "dx", "attn_reduced", "mlp_reduced", "branch", "embedded"), residual
        ),
        "logits_whole": whole,
        "d_norm_out": residual,
        **dict.fromkeys(_INPUT_GRADS, whole),
    }
    if plan.embedding_all_reduce and plan.sequence_parallel:
        rows |= {"word": whole, "d_scatter": whole}
    rows |= _cached(plan)
    rows |= _expert_parallel(plan, sequence)
    if plan.context:
        rows |= _context_parallel(plan) | _states_parallel(plan)
    own = {name: plan.layout(where) for name, where in plan.table.items()}

    def parameter(n: Node, p: Parameter, have: Layout | None) -> Layout | None:
        if not n.shape:  # a count of steps
            return Layout(())
        role = n.role
        if n.binding.buffer:
            return None if role is Role.COUNT else Layout(((),) * len(n.shape))
        used = plan.used(p, len(n.shape))
        shared = _spread(n, p, used, plan, sizes)
        match role:
            case Role.PARAMETER:
                return Layout(shared if plan.zero == 3 else used)
            case Role.USED:
                return Layout(used)
            case Role.WHOLE_GRADIENT:
                over = frozenset((*plan.data, *plan.context))
                return Layout(((),) * len(n.shape), have.partial & over if have else frozenset())
            case Role.OWN_ROWS:
                return Layout(used, have.partial) if have and plan.reduce_each_microbatch else None
            case Role.SUM_OVER_MODEL:
                if have is None or n.once == plan.reduce_each_microbatch:
                    return None
                return Layout(have.dims, have.partial & {*plan.data, *plan.context})
            case Role.TABLE_GRADIENT:
                return Layout(used, frozenset((*plan.data, *plan.context)))
            case Role.STATE | Role.MASTER:
                return Layout(shared if plan.zero else used)
            case Role.UPDATED:
                return Layout(shared if plan.zero == 3 else used)
            case Role.MICROBATCH_GRADIENT if plan.reduce_each_microbatch:
                return _reduced(have, plan, shared if plan.zero >= 2 else used)
            case Role.STEP_GRADIENT:
                return _reduced(have, plan, shared if plan.zero else used)
            case Role.REDUCED if plan.sum_as_read and plan.sequence_parallel:
                return None
            case Role.READ | Role.REDUCED:
                return Layout(have.dims) if have else None
            case _:
                return None

    def want(n: Node, have: Layout | None) -> Layout | None:
        bound = n.binding
        if bound.param:
            return parameter(n, bound.param, have)
        if n.role is Role.SQUARED_NORM:
            return None
        if bound.split_as:  # a state of each request
            return Layout((plan.data, (), *plan.used(bound.split_as, len(n.shape) - 2)))
        if bound.asked:
            return _stated(n, have, own.get(n.name), plan)
        if n.name in own and len(own[n.name].dims) == len(n.shape):
            return own[n.name]
        dims = rows.get(bound.like or n.name)
        if dims is None and bound.live_in and n.shape:
            own_dims = residual if n.shape[0] == BATCH else _of_scores(plan)
            # A value of all sequences: its gradients are sums until the one who made it has them.
            sums = plan.data if n.phase == "backward" and n.shape[0] != BATCH else ()
            return Layout(own_dims, frozenset(sums))
        if n.op == "input" and have is None and dims is None and n.shape[:1] == (BATCH,):
            dims = (plan.data, *[()] * (len(n.shape) - 1))  # whatever comes from outside
        return None if dims is None or len(dims) != len(n.shape) else Layout(dims)

    return want


def rows_of(graph: Graph, plan: Plan, sizes: Mapping[str, int], whose: str) -> set[str]:
    """The names in the plan's table that a single-device graph has; a UserError if one is ill."""
    found: set[str] = set()
    misfit: dict[str, str] = {}
    for n in graph:
        name = n.binding.name or n.name
        row = plan.table.get(name)
        if row is None or n.phase == "optimizer":
            continue
        shown = f"[{', '.join(map(str, n.shape))}]"
        if len(row.dims) != len(n.shape):  # a weight and a value may have one name
            misfit[name] = shown
            continue
        found.add(name)
        for dim, degrees, axes in zip(n.shape, row.axes, plan.layout(row).dims, strict=True):
            count, ranks = dim.value(sizes), plan.mesh.size(*axes)
            if count % ranks:
                raise UserError(
                    f"{'*'.join(degrees)}={ranks} does not divide {dim} = {count} of {name} "
                    f"{shown}; use {divisors(count)}"
                )
    for name, shown in misfit.items():
        if name not in found:
            row = plan.table[name]
            raise UserError(
                f"{name} {row} has {len(row.dims)} dims, but in {whose} it is {shown}; name each"
            )
    return found


def _stated(n: Node, have: Layout | None, to: Layout | None, plan: Plan) -> Layout | None:
    """Where a value lives after a collective that a user's module names; the value must need it."""
    if have is None:
        return to
    asked = n.binding.asked
    assert asked is not None
    kind, degrees, where = asked
    over = plan.layout(Tensor((), (), degrees)).partial
    here = have.partial if kind in ("all_reduce", "reduce_scatter") else have.axes() - have.partial
    if not over <= here:
        shown = have.show(tuple(map(str, n.shape)))
        lacks = "not a partial sum" if here is have.partial else "not split"
        raise UserError(
            f"{n.name}, {where}: {kind} of a value that is {lacks} over "
            f"{'+'.join(degrees)}, {shown}"
        )
    if to is not None:
        return to
    over = over or here
    if kind == "all_reduce":
        return Layout(have.dims, have.partial - over)
    return Layout(
        tuple(tuple(a for a in axes if a not in over) for axes in have.dims), have.partial
    )


def _cached(plan: Plan) -> dict[str, Dims]:
    """Inference: the cache has a rank's requests and its key-value heads, as vLLM's.

    Ranks that share a key-value head, or latents, have a copy each, or share the tokens: queries of
    their heads then go to all of them (`_striped`). Logits are gathered for the sampler.
    """
    requests = (plan.data, ())
    heads = tuple(a for a in plan.tensor if a in plan.key_value)
    cache, striped = (*requests, heads, ()), (plan.data, plan.stripes, (), heads, ())
    rows: dict[str, Dims] = {"logits_gathered": (*requests, ()), "logit_rows": requests}
    rows["token_requests"] = requests
    rows |= {f"{name}_cache_striped": striped for name in ("k", "v")}
    rows["latent_cache_striped"] = (plan.data, plan.stripes, (), ())
    rows["prefix_slots"] = (plan.data, plan.stripes, ())
    rows["row_slots"] = requests
    rows["q_striped"] = (*requests, tuple(a for a in plan.tensor if a not in plan.stripes), ())
    rows["striped_context"] = (plan.data, plan.context, plan.tensor, ())
    rows |= {f"{name}_cache_source": cache for name in ("k", "v")}
    rows |= dict.fromkeys(("source_slots", "source_ends", "block_table_source"), requests)
    rows |= {f"{name}_striped": requests for name in ("token_slots", "block_table")}
    for kind in ("", "_local", "_chunked"):
        rows |= {f"{name}{kind}": requests for name in ("token_slots", "block_table", "key_slots")}
        rows |= {f"{name}_cache{kind}": cache for name in ("k", "v")}
        rows[f"latent_cache{kind}"] = (*requests, ())
    return rows | {"token_positions": (plan.data, plan.context)}


def _expert_parallel(plan: Plan, sequence: tuple[str, ...]) -> dict[str, Dims]:
    """Copies of tokens, by expert: where they come from, and where their experts are.

    The all-to-all goes from [E, rows of this rank's tokens] to [experts of this rank, all their
    rows]. What splits an expert itself (expert tensor parallelism) gathers rows before it and
    scatters sums after. Megatron-LM's other dispatcher gathers tokens over both instead.
    """
    tokens = (*plan.data, *sequence)
    away = tuple(a for a in tokens if a not in plan.expert)
    moving = tuple(a for a in reversed(plan.expert) if a in tokens)  # innermost first
    inside = tuple(a for a in away if a in plan.expert_tensor)
    whole = tuple(a for a in away if a not in inside)
    if plan.dispatcher == "allgather":
        data, rest = (tuple(a for a in axes if a in whole) for axes in (plan.data, sequence))
        known, rows = (data, rest, ()), (plan.expert, whole)
        return {
            **dict.fromkeys(("routed", "routes_known", "gates_known"), known),
            **dict.fromkeys(("routes_here", "gates_here"), (data, rest, plan.expert)),
            **dict.fromkeys(("permuted", "expert_in"), (*rows, ())),
            **dict.fromkeys(("probs", "probs_in"), rows),
            "moe_reduced": (plan.data, sequence, ()),
        }
    sent, there, here = ((), away + moving), (plan.expert, away), (plan.expert, whole)
    # Ranks that have the same tokens sum up what their experts make of them.
    back = tuple(a for a in plan.expert if a not in moving), away + moving
    return {
        "permuted": (*sent, ()),
        "returned": (*back, ()),
        **dict.fromkeys(("dispatched", "expert_out"), (*there, ())),
        "expert_in": (*here, ()),
        "probs": sent,
        "probs_dispatched": there,
        "probs_in": here,
        "splits": (whole + inside + moving, ()),
        "splits_known": (whole, ()),
    }


def _context_parallel(plan: Plan) -> dict[str, Dims]:
    """Where queries, keys and values are while attention runs.

    p2p: keys stay split like queries and go round the ring (arXiv 2310.01889); all_gather: every
    rank has all keys (Llama 3, arXiv 2407.21783, section 3.3.2); a2a: whole sequences of fewer
    heads (Ulysses, arXiv 2309.14509).
    """
    heads = (plan.data, plan.context, plan.tensor, ())
    keys = (plan.data, plan.context, tuple(a for a in plan.tensor if a in plan.key_value), ())
    latents, whole_latents = (plan.data, plan.context, ()), (plan.data, (), ())
    if plan.cp_comm_type == "all_gather":
        whole = (plan.data, (), *keys[2:])
        rows = {"k_core": whole, "v_core": whole}
    elif plan.cp_comm_type == "a2a":
        few = (plan.data, (), plan.tensor + plan.context, ())
        few_keys = (plan.data, (), tuple(a for a in few[2] if a in plan.key_value), ())
        rows = {"q_core": few, "k_core": few_keys, "v_core": few_keys, "context": heads}
    else:
        rows = {"q_core": heads, "k_core": keys, "v_core": keys}
    rows |= {f"cross_{name}": dims for name, dims in rows.items()}
    rows |= dict.fromkeys(("encoder_bias", "decoder_bias"), _of_scores(plan))
    return rows | {"latent_core": latents if plan.cp_comm_type == "p2p" else whole_latents}


def _of_scores(plan: Plan) -> Dims:
    """Where scores are, [heads, queries, keys], of which a rank has those of its queries."""
    if plan.cp_comm_type == "a2a":
        return (plan.tensor + plan.context, (), ())
    return (plan.tensor, plan.context, ())


def _states_parallel(plan: Plan) -> dict[str, Dims]:
    """Whole sequences of fewer heads while a state goes along them, as Megatron-LM's Mamba has it.

    A group whose heads are on several ranks is gathered there: the same bytes as Megatron-LM's
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


def _reduced(have: Layout | None, plan: Plan, dims: Dims) -> Layout | None:
    """Summed over the replicas of the model; what is partial over other axes stays so for now."""
    if have is None:
        return None
    return Layout(dims, have.partial - set(plan.data) - set(plan.context))


def _spread(
    n: Node, parameter: Parameter, dims: Dims, plan: Plan, sizes: Mapping[str, int]
) -> Dims:
    """Split one more dim over the sharding axes, at best one that divides, is whole and large.

    PyTorch splits rows: what a linear's weight leads to, our last dim, or the rows of a table.
    """
    shard = tuple(a for a in plan.shard if not any(a in axes for axes in dims))
    if not shard:
        return dims
    if plan.shard_rows:
        at = parameter.rows % len(dims)
        return (*dims[:at], dims[at] + shard, *dims[at + 1 :])
    ranks = plan.mesh.size(*shard)

    def merit(i: int) -> tuple[bool, bool, int]:
        here = math.ceil(n.shape[i].value(sizes) / plan.mesh.size(*dims[i]))
        return here % ranks == 0, not dims[i], here

    best = max(range(len(dims)), key=merit)
    return (*dims[:best], dims[best] + shard, *dims[best + 1 :])
