"""Timelines against the slow truth, and against closed forms."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

import eventsim
from effort import pairs, some
from stagewright.arrays import Bool, Int
from stagewright.errors import UserError
from stagewright.lower.compile import compile
from stagewright.program.columns import Program, TaskKind
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.time.simulate.breakdown import breakdown, critical_path, path_parts
from stagewright.time.simulate.endpoints import endpoints, lane_of_rank
from stagewright.time.simulate.host import HostWork
from stagewright.time.simulate.issue import issue
from stagewright.time.simulate.system import System
from stagewright.time.simulate.timeline import TICK, Timeline, timeline
from timed import RUNS, SHOWN, WAYS, durations


@cache
def programs(name: str) -> Program:
    return compile(Run(**RUNS[name])).program


def compare(
    program: Program,
    ticks: list[Int],
    how: Execution,
    factors: dict[int, float],
    hosts: list[tuple[Int, Bool]] | None = None,
) -> Timeline:
    works = hosts and [HostWork(cost * TICK, waits) for cost, waits in hosts]
    line = timeline(program, [t * TICK for t in ticks], how, factors, hosts=works)
    truth = eventsim.simulate(program, ticks, how, factors, hosts)
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
    for lane in line.lanes:
        parts = breakdown(line, lane)
        assert abs(parts.total - line.seconds) < 1e-9 * line.seconds
        assert (parts.launches == 0) or hosts
    path = path_parts(line, critical_path(line))
    assert abs(sum(path.values()) - line.seconds) < 1e-9 * line.seconds
    return line


@pytest.mark.parametrize(("run", "way"), dict.fromkeys([*pairs(RUNS, WAYS, 6), *SHOWN]))
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


def launches(program: Program, ticks: list[Int], seed: int) -> list[tuple[Int, Bool]]:
    """Launches about as long as tasks; some tasks are waited for, receives among them."""
    random = np.random.default_rng(seed)
    found: list[tuple[Int, Bool]] = []
    for of, each in zip(program.classes, ticks, strict=True):
        cost = random.integers(0, 1 + int(2 * each.mean()), len(each))
        waits = (random.random(len(each)) < 0.1) | (of.tasks.kind == TaskKind.RECV)
        found.append((cost, waits & (seed % 3 > 0)))
    return found


@pytest.mark.parametrize(("run", "way"), dict.fromkeys([*pairs(RUNS, WAYS, 6), *SHOWN]))
def test_launches_are_those_of_the_event_simulation(run: str, way: str) -> None:
    program = programs(run)
    ticks = durations(program, 3, True)
    seed = len(run) + len(way)
    compare(program, ticks, WAYS[way], {}, launches(program, ticks, seed))
    if seed % 2:
        slow = {program.mesh.world_size - 1: 1.5}
        compare(program, ticks, WAYS[way], slow, launches(program, ticks, seed + 1))


@pytest.mark.parametrize("run", some([*RUNS]))
def test_launches_that_take_no_time_change_nothing(run: str) -> None:
    program = programs(run)
    ticks = durations(program, 3, True)
    none = [(np.zeros(len(t), np.int64), np.zeros(len(t), bool)) for t in ticks]
    alone = compare(program, ticks, Execution(), {})
    beside = compare(program, ticks, Execution(), {}, none)
    for one, other in zip(alone.lanes, beside.lanes, strict=True):
        assert np.array_equal(one.end, other.end)
        assert np.array_equal(one.begin, other.begin)
        assert breakdown(alone, one) == breakdown(beside, other)


def test_a_deadlock_names_who_waits_for_what() -> None:
    program = compile(Run(model="gpt2", pp=2, layers=2, seq_length=8)).program
    issues = [issue(program, of.tasks, Execution()) for of in program.classes]
    ends = endpoints(program, issues, lane_of_rank(program, np.ones(2)))
    ticks = [np.ones(len(of.tasks), np.int64) for of in program.classes]
    system = System(program, Execution(), issues, ticks, np.ones(2), ends, [None, None])
    system.post = lambda sent, end: None  # pyright: ignore  # messages get lost
    with pytest.raises(
        UserError, match=r"deadlock: rank 0 waits for backward\.send of microbatch 0"
    ):
        system.run()
