"""Candidates evaluated in columns lot by lot: in this process, in several, or on a Ray cluster.

Candidates that agree in whatever decides the graphs of blocks are of one kind, and in one lot, so
that few graphs are made in two lots: a process makes these once (`shared.tuples`). Pipelines are
played once for all kinds of a lot. Lots do not depend on who evaluates them: the figures are the
same to the byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Int
from stagewright.errors import UserError
from stagewright.executors import Executor, InTurn
from stagewright.search.candidates import Candidates
from stagewright.explore.evaluate import Evaluated, LeftOut, evaluate
from stagewright.search.simulated import Heard, unknown
from stagewright.explore.shared.tuples import Shared
from stagewright.explore.structures import apart_from_graphs
from stagewright.model.config import ModelConfig
from stagewright.run.sections import SETTINGS

STOPPED = "left out by Ctrl-C"
"""The reason of candidates whose lots had not been evaluated when the user stopped the search."""


_KINDS = 8
"""Most kinds of candidates in a lot: they share what pipelines have in common."""
_LOTS = 4
"""Lots that there are at least, so that several processes are busy, unless kinds are fewer."""
FEW = 256
"""So many candidates are too little work for several processes: lots are as large as may be."""


class _NumberedLot(NamedTuple):
    """Some candidates, and their numbers among all."""

    at: Int
    candidates: Candidates


class _Done(NamedTuple):
    at: Int
    evaluated: Evaluated

    def without_figures(self) -> _Done:
        """What was left of the lot, with the names of its figures alone."""
        none = self.evaluated.figures.take(self.at[:0])
        return self._replace(evaluated=self.evaluated._replace(figures=none))


def in_lots(
    candidates: Candidates, executor: Executor | None = None, heard: Heard | None = None
) -> Evaluated:
    """The figures of all candidates, as `evaluate` has them; `heard` as in `exact`.

    Inference is not evaluated in columns: all its candidates are left. Ctrl-C leaves out the lots
    that have not been evaluated (`STOPPED`). Candidates on machines that differ in the size of
    their memory alone are evaluated once.
    """
    if candidates.base.run.mode != "train":
        every = np.arange(len(candidates))
        return Evaluated(unknown(len(candidates)), [LeftOut(every, "inference", True)])
    alike = candidates.regardless_of_memory()
    if alike is not candidates:
        once = alike.distinct(*alike.columns)
        found = in_lots(alike.take(once.first), executor, heard)
        return _of_each(candidates, once.of, found)
    done: list[_Done] = []
    figures = unknown(len(candidates))
    count = 0

    def keep(lot: _Done) -> None:
        nonlocal count
        figures.put(lot.at, lot.evaluated.figures)
        done.append(lot.without_figures())
        count += len(lot.at)
        if heard is not None:
            heard(count, len(candidates), lot.evaluated.figures)

    lots = _lots(candidates)
    try:
        (executor or InTurn()).run(_evaluated, lots, keep)
    except KeyboardInterrupt:
        if not done:
            raise
        evaluated = {int(lot.at[0]) for lot in done}
        done += [_not_evaluated(lot, STOPPED) for lot in lots if int(lot.at[0]) not in evaluated]
    finally:
        _shared.cache_clear()
    done.sort(key=lambda lot: int(lot.at[0]))
    left = [
        each._replace(candidates=lot.at[each.candidates])
        for lot in done
        for each in lot.evaluated.left
    ]
    return Evaluated(figures.ordered_as([lot.evaluated.figures for lot in done]), left)


def _of_each(candidates: Candidates, of: Int, found: Evaluated) -> Evaluated:
    """What is known of candidates from the evaluation of those that stand for them, by number."""
    figures = replace(found.figures.take(of), device_memory=candidates.device_memory)
    left = [
        each._replace(candidates=np.flatnonzero(np.isin(of, each.candidates)))
        for each in found.left
    ]
    return Evaluated(figures, left)


def _lots(candidates: Candidates) -> Sequence[_NumberedLot]:
    """Candidates by what they agree in: all settings except numbers and the pipeline's."""
    apart = apart_from_graphs(candidates.model)
    names = [name for name in candidates.columns if name in SETTINGS and name not in apart]
    alike = candidates.distinct(*names)
    kinds = _KINDS if len(candidates) <= FEW else min(_KINDS, max(1, len(alike) // _LOTS))
    lot = alike.of // kinds
    order = np.argsort(lot, kind="stable")
    ends = np.cumsum(np.bincount(lot))[:-1]
    return [_NumberedLot(at, candidates.take(at)) for at in np.split(order, ends)]


def _evaluated(lot: _NumberedLot) -> _Done:
    try:
        return _Done(lot.at, evaluate(lot.candidates, _shared(lot.candidates.model)))
    except UserError as error:
        return _not_evaluated(lot, str(error))


@lru_cache(maxsize=1)
def _shared(model: ModelConfig) -> Shared:
    """What the lots of a model have in common that this process evaluates one after another, never
    two at once. A worker keeps it until it gets lots of another model."""
    return Shared()


def _not_evaluated(lot: _NumberedLot, why: str) -> _Done:
    every = np.arange(len(lot.at))
    return _Done(lot.at, Evaluated(unknown(len(lot.at)), [LeftOut(every, why, True)]))
