"""vLLM's V1 scheduler: prompts and decode share one token budget in each step."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from stagewright.serving.batch import UNLIMITED, StepBatch
from stagewright.serving.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Vllm:
    """vLLM V1 (vllm-project/vllm@00024d31 `vllm/v1/core/sched/scheduler.py`, `Scheduler.schedule`).

    Fields are vLLM's options. In each step:

    1. Running requests come first, in order of admission; each takes its next tokens from the
       budget of `max_num_batched_tokens`: one where it decodes, and of a prompt all that remain, at
       most `long_prefill_token_threshold`, if that is not 0.
    2. Where blocks lack for a running request, running requests are preempted, the last admitted
       first, until blocks suffice or the request itself is preempted (`_preempt_request`). Its
       blocks become free; it waits before all others and is recomputed, except what is still
       cached.
    3. If no request was preempted, waiting requests are admitted in order while the budget and
       `max_num_seqs` allow. Cached tokens are not computed, except the prompt's last one
       (`KVCacheManager.get_computed_blocks`). The first request that does not fit ends admission,
       so nobody overtakes it. With `scheduler_reserve_full_isl` (the default since 0.19) blocks
       must suffice for the whole prompt, though only those of the chunk are allocated
       (`allocate_slots`, `full_sequence_must_fit`). Without chunked prefill a prompt beyond the
       budget waits.

    With priorities (`--scheduling-policy priority`, `request_queue.py`, `PriorityRequestQueue`)
    waiting requests are taken by (priority, arrival), and the running request of the largest
    (priority, arrival) is preempted; what was planned for that one in this step is taken back. When
    a request preempts itself, requests after it get nothing in this step. No request is preempted
    for one that waits.

    With `async_scheduling` a step is decided when the previous one begins, so that a request waits
    a step longer: the default since 0.14.0, except with pipelines (its release notes, #27614).
    """

    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 1024
    long_prefill_token_threshold: int = 0
    enable_chunked_prefill: bool = True
    scheduler_reserve_full_isl: bool = True
    async_scheduling: bool = False
    priority: array[int] | None = None
    """Priority of each request, the lowest first; None: first come, first served."""

    def schedule(self, engine: Engine) -> StepBatch:
        """Return the next batch: running requests first, then waiting ones."""
        if self.priority is None:
            return self._schedule(engine)
        if len(engine.waiting) > 1:
            ordered = sorted(engine.waiting, key=lambda request: self._rank(engine, request))
            engine.waiting.clear()
            engine.waiting.extend(ordered)
        batch = self._schedule(engine)
        if batch.skipped and not batch.prefill and len(batch.skipped) == engine.decoding:
            # The first in order was preempted: an empty step, which takes no time.
            return self.schedule(engine)
        return batch._replace(interruptible=len(engine.running) < self.max_num_seqs)

    def _schedule(self, engine: Engine) -> StepBatch:
        """Return the next batch, with waiting requests in order."""
        waiting, remaining = engine.waiting, engine.remaining_prefill
        budget = self.max_num_batched_tokens - engine.decoding * engine.new_tokens
        prefill: list[tuple[int, int]] = []
        skipped: list[int] = []
        num_waiting = len(waiting)
        one_by_one = budget < 0 or (remaining and self.long_prefill_token_threshold)
        if one_by_one or not engine.reserve():
            prefill, skipped, budget = self._schedule_running(engine)
        elif remaining:
            budget = self._continue_prefill(engine, budget, prefill)
        preempted = len(waiting) > num_waiting
        if waiting and not preempted:
            self._admit(engine, budget, prefill)
        if prefill or waiting:
            # Not interruptible: a step with prefill is a single one, and later requests queue
            # behind those that wait. A preempted request may be admitted in the next step.
            return StepBatch(
                prefill,
                max_steps=1 if preempted else UNLIMITED,
                interruptible=False,
                skipped=skipped,
            )
        return StepBatch(interruptible=len(engine.running) < self.max_num_seqs, skipped=skipped)

    def _continue_prefill(self, engine: Engine, budget: int, prefill: list[tuple[int, int]]) -> int:
        """Continue the incomplete prompt; return the budget left."""
        # Without a threshold only the last admitted prompt can be incomplete: it used up the
        # budget. All decoding requests have their blocks.
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
        """Schedule running requests one by one; return prefill, skipped requests and the budget."""
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
            chunk = engine.new_tokens if remaining is None else self._chunk(remaining, budget)
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
            budget = max(budget - chunk, 0)
        skipped = [request for request in skipped if request in engine.running]
        prefill = [(r, planned[r][0]) for r in planned if r in engine.remaining_prefill]
        return prefill, skipped, budget

    def _victim(self, engine: Engine) -> int:
        """Running request that is preempted first."""
        if self.priority is None:
            return next(reversed(engine.running))
        return max(engine.running, key=lambda request: self._rank(engine, request))

    def _rank(self, engine: Engine, request: int) -> tuple[int, float, int]:
        assert self.priority is not None
        return self.priority[request], engine.queued_at[request], request

    def _admit(self, engine: Engine, budget: int, prefill: list[tuple[int, int]]) -> None:
        """Admit waiting requests in order."""
        waiting, threshold = engine.waiting, self.long_prefill_token_threshold
        slots = self.max_num_seqs - len(engine.running)
        while waiting and budget > 0 and slots > 0:
            request = waiting[0]
            chunk = engine.admit(
                threshold if 0 < threshold < budget else budget,
                full_sequence_must_fit=self.scheduler_reserve_full_isl,
                chunked=self.enable_chunked_prefill or 0 < threshold <= budget,
            )
            if not chunk:
                return
            prefill.append((request, chunk))
            budget -= chunk
            slots -= 1

    def _chunk(self, remaining: int, budget: int) -> int:
        """Tokens of an incomplete prompt in one step."""
        return min(remaining, budget, self.long_prefill_token_threshold or budget)
