"""Execution of waves: all times of a step, by the transfer matrices of its fragments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Bool, Int
from stagewright.time.simulate.transfer import NEVER, TransferMatrices
from stagewright.time.simulate.waves import Waves

Progress = Callable[[int, int], None]
"""Called with the number of finished tasks and the number of all tasks, of all classes."""


class TaskTicks(NamedTuple):
    """Durations and launches of the positions of a table, in ticks: [sets, positions]."""

    duration: Int
    """0 for a receive; unused for rendezvous fragments."""
    launch: Int | None
    """Cost of the launch of each; None: launches take no time."""
    waits: Bool | None
    """The host waits for the end of each."""
    set_of_lane: Int
    """Duration set of each lane of the program; any number for lanes of other tables."""
    raw_duration: Int
    """Durations that the caller set, those of receives too."""


class Executed(NamedTuple):
    """Times after the last wave, by time index, and inputs of all batches."""

    times: Int
    inputs: list[Int]
    """By batch: [rows, inputs]."""
    rendezvous_times: list[Int]
    """By batch of rendezvous: when each row was ready, when it began, and when it ended."""


def execute(
    waves: Waves, duration_sets: Sequence[TaskTicks],
    matrices: Sequence[Sequence[TransferMatrices]], progress: Progress | None = None,
) -> Executed:  # fmt: skip
    """Execute all waves; `duration_sets` are by table, `matrices` by table and fragment group."""
    times = np.zeros(waves.unused + 1, np.int64)
    times[waves.never] = NEVER
    stacks: list[tuple[Int, Int]] = []
    for batch in waves.batches:
        group = waves.fragments[batch.table].groups[batch.group]
        ends = matrices[batch.table][batch.group].ends
        stack = ends[:, group.output_rows].reshape(-1, group.num_outputs, group.num_inputs)
        set_index = duration_sets[batch.table].set_of_lane[batch.lane]
        stacks.append((stack, set_index * len(group.indices) + batch.fragment))
    inputs = [np.empty_like(batch.inputs) for batch in waves.batches]
    rendezvous_times = [
        np.empty((len(batch.lane) if batch.is_rendezvous else 0, 3), np.int64)
        for batch in waves.batches
    ]
    finished = None if progress is None else _finished_tasks(waves).tolist()
    bounds = [batch.wave.tolist() for batch in waves.batches]
    for wave in range(waves.count):
        pending: list[tuple[int, slice, Int]] = []
        for number, batch in enumerate(waves.batches):
            a, b = bounds[number][wave], bounds[number][wave + 1]
            if a == b:
                continue
            stack, index = stacks[number]
            batch_inputs = inputs[number][a:b] = times[batch.inputs[a:b]]
            outputs = (stack[index[a:b]] + batch_inputs[:, None, :]).max(axis=2)
            if batch.is_rendezvous:
                pending.append((number, slice(a, b), outputs))
            else:
                times[batch.outputs[a:b]] = outputs
        if pending:
            for number, rows, outputs, columns in _rendezvous(waves, duration_sets, pending):
                times[waves.batches[number].outputs[rows]] = outputs
                rendezvous_times[number][rows] = columns.T
        if progress is not None and finished is not None:
            progress(finished[wave], finished[-1])
    return Executed(times, inputs, rendezvous_times)


def _finished_tasks(waves: Waves) -> Int:
    """Number of tasks of all classes that are finished after each wave."""
    finished = np.zeros(waves.count, np.int64)
    first_lanes = np.array([int(lanes[0]) for lanes in waves.lanes.by_class])
    for batch in waves.batches:
        fragments = waves.fragments[batch.table]
        indices: list[int] = fragments.groups[batch.group].indices.tolist()
        members = [fragments.fragments[i] for i in indices]
        length = np.array([fragment.end - fragment.begin for fragment in members])
        counted = np.isin(batch.lane, first_lanes)
        wave = np.repeat(np.arange(waves.count), np.diff(batch.wave))
        np.add.at(finished, wave[counted], length[batch.fragment[counted]])
    return finished.cumsum()


def _rendezvous(
    waves: Waves, duration_sets: Sequence[TaskTicks], pending: Sequence[tuple[int, slice, Int]]
) -> Iterator[tuple[int, slice, Int, Int]]:
    """Start and end of a wave's collectives: latest ready, longest duration.

    `pending`: batch, rows, outputs without waiting. Yields batch, rows, outputs, and times:
    [ready, start and end; rows].
    """
    parts: list[tuple[Int, ...]] = []
    for number, rows, outputs in pending:
        batch = waves.batches[number]
        ticks = duration_sets[batch.table]
        where = ticks.set_of_lane[batch.lane[rows]], batch.begin[rows]
        waits = np.zeros(len(outputs), np.int64)
        if ticks.waits is not None:
            waits = ticks.waits[where].astype(np.int64)
        parts.append((
            batch.rendezvous[rows], batch.rendezvous_group[rows], outputs[:, 1],
            ticks.duration[where], waits,
        ))  # fmt: skip
    rendezvous, group, ready, duration, waits = (
        np.concatenate(column) for column in zip(*parts, strict=True)
    )
    order = np.lexsort((group, rendezvous))
    starts = np.diff(rendezvous[order], prepend=-1) != 0

    def latest(values: Int, starts: Bool) -> Int:
        """Maximum of each run of rows in `order`, at all its rows."""
        first = np.flatnonzero(starts)
        counts = np.diff(np.append(first, len(values)))
        result = np.empty_like(values)
        result[order] = np.repeat(np.maximum.reduceat(values[order], first), counts)
        return result

    start = latest(ready, starts | (np.diff(group[order], prepend=-1) != 0))
    end = start + latest(duration, starts)
    times = np.stack([ready, start, end])
    begin = 0
    for number, rows, outputs in pending:
        part = slice(begin, begin + len(outputs))
        begin += len(outputs)
        result = np.repeat(end[part, None], outputs.shape[1], axis=1)
        launched = outputs[:, 0]
        result[:, 0] = np.where(waits[part] > 0, np.maximum(launched, end[part]), launched)
        yield number, rows, result, times[:, part]
