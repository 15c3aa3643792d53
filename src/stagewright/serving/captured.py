"""The batch that an engine runs at some moment of a serving run, as an ordinary run of one step.

A workload served twice is served alike, so the second time a scheduler is watched: what it decided
last before the moment is the batch, and the steps since then have given each request a token.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from stagewright.errors import UserError
from stagewright.run.lengths import Group, merge_groups
from stagewright.run.settings import Run
from stagewright.serving.engines.engine import Decision, Engine, Scheduler
from stagewright.serving.metrics import Slo
from stagewright.serving.requests import Workload
from stagewright.serving.service import Service
from stagewright.serving.steps.step_times import batch_run


class Captured(NamedTuple):
    """A step of one engine."""

    run: Run
    """Its batch in the layout of the instance; for `compile`, `simulate` and `generate`. Where an
    instance has several replicas, all have this batch."""
    begins: float
    """Seconds since the run began."""


@dataclass(slots=True)
class _Watched:
    """A scheduler whose last decision up to a moment is kept."""

    of: Scheduler
    at: float
    number: int
    begins: float = 0.0
    groups: list[Group] = field(default_factory=list[Group])
    decodes: bool = False
    """Whether the batch is one of several steps that decode only."""

    @property
    def async_scheduling(self) -> bool:
        """As the scheduler that is watched."""
        return bool(getattr(self.of, "async_scheduling", False))

    def schedule(self, engine: Engine) -> Decision:
        """The scheduler's own decision, for which it is asked each time the batch changes."""
        decision = self.of.schedule(engine)._replace(stands=False)
        if engine.now <= self.at and engine.running:
            first = next(iter(engine.running))
            if engine.records.engine[first] == self.number:
                self._keep(engine, decision)
        return decision

    def _keep(self, engine: Engine, decision: Decision) -> None:
        chunks = dict(decision.chunks)
        skipped = set(decision.skipped)
        groups: list[Group] = []
        for request in engine.running:
            if request in chunks:
                new = chunks[request]
                groups.append(Group(1, engine.done(request) - new, new))
            elif decision.decodes and request not in engine.left and request not in skipped:
                groups.append(Group(1, engine.done(request), engine.new_tokens))
        if groups:
            self.groups, self.begins = groups, engine.now
            self.decodes = not chunks and not skipped and engine.drafts is None


def captured(service: Service, workload: Workload, at: float, engine: int = 0) -> Captured:
    """The step that an engine runs `at` so many seconds; the last one before, if it is idle then.

    Raises UserError where it has run none.
    """
    watched = _Watched(service.scheduler, at, engine)
    replace(service, scheduler=_Shared(watched)).serve(workload, Slo())
    groups, begins = watched.groups, watched.begins
    if not groups:
        raise UserError(f"engine {engine} runs no step before {at:g} s; choose a later moment")
    if watched.decodes:
        times = service.instance.times.with_host(service.host)
        keys = sum((g.context_length or 0) + 1 for g in groups)
        most = max(1, round((at - begins) / times.decode(len(groups), keys)) + 1)
        steps = max(times.steps_within(len(groups), keys, at - begins, most), 1) - 1
        begins += times.decode_run(len(groups), keys, steps)
        groups = [replace(g, context_length=(g.context_length or 0) + steps) for g in groups]
    replicas = service.instance.replicas
    every = [replace(g, count=g.count * replicas) for g in sorted(groups, key=_lengths)]
    return Captured(batch_run(service.instance.run, merge_groups(every, "requests")), begins)


def _lengths(group: Group) -> tuple[int, int]:
    return group.new_tokens or 0, group.context_length or 0


class _Shared:
    """A watched scheduler that engines have in common, though each has a copy of its own."""

    def __init__(self, watched: _Watched) -> None:
        self.watched = watched

    @property
    def async_scheduling(self) -> bool:
        """As the scheduler that is watched."""
        return self.watched.async_scheduling

    def schedule(self, engine: Engine) -> Decision:
        """The scheduler's own decision."""
        return self.watched.schedule(engine)
