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

DRAWN = 30
SEED = 11


def compare(line: Timeline) -> None:
    for number, lane in enumerate(line.lanes):
        found, most = memory_by_row(lane), peak(line, number)
        by_action = memory_timeline(line, number)
        assert np.array_equal(by_action.ticks, found.ticks)
        assert np.array_equal(by_action.size, found.size)
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
