"""How long steps of a server take: a function of the batch, for an event loop.

One replica's batch is described by sums over its requests: new tokens, pairs of a query and a key
that it sees, keys in the cache after the step, and the number of requests. All numbers that go in
and out are plain ints and floats; a call takes about a microsecond.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import mul

from stagewright.run.lengths import Group
from stagewright.run.settings import Run
from stagewright.serving.engines.plans import Plan, PlannedSteps
from stagewright.serving.engines.times import DecodeRuns, StepSeconds
from stagewright.serving.hosts import HostTimes
from stagewright.serving.steps.pieces import Pieces, longest_pieces
from stagewright.serving.steps.pipelined import through_pipeline
from stagewright.serving.steps.plain import (
    BatchTotals,
    PlainRank,
    PlainTable,
    PlainWay,
    entry,
    in_one_call,
    longest,
)


def batch_run(run: Run, groups: Sequence[Group]) -> Run:
    """The run of one step with these requests, in the layout of `run`, which is not resolved.

    A request that has tokens in the cache and gets one token (and its drafts) decodes. A step with
    any such request is one of decode, beside which others' prompts are computed.
    """
    new = 1 + run.num_speculative_tokens
    decodes = any(g.context_length and g.new_tokens == new for g in groups)
    changed = {
        "mode": "decode" if decodes else "prefill",
        "requests": tuple(groups),
        "batch_size": None, "prompt_length": None, "context_length": None, "output_length": None,
        "num_speculative_tokens": run.num_speculative_tokens if decodes else 0,
    }  # fmt: skip
    return run.model_copy(update=changed)


@dataclass(eq=False)
class StepTimes(DecodeRuns):
    """Seconds of the steps of one replica; with a pipeline, of all its batches together."""

    most_tokens: int
    most_requests: int
    _decode: PlainTable
    """Steps in which requests decode."""
    _beside: PlainTable | None
    """Steps in which prompts are computed beside requests that decode; None: there are none."""
    _prompts: PlainTable
    """Steps of prompts alone."""
    _fresh: PlainTable
    """Steps of prompts alone of which no token is in the cache."""
    _knots: list[float]
    """Keys of a request between which terms of decode are linear."""
    _terms: list[list[float]]
    """By term of decode, its seconds for one request beside many, without launches: by knot."""
    _apart: bool
    """Whether prompts may run in steps of their own where that is faster: latent attention, whose
    form differs, and layers with a state, which have no steps of both."""
    host: HostTimes | None = None
    """What the engine's host adds to each step."""
    _shared: list[float] | None = None
    """By tokens: as `shared_experts.shared_seconds`."""
    _host_of_all: HostTimes | None = None
    """The host of a replica that `of_all` adds."""
    _without_host: StepTimes | None = None
    _pieces: dict[int, Pieces] = field(default_factory=dict[int, Pieces])
    _hosted: dict[HostTimes, StepTimes] = field(default_factory=dict[HostTimes, "StepTimes"])

    def with_host(self, host: HostTimes) -> StepTimes:
        """These times with what an engine's host adds to each step."""
        alone = self._without_host or self
        if host not in alone._hosted:
            alone._hosted[host] = replace(
                alone, host=host, _without_host=alone, _pieces={}, _hosted={}
            )
        return alone._hosted[host]

    def of_replica(self, host: HostTimes) -> StepTimes:
        """As `with_host`, for a replica whose steps `of_all` times together with the others'.

        Where replicas share experts, a host that works beside the GPU counts only in `of_all`: how
        long the GPU takes is not known before the tokens of all are.
        """
        if self._shared is None or not host.beside:
            return self.with_host(host)
        return replace(self._without_host or self, _host_of_all=host)

    def decode(self, requests: int, keys: int) -> float:
        """Seconds of a step in which so many requests get a token, and their drafts.

        keys: in the cache after the step, summed over the requests.
        """
        pieces = self._pieces.get(requests) or self._made(requests)
        n = bisect_right(pieces.edges, keys)
        return pieces.at_none[n] + pieces.per_key[n] * keys

    def decode_once(self, requests: int, keys: int) -> float:
        """As `decode`, for a number of requests that is not asked for again: cheaper then."""
        knots, each = self._knots, keys / requests
        k = min(max(bisect_right(knots, each) - 1, 0), len(knots) - 2)
        share = (each - knots[k]) / (knots[k + 1] - knots[k])
        terms = [of[k] + share * (of[k + 1] - of[k]) for of in self._terms_of(requests)]
        ways = self._with_host(requests, self._ways(requests))
        return max(base + sum(map(mul, counts, terms)) for base, counts in ways)

    def line(self, requests: int, keys: int) -> tuple[float, float, int]:
        """Seconds of the next decode step, by how much each further one is longer, and for how many
        steps that holds, the next one included."""
        edges, at_none, per_key = self._pieces.get(requests) or self._made(requests)
        n = bisect_right(edges, keys)
        slope = per_key[n]
        steps = -int((keys - edges[n]) // requests) if n < len(edges) else 1 << 60
        return at_none[n] + slope * keys, slope * requests, steps

    def step(
        self,
        tokens: int,
        pairs: int,
        keys: int,
        requests: int,
        decoding: int = 0,
        decoding_keys: int = 0,
    ) -> float:
        """Seconds of any step: chunks of prompts, and `decoding` of the requests beside them.

        tokens: new ones; pairs: of a query and a key that it sees, context and new ones; keys: in
        the cache after the step; requests: all; each summed over all requests, those that decode
        included. decoding_keys: the part of keys that belongs to these.
        """
        if decoding == requests:
            return self.decode(decoding, decoding_keys or keys)
        seconds = self.chunk_steps[0 if decoding else 1]
        return seconds(tokens, pairs, keys, requests, decoding, decoding_keys)

    @cached_property
    def chunk_steps(self) -> tuple[StepSeconds, StepSeconds]:
        """`step` where prompts are computed, beside requests that decode and alone."""
        tables = (None, None) if self._apart else (self._beside, self._prompts)
        beside, alone = (in_one_call(of, self.host, self._with_prompts) for of in tables)
        if self._beside is not None and not self._apart and len(self._beside.ranks) > 1:
            beside = through_pipeline(self._beside, self.host, self._with_prompts)
        return beside, alone

    def _with_prompts(
        self, tokens: int, pairs: int, keys: int, requests: int, decoding: int, decoding_keys: int
    ) -> float:
        """Seconds of a step with prompts."""
        found = self._on_gpu(tokens, pairs, keys, requests, decoding, decoding_keys)
        return found if self.host is None else self.host.after(found, requests)

    def beside_replicas(self, seconds: float, tokens: int, mean: float) -> float:
        """Seconds of a step with so many tokens whose replicas have `mean` of them in the mean.

        `seconds`: of the step where all have as many, without a host that works beside the GPU.
        """
        if self._shared is None:
            return seconds
        shared, last = self._shared, len(self._shared) - 1
        own, of_all = shared[min(tokens, last)], shared[min(round(mean), last)]
        found = seconds - own + of_all
        # The table of experts is of prompts: where other ways make decode shorter than their
        # difference, the step is one of a single token, and never of no length.
        return found if found > 0.0 else min(seconds, self.decode_once(1, self._decode.new))

    def of_all(self, of: PlannedSteps, mean: float) -> Plan:
        """As `plans_of_all`, of a single replica."""
        return self.plans_of_all((of,), mean)[0]

    def plans_of_all(self, active: Sequence[PlannedSteps], mean: float) -> list[Plan]:
        """The steps of replicas whose experts get the tokens of all, of times `of_replica`.

        `mean`: tokens of a replica's step in the mean. Later than the experts counts a host that
        prepares steps beside the GPU: steps that are shorter take as long as the host.
        """
        if self._shared is None:
            plans = [plan for plan, _, _ in active]
        else:
            shared, last = self._shared, len(self._shared) - 1
            of_all = shared[min(round(mean), last)]
            plans: list[Plan] = []
            for (steps, first, grows), tokens, _ in active:
                found = first - shared[tokens if tokens < last else last] + of_all
                if found <= 0.0:
                    found = self.beside_replicas(first, tokens, mean)
                plans.append((steps, found, grows))
        host = self._host_of_all
        if host is None:
            return plans
        return [host.run_after(plan, of.requests) for plan, of in zip(plans, active, strict=True)]

    def _on_gpu(
        self, tokens: int, pairs: int, keys: int, requests: int, decoding: int, decoding_keys: int
    ) -> float:
        """Seconds of a step with prompts, without the engine's host."""
        steps = self._beside if decoding else self._prompts if keys > tokens else self._fresh
        if steps is None:
            return self._one_after_the_other(tokens, pairs, keys, requests, decoding, decoding_keys)
        logits = requests + decoding * (steps.logits - 1)
        if steps.ways:
            values = [term(tokens, requests, pairs, keys) for term in steps.terms]
            found = longest(steps.ways, tokens, values) + entry(steps.head, logits)
        else:
            sums = BatchTotals(tokens, requests, pairs, keys, decoding, decoding_keys)
            found = self._general(steps, sums, logits)
        if decoding and self._apart:
            apart = self._one_after_the_other(
                tokens, pairs, keys, requests, decoding, decoding_keys
            )
            return min(found, apart)
        return found

    def _one_after_the_other(
        self, tokens: int, pairs: int, keys: int, requests: int, decoding: int, decoding_keys: int
    ) -> float:
        """Seconds of a step of decode and one of prompts."""
        new = self._decode.new
        own = decoding_keys * new - decoding * new * (new - 1) // 2
        prompts = self._on_gpu(
            tokens - decoding * new, max(pairs - own, 1), keys - decoding_keys,
            requests - decoding, 0, 0,
        )  # fmt: skip
        return prompts + (self._without_host or self).decode(decoding, decoding_keys)

    def _general(self, steps: PlainTable, sums: BatchTotals, logits: int) -> float:
        """With a pipeline, prompts are in one of its batches, and decoding requests in all."""
        if len(steps.ranks) == 1:
            return steps.ranks_seconds(sums, logits)[0]
        prompts = int(sums.requests - sums.decoding)
        batches = max(1, min(len(steps.ranks), int(sums.requests)))
        if not sums.decoding:
            return self._drained(steps, sums, prompts, batches)
        new = sums.decoding * steps.new
        own = sums.decoding_keys * steps.new - new * (steps.new - 1) / 2
        part = BatchTotals(
            new / batches, sums.decoding / batches,
            own / batches, sums.decoding_keys / batches,
            sums.decoding / batches, sums.decoding_keys / batches,
        )  # fmt: skip
        rest = 1 - 1 / batches
        full = BatchTotals(
            sums.tokens - new * rest, sums.requests - sums.decoding * rest,
            max(sums.pairs - part.pairs * (batches - 1), 1.0),
            sums.keys - sums.decoding_keys * rest, part.decoding, part.decoding_keys,
        )  # fmt: skip
        rows = round(sums.decoding * steps.logits / batches)
        few = steps.ranks_seconds(part, max(1, rows))
        much = steps.ranks_seconds(full, max(1, prompts + rows))
        through = sum(much) + steps.messages(int(full.tokens))
        return max(through, *(a + (batches - 1) * b for a, b in zip(much, few, strict=True)))

    def _drained(self, steps: PlainTable, sums: BatchTotals, prompts: int, batches: int) -> float:
        """Prompts alone drain a pipeline: its batches go through all ranks behind each other."""
        few, more = divmod(prompts, batches)
        total = 0.0
        for many, count in ((few + 1, more), (few, batches - more)):
            if not count:
                continue
            one = BatchTotals(*(x * many / prompts for x in sums))
            each = steps.ranks_seconds(one, many)
            if not total:
                total = sum(each) + steps.messages(int(one.tokens)) - max(each)
            total += count * max(each)
        return total

    # ---- decode ----------------------------------------------------------------------------------

    def _made(self, requests: int) -> Pieces:
        """The pieces of decode steps of so many requests: the longest of all ways."""
        knots, of_terms = self._knots, self._terms_of(requests)
        ways = self._with_host(requests, self._ways(requests))
        longest: dict[tuple[float, ...], float] = {}  # of ways that differ in what terms leave
        for base, counts in ways:
            key = tuple(counts)
            longest[key] = max(base, longest.get(key, base))
        values: list[list[float]] = []
        for counts, base in longest.items():
            terms = [*zip(counts, of_terms, strict=True)]
            values.append([base + sum(n * of[k] for n, of in terms) for k in range(len(knots))])
        self._pieces[requests] = longest_pieces(knots, values, requests)
        return self._pieces[requests]

    def _terms_of(self, requests: int) -> list[list[float]]:
        """`_terms` of one of so many requests, where it depends on how many there are."""
        new = self._decode.new
        besides = [getattr(term, "beside", None) for term in self._decode.terms]
        if new == 1 or not any(besides):
            return self._terms
        many = requests / min(len(self._decode.ranks), requests)
        return [
            [beside(many, many * keys, new) / many for keys in self._knots] if beside else values
            for beside, values in zip(besides, self._terms, strict=True)
        ]

    def _with_host(
        self, requests: int, ways: list[tuple[float, list[float]]]
    ) -> list[tuple[float, list[float]]]:
        """The ways with the engine's host behind each, or as a way of its own."""
        if self.host is None:
            return ways
        host = self.host.step(requests)
        if self.host.beside:
            return [*ways, (host, [0.0] * len(self._terms))]
        return [(base + host, counts) for base, counts in ways]

    def _ways(self, requests: int) -> list[tuple[float, list[float]]]:
        """Seconds that do not depend on keys, and how often each term counts for one request."""
        steps = self._decode
        batches = min(len(steps.ranks), requests)
        small, large = divmod(requests, batches)
        sizes = [(small + 1, large), (small, batches - large)]
        least = [term.least for term in steps.terms]

        def base(rank: PlainRank, way: PlainWay, many: int) -> float:
            launches = sum(n * x for n, x in zip(way.counts, least, strict=True))
            head = entry(rank.head, many * steps.logits)
            return entry(way.seconds, many * steps.new) + head + launches

        found = [
            (sum(n * base(rank, way, many) for many, n in sizes if n),
             [requests * n for n in way.counts])
            for rank in steps.ranks for way in rank.ways
        ]  # fmt: skip
        if len(steps.ranks) > 1:
            most = math.ceil(requests / batches)
            through = sum(base(rank, rank.ways[0], most) for rank in steps.ranks)
            counts = [
                most * sum(rank.ways[0].counts[t] for rank in steps.ranks)
                for t in range(len(least))
            ]
            found.append((through + steps.messages(most * steps.new), counts))
        return found
