"""TensorRT-LLM's scheduler: capacity of the KV cache first, then the token budget."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from stagewright.serving.batch import UNLIMITED, CacheRules, StepBatch
from stagewright.serving.engine import CachedPrefix, Engine


@dataclass(slots=True, kw_only=True)
class TensorRtLlm:
    """TensorRT-LLM with its PyTorch backend.

    Source: NVIDIA/TensorRT-LLM@002f3cc3 `tensorrt_llm/_torch/pyexecutor/scheduler/scheduler.py`,
    which names the equal lines of `cpp/tensorrt_llm/batch_manager/capacityScheduler.cpp`
    (@02a10fed) and `microBatchScheduler.cpp` (@0a949d31).

    Each step has three decisions, on requests in order of arrival:

    1. Capacity. With GUARANTEED_NO_EVICT, the default, running requests and then waiting ones have
       capacity while free blocks suffice for all of their tokens (`GuaranteedNoEvictPolicy`;
       `getRemainingBlocksToCompletion` counts prompt and output), so that no request is paused.
       Begun prompts come first here; there, a prompt that overtook another comes after it, and both
       may then wait forever. With MAX_UTILIZATION blocks must suffice for the step: for a whole
       prompt before its first chunk, for none before a later chunk, for one token of a decoding
       request (`getNeededBlocksOneStep`). At the first request without blocks, the last begun one
       is paused, and no later request is considered, until blocks suffice or none is left
       (`MaxUtilizationPolicy`). A paused request keeps its place and is recomputed.
    2. Tokens. Of `max_num_tokens`, decoding requests get theirs first. Without
       `enable_chunked_prefill` (its default) prompts run whole, and the first that does not fit
       ends the batch. With it, each prompt gets what it needs, or the remaining budget in whole
       blocks; a prompt that gets nothing does not stop a shorter one after it
       (`PyMicroBatchScheduler`, `_chunk_fcfs`).
    3. Waiting. While requests decode, all chunks of a step are held back, for at most
       `batch_wait_timeout_iters` steps, while the tokens of the step, decoding ones included, are
       fewer than `batch_wait_max_tokens_ratio` x `max_num_tokens`. Prompts that are held back take
       no blocks. With attention data parallelism none is (NVIDIA/TensorRT-LLM@00043967
       `tensorrt_llm/_torch/pyexecutor/py_executor.py`, `_schedule`, `_waiting_requests`).

    A prompt takes all its blocks with its first chunk (`add_sequence`), and they can be reused when
    it is complete (`store_context_blocks`). A request waits for a block that another prompt is
    about to compute (`_beneficial_to_skip`). With `async_scheduling` a step is scheduled when the
    previous one begins, like its overlap scheduler (`disable_overlap_scheduler` is off), except
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
    _waited_steps: int = field(default=0, init=False)  # in which prompts were held back

    @property
    def cache_rules(self) -> CacheRules:
        """Cache rules: a prompt takes all blocks at once, and is reusable when complete."""
        return CacheRules(allocate_whole_prompt=True, cache_after_compute=True)

    def schedule(self, engine: Engine) -> StepBatch:
        """Return the next batch: requests with capacity, as far as the token budget allows."""
        waiting = engine.waiting
        if not waiting and not engine.remaining_prefill and engine.reserve():
            return StepBatch(interruptible=len(engine.running) < self.max_num_seqs)
        evicts = self.capacity_scheduler_policy == "max_utilization"
        num_running = len(engine.running)
        fitting = self._max_utilization(engine) if evicts else self._no_evict(engine)
        paused = len(engine.running) < num_running
        reserved = engine.reserve()
        assert reserved
        if self._holds_back(engine, fitting):
            return StepBatch((), max_steps=1)
        prefill = self._prefill(engine, fitting)
        if prefill:
            return StepBatch(prefill)
        interruptible = not engine.waiting and len(engine.running) < self.max_num_seqs
        return StepBatch((), True, 1 if paused else UNLIMITED, interruptible)

    def _candidates(self, engine: Engine, begun: Iterable[int]) -> list[int]:
        """Begun requests, and waiting ones for which there are slots, in order of arrival."""
        slots = max(0, self.max_num_seqs - len(engine.running))
        return _by_arrival(engine, [*begun, *islice(engine.waiting, slots)])

    def _no_evict(self, engine: Engine) -> list[int]:
        """Prompts whose requests have blocks to their ends, next to all decoding ones."""
        size, remaining = engine.block_size, engine.remaining_prefill
        free = engine.kv_cache.free
        for request in engine.decoding_requests:
            free -= _blocks_to_the_end(engine, request)
            free += -(-engine.computed_tokens(request) // size)
        fitting: list[int] = []
        computing = _blocks_being_computed(engine)
        for request in [*_by_arrival(engine, remaining), *self._candidates(engine, ())]:
            needed = _blocks_to_the_end(engine, request)
            if request in remaining:
                needed -= -(-engine.tokens(request) // size)
            else:
                prefix = engine.cached_prefix(request)
                if _waits_for_block(engine, request, prefix, computing):
                    continue
                needed += engine.kv_cache.per_request - prefix.hit.blocks + prefix.hit.evictable
            if needed > free:
                break
            free -= needed
            fitting.append(request)
        return fitting

    def _max_utilization(self, engine: Engine) -> list[int]:
        """Prompts with blocks for this step; later requests are paused for earlier ones."""
        size, remaining, running = engine.block_size, engine.remaining_prefill, engine.running
        candidates = self._candidates(engine, running)
        fitting: list[int] = []
        computing = _blocks_being_computed(engine)
        index, end, taken = 0, len(candidates), 0
        while index < end:
            request = candidates[index]
            needed = 0
            if request not in running:
                prefix = engine.cached_prefix(request)
                if _waits_for_block(engine, request, prefix, computing):
                    index += 1
                    continue
                needed = -(-prefix.tokens // size) - prefix.hit.blocks + prefix.hit.evictable
                needed += engine.kv_cache.per_request
            elif request not in remaining:
                needed = engine.blocks_needed(request, 1)
            if taken + needed <= engine.kv_cache.free:
                taken += needed
                if request in remaining or request not in running:
                    fitting.append(request)
                index += 1
                continue
            later = [n for n in range(index, end) if candidates[n] in running]
            if not later:
                break
            end = later[-1]
            engine.preempt(candidates[end])
            engine.waiting = deque(_by_arrival(engine, engine.waiting))
        return fitting

    def _holds_back(self, engine: Engine, fitting: Iterable[int]) -> bool:
        """True if the prompts of this step are held back (`_waiting_requests`)."""
        min_tokens = self.batch_wait_max_tokens_ratio * self.max_num_batched_tokens
        if not (self.batch_wait_timeout_iters and min_tokens and engine.decoding):
            return False
        alone = engine.clock is engine
        prefill = self._prefill(engine, fitting, allocate=False) if alone else ()
        if not prefill:
            return False
        tokens = engine.decoding * engine.new_tokens + sum(chunk for _, chunk in prefill)
        holds = self._waited_steps < self.batch_wait_timeout_iters and tokens < min_tokens
        self._waited_steps = self._waited_steps + 1 if holds else 0
        return holds

    def _prefill(
        self, engine: Engine, fitting: Iterable[int], *, allocate: bool = True
    ) -> list[tuple[int, int]]:
        """Chunks of prompts, in order, within the token budget; `allocate` their blocks."""
        size, remaining = engine.block_size, engine.remaining_prefill
        budget = self.max_num_batched_tokens - engine.decoding * engine.new_tokens
        prefill: list[tuple[int, int]] = []
        for request in fitting:
            chunk = remaining.get(request)
            if chunk is None:
                prefix = engine.cached_prefix(request)
                chunk = prefix.tokens - prefix.blocks * size
            if chunk > budget:
                if not self.enable_chunked_prefill:
                    break
                chunk = budget // size * size
            if chunk <= 0:
                continue
            if allocate:
                _allocate(engine, request, chunk)
            prefill.append((request, chunk))
            budget -= chunk
        return prefill


def _allocate(engine: Engine, request: int, chunk: int) -> None:
    """Continue a begun prompt with a chunk, or admit a waiting request with it."""
    if request in engine.remaining_prefill:
        engine.grow(request, chunk)
        return
    engine.waiting.remove(request)
    engine.waiting.appendleft(request)
    admitted = engine.admit(chunk)
    assert admitted == chunk


def _by_arrival(engine: Engine, requests: Iterable[int]) -> list[int]:
    queued_at = engine.queued_at
    return sorted(requests, key=lambda request: (queued_at[request], request))


def _blocks_to_the_end(engine: Engine, request: int) -> int:
    """Blocks of a request's prompt and output (`getRemainingBlocksToCompletion`)."""
    tokens = engine.prompt[request] + engine.output[request]
    if engine.drafts is not None:
        tokens += engine.drafts.slots - 1
    cache = engine.kv_cache
    return min(-(-tokens // engine.block_size), cache.size - cache.per_request)


def _blocks_being_computed(engine: Engine) -> set[tuple[int, int]]:
    """First blocks that begun prompts compute and no other request finds yet."""
    prefixes = {request: engine.cached_prefix(request) for request in engine.remaining_prefill}
    blocks = (_first_uncached(engine, r, prefix.hit.blocks) for r, prefix in prefixes.items())
    return {block for block in blocks if block is not None}


def _waits_for_block(
    engine: Engine, request: int, prefix: CachedPrefix, computing: set[tuple[int, int]]
) -> bool:
    """True if a request waits for a block that another one computes; otherwise computes it."""
    block = None
    if not prefix.private_blocks:
        block = _first_uncached(engine, request, prefix.hit.blocks)
    if block is None:
        return False
    if block in computing:
        return True
    computing.add(block)
    return False


def _first_uncached(engine: Engine, request: int, cached_blocks: int) -> tuple[int, int] | None:
    """First block of a request's chain that is not cached."""
    if not engine.kv_cache.caching:
        return None
    for segment, end in zip(*engine.chain(request), strict=True):
        if cached_blocks < end:
            return segment, cached_blocks
    return None
