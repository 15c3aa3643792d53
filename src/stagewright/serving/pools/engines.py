"""Engines that compute prompts for others, and engines whose requests bring their cache along.

Rules, of vLLM's NixlConnector (vllm-project/vllm@00024d31 `vllm/v1/core/sched/scheduler.py` and
`distributed/kv_transfer/kv_connector/v1/nixl_connector.py`):

1. An instance that computes prompts gives each request one token and keeps its blocks until they
   have been read (`request_finished`, `delay_free_blocks`).
2. An instance that decodes takes the blocks of a whole prompt, but for what its own cache has, in
   the order of the queue; the first that finds no blocks stops this. Then the blocks are read
   (`WAITING_FOR_REMOTE_KVS`), during which others run.
3. A request whose blocks are there is the first to wait, and computes the prompt's last token again
   (`_update_waiting_for_remote_kv`): so its first token comes from the step it is in. Engines
   of others send the first token along with the cache (SGLang's `MetadataBuffers`, TensorRT-LLM's
   `first_gen_tokens`): `with_first_token`.
4. Who is preempted is computed again where it decodes.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass

from stagewright.serving.engines.engine import Decision, Engine, Scheduler


class PromptEngine(Engine):
    """An engine that gives each request one token, and keeps its blocks until they are read."""

    __slots__ = ("_kept", "prefilled")

    def watched(self, prefilled: array[float]) -> PromptEngine:
        """This engine; it notes in a column when prompts are done."""
        self.prefilled = prefilled
        self._kept: dict[int, int] = {}
        return self

    def _complete(self, request: int, done: int) -> None:
        del self.running[request]
        self._kept[request] = -(-done // self.block_size)
        self.prefilled[request] = self.now
        self.completed.append(request)

    def let_go(self, request: int, at: float) -> None:
        """Free the blocks of a request that have been read; who waits for blocks may go on."""
        keys, ends = self._chain(request)
        self.blocks.release(request, keys, ends, self._kept.pop(request))
        if not self._steps and self.waiting:
            self.end = min(self.end, at)


class DecodeEngine(Engine):
    """An engine to which requests bring the cache of their prompts."""

    __slots__ = ("_ready", "remote", "wanted", "with_first_token")

    def watched(self, with_first_token: bool) -> DecodeEngine:
        """This engine, which takes first tokens from elsewhere or makes them itself."""
        self.remote: dict[int, None] = {}
        """Requests whose cache is elsewhere, and has no blocks here."""
        self.wanted: list[tuple[int, int]] = []
        """Requests that have got blocks, and tokens to bring; who brings them takes them out."""
        self._ready: dict[int, None] = {}
        self.with_first_token = with_first_token
        return self

    def push_remote(self, request: int) -> None:
        """A request arrives whose prompt was computed elsewhere."""
        self.remote[request] = None
        self.push(request)

    def loaded(self, request: int, at: float) -> None:
        """The cache of a request has arrived."""
        keys, ends = self._chain(request)
        if keys:
            self.blocks.extend(request, keys, ends, self.tokens(request) // self.block_size)
        del self.loading[request]
        self._ready[request] = None
        self.arrival[request] = at
        self.push(request)

    def pull(self, request: int, to_its_end: bool) -> bool:
        """Take blocks for the prompt of a request, if there are as many, and want its cache.

        `to_its_end`: only if they suffice for all tokens of all requests.
        """
        size, blocks = self.block_size, self.blocks
        tokens, hit, _ = self.look(request)
        whole = -(-tokens // size) + blocks.per_request
        need, free = whole, blocks.free
        if to_its_end:
            need, free = self.most_blocks(request), self._never_needed()
        if need - hit.blocks + hit.idle > free:
            return False
        if hit.segments:
            blocks.hold(request, self._chain(request)[0], hit)
        blocks.take(whole - hit.blocks)
        del self.remote[request]
        self.loading[request] = None
        self.wanted.append((request, tokens - hit.blocks * size))
        return True

    def _never_needed(self) -> int:
        """Free blocks but for those that requests here, and on their way, take to their ends."""
        size, own = self.block_size, self.blocks.per_request
        coming = (*self.loading, *self._ready)
        more = sum(self.most_blocks(r) - own - -(-self.tokens(r) // size) for r in coming)
        return self.blocks.free - sum(map(self.lacking, self.running)) - more

    def ready(self) -> list[int]:
        """Waiting requests whose cache is there, as far as a decision sees that."""
        return [r for r in self._ready if self.arrival[r] <= self._seen]

    def begin(self, request: int) -> None:
        """Let a request run whose cache and first token are there."""
        del self._ready[request]
        self.running[request] = None
        self.left[request] = 0
        self._give_token(request)

    def admit(self, most: int, *, whole_prompt: bool = True, chunked: bool = True) -> int:
        """As of any engine; what has come from elsewhere lacks its last token only."""
        request = self.waiting[0]
        if request not in self._ready:
            return super().admit(most, whole_prompt=whole_prompt, chunked=chunked)
        del self._ready[request]
        self.waiting.popleft()
        self.running[request] = None
        self.left[request] = 0
        return 1


@dataclass(slots=True)
class Pulls:
    """A scheduler of an instance that decodes: who is there runs, then who waits gets blocks."""

    of: Scheduler
    most: int
    """Requests that run at a time."""
    to_their_ends: bool = False
    """Whether blocks must suffice for all tokens of who is admitted (GUARANTEED_NO_EVICT)."""

    @property
    def async_scheduling(self) -> bool:
        """As the scheduler of the engine."""
        return bool(getattr(self.of, "async_scheduling", False))

    def schedule(self, engine: Engine) -> Decision:
        """The scheduler's own decision, of which requests without a cache know nothing."""
        assert isinstance(engine, DecodeEngine)
        ready = engine.ready()
        if not engine.remote and not ready and not engine.loading:
            return self.of.schedule(engine)
        rest = engine.waiting
        for request in ready:
            rest.remove(request)
        local: deque[int] = deque()
        while rest and rest[0] not in engine.remote:
            local.append(rest.popleft())
        late: list[int] = []
        if engine.with_first_token:
            places = max(0, self.most - len(engine.running))
            late = ready[places:]
            for request in ready[:places]:
                engine.begin(request)
        else:
            local.extendleft(reversed(ready))
        engine.waiting = local
        decision = self.of.schedule(engine)
        while rest and not engine.waiting and len(engine.running) < self.most:
            if not engine.pull(rest[0], self.to_their_ends):
                break
            rest.popleft()
        rest.extendleft(reversed(engine.waiting))
        rest.extendleft(reversed(late))
        engine.waiting = rest
        return decision._replace(open=len(engine.running) < self.most)
