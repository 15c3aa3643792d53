"""SGLang's rules, a step after the other and a page after the other: an oracle of `SGLang`.

Written from sglang 0.5.23 (`srt/managers/scheduler.py`, `schedule_policy.py`, `schedule_batch.py`),
with its words; it shares no code with the product.
"""

from __future__ import annotations

from stepping import Pool, Stepping

CLIP = 4096


class RadixPool(Pool):
    """Pages: some are free, others hold what is in the tree and are held, or can be evicted."""

    def take(self, count):
        taken = []
        for _ in range(count):
            loose = (nth for nth in self.queue if self.blocks[nth].hash is None)
            nth = next(loose, None)
            if nth is None:
                nth = next(iter(self.queue))
                self.forget(nth)
            del self.queue[nth]
            self.blocks[nth].holders = 1
            taken.append(nth)
        return taken

    def forget(self, nth):
        del self.cached[self.blocks[nth].hash]
        self.blocks[nth].hash = None

    def evict_to_free(self, count):
        """`evict_to_free_tokens`, oldest first."""
        lacking = count - sum(self.blocks[nth].hash is None for nth in self.queue)
        for nth in [n for n in self.queue if self.blocks[n].hash is not None][: max(0, lacking)]:
            self.forget(nth)

    def insert(self, nth, hash_):
        """Put a page into the tree; returns the tree's page, if this is a copy of it."""
        if not self.caching or self.blocks[nth].hash is not None:
            return nth
        there = self.cached.get(hash_)
        if there is None:
            self.blocks[nth].hash = hash_
            self.cached[hash_] = {nth: None}
            return nth
        (other,) = there
        self.touch(other)
        self.free([nth])
        return other


class SGLangStepping(Stepping):
    def __init__(self, requests, rules, times, blocks, size, caching=True):
        super().__init__(requests, rules, times, blocks, size, caching)
        self.pool = RadixPool(blocks, caching)
        self.batch, self.last, self.full = [], [], False  # running_batch, last_batch, batch_is_full
        self.first = min(0.7 * rules.schedule_conservativeness, 1.0)
        self.ratio = self.first
        self.filled = {}  # tokens of each request's last prefill
        self.counter, self.mode = 0, None  # SchedulerRecvSkipper

    def carry_out(self, batch, begin, end, seen):
        held = self.pool.size - len(self.pool.queue)
        waiting = len(self.waiting) + sum(r.arrival <= seen for r in self.todo)
        self.steps.append((begin, end, waiting, len(self.running), held, seen))
        self.now = end
        for request, n in batch:
            request.computed += n
            if not self.decodes(request):
                self.into_tree(request, request.computed)  # cache_unfinished_req
            if request.computed == request.tokens:
                request.got += 1
                request.decodes = True
                request.tokens_at.append(end)
                if request.got == request.output:
                    self.running.remove(request)
                    self.into_tree(request, request.computed)  # cache_finished_req
                    self.pool.free(request.blocks)

    def into_tree(self, request, tokens):
        for nth in range(tokens // self.size):
            request.blocks[nth] = self.pool.insert(
                request.blocks[nth], request.hash(nth, self.size)
            )

    def room(self):
        """Tokens that are free or can be evicted."""
        return len(self.pool.queue) * self.size

    def come(self, seen):
        """`recv_requests`: what has come is received where the counter reaches the interval."""
        self.counter += 1 if self.mode == "decode" else 1000
        idle = not self.running and not self.waiting  # the loop goes round until it receives
        if idle or self.counter >= self.rules.scheduler_recv_interval:
            self.counter = 0
            super().come(seen)

    def schedule(self):
        batch = self.get_next_batch_to_run()
        self.mode = "extend" if any(not r.decodes for r, _ in batch) else "decode"
        return batch

    def get_next_batch_to_run(self):
        self.merge()
        if not self.batch:
            self.full = False
        unfinished = [r for r in self.running if not r.decodes]  # chunked_req
        picked = []
        if unfinished or (self.waiting and not self.full):
            picked = self.prefill(unfinished)
        if not picked and self.batch:
            self.decode_or_retract()
            if not self.batch:
                picked = self.prefill(unfinished)
            else:
                return [(r, 1) for r in self.batch]
        self.last = [r for r, _ in picked]
        mixes = self.rules.enable_mixed_chunk and picked
        if mixes and self.pages_of_decode(self.batch) <= len(self.pool.queue):
            for r in self.batch:
                self.extend(r, 1)
            picked += [(r, 1) for r in self.batch]
            self.last += self.batch
            self.batch = []
        return picked

    def merge(self):
        last, self.last = self.last, []
        goes_on = [r for r in last if r in self.running and r.decodes]
        if len(goes_on) < len(last):
            self.full = False
        if goes_on:
            if not self.batch:
                self.batch, self.full = goes_on, False
            else:
                self.batch = self.batch + goes_on
        before = len(self.batch)
        self.batch = [r for r in self.batch if r in self.running]
        if len(self.batch) < before:
            self.full = False

    def prefill(self, unfinished):  # _get_new_batch_prefill_raw, PrefillAdder
        rules, page = self.rules, self.size
        if rules.schedule_policy == "lpm" and self.pool.caching:
            self.by_longest_prefix()
        ratio = 1.0 if rules.ignore_eos else self.ratio
        mixed = len(self.batch) if rules.enable_mixed_chunk else 0
        room = self.room() - mixed - sum(min(r.output - r.got, CLIP) * ratio for r in self.batch)
        input_left, chunk_left = (
            rules.max_prefill_tokens - mixed,
            rules.chunked_prefill_size - mixed,
        )
        picked = []
        for request in unfinished:
            lacks = request.tokens - request.computed
            most = min(chunk_left, int(room))
            n = min(lacks, most if most > 0 else chunk_left)
            if n <= 0 or self.pages(request, n) > len(self.pool.queue):
                return []
            self.extend(request, n)
            picked.append((request, n))
            paged = -(-n // page) * page
            room -= paged + page + (min(request.output, CLIP) if n == lacks else 0)
            input_left, chunk_left = input_left - paged, chunk_left - paged
        for request in [*self.waiting]:
            if room > 0 and (input_left <= 0 or chunk_left <= 0):
                break
            if len(self.running) >= rules.max_num_seqs:
                self.full = True
                break
            hits = self.hits(request)
            room -= page * sum(not self.pool.blocks[nth].holders for nth in hits)
            lacks = request.tokens - len(hits) * page
            makes = min(request.output - request.got, CLIP)
            others = bool(picked or self.batch)
            if lacks + makes + page >= room and others:
                self.full = True
                break
            paged = -(-lacks // page) * page
            n, reserved = lacks, min(request.output, CLIP)
            if paged > chunk_left:
                n = paged = chunk_left // page * page
                reserved = 0
                if n <= 0:
                    break
            for nth in hits:
                self.pool.touch(nth)
            before = request.blocks, request.computed
            request.blocks, request.computed = hits, len(hits) * page
            # what the product asks for beside: pages for the whole prompt
            if self.pages(request, lacks) > len(self.pool.queue):
                self.pool.free(hits)
                request.blocks, request.computed = before
                self.full = others
                break
            self.extend(request, n)
            if request.scheduled is None:
                request.scheduled, request.cached = self.now, request.computed
            self.filled[request.number] = request.tokens
            self.waiting.remove(request)
            self.running.append(request)
            picked.append((request, n))
            room -= paged + page + reserved
            input_left, chunk_left = input_left - paged, chunk_left - paged
            if room <= 0:
                self.full = True
                break
        return picked

    def decode_or_retract(self):  # update_running_batch, retract_decode
        order = self.batch
        if self.pages_of_decode(order) <= len(self.pool.queue):
            least = 0.14 * self.first
            self.ratio = max(self.ratio - (self.first - least) / 600, least)
        else:
            order = sorted(order, key=lambda r: (r.got, -r.prompt), reverse=True)
            retracted = []
            while order:
                request = order.pop()
                self.release(request, len(order))
                retracted.append(request)
                if self.pages_of_decode(order) <= len(self.pool.queue):
                    break
            self.waiting += retracted
            made, most = sum(r.got for r in order), sum(r.output for r in order)
            self.ratio = min(1.0, (made + 20 * len(order)) / (most + 1))
            self.full = False
        self.batch = order
        for r in order:
            self.extend(r, 1)

    def release(self, request, remaining):  # release_req, checkpoint=False
        kept = self.filled[request.number] // self.size
        beyond = request.blocks[kept:]
        self.pool.free(beyond)
        self.pool.free(request.blocks[:kept])
        self.pool.evict_to_free(-(-20 * remaining // self.size))
        request.blocks, request.computed, request.decodes = [], 0, False
        request.preempted += 1
        self.running.remove(request)

    def pages(self, request, n):
        return max(0, -(-(request.computed + n) // self.size) - len(request.blocks))

    def pages_of_decode(self, requests):
        return sum(r.computed % self.size == 0 for r in requests)

    def extend(self, request, n):
        request.blocks += self.pool.take(self.pages(request, n))

    def by_longest_prefix(self):  # _compute_prefix_matches, _sort_by_longest_prefix
        if len(self.waiting) > 128:
            return
        tree, matched, last = [], {}, set()
        for request in self.waiting:
            matched[request.number] = len(self.hits(request)) * self.size
            if matched[request.number] <= 32:
                shared = max((common(request.chain, other) for other in tree), default=0)
                if shared >= 32:
                    last.add(request.number)
                else:
                    tree.append(request.chain)
        self.waiting.sort(key=lambda r: float("inf") if r.number in last else -matched[r.number])


def common(chain, other):
    """Tokens that two requests have in common."""
    shared = 0
    for mine, yours, end in zip(chain[0], other[0], chain[1], strict=False):
        if mine != yours:
            break
        shared = end
    return shared
