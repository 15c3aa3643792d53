"""Operation of instances during a run: full queues, failures, autoscaling.

Requests of a failed instance go elsewhere, or fail. With a failed prefill instance the caches are
lost that no engine has read: their requests are recomputed where they decode, or fail (vLLM's
`kv_load_failure_policy`, recompute or fail, vllm-project/vllm@00024d31
`vllm/config/kv_transfer.py`). Requests of a failed decode instance go to another one; caches that
had not arrived are sent there, others are computed there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from stagewright.serving.disaggregation import PrefillEngine, RemoteKvEngine
from stagewright.serving.engine import Engine, Scheduler
from stagewright.serving.events import BATCH_END, OTHER, EventQueue, Handler
from stagewright.serving.workload import Records, Workload

QUEUE_FULL = "the queue of its instance was full"
FAILED = "its instance failed"
NONE_SERVES = "all instances had failed"


class Failure(NamedTuple):
    """Failure of an instance."""

    seconds: float
    """Time since the run began."""
    instance: int


class UpTime(NamedTuple):
    """Time span in which an engine was up (s since the run began)."""

    engine: int
    begins: float
    ends: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Autoscaling of instances by load, one at a time.

    The rule of Dynamo's load-based planner (docs.nvidia.com/dynamo/archive/0.3.1/architecture/
    planner.html): at every adjustment the mean use of the instances' KV caches is compared with two
    thresholds (0.9 and 0.5 there), and one instance is started or leaves; while one starts, nothing
    is adjusted. With fewer than `min_instances` one is started whatever the load. An instance
    that leaves gets no new requests and serves those that it has.
    """

    min_instances: int
    max_instances: int
    interval: float
    up: float
    down: float

    def change(self, engines: Sequence[Engine], instances: int) -> int:
        """Return 1, -1 or 0: how the number of serving instances should change."""
        if instances < self.min_instances:
            return 1
        used = sum(1 - e.kv_cache.free / e.kv_cache.size for e in engines) / max(1, len(engines))
        if used > self.up and instances < self.max_instances:
            return 1
        return -1 if used < self.down and instances > self.min_instances else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceEvents:
    """Limits of queues, failures and scaling; by default none."""

    instances: int
    """Instances that serve from the beginning."""
    max_queued_requests: int | None = None
    """Queue length from which on an instance refuses requests (SGLang's option)."""
    failures: tuple[Failure, ...] = ()
    on_failure: Literal["requeue", "fail"] = "requeue"
    start_up_time: float | None = None
    """Seconds until a new instance serves; None: a failed one does not start again."""
    scaling: Scaling | None = None


class Requests(Protocol):
    """Simulation, as far as operation needs it."""

    workload: Workload
    records: Records
    engines: Sequence[Engine]
    events: EventQueue
    finished: int
    instances: list[tuple[float, int]]

    def post_event(self, engine: int) -> None:
        """Add the next event of an engine, which may have changed."""
        ...

    def route_prompt(self, at: float, request: int) -> None:
        """Choose the engine that computes a prompt."""
        ...

    def route_decode(self, at: float, request: int) -> None:
        """Choose the engine that decodes a request."""
        ...

    def cancel_transfer(self, request: int) -> None:
        """Cancel the transfer of a request's cache, if one is in flight."""
        ...

    def refuse(self, at: float, request: int, reason: str) -> None:
        """Give up a request."""
        ...


class Operator:
    """Starts, fails and stops instances; an instance is one engine here."""

    def __init__(
        self,
        events: InstanceEvents,
        numbers: Sequence[int],
        scaled: Sequence[int],
        simulation: Requests,
    ) -> None:
        """All engines `numbers` serve from the beginning, except idle ones of `scaled`."""
        self._events, self._simulation = events, simulation
        self._scaled = frozenset(scaled)
        self._idle = [*scaled[events.instances :]]  # may be started
        self._serving = {*numbers}.difference(self._idle)
        self._num_starting = 0
        self._failed: dict[int, Scheduler] = {}
        self._restarting: set[int] = set()  # failed ones that start when their step is over
        self._held: list[tuple[int, Handler]] = []  # requests that no instance can take
        self._output: dict[int, tuple[int, float]] = {}  # of evicted requests: tokens, last time
        self._lost_kv: set[int] = set()  # requests to decode without a cache anywhere
        self._up_since = dict.fromkeys(self._serving, 0.0)
        self._leaving: set[int] = set()
        self._up_times: list[UpTime] = []

    def begin(self) -> None:
        """Add the events of failures, and the first adjustment."""
        simulation = self._simulation
        simulation.instances.append((0.0, len(self._serving)))
        for failure in self._events.failures:
            simulation.events.add(failure.seconds, OTHER, failure.instance, self._fail)
        if self._events.scaling is not None:
            simulation.events.add(self._events.scaling.interval, OTHER, 0, self._adjust)

    @property
    def recomputes(self) -> bool:
        """True if requests that lose their cache are computed again."""
        return self._events.on_failure == "requeue"

    def up_times(self) -> list[UpTime]:
        """Times in which engines were up: from their start, start-up included, until they left."""
        last = max(
            (at for at in self._simulation.records.finish if not math.isnan(at)), default=0.0
        )
        still = (UpTime(n, since, max(since, last)) for n, since in self._up_since.items())
        return [*self._up_times, *still]

    def serving(self, numbers: Sequence[int]) -> Sequence[int]:
        """Engines among `numbers` that take requests."""
        return [number for number in numbers if number in self._serving]

    def hold(self, at: float, request: int, retry: Handler, fitting: Sequence[int]) -> None:
        """Hold a request until an instance serves; refuse it if none of `fitting` will."""
        may_start = self._events.scaling is not None and not set(fitting).isdisjoint(self._idle)
        if self._num_starting or may_start or self._events.start_up_time is not None:
            self._held.append((request, retry))
        else:
            self._simulation.refuse(at, request, NONE_SERVES)

    def has_failed(self, engine: int) -> bool:
        """True if an engine has failed."""
        return engine in self._failed

    def queue_is_full(self, engine: Engine) -> bool:
        """True if an engine refuses further requests."""
        limit = self._events.max_queued_requests
        return limit is not None and len(engine.waiting) + len(engine.arrivals) >= limit

    def adopt(self, request: int, engine: RemoteKvEngine) -> None:
        """Tell an engine which output a request had on a failed one."""
        engine.adopt(request, *self._output.pop(request, (0, 0.0)))

    def after_batch(self, at: float, number: int) -> None:
        """Process the end of a batch: an empty engine leaves, a failed one evicts its requests."""
        simulation = self._simulation
        engine = simulation.engines[number]
        if number in self._leaving and _is_empty(engine):
            self._stop(at, number)
        if number not in self._failed:
            return
        if number in self._up_since:
            self._stop(at, number)
            if self._events.start_up_time is not None:
                self._up_since[number] = at
        assert isinstance(engine, RemoteKvEngine)
        if isinstance(engine, PrefillEngine):
            for request in engine.lose_unread():
                self._lose_kv(at, request)
        decodes = engine.role == "decode"
        for request, output_tokens, token_time, kv_elsewhere in engine.evict():
            simulation.cancel_transfer(request)
            if not self.recomputes:
                self.fail_request(at, request)
                continue
            self._output[request] = (output_tokens, token_time)
            if decodes and not kv_elsewhere:
                self._lost_kv.add(request)
            route = simulation.route_decode if decodes else simulation.route_prompt
            simulation.events.add(at, OTHER, request, route)
        if number in self._restarting:
            self._restarting.discard(number)
            simulation.events.add(at, BATCH_END, number, self._start)

    def fail_request(self, at: float, request: int) -> None:
        """Refuse a request whose instance failed."""
        self._simulation.refuse(at, request, FAILED)

    def _lose_kv(self, at: float, request: int) -> None:
        """Give up the cache of a complete prompt that no decode instance has read."""
        simulation = self._simulation
        simulation.cancel_transfer(request)
        number = simulation.records.engine[request]
        engine = simulation.engines[number]
        if not (isinstance(engine, RemoteKvEngine) and engine.awaits_kv(request)):
            self._lost_kv.add(request)  # on its way to the decode instance
            return
        engine.lose_kv(request, at, recompute=self.recomputes)
        if not self.recomputes:
            self.fail_request(at, request)
        simulation.post_event(number)

    def kv_was_lost(self, request: int) -> bool:
        """True if a request comes to decode without a cache; asked once."""
        lost = request in self._lost_kv
        self._lost_kv.discard(request)
        return lost

    def _stop(self, at: float, number: int) -> None:
        self._up_times.append(UpTime(number, self._up_since.pop(number), at))
        self._leaving.discard(number)

    def _count(self, at: float) -> None:
        self._simulation.instances.append((at, len(self._serving)))

    def _fail(self, at: float, number: int) -> None:
        """Fail an instance, with its current step."""
        if number not in self._serving:
            return
        self._serving.discard(number)
        self._count(at)
        engine = self._simulation.engines[number]
        assert isinstance(engine, RemoteKvEngine)
        self._failed[number] = engine.scheduler
        engine.halt(at)
        if engine.current_run.steps:
            self._simulation.post_event(number)
        else:
            self.after_batch(at, number)
        if self._events.start_up_time is not None:
            restart = at + self._events.start_up_time
            self._simulation.events.add(restart, OTHER, number, self._start)

    def _start(self, at: float, number: int) -> None:
        """Let an instance serve, for the first time or again."""
        engine = self._simulation.engines[number]
        if number in self._failed:
            assert isinstance(engine, RemoteKvEngine)
            if engine.current_run.steps:  # the step in which it failed is not over
                self._restarting.add(number)
                return
            engine.restart(self._failed.pop(number))
        else:
            self._num_starting -= 1
        self._serving.add(number)
        self._count(at)
        held, self._held = self._held, []
        for request, retry in held:
            retry(at, request)

    def _adjust(self, at: float, number: int) -> None:
        """Compare the load with the thresholds; start or stop an instance."""
        del number
        scaling, events = self._events.scaling, self._simulation.events
        assert scaling is not None
        if self._simulation.finished >= len(self._simulation.workload):
            return
        if not self._num_starting:
            numbers = sorted(self._serving & self._scaled)
            engines = [self._simulation.engines[number] for number in numbers]
            change = scaling.change(engines, len(engines))
            if change > 0 and self._idle:
                self._num_starting += 1
                started = self._idle.pop(0)
                self._leaving.discard(started)
                self._up_since.setdefault(started, at)
                events.add(at + (self._events.start_up_time or 0.0), OTHER, started, self._start)
            elif change < 0:
                leaving = numbers[-1]
                self._serving.discard(leaving)
                self._idle.insert(0, leaving)
                self._count(at)
                self._leaving.add(leaving)
                if _is_empty(engines[-1]):
                    self._stop(at, leaving)
        if not self._simulation.events:  # no instance will serve requests that are held
            held, self._held = self._held, []
            for request, _ in held:
                self._simulation.refuse(at, request, NONE_SERVES)
        if self._simulation.events:  # otherwise nothing changes any more
            events.add(at + scaling.interval, OTHER, 0, self._adjust)


def _is_empty(engine: Engine) -> bool:
    """True if an engine has no requests."""
    return not (engine.running or engine.waiting or engine.arrivals or engine.loading)
