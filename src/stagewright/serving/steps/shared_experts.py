"""What experts take that replicas share: the tokens of all replicas count, not those of one.

A table of step times has as many tokens on all replicas. Where one replica computes a prompt while
others decode, its experts get the mean of all replicas' tokens.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from stagewright.arrays import Float, Int
from stagewright.program.columns import COLLECTIVES, TaskKind
from stagewright.serving.steps.batches import BatchSums, TimedBatches
from stagewright.serving.steps.tables import blocks_of, chain_of


def shared_seconds(of: TimedBatches, most_tokens: int) -> Float | None:
    """By a replica's tokens, seconds of its experts if all replicas have as many.

    They count from those of one token on. None: replicas share no experts, or have a pipeline.
    """
    run, model = of.step.run, of.step.model
    if run.dp == 1 or run.ep == 1 or run.pp > 1 or not model.num_experts:
        return None
    grid = _grid(most_tokens)
    ones, none = np.ones_like(grid), np.zeros_like(grid)
    alone = BatchSums.of_equal_requests(run, model, ones, none, ones)
    seconds = _of_all(of, replace(alone, routed=grid * run.dp))
    if of.routed is not None and of.routed.gathered:
        seconds = seconds + _of_all(
            of, BatchSums.of_equal_requests(run, model, ones, none, grid), exchanges=True
        )
    every = np.arange(most_tokens + 1, dtype=np.float64)
    return np.interp(every, grid.astype(np.float64), seconds - seconds[:1])


def _grid(most: int) -> Int:
    """Tokens at which experts are timed: four for each doubling."""
    octaves = np.arange(0, np.log2(most) + 0.25, 0.25)
    return np.unique(np.rint(np.exp2(octaves)).astype(np.int64))


def _of_all(of: TimedBatches, sums: BatchSums, *, exchanges: bool = False) -> Float:
    """Seconds of all rows of the only pipeline rank, or of those that exchange tokens."""
    (rank,) = of.rows(sums)
    chain = chain_of(blocks_of(rank, of.kept[0]), of.kept[0])
    counted = np.ones(len(rank.tasks), dtype=bool)
    if exchanges:
        counted = rank.tasks.kind == TaskKind.COLLECTIVE
        counted &= rank.tasks.collective == COLLECTIVES.index("all_to_all")
    return chain.copies @ (rank.seconds * counted[:, None])[chain.row]
