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
    for that one in this step is taken back. When a request preempts itself, those behind it get
    nothing in this step. Nobody is preempted for the sake of a request that waits.
    """

    priority: array[int] = field(default_factory=lambda: array("i"))
    """Priority of each request."""

    @classmethod
    def of(cls, scheduler: Vllm, priority: array[int]) -> Self:
        """The same options, with a priority for each request."""
        options: dict[str, Any] = {
            each.name: getattr(scheduler, each.name) for each in fields(scheduler)
        }
        return cls(priority=priority, **options)

    def schedule(self, engine: Engine) -> StepBatch:
        """The next batch."""
        waiting = engine.waiting
        if len(waiting) > 1:
            ordered = sorted(waiting, key=lambda r: self._rank(engine, r))
            waiting.clear()
            waiting.extend(ordered)
        batch = Vllm.schedule(self, engine)
        if batch.skipped and not batch.prefill and len(batch.skipped) == engine.decoding:
            # The first in order gave way: an empty step, which takes no time.
            return self.schedule(engine)
        return batch._replace(interruptible=len(engine.running) < self.max_num_seqs)

    def _rank(self, engine: Engine, request: int) -> tuple[int, float, int]:
        return self.priority[request], engine.arrival_time[request], request

    def _last(self, engine: Engine) -> int:
        """The running request that is preempted first."""
        return max(engine.running, key=lambda r: self._rank(engine, r))

    def _go_on(self, engine: Engine, budget: int, chunks: list[tuple[int, int]]) -> int:
        """Continue the prompt that has been begun; all that decode have their blocks."""
        (request,) = engine.remaining_prefill
        more = min(engine.remaining_prefill[request], budget)
        while more > 0 and not engine.grow(request, more):
            victim = self._last(engine)
            if victim != request:
                engine.blocks.take(-engine.blocks_needed(victim, 1))
                budget += 1
            engine.preempt(victim)
            if victim == request:
                return budget
        if more > 0:
            chunks.append((request, more))
        return budget - max(more, 0)

    def _in_order(self, engine: Engine) -> tuple[list[tuple[int, int]], list[int], int]:
        """Serve running requests one by one, the last by priority gives way."""
        budget = self.max_num_batched_tokens
        planned: dict[int, tuple[int, int]] = {}  # tokens, blocks taken
        skipped: list[int] = []
        stopped = False
        for request in list(engine.running):
            if request not in engine.running:
                continue
            left = engine.remaining_prefill.get(request)
            if budget == 0 or stopped:
                if left is None:
                    skipped.append(request)
                continue
            more = 1 if left is None else min(left, self._most(budget))
            lacking = engine.blocks_needed(request, more)
            while lacking > engine.blocks.free and request in engine.running:
                victim = self._last(engine)
                tokens, blocks = planned.pop(victim, (0, 0))
                budget += tokens
                engine.blocks.take(-blocks)
                if victim in engine.remaining_prefill:
                    engine.remaining_prefill[victim] += tokens
                engine.preempt(victim)
            if request not in engine.running:
                stopped = True
                continue
            if left is None:
                engine.take(request, lacking)
            else:
                engine.grow(request, more)
            planned[request] = more, lacking
            budget -= more
        skipped = [request for request in skipped if request in engine.running]
        chunks = [(r, planned[r][0]) for r in planned if r in engine.remaining_prefill]
        return chunks, skipped, budget
