"""Table of a serving step: plain numbers whose sum is the duration of any batch.

A step of inference is a chain: a kernel starts when the one before it has ended and the host has
launched it (`lower.serving_step`, `time.simulate`). So it takes as long as the longest of some paths:
the launches up to some kernel, then all kernels from that one on. Kernels that depend on the number
of new tokens only are summed for each number; the output layer is a function of the number of
logits; the rest are terms (`steps.terms`), each with the number of times that it runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

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
    """Sums of a batch over its requests, and over those that decode."""

    tokens: float
    pairs: float
    keys: float
    requests: float
    num_decodes: float = 0
    decode_keys: float = 0


@dataclass(frozen=True, eq=False)
class StepTable:
    """Seconds of a step with any batch, on each pipeline rank.

    A decoding request has `new` tokens in a step, of which `logits` are computed.
    """

    ranks: list[RankTable]
    terms: list[Term]
    reaches: list[Reach]
    knots: Float
    """Keys of a decoding request between which decode steps are linear."""
    new: int
    logits: int

    @cached_property
    def _in_prompt_tiles(self) -> bool:
        """True if attention computes decoding requests and prompts in one kernel."""
        return any(isinstance(of, Attention) and of.beside is not None for of in self.terms)

    @cached_property
    def _needs_means(self) -> bool:
        """True if some term depends on the mean lengths of requests."""
        return self._in_prompt_tiles or any(reach.kind for reach in self.reaches)

    def _values(self, batch: BatchSums) -> list[float]:
        """Seconds of each term."""
        tokens, pairs, keys, requests, num_decodes, _ = batch
        if not self._needs_means:
            return [term(tokens, requests, pairs, keys) for term in self.terms]
        if self._in_prompt_tiles and num_decodes and (requests > num_decodes or self.new > 1):
            return self._values_in_prompt_tiles(batch)
        return [
            term(tokens, requests, *self._pairs_and_keys(reach, batch))
            for term, reach in zip(self.terms, self.reaches, strict=True)
        ]

    def _values_in_prompt_tiles(self, batch: BatchSums) -> list[float]:
        """Seconds of each term where one kernel computes prompts and decoding requests.

        Without prompts the decoding requests have drafts.
        """
        prompts = batch.requests - batch.num_decodes
        new_tokens = batch.num_decodes * self.new
        decode_pairs = batch.decode_keys * self.new - new_tokens * (self.new - 1) / 2
        tokens = batch.tokens - new_tokens
        pairs, keys = max(batch.pairs - decode_pairs, 1.0), batch.keys - batch.decode_keys
        values: list[float] = []
        for term in self.terms:
            seconds = term(tokens, prompts, pairs, keys) if prompts else term.least
            if isinstance(term, Attention) and term.beside is not None:
                queries = tokens / prompts if prompts else self.new
                seconds += term.beside(batch.num_decodes, batch.decode_keys, queries)
            values.append(seconds)
        return values

    def _pairs_and_keys(self, reach: Reach, batch: BatchSums) -> tuple[float, float]:
        """Pairs and keys of a reach; those of a window follow from mean lengths of requests."""
        if not reach.kind:
            return batch.pairs, batch.keys
        pairs = keys = 0.0
        num_decodes, prompts = batch.num_decodes, batch.requests - batch.num_decodes
        if num_decodes:
            context = batch.decode_keys / num_decodes - self.new
            of_one = mean_sums(reach, context, self.new)
            pairs, keys = num_decodes * of_one[0], num_decodes * of_one[1]
        if prompts:
            new = (batch.tokens - num_decodes * self.new) / prompts
            context = (batch.keys - batch.decode_keys) / prompts - new
            of_one = mean_sums(reach, max(context, 0.0), new)
            pairs, keys = pairs + prompts * of_one[0], keys + prompts * of_one[1]
        return pairs, keys

    # ---- steps -----------------------------------------------------------------------------------

    def seconds(
        self,
        tokens: float,
        pairs: float,
        keys: float,
        requests: int,
        num_decodes: int = 0,
        decode_keys: float = 0,
    ) -> float:
        """Seconds of a step, like `StepTimes.step`; with a pipeline, of all batches in it."""
        batch = BatchSums(tokens, pairs, keys, requests, num_decodes, decode_keys)
        if len(self.ranks) > 1:
            return self._pipelined(batch)
        logits = requests + num_decodes * (self.logits - 1)
        return self.ranks[0].longest(int(tokens), self._values(batch), logits)

    def _ranks_seconds(self, batch: BatchSums, logits: int) -> list[float]:
        """Seconds of each pipeline rank with one batch."""
        values, tokens = self._values(batch), round(batch.tokens)
        return [rank.longest(tokens, values, logits) for rank in self.ranks]

    # ---- pipelines -------------------------------------------------------------------------------

    def _pipelined(self, batch: BatchSums) -> float:
        """Seconds of a step of all batches in a pipeline."""
        requests, num_decodes = batch.requests, batch.num_decodes
        prompts = int(requests - num_decodes)
        batches = max(1, min(len(self.ranks), int(requests)))
        if not num_decodes:
            return self._drained(batch, prompts, batches)
        # Prompts are in one of the batches, decoding requests in all.
        new_tokens = num_decodes * self.new
        decode_pairs = batch.decode_keys * self.new - new_tokens * (self.new - 1) / 2
        share = BatchSums(*(x / batches for x in (
            new_tokens, decode_pairs, batch.decode_keys, num_decodes, num_decodes,
            batch.decode_keys,
        )))  # fmt: skip
        others = batches - 1
        largest = BatchSums(
            batch.tokens - share.tokens * others, max(batch.pairs - share.pairs * others, 1.0),
            batch.keys - share.keys * others, requests - share.requests * others,
            share.num_decodes, share.decode_keys,
        )  # fmt: skip
        logits = round(num_decodes * self.logits / batches)
        of_share = self._ranks_seconds(share, max(1, logits))
        of_largest = self._ranks_seconds(largest, max(1, prompts + logits))
        through = sum(of_largest) + self._messages(round(largest.tokens))
        pairs = zip(of_largest, of_share, strict=True)
        return max(through, *(one + others * share for one, share in pairs))

    def _drained(self, batch: BatchSums, prompts: int, batches: int) -> float:
        """Seconds of prompts alone: their batches pass all ranks one after the other."""
        small, num_large = divmod(prompts, batches)
        total = 0.0
        for size, count in ((small + 1, num_large), (small, batches - num_large)):
            if not count:
                continue
            share = BatchSums(*(x * size / prompts for x in batch))
            ranks = self._ranks_seconds(share, size)
            if not total:
                total = sum(ranks) + self._messages(int(share.tokens)) - max(ranks)
            total += count * max(ranks)
        return total

    def _messages(self, tokens: int) -> float:
        """Seconds of messages between all pipeline ranks, and of tokens back to the first."""
        return sum(entry(rank.message, tokens) for rank in self.ranks)


def entry(by_number: list[float], n: int) -> float:
    """Entry of a table, which grows beyond its end as at its end."""
    if n < len(by_number):
        return by_number[n]
    last = len(by_number) - 1
    return by_number[last] + (n - last) * (by_number[last] - by_number[last - 1])
