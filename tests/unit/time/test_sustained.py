"""The clock of a long run slows what computes, by precision, and leaves memory and launches."""

import numpy as np
import pytest

from stagewright.errors import UserError
from stagewright.time.hardware import Hardware, resolve
from stagewright.time.roofline import gemm_seconds

H100 = resolve("h100-sxm")


def seconds(m: int, on: Hardware, dtype: str = "bf16") -> float:
    size = np.array([8192.0])
    rows = np.full(1, float(m))
    traffic = 2 * (rows * size * 2 + size * size)
    return float(
        gemm_seconds(size / size, rows, size, size, traffic=traffic, dtype=dtype, hardware=on)[0]
    )


def clocked(**clocks: float) -> Hardware:
    return H100.model_copy(update={"sustained_fraction": clocks})


def test_what_computes_is_slower_by_the_clock() -> None:
    ratio = seconds(8192, clocked(bf16=0.5).sustained()) / seconds(8192, H100)
    assert ratio == pytest.approx(2, rel=0.02)


def test_what_waits_for_memory_is_not_slower() -> None:
    ratio = seconds(1, clocked(bf16=0.5).sustained()) / seconds(1, H100)
    assert ratio < 1.02


def test_each_precision_has_its_clock_and_that_of_bf16_where_it_has_none() -> None:
    on = clocked(bf16=0.8, fp8=0.5)
    assert [on.clock_of(d) for d in ("bf16", "fp8", "fp4", "fp32")] == [0.8, 0.5, 0.8, 0.8]
    fp8 = seconds(8192, on.sustained(), "fp8") / seconds(8192, H100, "fp8")
    assert fp8 == pytest.approx(2, rel=0.03)


def test_the_clock_counts_once() -> None:
    assert H100.sustained().sustained() == H100.sustained()


def test_a_number_is_that_of_all_precisions(tmp_path) -> None:  # pyright: ignore
    path = tmp_path / "mine.yaml"
    path.write_text("base: h100-sxm\nname: mine\nsustained_fraction: 0.6\n")
    mine = resolve(path)
    assert {mine.clock_of(d) for d in ("bf16", "fp8", "fp4")} == {0.6}
    path.write_text("base: h100-sxm\nname: mine\nsustained_fraction: {fp8: 0.7}\n")
    assert resolve(path).clock_of("fp8") == 0.7
    assert resolve(path).clock_of("bf16") == H100.clock_of("bf16")
    path.write_text("base: h100-sxm\nname: mine\nsustained_fraction: {fp9: 0.7}\n")
    with pytest.raises(UserError, match=r"unknown key 'sustained_fraction.fp9'; did you mean"):
        resolve(path)
    path.write_text("base: h100-sxm\nname: mine\nsustained_fraction: 2\n")
    with pytest.raises(UserError, match=r"sustained_fraction.+less than or equal to 1"):
        resolve(path)


def test_attention_that_leaves_power_to_spare_is_not_slower() -> None:
    """FlashAttention 1 in Triton reaches a quarter of H100's peak, more of A100's."""
    h100, a100 = (resolve(name).with_attention("triton") for name in ("h100-sxm", "a100-sxm-80gb"))
    assert h100.sustained().attention == h100.attention
    assert a100.sustained().attention.fraction < a100.attention.fraction
