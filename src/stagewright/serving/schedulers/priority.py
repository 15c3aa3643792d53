"""vLLM's scheduler with `--scheduling-policy priority`."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, fields
from typing import Any, Self

from stagewright.serving.batch import StepBatch
from stagewright.serving.engine import Engine
from stagewright.serving.schedulers.vllm import Vllm


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmByPriority(Vllm):
    """vLLM V1, where requests with a lower `priority` come first, of equal ones the earlier.

    Rules, of vllm-project/vllm@00024d31 `vllm/v1/core/sched/scheduler.py` and `request_queue.py`
    (`PriorityRequestQueue`): waiting requests are taken by (priority, arrival). Where blocks lack
    for a running request, the one of the largest (priority, arrival) is preempted; what was planned
    for that one in this step is taken back. When a request preempts itself, requests after it get
    nothing in this step. No request is preempted for one that waits.
    """

    priority: array[int] = field(default_factory=lambda: array("i"))
    """Priority of each request."""

    @classmethod
    def of(cls, scheduler: Vllm, priority: array[int]) -> Self:
        """Scheduler with the same options, and a priority for each request."""
        options: dict[str, Any] = {
            option.name: getattr(scheduler, option.name) for option in fields(scheduler)
        }
        return cls(priority=priority, **options)

    def schedule(self, engine: Engine) -> StepBatch:
        """Return the next batch, with waiting requests in order of priority."""
        waiting = engine.waiting
        if len(waiting) > 1:
            ordered = sorted(waiting, key=lambda r: self._rank(engine, r))
            waiting.clear()
            waiting.extend(ordered)
        batch = Vllm.schedule(self, engine)
        if batch.skipped and not batch.prefill and len(batch.skipped) == engine.decoding:
            # The first in order was preempted: an empty step, which takes no time.
            return self.schedule(engine)
        return batch._replace(interruptible=len(engine.running) < self.max_num_seqs)

    def _rank(self, engine: Engine, request: int) -> tuple[int, float, int]:
        return self.priority[request], engine.arrival_time[request], request

    def _victim(self, engine: Engine) -> int:
        """Running request that is preempted first."""
        return max(engine.running, key=lambda r: self._rank(engine, r))

    def _continue_prefill(self, engine: Engine, budget: int, prefill: list[tuple[int, int]]) -> int:
        """Continue the incomplete prompt; all decoding requests have their blocks."""
        (request,) = engine.remaining_prefill
        chunk = min(engine.remaining_prefill[request], budget)
        while chunk > 0 and not engine.grow(request, chunk):
            victim = self._victim(engine)
            if victim != request:
                engine.kv_cache.take(-engine.blocks_needed(victim, 1))
                budget += 1
            engine.preempt(victim)
            if victim == request:
                return budget
        if chunk > 0:
            prefill.append((request, chunk))
        return budget - max(chunk, 0)

    def _schedule_running(self, engine: Engine) -> tuple[list[tuple[int, int]], list[int], int]:
        """Schedule running requests one by one, preempting the last by priority."""
        budget = self.max_num_batched_tokens
        planned: dict[int, tuple[int, int]] = {}  # tokens and blocks of this step
        skipped: list[int] = []
        preempted_itself = False
        for request in list(engine.running):
            if request not in engine.running:
                continue
            remaining = engine.remaining_prefill.get(request)
            if budget == 0 or preempted_itself:
                if remaining is None:
                    skipped.append(request)
                continue
            chunk = 1 if remaining is None else self._chunk(remaining, budget)
            needed = engine.blocks_needed(request, chunk)
            while needed > engine.kv_cache.free and request in engine.running:
                victim = self._victim(engine)
                tokens, blocks = planned.pop(victim, (0, 0))
                budget += tokens
                engine.kv_cache.take(-blocks)
                if victim in engine.remaining_prefill:
                    engine.remaining_prefill[victim] += tokens
                engine.preempt(victim)
            if request not in engine.running:
                preempted_itself = True
                continue
            if remaining is None:
                engine.take(request, needed)
            else:
                engine.grow(request, chunk)
            planned[request] = chunk, needed
            budget -= chunk
        skipped = [request for request in skipped if request in engine.running]
        prefill = [(r, planned[r][0]) for r in planned if r in engine.remaining_prefill]
        return prefill, skipped, budget
