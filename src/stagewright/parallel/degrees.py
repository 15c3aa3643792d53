"""Mesh of a run and the plan of its axes, from the degrees of parallelism.

Where two parallelisms factor the same ranks differently (tensor parallelism wider than the
key-value heads, experts spread over data-parallel ranks), the mesh has the axes of both
factorizations: dp becomes the axes `dp_ep` and `dp_edp`, and a degree consists of several axes.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

from stagewright.algebra.layout import MIRROR, Mesh
from stagewright.errors import UserError
from stagewright.model.config import ModelConfig
from stagewright.parallel.plan import Axes, Plan
from stagewright.run import requests
from stagewright.run.settings import Run


class AxisUse(NamedTuple):
    """Axis of the mesh: its degree for dense weights, and its degree for experts' weights."""

    name: str
    size: int
    dense: str
    """tp or an axis of tp (tp_kv, tp_rep, tp_group, tp_dcp), cp, dp, dp_shard, dp_replicate, pp."""
    expert: str
    """etp, ep, edp, pp; "": none."""


def parallelization(run: Run, model: ModelConfig, *, mirrored: bool = False) -> tuple[Mesh, Plan]:
    """Mesh of a run, with all axes, and the plan of those of more than one rank.

    `mirrored`: the schedule has every stage twice, and the two replicas are data parallel.
    """
    uses = axes_of(run, model)
    sizes = {use.name: use.size for use in uses}

    def axes(*parts: str) -> Axes:
        """Axes of more than one rank of some degrees, or axes of tp, outermost first."""
        split = [use for use in reversed(uses) if use.size > 1]
        return tuple(use.name for x in parts for use in split if x in (use.dense, use.expert))

    def outermost(axes: Axes, ranks: int) -> Axes:
        """First axes, whose sizes multiply to `ranks`."""
        outer: Axes = ()
        while len(outer) < len(axes) and ranks % sizes[axes[len(outer)]] == 0:
            ranks //= sizes[axes[len(outer)]]
            outer = axes[: len(outer) + 1]
        return outer

    tensor_axes = [name for name, _ in _tensor_axes(run, model)]
    tensor, cp = axes(*reversed(tensor_axes)), axes("cp")
    expert, expert_tensor = (axes("ep"), axes("etp")) if model.num_experts else ((), ())
    # Ranks of cp decode the same tokens.
    context = () if run.mode == "decode" else cp
    stripes: Axes = ()
    if requests.stripes(run, model) > 1:
        stripes = cp + (axes(tensor_axes[0]) if _striped(run) > 1 else ())
    replicas = axes("dp_replicate", "dp_shard", "dp")
    data = ((MIRROR,) if mirrored else ()) + replicas
    # Ranks of tp that split the key-value heads; the others split the query heads of one.
    kv_ranks = gcd(run.tp, model.shared_query_groups)
    key_value = outermost(tensor, kv_ranks)
    inner = frozenset(tensor) - {*key_value}
    if run.cp > 1 and run.cp_comm_type == "a2a":
        if model.shared_query_groups // kv_ranks % run.cp == 0:
            key_value += context
        else:
            inner |= {*context}
    state_groups: Axes = ()
    if groups := shared_groups(model):
        group_ranks = gcd(run.tp, groups)
        state_groups = outermost(tensor, group_ranks)
        state_groups += context if groups // group_ranks % run.cp == 0 else ()
    combined: Axes = ()
    if run.mode != "train":
        # Ranks of dp may differ in tokens: they exchange copies, of which all get a mean. Where
        # copies go to other ranks of ep, ranks of one sequence send those of their own tokens.
        sequence = (*context, *(tensor if run.sequence_parallel_ranks > 1 else ()))
        exchanging = {*data, *(sequence if {*axes("ep")} & {*data, *sequence} else ())}
        combined = tuple(a for a in axes("etp") if a not in exchanging)
    hybrid = any(use.dense == "dp_shard" for use in uses)
    labels = {"tp": tensor, "cp": cp, "dp": replicas, "pp": axes("pp")}
    labels |= {"dcp": stripes} if stripes != cp else {}
    if model.num_experts:
        labels |= {"ep": expert, "edp": axes("edp"), "etp": expert_tensor}
    mesh = Mesh(
        tuple((use.name, use.size) for use in uses),
        tuple((label, parts) for label, parts in labels.items() if parts),
        mirror="pp" if mirrored else "",
    )
    return mesh, Plan(
        groups=mesh.groups,
        data=data,
        context=context,
        stripes=stripes,
        tensor=tensor,
        key_value=key_value,
        inner=inner,
        state_groups=state_groups,
        expert=expert,
        expert_tensor=expert_tensor,
        dispatcher=run.moe_token_dispatcher_type,
        combined=combined,
        zero_axes=(*(axes("dp_shard") if hybrid else data), *context),
        zero=run.zero,
        sequence_parallel=run.sequence_parallel_ranks > 1,
        cp_comm_type=run.cp_comm_type if run.mode == "train" else "all_gather",
        reduce_each_microbatch=reduces_each_microbatch(run),
        sum_as_read=run.sequence_parallel_grads == "dtensor" and run.zero < 3,
        counts_to_owners=run.moe_counts_exchange == "all_to_all",
        shard_rows=run.fsdp_shard_dim != "best" and run.zero == 3,
        shard_few_experts=run.fsdp_shard_dim == "few_experts_second",
        embedding_all_reduce=model.position == "learned",
        gather_adapters=not run.lora_all_to_all,
    )


def reduces_each_microbatch(run: Run) -> bool:
    """Return True if gradients are reduced in every microbatch, as sharded ones must be."""
    late = run.zero == 3 and run.fsdp_reduce == "last" and run.microbatches > 1
    return (run.zero >= 2 and not late) or run.grad_reduce == "microbatch"


def axes_of(run: Run, model: ModelConfig) -> list[AxisUse]:
    """Axes of the mesh, fastest first."""
    degrees: dict[str, list[tuple[str, int]]] = {
        "tp": _tensor_axes(run, model),
        "cp": [("cp", run.cp)],
        "dp": [("dp", run.dp)],
        "pp": [("pp", run.pp)],
        "ep": [],
    }
    if run.zero > 0 and run.dp_shard is not None and run.dp_shard < run.dp:  # hybrid sharding
        degrees["dp"] = [("dp_shard", run.dp_shard), ("dp_replicate", run.dp // run.dp_shard)]
    dense = [x for degree in run.order.split("-") for x in degrees[degree]]
    if not model.num_experts:
        return [AxisUse(name, size, name, "pp" if name == "pp" else "") for name, size in dense]
    # The coarsest axes of which both factorizations of the same ranks consist.
    etp = run.expert_tensor_parallel_size
    experts = [("etp", etp), ("ep", run.ep), ("edp", run.tp * run.cp * run.dp // (etp * run.ep))]
    remaining = [x for x in experts if x[1] > 1]
    uses: list[AxisUse] = []
    for name, size in dense:
        if name == "pp" or size == 1:
            uses.append(AxisUse(name, size, name, "pp" if name == "pp" else ""))
            continue
        ranks = size
        while ranks > 1:
            (expert, expert_ranks), *others = remaining
            common = gcd(ranks, expert_ranks)
            if common not in (ranks, expert_ranks):
                raise UserError(
                    f"{expert}={expert_ranks} does not fit the ranks of {name}={size}: one must be "
                    "a multiple of the other; choose etp and ep from products of tp, cp and dp"
                )
            axis = name if common == size else f"{name}_{expert}"
            uses.append(AxisUse(axis, common, name, expert))
            ranks //= common
            expert_ranks //= common
            remaining = others if expert_ranks == 1 else [(expert, expert_ranks), *others]
    return uses


def _tensor_axes(run: Run, model: ModelConfig) -> list[tuple[str, int]]:
    """Axes of tp with their sizes, fastest first.

    A model may have fewer key-value heads, or fewer groups of state heads, than tp has ranks: then
    neighbours have copies, and tp has an axis for the ranks that differ and one for the copies.
    """
    cuts = {gcd(run.tp, shared_groups(model)): "tp_group"} if shared_groups(model) else {}
    if model.attends:
        cuts[gcd(run.tp, model.shared_query_groups)] = "tp_kv"
    shared = _striped(run)
    if shared > 1:
        cuts.setdefault(run.tp // shared, "tp_rep")
    within = sorted(ranks for ranks in cuts if 1 < ranks < run.tp)
    if not within:
        return [("tp", run.tp)]
    pieces: list[tuple[str, int]] = []
    for below, ranks in zip([1, *within], within, strict=False):
        if ranks % below:
            raise UserError(
                f"tp={run.tp} shares {within[0]} and {within[1]} ways the key-value heads and the "
                f"groups of state heads of {model.name}, which has fewer of them than ranks; use a "
                "power of two"
            )
        pieces.append((cuts[ranks], ranks // below))
    innermost = "tp_dcp" if shared > 1 else "tp_rep"
    return [(innermost, run.tp // within[-1]), *reversed(pieces)]


def _striped(run: Run) -> int:
    """Number of neighbours in tp that share the cache of their requests, token by token."""
    return max(1, (run.dcp or 1) // run.cp)


def shared_groups(model: ModelConfig) -> int:
    """Number of groups of heads that share keys and queries in a state-space layer; 0: no groups.

    Mamba-1 shares its B and C among all channels, and splits those.
    """
    state = model.state_space
    return state.groups if state and model.recurrence != "mamba" else 0
