"""The property on which all else rests: for any layouts whatsoever, the sharded graph computes what
the single-device graph computes, on every rank of a simulated mesh.

Failures name a seed: `replay(block, seed)` builds the case again.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import some, times
from spmd import TINY, Case, RandomLayouts, case, check, random_values
from stagewright.algebra.layout import split
from stagewright.blocks import Recipe
from stagewright.graph.make import apply, leaf
from stagewright.graph.node import Graph
from stagewright.graph.shard import shard
from stagewright.graph.verify import verify

BLOCKS: dict[str, Callable[[], Case]] = {
    f"{model} {block}{' unfused' * unfused}": (
        lambda m=model, b=block, u=unfused: case(m, b, Recipe(flash_attention=not u))
    )
    for model in TINY
    for block in ("embedding", "layer", "head")
    if not (block == "layer" and TINY[model].num_experts)  # rows of tokens: see test_strategies
    for unfused in ((False, True) if block == "layer" else (False,))
}
BLOCKS["gemma2 layer local"] = lambda: case("gemma2", "layer", layer=1)


def replay(block: str, rng: random.Random) -> None:
    """Shard a block with random layouts and compare all its outputs."""
    c = BLOCKS[block]()
    draw = RandomLayouts(rng, c.sizes)
    axes = tuple(draw.mesh)
    sharded = shard(
        c.block.graph,
        draw.want,
        c.block.primal,
        keep_gathered=rng.random() < 0.5,
        inner=draw.inner,
        model_axes=tuple(a for a in axes if rng.random() < 0.7),
    )
    verify(sharded)
    check(c.block.graph, sharded, draw.mesh, c.sizes, c.values, c.truth)


OFTEN = "llama layer"  # attention with grouped queries and a gated MLP


@pytest.mark.parametrize("block", dict.fromkeys([OFTEN, *some([*BLOCKS], 4)]))
def test_seeded_layouts(block: str) -> None:
    for seed in range(times(30 if block == OFTEN else 1)):
        try:
            replay(block, random.Random(seed))
        except Exception as error:
            error.add_note(f"replay({block!r}, random.Random({seed}))")
            raise


@given(rng=st.randoms(use_true_random=False), block=st.sampled_from(sorted(BLOCKS)))
@settings(max_examples=times(15), suppress_health_check=list(HealthCheck))
def test_any_layouts(rng: random.Random, block: str) -> None:
    replay(block, rng)


def test_heads_of_a_group_are_split_only_where_the_groups_are() -> None:
    """With two key-value heads over `a`, `b` alone cannot split query heads in contiguous parts."""
    q = leaf("input", ("B", "Q", "A", "D"), "fp32", "q")
    k, v = (leaf("input", ("B", "K", "G", "D"), "fp32", name) for name in "kv")
    spec = "bq(gr)D,bkgD,bkgD->bq(gr)D"
    out = apply("attention", spec, q, k, v, causal=True, window=0, products=(1, 1), name="out")
    graph = Graph.of([out], {"out": out})
    layouts = {
        "q": split("", "", "a b", ""),
        "k": split("a", "", "", ""),  # takes `a` away from the groups
        "out": split("a", "", "", ""),
    }
    sharded = shard(graph, lambda n, have: layouts.get(n.name), inner=frozenset("b"))
    sizes = {"B": 2, "Q": 2, "K": 2, "A": 6, "G": 2, "D": 2}
    check(graph, sharded, {"a": 2, "b": 3}, sizes, random_values(graph, sizes))
