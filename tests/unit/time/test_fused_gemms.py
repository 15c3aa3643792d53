"""Products of one input that are timed as one: closed forms of the kernel model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import stagewright as sw
from stagewright.lower.compile import compile
from stagewright.program.columns import Program, Tasks
from stagewright.run.settings import Run
from stagewright.time.durations import task_seconds
from stagewright.time.fused_gemms import within_products
from stagewright.time.hardware import resolve
from stagewright.time.network import Machine
from stagewright.time.roofline import gemm_seconds

H100 = resolve("h100-sxm")
LLAMA: dict[str, Any] = {"model": "llama3-8b", "layers": 2, "tp": 4, "seq_length": 4096}
S, M, Q, KV, F = 4096, 4096, 8 * 128, 2 * 128, 14336 // 4  # on a rank of tp=4


def timed(**settings: Any) -> tuple[Program, Tasks, np.ndarray]:
    program = compile(Run(**{**LLAMA, **settings})).program
    machine = Machine.of(H100, gpus=program.mesh.world_size)
    seconds = task_seconds(program, machine)[0]
    return program, program.classes[0].tasks, seconds


def product(m: int, n: int, k: int, traffic: float, batch: int = 1) -> float:
    sizes = [np.array([float(x)]) for x in (batch, m, n, k)]
    on = H100.sustained()
    return float(gemm_seconds(*sizes, traffic=np.array([traffic]), dtype="bf16", hardware=on)[0])


def total(t: Tasks, seconds: np.ndarray, *names: str) -> float:
    of = np.isin(np.array(t.names)[t.name], [f"layer0.{n}" for n in names])
    return float(seconds[of & (t.microbatch == 0)].sum())


def test_query_key_and_value_are_one_product() -> None:
    _, t, seconds = timed()
    n = Q + 2 * KV
    moved = 2 * (S * M + M * n + S * n)
    assert total(t, seconds, "q", "k", "v") == pytest.approx(product(S, n, M, moved))
    # The gradient of the input is one longer sum, and nothing adds up three.
    assert total(t, seconds, "d_attn_norm_out") == pytest.approx(product(S, M, n, moved))
    # Gradients of weights are added to what is there in fp32: read, written.
    grads = ("d_wq+wq.grad", "d_wk+wk.grad", "d_wv+wv.grad")
    moved = 2 * (S * M + S * n) + 8 * M * n
    assert total(t, seconds, *grads) == pytest.approx(product(M, n, S, moved))


def test_gate_and_up_are_one_product() -> None:
    _, t, seconds = timed()
    moved = 2 * (S * M + 2 * M * F + 2 * S * F)
    assert total(t, seconds, "gate", "up") == pytest.approx(product(S, 2 * F, M, moved))
    assert total(t, seconds, "d_mlp_norm_out") == pytest.approx(product(S, M, 2 * F, moved))


def test_those_of_experts_too_but_not_the_router() -> None:
    small = {"model": "mixtral-8x7b", "tp": 1, "seq_length": 1024}
    _, t, seconds = timed(**small)
    _, _, apart = timed(**small, joint_projections=False)
    rows, f = 1024 * 2 // 8, 14336
    moved = 2 * 8 * (rows * M + 2 * M * f + 2 * rows * f)
    up = total(t, seconds, "gate", "up")
    assert up == pytest.approx(product(rows, 2 * f, M, moved, batch=8))
    assert total(t, seconds, "router") == total(t, apart, "router")
    # The input's gradient is a sum of the router's, too.
    sums = np.array(t.ops)[t.op] == "add"
    assert (seconds[sums] <= apart[sums]).all()


@pytest.mark.parametrize("settings", [{"framework": "torchtitan"}, {"joint_projections": False}])
def test_apart_each_is_its_own(settings: dict[str, Any]) -> None:
    _, t, seconds = timed(**settings)
    moved = 2 * (S * M + M * KV + S * KV)
    assert total(t, seconds, "v") == pytest.approx(product(S, KV, M, moved))


def test_what_was_measured_stays() -> None:
    program, t, _ = timed()
    (of,) = program.classes
    is_v = np.array(t.names)[t.name] == "layer0.v"
    known = replace(t, duration=np.where(is_v, 10**6, 0))
    changed = replace(program, classes=(replace(of, work=of.work.with_tasks(known)),))
    (seconds,) = task_seconds(changed, Machine.of(H100, gpus=4))
    assert (seconds[is_v] == 1e-3).all()
    n = Q + KV  # of what was not measured
    moved = 2 * (S * M + M * n + S * n)
    found = total(t, seconds, "q", "k")
    assert found == pytest.approx(product(S, n, M, moved))


def test_a_linear_layer_of_pytorch_adds_its_bias_within_the_product() -> None:
    """Megatron-LM's layers multiply and then add; behind a reduction every bias is a kernel."""
    for settings, free in (
        ({"fuse": False}, {"q", "k", "v", "wo", "up", "down"}),
        ({"fuse": False, "tp": 2}, {"q", "k", "v", "up"}),
        ({}, set[str]()),
    ):
        settings = {"model": "gpt2", "layers": 1, "tp": 1, "seq_length": 256, **settings}
        _, t, seconds = timed(**settings)
        biases = np.array([op == "bias" for op in t.ops])[t.op]
        within = biases & within_products(t)
        assert within.sum() == len(free)
        assert not seconds[within].any()
        assert (seconds[biases & ~within] > 0).all()


def test_products_with_scales_per_row_are_slower() -> None:
    """torch._scaled_mm runs kernels of CUTLASS, but for AMD's GPUs."""
    run = {"model": "llama3-8b", "layers": 2, "framework": "torchtitan", "precision": "fp8"}
    seconds = {
        (hardware, recipe): sw.simulate(
            sw.compile(**run, fp8_recipe=recipe), hardware, launch_mode="ahead"
        ).seconds
        for hardware in ("h100-sxm", "mi300x")
        for recipe in ("delayed", "rowwise")
    }
    slower = {
        name: seconds[name, "rowwise"] / seconds[name, "delayed"] for name in ("h100-sxm", "mi300x")
    }
    assert slower["h100-sxm"] > 1.05 * slower["mi300x"]
