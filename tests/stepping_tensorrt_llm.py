"""TensorRT-LLM's rules, a step after the other and a block after the other: an oracle.

Written from NVIDIA/TensorRT-LLM (`_torch/pyexecutor/scheduler/scheduler.py`), with its words; it
shares no code with the product.
"""

from __future__ import annotations

from stepping import Stepping


class TensorRtStepping(Stepping):
    batch_wait_iters_count = 0

    def schedule(self):
        self.waiting.sort(key=order)
        active = sorted(self.running, key=order)
        room = max(0, self.rules.max_num_seqs - len(active))
        active = sorted(active + self.waiting[:room], key=order)
        if self.rules.capacity_scheduler_policy == "max_utilization":
            fitting = self.max_utilization(active)
        else:
            fitting = self.guaranteed_no_evict(active)
        return self.micro_batch(fitting)

    # ---- who has blocks --------------------------------------------------------------------------

    def first_new(self, request):
        """The first block that is not in the cache: of nobody else, or of what is in common."""
        hits = len(self.hits(request))
        name = request.hash(hits, self.size)
        return name if self.pool.caching and name[0] != "own" else None

    def beneficial_to_skip(self, request, contributed):
        block = self.first_new(request)
        if block is None:
            return False
        if block in contributed:
            return True
        contributed.add(block)
        return False

    def contributed(self, active):
        return {self.first_new(r) for r in active if r in self.running and not r.decodes} - {None}

    def lacking(self, request, upto):
        """Free blocks that a request takes to have so many tokens."""
        if request in self.running:
            return -(-upto // self.size) - len(request.blocks)
        hits = self.hits(request)
        idle = sum(not self.pool.blocks[nth].holders for nth in hits)
        return -(-upto // self.size) - len(hits) + idle

    def guaranteed_no_evict(self, active):
        available = len(self.pool.queue)
        decoding = [r for r in active if r.decodes]
        for r in decoding:
            available -= self.lacking(r, min(r.prompt + r.output, self.pool.size * self.size))
        fitting, contributed = [*decoding], self.contributed(active)
        pending = [r for r in active if not r.decodes]
        for r in sorted(pending, key=lambda r: r not in self.running):  # those begun first
            if r not in self.running and self.beneficial_to_skip(r, contributed):
                continue
            needed = self.lacking(r, min(r.prompt + r.output, self.pool.size * self.size))
            if needed > available:
                break
            available -= needed
            fitting.append(r)
        return fitting

    def max_utilization(self, active):
        contributed = self.contributed(active)
        fitting, at, end, scheduled = [], 0, len(active), 0
        while at < end:
            r = active[at]
            if r not in self.running and self.beneficial_to_skip(r, contributed):
                at += 1
                continue
            needed = 0
            if r.decodes:
                needed = self.lacking(r, r.computed + 1)
            elif r not in self.running:
                needed = self.lacking(r, r.tokens)
            if scheduled + needed <= len(self.pool.queue):
                scheduled += needed
                fitting.append(r)
                at += 1
                continue
            started = [nth for nth in range(at, end) if active[nth] in self.running]
            if not started:
                break
            end = started[-1]
            self.pause(active[end])
        return fitting

    def pause(self, request):
        self.running.remove(request)
        self.name(request, request.computed)
        self.pool.free(request.blocks)
        request.blocks, request.computed, request.decodes = [], 0, False
        request.preempted += 1
        self.waiting.append(request)
        self.waiting.sort(key=order)

    # ---- who has tokens --------------------------------------------------------------------------

    def micro_batch(self, fitting):
        rules, batch = self.rules, []
        for r in fitting:
            if r.decodes:
                assert self.allocate(r, 1)
                batch.append((r, 1))
        if not self.waiting_requests([r for r in fitting if not r.decodes], len(batch)):
            return batch
        budget = rules.max_num_batched_tokens - len(batch)
        for r in fitting:
            if r.decodes:
                continue
            started = r in self.running
            hits = [] if started else self.hits(r)
            compute = r.tokens - (r.computed if started else len(hits) * self.size)
            chunk = self.chunk(compute, budget)
            if chunk is None:
                break
            if chunk == 0:
                continue
            if not started:
                for nth in hits:
                    self.pool.touch(nth)
                r.blocks, r.computed = hits, len(hits) * self.size
                assert self.allocate(r, compute)  # add_sequence
                if r.scheduled is None:
                    r.scheduled, r.cached = self.now, r.computed
                self.waiting.remove(r)
                self.running.append(r)
            batch.append((r, chunk))
            budget -= chunk
        return batch

    def chunk(self, compute, budget):
        if compute <= budget:
            return compute
        return budget // self.size * self.size if self.rules.enable_chunked_prefill else None

    def waiting_requests(self, pending, generation):
        """py_executor.py: whether the context requests of this step run in it."""
        rules, scheduled = self.rules, []
        for r in pending:
            reused = r.computed if r in self.running else len(self.hits(r)) * self.size
            budget = rules.max_num_batched_tokens - generation - sum(scheduled)
            chunk = self.chunk(r.tokens - reused, budget)
            if chunk is None:
                break
            scheduled.append(chunk)
        if not any(scheduled) or not generation:  # no dead waiting
            return True
        should_wait = (
            self.batch_wait_iters_count < rules.batch_wait_timeout_iters
            and generation + sum(scheduled)
            < rules.batch_wait_max_tokens_ratio * rules.max_num_batched_tokens
        )
        self.batch_wait_iters_count = self.batch_wait_iters_count + 1 if should_wait else 0
        return not should_wait

    def allocate(self, request, n):
        lacking = max(0, -(-(request.computed + n) // self.size) - len(request.blocks))
        if lacking > len(self.pool.queue):
            return False
        request.blocks += self.pool.take(lacking)
        return True


def order(request):
    return request.arrival, request.number
