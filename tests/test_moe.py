"""Mixture of experts and latent attention, sharded: what one device computes, textbook collectives,
whole programs. The sizes are toys; the runs go through the settings that users have."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest

from invariants import check as check_program
from spmd import check as same_as_one_device
from spmd import random_values, single
from stagewright import nn
from stagewright.compiler import Compiled, compile, recipe_of, sizes_of
from stagewright.errors import UserError
from stagewright.ir import Graph, verify
from stagewright.layout import Mesh
from stagewright.models import ModelConfig
from stagewright.nn import Block
from stagewright.ops import COLLECTIVE_OPS
from stagewright.parallel import parallelization
from stagewright.program import PHASES, Kind
from stagewright.run import Run
from stagewright.run import check as check_run
from stagewright.shard import shard
from stagewright.strategies import EXPERTS, strategy

MOE = ModelConfig(
    name="moe",
    num_layers=2,
    hidden_size=8,
    ffn_hidden_size=16,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=4,
    vocab_size=16,
    max_position_embeddings=64,
    num_experts=4,
    top_k=2,
    moe_ffn_hidden_size=8,
)
LATENT: dict[str, Any] = {"num_query_groups": 4, "kv_channels": 6, "qk_rope_head_dim": 2}
LATENT |= {"kv_lora_rank": 4, "v_head_dim": 4}
MODELS = {
    "moe": MOE,
    "shared": replace(MOE, shared_ffn_hidden_size=8, router="sigmoid"),
    "mla": replace(MOE, **LATENT, q_lora_rank=4, shared_ffn_hidden_size=8),
    "mla, whole queries": replace(MOE, **LATENT),
}
SP: dict[str, Any] = {"sequence_parallel": True}
RUNS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "dp": {"dp": 4},
    "ep": {"dp": 2, "ep": 2},
    "ep inside dp": {"dp": 4, "ep": 2},
    "one expert a rank": {"dp": 4, "ep": 4},
    "tp inside experts": {"tp": 2, "dp": 2, "ep": 2},
    "tp + sp inside experts": {"tp": 2, "dp": 2, "ep": 2} | SP,
    "etp 1, sp": {"tp": 2, "dp": 2, "ep": 4, "etp": 1} | SP,
    "ep over tp": {"tp": 2, "ep": 2, "etp": 1},
    "ep over dp and cp": {"cp": 2, "dp": 2, "ep": 4},
    "ep over cp": {"cp": 2, "dp": 2, "ep": 2, "cp_comm_type": "all_gather"},
    "tp + sp + cp, zero 1": {"tp": 2, "cp": 2, "dp": 2, "ep": 2, "zero": 1} | SP,
    "ulysses, etp 1, zero 1": {"tp": 2, "cp": 2, "dp": 2, "ep": 4, "etp": 1, "zero": 1}
    | {"cp_comm_type": "a2a"}
    | SP,
    "zero 1": {"dp": 4, "ep": 2, "zero": 1},
    "zero 2": {"dp": 4, "ep": 2, "zero": 2},
    "zero 3": {"dp": 4, "ep": 2, "zero": 3},
    "zero 3, tp + sp": {"tp": 2, "dp": 2, "ep": 2, "zero": 3} | SP,
    "hybrid zero 2": {"dp": 4, "ep": 2, "dp_shard": 2, "zero": 2},
    "hybrid zero 3": {"dp": 4, "ep": 2, "dp_shard": 2, "zero": 3},
    "edp fastest": {"dp": 4, "ep": 2, "order": "dp-tp-cp-ep-pp"},
    "kept gathers": {"tp": 2, "dp": 2, "ep": 2, "activation_gather": "keep"} | SP,
}


class One(NamedTuple):
    """A layer with experts, and what one device computes with it."""

    block: Block
    values: dict[str, Any]
    truth: dict[str, Any]


@cache
def one_device(model: str, batch: int, **recipe: bool) -> One:
    config = MODELS[model]
    run = Run(model=model, seq_length=16, micro_batch_size=batch)
    block = nn.BLOCKS["layer"](config, replace(recipe_of(run, config), **recipe), config.layer(0))
    sizes = sizes_of(run, config)
    values = random_values(block.graph, sizes)
    return One(block, values, single(block.graph, sizes, values))


def sharded(model: str, settings: dict[str, Any], **recipe: bool) -> tuple[Graph, Mesh, Run]:
    """The layer as a run shards it; the block knows nothing of the run."""
    config = MODELS[model]
    run = Run(model=model, seq_length=16, **settings).resolved(config)
    check_run(run, config)
    mesh, plan = parallelization(run, config)
    block = one_device(model, run.dp, **recipe).block
    want = strategy(plan, sizes_of(run, config))
    keep = run.activation_gather == "keep"
    graph = shard(
        block.graph,
        want,
        block.primal,
        keep_gathered=keep,
        inner=plan.inner,
        model_axes=plan.model_axes,
    )
    verify(graph)
    return graph, mesh, run


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("model", MODELS)
def test_a_sharded_layer_computes_what_one_device_does(model: str, name: str) -> None:
    graph, mesh, run = sharded(model, RUNS[name])
    one = one_device(model, run.dp)
    axes = {a: n for a, n in reversed(mesh.axes) if n > 1}
    sizes = sizes_of(run, MODELS[model])
    same_as_one_device(one.block.graph, graph, axes, sizes, one.values, one.truth)


ABSORBED = [
    "one rank",
    "ep over dp and cp",
    "ep over cp",
    "tp + sp + cp, zero 1",
    "ulysses, etp 1, zero 1",
    "zero 3, tp + sp",
]


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("name", ABSORBED)
def test_latent_attention_may_work_in_the_space_of_the_latents(name: str, flash: bool) -> None:
    """The same results and gradients, whichever side w_uk and w_uv are multiplied on."""
    form = {"absorb": True, "flash_attention": flash}
    graph, mesh, run = sharded("mla", RUNS[name], **form)
    one, naive = one_device("mla", run.dp, **form), one_device("mla", run.dp)
    axes = {a: n for a, n in reversed(mesh.axes) if n > 1}
    sizes = sizes_of(run, MODELS["mla"])
    same_as_one_device(one.block.graph, graph, axes, sizes, naive.values, naive.truth)


# ---- textbook collectives ------------------------------------------------------------------------


def moved(model: str, settings: dict[str, Any]) -> Counter[str]:
    """Collectives of the experts' half of a layer, by phase; those of parameters aside."""
    graph, mesh, _ = sharded(model, settings)
    return Counter(
        f"{n.phase} {n.op} {mesh.label(n['axes'])}"
        for n in graph
        if n.op in COLLECTIVE_OPS and n.scope == "mlp" and not n.once and not n.get("role")
    )


def each(count: int, *ops: str) -> dict[str, int]:
    """So many in forward, and as many in backward."""
    return {f"{phase} {op}": count for phase in ("forward", "backward") for op in ops}


# What the names say is one axis for two uses: dp/ep is dp, all of which is ep.
GATHERED = each(1, "all_gather tp/etp", "reduce_scatter tp/etp")
TEXTBOOK: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    # GShard (arXiv 2006.16668): dispatch and combine, and the same for gradients;
    # shared experts have all tokens where they are and add nothing.
    **dict.fromkeys(("one rank", "dp"), ({}, {})),
    **dict.fromkeys(("ep", "one expert a rank"), (each(2, "all_to_all dp/ep"), {})),
    **dict.fromkeys(
        ("ep inside dp", "zero 1", "zero 2", "zero 3", "hybrid zero 2", "hybrid zero 3"),
        (each(2, "all_to_all ep"), {}),
    ),
    "ep over cp": (each(2, "all_to_all cp/ep"), {}),
    # Megatron-Core's all-to-all dispatcher (arXiv 2504.14960): rows are gathered over
    # etp before the experts and scattered after, in backward the other way round; shared experts
    # do with sequences what a dense MLP does (arXiv 2205.05198, section 4.2.2).
    "tp + sp inside experts": (each(2, "all_to_all dp/ep") | GATHERED, GATHERED),
    "zero 3, tp + sp": (each(2, "all_to_all dp/ep") | GATHERED, GATHERED),
    "tp + sp + cp, zero 1": (each(2, "all_to_all cp/ep") | GATHERED, GATHERED),
    # Every rank of tp has the same rows: sums after the experts, and of gradients before them.
    "tp inside experts": (
        each(2, "all_to_all dp/ep") | each(1, "all_reduce tp/etp"),
        each(1, "all_reduce tp/etp"),
    ),
}


@pytest.mark.parametrize("name", TEXTBOOK)
def test_textbook(name: str) -> None:
    routed, shared = TEXTBOOK[name]
    assert moved("moe", RUNS[name]) == routed
    assert moved("shared", RUNS[name]) == Counter(routed) + Counter(shared)


def reductions(settings: dict[str, Any]) -> dict[bool, Counter[str]]:
    """How gradients of experts, and of the other matrices, are reduced over data parallelism."""
    graph, mesh, _ = sharded("shared", settings)
    found: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    for n in graph:
        if n.op in COLLECTIVE_OPS and n.get("role") == "synced" and n.scope == "mlp":
            weight = str(n.srcs[0]["param"])
            if not weight.endswith("norm.weight"):
                found[weight in EXPERTS][f"{n.op} {mesh.label(n['axes'])}"] += 1
    return found


@pytest.mark.parametrize(
    ("name", "experts", "others"),
    [
        ("dp", "all_reduce dp/edp", "all_reduce dp/edp"),
        ("ep", "", "all_reduce dp/ep"),
        ("ep inside dp", "all_reduce edp", "all_reduce dp"),
        ("edp fastest", "all_reduce edp", "all_reduce dp"),
        ("ep over tp", "", ""),
        ("etp 1, sp", "", "all_reduce dp"),
        ("ep over cp", "all_reduce dp/edp", "all_reduce cp/ep+dp/edp"),
        ("zero 1", "reduce_scatter edp", "reduce_scatter dp"),
        ("tp + sp + cp, zero 1", "reduce_scatter dp/edp", "reduce_scatter cp/ep+dp/edp"),
    ],
)
def test_gradients_of_experts_are_reduced_over_their_copies(
    name: str, experts: str, others: str
) -> None:
    found = reductions(RUNS[name])
    assert found[True] == ({experts: 3} if experts else {})  # up, gate, down
    assert found[False] == ({others: 4} if others else {})  # the shared ones and the router


# ---- work ----------------------------------------------------------------------------------------


def products(compiled: Compiled) -> Counter[str]:
    """FLOPs of matrix products of all ranks by phase."""
    found: Counter[str] = Counter()
    for c in compiled.program.classes:
        t = c.tasks
        for row in range(len(t)):
            if t.kind[row] == Kind.COMPUTE and t.ops[t.op[row]] == "einsum":
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
    assert sent == [16 * MOE.top_k * MOE.hidden_size * bf16] * 4 * MOE.num_layers


def test_rows_are_rounded_up_to_what_ranks_share_evenly() -> None:
    run = Run(model="moe", seq_length=6, dp=4, ep=2)
    few = replace(MOE, top_k=1)
    assert sizes_of(run.resolved(few), few)["R"] == 4 * 2  # 24 tokens on 4 experts: 6, as 4 x 1.5


# ---- whole programs ------------------------------------------------------------------------------

PROGRAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "ep, pp": ("moe", {"dp": 2, "ep": 2, "pp": 2, "global_batch_size": 8}),
    "all but cp": ("shared", {"tp": 2, "dp": 4, "ep": 2, "pp": 2, "zero": 1} | SP),
    "ep over dp and cp, zero 3": ("mla", {"cp": 2, "dp": 2, "ep": 4, "zero": 3}),
    "interleaved": ("mla", {"dp": 2, "ep": 2, "pp": 2, "vpp": 2, "layers": 4}),
    "recompute": ("mla, whole queries", {"dp": 4, "ep": 4, "recompute": "full"}),
    "hybrid": ("shared", {"dp": 4, "ep": 2, "dp_shard": 2, "zero": 3, "pp": 2}),
    "streams": ("shared", {"tp": 2, "dp": 2, "ep": 4, "etp": 1, "streams": "separate"} | SP),
    "unfused": ("mla", {"tp": 2, "dp": 2, "ep": 2, "flash_attention": False}),
    "dense first": ("dense first", {"dp": 2, "ep": 2, "pp": 2}),
}


@cache
def compiled(name: str) -> Compiled:
    model, settings = PROGRAMS[name]
    models = MODELS | {"dense first": replace(MODELS["mla"], first_dense_layers=1)}
    return compile(Run(model=model, seq_length=16, **settings), models[model])


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_rank_can_run(name: str) -> None:
    streams = str(PROGRAMS[name][1].get("streams", "one"))
    check_program(compiled(name).program, streams=streams, seeds=(0,))


def test_layers_of_both_kinds() -> None:
    both = compiled("dense first")
    assert [label for label in both.blocks if label.startswith("layer")] == [
        "layer dense",
        "layer experts",
    ]
    dense, mixture = (c.tasks for c in both.program.classes)
    assert (sum(dense.collective == 3), sum(mixture.collective == 3)) == (0, 2 * 4)


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


@pytest.mark.parametrize(
    ("model", "settings", "wanted"),
    [
        ("moe", {"dp": 3, "ep": 3}, "ep=3 does not divide the 4 experts of moe; use 1, 2 or 4"),
        (
            "dense",
            {"dp": 2, "ep": 2},
            "dense is a dense model; ep=2 needs a mixture-of-experts model; use ep=1",
        ),
        (
            "dense",
            {"tp": 2, "etp": 2},
            "dense is a dense model; etp=2 needs a mixture-of-experts model; use etp=1",
        ),
        (
            "moe",
            {"tp": 2, "ep": 2},
            "etp=2 * ep=2 does not divide tp * cp * dp = 2: experts spread over the ranks of "
            "these; use a smaller ep, or more dp",
        ),
        (
            "moe",
            {"dp": 3, "etp": 3},
            "etp=3 does not divide the width 8 of an expert of moe; use 1, 2, 4 or 8",
        ),
        (
            "moe",
            {"tp": 4, "dp": 3, "ep": 2, "etp": 6},
            "etp=6 does not divide the width 8 of an expert of moe; use 1, 2, 4 or 8",
        ),
    ],
)
def test_refused(model: str, settings: dict[str, Any], wanted: str) -> None:
    dense = replace(MOE, name="dense", num_experts=0, top_k=0, moe_ffn_hidden_size=0)
    with pytest.raises(UserError) as info:
        compile(Run(model=model, seq_length=48, **settings), dense if model == "dense" else MOE)
    assert str(info.value) == wanted


def test_degrees_that_do_not_nest_are_refused() -> None:
    wide = replace(MOE, num_experts=6, moe_ffn_hidden_size=12)
    with pytest.raises(UserError, match=r"^ep=6 does not fit the ranks of dp=4: one must be a"):
        compile(Run(model="moe", seq_length=48, dp=4, cp=3, ep=6, order="dp-tp-cp-ep-pp"), wide)
