"""Engines that go from change to change do what stepping does."""

import json
import random
from array import array
from copy import deepcopy as copy
from dataclasses import fields, replace
from functools import partial
from itertools import accumulate, pairwise

import pytest

import stagewright as sw
from helpers import cases, times
from serving_toys import LinearTimes, serve
from stagewright.cli.main import main
from stagewright.serving.batch import CacheRules
from stagewright.serving.engine import Engine
from stagewright.serving.kv_cache import PagedKvCache
from stagewright.serving.routers import BySession, KvAware, LeastLoaded, RoundRobin
from stagewright.serving.schedulers.sglang import SGLang
from stagewright.serving.schedulers.static import Static
from stagewright.serving.schedulers.tensorrt_llm import TensorRtLlm
from stagewright.serving.schedulers.vllm import Vllm
from stagewright.serving.simulation import chains_in_blocks
from stagewright.serving.speculative import Drafts
from stagewright.serving.workload import TOO_LONG, Workload, fold
from stagewright.serving.workloads.traces import NO_TOKENS
from stepping import Request, Stepping, together
from stepping_sglang import SGLangStepping
from stepping_tensorrt_llm import TensorRtStepping


def drawn(draw: random.Random):
    """Rules, a cache and a workload, in which there are queues, chunks, preemption and hits."""
    size = draw.choice((1, 4, 16))
    budget = draw.choice((24, 64, 512))
    rules = Vllm(
        max_num_batched_tokens=budget,
        max_num_seqs=draw.randint(1, 24),
        enable_chunked_prefill=draw.random() < 0.8,
        scheduler_reserve_full_isl=draw.random() < 0.6,
        long_prefill_token_threshold=draw.choice((0, 0, 0, 10)),
        async_scheduling=draw.random() < 0.5,
    )
    most = budget - 1 if not rules.enable_chunked_prefill else draw.choice((40, 200))
    count = draw.randint(1, 60)
    gaps = [draw.choice((0, draw.expovariate(draw.choice((1, 10))))) for _ in range(count)]
    shared = draw.random() < 0.6 and not rules.long_prefill_token_threshold
    prompts, outputs, chains = [], [], []
    tree: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for _ in range(count):
        keys, ends = draw.choice(tree)
        more = draw.randint(0, 3)
        for _ in range(more):
            end = (ends[-1] if ends else 0) + draw.randint(1, 30)
            if end < most:
                keys, ends = (*keys, len(tree) * 1000 + len(keys)), (*ends, end)
        tree.append((keys, ends))
        prompt = draw.randint(ends[-1] if ends else 1, most)
        prompts.append(prompt + (prompt % size == 0 and shared))
        outputs.append(draw.randint(1, 60))
        chains.append((keys, ends))
    longest = max(p + o for p, o in zip(prompts, outputs, strict=True))
    blocks = -(-longest // size) + draw.choice((0, 3, 100, 1000))
    if not rules.enable_chunked_prefill:  # what was preempted must fit into a step again
        blocks = 10_000
    work = Workload(
        "random",
        array("d", accumulate(gaps)),
        array("i", prompts),
        array("i", outputs),
        (fold(chains) if draw.random() < 0.5 else chains) if shared else None,
    )
    seconds = LinearTimes(draw.uniform(0.01, 0.02), 1e-4, 1e-3, draw.choice((0.0, 1e-5)))
    return rules, seconds, PagedKvCache(blocks, size, draw.random() < 0.8), work


def test_changes_equal_steps():
    for seed in range(8):
        equal_to_stepping(seed)


@pytest.mark.slow
def test_changes_equal_steps_on_many_workloads():
    for seed in range(100, 100 + times(40)):
        equal_to_stepping(seed)


def equal_to_stepping(seed: int):
    rules, seconds, cache, work = drawn(random.Random(seed))
    count = seed % 4 if seed % 4 > 1 else 1  # of engines, which step together
    drafts = None
    if seed % 3 == 1:
        drafts = Drafts.of_rate(1 + seed % 5, 0.6, slots=1 + (1 + seed % 2) * (1 + seed % 5))
        cache.size = cache.free = cache.size + drafts.slots
    requests = [
        Request(i, work.arrival[i], work.prompt[i], work.output[i],
                ((), ()) if work.chains is None else work.chains[i])
        for i in range(len(work))
    ]  # fmt: skip
    oracles = [
        Stepping(
            requests[nth::count],
            rules,
            seconds,
            cache.size,
            cache.block_size,
            cache.caching,
            drafts,
        )
        for nth in range(count)
    ]
    together(oracles)

    def engine(workload, records):
        made = Engine(workload, records, copy(cache), rules, seconds, 0.37)
        made.drafts = drafts
        return made

    of = chains_in_blocks(work, cache.block_size)
    done = serve(of, engine, count, RoundRobin(), together=count)
    alike(requests, done.records)
    for ran, oracle, mine in zip(
        done.engines, oracles, (requests[nth::count] for nth in range(count)), strict=True
    ):
        observed_alike(ran, oracle, mine)


def alike(requests: list[Request], records):
    near = lambda column: pytest.approx(list(column), rel=1e-9)  # noqa: E731
    assert [r.preempted for r in requests] == list(records.preempted)
    assert [r.cached for r in requests] == list(records.cached)
    assert [r.scheduled for r in requests] == near(records.scheduled)
    assert [r.tokens_at[0] for r in requests] == near(records.first)
    assert [r.tokens_at[-1] for r in requests] == near(records.finish)


def observed_alike(ran: Engine, oracle: Stepping, requests: list[Request]):
    assert ran.kv_cache.free == ran.kv_cache.size
    gaps = sorted(b - a for r in requests for a, b in pairwise(r.tokens_at))
    ours = []
    for first, last, steps, n in ran.step_log.gaps():
        for step in range(int(steps)):
            ours += [first + (last - first) * step / max(1, steps - 1)] * int(n)
    assert gaps == pytest.approx(sorted(ours), rel=1e-9)
    first, last, steps, _ = ran.step_log.steps().T
    own = [step[1] - step[0] for step in oracle.steps if step[3]]  # not those waited along with
    assert steps.sum() == len(own)
    assert ((first + last) / 2 * steps).sum() == pytest.approx(sum(own), rel=1e-9)
    for at, waiting, running, blocks in zip(*ran.samples[:4], strict=True):
        found = [step for step in oracle.steps if step[0] < at <= step[1]]
        if found:
            late = sum(found[0][5] < r.arrival <= at for r in requests)
            assert (waiting, running, blocks) == (found[0][2] + late, *found[0][3:5])
        else:
            assert (waiting, running, blocks) == (0, 0, 0)


@pytest.mark.parametrize("seed", range(12))
def test_engines_that_run_ahead_of_others_do_what_they_do_in_one_order(seed: int):
    """Requests that wait for no other one, which lets engines run ahead, or for none of many."""
    rules, seconds, cache, work = drawn(random.Random(seed))
    found = []
    for of in (work, replace(work, predecessor=array("i", [-1] * len(work)))):
        done = serve(
            chains_in_blocks(of, cache.block_size),
            lambda w, r: Engine(w, r, copy(cache), rules, seconds, 0.37),
            1 + seed % 3,
            (RoundRobin, LeastLoaded, KvAware, BySession)[seed % 4](),
        )
        columns = [[*getattr(done.records, each.name)] for each in fields(done.records)]
        for engine in done.engines:
            columns += map(list, engine.samples[:4])
            columns.append(engine.step_log.gaps().ravel().tolist())
        found.append(columns)
    for ahead, in_order in zip(*found, strict=True):
        assert ahead == pytest.approx(in_order, rel=1e-12)


def drawn_sglang(draw: random.Random):
    return SGLang(
        max_prefill_tokens=draw.choice((40, 90, 500)),
        chunked_prefill_size=draw.choice((32, 48, 300)),
        max_num_seqs=draw.randint(1, 16),
        schedule_conservativeness=draw.choice((0.1, 0.3, 1.0, 2.0)),
        schedule_policy=draw.choice(("fcfs", "lpm")),
        enable_mixed_chunk=draw.random() < 0.4,
        ignore_eos=draw.random() < 0.3,
        async_scheduling=draw.random() < 0.5,
        scheduler_recv_interval=draw.choice((1, 1, 2, 5, 30)),
    )


def drawn_tensorrt(draw: random.Random):
    chunked = draw.random() < 0.6
    return TensorRtLlm(
        max_num_batched_tokens=draw.choice((40, 90, 300)) if chunked else 600,
        max_num_seqs=draw.randint(1, 16),
        enable_chunked_prefill=chunked,
        capacity_scheduler_policy=draw.choice(("guaranteed_no_evict", "max_utilization")),
        async_scheduling=draw.random() < 0.5,
        batch_wait_timeout_iters=draw.choice((0, 1, 4, 20)),
        batch_wait_max_tokens_ratio=draw.choice((0.0, 0.2, 0.5, 1.0)),
    )


ORACLES = {"sglang": (drawn_sglang, SGLangStepping), "trt": (drawn_tensorrt, TensorRtStepping)}


@pytest.mark.parametrize("name", ORACLES)
def test_rules_of_other_engines_equal_steps(name: str):
    paused = sum(rules_equal_stepping(name, seed) for seed in range(8))
    assert paused


@pytest.mark.slow
@pytest.mark.parametrize("name", ORACLES)
def test_rules_of_other_engines_equal_steps_on_many_workloads(name: str):
    for seed in range(100, 100 + times(40)):
        rules_equal_stepping(name, seed)


def rules_equal_stepping(name: str, seed: int) -> int:
    """One engine with drawn rules, little memory and hits; returns how often requests paused."""
    draw = random.Random(seed)
    make_rules, make_oracle = ORACLES[name]
    rules = make_rules(draw)
    _, seconds, cache, work = drawn(draw)
    size = cache.block_size
    if size == 1:  # a segment counts as held until the last who holds any of it leaves: with blocks
        work = replace(work, chains=None)  # of a token that is seen in one of 400 workloads
    longest = max(p + o for p, o in zip(work.prompt, work.output, strict=True))
    cache = PagedKvCache(
        -(-longest // size) + 2 + draw.choice((0, 3, 30, 1000)), size, draw.random() < 0.8
    )
    requests = [
        Request(i, work.arrival[i], work.prompt[i], work.output[i],
                ((), ()) if work.chains is None else work.chains[i])
        for i in range(len(work))
    ]  # fmt: skip
    oracle = make_oracle(requests, rules, seconds, cache.size, size, cache.caching).run()
    made = lambda work, records: Engine(work, records, cache, copy(rules), seconds, 0.37)  # noqa: E731
    done = serve(chains_in_blocks(work, size), made, 1, RoundRobin())
    alike(requests, done.records)
    observed_alike(done.engines[0], oracle, requests)
    return sum(r.preempted for r in requests)


class OneStep:
    """A scheduler that is asked anew for each step."""

    def __init__(self, of):
        self.of = of
        self.async_scheduling = getattr(of, "async_scheduling", False)
        self.cache_rules = getattr(of, "cache_rules", CacheRules())

    def schedule(self, engine):
        return self.of.schedule(engine)._replace(max_steps=1)


SCHEDULERS = {
    "sglang": lambda: SGLang(max_prefill_tokens=90, chunked_prefill_size=48, max_num_seqs=7),
    "sglang-mixed": lambda: SGLang(
        max_prefill_tokens=90,
        chunked_prefill_size=48,
        max_num_seqs=7,
        enable_mixed_chunk=True,
        schedule_policy="lpm",
    ),
    "max-utilization": lambda: TensorRtLlm(
        max_num_batched_tokens=300, max_num_seqs=7, capacity_scheduler_policy="max_utilization"
    ),
    "sglang-seldom": lambda: SGLang(
        max_prefill_tokens=90,
        chunked_prefill_size=48,
        max_num_seqs=7,
        scheduler_recv_interval=5,
        async_scheduling=True,
    ),
    "tensorrt-llm": lambda: TensorRtLlm(max_num_batched_tokens=300, max_num_seqs=7),
    "tensorrt-llm-overlap": lambda: TensorRtLlm(
        max_num_batched_tokens=300, max_num_seqs=7, async_scheduling=True
    ),
    "tensorrt-llm-waits": lambda: TensorRtLlm(
        max_num_batched_tokens=300,
        max_num_seqs=7,
        batch_wait_timeout_iters=9,
        batch_wait_max_tokens_ratio=0.8,
    ),
    "static": lambda: Static(max_num_seqs=5),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_are_asked_only_where_they_would_change_their_minds(name: str):
    preempted = 0
    for seed in range(15):
        _, seconds, drawn_cache, work = drawn(random.Random(seed))
        ends = []
        for scheduler in (SCHEDULERS[name](), OneStep(SCHEDULERS[name]())):
            roomy = 1 if name == "max-utilization" else 2
            cache = PagedKvCache(
                drawn_cache.size * roomy, drawn_cache.block_size, drawn_cache.caching
            )
            made = partial(Engine, kv_cache=cache, scheduler=scheduler, times=seconds)
            ends.append(serve(chains_in_blocks(work, cache.block_size), made, 1, RoundRobin()))
            assert cache.free == cache.size
        fast, slow = (done.records for done in ends)
        assert all(at == at for at in fast.finish)
        assert list(fast.first) == pytest.approx(list(slow.first), rel=1e-9)
        assert list(fast.finish) == pytest.approx(list(slow.finish), rel=1e-9)
        assert list(fast.preempted) == list(slow.preempted)
        preempted += sum(fast.preempted)
    assert (preempted > 0) == (
        name not in ("static", *(k for k in SCHEDULERS if k.startswith("tensorrt-llm")))
    )


def test_drafts_that_are_right_shorten_decode():
    drafts = Drafts.of_length(3, 2.5, slots=4)
    made = [
        drafts.tokens_of_step(request, got) for request in range(500) for got in range(1, 40, 2)
    ]
    assert sum(made) / len(made) == pytest.approx(2.5, abs=0.02)
    assert set(made) == {2, 3}
    assert Drafts.of_rate(3, 0.5, slots=4).length == 1 + 0.5 + 0.25 + 0.125
    one = sw_serve(rate=1, isl=64, osl=400, num_requests=1)
    fast = sw_serve(
        rate=1, isl=64, osl=400, num_requests=1, num_speculative_tokens=3, acceptance_length=4
    )
    steps = [engine.decode_step for engine in (one.outcome.engines[0], fast.outcome.engines[0])]
    assert steps == [399, 100]


@pytest.mark.parametrize("router", ["round_robin", "least_loaded"])
@pytest.mark.parametrize("told", [1, 3])
def test_what_is_known_when_somebody_stops_it(router: str, told: int):
    heard: list[tuple[int, int]] = []

    def stops(done: int, of: int):
        heard.append((done, of))
        if len(heard) == told:
            raise KeyboardInterrupt

    found = sw_serve(
        rate=100, isl=64, osl=16, num_requests=3000, router=router, instances=2, progress=stops
    )
    assert found.outcome.stopped
    assert found.summary.requests + found.summary.unfinished == 3000
    assert found.summary.unfinished > 0
    assert heard[-1][1] == 3000
    assert str(found.table("latencies"))
    assert json.dumps(found.to_dict())


def test_a_short_max_model_len_cuts_outputs():
    found = sw_serve(rate=1, isl=10, osl=10, num_requests=3, max_model_len=18)
    assert (found.summary.shortened, found.summary.output_rate > 0) == (3, True)


def sw_serve(**settings):
    return sw.serve("llama3.1-8b", "h100-sxm", layers=2, **settings)


# ---- the command ---------------------------------------------------------------------------------


MODEL = ("llama3.1-8b", "--hardware", "h100-sxm", "--layers", "2")


def code(*words: str):
    with pytest.raises(SystemExit) as end:
        main(["serve", *MODEL, *words])
    return end.value.code


def printed(capfd, *words: str) -> str:
    assert not code(*words)
    return capfd.readouterr().out


def test_the_command(capfd, tmp_path):
    words = ("--rate", "50", "--isl", "256", "--osl", "16", "--num-requests", "40")
    text = printed(capfd, *words, "--instances", "2", "--ttft", "1000")
    assert "40 requests in" in text
    assert "goodput" in text
    files = [f"--out={tmp_path / name}" for name in ("a.csv", "b.json")]
    found = json.loads(printed(capfd, *words, "--json", *files))
    assert len(json.loads((tmp_path / "b.json").read_text())["rows"]) == 40
    assert found["requests"] == 40
    assert found["ttft"]["p99"] >= found["ttft"]["p50"] > 0
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 41
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival,prompt,output\n0,200000,5\n1,100,5\n2,0,5\n")
    assert not code("--requests", str(trace), "--json")
    out, err = capfd.readouterr()
    assert json.loads(out)["rejected"] == {TOO_LONG: 1, NO_TOKENS: 1}
    assert "1 request rejected" in err


def test_a_paused_request_that_never_runs_again_is_told(capfd):
    words = ("--scheduler", "tensorrt-llm", "--capacity-scheduler-policy", "max_utilization")
    words += ("--num-gpu-blocks", "24", "--max-num-batched-tokens", "128")
    words += ("--no-enable-prefix-caching", "--rate", "100", "--num-requests", "3")
    assert code(*words, "--isl", "100", "--osl", "200") == 0
    assert "again only with --enable-chunked-prefill" in capfd.readouterr().err
    assert code(*words, "--isl", "100", "--osl", "200", "--enable-chunked-prefill") == 0
    assert "never done" not in capfd.readouterr().err


ONE = ("--rate", "1", "--isl", "1", "--osl", "1")
DRAFTS = (*ONE, "--num-speculative-tokens", "2", "--acceptance-length", "2")


@cases
def test_bad_options_are_one_line(capfd, words, says):
    assert code(*words) == 2
    out, err = capfd.readouterr()
    assert not out
    assert says in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("apart", [(), ("--prefill-instances", "1")])
def test_a_cache_smaller_than_the_windows_of_a_request_is_refused(capfd, apart):
    asked = ("--rate", "1", "--isl", "9", "--osl", "2", "--num-requests", "3", *apart)
    words = ("serve", "gemma2-9b", "--hardware", "h100-sxm", *asked, "--num-gpu-blocks")
    with pytest.raises(SystemExit, match="2"):
        main([*words, "60"])
    assert "has 60 blocks of 16 tokens, wanted at least 258: " in capfd.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main([*words, "258"])
