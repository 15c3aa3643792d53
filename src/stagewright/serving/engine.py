"""One serving engine: runs the batches that its scheduler decides on, as discrete events.

Between two changes of the batch, every step gives each decoding request one token. The step at
which a request finishes is therefore known when its decode starts: a request that has g of n tokens
after step s finishes at step s + n - g. Finish steps lie in a heap, and all steps up to the next
change of the batch are one event (fast-forward), whose duration is an arithmetic series.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple, Protocol

from stagewright.serving.batch import (
    NO_RUN,
    BatchPlan,
    CacheRules,
    DecodeRun,
    StepBatch,
    series_sum,
    steps_to_reach,
)
from stagewright.serving.kv_cache import CacheHit, PagedKvCache
from stagewright.serving.speculative import Drafts
from stagewright.serving.step_log import (
    GAPS,
    MAX_SAMPLES,
    STEP,
    STEP_AND_GAPS,
    EngineSamples,
    StepLog,
)
from stagewright.serving.steps.step_times import StepTimes
from stagewright.serving.workload import NO_CHAIN, Chain, Records, Workload


class Scheduler(Protocol):
    """Decides what the next step of an engine computes.

    Optional attributes of a scheduler:

    - `async_scheduling: bool`: a step is scheduled when the previous one begins, and sees only
      what has arrived by then.
    - `cache_rules: CacheRules`: when prompts take KV blocks, and when others may reuse them.
    """

    def schedule(self, engine: Engine) -> StepBatch:
        """Return the next batch; admit, preempt and allocate KV blocks by the engine's methods.

        An empty batch means that nothing can run until a request arrives.
        """
        ...


class SchedulerWrapper:
    """Scheduler that calls another one, and has its optional attributes."""

    scheduler: Scheduler

    @property
    def async_scheduling(self) -> bool:
        """Attribute of the wrapped scheduler."""
        return bool(getattr(self.scheduler, "async_scheduling", False))

    @property
    def cache_rules(self) -> CacheRules:
        """Attribute of the wrapped scheduler."""
        return getattr(self.scheduler, "cache_rules", CacheRules())


class Clock(Protocol):
    """Engines that advance together: one, or with dp and experts a lockstep group."""

    next_event: float
    """End of the current batch or, if idle, arrival of the next request."""

    @property
    def engines(self) -> Sequence[Engine]:
        """Engines of this clock."""
        ...

    def advance(self, until: float) -> None:
        """Process all events up to `until`; afterwards a later batch is running."""
        ...

    def on_arrival(self, engine: Engine) -> None:
        """React to a request that was added to the arrivals of one engine."""
        ...


class CachedPrefix(NamedTuple):
    """Cached part of a waiting request."""

    tokens: int
    """Tokens that must be cached or computed before the next one."""
    hit: CacheHit
    private_blocks: int
    """Blocks of a preempted request that only it has."""

    @property
    def blocks(self) -> int:
        """All cached blocks."""
        return self.hit.blocks + self.private_blocks


class Engine:
    """Queue, running requests, KV cache and current batch of one engine.

    Schedulers read `waiting`, `running` (in order of admission), `remaining_prefill`, `decoding`,
    `kv_cache`, `tokens`, `computed_tokens`, `blocks_needed`; they call `reserve`, `admit`, `grow`
    and `preempt`. `advance` runs the engine up to a given time.
    """

    def __init__(
        self,
        workload: Workload,
        records: Records,
        kv_cache: PagedKvCache,
        scheduler: Scheduler,
        times: StepTimes,
        sample_every: float = math.inf,
    ) -> None:
        """Start idle. `sample_every`: seconds between samples of queue, batch and cache."""
        self.records, self.kv_cache = records, kv_cache
        self.block_size = kv_cache.block_size
        self.scheduler, self.times = scheduler, times
        self.prompt, self.output = workload.prompt, workload.output
        self.queued_at = records.reached
        """Time at which each request entered a queue, after HTTP and tokenizer."""
        self._chains = workload.chains
        self.async_scheduling = bool(getattr(scheduler, "async_scheduling", False))
        """A step is scheduled when the previous one begins."""
        rules: CacheRules = getattr(scheduler, "cache_rules", CacheRules())
        self.allocate_whole_prompt, self.cache_after_compute, self.deduplicate = rules
        self.clock: Clock = self
        """Clock of this engine: the engine itself, or its lockstep group."""

        self.arrivals: deque[int] = deque()
        """Requests that arrive later, or that the scheduler has not seen, in order of arrival."""
        self.waiting: deque[int] = deque()
        """Requests that the scheduler sees and has not admitted."""
        self.running: dict[int, None] = {}
        self.remaining_prefill: dict[int, int] = {}
        """Prompt tokens that running requests have still to compute."""
        self.loading: dict[int, int] = {}
        """Tokens whose KV cache is on its way to blocks of this engine, by request."""
        self.generated: dict[int, int] = {}
        """Output tokens of preempted requests."""
        self.completed: list[int] = []
        """Finished requests; the simulation empties the list."""
        self.drafts: Drafts | None = None
        """Speculative decoding; None: each step gives a request one token."""

        self.now = 0.0
        self.next_event = math.inf
        """End of the current batch or, if idle, arrival of the next request."""
        self.decode_step = 0
        """Number of decode steps so far."""
        self.context_tokens = 0
        """Cached tokens of all decoding requests."""
        self.step_log, self.samples = StepLog(), EngineSamples.none()
        self._next_sample = self._sample_every = sample_every
        # Decoding requests: the step that gives the last token; a heap of these, some outdated.
        self._finish_step: dict[int, int] = {}
        self._finish_heap: list[tuple[int, int]] = []
        # [s % block_size]: decoding requests whose token of decode step s is the first of a block.
        self._block_starts = [0] * self.block_size
        self._draft_blocks: dict[int, int] = {}  # blocks of decoding requests with drafts
        # Time of the last token of decoding requests, and of those for which it differs.
        self._token_time = 0.0
        self._token_time_of: dict[int, float] = {}
        # Preempted requests: time of the last token, and tokens that had been computed.
        self._preempted: dict[int, tuple[float, int]] = {}
        # The current batch: its steps, seconds of the first step, and growth per step.
        self._batch = StepBatch()
        self._num_decodes = 0
        self._steps, self._step_seconds, self._step_growth = NO_RUN
        self._visible_until = 0.0  # the next batch sees arrivals up to this time

    # ---- queries of schedulers -------------------------------------------------------------------

    @property
    def decoding(self) -> int:
        """Number of requests that get a token in every step."""
        return len(self._finish_step)

    @property
    def decoding_requests(self) -> list[int]:
        """Requests that get a token in every step."""
        return [*self._finish_step]

    @property
    def new_tokens(self) -> int:
        """Tokens that a step computes of a decoding request: the next one, and drafts."""
        return 1 if self.drafts is None else 1 + self.drafts.number

    def tokens(self, request: int) -> int:
        """Tokens that must be cached before a request's next one: prompt and generated."""
        tokens = self.prompt[request]
        return tokens + self.generated.get(request, 0) if self.generated else tokens

    def computed_tokens(self, request: int) -> int:
        """Computed tokens of a running request."""
        remaining = self.remaining_prefill.get(request)
        if remaining is not None:
            return self.tokens(request) - remaining
        steps_left = self._finish_step[request] - self.decode_step
        return self.prompt[request] + self.output[request] - 1 - steps_left

    def output_tokens(self, request: int) -> int:
        """Output tokens that a request has."""
        finish = self._finish_step.get(request)
        if finish is None:
            return self.generated.get(request, 0)
        return self.output[request] - finish + self.decode_step

    def blocks_needed(self, request: int, tokens: int) -> int:
        """Blocks that a running request needs for further `tokens`; with drafts, for a step."""
        computed, size = self.computed_tokens(request), self.block_size
        if self.drafts is not None and request in self._draft_blocks:
            blocks = -(-(computed + self.drafts.slots) // size)
            return max(0, blocks - self._draft_blocks[request])
        return -(-(computed + tokens) // size) + (-computed // size)

    def max_blocks(self, request: int) -> int:
        """Blocks of a request when it finishes."""
        tokens = self.prompt[request] + self.output[request] - 1
        if self.drafts is not None:
            tokens += self.drafts.slots - 1
        return -(-tokens // self.block_size) + self.kv_cache.per_request

    def blocks_to_finish(self, request: int) -> int:
        """Blocks that a running request needs until it finishes."""
        blocks = self._draft_blocks.get(request)
        if blocks is None:
            all_allocated = self.allocate_whole_prompt and request in self.remaining_prefill
            tokens = self.tokens(request) if all_allocated else self.computed_tokens(request)
            blocks = -(-tokens // self.block_size)
        return self.max_blocks(request) - self.kv_cache.per_request - blocks

    def chain(self, request: int) -> Chain:
        """Segments that a request may share with others, and their ends in blocks."""
        return NO_CHAIN if self._chains is None else self._chains[request]

    def cached_prefix(self, request: int) -> CachedPrefix:
        """Cached part of a waiting request; its last token is computed in any case."""
        tokens, (segments, ends) = self.tokens(request), self.chain(request)
        limit = (tokens - 1) // self.block_size
        hit = self.kv_cache.find(segments, ends, limit)
        private_blocks = 0
        preempted = self._preempted.get(request)
        if preempted is not None and (not ends or hit.blocks >= min(ends[-1], limit)):
            resumable = self.kv_cache.resumable(request)
            limit = min(limit, preempted[1] // self.block_size)
            private_blocks = min(resumable, limit - hit.blocks)
        return CachedPrefix(tokens, hit, private_blocks)

    # ---- actions of schedulers -------------------------------------------------------------------

    def reserve(self) -> bool:
        """Take the blocks that decoding requests need in the next step, if enough are free."""
        kv_cache = self.kv_cache
        if self.drafts is not None:
            needed = {request: self.blocks_needed(request, 1) for request in self._finish_step}
            if sum(needed.values()) > kv_cache.free:
                return False
            for request, count in needed.items():
                self.take(request, count)
            return True
        count = self._block_starts[self.decode_step % self.block_size]
        if count > kv_cache.free:
            return False
        kv_cache.free -= count
        return True

    def take(self, request: int, blocks: int) -> None:
        """Take blocks for the next step of a decoding request (see `blocks_needed`)."""
        self.kv_cache.free -= blocks
        if self.drafts is not None:
            self._draft_blocks[request] += blocks

    def admit(
        self, max_tokens: int, *, full_sequence_must_fit: bool = True, chunked: bool = True
    ) -> int:
        """Admit the first waiting request with a chunk of at most `max_tokens`.

        Returns the chunk's tokens; 0 if too few blocks are free for it (`full_sequence_must_fit`:
        for the whole prompt), or if the prompt is longer and must not be `chunked`.
        """
        request = self.waiting[0]
        size, kv_cache, records = self.block_size, self.kv_cache, self.records
        segments, ends = self.chain(request)
        tokens, hit, private_blocks = self.cached_prefix(request)
        cached_blocks = hit.blocks + private_blocks
        computed = cached_blocks * size
        chunk = tokens - computed
        if chunk > max_tokens:
            if not chunked:
                return 0
            chunk = max_tokens
        computed += chunk
        per_request = kv_cache.per_request
        needed = per_request - (-(tokens if full_sequence_must_fit else computed) // size)
        if needed - hit.blocks + hit.evictable > kv_cache.free:
            return 0
        if request in self._preempted:
            kv_cache.resume(request, private_blocks)
        elif math.isnan(records.scheduled[request]):
            records.scheduled[request] = self.now
            if cached_blocks:
                records.cached[request] = cached_blocks * size
        if hit.segments:
            kv_cache.hold(request, hit)
        taken = -(-(tokens if self.allocate_whole_prompt else computed) // size) - cached_blocks
        kv_cache.free -= per_request + taken
        if segments and not self.cache_after_compute:
            kv_cache.extend(request, segments, ends, computed // size)
        self.waiting.popleft()
        self.running[request] = None
        self.remaining_prefill[request] = tokens - computed
        return chunk

    def grow(self, request: int, tokens: int) -> bool:
        """Take blocks for the next prefill chunk of a running request, if enough are free."""
        remaining, size = self.remaining_prefill[request], self.block_size
        computed = self.tokens(request) - remaining
        end = computed + tokens
        needed = 0 if self.allocate_whole_prompt else (-computed // size) - (-end // size)
        if needed > self.kv_cache.free:
            return False
        self.kv_cache.free -= needed
        self.remaining_prefill[request] = remaining - tokens
        if self._chains is not None and not self.cache_after_compute:
            segments, ends = self._chains[request]
            if segments:
                self.kv_cache.extend(request, segments, ends, end // size)
        return True

    def preempt(
        self, request: int | None = None, *, to_front: bool = True, keep_tokens: int = 0
    ) -> int:
        """Stop a running request, by default the last admitted one; it waits again.

        Its blocks are free; what is evicted from them is recomputed. It waits before all others
        (`to_front`), or after them with only its first `keep_tokens` private tokens cached.
        """
        if request is None:
            request, _ = self.running.popitem()
        else:
            del self.running[request]
        computed = allocated = self.computed_tokens(request)
        finish = self._finish_step.pop(request, None)
        if finish is None:
            if self.allocate_whole_prompt:
                allocated = self.tokens(request)
            if self.cache_after_compute:
                self.kv_cache.extend(request, *self.chain(request), computed // self.block_size)
            del self.remaining_prefill[request]
            token_time, _ = self._preempted.pop(request, (self.now, 0))
        else:
            self.generated[request] = self.output[request] - finish + self.decode_step
            self.context_tokens -= computed
            self._block_starts[(self.decode_step - computed) % self.block_size] -= 1
            token_time = self._token_time_of.pop(request, self._token_time)
        self._preempted[request] = token_time, computed
        self.kv_cache.release(request, self._allocated_blocks(request, allocated))
        if to_front:
            self.waiting.appendleft(request)
        else:
            dropped = -(-allocated // self.block_size) - keep_tokens // self.block_size
            self.kv_cache.drop_last(request, dropped)
            self.waiting.append(request)
        self.records.preempted[request] += 1
        return request

    # ---- time ------------------------------------------------------------------------------------

    @property
    def engines(self) -> Sequence[Engine]:
        """This engine alone."""
        return (self,)

    @property
    def next_arrival(self) -> float:
        """Time at which the next of `arrivals` enters the queue."""
        return self.queued_at[self.arrivals[0]]

    def add_request(self, request: int) -> None:
        """Add a request that arrives now or later, in order of arrival.

        An idle engine starts with the next `advance` of its clock.
        """
        self.arrivals.append(request)
        self.clock.on_arrival(self)

    def on_arrival(self, engine: Engine) -> None:
        """Wake up if idle; cut a decode run short so that the scheduler sees the request."""
        arrival = self.next_arrival
        if not self._steps:
            self.next_event = min(self.next_event, arrival)
        elif self._batch.interruptible and self._steps > 1 and len(self.arrivals) == 1:
            steps = self.steps_until_visible(arrival - self.now, self.current_run)
            if steps < self._steps:
                self._steps = steps
                self.next_event = self.now + self.current_run.duration

    def steps_until_visible(self, delay: float, run: DecodeRun) -> int:
        """Steps of a run until the scheduler sees what arrives after `delay` seconds."""
        if delay <= 0.0:
            return 1
        steps = steps_to_reach(run.seconds, run.growth, delay, run.steps)
        return steps + 1 if self.async_scheduling and steps < run.steps else steps

    def advance(self, until: float) -> None:
        """Process all events up to `until`; afterwards a later batch is running."""
        while self.next_event <= until:
            if self.next_event >= self._next_sample:
                self._record_samples()
            if self._steps:
                self._finish_batch()
            else:
                self._visible_until = self.now = self.next_event
            self._start_batch()

    # ---- start of a batch ------------------------------------------------------------------------

    def _start_batch(self) -> None:
        """Move arrivals to `waiting`, schedule the next batch, and compute when it ends."""
        arrivals, waiting, queued_at = self.arrivals, self.waiting, self.queued_at
        while arrivals and queued_at[arrivals[0]] <= self._visible_until:
            waiting.append(arrivals.popleft())
        if not self.running and not waiting:
            self._wait_for_arrival()
            return
        self._batch = batch = self.scheduler.schedule(self)
        prefill, decode, max_steps, interruptible, skipped = batch
        decodes = len(self._finish_step) - len(skipped) if decode else 0
        if self.drafts is not None:  # accepted drafts change every step
            max_steps = 1
        if prefill or skipped:
            self._steps, self._num_decodes = 1, decodes
            self.next_event = self.now + self._mixed_step_seconds(batch, decodes)
        elif decodes:
            self._start_decode_run(decodes, max_steps, interruptible)
        else:
            self._num_decodes = 0
            self._wait_for_arrival()

    def _wait_for_arrival(self) -> None:
        """Become idle until the next request arrives."""
        self._steps = 0
        self.next_event = max(self.now, self.next_arrival) if self.arrivals else math.inf

    def _mixed_step_seconds(self, batch: StepBatch, decodes: int) -> float:
        """Seconds of a single step, with prefill chunks or with decodes that are skipped."""
        tokens = keys = pairs = 0
        if decodes:
            new = self.new_tokens
            tokens = decodes * new
            keys = tokens + self.context_tokens
            for request in batch.skipped:
                keys -= self.computed_tokens(request)
            # Of a request's `new` queries each sees a key fewer than the next one.
            pairs = keys * new - tokens * (new - 1) // 2
        decode_keys = keys
        prompt, remaining, generated = self.prompt, self.remaining_prefill, self.generated
        for request, chunk in batch.prefill:
            computed = prompt[request] - remaining[request]  # with this chunk
            if generated:  # a preempted request recomputes its generated tokens, too
                computed += generated.get(request, 0)
            tokens += chunk
            pairs += chunk * computed - chunk * (chunk - 1) // 2
            keys += computed
        requests = decodes + len(batch.prefill)
        return self.times.step(tokens, pairs, keys, requests, decodes, decode_keys)

    def _start_decode_run(self, decodes: int, max_steps: int, interruptible: bool) -> None:
        """Start a run of decode steps, up to the first possible change of the batch.

        The run ends when a request finishes, when KV blocks run out, where step times stop growing
        linearly, or, if `interruptible`, when the scheduler sees the next arrival.
        """
        finish_heap, finish_step = self._finish_heap, self._finish_step
        while True:
            last, request = finish_heap[0]
            if finish_step.get(request) == last:
                break
            heappop(finish_heap)  # outdated: the request was preempted or delayed
        steps = last - self.decode_step
        if max_steps < steps:
            steps = max_steps
        if decodes * (steps // self.block_size + 1) > self.kv_cache.free:
            steps = self._steps_that_fit(steps)
        tokens = decodes if self.drafts is None else decodes * self.new_tokens
        linear_steps, seconds, growth = self.times.linear_run(decodes, self.context_tokens + tokens)
        if linear_steps < steps:
            steps = linear_steps
        duration = steps * (seconds + growth * (steps - 1) * 0.5)
        if steps > 1 and interruptible and self.arrivals and self.clock is self:
            delay = self.queued_at[self.arrivals[0]] - self.now
            if delay < duration:
                steps = self.steps_until_visible(delay, DecodeRun(steps, seconds, growth))
                duration = steps * (seconds + growth * (steps - 1) * 0.5)
        self._num_decodes, self._steps = decodes, steps
        self._step_seconds, self._step_growth = seconds, growth
        self.next_event = self.now + duration

    def _steps_that_fit(self, limit: int) -> int:
        """Steps for which free blocks suffice; those of the first step are taken already."""
        free, size = self.kv_cache.free, self.block_size
        for steps in range(1, limit):
            free -= self._block_starts[(self.decode_step + steps) % size]
            if free < 0:
                return steps
        return limit

    # ---- end of a batch --------------------------------------------------------------------------

    def _finish_batch(self) -> None:
        """Apply the results of the current batch: tokens, finished requests, latencies."""
        start, end, steps, decodes = self.now, self.next_event, self._steps, self._num_decodes
        self.now = self._visible_until = end
        if self.async_scheduling:  # the next batch is scheduled when the last step begins
            self._visible_until = start
            if steps > 1:
                self._visible_until += series_sum(self._step_seconds, self._step_growth, steps - 1)
        prefill, skipped = self._batch.prefill, self._batch.skipped
        if decodes:
            if start != self._token_time or self._token_time_of or skipped:
                self._log_delayed_tokens(start, end)
            elif steps == 1:
                self.step_log.add((end - start, end - start, 1, decodes, STEP_AND_GAPS))
            else:
                last = self._step_seconds + self._step_growth * (steps - 1)
                self.step_log.add((self._step_seconds, last, steps, decodes, STEP_AND_GAPS))
                self.kv_cache.free -= self._blocks_for_steps(steps - 1, decodes)
            self.decode_step = step = self.decode_step + steps
            self.context_tokens += decodes * steps
            self._token_time = end
            if skipped:
                for request in skipped:
                    self._delay_finish(request)
            if self.drafts is not None:
                self._accept_drafts(skipped)
            if self._finish_heap and self._finish_heap[0][0] <= step:
                self._finish_due_requests()
        else:
            self.step_log.add((end - start, end - start, 1, 0, STEP))
            if not self._finish_step:
                self._token_time = end
        if prefill:
            if self.cache_after_compute and self._chains is not None:
                self._cache_computed_blocks(prefill)
            for request, _ in prefill:
                if not self.remaining_prefill[request]:
                    self._finish_prefill(request)

    def _log_delayed_tokens(self, start: float, end: float) -> None:
        """Log a batch that began after the last token of some of its decoding requests.

        The first gap of these is longer than the first step.
        """
        steps, decodes, skipped = self._steps, self._num_decodes, self._batch.skipped
        first = last = end - start
        if steps > 1:
            first, last = self._step_seconds, self._step_seconds + self._step_growth * (steps - 1)
            self.kv_cache.free -= self._blocks_for_steps(steps - 1, decodes)
        times = [at for request, at in self._token_time_of.items() if request not in skipped]
        for token_time in times:
            gap = start + first - token_time
            self.step_log.add((gap, gap, 1, 1, GAPS))
        if decodes > len(times):
            gap = start - self._token_time + first
            self.step_log.add((gap, gap, 1, decodes - len(times), GAPS))
        self.step_log.add((first, first, 1, decodes, STEP))
        if steps > 1:
            second = first + (last - first) / (steps - 1)
            self.step_log.add((second, last, steps - 1, decodes, STEP_AND_GAPS))
        self._token_time_of = {r: self._token_time_of.get(r, self._token_time) for r in skipped}

    def _blocks_for_steps(self, steps: int, decodes: int) -> int:
        """Blocks that decoding requests begin in `steps` steps after the first of a run."""
        size, block_starts = self.block_size, self._block_starts
        rounds, steps = divmod(steps, size)
        begin = (self.decode_step + 1) % size
        end = begin + steps
        if end <= size:
            return rounds * decodes + sum(block_starts[begin:end])
        return rounds * decodes + sum(block_starts[begin:]) + sum(block_starts[: end - size])

    def _delay_finish(self, request: int) -> None:
        """Let a request that got no token in the last step finish a step later."""
        finish, size = self._finish_step[request], self.block_size
        tokens = self.prompt[request] + self.output[request]
        computed = tokens - finish + self.decode_step - 2
        self._finish_step[request] = finish + 1
        heappush(self._finish_heap, (finish + 1, request))
        self._block_starts[(self.decode_step - computed - 1) % size] -= 1
        self._block_starts[(self.decode_step - computed) % size] += 1

    def _accept_drafts(self, skipped: Sequence[int]) -> None:
        """Give decoding requests the drafts of the last step that were accepted."""
        assert self.drafts is not None
        step, size, block_starts = self.decode_step, self.block_size, self._block_starts
        for request, finish in [*self._finish_step.items()]:
            generated = self.output[request] - finish + step - 1  # before the step
            accepted = self.drafts.tokens_of_step(request, generated) - 1
            accepted = min(accepted, finish - step)
            if accepted > 0 and request not in skipped:
                phase = step - (self.prompt[request] + generated)
                self._finish_step[request] = finish - accepted
                heappush(self._finish_heap, (finish - accepted, request))
                self.context_tokens += accepted
                block_starts[phase % size] -= 1
                block_starts[(phase - accepted) % size] += 1

    def _finish_due_requests(self) -> None:
        """Finish the requests whose last token came with the last step."""
        heap, finish_step, step = self._finish_heap, self._finish_step, self.decode_step
        while heap and heap[0][0] <= step:
            last, request = heappop(heap)
            if finish_step.get(request) == last:
                del finish_step[request]
                computed = self.prompt[request] + self.output[request] - 1
                self.context_tokens -= computed
                self._block_starts[(step - computed) % self.block_size] -= 1
                self._complete(request, computed)

    def _cache_computed_blocks(self, prefill: Sequence[tuple[int, int]]) -> None:
        """Let other requests reuse the blocks of the last step's chunks.

        Where the blocks of whole prompts are reserved, a prompt is reusable when it is finished.
        """
        for request, _ in prefill:
            segments, ends = self.chain(request)
            remaining = self.remaining_prefill[request]
            if segments and not (self.allocate_whole_prompt and remaining):
                blocks = (self.tokens(request) - remaining) // self.block_size
                self.kv_cache.extend(request, segments, ends, blocks, merge=self.deduplicate)

    def _finish_prefill(self, request: int) -> None:
        """Give a request the token of its last prefill chunk, and let it decode."""
        del self.remaining_prefill[request]
        now, step, tokens, generated = self.now, self.decode_step, self.prompt[request], 1
        if self.generated:
            generated += self.generated.pop(request, 0)
            tokens += generated - 1
        if request in self._preempted:
            token_time, _ = self._preempted.pop(request)
            if generated > 1:
                self.step_log.add((now - token_time, now - token_time, 1, 1, GAPS))
        if generated == 1:
            self.records.first[request] = now
        steps = self.output[request] - generated
        if not steps:
            self._complete(request, tokens)
            return
        if self.drafts is not None:
            self._draft_blocks[request] = -(-tokens // self.block_size)
        self._finish_step[request] = step + steps
        heappush(self._finish_heap, (step + steps, request))
        self.context_tokens += tokens
        self._block_starts[(step - tokens) % self.block_size] += 1
        if self._token_time != now:
            self._token_time_of[request] = now

    def _complete(self, request: int, computed: int) -> None:
        """Release a request that has its last token; `computed` tokens of it are cached."""
        del self.running[request]
        size, kv_cache = self.block_size, self.kv_cache
        if self._chains is not None:
            segments, ends = self._chains[request]
            if segments and ends[-1] > self.prompt[request] // size:
                kv_cache.extend(request, segments, ends, computed // size, merge=self.deduplicate)
        partial_blocks = int(self.deduplicate and computed % size > 0)
        blocks = self._allocated_blocks(request, computed)
        kv_cache.release(request, blocks, resumable=False, partial_blocks=partial_blocks)
        self.records.finish[request] = self.now
        self.completed.append(request)

    def _allocated_blocks(self, request: int, tokens: int) -> int:
        """Blocks of a request that is about to release them, `tokens` of it allocated."""
        if self.drafts is not None and request in self._draft_blocks:
            return self._draft_blocks.pop(request)
        return -(-tokens // self.block_size)

    # ---- lockstep groups -------------------------------------------------------------------------

    @property
    def interruptible(self) -> bool:
        """True if an arrival could change the next steps."""
        return self._batch.interruptible or not self._steps

    @property
    def current_run(self) -> DecodeRun:
        """Steps of the current batch and their durations; no steps if idle."""
        return DecodeRun(self._steps, self._step_seconds, self._step_growth)

    def plan_batch(self) -> BatchPlan | None:
        """Schedule the next batch: its size, and its duration alone; None if idle."""
        self._start_batch()
        if not self._steps:
            self._step_seconds = self._step_growth = 0.0
            return None
        prefill = self._batch.prefill
        if prefill or self._batch.skipped:
            self._step_seconds, self._step_growth = self.next_event - self.now, 0.0
        tokens = self._num_decodes * self.new_tokens + sum(chunk for _, chunk in prefill)
        return BatchPlan(self.current_run, tokens, self._num_decodes + len(prefill))

    def follow(self, run: DecodeRun, end: float) -> None:
        """Adopt the group's steps and their duration; an idle engine waits until `end`."""
        if self._steps:
            self._steps, self._step_seconds, self._step_growth = run
        self.next_event = end

    def finish_group_step(self, end: float, visible_until: float) -> None:
        """Finish the group's steps; the next batch sees arrivals up to `visible_until`."""
        self.next_event = end
        if end >= self._next_sample:
            self._record_samples()
        if self._steps:
            self._finish_batch()
        self.now, self._visible_until = end, visible_until

    # ---- samples ---------------------------------------------------------------------------------

    def _record_samples(self) -> None:
        """Record the state at the sample times up to the end of the current batch."""
        used, steps = self.kv_cache.size - self.kv_cache.free, 1
        samples, run = self.samples, self.current_run
        while self._next_sample <= self.next_event:
            at = self._next_sample
            if run.steps > 1:
                reached = steps_to_reach(run.seconds, run.growth, at - self.now, run.steps)
                steps = max(steps, reached)
            arrived = 0
            for request in self.arrivals:
                if self.queued_at[request] > at:
                    break
                arrived += 1
            samples.seconds.append(at)
            samples.waiting.append(len(self.waiting) + arrived)
            samples.running.append(len(self.running))
            grown = self._blocks_for_steps(steps - 1, self._num_decodes) if steps > 1 else 0
            samples.blocks.append(used + grown)
            samples.logged.append(self.step_log.end(self.now))
            if len(samples.seconds) >= MAX_SAMPLES:
                samples = self.samples = samples.every_second()
                self._next_sample, self._sample_every = samples.seconds[-1], 2 * self._sample_every
            self._next_sample += self._sample_every
