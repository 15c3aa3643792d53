"""Instances in pools do what stepping does, and what plain instances do where they are alike."""

import math
import random
from array import array
from dataclasses import dataclass
from itertools import accumulate

import pytest

import stagewright as sw
from helpers import times
from pool_stepping import Apart, Server
from serving_toys import LinearTimes
from stagewright.serving.disaggregation import PrefillEngine, RemoteKvEngine, RemoteKvScheduler
from stagewright.serving.host import HostTimes
from stagewright.serving.kv_cache import PagedKvCache
from stagewright.serving.kv_transfer import Handover, KvTransfers
from stagewright.serving.lockstep import LockstepGroup
from stagewright.serving.operation import Failure, InstanceEvents, Scaling
from stagewright.serving.routers import RoundRobin
from stagewright.serving.schedulers.sglang import SGLang
from stagewright.serving.schedulers.tensorrt_llm import TensorRtLlm
from stagewright.serving.schedulers.vllm import Vllm
from stagewright.serving.simulation import Pool, ServingSimulation, chains_in_blocks
from stagewright.serving.workload import Records, Workload
from stagewright.serving.workloads.synthetic import Arrivals, Conversations, Lengths, sessions


def drawn(draw: random.Random, most: int = 60) -> Workload:
    count = draw.randint(1, most)
    gaps = [draw.choice((0, draw.expovariate(draw.choice((2, 20))))) for _ in range(count)]
    return Workload(
        "random",
        array("d", accumulate(gaps)),
        array("i", (draw.randint(1, 200) for _ in gaps)),
        array("i", (draw.randint(1, 60) for _ in gaps)),
    )


@dataclass
class Cost:
    """Of a transfer between any two engines, by its seconds alone."""

    alone: object
    layers: int | None

    def seconds(self, tokens, last=True, *, parts=1):
        return self.alone(tokens, last) / parts

    def bytes(self, tokens, last=True):
        return tokens


def apart(work, made, host, transfer, prefills, operation=None, layers=None):
    """Prompts on the first engines, decode on the others; `made` makes an engine of either kind."""
    records, handover = Records.of(len(work)), Handover.of(len(work))
    one = Workload(work.name, work.arrival, work.prompt, array("i", [1]) * len(work), work.chains)
    engines = [made(k, one if k < prefills else work, records, handover) for k in range(len(made))]
    front, back = range(prefills), range(prefills, len(engines))
    pools = [
        Pool("prefill", front, RoundRobin(), dict.fromkeys(front, host)),
        Pool("decode", back, RoundRobin(), dict.fromkeys(back, host)),
    ]
    how = "prompt" if layers is None else "layer" if layers else "chunk"
    cost = Cost(transfer, layers)
    transfers = KvTransfers(handover, len(engines), lambda source, target: cost, how)
    return ServingSimulation(
        work, records, engines, pools, transfers=transfers, operation=operation
    ).run()


@dataclass
class Counted:
    """So many engines, each made by a function."""

    make: object
    many: int

    def __len__(self):
        return self.many

    def __call__(self, *args):
        return self.make(*args)


class Made:
    def __init__(self, rules, caches, seconds, prefills, first_token=False, pushes=False):
        self.pushes = pushes
        self.rules, self.caches, self.seconds = rules, caches, seconds
        self.prefills, self.first_token = prefills, first_token

    def __len__(self):
        return len(self.caches)

    def __call__(self, k, work, records, handover):
        rules = self.rules[k]() if callable(self.rules[k]) else self.rules[k]
        pulls = RemoteKvScheduler(rules, rules.max_num_seqs, isinstance(rules, TensorRtLlm))
        parts = (work, records, self.caches[k], pulls, self.seconds[k])
        if k < self.prefills:
            return PrefillEngine(handover.prefilled, *parts, pushes=self.pushes)
        return RemoteKvEngine(*parts, role="decode", with_first_token=self.first_token)


def equal_to_stepping(seed: int) -> None:
    draw = random.Random(seed)
    work, prefills, decodes = drawn(draw), draw.randint(1, 3), draw.randint(1, 3)
    rules, seconds, places = [], [], []
    for _ in range(prefills + decodes):
        rules.append(
            Vllm(
                max_num_batched_tokens=draw.choice((24, 64, 512)),
                max_num_seqs=draw.randint(1, 12),
                async_scheduling=draw.random() < 0.5,
            )
        )
        seconds.append(LinearTimes(draw.uniform(0.01, 0.02), 1e-4, 1e-3, draw.choice((0.0, 1e-5))))
        places.append(draw.randint(1, 20))
    slow = draw.choice((1e-5, 1e-3))

    windows = draw.choice((0.0, 0.02))

    def alone(tokens, last):
        return 1e-3 + windows * last + slow * tokens

    host = HostTimes(per_request=draw.choice((0.0, 0.004)))
    rows = [*zip(work.arrival, work.prompt, work.output, strict=True)]
    servers = [Server(*each) for each in zip(places, rules, seconds, strict=True)]
    layers = draw.choice((None, 0, draw.randint(1, 9)))
    pools = servers[:prefills], servers[prefills:]
    oracle = Apart(rows, *pools, alone, host.per_request, layers).run()
    caches = [PagedKvCache(n, 1000, caching=False) for n in places]
    made = Made(rules, caches, seconds, prefills, pushes=layers is not None)
    of = apart(work, made, host, alone, prefills, layers=layers)
    assert [*of.handover.tokens] == [*work.prompt]
    near = lambda column: pytest.approx(list(column), rel=1e-9)  # noqa: E731
    assert oracle.prefilled == near(of.handover.prefilled)
    assert oracle.arrives == near(of.handover.arrives)
    assert oracle.first == near(of.records.first)
    assert oracle.finish == near(of.records.finish)
    assert all(cache.free == cache.size for cache in caches)


def fails_in_pools(seed: int) -> tuple[int, int]:
    """Instances of both pools fail, and decode instances come and go: each request ends once, or is
    counted; tokens are made once; caches are free. Returns requests that were computed again, and
    those that failed.
    """
    draw = random.Random(seed)
    work = drawn(draw)
    prefills, decodes = draw.randint(1, 3), draw.randint(1, 3)
    kinds = draw.choice((
        lambda: Vllm(max_num_batched_tokens=64, max_num_seqs=8, async_scheduling=True),
        lambda: SGLang(max_prefill_tokens=90, chunked_prefill_size=48, max_num_seqs=7),
        lambda: TensorRtLlm(max_num_batched_tokens=300, max_num_seqs=7),
    ))  # fmt: skip
    many = prefills + decodes
    last = work.arrival[-1] + 1
    failures = tuple(
        Failure(draw.uniform(0, last), draw.randrange(many)) for _ in range(draw.randint(0, 6))
    )
    scaling = None
    if draw.random() < 0.5:
        scaling = Scaling(min_instances=1, max_instances=decodes, interval=0.3, up=0.6, down=0.3)
    of = InstanceEvents(
        instances=decodes if scaling is None else draw.randint(1, decodes),
        failures=failures,
        on_failure=draw.choice(("requeue", "requeue", "fail")),
        start_up_time=draw.choice((None, 0.2, 1.0)),
        scaling=scaling,
    )
    size = draw.choice((4, 16))
    caches = [PagedKvCache(-(-300 // size) + draw.choice((0, 40)), size) for _ in range(many)]
    seconds = [LinearTimes(draw.uniform(0.01, 0.02), 1e-4, 1e-3)] * many
    made = Made(
        [kinds] * many, caches, seconds, prefills, isinstance(kinds(), SGLang | TensorRtLlm)
    )
    slow = draw.choice((1e-5, 1e-3))
    done = apart(work, made, HostTimes(), lambda n, last: 1e-3 + slow * n, prefills, of)
    ended = [k for k, at in enumerate(done.records.finish) if at == at]
    assert len(ended) + sum(done.refused.values()) == len(work), "requests end once"
    assert all(engine.kv_cache.free == engine.kv_cache.size for engine in done.engines)
    assert not any(e.running or e.waiting or e.arrivals or e.loading for e in done.engines)
    if len(ended) == len(work):
        gaps = sum(n * k for e in done.engines for _, _, n, k in e.step_log.gaps())
        assert gaps == sum(work.output) - len(work)
    hand = done.handover
    for request in ended:
        assert done.records.first[request] <= done.records.finish[request]
        if hand.arrives[request] == hand.arrives[request]:
            assert hand.prefilled[request] <= hand.begins[request] < hand.arrives[request]
            assert hand.bytes[request] > 0
    again = sum(hand.arrives[k] != hand.arrives[k] and work.output[k] > 0 for k in ended)
    return again, sum(done.refused.values())


def test_requests_of_failed_instances_of_pools_end_once_or_are_counted():
    again, failed = map(sum, zip(*map(fails_in_pools, range(25)), strict=True))
    assert again
    assert failed


@pytest.mark.slow
def test_failures_in_pools_on_many_workloads():
    for seed in range(100, 100 + times(150)):
        fails_in_pools(seed)


@dataclass
class Timed:
    """A scheduler that notes when it is asked, and where the other engine is that has requests."""

    of: object
    engines: list
    asked: list

    def schedule(self, engine):
        for other in self.engines:
            if other is not engine and other.running:
                self.asked.append((engine.now, other.now))
        return self.of.schedule(engine)


def test_engines_of_pools_that_share_experts_step_together():
    """Ranks of attention data parallelism that decode: no one decides within another step."""
    together = 0
    for seed in range(6):
        work = drawn(random.Random(seed), 30)
        notes, decode = [], []
        caches = [PagedKvCache(80, 16) for _ in range(4)]
        rules = [Vllm(max_num_batched_tokens=64, max_num_seqs=8)] * 4
        made = Made(rules, caches, [LinearTimes(0.01, 1e-4, 1e-3)] * 4, 2)

        def engine(k, *parts, made=made, decode=decode, notes=notes):
            one = made(k, *parts)
            if k >= 2:
                decode.append(one)
                one.scheduler = Timed(one.scheduler, decode, notes)
            if k == 3:
                LockstepGroup(decode)
            return one

        done = apart(work, Counted(engine, 4), HostTimes(), lambda n, last: 1e-3, 2)
        assert all(math.isfinite(at) for at in done.records.finish)
        assert all(cache.free == cache.size for cache in caches)
        assert all(mine == others for mine, others in notes)
        together += len(notes)
    assert together


def test_pools_equal_steps():
    for seed in range(12):
        equal_to_stepping(seed)


@pytest.mark.slow
def test_pools_equal_steps_on_many_workloads():
    for seed in range(100, 100 + times(60)):
        equal_to_stepping(seed)


SCHEDULERS = {
    "vllm": lambda: Vllm(max_num_batched_tokens=64, max_num_seqs=7),
    "sglang": lambda: SGLang(max_prefill_tokens=90, chunked_prefill_size=48, max_num_seqs=7),
    "tensorrt-llm": lambda: TensorRtLlm(max_num_batched_tokens=300, max_num_seqs=7),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_request_ends_once_and_gives_back_its_blocks(name):
    preempted = 0
    for seed in range(6):
        work = chains_in_blocks(
            sessions(
                15, Arrivals(rate=8), Lengths(isl=60, osl=40, range_ratio=0.2),
                Conversations(turns=3, think_time=0.1, system_prompt=40), seed,
            ),
            16,
        )  # fmt: skip
        ends = []
        for _ in range(2):
            caches = [PagedKvCache(30, 16) for _ in range(4)]
            seconds = [LinearTimes(0.01, 1e-4, 1e-3, 1e-5)] * 4
            made = Made([SCHEDULERS[name]] * 4, caches, seconds, 2, name != "vllm")
            of = apart(work, made, HostTimes(), lambda n, last: 1e-3 + 1e-5 * n, 2)
            assert all(cache.free == cache.size for cache in caches)
            assert all(at == at for at in of.records.finish)
            tokens = sum(n * k for e in of.engines for _, _, n, k in e.step_log.gaps())
            assert tokens == sum(work.output) - len(work)
            ends.append(of)
        assert ends[0].records.finish == ends[1].records.finish
        one = ends[0].records
        for i in range(len(work)):
            mine = ends[0].handover
            assert one.arrival[i] <= one.scheduled[i] < mine.prefilled[i]
            assert mine.prefilled[i] <= mine.begins[i] <= mine.arrives[i] <= one.first[i]
            assert one.first[i] <= one.finish[i]
        preempted += sum(one.preempted)
    assert preempted or name == "tensorrt-llm"


def test_two_transfers_share_a_link():
    """Two prompts end at once on two instances; the second cache waits for the one that decodes."""
    work = Workload("two", array("d", (0, 0)), array("i", (100, 100)), array("i", (3, 3)))
    caches = [PagedKvCache(100, 16) for _ in range(3)]
    made = Made([SCHEDULERS["sglang"]] * 3, caches, [LinearTimes(0.01)] * 3, 2, first_token=True)
    of = apart(work, made, HostTimes(), lambda n, last: 0.5, 2)
    assert [*of.handover.prefilled] == pytest.approx([0.03, 0.03])  # chunks of 48
    assert [*of.handover.arrives] == pytest.approx([0.53, 1.03])
    assert [*of.records.first] == pytest.approx([0.53, 1.03])
    assert [*of.records.finish] == pytest.approx([0.55, 1.05])


@pytest.mark.slow
def test_windows_are_sent_once_whatever_leaves_a_prefill_instance():
    """Layers with windows: as many bytes of chunks and of layers as of whole prompts."""
    sent = {}
    for how in ("prompt", "chunk", "layer"):
        served = sw.serve(
            model="gpt-oss-20b", layers=2, hardware="h100-sxm", rate=2, isl=3000, osl=4,
            num_requests=3, prefill_instances=1, kv_transfer=how, max_num_batched_tokens=1024,
        )  # fmt: skip
        handover = served.outcome.handover
        sent[how] = sum(handover.bytes)
        assert len(handover.pushes) == (0 if how == "prompt" else 9)
    assert sent["chunk"] == sent["layer"] == pytest.approx(sent["prompt"], abs=9)


def test_prompts_that_are_done_are_not_remembered_by_who_sends_them():
    work = drawn(random.Random(3))
    caches = [PagedKvCache(100, 16) for _ in range(2)]
    made = Made([SCHEDULERS["vllm"]] * 2, caches, [LinearTimes(0.01)] * 2, 1, pushes=True)
    of = apart(work, made, HostTimes(), lambda n, last: 1e-3, 1, layers=0)
    assert len({push.request for push in of.handover.pushes}) == len(work)
    assert not of.engines[0].sent_tokens
