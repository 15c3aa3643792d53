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

import math
from array import array
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from stagewright.serving.engines.blocks import Hit, KvBlocks
from stagewright.serving.engines.decisions import BlockRules, PlainRules
from stagewright.serving.engines.engine import Decision, Engine, Scheduler
from stagewright.serving.engines.state import CachedPart
from stagewright.serving.engines.times import series


class _Halted:
    """A scheduler that lets nothing run."""

    def schedule(self, engine: Engine) -> Decision:
        """Nothing."""
        del engine
        return Decision(decodes=False)


_HALTED = _Halted()


class Evicted(NamedTuple):
    """A request of an engine that has failed."""

    request: int
    got: int
    """Tokens that the request had got."""
    last: float
    """When it had got the last one."""
    elsewhere: bool
    """Whether its cache is still where it was computed."""


class BringingEngine(Engine):
    """An engine to which requests bring the cache of their tokens, or of the first ones."""

    __slots__ = ("_ready", "remote", "wanted", "with_first_token")

    def __init__(self, *parts: Any, with_first_token: bool = False) -> None:
        """As any engine; first tokens come from elsewhere, or are made here."""
        super().__init__(*parts)
        self.remote: dict[int, int] = {}
        """Tokens of requests whose cache is elsewhere, and has no blocks here."""
        self.wanted: list[tuple[int, int]] = []
        """Requests with blocks, and the tokens whose caches are to come; the loop empties the list
        when it starts the transfers."""
        self._ready: dict[int, int] = {}  # tokens whose cache has come
        self.with_first_token = with_first_token

    @property
    def _plain(self) -> bool:
        return not (self.remote or self.loading or self._ready) and super()._plain

    def push_remote(self, request: int, tokens: int) -> None:
        """A request arrives of which so many tokens were computed elsewhere."""
        self.remote[request] = tokens
        self.push(request)

    def loaded(self, request: int, at: float) -> None:
        """The cache of a request has arrived."""
        tokens = self.loading.pop(request)
        keys, ends = self._chain(request)
        if keys:
            self.blocks.extend(request, keys, ends, tokens // self.block_size)
        self._ready[request] = tokens
        self.arrival[request] = at
        self.push(request)

    def pull(self, request: int, to_its_end: bool) -> bool:
        """Take blocks for what a request brings, if there are as many, and want its cache.

        `to_its_end`: only if they suffice for all tokens of all requests.
        """
        size, blocks = self.block_size, self.blocks
        tokens, hit, _ = self.look(request)
        coming = self.remote[request]
        if coming <= hit.blocks * size:  # all of it is here
            del self.remote[request]
            return True
        need = -(-tokens // size) + blocks.per_request
        free = blocks.free - self._growth[self.step % size] - self.owed(to_its_end)
        if to_its_end:
            need = self.most_blocks(request)
            free -= sum(map(self.lacking, self.running))
        if need - hit.blocks + hit.idle > free:
            return False
        if hit.segments:
            blocks.hold(request, hit)
        blocks.take(-(-coming // size) - hit.blocks + blocks.per_request)
        del self.remote[request]
        self.loading[request] = coming
        self.wanted.append((request, coming - hit.blocks * size))
        return True

    def owed(self, to_their_ends: bool) -> int:
        """Blocks that requests lack whose cache is coming or has come: for a prompt, or for all."""
        size, own = self.block_size, self.blocks.per_request
        held = {**self.loading, **self._ready}
        if to_their_ends:
            return sum(self.most_blocks(r) - own - -(-n // size) for r, n in held.items())
        return sum(-(-self.tokens(r) // size) - -(-n // size) for r, n in held.items())

    def halt(self, at: float) -> None:
        """Begin nothing any more; what is under way ends with the step in which `at` lies."""
        if self._steps > 1:
            steps = self.steps_until(at - self.now, self._first, self._grows, self._steps)
            self._steps = min(steps, self._steps)
            self.end = self.now + series(self._first, self._grows, self._steps)
        self.scheduler, self._rules, self._stands = _HALTED, None, False

    def evict(self) -> list[Evicted]:
        """Take all requests out, and free their blocks."""
        for request in [*self.running]:
            self.preempt(request, keep=False)
            self.records.preempted[request] -= 1
        out = [*self.waiting, *self.inbox, *self.loading]
        elsewhere = {*self.remote, *self.loading}
        for request in [*self.loading, *self._ready]:
            self._drop(request)
        self.waiting.clear()
        self.inbox.clear()
        self.remote.clear()
        self.wanted.clear()
        self.end = math.inf
        last = {r: self._last.pop(r, (self.now, 0))[0] for r in out}
        return [Evicted(r, self.generated.pop(r, 0), last[r], r in elsewhere) for r in out]

    def _drop(self, request: int) -> None:
        """Free the blocks of a request whose cache is coming, or has come."""
        tokens = self.loading.pop(request, None)
        if tokens is None:
            tokens = self._ready.pop(request)
        self.blocks.release(request, -(-tokens // self.block_size), again=False)

    def awaits(self, request: int) -> bool:
        """Whether the cache of a request is to come."""
        return request in self.remote or request in self.loading

    def await_no_more(self, request: int, at: float, *, compute: bool) -> None:
        """The cache of a request is lost: the request is computed here, or leaves."""
        if request in self.loading:
            self._drop(request)
            if compute:
                self.arrival[request] = at
                self.push(request)
        else:
            del self.remote[request]
            if not compute:
                (self.inbox if request in self.inbox else self.waiting).remove(request)
        if self.waiting and not any(engine.planned[0] for engine in self.unit.engines):
            self.unit.end = min(self.unit.end, at)

    def restart(self, scheduler: Scheduler) -> None:
        """Serve again, with an empty cache."""
        old = self.blocks
        self.blocks = KvBlocks(old.size, old.block_size, old.caching, old.per_request)
        self.scheduler = scheduler

    def adopt(self, request: int, got: int, last: float) -> None:
        """Know what a request has got elsewhere: it is computed again, with these tokens."""
        if got:
            self.generated[request] = got
            self._last[request] = (last, self.tokens(request))

    def ready(self) -> list[int]:
        """Waiting requests whose cache is there, as far as a decision sees that."""
        return [r for r in self._ready if self.arrival[r] <= self._seen]

    def begin(self, request: int) -> None:
        """Let a request run whose cache and first token are there."""
        del self._ready[request]
        self.running[request] = None
        self.left[request] = 0
        self._give_token(request)

    def look(self, request: int) -> CachedPart:
        """As of any engine; what has come from elsewhere is in the cache."""
        brought = self._ready.get(request)
        if brought is None:
            return super().look(request)
        tokens = self.tokens(request)
        return CachedPart(tokens, Hit([], min(brought, tokens - 1) // self.block_size, 0), 0)

    def admit(self, most: int, *, whole_prompt: bool = True, chunked: bool = True) -> int:
        """As of any engine; what has come from elsewhere is not computed, but the last token is."""
        request = self.waiting[0]
        brought = self._ready.get(request)
        if brought is None:
            return super().admit(most, whole_prompt=whole_prompt, chunked=chunked)
        size, tokens = self.block_size, self.tokens(request)
        done = min(brought, tokens - 1)
        n = min(tokens - done, most)
        held = -(-brought // size)
        need = -(-(tokens if whole_prompt else done + n) // size) - held
        if need > self.blocks.free or (n < tokens - done and not chunked):
            return 0
        upto = tokens if self.takes_whole_prompts else done + n
        self.blocks.take(max(0, -(-upto // size) - held))
        del self._ready[request]
        self.waiting.popleft()
        self.running[request] = None
        self.left[request] = tokens - done - n
        if self.records.scheduled[request] != self.records.scheduled[request]:
            self.records.scheduled[request] = self.now
            self.records.cached[request] = done
        return n


class PromptEngine(BringingEngine, plain=True):
    """An engine that gives each request one token, and keeps its blocks until they are read."""

    __slots__ = ("_kept", "prefilled")

    def __init__(self, prefilled: array[float], *parts: Any) -> None:
        """It notes in the column `prefilled` when prompts are done."""
        super().__init__(*parts)
        self.prefilled = prefilled
        self._kept: dict[int, int] = {}

    def _complete(self, request: int, done: int) -> None:
        del self.running[request]
        self._kept[request] = -(-done // self.block_size)
        self.prefilled[request] = self.now
        self.completed.append(request)

    def keeps(self, request: int) -> bool:
        """Whether the blocks of a request whose prompt is done are still held."""
        return request in self._kept

    def lose_kept(self) -> list[int]:
        """Free the blocks of all requests whose prompts are done; they have not been read."""
        lost = [*self._kept]
        for request in lost:
            self.blocks.release(request, self._kept.pop(request), again=False)
        return lost

    def let_go(self, request: int, at: float) -> None:
        """Free the blocks of a request that have been read; who waits for blocks may go on."""
        self.blocks.release(request, self._kept.pop(request), again=False)
        unit = self.unit
        if self.waiting and not any(engine.planned[0] for engine in unit.engines):
            unit.end = min(unit.end, at)


class DecodeEngine(BringingEngine, plain=True):
    """An engine whose requests have been prefilled elsewhere."""

    __slots__ = ()


@dataclass(slots=True)
class Pulls:
    """A scheduler whose requests bring caches: who is there runs, then who waits gets blocks."""

    of: Scheduler
    most: int
    """Requests that run at a time."""
    to_their_ends: bool = False
    """Whether blocks must suffice for all tokens of who is admitted (GUARANTEED_NO_EVICT)."""

    @property
    def async_scheduling(self) -> bool:
        """As the scheduler of the engine."""
        return bool(getattr(self.of, "async_scheduling", False))

    @property
    def block_rules(self) -> BlockRules:
        """As the scheduler of the engine."""
        return getattr(self.of, "block_rules", BlockRules())

    @property
    def plain(self) -> PlainRules | None:
        """As of the scheduler of the engine, while nobody brings a cache."""
        return getattr(self.of, "plain", None)

    def schedule(self, engine: Engine) -> Decision:
        """The scheduler's own decision, of which requests without a cache know nothing."""
        assert isinstance(engine, BringingEngine)
        ready = engine.ready()
        if not engine.remote and not ready and not engine.loading:
            return self.of.schedule(engine)
        rest = engine.waiting
        for request in ready:
            rest.remove(request)
        late: list[int] = []
        if engine.with_first_token:
            places = max(0, self.most - len(engine.running))
            ready, late = ready[:places], ready[places:]
            for request in ready:
                engine.begin(request)
            ready.clear()
        local = deque(ready)
        while rest and rest[0] in engine.remote:
            full = len(engine.running) + len(local) + len(late) >= self.most
            if full or not engine.pull(rest[0], self.to_their_ends):
                break
            request = rest.popleft()
            if request not in engine.loading:
                local.append(request)
        while rest and rest[0] not in engine.remote:
            local.append(rest.popleft())
        engine.waiting = local
        ran = len(engine.running)
        kept = engine.owed(to_their_ends=True) if self.to_their_ends else 0
        engine.blocks.free -= kept
        decision = self.of.schedule(engine)
        engine.blocks.free += kept
        rest.extendleft(reversed(engine.waiting))
        rest.extendleft(reversed(late))
        engine.waiting = rest
        if ran and not engine.running:  # all are preempted: whose cache is there goes on
            return self.schedule(engine)
        return decision._replace(open=len(engine.running) < self.most)
