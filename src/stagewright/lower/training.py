"""From a run to the program of every rank: the whole pipeline on one screen."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

from stagewright import blocks as nn
from stagewright.algebra import notation
from stagewright.algebra.layout import MIRROR, Mesh
from stagewright.algebra.notation import Tensor
from stagewright.blocks.chain import MADE_ON_EACH_STAGE, live_ins, tied_tables
from stagewright.errors import UserError, did_you_mean
from stagewright.graph.node import BYTES, Graph, Node, text
from stagewright.graph.recompute import remat
from stagewright.graph.roles import Role
from stagewright.graph.shard import shard
from stagewright.graph.verify import verify
from stagewright.lower import offload
from stagewright.lower.assemble import lower
from stagewright.lower.capacity import Capacity
from stagewright.lower.kernels import (
    Extent,
    bytes_of,
    extent_of,
    handed_on,
    interface,
    kernels,
)
from stagewright.lower.lifetimes import Gradients, static, uses
from stagewright.lower.routing import ROWS, Load, Routing, Rows
from stagewright.lower.stages import LoweredBlock, Placed, weight_half
from stagewright.model.catalog import resolve
from stagewright.model.config import Layer, ModelConfig
from stagewright.parallel.degrees import parallelization, reduces_each_microbatch
from stagewright.parallel.placement import names_in_table, strategy
from stagewright.parallel.plan import Plan
from stagewright.program.columns import Program
from stagewright.run import requests as serving
from stagewright.run.requests import read_bytes
from stagewright.run.rules import MOST_FLOPS, check
from stagewright.run.settings import Run
from stagewright.schedule.schedules import Order, flat, mirrored, places
from stagewright.schedule.schedules import make as make_order
from stagewright.texttable import Table
from stagewright.views import tables


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """A run, all decided: sharded graph of each distinct block, schedule, every rank's program."""

    run: Run
    model: ModelConfig
    parameters: int
    active_parameters: int
    blocks: Mapping[str, Graph]
    order: Order
    program: Program
    capacity: Capacity | None = None  # inference, where the memory of a device is known
    load: Load | None = None  # of experts, where it is not even

    def __repr__(self) -> str:
        return f"<{self.run.describe()}: {self.program.mesh.world_size} ranks, compiled>"

    def _repr_html_(self) -> str:
        from stagewright.views.pages.notebook import of_compiled

        return of_compiled(self)

    def summary(self) -> dict[str, Any]:
        """What the ranks compute, exchange and hold: the object that `show --json` prints."""
        from stagewright.views.summary import summary

        return summary(self)

    def compute(self) -> Table:
        """Layers, tasks and FLOPs by phase of a rank of each stage."""
        return tables.compute(self.summary())

    def memory(self) -> Table:
        """Bytes by category while most is held, of a rank of each stage."""
        return tables.memory(self.summary())

    def communication(self) -> Table:
        """Collectives and messages of a rank of each stage, by phase, kind and axis."""
        return tables.communication(self.summary(), merged=False)

    def tasks(self, rank: int = 0) -> Table:
        """All that one rank does, a row a task, in the order of issue."""
        return tables.tasks(self.program, rank)

    def graph_text(self) -> str:
        """The sharded graph in the paper's notation, one section per distinct block."""
        return "\n\n".join(f"# {label}\n{text(graph)}" for label, graph in self.blocks.items())


def compile(
    run: Run, model: ModelConfig | None = None, *, table: Mapping[str, str] | None = None
) -> Compiled:
    """Everything that a run implies; raises UserError where it cannot be done.

    `model` replaces the configuration that `run.model` names. `table` is a strategy of one's own:
    where values and parameters live, by name, such as `{"wq": "[M, A/tp, D]"}`; it goes before the
    rows of `run.strategy` and those that the degrees imply.
    """
    model = (model or resolve(run.model)).with_overrides(
        num_layers=run.layers, vocab_size=run.vocab, mtp_num_layers=run.mtp_num_layers
    )
    run = run.resolved(model)
    check(run, model)
    if run.mode == "train":
        return _training(run, model, table or {})
    from stagewright.lower import disaggregated
    from stagewright.lower import serving as inference  # which are made of this module's parts

    if run.prefill is not None:
        return disaggregated.compiled(run, model, table or {})
    return inference.compiled(run, model, table or {})


def _training(run: Run, model: ModelConfig, table: Mapping[str, str]) -> Compiled:
    """A training step of a resolved run that has been checked."""
    order = make_order(str(run.schedule), run.pp, run.microbatches, run.vpp)
    twice = mirrored(order)
    mesh, plan = parallelization(run, model, mirrored=twice)
    plan = replace(plan, table=table_of(run, model, table))
    sizes = sizes_of(run, model, replicas=1 + twice)
    recipe = recipe_of(run, model)
    check_rows(plan, run, model, sizes)
    stages = with_ties(place_blocks(run, model), order, model)
    kinds = dict.fromkeys(kind for stage in stages for kind, _ in stage)
    graphs = {kind: sharded(kind, run, model, plan, sizes, recipe) for kind in kinds}
    pipeline = {"pp"} if run.pp > 1 else set[str]()
    norm_axes = tuple(sorted({*plan.model_axes, *pipeline} - {MIRROR}))  # its ranks are pp's
    vector = run.clip_grad_norm == "vector"
    norm_dims = (plan.shard if plan.zero else (), plan.tensor) if vector else ()

    def program(rows: Rows | None) -> Program:
        """What ranks do if experts have so many rows."""
        shards = frozenset(plan.shard if plan.shard_rows else ())
        extent = extent_of(sizes, mesh, {ROWS: rows} if rows else None, shards)
        blocks = {kind: lowered(graph, run, mesh, extent, kind) for kind, graph in graphs.items()}
        placed = [[Placed(blocks[k], i, k.place(i)) for k, i in stage] for stage in stages]
        return lower(
            placed,
            order,
            mesh,
            norm_axes=norm_axes,
            norm_dims=norm_dims,
            clip_grad=run.clip_grad,
            streams=run.streams,
            bucket_cap=_bucket_cap(run),
            units=run.fsdp_root_unit and run.zero == 3,
            caches=run.pipeline_caches,
            schedule=(run.schedule or "") if len(stages) == run.pp else "",
        )

    routing = Routing.of(run, model, plan, sizes["B"] * sizes["S"]) if model.num_experts else None
    load = Load.read(run.expert_load, routing, model) if routing and run.expert_load else None
    whole = load.programs(program) if load else program(routing.even() if routing else None)
    if run.memory_allowance is not None:
        allowance = {"allowance": read_bytes(run.memory_allowance, "memory_allowance")}
        held = [replace(of, memory={**of.memory, **allowance}) for of in whole.classes]
        whole = replace(whole, classes=tuple(held))
    texts = {kind.label(graphs): graph for kind, graph in graphs.items()}
    return Compiled(run, model, *parameters(model), texts, order, whole, load=load)


def with_ties(
    stages: Sequence[Sequence[tuple[Kind, int]]], order: Order, model: ModelConfig
) -> list[list[tuple[Kind, int]]]:
    """The blocks of the stages, each with what it has to know of tables with copies elsewhere."""
    ranks: dict[int, frozenset[int]] = {}
    for p in places(order):
        ranks[p.stage] = ranks.get(p.stage, frozenset()) | {p.rank}
    held: dict[str, list[tuple[int, int]]] = {}  # stage, block
    for s, stage in enumerate(stages):
        for i, (kind, _) in enumerate(stage):
            for name in tied_tables(model, kind.block, kind.layer, kind.begins):
                held.setdefault(name, []).append((s, i))
    ties: dict[tuple[int, int], list[nn.Tie]] = {}
    for name, copies in held.items():
        everywhere = {ranks[s] for s, _ in copies}
        on_ranks = {ranks[s]: n for n, (s, _) in reversed([*enumerate(copies)])}  # the first
        first = {s: n for n, (s, _) in reversed([*enumerate(copies)])}
        last = {s: n for n, (s, _) in enumerate(copies)}
        for n, (s, i) in enumerate(copies):
            owner, away = n == on_ranks[ranks[s]], len(everywhere) > 1
            tie = nn.Tie(name, n == 0, owner, away, n < last[s], n == first[s])
            ties.setdefault((s, i), []).append(tie)
        for of in everywhere:
            _check_table(order, of, name, sorted({s for s, _ in copies if ranks[s] == of}))
    return [
        [
            (kind._replace(ties=tuple(ties.get((s, i), ()))), layer)
            for i, (kind, layer) in enumerate(stage)
        ]
        for s, stage in enumerate(stages)
    ]


def _check_table(order: Order, ranks: Iterable[int], name: str, stages: Sequence[int]) -> None:
    """A table of several stages of a rank is complete when the gradient of the first one's is."""
    for rank in ranks if len(stages) > 1 else ():
        ends = [a for a in flat(order[rank]) if a.kind in "BW" and a.stage in stages]
        if ends[-1].stage != stages[0]:
            raise UserError(
                f"pipeline order: on rank {rank}, {ends[-1]} comes after all backwards of stage "
                f"{stages[0]}, which shares {name} with it; move one of stage {stages[0]} behind it"
            )


def sizes_of(run: Run, model: ModelConfig, *, replicas: int = 1) -> dict[str, int]:
    """The numbers behind the dims; the vocabulary padded so that tp divides it.

    In inference, those that depend on a batch are not among them. `replicas`: how often the
    schedule holds each stage, each time with a microbatch of its own.
    """
    multiple = run.make_vocab_size_divisible_by * run.tp
    sizes = nn.sizes(model) | {"V": -(-model.vocab_size // multiple) * multiple}
    own = {name: number for m in model.modules for name, number in m.sizes.items()}
    if run.mode != "train":
        held = model.num_experts + run.num_redundant_experts
        return sizes | {"B": run.dp, "H": held, "Stripes": serving.stripes(run, model)} | own
    return sizes | {
        "B": run.micro_batch_size * run.dp * replicas,
        "S": (run.decoder_seq_length if model.encoder_num_layers else run.seq_length) or 0,
        "Source": run.seq_length or 0,
        "R": _rows(run, model) * replicas,
        "dp_parts": run.dp * replicas,
        "parts": run.dp * run.cp * (run.tp if run.sequence_parallel else 1) * replicas,
        **_text(run, model),
        **own,
    }


def _text(run: Run, model: ModelConfig) -> dict[str, int]:
    """Where a tower's patches stand before the text, what is left of the sequence."""
    vision = model.tower and model.tower.vision
    return {"Text": (run.seq_length or 0) - vision.patches} if vision else {}


def _rows(run: Run, model: ModelConfig) -> int:
    """Copies of tokens that each expert gets from all ranks: as many of each rank's tokens."""
    if not model.num_experts:
        return 0
    ranks = run.tp * run.cp * run.dp
    tokens = run.micro_batch_size * run.dp * (run.seq_length or 0)
    return ranks * math.ceil(tokens * model.top_k / model.num_experts / ranks)


def table_of(run: Run, model: ModelConfig, given: Mapping[str, str]) -> dict[str, Tensor]:
    """Where named values live: as modules say, as the run's file says, as the caller says."""
    rows: dict[str, Tensor] = {}
    for module in model.modules:
        rows |= module.table
        if model.bare:
            inputs = [f"{module.name}.{name}" for name, _, _ in module.inputs]
            like = {f"d_{name}": name for name in inputs}
            like |= {"x": inputs[0], "dx": inputs[0], "dy": f"{module.name}.{module.output}"}
            rows |= {name: rows[other] for name, other in like.items() if other in rows}
    if run.strategy is not None:
        rows |= notation.table(run.strategy)
    for name, text_ in given.items():
        try:
            rows[name] = notation.tensor(text_)
        except notation.NotationError as error:
            raise UserError(f"table: {name}: {error}") from None
    return rows


def check_rows(plan: Plan, run: Run, model: ModelConfig, sizes: Mapping[str, int]) -> None:
    """Every row of the table is of some value, and fits it."""
    if not plan.table:
        return
    known: set[str] = set()
    found: set[str] = set()
    for kind in {kind for stage in place_blocks(run, model) for kind, _ in stage}:
        graph = block_of(kind.block, model, recipe_of(run, model, kind), kind.layer).graph
        known |= {n.binding.name or n.name for n in graph if n.phase != "optimizer"}
        found |= names_in_table(graph, plan, sizes, model.name)
    own = {name for module in model.modules for name in module.table}
    own |= {"x", "dx", "dy", *(f"d_{name}" for name in own)}  # those of modules may be unused
    unknown = sorted(set(plan.table) - found - own)
    if unknown:
        hint = did_you_mean(unknown[0], known) or "; see `stagewright show --graph` for the names"
        raise UserError(f"strategy: {model.name} has no value {unknown[0]!r}{hint}")


class Kind(NamedTuple):
    """What makes two blocks of a model differ."""

    block: str  # embedding, layer, head
    layer: Layer = Layer()
    recomputed: bool = False
    states_on_host: bool = False
    activations_on_host: bool = False
    root: bool = False  # part of FSDP's root unit
    ties: tuple[nn.Tie, ...] = ()
    begins: frozenset[str] = frozenset()  # as in `nn.Recipe`
    ends: frozenset[str] = frozenset()

    def place(self, layer: int) -> str:
        """What a block of this kind is called in its place."""
        if layer >= 0:
            return f"layer{layer}"
        return f"{self.block}{self.layer.ahead or ''}"

    def label(self, kinds: Iterable[Kind]) -> str:
        """A name that tells it from the other kinds of the model."""
        alike = [k for k in kinds if k.block == self.block]
        words = [self.block]
        if len({k.layer.mixer for k in alike}) > 1:
            words.append(self.layer.mixer)
        if len({k.layer.mlp for k in alike}) > 1:
            words.append(self.layer.mlp)
        if len({k.layer.ahead for k in alike}) > 1:
            words.append(str(self.layer.ahead))
        if len({k.layer.block for k in alike}) > 1 and self.layer.block:
            words.append(f"block {self.layer.block}")
        if len({(k.begins, k.ends) for k in alike}) > 1:
            words += [f"first with {x}" for x in sorted(self.begins)]
            words += [f"last with {x}" for x in sorted(self.ends)]
        if len({k.ties for k in alike}) > 1:
            words += [t.words for t in self.ties[:1]]
        if len({k.recomputed for k in alike}) > 1:
            words.append("recomputed" if self.recomputed else "kept")
        if len({k.activations_on_host for k in alike}) > 1:
            words.append("offloaded" if self.activations_on_host else "on device")
        if len({k.states_on_host for k in alike}) > 1:
            words.append("updated on host" if self.states_on_host else "updated on device")
        return " ".join(words)


def place_blocks(run: Run, model: ModelConfig) -> list[list[tuple[Kind, int]]]:
    """(kind of block, layer) per virtual stage: what is no layer goes with the layer after it.

    What comes before all layers is on the first stage, what comes after them on the last.
    """
    counts = run.layers_per_stage
    assert counts is not None
    ends = list(itertools.accumulate(counts))
    stages: list[list[tuple[Kind, int]]] = [[] for _ in counts]
    between: list[tuple[Kind, int]] = []
    stage = 0
    for name, index, layer, behind in nn.chain(model):
        if index < 0:
            again = run.recompute == "full" and layer.ahead > 0
            kind = Kind(name, layer, again, root=run.fsdp_root_unit and run.zero == 3)
            (stages[stage] if behind else between).append((kind, -1))
            continue
        while index >= ends[stage]:
            stage += 1
        stages[stage if index else 0] += between
        between = []
        at = index - ends[stage] + counts[stage]
        recomputed = run.recompute == "full" and at < (run.recompute_num_layers or counts[stage])
        away = at < (run.cpu_offloading_num_layers or 0)
        stages[stage].append((Kind(name, layer, recomputed, activations_on_host=away), index))
    stages[-1] += between
    if run.mode != "train":
        return stages
    return [_states_on_host(run, stage) for stage in _with_ends(stages, model)]


def _with_ends(
    stages: list[list[tuple[Kind, int]]], model: ModelConfig
) -> list[list[tuple[Kind, int]]]:
    """The blocks, with what each is the first or the last to use of what is handed on.

    What is made anew on every stage is so by the first that uses it there.
    """
    users: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for s, stage in enumerate(stages):
        for i, (kind, _) in enumerate(stage):
            for name in live_ins(model, kind.block, kind.layer):
                at = s if name in MADE_ON_EACH_STAGE else -1
                users.setdefault((name, at), []).append((s, i))
    result = [[*stage] for stage in stages]
    for (name, at), some in users.items():
        for which, (s, i) in (("begins", some[0]), ("ends", some[-1])):
            if which == "begins" and at < 0:
                continue
            kind, layer = result[s][i]
            kind = kind._replace(**{which: getattr(kind, which) | {name}})
            result[s][i] = kind, layer
    return result


def _states_on_host(run: Run, stage: list[tuple[Kind, int]]) -> list[tuple[Kind, int]]:
    """The blocks of a stage, the first of them with their optimizer states on the host."""
    if not run.optimizer_cpu_offload:
        return stage
    share = len(stage) if run.optimizer_offload_fraction is None else (
        round(run.optimizer_offload_fraction * len(stage))
    )  # fmt: skip
    return [
        (kind._replace(states_on_host=n < share), index) for n, (kind, index) in enumerate(stage)
    ]


def recipe_of(run: Run, model: ModelConfig, kind: Kind | None = None) -> nn.Recipe:
    """How the run trains or serves, as far as one device can tell; of a block in its place."""
    kept = run.zero == 3 and not run.reshard_after_forward
    dtensor = run.sequence_parallel_grads == "dtensor" and run.sequence_parallel
    inference = nn.Inference(
        run.kv_cache_dtype or "bf16",
        serving.STORED[run.weight_precision or "bf16"],
        run.num_redundant_experts,
        run.mode == "decode",
        serving.stripes(run, model) > 1,
        run.mode != "train" and serving.prefixed(run),
    )
    return nn.Recipe(
        experts=_experts(run, model),
        precision=_precision(run),
        optimizer=run.optimizer,
        flash_attention=run.flash_attention,
        dropout=run.dropout and run.mode == "train",
        clip_grad=run.clip_grad,
        sum_tied=reduces_each_microbatch(run),
        # What is held wider is cast in each microbatch, and so are copies of that.
        cast_once=kept or (run.zero < 3 and run.params_dtype != "fp32"),
        gather_once=kept,
        ties=kind.ties if kind else (),
        begins=kind.begins if kind else frozenset(),
        ends=kind.ends if kind else frozenset(),
        mtp_loss=run.mtp_loss_scaling_factor,
        absorb=run.mla == "absorb",
        inference=None if run.mode == "train" else inference,
        eager=run.operators == "eager",
        joint_projections=run.joint_projections,
        repeat_kv=run.repeat_kv,
        split_loss=run.loss_parallel and run.tp > 1,
        step_tensors=run.optimizer_step_tensors and run.optimizer == "adamw",
        loss_parallel=run.loss_parallel or run.tp == 1,
        own_input_grads=run.input_grad_reduce == "linear" and run.tp > 1,
        whole_embedding_grad=run.whole_embedding_grad and run.tp > 1,
        sum_as_made=dtensor and run.zero == 3,
        sum_as_read=READS[run.optimizer] if dtensor and run.zero < 3 else 0,
    )


READS = {"adamw": 3, "sgd": 1}
"""How often PyTorch's optimizers read a gradient: `lerp_` once and `addcmul_` twice; `add_`."""


def _precision(run: Run) -> nn.Precision:
    """Number formats of a run."""
    usual = replace(nn.PRECISIONS[run.precision], reduce=run.grad_reduce_dtype or "")
    held = run.params_dtype
    if held is None:
        return usual
    return replace(usual, param=held, gradient=held, moment=held, master="")


@lru_cache(maxsize=64)
def block_of(name: str, model: ModelConfig, recipe: nn.Recipe, layer: Layer) -> nn.Block:
    """A block for one device: the same one for all the runs of a search."""
    return nn.BLOCKS[name](model, recipe, layer)


def _experts(run: Run, model: ModelConfig) -> nn.ExpertRecipe:
    exchanged = run.ep * (run.etp or run.tp) > 1 and not run.moe_pad_expert_input_to_capacity
    bias, trains = run.moe_router_enable_expert_bias, run.mode == "train"
    return nn.ExpertRecipe(
        dispatcher=run.moe_token_dispatcher_type,
        apply_probs=run.moe_apply_probs or model.apply_probs,
        exchange_counts=trains and exchanged and run.moe_token_dispatcher_type == "alltoall",
        router_fp32=run.moe_router_dtype == "fp32",
        load_balancing_type=run.moe_router_load_balancing_type,
        aux_loss=run.moe_aux_loss_coeff,
        z_loss=run.moe_z_loss_coeff,
        expert_bias=model.expert_bias if bias is None else bias,
    )


def sharded(
    kind: Kind,
    run: Run,
    model: ModelConfig,
    plan: Plan,
    sizes: Mapping[str, int],
    recipe: nn.Recipe | None = None,
) -> Graph:
    """One kind of block: forward, gradient, recompute, layouts."""
    recipe = recipe or recipe_of(run, model)
    recipe = replace(recipe, ties=kind.ties, begins=kind.begins, ends=kind.ends)
    block = block_of(kind.block, model, recipe, kind.layer)
    verify(block.graph, "building, with gradients")
    again = partial(_again, run=run, whole=kind.recomputed, root=kind.root)
    results = {n for c, n in handed_on(block.graph).items() if not c.gradient}
    results = results if kind.recomputed else {n for n in block.graph if n.role is Role.CORE}
    if run.recompute_early_stop:
        results = set[Node]()
    graph, primal = remat(block.graph, again, block.primal, rerun=results.__contains__)
    verify(graph, "recomputation")
    want = strategy(plan, sizes)
    keep = run.activation_gather == "keep"
    graph = shard(
        graph, want, primal, keep_gathered=keep, inner=plan.inner, model_axes=plan.model_axes
    )
    return verify(graph, "sharding")


def _again(n: Node, *, run: Run, whole: bool, root: bool) -> str | None:
    """The phase in which backward makes a forward value again, or None where it keeps it."""
    if n.role in (Role.SENT, Role.USED, Role.LOW_PRECISION):  # a weight as the computation sees it
        return "backward" if run.zero == 3 and run.reshard_after_forward and not root else None
    if whole:
        return None if n.once else "recompute"
    here = n.srcs[0] if n.op == "identity" and run.cp == 1 else n  # a place, and nothing moves
    if here.role is Role.REMADE:  # by the kernels that are trained with
        return "backward"
    gathers = run.activation_gather == "again" or run.cp_grad_comm_type == "ring"
    if n.role is Role.KEYS and run.cp_comm_type == "all_gather" and gathers:
        return "backward"
    if run.recompute != "selective":
        return None
    in_layer = n.scope in ("attention", "mlp")
    modules = {
        "core_attn": n.scope == "attention.core",
        "norm": n.op == "norm" and in_layer,
        "activation": n.op in ("act", "glu") and n.scope == "mlp",
    }
    return "recompute" if any(modules[m] for m in run.recompute_modules) else None


def lowered(
    graph: Graph, run: Run, mesh: Mesh, extent: Extent, kind: Kind | None = None
) -> LoweredBlock:
    """One block as tasks with numbers; `kind` says what of it is on the host."""
    bucket = "step" if _bucket_cap(run) else run.bucket
    how: dict[str, Any] = {"fuse": run.fuse, "bucket": bucket, "key_grads": run.cp_grad_comm_type}
    tasks, at = kernels(graph, extent, mesh, **how)
    for t in tasks:
        if max(t.flops, t.traffic, t.comm_bytes) > MOST_FLOPS:
            raise UserError(
                f"{run.model}: {t.name} makes a kernel or message of more than {MOST_FLOPS} FLOPs "
                "or bytes on one rank; lower a size, or split it over more ranks"
            )
    made = handed_on(graph)
    makes = {c: at[n] for c, n in made.items()}
    wants = {
        c.name: (bytes_of(n, extent), n.dtype)
        for n in graph
        if (c := interface(n)) and not c.gradient
    }
    size = {n: bytes_of(n, extent) for n in graph}
    for n in graph if extent.rows else ():  # gathered with what they are padded with
        if n.op == "all_gather" and n.role is Role.USED:
            over: Any = n["axes"]
            size[n] = size[n.srcs[0]] * mesh.size(*over)
    if run.operators == "eager":  # PyTorch's attention keeps an fp32 number for every row of scores
        cores = [n for n in graph if n.op == "attention"]
        size |= {n: size[n] + _bytes_of_row_sums(n, extent) for n in cores}
    eager_update = run.operators == "eager" and run.optimizer == "adamw"
    # `denom` of torch.optim.AdamW: a square root, and what it is divided by.
    temporaries = 2 * eager_update
    gradients = Gradients(run.set_grads_to_none, run.microbatches == 1, temporaries)
    offloaded = frozenset[Node]()
    if kind and kind.activations_on_host:
        tasks, offloaded = offload.activations(graph, tasks, size)
    if kind and kind.states_on_host:
        tasks = offload.states(tasks, size)
    tied = {n.binding.tied for n in graph if n.op == "param" and n.binding.tied}
    first = [t for c, t in makes.items() if c.gradient and c.name not in tied]
    held = static(
        graph, size, states_on_host=bool(kind and kind.states_on_host), gradients=gradients
    )
    if _bucket_cap(run) and run.dp * run.cp > 1:  # the gradients once more
        held["communication"] = sum(size[n] for n in graph if n.op == "accumulate")
    return LoweredBlock(
        graph, tasks, makes, made, wants, weight_half(tasks, first), size,
        uses(tasks, size, graph, gradients), held, offloaded, gradients, bool(kind and kind.root),
    )  # fmt: skip


def _bytes_of_row_sums(n: Node, extent: Extent) -> int:
    rows = extent.elements(n) // math.ceil(extent(n.shape[-1], n.layout.dims[-1]))
    return rows * int(BYTES["fp32"])


def _bucket_cap(run: Run) -> int:
    """Bytes of a bucket of DDP, which reduces whole gradients once per step."""
    return 0 if run.zero or reduces_each_microbatch(run) else (run.ddp_bucket_cap_mb or 0) * 2**20


@lru_cache(maxsize=16)
def parameters(model: ModelConfig) -> tuple[int, int]:
    """Parameters of the model as published, in all and active per token.

    No padding, tied weights once. Of a layer's experts, a token activates `top_k`.
    """
    sizes = sizes_of(
        Run(model=model.name, seq_length=model.max_position_embeddings if model.vision else 1),
        model,
    )
    run = Run(model=model.name)
    one = run.model_copy(update={"layers_per_stage": (model.depth,)})
    stages = with_ties(place_blocks(one, model), make_order("1f1b", 1, 1, 1), model)
    total = active = 0
    for kind, count in Counter(kind for kind, _ in stages[0]).items():
        block = block_of(kind.block, model, recipe_of(run, model, kind), kind.layer)
        updated = {n.binding.param for n in block.graph if n.phase == "optimizer"}
        for n in block.graph:
            parameter = n.binding.param
            if n.op == "param" and parameter in updated and not n.binding.buffer:
                number = count * math.prod(d.value(sizes) for d in n.shape)
                total += number
                routed = parameter is not None and parameter.of_expert
                active += number * model.top_k // model.num_experts if routed else number
    return total, active
