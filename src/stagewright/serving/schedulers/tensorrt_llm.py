"""TensorRT-LLM's scheduler: who has room for all of its tokens, then who has of the budget."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from stagewright.serving.batch import UNLIMITED, CacheRules, StepBatch
from stagewright.serving.engine import CachedPrefix, Engine


@dataclass(slots=True, kw_only=True)
class TensorRtLlm:
    """TensorRT-LLM with its PyTorch backend (NVIDIA/TensorRT-LLM@002f3cc3
    `tensorrt_llm/_torch/pyexecutor/scheduler/scheduler.py`, which says of which lines of
    `cpp/tensorrt_llm/batch_manager/capacityScheduler.cpp` (@02a10fed) and `microBatchScheduler.cpp`
    (@0a949d31) each class is the equal).

    In each step it asks twice, of requests in the order of their arrival, and may then wait.

    1. Who has blocks? With GUARANTEED_NO_EVICT, its default, who runs and, in order, who waits
       while free blocks suffice for all tokens of all of them (`GuaranteedNoEvictPolicy`;
       `getRemainingBlocksToCompletion` counts prompt and output): so nobody is paused. Prompts that
       have begun come first here; there, one that has overtaken another comes behind it, and both
       may then wait for ever. With
       MAX_UTILIZATION blocks must suffice for the step: for a whole prompt before its first chunk,
       for none before a later one, for a token of who decodes (`getNeededBlocksOneStep`). At the
       first for whom they do not suffice the last that has begun is paused, itself or one behind
       it, and nobody behind that one is looked at, until they suffice or nobody is left
       (`MaxUtilizationPolicy`). Who is paused keeps its place and is computed again.
    2. Who has tokens of `max_num_tokens`? Who decodes comes first. Without `enable_chunked_prefill`
       (its default) prompts run whole, and the first that does not fit ends this. With it each in
       turn gets what it lacks, or what is left, cut to whole blocks; who then gets nothing does not
       keep a shorter one behind it from running (`PyMicroBatchScheduler`, `_chunk_fcfs`).
    3. Do prompts wait for others? While requests decode, all chunks of a step are held back, for at
       most `batch_wait_timeout_iters` steps, as long as the step's tokens, with those of who
       decodes, are fewer than `batch_wait_max_tokens_ratio` x `max_num_tokens`. Held prompts take
       no blocks. With attention data parallelism nobody waits (NVIDIA/TensorRT-LLM@00043967
       `tensorrt_llm/_torch/pyexecutor/py_executor.py`, `_schedule`, `_waiting_requests`).

    A prompt's blocks are all taken with its first chunk (`add_sequence`) and may be reused when the
    prompt is done (`store_context_blocks`); who would compute a block that another prompt is about
    to compute waits for it (`_beneficial_to_skip`). With `async_scheduling` a step is decided when
    the one before begins, as its overlap scheduler does (`disable_overlap_scheduler` is off), but
    with pipelines.
    """

    max_num_batched_tokens: int = 8192
    """TensorRT-LLM's `max_num_tokens`."""
    max_num_seqs: int = 2048
    """TensorRT-LLM's `max_batch_size`."""
    enable_chunked_prefill: bool = False
    capacity_scheduler_policy: str = "guaranteed_no_evict"
    batch_wait_timeout_iters: int = 0
    batch_wait_max_tokens_ratio: float = 0.0
    async_scheduling: bool = False
    _waited: int = field(default=0, init=False)  # steps for which prompts have been held back

    @property
    def cache_rules(self) -> CacheRules:
        """Cache rules: a prompt takes all blocks at once, and is reusable when complete."""
        return CacheRules(reserve_whole_prompt=True, cache_after_compute=True)

    def schedule(self, engine: Engine) -> StepBatch:
        """The next batch."""
        waiting = engine.waiting
        if not waiting and not engine.remaining_prefill and engine.reserve():
            return StepBatch(interruptible=len(engine.running) < self.max_num_seqs)
        evicts = self.capacity_scheduler_policy == "max_utilization"
        before = len(engine.running)
        fitting = self._utilized(engine) if evicts else self._guaranteed(engine)
        paused = len(engine.running) < before
        reserved = engine.reserve()
        assert reserved
        if self._holds(engine, fitting):
            return StepBatch((), max_steps=1)
        chunks = self._chunks(engine, fitting)
        if chunks:
            return StepBatch(chunks)
        open_ = not engine.waiting and len(engine.running) < self.max_num_seqs
        return StepBatch((), True, 1 if paused else UNLIMITED, open_)

    def _line(self, engine: Engine, begun: Iterable[int]) -> list[int]:
        """Requests in order: those that have begun, and who waits, as far as there are places."""
        places = max(0, self.max_num_seqs - len(engine.running))
        return _in_order(engine, [*begun, *islice(engine.waiting, places)])

    def _guaranteed(self, engine: Engine) -> list[int]:
        """Requests with prompts that have blocks to their ends, with all that decode."""
        size, left = engine.block_size, engine.remaining_prefill
        spare = engine.blocks.free
        for request in engine.decoding_requests:
            spare -= _to_the_end(engine, request) - -(-engine.computed_tokens(request) // size)
        fitting: list[int] = []
        coming = _coming(engine)
        for request in [*_in_order(engine, left), *self._line(engine, ())]:
            if request in left:
                need = _to_the_end(engine, request) - -(-engine.tokens(request) // size)
            else:
                found = engine.cached_prefix(request)
                if _skips(engine, request, found, coming):
                    continue
                need = _to_the_end(engine, request) - found.hit.blocks + found.hit.evictable
                need += engine.blocks.per_request
            if need > spare:
                break
            spare -= need
            fitting.append(request)
        return fitting

    def _utilized(self, engine: Engine) -> list[int]:
        """Requests with prompts that have blocks for this step; others are paused for them."""
        size, left, running = engine.block_size, engine.remaining_prefill, engine.running
        line = self._line(engine, running)
        fitting: list[int] = []
        coming = _coming(engine)
        at, end, taken = 0, len(line), 0
        while at < end:
            request = line[at]
            need = 0
            if request not in running:
                found = engine.cached_prefix(request)
                if _skips(engine, request, found, coming):
                    at += 1
                    continue
                need = -(-found.tokens // size) - found.hit.blocks + found.hit.evictable
                need += engine.blocks.per_request
            elif request not in left:
                need = engine.blocks_needed(request, 1)
            if taken + need <= engine.blocks.free:
                taken += need
                if request in left or request not in running:
                    fitting.append(request)
                at += 1
                continue
            behind = [nth for nth in range(at, end) if line[nth] in running]
            if not behind:
                break
            end = behind[-1]
            engine.preempt(line[end])
            engine.waiting = deque(_in_order(engine, engine.waiting))
        return fitting

    def _holds(self, engine: Engine, fitting: Iterable[int]) -> bool:
        """True if the prompts of this step are held back (`_waiting_requests`)."""
        least = self.batch_wait_max_tokens_ratio * self.max_num_batched_tokens
        if not (self.batch_wait_timeout_iters and least and engine.decoding):
            return False
        chunks = self._chunks(engine, fitting, take=False) if engine.clock is engine else ()
        if not chunks:
            return False
        tokens = engine.decoding * engine.new_tokens + sum(more for _, more in chunks)
        holds = self._waited < self.batch_wait_timeout_iters and tokens < least
        self._waited = self._waited + 1 if holds else 0
        return holds

    def _chunks(
        self, engine: Engine, fitting: Iterable[int], *, take: bool = True
    ) -> list[tuple[int, int]]:
        """Give the budget to prompts, in order; they take their blocks, or would."""
        size, left = engine.block_size, engine.remaining_prefill
        budget = self.max_num_batched_tokens - engine.decoding * engine.new_tokens
        chunks: list[tuple[int, int]] = []
        for request in fitting:
            lacks = left.get(request)
            if lacks is None:
                found = engine.cached_prefix(request)
                lacks = found.tokens - found.blocks * size
            more = lacks
            if lacks > budget:
                if not self.enable_chunked_prefill:
                    break
                more = budget // size * size
            if more <= 0:
                continue
            if take:
                _take(engine, request, more)
            chunks.append((request, more))
            budget -= more
        return chunks


def _take(engine: Engine, request: int, more: int) -> None:
    """Let a prompt go on with so many tokens, or begin with them."""
    if request in engine.remaining_prefill:
        engine.grow(request, more)
        return
    engine.waiting.remove(request)
    engine.waiting.appendleft(request)
    admitted = engine.admit(more)
    assert admitted == more


def _in_order(engine: Engine, requests: Iterable[int]) -> list[int]:
    arrival = engine.arrival_time
    return sorted(requests, key=lambda request: (arrival[request], request))


def _to_the_end(engine: Engine, request: int) -> int:
    """Blocks of a request's prompt and output (`getRemainingBlocksToCompletion`)."""
    most = engine.prompt[request] + engine.output[request]
    if engine.drafts is not None:
        most += engine.drafts.slots - 1
    cache = engine.blocks
    return min(-(-most // engine.block_size), cache.size - cache.per_request)


def _coming(engine: Engine) -> set[tuple[int, int]]:
    """The first blocks that prompts under way compute, and that nobody finds yet."""
    return {
        block
        for request in engine.remaining_prefill
        if (block := _first_new(engine, request, engine.cached_prefix(request).hit.blocks))
        is not None
    }


def _skips(engine: Engine, request: int, found: CachedPrefix, coming: set[tuple[int, int]]) -> bool:
    """True if a request waits for a block that another one computes."""
    block = _first_new(engine, request, found.hit.blocks) if not found.private_blocks else None
    if block is None:
        return False
    if block in coming:
        return True
    coming.add(block)
    return False


def _first_new(engine: Engine, request: int, found: int) -> tuple[int, int] | None:
    """The first block of what requests have in common that is not in the cache."""
    if not engine.blocks.caching:
        return None
    for key, end in zip(*engine.chain(request), strict=True):
        if found < end:
            return key, found
    return None
