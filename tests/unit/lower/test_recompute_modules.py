"""Modules that backward recomputes: what runs again, and what is kept, in closed form."""

from __future__ import annotations

from collections import Counter
from typing import Any, get_args

import numpy as np
import pytest

import stagewright as sw
from stagewright.errors import UserError
from stagewright.lower.blocks import MODULES
from stagewright.program.columns import PHASES, RankClass, TaskKind
from stagewright.run.sections.memory import Module

TOKENS = 1024
M, HEADS, NOPE, ROPE, V = 7168, 128, 128, 64, 128
Q_RANK, KV_RANK, F, EXPERTS, TOP_K, X = 1536, 512, 18432, 256, 8, 2048
QK = NOPE + ROPE


def compiled(**more: Any) -> RankClass:
    """DeepSeek-V3 with three dense layers and one of experts."""
    run = sw.Run(
        model="deepseek-v3", layers=4, vocab=64, seq_length=TOKENS, micro_batch_size=1, **more
    )
    return sw.compile(run).program.classes[0]


def recomputed(*modules: str, **more: Any) -> RankClass:
    return compiled(recompute="selective", recompute_modules=modules, **more)


DENSE, EXPERT, SHARED, ROUTER = 6 * M * F, 6 * M * X * TOP_K, 6 * M * X, 2 * M * EXPERTS
UP = 2 * HEADS * (Q_RANK * QK + KV_RANK * (NOPE + V))
PRODUCTS = {
    "mla_up_proj": 4 * UP,
    "mlp": 3 * DENSE,
    "moe": ROUTER + EXPERT + SHARED,
    "shared_experts": SHARED,
    "moe_act": 0,
    "norm": 0,
}
"""FLOPs of products that run again, per token."""


@pytest.mark.parametrize("module", PRODUCTS)
def test_products_that_run_again(module: str) -> None:
    t = recomputed(module).tasks
    again = (t.phase == PHASES.index("recompute")) & (t.kind == TaskKind.COMPUTE)
    product = [t.ops[o] == "einsum" for o in t.op]
    assert int(t.flops[again & product].sum()) == TOKENS * PRODUCTS[module]


MOVED = {  # by module: the collectives of its forward pass, in all four layers
    "mlp": {"all_gather": 3, "reduce_scatter": 3},
    "moe": {"all_to_all": 3, "all_gather": 2, "reduce_scatter": 1},  # counts of tokens, too
    "shared_experts": {"all_gather": 1, "reduce_scatter": 1},
    "mla_up_proj": {"all_gather": 4 * 3},
    "moe_act": {},
}


@pytest.mark.parametrize("module", MOVED)
def test_collectives_inside_a_module_run_again(module: str) -> None:
    found = recomputed(module, tp=2, sequence_parallel=True, dp=2, ep=4, etp=1).tasks
    again = (found.phase == PHASES.index("recompute")) & (found.kind == TaskKind.COLLECTIVE)
    assert Counter(found.ops[o] for o in found.op[again]) == MOVED[module]


def kept(of: RankClass) -> int:
    """Bytes of values that the last layer's forward pass makes for its backward pass."""
    v, tasks = of.values, of.tasks
    last = np.minimum(v.last, len(tasks) - 1)
    made = (v.first >= 0) & (v.last < len(tasks))
    made &= (tasks.phase[v.first] == 0) & (tasks.layer[v.first] == 3)
    return int(v.size[v.value[made & (tasks.phase[last] > 0) & (tasks.layer[last] == 3)]].sum())


NORMED = Q_RANK + KV_RANK  # of latents; the key's rotary part is kept instead of the turned one
SAVED = {
    "mla_up_proj": 2 * (HEADS * (2 * QK + V) + NORMED - ROPE),
    "moe": 2 * TOP_K * (M + 4 * X) + 2 * 3 * X,
    "shared_experts": 2 * 3 * X,
    "moe_act": 2 * TOP_K * 2 * X,
}
"""Bytes per token that a layer of experts keeps less; the router's few are not counted."""


@pytest.mark.parametrize("module", SAVED)
def test_what_is_kept_for_backward(module: str) -> None:
    freed = kept(compiled()) - kept(recomputed(module))
    assert freed == pytest.approx(TOKENS * SAVED[module], rel=0.01)


def test_each_module_is_a_value_of_the_setting() -> None:
    assert get_args(Module) == tuple(MODULES)


def test_latent_attention_is_needed() -> None:
    run = sw.Run(model="gpt2", recompute="selective", recompute_modules=("mla_up_proj",))
    with pytest.raises(UserError, match="a part of latent attention, which gpt2 does not have"):
        sw.compile(run)
