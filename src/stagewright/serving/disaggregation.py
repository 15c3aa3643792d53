"""Engines of disaggregated serving: prefill engines, and engines that load KV cache from elsewhere.

Rules of vLLM's NixlConnector (vllm-project/vllm@00024d31 `vllm/v1/core/sched/scheduler.py` and
`distributed/kv_transfer/kv_connector/v1/nixl_connector.py`):

1. A prefill instance gives each request one token and keeps its blocks until they have been read
   (`request_finished`, `delay_free_blocks`).
2. A decode instance takes the blocks of a whole prompt, except what its own cache has, in the order
   of the queue; the first request without blocks stops this. Then the blocks are read
   (`WAITING_FOR_REMOTE_KVS`) while other requests run.
3. A request whose blocks have arrived is the first to wait, and computes the prompt's last token
   again (`_update_waiting_for_remote_kv`), which gives its first token. Other engines send the
   first token along with the cache (SGLang's `MetadataBuffers`, TensorRT-LLM's `first_gen_tokens`):
   `with_first_token`.
4. Preempted requests are recomputed where they decode.

With `pushes`, a prefill engine reports after each step which chunks it has computed, and their
cache leaves at once (`kv_transfer`).
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from stagewright.serving.batch import StepBatch
from stagewright.serving.engine import CachedPrefix, Engine, Scheduler, SchedulerWrapper
from stagewright.serving.kv_cache import CacheHit, PagedKvCache

Role = Literal["both", "prefill", "decode"]
"""Phases of a request that an instance runs."""


class ComputedChunk(NamedTuple):
    """Prompt tokens that one step has computed."""

    request: int
    tokens: int
    last: bool
    """The prompt is complete: cache of fixed size, whatever its length, is sent with it."""
    begin: float
    """Begin of the step."""
    end: float


class EvictedRequest(NamedTuple):
    """Request of a failed engine."""

    request: int
    output_tokens: int
    token_time: float
    """Time of its last token."""
    kv_elsewhere: bool
    """The cache is still where it was computed."""


class RemoteKvEngine(Engine):
    """Engine whose requests may bring the KV cache of their first tokens."""

    role: Role = "both"

    def __init__(self, *args: Any, role: Role = "both", with_first_token: bool = False) -> None:
        """Idle engine; `with_first_token`: first tokens arrive with the cache."""
        super().__init__(*args)
        self.role, self.with_first_token = role, with_first_token
        self.remote: dict[int, int] = {}
        """Tokens whose cache is elsewhere and has no blocks here yet, by request."""
        self.pulls: list[tuple[int, int]] = []
        """Requests with blocks, and tokens to load; the simulation starts them and empties the
        list."""
        self._loaded: dict[int, int] = {}  # tokens whose cache has arrived, of waiting requests

    # ---- loading ---------------------------------------------------------------------------------

    def add_remote_request(self, request: int, tokens: int) -> None:
        """Add a request that arrives now, of which `tokens` were computed elsewhere."""
        self.remote[request] = tokens
        self.add_request(request)

    def start_pull(self, request: int, to_the_end: bool) -> bool:
        """Take blocks for a request's remote cache, if enough are free, and pull it.

        `to_the_end`: blocks must suffice until all requests have finished.
        """
        size, kv_cache = self.block_size, self.kv_cache
        tokens, hit, _ = self.cached_prefix(request)
        remote = self.remote[request]
        if remote <= hit.blocks * size:  # all of it is cached here
            del self.remote[request]
            return True
        needed = -(-tokens // size) + kv_cache.per_request
        free = (
            kv_cache.free
            - self._block_starts[self.decode_step % size]
            - self.reserved_blocks(to_the_end)
        )
        if to_the_end:
            needed = self.max_blocks(request)
            free -= sum(map(self.blocks_to_finish, self.running))
        if needed - hit.blocks + hit.evictable > free:
            return False
        if hit.segments:
            kv_cache.hold(request, hit)
        kv_cache.take(-(-remote // size) - hit.blocks + kv_cache.per_request)
        del self.remote[request]
        self.loading[request] = remote
        self.pulls.append((request, remote - hit.blocks * size))
        return True

    def reserved_blocks(self, to_the_end: bool) -> int:
        """Blocks that requests with loading or loaded cache still need: for the prompt, or all."""
        size, per_request = self.block_size, self.kv_cache.per_request
        tokens_of = {**self.loading, **self._loaded}
        if to_the_end:
            return sum(
                self.max_blocks(r) - per_request - -(-n // size) for r, n in tokens_of.items()
            )
        return sum(-(-self.tokens(r) // size) - -(-n // size) for r, n in tokens_of.items())

    def finish_loading(self, request: int, at: float) -> None:
        """Queue a request whose cache has arrived."""
        tokens = self.loading.pop(request)
        segments, ends = self.chain(request)
        if segments:
            self.kv_cache.extend(request, segments, ends, tokens // self.block_size)
        self._loaded[request] = tokens
        self.queued_at[request] = at
        self.add_request(request)

    def awaits_kv(self, request: int) -> bool:
        """True if the cache of a request has not arrived."""
        return request in self.remote or request in self.loading

    def loaded_requests(self) -> list[int]:
        """Waiting requests whose cache the next batch sees."""
        return [r for r in self._loaded if self.queued_at[r] <= self._visible_until]

    def start_decode(self, request: int) -> None:
        """Let a request decode whose cache and first token have arrived."""
        del self._loaded[request]
        self.running[request] = None
        self.remaining_prefill[request] = 0
        self._finish_prefill(request)

    def cached_prefix(self, request: int) -> CachedPrefix:
        """Cached part of a waiting request; loaded cache counts as cached."""
        loaded = self._loaded.get(request)
        if loaded is None:
            return super().cached_prefix(request)
        tokens = self.tokens(request)
        return CachedPrefix(tokens, CacheHit([], min(loaded, tokens - 1) // self.block_size, 0), 0)

    def admit(
        self, max_tokens: int, *, full_sequence_must_fit: bool = True, chunked: bool = True
    ) -> int:
        """Admit the first waiting request; of a loaded prompt only the last token is computed."""
        request = self.waiting[0]
        loaded = self._loaded.get(request)
        if loaded is None:
            return super().admit(
                max_tokens, full_sequence_must_fit=full_sequence_must_fit, chunked=chunked
            )
        size, tokens = self.block_size, self.tokens(request)
        computed = min(loaded, tokens - 1)
        chunk = min(tokens - computed, max_tokens)
        allocated = -(-loaded // size)
        needed = -(-(tokens if full_sequence_must_fit else computed + chunk) // size) - allocated
        if needed > self.kv_cache.free or (chunk < tokens - computed and not chunked):
            return 0
        end = tokens if self.allocate_whole_prompt else computed + chunk
        self.kv_cache.take(max(0, -(-end // size) - allocated))
        del self._loaded[request]
        self.waiting.popleft()
        self.running[request] = None
        self.remaining_prefill[request] = tokens - computed - chunk
        if math.isnan(self.records.scheduled[request]):
            self.records.scheduled[request] = self.now
            self.records.cached[request] = computed
        return chunk

    # ---- failure ---------------------------------------------------------------------------------

    def halt(self, at: float) -> None:
        """Start no further batch; the current run ends with the step in which `at` lies."""
        if self._steps > 1:
            self._steps = self.steps_until_visible(at - self.now, self.current_run)
            self.next_event = self.now + self.current_run.duration
        self.scheduler = _HALTED

    def evict(self) -> list[EvictedRequest]:
        """Remove all requests, and free their blocks."""
        for request in [*self.running]:
            self.preempt(request, to_front=False)
            self.records.preempted[request] -= 1
        requests = [*self.waiting, *self.arrivals, *self.loading]
        elsewhere = {*self.remote, *self.loading}
        for request in [*self.loading, *self._loaded]:
            self._release_loaded(request)
        self.waiting.clear()
        self.arrivals.clear()
        self.remote.clear()
        self.pulls.clear()
        self.next_event = math.inf
        times = {r: self._preempted.pop(r, (self.now, 0))[0] for r in requests}
        return [
            EvictedRequest(r, self.generated.pop(r, 0), times[r], r in elsewhere) for r in requests
        ]

    def restart(self, scheduler: Scheduler) -> None:
        """Serve again, with an empty cache."""
        old = self.kv_cache
        self.kv_cache = PagedKvCache(old.size, old.block_size, old.caching, old.per_request)
        self.scheduler = scheduler

    def adopt(self, request: int, output_tokens: int, token_time: float) -> None:
        """Note the output of a request of a failed engine; it is recomputed with the prompt."""
        if output_tokens:
            self.generated[request] = output_tokens
            self._preempted[request] = (token_time, self.tokens(request))

    def lose_kv(self, request: int, at: float, *, recompute: bool) -> None:
        """Give up the cache of a request: it is computed here (`recompute`), or leaves."""
        if request in self.loading:
            self._release_loaded(request)
            if recompute:
                self.queued_at[request] = at
                self.add_request(request)
        else:
            del self.remote[request]
            if not recompute:
                (self.arrivals if request in self.arrivals else self.waiting).remove(request)
        self._wake_up(at)

    def _release_loaded(self, request: int) -> None:
        """Free the blocks of a request whose cache is loading, or has arrived."""
        tokens = self.loading.pop(request, None)
        if tokens is None:
            tokens = self._loaded.pop(request)
        self.kv_cache.release(request, -(-tokens // self.block_size), resumable=False)

    def _wake_up(self, at: float) -> None:
        """Let waiting requests use blocks that were freed, if no batch is running."""
        clock = self.clock
        if self.waiting and not any(engine.current_run.steps for engine in clock.engines):
            clock.next_event = min(clock.next_event, at)


class PrefillEngine(RemoteKvEngine):
    """Engine that gives each request one token, and keeps its blocks until they are read."""

    role: Role = "prefill"

    def __init__(self, prefilled: array[float], *args: Any, pushes: bool = False) -> None:
        """Idle engine that writes when prompts are complete into the column `prefilled`."""
        super().__init__(*args, role="prefill")
        self.prefilled, self._pushes = prefilled, pushes
        self.computed: list[ComputedChunk] = []
        """Chunks that were computed but not sent; the simulation empties the list."""
        self.sent_tokens: dict[int, int] = {}
        """Sent tokens of requests whose prompts are incomplete."""
        self._unread: dict[int, int] = {}  # blocks of complete prompts

    def holds_unread(self, request: int) -> bool:
        """True if the blocks of a complete prompt are kept."""
        return request in self._unread

    def release_unread(self, request: int, at: float) -> None:
        """Free the blocks of a prompt that have been read; waiting requests may go on."""
        self.kv_cache.release(request, self._unread.pop(request), resumable=False)
        self._wake_up(at)

    def lose_unread(self) -> list[int]:
        """Free the blocks of all complete prompts, which have not been read."""
        requests = [*self._unread]
        for request in requests:
            self.kv_cache.release(request, self._unread.pop(request), resumable=False)
        return requests

    def _complete(self, request: int, computed: int) -> None:
        del self.running[request]
        self._unread[request] = -(-computed // self.block_size)
        self.prefilled[request] = self.now
        self.completed.append(request)

    def _finish_batch(self) -> None:
        for request, _ in self._batch.prefill if self._pushes else ():
            computed, sent = self.computed_tokens(request), self.sent_tokens.get(request, 0)
            if computed > sent:  # a preempted request computes again what was sent
                last = computed == self.prompt[request]
                chunk = ComputedChunk(request, computed - sent, last, self.now, self.next_event)
                self.computed.append(chunk)
                self.sent_tokens[request] = computed
                if last:
                    del self.sent_tokens[request]
        super()._finish_batch()


class _Halted:
    """Scheduler of a failed engine: runs nothing."""

    def schedule(self, engine: Engine) -> StepBatch:
        """Return an empty batch."""
        del engine
        return StepBatch(decode=False)


_HALTED = _Halted()


@dataclass(slots=True)
class RemoteKvScheduler(SchedulerWrapper):
    """Scheduler of requests with remote cache: loaded ones run first, then waiting ones pull."""

    scheduler: Scheduler
    """Scheduler of the engine, which sees only requests that need no remote cache."""
    max_running: int
    to_the_end: bool = False
    """Blocks must suffice for all tokens of admitted requests (GUARANTEED_NO_EVICT)."""

    def schedule(self, engine: Engine) -> StepBatch:
        """Return the next batch, and start pulls."""
        assert isinstance(engine, RemoteKvEngine)
        loaded = engine.loaded_requests()
        if not engine.remote and not loaded and not engine.loading:
            return self.scheduler.schedule(engine)
        deferred = engine.waiting
        for request in loaded:
            deferred.remove(request)
        without_slot: list[int] = []
        if engine.with_first_token:
            slots = max(0, self.max_running - len(engine.running))
            loaded, without_slot = loaded[:slots], loaded[slots:]
            for request in loaded:
                engine.start_decode(request)
            loaded.clear()
        local = deque(loaded)
        while deferred and deferred[0] in engine.remote:
            used_slots = len(engine.running) + len(local) + len(without_slot)
            if used_slots >= self.max_running or not engine.start_pull(
                deferred[0], self.to_the_end
            ):
                break
            request = deferred.popleft()
            if request not in engine.loading:
                local.append(request)
        while deferred and deferred[0] not in engine.remote:
            local.append(deferred.popleft())
        engine.waiting = local
        num_running = len(engine.running)
        reserved = engine.reserved_blocks(to_the_end=True) if self.to_the_end else 0
        engine.kv_cache.free -= reserved
        batch = self.scheduler.schedule(engine)
        engine.kv_cache.free += reserved
        deferred.extendleft(reversed(engine.waiting))
        deferred.extendleft(reversed(without_slot))
        engine.waiting = deferred
        if num_running and not engine.running:  # all were preempted: loaded requests go on
            return self.schedule(engine)
        return batch._replace(interruptible=len(engine.running) < self.max_running)
