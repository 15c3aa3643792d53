"""TensorRT-LLM's scheduler: who has room for all of its tokens, then who has of the budget."""

from __future__ import annotations

from dataclasses import dataclass

from stagewright.serving.engines.engine import Decision, Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRtLlm:
    """TensorRT-LLM with GUARANTEED_NO_EVICT, its default (NVIDIA/TensorRT-LLM@64e644e7
    `tensorrt_llm/_torch/pyexecutor/scheduler/design.md`).

    A request is admitted, in order, if free blocks suffice for it and for all running ones to their
    ends: so nobody is paused. Of `max_num_tokens` per step, generation comes before context.
    Without `enable_chunked_prefill` (its default) a prompt runs in one step, with it in chunks,
    first come first served.
    """

    max_num_batched_tokens: int = 8192
    """Its `max_num_tokens`."""
    max_num_seqs: int = 2048
    """Its `max_batch_size`."""
    enable_chunked_prefill: bool = False

    def schedule(self, engine: Engine) -> Decision:
        """The next batch."""
        waiting = engine.waiting
        spare = engine.blocks.free - sum(map(engine.lacking, engine.running)) if waiting else 0
        assert engine.reserve()  # guaranteed by admission
        chunks: list[tuple[int, int]] = []
        budget = self.max_num_batched_tokens - engine.decoding
        for request, left in [*engine.left.items()]:
            more = min(left, budget)
            if more > 0 and engine.grow(request, more):
                chunks.append((request, more))
                budget -= more
        while waiting and budget > 0 and len(engine.running) < self.max_num_seqs:
            request = waiting[0]
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
        return Decision(open=not waiting and len(engine.running) < self.max_num_seqs)
