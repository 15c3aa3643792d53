"""Who arrives when: follow-ups, joins, and lanes of a closed loop."""

from array import array
from dataclasses import replace

import numpy as np
import pytest

from serving_toys import LinearTimes, serve
from stagewright.serving.engine import Engine
from stagewright.serving.kv_cache import PagedKvCache
from stagewright.serving.routers import ROUTERS
from stagewright.serving.schedulers.vllm import Vllm
from stagewright.serving.simulation import chains_in_blocks
from stagewright.serving.workload import Records, Workload
from stagewright.serving.workloads.synthetic import (
    Arrivals,
    Conversations,
    Lengths,
    open_loop,
    sessions,
)

TIMES = LinearTimes(0.01, 1e-5, 1e-5, 1e-9)
LENGTHS = Lengths(isl=64, osl=32, range_ratio=0.3)


def served(work: Workload, count: int = 1) -> Records:
    def engine(workload, records):
        return Engine(workload, records, PagedKvCache(10_000), Vllm(), TIMES, 1.0)

    return serve(chains_in_blocks(work, 16), engine, count, ROUTERS["round_robin"]()).records


def in_flight(begins, ends) -> int:
    """The most intervals that overlap; an end comes before a begin at the same time."""
    events = sorted([*((at, 1) for at in begins), *((at, -1) for at in ends)])
    return max(np.cumsum([change for _, change in events]))


@pytest.mark.parametrize("think", [0.0, 0.5])
def test_a_session_holds_its_lane_to_its_end(think: float):
    of = Conversations(turns=4, think_time=think)
    work = replace(sessions(30, Arrivals(rate=float("inf")), LENGTHS, of), concurrency=5)
    records = served(work, 2)
    session = np.array(work.session)
    begins = [np.array(records.arrival)[session == n].min() for n in range(30)]
    ends = [np.array(records.finish)[session == n].max() for n in range(30)]
    assert in_flight(begins, ends) == 5
    assert sorted(begins)[5:] == pytest.approx(sorted(ends)[:25])
    assert in_flight(records.arrival, records.finish) <= 5
    alone = replace(work, session=None)  # the tree says as much
    assert served(alone, 2).finish == records.finish


def test_a_lane_is_a_ceiling_of_arrivals_at_a_rate():
    work = open_loop(60, Arrivals(rate=20), LENGTHS)
    records = served(replace(work, concurrency=3))
    assert in_flight(records.arrival, records.finish) == 3
    sent, wanted = np.array(records.arrival), np.array(work.arrival)
    assert (sent >= wanted).all()
    assert (sent > wanted).any()
    free = served(replace(work, concurrency=60))
    assert free.arrival == served(work).arrival


def test_a_join_waits_for_all():
    # 0 -> 1, 2 and 3 in parallel; 4 joins them after 0.5 s; 5 is nobody's predecessor.
    work = Workload(
        "fan-out",
        array("d", [0.0, 0.1, 0.0, 0.0, 0.5, 0.0, 0.0]),
        array("i", [50, 10, 20, 30, 90, 10, 10]),
        array("i", [5, 40, 3, 9, 2, 200, 4]),
        predecessor=array("i", [-1, 0, 0, 0, 0, 0, -1]),
        further_predecessors={4: (1, 2, 3)},
        concurrency=1,
    )
    records = served(work)
    arrival, finish = np.array(records.arrival), np.array(records.finish)
    assert arrival[1:4] == pytest.approx(finish[0] + np.array([0.1, 0.0, 0.0]))
    assert arrival[4] == pytest.approx(finish[1:4].max() + 0.5)
    assert arrival[6] == pytest.approx(finish[:6].max())  # the lane is free
    assert finish[5] > finish[4]
