"""One order of events of engines in pools: arrivals, batches' ends, transfers between instances."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from heapq import heappop
from itertools import count

from stagewright.serving.cluster import Heard, Outcome, ToCome
from stagewright.serving.pools.agenda import ARRIVAL, BATCH_END, OTHER, Act, Agenda
from stagewright.serving.pools.engines import BringingEngine, DecodeEngine, PromptEngine
from stagewright.serving.pools.links import Links
from stagewright.serving.pools.operated import Operated
from stagewright.serving.pools.operation import QUEUE_FULL
from stagewright.serving.pools.parts import EnginePool, Pools
from stagewright.serving.pools.pushing import Pushes, PushingEngine
from stagewright.serving.pools.stages import Passage, Retrieval
from stagewright.serving.requests import Records, Workload

Enough = Callable[[Workload, Records, float], bool]
"""Is asked, of what has become of requests up to a moment, whether that is enough."""
ASKED = 100
"""How often it is asked in a run."""


class _IsEnough(Exception):
    """Whoever asked for the run need not know more than these records."""

    def __init__(self, records: Records) -> None:
        super().__init__()
        self.records = records


def serve_in_pools(
    workload: Workload,
    records: Records,
    pools: Pools,
    heard: Heard | None = None,
    enough: Enough | None = None,
) -> Outcome:
    """Serve a workload on engines that write into `records`, in one order of events.

    The run ends early when somebody has `enough` of it.
    """
    play = _Play(workload, records, pools, heard, enough)
    stopped = False
    try:
        play.run()
    except _IsEnough as enough_of:
        records = enough_of.records
    except KeyboardInterrupt:
        stopped = True
    return Outcome(
        workload,
        records,
        pools.engines,
        stopped,
        pools.handover,
        refused=dict(play.refused),
        instances=play.instances,
        up=() if play.operated is None else play.operated.all_up(),
        stages=play.passed(),
    )


class _Play:
    """Requests on their way through pools."""

    def __init__(
        self,
        workload: Workload,
        records: Records,
        pools: Pools,
        heard: Heard | None,
        enough: Enough | None,
    ) -> None:
        self.workload, self.records, self.pools, self.heard = workload, records, pools, heard
        self.enough, self.every = enough, max(1, len(workload) // ASKED)
        self._noted = [math.inf] * len(pools.engines)  # ends on the agenda
        self.arrivals = ToCome(workload, pools.front.host)
        self.handover, self.engines = pools.handover, pools.engines
        self.agenda = Agenda()
        self.links = Links(len(pools.engines))
        self.pushes = None if pools.pushes == "prompt" else Pushes(pools, self.links)
        self.passage: Passage | None = None
        self.retrieval: Retrieval | None = None
        if pools.stages is not None:
            if pools.stages.stations:
                self.passage = Passage(pools.stages, workload, self.agenda, self.route_in)
            if pools.stages.tiers:
                self.retrieval = Retrieval(
                    pools.stages, workload, pools.engines, pools.front.numbers
                )
        self.done = 0
        self.refused: Counter[str] = Counter()
        self.instances: list[tuple[float, int]] = []
        self.operated: Operated | None = None
        if pools.operation is not None:
            scaled = (pools.decode or pools.front).numbers
            self.operated = Operated(pools.operation, range(len(self.engines)), scaled, self)
        self.sending: dict[int, int] = {}  # requests whose caches are on their way, by attempt
        self._attempts = count()

    def passed(self) -> Mapping[str, array[float]]:
        """Seconds of each request in each stage before its prompt; nan where it was in none."""
        found: dict[str, array[float]] = {}
        if self.passage is not None:
            found |= self.passage.seconds
        if self.retrieval is not None:
            found["retrieve"] = self.retrieval.seconds
        return found

    def run(self) -> None:
        """All events, to the end."""
        self._come()
        if self.operated is not None:
            self.operated.begin()
        self.agenda.run()

    # ---- requests ------------------------------------------------------------------------------

    def _come(self) -> None:
        """Note the arrivals that are known."""
        heap = self.arrivals.heap
        while heap:
            at, request = heappop(heap)
            self.agenda.note(at, ARRIVAL, request, self._arrive)

    def _arrive(self, at: float, request: int) -> None:
        """A request has come."""
        self.records.arrival[request] = at - self.arrivals.delay(request)
        if self.passage is None:
            self.route_in(at, request)
        else:
            self.passage.enter(at, request)

    def route_in(self, at: float, request: int) -> None:
        """A request reaches the first router."""
        nth = self._route(at, self.pools.front, request, self.route_in)
        if nth is None:
            return
        self.records.engine[request] = nth
        if self.handover is not None:
            self.handover.engine[request] = nth
        if self.pushes is not None and self.pools.decode is not None:
            self.pushes.to[request] = self._route(at, self.pools.decode, request, self.route_in)
        later = self.pools.front.behind(nth, self.workload.prompt[request])
        if later:
            self.agenda.note(at + later, ARRIVAL, request, self._enter)
        else:
            self._enter(at, request)

    def _enter(self, at: float, request: int) -> None:
        """A request is in the queue of its engine."""
        nth = self.records.engine[request]
        self.records.reached[request] = at
        engine = self.engines[nth]
        if self.operated is not None and self.operated.gone(nth):
            self.route_in(at, request)
            return
        if self.operated is not None and self.operated.refuses(engine):
            self.refuse(at, request, QUEUE_FULL)
            return
        if self.operated is not None and isinstance(engine, BringingEngine):
            self.operated.entered(request, engine)
        coming = 0 if self.retrieval is None else self.retrieval.find(request, nth)
        if coming:
            assert isinstance(engine, BringingEngine)
            engine.push_remote(request, coming)
        else:
            engine.push(request)
        self.note(nth)

    def _route(self, at: float, pool: EnginePool, request: int, again: Act) -> int | None:
        """The engine to which a request goes; None: it waits to be routed `again`."""
        numbers = pool.numbers
        if pool.fits is not None:
            numbers = [nth for nth in numbers if pool.fits(request, nth)]
        if self.operated is not None:
            able, numbers = numbers, self.operated.serving(numbers)
            if not numbers:
                self.operated.hold(at, request, again, able)
                return None
        if self.retrieval is not None and pool is self.pools.front:
            numbers = self.retrieval.near(request, numbers)
        chosen = [self.engines[nth] for nth in numbers]
        return numbers[pool.router.route(request, self.workload, chosen)]

    # ---- engines -------------------------------------------------------------------------------

    def note(self, nth: int) -> None:
        """Note when the batch of an engine, and of those that step with it, ends."""
        end = self.engines[nth].unit.end
        if end != self._noted[nth]:
            self._noted[nth] = end
            if end < math.inf:
                self.agenda.note(end, BATCH_END, nth, self._advance)

    def _advance(self, at: float, nth: int) -> None:
        """Move an engine on, and hear what it has done."""
        if self._noted[nth] == at:
            self._noted[nth] = math.inf
        unit = self.engines[nth].unit
        if unit.end != at:
            return  # the batch was cut since
        unit.advance(at)
        if self.operated is not None:
            self.operated.ended(at, nth)
        for engine in unit.engines:
            if self.pushes is not None and isinstance(engine, PushingEngine):
                self.pushes.push(engine)
            if engine.completed:
                completed = [*engine.completed]
                engine.completed.clear()
                done = self._hand_over if isinstance(engine, PromptEngine) else self._end
                for request in completed:
                    done(at, request)
            if isinstance(engine, BringingEngine) and engine.wanted:
                self._bring(at, engine)
        self.note(nth)

    def _bring(self, at: float, engine: BringingEngine) -> None:
        """Send or read what requests have got blocks for."""
        wanted = [*engine.wanted]
        engine.wanted.clear()
        for request, tokens in wanted:
            if isinstance(engine, DecodeEngine):
                self._send(at, request, tokens, self.records.engine[request])
            else:
                self._read(at, request, tokens)

    def _end(self, at: float, request: int) -> None:
        """A request is done."""
        if self.retrieval is not None:
            of = self.records if self.handover is None else self.handover
            self.retrieval.keep(request, of.engine[request])
        self.arrivals.done(request, at)
        self._come()
        self.done += 1
        if self.heard is not None and self.done % 1000 == 0:
            self.heard(self.done, len(self.workload))
        if self.enough is not None and self.done % self.every == 0:
            self._ask(at, self.enough)

    def _ask(self, at: float, enough: Enough) -> None:
        """End the run if what is known is enough."""
        records = self.records
        if self.handover is not None:  # instances for prompts note a first token, too
            records = records.known(self.handover.prefilled, at)
        if enough(self.workload, records, at):
            raise _IsEnough(records)

    def refuse(self, at: float, request: int, why: str) -> None:
        """A request is not served to its end; who waited for it goes on."""
        self.refused[why] += 1
        source = -1 if self.handover is None else self.handover.engine[request]
        sender = self.engines[source]
        if isinstance(sender, PromptEngine) and sender.keeps(request):
            sender.let_go(request, at)
            self.note(source)
        self.arrivals.done(request, at)
        self._come()
        self.done += 1

    # ---- from stores ---------------------------------------------------------------------------

    def _read(self, at: float, request: int, tokens: int) -> None:
        """Tokens of a request are read from stores."""
        assert self.retrieval is not None
        arrives = self.retrieval.read(at, request, tokens)
        self.agenda.note(arrives, OTHER, request, self._was_read)

    def _was_read(self, at: float, request: int) -> None:
        nth = (self.records if self.handover is None else self.handover).engine[request]
        engine = self.engines[nth]
        assert isinstance(engine, BringingEngine)
        engine.loaded(request, at)
        self.note(nth)

    # ---- from prompt to decode -----------------------------------------------------------------

    def _hand_over(self, at: float, request: int) -> None:
        """The prompt of a request is done: the request goes to an instance that decodes.

        The host counts again: vLLM's proxy sends the whole request to the one server and, when that
        has answered, to the other, each with HTTP and tokenizer of its own (vllm-project/vllm,
        `tests/v1/kv_connector/nixl_integration/toy_proxy_server.py`).
        """
        assert self.pools.decode is not None
        if self.pushes is not None:
            self.agenda.note(self.pushes.arrival(at, request), OTHER, request, self._was_pushed)
        seconds = self.pools.decode.host.before_prefill(self.workload.prompt[request])
        self.agenda.note(at + seconds, ARRIVAL, request, self.go_on)

    def go_on(self, at: float, request: int) -> None:
        """A request reaches the router of the instances that decode."""
        pool = self.pools.decode
        assert pool is not None
        if self.pushes is not None:
            nth = self.pushes.to[request]
        else:
            nth = self._route(at, pool, request, self.go_on)
        if nth is None:
            return
        self.records.engine[request] = nth
        later = pool.behind(nth, self.workload.prompt[request])
        self.agenda.note(at + later, ARRIVAL, request, self._enter_decode)

    def _enter_decode(self, at: float, request: int) -> None:
        nth = self.records.engine[request]
        engine = self.engines[nth]
        assert isinstance(engine, DecodeEngine)
        lost: bool | None = False
        if self.operated is not None:
            if self.operated.gone(nth):
                self.go_on(at, request)
                return
            lost = self.operated.comes_without(at, request)
            if lost is None:
                return
            self.operated.entered(request, engine)
        self.records.reached[request] = at
        if lost:
            engine.push(request)
        else:
            engine.push_remote(request, engine.tokens(request))
        self.note(nth)

    def _send(self, at: float, request: int, tokens: int, target: int) -> None:
        """The cache of a request leaves as soon as its links are free."""
        assert self.handover is not None
        assert self.pools.transfer is not None
        source = self.handover.engine[request]
        if self.pushes is not None:
            there = self.pushes.arrival(at, request)
            self.agenda.note(there, OTHER, request, self._is_loaded)
            return
        seconds, bytes_ = self.pools.transfer(source, target, tokens, True)
        begins = self.links.send(source, target, at, seconds)
        self.handover.begins[request] = begins
        self.handover.arrives[request] = begins + seconds
        self.handover.bytes[request] = bytes_
        self.handover.tokens[request] = tokens
        self.sending[request] = attempt = next(self._attempts)
        arrived = partial(self._arrived, attempt=attempt)
        self.agenda.note(begins + seconds, OTHER, request, arrived)

    def cut_off(self, request: int) -> None:
        """The cache of a request does not arrive, if one is on its way."""
        if self.handover is not None and self.sending.pop(request, None) is not None:
            self.handover.begins[request] = self.handover.arrives[request] = math.nan
            self.handover.bytes[request] = 0.0

    def _arrived(self, at: float, request: int, attempt: int) -> None:
        """The cache of a request is where it decodes, unless one of the two has failed."""
        if self.sending.get(request) != attempt:
            return
        del self.sending[request]
        self._was_pushed(at, request)
        self._is_loaded(at, request)

    def _was_pushed(self, at: float, request: int) -> None:
        """The instance that computed a prompt needs its blocks no more."""
        assert self.handover is not None
        source = self.handover.engine[request]
        sender = self.engines[source]
        assert isinstance(sender, PromptEngine)
        sender.let_go(request, at)
        self.note(source)

    def _is_loaded(self, at: float, request: int) -> None:
        """The cache of a request is in blocks of the engine that decodes it."""
        target = self.records.engine[request]
        receiver = self.engines[target]
        assert isinstance(receiver, DecodeEngine)
        receiver.loaded(request, at)
        self.note(target)
