"""The batch of a moment as a run: its step takes as long as the engine's, and has a trace."""

import pytest

import stagewright as sw
from stagewright.errors import UserError
from stagewright.time.hardware import resolve
from stagewright.time.network import Machine
from stagewright.time.simulate.step import simulate

pytestmark = pytest.mark.numerics


def test_steps_of_a_run_are_runs(tmp_path):
    done = sw.serve("llama3.1-8b", "h100-sxm", layers=2, rate=40, isl=300, osl=60, num_requests=80)
    machine = Machine.of(resolve("h100-sxm"), gpus=1)
    for at in (0.4, 1.0, 1.7):
        found = done.step(at)
        groups = found.run.requests
        assert all(g.context_length + g.new_tokens <= 360 for g in groups)
        assert 0 < simulate(found, machine).seconds < 0.1
    written = sw.generate(done.step(1.0), str(tmp_path / "trace"))
    assert written
    with pytest.raises(UserError, match="runs no step"):
        done.step(-1.0)
