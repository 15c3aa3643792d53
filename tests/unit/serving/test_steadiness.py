"""The measured window of a run, and whether its figures are steady."""

import json
from array import array

import numpy as np
import pytest

from serving_toys import LinearTimes, serve
from stagewright.serving.engine import Engine
from stagewright.serving.kv_cache import PagedKvCache
from stagewright.serving.metrics import ServingSummary, Slo, summarize
from stagewright.serving.routers import RoundRobin
from stagewright.serving.schedulers.vllm import Vllm
from stagewright.serving.workload import Workload
from stagewright.serving.workloads.synthetic import Arrivals, Lengths, closed_loop, open_loop

LENGTHS = Lengths(isl=100, osl=50)
SLO = Slo(ttft=0.2)
TIMES = LinearTimes(0.01, 1e-4, 1e-5, 1e-9)
"""A step takes 10 ms, and 10 ms for a prompt: some 80 requests/s at the most."""


def served(work: Workload, slo: Slo = SLO, **options) -> ServingSummary:
    def engine(workload, records):
        return Engine(workload, records, PagedKvCache(100_000), Vllm(), TIMES, 0.05)

    return summarize(serve(work, engine, 1, RoundRobin()), slo, 1, {}, **options)


def loaded(rate: float, requests: int, **options) -> ServingSummary:
    return served(open_loop(requests, Arrivals(rate=rate), LENGTHS), **options)


def test_rates_are_those_of_arrivals_between_ramp_and_drain():
    constant = open_loop(200, Arrivals(rate=20, process="constant"), LENGTHS)
    of, whole = served(constant), served(constant, whole_run=True)
    assert of.window.begins == pytest.approx(2, abs=0.01)  # the arrival of request 40
    assert of.window.ends == pytest.approx(199 / 20, abs=0.01)
    assert of.measured == 160
    assert of.request_rate == pytest.approx(20, rel=0.01)
    assert of.output_rate == pytest.approx(20 * 50, rel=0.01)
    assert of.total_rate == pytest.approx(20 * 150, rel=0.01)
    assert of.mean_running + of.mean_waiting == pytest.approx(20 * of.e2e.mean, rel=0.02)
    assert (whole.request_rate, whole.output_rate) == pytest.approx(
        (200 / whole.seconds, 200 * 50 / whole.seconds)
    )
    assert whole.request_rate < 0.97 * of.request_rate
    assert of.steadiness.steady
    assert "steady: 20" in of.verdict


def test_tokens_between_window_ends_are_counted_as_if_one_by_one():
    """Requests that arrive before the window have tokens in it, and those after it have not."""
    of = served(open_loop(100, Arrivals(rate=5, process="constant"), LENGTHS))
    alone = served(Workload("one", *(array(t, [n]) for t, n in (("d", 0), ("i", 100), ("i", 50)))))
    tokens = of.output_rate * of.window.seconds
    step = alone.tpot.mean
    first, ends = alone.ttft.mean, of.window.ends - of.window.begins
    arrivals = np.arange(100) / 5 - 20 / 5
    times = arrivals[:, None] + first + step * np.arange(50)
    assert tokens == pytest.approx(((times > 0) & (times <= ends)).sum(), rel=0.01)


def test_overload_is_named_however_long_the_run():
    for requests in (300, 1000, 3000):
        of = loaded(300, requests)
        assert of.steadiness.overloaded
        assert not of.steadiness.steady
        assert of.verdict.startswith("overloaded: ")
        assert "requests/s come" in of.verdict
        assert of.request_rate < 0.5 * of.steadiness.arrival_rate
    slightly = loaded(100, 3000)
    assert slightly.steadiness.overloaded
    assert slightly.window.whole is False
    assert slightly.request_rate < 95


@pytest.mark.parametrize("seed", range(5))
def test_a_server_that_keeps_up_is_not_overloaded(seed: int):
    for rate in (10, 25, 40):
        of = served(open_loop(1500, Arrivals(rate=rate), LENGTHS, seed))
        assert not of.steadiness.overloaded
        assert of.steadiness.steady
        assert of.request_rate == pytest.approx(of.steadiness.arrival_rate, rel=0.05)


def test_runs_that_are_too_short_say_how_long_they_should_be():
    few = loaded(40, 40)
    assert not few.steadiness.steady
    assert not few.steadiness.overloaded
    wanted = few.steadiness.wanted_requests
    assert f"{wanted} requests" in few.verdict
    assert loaded(40, 2 * wanted).steadiness.steady
    at_once = served(
        Workload("burst", *(array(t, [n] * 9) for t, n in (("d", 0), ("i", 9), ("i", 9))))
    )
    assert at_once.verdict == "not steady: all requests arrive at once"
    assert at_once.window.whole


def test_a_closed_loop_is_steady_and_never_overloaded():
    of = served(closed_loop(400, 16, LENGTHS))
    assert of.steadiness.steady
    assert of.steadiness.in_flight == (16, 16)


def test_load_that_grows_is_not_steady():
    arrival = array("d", np.cumsum(1 / np.linspace(2, 60, 1500)))
    work = Workload("ramp", arrival, array("i", [100] * 1500), array("i", [50] * 1500))
    of = served(work)
    assert not of.steadiness.steady
    assert not of.steadiness.overloaded
    assert of.verdict.startswith("not steady: 9 requests are in flight at the begin, ")


def test_a_share_of_good_requests_that_falls_is_not_steady():
    """Prompts grow in the middle of the run: throughput stays, some latencies miss their limit."""
    prompts = array("i", [100] * 600 + [4000] * 400)
    arrival = array("d", np.arange(1000) / 2)
    work = Workload("longer", arrival, prompts, array("i", [50] * 1000))
    assert served(work, slo=Slo(ttft=9.0)).steadiness.steady
    of = served(work, slo=Slo(ttft=0.05))
    assert of.verdict == "not steady: 100% of the first half keep the limits, 0% of the second"
    assert of.good == pytest.approx(0.5)
    assert of.goodput == pytest.approx(of.request_rate / 2, rel=0.01)


def test_verdicts_are_fields_of_json_without_nan():
    of = served(
        Workload("one token", *(array(t, [n] * 3) for t, n in (("d", 0), ("i", 8), ("i", 1))))
    )
    values = of.values()
    assert json.loads(json.dumps(values, allow_nan=False))["steady"] is False
    assert values["overloaded"] is False
    assert values["tpot"]["p50"] is None
    assert values["window"]["whole"] is True
