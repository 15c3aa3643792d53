"""Timelines against the slow truth, and against closed forms."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache

import numpy as np
import pytest

import eventsim
from helpers import pairs, some
from stagewright.arrays import Bool, Int
from stagewright.errors import UserError
from stagewright.lower.compile import compile
from stagewright.program.columns import Program, RankWork, TaskKind, Tasks
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.time.simulate.breakdown import breakdown, critical_path, path_parts
from stagewright.time.simulate.launches import HostWork
from stagewright.time.simulate.timeline import TICK, Timeline, table_rows, timeline
from timed import RUNS, SHOWN, WAYS, durations, row_by_row


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
    rows = [table_rows(of.work) for of in program.classes]
    by_row = [t[at] for t, at in zip(ticks, rows, strict=True)]
    launches = hosts and [
        (cost[at], waits[at]) for (cost, waits), at in zip(hosts, rows, strict=True)
    ]
    truth = eventsim.simulate(program, by_row, how, factors, launches)
    seen = 0
    for lane in line.lanes:
        for rank in lane.ranks.tolist():
            start, end = truth[rank]
            rows = lane.issue.rows
            assert abs(lane.end - np.array([int(end[r]) for r in rows])).max() == 0
            own = lane.kind != TaskKind.RECV
            begin = np.array([int(start[r]) for r in rows])
            assert abs(lane.begin - begin)[own].max() == 0
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


@pytest.mark.parametrize(("run", "way"), pairs(RUNS, WAYS, 3))
def test_a_rank_whose_rows_are_one_action_takes_as_long(run: str, way: str) -> None:
    program = programs(run)
    ticks = durations(program, 1, False)
    rows = [table_rows(of.work) for of in program.classes]
    line = compare(program, ticks, WAYS[way], {})
    each = [t[at] for t, at in zip(ticks, rows, strict=True)]
    alone = compare(row_by_row(program), each, WAYS[way], {})
    for one, other in zip(line.lanes, alone.lanes, strict=True):
        assert np.array_equal(one.end, other.end)
        assert np.array_equal(one.ready, other.ready)


@pytest.mark.parametrize(("run", "way"), pairs(RUNS, WAYS, 3))
def test_rows_of_one_action_may_take_different_times(run: str, way: str) -> None:
    program = row_by_row(programs(run))
    compare(program, durations(program, 4, False), WAYS[way], {})


@pytest.mark.parametrize("run", RUNS)
def test_stragglers(run: str) -> None:
    program = programs(run)
    ticks = durations(program, 2, True)
    line = compare(program, ticks, Execution(), {program.mesh.world_size - 1: 1.5})
    random = np.random.default_rng(3)
    every = dict(enumerate((1 + random.random(program.mesh.world_size)).tolist()))
    some = compare(program, ticks, Execution(), every)
    assert len(line.lanes) <= len(some.lanes) == program.mesh.world_size


def launches(program: Program, ticks: list[Int], seed: int) -> list[tuple[Int, Bool]]:
    """Launches about as long as tasks; some tasks are waited for, receives among them."""
    random = np.random.default_rng(seed)
    found: list[tuple[Int, Bool]] = []
    known: dict[int, tuple[Int, Bool]] = {}
    for of, each in zip(program.classes, ticks, strict=True):
        tasks = of.work.actions.tasks
        if id(tasks) not in known:
            cost = random.integers(0, 1 + int(2 * each.mean()), len(each))
            waits = (random.random(len(each)) < 0.1) | (tasks.kind == TaskKind.RECV)
            known[id(tasks)] = cost, waits & (seed % 3 > 0)
        found.append(known[id(tasks)])
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
    first = program.classes[0]
    tasks = first.tasks
    kernels = np.flatnonzero(tasks.kind == TaskKind.COMPUTE)
    send = int(np.flatnonzero(tasks.kind == TaskKind.SEND)[0])
    receive = int(np.flatnonzero(tasks.kind == TaskKind.RECV)[0])
    # Rank 0 waits for the gradient before it sends what the gradient is of.
    rows = np.arange(len(tasks))
    assert send < receive < kernels[-1]
    order = np.concatenate([rows[:send], rows[send + 1 : receive + 1], [send], rows[receive + 1 :]])
    place = np.argsort(order)
    counts = np.diff(tasks.data_ptr)[order]
    data = [place[tasks.data[tasks.data_ptr[r] : tasks.data_ptr[r + 1]]] for r in order]
    columns = {
        f.name: column[order]
        for f in fields(Tasks)
        for column in [getattr(tasks, f.name)]
        if isinstance(column, np.ndarray) and len(column) == len(tasks)
    }
    moved = replace(
        tasks, **columns, data_ptr=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        data=np.concatenate(data).astype(np.int32),
    )  # fmt: skip
    classes = replace(first, work=RankWork.from_tables(moved)), program.classes[1]
    crossed = replace(program, classes=classes)
    seconds = [np.ones(len(of.work.actions.tasks)) for of in crossed.classes]
    with pytest.raises(
        UserError, match=r"deadlock: rank 0 waits for backward\.send of microbatch 0"
    ):
        assert timeline(crossed, seconds).seconds
