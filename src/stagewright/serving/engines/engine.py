"""One engine: what a scheduler decides, carried out in time, a change of the batch at a time.

Between two changes every step gives each decoding request one token. When such a request ends is
known in steps from the start: the engine counts its decode steps, and a request that has g of n
tokens after step s ends with step s + n - g. So ends lie in a heap by step, and all the steps up to
the next change are one event, whose length the step times give in closed form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import takewhile
from typing import NamedTuple, Protocol

from stagewright.serving.engines.blocks import KvBlocks
from stagewright.serving.engines.state import EngineState
from stagewright.serving.engines.times import BatchTimes, series, terms_within
from stagewright.serving.requests import Records, Workload

FOREVER = 1 << 60


class Decision(NamedTuple):
    """What a step computes, and how long that decision stands."""

    chunks: Sequence[tuple[int, int]] = ()
    """Requests whose prompts go on, and so many tokens of each."""
    decodes: bool = True
    """Whether decoding requests get a token."""
    repeats: int = FOREVER
    """Without chunks: so many steps are decided alike if nothing arrives or ends."""
    open: bool = True
    """Whether an arrival could change that."""
    skipped: Sequence[int] = ()
    """Decoding requests that get no token in this one step."""


class Scheduler(Protocol):
    """Decides what an engine's next step computes."""

    def schedule(self, engine: Engine) -> Decision:
        """The next batch; it admits, preempts and takes blocks by the engine's methods.

        A batch of nothing says that nothing can run until something arrives. A scheduler with a
        field `async_scheduling` that is true decides on a step when the one before begins: it sees
        only what has arrived by then.
        """
        ...


class Engine(EngineState):
    """An engine; `advance` moves it on in time."""

    __slots__ = (
        *("_decision", "_decoders", "_first", "_grows", "_next_sample", "_sample_every", "_steps"),
        *("_ahead", "_seen", "end", "scheduler", "times"),
    )

    def __init__(
        self,
        workload: Workload,
        records: Records,
        blocks: KvBlocks,
        scheduler: Scheduler,
        times: BatchTimes,
        sample_every: float = math.inf,
    ) -> None:
        """An idle engine for some of a workload's requests; its state is noted every so often."""
        super().__init__(workload, records, blocks)
        self.scheduler, self.times = scheduler, times
        self._next_sample, self._sample_every = sample_every, sample_every
        self.end = math.inf
        """When the batch that is under way ends, or something arrives."""
        self._decision, self._decoders = Decision(), 0
        # Steps of the batch; of several, the length of the first and by how much each one grows.
        self._steps, self._first, self._grows = 0, 0.0, 0.0
        self._ahead = bool(getattr(scheduler, "async_scheduling", False))
        self._seen = 0.0  # what had arrived by then is seen by the next decision

    def push(self, request: int) -> None:
        """A request arrives, not before what has arrived already and not before `now`.

        An engine with nothing to do begins with `advance`.
        """
        self.inbox.append(request)
        if not self._steps:
            self.end = min(self.end, self.arrival[request])
        elif self._decision.open and self._steps > 1 and len(self.inbox) == 1:
            self._cut(self.arrival[request])

    def _cut(self, arrival: float) -> None:
        """End a run of steps with the one in which a request arrives."""
        steps = self._steps_until(arrival - self.now, self._first, self._grows, self._steps)
        if steps < self._steps:
            self._steps = steps
            self.end = self.now + series(self._first, self._grows, steps)

    def _steps_until(self, gap: float, first: float, grows: float, most: int) -> int:
        """Steps up to the decision that sees what arrives in so many seconds, or `most`."""
        if not self._ahead:
            return terms_within(first, grows, gap, most)
        return min(terms_within(first, grows, gap, most) + 1, most) if gap > 0.0 else 1

    def advance(self, until: float) -> None:
        """Carry out all that ends by then; the batch that is under way then has been decided."""
        while self.end <= until:
            if self._steps:
                self._finish()
            else:
                self._seen = self.now = self.end
            self._begin()

    def _begin(self) -> None:
        """Decide on the next batch, and when it ends."""
        inbox, waiting, arrival = self.inbox, self.waiting, self.arrival
        while inbox and arrival[inbox[0]] <= self._seen:
            waiting.append(inbox.popleft())
        if not self.running and not waiting:
            self._steps, self.end = 0, max(self.now, arrival[inbox[0]]) if inbox else math.inf
            return
        self._decision = decision = self.scheduler.schedule(self)
        self._decoders = n = (len(self._ends) - len(decision.skipped)) if decision.decodes else 0
        if decision.chunks or decision.skipped:
            self._steps = 1
            self.end = self.now + self._seconds(decision, n)
        elif n:
            self._run(decision, n)
        else:
            self._steps, self.end = 0, max(self.now, arrival[inbox[0]]) if inbox else math.inf

    def _seconds(self, decision: Decision, n: int) -> float:
        """How long a step with chunks takes."""
        keys = n
        if n:
            keys += self.context - sum(map(self.done, decision.skipped))
        tokens, pairs, own = n, keys, keys
        generated = self.generated
        for request, more in decision.chunks:
            past = self.prompt[request] + generated.get(request, 0) - self.left[request] - more
            tokens += more
            pairs += more * past + more * (more + 1) // 2
            keys += past + more
        return self.times.step(tokens, pairs, keys, n + len(decision.chunks), n, own)

    def _run(self, decision: Decision, n: int) -> None:
        """Steps that only decode, up to the first that may be followed by another decision."""
        heap, ends = self._heap, self._ends
        while ends.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        steps, keys = heap[0][0] - self.step, self.context + n
        if decision.repeats < steps:
            steps = decision.repeats
        if n * (steps // self.block_size + 1) > self.blocks.free:
            steps = self._steps_in_memory(steps)
        first, grows, linear = self.times.line(n, keys)
        if linear < steps:
            steps = linear
        seconds = steps * (first + grows * (steps - 1) * 0.5)
        if steps > 1 and decision.open and self.inbox:
            gap = self.arrival[self.inbox[0]] - self.now
            if gap < seconds:
                steps = self._steps_until(gap, first, grows, steps)
                seconds = steps * (first + grows * (steps - 1) * 0.5)
        self._first, self._grows, self._steps = first, grows, steps
        self.end = self.now + seconds

    def _steps_in_memory(self, most: int) -> int:
        """Steps for which blocks suffice; those of the first one are taken."""
        free, size = self.blocks.free, self.block_size
        for steps in range(1, most):
            free -= self._growth[-(self.step + steps) % size]
            if free < 0:
                return steps
        return most

    def _finish(self) -> None:
        """Carry out the batch: its tokens are there."""
        start, end, steps, n = self.now, self.end, self._steps, self._decoders
        if end >= self._next_sample:
            self._sample()
        self.now = self._seen = end
        if self._ahead:
            self._seen = start
            if steps > 1:
                self._seen += series(self._first, self._grows, steps - 1)
        decision = self._decision
        if n:
            if start != self._token_time or self._fresh or decision.skipped:
                self._note_late(start, end, steps, n)
            elif steps == 1:
                self.gaps.add((end - start, end - start, 1, n))
            else:
                last = self._first + self._grows * (steps - 1)
                self.gaps.add((self._first, last, steps, n))
            if steps > 1:
                self._take_growth(steps)
            self.step += steps
            self.context += n * steps
            self._token_time = end
            for request in decision.skipped:
                self._put_off(request)
            heap, ends, step = self._heap, self._ends, self.step
            while heap and heap[0][0] <= step:
                last, request = heappop(heap)
                if ends.get(request) == last:
                    del ends[request]
                    done = self.prompt[request] + self.output[request] - 1
                    self.context -= done
                    self._growth[(done - step) % self.block_size] -= 1
                    self._complete(request, done)
        elif not self._ends:
            self._token_time = end
        for request, _ in decision.chunks:
            if not self.left[request]:
                self._give_token(request)

    def _take_growth(self, steps: int) -> None:
        """Take the blocks of the steps behind the first one."""
        size, growth, step = self.block_size, self._growth, self.step
        rounds, rest = divmod(steps - 1, size)
        need = rounds * self._decoders
        for nth in range(step + 1, step + 1 + rest):
            need += growth[-nth % size]
        self.blocks.free -= need

    def _note_late(self, start: float, end: float, steps: int, n: int) -> None:
        """Note gaps where some requests got their last tokens before the batch began."""
        first = last = end - start
        if steps > 1:
            first, last = self._first, self._first + self._grows * (steps - 1)
        stalled = start - self._token_time
        late = [t for request, t in self._fresh.items() if request not in self._decision.skipped]
        for token_time in late:
            self.gaps.add((start + first - token_time, start + first - token_time, 1, 1))
        if n > len(late):
            self.gaps.add((stalled + first, stalled + first, 1, n - len(late)))
        if steps > 1:
            second = first + (last - first) / (steps - 1)
            self.gaps.add((second, last, steps - 1, n))
        skipped = {r: self._fresh.get(r, self._token_time) for r in self._decision.skipped}
        self._fresh = skipped

    def _put_off(self, request: int) -> None:
        """A decoding request got no token in the step just counted: it ends a step later."""
        end = self._ends[request]
        done = self.prompt[request] + self.output[request] - end + self.step - 2
        self._ends[request] = end + 1
        heappush(self._heap, (end + 1, request))
        size = self.block_size
        self._growth[(done - self.step + 1) % size] -= 1
        self._growth[(done - self.step) % size] += 1

    def _give_token(self, request: int) -> None:
        """The prompt of a request is done, and so is its first token; or its next, if preempted."""
        del self.left[request]
        tokens = self.tokens(request)
        got = self.generated.pop(request, 0) + 1
        last, _ = self._last.pop(request, (self.now, 0))
        if got == 1:
            self.records.first[request] = self.now
        else:
            self.gaps.add((self.now - last, self.now - last, 1, 1))
        if got == self.output[request]:
            self._complete(request, tokens)
            return
        self._ends[request] = end = self.step + self.output[request] - got
        heappush(self._heap, (end, request))
        self.context += tokens
        self._growth[(tokens - self.step) % self.block_size] += 1
        if self._token_time != self.now:
            self._fresh[request] = self.now

    def _complete(self, request: int, done: int) -> None:
        """A request has its last token; `done` tokens of it are in the cache."""
        del self.running[request]
        keys, ends = self._chain(request)
        if keys and ends[-1] > self.prompt[request] // self.block_size:
            self.blocks.extend(request, keys, ends, done // self.block_size)
        self.blocks.release(request, keys, ends, -(-done // self.block_size))
        self.records.finish[request] = self.now
        self.completed.append(request)

    def _sample(self) -> None:
        """Note the state at the moments that lie within the batch."""
        growth, size = self._growth, self.block_size
        used, steps = self.blocks.size - self.blocks.free, 1
        while self._next_sample <= self.end:
            at = self._next_sample
            if self._steps > 1:
                within = terms_within(self._first, self._grows, at - self.now, self._steps)
                while steps < within:
                    used += growth[-(self.step + steps) % size]
                    steps += 1
            times = map(self.arrival.__getitem__, self.inbox)
            arrived = sum(1 for _ in takewhile(at.__ge__, times))
            self.samples.seconds.append(at)
            self.samples.waiting.append(len(self.waiting) + arrived)
            self.samples.running.append(len(self.running))
            self.samples.blocks.append(used)
            self._next_sample += self._sample_every
