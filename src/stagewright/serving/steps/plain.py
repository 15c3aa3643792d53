"""The table of a step as plain numbers: lists of floats, and terms that take and return floats."""

from __future__ import annotations

from operator import mul
from typing import NamedTuple

from stagewright.model.layers import Reach
from stagewright.serving.steps.means import mean_sums
from stagewright.serving.steps.tables import StepTable
from stagewright.serving.steps.terms import Term


class PlainWay(NamedTuple):
    """As `tables.Way`."""

    seconds: list[float]
    """By tokens."""
    counts: tuple[float, ...]


class PlainRank(NamedTuple):
    """As `tables.RankTable`."""

    ways: list[PlainWay]
    head: list[float]
    message: list[float]


class BatchTotals(NamedTuple):
    """Sums of a batch, for all reaches, and of its requests that decode."""

    tokens: float
    requests: float
    pairs: float
    keys: float
    decoding: float
    decoding_keys: float


class PlainTable:
    """The table of a step as plain numbers."""

    def __init__(self, of: StepTable, drafts: int) -> None:
        """Each decoding request has one token and so many `drafts` in a step."""
        self.terms: list[Term] = [term for term, _ in of.terms]
        self.reaches: list[Reach] = [reach for _, reach in of.terms]
        self.new = 1 + drafts
        self.ranks = [
            PlainRank(
                [PlainWay(way.seconds.tolist(), way.counts) for way in rank.ways],
                rank.head.tolist(),
                rank.message.tolist(),
            )
            for rank in of.ranks
        ]
        one = self.ranks[0]
        self.head = one.head
        self.ways = (
            one.ways if len(self.ranks) == 1 and not any(r.kind for r in self.reaches) else []
        )
        """Those of the only rank, where all terms are of attention to everything."""
        self.single: list[tuple[list[float], float]] = []
        """The same where there is but one term: seconds by tokens, and how often the term runs."""
        if len(self.terms) == 1:
            self.single = [(way.seconds, way.counts[0]) for way in self.ways]

    def values(self, sums: BatchTotals) -> list[float]:
        """Seconds of each term."""
        return [
            term(sums.tokens, sums.requests, *self._of_reach(reach, sums))
            for term, reach in zip(self.terms, self.reaches, strict=True)
        ]

    def _of_reach(self, reach: Reach, sums: BatchTotals) -> tuple[float, float]:
        if not reach.kind:
            return sums.pairs, sums.keys
        pairs = keys = 0.0
        if sums.decoding:
            context = sums.decoding_keys / sums.decoding - self.new
            one = mean_sums(reach, context, self.new)
            pairs, keys = sums.decoding * one[0], sums.decoding * one[1]
        prompts = sums.requests - sums.decoding
        if prompts:
            new = (sums.tokens - sums.decoding * self.new) / prompts
            context = (sums.keys - sums.decoding_keys) / prompts - new
            one = mean_sums(reach, max(context, 0.0), new)
            pairs, keys = pairs + prompts * one[0], keys + prompts * one[1]
        return pairs, keys

    def ranks_seconds(self, sums: BatchTotals, logits: int) -> list[float]:
        """Seconds of each pipeline rank."""
        values, tokens = self.values(sums), int(sums.tokens)
        return [longest(ways, tokens, values) + entry(head, logits) for ways, head, _ in self.ranks]

    def messages(self, tokens: int) -> float:
        """Seconds of the messages between all pipeline ranks, and of tokens back to the first."""
        return sum(entry(rank.message, tokens) for rank in self.ranks)


def longest(ways: list[PlainWay], tokens: int, values: list[float]) -> float:
    """Seconds of the longest way, with these seconds of terms."""
    found = 0.0
    for seconds, counts in ways:
        here = entry(seconds, tokens) + sum(map(mul, counts, values))
        if here > found:
            found = here
    return found


def entry(by_number: list[float], n: int) -> float:
    """An entry of a table, which goes on beyond its end as at its end."""
    if n < len(by_number):
        return by_number[n]
    last = len(by_number) - 1
    return by_number[last] + (n - last) * (by_number[last] - by_number[last - 1])
