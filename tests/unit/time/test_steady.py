"""Decode on a pipeline in steady state: the time of a step in closed form, and what it means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stagewright as sw
from helpers import cases
from stagewright.program.columns import Program, TaskKind
from stagewright.time.collectives import message_seconds
from stagewright.time.durations import task_seconds
from stagewright.time.engines import engine_seconds
from stagewright.time.simulate.steady import TOKEN, repeated, steady_step
from stagewright.time.simulate.timeline import Timeline, timeline
from stagewright.views.perfetto import write
from timed import row_by_row
from trace_events import check

pytestmark = pytest.mark.numerics  # whole steps of large models take seconds

SETTINGS: dict[str, Any] = {"mode": "decode", "context_length": 2048}


def test_repeated_steps_hold_the_bytes_of_one() -> None:
    """No step allocates or frees: memory is that of one step."""
    compiled = sw.compile(
        sw.Run(model="gpt2", layers=2, mode="decode", context_length=64, pp=2, batch_size=2)
    )
    program = compiled.program
    for step, several in zip(program.classes, repeated(program, 6, tokens=1).classes, strict=True):
        changes = several.work.changes
        assert changes.at_peak()["peak"] == int(changes.start.sum())
        assert several.memory == step.memory


def test_steps_end_alike_where_all_are_one_unit() -> None:
    run = sw.Run(model="gpt2", layers=2, mode="decode", context_length=64, pp=2, batch_size=2)
    program = sw.compile(run).program

    def simulated(several: Program) -> Timeline:
        actions = [of.work.actions for of in several.classes]
        return timeline(several, [np.full(len(a.tasks), 1e-6) for a in actions])

    one_unit = steady_step(program, 1, lambda several: simulated(row_by_row(several)))
    assert one_unit.seconds == steady_step(program, 1, simulated).seconds


def test_no_parameters_are_gathered_in_steps_of_decode() -> None:
    step = sw.simulate("gpt2", "h100-sxm", mode="decode", pp=2, overlap_param_gather=True)
    assert step.seconds == sw.simulate("gpt2", "h100-sxm", mode="decode", pp=2).seconds


@cases
def test_a_step_takes_the_busiest_stage_or_the_way_round(
    pp: int, requests: int, layers: tuple[int, ...]
) -> None:
    """A stage computes each of m batches once in a step; a batch passes all stages and returns."""
    found = sw.simulate(
        "llama3-8b", "h100-sxm", pp=pp, batch_size=requests, layers_per_stage=layers, **SETTINGS
    )
    program, machine = found.compiled.program, found.machine
    batches = found.compiled.run.microbatches
    assert batches == min(pp, requests)
    stages: list[list[float]] = []
    sent = 0.0
    for of, alone in zip(program.classes, task_seconds(program, machine), strict=True):
        tasks = of.tasks
        compiled, on = found.compiled, machine.hardware
        seconds = engine_seconds(tasks, alone, compiled.run, compiled.model, None, on)
        kernels = tasks.kind == TaskKind.COMPUTE
        each = [kernels & (tasks.microbatch == m) for m in range(batches)]
        stages.append([float(seconds[mine].sum()) for mine in each])
        sends = tasks.kind == TaskKind.SEND
        sent += float(seconds[sends & (tasks.microbatch == 0)].sum())
    back = message_seconds(-(-requests // batches) * TOKEN, 0, machine)
    around = max(sum(stage[m] for stage in stages) for m in range(batches)) + sent + back
    busiest = max(sum(stage) for stage in stages)
    assert found.seconds == pytest.approx(max(busiest, around), rel=1e-6)
    assert found.tokens_per_second == pytest.approx(requests / found.seconds)
    assert found.mean.total == pytest.approx(found.seconds)
    assert sum(found.critical_path.values()) == pytest.approx(found.seconds)
    for each, stage in zip(found.parts, stages, strict=True):
        assert sum(each.kernels.values()) == pytest.approx(sum(stage))
        assert each.total == pytest.approx(found.seconds)


@pytest.mark.parametrize(("tp", "pp"), [(8, 1), (4, 2), (2, 4)])
def test_70b_on_eight_gpus_has_next_to_no_bubble(tp: int, pp: int) -> None:
    # A drained step had a bubble of 34% with pp=2 and of 44% with pp=4.
    settings: dict[str, Any] = {"mode": "decode", "batch_size": 64, "tp": tp, "pp": pp}
    compiled = sw.compile("llama3.1-70b", **settings)
    found = sw.simulate(compiled, "h100-sxm")
    assert found.mean.bubble < 0.04 * found.seconds
    drained = sw.simulate(compiled, "h100-sxm", pipeline_drain=True)
    assert drained.seconds / found.seconds == pytest.approx((2 * pp - 1) / pp, rel=0.05)
    assert found.hfu == pytest.approx(drained.hfu * drained.seconds / found.seconds)


def test_a_drained_step_is_that_of_the_program_alone() -> None:
    found = sw.simulate("gpt2", "h100-sxm", mode="decode", pp=2, pipeline_drain=True)
    assert found.timeline.program is found.compiled.program
    assert not found.timeline.steady


def test_ranks_with_other_requests_and_a_straggler() -> None:
    requests = [{"count": 5, "context_length": 512}, {"count": 2, "context_length": 8000}]
    settings: dict[str, Any] = {"mode": "decode", "dp": 2, "pp": 2, "tp": 2, "requests": requests}
    compiled = sw.compile("llama3-8b", **settings)
    found = sw.simulate(compiled, "h100-sxm")
    slow = sw.simulate(compiled, "h100-sxm", stragglers={0: 1.5})
    for each in (found, slow):
        assert each.mean.total == pytest.approx(each.seconds)
        assert sum(each.critical_path.values()) == pytest.approx(each.seconds)
    assert 1.2 < slow.seconds / found.seconds < 1.5


def test_perfetto_shows_one_step(tmp_path: Path) -> None:
    found = sw.simulate("llama3-8b", "h100-sxm", layers=4, pp=2, batch_size=8, **SETTINGS)
    out = tmp_path / "step.json"
    write(found.timeline, str(out), "decode")
    trace = json.loads(out.read_text())
    check(trace)
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["cat"] != "action"]
    tasks = sum(len(of.tasks) for of in found.compiled.program.classes)
    assert tasks <= len(slices) <= 1.1 * tasks
    assert max(e["ts"] + e["dur"] for e in slices) == pytest.approx(1e6 * found.seconds, rel=1e-3)
