"""One engine: what a scheduler decides, carried out in time, a change of the batch at a time.

Between two changes every step gives each decoding request one token. When such a request ends is
known in steps from the start: the engine counts its decode steps, and a request that has g of n
tokens after step s ends with step s + n - g. So ends lie in a heap by step, and all the steps up to
the next change are one event, whose length the step times give in closed form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop
from typing import ClassVar, Protocol

from stagewright.serving.engines.blocks import KvBlocks
from stagewright.serving.engines.decisions import FOREVER, BlockRules, Decision, PlainRules
from stagewright.serving.engines.plain import PlainSteps
from stagewright.serving.engines.plans import Plan, PlannedSteps
from stagewright.serving.engines.times import BatchTimes, series, terms_within
from stagewright.serving.requests import Records, Workload


class Scheduler(Protocol):
    """Decides what an engine's next step computes."""

    def schedule(self, engine: Engine) -> Decision:
        """The next batch; it admits, preempts and takes blocks by the engine's methods.

        A batch of nothing says that nothing can run until something arrives. A scheduler with a
        field `async_scheduling` that is true decides on a step when the one before begins: it sees
        only what has arrived by then. A field `block_rules` (`BlockRules`) says how blocks of
        prompts are taken and named. One with a field `plain` that is not None (`PlainRules`) is
        not asked while blocks suffice.
        """
        ...


class Unit(Protocol):
    """What is moved on in time as one: an engine, or several that step together."""

    end: float
    """When the batch that is under way ends, or something arrives."""

    @property
    def engines(self) -> Sequence[Engine]:
        """Its engines."""
        ...

    def advance(self, until: float) -> None:
        """Carry out all that ends by then; the batch that is under way then has been decided."""
        ...

    def arrives(self, engine: Engine) -> None:
        """Something has come into the inbox of one of its engines."""
        ...


class Engine(PlainSteps):
    """An engine; `advance` moves it on in time."""

    __slots__ = ("_rules", "scheduler", "unit")

    _carries_on: ClassVar[bool] = True

    def __init_subclass__(cls, plain: bool = False) -> None:
        """A subclass has methods of its own; `plain`: `_carry_on` does the same if `_plain`."""
        cls._carries_on = plain

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
        super().__init__(workload, records, blocks, times)
        self.scheduler = scheduler
        self._next_sample, self._sample_every = sample_every, sample_every
        self._ahead = bool(getattr(scheduler, "async_scheduling", False))
        rules: BlockRules = getattr(scheduler, "block_rules", BlockRules())
        self.takes_whole_prompts, self.names_late, self.merges_copies = rules
        plain: PlainRules | None = getattr(scheduler, "plain", None)
        self._rules = plain if self._carries_on else None

        self.unit: Unit = self
        """What moves the engine on: itself, or what lets several step together."""

    def push(self, request: int) -> None:
        """A request arrives, not before what has arrived already and not before `now`.

        An engine with nothing to do begins with `advance` of its unit.
        """
        self.inbox.append(request)
        self.unit.arrives(self)

    @property
    def engines(self) -> Sequence[Engine]:
        """The engine, as the only one of its unit."""
        return (self,)

    def arrives(self, engine: Engine) -> None:
        """A request has come into the inbox: a run of steps ends with the one in which it does."""
        arrival = self.next_arrival
        if not self._steps:
            self.end = min(self.end, arrival)
        elif self._decision.open and self._steps > 1 and len(self.inbox) == 1:
            steps = self.steps_until(arrival - self.now, self._first, self._grows, self._steps)
            if steps < self._steps:
                self._steps = steps
                self.end = self.now + series(self._first, self._grows, steps)

    def steps_until(self, gap: float, first: float, grows: float, most: int) -> int:
        """Steps up to the decision that sees what arrives in so many seconds, or `most`."""
        if gap <= 0.0:
            return 1
        steps = terms_within(first, grows, gap, most)
        return steps + 1 if self._ahead and steps < most else steps

    def advance(self, until: float) -> None:
        """Carry out all that ends by then; the batch that is under way then has been decided."""
        while self.end <= until:
            if self.end >= self._next_sample:
                self._sample()
            if self._rules is not None and self._plain:
                if not self._carry_on(self._rules, until):
                    self._begin()
            elif not self._steps:
                self._seen = self.now = self.end
                self._begin()
            elif self._stands:
                self._decode_on(until)
            else:
                self._finish()
                self._begin()

    # ---- for engines that step together ----------------------------------------------------------

    @property
    def next_arrival(self) -> float:
        """When the first request in the inbox arrives."""
        return self.arrival[self.inbox[0]]

    @property
    def decides_ahead(self) -> bool:
        """Whether a step is decided when the one before begins."""
        return self._ahead

    @property
    def interruptible(self) -> bool:
        """Whether an arrival could change what the next steps do."""
        return self._decision.open or not self._steps

    @property
    def planned(self) -> tuple[int, float, float]:
        """Steps under way, the length of the first and by how much each one grows."""
        return self._steps, self._first, self._grows

    @property
    def planned_steps(self) -> PlannedSteps | None:
        """The batch that is under way; None: nothing is."""
        if not self._steps:
            return None
        tokens = requests = self._decoders
        if self.drafts is not None:
            tokens *= self.new_tokens
        for _, more in self._decision.chunks:
            tokens += more
            requests += 1
        return PlannedSteps((self._steps, self._first, self._grows), tokens, requests)

    def decide(self) -> None:
        """Decide on the next batch, and how long it would take alone."""
        self._begin()
        if not self._steps:
            self._first = self._grows = 0.0
        elif self._decision.chunks or self._decision.skipped:
            self._first, self._grows = self.end - self.now, 0.0

    def keep_pace(self, plan: Plan, end: float) -> None:
        """Take as many steps as others, and as long; with nothing to do, wait for them."""
        if self._steps:
            self._steps, self._first, self._grows = plan
        self.end = end

    def carry_out(self, end: float, seen: float) -> None:
        """The step of all has ended; the next decision sees what had arrived by `seen`."""
        self.end = end
        if end >= self._next_sample:
            self._sample()
        if self._steps:
            self._finish()
        self.now, self._seen = end, seen

    # ---- alone -----------------------------------------------------------------------------------

    def _decode_on(self, until: float) -> None:
        """Carry out the run of steps that only decode, and those behind it that nobody decides on.

        As `_finish` and `_begin` do it, in a single loop: most of what happens is here.
        """
        heap, ends, growth, size = self._heap, self._ends, self._growth, self.block_size
        inbox, arrival, blocks, note = self.inbox, self.arrival, self.blocks, self.gaps.add
        while True:
            start, end, steps, n = self.now, self.end, self._steps, self._decoders
            first, grows = self._first, self._grows
            if start != self._token_time or self._fresh:
                self._note_late(start, end, steps, n)
            else:
                note((first, first + grows * (steps - 1), steps, n))
            step = self.step
            if steps > 1:
                blocks.free -= self._taken(steps - 1, n)
            self.step = step = step + steps
            self.context += n * steps
            self.now = self._token_time = seen = end
            if self._ahead:
                seen = start + (steps - 1) * (first + grows * (steps - 2) * 0.5)
            self._seen = seen
            if heap[0][0] <= step:
                self._end_those_due()
            n, need = len(ends), growth[step % size]
            if (inbox and arrival[inbox[0]] <= seen) or not n or need > blocks.free or self.waiting:
                self._begin()
                return
            blocks.free -= need
            self._run(n, FOREVER, True)
            if self.end > until or self.end >= self._next_sample:
                return

    # ---- a batch begins --------------------------------------------------------------------------

    def _begin(self) -> None:
        """Decide on the next batch, and when it ends."""
        inbox, waiting, arrival = self.inbox, self.waiting, self.arrival
        if inbox and arrival[inbox[0]] <= self._seen:
            waiting.append(inbox.popleft())
            while inbox and arrival[inbox[0]] <= self._seen:
                waiting.append(inbox.popleft())
        elif self._stands and self._ends and not waiting and self.reserve():
            self._run(len(self._ends), FOREVER, True)
            return
        if not self.running and not waiting:
            self._steps, self.end = 0, max(self.now, arrival[inbox[0]]) if inbox else math.inf
            return
        self._decision = decision = self.scheduler.schedule(self)
        chunks, decodes, repeats, open_, skipped, stands = decision
        n = (len(self._ends) - len(skipped)) if decodes else 0
        if self.drafts is not None:
            repeats, stands = 1, False
        self._stands = stands and not chunks
        if chunks or skipped:
            self._steps, self._decoders = 1, n
            self.end = self.now + self._seconds(chunks, skipped, n)
        elif n:
            self._run(n, repeats, open_)
        else:
            self._decoders = 0
            self._steps, self.end = 0, max(self.now, arrival[inbox[0]]) if inbox else math.inf

    def _seconds(self, chunks: Sequence[tuple[int, int]], skipped: Sequence[int], n: int) -> float:
        """How long a step with chunks takes."""
        tokens = keys = pairs = 0
        if n:
            new = self.new_tokens
            tokens = n * new
            keys = tokens + self.context
            for request in skipped:
                keys -= self.done(request)
            pairs = keys * new - tokens * (new - 1) // 2
        own = keys
        prompt, left, generated = self.prompt, self.left, self.generated
        for request, more in chunks:
            upto = prompt[request] - left[request]
            if generated:
                upto += generated.get(request, 0)
            tokens += more
            pairs += more * upto - more * (more - 1) // 2
            keys += upto
        return self.times.step(tokens, pairs, keys, n + len(chunks), n, own)

    def _run(self, n: int, repeats: int, open_: bool) -> None:
        """Steps that only decode, up to the first that may be followed by another decision."""
        heap, ends = self._heap, self._ends
        while True:
            last, request = heap[0]
            if ends.get(request) == last:
                break
            heappop(heap)
        steps = last - self.step
        if repeats < steps:
            steps = repeats
        if n * (steps // self.block_size + 1) > self.blocks.free:
            steps = self._steps_in_memory(steps)
        new = n if self.drafts is None else n * self.new_tokens
        first, grows, linear = self.times.line(n, self.context + new)
        if linear < steps:
            steps = linear
        seconds = steps * (first + grows * (steps - 1) * 0.5)
        now, inbox = self.now, self.inbox
        if steps > 1 and open_ and inbox and self.unit is self:
            gap = self.arrival[inbox[0]] - now
            if gap < seconds:
                steps = self.steps_until(gap, first, grows, steps)
                seconds = steps * (first + grows * (steps - 1) * 0.5)
        self._decoders, self._first, self._grows, self._steps = n, first, grows, steps
        self.end = now + seconds

    # ---- a batch ends ----------------------------------------------------------------------------

    def _finish(self) -> None:
        """Carry out the batch: its tokens are there."""
        start, end, steps, n = self.now, self.end, self._steps, self._decoders
        self.now = self._seen = end
        if self._ahead:
            self._seen = start
            if steps > 1:
                self._seen += series(self._first, self._grows, steps - 1)
        chunks, _, _, _, skipped, _ = self._decision
        if n:
            if start != self._token_time or self._fresh or skipped:
                self._note_late(start, end, steps, n)
            elif steps == 1:
                self.gaps.add((end - start, end - start, 1, n))
            else:
                last = self._first + self._grows * (steps - 1)
                self.gaps.add((self._first, last, steps, n))
            if steps > 1:
                self.blocks.free -= self._taken(steps - 1, n)
            self.step = step = self.step + steps
            self.context += n * steps
            self._token_time = end
            if skipped:
                for request in skipped:
                    self._put_off(request)
            if self.drafts is not None:
                self._accept_drafts(skipped)
            heap = self._heap
            if heap and heap[0][0] <= step:
                self._end_those_due()
        else:
            self.gaps.add_step((end - start, end - start, 1, 0))
            if not self._ends:
                self._token_time = end
        if self.names_late and self._chains is not None:
            self._name_computed(chunks)
        for request, _ in chunks:
            if not self.left[request]:
                self._give_token(request)

    def _note_late(self, start: float, end: float, steps: int, n: int) -> None:
        """Note gaps where some requests got their last tokens before the batch began."""
        first = last = end - start
        if steps > 1:
            first, last = self._first, self._first + self._grows * (steps - 1)
        stalled, add_late = start - self._token_time, self.gaps.add_late
        late = [t for request, t in self._fresh.items() if request not in self._decision.skipped]
        for token_time in late:
            add_late((start + first - token_time, start + first - token_time, 1, 1))
        if n > len(late):
            add_late((stalled + first, stalled + first, 1, n - len(late)))
        self.gaps.add_step((first, first, 1, n))
        if steps > 1:
            second = first + (last - first) / (steps - 1)
            self.gaps.add((second, last, steps - 1, n))
        skipped = {r: self._fresh.get(r, self._token_time) for r in self._decision.skipped}
        self._fresh = skipped
