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
        """The next batch."""
        waiting, left = engine.waiting, engine.remaining_prefill
        budget = self.max_num_batched_tokens - engine.decoding * engine.new_tokens
        one_by_one = budget < 0 or (left and self.long_prefill_token_threshold)
        if not one_by_one and engine.reserve():  # most steps
            if not left:
                if not waiting:
                    return DECODE_ONLY if len(engine.running) < self.max_num_seqs else FULL
                chunks = list[tuple[int, int]]()
                self._admit(engine, budget, chunks)
                return StepBatch(chunks, True, UNLIMITED, False)
            before = len(waiting)
            skipped, chunks = list[int](), list[tuple[int, int]]()
            budget = self._go_on(engine, budget, chunks)
        else:
            before = len(waiting)
            chunks, skipped, budget = self._in_order(engine)
        preempted = len(waiting) > before
        if waiting and not preempted:
            self._admit(engine, budget, chunks)
        if not chunks and not waiting:
            return StepBatch(interruptible=len(engine.running) < self.max_num_seqs, skipped=skipped)
        return StepBatch(chunks, True, 1 if preempted else UNLIMITED, False, skipped)

    def _go_on(self, engine: Engine, budget: int, chunks: list[tuple[int, int]]) -> int:
        """Continue the prompt that has been begun; it is the last of the running requests."""
        (request,) = engine.remaining_prefill
        more = min(engine.remaining_prefill[request], budget)
        if more > 0:
            if engine.grow(request, more):
                chunks.append((request, more))
            else:
                engine.preempt()
        return budget - more

    def _in_order(self, engine: Engine) -> tuple[list[tuple[int, int]], list[int], int]:
        """Serve running requests one by one; returns also the budget that is left."""
        budget = self.max_num_batched_tokens
        chunks: list[tuple[int, int]] = []
        skipped: list[int] = []
        for request in list(engine.running):
            if request not in engine.running:
                break  # it and those behind it have been preempted
            left = engine.remaining_prefill.get(request)
            if budget == 0:
                if left is None:
                    skipped.append(request)
                continue
            more = engine.new_tokens if left is None else min(left, self._most(budget))
            lacking = engine.blocks_needed(request, more)
            while lacking > engine.blocks.free and engine.preempt() != request:
                pass
            if request not in engine.running:
                break
            if left is None:
                engine.take(request, lacking)
            else:
                engine.grow(request, more)
                chunks.append((request, more))
            budget = max(budget - more, 0)
        return chunks, skipped, budget

    def _admit(self, engine: Engine, budget: int, chunks: list[tuple[int, int]]) -> None:
        """Admit waiting requests in order."""
        waiting, running, threshold = (
            engine.waiting,
            engine.running,
            self.long_prefill_token_threshold,
        )
        whole, room = self.scheduler_reserve_full_isl, self.max_num_seqs - len(running)
        while waiting and budget > 0 and room > 0:
            request = waiting[0]
            more = engine.admit(
                threshold if 0 < threshold < budget else budget,
                whole_prompt=whole,
                chunked=self.enable_chunked_prefill or 0 < threshold <= budget,
            )
            if not more:
                return
            chunks.append((request, more))
            budget -= more
            room -= 1

    def _most(self, budget: int) -> int:
        """Tokens of a prompt in one step."""
        return min(budget, self.long_prefill_token_threshold or budget)
