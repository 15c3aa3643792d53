"""Fused attention in training: kernels in fp8 beside published ones."""

from dataclasses import replace

import numpy as np
import pytest

import stagewright as sw
from stagewright.evidence.kernels import sdpa_kernels
from stagewright.time.durations import kernel_seconds, task_seconds
from stagewright.time.hardware import resolve
from stagewright.time.network import Machine
from stagewright.time.roofline import QUERIES, attention_seconds, training_attention_seconds

HEADS, WIDTH, TOKENS = 16, 128, 16_384

CUDNN_FP8 = {1024: 751, 2048: 886, 4096: 864, 8192: 971, 16384: 1005}
"""TFLOP/s by sequence length of cuDNN's forward in fp8 on H100, without a mask, with heads of 128
and 16,384 tokens in all (arXiv 2407.08608, figure 7)."""


def tflops(length: int, dtype: str, *, backward: bool = False) -> float:
    heads = np.array([TOKENS / length * HEADS])
    points, per_point = heads * length**2, (10 if backward else 4) * WIDTH
    traffic = (1 if dtype == "fp8" else 2) * 4 * TOKENS * HEADS * WIDTH * np.ones(1)
    seconds = attention_seconds(
        heads * length / QUERIES, np.array([length]), points, np.array([per_point]), traffic,
        dtype=dtype, hardware=resolve("h100-sxm"), backward=backward,
    )  # fmt: skip
    return float((points * per_point / seconds)[0]) / 1e12


def test_forward_in_fp8_is_as_fast_as_published() -> None:
    """The constants are fitted to other measurements of cuDNN, on H200."""
    for length, found in CUDNN_FP8.items():
        assert 0.79 < tflops(length, "fp8") / found < 1.1


@pytest.mark.parametrize(("backward", "least", "most"), [(False, 1.2, 1.8), (True, 0.75, 1.1)])
def test_fp8_is_not_twice_as_fast_as_bf16(backward: bool, least: float, most: float) -> None:
    """Exponentials take as long; backward, cuDNN on H200 reaches 430 to 636 TFLOP/s in fp8 with
    8,192 tokens, and 541 to 594 in bf16."""
    fp8, bf16 = (tflops(8192, dtype, backward=backward) for dtype in ("fp8", "bf16"))
    assert least < fp8 / bf16 < most


def training_us(window: int, dtype: str, *, backward: bool) -> float:
    """Two sequences of 4,096 tokens on GB200, 128 heads of 64."""
    extents = {"batch": 2, "heads": 128, "kv_heads": 128, "q": 4096, "k": 4096, "d": 64, "v": 64,
               "causal": 1, "window": window}  # fmt: skip
    kernels = sdpa_kernels(
        {name: np.array([float(x)]) for name, x in extents.items()}, dtype, backward=backward
    )
    on = resolve("gb200-nvl72")
    return float(training_attention_seconds(kernels, on, backward=backward)[0]) * 1e6


@pytest.mark.parametrize(
    ("dtype", "backward", "us"),
    [("bf16", False, 210), ("bf16", True, 465), ("fp8", False, 195)],
)
def test_windows_of_training(dtype: str, backward: bool, us: float) -> None:
    """cuDNN with windows of 128 keys (cudnn-frontend@3929da2e, gpt_oss_20260424_100011.csv)."""
    assert training_us(128, dtype, backward=backward) == pytest.approx(us, rel=0.15)


def test_backward_in_fp8_passes_through_all_keys() -> None:
    """With windows of 128 keys cuDNN took 1,731 us; 32,768 tokens took 52 times as long."""
    assert training_us(128, "fp8", backward=True) == pytest.approx(
        training_us(0, "fp8", backward=True), rel=0.01
    )


@pytest.mark.parametrize(("heads", "width", "aligned"), [(64, 216, True), (128, 108, False)])
def test_products_of_heads_that_are_not_aligned_wait(heads: int, width: int, aligned: bool) -> None:
    """A head of 108 values in bf16 does not begin at a multiple of 16 bytes; one of 216 does."""
    sizes = {"num_attention_heads": heads, "kv_channels": width, "num_query_groups": heads}
    model = replace(sw.resolve("megatron-22b"), **sizes)
    run = sw.Run(model="megatron-22b", flash_attention=False, layers=1, seq_length=512)
    t = sw.compile(run, model).program.classes[0].tasks
    mine = np.array([shape.head == width for shape in t.shapes])[t.shape] & (t.shape >= 0)
    a100 = resolve("a100-sxm-80gb")
    products = np.flatnonzero(mine)
    assert len(products) == 6
    rate = t.flops[products] / kernel_seconds(t, products, a100) / 1e12
    assert a100.unaligned_heads_tflops
    assert (rate > 4 * a100.unaligned_heads_tflops).all() == aligned
    assert aligned or rate == pytest.approx(a100.unaligned_heads_tflops)


# ---- chunked recurrences, at the speed that hardware reaches in them -----------------------------


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
    assert found == pytest.approx([1.53 * tflops, 0.885 * tflops], rel=1e-6)
    assert of.tasks.flops[mine].sum() / seconds[mine].sum() / 1e12 == pytest.approx(
        tflops, rel=1e-3
    )
