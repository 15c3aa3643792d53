"""Static batching: a batch is formed, and the next when all of it is done."""

from __future__ import annotations

from dataclasses import dataclass

from stagewright.serving.batch import StepBatch
from stagewright.serving.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Static:
    """Requests are served in batches, as before continuous batching (Orca, OSDI 2022, section 3).

    An idle engine takes as many waiting requests as there are, up to `max_num_seqs` and as blocks
    suffice to their ends; their prompts run in one step, without padding. Later arrivals wait until
    all of them have finished. Slots of requests that finish early stay empty.
    """

    max_num_seqs: int = 256

    def schedule(self, engine: Engine) -> StepBatch:
        """Return a new batch if the previous one has finished, otherwise decode."""
        prefill: list[tuple[int, int]] = []
        if not engine.running:
            free = engine.kv_cache.free
            while engine.waiting and len(prefill) < self.max_num_seqs:
                request = engine.waiting[0]
                free -= engine.max_blocks(request)
                if free < 0:
                    break
                prefill.append((request, engine.admit(engine.tokens(request))))
        assert engine.reserve()
        return StepBatch(prefill, interruptible=False)
