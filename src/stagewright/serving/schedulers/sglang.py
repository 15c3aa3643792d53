"""SGLang's scheduler: prompts run in steps of their own; admission guesses what will be made."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from stagewright.serving.batch import CacheRules, StepBatch
from stagewright.serving.engine import Engine

CLIP = 4096
"""Tokens that a request is taken to make at most (`SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION`)."""
MOST_MATCHED = 128
"""Waiting requests that are put in order (`SGLANG_WAITING_QUEUE_PREFIX_MATCH_MAX`)."""
SHORT = 32
"""Tokens (`IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD`, `..._DEPRIORITIZE_THRESHOLD`)."""
RETRACT_STEPS = 20
"""Tokens that a kept request is taken to make next (`SGLANG_RETRACT_DECODE_STEPS`)."""


@dataclass(slots=True, kw_only=True)
class SGLang:
    """SGLang 0.5.23 (`sglang/srt/managers/` of the wheel).

    1. If a batch of prompts can be formed it runs alone, else all requests decode
       (`scheduler.py`, `get_next_batch_to_run`). With `enable_mixed_chunk` requests decode beside
       it, of whose budgets their tokens are taken; if then room lacks for them they sit this step
       out (`_get_new_batch_prefill_raw`, "Mixed-style chunked prefill").
    2. A batch of prompts takes the prompt that has been begun, then waiting requests in order, as
       long as any of `max_prefill_tokens` and of `chunked_prefill_size` is left; the last is cut to
       whole pages (`_get_new_batch_prefill_raw`, `schedule_policy.py` `PrefillAdder`). Each needs
       room for the tokens it lacks, those it will make (at most 4,096) and a page; the room is what
       is free less `new_token_ratio` of what running requests will make, or all of that if clients
       send `ignore_eos`. Budgets are charged whole pages (`_update_prefill_budget`). If it lacks
       room, or there are `max_running_requests`, nobody is admitted before a request ends, or the
       batch is another one: one that was empty, or mixed (`batch_is_full`).
    3. The ratio is 0.7 x `schedule_conservativeness` and falls to 0.14 of that in 600 decode steps
       (`new_token_ratio_tracker.py`).
    4. Where a decode step lacks room, requests with the fewest tokens made are retracted, of equal
       ones the longest prompt first, but for the last one (`schedule_batch.py`, `retract_decode`):
       they wait behind all others, and of what they had only their prompts are in the cache, of
       which as much is forgotten as leaves 20 tokens for each of the others (`release_req`). The
       ratio is then (tokens made + 20 per request) / tokens that will have been made. Where the
       last one, too, lacks room it is retracted here; SGLang ends it with an error.
    5. With the policy `lpm` who has most in the cache comes first, while at most 128 wait.
       Of those of which it has at most 32 tokens, one that shares 32 with another one before it
       comes last, so that it finds these in the cache (`schedule_policy.py`,
       `_compute_prefix_matches`, `_sort_by_longest_prefix`).
    6. What a chunk has computed is in the radix cache after its step, of copies only one
       (`cache_unfinished_req`).
    7. With `scheduler_recv_interval` requests are received in one of so many steps of decode, and
       behind each batch of prompts (`scheduler_components/recv_skipper.py`).

    Its radix cache forgets whole nodes (`mem_cache/radix_cache.py`, `evict`): what a chunk of a
    prompt, or an output, added, as far as no two requests differ in it. Here, as with all
    schedulers, the last blocks of what was used least recently are forgotten, no more than needed,
    so that more of it may be found where memory is short.

    With `async_scheduling` a step is decided when the one before begins (`event_loop_overlap`, the
    default but with pipelines).
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
    _since: int = field(default=0, init=False)  # the decode step from which it falls
    _full: bool = field(default=False, init=False)
    _anew: bool = field(default=False, init=False)  # the batch is another one: not full
    _count: int = field(default=0, init=False)  # running requests when last seen
    # Of retracted requests: the tokens that are computed at once when they run again.
    _prefilled: dict[int, int] | None = field(default=None, init=False)
    _received: int = field(default=0, init=False)  # the step in which requests were received
    _known: int = field(default=0, init=False)  # waiting requests that have been received
    _prompts: bool = field(default=False, init=False)  # whether the last batch was of prompts

    @property
    def cache_rules(self) -> CacheRules:
        """Cache rules of the radix tree: blocks enter when computed, copies are freed."""
        return CacheRules(cache_after_compute=True, deduplicate=True)

    def schedule(self, engine: Engine) -> StepBatch:
        """The next batch."""
        if self.scheduler_recv_interval == 1:
            return self._schedule(engine)
        every, since = self.scheduler_recv_interval, engine.decode_step - self._received
        late: list[int] = []
        idle = not engine.running and not self._known
        if self._prompts or idle or since % every == 0:
            self._received, since = engine.decode_step, 0
        else:
            late = [engine.waiting.pop() for _ in range(len(engine.waiting) - self._known)]
        found = self._schedule(engine)
        self._known, self._prompts = len(engine.waiting), bool(found.prefill)
        engine.waiting.extend(reversed(late))
        if since % every or not found.interruptible:  # asked again where requests are received next
            return found._replace(
                max_steps=min(found.max_steps, every - since % every), interruptible=False
            )
        return found

    def _schedule(self, engine: Engine) -> StepBatch:
        """The next batch of the requests that have been received."""
        if self._anew or len(engine.running) < self._count or not engine.decoding:
            self._full = self._anew = False
        chunks: list[tuple[int, int]] = []
        decoding = engine.decoding
        if engine.remaining_prefill or (engine.waiting and not self._full):
            if self.schedule_policy == "lpm" and engine.blocks.caching:
                longest_prefix_first(engine)
            self._prefill(engine, chunks)
        self._count = len(engine.running)
        if chunks:
            beside = self.enable_mixed_chunk and decoding > 0 and engine.reserve()
            self._since += beside  # the ratio does not fall
            self._anew = beside or not decoding or any(engine.remaining_prefill.values())
            return StepBatch(chunks, decode=beside)
        if not engine.reserve():
            self._retract(engine)
            self._full = False
            if not engine.decoding:
                self._prefill(engine, chunks)
            self._count = len(engine.running)
            return StepBatch(chunks, max_steps=1)
        return StepBatch(interruptible=not self._full)

    def ratio(self, engine: Engine) -> float:
        """The share of what requests may still make that is kept for them."""
        first = min(0.7 * self.schedule_conservativeness, 1.0)
        least = 0.14 * first
        if self._ratio < 0:
            self._ratio = first
        steps = engine.decode_step - self._since
        if steps <= 0:
            return self._ratio
        return max(self._ratio - steps * (first - least) / 600, least)

    def _prefill(self, engine: Engine, chunks: list[tuple[int, int]]) -> None:
        page, waiting = engine.block_size, engine.waiting
        made = sum(
            min(engine.output[i] - engine.output_tokens(i), CLIP) for i in engine.decoding_requests
        )
        room = engine.blocks.free * page - made * (1.0 if self.ignore_eos else self.ratio(engine))
        budget, chunk = self.max_prefill_tokens, self.chunked_prefill_size
        if self.enable_mixed_chunk:
            beside = engine.decoding * engine.new_tokens
            room, budget, chunk = room - beside, budget - beside, chunk - beside
        for request, left in [*engine.remaining_prefill.items()]:
            most = min(chunk, int(room))
            more = min(left, most if most > 0 else chunk)
            if more <= 0 or not engine.grow(request, more):
                return
            chunks.append((request, more))
            charged = -(-more // page) * page
            budget, chunk = budget - charged, chunk - charged
            room -= charged + page + (min(engine.output[request], CLIP) if more == left else 0)
        while waiting and (room <= 0 or (budget > 0 and chunk > 0)):
            if len(engine.running) >= self.max_num_seqs:
                self._full = True
                return
            request = waiting[0]
            found = engine.cached_prefix(request)
            lacks = found.tokens - found.blocks * page
            makes = min(engine.output[request] - engine.output_tokens(request), CLIP)
            room -= (found.hit.evictable + found.private_blocks) * page
            more = -(-lacks // page) * page
            others = bool(chunks) or engine.decoding > 0
            if lacks + makes + page >= room and others:  # SGLang cuts outputs that never have room
                self._full = True
                return
            whole = more <= chunk
            if not whole:
                more = chunk // page * page
            if more <= 0:
                return
            admitted = engine.admit(lacks if whole else more)
            if not admitted:
                self._full = others
                return
            chunks.append((request, admitted))
            budget, chunk = budget - more, chunk - more
            room -= more + page + (min(engine.output[request], CLIP) if whole else 0)
            if room <= 0:
                self._full = True
                return

    def _retract(self, engine: Engine) -> None:
        """Retract requests until those that are left have room for a step."""
        order = sorted(
            engine.decoding_requests,
            key=lambda i: (engine.output_tokens(i), -engine.prompt[i]),
            reverse=True,
        )
        if self._prefilled is None:  # not shared with copies of the scheduler
            self._prefilled = {}
        while order:
            request = order.pop()
            known = self._prefilled.get(request, engine.prompt[request])
            self._prefilled[request] = engine.prompt[request] + engine.output_tokens(request)
            engine.preempt(request, to_front=False, keep_tokens=known)
            engine.blocks.forget(-(-RETRACT_STEPS * len(order) // engine.block_size))
            if engine.reserve():
                break
        made = sum(map(engine.output_tokens, order))
        most = sum(engine.output[i] for i in order)
        self._ratio = min(1.0, (made + RETRACT_STEPS * len(order)) / (most + 1))
        self._since = engine.decode_step + (len(order) > 0)


def longest_prefix_first(engine: Engine) -> None:
    """Sort waiting requests by cached prefix; put those last that may find more later."""
    waiting = engine.waiting
    if len(waiting) > MOST_MATCHED or len(waiting) < 2:
        return
    page = engine.block_size
    there = {request: engine.cached_prefix(request).blocks * page for request in waiting}
    seen: set[int] = set()
    last: set[int] = set()
    for request in waiting:
        if there[request] > SHORT:
            continue
        shared = 0
        keys, ends = engine.chain(request)
        for key, end in zip(keys, ends, strict=True):
            if key not in seen:
                break
            shared = end * page
        if shared >= SHORT:
            last.add(request)
        else:
            seen.update(keys)
    engine.waiting = deque(sorted(waiting, key=lambda request: (request in last, -there[request])))
