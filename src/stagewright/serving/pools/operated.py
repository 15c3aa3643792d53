"""Instances at work whose number changes: failures, starts, leaves; their requests go elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from stagewright.serving.engines.engine import Engine, Scheduler
from stagewright.serving.pools.agenda import BATCH_END, OTHER, Agenda
from stagewright.serving.pools.engines import BringingEngine
from stagewright.serving.pools.operation import FAILED, NONE_SERVES, InstanceEvents
from stagewright.serving.requests import Workload


class Requeuing(Protocol):
    """What serves requests; `serving.pools.loop`."""

    workload: Workload
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

    def refuse(self, at: float, request: int, why: str) -> None:
        """A request is not served to its end."""
        ...


class Operated:
    """Which instances serve; an instance is one engine here."""

    def __init__(self, of: InstanceEvents, numbers: Sequence[int], play: Requeuing) -> None:
        """The first `InstanceEvents.instances` serve from the beginning."""
        self._of, self._play = of, play
        self._idle = [*numbers[of.instances :]]  # may be started
        self._serving = set(numbers[: of.instances])
        self._starting = 0
        self._halted: dict[int, Scheduler] = {}
        self._held: list[int] = []  # requests that no instance can take
        self._got: dict[int, tuple[int, float]] = {}  # tokens and the last one's time, elsewhere

    def begin(self) -> None:
        """Note what is to happen."""
        self._play.instances.append((0.0, len(self._serving)))
        for failure in self._of.failures:
            self._play.agenda.note(failure.seconds, OTHER, failure.instance, self._fail)
        if self._of.scaling is not None:
            self._play.agenda.note(self._of.scaling.interval, OTHER, 0, self._adjust)

    def serving(self, numbers: Sequence[int]) -> Sequence[int]:
        """Of some engines those that take requests."""
        return [nth for nth in numbers if nth in self._serving]

    def held(self, at: float, request: int) -> bool:
        """Whether no instance serves: the request waits for one, or is refused if none will."""
        if self._serving:
            return False
        if self._starting or self._of.start_up_time is not None:
            self._held.append(request)
        else:
            self._play.refuse(at, request, NONE_SERVES)
        return True

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
        if nth not in self._halted:
            return
        engine = self._play.engines[nth]
        assert isinstance(engine, BringingEngine)
        for request, got, last in engine.evict():
            if self._of.on_failure == "fail":
                self._play.refuse(at, request, FAILED)
                continue
            self._got[request] = (got, last)
            self._play.agenda.note(at, OTHER, request, self._play.route_in)

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
        for request in held:
            self._play.route_in(at, request)

    def _adjust(self, at: float, number: int) -> None:
        """Compare the load with the thresholds."""
        del number
        scaling = self._of.scaling
        assert scaling is not None
        if self._play.done >= len(self._play.workload):
            return
        if not self._starting:
            engines = [self._play.engines[nth] for nth in sorted(self._serving)]
            change = scaling.change(engines, len(engines))
            if change > 0 and self._idle:
                self._starting += 1
                self._play.agenda.note(
                    at + (self._of.start_up_time or 0.0), OTHER, self._idle.pop(0), self._start
                )
            elif change < 0:
                nth = max(self._serving)
                self._serving.discard(nth)
                self._idle.insert(0, nth)
                self._changed(at)
        self._play.agenda.note(at + scaling.interval, OTHER, 0, self._adjust)
