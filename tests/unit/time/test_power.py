"""Energy and cost against their definitions."""

from __future__ import annotations

import numpy as np
import pytest

import stagewright as sw
from helpers import cases, table_of
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


# ---- over a step: its mean, peaks and swings, and signs that measurements have -------------------


SETTINGS = table_of("test_power", "settings")


def _step(**changes: object) -> sw.Simulation:
    return sw.simulate("llama3.1-70b", **{**SETTINGS, **changes})  # pyright: ignore


@cases
def test_the_mean_over_time_is_the_power_of_the_step(changes: dict[str, object]) -> None:
    step = _step(**changes)
    of, watts = step.power_over_time, step.expense().watts_per_gpu
    gpus = step.machine.gpus
    # Kernels of two streams at once count twice in the mean, and draw the TDP at most over time.
    assert of.gpu.mean == pytest.approx(watts, rel=2e-3)
    assert of.gpu.mean <= watts * (1 + 1e-9)
    assert of.job.mean == pytest.approx(of.gpu.mean * gpus)
    limit = step.machine.hardware.tdp_w + step.machine.hardware.node_overhead_w
    assert of.gpu.peak <= limit * (1 + 1e-9)
    assert 0 <= of.job.swing <= of.job.peak - float(of.job.watts.min()) + 1e-6
    assert of.node.peak >= of.job.peak / (gpus / 8) * (1 - 1e-9)
    assert of.seconds[-1] + of.job.span == pytest.approx(step.seconds)


def test_json_has_the_peaks() -> None:
    step = _step()
    job = step.power_over_time.job
    assert [*step.table("power").columns["all GPUs"]] == job.watts.round(2).tolist()
    assert step.to_dict()["power"]["over_time"]["job"]["peak"] == step.power_over_time.job.peak


# Signs of "Characterizing the efficiency of distributed training" (arXiv 2509.10371).


def test_larger_microbatches_raise_peaks() -> None:
    small, large = (_step(seq_length=512, micro_batch_size=m) for m in (1, 4))
    assert large.power_over_time.gpu.peak > small.power_over_time.gpu.peak * 1.01
    assert large.expense().watts_per_gpu > small.expense().watts_per_gpu


def test_overlap_raises_power() -> None:
    settings = {"tp": 1, "pp": 1, "dp": 32, "zero": 3, "sequence_parallel": False}
    overlapped, exposed = (_step(**settings, **more) for more in ({}, {"no_overlap": ["dp"]}))
    assert overlapped.power_over_time.gpu.mean > exposed.power_over_time.gpu.mean
    assert overlapped.power_over_time.gpu.peak >= exposed.power_over_time.gpu.peak


def test_a_slow_node_slows_the_step_by_its_factor() -> None:
    settings = {"pp": 1, "dp": 4, "no_overlap": ["dp"]}
    slow = dict.fromkeys(range(8), 1.25)
    fast, slowed = _step(**settings), _step(**settings, stragglers=slow)
    kernels = sum(fast.mean.kernels.values()) / fast.seconds
    assert slowed.seconds / fast.seconds == pytest.approx(1 + 0.25 * kernels, rel=0.01)
    # The others wait for it and draw less.
    assert slowed.expense().watts_per_gpu < fast.expense().watts_per_gpu


def test_fewer_layers_on_a_slow_node_give_some_back() -> None:
    slow = dict.fromkeys(range(8), 1.5)  # with dp = 1: pipeline rank 0
    settings = {"dp": 1, "global_batch_size": 16, "stragglers": slow}
    even = _step(**settings)
    moved = _step(**settings, layers_per_stage=(6, 9, 9, 8))
    assert moved.seconds < even.seconds
    assert moved.expense().joules < even.expense().joules


def test_a_steady_pipeline_draws_the_power_of_its_step() -> None:
    settings = {"mode": "decode", "pp": 4, "batch_size": 64, "context_length": 2048}
    step = sw.simulate("llama3.1-8b", "h100-sxm", **settings)  # pyright: ignore
    assert step.power_over_time.gpu.mean == pytest.approx(step.expense().watts_per_gpu, rel=1e-6)
