"""Energy and cost against their definitions."""

from __future__ import annotations

import numpy as np
import pytest

from stagewright.lower.compile import compile
from stagewright.run.settings import Run
from stagewright.time import hardware
from stagewright.time.power import IDLE_FRACTION, expense, kernel_energies, kernel_shares

H100 = hardware.resolve("h100-sxm")


@pytest.mark.parametrize(
    ("running", "drawn", "watts"), [(0.0, 0.0, IDLE_FRACTION * 700), (1.0, 1.0, 700.0)]
)
def test_power_is_between_idle_and_tdp(running: float, drawn: float, watts: float) -> None:
    spent = expense(H100, gpus=16, seconds=2.0, tokens=1000, running=running, drawn=drawn)
    assert spent.watts_per_gpu == pytest.approx(watts)
    assert spent.joules == pytest.approx(watts * 16 * 2)
    assert spent.joules_per_token == pytest.approx(watts * 32 / 1000)


def test_kernels_that_compute_draw_more_than_kernels_that_wait_for_memory() -> None:
    """H200 (700 W), measured: 691 W at 0.68 of the peak in bf16, 621 W for decode attention of all
    but the shortest kernels' 90th percentile, 290 W for the shortest kernels."""
    launch, stream, product = kernel_shares(np.array([0.0, 1.0, 0.1]), np.array([0.0, 0.0, 0.68]))
    assert launch < stream < product <= 1
    assert product * 700 == pytest.approx(691, rel=0.05)


def test_cost_is_gpu_hours_by_price() -> None:
    """1e6 tokens in an hour of 8 GPUs at 2 USD are 16 USD."""
    spent = expense(H100, gpus=8, seconds=3600.0, tokens=10**6, running=1.0, drawn=1.0, price=2.0)
    assert spent.usd_per_million_tokens == pytest.approx(16)
    free = H100.model_copy(update={"price_usd_per_gpu_hour": None})
    unknown = expense(free, gpus=8, seconds=1.0, tokens=1, running=1.0, drawn=1.0)
    assert unknown.usd_per_million_tokens is None


def test_what_a_node_draws_besides_is_added() -> None:
    more = H100.model_copy(update={"idle_w": 100.0, "node_overhead_w": 250.0})
    spent = expense(more, gpus=1, seconds=1.0, tokens=1, running=0.5, drawn=0.5)
    assert spent.watts_per_gpu == 650


def test_tiles_of_experts_draw_more_than_their_rows() -> None:
    """vLLM's experts in bf16 on H200 that read memory draw 0.98 of the power limit in the median
    (moe_perf of aiconfigurator): a row or two of each expert is a tile of 64."""
    run = Run(model="qwen3-30b-a3b", layers=1, mode="decode", batch_size=64, context_length=128)
    tasks = compile(run).program.classes[0].tasks
    kernels = [(n, dict(s.extents)) for n, s in enumerate(tasks.shapes) if s.kernel == "gemm"]
    grouped = [n for n, of in kernels if of["batch"] > 1]
    row = np.flatnonzero(np.isin(tasks.shape, grouped))[:1]
    h200 = hardware.resolve("h200")
    seconds = tasks.traffic[row] / (0.8 * h200.memory_bandwidth_gb_s * 1e9)
    assert kernel_energies(tasks, row, seconds, h200)[0] / seconds[0] > 0.9
