"""Replicas that share experts, with unequal batches."""

import pytest

from stagewright.lower.compile import compile
from stagewright.run.lengths import Group
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
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
    times = step_times(run, model, machine, how, most_tokens=2048, most_requests=64)
    # Requests are dealt in turn: the first replica gets the prompt, the other one few tokens.
    mixed = [Group(1, 0, 1536), Group(1, 0, 64)]
    wanted = simulate(compile(batch_run(run, mixed), model), machine, how).seconds
    alone = times.step(1536, 1536 * 1537 // 2, 1536, 1)
    found = times.beside_replicas(alone, 1536, (1536 + 64) / 2)
    assert found < 0.9 * alone
    assert found == pytest.approx(wanted, rel=0.08 if engine is None else 0.25)
    assert times.beside_replicas(alone, 1536, 1536) == alone
