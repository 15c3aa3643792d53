"""The mesh of a run and the plan of its axes, from the degrees of parallelism.

Where two parallelisms factor the same ranks differently (tensor parallelism wider than the
key-value heads, experts spread over data-parallel ranks), the mesh has the axes of both
factorizations: dp becomes the axes `dp_ep` and `dp_edp`, and a degree names the axes it is made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import NamedTuple

from stagewright.algebra.layout import MIRROR, Mesh
from stagewright.errors import UserError
from stagewright.model.config import ModelConfig
from stagewright.parallel.plan import Axes, Plan
from stagewright.run import requests as serving
from stagewright.run.settings import Run


class AxisUse(NamedTuple):
    """One axis of the mesh, the degree that it is part of, and that of the experts' weights."""

    name: str
    size: int
    dense: str  # tp, cp, dp, dp_shard, dp_replicate, pp
    expert: str  # etp, ep, edp, or pp


def parallelization(run: Run, model: ModelConfig, *, mirrored: bool = False) -> tuple[Mesh, Plan]:
    """The mesh of a run and the plan of its axes; axes of one rank are left out of the plan.

    `mirrored`: the schedule holds every stage twice, and the two replicas are data parallel.
    """
    pieces = axes_of(run, model)

    def axes(*degrees: str) -> tuple[str, ...]:
        """The axes of some degrees, outermost first."""
        split = [p for p in reversed(pieces) if p.size > 1]
        return tuple(p.name for d in degrees for p in split if d in (p.dense, p.expert))

    parts = _tensor_axes(run, model)
    tensor, cp = axes(*(name for name, _ in reversed(parts))), axes("cp")
    # Ranks of cp decode the same tokens.
    context = () if run.mode == "decode" else cp
    within = axes(parts[0][0]) if _striped(run) > 1 else ()
    stripes = cp + within if serving.stripes(run, model) > 1 else ()
    replicas = axes("dp_replicate", "dp_shard", "dp")
    data = ((MIRROR,) if mirrored else ()) + replicas
    sizes = {p.name: p.size for p in pieces}
    heads = _outermost(tensor, sizes, gcd(run.tp, model.shared_query_groups))
    key_value, inner = _key_value(run, model, tensor, heads, context)
    hybrid = any(p.dense == "dp_shard" for p in pieces)
    labels = {"tp": tensor, "cp": cp, "dp": replicas, "pp": axes("pp")}
    labels |= {"dcp": stripes} if stripes != cp else {}
    if model.num_experts:
        labels |= {"ep": axes("ep"), "edp": axes("edp"), "etp": axes("etp")}
    mesh = Mesh(
        tuple((p.name, p.size) for p in pieces),
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
        state_groups=_state_groups(run, model, tensor, context, sizes),
        expert=axes("ep") if model.num_experts else (),
        expert_tensor=axes("etp") if model.num_experts else (),
        columns=data if model.recommendation else (),
        dispatcher=run.moe_token_dispatcher_type,
        combined=_combined(run, axes("etp"), axes("ep"), data, context, tensor),
        shard=(*(axes("dp_shard") if hybrid else data), *context),
        zero=run.zero,
        sequence_parallel=run.sequence_parallel_size > 1,
        cp_comm_type=run.cp_comm_type if run.mode == "train" else "all_gather",
        reduce_each_microbatch=reduces_each_microbatch(run),
        sum_as_read=run.sequence_parallel_grads == "dtensor" and run.zero < 3,
        counts_to_owners=run.moe_counts_exchange == "all_to_all",
        shard_rows=run.fsdp_shard_dim != "best" and run.zero == 3,
        shard_few_experts=run.fsdp_shard_dim == "few_experts_second",
        embedding_all_reduce=model.position == "learned",
        gather_adapters=not run.lora_all_to_all,
    )


def _combined(run: Run, etp: Axes, ep: Axes, data: Axes, context: Axes, tensor: Axes) -> Axes:
    """The axes of etp whose ranks combine copies of tokens before sums are reduced: in inference.

    Ranks of dp may differ in tokens: they exchange copies, of which all get a mean. Where copies go
    to other ranks of ep, ranks of one sequence send those of their own tokens.
    """
    if run.mode == "train":
        return ()
    split = (*context, *(tensor if run.sequence_parallel_size > 1 else ()))
    own = {*data, *(split if {*ep} & {*data, *split} else ())}
    return tuple(a for a in etp if a not in own)


def reduces_each_microbatch(run: Run) -> bool:
    """Whether gradients are reduced in every microbatch, as sharded gradients must be."""
    late = run.zero == 3 and run.fsdp_reduce == "last" and run.microbatches > 1
    return (run.zero >= 2 and not late) or run.grad_reduce == "microbatch"


def axes_of(run: Run, model: ModelConfig) -> list[AxisUse]:
    """The axes of the mesh, fastest first."""
    hybrid = run.zero > 0 and run.dp_shard is not None and run.dp_shard < run.dp
    degrees: dict[str, list[tuple[str, int]]] = {
        "tp": _tensor_axes(run, model),
        "cp": [("cp", run.cp)],
        "dp": [("dp", run.dp)],
        "pp": [("pp", run.pp)],
        "ep": [],
    }
    if hybrid and run.dp_shard:
        degrees["dp"] = [("dp_shard", run.dp_shard), ("dp_replicate", run.dp // run.dp_shard)]
    dense = [x for degree in run.order.split("-") for x in degrees[degree]]
    if not model.num_experts:
        return [AxisUse(name, size, name, "pp" if name == "pp" else "") for name, size in dense]
    etp = run.expert_tensor_parallel_size
    world = run.tp * run.cp * run.dp
    experts = [("etp", etp), ("ep", run.ep), ("edp", world // (etp * run.ep))]
    common = iter(_common_axes([x for x in dense if x[0] != "pp"], experts))
    result: list[AxisUse] = []
    for name, size in dense:
        if name == "pp":
            result.append(AxisUse("pp", size, "pp", "pp"))
        left = size if name != "pp" else 1
        while left > 1:
            axis = next(common)
            result.append(axis)
            left //= axis.size
        if size == 1 and name != "pp":
            result.append(AxisUse(name, 1, name, ""))
    return result


def _tensor_axes(run: Run, model: ModelConfig) -> list[tuple[str, int]]:
    """The axes of tp, fastest first, with their sizes.

    A model may have fewer key-value heads, or fewer groups of state heads, than tp has ranks: then
    neighbours hold copies, and tp has an axis for the ranks that differ and one for the copies.
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
    """How many neighbours in tp share the cache of their requests, token by token."""
    return max(1, (run.dcp or 1) // run.cp)


def shared_groups(model: ModelConfig) -> int:
    """How many groups of heads share keys and queries in a state-space layer; 0 without groups.

    Mamba-1 shares its B and C among all channels, and splits those.
    """
    state = model.state_space
    return state.groups if state and model.recurrence != "mamba" else 0


def _outermost(axes: tuple[str, ...], sizes: Mapping[str, int], ranks: int) -> tuple[str, ...]:
    """The first axes whose sizes multiply to `ranks`."""
    outer: list[str] = []
    for axis in axes:
        if ranks % sizes[axis]:
            break
        outer.append(axis)
        ranks //= sizes[axis]
    return tuple(outer)


def _state_groups(
    run: Run,
    model: ModelConfig,
    tensor: tuple[str, ...],
    context: tuple[str, ...],
    sizes: Mapping[str, int],
) -> tuple[str, ...]:
    """The axes that split groups of state heads; the others split the heads of a group."""
    groups = shared_groups(model)
    ways = gcd(run.tp, groups)
    outer = _outermost(tensor, sizes, ways)
    return outer + (context if groups // ways % run.cp == 0 else ()) if groups else ()


def _common_axes(dense: list[tuple[str, int]], experts: list[tuple[str, int]]) -> list[AxisUse]:
    """The coarsest axes that both factorizations of the same ranks consist of, fastest first."""
    result: list[AxisUse] = []
    left = [x for x in experts if x[1] > 1]
    for name, size in dense:
        rest = size
        while rest > 1:
            (expert, most), *others = left
            piece = gcd(rest, most)
            if piece not in (rest, most):
                raise UserError(
                    f"{expert}={most} does not fit the ranks of {name}={size}: one must be a "
                    "multiple of the other; choose etp and ep from products of tp, cp and dp"
                )
            whole = piece == size
            result.append(AxisUse(name if whole else f"{name}_{expert}", piece, name, expert))
            rest //= piece
            most //= piece
            left = others if most == 1 else [(expert, most), *others]
    return result


def _key_value(
    run: Run,
    model: ModelConfig,
    tensor: tuple[str, ...],
    heads: tuple[str, ...],
    context: tuple[str, ...],
) -> tuple[tuple[str, ...], frozenset[str]]:
    """The axes that split key-value heads, and the axes that split the query heads of one.

    `heads` are the axes of `tensor` that split key-value heads where not all axes do.
    """
    kv = gcd(run.tp, model.shared_query_groups)
    if kv == run.tp:
        key_value, inner = tensor, frozenset[str]()
    elif kv == 1:
        key_value, inner = (), frozenset(tensor)
    else:
        key_value, inner = heads, frozenset(tensor) - set(heads)
    if run.cp > 1 and run.cp_comm_type == "a2a":
        if model.shared_query_groups // kv % run.cp == 0:
            return key_value + context, inner
        inner |= set(context)
    return key_value, inner
