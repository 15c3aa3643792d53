"""Replay: who waits for whom, as recorded and with a change."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import stagewright as sw
from helpers import cases
from recorded_steps import OTHER_THREAD, Step
from stagewright.errors import UserError
from stagewright.recorded.link import link
from stagewright.recorded.read import read_traces
from stagewright.recorded.replay import execute
from stagewright.run.sections.cluster import ClusterSection

pytestmark = pytest.mark.unit
GEMM, ADD = "sm90_xmma_gemm_bf16", "vectorized_elementwise_kernel"
MS = 1000


def run(tmp_path: Path, *steps: Step, **change: Any) -> sw.Replay:
    paths = [step.write(tmp_path / f"rank{rank}.json") for rank, step in enumerate(steps)]
    return sw.replay(paths, **change)


def micros(seconds: float | None) -> float:
    assert seconds is not None
    return round(seconds * 1e6, 3)


def test_launches_and_streams(tmp_path: Path) -> None:
    step = Step()
    step.kernel(GEMM, 15, 100, launched=10)
    step.kernel(ADD, 116, 10, launched=20)  # waits for its stream, 1 us
    step.kernel(ADD, 205, 10, launched=200)  # for its launch
    same = run(tmp_path, step)
    assert micros(same.recorded) == micros(same.replayed) == micros(same.linked) == 200
    assert micros(run(tmp_path, step, without="host").changed) == 100 + 1 + 10 + 1 + 10
    assert micros(run(tmp_path, step, scale={"gemm": 0.5}).changed) == 200
    assert micros(run(tmp_path, step, scale={"gemm": 3.0}).changed) == 300 + 1 + 10 + 1 + 10
    assert micros(run(tmp_path, step, stragglers={0: 3.0}).changed) == 300 + 1 + 30 + 1 + 30


def test_synchronization_of_the_host(tmp_path: Path) -> None:
    step = Step()
    step.kernel(GEMM, 15, 500, launched=10)
    step.call("cudaDeviceSynchronize", 20, 500)  # returns 5 us after the kernel
    step.kernel(ADD, 535, 10, launched=530)
    assert micros(run(tmp_path, step).linked) == 530
    # The host goes on 500 us later: it waits for the device, not for a time.
    assert micros(run(tmp_path, step, scale={"gemm": 2}).changed) == 1030
    assert micros(run(tmp_path, step, without="host").changed) == 510


def test_a_stream_waits_for_a_recorded_event(tmp_path: Path) -> None:
    step = Step()
    step.kernel(GEMM, 15, 300, launched=10)
    record = step.call("cudaEventRecord", 20, 1)
    wait = step.call("cudaStreamWaitEvent", 22, 1)
    args = {"cuda_sync_kind": "Stream Wait Event", "stream": 20, "wait_on_stream": 7}
    args |= {"correlation": wait, "wait_on_cuda_event_record_corr_id": record}
    step.add("cuda_sync", "Stream Wait Event", 22, 1, pid=0, tid=20, args=args)
    step.kernel(ADD, 317, 10, launched=30, stream=20)
    assert micros(run(tmp_path, step, scale={"gemm": 2}).changed) == 612


def test_a_stream_waits_for_an_event_that_was_not_recorded(tmp_path: Path) -> None:
    step = Step()
    step.kernel(ADD, 5, 1, launched=0, stream=20)
    step.kernel(GEMM, 15, 300, launched=10)
    step.kernel(ADD, 320, 10, launched=30, stream=20)  # 5 us after the product, late by 285
    result = run(tmp_path, step)
    assert micros(result.linked) == 325
    shapes, inferred = result.notes
    assert shapes == "no shapes: products have no m, n, k (record_shapes=True)"
    assert inferred.startswith("1 kernel is taken to wait for a kernel of another stream")
    assert micros(run(tmp_path, step, scale={"gemm": 2}).changed) == 625


def test_unexplained_waits_are_kept_and_said(tmp_path: Path) -> None:
    step = Step()
    step.kernel(GEMM, 15, 100, launched=10)
    step.kernel(ADD, 515, 10, launched=20)
    result = run(tmp_path, step)
    assert (micros(result.replayed), micros(result.linked)) == (510, 110)
    assert result.notes[-1].startswith("1 kernel started 0.4 ms in all after what they")


def test_an_idle_thread_waits_for_another(tmp_path: Path) -> None:
    step = Step()
    step.kernel(ADD, 5, 1, launched=0, tid=OTHER_THREAD)
    for number in range(10):
        step.kernel(GEMM, 10 + 500 * number, 400, launched=5 + 500 * number)
    step.kernel(ADD, 5 * MS, 10, launched=5 * MS - 5, tid=OTHER_THREAD, stream=9)
    # Without the host the second thread still follows the last product's call.
    changed = run(tmp_path, step, without="host")
    rows = changed.table("kernels").rows
    assert micros(changed.replayed) == 5 * MS + 5
    assert micros(rows[-1]["replayed_start"]) < MS
    quick = [row for row in rows if row["stream"] == 9]
    assert len(quick) == 1


def test_a_launch_waits_for_a_full_queue(tmp_path: Path) -> None:
    step = Step()
    for number in range(4):
        step.kernel(GEMM, 15 + 400 * number, 400, launched=10 + number)
    full = step.call("cudaLaunchKernel", 20, 397)  # returns 2 us after the first kernel
    step.kernel(GEMM, 1615, 400, correlation=full)
    step.kernel(ADD, 2115, 10, launched=2110)  # bound by the host
    assert micros(run(tmp_path, step).linked) == 2110
    # The host launches the sum 1,693 us after the queue had room, which is 200 us earlier.
    assert micros(run(tmp_path, step, scale={"gemm": 0.5}).changed) == 1910


def test_ranks_wait_in_collectives(tmp_path: Path) -> None:
    def rank(number: int, work: float) -> Step:
        step = Step(number, 2)
        step.kernel(GEMM, 15, work, launched=10)
        step.collective(16 + work, 350 - work, launched=12)
        step.kernel(ADD, 367, 10, launched=13, stream=20)
        return step

    steps = rank(0, 100), rank(1, 300)
    result = run(tmp_path, *steps)
    assert micros(result.replayed) == micros(result.linked) == 362
    ranks = result.table("ranks").rows
    assert [micros(row["waiting"]) for row in ranks] == [200, 0]
    (collective,) = result.table("collectives").rows
    assert (collective["kind"], micros(collective["transfer"])) == ("all_reduce", 50)
    # The stream of the product bounds nothing: the collective waits for its last rank.
    assert micros(run(tmp_path, *steps, link=2).changed) == 337
    assert micros(run(tmp_path, *steps, stragglers={0: 4}).changed) == 492


def test_random_steps_replay_as_recorded(tmp_path: Path) -> None:
    for seed in range(30):
        chance = random.Random(seed)
        step, free = Step(), {7: 0.0, 20: 0.0, 24: 0.0}
        clock = dict.fromkeys((100, OTHER_THREAD), 0.0)
        for _ in range(60):
            tid = chance.choice([100, OTHER_THREAD])
            at = clock[tid] = clock[tid] + chance.choice([5, 40, 3 * MS])
            if chance.random() < 0.2:
                until = max(at, *free.values()) + 3
                step.call(
                    chance.choice(["cudaDeviceSynchronize", "cudaStreamSynchronize"]),
                    at,
                    until - at,
                    tid=tid,
                )
                clock[tid] = until
                continue
            stream = chance.choice([*free])
            begin = max(at + 4, free[stream]) + chance.choice([0, 1, 30, 400])
            free[stream] = begin + chance.choice([2, 90, 800])
            step.kernel(GEMM, begin, free[stream] - begin, launched=at, tid=tid, stream=stream)
        traces = read_traces([step.write(tmp_path / "a.json")])
        graph = link(traces)
        times = execute(graph)
        late = [abs(times.start[n.index] - n.start) for n in graph.nodes if n.kernel]
        assert max(late) == 0, seed
        linked = execute(graph, typical=True)
        assert max(linked.end) <= 1.2 * max(times.end)


@cases
def test_changes_are_checked(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    step = Step()
    step.kernel(GEMM, 15, 100, launched=10)
    with pytest.raises(UserError, match=message):
        run(tmp_path, step, **change)


@pytest.mark.parametrize("layout", [{"tp": 2, "dp": 2}, {"pp": 2, "dp": 2, "global_batch_size": 8}])
def test_changes_are_those_of_the_simulator(tmp_path: Path, layout: dict[str, Any]) -> None:
    compiled = sw.compile("llama3.1-8b", layers=4, seq_length=2048, **layout)
    plain = sw.simulate(compiled, "h100-sxm")
    slow = sw.simulate(compiled, "h100-sxm", stragglers={1: 1.3})
    cluster = ClusterSection(hardware="h100-sxm")
    sw.generate(compiled, tmp_path / "t", format="kineto", cluster=cluster, ranks=range(4))
    replay = sw.replay(tmp_path / "t", stragglers={1: 1.3})
    launch = plain.seconds - replay.recorded  # of the first kernel, before the span
    assert replay.changed == pytest.approx(slow.seconds - launch, rel=1e-3)
    assert replay.linked == pytest.approx(replay.recorded, rel=1e-3)


def test_kernels_beside_the_only_step_are_said(tmp_path: Path) -> None:
    step = Step()
    step.add("user_annotation", "ProfilerStep#6", 100, 400)
    step.kernel(ADD, 5, 90, correlation=999)  # of the step before
    step.kernel(GEMM, 115, 100, launched=110)
    notes = run(tmp_path, step).notes
    assert (
        "1 step recorded, ProfilerStep#6, and 1 kernel of none: --step 6 leaves them out" in notes
    )
    assert not any("--step" in note for note in run(tmp_path, step, step=6).notes)
    step.add("user_annotation", "ProfilerStep#7", 500, 400)
    step.kernel(GEMM, 515, 100, launched=510)
    several = "2 steps recorded, ProfilerStep#6 to 7: all are taken as one; --step 6 takes one"
    assert several in run(tmp_path, step).notes


def test_the_slowest_rank_is_in_the_headline(tmp_path: Path) -> None:
    """The span keeps how far the first kernels of ranks are apart."""
    steps = [Step(rank, 2) for rank in range(2)]
    for step, first in zip(steps, (10, 5010), strict=True):
        step.kernel(GEMM, first + 5, 100, launched=first)
        step.kernel(ADD, first + 1005, 10, launched=first + 1000)
    result = run(tmp_path, *steps, without="host")
    lines = [line for line in result.text() if isinstance(line, str)]
    assert lines[-1] == "without host: 5.11 ms (-15.0%); slowest rank 110.00 us (-89.1%)"
