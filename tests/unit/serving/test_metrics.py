"""What is said of a run."""

from array import array

import numpy as np
import pytest

from serving_toys import LinearTimes, serve
from stagewright.serving.engine import Engine
from stagewright.serving.kv_cache import PagedKvCache
from stagewright.serving.metrics import Slo, gap_spread, summarize
from stagewright.serving.routers import ROUTERS
from stagewright.serving.schedulers.vllm import Vllm
from stagewright.serving.simulation import chains_in_blocks
from stagewright.serving.step_log import STEP, STEP_AND_GAPS, StepLog
from stagewright.serving.workload import Workload
from stagewright.serving.workloads.synthetic import (
    Arrivals,
    Conversations,
    Lengths,
    closed_loop,
    open_loop,
    sessions,
)

TIMES = LinearTimes(0.01, 1e-5, 1e-5, 1e-9)


def served(work: Workload, count: int = 1, router: str = "round_robin", blocks: int = 10_000):
    def engine(workload, records):
        return Engine(workload, records, PagedKvCache(blocks), Vllm(), TIMES, 1.0)

    return serve(chains_in_blocks(work, 16), engine, count, ROUTERS[router]())


def test_one_request_in_closed_form():
    work = Workload("one", array("d", [0.0]), array("i", [100]), array("i", [11]))
    of = summarize(served(work), Slo(ttft=1), 8, {})
    first = 0.01 + 100e-5 + 1e-5 + 100e-9
    rest = sum(0.01 + 2e-5 + 1e-9 * (101 + n) for n in range(10))
    assert of.ttft.mean == pytest.approx(first)
    assert of.tpot.mean == pytest.approx(rest / 10)
    assert of.e2e.p99 == pytest.approx(first + rest)
    assert of.output_rate == pytest.approx(11 / (first + rest))
    assert (of.requests, of.good, of.preemptions, of.hit_rate) == (1, 1, 0, 0)


def test_gaps_as_if_written_out():
    gaps = StepLog()
    for row in ((1.0, 2.0, 11, 3), (0.5, 0.5, 1, 7), (3.0, 2.5, 6, 1)):
        gaps.add((*row, STEP_AND_GAPS))
    gaps.add((9.0, 9.0, 1, 5, STEP))
    written = np.repeat(
        np.concatenate([np.linspace(1, 2, 11), [0.5], np.linspace(3, 2.5, 6)]),
        [3] * 11 + [7] + [1] * 6,
    )
    of = gap_spread(gaps.gaps())
    assert of.mean == pytest.approx(written.mean())
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        wanted = np.quantile(written, share, method="inverted_cdf")
        assert getattr(of, name) == pytest.approx(wanted, rel=2e-5)


def test_a_closed_loop_keeps_its_users():
    of = summarize(served(closed_loop(200, 8, Lengths(isl=64, osl=32))), Slo(), 1, {})
    assert of.requests == 200
    assert of.mean_running + of.mean_waiting == pytest.approx(8, rel=0.05)
    assert of.request_rate == pytest.approx(8 / of.e2e.mean, rel=0.05)  # Little's law


def test_turns_find_what_was_said_before():
    work = sessions(20, Arrivals(rate=2), Lengths(isl=160, osl=32), Conversations(turns=4))
    of = summarize(served(work), Slo(), 1, {}, whole_run=True)
    # Whole blocks of earlier turns, whose last token was never computed.
    assert of.hit_rate == pytest.approx((176 + 368 + 560) / (160 + 352 + 544 + 736))
    alone, same, aware = (
        summarize(served(work, 4, router), Slo(), 4, {}, whole_run=True).hit_rate
        for router in ("round_robin", "session", "kv_aware")
    )
    assert same == of.hit_rate
    assert alone < aware <= of.hit_rate


def test_routers_share_the_load():
    work = open_loop(400, Arrivals(rate=100), Lengths(isl=512, osl=64, range_ratio=0.1))
    of = {name: summarize(served(work, 4, name), Slo(ttft=0.05), 4, {}) for name in ROUTERS}
    assert all(each.requests == 400 for each in of.values())
    assert 0 < of["round_robin"].good <= 1
