"""vLLM's V1 scheduler: no phases; every request wants to catch up with its tokens."""

from __future__ import annotations

from dataclasses import dataclass

from stagewright.serving.batch import UNLIMITED, StepBatch
from stagewright.serving.engine import Engine

DECODE_ONLY = StepBatch(repeatable=True)
FULL = StepBatch(interruptible=False)
"""Decode while `max_num_seqs` requests run: arrivals have to wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vllm:
    """vLLM V1, first come first served (vllm-project/vllm@00024d31
    `vllm/v1/core/sched/scheduler.py`, `Scheduler.schedule`).

    Fields are vLLM's options. In each step:

    1. Running requests come first, in order of admission; each takes of the budget of
       `max_num_batched_tokens` what it lacks: one token where it decodes, and of a prompt at most
       `long_prefill_token_threshold`, if that is not 0.
    2. Where blocks lack for a request, the last of the running ones is preempted, until they
       suffice, or until that request is preempted itself (`_preempt_request`): its blocks are free,
       it is the first to wait, and it is computed again, but for what is still cached.
    3. If nothing was preempted, waiting requests are admitted in order while the budget and
       `max_num_seqs` allow. What the cache has of a request is not computed, but for its last token
       (`KVCacheManager.get_computed_blocks`). The first that does not fit stops this: the head of
       the line. With `scheduler_reserve_full_isl` (the default since 0.19) blocks must suffice for
       the whole prompt, of which then only the chunk takes them (`allocate_slots`,
       `full_sequence_must_fit`). Without chunked prefill a prompt beyond the budget waits.

    With `async_scheduling` the step is decided when the one before it begins, so that a request
    waits a step longer: the default since 0.14.0, but with pipelines (its release notes, #27614).
    """

    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 1024
    long_prefill_token_threshold: int = 0
    enable_chunked_prefill: bool = True
    scheduler_reserve_full_isl: bool = True
    async_scheduling: bool = False

    def schedule(self, engine: Engine) -> StepBatch:
        """Return the next batch: running requests first, then waiting ones."""
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
        elif not waiting:  # most steps
            return DECODE_ONLY if len(engine.running) < self.max_num_seqs else FULL
        preempted = len(waiting) > num_waiting
        if waiting and not preempted:
            self._admit(engine, budget, prefill)
        if prefill or waiting:
            return StepBatch(prefill, True, 1 if preempted else UNLIMITED, False, skipped)
        return StepBatch(interruptible=len(engine.running) < self.max_num_seqs, skipped=skipped)

    def _continue_prefill(self, engine: Engine, budget: int, prefill: list[tuple[int, int]]) -> int:
        """Continue the incomplete prompt, of the last running request; return the budget left."""
        (request,) = engine.remaining_prefill
        chunk = min(engine.remaining_prefill[request], budget)
        if chunk > 0:
            if engine.grow(request, chunk):
                prefill.append((request, chunk))
            else:
                engine.preempt()
        return budget - chunk

    def _schedule_running(self, engine: Engine) -> tuple[list[tuple[int, int]], list[int], int]:
        """Schedule running requests one by one; return prefill, skipped requests and the budget."""
        budget = self.max_num_batched_tokens
        prefill: list[tuple[int, int]] = []
        skipped: list[int] = []
        for request in list(engine.running):
            if request not in engine.running:
                break  # it was preempted, and so were those after it
            remaining = engine.remaining_prefill.get(request)
            if budget == 0:
                if remaining is None:
                    skipped.append(request)
                continue
            chunk = engine.new_tokens if remaining is None else self._chunk(remaining, budget)
            needed = engine.blocks_needed(request, chunk)
            while needed > engine.blocks.free and engine.preempt() != request:
                pass
            if request not in engine.running:
                break
            if remaining is None:
                engine.take(request, needed)
            else:
                engine.grow(request, chunk)
                prefill.append((request, chunk))
            budget = max(budget - chunk, 0)
        return prefill, skipped, budget

    def _admit(self, engine: Engine, budget: int, prefill: list[tuple[int, int]]) -> None:
        """Admit waiting requests in order."""
        waiting, threshold = engine.waiting, self.long_prefill_token_threshold
        whole_prompt, seats = self.scheduler_reserve_full_isl, self.max_num_seqs
        seats -= len(engine.running)
        while waiting and budget > 0 and seats > 0:
            request = waiting[0]
            chunk = engine.admit(
                threshold if 0 < threshold < budget else budget,
                whole_prompt=whole_prompt,
                chunked=self.enable_chunked_prefill or 0 < threshold <= budget,
            )
            if not chunk:
                return
            prefill.append((request, chunk))
            budget -= chunk
            seats -= 1

    def _chunk(self, remaining: int, budget: int) -> int:
        """Tokens of an incomplete prompt in one step."""
        return min(remaining, budget, self.long_prefill_token_threshold or budget)
