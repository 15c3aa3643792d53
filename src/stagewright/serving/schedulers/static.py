"""Static batching: a batch is formed, and the next when all of it is done."""

from __future__ import annotations

from dataclasses import dataclass

from stagewright.serving.batch import StepBatch
from stagewright.serving.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Static:
    """Requests are served in batches, as before continuous batching (Orca, OSDI 2022, section 3).

    An idle engine takes as many waiting requests as there are, up to `max_num_seqs` and as blocks
    suffice to their ends; their prompts run in one step, without padding. What arrives then waits
    until all of them are done. Places of requests that are done early stay empty.
    """

    max_num_seqs: int = 256

    def schedule(self, engine: Engine) -> StepBatch:
        """The next batch."""
        chunks: list[tuple[int, int]] = []
        if not engine.running:
            spare = engine.blocks.free
            while engine.waiting and len(chunks) < self.max_num_seqs:
                request = engine.waiting[0]
                spare -= engine.max_blocks(request)
                if spare < 0:
                    break
                chunks.append((request, engine.admit(engine.tokens(request))))
        assert engine.reserve()
        return StepBatch(chunks, interruptible=False)
