"""Small runs, ways to execute them, and durations that are drawn: what timelines are tried with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from helpers import table_of
from stagewright.arrays import Int
from stagewright.program.columns import Program, Tasks
from stagewright.run.sections.execution import Execution
from stagewright.time.collectives import seconds_by_algorithm
from stagewright.time.network import Machine, Placement
from stagewright.time.simulate.memory import MemoryTimeline
from stagewright.time.simulate.order import deferred_past_backward
from stagewright.time.simulate.timeline import Lane, table_rows
from stagewright.time.simulate.units import CarriedDeps, Units

SMALL: dict[str, Any] = {"model": "llama3-8b", "layers": 2, "seq_length": 64, "streams": "separate"}
SP = {"sequence_parallel": True}
GPT = SMALL | {"model": "gpt2"}
MIXTRAL = SMALL | {"model": "mixtral-8x7b"}
RUNS: dict[str, dict[str, Any]] = table_of("timed", "runs")
WAYS = {
    "overlap": Execution(),
    "one": Execution(streams="one"),
    "no dp": Execution(no_overlap=frozenset({"dp"})),
    "none": Execution(no_overlap=frozenset({"tp", "cp", "ep", "dp", "pp"})),
    "late": Execution(prefetch=0),
    "ahead": Execution(prefetch=3),
    "next": Execution(overlap_param_gather=True),
}


SHOWN = table_of("timed", "shown")
"""Runs and ways that show what few of them do."""


def durations(program: Program, seed: int, alike: bool) -> list[Int]:
    """Ticks by class and row of its actions; `alike`: rows of one name take the same."""
    random = np.random.default_rng(seed)
    by_name = random.integers(1, 10**7, 10**4)
    known: dict[int, Int] = {}
    result: list[Int] = []
    for of in program.classes:
        t = of.work.actions.tasks
        if id(t) not in known:
            ticks = by_name[t.name] if alike else random.integers(1, 10**7, len(t))
            moves = by_name[t.slot] % 997 + t.comm_bytes % 10**6
            known[id(t)] = np.where(t.slot >= 0, moves, ticks)
        result.append(known[id(t)])
    return result


def row_by_row(program: Program) -> Program:
    """The program with one action per class, which has all its rows."""
    classes = [replace(of, work=of.work.with_tasks(of.tasks)) for of in program.classes]
    return replace(program, classes=tuple(classes))


def by_row(program: Program, by_action: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """By class and row of its tasks, what is given by row of its actions."""
    pairs = zip(program.classes, by_action, strict=True)
    return [given[table_rows(of.work)] for of, given in pairs]


def by_action(program: Program, by_row: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """By class and row of its actions, what is given by row of its tasks: equal in all copies."""
    result: list[NDArray[Any]] = []
    for of, given in zip(program.classes, by_row, strict=True):
        rows = table_rows(of.work)
        each = np.zeros(len(of.work.actions.tasks), given.dtype)
        each[rows] = given
        assert np.array_equal(each[rows], given), "copies of an action differ"
        result.append(each)
    return result


def one_unit(program: Program, tasks: Tasks, execution: Execution) -> Units:
    """All rows of a rank as one unit: the oracle of units of actions."""
    size = len(tasks)
    zeros, none = np.zeros(size, np.int64), np.zeros(0, np.int64)
    return Units(
        tasks, deferred_past_backward(program, tasks, execution), np.arange(size), zeros, zeros,
        tasks.reads, CarriedDeps(none, none, none, none), ((0,),), np.arange(size),
        np.zeros((1, 1), np.int64),
    )  # fmt: skip


def algorithm_of(op: str, comm_bytes: int, group: Placement, machine: Machine) -> str:
    """The fastest algorithm of a collective."""
    options = seconds_by_algorithm(op, comm_bytes, group, machine)
    return min(options, key=lambda name: float(options[name]))


def memory_by_row(lane: Lane) -> MemoryTimeline:
    """The memory of a lane over time, counted from the times of its rows and their values."""
    start, allocated, freed = lane.rank_class.work.changes
    rows = lane.issue.rows
    ready, end = np.empty_like(lane.ready), np.empty_like(lane.end)
    ready[rows], end[rows] = lane.ready, lane.end
    come, go = allocated.any(axis=0), freed.any(axis=0)
    ticks = np.concatenate([[0], end[go], ready[come]])
    changes = np.concatenate([start[:, None], -freed[:, go], allocated[:, come]], axis=1)
    order = np.argsort(ticks, kind="stable")
    last = np.flatnonzero(np.diff(ticks[order], append=ticks.max() + 1))
    return MemoryTimeline(ticks[order[last]], changes[:, order].cumsum(axis=1)[:, last])
