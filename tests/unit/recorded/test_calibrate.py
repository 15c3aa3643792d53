"""A machine of known figures simulates a step; calibration gives the figures back."""

import csv
from pathlib import Path

import pytest

import stagewright as sw
from recorded_steps import Step
from stagewright.run.sections.cluster import ClusterSection
from stagewright.time.hardware import resolve

MACHINE = """
base: h100-sxm
name: other
sustained_fraction: {bf16: 0.62}
memory_bandwidth_fraction: 0.7
kernel_launch_us: 3.4
host_factor: 1.6
scale_up: {bandwidth_fraction: 0.55, latency_us: 9.0}
scale_out: {bandwidth_fraction: 0.6, latency_us: 21.0}
"""
RUN = {"model": "llama3-8b", "layers": 4, "seq_length": 4096, "tp": 8, "dp": 2,
       "sequence_parallel": True, "zero": 1}  # fmt: skip


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Traces of all ranks on the machine, its file, and the run."""
    folder = tmp_path_factory.mktemp("calibrate")
    machine = folder / "other.yaml"
    machine.write_text(MACHINE)
    compiled = sw.compile(sw.Run(**RUN))
    cluster = ClusterSection(hardware=str(machine))
    ranks = [0, 1, 2, 3, 4, 5, 6, 7, 8]
    sw.generate(compiled, str(folder / "traces"), format="kineto", cluster=cluster, ranks=ranks)
    return folder / "traces", machine, compiled


def test_figures_of_the_machine_come_back(recorded, tmp_path):
    traces, machine, _ = recorded
    wanted, base = resolve(machine), resolve("h100-sxm")
    result = sw.calibrate(traces, "h100-sxm")
    found = result.hardware
    assert found.sustained_fraction["bf16"] == pytest.approx(0.62, rel=0.01)
    for name in ("memory_bandwidth_fraction", "kernel_launch_us", "host_factor"):
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=0.01)
    for block in ("scale_up", "scale_out"):
        ours, theirs = getattr(found, block), getattr(wanted, block)
        assert ours.bandwidth_fraction == pytest.approx(theirs.bandwidth_fraction, rel=0.02)
        assert ours.medium_fraction == pytest.approx(theirs.medium_fraction, rel=0.02)
    assert found.scale_up.latency_us == pytest.approx(9.0, rel=0.02)
    assert found.gemm == base.gemm

    (path,) = result.write(tmp_path / "mine.yaml")
    written = resolve(path)
    assert written.name == "mine"
    assert written.host_factor == pytest.approx(found.host_factor, rel=1e-3)
    assert written.sustained_fraction["bf16"] == pytest.approx(0.62, rel=0.01)
    assert "kernels of rank.0" in written.sources["memory_bandwidth_fraction"]


def test_the_step_is_the_measured_one(recorded, tmp_path):
    traces, machine, compiled = recorded
    (mine,) = sw.calibrate(traces, "h100-sxm").write(tmp_path / "mine.yaml")
    measured = sw.simulate(compiled, machine).seconds
    assert sw.simulate(compiled, "h100-sxm").seconds < 0.9 * measured
    assert sw.simulate(compiled, mine).seconds == pytest.approx(measured, rel=0.01)


def test_durations_replace_those_of_the_model(recorded, tmp_path):
    traces, *_ = recorded
    (path,) = sw.calibrate(traces, "h100-sxm").write(tmp_path / "kernels.csv")
    rows = list(csv.DictReader(Path(path).read_text("utf-8").splitlines()))
    assert {row["kernel"] for row in rows} >= {"gemm", "attention", "all_gather"}
    step = sw.simulate(sw.Run(**RUN), "h100-sxm", durations=path)
    assert step.durations.measured_collectives == step.durations.collectives
    assert step.durations.measured_kernels > 0


def test_a_figure_at_its_limit_is_kept(tmp_path):
    """All-reduces that are slower than a ring of the base, whatever switches do."""
    machine = tmp_path / "slow.yaml"
    links = "{bandwidth_fraction: 0.5, in_network_fraction: 0.4}"
    machine.write_text(f"base: h200\nname: slow\nscale_up: {links}\n")
    compiled = sw.compile("llama3-8b", dp=8, layers=2, seq_length=2048)
    cluster = ClusterSection(hardware=str(machine))
    sw.generate(compiled, str(tmp_path / "traces"), format="kineto", cluster=cluster)
    result = sw.calibrate(tmp_path / "traces", "h200")
    assert result.hardware.scale_up == resolve("h200").scale_up
    (note,) = [note for note in result.notes if "in_network_fraction" in note]
    assert "slower than at 0.01" in note


def test_products_beyond_the_full_clock_keep_the_clock(tmp_path):
    fast = tmp_path / "fast.yaml"
    fast.write_text("base: h100-sxm\nname: fast\nsustained_fraction: {bf16: 1}\n")
    slow = tmp_path / "slow.yaml"
    slow.write_text("base: h100-sxm\nname: slow\npeak_bf16_tflops: 500\n")
    compiled = sw.compile("llama3-8b", layers=1, seq_length=4096)
    cluster = ClusterSection(hardware=str(fast))
    sw.generate(compiled, str(tmp_path / "traces"), format="kineto", cluster=cluster)
    same = sw.calibrate(tmp_path / "traces", "h100-sxm").hardware
    assert same.sustained_fraction["bf16"] == pytest.approx(1.0, rel=0.01)
    result = sw.calibrate(tmp_path / "traces", slow)
    assert result.hardware.sustained_fraction == resolve(slow).sustained_fraction
    assert any("faster than at 1" in note for note in result.notes)


def test_what_traces_do_not_tell_stays(recorded, tmp_path):
    _, machine, _ = recorded
    compiled = sw.compile("gpt2", layers=1, seq_length=64)
    cluster = ClusterSection(hardware=str(machine))
    sw.generate(compiled, str(tmp_path / "small"), format="kineto", cluster=cluster)
    result = sw.calibrate(tmp_path / "small", "h100-sxm")
    assert result.hardware.sustained_fraction == resolve("h100-sxm").sustained_fraction
    assert result.hardware.scale_up == resolve("h100-sxm").scale_up
    notes = " ".join(result.notes)
    assert "sustained_fraction.bf16: 0 products that compute limits" in notes
    assert "scale_up: no transfers in nodes" in notes
    assert "kernel_launch_us" in str(result)
    with pytest.raises(sw.UserError, match="unknown hardware"):
        sw.calibrate(tmp_path / "small", "h1000")
    with pytest.raises(sw.UserError, match="wanted a name that ends in"):
        result.write(tmp_path / "mine.txt")


def test_the_host_is_measured_from_op_to_op(tmp_path):
    """cuBLAS clears its workspace within the op of a product."""
    step = Step()
    for number in range(5):
        at = 200 * number
        step.op("aten::add", at, 20, [[64, 64]])
        step.kernel("vectorized_elementwise_kernel", at + 12, 2, launched=at + 10)
        step.op("aten::mm", at + 60, 40, [[64, 64], [64, 64]])
        step.kernel("Memset (Device)", at + 84, 1, launched=at + 80)
        step.kernel("sm90_xmma_gemm_bf16", at + 88, 3, launched=at + 85)
    result = sw.calibrate(step.write(tmp_path / "a.json"), "h100-sxm")
    (figure,) = (row for row in result.table("figures").rows if row["figure"] == "host_factor")
    assert figure["calibrated"] == pytest.approx(70 / 60)
    assert "traces are of" not in " ".join(result.notes)
    other = sw.calibrate(tmp_path / "a.json", "a100-sxm-80gb")
    assert other.notes[0].startswith("traces are of NVIDIA H100, the base is a100-sxm-80gb")


def test_launches_of_compiled_code_are_none_of_operators(tmp_path):
    step = Step()
    for number in range(5):
        step.op("aten::mm", 8 * number, 7, [[64, 64], [64, 64]])
        step.kernel("sm90_xmma_gemm_bf16", 8 * number + 6, 1, launched=8 * number + 1)
    result = sw.calibrate(step.write(tmp_path / "a.json"), "h100-sxm")
    assert result.hardware.host_factor == 1
    assert any("host_factor: launches every 8.0 us" in note for note in result.notes)
