"""Capture of the batch that an engine runs at some time, as a run of one step.

Simulations are deterministic, so a second one watches the scheduler: its last batch before that
time is the batch, and each step since then has given each request a token.

Where a cache is on its way meanwhile between the instance and another one, the step is that of both
instances side by side, with the messages between their ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, count
from typing import NamedTuple

from stagewright.errors import UserError
from stagewright.lower.compile import compile
from stagewright.lower.compiled_run import CompiledRun
from stagewright.lower.disaggregated import concurrent_steps
from stagewright.run.lengths import Group, merge_groups
from stagewright.run.settings import Run
from stagewright.serving.batch import StepBatch, series_sum, steps_to_reach
from stagewright.serving.deployment import Deployment, InstanceGroup
from stagewright.serving.engine import Engine, Scheduler, SchedulerWrapper
from stagewright.serving.kv_transfer import TransferEnd, cache_messages
from stagewright.serving.simulation import Outcome
from stagewright.serving.steps.step_times import batch_run
from stagewright.serving.workload import Workload


class Captured(NamedTuple):
    """Step of one engine."""

    run: Run
    """Run of the batch in the layout of the instance, for `compile`, `simulate` and `generate`.

    Where an instance has several replicas, all have this batch."""
    begins: float
    """Seconds since the run began."""


@dataclass(slots=True)
class _Watched(SchedulerWrapper):
    """Scheduler whose last batch up to a time is kept, or its first one."""

    scheduler: Scheduler
    at: float
    begins: float = 0.0
    groups: list[Group] = field(default_factory=list[Group])
    steps: int = 1
    """Steps of the batch until a request finishes."""

    def schedule(self, engine: Engine) -> StepBatch:
        """The scheduler's own batch."""
        batch = self.scheduler.schedule(engine)
        if (engine.now <= self.at or not self.groups) and engine.running:
            self._keep(engine, batch)
        return batch

    def _keep(self, engine: Engine, batch: StepBatch) -> None:
        chunks = dict(batch.prefill)
        skipped = {*batch.skipped, *engine.remaining_prefill}
        groups: list[Group] = []
        for request in engine.running:
            if request in chunks:
                new = chunks[request]
                groups.append(Group(1, engine.computed_tokens(request) - new, new))
            elif batch.decode and request not in skipped:
                groups.append(Group(1, engine.computed_tokens(request), engine.new_tokens))
        if groups:
            self.groups, self.begins = groups, engine.now
            decodes = not chunks and not batch.skipped and engine.drafts is None
            lefts = [engine.output[r] - engine.output_tokens(r) for r in engine.decoding_requests]
            self.steps = min(lefts) if decodes else 1


def _capture(
    deployment: Deployment, workload: Workload, at: float, engines: Sequence[int]
) -> list[Captured]:
    """Capture the steps of some engines; the first one of an engine that has run none."""
    numbers, watched = count(), dict[int, _Watched]()

    def watch(scheduler: Scheduler) -> Scheduler:
        number = next(numbers)
        if number not in engines:
            return scheduler
        watched[number] = _Watched(scheduler, at)
        return watched[number]

    groups = [replace(group, watch=watch) for group in deployment.groups]
    replace(deployment, groups=tuple(groups)).run(workload)
    return [_run_of(_group_of(deployment, engine)[0], watched[engine]) for engine in engines]


def _run_of(group: InstanceGroup, watched: _Watched) -> Captured:
    """Run of one step with the watched batch."""
    groups, begins, at = watched.groups, watched.begins, watched.at
    if not groups:
        raise UserError("the engine runs no step at all; choose another one")
    if watched.steps > 1 and begins <= at:
        # The scheduler decides again where step times cease to be one series.
        times = group.instance.times.with_host(group.host)
        keys = sum((g.context_length or 0) + 1 for g in groups)
        _, seconds, growth = times.linear_run(len(groups), keys)
        steps = steps_to_reach(seconds, growth, at - begins, watched.steps) - 1
        begins += series_sum(seconds, growth, steps)
        groups = [replace(g, context_length=(g.context_length or 0) + steps) for g in groups]
    replicas = group.instance.replicas
    of_instance = [replace(g, count=g.count * replicas) for g in sorted(groups, key=_lengths)]
    return Captured(batch_run(group.instance.run, merge_groups(of_instance, "requests")), begins)


def _lengths(group: Group) -> tuple[int, int]:
    return group.new_tokens or 0, group.context_length or 0


def _group_of(deployment: Deployment, engine: int) -> tuple[InstanceGroup, int]:
    """Group of an engine, and the number of its replica in its instance."""
    for group in deployment.groups:
        if 0 <= engine < group.num_engines:
            return group, engine % group.instance.replicas
        engine -= group.num_engines
    raise UserError("there is no such engine; see the table of engines for their numbers")


def first_engine(deployment: Deployment, instance: int) -> int:
    """The first engine of an instance, which are numbered through all groups."""
    replicas = [s.instance.replicas for s in deployment.groups for _ in range(s.settings.instances)]
    if not 0 <= instance < len(replicas):
        raise UserError(f"instance {instance}: wanted one of 0 to {len(replicas) - 1}")
    return [0, *accumulate(replicas)][instance]


def step_at(
    deployment: Deployment, outcome: Outcome, workload: Workload, at: float, engine: int
) -> CompiledRun:
    """Compile the step of an engine at some time, with the transfer that is in flight.

    Where a request's cache is being sent from or to the engine, the step of the other one is beside
    it (one that has run none yet: its first one): prefill ranks first. A link sends or receives one
    cache at a time (`kv_transfer.KvLinks`), so there is at most one.
    """
    (capture,) = _capture(deployment, workload, at, [engine])
    if capture.begins > at:
        raise UserError(f"engine {engine} runs no step before {at:g} s; choose a later moment")
    transfer = _transfer_in_flight(outcome, at, engine)
    if transfer is None:
        return compile(capture.run, _group_of(deployment, engine)[0].instance.model)
    numbers = transfer.source, transfer.target
    ends: list[TransferEnd] = []
    for number, step in zip(numbers, _capture(deployment, workload, at, numbers), strict=True):
        group, replica = _group_of(deployment, number)
        instance = group.instance
        ends.append(TransferEnd(instance.run, compile(step.run, instance.model), replica))
    messages = cache_messages(ends[0], ends[1], transfer.tokens, transfer.window_tokens)
    return concurrent_steps(ends[0].step, ends[1].step, messages, computed=transfer.computed)


class _TransferInFlight(NamedTuple):
    """Transfer of a cache, or of a chunk of one, between two engines."""

    source: int
    target: int
    tokens: int
    window_tokens: int
    """Tokens of the prompt, with whose last ones windows go; 0: these are not the last."""
    computed: bool
    """The cache was computed before the step."""


def _transfer_in_flight(outcome: Outcome, at: float, engine: int) -> _TransferInFlight | None:
    """Transfer in flight at some time of which `engine` is an end."""
    handover = outcome.handover
    if handover is None:
        return None
    for push in handover.pushes:
        ends = handover.engine[push.request], outcome.records.engine[push.request]
        if push.begins <= at < push.arrives and engine in ends:
            window_tokens = handover.tokens[push.request] if push.last else 0
            return _TransferInFlight(
                *ends, push.tokens, window_tokens, computed=at >= push.step_end
            )
    if handover.pushes:
        return None
    columns = zip(
        handover.begins, handover.arrives, handover.engine, outcome.records.engine, handover.tokens,
        strict=True,
    )  # fmt: skip
    for begins, arrives, source, target, tokens in columns:
        if begins <= at < arrives and engine in (source, target):
            return _TransferInFlight(source, target, tokens, tokens, computed=True)
    return None
