"""Recomputing changes what is kept, never what is computed; counts of what runs again."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import pytest

import stagewright as sw
from helpers import cases, pairs, times
from spmd import PLAIN, RandomLayouts, Spmd, case, check, single
from stagewright.blocks import Recipe
from stagewright.graph.node import Graph, Node
from stagewright.graph.recompute import remat
from stagewright.graph.roles import Role
from stagewright.graph.shard import shard
from stagewright.graph.verify import verify
from stagewright.lower.blocks import SAVED

Again = Callable[[Node], str | None]

WHAT: dict[str, Again] = {
    "all": lambda n: "recompute",
    "norms": lambda n: "recompute" if n.op == "norm" else None,
    "attention": lambda n: "recompute" if n.scope == "attention.core" else None,
    "activations": lambda n: "recompute" if n.op in ("act", "glu") else None,
    "weights": lambda n: "backward" if n.role is Role.USED else None,
    "weights and norms": lambda n: {Role.USED: "backward"}.get(
        n.role, "recompute" if n.op == "norm" else None
    ),
}
WHAT |= {
    f"all but {saved}": lambda n, names=names: None if n.name in names else "recompute"
    for saved, names in SAVED.items()
}
MODELS = ["llama", "gpt2", "gemma2", "bert", "falcon-mqa"]


def never(n: Node) -> bool:
    return False


def core(n: Node) -> bool:
    """The result of attention, which a checkpoint of attention keeps, and makes again whole."""
    return n.role is Role.CORE


def again(
    model: str, what: Again, recipe: Recipe = PLAIN, rerun: Callable[[Node], bool] = never
) -> Graph:
    block = case(model, "layer", recipe).block
    graph, primal = remat(block.graph, what, block.primal, rerun=rerun)
    verify(graph)
    assert {*primal} | {*primal.values()} <= {*graph.nodes} | {*block.primal}
    return graph


def repeated(graph: Graph, phase: str = "recompute") -> dict[str, int]:
    return dict(Counter(n.op for n in graph if n.phase == phase and n.op != "identity"))


@pytest.mark.parametrize(("model", "what"), pairs(MODELS, WHAT, 4))
def test_the_numbers_stay(model: str, what: str) -> None:
    c = case(model, "layer")
    found = single(again(model, WHAT[what]), c.sizes, c.values)
    for name, value in c.truth.items():
        assert found[name] == pytest.approx(value, rel=1e-9), name


@pytest.mark.parametrize(("model", "what"), pairs(MODELS, WHAT, 4))
def test_the_numbers_stay_under_any_layouts(model: str, what: str) -> None:
    c = case(model, "layer")
    y = c.block.graph.outputs["y"]
    graph, primal = remat(c.block.graph, WHAT[what], c.block.primal, rerun=lambda n: n is y)
    for seed in range(times(1)):
        draw = RandomLayouts(random.Random(seed), c.sizes)
        sharded = shard(graph, draw.want, primal, inner=draw.inner)
        verify(sharded)
        check(graph, sharded, draw.mesh, c.sizes, c.values, c.truth)


def test_nothing_again() -> None:
    block = case("llama", "layer").block
    graph, primal = remat(block.graph, lambda n: None, block.primal)
    assert graph is block.graph
    assert primal == block.primal


UNFUSED = Recipe(flash_attention=False)
COUNTS = [
    # Backward needs both norms' outputs for the weights' gradients.
    ("llama", "norms", PLAIN, never, {"norm": 2}),
    ("gemma2", "norms", PLAIN, never, {"norm": 2}),  # of its four, those that lead into a branch
    # Flash attention's backward needs no result of its forward but the one that is kept.
    ("llama", "attention", PLAIN, never, {}),
    ("llama", "attention", PLAIN, core, {"attention": 1}),
    ("llama", "attention", UNFUSED, never, {"einsum": 1, "softmax": 1}),
    # arXiv 2205.05198, section 5: QK^T, softmax, dropout, and attention over V.
    ("llama", "attention", UNFUSED, core, {"einsum": 2, "softmax": 1}),
    (
        "gpt2",
        "attention",
        UNFUSED,
        core,
        {"einsum": 2, "softmax": 1, "random_mask": 1, "dropout": 1},
    ),
    ("llama", "activations", PLAIN, never, {"glu": 1}),
    ("gpt2", "activations", PLAIN, never, {"act": 1}),
]


@pytest.mark.parametrize(("model", "what", "recipe", "rerun", "expect"), COUNTS)
def test_what_runs_again(
    model: str,
    what: str,
    recipe: Recipe,
    rerun: Callable[[Node], bool],
    expect: dict[str, int],
) -> None:
    assert repeated(again(model, WHAT[what], recipe, rerun)) == expect


def test_full_recompute_leaves_out_what_backward_does_not_need() -> None:
    graph = again("llama", WHAT["all"])
    forward, repeat = (
        {n.name for n in graph if n.phase == p and n.op not in ("input", "param", "identity")}
        for p in ("forward", "recompute")
    )
    # The last product and the sum after it: their results are needed by the next layer only.
    assert forward - repeat == {"mlp_out", "mlp_residual"}


def test_forward_keeps_less() -> None:
    """What backward reads of forward: with full recompute, the layer's input and nothing else."""

    def kept(graph: Graph) -> set[str]:
        later = [n for n in graph if n.phase != "forward"]
        return {s.name for n in later for s in n.srcs if s.phase == "forward" and s.op != "param"}

    assert kept(again("llama", WHAT["all"])) == {"x"}
    plain = kept(case("llama", "layer").block.graph)
    assert kept(again("llama", WHAT["norms"])) == plain - {"attn_norm_out", "mlp_norm_out"}


def test_a_dropout_mask_is_drawn_alike_again() -> None:
    c = case("gpt2", "layer")
    graph = again("gpt2", WHAT["all"])
    env = Spmd({}, c.sizes).run(graph, c.values)
    masks: dict[str, list[Node]] = {}
    for n in graph:
        if n.op == "random_mask":
            masks.setdefault(n.name, []).append(n)
    assert masks
    for same in masks.values():
        assert {n.phase for n in same} == {"forward", "recompute"}
        assert all((env[n][()] == env[same[0]][()]).all() for n in same)


@pytest.mark.parametrize("reshard", [True, False])
@cases
def test_weights_are_gathered_again_whatever_is_done_with_activations(
    settings: dict[str, Any], reshard: bool
):
    """FSDP2's `reshard_after_forward` says it alone: not how activations are kept, and no cast."""
    compiled = sw.compile(
        "llama3-8b",
        layers=2,
        dp=4,
        zero=3,
        seq_length=512,
        reshard_after_forward=reshard,
        **settings,
    )
    layer = next(graph for label, graph in compiled.blocks.items() if label.startswith("layer"))
    gathered = {
        phase: {
            n.srcs[0].binding.name
            for n in layer
            if n.op == "all_gather"
            and n.phase == phase
            and "dp" in cast(tuple[str, ...], n["axes"])
        }
        for phase in ("forward", "backward")
    }
    assert len(gathered["forward"]) >= 7
    assert gathered["backward"] == (gathered["forward"] if reshard else set())
