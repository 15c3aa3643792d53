"""Kernels of chunked recurrences, at the speed that hardware reaches in them."""

import numpy as np
import pytest

import stagewright as sw
from stagewright.time.durations import task_seconds
from stagewright.time.hardware import resolve
from stagewright.time.network import Machine


@pytest.mark.parametrize(("name", "tflops"), [("h200", 34.7), ("gb200-nvl72", 42.8)])
def test_a_recurrence_runs_at_its_speed_and_not_at_that_of_products(
    name: str, tflops: float
) -> None:
    run = sw.Run(model="mamba2-1.3b", layers=1, seq_length=4096, micro_batch_size=4)
    (of,) = sw.compile(run).program.classes
    (seconds,) = task_seconds(sw.compile(run).program, Machine.of(resolve(name), gpus=1))
    kernels = [shape.kernel for shape in of.tasks.shapes]
    mine = np.array([*(k.startswith("linear_attention") for k in kernels), False])[of.tasks.shape]
    assert mine.sum() == 2
    found = of.tasks.flops[mine] / seconds[mine] / 1e12
    assert found == pytest.approx(tflops, rel=1e-6)
