"""Tables of step times, from kernels timed for batches as columns.

A step of inference is a chain: a kernel starts when the one before it has ended and the host has
launched it (`lower/inference`, `time.simulate`). So the step takes as long as the longest of these
ways: the launches up to some kernel, then all kernels from that one on. Most kernels depend on the
number of new tokens only; their sums are exact for each number of tokens where kernels change their
tiles, and linear between. The rest are terms (`steps.terms`), each with the number of times that
it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Bool, Float, Int
from stagewright.errors import UserError
from stagewright.model.layers import Reach
from stagewright.program.columns import TaskKind
from stagewright.serving.steps.batches import BatchSums, KeptBlock, RankColumns, TimedBatches
from stagewright.serving.steps.terms import Attention, OverKeys, State, Term

TILE = 32
"""Rows of products change their tiles at multiples of so many (`time.roofline.TILES`)."""
NEARLY = 1e-3
"""Ways that are longer than all others by less than this share are left out."""
FEW = 256
"""Tokens up to which every number is computed."""


class Chain(NamedTuple):
    """The rows of a pipeline rank as they run, copies of layers as repetitions."""

    row: Int
    copies: Float
    cut: Bool
    """Where the GPU may wait for the host; copies between the first and the last are alike."""


class Way(NamedTuple):
    """Launches up to some kernel, then all kernels from there on."""

    seconds: Float
    """Of launches, and of kernels that depend on tokens only: by tokens, [most_tokens + 1]."""
    counts: tuple[float, ...]
    """How often each term runs."""


@dataclass(frozen=True, slots=True, eq=False)
class RankTable:
    """What a pipeline rank takes with a batch."""

    ways: Sequence[Way]
    head: Float
    """Seconds of the output layer, by logits."""
    message: Float
    """Seconds of the message to the next rank, by tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class StepTable:
    """What a step takes on each pipeline rank, with any batch."""

    batches: TimedBatches
    ranks: Sequence[RankTable]
    terms: Sequence[tuple[Term, Reach]]
    exact: Sequence[TermRow]
    """The rows of each term."""

    def seconds(self, sums: BatchSums) -> Float:
        """Seconds of each rank, terms computed anew for these batches: [ranks, batches]."""
        terms = self.exact_terms(sums)
        found: list[Float] = []
        for rank in self.ranks:
            ways = [
                _at(way.seconds, sums.tokens)
                + sum((n * t for n, t in zip(way.counts, terms, strict=True)), np.zeros(1))
                for way in rank.ways
            ]
            found.append(np.max(ways, axis=0) + _at(rank.head, sums.logits))
        return np.stack(found)

    def exact_terms(self, sums: BatchSums) -> list[Float]:
        """Seconds of each term, computed anew for these batches."""
        return [self._exact(*of, sums) for of in zip(self.exact, self.terms, strict=True)]

    def _exact(self, rows: TermRow, term: tuple[Term, Reach], sums: BatchSums) -> Float:
        if isinstance(term[0], OverKeys):
            keys = sums.keys[term[1]].astype(np.float64)
            return np.interp(keys, term[0].keys, term[0].seconds)
        return self.batches.alone(rows.block.variant, rows.place, sums)


class TermRow(NamedTuple):
    """Where a term's kernel is."""

    block: KeptBlock
    place: int


def _at(by_number: Float, numbers: Int) -> Float:
    """Entries of a table; what is beyond its end goes on as at its end."""
    last = len(by_number) - 1
    slope = by_number[-1] - by_number[-2]
    return by_number[np.minimum(numbers, last)] + np.maximum(numbers - last, 0) * slope


# ---- which row depends on what -------------------------------------------------------------------

_Probe = tuple[str, "Reach | None"]


_BASES = ((300, 5, 150_000, 4_000), (64, 64, 64_000, 64_000), (200, 2, 10_000, 200))
"""Tokens, requests, pairs and keys of batches beside which others are held: a chunk of a prompt
beside few requests, requests that decode, and short prompts."""


def _probes(of: TimedBatches) -> tuple[BatchSums, dict[_Probe, list[tuple[int, int]]]]:
    """Batches, and of each sum the pairs of batches that differ in this sum only."""
    reaches = of.step.model.reaches
    rows: list[dict[_Probe, int]] = []
    which: dict[_Probe, list[tuple[int, int]]] = {}
    for tokens, requests, pairs, keys in _BASES:
        base: dict[_Probe, int] = {("tokens", None): tokens, ("requests", None): requests}
        base[("logits", None)] = requests
        base |= {("pairs", reach): pairs for reach in reaches}
        base |= {("keys", reach): keys for reach in reaches}
        first = len(rows)
        rows.append(base)
        for probe, number in base.items():
            for factor in (0.4, 3.0):
                which.setdefault(probe, []).append((first, len(rows)))
                rows.append({**base, probe: max(1, round(number * factor))})

    def column(name: str, reach: Reach | None = None) -> Int:
        return np.array([row[name, reach] for row in rows], dtype=np.int64)

    sums = BatchSums(
        column("requests"), column("tokens"), column("logits"),
        {reach: column("pairs", reach) for reach in reaches},
        {reach: column("keys", reach) for reach in reaches},
    )  # fmt: skip
    return sums, which


def _depends(
    rank: RankColumns, which: Mapping[_Probe, Sequence[tuple[int, int]]]
) -> list[frozenset[_Probe]]:
    """By row, the sums that its seconds depend on."""
    seconds = rank.seconds
    found: list[set[_Probe]] = [set() for _ in seconds]
    for probe, batches in which.items():
        for a, b in batches:
            differs = np.abs(seconds[:, b] - seconds[:, a]) > 1e-12 * seconds[:, a]
            for row in np.flatnonzero(differs).tolist():
                found[row].add(probe)
    return [frozenset(of_row) for of_row in found]


# ---- the chain of a rank -------------------------------------------------------------------------


def blocks_of(rank: RankColumns, kept: Sequence[KeptBlock]) -> Int:
    """By row, which of the kept blocks it belongs to; messages belong to the block before them."""
    message = (rank.tasks.kind == TaskKind.SEND) | (rank.tasks.kind == TaskKind.RECV)
    layer = rank.tasks.layer.astype(np.int64)
    own = np.flatnonzero(~message)
    # Blocks that are no layers may be neighbours: the names of their rows begin with their labels.
    labels = [text.split(".")[0] for text in rank.tasks.names]
    first = np.array([*map(labels.index, labels)])[rank.tasks.name]
    which = np.where(layer < 0, -1 - first, layer)
    number = np.zeros(len(layer), dtype=np.int64)
    number[own] = np.cumsum(np.diff(which[own], prepend=which[own[0]]) != 0)
    assert number.max() + 1 == len(kept), "blocks and rows differ"
    return np.where(message, -1, number)


def chain_of(of: Int, kept: Sequence[KeptBlock]) -> Chain:
    """The rows of a rank as they run, given the block of each."""
    rows: list[Int] = []
    copies: list[Float] = []
    cut: list[Bool] = []
    for nth, block in enumerate(kept):
        mine = np.flatnonzero(of == nth)
        parts = [(1, True), (block.copies - 2, False), (1, True)]
        for many, may in parts if block.copies > 1 else parts[:1]:
            rows.append(mine)
            copies.append(np.full(len(mine), float(many)))
            cut.append(np.full(len(mine), may))
    return Chain(np.concatenate(rows), np.concatenate(copies), np.concatenate(cut))


# ---- tables --------------------------------------------------------------------------------------


def _grid(most: int) -> Int:
    """Tokens at which steps are computed: all of few, then where tiles change."""
    tiles = np.arange(FEW, most + TILE, TILE)
    return np.unique(np.concatenate([np.arange(1, FEW + 1), tiles, tiles + 1]))


class TableSize(NamedTuple):
    """How far a table goes."""

    tokens: int
    logits: int


def table(of: TimedBatches, most: TableSize, timed: TableSize) -> StepTable:
    """The table of a step; as many batches are timed as for other steps of the layout, or more."""
    run, model = of.step.run, of.step.model
    probes, which = _probes(of)
    grid, logits = (_grid(number) for number in timed)
    none, ones = np.zeros_like(grid), np.ones_like(grid)
    each = dict.fromkeys(model.reaches, logits)
    of_logits = BatchSums(np.ones_like(logits), logits, logits, each, each)
    of_tokens = BatchSums.of_equal_requests(run, model, ones, none, grid)
    by_tokens, by_logits, probed = of.rows_of([of_tokens, of_logits, probes])
    grid, logits = (_grid(number) for number in most)  # the first ones of those that are timed
    by_tokens = [rank.take(np.arange(len(grid))) for rank in by_tokens]
    by_logits = [rank.take(np.arange(len(logits))) for rank in by_logits]
    depends = [_depends(rank, which) for rank in probed]
    linear = [[_of_tokens(d) for d in rank] for rank in depends]
    heads = [[("logits", None) in d for d in rank] for rank in depends]
    terms = _Terms(of)
    every = np.arange(most.tokens + 1)
    ranks: list[RankTable] = []
    chains: list[tuple[Chain, Float, Float, Int]] = []
    for nth, rank in enumerate(by_tokens):
        block = blocks_of(rank, of.kept[nth])
        chain = chain_of(block, of.kept[nth])
        numbers = np.full(len(block), -1)
        for row in np.flatnonzero(~np.array(linear[nth]) & ~np.array(heads[nth]) & (block >= 0)):
            first = int(np.flatnonzero(block == block[row])[0])
            at = TermRow(of.kept[nth][block[row]], int(row) - first)
            numbers[row] = terms.number(at, depends[nth][row], rank, probed[nth], int(row))
        head = np.array(heads[nth])
        host = np.zeros(len(block)) if rank.host is None else rank.host.seconds
        seconds = np.where(np.array(linear[nth])[:, None], rank.seconds, 0.0)
        of_head = np.where(head[:, None], by_logits[nth].seconds, 0.0)
        chains.append((chain, host, seconds, numbers))
        ranks.append(
            RankTable(
                (),
                np.interp(np.arange(most.logits + 1), logits, chain.copies @ of_head[chain.row]),
                np.interp(every, grid, rank.message),
            )
        )
    found: list[RankTable] = []
    for (chain, host, seconds, numbers), rank in zip(chains, ranks, strict=True):
        ways = _ways(chain, host, seconds, numbers, terms, grid, every)
        found.append(RankTable(ways, rank.head, rank.message))
    return _with_one_over_keys(StepTable(of, found, terms.found, terms.rows))


def _with_one_over_keys(of: StepTable) -> StepTable:
    """Of terms over keys of one reach one term, that runs as often as the first of them."""
    ranks = [[[*way.counts] for way in rank.ways] for rank in of.ranks]
    firsts: dict[Reach, int] = {}
    kept: list[int] = []
    terms = [*of.terms]
    for nth, (term, reach) in enumerate(of.terms):
        first = firsts.setdefault(reach, nth) if isinstance(term, OverKeys) else nth
        if first == nth:
            kept.append(nth)
            continue
        one = terms[first][0]
        often = [(ways[0][first], ways[0][nth]) for ways in ranks]
        many = sum(b for _, b in often) / sum(a for a, _ in often)
        assert isinstance(one, OverKeys)
        assert isinstance(term, OverKeys)
        both = [a + many * b for a, b in zip(one.seconds, term.seconds, strict=True)]
        terms[first] = (OverKeys(one.least + many * term.least, one.keys, both), reach)
    found = [
        replace(
            rank,
            ways=[Way(way.seconds, tuple(way.counts[n] for n in kept)) for way in rank.ways],
        )
        for rank in of.ranks
    ]
    return StepTable(of.batches, found, [terms[n] for n in kept], [of.exact[n] for n in kept])


def _of_tokens(depends: frozenset[_Probe]) -> bool:
    return {name for name, _ in depends} <= {"tokens"}


def _ways(
    chain: Chain, host: Float, seconds: Float, numbers: Int, terms: _Terms, grid: Int, every: Int
) -> list[Way]:
    """The ways through a rank that may be the longest, of which the first waits for no launch."""
    launched = np.cumsum(chain.copies * host[chain.row])
    after = np.cumsum((chain.copies[:, None] * seconds[chain.row])[::-1], axis=0)[::-1]
    kinds = np.arange(len(terms.found))
    runs = (numbers[chain.row][:, None] == kinds) * chain.copies[:, None]
    counts = np.cumsum(runs[::-1], axis=0)[::-1]
    by_counts: dict[tuple[float, ...], Float] = {}
    for place in np.flatnonzero(chain.cut).tolist():
        key = tuple(counts[place].tolist())
        here = launched[place] + after[place]
        by_counts[key] = np.maximum(by_counts.get(key, 0.0), here)
    chosen = _longest(by_counts, np.array([term.least for term, _ in terms.found]))
    return [Way(np.interp(every, grid, by_counts[key]), key) for key in chosen]


def _longest(by_counts: Mapping[tuple[float, ...], Float], least: Float) -> list[tuple[float, ...]]:
    """The ways without which some step would be `NEARLY` as long only."""
    keys = [*by_counts]
    much = 2.0 ** np.arange(0, 16, 2)  # terms take so many times the least that they take
    each = np.array(keys).reshape(len(keys), -1) @ least
    seconds = np.stack([*by_counts.values()])[:, :, None] + each[:, None, None] * much
    wanted = seconds.max(axis=0) * (1 - NEARLY)
    chosen, covered = [0], seconds[0]
    while (short := wanted - covered).max() > 0:
        at = np.unravel_index(int(short.argmax()), short.shape)
        chosen.append(int(seconds[(slice(None), *at)].argmax()))
        covered = np.maximum(covered, seconds[chosen[-1]])
    return [keys[n] for n in sorted(chosen)]


class _Terms:
    """The terms of a step, each found once."""

    def __init__(self, of: TimedBatches) -> None:
        self.of = of
        self.shared = of.known.terms_on(of.machine.hardware, of.step.run.kv_block_size)
        self.found: list[tuple[Term, Reach]] = []
        self.rows: list[TermRow] = []
        self.known: dict[object, int] = {}

    def number(
        self,
        at: TermRow,
        depends: frozenset[_Probe],
        rank: RankColumns,
        probed: RankColumns,
        row: int,
    ) -> int:
        """The number of a row's term."""
        key = at.block.variant, at.place
        if key in self.known:
            return self.known[key]
        reaches = {reach for _, reach in depends if reach is not None}
        names = {name for name, _ in depends}
        if len(reaches) > 1:
            name = rank.tasks.names[int(rank.tasks.name[row])]
            raise UserError(f"serve: {name} depends on several reaches; such steps have no table")
        # Kernels of different blocks that take equally long with all probes are alike.
        alike = *sorted(names), *reaches, probed.seconds[row].tobytes()
        if alike not in self.known:
            self.known[alike] = len(self.found)
            reach = next(iter(reaches)) if reaches else next(iter(self.of.step.model.reaches))
            if alike not in self.shared:
                self.shared[alike] = self._term(at, names, reach)
            self.found.append((self.shared[alike], reach))
            self.rows.append(at)
        self.known[key] = self.known[alike]
        return self.known[key]

    def _term(self, at: TermRow, names: set[str], reach: Reach) -> Term:
        partly = (self.of.step.run.kv_block_size - 1) / (1 if reach.kind else 2)

        def alone(tokens: Int, requests: Int, pairs: Int, keys: Int) -> Float:
            reaches = self.of.step.model.reaches
            sums = BatchSums(
                requests, tokens, np.ones_like(tokens),
                dict.fromkeys(reaches, pairs), dict.fromkeys(reaches, keys),
            )  # fmt: skip
            return self.of.alone(at.block.variant, at.place, sums)

        if names <= {"tokens", "requests"}:
            return State.of(lambda tokens, requests: alone(tokens, requests, tokens, tokens), 65536)
        if names <= {"keys", "requests"}:
            return self._over_keys(at)
        found = Attention.of(
            lambda tokens, pairs, keys: alone(tokens, np.ones_like(tokens), pairs, keys), partly
        )
        return replace(found, beside=self.of.beside_prompts(at.block.variant, at.place))

    def _over_keys(self, at: TermRow) -> OverKeys:
        """Products are timed with the others of their block, of which some are one kernel."""
        few = np.arange(TILE, 16384 + TILE, TILE)
        keys = np.unique(np.concatenate([
            [1], few, few + 1, np.rint(np.exp2(np.arange(14 * 16, 23 * 16 + 1) / 16)),
        ])).astype(np.int64)  # fmt: skip
        reaches = self.of.step.model.reaches
        one = np.ones_like(keys)
        sums = BatchSums(one, one, one, dict.fromkeys(reaches, keys), dict.fromkeys(reaches, keys))
        for rank, kept in zip(self.of.rows(sums), self.of.kept, strict=True):
            if at.block not in kept:
                continue
            block = blocks_of(rank, kept)
            row = int(np.flatnonzero(block == kept.index(at.block))[0]) + at.place
            seconds = rank.seconds[row]
            return OverKeys(float(seconds.min()), keys.astype(float).tolist(), seconds.tolist())
        raise AssertionError("a term of a block that no rank has")
