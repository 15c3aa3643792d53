"""Mixture of experts and latent attention, sharded: what one device computes, textbook collectives,
whole programs. The sizes are toys; the runs go through the settings that users have."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest

from helpers import cases, rows_of, some
from spmd import check as same_as_one_device
from spmd import random_values, single
from stagewright import blocks as model_blocks
from stagewright.algebra.layout import Mesh
from stagewright.blocks import Block, Recipe
from stagewright.errors import UserError
from stagewright.graph.node import Graph
from stagewright.graph.roles import Role
from stagewright.graph.shard import shard
from stagewright.graph.table import COLLECTIVE_OPS
from stagewright.graph.verify import verify
from stagewright.lower.compile import compile
from stagewright.lower.compiled_run import CompiledRun
from stagewright.lower.recipe import recipe_of, sizes_of
from stagewright.parallel.degrees import parallelization
from stagewright.parallel.placement import strategy, zero_layouts
from stagewright.program.columns import PHASES, TaskKind
from stagewright.run.rules import check as check_run
from stagewright.run.settings import Run
from toys import MOE
from toys import WITH_EXPERTS as MODELS

RUNS = {row["name"]: row["settings"] for row in rows_of("test_moe", "runs")}


class Sharded(NamedTuple):
    """A layer as a run shards it, and what one device computes with it."""

    block: Block
    graph: Graph
    mesh: Mesh
    run: Run
    sizes: dict[str, int]

    def check(self, naive: Block | None = None) -> None:
        """Every rank computes what one device does, with this block or another form of it."""
        block = naive or self.block
        values, truth = one_device(block, tuple(self.sizes.items()))
        axes = {a: n for a, n in reversed(self.mesh.axes) if n > 1}
        same_as_one_device(block.graph, self.graph, axes, self.sizes, values, truth)


@cache
def one_device(
    block: Block, sizes: tuple[tuple[str, int], ...]
) -> tuple[dict[str, Any], dict[str, Any]]:
    values = random_values(block.graph, dict(sizes))
    truth = single(block.graph, dict(sizes), values)
    truth.pop("splits", None)  # in the order of ranks, which one device has not
    return values, truth


@cache
def built(model: str, recipe: Recipe) -> Block:
    config = MODELS[model]
    return model_blocks.BLOCKS["layer"](config, recipe, config.layer(0))


def sharded(model: str, settings: dict[str, Any], **form: bool) -> Sharded:
    config = MODELS[model]
    run = Run(model=model, seq_length=16, **settings).resolved(config)
    check_run(run, config)
    mesh, plan = parallelization(run, config)
    block = built(model, replace(recipe_of(run, config), **form))
    sizes = sizes_of(run, config)
    keep = run.activation_gather == "keep"
    graph = shard(
        block.graph,
        strategy(plan, zero_layouts(block.graph, plan, mesh, sizes)),
        block.primal,
        keep_gathered=keep,
        inner=plan.inner,
        model_axes=plan.model_axes,
    )
    verify(graph)
    return Sharded(block, graph, mesh, run, sizes)


# Experts are the same in all models: each of the others is tried with some runs.
TRIED = [(model, name) for i, name in enumerate(RUNS) for model in ("shared", list(MODELS)[i % 4])]
TRIED += [("biased", name) for name in RUNS]


@pytest.mark.parametrize(("model", "name"), some([*dict.fromkeys(TRIED)], 4))
def test_a_sharded_layer_computes_what_one_device_does(model: str, name: str) -> None:
    sharded(model, RUNS[name]).check()


@pytest.mark.parametrize("flash", [True, False])
@cases
def test_latent_attention_may_work_in_the_space_of_the_latents(name: str, flash: bool) -> None:
    """The same results and gradients, whichever side w_uk and w_uv are multiplied on."""
    form = {"absorb": True, "flash_attention": flash}
    naive = built("mla", recipe_of(sharded("mla", RUNS[name]).run, MODELS["mla"]))
    sharded("mla", RUNS[name], **form).check(naive)


# ---- losses beside the graph's own ---------------------------------------------------------------


def balance(counts: Any, scores: Any, coeff: float) -> float:
    """E sum(f P), arXiv 2101.03961, equations 4 to 6: of each row of counts, by its own tokens."""
    parts = counts.shape[0]
    tokens = scores.reshape(parts, -1, scores.shape[-1])
    f = counts / (MOE.top_k * tokens.shape[1])
    return coeff * MOE.num_experts * float((f * tokens.mean(1)).sum())


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    ("kind", "parts"), [("aux_loss", 2), ("seq_aux_loss", 4), ("global_aux_loss", 1)]
)
def test_losses_against_finite_differences(kind: str, parts: int, router: Any) -> None:
    """The gradient is that of the layer's own output, and of both losses of the router."""
    config = replace(MOE, router=router)
    experts = model_blocks.ExpertRecipe(load_balancing_type=kind, aux_loss=3.0, z_loss=0.2)
    block = model_blocks.BLOCKS["layer"](config, Recipe(experts=experts), config.layer(0))
    sizes = sizes_of(Run(model="moe", dp=2, micro_batch_size=2, seq_length=16), config)
    values = random_values(block.graph, sizes)
    truth = single(block.graph, sizes, values)
    parts_of = {n.name: n for n in block.graph if n.name in ("scores", "balance_counts")}
    # the logits are what the loss of their sizes passes on
    parts_of["logits"] = next(n for n in block.graph if n.op == "z_loss")
    outputs = {"y": block.graph.outputs["y"], **parts_of}
    forward = Graph.of(block.graph.nodes, outputs)

    def loss(changed: dict[str, Any]) -> float:
        out = single(forward, sizes, values | changed)
        counts = out["balance_counts"].reshape(-1, config.num_experts)
        assert counts.shape[0] == parts
        assert counts.sum() == 4 * 16 * config.top_k
        z = np.log(np.exp(out["logits"]).sum(-1)) ** 2
        own = balance(counts, out["scores"], 3.0)
        return float((out["y"] * values["dy"]).sum()) + own + 0.2 * float(z.mean())

    rng = np.random.default_rng(0)
    for name, gradient in (("w_router", "grad.w_router"), ("x", "dx")):
        way, h = rng.normal(size=values[name].shape), 1e-5
        ends = [loss({name: values[name] + sign * h * way}) for sign in (1, -1)]
        slope = (ends[0] - ends[1]) / (2 * h)
        assert (truth[gradient] * way).sum() == pytest.approx(slope, rel=1e-6), name


def test_a_bias_follows_the_counts_of_all() -> None:
    """Experts that got fewer tokens than the mean are chosen more easily from then on."""
    of = sharded("sigmoid", RUNS["bias"])
    values, truth = one_device(of.block, tuple(of.sizes.items()))
    assert (truth["new.router_bias"] == values["router_bias"]).all()  # all got as many
    graph = of.graph
    moves = [n for n in graph if n.op == "all_reduce" and n.role is Role.COUNTED]
    assert [(n.once, str(n.dtype), of.mesh.label(n["axes"])) for n in moves] == [
        (True, "fp32", "dp/ep+tp/etp")
    ]
    assert not any(n.binding.name == "router_bias" and "grad" in n.name for n in graph)


REDUCED = {
    "aux loss": ("cp+tp", "dp_parts"),
    "aux loss of sequences": ("cp+tp", "B"),
    "aux loss of all": ("dp+tp", ""),
}


@pytest.mark.parametrize("name", REDUCED)
def test_counts_are_added_up_over_the_ranks_that_share_tokens(name: str) -> None:
    """As Megatron-LM: whole numbers, over tp and cp, or also dp; nothing in backward."""
    of = sharded("moe", RUNS[name])
    moves = [n for n in of.graph if n.name == "balance_counts" and n.op in COLLECTIVE_OPS]
    axes, dim = REDUCED[name]
    assert [(n.op, n.phase, n.dtype) for n in moves] == [("all_reduce", "forward", "int64")]
    assert "+".join(sorted(str(moves[0]["axes"][i]) for i in range(2))) == axes
    assert "".join(map(str, moves[0].shape)) == dim + "E"


# ---- textbook collectives ------------------------------------------------------------------------


def moved(model: str, settings: dict[str, Any]) -> Counter[str]:
    """Collectives of the experts' half of a layer, by phase; those of parameters aside."""
    _, graph, mesh, *_ = sharded(model, settings)
    return Counter(
        f"{n.phase} {n.op} {mesh.label(n['axes'])}"
        for n in graph
        if n.op in COLLECTIVE_OPS and n.scope.startswith("mlp") and not n.once and n.role is None
    )


@cases
def test_textbook(name: str, routed: dict[str, int], shared: dict[str, int]) -> None:
    assert moved("moe", RUNS[name]) == routed
    assert moved("shared", RUNS[name]) == Counter(routed) + Counter(shared)


def reductions(settings: dict[str, Any]) -> dict[bool, Counter[str]]:
    """How gradients of experts, and of the other matrices, are reduced over data parallelism."""
    _, graph, mesh, *_ = sharded("shared", settings)
    found: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    for n in graph:
        if n.op in COLLECTIVE_OPS and n.role is Role.STEP_GRADIENT and n.scope.startswith("mlp"):
            weight = n.srcs[0].binding.param
            assert weight is not None
            if not weight.name.endswith("norm.weight"):
                found[weight.of_expert][f"{n.op} {mesh.label(n['axes'])}"] += 1
    return found


@cases
def test_gradients_of_experts_are_reduced_over_their_copies(
    name: str, experts: str, others: str
) -> None:
    found = reductions(RUNS[name])
    assert found[True] == ({experts: 3} if experts else {})  # up, gate, down
    assert found[False] == ({others: 4} if others else {})  # the shared ones and the router


# ---- work ----------------------------------------------------------------------------------------


def products(compiled: CompiledRun) -> Counter[str]:
    """FLOPs of matrix products of all ranks by phase."""
    found: Counter[str] = Counter()
    for c in compiled.program.classes:
        t = c.tasks
        for row in range(len(t)):
            if t.kind[row] == TaskKind.COMPUTE and t.ops[t.op[row]] == "einsum":
                found[PHASES[t.phase[row]]] += int(t.flops[row]) * len(c.ranks)
    return found


@pytest.mark.parametrize("model", ["moe", "mla"])
@pytest.mark.parametrize("name", ["one rank", "ep inside dp", "zero 3, tp + sp", "etp 1, sp"])
def test_experts_work_on_the_tokens_they_are_sent(model: str, name: str) -> None:
    """2 per multiply-add, 3 matrices, forward; dX and dW in backward. By difference of widths."""
    narrow, run = MODELS[model], Run(model=model, seq_length=16, fuse=False, **RUNS[name])
    wide = replace(narrow, moe_ffn_hidden_size=3 * narrow.moe_ffn_hidden_size)
    more = products(compile(run, wide)) - products(compile(run, narrow))
    tokens = 16 * run.dp * run.microbatches * narrow.num_layers
    width = wide.moe_ffn_hidden_size - narrow.moe_ffn_hidden_size
    forward = 2 * 3 * tokens * narrow.top_k * narrow.hidden_size * width
    assert more == {"forward": forward, "backward": 2 * forward}


@pytest.mark.parametrize(
    ("model", "heads", "turned"),
    [("mla", 4 + 1, 2), ("moe", 4 + 2, 4), ("half", 4 + 2, 2)],
)
def test_rope_turns_its_part_of_heads(model: str, heads: int, turned: int) -> None:
    """Of latent attention, the part that all heads' keys share; of others, a fraction of each."""
    config = (MODELS | {"half": replace(MOE, rotary_fraction=0.5)})[model]
    compiled = compile(Run(model=model, seq_length=16, fuse=False), config)
    t = compiled.program.classes[0].tasks
    rope = (t.op == t.ops.index("rope")) & (t.phase == PHASES.index("forward"))
    assert t.flops[rope].sum() == 2 * 16 * heads * turned * 3  # two layers; x cos + y sin


def test_a_rank_sends_the_rows_of_its_tokens() -> None:
    """Every rank sends a copy of each of its tokens for each of its experts, itself included."""
    compiled = compile(Run(model="moe", seq_length=16, dp=4, ep=2), MOE)
    (c,) = compiled.program.classes
    sent = c.tasks.comm_bytes[c.tasks.collective == 3].tolist()  # all_to_all
    bf16 = 2
    copies = 16 * MOE.top_k
    row, gate = copies * MOE.hidden_size * bf16, copies * bf16
    assert sorted(sent) == [gate] * 2 * MOE.num_layers + [row] * 4 * MOE.num_layers


# ---- whole programs ------------------------------------------------------------------------------


def test_groups_of_ep_and_of_the_copies_of_experts() -> None:
    program = compile(Run(model="moe", seq_length=16, dp=4, tp=2, ep=2), MOE).program
    groups = program.groups()
    found: dict[str, list[list[int]]] = {}
    for slot in range(len(program.communicators)):
        ids = sorted({int(i) for i in program.group_of(slot)} - {0})
        found[program.label_of(slot)] = [groups[i] for i in ids]
    assert found["tp/etp"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert found["ep"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert found["edp"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert found["dp"] == [[0, 2, 4, 6], [1, 3, 5, 7]]


@cases
def test_refused(model: str, settings: dict[str, Any], wanted: str) -> None:
    dense = replace(MOE, name="dense", num_experts=0, top_k=0, moe_ffn_hidden_size=0)
    with pytest.raises(UserError) as info:
        compile(Run(model=model, seq_length=48, **settings), dense if model == "dense" else MOE)
    assert str(info.value) == wanted


def test_degrees_that_do_not_nest_are_refused() -> None:
    wide = replace(MOE, num_experts=6, moe_ffn_hidden_size=12)
    with pytest.raises(UserError, match=r"^ep=6 does not fit the ranks of dp=4: one must be a"):
        compile(Run(model="moe", seq_length=48, dp=4, cp=3, ep=6, order="dp-tp-cp-ep-pp"), wide)
