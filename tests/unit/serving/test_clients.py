"""Results of benchmark clients, as the load that they sent and what they measured."""

import json
import math

import numpy as np
import pytest

from helpers import cases
from stagewright.api.workloads import workload_of
from stagewright.errors import UserError
from stagewright.run.sections.serving import WorkloadSection
from stagewright.serving.compare_log import measured_run
from stagewright.serving.workloads import traces

VLLM = {
    "date": "20260801-101010", "backend": "vllm", "model_id": "m", "num_prompts": 4,
    "request_rate": 8.0, "burstiness": 0.5, "max_concurrency": None,
    "duration": 2.5, "completed": 3, "failed": 1, "total_input_tokens": 3000,
    "total_output_tokens": 390, "request_throughput": 1.2, "output_throughput": 156.0,
    "mean_ttft_ms": 50.0, "median_ttft_ms": 48.0, "p99_ttft_ms": 90.0,
    "mean_tpot_ms": 9.0, "median_tpot_ms": 8.5, "p99_tpot_ms": 12.0,
    "mean_e2el_ms": 1200.0, "median_e2el_ms": 1150.0, "p99_e2el_ms": 1900.0,
}  # fmt: skip
DETAILS = {
    "input_lens": [1000, 900, 1100, 1000], "output_lens": [130, 1, 129, 0],
    "ttfts": [0.05, 0.04, 0.06, 0.0], "itls": [[0.01] * 129, [], [0.02] * 64, []],
    "generated_texts": ["", "", "", ""], "errors": ["", "", "", "Timeout"],
}  # fmt: skip
SGLANG = {
    "backend": "sglang", "dataset_name": "random", "request_rate": math.inf, "max_concurrency": 2,
    "random_input_len": 1024, "random_output_len": 128, "random_range_ratio": 0.5,
    "duration": 9.5, "completed": 4, "total_input_tokens": 4000, "total_output_tokens": 260,
    "mean_e2e_latency_ms": 1200.0, "median_e2e_latency_ms": 1100.0, "mean_ttft_ms": 40.0,
    "median_ttft_ms": 39.0, "p99_ttft_ms": 41.0, "mean_tpot_ms": 9.0, "median_tpot_ms": 9.0,
    "p99_tpot_ms": 9.5, "concurrency": 1.9, "accept_length": None,
}  # fmt: skip


def stat(avg: float, unit: str = "ms", **more: float) -> dict:
    return {"unit": unit, "avg": avg, **more}


AIPERF = {
    "request_throughput": stat(5.0, "requests/sec"), "request_count": stat(40, "requests"),
    "time_to_first_token": stat(60.0, p50=55.0, p90=80.0, p95=85.0, p99=90.0),
    "inter_token_latency": stat(8.0, p50=7.5, p99=11.0),
    "request_latency": stat(1500.0, p50=1400.0, p99=2000.0),
    "input_sequence_length": stat(550.4, "tokens"), "output_sequence_length": stat(180.0, "tokens"),
    "input_config": {
        "phases": [{"name": "warmup", "concurrency": 3}, {"name": "profiling", "concurrency": 10}],
    },
}  # fmt: skip


def record(start: float, isl: int, osl: int, phase: str = "profiling", **more) -> dict:
    metrics = {
        "input_sequence_length": {"value": isl, "unit": "tokens"},
        "output_sequence_length": {"value": osl, "unit": "tokens"},
        "time_to_first_token": {"value": 250.0, "unit": "ms"},
        "request_latency": {"value": 1250.0, "unit": "ms"},
    }
    metadata = {
        "x_correlation_id": more.pop("session", f"{start}"), "benchmark_phase": phase,
        "request_start_ns": 1_759_813_207_000_000_000 + int(start * 1e9),
    }  # fmt: skip
    return {"metadata": metadata, "metrics": metrics, "error": None} | more


@pytest.fixture
def written(tmp_path):
    def write(*values: dict, indent: int | None = None, name: str = "result.json") -> str:
        path = tmp_path / name
        path.write_text("\n".join(json.dumps(value, indent=indent) for value in values))
        return str(path)

    return write


@pytest.mark.parametrize("indent", [None, 2])
def test_totals_of_vllm(written, indent):
    path = written(VLLM, indent=indent)
    work = workload_of(WorkloadSection(requests=path))
    assert len(work) == 4
    assert {*work.prompt} == {1000}
    assert {*work.output} == {130}
    assert work.concurrency is None
    assert work.arrival[-1] > 0
    figures = measured_run(path).figures
    assert figures["ttft", "mean"] == 0.05
    assert figures["tpot", "p50"] == 0.0085
    assert figures["e2e", "p99"] == 1.9
    assert ("e2e", "p90") not in figures
    own = workload_of(WorkloadSection(requests=path, isl=500, range_ratio=0.5, concurrency=3))
    assert (own.concurrency, max(own.prompt) <= 500, {*own.arrival}) == (3, True, {0.0})


def test_requests_of_vllm(written):
    sent = {"start_times": [100.5, 100.0, 101.0, 102.0], "latencies": [1.4, 0.04, 1.5, 0.0]}
    work = traces.read(written(VLLM | DETAILS | sent))
    assert list(work.arrival) == [0.0, 0.5, 1.0]
    assert list(work.prompt) == [900, 1000, 1100]
    assert work.rejected == {traces.UNANSWERED: 1}
    run = measured_run(written(VLLM | DETAILS | sent))
    assert run.times["e2e"] == pytest.approx([0.04, 1.4, 1.5])
    assert run.times["tpot"][1:] == pytest.approx([1.35 / 129, 1.44 / 128])
    assert run.figures["ttft", "p50"] == pytest.approx(0.05)


def test_requests_without_their_times(written):
    work = traces.read(written(VLLM | DETAILS))  # older versions
    assert work.name.endswith(" (arrivals drawn at its rate)")
    assert work.arrival[0] == 0.0 < work.arrival[-1]
    assert list(work.prompt) == [1000, 900, 1100]
    times = measured_run(written(VLLM | DETAILS)).times
    assert times["e2e"] == pytest.approx([0.05 + 1.29, 0.04, 0.06 + 1.28])


def test_a_closed_loop_of_sglang(written):
    path = written(SGLANG | DETAILS, name="sglang.jsonl")
    work = traces.read(path)
    assert (work.concurrency, {*work.arrival}) == (2, {0.0})
    totals = workload_of(WorkloadSection(requests=written(SGLANG, name="sglang.jsonl")))
    assert (totals.concurrency, len(totals), totals.prompt[0], totals.output[0]) == (2, 4, 1000, 65)
    assert measured_run(path).figures.keys() > {("e2e", "mean"), ("tpot", "p99")}


def test_aiperf(written):
    path = written(AIPERF, indent=2)
    work = workload_of(WorkloadSection(requests=path))
    assert (work.concurrency, len(work), work.prompt[0], work.output[0]) == (10, 40, 550, 180)
    figures = measured_run(path).figures
    assert (figures["ttft", "p95"], figures["tpot", "mean"]) == (0.085, 0.008)
    older = AIPERF | {"input_config": {"perf_analyzer": {"stimulus": {"request_rate": 2.0}}}}
    assert workload_of(WorkloadSection(requests=written(older))).arrival[-1] > 0  # GenAI-Perf


def test_records_of_aiperf(written):
    failed = record(3, 0, 0) | {"metrics": {"error_isl": {"value": 5}}, "error": {"code": 499}}
    path = written(
        record(0, 9, 9, "warmup"), record(1, 100, 11, session="a"),
        record(2.5, 200, 1, session="b"), failed, name="profile_export.jsonl",
    )  # fmt: skip
    work = traces.read(path)
    assert list(work.arrival) == pytest.approx([0.0, 1.5], abs=1e-6)
    assert list(work.prompt) == [100, 200]
    assert work.session is not None
    assert list(work.session) == [0, 1]
    assert work.rejected == {traces.WARM_UP: 1, traces.UNANSWERED: 1}
    times = measured_run(path).times
    assert times["ttft"] == pytest.approx([0.25, 0.25])
    assert times["tpot"][0] == pytest.approx(0.1)
    assert np.isnan(times["tpot"][1])


@cases
def test_bad_results_are_one_line(written, values, says):
    with pytest.raises(UserError) as error:
        traces.read(written(*values))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_result_without_a_rate_wants_one(written):
    path = written(VLLM | {"request_rate": None})
    with pytest.raises(UserError, match="give one of --requests FILE, --rate R"):
        workload_of(WorkloadSection(requests=path))
    assert len(workload_of(WorkloadSection(requests=path, rate=3.0))) == 4


def test_a_deep_configuration(written):
    config: dict = {"concurrency": 7}
    for _ in range(450):
        config = {"section": config}
    path = written(AIPERF | {"input_config": config})
    assert workload_of(WorkloadSection(requests=path)).concurrency == 7


@pytest.mark.parametrize("key", ["num_prompts", "max_concurrency", "total_input_tokens"])
def test_infinite_totals_are_left_out(written, key: str):
    path = written(VLLM | {key: math.inf})
    assert len(workload_of(WorkloadSection(requests=path, isl=9))) in (4, 1000)


def test_two_totals_in_a_file_are_refused(tmp_path):
    file = tmp_path / "results.jsonl"
    file.write_text("\n".join(json.dumps(SGLANG) for _ in range(2)))
    with pytest.raises(UserError, match="is a second result; wanted one result in a file"):
        traces.summary_of(file)
