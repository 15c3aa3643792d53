"""The steps of an engine where nothing is out of the ordinary, all in one function.

Most steps of most runs are these: who runs decodes, a prompt goes on, prompts begin, requests are
done; blocks suffice, nobody has been preempted, nothing is speculated. `PlainSteps._carry_on` is
what `EngineState.reserve`, `grow`, `admit`, `_give_token` and `_complete`, the scheduler and the
engine's own methods come to then, with all that changes in local variables. Where anything else is
asked for, it leaves the step to these methods.
"""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush

from stagewright.serving.engines.blocks import NO_HIT, KvBlocks
from stagewright.serving.engines.decisions import (
    FOREVER,
    FULL,
    ONLY_DECODES,
    Decision,
    PlainRules,
)
from stagewright.serving.engines.observed import MOST_SAMPLES, pack_series
from stagewright.serving.engines.state import EngineState
from stagewright.serving.engines.times import BatchTimes, terms_within
from stagewright.serving.requests import NO_CHAIN, Records, Workload

MANY_ALONE = 1000
"""Steps of prompts only that are noted together: many, but few enough to take no memory."""


class PlainSteps(EngineState):
    """An engine's state, and the batch that is under way."""

    __slots__ = (
        *("_ahead", "_decision", "_decoders", "_first", "_grows", "_next_sample"),
        *("_sample_every", "_seen", "_stands", "_steps", "end", "times"),
    )

    def __init__(
        self, workload: Workload, records: Records, blocks: KvBlocks, times: BatchTimes
    ) -> None:
        """Nothing is under way."""
        super().__init__(workload, records, blocks)
        self.times = times
        self.end: float = math.inf
        """When the batch that is under way ends, or something arrives."""
        self._decision = Decision()
        self._decoders: int = 0
        self._stands: bool = False
        # Steps of the batch; of several, the length of the first and by how much each one grows.
        self._steps: int = 0
        self._first: float = 0.0
        self._grows: float = 0.0
        self._ahead = False  # whether a step is decided when the one before begins
        self._seen: float = 0.0  # what had arrived by then is seen by the next decision
        self._next_sample = self._sample_every = math.inf

    @property
    def _plain(self) -> bool:
        """Whether the batch under way, and who is there, are as `_carry_on` knows them."""
        return not (
            self._last
            or self.generated
            or self._fresh
            or self._decision.skipped
            or self.drafts is not None
            or (self._decoders and self.now != self._token_time)
        )

    def _steps_in_memory(self, most: int) -> int:
        """Steps for which blocks suffice; those of the first one are taken."""
        free, size = self.blocks.free, self.block_size
        for steps in range(1, most):
            free -= self._growth[(self.step + steps) % size]
            if free < 0:
                return steps
        return most

    def _sample(self) -> None:
        """Note the state at the moments that lie within the batch, or before it, when idle."""
        used, steps = self.blocks.size - self.blocks.free, 1
        arrival, noted = self.arrival, self.samples
        while self._next_sample <= self.end:
            at = self._next_sample
            if self._steps > 1:
                within = terms_within(self._first, self._grows, at - self.now, self._steps)
                steps = max(steps, within)
            arrived = 0
            for request in self.inbox:
                if arrival[request] > at:
                    break
                arrived += 1
            noted.seconds.append(at)
            noted.waiting.append(len(self.waiting) + arrived)
            noted.running.append(len(self.running))
            noted.blocks.append(used + (self._taken(steps - 1, self._decoders) if steps > 1 else 0))
            if len(noted.seconds) >= MOST_SAMPLES:
                noted = self.samples = noted.halved()
                self._next_sample, self._sample_every = noted.seconds[-1], 2 * self._sample_every
            self._next_sample += self._sample_every

    def goes_on(self, end: float, seen: float) -> bool | None:
        """End a run of steps that only decode and begin the next one, in step with others.

        As `Engine.carry_out` and `Engine.decide`. None, and nothing is done, where more may happen
        with its end; False where the run has ended and the next step is to be decided.
        """
        steps, n, begin = self._steps, self._decoders, self.now
        if not steps or not self._stands or self._fresh or begin != self._token_time:
            return None
        if end >= self._next_sample:
            return None
        blocks, heap, growth, size = self.blocks, self._heap, self._growth, self.block_size
        if steps == 1:
            seconds = end - begin
            self.gaps.add_packed(pack_series(seconds, seconds, 1, n))
        else:
            first, grows = self._first, self._grows
            self.gaps.add_packed(pack_series(first, first + grows * (steps - 1), steps, n))
            blocks.free -= self._taken(steps - 1, n)
        self.step = step = self.step + steps
        self.context += n * steps
        self.end = self.now = self._token_time = end
        self._seen = seen
        inbox, ends = self.inbox, self._ends
        if heap[0][0] <= step:
            self._end_those_due()
            n = len(ends)
        need = growth[step % size]
        if not n or need > blocks.free or self.waiting:
            return False
        if inbox and self.arrival[inbox[0]] <= seen:
            return False
        blocks.free -= need
        while ends.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        steps = heap[0][0] - step
        if n * (steps // size + 1) > blocks.free:
            steps = self._steps_in_memory(steps)
        self._first, self._grows, alike = self.times.line(n, self.context + n)
        self._decoders, self._steps = n, alike if alike < steps else steps
        return True

    def _carry_on(self, rules: PlainRules, until: float) -> bool:
        """Carry out steps up to the first that ends later.

        Returns whether that one has been decided; if not, the one before it has ended, and the
        scheduler is to be asked. To begin with, the engine is `_plain`.
        """
        budget, seats, chunked, whole_prompts = rules
        prompt, output, arrival, chains = self.prompt, self.output, self.arrival, self._chains
        inbox, waiting, running, left = self.inbox, self.waiting, self.running, self.left
        heap, ends, growth, size = self._heap, self._ends, self._growth, self.block_size
        scheduled_at, first_at, finish_at = self._scheduled_at, self._first_at, self._finish_at
        blocks, per_request = self.blocks, self.blocks.per_request
        cached, line, note, pack = self._cached, self.times.line, self.gaps.add_packed, pack_series
        step_seconds, add_alone = self.times.step, self.gaps.add_alone
        alone: list[float] = []  # seconds of steps of prompts only
        completed, ahead, sampled = self.completed, self._ahead, self._next_sample
        noticed = min(sampled, until)  # the first end at which anything else is to be done
        now, end, steps = self.now, self.end, self._steps
        n: int = len(ends)
        first, grows, stands = self._first, self._grows, self._stands
        step, context, token_time = self.step, self.context, self._token_time
        chunks: list[tuple[int, int]] = [*self._decision.chunks] if steps else []
        begun, lacks = -1, 0  # the request with a prompt in part, and the tokens that it lacks
        for request, tokens in left.items():
            if tokens:
                begun, lacks = request, tokens
        left.clear()
        if len(heap) > n:  # entries that hold no longer
            heap[:] = [(last, request) for request, last in ends.items()]
            heapify(heap)
        last: int = heap[0][0] if heap else FOREVER  # the step with which the first ends
        next_arrival = arrival[inbox[0]] if inbox else math.inf
        forgotten = 0  # blocks whose contents nobody will ask for
        more = done = 0
        tokens = pairs = places = 0  # of a step with prompts
        decided = True
        while True:
            # ---- what is under way ends ----------------------------------------------------------
            start = now
            now = seen = end
            if steps:
                if not chunks:
                    if steps == 1:
                        if ahead:
                            seen = start
                        seconds = first if stands else now - start
                        note(pack(seconds, seconds, 1, n))
                    else:
                        later = steps - 1
                        if ahead:
                            seen = start + later * (first + grows * (later - 1) * 0.5)
                        note(pack(first, first + grows * later, steps, n))
                        at = (step + 1) % size
                        upto = at + later % size
                        taken = later // size * n + sum(growth[at:upto])
                        if upto > size:
                            taken += sum(growth[: upto - size])
                        blocks.free -= taken
                    step += steps
                    context += n * steps
                else:
                    if ahead:
                        seen = start
                    seconds = now - start
                    if n:
                        note(pack(seconds, seconds, 1, n))
                        step += 1
                        context += n
                    else:
                        alone.append(seconds)
                token_time = now
                while last <= step:
                    request = heappop(heap)[1]
                    last = heap[0][0] if heap else FOREVER
                    n -= 1
                    del ends[request], running[request]
                    whole = prompt[request] + output[request] - 1
                    context -= whole
                    growth[(step - whole) % size] -= 1
                    if chains is None:
                        blocks.free += per_request - (-whole // size)
                        forgotten -= -whole // size
                    else:
                        keys, key_ends = chains[request]
                        if keys and key_ends[-1] > prompt[request] // size:
                            blocks.extend(request, keys, key_ends, whole // size)
                        blocks.release(request, -(-whole // size), again=False)
                    finish_at[request] = now
                    completed.append(request)
                if chunks:
                    for request, _ in chunks:
                        if request == begun:
                            continue
                        first_at[request] = now
                        whole, later = prompt[request], output[request] - 1
                        if later:
                            n += 1
                            ends[request] = at = step + later
                            heappush(heap, (at, request))
                            if at < last:
                                last = at
                            context += whole
                            growth[(step - whole) % size] += 1
                        else:
                            self.now = now
                            self._complete(request, whole)
                    chunks = []
            # ---- the next is decided -------------------------------------------------------------
            while next_arrival <= seen:
                waiting.append(inbox.popleft())
                next_arrival = arrival[inbox[0]] if inbox else math.inf
            need, room = growth[step % size], budget - n
            if begun >= 0:
                more = lacks if lacks < room else room
                done = prompt[begun] - lacks
                need += (-done // size) - (-(done + more) // size)
            if room < 0 or need > blocks.free:
                decided = False
                break
            if need:
                blocks.free -= need
            own = n + context
            if begun >= 0 or waiting:
                tokens, pairs, places = n, own, own
                if begun >= 0 and more:
                    done += more
                    lacks -= more
                    room -= more
                    chunks.append((begun, more))
                    if chains is not None:
                        keys, key_ends = chains[begun]
                        if keys and (done - more) // size < key_ends[-1]:
                            blocks.extend(begun, keys, key_ends, done // size)
                    tokens += more
                    pairs += more * done - more * (more - 1) // 2
                    places += done
                    if not lacks:
                        begun = -1
                while waiting and room > 0 and len(running) < seats:
                    request = waiting[0]
                    whole = prompt[request]
                    keys, key_ends = NO_CHAIN if chains is None else chains[request]
                    hit = blocks.look(keys, key_ends, (whole - 1) // size) if keys else NO_HIT
                    segments, there, idle = hit
                    more = whole - there * size
                    if more > room:
                        if not chunked:
                            break
                        more = room
                    done = there * size + more
                    held = per_request - there
                    if held - (-(whole if whole_prompts else done) // size) + idle > blocks.free:
                        break
                    scheduled_at[request] = now
                    if segments:
                        cached[request] = there * size
                        blocks.hold(request, hit)
                    blocks.free -= held - (-done // size)
                    if keys and (there < key_ends[-1] or len(segments) < len(keys)):
                        blocks.extend(request, keys, key_ends, done // size)
                    waiting.popleft()
                    running[request] = None
                    chunks.append((request, more))
                    room -= more
                    tokens += more
                    pairs += more * done - more * (more - 1) // 2
                    places += done
                    if done < whole:
                        begun, lacks = request, whole - done
            # ---- how long it takes ---------------------------------------------------------------
            if chunks:
                steps = 1
                end = now + step_seconds(tokens, pairs, places, n + len(chunks), n, own)
            elif n:
                steps = last - step
                if n * (steps // size + 1) > blocks.free:
                    self.step = step
                    steps = self._steps_in_memory(steps)
                first, grows, alike = line(n, own)
                if alike < steps:
                    steps = alike
                seconds = steps * (first + grows * (steps - 1) * 0.5)
                gap = next_arrival - now
                if gap < seconds and steps > 1 and not waiting and len(running) < seats:
                    most, steps = steps, 1
                    if gap > 0.0:
                        steps = terms_within(first, grows, gap, most)
                        if ahead and steps < most:
                            steps += 1
                    seconds = steps * (first + grows * (steps - 1) * 0.5)
                if steps == 1:
                    stands = begun < 0 and not waiting and len(running) < seats
                end = now + seconds
            else:
                steps = 0
                end = now if now > next_arrival else next_arrival
            if end >= noticed:
                if end > until:
                    break
                if end >= sampled:
                    self.now, self.end, self._steps, self._decoders = now, end, steps, n
                    self._first, self._grows, self.step = first, grows, step
                    self._sample()
                    sampled = self._next_sample
                    noticed = min(sampled, until)
                    if len(alone) > MANY_ALONE:
                        add_alone(alone)
                        alone.clear()
        # ---- what comes next is not of this function -----------------------------------------
        self.now, self.end, self._steps, self._decoders = now, end, steps, n
        self._first, self._grows, self._seen = first, grows, seen
        self.step, self.context, self._token_time = step, context, token_time
        if forgotten:
            blocks.leave(forgotten)
        if alone:
            add_alone(alone)
        for request, _ in chunks:
            left[request] = 0
        if begun >= 0:
            left[begun] = lacks
        if chunks:
            self._decision, self._stands = Decision(chunks, True, FOREVER, False), False
        else:
            open_ = not waiting and len(running) < seats
            self._decision = ONLY_DECODES if open_ else FULL
            self._stands = decided and open_ and begun < 0
        return decided
