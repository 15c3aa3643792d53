"""The state of one engine: who waits, who runs, how far each request is, what its cache holds.

When a decoding request ends is known in steps from the start: the engine counts its decode steps,
and a request that has g of n tokens after step s ends with step s + n - g.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from stagewright.serving.engines.blocks import Hit, KvBlocks
from stagewright.serving.engines.observed import EngineSamples, Gaps
from stagewright.serving.requests import NO_CHAIN, Chain, Records, Workload


class CachedPart(NamedTuple):
    """What of a request is in the cache."""

    tokens: int
    """All that must be computed or be there."""
    hit: Hit
    kept: int
    """Blocks of its own, of a request that was preempted."""

    @property
    def blocks(self) -> int:
        """All blocks that are there."""
        return self.hit.blocks + self.kept


class EngineState:
    """Requests and blocks of one engine at a moment.

    What schedulers read: `waiting`, `running` (in order of admission), `left` (tokens that each
    request with an unfinished prompt must still compute), `decoding` (how many requests are past
    that), `blocks` (how many are free), `tokens`, `done`, `need`. What they do: `reserve`, `admit`,
    `grow`, `preempt`.
    """

    __slots__ = (
        *("_chains", "_ends", "_fresh", "_growth", "_heap", "_last", "_token_time"),
        *("arrival", "block_size", "blocks", "completed", "context", "gaps", "generated", "inbox"),
        *("left", "loading", "now", "output", "prompt", "records", "running", "samples"),
        *("step", "waiting"),
    )

    def __init__(self, workload: Workload, records: Records, blocks: KvBlocks) -> None:
        """Nothing has arrived; what becomes of requests is written into `records`."""
        self.records, self.blocks = records, blocks
        self.block_size = blocks.block_size
        self.prompt, self.output, self.arrival = workload.prompt, workload.output, records.reached
        self._chains = workload.chains
        self.inbox: deque[int] = deque()
        """Requests that will arrive, in order."""
        self.waiting: deque[int] = deque()
        self.running: dict[int, None] = {}
        self.left: dict[int, int] = {}
        self.loading: dict[int, None] = {}
        """Requests that have blocks, but whose cache is on its way (`serving.pools`)."""
        self.generated: dict[int, int] = {}
        """Tokens that preempted requests had got."""
        self.completed: list[int] = []
        """Requests that are done; whoever moves the engine on takes them out."""
        self.now: float = 0.0
        self.step: int = 0
        """Steps so far in which requests decoded."""
        self.context: int = 0
        """Tokens in the cache of all decoding requests."""
        self.gaps, self.samples = Gaps(), EngineSamples.none()
        self._ends: dict[int, int] = {}  # of decoding requests: the step that gives the last token
        self._heap: list[tuple[int, int]] = []  # the same, with entries that hold no longer
        self._growth = [0] * self.block_size  # decoding requests by when they need a new block
        self._token_time = 0.0  # when decoding requests got their last tokens, but for
        self._fresh: dict[int, float] = {}  # these
        # Of preempted requests: when they got their last token, and the tokens that were computed.
        self._last: dict[int, tuple[float, int]] = {}

    # ---- what schedulers read --------------------------------------------------------------------

    @property
    def decoding(self) -> int:
        """Requests that get a token in every step."""
        return len(self._ends)

    def tokens(self, request: int) -> int:
        """Tokens of a request that must be computed before its next one: prompt and generated."""
        return self.prompt[request] + self.generated.get(request, 0)

    def done(self, request: int) -> int:
        """Tokens of a running request that are computed."""
        left = self.left.get(request)
        if left is not None:
            return self.tokens(request) - left
        return self.prompt[request] + self.output[request] - 1 - self._ends[request] + self.step

    def got(self, request: int) -> int:
        """Tokens that a request has got."""
        end = self._ends.get(request)
        if end is None:
            return self.generated.get(request, 0)
        return self.output[request] - end + self.step

    def need(self, request: int, tokens: int) -> int:
        """Blocks that a running request lacks for so many tokens more."""
        done, size = self.done(request), self.block_size
        return -(-(done + tokens) // size) + (-done // size)

    def decoders(self) -> list[int]:
        """The requests that get a token in every step."""
        return [*self._ends]

    def most_blocks(self, request: int) -> int:
        """Blocks that a request holds when it ends."""
        most = self.prompt[request] + self.output[request] - 1
        return -(-most // self.block_size) + self.blocks.per_request

    def lacking(self, request: int) -> int:
        """Blocks that a running request lacks to its end."""
        return self.need(
            request, self.prompt[request] + self.output[request] - 1 - self.done(request)
        )

    def look(self, request: int) -> CachedPart:
        """What of a waiting request is in the cache; its last token never counts."""
        size, blocks = self.block_size, self.blocks
        tokens = self.tokens(request)
        keys, ends = self._chain(request)
        limit = (tokens - 1) // size  # the last token is computed, for the next one
        hit = blocks.find(keys, ends, limit)
        kept = 0
        again = self._last.get(request)
        if again is not None and (not ends or hit.blocks >= min(ends[-1], limit)):
            kept = min(blocks.kept(request), min(limit, again[1] // size) - hit.blocks)
        return CachedPart(tokens, hit, kept)

    # ---- what schedulers do ----------------------------------------------------------------------

    def reserve(self) -> bool:
        """Take the blocks that decoding requests need in the next step, if there are as many."""
        need = self._growth[-self.step % self.block_size]
        blocks = self.blocks
        if need > blocks.free:
            return False
        blocks.free -= need
        return True

    def admit(self, most: int, *, whole_prompt: bool = True, chunked: bool = True) -> int:
        """Let the first waiting request run, with at most so many tokens in this step.

        Returns how many, or 0 if blocks are lacking: for these tokens, or for the `whole_prompt`;
        or if it must not be `chunked`, but has more tokens.
        """
        request = self.waiting[0]
        size, blocks = self.block_size, self.blocks
        keys, ends = self._chain(request)
        tokens, hit, kept = self.look(request)
        found = hit.blocks + kept
        n = tokens - found * size
        if n > most:
            if not chunked:
                return 0
            n = most
        done = found * size + n
        need = -(-(tokens if whole_prompt else done) // size) - hit.blocks + hit.idle
        need += blocks.per_request
        if need > blocks.free:
            return 0
        if request in self._last:
            blocks.resume(request, kept)
        elif self.records.scheduled[request] != self.records.scheduled[request]:
            self.records.scheduled[request] = self.now
            self.records.cached[request] = found * size
        if hit.segments:
            blocks.hold(request, keys, hit)
        blocks.free -= -(-done // size) - found + blocks.per_request
        if keys:
            blocks.extend(request, keys, ends, done // size)
        self.waiting.popleft()
        self.running[request] = None
        self.left[request] = tokens - done
        return n

    def grow(self, request: int, tokens: int) -> bool:
        """Take blocks for so many tokens of a running request's prompt, if there are as many."""
        need = self.need(request, tokens)
        if need > self.blocks.free:
            return False
        self.blocks.free -= need
        self.left[request] -= tokens
        keys, ends = self._chain(request)
        if keys:
            self.blocks.extend(request, keys, ends, self.done(request) // self.block_size)
        return True

    def preempt(self, request: int | None = None, *, keep: bool = True) -> int:
        """Stop a running request, the last one if none is named; it waits again, first of all.

        Its blocks are free; all of it that is not in the cache then is computed again. Without
        `keep` what was its own is not in the cache, and it waits behind all others.
        """
        if request is None:
            request, _ = self.running.popitem()
        else:
            del self.running[request]
        done = self.done(request)
        end = self._ends.pop(request, None)
        if end is None:
            del self.left[request]
            self._last[request] = (self._last.pop(request, (self.now, 0))[0], done)
        else:
            self.generated[request] = self.output[request] - end + self.step
            self.context -= done
            self._growth[(done - self.step) % self.block_size] -= 1
            self._last[request] = (self._fresh.pop(request, self._token_time), done)
        keys, ends = self._chain(request)
        self.blocks.release(request, keys, ends, -(-done // self.block_size))
        if keep:
            self.waiting.appendleft(request)
        else:
            self.blocks.resume(request, 0)
            self.waiting.append(request)
        self.records.preempted[request] += 1
        return request

    def _chain(self, request: int) -> Chain:
        return NO_CHAIN if self._chains is None else self._chains[request]
