"""Table of a serving step: plain numbers that add up to the duration of a step with any batch.

A step of inference is a chain: a kernel starts when the one before it has ended and the host has
launched it. It takes max over kernels k of (launches up to k + durations from k on).

Kernels that depend on the number of new tokens only are summed for each number, and the output
layer for each number of logits. The others are terms:

- attention: (seconds - launch) / positions depends only on pairs / positions and tokens /
  positions, a surface; positions are those of the cache, pairs are of a query and a key;
- kernels of layers with a state: (seconds - launch) / requests depends only on tokens / requests,
  a curve;
- products that expand cached latents: a curve over the number of keys.

An event loop evaluates a table for each step, so all of it is in plain floats.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from math import log2
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Bool, Float, Int
from stagewright.errors import UserError
from stagewright.model.config import ModelConfig
from stagewright.model.layers import Reach
from stagewright.program.columns import TaskKind
from stagewright.run.settings import Run
from stagewright.serving.steps.rows import KeptBlock, StepRows, unfilled
from stagewright.time.engines import decode_in_prompt_kernel, has_mixed_attention
from stagewright.time.roofline import DecodeInPromptKernel

MAX_KEYS = 1 << 21
"""Keys of a request up to which decode steps are computed; beyond, they are extrapolated."""
NEARLY = 1e-3
"""Paths that are longer than all others by less than this share are left out."""
PER_OCTAVE = 8
"""Points of a surface for a doubling of a ratio."""
PAIRS = (-4, 15)
"""Octaves of pairs over cache positions."""
TOKENS = (-20, 1)
"""Octaves of new tokens over cache positions."""
POSITIONS = 1 << 20
"""Cache positions for which surfaces are timed: enough for ratios of whole numbers."""
PAIR_INTERVALS = (PAIRS[1] - PAIRS[0]) * PER_OCTAVE
"""Intervals of a surface along pairs."""
TOKEN_INTERVALS = (TOKENS[1] - TOKENS[0]) * PER_OCTAVE
"""Intervals of a surface along new tokens."""

# ---- terms ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """Attention of one reach, by pairs and tokens over cache positions."""

    launch: float
    table: list[list[float]]
    """log2 of seconds without the launch over positions, by octaves of `PAIRS` and `TOKENS`."""
    unfilled: float
    """Mean positions of a request's last block that hold nothing."""
    decoding: DecodeInPromptKernel | None
    """Decoding requests in one kernel with prompts; None: as if alone."""

    @classmethod
    def of(
        cls,
        seconds: Callable[[Int, Int, Int], Float],
        unfilled: float,
        decoding: DecodeInPromptKernel | None,
    ) -> Attention:
        """Surface from the seconds of tokens, pairs and keys: arrays in, array out."""
        small = np.array([1, 2], dtype=np.int64)
        one, two = seconds(64 * small, 65536 * small, 65536 * small).tolist()
        launch = max(2 * one - two, 0.0)
        u, v = (
            np.arange(a * PER_OCTAVE, b * PER_OCTAVE + 1) / PER_OCTAVE for a, b in (PAIRS, TOKENS)
        )
        pairs = np.rint(np.exp2(np.repeat(u, len(v))) * POSITIONS).astype(np.int64)
        tokens = np.maximum(np.rint(np.exp2(np.tile(v, len(u))) * POSITIONS), 1).astype(np.int64)
        computed = seconds(tokens, pairs, np.full(len(pairs), POSITIONS)) - launch
        logs = np.log2(np.maximum(computed, 1e-30) / POSITIONS)
        return cls(launch, logs.reshape(len(u), len(v)).tolist(), unfilled, decoding)

    def __call__(self, tokens: float, requests: float, pairs: float, keys: float) -> float:
        """Seconds for the sums of a batch."""
        positions = keys + requests * self.unfilled
        x = (log2(pairs / positions) - PAIRS[0]) * PER_OCTAVE
        y = (log2(tokens / positions) - TOKENS[0]) * PER_OCTAVE
        i, j = int(x), int(y)
        if not 0 <= i < PAIR_INTERVALS:
            i = 0 if i < 0 else PAIR_INTERVALS - 1
        if not 0 <= j < TOKEN_INTERVALS:
            j = 0 if j < 0 else TOKEN_INTERVALS - 1
        row, next_row = self.table[i], self.table[i + 1]
        y -= j
        low, high = row[j], next_row[j]
        low += y * (row[j + 1] - low)
        high += y * (next_row[j + 1] - high)
        return self.launch + positions * 2.0 ** (low + (x - i) * (high - low))


@dataclass(frozen=True, slots=True, eq=False)
class StateKernel:
    """Kernel of a layer with a state: seconds of a request by its tokens."""

    launch: float
    tokens: list[float]
    seconds: list[float]

    @classmethod
    def of(cls, seconds: Callable[[Int, Int], Float]) -> StateKernel:
        """Curve from the seconds of tokens and requests: arrays in, array out."""
        requests = 256
        ratios = np.unique(np.rint(np.exp2(np.arange(0, 16.01, 1 / 8))).astype(np.int64))
        counts = np.array([requests, 2 * requests])
        one, two = seconds(counts, counts).tolist()
        launch = max(2 * one - two, 0.0)
        total = seconds(ratios * requests, np.full(len(ratios), requests))
        return cls(launch, ratios.astype(float).tolist(), ((total - launch) / requests).tolist())

    def __call__(self, tokens: float, requests: float, pairs: float, keys: float) -> float:
        """Seconds for the sums of a batch."""
        return self.launch + requests * _interpolate(self.tokens, self.seconds, tokens / requests)


@dataclass(frozen=True, slots=True, eq=False)
class KeysKernel:
    """Kernel that expands cached latents: seconds by keys."""

    keys: list[float]
    seconds: list[float]

    @property
    def launch(self) -> float:
        """Seconds with the fewest keys."""
        return self.seconds[0]

    def __call__(self, tokens: float, requests: float, pairs: float, keys: float) -> float:
        """Seconds for the sums of a batch."""
        return _interpolate(self.keys, self.seconds, keys)


Term = Attention | StateKernel | KeysKernel


def _interpolate(points: list[float], values: list[float], x: float) -> float:
    """Value at `x`, linear between points, extrapolated from the outer two."""
    n = bisect_right(points, x, 1, len(points) - 1)
    low, high = points[n - 1], points[n]
    return values[n - 1] + (x - low) * (values[n] - values[n - 1]) / (high - low)


def mean_sums(reach: Reach, context: float, new: float) -> tuple[float, float]:
    """Query-key pairs, and keys that any query sees, of one request.

    As `run.lengths.attention_sums`, for numbers of tokens that are means. Where a request is in its
    chunk of positions is taken to be anywhere.

    >>> mean_sums(Reach(), 10.0, 2.0), mean_sums(Reach(window=4), 10.0, 2.0)
    ((23.0, 12.0), (8.0, 5.0))
    """
    window, chunk, top, block, _ = reach
    if window:
        before = min(context, window - 1.0)
        rising = min(max(window - context, 0.0), new)
        return rising * context + rising * (rising + 1) / 2 + (new - rising) * window, before + new
    if chunk and context + new > chunk:
        before = context if context < chunk else (chunk - 1) / 2
        seen = (before + 1 + chunk) / 2 if new > chunk else before + (new + 1) / 2
        return new * min(seen, (chunk + 1) / 2 if new > chunk else chunk), before + new
    if top:
        pairs = _chosen_pairs(context + new, top, block) - _chosen_pairs(context, top, block)
        return pairs, min(context + new, pairs)
    return new * context + new * (new + 1) / 2, context + new


def _chosen_pairs(tokens: float, top: int, block: int) -> float:
    """Pairs of all queries up to `tokens`, each of which sees the `top` keys that were chosen."""
    first = min(tokens, float(top))
    later = tokens - first
    return first * (first + 1) / 2 + later * (top - block) + later * (block + 1) / 2


# ---- table ---------------------------------------------------------------------------------------


class Path(NamedTuple):
    """Launches up to some kernel, then all kernels from there on."""

    seconds: list[float]
    """Seconds of launches, and of kernels that depend on tokens only, by tokens."""
    counts: tuple[float, ...]
    """How often the kernel of each term follows on this path."""


class RankTable(NamedTuple):
    """Seconds of a pipeline rank."""

    paths: list[Path]
    head: list[float]
    """Output layer, by logits."""
    message: list[float]
    """Message to the next rank, by tokens."""

    def longest(self, tokens: int, values: list[float], logits: int) -> float:
        """Seconds of the longest path, with these seconds of terms."""
        longest = 0.0
        for seconds, counts in self.paths:
            path = seconds[tokens] if tokens < len(seconds) else table_value(seconds, tokens)
            for count, value in zip(counts, values, strict=False):
                path += count * value
            if path > longest:
                longest = path
        return longest + table_value(self.head, logits)


class BatchSums(NamedTuple):
    """Sums of a batch over its requests, and over those that decode (`step_times.StepTimes`)."""

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
    """Reach of each term."""
    knots: Float
    """Keys of a decoding request between which decode steps are linear."""
    new: int
    logits: int

    @cached_property
    def _in_prompt_tiles(self) -> bool:
        """True if attention computes decoding requests and prompts in one kernel."""
        return any(isinstance(t, Attention) and t.decoding is not None for t in self.terms)

    @cached_property
    def _depends_on_sums(self) -> bool:
        """True if all terms follow from the sums of a batch, without mean lengths."""
        return not (self._in_prompt_tiles or any(reach.kind for reach in self.reaches))

    def seconds(self, batch: BatchSums) -> float:
        """Seconds of a step; with a pipeline, of all batches in it."""
        if len(self.ranks) > 1:
            return self._pipelined(batch)
        logits = int(batch.requests + batch.num_decodes * (self.logits - 1))
        return self.ranks[0].longest(int(batch.tokens), self._values(batch), logits)

    def _rank_seconds(self, batch: BatchSums) -> list[float]:
        """Seconds of each pipeline rank with one batch."""
        values, tokens = self._values(batch), round(batch.tokens)
        logits = max(1, round(batch.requests + batch.num_decodes * (self.logits - 1)))
        return [rank.longest(tokens, values, logits) for rank in self.ranks]

    def _pipelined(self, batch: BatchSums) -> float:
        """Seconds of a step of all batches in a pipeline.

        Prompts are in one of the batches, decoding requests in all. Prompts alone are dealt to the
        batches, which pass all ranks and leave the pipeline empty.
        """
        requests, num_decodes = int(batch.requests), batch.num_decodes
        batches = max(1, min(len(self.ranks), requests))
        others = batches - 1
        share = [0.0] * len(batch)  # each of the batches but the largest one
        if num_decodes:
            tokens, pairs = self._decode_sums(batch)
            sums = tokens, pairs, batch.decode_keys, num_decodes, num_decodes, batch.decode_keys
            share = [x / batches for x in sums]
        elif others:
            part = (1 - -(-requests // batches) / requests) / others
            share = [x * part for x in batch]
        rest = [x - others * y for x, y in zip(batch, share, strict=True)]
        largest = BatchSums(rest[0], max(rest[1], 1.0), *rest[2:])
        of_largest = self._rank_seconds(largest)
        of_others = self._rank_seconds(BatchSums(*share)) if others else [0.0] * len(self.ranks)
        # Tokens go back to the first rank.
        through = sum(of_largest)
        through += sum(table_value(rank.message, round(largest.tokens)) for rank in self.ranks)
        busiest = max(x + others * y for x, y in zip(of_largest, of_others, strict=True))
        return max(through, busiest) if num_decodes else busiest + through - max(of_largest)

    def _values(self, batch: BatchSums) -> list[float]:
        """Seconds of each term."""
        tokens, pairs, keys, requests, num_decodes, _ = batch
        if self._depends_on_sums:
            return [term(tokens, requests, pairs, keys) for term in self.terms]
        if self._in_prompt_tiles and num_decodes and (requests > num_decodes or self.new > 1):
            return self._values_in_prompt_tiles(batch)
        return [
            term(tokens, requests, *self._pairs_and_keys(reach, batch))
            for term, reach in zip(self.terms, self.reaches, strict=True)
        ]

    def _decode_sums(self, batch: BatchSums) -> tuple[float, float]:
        """New tokens and pairs of the decoding requests."""
        tokens = batch.num_decodes * self.new
        return tokens, batch.decode_keys * self.new - tokens * (self.new - 1) / 2

    def prompts_of(self, batch: BatchSums) -> BatchSums:
        """Sums of a batch without its decoding requests."""
        tokens, pairs = self._decode_sums(batch)
        return BatchSums(
            batch.tokens - tokens,
            max(batch.pairs - pairs, 1.0),
            batch.keys - batch.decode_keys,
            batch.requests - batch.num_decodes,
        )

    def _values_in_prompt_tiles(self, batch: BatchSums) -> list[float]:
        """Seconds of each term where one kernel computes prompts and decoding requests.

        Without prompts the decoding requests have drafts.
        """
        tokens, pairs, keys, prompts, _, _ = self.prompts_of(batch)
        values: list[float] = []
        for term in self.terms:
            seconds = term(tokens, prompts, pairs, keys) if prompts else term.launch
            if isinstance(term, Attention) and term.decoding is not None:
                queries = tokens / prompts if prompts else self.new
                seconds += term.decoding(batch.num_decodes, batch.decode_keys, queries)
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


def table_value(table: list[float], n: int) -> float:
    """Value at `n`, extrapolated from the last two."""
    if n < len(table):
        return table[n]
    last = len(table) - 1
    return table[last] + (n - last) * (table[last] - table[last - 1])


# ---- table from rows -----------------------------------------------------------------------------


def step_table(
    rows: StepRows, run: Run, max_tokens: int, max_logits: int, new: int = 1, logits: int = 1
) -> StepTable:
    """Table of steps up to some tokens and logits, launched as in `run`.

    `new`, `logits`: of `StepTable`.
    """
    terms: dict[object, tuple[Term, Reach]] = {}
    ranks: list[RankTable] = []
    seconds, launches = rows.seconds(), rows.launches(run)
    by_rank: list[tuple[Bool, Int]] = []
    for rank, rank_rows in enumerate(rows.ranks):
        in_head = np.zeros(len(rank_rows.block), dtype=bool)
        term_of = np.full(len(rank_rows.block), -1)
        for row in np.flatnonzero(rank_rows.block >= 0).tolist():
            depends = rows.depends(rank, row)
            if "O" in depends:
                in_head[row] = True
            elif depends:
                key = _content(rows, rank, row)
                if key not in terms:
                    terms[key] = _term(rows, rank, row, depends, seconds[rank][row])
                term_of[row] = [*terms].index(key)
        by_rank.append((in_head, term_of))
    shortest = np.array([term.launch for term, _ in terms.values()])
    for rank, (in_head, term_of) in enumerate(by_rank):
        order, copies, may_wait = _rows_in_order(rows.ranks[rank].block, rows.kept[rank])
        by_tokens = seconds[rank] * ~(in_head | (term_of >= 0))[:, None]
        runs = (term_of[order, None] == np.arange(len(terms))) * copies[:, None]
        launched = np.cumsum(copies[:, None] * launches[rank][order], axis=0)
        by_row = copies[:, None] * by_tokens[order]
        paths = _paths(by_row, runs, launched, may_wait, shortest)
        head = copies @ (seconds[rank] * in_head[:, None])[order]
        sends = rows.ranks[rank].tasks.kind == TaskKind.SEND
        ranks.append(
            RankTable(
                [Path(tabulate(max_tokens, rows.grid, path), key) for key, path in paths],
                tabulate(max_logits, rows.grid, head),
                tabulate(max_tokens, rows.grid, seconds[rank][sends].sum(axis=0)),
            )
        )
    knots = _knots(rows.step.model, new)
    values = [*terms.values()]
    return StepTable(ranks, [t for t, _ in values], [r for _, r in values], knots, new, logits)


def tabulate(last: int, at: Int, values: Float) -> list[float]:
    """Values at 0 to `last`, linear between those given."""
    numbers = np.arange(last + 1, dtype=np.float64)
    return np.interp(numbers, at.astype(np.float64), values).tolist()


def _knots(model: ModelConfig, new: int) -> Float:
    """Keys of a request between which decode is linear."""
    geometric = np.rint(np.exp2(np.arange(4, 21.01, 0.5)))
    ends = [reach.window or reach.chunk or reach.top for reach in model.reaches]
    near = [end + more for end in ends if end for more in (0, 1)]
    knots = np.unique([new, new + 1, *geometric.tolist(), *near, MAX_KEYS])
    return knots[knots >= new].astype(np.float64)


def total_seconds(seconds: Float, block: Int, kept: Sequence[KeptBlock]) -> Float:
    """Seconds of all rows of a rank, copies of layers included: [batches]."""
    order, copies, _ = _rows_in_order(block, kept)
    return copies @ seconds[order]


def _rows_in_order(block: Int, kept: Sequence[KeptBlock]) -> tuple[Int, Float, Bool]:
    """Rows of a rank as they run, copies of each, and those where the GPU may wait for the host.

    Copies between the first and the last are equal. Rows of block -1 do not run.
    """
    parts: list[tuple[Int, int, bool]] = []
    for index, of_stage in enumerate(kept):
        rows = np.flatnonzero(block == index)
        parts.append((rows, 1, True))
        if of_stage.copies > 1:
            parts += [(rows, of_stage.copies - 2, False), (rows, 1, True)]
    counts = [len(rows) for rows, _, _ in parts]
    copies = np.repeat([float(copies) for _, copies, _ in parts], counts)
    may_wait = np.repeat([waits for _, _, waits in parts], counts)
    return np.concatenate([rows for rows, _, _ in parts]), copies, may_wait


def _paths(
    seconds: Float, runs: Float, launched: Float, may_wait: Bool, launches: Float
) -> list[tuple[tuple[float, ...], Float]]:
    """Paths through a rank that may be the longest: runs of each term, and seconds by batch.

    `seconds` and `runs` are those of each row with its copies, `launched` those of all launches up
    to it; `launches`: the least seconds of each term. Of paths with equal runs the longest counts.
    Paths are added until their maximum is within `NEARLY` of that of all.
    """
    after = np.cumsum(seconds[::-1], axis=0)[::-1]
    remaining = np.cumsum(runs[::-1], axis=0)[::-1]
    longest: dict[tuple[float, ...], Float] = {}
    for row in np.flatnonzero(may_wait).tolist():
        key = tuple(remaining[row].tolist())
        longest[key] = np.maximum(longest.get(key, 0.0), launched[row] + after[row])
    paths = [*longest.items()]
    multiples = 2.0 ** np.arange(0, 16, 2)  # of the least that terms take
    of_terms = np.array([*longest]).reshape(len(paths), -1) @ launches
    total = np.stack([*longest.values()])[:, :, None] + of_terms[:, None, None] * multiples
    wanted, chosen, covered = total.max(axis=0) * (1 - NEARLY), [0], total[0]
    while (covered < wanted).any():
        worst = np.unravel_index(int((wanted - covered).argmax()), wanted.shape)
        chosen.append(int(total[(slice(None), *worst)].argmax()))
        covered = np.maximum(covered, total[chosen[-1]])
    return [paths[n] for n in chosen]


def _content(rows: StepRows, rank: int, row: int) -> object:
    """Key of everything that the seconds of a row follow from."""
    rank_rows = rows.ranks[rank]
    tasks = rank_rows.tasks
    kernel = tasks.shapes[int(tasks.shape[row])].kernel, int(tasks.dtype[row])
    numbers = rank_rows.numbers[row][:, [0, -1]]
    return *kernel, numbers.tobytes(), rank_rows.slopes[row].tobytes()


def _term(
    rows: StepRows, rank: int, row: int, depends: AbstractSet[str], seconds: Float
) -> tuple[Term, Reach]:
    """Term of a kernel, and its reach; `seconds`: with the batches of the grid."""
    model, tasks = rows.step.model, rows.ranks[rank].tasks
    of_attention = [name for name in depends if name.startswith(("pairs", "keys"))]
    kinds = {"".join(name.partition("_")[1:]) for name in of_attention}
    if len(kinds) > 1:
        name = tasks.names[int(tasks.name[row])]
        raise UserError(f"serve: {name} depends on several reaches; it has no table")
    reach = next((r for r in model.reaches if r.kind in kinds), next(iter(model.reaches)))

    def isolated(tokens: Int, requests: Int, pairs: Int, keys: Int) -> Float:
        batches = rows.sizes(tokens, requests, np.ones_like(tokens), pairs, keys)
        return rows.kernel_seconds(rank, row, batches)

    if depends <= {"requests"}:
        state = StateKernel.of(lambda tokens, requests: isolated(tokens, requests, tokens, tokens))
        return state, reach
    if not any(name.startswith("pairs") for name in depends):
        return KeysKernel(rows.keys_timed.tolist(), seconds.tolist()), reach
    hardware, decoding = rows.machine.hardware, None
    if has_mixed_attention(model, hardware):
        decoding = decode_in_prompt_kernel(tasks.shapes[int(tasks.shape[row])].sizes(), hardware)
    attention = Attention.of(
        lambda tokens, pairs, keys: isolated(tokens, np.ones_like(tokens), pairs, keys),
        unfilled(reach, rows.step.run.kv_block_size),
        decoding,
    )
    return attention, reach
