"""Instances at work whose number changes: failures, starts, leaves; their requests go elsewhere.

Of an instance that computes prompts for others the caches fail, too, that nobody has read yet:
their requests are computed again where they decode, or fail (vLLM's `kv_load_failure_policy`,
recompute or fail, vllm-project/vllm@00024d31 `vllm/config/kv_transfer.py`). Of one that decodes the
requests go to another one: caches that had not come are sent there, others are computed there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from stagewright.serving.engines.engine import Engine, Scheduler
from stagewright.serving.pools.agenda import BATCH_END, OTHER, Act, Agenda
from stagewright.serving.pools.engines import BringingEngine, DecodeEngine, PromptEngine
from stagewright.serving.pools.operation import FAILED, NONE_SERVES, InstanceEvents
from stagewright.serving.requests import Records, UpTime, Workload


class Requeuing(Protocol):
    """What serves requests; `serving.pools.loop`."""

    workload: Workload
    records: Records
    engines: Sequence[Engine]
    agenda: Agenda
    done: int
    """Requests that need nothing any more."""
    instances: list[tuple[float, int]]

    def note(self, nth: int) -> None:
        """Note when the batch of an engine ends."""
        ...

    def route_in(self, at: float, request: int) -> None:
        """A request reaches the first router."""
        ...

    def go_on(self, at: float, request: int) -> None:
        """A request reaches the router of the instances that decode."""
        ...

    def cut_off(self, request: int) -> None:
        """The cache of a request does not arrive, if one is on its way."""
        ...

    def refuse(self, at: float, request: int, why: str) -> None:
        """A request is not served to its end."""
        ...


class Operated:
    """Which instances serve; an instance is one engine here."""

    def __init__(
        self, of: InstanceEvents, numbers: Sequence[int], scaled: Sequence[int], play: Requeuing
    ) -> None:
        """All of `numbers` serve from the beginning; of `scaled` only as many as are asked for."""
        self._of, self._play = of, play
        self._scaled = frozenset(scaled)
        self._idle = [*scaled[of.instances :]]  # may be started
        self._serving = {*numbers}.difference(self._idle)
        self._starting = 0
        self._halted: dict[int, Scheduler] = {}
        self._held: list[tuple[int, Act]] = []  # requests that no instance can take
        self._got: dict[int, tuple[int, float]] = {}  # tokens and the last one's time, elsewhere
        self._lost: set[int] = set()  # requests to decode whose caches are nowhere
        self._since = dict.fromkeys(self._serving, 0.0)  # engines that are up
        self._leaving: set[int] = set()
        self._up: list[UpTime] = []  # as far as that is over

    def begin(self) -> None:
        """Note what is to happen."""
        self._play.instances.append((0.0, len(self._serving)))
        for failure in self._of.failures:
            self._play.agenda.note(failure.seconds, OTHER, failure.instance, self._fail)
        if self._of.scaling is not None:
            self._play.agenda.note(self._of.scaling.interval, OTHER, 0, self._adjust)

    def all_up(self) -> list[UpTime]:
        """When engines are up: from their start, start-up time included, until they have left."""
        last = max((at for at in self._play.records.finish if at == at), default=0.0)
        still = (UpTime(nth, since, max(since, last)) for nth, since in self._since.items())
        return [*self._up, *still]

    def _down(self, at: float, nth: int) -> None:
        self._up.append(UpTime(nth, self._since.pop(nth), at))
        self._leaving.discard(nth)

    def serving(self, numbers: Sequence[int]) -> Sequence[int]:
        """Of some engines those that take requests."""
        return [nth for nth in numbers if nth in self._serving]

    def hold(self, at: float, request: int, again: Act, able: Sequence[int]) -> None:
        """Of the engines `able` to serve a request none does: it waits, or is refused if none will.

        An engine that autoscaling may start will: `again` is called when one serves.
        """
        idle = self._of.scaling is not None and not set(able).isdisjoint(self._idle)
        if self._starting or idle or self._of.start_up_time is not None:
            self._held.append((request, again))
        else:
            self._play.refuse(at, request, NONE_SERVES)

    def gone(self, nth: int) -> bool:
        """Whether an engine has failed."""
        return nth in self._halted

    def refuses(self, engine: Engine) -> bool:
        """Whether the queue of an engine is full."""
        most = self._of.max_queued_requests
        return most is not None and len(engine.waiting) + len(engine.inbox) >= most

    def entered(self, request: int, engine: BringingEngine) -> None:
        """A request comes to an engine; tokens that it had got elsewhere are its own again."""
        engine.adopt(request, *self._got.pop(request, (0, 0.0)))

    def ended(self, at: float, nth: int) -> None:
        """The batch of an engine has ended: if it was to fail, its requests go elsewhere."""
        engine = self._play.engines[nth]
        if nth in self._leaving and _empty(engine):
            self._down(at, nth)
        if nth not in self._halted:
            return
        if nth in self._since:
            self._down(at, nth)
            if self._of.start_up_time is not None:
                self._since[nth] = at
        assert isinstance(engine, BringingEngine)
        if isinstance(engine, PromptEngine):
            for request in engine.lose_kept():
                self._lose(at, request)
        decodes = isinstance(engine, DecodeEngine)
        for request, got, last, elsewhere in engine.evict():
            self._play.cut_off(request)
            if self._of.on_failure == "fail":
                self._play.refuse(at, request, FAILED)
                continue
            self._got[request] = (got, last)
            if decodes and not elsewhere:
                self._lost.add(request)
            again = self._play.go_on if decodes else self._play.route_in
            self._play.agenda.note(at, OTHER, request, again)

    def _lose(self, at: float, request: int) -> None:
        """The cache of a request whose prompt is done is lost before it has come."""
        self._play.cut_off(request)
        nth = self._play.records.engine[request]
        engine = self._play.engines[nth]
        if not (isinstance(engine, BringingEngine) and engine.awaits(request)):
            self._lost.add(request)  # on its way there
            return
        again = self._of.on_failure == "requeue"
        engine.await_no_more(request, at, compute=again)
        if not again:
            self._play.refuse(at, request, FAILED)
        self._play.note(nth)

    def comes_without(self, at: float, request: int) -> bool | None:
        """Whether the cache of a request that comes to decode is lost; None: so is the request."""
        if request not in self._lost:
            return False
        self._lost.discard(request)
        if self._of.on_failure == "requeue":
            return True
        self._play.refuse(at, request, FAILED)
        return None

    def _changed(self, at: float) -> None:
        self._play.instances.append((at, len(self._serving)))

    def _fail(self, at: float, nth: int) -> None:
        """An instance fails, with the step that is under way."""
        if nth not in self._serving:
            return
        self._serving.discard(nth)
        self._changed(at)
        engine = self._play.engines[nth]
        assert isinstance(engine, BringingEngine)
        self._halted[nth] = engine.scheduler
        engine.halt(at)
        if engine.planned[0]:
            self._play.note(nth)
        else:
            self.ended(at, nth)
        if self._of.start_up_time is not None:
            self._play.agenda.note(at + self._of.start_up_time, OTHER, nth, self._start)

    def _start(self, at: float, nth: int) -> None:
        """An instance serves, for the first time or again."""
        engine = self._play.engines[nth]
        if nth in self._halted:
            assert isinstance(engine, BringingEngine)
            if engine.planned[0]:  # the step in which it failed is not over
                self._play.agenda.note(engine.end, BATCH_END, nth, self._start)
                return
            engine.restart(self._halted.pop(nth))
        else:
            self._starting -= 1
        self._serving.add(nth)
        self._changed(at)
        held, self._held = self._held, []
        for request, again in held:
            again(at, request)

    def _adjust(self, at: float, number: int) -> None:
        """Compare the load with the thresholds."""
        del number
        scaling = self._of.scaling
        assert scaling is not None
        if self._play.done >= len(self._play.workload):
            return
        if not self._starting:
            mine = sorted(self._serving & self._scaled)
            engines = [self._play.engines[nth] for nth in mine]
            change = scaling.change(engines, len(engines))
            if change > 0 and self._idle:
                self._starting += 1
                nth = self._idle.pop(0)
                self._leaving.discard(nth)
                self._since.setdefault(nth, at)
                self._play.agenda.note(
                    at + (self._of.start_up_time or 0.0), OTHER, nth, self._start
                )
            elif change < 0:
                nth = mine[-1]
                self._serving.discard(nth)
                self._idle.insert(0, nth)
                self._changed(at)
                self._leaving.add(nth)
                if _empty(engines[-1]):
                    self._down(at, nth)
        if not self._play.agenda:  # no instance will serve those that are held
            held, self._held = self._held, []
            for request, _ in held:
                self._play.refuse(at, request, NONE_SERVES)
        if self._play.agenda:  # else nothing changes any more
            self._play.agenda.note(at + scaling.interval, OTHER, 0, self._adjust)


def _empty(engine: Engine) -> bool:
    """Whether an engine has no requests."""
    return not (engine.running or engine.waiting or engine.inbox or engine.loading)
