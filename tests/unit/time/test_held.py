"""Memory over time, against a count value by value."""

from __future__ import annotations

import numpy as np
import pytest

from stagewright.lower.compile import compile
from stagewright.program.memory import timeline as by_row
from stagewright.run.settings import Run
from stagewright.time.simulate.memory import memory_timeline, peak
from stagewright.time.simulate.timeline import TICK, Lane, timeline
from timed import RUNS, durations


def counted(lane: Lane, tick: int) -> int:
    """Bytes of the values that are there just after a time."""
    v, rows = lane.rank_class.values, lane.issue.rows
    ready, end = np.empty_like(lane.ready), np.empty_like(lane.end)
    ready[rows], end[rows] = lane.ready, lane.end
    total = 0
    for value, first, last in zip(v.value.tolist(), v.first.tolist(), v.last.tolist(), strict=True):
        come = -1 if first < 0 else int(ready[first])
        go = np.inf if last >= len(rows) else int(end[last])
        total += int(v.size[value]) if come <= tick < go else 0
    return total


@pytest.mark.parametrize("run", ["sp", "vpp", "zero3", "dual"])
def test_memory_over_time_is_what_is_there(run: str) -> None:
    program = compile(Run(**RUNS[run])).program
    line = timeline(program, [t * 1e-12 for t in durations(program, 1, True)])
    random = np.random.default_rng(1)
    for number, lane in enumerate(line.lanes):
        found = memory_timeline(line, number)
        assert found.size.min() >= 0
        assert (np.diff(found.ticks) > 0).all()
        for tick in random.integers(0, line.ticks, 20).tolist():
            at = int(np.searchsorted(found.ticks, tick, side="right")) - 1
            assert int(found.size[:, at].sum()) == counted(lane, tick)
        fewer = found.sampled(10)
        assert len(fewer.ticks) <= 10
        most = peak(line, number)
        assert fewer.peak == found.peak == sum(most.by_category.values())
        first = int(found.size.sum(axis=0).argmax())
        assert most.seconds == found.ticks[first] * TICK
        assert [*most.by_category.values()] == [size for size in found.size[:, first] if size]


def test_without_overlap_it_is_memory_over_rows() -> None:
    program = compile(Run(**RUNS["dp"] | {"dp": 1, "global_batch_size": 1})).program
    (of,) = program.classes
    line = timeline(program, [np.full(len(of.work.actions.tasks), 1e-6)])
    assert memory_timeline(line, 0).peak == by_row(of).sum(axis=0).max()
    assert peak(line, 0).by_category.items() <= of.memory.items()
