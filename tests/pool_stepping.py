"""Instances that compute prompts and instances that decode, a step at a time: an oracle of
`stagewright.serving.disaggregation`, with which it shares no code.

Every request holds one block, so that nobody is ever preempted: a cache of n blocks holds n
requests. Requests go to instances in turn.
"""

import math


class Server:
    def __init__(self, places, rules, times):
        self.free, self.rules, self.times = places, rules, times
        self.queue, self.running, self.loaded = [], [], []
        self.batch, self.start, self.end, self.seen = [], 0.0, math.inf, 0.0
        self.awake = False  # something happened while no batch was under way


class Apart:
    """`rows` are (arrival, prompt, output); `seconds(tokens, last)` is a transfer alone on its
    links; `last`: with what a request has whatever its length.

    `layers`: None, caches leave with the whole prompt; 0, with each chunk; else, by so many layers.
    """

    def __init__(self, rows, prefill, decode, seconds, delay, layers=None):
        self.layers = layers
        self.rows, self.servers, self.count = rows, [*prefill, *decode], len(prefill)
        self.seconds, self.delay = seconds, delay
        n = len(rows)
        self.left = [prompt for _, prompt, _ in rows]
        self.got = [0] * n
        self.prefilled, self.arrives, self.first, self.finish = ([math.nan] * n for _ in range(4))
        self.home, self.links = {}, [0.0] * len(self.servers)
        self.events = [(at + delay, 0, i, "arrival") for i, (at, _, _) in enumerate(rows)]
        self.turns = [0, 0]

    def run(self):
        while True:
            ends = [(s.end, 2, k, "end") for k, s in enumerate(self.servers)]
            event = min([*self.events, *ends])
            if event[0] == math.inf:
                return self
            at, _, i, what = event
            if what == "end":
                self.ends(at, i)
                continue
            self.events.remove(event)
            getattr(self, what)(at, i)

    def wake(self, k, at):
        if not self.servers[k].batch:
            self.servers[k].end, self.servers[k].awake = at, True

    def arrival(self, at, i):
        k = self.turns[0] % self.count
        self.turns[0] += 1
        self.home[i] = [k]
        if self.layers is not None:
            self.home[i].append(self.next_decoder())
        self.servers[k].queue.append((at, i))
        self.wake(k, at)

    def next_decoder(self):
        self.turns[1] += 1
        return self.count + (self.turns[1] - 1) % (len(self.servers) - self.count)

    def go_on(self, at, i):
        if self.layers is None:
            self.home[i].append(self.next_decoder())
        k = self.home[i][1]
        self.servers[k].queue.append((at, i))
        self.wake(k, at)

    def push(self, start, end, i, n):
        """The cache of a chunk leaves at its end, or when the step's first layer is computed."""
        ends = self.home[i]
        leaves = start + (end - start) / self.layers if self.layers else end
        begins = max(leaves, *(self.links[e] for e in ends))
        seconds = self.seconds(n, n == self.left[i])
        self.arrives[i] = begins + seconds
        if self.layers:
            self.arrives[i] = max(self.arrives[i], end + seconds / self.layers)
        for e in ends:
            self.links[e] = self.arrives[i]

    def left_source(self, at, i):
        source = self.home[i][0]
        self.servers[source].free += 1
        if self.servers[source].queue:
            self.wake(source, at)

    def arrived(self, at, i):
        target = self.home[i][1]
        if self.layers is None:
            self.left_source(at, i)
        self.servers[target].loaded.append((at, i))
        self.wake(target, at)

    def ends(self, at, k):
        of = self.servers[k]
        of.seen = of.start if of.batch and of.rules.async_scheduling else at
        if k < self.count and self.layers is not None:
            for i, n in of.batch:
                self.push(of.start, at, i, n)
        for i, n in of.batch:
            self.left[i] -= n
            if self.left[i]:
                continue
            if k < self.count:
                of.running.remove(i)
                if self.layers is not None:
                    self.events.append((max(at, self.arrives[i]), 1, i, "left_source"))
                self.prefilled[i] = at
                self.events.append((at + self.delay, 0, i, "go_on"))
                continue
            self.left[i] = 1
            self.got[i] += 1
            if self.got[i] == 1:
                self.first[i] = at
            if self.got[i] == self.rows[i][2]:
                self.finish[i] = at
                of.running.remove(i)
                of.free += 1
        self.begin(at, k)

    def begin(self, at, k):
        of, rules = self.servers[k], self.servers[k].rules
        budget, batch = rules.max_num_batched_tokens, []
        for i in of.running:
            n = min(self.left[i], budget)
            if n:
                batch.append((i, n))
                budget -= n
        while (
            of.loaded and of.loaded[0][0] <= of.seen and budget
            and len(of.running) < rules.max_num_seqs
        ):  # fmt: skip
            i = of.loaded.pop(0)[1]
            self.left[i] = 1
            of.running.append(i)
            batch.append((i, 1))
            budget -= 1
        blocked = of.loaded and of.loaded[0][0] <= of.seen
        while (
            not blocked and of.queue and of.queue[0][0] <= of.seen and of.free
            and len(of.running) < rules.max_num_seqs
        ):  # fmt: skip
            if k < self.count and not budget:
                break
            i = of.queue.pop(0)[1]
            of.free -= 1
            if k < self.count:
                n = min(self.left[i], budget)
                of.running.append(i)
                batch.append((i, n))
                budget -= n
            else:
                if self.layers is not None:
                    self.events.append((max(at, self.arrives[i]), 1, i, "arrived"))
                    continue
                source = self.home[i][0]
                begins = max(at, self.links[source], self.links[k])
                self.links[source] = self.links[k] = begins + self.seconds(self.rows[i][1], True)
                self.arrives[i] = self.links[k]
                self.events.append((self.arrives[i], 1, i, "arrived"))
        of.batch, of.start = batch, at
        if not batch:
            later = [t for t, _ in (*of.queue[:1], *of.loaded[:1]) if t > of.seen]
            of.end = max(at, min(later)) if later else math.inf
            if of.end == at:  # who came while the last batch ran is seen now
                self.ends(at, k)
            return
        past = {i: self.rows[i][1] - self.left[i] if k < self.count else
                self.rows[i][1] - 1 + self.got[i] for i, _ in batch}  # fmt: skip
        keys = sum(past[i] + n for i, n in batch)
        pairs = sum(n * past[i] + n * (n + 1) // 2 for i, n in batch)
        decoding = sum(self.got[i] > 0 for i, _ in batch)
        if decoding == len(batch):
            of.end = at + of.times.linear_run(len(batch), keys).seconds
        else:
            tokens = sum(n for _, n in batch)
            of.end = at + of.times.step(tokens, pairs, keys, len(batch), decoding)
