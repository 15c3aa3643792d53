"""The table of a serving step: plain numbers from which an event loop adds up its seconds.

A step of inference is a chain: a kernel starts when the one before it has ended and the host has
launched it (`lower.inference`, `time.simulate`). So it takes as long as the longest of some paths:
the launches up to some kernel, then all kernels from that one on. Kernels that depend on the number
of new tokens only are summed for each number; the output layer is a function of the number of
logits; the rest are terms (`steps.terms`), each with the number of times that it runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Float
from stagewright.model.layers import Reach
from stagewright.serving.steps.terms import Attention, Term, mean_sums


class Path(NamedTuple):
    """Launches up to some kernel, then all kernels from there on."""

    seconds: list[float]
    """Seconds of launches, and of kernels that depend on tokens only, by tokens."""
    counts: tuple[float, ...]
    """Number of runs of each term."""


class RankTable(NamedTuple):
    """Seconds of a pipeline rank."""

    paths: list[Path]
    """The first one waits for no launch."""
    head: list[float]
    """The output layer, by logits."""
    message: list[float]
    """The message to the next rank, by tokens."""

    def longest(self, tokens: int, values: list[float], logits: int) -> float:
        """Seconds of the longest path, with these seconds of terms."""
        most = 0.0
        for seconds, counts in self.paths:
            path = seconds[tokens] if tokens < len(seconds) else entry(seconds, tokens)
            for count, value in zip(counts, values, strict=False):
                path += count * value
            if path > most:
                most = path
        return most + entry(self.head, logits)


class BatchSums(NamedTuple):
    """Sums of a batch over its requests, and of those that decode."""

    tokens: float
    requests: float
    pairs: float
    keys: float
    decoding: float
    decoding_keys: float


@dataclass(frozen=True, eq=False)
class StepTable:
    """Seconds of a step with any batch, on each pipeline rank.

    A request that decodes has `new` tokens in a step, of which so many `logits` are computed.
    """

    ranks: list[RankTable]
    terms: list[Term]
    reaches: list[Reach]
    knots: Float
    """Keys of a request that decodes, between which terms are linear."""
    at_knots: list[Float]
    """Seconds of each term for one of many such requests, without its launch."""
    new: int
    logits: int

    def of_one(self, requests: float) -> list[Float]:
        """`at_knots` of one of so many requests; drafts make it depend on how many there are."""
        found = [*self.at_knots]
        for nth, term in enumerate(self.terms if self.new > 1 else ()):
            if isinstance(term, Attention) and term.beside is not None:
                each = [term.beside(requests, requests * k, self.new) for k in self.knots.tolist()]
                found[nth] = np.array(each) / requests
        return found

    @cached_property
    def _in_prompts_tiles(self) -> bool:
        return any(isinstance(of, Attention) and of.beside is not None for of in self.terms)

    def _values(self, of: BatchSums) -> list[float]:
        """Seconds of each term, where it matters which requests a batch has."""
        prompts = of.requests - of.decoding
        if self._in_prompts_tiles and of.decoding and (prompts or self.new > 1):
            return self._values_in_prompts_tiles(of, prompts)
        return [
            term(of.tokens, of.requests, *self._of_reach(reach, of))
            for term, reach in zip(self.terms, self.reaches, strict=True)
        ]

    def _values_in_prompts_tiles(self, of: BatchSums, prompts: float) -> list[float]:
        """Seconds of each term where prompts and requests that decode are one kernel.

        Without prompts the requests that decode have drafts.
        """
        new = of.decoding * self.new
        own = of.decoding_keys * self.new - new * (self.new - 1) / 2
        tokens = of.tokens - new
        pairs, keys = max(of.pairs - own, 1.0), of.keys - of.decoding_keys
        found: list[float] = []
        for term in self.terms:
            seconds = term(tokens, prompts, pairs, keys) if prompts else term.least
            if isinstance(term, Attention) and term.beside is not None:
                queries = tokens / prompts if prompts else self.new
                seconds += term.beside(of.decoding, of.decoding_keys, queries)
            found.append(seconds)
        return found

    def _of_reach(self, reach: Reach, of: BatchSums) -> tuple[float, float]:
        """Pairs and keys: those of a window from the mean lengths of requests."""
        if not reach.kind:
            return of.pairs, of.keys
        pairs = keys = 0.0
        if of.decoding:
            context = of.decoding_keys / of.decoding - self.new
            one = mean_sums(reach, context, self.new)
            pairs, keys = of.decoding * one[0], of.decoding * one[1]
        prompts = of.requests - of.decoding
        if prompts:
            new = (of.tokens - of.decoding * self.new) / prompts
            context = (of.keys - of.decoding_keys) / prompts - new
            one = mean_sums(reach, max(context, 0.0), new)
            pairs, keys = pairs + prompts * one[0], keys + prompts * one[1]
        return pairs, keys

    # ---- steps -----------------------------------------------------------------------------------

    @cached_property
    def _plain(self) -> bool:
        """True if there is one rank whose terms follow from a batch's sums alone."""
        local = any(reach.kind for reach in self.reaches)
        return len(self.ranks) == 1 and not local and not self._in_prompts_tiles

    def seconds(
        self,
        tokens: int,
        pairs: int,
        keys: int,
        requests: int,
        decoding: int = 0,
        decoding_keys: int = 0,
    ) -> float:
        """Seconds of a step, as `StepTimes.step`; with a pipeline, of all batches in it."""
        if self._plain:
            values = [term(tokens, requests, pairs, keys) for term in self.terms]
            logits = requests + decoding * (self.logits - 1)
            return self.ranks[0].longest(tokens, values, logits)
        of = BatchSums(tokens, requests, pairs, keys, decoding, decoding_keys)
        if len(self.ranks) == 1:
            return self._ranks_seconds(of, requests + decoding * (self.logits - 1))[0]
        return self._pipelined(of)

    def _ranks_seconds(self, of: BatchSums, logits: int) -> list[float]:
        """Seconds of each pipeline rank with one batch."""
        values, tokens = self._values(of), int(of.tokens)
        return [rank.longest(tokens, values, logits) for rank in self.ranks]

    # ---- pipelines -------------------------------------------------------------------------------

    def _pipelined(self, of: BatchSums) -> float:
        """Seconds of a step of all batches in a pipeline."""
        requests, decoding = of.requests, of.decoding
        prompts = int(requests - decoding)
        batches = max(1, min(len(self.ranks), int(requests)))
        if not decoding:
            return self._drained(of, prompts, batches)
        # Prompts are in one of the batches, requests that decode in all.
        new = decoding * self.new
        own = of.decoding_keys * self.new - new * (self.new - 1) / 2
        part = BatchSums(*(x / batches for x in (
            new, decoding, own, of.decoding_keys, decoding, of.decoding_keys
        )))  # fmt: skip
        rest = batches - 1
        full = BatchSums(
            of.tokens - part.tokens * rest, requests - part.requests * rest,
            max(of.pairs - part.pairs * rest, 1.0), of.keys - part.keys * rest,
            part.decoding, part.decoding_keys,
        )  # fmt: skip
        rows = round(decoding * self.logits / batches)
        few = self._ranks_seconds(part, max(1, rows))
        much = self._ranks_seconds(full, max(1, prompts + rows))
        through = sum(much) + self.messages(int(full.tokens))
        return max(through, *(a + rest * b for a, b in zip(much, few, strict=True)))

    def _drained(self, of: BatchSums, prompts: int, batches: int) -> float:
        """Prompts alone drain a pipeline: its batches go through all ranks one after the other."""
        few, more = divmod(prompts, batches)
        total = 0.0
        for many, count in ((few + 1, more), (few, batches - more)):
            if not count:
                continue
            one = BatchSums(*(x * many / prompts for x in of))
            each = self._ranks_seconds(one, many)
            if not total:
                total = sum(each) + self.messages(int(one.tokens)) - max(each)
            total += count * max(each)
        return total

    def messages(self, tokens: int) -> float:
        """Seconds of the messages between all pipeline ranks, and of tokens back to the first."""
        return sum(entry(rank.message, tokens) for rank in self.ranks)


def entry(by_number: list[float], n: int) -> float:
    """An entry of a table, which goes on beyond its end as at its end."""
    if n < len(by_number):
        return by_number[n]
    last = len(by_number) - 1
    return by_number[last] + (n - last) * (by_number[last] - by_number[last - 1])
