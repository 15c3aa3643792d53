"""TensorRT-LLM's scheduler: who has room for all of its tokens, then who has of the budget."""

from __future__ import annotations

from dataclasses import dataclass

from stagewright.serving.engines.engine import FOREVER, Decision, Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRtLlm:
    """TensorRT-LLM (NVIDIA/TensorRT-LLM@64e644e7 `tensorrt_llm/_torch/pyexecutor/scheduler/`).

    With GUARANTEED_NO_EVICT, its default, a request is admitted, in order, if free blocks suffice
    for it and for all running ones to their ends: so nobody is paused (`design.md`). With
    MAX_UTILIZATION blocks must suffice for one step: of requests in order, the first for which they
    do not pauses the last that has begun, until they suffice or it has paused itself; who is paused
    is computed again when there is room, in its old place, and then nobody is admitted
    (`scheduler.py`, `MaxUtilizationPolicy`; `cpp/tensorrt_llm/batch_manager/capacityScheduler.cpp`,
    `MaxUtilizationScheduler`).

    Of `max_num_tokens` per step, generation comes before context. Without `enable_chunked_prefill`
    (its default) a prompt runs in one step, with it in chunks, first come first served.
    """

    max_num_batched_tokens: int = 8192
    """Its `max_num_tokens`."""
    max_num_seqs: int = 2048
    """Its `max_batch_size`."""
    enable_chunked_prefill: bool = False
    capacity_scheduler_policy: str = "guaranteed_no_evict"

    def schedule(self, engine: Engine) -> Decision:
        """The next batch."""
        waiting = engine.waiting
        evicts = self.capacity_scheduler_policy == "max_utilization"
        paused, spare = False, 0
        if evicts:
            while engine.running and not engine.reserve():
                engine.preempt()
                paused = True
        else:
            if waiting:
                spare = engine.blocks.free - sum(map(engine.lacking, engine.running))
            assert engine.reserve()  # guaranteed by admission
        chunks: list[tuple[int, int]] = []
        budget = self.max_num_batched_tokens - engine.decoding * engine.new_tokens
        for request, left in [*engine.left.items()]:
            more = min(left, budget)
            if more > 0:
                if engine.grow(request, more):
                    chunks.append((request, more))
                    budget -= more
                elif evicts:  # it is the last that has begun
                    engine.preempt(request)
                    paused = True
        while waiting and not paused and budget > 0 and len(engine.running) < self.max_num_seqs:
            request = waiting[0]
            need = 0
            if not evicts:
                found = engine.look(request)
                need = engine.most_blocks(request) - found.blocks + found.hit.idle
                if need > spare:
                    break
            more = engine.admit(budget, chunked=self.enable_chunked_prefill)
            if not more:
                break
            spare -= need
            chunks.append((request, more))
            budget -= more
        if chunks:
            return Decision(chunks)
        repeats = 1 if paused else FOREVER
        return Decision((), True, repeats, not waiting and len(engine.running) < self.max_num_seqs)
