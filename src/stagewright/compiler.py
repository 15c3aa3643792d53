"""From a run to the program of every rank: the whole pipeline on one screen."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from stagewright import nn
from stagewright.ir import Graph, Node, text, verify
from stagewright.kernels import Extent, Task, bytes_of, extent_of, kernels
from stagewright.layout import Mesh
from stagewright.lower import LoweredBlock, Placed, lower, stage_ranks
from stagewright.memory import footprint, rank_memory
from stagewright.models import Layer, ModelConfig, resolve
from stagewright.parallel import parallelization, reduces_each_microbatch
from stagewright.pipeline import Order
from stagewright.pipeline import make as make_order
from stagewright.program import Program
from stagewright.remat import remat
from stagewright.run import Run, check
from stagewright.shard import shard
from stagewright.strategies import EXPERTS, Plan, strategy


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

    def graph_text(self) -> str:
        """The sharded graph in the paper's notation, one section per distinct block."""
        return "\n\n".join(f"# {label}\n{text(graph)}" for label, graph in self.blocks.items())


def compile(run: Run, model: ModelConfig | None = None) -> Compiled:
    """Everything that a run implies; raises UserError where it cannot be done.

    `model` replaces the configuration that `run.model` names.
    """
    model = (model or resolve(run.model)).with_overrides(
        num_layers=run.layers, vocab_size=run.vocab
    )
    run = run.resolved(model)
    check(run, model)
    mesh, plan = parallelization(run, model)
    sizes = sizes_of(run, model)
    extent = extent_of(sizes, mesh)
    order = make_order(str(run.schedule), run.pp, run.microbatches, run.vpp)

    blocks: dict[Kind, tuple[Graph, LoweredBlock]] = {}
    stages: list[list[Placed]] = []
    for stage in place_blocks(run, model):
        placed: list[Placed] = []
        for kind, layer in stage:
            if kind not in blocks:
                graph = sharded(kind, run, model, plan, sizes)
                blocks[kind] = graph, lowered(graph, run, mesh, extent)
            label = f"layer{layer}" if layer >= 0 else kind.block
            placed.append(Placed(blocks[kind][1], layer, label))
        stages.append(placed)

    footprints = {id(b): footprint(g, b.tasks, extent) for g, b in blocks.values()}
    ranks = stage_ranks(order)
    memory = {
        p: rank_memory([(s, b) for s, b in enumerate(stages) if ranks[s] == p], actions, footprints)
        for p, actions in enumerate(order)
    }
    pipeline = ("pp",) if run.pp > 1 else ()
    norm_axes = tuple(sorted((*plan.model_axes, *pipeline)))
    program = lower(
        stages,
        order,
        mesh,
        norm_axes=norm_axes,
        clip_grad=run.clip_grad,
        streams=run.streams,
        memory=memory,
    )
    total, active = parameters(model)
    return Compiled(
        run,
        model,
        total,
        active,
        {k.label(blocks): g for k, (g, _) in blocks.items()},
        order,
        program,
    )


def sizes_of(run: Run, model: ModelConfig) -> dict[str, int]:
    """The numbers behind the dims; the vocabulary padded so that tp divides it."""
    multiple = run.make_vocab_size_divisible_by * run.tp
    return nn.sizes(model) | {
        "B": run.micro_batch_size * run.dp,
        "S": run.seq_length or 0,
        "V": -(-model.vocab_size // multiple) * multiple,
        "R": _rows(run, model),
    }


def _rows(run: Run, model: ModelConfig) -> int:
    """Copies of tokens that each expert gets from all ranks: as many of each rank's tokens."""
    if not model.num_experts:
        return 0
    ranks = run.tp * run.cp * run.dp
    tokens = run.micro_batch_size * run.dp * (run.seq_length or 0)
    return ranks * math.ceil(tokens * model.top_k / model.num_experts / ranks)


class Kind(NamedTuple):
    """What makes two blocks of a model differ."""

    block: str  # embedding, layer, head
    layer: Layer = Layer()
    recomputed: bool = False

    def label(self, kinds: Iterable[Kind]) -> str:
        """A name that tells it from the other kinds of the model."""
        alike = [k for k in kinds if k.block == self.block]
        words = [self.block]
        if len({k.layer.mixer for k in alike}) > 1:
            words.append(self.layer.mixer)
        if len({k.layer.mlp for k in alike}) > 1:
            words.append(self.layer.mlp)
        if len({k.recomputed for k in alike}) > 1:
            words.append("recomputed" if self.recomputed else "kept")
        return " ".join(words)


def place_blocks(run: Run, model: ModelConfig) -> list[list[tuple[Kind, int]]]:
    """(kind of block, layer) per virtual stage: embedding first, head last, layers in between."""
    stages: list[list[tuple[Kind, int]]] = []
    assert run.layers_per_stage is not None
    layers = iter(range(sum(run.layers_per_stage)))
    for count in run.layers_per_stage:
        here: list[tuple[Kind, int]] = []
        for i in range(count):
            layer = next(layers)
            recomputed = run.recompute == "full" and i < (run.recompute_num_layers or count)
            kind = Kind("layer", model.layer(layer), recomputed)
            here.append((kind, layer))
        stages.append(here)
    stages[0].insert(0, (Kind("embedding"), -1))
    stages[-1].append((Kind("head"), -1))
    return stages


def recipe_of(run: Run, model: ModelConfig) -> nn.Recipe:
    """How the run trains, as far as one device can tell."""
    return nn.Recipe(
        precision=nn.PRECISIONS[run.precision],
        optimizer=run.optimizer,
        flash_attention=run.flash_attention,
        dropout=run.dropout,
        clip_grad=run.clip_grad,
        sum_tied=model.tied_embeddings and run.pp == 1 and reduces_each_microbatch(run),
        cast_once=run.zero < 3 or not run.reshard_after_forward,
        gather_once=run.zero == 3 and not run.reshard_after_forward,
        shared_embedding=model.tied_embeddings and run.pp == 1,
    )


def sharded(
    kind: Kind, run: Run, model: ModelConfig, plan: Plan, sizes: Mapping[str, int]
) -> Graph:
    """One kind of block: forward, gradient, recompute, layouts."""
    recipe = recipe_of(run, model)
    if kind.block == "layer":
        block = nn.layer(model, recipe, kind.layer)
    else:
        block = nn.ENDS[kind.block](model, recipe)
    again = partial(_again, run=run, whole=kind.recomputed)
    y = block.graph.outputs.get("y")
    results = {y} if kind.recomputed else {n for n in block.graph if n.get("role") == "core"}
    graph, primal = remat(block.graph, again, block.primal, rerun=results.__contains__)
    want = strategy(plan, sizes)
    keep = run.activation_gather == "keep"
    graph = shard(
        graph, want, primal, keep_gathered=keep, inner=plan.inner, model_axes=plan.model_axes
    )
    verify(graph)
    return graph


def _again(n: Node, *, run: Run, whole: bool) -> str | None:
    """The phase in which backward makes a forward value again, or None where it keeps it."""
    role = n.get("role")
    if role in ("used", "low"):  # a weight as the computation sees it
        return "backward" if run.zero == 3 and run.reshard_after_forward else None
    if whole:
        return None if n.once else "recompute"
    if role == "keys" and run.cp_comm_type == "all_gather" and run.activation_gather == "again":
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


def lowered(graph: Graph, run: Run, mesh: Mesh, extent: Extent) -> LoweredBlock:
    """One block as tasks with numbers."""
    tasks, at = kernels(graph, extent, mesh, fuse=run.fuse, bucket=run.bucket)
    stream = (
        next((n for n in graph if n.name == "x" and n.op == "input"), None) or graph.outputs["y"]
    )

    def maker(output: str) -> Task | str | None:
        return at[graph.outputs[output]] if output in graph.outputs else None

    boundary = bytes_of(stream, extent), stream.dtype
    return LoweredBlock(graph, tasks, maker("y"), maker("dx"), maker("tied_grad"), boundary)


def parameters(model: ModelConfig) -> tuple[int, int]:
    """Parameters of the model as published, in all and active per token.

    No padding, tied weights once. Of a layer's experts, a token activates `top_k`.
    """
    sizes = sizes_of(Run(model=model.name, seq_length=1), model)
    recipe = nn.Recipe(shared_embedding=True)
    layers = Counter(model.layer(i) for i in range(model.num_layers))
    blocks = [(end(model, recipe), 1) for end in nn.ENDS.values()]
    blocks += [(nn.layer(model, recipe, what), count) for what, count in layers.items()]
    total = active = 0
    for block, count in blocks:
        updated = {n["param"] for n in block.graph if n.phase == "optimizer" and n.get("param")}
        for n in block.graph:
            if n.op == "param" and n.name in updated:
                number = count * math.prod(d.value(sizes) for d in n.shape)
                total += number
                active += number * model.top_k // model.num_experts if n.name in EXPERTS else number
    return total, active
