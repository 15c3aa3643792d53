"""Makes the table of a serving step from the seconds of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Bool, Float, Int
from stagewright.errors import UserError
from stagewright.model.config import ModelConfig
from stagewright.model.layers import Reach
from stagewright.program.columns import TaskKind
from stagewright.serving.steps.rows import KeptBlock, RankRows, StepRows, unfilled
from stagewright.serving.steps.step_table import Path, RankTable, StepTable
from stagewright.serving.steps.terms import Attention, Term, TimedCurve

MOST_KEYS = 1 << 21
"""Keys of a request at most; beyond, decode times grow as before."""
NEARLY = 1e-3
"""Paths that are longer than all others by less than this share are left out."""


class Chain(NamedTuple):
    """The rows of a pipeline rank as they run, copies of layers as repetitions."""

    row: Int
    copies: Float
    cut: Bool
    """Mask of rows where the GPU may wait for the host.

    Copies between the first and the last are equal."""

    @classmethod
    def of(cls, block: Int, kept: Sequence[KeptBlock]) -> Chain:
        """Chain of rows from the kept block of each row; rows of block -1 do not run."""
        rows: list[Int] = []
        copies: list[Float] = []
        cut: list[Bool] = []
        for nth, of in enumerate(kept):
            mine = np.flatnonzero(block == nth)
            parts = [(1, True), (of.copies - 2, False), (1, True)]
            for many, may in parts if of.copies > 1 else parts[:1]:
                rows.append(mine)
                copies.append(np.full(len(mine), float(many)))
                cut.append(np.full(len(mine), may))
        return cls(np.concatenate(rows), np.concatenate(copies), np.concatenate(cut))

    def total(self, seconds: Float) -> Float:
        """Seconds of all rows together, given those of each: [rows, batches]."""
        return self.copies @ seconds[self.row]


def step_table(
    of: StepRows, most_tokens: int, most_logits: int, new: int, logits: int
) -> StepTable:
    """The table of a step of up to so many tokens and logits; `new`, `logits`: of `StepTable`."""
    terms = _Terms(of)
    heads = [np.zeros(len(rows.block), dtype=bool) for rows in of.timed.ranks]
    for rank, rows in enumerate(of.timed.ranks):
        for block in range(len(of.kept[rank])):
            groups: dict[tuple[frozenset[str], int], list[int]] = {}
            for row in np.flatnonzero(rows.block == block).tolist():
                depends = rows.depends(row)
                heads[rank][row] = "O" in depends
                if depends and "O" not in depends:  # attention by itself, the others together
                    alone = row if any(name.startswith("pairs") for name in depends) else -1
                    groups.setdefault((frozenset(depends), alone), []).append(row)
            for (depends, _), group in groups.items():
                terms.add(rank, group, depends)
    least = np.array([term.least for term in terms.found])
    ranks: list[RankTable] = []
    for rank, head in enumerate(heads):
        rows, seconds = of.timed.ranks[rank], of.seconds[rank]
        chain = Chain.of(rows.block, of.kept[rank])
        runs = terms.runs(rank)
        linear = ~head & ~runs.any(axis=1)
        paths = _paths(chain, of.launches[rank], seconds * linear[:, None], runs, least)
        output = chain.total(seconds * head[:, None])
        sent = seconds[rows.tasks.kind == TaskKind.SEND].sum(axis=0)
        ranks.append(
            RankTable(
                [Path(at_each(most_tokens, of.grid, path), key) for key, path in paths],
                at_each(most_logits, of.grid, output),
                at_each(most_tokens, of.grid, sent),
            )
        )
    return StepTable(ranks, terms.found, terms.reaches, _knots(of.step.model, new), new, logits)


def at_each(most: int, at: Int, values: Float) -> list[float]:
    """Values at each whole number up to `most`, given those at some: linear between these."""
    numbers = np.arange(most + 1, dtype=np.float64)
    return np.interp(numbers, at.astype(np.float64), values).tolist()


def _knots(model: ModelConfig, new: int) -> Float:
    """Keys of a request between which decode is linear."""
    geometric = np.rint(np.exp2(np.arange(4, 21.01, 0.5)))
    ends = [reach.window or reach.chunk or reach.top for reach in model.reaches]
    near = [end + more for end in ends if end for more in (0, 1)]
    knots = np.unique([new, new + 1, *geometric.tolist(), *near, MOST_KEYS])
    return knots[knots >= new].astype(np.float64)


def _paths(
    chain: Chain, launches: Float, seconds: Float, runs: Float, least: Float
) -> list[tuple[tuple[float, ...], Float]]:
    """The paths through a rank that may be the longest, the one without launches first.

    `runs`: how often a row runs each term, [rows, terms]; `least`: the seconds of these. Without
    the others some step would be shorter by more than `NEARLY`.
    """
    launched = np.cumsum(chain.copies * launches[chain.row])
    after = np.cumsum((chain.copies[:, None] * seconds[chain.row])[::-1], axis=0)[::-1]
    runs = runs[chain.row] * chain.copies[:, None]
    counts = np.cumsum(runs[::-1], axis=0)[::-1]
    by_counts: dict[tuple[float, ...], Float] = {}
    for place in np.flatnonzero(chain.cut).tolist():
        key = tuple(counts[place].round(6).tolist())
        by_counts[key] = np.maximum(by_counts.get(key, 0.0), launched[place] + after[place])
    keys = [*by_counts]
    much = 2.0 ** np.arange(0, 16, 2)  # terms take so many times the least that they take
    of_terms = np.array(keys).reshape(len(keys), -1) @ least
    every = np.stack([*by_counts.values()])[:, :, None] + of_terms[:, None, None] * much
    wanted = every.max(axis=0) * (1 - NEARLY)
    chosen, covered = [0], every[0]
    while (short := wanted - covered).max() > 0:
        worst = np.unravel_index(int(short.argmax()), short.shape)
        chosen.append(int(every[(slice(None), *worst)].argmax()))
        covered = np.maximum(covered, every[chosen[-1]])
    return [(keys[n], by_counts[keys[n]]) for n in sorted(chosen)]


class _TermRows(NamedTuple):
    """Rows of a term's kernels."""

    rank: int
    rows: list[int]


class _Terms:
    """The terms of a step, each found once, and which rows they consist of."""

    def __init__(self, of: StepRows) -> None:
        self.of = of
        self.found: list[Term] = []
        self.reaches: list[Reach] = []
        self.places: list[_TermRows] = []
        self._known: dict[object, int] = {}
        self._shares: dict[tuple[int, int], tuple[int, float]] = {}

    def add(self, rank: int, group: list[int], depends: AbstractSet[str]) -> None:
        """Add rows of a block that depend on the same sums: one of attention, or all others."""
        rows = self.of.timed.ranks[rank]
        key = (*(self._content(rows, row) for row in group),)
        if key not in self._known:
            self._known[key] = len(self.found)
            read = {n for n in depends if n.startswith(("pairs", "keys"))}
            kinds = {"".join(name.partition("_")[1:]) for name in read}
            if len(kinds) > 1:
                name = rows.tasks.names[int(rows.tasks.name[group[0]])]
                raise UserError(f"serve: {name} depends on several reaches; it has no table")
            reaches = self.of.step.model.reaches
            reach = next((of for of in reaches if of.kind in kinds), next(iter(reaches)))
            self.places.append(_TermRows(rank, group))
            self.reaches.append(reach)
            self.found.append(self._term(self.places[-1], depends, reach))
        seconds = self.of.seconds[rank][group].mean(axis=1)
        for row, share in zip(group, (seconds / seconds.sum()).tolist(), strict=True):
            self._shares[rank, row] = self._known[key], share

    def runs(self, rank: int) -> Float:
        """Share of each term that a row is, by row of a rank: [rows, terms]."""
        found = np.zeros((len(self.of.timed.ranks[rank].block), len(self.found)))
        for (on, row), (term, share) in self._shares.items():
            if on == rank:
                found[row, term] = share
        return found

    def _content(self, rows: RankRows, row: int) -> object:
        """Key of everything that the seconds of a row follow from."""
        tasks = rows.tasks
        kernel = tasks.shapes[int(tasks.shape[row])].kernel, int(tasks.dtype[row])
        ends = rows.needs[row][:, [0, -1]].tobytes()
        return *kernel, ends, rows.slopes[row].tobytes()

    def _term(self, at: _TermRows, depends: AbstractSet[str], reach: Reach) -> Term:
        of = self.of

        def alone(tokens: Int, requests: Int, pairs: Int, keys: Int) -> Float:
            sizes = of.sizes(tokens, requests, np.ones_like(tokens), pairs, keys)
            return np.sum([of.kernel_seconds(at.rank, row, sizes) for row in at.rows], axis=0)

        if depends <= {"requests"}:
            return TimedCurve.of_requests(
                lambda tokens, requests: alone(tokens, requests, tokens, tokens)
            )
        if not any(name.startswith("pairs") for name in depends):  # some products are one kernel
            seconds = of.seconds[at.rank][at.rows].sum(axis=0)
            return TimedCurve(float(seconds[0]), of.keys_timed.tolist(), seconds.tolist())
        return Attention.of(
            lambda tokens, pairs, keys: alone(tokens, np.ones_like(tokens), pairs, keys),
            unfilled(reach, of.step.run.kv_block_size),
            of.beside_prompts(at.rank, at.rows[0]),
        )
