"""Timelines against the slow truth, and against closed forms."""

from __future__ import annotations

import numpy as np
import pytest

import eventsim
from stagewright.arrays import Int
from stagewright.errors import UserError
from stagewright.lower.compile import compile
from stagewright.program.columns import Program, TaskKind
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.time.simulate.endpoints import endpoints, lane_of_rank
from stagewright.time.simulate.issue import issue
from stagewright.time.simulate.system import System
from stagewright.time.simulate.timeline import TICK, Timeline, timeline
from timed import RUNS, WAYS, durations


def programs(name: str) -> Program:
    return compile(Run(**RUNS[name])).program


def compare(
    program: Program, ticks: list[Int], how: Execution, factors: dict[int, float]
) -> Timeline:
    line = timeline(program, [t * TICK for t in ticks], how, factors)
    truth = eventsim.simulate(program, ticks, how, factors)
    slack = 0 if how.overlap_slowdown == 0 else 10 * len(truth[0][0])
    seen = 0
    for lane in line.lanes:
        for rank in lane.ranks.tolist():
            start, end = truth[rank]
            rows = lane.issue.rows
            assert abs(lane.end - np.array([int(end[r]) for r in rows])).max() <= slack
            own = lane.kind != TaskKind.RECV
            begin = np.array([int(start[r]) for r in rows])
            assert abs(lane.begin - begin)[own].max() <= slack
            seen += 1
    assert seen == program.mesh.world_size
    return line


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("run", RUNS)
def test_timeline_is_that_of_the_event_simulation(run: str, way: str) -> None:
    program = programs(run)
    for alike in (True, False) if way == "overlap" else (len(run + way) % 2 == 0,):
        compare(program, durations(program, 1, alike), WAYS[way], {})


@pytest.mark.parametrize("run", RUNS)
def test_stragglers(run: str) -> None:
    program = programs(run)
    ticks = durations(program, 2, True)
    line = compare(program, ticks, Execution(), {program.mesh.world_size - 1: 1.5})
    random = np.random.default_rng(3)
    every = dict(enumerate((1 + random.random(program.mesh.world_size)).tolist()))
    some = compare(program, ticks, Execution(overlap_slowdown=0.1), every)
    assert len(line.lanes) <= len(some.lanes) == program.mesh.world_size


def test_a_deadlock_names_who_waits_for_what() -> None:
    program = compile(Run(model="gpt2", pp=2, layers=2, seq_length=8)).program
    issues = [issue(program, of.tasks, Execution()) for of in program.classes]
    ends = endpoints(program, issues, lane_of_rank(program, np.ones(2)))
    ticks = [np.ones(len(of.tasks), np.int64) for of in program.classes]
    system = System(program, Execution(), issues, ticks, np.ones(2), ends)
    system.post = lambda sent, end: None  # pyright: ignore  # messages get lost
    with pytest.raises(
        UserError, match=r"deadlock: rank 0 waits for backward\.send of microbatch 0"
    ):
        system.run()
