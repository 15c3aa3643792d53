"""Candidates simulated one by one: figures of the same kinds as columns have, each of its own run.

Many go to several processes, or to a Ray cluster; the figures are the same, whoever found them, and
a run that Ctrl-C stops keeps what it has found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from stagewright.arrays import Int
from stagewright.errors import UserError
from stagewright.executors import Executor, InTurn
from stagewright.search.candidates import Candidates
from stagewright.search.figures import Figures
from stagewright.lower.compile import compile
from stagewright.time.simulate.step import SimulatedStep, simulate

Heard = Callable[[int, int, Figures], None]
"""Hears how many candidates are simulated, of how many, and the figures of the latest."""


@dataclass(frozen=True, slots=True, eq=False)
class Exact:
    """Candidates that have been simulated."""

    rows: Int
    """By their numbers among those that were given, ascending."""
    figures: Figures
    """Of these rows. Where a run was refused, `seconds` is NaN."""
    launches: Mapping[int, float]
    """Seconds of a step in which the mean GPU waits for the host's launches, by row."""
    refused: Mapping[int, str]
    """What was said of rows whose run could not be compiled or simulated."""
    stopped: bool
    """Whether Ctrl-C has left out the rest."""


class _Job(NamedTuple):
    """One candidate, for a process of its own."""

    row: int
    candidate: Candidates


class _Result(NamedTuple):
    row: int
    figures: Figures
    refused: str
    launches: float = 0.0


def exact(
    candidates: Candidates, executor: Executor | None = None, heard: Heard | None = None
) -> Exact:
    """Compile and simulate every candidate, each on its own machine.

    `executor` None: in this process. Ctrl-C ends the work, and returns what has been found by then.
    """
    done: dict[int, _Result] = {}

    def keep(result: _Result) -> None:
        done[result.row] = result
        if heard is not None:
            heard(len(done), len(candidates), result.figures)

    def job(row: int) -> _Job:
        return _Job(row, candidates.take(slice(row, row + 1)))

    stopped = False
    try:
        (executor or InTurn()).run(_simulated, map(job, range(len(candidates))), keep)
    except KeyboardInterrupt:
        if not done:
            raise
        stopped = True
    known = sorted(done)
    figures = Figures.concatenated([done[row].figures for row in known] or [unknown(0)])
    refused = {row: done[row].refused for row in known if done[row].refused}
    launches = {row: done[row].launches for row in known if row not in refused}
    return Exact(np.array(known, dtype=np.int64), figures, launches, refused, stopped)


def _simulated(job: _Job) -> _Result:
    """The figures of one candidate."""
    of = job.candidate
    try:
        step = step_of(of, 0)
        return _Result(job.row, figures_of(step, of.cluster(0).price), "", step.mean.launches)
    except UserError as error:
        return _Result(job.row, unknown(1), str(error))


def step_of(candidates: Candidates, row: int) -> SimulatedStep:
    """One candidate, compiled and simulated."""
    machine = candidates.machine(row)
    compiled = compile(candidates.run(row), candidates.model, device_memory=machine.hardware.memory)
    factors = candidates.cluster(row).stragglers
    return simulate(compiled, machine, candidates.execution(row), factors)


def figures_of(step: SimulatedStep, price: float | None = None) -> Figures:
    """The figures of a simulated step, as columns of one row; `price` in USD per GPU and hour."""
    fit, spent = step.fit, step.expense(price)
    usd = spent.usd_per_million_tokens
    trains = step.compiled.run.mode == "train"
    return Figures(
        seconds=np.array([step.seconds]),
        memory={name: np.array([size]) for name, size in fit.fullest.by_category.items()},
        device_memory=np.array([fit.device_memory]),
        exposed={name: np.array([seconds]) for name, seconds in step.mean.exposed.items()},
        bubble=np.array([step.mean.bubble]),
        tokens=np.array([step.tokens]),
        mfu=np.array([step.mfu if trains else np.nan]),
        joules=np.array([spent.joules]),
        usd=np.array([np.nan if usd is None else usd * step.tokens / 1e6]),
        exact=np.array([True]),
    )


def unknown(count: int) -> Figures:
    """Figures of candidates that nobody has evaluated: NaN, and 0 where there is no NaN."""
    names = "seconds", "bubble", "mfu", "joules", "usd"
    columns: dict[str, Any] = {name: np.full(count, np.nan) for name in names}
    columns |= {name: np.zeros(count, dtype=np.int64) for name in ("device_memory", "tokens")}
    return Figures(**columns, memory={}, exposed={}, exact=np.zeros(count, dtype=bool))
