"""Queues that are full, instances that fail, instances that come and go with the load."""

import math
import random
from array import array
from itertools import accumulate, pairwise

import numpy as np
import pytest

import stagewright as sw
from helpers import cases
from serving_toys import LinearTimes
from stagewright.api.deployment import instance_events
from stagewright.errors import UserError
from stagewright.run.sections.serving import OperationSection
from stagewright.serving import energy
from stagewright.serving.disaggregation import RemoteKvEngine, RemoteKvScheduler
from stagewright.serving.host import HostTimes
from stagewright.serving.kv_cache import PagedKvCache
from stagewright.serving.metrics import Slo, summarize
from stagewright.serving.operation import (
    FAILED,
    NONE_SERVES,
    QUEUE_FULL,
    Failure,
    InstanceEvents,
    Scaling,
)
from stagewright.serving.routers import ROUTERS
from stagewright.serving.schedulers.sglang import SGLang
from stagewright.serving.schedulers.vllm import Vllm
from stagewright.serving.simulation import Pool, ServingSimulation, chains_in_blocks
from stagewright.serving.workload import Records, Workload
from stagewright.serving.workloads.synthetic import Arrivals, Conversations, Lengths, sessions


def served(work, operation, engines=2, rules=None, router="round_robin", blocks=40):
    work = chains_in_blocks(work, 16)
    records, seconds = Records.of(len(work)), LinearTimes(0.01, 1e-4, 1e-3)
    rules = rules or Vllm(max_num_batched_tokens=64, max_num_seqs=6)
    made = [
        RemoteKvEngine(
            work,
            records,
            PagedKvCache(blocks, 16),
            RemoteKvScheduler(rules, rules.max_num_seqs),
            seconds,
        )
        for _ in range(engines)
    ]
    hosts = dict.fromkeys(range(engines), HostTimes(per_request=0.003))
    pool = Pool("both", range(engines), ROUTERS[router](), hosts)
    done = ServingSimulation(work, records, made, [pool], operation=operation).run()
    assert all(engine.kv_cache.free == engine.kv_cache.size for engine in made)
    return done


def burst(count=60, output=30):
    draw = random.Random(3)
    when = array("d", accumulate(draw.expovariate(20) for _ in range(count)))
    prompts = array("i", (draw.randint(1, 90) for _ in when))
    return Workload("burst", when, prompts, array("i", [output]) * count)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize(
    "rules", [Vllm(max_num_batched_tokens=64, max_num_seqs=6, async_scheduling=True),
              SGLang(max_prefill_tokens=90, chunked_prefill_size=48, max_num_seqs=7)]
)  # fmt: skip
def test_requests_of_a_failed_instance_end_elsewhere_once(rules, router):
    talk = Conversations(turns=3, think_time=0.1, system_prompt=20)
    work = sessions(14, Arrivals(rate=10), Lengths(isl=30, osl=20, range_ratio=0.3), talk)
    failures = (Failure(0.4, 0), Failure(0.9, 1))
    of = InstanceEvents(instances=3, failures=failures, start_up_time=0.7)
    done = [served(work, of, 3, rules, router) for _ in range(2)]
    assert done[0].records.finish == done[1].records.finish
    assert all(math.isfinite(at) for at in done[0].records.finish)
    tokens = sum(n * k for e in done[0].engines for _, _, n, k in e.step_log.gaps())
    assert tokens == sum(work.output) - len(work)
    counts = [count for _, count in done[0].instances]
    assert counts == [3, 2, 1, 2, 3]
    assert [at for at, _ in done[0].instances] == pytest.approx([0, 0.4, 0.9, 1.1, 1.6])
    for first, last in zip(done[0].records.first, done[0].records.finish, strict=True):
        assert first <= last


def test_what_had_been_made_is_not_made_again():
    """A request of 10 tokens, whose instance fails in the sixth step; the other one computes the
    prompt and 6 tokens in a step, which gives the seventh."""
    work = Workload("one", array("d", [0.0]), array("i", [10]), array("i", [10]))
    of = InstanceEvents(instances=2, failures=(Failure(0.003 + 0.0120 + 4.5 * 0.0111, 0),))
    records = served(work, of).records
    first = 0.003 + 0.01 + 1e-3 + 10e-4
    assert records.first[0] == pytest.approx(first)
    again = first + 5 * 0.0111 + 0.01 + 1e-3 + 16e-4
    assert records.finish[0] == pytest.approx(again + 3 * 0.0111)


def test_requests_fail_with_their_instance():
    work = burst()
    of = InstanceEvents(instances=2, failures=(Failure(1.0, 0),), on_failure="fail")
    done = served(work, of)
    ended = sum(map(math.isfinite, done.records.finish))
    assert 0 < done.refused[FAILED] == len(work) - ended
    found = summarize(done, Slo(), 2, {})
    assert (found.unfinished, found.rejected) == (0, done.refused)


def test_all_instances_may_be_away_for_a_while():
    work = burst(30)
    done = served(
        work, InstanceEvents(instances=1, failures=(Failure(0.2, 0),), start_up_time=2), 1
    )
    assert all(math.isfinite(at) for at in done.records.finish)
    assert not any(0.3 < at < 2.2 for at in done.records.finish)
    for of_step in (0.0, 1e-9):  # it is to serve again before its last step is over
        of = InstanceEvents(instances=1, failures=(Failure(0.2, 0),), start_up_time=of_step)
        assert all(math.isfinite(at) for at in served(work, of, 1).records.finish)


def test_requests_that_no_instance_will_ever_take_are_counted():
    work = burst(30)
    for at in (0.0, 1.0):
        gone = served(work, InstanceEvents(instances=1, failures=(Failure(at, 0),)), 1)
        found = summarize(gone, Slo(), 1, {})
        assert found.unfinished == 0
        assert found.rejected == {NONE_SERVES: 30 - found.requests}
        assert (found.requests > 0) == (at > 0)


def test_a_full_queue_refuses():
    few = Vllm(max_num_batched_tokens=64, max_num_seqs=2)
    done = served(burst(), InstanceEvents(instances=2, max_queued_requests=2), rules=few)
    assert done.refused[QUEUE_FULL] + sum(map(math.isfinite, done.records.finish)) == 60
    assert done.refused[QUEUE_FULL] > 0
    users = Workload("users", array("d", [0.0]) * 40, array("i", [50]) * 40, array("i", [9]) * 40,
                     concurrency=20)  # fmt: skip
    closed = served(users, InstanceEvents(instances=2, max_queued_requests=3), rules=few)
    assert closed.refused[QUEUE_FULL] + sum(map(math.isfinite, closed.records.finish)) == 40


def test_instances_come_with_the_load_and_leave():
    """Load above 0.8 of a cache at 1 s, 2 s, ...; an instance takes 0.5 s; one at a time."""
    work = burst(120, 40)
    work.arrival[-1] = 20.0
    scaling = Scaling(min_instances=1, max_instances=3, interval=1.0, up=0.8, down=0.3)
    of = InstanceEvents(instances=1, start_up_time=0.5, scaling=scaling)
    done = served(work, of, 3, router="least_loaded", blocks=30)
    counts = [count for _, count in done.instances]
    assert counts[0] == 1
    assert max(counts) == 3
    assert counts[-1] == 1
    assert next(at for at, n in done.instances if n == 2) == pytest.approx(1.5)
    assert all(abs(a - b) == 1 for a, b in pairwise(counts))
    alone = served(work, InstanceEvents(instances=1), 3, blocks=30)
    assert sum(done.records.finish) < sum(alone.records.finish)


def test_idle_instances_start_when_those_that_serve_have_failed():
    scaling = Scaling(min_instances=1, max_instances=3, interval=0.5, up=0.9, down=0.1)
    failures = (Failure(0.1, 0),)
    of = InstanceEvents(instances=1, failures=failures, scaling=scaling)
    done = served(burst(30), of, 3)
    assert all(math.isfinite(at) for at in done.records.finish)
    assert done.instances[:3] == [(0.0, 1), (0.1, 0), (0.5, 1)]
    of = InstanceEvents(instances=1, failures=(*failures, Failure(0.6, 1)), scaling=scaling)
    gone = served(burst(30), of, 2)
    ended = sum(map(math.isfinite, gone.records.finish))
    assert 0 < gone.refused[NONE_SERVES] == 30 - ended


def test_autoscaling_ends_where_nothing_can_change():
    scaling = Scaling(min_instances=1, max_instances=2, interval=0.5, up=0.9, down=0.1)
    never = SGLang(chunked_prefill_size=8, max_num_seqs=6)  # cut to whole blocks: to none
    done = served(burst(3), InstanceEvents(instances=1, scaling=scaling), rules=never)
    assert not any(map(math.isfinite, done.records.finish))


@cases
def test_bad_settings_are_one_line(settings, says):
    with pytest.raises(UserError) as error:
        instance_events(OperationSection(**settings), 2)
    assert says in str(error.value)


def test_failures_and_autoscaling_of_pools():
    load = {"layers": 2, "isl": 400, "osl": 60, "num_requests": 60, "rate": 200}
    pools = {"prefill_instances": 2, "instances": 1, "max_instances": 3, "start_up_time": 0.05}
    found = sw.serve(
        "llama3.1-8b", "h100-sxm", **load, **pools, fail_at="0.1:0,0.15:2",
        adjustment_interval=0.05, kv_scale_up_threshold=0.02, kv_scale_down_threshold=0.01,
        num_gpu_blocks=4000,
    )  # fmt: skip
    assert (found.summary.requests, found.summary.unfinished) == (60, 0)
    counts = [count for _, count in found.outcome.instances]
    assert counts[0] == 3
    assert max(counts) > 3
    assert found.summary.gpus == max(counts)
    with pytest.raises(UserError, match="of instances 0 to 3"):
        sw.serve("llama3.1-8b", "h100-sxm", **load, prefill_instances=2, instances=2, fail_at="1:4")


def test_energy_is_the_integral_of_power_over_the_time_that_engines_are_up(monkeypatch):
    load = {"layers": 2, "isl": 400, "osl": 60, "num_requests": 80, "rate": 100}
    scaled = {
        "max_instances": 3, "min_instances": 1, "start_up_time": 0.1, "adjustment_interval": 0.1,
        "kv_scale_up_threshold": 0.02, "kv_scale_down_threshold": 0.015, "num_gpu_blocks": 4000,
    }  # fmt: skip
    found = sw.serve("llama3.1-8b", "h100-sxm", **load, **scaled, fail_at="0.3:0", whole_run=True)
    up = found.outcome.up
    first = min(found.outcome.records.arrival)
    last = first + found.summary.seconds
    seconds = [max(0.0, min(one.ends, last) - max(one.begins, first)) for one in up]
    assert len({one.engine for one in up}) > 1
    assert sum(seconds) < 3 * found.summary.seconds
    assert all(one.begins <= one.ends for one in up)
    for busy, idle in ((300.0, 300.0), (500.0, 0.0), (0.0, 70.0)):
        sizes, in_steps = np.array([1.0, 64.0]), np.array([busy, busy])
        power = energy._Power(found.group.instance.times, 430, sizes, in_steps, busy, idle)
        monkeypatch.setattr(energy._Power, "of", lambda *_, power=power: power)
        spent = energy.serving_expense(found, [found.group], price=3600.0)
        rows = [engine.step_log.steps() for engine in found.outcome.engines]
        worked = sum(float(((r[:, 0] + r[:, 1]) / 2 * r[:, 2]).sum()) for r in rows)
        joules = busy * worked + idle * (sum(seconds) - worked)
        assert spent.joules == pytest.approx(joules, rel=1e-6)
        usd = spent.usd_per_million_tokens * 80 * 60 / 1e6
        assert usd == pytest.approx(sum(seconds), rel=1e-6)
        assert idle != busy or spent.watts_per_gpu == pytest.approx(300.0, rel=1e-6)
