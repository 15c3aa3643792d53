"""Hardware files: every number has a source, unknown keys are refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from helpers import ROOT, cases
from stagewright.errors import UserError
from stagewright.searching.machines import varied
from stagewright.time import hardware
from stagewright.time.hardware import Hardware, resolve
from stagewright.time.roofline import gemm_seconds

NUMBERS_WITHOUT_SOURCE = {"shape"}


@pytest.mark.parametrize("name", hardware.names())
def test_every_number_has_a_source(name: str):
    found = hardware.resolve(name)
    for key, value in found.model_dump(exclude={"sources"}, exclude_defaults=True).items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        for sub, number in inner:
            if isinstance(number, float | int) and not isinstance(number, bool):
                path = f"{key}.{sub}" if sub else key
                assert found.sources.get(path), f"{name}: {path} has no source"


def test_unknown_keys_are_refused_by_name(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text("base: h100-sxm\npeak_bf16_tflop: 100\n")
    with pytest.raises(UserError, match=r"peak_bf16_tflop'; did you mean 'peak_bf16_tflops'"):
        hardware.resolve(path)
    path.write_text("base: h100-sxm\nscale_up: {bandwith_gb_s: 100}\n")
    with pytest.raises(UserError, match=r"scale_up.bandwith_gb_s'; did you mean 'bandwidth_gb_s'"):
        hardware.resolve(path)


@cases
def test_figures_that_are_none(tmp_path: Path, text: str, words: str):
    path = tmp_path / "mine.yaml"
    path.write_text(f"base: h100-sxm\n{text}\n")
    with pytest.raises(UserError, match=words.replace(".", r"\.").strip()):
        hardware.resolve(path)


def test_products_have_constants_for_bf16(tmp_path: Path):
    """Those of all data types that have none of their own."""
    path = tmp_path / "mine.yaml"
    known = (ROOT / "src/stagewright/data/hardware/mi250x.yaml").read_text()
    path.write_text(known.replace("  bf16:\n", "  bf17:\n"))
    with pytest.raises(UserError, match=r"unknown key 'gemm.bf17'; did you mean 'bf16'"):
        hardware.resolve(path)
    path.write_text(known.replace("  bf16:\n", "  fp8:\n"))
    with pytest.raises(UserError, match=r"gemm\.bf16 is missing, whose constants all data types"):
        hardware.resolve(path)


def test_a_base_lends_what_is_not_named(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text("base: h100-sxm\nname: mine\nscale_out: {bandwidth_gb_s: 25}\n")
    mine, base = hardware.resolve(path), hardware.resolve("h100-sxm")
    assert mine.scale_out.bandwidth_gb_s == 25
    assert mine.scale_out.latency_us == base.scale_out.latency_us
    assert mine.peak_bf16_tflops == base.peak_bf16_tflops


@pytest.mark.parametrize(
    "line",
    [
        "memory_gb: 1.0e+300", "tdp_w: 1.0e+308", "peak_bf16_tflops: .inf",
        "compute_units: 1" + "0" * 30,
        "scale_up: {gpus: 9223372036854775807}", "scale_out: {latency_us: 1.0e+15}",
        "price_usd_per_gpu_hour: 1.0e+13", "gemm: {bf16: {tile_us: 1.0e+13}}", "idle_w: .nan",
    ],
)  # fmt: skip
def test_figures_beyond_any_device(tmp_path: Path, line: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"base: h100-sxm\n{line}\n")
    with pytest.raises(UserError, match=r"wanted at most 1e\+12; check the unit|finite number"):
        hardware.resolve(str(path))


def test_a_base_may_be_a_file_beside(tmp_path: Path):
    (tmp_path / "bases").mkdir()
    (tmp_path / "bases" / "ours.yaml").write_text("base: h100-sxm\nname: ours\ntdp_w: 600\n")
    path = tmp_path / "mine.yaml"
    path.write_text("base: bases/ours.yaml\nname: mine\nmemory_gb: 90\n")
    mine = hardware.resolve(path)
    assert (mine.name, mine.memory_gb, mine.tdp_w) == ("mine", 90, 600)
    assert mine.peak_bf16_tflops == hardware.resolve("h100-sxm").peak_bf16_tflops


@pytest.mark.parametrize("base", ["mine.yaml", "ring.yaml", "gone.yaml", "h100-sxn"])
def test_a_base_that_is_none(tmp_path: Path, base: str):
    path = tmp_path / "mine.yaml"
    path.write_text(f"base: {base}\n")
    (tmp_path / "ring.yaml").write_text("base: mine.yaml\n")
    with pytest.raises(UserError, match=r"base is|gone\.yaml: cannot be read") as error:
        hardware.resolve(path)
    assert ".yaml" in str(error.value)


def test_a_file_without_a_base_is_told_of_one(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\npeak_bf16_tflops: 100\n")
    with pytest.raises(UserError, match="vendor is missing; give it, or a base to start"):
        hardware.resolve(path)


def test_smaller_messages_follow_the_bandwidth_that_large_ones_reach(tmp_path: Path):
    base = hardware.resolve("h100-sxm").scale_out
    path = tmp_path / "measured.yaml"
    path.write_text("base: h100-sxm\nname: m\nscale_out: {bandwidth_fraction: 0.46}\n")
    link = hardware.resolve(path).scale_out
    ratio = 0.46 / base.bandwidth_fraction
    assert link.medium_fraction == pytest.approx(base.medium_fraction * ratio)
    assert link.low_latency_fraction == pytest.approx(base.low_latency_fraction * ratio)
    path.write_text(
        "base: h100-sxm\nname: m\nscale_out: {bandwidth_fraction: 0.46, medium_fraction: 0.4}\n"
    )
    assert hardware.resolve(path).scale_out.medium_fraction == 0.4
    ((varied_hardware, _),) = varied(
        hardware.resolve("h100-sxm"), {"scale_out.bandwidth_fraction": [0.46]}
    )
    assert varied_hardware.scale_out == link


# ---- the clock of a long run, by precision -------------------------------------------------------


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
