"""Simulation of a workload on engines in pools: all events in one order of time.

Events are arrivals, ends of batches, of KV transfers and of stages before the prompt, failures and
scaling. `ServingSimulation` routes each request through the pools; the engines decide what their
batches compute (`engine.py`, `schedulers/`).
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from stagewright.serving.disaggregation import PrefillEngine, RemoteKvEngine, Role
from stagewright.serving.engine import Engine
from stagewright.serving.events import (
    ARRIVAL,
    BATCH_END,
    OTHER,
    ArrivalQueue,
    EventQueue,
    Handler,
)
from stagewright.serving.host import HostTimes
from stagewright.serving.kv_transfer import Handover, KvTransfers
from stagewright.serving.operation import QUEUE_FULL, InstanceEvents, Operator, UpTime
from stagewright.serving.routers import Router
from stagewright.serving.stages import PromptStages, StageQueues, StoreReads
from stagewright.serving.workload import Chain, Records, Workload

ProgressCallback = Callable[[int, int], None]
"""Called with the number of finished requests, and of all."""
StopEarly = Callable[[Workload, Records, float], bool]
"""True if the records at some time suffice and the simulation may end."""
REPORTS = 100
"""Calls of `StopEarly` and of progress in a run, about."""


@dataclass(frozen=True, eq=False)
class Pool:
    """Engines of one role among which a router chooses."""

    role: Role
    numbers: Sequence[int]
    """Indices of the pool's engines among all engines."""
    router: Router
    hosts: Mapping[int, HostTimes]
    """Host of each engine, by its index among all."""
    fits: Callable[[int, int], bool] | None = None
    """True if a request fits an engine; None: all fit everywhere."""

    @cached_property
    def host(self) -> HostTimes:
        """Host that requests pass before the router: the fastest one."""
        return min(self.hosts.values(), key=lambda host: host.seconds_to_router(1))

    @cached_property
    def has_one_host(self) -> bool:
        """True if all engines have equal hosts."""
        return len(set(self.hosts.values())) == 1

    def extra_delay(self, engine: int, prompt_tokens: int) -> float:
        """Seconds that a slower host of the chosen engine takes beyond `host`."""
        if self.has_one_host:
            return 0.0
        seconds = self.hosts[engine].seconds_to_router(prompt_tokens)
        return max(0.0, seconds - self.host.seconds_to_router(prompt_tokens))


@dataclass(frozen=True, eq=False)
class Outcome:
    """Result of a simulation."""

    workload: Workload
    records: Records
    engines: Sequence[Engine]
    stopped: bool = False
    """Interrupted by the user: the records end then."""
    handover: Handover | None = None
    """Transfers between prefill and decode engines; None without disaggregation."""
    refused: Mapping[str, int] = field(default_factory=dict[str, int])
    """Number of requests that were not served to their ends, by reason."""
    instances: Sequence[tuple[float, int]] = ()
    """Times (s) at which the number of serving instances changed, and that number."""
    up: Sequence[UpTime] = ()
    """Time spans in which engines were up; empty: all of the time."""
    stages: Mapping[str, array[float]] = field(default_factory=dict[str, "array[float]"])
    """Seconds of each request in each stage before the prompt; nan where it was in none."""


def chains_in_blocks(workload: Workload, block_size: int) -> Workload:
    """Convert ends of chains from tokens to blocks; a block belongs to its last token's segment."""
    if workload.chains is None:
        return workload
    blocks_of = block_size.__rfloordiv__
    lengths = {ends for _, ends in workload.chains}  # many chains have equal ends
    blocks = {ends: tuple(map(blocks_of, ends)) for ends in lengths}
    chains: list[Chain] = [(keys, blocks[ends]) for keys, ends in workload.chains]
    return replace(workload, chains=chains)


class _EndSimulation(Exception):
    """Raised when the records suffice."""


class ServingSimulation:
    """Events of requests and engines, in one heap."""

    def __init__(
        self,
        workload: Workload,
        records: Records,
        engines: Sequence[Engine],
        pools: Sequence[Pool],
        *,
        transfers: KvTransfers | None = None,
        stages: PromptStages | None = None,
        operation: InstanceEvents | None = None,
        progress: ProgressCallback | None = None,
        stop_early: StopEarly | None = None,
    ) -> None:
        """Prepare a run of engines that write into `records`.

        `pools` are one pool for whole requests, or one for prefill and one for decode, which
        `transfers` connects.
        """
        self.workload, self.records, self.engines = workload, records, engines
        self.events = EventQueue()
        self.finished = 0
        """Requests that have finished, or were refused."""
        self.instances: list[tuple[float, int]] = []
        self._prefill_pool = next(pool for pool in pools if pool.role != "decode")
        self._decode_pool = next((pool for pool in pools if pool.role == "decode"), None)
        self._transfers = transfers
        self._arrivals = ArrivalQueue(workload, self._prefill_pool.host)
        self._refused: Counter[str] = Counter()
        self._progress, self._stop_early = progress, stop_early
        self._every = max(1, len(workload) // REPORTS)
        self._next_report = self._every
        self._stopped_at: float | None = None

        self._clocks = [*dict.fromkeys(engine.clock for engine in engines)]
        index_of = {clock: index for index, clock in enumerate(self._clocks)}
        self._clock_of = [index_of[engine.clock] for engine in engines]
        self._engines_of_clock: list[list[int]] = [[] for _ in self._clocks]
        for number, index in enumerate(self._clock_of):
            self._engines_of_clock[index].append(number)
        self._event_times = [math.inf] * len(self._clocks)  # of the clocks' events in the queue

        self._queues: StageQueues | None = None
        self._stores: StoreReads | None = None
        if stages is not None and stages.stations:
            self._queues = StageQueues(stages, workload, self.events, self.route_prompt)
        if stages is not None and stages.tiers:
            self._stores = StoreReads(stages, workload, engines, self._prefill_pool.numbers)
        self._operator: Operator | None = None
        if operation is not None:
            scaled = (self._decode_pool or self._prefill_pool).numbers
            self._operator = Operator(operation, range(len(engines)), scaled, self)
        # Only arrivals influence an engine: its batches up to the next arrival are one event.
        self._independent = (
            workload.predecessor is None
            and workload.concurrency is None
            and transfers is None
            and stages is None
            and operation is None
            and self._prefill_pool.has_one_host
        )
        self._next_arrival = math.inf
        span = max(workload.arrival, default=0.0) / REPORTS
        self._lookahead = math.inf if progress is None and stop_early is None else span
        """Longest time (s) by which an event advances independent engines, for `_report`."""

    def run(self) -> Outcome:
        """Process all events, or up to where the user or `stop_early` ends the run."""
        records, stopped = self.records, False
        try:
            self._process_events()
        except _EndSimulation:
            pass
        except KeyboardInterrupt:
            stopped = True
        if self._stopped_at is not None and self._transfers is not None:
            # A prefill engine notes first tokens, too, which users see when the request decodes.
            records = records.with_lower_bounds(
                self._transfers.handover.prefilled, self._stopped_at
            )
        stages: dict[str, array[float]] = {}
        if self._queues is not None:
            stages |= self._queues.seconds
        if self._stores is not None:
            stages["retrieve"] = self._stores.seconds
        return Outcome(
            self.workload,
            records,
            self.engines,
            stopped,
            None if self._transfers is None else self._transfers.handover,
            refused=dict(self._refused),
            instances=self.instances,
            up=() if self._operator is None else self._operator.up_times(),
            stages=stages,
        )

    def _process_events(self) -> None:
        """Process events in order of time; at one time, the ends of batches last.

        Where engines are independent and the router does not read their state, all requests are
        routed before the first event.
        """
        if self._independent and not self._prefill_pool.router.reads_engines:
            for at, request in self._arrivals:
                self._arrive(at, request)
        else:
            self._add_next_arrival()
        if self._operator is not None:
            self._operator.begin()
        self.events.run()

    # ---- requests --------------------------------------------------------------------------------

    def _add_next_arrival(self) -> None:
        """Add the next arrival of a request that waits for no other one."""
        arrival = next(self._arrivals, None)
        if arrival is None:
            self._next_arrival = math.inf
            return
        self._next_arrival, request = arrival
        self.events.add(self._next_arrival, ARRIVAL, request, self._arrive_and_go_on)

    def _arrive_and_go_on(self, at: float, request: int) -> None:
        self._add_next_arrival()
        self._arrive(at, request)

    def _arrive(self, at: float, request: int) -> None:
        """Note the arrival of a request, which is at the router."""
        self.records.arrival[request] = at - self._arrivals.seconds_to_router(request)
        if self._queues is None:
            self.route_prompt(at, request)
        else:
            self._queues.enter(at, request)

    def route_prompt(self, at: float, request: int) -> None:
        """Choose the engine that computes a prompt."""
        engine = self._route(at, self._prefill_pool, request, self.route_prompt)
        if engine is None:
            return
        self.records.engine[request] = engine
        if self._transfers is not None:
            self._transfers.handover.engine[request] = engine
            if self._transfers.pushes and self._decode_pool is not None:
                target = self._route(at, self._decode_pool, request, self.route_prompt)
                assert target is not None
                self._transfers.decode_engine[request] = target
        delay = self._prefill_pool.extra_delay(engine, self.workload.prompt[request])
        if delay:
            self.events.add(at + delay, ARRIVAL, request, self._enter_queue)
        else:
            self._enter_queue(at, request)

    def _route(self, at: float, pool: Pool, request: int, retry: Handler) -> int | None:
        """Index of the engine that a router chooses; None: the request waits for an instance."""
        numbers = pool.numbers
        if pool.fits is not None:
            numbers = [number for number in numbers if pool.fits(request, number)]
        if self._operator is not None:
            fitting, numbers = numbers, self._operator.serving(numbers)
            if not numbers:
                self._operator.hold(at, request, retry, fitting)
                return None
        if self._stores is not None and pool is self._prefill_pool:
            numbers = self._stores.near(request, numbers)
        engines = self.engines
        if len(numbers) < len(engines):
            engines = [engines[number] for number in numbers]
        return numbers[pool.router.route(request, self.workload, engines)]

    def _enter_queue(self, at: float, request: int) -> None:
        """Add a request to the queue of its engine."""
        number = self.records.engine[request]
        self.records.reached[request] = at
        engine = self.engines[number]
        if self._operator is not None:
            if self._operator.has_failed(number):
                self.route_prompt(at, request)
                return
            if self._operator.queue_is_full(engine):
                self.refuse(at, request, QUEUE_FULL)
                return
            if isinstance(engine, RemoteKvEngine):
                self._operator.adopt(request, engine)
        stored = 0 if self._stores is None else self._stores.find(request, number)
        if stored:
            assert isinstance(engine, RemoteKvEngine)
            engine.add_remote_request(request, stored)
        else:
            engine.add_request(request)
        self.post_event(number)

    def _finish(self, at: float, request: int) -> None:
        """Let requests arrive that waited for the end of this one."""
        if self._stores is not None:
            self._stores.keep(request, self._prefill_engine(request))
        self._release_followers(at, request)

    def _release_followers(self, at: float, request: int) -> None:
        self.finished += 1
        for arrival, follower in self._arrivals.followers_of(request, at):
            self.events.add(arrival, ARRIVAL, follower, self._arrive)

    def _prefill_engine(self, request: int) -> int:
        """Index of the engine that computes, or computed, a prompt."""
        columns = self.records if self._transfers is None else self._transfers.handover
        return columns.engine[request]

    def refuse(self, at: float, request: int, reason: str) -> None:
        """Give up a request; requests that waited for it go on."""
        self._refused[reason] += 1
        source = self._prefill_engine(request)
        engine = self.engines[source]
        if isinstance(engine, PrefillEngine) and engine.holds_unread(request):
            engine.release_unread(request, at)
            self.post_event(source)
        self._release_followers(at, request)

    # ---- engines ---------------------------------------------------------------------------------

    def post_event(self, engine: int) -> None:
        """Add the next event of an engine, which may have changed."""
        self._post_clock_event(self._clock_of[engine])

    def _post_clock_event(self, index: int) -> None:
        end = self._clocks[index].next_event
        if end != self._event_times[index]:
            self._event_times[index] = end
            if end < math.inf:
                self.events.add(end, BATCH_END, index, self._advance_clock)

    def _advance_clock(self, at: float, index: int) -> None:
        """End the current batch of a clock, and start the next one.

        If engines are independent, run all batches up to the next arrival, or by `_lookahead`.
        """
        if self._event_times[index] != at:
            return  # outdated
        self._event_times[index] = math.inf
        clock, until = self._clocks[index], at
        if clock.next_event == at:
            if self._independent:
                until = min(math.nextafter(self._next_arrival, 0.0), at + self._lookahead)
            clock.advance(until)
            self._after_batch(at, index)
        self._post_clock_event(index)

    def _after_batch(self, at: float, index: int) -> None:
        """Process what the engines of a clock have done in its batches."""
        for number in self._engines_of_clock[index]:
            engine = self.engines[number]
            if self._independent:
                self.finished += len(engine.completed)
                engine.completed.clear()
                continue
            if self._operator is not None:
                self._operator.after_batch(at, number)
            if isinstance(engine, PrefillEngine) and engine.computed:
                assert self._transfers is not None
                self._transfers.push(engine)
            finish = self._hand_over if isinstance(engine, PrefillEngine) else self._finish
            completed, engine.completed = engine.completed, []
            for request in completed:
                finish(at, request)
            if isinstance(engine, RemoteKvEngine) and engine.pulls:
                self._start_pulls(at, number, engine)
        if self.finished >= self._next_report:
            self._report(at)

    def _report(self, at: float) -> None:
        """Report progress, and end the run if the records suffice."""
        self._next_report = self.finished - self.finished % self._every + self._every
        if self._progress is not None:
            self._progress(self.finished, len(self.workload))
        if self._stop_early is not None:
            records = self.records
            if self._transfers is not None:
                records = records.with_lower_bounds(self._transfers.handover.prefilled, at)
            if self._stop_early(self.workload, records, at):
                self._stopped_at = at
                raise _EndSimulation

    # ---- KV transfers ----------------------------------------------------------------------------

    def _start_pulls(self, at: float, number: int, engine: RemoteKvEngine) -> None:
        """Start to load the caches for which an engine has taken blocks."""
        for request, tokens in engine.pulls:
            arrived = partial(self._kv_arrived, number=number)
            if engine.role != "decode":
                assert self._stores is not None
                end = self._stores.read(at, request, tokens)
            else:
                assert self._transfers is not None
                if self._transfers.pushes:
                    end = self._transfers.pushed_by(at, request)
                else:
                    end, transfer = self._transfers.pull(at, request, tokens, number)
                    arrived = partial(self._pull_ended, number=number, transfer=transfer)
            self.events.add(end, OTHER, request, arrived)
        engine.pulls.clear()

    def _kv_arrived(self, at: float, request: int, number: int) -> None:
        """Let an engine use the cache of a request."""
        engine = self.engines[number]
        assert isinstance(engine, RemoteKvEngine)
        engine.finish_loading(request, at)
        self.post_event(number)

    def _pull_ended(self, at: float, request: int, number: int, transfer: int) -> None:
        """Use the cache of a request where it decodes, unless an engine has failed."""
        assert self._transfers is not None
        if self._transfers.finish(request, transfer):
            self._release_source(at, request)
            self._kv_arrived(at, request, number)

    def _release_source(self, at: float, request: int) -> None:
        """Free the blocks of a prompt whose cache has been read."""
        source = self._prefill_engine(request)
        engine = self.engines[source]
        assert isinstance(engine, PrefillEngine)
        engine.release_unread(request, at)
        self.post_event(source)

    def cancel_transfer(self, request: int) -> None:
        """Cancel the transfer of a request's cache, if one is in flight."""
        if self._transfers is not None:
            self._transfers.cancel(request)

    def _hand_over(self, at: float, request: int) -> None:
        """Send a request whose prompt is complete to the decode pool.

        The host counts again: vLLM's proxy sends the whole request to one server and then to the
        other, each with HTTP and tokenizer (vllm-project/vllm,
        `tests/v1/kv_connector/nixl_integration/toy_proxy_server.py`).
        """
        assert self._transfers is not None
        assert self._decode_pool is not None
        if self._transfers.pushes:
            arrives = self._transfers.pushed_by(at, request)
            self.events.add(arrives, OTHER, request, self._release_source)
        delay = self._decode_pool.host.seconds_to_router(self.workload.prompt[request])
        self.events.add(at + delay, ARRIVAL, request, self.route_decode)

    def route_decode(self, at: float, request: int) -> None:
        """Choose the engine that decodes a request."""
        assert self._transfers is not None
        assert self._decode_pool is not None
        if self._transfers.pushes:
            number = self._transfers.decode_engine[request]
        else:
            number = self._route(at, self._decode_pool, request, self.route_decode)
        if number is None:
            return
        self.records.engine[request] = number
        delay = self._decode_pool.extra_delay(number, self.workload.prompt[request])
        self.events.add(at + delay, ARRIVAL, request, self._enter_decode_queue)

    def _enter_decode_queue(self, at: float, request: int) -> None:
        """Add a request to the queue of the engine that decodes it."""
        number = self.records.engine[request]
        engine = self.engines[number]
        assert isinstance(engine, RemoteKvEngine)
        has_kv = True
        if self._operator is not None:
            if self._operator.has_failed(number):
                self.route_decode(at, request)
                return
            has_kv = not self._operator.kv_was_lost(request)
            if not has_kv and not self._operator.recomputes:
                self._operator.fail_request(at, request)
                return
            self._operator.adopt(request, engine)
        self.records.reached[request] = at
        if has_kv:
            engine.add_remote_request(request, engine.tokens(request))
        else:
            engine.add_request(request)
        self.post_event(number)
