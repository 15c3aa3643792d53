"""Frozen weights and adapters compute what one device does, and only what some gradient needs."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from helpers import pairs, times
from spmd import TINY, RandomLayouts, case, check, random_values, single
from stagewright import blocks as model_blocks
from stagewright.blocks import PRECISIONS, Adapter, Recipe, Training
from stagewright.blocks.adapters import LINEARS
from stagewright.graph.node import Graph
from stagewright.graph.roles import Role
from stagewright.graph.shard import shard
from stagewright.graph.verify import verify
from stagewright.lower.blocks import shard_block
from stagewright.lower.recipe import sizes_of
from stagewright.lower.variants import BlockVariant
from stagewright.parallel.degrees import parallelization
from stagewright.run.requests import FROZEN
from stagewright.run.settings import Run

RANK = 12
FUSED = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "linear_kv_down_proj", "in_proj")


@cache
def weights(model: str, block: str = "layer", layer: int = 0) -> frozenset[str]:
    """The parameters of a block of a tiny model."""
    graph = model_blocks.BLOCKS[block](TINY[model], Recipe(), TINY[model].layer(layer)).graph
    return frozenset(n.name for n in graph if n.op == "param" and not n.binding.buffer)


def recipe(model: str, *targets: str, layer: int = 0, **training: Any) -> Recipe:
    """Adapters beside the layers of these names; all other parameters are frozen."""
    own = weights(model, layer=layer)
    linears = (linear.of(own) for target in targets for linear in LINEARS[target])
    adapters = tuple(Adapter(of, RANK, 2.0, **training) for of in linears if of)
    return Recipe(training=Training(frozen=own, adapters=adapters))


# ---- the same numbers ----------------------------------------------------------------------------

SP = {"sequence_parallel": True}
SETUPS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "tp + sp": {"tp": 3, **SP},
    "tp + sp, all-to-all": {"tp": 3, "lora_all_to_all": True, **SP},
    "tp + cp + sp, all-to-all": {"tp": 2, "cp": 3, "lora_all_to_all": True, **SP},
    "tp with copied heads": {"tp": 12, **SP},
    "zero 3": {"dp": 3, "zero": 3},
    "tp + cp + zero 1": {"tp": 2, "cp": 3, "dp": 2, "zero": 1, **SP},
    "tp + cp + zero 3": {"tp": 2, "cp": 3, "dp": 2, "zero": 3, "recompute": "full", **SP},
    "ep": {"dp": 3, "ep": 3},
    "ep + etp": {"dp": 3, "ep": 3, "tp": 2, "etp": 2, **SP},
    "ep over tp": {"dp": 2, "tp": 3, "ep": 3, "etp": 1, **SP},
    "ep + zero 3": {"dp": 6, "ep": 3, "zero": 3},
}


def sharded(model: str, setup: str, of: Recipe, layer: int = 0) -> Graph:
    """A layer of a tiny model under a run's settings, after a check of what it computes."""
    config, kind = TINY[model], TINY[model].layer(layer)
    settings = {"micro_batch_size": 6 // SETUPS[setup].get("dp", 1), **SETUPS[setup]}
    run = Run(model=model, seq_length=12, lora_rank=RANK, **settings).resolved(config)
    mesh, plan = parallelization(run, config)
    variant = BlockVariant("layer", kind, run.recompute == "full", training=of.training)
    graph = shard_block(variant, run, config, mesh, plan, sizes_of(run, config), of)
    c = case(model, "layer", of, layer)
    check(c.block.graph, verify(graph), dict(mesh.axes), c.sizes, c.values, c.truth)
    return graph


@pytest.mark.parametrize(
    "targets",
    [FUSED, pytest.param(("all-linear",), marks=pytest.mark.slow)],
    ids=["fused", "each"],
)
@pytest.mark.parametrize(("model", "setup"), pairs(sorted(TINY), ("tp", "tp + cp + zero 3"), 4))
def test_adapters_under_every_parallelism(model: str, setup: str, targets: tuple[str, ...]) -> None:
    if TINY[model].residual_streams > 1:
        setup = "tp"  # nobody splits the three scales of several streams evenly
    for layer in range(TINY[model].num_layers):
        sharded(model, setup, recipe(model, *targets, layer=layer), layer)


@pytest.mark.parametrize("setup", [name for name in SETUPS if "ep" not in SETUPS[name]])
def test_adapters_of_a_dense_layer(setup: str) -> None:
    sharded("llama", setup, recipe("llama", *FUSED))
    sharded("llama", setup, recipe("llama", "q_proj", "v_proj", "down_proj", dropout=0.25))


@pytest.mark.parametrize("setup", [name for name in SETUPS if "ep" in SETUPS[name]])
def test_adapters_of_experts(setup: str) -> None:
    sharded("mixtral", setup, recipe("mixtral", *FUSED))
    sharded("deepseek", setup, recipe("deepseek", "all-linear"))


def test_adapters_under_random_layouts() -> None:
    c = case("llama", "layer", recipe("llama", *FUSED))
    for seed in range(times(10)):
        draw = RandomLayouts(random.Random(seed), c.sizes)
        graph = shard(c.block.graph, draw.want, c.block.primal, inner=draw.inner)
        check(c.block.graph, verify(graph), draw.mesh, c.sizes, c.values, c.truth)


def test_a_block_of_which_some_parameters_are_frozen() -> None:
    own = weights("llama")
    for some in (own - {"wq"}, own - {"w_up", "w_down"}, own - {"attn_norm.weight"}):
        for setup in ("tp + sp", "tp + cp + zero 3"):
            sharded("llama", setup, Recipe(training=Training(frozen=some)))


# ---- closed forms --------------------------------------------------------------------------------


def gradients(graph: Graph) -> set[str]:
    return {name for name in graph.outputs if name.startswith("grad.")}


def test_an_adapter_adds_the_product_of_its_factors_to_the_weight() -> None:
    """The layer with adapters is the layer whose weights are W + scale A B."""
    with_adapters = case("llama", "layer", recipe("llama", *FUSED))
    plain = model_blocks.BLOCKS["layer"](TINY["llama"], Recipe(), TINY["llama"].layer(0))
    values = dict(with_adapters.values)
    # The first factor of a fused layer has the name of its first weight.
    first = {"wk": "wq", "wv": "wq", "w_gate": "w_up"}
    for w in ("wq", "wk", "wv", "wo", "w_up", "w_gate", "w_down"):
        a, b = values[f"{first.get(w, w)}.lora_A"], values[f"{w}.lora_B"]
        values[w] = values[w] + 2.0 * np.tensordot(a, b, axes=1)
    sizes = with_adapters.sizes
    merged = single(plain.graph, sizes, random_values(plain.graph, sizes) | values)
    np.testing.assert_allclose(merged["y"], with_adapters.truth["y"], rtol=1e-9)
    np.testing.assert_allclose(merged["dx"], with_adapters.truth["dx"], rtol=1e-9)
    # d A = d W B^T, d B = A^T d W
    a, b = values["wo.lora_A"], values["wo.lora_B"]
    d_w = 2.0 * merged["grad.wo"]
    np.testing.assert_allclose(
        with_adapters.truth["grad.wo.lora_A"], np.tensordot(d_w, b, axes=(-1, -1)), rtol=1e-9
    )
    np.testing.assert_allclose(
        with_adapters.truth["grad.wo.lora_B"],
        np.tensordot(a, d_w, axes=((0, 1), (0, 1))),
        rtol=1e-9,
    )


def test_nothing_is_computed_below_the_first_that_trains() -> None:
    """With a constant input, backward ends at the last product that some gradient needs."""
    own = weights("llama")
    training = Training(frozen=own - {"w_down"}, constant=frozenset({"x"}))
    block = model_blocks.BLOCKS["layer"](
        TINY["llama"], Recipe(training=training), TINY["llama"].layer(0)
    )
    assert gradients(block.graph) == {"grad.w_down"}
    assert "dx" not in block.graph.outputs
    products = [n for n in block.graph if n.phase == "backward" and n.op == "einsum"]
    assert [n.name for n in products] == ["d_w_down"]
    assert block.trained == {"x": True}
    frozen = Training(frozen=own, constant=frozenset({"x"}))
    block = model_blocks.BLOCKS["layer"](
        TINY["llama"], Recipe(training=frozen), TINY["llama"].layer(0)
    )
    assert {n.phase for n in block.graph} == {"forward"}
    assert block.trained == {"x": False}


def test_matrices_in_fp8_are_multiplied_as_they_are_stored() -> None:
    """With products in fp8 no copy of a frozen matrix is made; in bf16 each is dequantized."""
    base = recipe("llama", *FUSED)
    stored = tuple((scope, FROZEN["fp8"]) for scope in ("attention", "mlp"))
    training = base.training._replace(stored=stored)
    for precision, casts in (("fp8", 0), ("bf16", 14)):
        of = replace(base, training=training, precision=PRECISIONS[precision])
        graph = sharded("llama", "zero 3", of)
        made = (Role.DEQUANTIZED, Role.LOW_PRECISION)
        assert len([n for n in graph if n.role in made and n.op == "cast"]) == casts
        assert len([n for n in graph if n.op == "all_gather" and n.dtype == "fp8"]) == 14


def test_stored_matrices_are_dequantized_where_they_are_read() -> None:
    """ZeRO-3 gathers few bits, in forward and again in backward."""
    stored = tuple((scope, FROZEN["nf4"]) for scope in ("attention", "mlp"))
    training = recipe("llama", *FUSED).training._replace(stored=stored)
    graph = sharded("llama", "zero 3", Recipe(training=training))
    assert len([n for n in graph if n.op == "param" and n.dtype == "fp4"]) == 7
    for phase in ("forward", "backward"):
        here = [n for n in graph if n.phase == phase]
        casts = [n for n in here if n.role is Role.DEQUANTIZED]
        assert [n.dtype for n in casts] == ["bf16"] * 7
        assert len([n for n in here if n.op == "all_gather" and n.dtype == "fp4"]) == 7
