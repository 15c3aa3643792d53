"""The table of a step as plain numbers: lists of floats, and terms that take and return floats."""

from __future__ import annotations

from math import floor, log2
from operator import mul
from typing import NamedTuple

from stagewright.model.layers import Reach
from stagewright.serving.engines.times import StepSeconds
from stagewright.serving.hosts import HostTimes
from stagewright.serving.steps.means import mean_sums
from stagewright.serving.steps.tables import StepTable
from stagewright.serving.steps.terms import (
    COLUMNS,
    PAIRS,
    PER_OCTAVE,
    ROWS,
    TOKENS,
    Attention,
    Term,
)


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


def in_one_call(
    steps: PlainTable | None, host: HostTimes | None, otherwise: StepSeconds
) -> StepSeconds:
    """Seconds of a step with prompts and what the engine's host adds.

    Where the only term of the only rank is attention to everything, all that `longest`,
    `Attention.__call__` and the host do is a single function: the event loop calls it for every
    step with prompts. Anything else, and steps of more tokens than tables have, are asked for
    `otherwise`.
    """
    host = host or HostTimes()
    if steps is None or not steps.ways or len(steps.terms) != 1:
        return otherwise
    (of,) = steps.terms
    if not isinstance(of, Attention):
        return otherwise
    (count, seconds), *others = ways_by_count(steps.ways).items()
    least, partly, table = of.least, of.partly, [*zip(of.table, of.table[1:], strict=False)]
    head, more = steps.head, steps.logits - 1
    per_step, per_request, behind = host.per_step, host.per_request_step, not host.beside
    rows, columns, sampled_most, most_tokens = ROWS - 1, COLUMNS - 1, len(head), len(seconds)
    first_row, first_column = PAIRS[0] * PER_OCTAVE, TOKENS[0] * PER_OCTAVE

    def step_seconds(
        tokens: int, pairs: int, keys: int, requests: int, decoding: int, decoding_keys: int
    ) -> float:
        if tokens >= most_tokens:
            return otherwise(tokens, pairs, keys, requests, decoding, decoding_keys)
        places = keys + requests * partly
        x = log2(pairs / places) * PER_OCTAVE - first_row
        y = log2(tokens / places) * PER_OCTAVE - first_column
        i, j = floor(x), floor(y)
        if i < 0 or i > rows:
            i = 0 if i < 0 else rows
        if j < 0 or j > columns:
            j = 0 if j < 0 else columns
        row, after = table[i]
        y -= j
        low, high = row[j], after[j]
        j += 1
        low += y * (row[j] - low)
        high += y * (after[j] - high)
        value = least + places * 2.0 ** (low + (x - i) * (high - low))
        most = seconds[tokens] + count * value
        for other_count, other in others:
            way = other[tokens] + other_count * value
            if way > most:
                most = way
        sampled = requests + decoding * more
        most += head[sampled] if sampled < sampled_most else entry(head, sampled)
        launched = per_step + per_request * requests
        return most + launched if behind else max(most, launched)

    return step_seconds


def ways_by_count(ways: list[PlainWay]) -> dict[float, list[float]]:
    """By how often the only term runs, the longest seconds of the ways that have it so often."""
    found: dict[float, list[float]] = {}
    for seconds, (count,) in ways:
        known = found.get(count)
        found[count] = seconds if known is None else [*map(max, known, seconds)]
    return found


class PlainTable:
    """The table of a step as plain numbers."""

    def __init__(self, of: StepTable, drafts: int, logits: int | None = None) -> None:
        """Each decoding request has one token and so many `drafts` in a step.

        `logits` of such a request are computed; None: those of all its tokens.
        """
        self.terms: list[Term] = [term for term, _ in of.terms]
        self.reaches: list[Reach] = [reach for _, reach in of.terms]
        self.new = 1 + drafts
        self.logits = self.new if logits is None else logits
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
        self.of_sums = not any(r.kind for r in self.reaches) and not any(map(_in_tiles, self.terms))
        """Whether terms are of attention to everything, and of the sums of a batch alone."""
        self.ways = one.ways if len(self.ranks) == 1 and self.of_sums else []
        """Those of the only rank, where terms are `of_sums`."""

    def values(self, sums: BatchTotals) -> list[float]:
        """Seconds of each term."""
        prompts = sums.requests - sums.decoding
        if sums.decoding and (prompts or self.new > 1) and any(map(_in_tiles, self.terms)):
            return self._in_prompts_tiles(sums, prompts)
        return [
            term(sums.tokens, sums.requests, *self._of_reach(reach, sums))
            for term, reach in zip(self.terms, self.reaches, strict=True)
        ]

    def _in_prompts_tiles(self, sums: BatchTotals, prompts: float) -> list[float]:
        """Seconds of each term where prompts and requests that decode are one kernel.

        Without prompts the requests that decode have drafts.
        """
        new = sums.decoding * self.new
        own = sums.decoding_keys * self.new - new * (self.new - 1) / 2
        tokens = sums.tokens - new
        pairs, keys = max(sums.pairs - own, 1.0), sums.keys - sums.decoding_keys
        found: list[float] = []
        for term in self.terms:
            seconds = term(tokens, prompts, pairs, keys) if prompts else term.least
            beside = term.beside if isinstance(term, Attention) else None
            if beside is not None:
                queries = tokens / prompts if prompts else self.new
                seconds += beside(sums.decoding, sums.decoding_keys, queries)
            found.append(seconds)
        return found

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


def _in_tiles(term: Term) -> bool:
    return isinstance(term, Attention) and term.beside is not None


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
