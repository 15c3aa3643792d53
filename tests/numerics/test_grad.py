"""Reverse mode of whole blocks against finite differences, and the order that it runs in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers import some
from spmd import TINY, Case, case, single
from stagewright.blocks import Recipe, Tie
from stagewright.graph.gradient import backward
from stagewright.graph.make import add, apply, einsum, elementwise, identity, leaf
from stagewright.graph.node import Graph, Node
from stagewright.graph.verify import verify

BLOCKS = [
    (model, block, Recipe(flash_attention=not unfused))
    for model in TINY
    for block in ("embedding", "layer", "head")
    for unfused in ((False, True) if block == "layer" else (False,))
]


def name_of(value: Any) -> str:
    if isinstance(value, Recipe):
        return "flash" if value.flash_attention else "unfused"
    return str(value)


def loss(c: Case, forward: Graph, values: dict[str, Any]) -> float:
    """The number whose gradient the block computes: sum(y * dy), or the loss itself."""
    out = single(forward, c.sizes, values)
    if "loss" in out:
        return float(out["loss"] * values["d_loss"])
    return float((out["y"] * values["dy"]).sum())


@pytest.mark.parametrize(("model", "block", "recipe"), some(BLOCKS, 4), ids=name_of)
def test_blocks_against_finite_differences(model: str, block: str, recipe: Recipe) -> None:
    c = case(model, block, recipe)
    graph = c.block.graph
    out = "loss" if block == "head" else "y"
    forward = Graph.of(graph.nodes, {out: graph.outputs[out]})
    gradients = {n.name: f"grad.{n.name}" for n in graph if n.op == "param"}
    gradients |= {"x": "dx"} if "dx" in graph.outputs else {}
    assert {"dx", out, *gradients.values()} >= {k for k in graph.outputs if k[:3] in ("dx", "gra")}
    rng = np.random.default_rng(0)
    h = 1e-7 if TINY[model].index_topk else 1e-5  # so small that an indexer chooses the same keys
    for name, gradient in gradients.items():
        way = rng.normal(size=c.values[name].shape)
        ends = [
            loss(c, forward, c.values | {name: c.values[name] + sign * h * way}) for sign in (1, -1)
        ]
        slope = (ends[0] - ends[1]) / (2 * h)
        assert (c.truth[gradient] * way).sum() == pytest.approx(slope, rel=1e-5, abs=1e-6), name


def test_a_table_that_is_shared_has_one_optimizer() -> None:
    c = case("gpt2", "head", Recipe(ties=(Tie("wte", first=False, owner=False, away=False),)))
    assert "grad.wte" in c.truth
    assert "new.wte" not in c.truth


@pytest.mark.parametrize(
    ("recipe", "outputs", "inputs"),
    [
        (Recipe(clip_grad=False), {"norm2": False}, {"clip_scale": False, "wq.exp_avg": True}),
        (Recipe(optimizer="sgd"), {"norm2": True}, {"wq.momentum": True, "wq.exp_avg": False}),
    ],
    ids=["no clipping", "sgd"],
)
def test_recipes(recipe: Recipe, outputs: dict[str, bool], inputs: dict[str, bool]) -> None:
    c = case("llama", "layer", recipe)
    assert {k: k in c.truth for k in outputs} == outputs
    assert {k: k in c.values for k in inputs} == inputs


def test_dropout_only_where_asked() -> None:
    def masks(recipe: Recipe) -> int:
        return sum(n.op == "random_mask" for n in case("gpt2", "layer", recipe).block.graph)

    assert masks(Recipe()) == 2  # after each branch; flash attention drops inside
    assert masks(Recipe(flash_attention=False)) == 3
    assert masks(Recipe(dropout=False)) == 0


# ---- the order and the sums ----------------------------------------------------------------------


def wave(x: Node, name: str) -> Node:
    return elementwise("act", x, fn="tanh", name=name)


def seeded(y: Node) -> Node:
    return leaf("input", y.shape, y.dtype, "dy", phase="backward")


def test_gradients_of_one_value_are_added_at_once() -> None:
    x = leaf("input", ("B", "M"), "fp32", "x")
    y = add(wave(x, "a"), wave(wave(x, "b"), "c"), x, name="y")
    found = backward(y, seeded(y), [x])
    (g,) = found.gradients
    assert (g.op, len(g.srcs), g.name) == ("add", 3, "d_x")
    assert all(found.primal[part] is x for part in (g, *g.srcs) if part.name == "d_x")
    assert sum(n.op == "add" for n in found.order) == 1


def test_weight_gradients_wait_for_what_others_need() -> None:
    x = leaf("input", ("B", "M"), "fp32", "x")
    h = x
    for i in range(3):
        w = identity(leaf("param", ("M", "M"), "fp32", f"w{i}"), f"w{i}")
        h = wave(einsum("bm,mn->bn", h, w, name=f"h{i}"), f"a{i}")
    weights = [n for n in toposorted(h) if n.op == "identity"]
    found = backward(h, seeded(h), [x, *weights])
    names = [n.name for n in found.order]
    for i in (1, 2):  # the gradient that the layer below needs comes first
        assert names.index(f"d_a{i - 1}") < names.index(f"d_w{i}")


def toposorted(y: Node) -> list[Node]:
    return list(Graph.of([y], {"y": y}))


def test_only_what_leads_to_the_asked() -> None:
    x, z = leaf("input", ("B", "M"), "fp32", "x"), leaf("input", ("B", "M"), "fp32", "z")
    y = add(wave(x, "a"), wave(z, "b"), name="y")
    found = backward(y, seeded(y), [x])
    assert "d_z" not in {n.name for n in found.order}


def test_no_way_back() -> None:
    x, z = leaf("input", ("B", "M"), "fp32", "x"), leaf("input", ("B", "M"), "fp32", "z")
    y = wave(x, "y")
    with pytest.raises(ValueError, match="does not depend on"):
        backward(y, seeded(y), [z])
    total = apply("norm2", "bm->", x, alone=())
    with pytest.raises(NotImplementedError, match="'norm2' has no gradient"):
        backward(total, seeded(total), [x])


def test_no_gradient_is_dropped_when_an_input_is_the_output() -> None:
    x = leaf("input", ("B", "M"), "fp32", "x")
    found = backward(x, seeded(x), [x])
    assert found.gradients == (seeded(x),)
    graph = Graph.of(found.order, {"dx": found.gradients[0]})
    verify(graph)
