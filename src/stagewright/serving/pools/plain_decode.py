"""Engines that decode what was prefilled elsewhere, where nothing is out of the ordinary.

They do what `DecodeEngine` does with `Pulls` of vLLM's first-come rules, and note nothing but when
tokens come: requests have nothing in common, and none is preempted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

from stagewright.serving.engines.decisions import PlainRules
from stagewright.serving.engines.plans import OfAll, PlannedSteps, plan_of_all
from stagewright.serving.engines.times import BatchTimes, series, terms_within
from stagewright.serving.requests import Records, Workload
from stagewright.serving.service import Service


class Unusual(Exception):
    """Something happens that only one order of all events knows."""


class InStep:
    """Replicas that step together, or a single one (`engines.lockstep`, `Engine`)."""

    __slots__ = ("ahead", "end", "first", "now", "replicas")

    def __init__(self, replicas: Sequence[PlainDecoder], first: int) -> None:
        """Replicas with nothing to do, of which the `first` has this number among all."""
        self.replicas, self.first, self.ahead = replicas, first, replicas[0].ahead
        self.now: float = 0.0
        self.end: float = math.inf

    def arrives(self, replica: PlainDecoder, at: float) -> None:
        """Something has come into the inbox of a replica: a run of steps ends with this one."""
        steps, first, grows = max(each.plan for each in self.replicas)
        if not steps:
            self.end = min(self.end, at)
        elif steps > 1 and len(replica.inbox) == 1 and (replica.open or not replica.plan[0]):
            gap = at - self.now
            fewer = 1 if gap <= 0.0 else terms_within(first, grows, gap, steps)
            if gap > 0.0 and self.ahead and fewer < steps:
                fewer += 1
            if fewer < steps:
                self._go(fewer, first, grows)

    def advance(self) -> None:
        """Carry out what ends now, and decide what is next."""
        replicas, start, end = self.replicas, self.now, self.end
        steps, first, grows = max(each.plan for each in replicas)
        self.now = seen = end
        if steps and self.ahead:
            seen = start + series(first, grows, steps - 1) if steps > 1 else start
        for each in replicas:
            if each.plan[0]:
                each.finish(end, steps)
        for each in replicas:
            each.decide(end, seen)
        if len(replicas) == 1:
            (one,) = replicas
            steps, first, grows = one.plan
            if one.chunks:
                self.end = end + first
            elif steps:
                if steps > 1 and one.open and one.inbox:
                    steps = 1
                    one.plan = (steps, first, grows)
                self.end = end + series(first, grows, steps)
            else:
                self.end = end if one.inbox else math.inf
            return
        for each in replicas:
            if each.chunks:
                each.plan = (1, (end + each.plan[1]) - end, 0.0)
        active = [
            PlannedSteps(each.plan, tokens, tokens)
            for each in replicas
            if each.plan[0]
            for tokens in (each.decoders + len(each.chunks),)
        ]
        if not active:
            self.end = end if any(each.inbox for each in replicas) else math.inf
            return
        steps, first, grows = plan_of_all(active, replicas[0].of_all, len(replicas))
        if steps > 1 and any(each.inbox and (each.open or not each.plan[0]) for each in replicas):
            steps = 1
        self._go(steps, first, grows)

    def _go(self, steps: int, first: float, grows: float) -> None:
        self.end = self.now + series(first, grows, steps)
        for each in self.replicas:
            if each.plan[0]:
                each.plan = (steps, first, grows)


class PlainDecoder:
    """An engine that decodes, as `DecodeEngine` with `Pulls` of vLLM's plain rules."""

    __slots__ = (
        *(
            "ahead",
            "chunks",
            "completed",
            "context",
            "decoders",
            "free",
            "growth",
            "heap",
            "inbox",
        ),
        *("line", "loading", "of", "of_all", "open", "per_request", "plan", "ready", "records"),
        *("rules", "size", "stands", "step", "step_seconds", "waiting", "wanted"),
    )

    def __init__(self, service: Service, of: Workload, records: Records) -> None:
        """With nothing to do."""
        cache = service.instance.cache
        times: BatchTimes = service.instance.times.of_replica(service.host)
        scheduler = service.scheduler_for(of)
        rules: PlainRules | None = getattr(scheduler, "plain", None)
        assert rules is not None
        self.ahead = bool(getattr(scheduler, "async_scheduling", False))
        self.rules, self.of, self.records = rules, of, records
        self.line, self.step_seconds = times.line, times.step
        self.of_all: OfAll | None = getattr(times, "plans_of_all", None)
        self.size, self.per_request = cache.block_size, cache.blocks_per_request
        self.free: int = service.blocks
        self.growth = [0] * self.size
        self.heap: list[tuple[int, int]] = []
        """Decoding requests by the steps that give their last tokens."""
        self.inbox: deque[int] = deque()
        """What has come and no decision has seen: requests, and ~ requests whose caches are there.
        """
        self.waiting: deque[int] = deque()
        self.ready: list[int] = []
        self.wanted: list[int] = []
        self.chunks: list[int] = []
        self.loading: int = 0
        self.completed: int = 0
        self.step: int = 0
        self.context: int = 0
        self.decoders: int = 0
        self.open: bool = True
        self.stands: bool = False
        self.plan: tuple[int, float, float] = (0, 0.0, 0.0)
        """Steps under way, seconds of the first, and by how much each one is longer."""

    def finish(self, end: float, steps: int) -> None:
        """So many steps have ended."""
        heap, growth, size, of = self.heap, self.growth, self.size, self.of
        finish, n = self.records.finish, self.decoders
        if n:
            step = self.step
            if steps > 1:
                more = steps - 1
                if more >= size:
                    self.free -= more // size * n
                at = (step + 1) % size
                upto = at + more % size
                self.free -= sum(growth[at:upto])
                if upto > size:
                    self.free -= sum(growth[: upto - size])
            self.step = step = step + steps
            self.context += n * steps
            while heap and heap[0][0] <= step:
                _, request = heappop(heap)
                done = of.prompt[request] + of.output[request] - 1
                self.context -= done
                growth[(step - done) % size] -= 1
                self.free += self.per_request - (-done // size)
                finish[request] = end
                self.completed += 1
        for request in self.chunks:
            self.records.first[request] = end
            tokens, more = of.prompt[request], of.output[request] - 1
            if more:
                heappush(heap, (self.step + more, request))
                self.context += tokens
                growth[(self.step - tokens) % size] += 1
            else:
                self.free += self.per_request - (-tokens // size)
                finish[request] = end
                self.completed += 1

    def decide(self, now: float, seen: float) -> None:
        """Decide on the next steps, of which the plan has the length."""
        inbox, waiting, ready, reached = self.inbox, self.waiting, self.ready, self.records.reached
        n, need = len(self.heap), self.growth[self.step % self.size]
        came = False
        while inbox:
            request = inbox[0]
            if reached[request if request >= 0 else ~request] > seen:
                break
            inbox.popleft()
            came = True
            if request >= 0:
                waiting.append(request)
            else:
                ready.append(~request)
        self.chunks = []
        self.decoders = n
        if not (n or waiting or ready):
            self.plan = (0, 0.0, 0.0)
            return
        if came or not self.stands or waiting or ready or not n:
            seats, there = self.rules.seats, len(ready)
            while waiting and n + there < seats:
                blocks = self.per_request - (-self.of.prompt[waiting[0]] // self.size)
                if blocks > self.free - need:
                    break
                self.free -= blocks
                self.loading += 1
                self.wanted.append(waiting.popleft())
            room = self.rules.budget - n
            if room < 0:
                raise Unusual
            if there:
                room = min(room, seats - n)
                self.chunks = ready[:room]
                del ready[:room]
            self.open = n + len(self.chunks) < seats
            self.stands = self.open and not there
        if need > self.free:
            raise Unusual
        self.free -= need
        if self.chunks:
            own = n + self.context
            prompts = sum(map(self.of.prompt.__getitem__, self.chunks))
            many = n + len(self.chunks)
            places = own + prompts
            seconds = self.step_seconds(many, places, places, many, n, own)
            self.plan = (1, seconds, 0.0)
        elif n:
            self._run(n)
        else:
            self.plan = (0, 0.0, 0.0)

    def _run(self, n: int) -> None:
        """Steps that only decode, up to the first behind which a request ends."""
        steps, free, size = self.heap[0][0] - self.step, self.free, self.size
        if n * (steps // size + 1) > free:
            for few in range(1, steps):
                free -= self.growth[(self.step + few) % size]
                if free < 0:
                    steps = few
                    break
        first, grows, alike = self.line(n, self.context + n)
        self.plan = (min(steps, alike), first, grows)
