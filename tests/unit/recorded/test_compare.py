"""A measured step beside a simulated one: equal, and with one part slower."""

import json
from pathlib import Path

import pytest

import stagewright as sw
from recorded_steps import Step
from stagewright.api.compared import Comparison, simulated_traces
from stagewright.recorded.compare import ComparedSide, StepComparison
from stagewright.recorded.rank import Annotation, Kernel, RankTrace, RuntimeCall
from stagewright.recorded.steps import recorded_steps
from stagewright.run.sections.cluster import ClusterSection

RUN = {"model": "llama3-8b", "layers": 4, "seq_length": 1024, "tp": 2, "pp": 2, "dp": 2}
RANKS = range(8)
US = 1000


@pytest.fixture(scope="module")
def step():
    return sw.simulate(sw.Run(**RUN), "h100-sxm")


def side(traces):
    return ComparedSide(tuple(recorded_steps(traces)))


def difference(step, change, ranks=RANKS):
    """Microseconds of the parts that differ once `change` has changed the recording."""
    traces = simulated_traces(step, ranks)
    change(traces)
    comparison = StepComparison(side(traces), side(simulated_traces(step, ranks)))
    total = comparison.measured.seconds - comparison.simulated.seconds
    assert sum(comparison.difference.values()) == pytest.approx(total, abs=1e-12)
    return {p: s * 1e6 for p, s in comparison.difference.items() if abs(s) > 1e-12}


def delay(trace: RankTrace, after: int, by: int) -> None:
    """Move all that begins at a time or later."""
    for kernel in trace.kernels:
        if kernel.start >= after:
            kernel.start += by
            kernel.end += by
    for call in trace.calls:
        call.start += by * (call.start >= after)
        call.end += by * (call.end >= after)
    for annotation in trace.annotations:
        annotation.end += by


def test_the_step_is_equal_to_itself(step):
    comparison = StepComparison(*(side(simulated_traces(step, RANKS)) for _ in "ab"))
    result = Comparison(comparison, "")
    assert result.error == 0
    assert result.measured == pytest.approx(step.seconds, rel=1e-6)
    assert set(result.difference.values()) == {0.0}
    assert len(result.table("unmatched")) == 0
    for name in ("families", "kernels", "transfers"):
        assert set(result.table(name).columns["ratio"]) <= {1.0, None}
    kinds = {name.split(" ")[0] for name in result.table("kernels").columns["kernel"]}
    assert {"attention", "attention_bwd"} <= kinds  # each with its extents
    assert "equal in all parts" in str(result)


JOINED = {
    "encoder and decoder": {"model": "t5-small", "dp": 2, "seq_length": 64},
    "context": {"model": "llama3-8b", "layers": 2, "cp": 2, "seq_length": 128},
    "experts": {"model": "mixtral-8x7b", "layers": 2, "dp": 4, "ep": 2, "seq_length": 64},
    "decode": {"model": "llama3-8b", "layers": 4, "mode": "decode", "pp": 2, "batch_size": 8,
               "context_length": 128},
    "dualpipe": {"model": "gpt2", "layers": 4, "pp": 2, "schedule": "dualpipe",
                 "global_batch_size": 4, "seq_length": 64},
}  # fmt: skip
"""Runs in which others wait for the last part of a product, or for a task of the step before."""


@pytest.mark.parametrize("name", JOINED)
def test_written_steps_are_equal_to_themselves(name, tmp_path):
    compiled = sw.compile(sw.Run(**JOINED[name]))
    cluster = ClusterSection(hardware="h200")
    sw.generate(compiled, str(tmp_path / "traces"), format="kineto", cluster=cluster)
    result = sw.compare(tmp_path / "traces", compiled, "h200")
    assert result.error == 0
    assert set(result.difference.values()) == {0.0}
    assert result.measured == pytest.approx(sw.simulate(compiled, "h200").seconds, rel=1e-6)


def test_parts_are_those_of_the_breakdown(step):
    """Time in which no kernel computes is exposed communication, bubble, and launches."""
    measured = side(simulated_traces(step, RANKS)).parts
    mean = step.mean
    computes = sum(measured[p] for p in ("products", "attention", "norms", "elementwise"))
    assert computes == pytest.approx(sum(mean.kernels.values()), rel=1e-4)
    others = sum(
        measured[p] for p in ("transfers", "waiting", "launches", "synchronisation", "idle")
    )
    wanted = sum(mean.exposed.values()) + mean.bubble + mean.launches
    assert others == pytest.approx(wanted, rel=1e-3)


def test_slower_products():
    """Transfers are not hidden, so that nothing else changes."""
    step = sw.simulate("llama3-8b", "h100-sxm", layers=2, seq_length=1024, tp=2)

    def change(traces):
        for trace in traces:
            for kernel in [k for k in trace.kernels if k.family == "gemm"]:
                delay(trace, kernel.end, added := kernel.duration // 5)
                kernel.end += added

    added = side(simulated_traces(step, [0])).parts["products"] * 1e6 / 5
    assert difference(step, change, [0]) == pytest.approx({"products": added}, rel=1e-4)


def test_a_slower_link(step):
    """All members take longer for a collective that nothing hides."""

    def change(traces):
        for trace in traces:
            exposed = [k for k in trace.kernels if k.comm and k.comm.kind == "all_reduce"]
            kernel = next(k for k in exposed if k.comm.bytes > 1e6 and k.comm.size == 2)
            delay(trace, kernel.end, 500 * US)
            kernel.end += 500 * US
            kernel.comm.transfer += 500 * US

    assert difference(step, change) == pytest.approx({"transfers": 500.0})


def test_waiting_for_a_rank(step):
    def change(traces):
        for trace in traces[:4]:  # their next stage is late
            kernel = next(k for k in trace.kernels if k.comm and k.comm.kind == "recv")
            delay(trace, kernel.end, 800 * US)
            kernel.end += 800 * US

    assert difference(step, change) == pytest.approx({"waiting": 400.0})  # of half of the ranks


def test_a_slower_host(step):
    def change(traces):
        for trace in traces:
            kernels = [k for k in trace.kernels if k.call and k.call.start + 1 == k.start]
            call = max(kernels, key=lambda k: k.start).call
            delay(trace, call.start, 300 * US)

    assert difference(step, change) == pytest.approx({"launches": 300.0}) or difference(
        step, change
    ) == pytest.approx({"synchronisation": 300.0})


def test_the_host_waits_for_the_gpu(step):
    def change(traces):
        for trace in traces:
            wait = next(c for c in trace.calls if "Synchronize" in c.name and c.end > c.start)
            delay(trace, wait.end, 250 * US)

    assert difference(step, change) == pytest.approx({"synchronisation": 250.0})


def test_files_and_page(tmp_path, step):
    compiled = sw.compile(sw.Run(**RUN))
    cluster = ClusterSection(hardware="h100-sxm")
    out = str(tmp_path / "recorded")
    sw.generate(compiled, out, format="kineto", cluster=cluster, ranks=[0, 4])
    result = sw.compare(out, sw.Run(**RUN), "h100-sxm")
    assert result.error == 0
    assert result.measured == pytest.approx(step.seconds, rel=1e-6)
    (name,) = result.write(tmp_path / "page.html")
    page = Path(name).read_text("utf-8")
    assert "equal in all parts" in page.replace("Equal", "equal")
    assert page.count("rank 4") >= 2
    (name,) = result.write(tmp_path / "all.json")
    assert json.loads(Path(name).read_text("utf-8"))["error"] == 0

    other = sw.compare(out, sw.Run(**RUN), "h100-sxm", seq_length=2048)
    assert other.error > 0.3
    assert {row["side"] for row in other.table("unmatched").rows} == {"measured", "simulated"}
    with pytest.raises(sw.UserError, match="job of 8 ranks, and the simulated run has 2"):
        sw.compare(out, "llama3-8b", "h100-sxm", layers=2, tp=2)
    with pytest.raises(sw.UserError, match="no kernels of an annotation"):
        sw.compare(out, sw.Run(**RUN), "h100-sxm", step=7)


def test_the_middle_step_is_taken():
    """Of several steps; a step begins where the GPU ends the one before."""

    def kernel(start, call):
        launch = RuntimeCall("cudaLaunchKernel", "t", call, call + 1, call)
        return Kernel("elementwise", start, start + 90, 0, 7, call, launch, "elementwise")

    names = [Annotation(f"ProfilerStep#{n}", 100 * n, 100 * n + 100) for n in range(3)]
    kernels = [kernel(130 + 100 * n, 100 * n + 20) for n in range(3)]
    calls = [of.call for of in kernels]
    trace = RankTrace("a.json", 0, 1, "", kernels, calls, names)
    (middle,) = recorded_steps([trace])
    assert (middle.name, middle.begin, middle.end) == ("ProfilerStep#1", 220, 320)
    assert {part: ns for part, ns in middle.parts.items() if ns} == {
        "elementwise": 90,
        "launches": 10,
    }
    (last,) = recorded_steps([trace], step=2)
    assert (last.begin, last.end) == (320, 420)


def test_another_run_is_said(tmp_path):
    def step(adds):
        step = Step()
        step.add("user_annotation", "ProfilerStep#0", 0, 5000)
        step.op("aten::mm", 5, 20, [[4096, 1000], [1000, 512]])
        step.kernel("sm90_xmma_gemm_bf16", 15, 100, launched=10)
        for number in range(adds):
            step.kernel("vectorized_elementwise_kernel", 200 + number, 1, launched=150 + number)
        return step.write(tmp_path / f"{adds}.json")

    few = sw.compare(step(3), "gpt2", "a100-sxm-80gb", layers=1, seq_length=64)
    assert few.notes[-2:] == [
        "traces are of NVIDIA H100, the simulation is of a100-sxm-80gb",
        "0% of the measured products' time has a simulated product of the same size: check model, "
        "batch and layout",
    ]
    many = sw.compare(step(500), "gpt2", "h100-sxm", layers=1, seq_length=64)
    assert many.notes[-1].startswith(
        "the measured step launches unfused operators: 500 norms and element-wise kernels, "
    )
