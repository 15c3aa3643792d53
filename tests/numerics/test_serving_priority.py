"""Priorities as vLLM's scheduler has them, beside stepping; classes with limits of their own."""

import random
from array import array
from dataclasses import replace
from functools import partial
from itertools import accumulate

import pytest

from helpers import cases
from serving_toys import LinearTimes, serve
from stagewright.api.workloads import workload_of
from stagewright.errors import UserError
from stagewright.run.sections.serving import WorkloadSection
from stagewright.serving.engine import Engine
from stagewright.serving.kv_cache import PagedKvCache
from stagewright.serving.metrics import Slo, summarize
from stagewright.serving.routers import RoundRobin
from stagewright.serving.schedulers.vllm import Vllm
from stagewright.serving.workload import RequestClass, Workload, with_classes
from stepping import Request, Stepping


class ByPriority(Stepping):
    """Stepping, where the largest (priority, arrival) gives way and the least is taken first."""

    def rank(self, request):
        return self.rules.priority[request.number], request.arrival, request.number

    def schedule(self):
        batch = self.step()
        return batch or (self.step() if self.running else batch)  # an empty step takes no time

    def step(self):
        rules, budget = self.rules, self.rules.max_num_batched_tokens
        batch, gone = [], False
        order = [*self.running]
        for request in order:
            if request not in self.running or budget == 0:
                continue
            n = min(request.tokens - request.computed,
                    rules.long_prefill_token_threshold or budget, budget)  # fmt: skip
            while not self.allocate(request, n):
                victim = max(self.running, key=self.rank)
                self.running.remove(victim)
                budget += sum(k for r, k in batch if r is victim)
                batch = [(r, k) for r, k in batch if r is not victim]
                self.pool.free(victim.blocks)
                victim.blocks, victim.computed, victim.decodes, gone = [], 0, False, True
                victim.preempted += 1
                self.waiting.append(victim)
                if victim is request:
                    break
            if request not in self.running:
                break
            batch.append((request, n))
            budget -= n
        self.waiting.sort(key=self.rank)
        if gone:
            return batch
        running, self.running = self.running, []  # the rest of the rules: who waits
        limit, rules = rules.max_num_seqs, self.rules
        self.rules = replace(rules, max_num_seqs=limit - len(running),
                             max_num_batched_tokens=budget)  # fmt: skip
        batch += super().schedule() if limit > len(running) and budget else []
        self.rules, self.running = rules, running + self.running
        return batch


def drawn(draw):
    """Rules, step times, a cache that is too small at times, requests of up to three classes."""
    size = draw.choice((1, 4, 16))
    rules = Vllm(
        max_num_batched_tokens=draw.choice((24, 64, 512)),
        max_num_seqs=draw.randint(1, 24),
        long_prefill_token_threshold=draw.choice((0, 0, 10)),
        scheduler_reserve_full_isl=draw.random() < 0.6,
        async_scheduling=draw.random() < 0.5,
    )
    count = draw.randint(1, 60)
    gaps = [draw.choice((0, draw.expovariate(draw.choice((1, 10))))) for _ in range(count)]
    prompts = array("i", (draw.randint(1, 150) for _ in gaps))
    outputs = array("i", (draw.randint(1, 60) for _ in gaps))
    most = max(p + o for p, o in zip(prompts, outputs, strict=True))
    work = Workload("random", array("d", accumulate(gaps)), prompts, outputs)
    levels = tuple(RequestClass(name=str(n), priority=n) for n in range(draw.randint(1, 3)))
    cache = PagedKvCache(-(-most // size) + draw.choice((0, 3, 100)), size, draw.random() < 0.5)
    seconds = LinearTimes(draw.uniform(0.01, 0.02), 1e-4, 1e-3, draw.choice((0.0, 1e-5)))
    return rules, seconds, cache, with_classes(work, levels, 0)


def equal_to_stepping(seed: int) -> int:
    rules, seconds, cache, work = drawn(random.Random(seed))
    rules = replace(rules, priority=work.class_of)
    rows = zip(work.arrival, work.prompt, work.output, strict=True)
    requests = [Request(number, *row) for number, row in enumerate(rows)]
    ByPriority(requests, rules, seconds, cache.size, cache.block_size, cache.caching).run()

    def made(of, records):
        return Engine(of, records, cache, rules, seconds)

    records = serve(work, made, 1, RoundRobin()).records
    near = lambda column: pytest.approx(list(column), rel=1e-9)  # noqa: E731
    assert [r.preempted for r in requests] == list(records.preempted)
    assert [r.tokens_at[0] for r in requests] == near(records.first)
    assert [r.tokens_at[-1] for r in requests] == near(records.finish)
    assert cache.free == cache.size
    return sum(records.preempted)


def test_priorities_equal_steps():
    assert sum(map(equal_to_stepping, range(20))) > 20


def test_classes_have_limits_of_their_own():
    when, some = array("d", [0.0] * 40), array("i", [50]) * 40
    work = Workload("burst", when, some, some)
    classes = (RequestClass(name="chat", priority=0, ttft=0.5),
               RequestClass(name="batch", priority=1))  # fmt: skip
    work = with_classes(work, classes, 1)
    kept = {}
    for name, rules in (("priority", Vllm(max_num_seqs=4, priority=work.class_of)),
                        ("fcfs", Vllm(max_num_seqs=4))):  # fmt: skip
        made = partial(
            Engine, kv_cache=PagedKvCache(99, 16), scheduler=rules, times=LinearTimes(0.001, 1e-4)
        )
        found = summarize(serve(work, made, 1, RoundRobin()), Slo(), 1, {})
        assert sum(each.requests for each in found.classes.values()) == 40
        assert found.classes["batch"].good == 1
        chat = found.classes["chat"]
        assert found.good * 40 == pytest.approx(40 - chat.requests * (1 - chat.good))
        kept[name] = chat.ttft.p99
    assert kept["priority"] < kept["fcfs"]


@cases
def test_bad_classes_are_one_line(tmp_path, text, says):
    path = tmp_path / "classes.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        workload_of(WorkloadSection(rate=1.0, isl=1, osl=1, classes=str(path)))
    assert says in str(error.value)
