"""Recomputation that keeps results by name: what runs again, and what is kept, in closed form."""

from typing import Any

import pytest

import stagewright as sw
from stagewright.launch.names import REMAT_POLICIES
from stagewright.program.columns import PHASES, RankClass, TaskKind
from stagewright.run.other_names import translate

B, S, M, F, D, HEADS, GROUPS = 2, 1024, 4096, 14336, 128, 32, 8
TOKENS = B * S


def compiled(**more: Any) -> RankClass:
    run = sw.Run(
        model="llama3-8b", layers=2, vocab=64, micro_batch_size=B, seq_length=S, dropout=False,
        **more,
    )  # fmt: skip
    return sw.compile(run).program.classes[0]


def again(of: RankClass) -> int:
    """FLOPs of products that run again, per layer; attention is none of them."""
    tasks = of.tasks
    repeated = (tasks.phase == PHASES.index("recompute")) & (tasks.kind == TaskKind.COMPUTE)
    named = [tasks.names[i] for i in tasks.name[repeated].tolist()]
    flops = tasks.flops[repeated].tolist()
    products = ("q", "k", "v", "attn_out", "gate", "up", "mlp_out")
    return sum(f for n, f in zip(named, flops, strict=True) if n.split(".")[-1] in products) // 2


QKV = 2 * TOKENS * M * (HEADS + 2 * GROUPS) * D
OUT = 2 * TOKENS * M * HEADS * D
WI = 2 * TOKENS * M * 2 * F
PRODUCTS = {  # what backward reads and the policy has not kept
    "minimal": 0,
    "minimal_with_context": 0,
    "save_dot_with_context_except_mlp": WI,
    "save_dot_except_mlpwi": WI,
    "save_dot_except_mlp": WI,
    "save_qkv_proj": OUT + WI,
    "save_out_proj": QKV + WI,
    "full": QKV + OUT + WI,
    "minimal_offloaded": 0,
    "qkv_proj_offloaded": OUT + WI,
}


@pytest.mark.parametrize("policy", PRODUCTS)
def test_products_that_run_again(policy: str) -> None:
    settings, _ = translate({"remat_policy": policy})
    assert again(compiled(**settings)) == PRODUCTS[policy]
    assert set(PRODUCTS) == set(REMAT_POLICIES) - {"none"}


KEPT = {
    "qkv_proj": (HEADS + 2 * GROUPS) * D,
    "context": HEADS * D,
    "out_proj": M,
    "mlpwi": 2 * F,
}


@pytest.mark.numerics
@pytest.mark.parametrize("saved", KEPT)
def test_what_is_kept_for_backward(saved: str) -> None:
    """On the device, or in the host's memory: bf16 values of both layers."""
    nothing = stored(recompute="full", cpu_offloading_num_layers=2)
    everything = stored(recompute="full", recompute_save=(saved,), cpu_offloading_num_layers=2)
    only = stored(recompute="full", recompute_save=(saved,), recompute_save_on_host=True)
    assert nothing == 2 * 2 * TOKENS * M
    assert everything - nothing == only == 2 * 2 * TOKENS * KEPT[saved]


def stored(**more: Any) -> int:
    tasks = compiled(**more).tasks
    return int(tasks.comm_bytes[tasks.kind == TaskKind.STORE].sum())


def test_all_that_a_layer_makes_again_is_what_backward_reads() -> None:
    """`mlpwo` is only added to the stream: no gradient reads it, and nothing is kept."""
    settings: dict[str, Any] = {"recompute": "full", "recompute_early_stop": True}
    assert again(compiled(**settings)) == again(compiled(**settings, recompute_save=("mlpwo",)))
