"""Replicas that share experts, with unequal batches."""

from itertools import product

import pytest

from stagewright.lower.compile import compile
from stagewright.run.lengths import Group
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.serving.batch import BatchPlan
from stagewright.serving.host import HostTimes
from stagewright.serving.steps.step_times import batch_run, step_times
from stagewright.time.hardware import resolve
from stagewright.time.network import Machine
from stagewright.time.simulate.step import simulate


@pytest.mark.parametrize("engine", [None, "vllm"])
def test_experts_get_the_tokens_of_all_replicas(engine):
    """One replica computes a prompt while the other decodes: both as simulated together."""
    run = Run(model="qwen3-30b-a3b", layers=4, mode="decode", dp=2, ep=2)
    model = compile(batch_run(run, [Group(2, 100, 1)])).model
    machine = Machine.of(resolve("h100-sxm"), gpus=2)
    how = Execution(serving_engine=engine)
    times = step_times(run, model, machine, how, max_tokens=2048, max_requests=64)
    # Requests are dealt in turn: the first replica gets the prompt, the other one few tokens.
    mixed = [Group(1, 0, 1536), Group(1, 0, 64)]
    wanted = simulate(compile(batch_run(run, mixed), model), machine, how).seconds
    alone = times.step(1536, 1536 * 1537 // 2, 1536, 1)
    found = times.in_group(alone, 1536, (1536 + 64) / 2)
    assert found < 0.9 * alone
    assert found == pytest.approx(wanted, rel=0.08 if engine is None else 0.25)
    assert times.in_group(alone, 1536, 1536) == alone


def test_a_host_beside_the_gpu_counts_behind_the_experts_of_all_replicas():
    """Each step of a run takes the longer of both; equal replicas are as one by itself."""
    run = Run(model="qwen3-30b-a3b", layers=4, mode="decode", dp=2, ep=2)
    model = compile(batch_run(run, [Group(2, 100, 1)])).model
    machine = Machine.of(resolve("h100-sxm"), gpus=2)
    gpu = step_times(run, model, machine, max_tokens=512, max_requests=512)
    for n, keys, mean in product((1, 64, 512), (600, 5000), (0.5, 64, 512)):
        line = gpu.linear_run(n, n * keys)
        least = gpu.in_group(line.seconds, n, mean)
        for host in (HostTimes(per_step=s, overlaps_gpu=True) for s in (0, least, 1.01 * least, 9)):
            times = gpu.of_replica(host)
            assert times.linear_run(n, n * keys) == line
            plan = BatchPlan(line, n, n)
            steps, first, grows = times.group_runs([plan], mean)[0]
            assert 1 <= steps <= line.steps
            for k in {0, steps // 2, steps - 1} if steps < 1 << 40 else {0, 9}:
                wanted = host.step_interval(least + k * line.growth, n)
                assert first + k * grows == pytest.approx(wanted, rel=1e-9)
            if mean == n:
                assert first == pytest.approx(gpu.with_host(host).decode(n, n * keys), rel=1e-9)
        behind = HostTimes(per_step=1e-3)
        times, baked = gpu.of_replica(behind), gpu.with_host(behind).linear_run(n, n * keys)
        found = times.group_runs([BatchPlan(baked, n, n)], mean)[0]
        assert found[1] == pytest.approx(least + 1e-3, rel=1e-9)
