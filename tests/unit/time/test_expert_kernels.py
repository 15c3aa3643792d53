"""What Megatron-LM runs around experts besides products, against bytes that are counted by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import stagewright as sw
from stagewright.lower.compile import compile
from stagewright.program.columns import COLLECTIVES, PHASES, Tasks
from stagewright.run.settings import Run
from stagewright.time import hardware
from stagewright.time.dispatch import DispatchKernels
from stagewright.time.durations import task_seconds
from stagewright.time.expert_kernels import bias_seconds, copying_seconds, weighed_within
from stagewright.time.hardware import resolve
from stagewright.time.network import Machine
from stagewright.time.roofline import gemm_seconds

H100 = hardware.resolve("h100-sxm")
INDEXED = 0.6818 * 3350e9
"""Bytes per second of rows that are copied by index."""
STREAM = 0.87 * 3350e9


def _tasks(model: str = "qwen3-30b-a3b", **settings: Any) -> Tasks:
    run = Run(model=model, layers=1, dp=8, zero=1, seq_length=1024, **settings)
    return compile(run).program.classes[0].tasks


def _ops(tasks: Tasks, *names: str) -> np.ndarray:
    return np.isin(np.array(tasks.ops)[tasks.op], names)


def test_rows_are_sorted_by_expert_on_arrival_and_before_they_return() -> None:
    """8 x 1024 rows of 2048 in bf16, read and written: with 16 experts on a rank, and not with one.
    Ranks that share an expert gather its rows first."""
    tasks = _tasks(ep=8)
    copies = _ops(tasks, "dispatch", "combine")
    assert copies.sum() == 4  # both ways, forward and backward
    rows = 8 * 1024
    once = 2.5e-6 + 2 * rows * 2048 * 2 / INDEXED
    extra = copying_seconds(tasks, 8, 1, H100)
    assert extra[copies] == pytest.approx([once] * 4)
    assert not extra[~copies].any()
    assert not copying_seconds(tasks, 128, 1, H100).any()
    wide = copying_seconds(tasks, 8, 2, H100)[copies]
    assert wide == pytest.approx([2 * once - 2.5e-6] * 4)


def test_rows_of_products_in_fp8_are_padded() -> None:
    """Copied once more, in a stream: 24 bits are no reason to sort."""
    bf16, fp8 = (_tasks(ep=8, precision=precision) for precision in ("bf16", "fp8"))
    found = [copying_seconds(tasks, 8, 1, H100)[_ops(tasks, "dispatch", "combine")]
             for tasks in (bf16, fp8)]  # fmt: skip
    pad = 2.5e-6 + 2 * 8 * 1024 * 2048 * 2 / STREAM
    assert found[1] - found[0] == pytest.approx([pad] * 4)


def test_gates_weigh_within_the_activation() -> None:
    tasks = _tasks(ep=8)
    within = weighed_within(tasks)
    assert within.sum() == 2
    assert (within == _ops(tasks, "weigh", "weigh+weigh_bwd")).all()
    # Elsewhere the gates weigh rows on their way, in the kernels that copy them.
    assert not weighed_within(_tasks(ep=8, moe_apply_probs="output")).any()


def test_biases_of_experts_are_added_in_fp32() -> None:
    """gpt-oss: 4 x 1024 rows of 2880, 20 bytes for each value forward and 32 backward, beyond the
    bytes that the graph counts."""
    tasks = _tasks("gpt-oss-20b", ep=8)
    extra = bias_seconds(tasks, H100)
    values = 4 * 1024 * 2880
    forward = tasks.phase == PHASES.index("forward")
    assert extra[forward].sum() == pytest.approx(20 * values / STREAM)
    assert extra[~forward].sum() == pytest.approx(32 * values / STREAM)
    assert not bias_seconds(_tasks(ep=8), H100).any()


def test_dispatchers_that_send_tokens_once_sort_and_send_gates_with_them() -> None:
    program = compile(
        Run(model="qwen3-30b-a3b", layers=1, dp=8, ep=8, zero=1, seq_length=1024)
    ).program
    machine = Machine.of(H100, gpus=8)
    (each,), (once,) = (
        task_seconds(program, machine, dispatch=dispatch)
        for dispatch in (None, DispatchKernels(128, 8))
    )
    tasks = program.classes[0].tasks
    copies = _ops(tasks, "dispatch", "combine")
    assert (each[copies] - once[copies]).min() > 10e-6
    moves = tasks.collective == COLLECTIVES.index("all_to_all")
    gates = moves & (tasks.comm_bytes < tasks.comm_bytes[moves].max() / 2)
    assert gates.sum() == 2
    assert not once[gates].any()
    assert each[gates].all()


def test_products_that_take_turns_are_products_of_their_own() -> None:
    """Unless one kernel computes all of them, as in steps that are one CUDA graph."""
    b200 = resolve("b200")
    assert b200.experts is not None
    assert b200.experts.takes_turns
    one, sizes = np.ones(1), [np.array([x]) for x in (1232.0, 3072.0, 5120.0)]
    traffic = np.array([2.0 * (1232 * 5120 + 3072 * 5120 + 1232 * 3072)])
    each = gemm_seconds(one, *sizes, traffic=traffic, dtype="bf16", hardware=b200)
    all_ = gemm_seconds(20 * one, *sizes, traffic=20 * traffic, dtype="bf16", hardware=b200)
    assert all_ == pytest.approx(20 * each)
    grouped = b200.with_grouped_experts()
    assert (
        gemm_seconds(20 * one, *sizes, traffic=20 * traffic, dtype="bf16", hardware=grouped)
        < 0.95 * all_
    )

    moe: dict[str, Any] = {
        "model": "qwen3-30b-a3b",
        "layers": 2,
        "ep": 2,
        "dp": 2,
        "seq_length": 4096,
    }
    compiled = sw.compile(**moe)
    kernels = [
        sw.simulate(
            compiled, "b200", launch_mode="cuda_graph", cuda_graph_modules=modules
        ).to_dict()["mean"]["kernels"]["forward"]
        for modules in (frozenset({"attn"}), frozenset[str]())
    ]
    assert kernels[0] > kernels[1]


def test_heads_of_an_unfused_attention_are_one_kernel_beside_experts_that_take_turns() -> None:
    """Attention's heads are in a model with experts as in one without: a product of each layer."""
    b200 = resolve("b200")
    for model in ("mixtral-8x7b", "llama3-8b"):
        run = Run(model=model, layers=1, seq_length=128, flash_attention=False)
        program = compile(run).program
        tasks = program.classes[0].tasks
        heads = np.array([*(shape.head > 0 for shape in tasks.shapes), False])[tasks.shape]
        assert heads.any()
        turns, together = (
            task_seconds(program, Machine.of(on, gpus=1))[0][heads]
            for on in (b200, b200.with_grouped_experts())
        )
        assert (turns == together).all()
