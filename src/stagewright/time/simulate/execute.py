"""Execution of waves: all times of a step, from the matrices of its runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Bool, Int
from stagewright.time.simulate.transfer import NEVER, Evaluated
from stagewright.time.simulate.waves import Waves

Progress = Callable[[int, int], None]
"""Called with the number of tasks done and the number of all tasks, of all classes."""


class TaskTicks(NamedTuple):
    """Durations and launches of the positions of a table, in ticks: [timings, positions]."""

    duration: Int
    """Of a receive 0; of a collective of several lanes its own, which counts only there."""
    cost: Int | None
    """Of the launch of each; None: launches take no time."""
    waits: Bool | None
    """Whether the host waits for the end of each."""
    of_lane: Int
    """By lane of the program: which timing it has; any number for lanes of other tables."""
    given: Int
    """[timings, positions]: durations as they were given, those of receives too."""


class Executed(NamedTuple):
    """Times of all slots after the last wave, and what each row of each batch began with."""

    times: Int
    inputs: list[Int]
    """By batch: [rows, inputs]."""
    met: list[Int]
    """By batch of meetings: when each row was ready, when it began, and when it ended."""


def execute(
    waves: Waves, timings: Sequence[TaskTicks], evaluated: Sequence[Sequence[Evaluated]],
    progress: Progress | None = None,
) -> Executed:  # fmt: skip
    """Execute all waves; `timings` are by table, `evaluated` by table and group of runs."""
    times = np.zeros(waves.unused + 1, np.int64)
    times[waves.nothing] = NEVER
    stacks: list[tuple[Int, Int]] = []
    for batch in waves.batches:
        group = waves.runs[batch.table].groups[batch.group]
        ends = evaluated[batch.table][batch.group].ends
        stack = ends[:, group.outs].reshape(-1, group.outputs, group.inputs)
        timing = timings[batch.table].of_lane[batch.lane]
        stacks.append((stack, timing * len(group.runs) + batch.run))
    inputs = [np.empty_like(batch.ins) for batch in waves.batches]
    met = [np.empty((len(batch.run) if batch.meets else 0, 3), np.int64) for batch in waves.batches]
    done = None if progress is None else _tasks_done(waves).tolist()
    bounds = [batch.wave.tolist() for batch in waves.batches]
    for wave in range(waves.count):
        meeting: list[tuple[int, slice, Int]] = []
        for number, batch in enumerate(waves.batches):
            a, b = bounds[number][wave], bounds[number][wave + 1]
            if a == b:
                continue
            stack, index = stacks[number]
            begun = inputs[number][a:b] = times[batch.ins[a:b]]
            left = (stack[index[a:b]] + begun[:, None, :]).max(axis=2)
            if batch.meets:
                meeting.append((number, slice(a, b), left))
            else:
                times[batch.outs[a:b]] = left
        if meeting:
            for number, rows, left, moments in _met(waves, timings, meeting):
                times[waves.batches[number].outs[rows]] = left
                met[number][rows] = moments.T
        if progress is not None and done is not None:
            progress(done[wave], done[-1])
    return Executed(times, inputs, met)


def _tasks_done(waves: Waves) -> Int:
    """By wave, the tasks of all classes that are done after it."""
    done = np.zeros(waves.count, np.int64)
    first = np.array([int(lanes[0]) for lanes in waves.lanes.by_class])
    for batch in waves.batches:
        runs = waves.runs[batch.table]
        numbers: list[int] = runs.groups[batch.group].runs.tolist()
        length = np.array([runs.runs[n].end - runs.runs[n].begin for n in numbers])
        counted = np.isin(batch.lane, first)
        wave = np.repeat(np.arange(waves.count), np.diff(batch.wave))
        np.add.at(done, wave[counted], length[batch.run[counted]])
    return done.cumsum()


def _met(
    waves: Waves, timings: Sequence[TaskTicks], meeting: Sequence[tuple[int, slice, Int]]
) -> Iterator[tuple[int, slice, Int, Int]]:
    """What the meetings of a wave leave: batch and rows, times of outputs, and when lanes are
    ready, begin and end. Given are batches, rows, and outputs as if none waited for others."""
    parts: list[tuple[Int, ...]] = []
    for number, rows, left in meeting:
        batch = waves.batches[number]
        timing = timings[batch.table]
        of, position = timing.of_lane[batch.lane[rows]], waves.begin(batch)[rows]
        waits = np.zeros(len(of), np.int64)
        if timing.waits is not None:
            waits = timing.waits[of, position].astype(np.int64)
        ticks = timing.duration[of, position]
        parts.append((batch.meeting[rows], batch.together[rows], left[:, 1], ticks, waits))
    meets, group, ready, ticks, waits = (np.concatenate(c) for c in zip(*parts, strict=True))
    order = np.lexsort((group, meets))
    new = np.diff(meets[order], prepend=-1) != 0

    def latest(numbers: Int, new: Bool) -> Int:
        first = np.flatnonzero(new)
        counts = np.diff(np.append(first, len(numbers)))
        result = np.empty_like(numbers)
        result[order] = np.repeat(np.maximum.reduceat(numbers[order], first), counts)
        return result

    start = latest(ready, new | (np.diff(group[order], prepend=-1) != 0))
    end = start + latest(ticks, new)
    moments = np.stack([ready, start, end])
    at = 0
    for number, rows, left in meeting:
        mine = slice(at, at + len(left))
        at += len(left)
        result = np.repeat(end[mine, None], left.shape[1], axis=1)
        later = np.maximum(left[:, 0], end[mine])
        result[:, 0] = np.where(waits[mine] > 0, later, left[:, 0])
        yield number, rows, result, moments[:, mine]
