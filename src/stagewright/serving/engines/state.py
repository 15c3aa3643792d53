"""The state of one engine: who waits, who runs, how far each request is, what its cache holds.

When a decoding request ends is known in steps from the start: the engine counts its decode steps,
and a request that has g of n tokens after step s ends with step s + n - g.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from stagewright.serving.engines.blocks import NO_HIT, Hit, KvBlocks
from stagewright.serving.engines.drafts import Drafts
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
        *("_cached", "_finish_at", "_first_at", "_held", "_scheduled_at", "drafts"),
        *("merges_copies", "names_late", "takes_whole_prompts"),
    )

    def __init__(self, workload: Workload, records: Records, blocks: KvBlocks) -> None:
        """Nothing has arrived; what becomes of requests is written into `records`."""
        self.records, self.blocks = records, blocks
        self.block_size = blocks.block_size
        self.prompt, self.output, self.arrival = workload.prompt, workload.output, records.reached
        self._scheduled_at, self._cached = records.scheduled, records.cached
        self._first_at, self._finish_at = records.first, records.finish
        self._chains = workload.chains
        self.inbox: deque[int] = deque()
        """Requests that will arrive, in order."""
        self.waiting: deque[int] = deque()
        self.running: dict[int, None] = {}
        self.left: dict[int, int] = {}
        self.loading: dict[int, int] = {}
        """Tokens that are on their way to requests' blocks (`serving.pools`)."""
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
        # Decoding requests by the step, modulo a block's tokens, that begins a new block of theirs.
        self._growth = [0] * self.block_size
        self.drafts: Drafts | None = None
        """Of speculative decoding; None: each step gives a request one token."""
        self._held: dict[int, int] = {}  # blocks of decoding requests, where these have drafts
        self.takes_whole_prompts = False
        """Whether a request that is admitted takes the blocks of its whole prompt at once."""
        self.names_late = False
        """Whether others find blocks of a prompt when these are computed, not when taken."""
        self.merges_copies = False
        """Whether of blocks that two have computed in the same step one copy is kept."""
        self._token_time: float = 0.0  # when decoding requests got their last tokens, but for
        self._fresh: dict[int, float] = {}  # these
        # Of preempted requests: when they got their last token, and the tokens that were computed.
        self._last: dict[int, tuple[float, int]] = {}

    # ---- what schedulers read --------------------------------------------------------------------

    @property
    def decoding(self) -> int:
        """Requests that get a token in every step."""
        return len(self._ends)

    @property
    def new_tokens(self) -> int:
        """Tokens that a step computes of a decoding request: its next one, and drafts."""
        return 1 if self.drafts is None else 1 + self.drafts.number

    def tokens(self, request: int) -> int:
        """Tokens of a request that must be computed before its next one: prompt and generated."""
        tokens = self.prompt[request]
        return tokens + self.generated.get(request, 0) if self.generated else tokens

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
        """Blocks that a running request lacks for so many tokens more; with drafts, for a step."""
        done, size = self.done(request), self.block_size
        if self.drafts is not None and request in self._held:
            return max(0, -(-(done + self.drafts.slots) // size) - self._held[request])
        return -(-(done + tokens) // size) + (-done // size)

    def decoders(self) -> list[int]:
        """The requests that get a token in every step."""
        return [*self._ends]

    def most_blocks(self, request: int) -> int:
        """Blocks that a request holds when it ends."""
        most = self.prompt[request] + self.output[request] - 1
        if self.drafts is not None:
            most += self.drafts.slots - 1
        return -(-most // self.block_size) + self.blocks.per_request

    def lacking(self, request: int) -> int:
        """Blocks that a running request lacks to its end."""
        held = self._held.get(request)
        if held is None:
            whole = self.takes_whole_prompts and request in self.left
            held = -(-(self.tokens if whole else self.done)(request) // self.block_size)
        return self.most_blocks(request) - self.blocks.per_request - held

    def chain(self, request: int) -> Chain:
        """What a request has in common with others; ends in blocks."""
        return NO_CHAIN if self._chains is None else self._chains[request]

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
        if self.drafts is not None:
            needs = {request: self.need(request, 1) for request in self._ends}
            if sum(needs.values()) > self.blocks.free:
                return False
            for request, more in needs.items():
                self.take(request, more)
            return True
        need = self._growth[self.step % self.block_size]
        blocks = self.blocks
        if need > blocks.free:
            return False
        blocks.free -= need
        return True

    def take(self, request: int, blocks: int) -> None:
        """Take blocks for the next step of a decoding request; `need` has said how many."""
        self.blocks.free -= blocks
        if self.drafts is not None:
            self._held[request] += blocks

    def admit(self, most: int, *, whole_prompt: bool = True, chunked: bool = True) -> int:
        """Let the first waiting request run, with at most so many tokens in this step.

        Returns how many, or 0 if blocks are lacking: for these tokens, or for the `whole_prompt`;
        or if it must not be `chunked`, but has more tokens.
        """
        request = self.waiting[0]
        size, blocks = self.block_size, self.blocks
        keys, ends = NO_CHAIN if self._chains is None else self._chains[request]
        again = request in self._last
        if keys or again:
            tokens, hit, kept = self.look(request)
        else:
            tokens, hit, kept = self.tokens(request), NO_HIT, 0
        there, n, done = hit.blocks + kept, tokens, 0
        if there:
            done = there * size
            n -= done
        if n > most:
            if not chunked:
                return 0
            n = most
        done += n
        extra = blocks.per_request
        need = extra - (-(tokens if whole_prompt else done) // size) - hit.blocks + hit.idle
        if need > blocks.free:
            return 0
        if again:
            blocks.resume(request, kept)
        elif self._scheduled_at[request] != self._scheduled_at[request]:
            self._scheduled_at[request] = self.now
            if there:
                self._cached[request] = there * size
        if hit.segments:
            blocks.hold(request, hit)
        blocks.free -= extra - (-(tokens if self.takes_whole_prompts else done) // size) - there
        if keys and not self.names_late:
            blocks.extend(request, keys, ends, done // size)
        self.waiting.popleft()
        self.running[request] = None
        self.left[request] = tokens - done
        return n

    def grow(self, request: int, tokens: int) -> bool:
        """Take blocks for so many tokens of a running request's prompt, if there are as many."""
        left, size = self.left[request], self.block_size
        done = self.tokens(request) - left
        upto = done + tokens
        need = 0 if self.takes_whole_prompts else (-done // size) - (-upto // size)
        if need > self.blocks.free:
            return False
        self.blocks.free -= need
        self.left[request] = left - tokens
        if self._chains is not None and not self.names_late:
            keys, ends = self._chains[request]
            if keys:
                self.blocks.extend(request, keys, ends, upto // size)
        return True

    def preempt(self, request: int | None = None, *, keep: bool = True, known: int = 0) -> int:
        """Stop a running request, the last one if none is named; it waits again, first of all.

        Its blocks are free; all of it that is not in the cache then is computed again. Without
        `keep` it waits behind all others, and of what was its own only the first `known` tokens are
        in the cache.
        """
        if request is None:
            request, _ = self.running.popitem()
        else:
            del self.running[request]
        done = held = self.done(request)
        end = self._ends.pop(request, None)
        if end is None:
            if self.takes_whole_prompts:
                held = self.tokens(request)
            if self.names_late:
                self.blocks.extend(request, *self._chain(request), done // self.block_size)
            del self.left[request]
            self._last[request] = (self._last.pop(request, (self.now, 0))[0], done)
        else:
            self.generated[request] = self.output[request] - end + self.step
            self.context -= done
            self._growth[(self.step - done) % self.block_size] -= 1
            self._last[request] = (self._fresh.pop(request, self._token_time), done)
        self.blocks.release(request, self._let_go(request, held))
        if keep:
            self.waiting.appendleft(request)
        else:
            self.blocks.lose(request, -(-held // self.block_size) - known // self.block_size)
            self.waiting.append(request)
        self.records.preempted[request] += 1
        return request

    # ---- what becomes of requests in a step ------------------------------------------------------

    def _name_computed(self, chunks: Sequence[tuple[int, int]]) -> None:
        """Let others find what a step has computed of prompts: blocks of their own were taken.

        Where blocks of whole prompts are taken at once, a prompt is found when all of it is done.
        """
        for request, _ in chunks:
            keys, ends = self._chain(request)
            if keys and not (self.takes_whole_prompts and self.left[request]):
                upto = (self.tokens(request) - self.left[request]) // self.block_size
                self.blocks.extend(request, keys, ends, upto, merge=self.merges_copies)

    def _let_go(self, request: int, done: int) -> int:
        """Blocks that a request has held, of which `done` tokens are computed."""
        if self.drafts is not None and request in self._held:
            return self._held.pop(request)
        return -(-done // self.block_size)

    def _accept_drafts(self, skipped: Sequence[int]) -> None:
        """Give decoding requests the drafts that were right in the step just counted."""
        assert self.drafts is not None
        step, size, growth = self.step, self.block_size, self._growth
        for request, end in [*self._ends.items()]:
            got = self.output[request] - end + step - 1  # before the step
            more = min(self.drafts.made(request, got) - 1, end - step)
            if more > 0 and request not in skipped:
                behind = step - (self.prompt[request] + got)
                self._ends[request] = end - more
                heappush(self._heap, (end - more, request))
                self.context += more
                growth[behind % size] -= 1
                growth[(behind - more) % size] += 1

    def _end_those_due(self) -> None:
        """Complete the requests that have their last tokens with the step just counted."""
        heap, ends, step = self._heap, self._ends, self.step
        while heap and heap[0][0] <= step:
            last, request = heappop(heap)
            if ends.get(request) == last:
                del ends[request]
                done = self.prompt[request] + self.output[request] - 1
                self.context -= done
                self._growth[(step - done) % self.block_size] -= 1
                self._complete(request, done)

    def _taken(self, steps: int, decoders: int) -> int:
        """Blocks that decoding requests need in so many steps behind the one under way."""
        size, growth = self.block_size, self._growth
        need = 0
        if steps >= size:
            rounds, steps = divmod(steps, size)
            need = rounds * decoders
        begin = (self.step + 1) % size
        end = begin + steps
        if end <= size:
            return need + sum(growth[begin:end])
        return need + sum(growth[begin:]) + sum(growth[: end - size])

    def _put_off(self, request: int) -> None:
        """A decoding request got no token in the step just counted: it ends a step later."""
        end = self._ends[request]
        done = self.prompt[request] + self.output[request] - end + self.step - 2
        self._ends[request] = end + 1
        heappush(self._heap, (end + 1, request))
        size = self.block_size
        self._growth[(self.step - done - 1) % size] -= 1
        self._growth[(self.step - done) % size] += 1

    def _give_token(self, request: int) -> None:
        """The prompt of a request is done, and so is its first token; or its next, if preempted."""
        del self.left[request]
        now, step, tokens, got = self.now, self.step, self.prompt[request], 1
        if self.generated:
            got += self.generated.pop(request, 0)
            tokens += got - 1
        if request in self._last:
            last, _ = self._last.pop(request)
            if got > 1:
                self.gaps.add_late((now - last, now - last, 1, 1))
        if got == 1:
            self._first_at[request] = now
        more = self.output[request] - got
        if not more:
            self._complete(request, tokens)
            return
        if self.drafts is not None:
            self._held[request] = -(-tokens // self.block_size)
        self._ends[request] = step + more
        heappush(self._heap, (step + more, request))
        self.context += tokens
        self._growth[(step - tokens) % self.block_size] += 1
        if self._token_time != now:
            self._fresh[request] = now

    def _complete(self, request: int, done: int) -> None:
        """A request has its last token; `done` tokens of it are in the cache."""
        del self.running[request]
        size = self.block_size
        keys, ends = NO_CHAIN if self._chains is None else self._chains[request]
        if keys and ends[-1] > self.prompt[request] // size:
            self.blocks.extend(request, keys, ends, done // size, merge=self.merges_copies)
        loose = self.merges_copies and done % size > 0
        held = self._let_go(request, done)
        self.blocks.release(request, held, again=False, loose=loose)
        self._finish_at[request] = self.now
        self.completed.append(request)

    def _chain(self, request: int) -> Chain:
        return self.chain(request)
