"""SGLang's scheduler: prompts run in steps of their own; admission guesses what will be made."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from stagewright.serving.batch import CacheRules, StepBatch
from stagewright.serving.engine import Engine

CLIP = 4096
"""Output tokens assumed at most (`SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION`)."""
MAX_MATCHED = 128
"""Waiting requests that are sorted (`SGLANG_WAITING_QUEUE_PREFIX_MATCH_MAX`)."""
SHORT = 32
"""Tokens (`IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD`, `..._DEPRIORITIZE_THRESHOLD`)."""
RETRACT_STEPS = 20
"""Tokens that a request gets next after a retraction (`SGLANG_RETRACT_DECODE_STEPS`)."""


@dataclass(slots=True, kw_only=True)
class SGLang:
    """SGLang 0.5.23 (`sglang/srt/managers/` of the wheel).

    1. A batch of prompts runs alone if one can be formed; otherwise all requests decode
       (`scheduler.py`, `get_next_batch_to_run`). With `enable_mixed_chunk` requests decode in the
       same step, and their tokens count against its budgets; where they have no room they skip the
       step (`_get_new_batch_prefill_raw`, "Mixed-style chunked prefill").
    2. A batch of prompts takes the begun prompt, then waiting requests in order, while
       `max_prefill_tokens` and `chunked_prefill_size` last; the last prompt is cut to whole pages
       (`_get_new_batch_prefill_raw`, `schedule_policy.py` `PrefillAdder`). Each needs room for its
       uncached tokens, its output (at most 4,096 tokens) and a page. The room is what is free, less
       `new_token_ratio` of what running requests will generate (all of it if clients send
       `ignore_eos`). Budgets are charged whole pages (`_update_prefill_budget`). Without room, or
       with `max_running_requests`, no request is admitted before one finishes, or before a batch
       that was empty or mixed (`batch_is_full`).
    3. The ratio is 0.7 x `schedule_conservativeness` and falls to 0.14 of that in 600 decode steps
       (`new_token_ratio_tracker.py`).
    4. Where a decode step has no room, requests with the fewest output tokens are retracted, of
       equal ones the longest prompt first, except the last one (`schedule_batch.py`,
       `retract_decode`). They wait after all others, with only their prompts cached, of which so
       much is evicted that each other request has room for 20 tokens (`release_req`). The ratio is
       then (generated + 20 per request) / (all output tokens). Where the last request has no room
       it is retracted here; SGLang ends it with an error.
    5. With the policy `lpm` the request with the longest cached prefix comes first, while at most
       128 wait. Of those with at most 32 cached tokens, one that shares 32 with an earlier one
       comes last, so that it finds these cached (`schedule_policy.py`, `_compute_prefix_matches`,
       `_sort_by_longest_prefix`).
    6. A chunk enters the radix cache after its step, and copies are freed
       (`cache_unfinished_req`).
    7. With `scheduler_recv_interval` N, requests are received in every Nth decode step, and after
       each batch of prompts (`scheduler_components/recv_skipper.py`).

    Its radix cache evicts whole nodes (`mem_cache/radix_cache.py`, `evict`): what a chunk of a
    prompt, or an output, added, as far as no two requests differ in it. Here, as with all
    schedulers, the least recently used blocks are evicted, no more than needed, so that more may be
    found where memory is scarce.

    With `async_scheduling` a step is scheduled when the previous one begins (`event_loop_overlap`,
    the default except with pipelines).
    """

    max_prefill_tokens: int = 16_384
    chunked_prefill_size: int = 8192
    max_num_seqs: int = 1024
    """SGLang's `max_running_requests`."""
    schedule_conservativeness: float = 1.0
    schedule_policy: str = "fcfs"
    enable_mixed_chunk: bool = False
    ignore_eos: bool = False
    scheduler_recv_interval: int = 1
    async_scheduling: bool = False
    _ratio: float = field(default=-1.0, init=False)
    _ratio_step: int = field(default=0, init=False)  # the decode step from which it falls
    _full: bool = field(default=False, init=False)
    _new_batch: bool = field(default=False, init=False)  # the next batch is not full
    _num_running: int = field(default=0, init=False)  # after the previous batch
    # Retracted requests: tokens that are computed at once when they run again.
    _computed_at_once: dict[int, int] | None = field(default=None, init=False)
    _received_step: int = field(default=0, init=False)  # when requests were received
    _num_received: int = field(default=0, init=False)  # waiting requests that were received
    _was_prefill: bool = field(default=False, init=False)  # the previous batch had prompts

    @property
    def cache_rules(self) -> CacheRules:
        """Cache rules of the radix tree: blocks enter when computed, copies are freed."""
        return CacheRules(cache_after_compute=True, deduplicate=True)

    def schedule(self, engine: Engine) -> StepBatch:
        """Return the next batch of requests that have been received."""
        interval, steps = self.scheduler_recv_interval, engine.decode_step - self._received_step
        if interval == 1:
            return self._schedule(engine)
        waiting, not_received = engine.waiting, list[int]()
        idle = not engine.running and not self._num_received
        if self._was_prefill or idle or steps % interval == 0:
            self._received_step, steps = engine.decode_step, 0
        else:
            not_received = [waiting.pop() for _ in range(len(waiting) - self._num_received)]
        batch = self._schedule(engine)
        self._num_received, self._was_prefill = len(engine.waiting), bool(batch.prefill)
        engine.waiting.extend(reversed(not_received))
        if steps % interval or not batch.interruptible:  # called again when requests are received
            max_steps = min(batch.max_steps, interval - steps % interval)
            return batch._replace(max_steps=max_steps, interruptible=False)
        return batch

    def _schedule(self, engine: Engine) -> StepBatch:
        """Return a batch of prompts if one can be formed, otherwise a decode step."""
        decoding = engine.decoding
        if self._new_batch or len(engine.running) < self._num_running or not decoding:
            self._full = self._new_batch = False
        prefill: list[tuple[int, int]] = []
        if engine.remaining_prefill or (engine.waiting and not self._full):
            if self.schedule_policy == "lpm" and engine.kv_cache.caching:
                longest_prefix_first(engine)
            self._prefill(engine, prefill)
        self._num_running = len(engine.running)
        if prefill:
            mixed = self.enable_mixed_chunk and decoding > 0 and engine.reserve()
            self._ratio_step += mixed  # the ratio does not fall
            self._new_batch = mixed or not decoding or any(engine.remaining_prefill.values())
            return StepBatch(prefill, decode=mixed)
        if not engine.reserve():
            self._retract(engine)
            self._full = False
            if not engine.decoding:
                self._prefill(engine, prefill)
            self._num_running = len(engine.running)
            return StepBatch(prefill, max_steps=1)
        return StepBatch(interruptible=not self._full)

    def ratio(self, engine: Engine) -> float:
        """Share of the tokens still to generate for which room is kept."""
        initial = min(0.7 * self.schedule_conservativeness, 1.0)
        lowest = 0.14 * initial
        if self._ratio < 0:
            self._ratio = initial
        steps = max(engine.decode_step - self._ratio_step, 0)
        return max(self._ratio - steps * (initial - lowest) / 600, lowest) if steps else self._ratio

    def _prefill(self, engine: Engine, prefill: list[tuple[int, int]]) -> None:
        """Add chunks of begun and of waiting prompts, as far as budgets and room allow."""
        page, waiting = engine.block_size, engine.waiting
        lefts = (engine.output[r] - engine.output_tokens(r) for r in engine.decoding_requests)
        to_generate = sum(min(left, CLIP) for left in lefts)
        kept = to_generate * (1.0 if self.ignore_eos else self.ratio(engine))
        room = engine.kv_cache.free * page - kept
        budget, chunk_budget = self.max_prefill_tokens, self.chunked_prefill_size
        if self.enable_mixed_chunk:
            tokens = engine.decoding * engine.new_tokens
            room, budget, chunk_budget = room - tokens, budget - tokens, chunk_budget - tokens
        for request, remaining in [*engine.remaining_prefill.items()]:
            limit = min(chunk_budget, int(room))
            chunk = min(remaining, limit if limit > 0 else chunk_budget)
            if chunk <= 0 or not engine.grow(request, chunk):
                return
            prefill.append((request, chunk))
            pages = -(-chunk // page) * page
            budget, chunk_budget = budget - pages, chunk_budget - pages
            room -= pages + page
            if chunk == remaining:
                room -= min(engine.output[request], CLIP)
        while waiting and (room <= 0 or (budget > 0 and chunk_budget > 0)):
            if len(engine.running) >= self.max_num_seqs:
                self._full = True
                return
            request = waiting[0]
            prefix = engine.cached_prefix(request)
            uncached = prefix.tokens - prefix.blocks * page
            output = min(engine.output[request] - engine.output_tokens(request), CLIP)
            room -= (prefix.hit.evictable + prefix.private_blocks) * page
            pages = -(-uncached // page) * page
            others = bool(prefill) or engine.decoding > 0
            if uncached + output + page >= room and others:  # SGLang cuts outputs that never fit
                self._full = True
                return
            complete = pages <= chunk_budget
            if not complete:
                pages = chunk_budget // page * page
            if pages <= 0:
                return
            admitted = engine.admit(uncached if complete else pages)
            if not admitted:
                self._full = others
                return
            prefill.append((request, admitted))
            budget, chunk_budget = budget - pages, chunk_budget - pages
            room -= pages + page + (min(engine.output[request], CLIP) if complete else 0)
            if room <= 0:
                self._full = True
                return

    def _retract(self, engine: Engine) -> None:
        """Retract requests until the others have room for a step."""
        order = sorted(
            engine.decoding_requests,
            key=lambda r: (engine.output_tokens(r), -engine.prompt[r]),
            reverse=True,
        )
        if self._computed_at_once is None:  # not shared with copies of the scheduler
            self._computed_at_once = {}
        while order:
            request = order.pop()
            tokens = self._computed_at_once.get(request, engine.prompt[request])
            self._computed_at_once[request] = engine.prompt[request] + engine.output_tokens(request)
            engine.preempt(request, to_front=False, keep_tokens=tokens)
            engine.kv_cache.forget(-(-RETRACT_STEPS * len(order) // engine.block_size))
            if engine.reserve():
                break
        generated = sum(map(engine.output_tokens, order))
        output = sum(engine.output[request] for request in order)
        self._ratio = min(1.0, (generated + RETRACT_STEPS * len(order)) / (output + 1))
        self._ratio_step = engine.decode_step + (len(order) > 0)


def longest_prefix_first(engine: Engine) -> None:
    """Sort waiting requests by cached prefix; put those last that may find more later."""
    waiting = engine.waiting
    if len(waiting) > MAX_MATCHED or len(waiting) < 2:
        return
    page = engine.block_size
    cached = {request: engine.cached_prefix(request).blocks * page for request in waiting}
    computed_soon: set[int] = set()
    deferred: set[int] = set()
    for request in waiting:
        if cached[request] > SHORT:
            continue
        shared = 0
        segments, ends = engine.chain(request)
        for segment, end in zip(segments, ends, strict=True):
            if segment not in computed_soon:
                break
            shared = end * page
        if shared >= SHORT:
            deferred.add(request)
        else:
            computed_soon.update(segments)
    engine.waiting = deque(sorted(waiting, key=lambda r: (r in deferred, -cached[r])))
