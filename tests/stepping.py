"""An engine that takes one step after the other with vLLM's rules, block by block: the oracle of
`stagewright.serve`, which goes from change to change and counts blocks.

It shares no code with it. Blocks have hashes, reference counts and places in a queue, as in vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Block:
    holders: int = 0
    hash: object = None


@dataclass
class Pool:
    """vLLM's BlockPool."""

    size: int
    caching: bool

    def __post_init__(self):
        self.blocks = [Block() for _ in range(self.size)]
        self.queue = dict.fromkeys(range(self.size))  # free ones, the next to hand out first
        self.cached: dict[object, dict[int, None]] = {}

    def take(self, count: int) -> list[int]:
        taken = []
        for _ in range(count):
            nth = next(iter(self.queue))
            del self.queue[nth]
            block = self.blocks[nth]
            if block.hash is not None:
                del self.cached[block.hash][nth]
                if not self.cached[block.hash]:
                    del self.cached[block.hash]
                block.hash = None
            block.holders = 1
            taken.append(nth)
        return taken

    def touch(self, nth: int):
        if not self.blocks[nth].holders:
            del self.queue[nth]
        self.blocks[nth].holders += 1

    def free(self, held: list[int]):
        for nth in reversed(held):
            self.blocks[nth].holders -= 1
            if not self.blocks[nth].holders:
                self.queue[nth] = None

    def name(self, nth: int, hash_: object):
        if self.caching and self.blocks[nth].hash is None:
            self.blocks[nth].hash = hash_
            self.cached.setdefault(hash_, {})[nth] = None


@dataclass
class Request:
    number: int
    arrival: float
    prompt: int
    output: int
    chain: tuple = ((), ())
    computed: int = 0
    got: int = 0
    blocks: list = field(default_factory=list)
    tokens_at: list = field(default_factory=list)
    scheduled: float | None = None
    cached: int = 0
    preempted: int = 0
    decodes: bool = False  # has its next token with every step

    @property
    def tokens(self):
        return self.prompt + self.got

    def hash(self, nth: int, size: int):
        """What the nth block's hash stands for: the segment of its last token, or nobody else's."""
        last = (nth + 1) * size
        for key, end in zip(*self.chain, strict=True):
            if last <= end:
                return key, nth
        return "own", self.number, nth


class Stepping:
    """One engine."""

    def __init__(self, requests, rules, times, blocks, size, caching=True, drafts=None):
        self.todo = sorted(requests, key=lambda r: (r.arrival, r.number))
        self.rules, self.times, self.size = rules, times, size
        self.pool = Pool(blocks, caching)
        self.drafts = drafts
        self.new = 1 + (drafts.number if drafts else 0)  # tokens of who decodes
        self.waiting, self.running, self.now = [], [], 0.0
        self.steps = []  # start, end, waiting, running, blocks held, when the decision was taken

    def run(self):
        together([self])
        return self

    def decodes(self, request):
        return request.decodes

    def come(self, seen):
        while self.todo and self.todo[0].arrival <= seen:
            self.waiting.append(self.todo.pop(0))

    def seconds(self, batch):
        tokens = sum(n for _, n in batch)
        keys = sum(r.computed + n for r, n in batch)
        pairs = sum(n * r.computed + n * (n + 1) // 2 for r, n in batch)
        decoding = sum(self.decodes(r) for r, _ in batch)
        if decoding == len(batch):
            return self.times.linear_run(len(batch), keys).seconds
        return self.times.step(tokens, pairs, keys, len(batch), decoding)

    def carry_out(self, batch, begin, end, seen):
        held = self.pool.size - len(self.pool.queue)
        self.steps.append((begin, end, len(self.waiting), len(self.running), held, seen))
        self.now = end
        for request, n in batch:
            right = 0
            if self.drafts and self.decodes(request):
                right = (
                    min(
                        self.drafts.tokens_of_step(request.number, request.got),
                        request.output - request.got,
                    )
                    - 1
                )
                n = 1
            request.computed += n
            if request.computed == request.tokens:
                request.computed += right
                request.got += 1 + right
                request.decodes = True
                request.tokens_at.append(end)
                self.name(request, request.computed)
                if request.got == request.output:
                    self.running.remove(request)
                    self.pool.free(request.blocks)

    def schedule(self):
        rules, budget = self.rules, self.rules.max_num_batched_tokens
        threshold = rules.long_prefill_token_threshold
        batch, preempted, at = [], False, 0
        while at < len(self.running) and budget > 0:
            request = self.running[at]
            n = min(request.tokens - request.computed, threshold or budget, budget)
            if self.drafts and self.decodes(request):
                n = self.new
            while not self.allocate(request, n):
                last = self.running.pop()
                self.pool.free(last.blocks)
                last.blocks, last.computed, preempted = [], 0, True
                last.decodes = False
                last.preempted += 1
                self.waiting.insert(0, last)
                if last is request:
                    return batch
            batch.append((request, n))
            budget = max(budget - n, 0)
            at += 1
        while self.waiting and budget > 0 and not preempted:
            if len(self.running) == rules.max_num_seqs:
                break
            request = self.waiting[0]
            hits = self.hits(request)
            n = request.tokens - len(hits) * self.size
            n = min(n, threshold or n)
            if n > budget and not rules.enable_chunked_prefill:
                break
            n = min(n, budget)
            idle = sum(not self.pool.blocks[nth].holders for nth in hits)
            whole = (
                request.tokens if rules.scheduler_reserve_full_isl else len(hits) * self.size + n
            )
            if -(-whole // self.size) - len(hits) + idle > len(self.pool.queue):
                break
            for nth in hits:
                self.pool.touch(nth)
            request.blocks, request.computed = hits, len(hits) * self.size
            assert self.allocate(request, n)
            if request.scheduled is None:
                request.scheduled, request.cached = self.now, request.computed
            self.running.append(self.waiting.pop(0))
            batch.append((request, n))
            budget -= n
        return batch

    def hits(self, request):
        found = []
        for nth in range((request.tokens - 1) // self.size):
            of = self.pool.cached.get(request.hash(nth, self.size))
            if not of:
                break
            found.append(next(iter(of)))
        return found

    def allocate(self, request, n):
        upto = request.computed + n
        if self.drafts and self.decodes(request):
            upto = request.computed + self.drafts.slots
        lacking = max(0, -(-upto // self.size) - len(request.blocks))
        if lacking > len(self.pool.queue):
            return False
        request.blocks += self.pool.take(lacking)
        self.name(request, min(request.computed + n, request.tokens))
        return True

    def name(self, request, tokens):
        for nth in range(tokens // self.size):
            self.pool.name(request.blocks[nth], request.hash(nth, self.size))


def together(engines: list[Stepping]):
    """Engines that step together: a step takes as long as the slowest one's."""
    now = seen = 0.0
    while any(e.todo or e.waiting or e.running for e in engines):
        for e in engines:
            e.come(seen)
        if not any(e.waiting or e.running for e in engines):
            seen = now = max(now, min(e.todo[0].arrival for e in engines if e.todo))
            continue
        for e in engines:
            e.now = now
        batches = [e.schedule() for e in engines]
        pairs = [*zip(engines, batches, strict=True)]
        begin, now = now, now + max(e.seconds(batch) for e, batch in pairs if batch)
        for e, batch in pairs:
            e.carry_out(batch, begin, now, seen)
        seen = begin if engines[0].rules.async_scheduling else now
