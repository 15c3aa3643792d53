"""The table of a step as plain numbers: lists of floats, and terms that take and return floats."""

from __future__ import annotations

from typing import NamedTuple

from stagewright.model.layers import Reach
from stagewright.serve.means import mean_sums
from stagewright.serve.tables import StepTable
from stagewright.serve.terms import Attention, Term


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

    def __init__(self, of: StepTable, most_tokens: int, drafts: int) -> None:
        """Each decoding request has one token and so many `drafts` in a step."""
        self.most = most_tokens
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
        first = self.ranks[0]
        self.simple = (
            len(self.ranks) == len(first.ways) == len(self.terms) == 1
            and isinstance(self.terms[0], Attention)
            and not self.reaches[0].kind
        )
        self.linear, self.head = first.ways[0].seconds, first.head
        self.count = first.ways[0].counts[0] if self.terms else 0.0
        self.term = self.terms[0] if self.terms else None

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
        found: list[float] = []
        for ways, head, _ in self.ranks:
            longest = 0.0
            for seconds, counts in ways:
                here = entry(seconds, tokens)
                for n, value in zip(counts, values, strict=True):
                    here += n * value
                if here > longest:
                    longest = here
            found.append(longest + entry(head, logits))
        return found

    def messages(self, tokens: int) -> float:
        """Seconds of the messages between all pipeline ranks, and of tokens back to the first."""
        return sum(entry(rank.message, tokens) for rank in self.ranks)


def entry(by_number: list[float], n: int) -> float:
    """An entry of a table, which goes on beyond its end as at its end."""
    if n < len(by_number):
        return by_number[n]
    last = len(by_number) - 1
    return by_number[last] + (n - last) * (by_number[last] - by_number[last - 1])
