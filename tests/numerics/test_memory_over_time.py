"""The peak of memory over time, from the times of actions, is that of all rows."""

from __future__ import annotations

import random

import numpy as np
import pytest

from stagewright.errors import UserError
from stagewright.lower.compile import compile
from stagewright.program.columns import CATEGORIES, Program
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.time.simulate.memory import memory_timeline, peak
from stagewright.time.simulate.timeline import TICK, Timeline, timeline
from sweep import draw
from timed import RUNS, WAYS, durations, memory_by_row

DRAWN = 15
SEED = 11


def compare(line: Timeline) -> None:
    for number, lane in enumerate(line.lanes):
        found, most = memory_by_row(lane), peak(line, number)
        by_action = memory_timeline(line, number)
        assert np.array_equal(by_action.ticks, found.ticks)
        assert np.array_equal(by_action.size, found.size)
        assert found.size.min() >= 0
        fewer = by_action.sampled(10)
        assert len(fewer.ticks) <= 10
        assert fewer.peak == found.peak
        tensors = dict(most.by_category)
        assert tensors.pop("allowance", 0) == line.class_of(number).allowance
        assert sum(tensors.values()) == found.peak
        first = int(found.size.sum(axis=0).argmax())
        assert most.seconds == found.ticks[first] * TICK
        sizes = zip(CATEGORIES, found.size[:, first].tolist(), strict=True)
        assert tensors == {name: size for name, size in sizes if size}


def line_of(program: Program, seed: int, how: Execution, factors: dict[int, float]) -> Timeline:
    seconds = [ticks * TICK for ticks in durations(program, seed, False)]
    return timeline(program, seconds, how, factors)


@pytest.mark.parametrize("way", ["overlap", "one", "none", "next"])
@pytest.mark.parametrize("run", RUNS)
def test_the_peak_needs_no_rows(run: str, way: str) -> None:
    program = compile(Run(**RUNS[run])).program
    for factors in ({}, {program.mesh.world_size - 1: 1.5}):
        compare(line_of(program, 8, WAYS[way], factors))


def test_without_overlap_it_is_memory_over_rows() -> None:
    program = compile(Run(**RUNS["dp"] | {"dp": 1, "global_batch_size": 1})).program
    (of,) = program.classes
    line = timeline(program, [np.full(len(of.work.actions.tasks), 1e-6)])
    assert memory_timeline(line, 0).peak == of.work.changes.in_use.sum(axis=0).max()
    assert peak(line, 0).by_category.items() <= of.memory.items()


def test_the_peak_of_random_runs() -> None:
    dice = random.Random(SEED)
    count = 0
    while count < DRAWN:
        settings = draw(dice)
        try:
            compiled = compile(Run(**settings))
        except UserError:
            continue
        how = Execution(streams=compiled.run.streams)
        line = line_of(compiled.program, count, how, {})
        compare(line)
        count += 1
