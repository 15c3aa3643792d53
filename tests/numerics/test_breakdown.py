"""Where time goes: parts that add up, and bubbles that the literature gives."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from helpers import cases
from stagewright.arrays import Float
from stagewright.lower.compile import compile
from stagewright.program.columns import PHASES, Program, TaskKind, Tasks
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.time.simulate.breakdown import breakdown, critical_path, path_parts
from stagewright.time.simulate.timeline import Timeline, timeline
from timed import RUNS, WAYS, by_action, durations

TICK = 1e-12


@cache
def program_of(run: str) -> Program:
    return compile(Run(**RUNS[run])).program


def lines(run: str, way: str) -> list[Timeline]:
    program = program_of(run)
    seconds = [t * TICK for t in durations(program, 5, True)]
    return [timeline(program, seconds, WAYS[way], slow) for slow in ({}, {0: 1.3, 1: 1.1})]


@pytest.mark.parametrize("way", ["overlap", "none", "next"])
@pytest.mark.parametrize("run", RUNS)
def test_parts_of_every_lane_add_up_to_the_step(run: str, way: str) -> None:
    for line in lines(run, way):
        for lane in line.lanes:
            found = breakdown(line, lane)
            assert found.total == pytest.approx(line.seconds, rel=1e-9)
            assert found.bubble >= 0
            assert all(s >= 0 for s in found.exposed.values())
            for axis, s in found.exposed.items():
                # What waits is in no transfer; settling gradients aside counts to their axis.
                aside = int((lane.end - lane.begin)[lane.on_comm_stream].sum()) * TICK
                received = lane.kind == TaskKind.RECV
                message = int((lane.end - lane.begin)[received].sum()) * TICK
                assert s <= found.communication.get(axis, 0) + aside + message + 1e-12


@pytest.mark.parametrize("way", ["overlap", "one", "next"])
@pytest.mark.parametrize("run", RUNS)
def test_critical_path_is_a_chain_through_the_step(run: str, way: str) -> None:
    for line in lines(run, way):
        path = critical_path(line)
        now = 0
        for lane, place, launch in path:
            assert not launch
            assert line.lanes[lane].begin[place] == now
            now = int(line.lanes[lane].end[place])
        assert now == line.ticks
        assert sum(path_parts(line, path).values()) == pytest.approx(line.seconds, rel=1e-9)


def even(program: Program, forward: float, backward: float) -> list[Float]:
    """Kernels such that every stage's forward and backward take as given; all else takes none."""
    return by_action(program, [_even(of.tasks, forward, backward) for of in program.classes])


def _even(tasks: Tasks, forward: float, backward: float) -> Float:
    seconds = np.zeros(len(tasks))
    for stage in np.unique(tasks.stage[tasks.stage >= 0]):
        for phase, total in (("forward", forward), ("backward", backward)):
            mine = (tasks.stage == stage) & (tasks.phase == PHASES.index(phase))
            mine &= (tasks.kind == TaskKind.COMPUTE) & (tasks.microbatch == 0)
            rows = np.isin(tasks.name, tasks.name[mine]) & (tasks.kind == TaskKind.COMPUTE)
            rows &= (tasks.stage == stage) & (tasks.phase == PHASES.index(phase))
            seconds[rows] = total / mine.sum()
    return seconds


@cases
def test_bubble_of_even_stages(schedule: str, pp: int, vpp: int, microbatches: int) -> None:
    # arXiv 2104.04473, section 2.2: (p - 1) / (v m) of the ideal time.
    run: dict[str, Any] = {"model": "llama3-8b", "layers": pp * vpp, "seq_length": 64}
    run |= {"pp": pp, "vpp": vpp, "schedule": schedule, "global_batch_size": microbatches}
    program = compile(Run(**run, clip_grad=False)).program
    line = timeline(program, even(program, 1e-3, 2e-3))
    ideal = microbatches * vpp * 3e-3
    assert line.seconds == pytest.approx(ideal * (1 + (pp - 1) / (vpp * microbatches)), rel=1e-6)
    for lane in line.lanes:
        assert breakdown(line, lane).bubble == pytest.approx((pp - 1) * 3e-3, rel=1e-6)


def test_reductions_hide_behind_the_backward_pass_but_the_last() -> None:
    # Four blocks (embedding, two layers, head), each followed by its reduction: all but that of the
    # embedding, which is the last, run beside the backward pass of the block after.
    run: dict[str, Any] = {"model": "llama3-8b", "layers": 2, "seq_length": 64, "dp": 2}
    program = compile(Run(**run, clip_grad=False)).program
    (tasks,) = (of.tasks for of in program.classes)
    moves = tasks.kind == TaskKind.COLLECTIVE
    assert moves.sum() == 4
    kernels = np.where(moves, 0, 1e-3)
    none, both = (by_action(program, [kernels + moves * each]) for each in (0, 0.8e-3))
    alone = timeline(program, none).seconds
    beside = timeline(program, both)
    assert breakdown(beside, beside.lanes[0]).exposed == {"dp": pytest.approx(0.8e-3)}
    assert beside.seconds == pytest.approx(alone + 0.8e-3)
    after = timeline(program, both, Execution(no_overlap=frozenset({"dp"})))
    assert after.seconds == pytest.approx(alone + 4 * 0.8e-3)


def test_a_straggler_holds_up_those_it_meets() -> None:
    run: dict[str, Any] = {"model": "llama3-8b", "layers": 2, "seq_length": 64, "dp": 8}
    program = compile(Run(**run, clip_grad=False)).program
    (tasks,) = (of.tasks for of in program.classes)
    seconds = by_action(program, [np.where(tasks.kind == TaskKind.COMPUTE, 1e-3, 0)])
    plain, slow = timeline(program, seconds), timeline(program, seconds, slowdowns={3: 1.2})
    # What comes before the last reduction is held up by a fifth; the optimizer step is not.
    step = (tasks.phase == PHASES.index("optimizer")).sum() * 1e-3
    others, straggler = slow.lanes
    assert straggler.ranks.tolist() == [3]
    held = (plain.seconds - step) * 1.2
    assert others.end.max() * TICK == pytest.approx(held + step, rel=1e-3)
    assert slow.seconds == pytest.approx(plain.seconds * 1.2)
    assert breakdown(slow, others).bubble == pytest.approx(0.2 * plain.seconds, rel=1e-3)
