"""Power over a step: its mean, peaks and swings, and four signs that measurements have."""

from __future__ import annotations

import pytest

import stagewright as sw
from helpers import cases, table_of

SETTINGS = table_of("test_power_over_time", "settings")


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
