"""Power and cost of a step, from FLOPs and bytes of kernels, TDP and price.

A GPU that waits draws its idle power. While a kernel runs, it draws a part of its TDP, more for
the share of the memory's bandwidth that the kernel uses, and more for the share of the peak of
products, up to the TDP. Tensor cores multiply whole tiles: products of few rows count as products
of 16, and grouped ones as of 64 rows each, so that experts of few tokens draw what their tiles do.
The three parts were fitted to the power that NVIDIA's aiconfigurator measured with the time of
kernels longer than 200 us on H200, B200 and GB200 (products, experts, decode and prefill attention
of vLLM 0.22 and TensorRT-LLM 1.3; github.com/ai-dynamo/aiconfigurator@095f58a5): 70% of the rows,
where kernels that use memory and others have equal weight (`benchmarks/fit_power.py`). On the
other 30% the median error is 10%, of experts that read memory 7% (33% before tiles counted).

>>> from stagewright.time.hardware import resolve
>>> h100 = resolve("h100-sxm")
>>> round(float(kernel_shares(np.array([1.0]), np.array([0.0]))[0]), 2)  # a stream of bytes
0.7
>>> spent = expense(h100, gpus=8, seconds=10.0, tokens=10**6, running=0.5, drawn=0.4, price=2.0)
>>> spent.watts_per_gpu, spent.joules, round(spent.usd_per_million_tokens or 0, 4)
(350.0, 28000.0, 0.0444)
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from stagewright.arrays import Float, Int
from stagewright.program.columns import Shape, Tasks
from stagewright.program.shapes import GEMM
from stagewright.time.hardware import Hardware

IDLE_FRACTION = 0.2
"""Power of a GPU that waits over its TDP, where its file gives no `idle_w`: an assumption."""
RUNNING_FRACTION = 0.498
"""Power over TDP while a kernel runs that neither computes nor moves much."""
MEMORY_FRACTION = 0.2
"""Power over TDP that the full bandwidth of the memory adds."""
COMPUTE_FRACTION = 1.792
"""Power over TDP that products at the peak of their precision would add; less than a third of the
peak draws all of the TDP."""
ROWS, GROUPED_ROWS = 16, 64
"""Rows that the tiles of a product have at least: of one, and of each of a group."""


class Expense(NamedTuple):
    """Energy and cost of a step."""

    watts_per_gpu: float
    """Mean over the step, of the GPU and its share of the node (`node_overhead_w`)."""
    joules: float
    """Energy of all GPUs."""
    joules_per_token: float
    usd_per_million_tokens: float | None
    """None without a price."""


def idle_watts(hardware: Hardware) -> float:
    """Power of an idle GPU."""
    watts = hardware.idle_w
    return IDLE_FRACTION * hardware.tdp_w if watts is None else watts


def kernel_shares(bandwidth: Float, compute: Float) -> Float:
    """Power over TDP of kernels, from their shares of bandwidth and peak."""
    used = MEMORY_FRACTION * np.minimum(bandwidth, 1) + COMPUTE_FRACTION * np.minimum(compute, 1)
    return np.minimum(RUNNING_FRACTION + used, 1)


def kernel_energies(tasks: Tasks, rows: Int, seconds: Float, hardware: Hardware) -> Float:
    """Energy of each kernel, in seconds at TDP.

    Kernel n is row `rows[n]` of `tasks`, and takes `seconds[n]`, above 0.
    """
    # Products run at bf16's peak where hardware lacks their precision.
    peaks = [hardware.rate_of(dtype) or hardware.peak_bf16_tflops for dtype in tasks.dtypes]
    rates = np.array([peak * 1e12 for peak in peaks])[tasks.dtype[rows]]
    tiles = np.array([*map(_tiled, tasks.shapes), 1.0])[tasks.shape[rows]]
    flops, traffic = (column[rows].astype(np.float64) for column in (tasks.flops, tasks.traffic))
    moved = traffic / seconds / (hardware.memory_bandwidth_gb_s * 1e9)
    return kernel_shares(moved, tiles * flops / seconds / rates) * seconds


def _tiled(shape: Shape) -> float:
    """Ratio of FLOPs of the tiles of a product to its FLOPs; 1 for other kernels."""
    sizes = shape.sizes() if shape.kernel == GEMM else {}
    rows = sizes.get("m")
    if not rows:
        return 1.0
    tile = GROUPED_ROWS if sizes["batch"] > 1 else ROWS
    return math.ceil(rows / tile) * tile / rows


def watts_per_gpu(hardware: Hardware, running: Float | float, drawn: Float | float) -> Any:
    """Mean power of a GPU and its share of the node; arguments of `expense`."""
    return idle_watts(hardware) * (1 - running) + hardware.tdp_w * drawn + hardware.node_overhead_w


def expense(
    hardware: Hardware, *, gpus: int, seconds: float, tokens: int, running: float, drawn: float,
    price: float | None = None,
) -> Expense:  # fmt: skip
    """Energy and cost of a step that takes `seconds` on `gpus` GPUs.

    `running`: the share of the step, 0 to 1, in which kernels of the mean GPU run, those of
    communication included. `drawn`: the mean over the step of the power of these kernels over TDP.
    `price` is in USD per GPU and hour; None takes the hardware's.
    """
    watts = float(watts_per_gpu(hardware, running, drawn))
    joules = watts * gpus * seconds
    price = hardware.price_usd_per_gpu_hour if price is None else price
    usd = None if price is None else price * gpus * seconds / 3600 / tokens * 1e6
    return Expense(watts, joules, joules / tokens, usd)
