"""Candidates simulated one by one, in this process, in several, or on a Ray cluster.

The figures are the same, whichever process finds them. Ctrl-C keeps what has been simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from stagewright.arrays import Int
from stagewright.blocks.recipe import PRECISIONS
from stagewright.errors import UserError
from stagewright.executors import Executor, InTurn
from stagewright.lower.compile import compile
from stagewright.searching.candidates import Candidates
from stagewright.searching.figures import Figures
from stagewright.time.roofline import peak_flops
from stagewright.time.simulate.step import SimulatedStep, simulate

Progress = Callable[[int, int, Figures], None]
"""Called after each simulation with how many are done, how many there are, and the new figures."""


@dataclass(frozen=True, slots=True, eq=False)
class Simulated:
    """Candidates that have been simulated."""

    rows: Int
    """Their numbers among those that were given, ascending."""
    figures: Figures
    """Of these rows. Where a run was refused, `seconds` is NaN."""
    launches: Mapping[int, float]
    """Seconds of a step in which the mean GPU waits for the host's launches, by row."""
    refused: Mapping[int, str]
    """Error messages of rows that could not be compiled or simulated."""
    stopped: bool
    """True if Ctrl-C has left out the others."""


class _Job(NamedTuple):
    """One candidate, for any process."""

    row: int
    candidate: Candidates


class _Result(NamedTuple):
    row: int
    figures: Figures
    refused: str
    launches: float = 0.0


def simulate_all(
    candidates: Candidates, executor: Executor | None = None, progress: Progress | None = None
) -> Simulated:
    """Compile and simulate every candidate on its machine.

    `executor` None: in this process. Ctrl-C ends the work, and returns what was found by then.
    """
    results: dict[int, _Result] = {}

    def keep(result: _Result) -> None:
        results[result.row] = result
        if progress is not None:
            progress(len(results), len(candidates), result.figures)

    def job(row: int) -> _Job:
        return _Job(row, candidates.take(slice(row, row + 1)))

    stopped = False
    try:
        (executor or InTurn()).run(_simulated, map(job, range(len(candidates))), keep)
    except KeyboardInterrupt:
        stopped = True
    rows = sorted(results)
    figures = Figures.concatenated([results[row].figures for row in rows] or [unknown(0)])
    refused = {row: results[row].refused for row in rows if results[row].refused}
    launches = {row: results[row].launches for row in rows if row not in refused}
    return Simulated(np.array(rows, dtype=np.int64), figures, launches, refused, stopped)


def _simulated(job: _Job) -> _Result:
    """The figures of one candidate."""
    candidate = job.candidate
    try:
        step = step_of(candidate, 0)
        figures = figures_of(step, candidate.cluster(0).price)
        return _Result(job.row, figures, "", step.mean.launches)
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
    fit, spent, run = step.fit, step.expense(price), step.compiled.run
    usd = spent.usd_per_million_tokens
    trains = run.mode == "train"
    peak = peak_flops(step.machine.hardware, PRECISIONS[run.precision].product)
    return Figures(
        seconds=np.array([step.seconds]),
        memory={name: np.array([size]) for name, size in fit.fullest.by_category.items()},
        device_memory=np.array([fit.device_memory]),
        exposed={name: np.array([seconds]) for name, seconds in step.mean.exposed.items()},
        bubble=np.array([step.mean.bubble]),
        tokens=np.array([step.tokens]),
        mfu=np.array([step.mfu if trains else np.nan]),
        mfu_causal=np.array([step.mfu_causal if trains else np.nan]),
        tflops=np.array([step.mfu * peak / 1e12 if trains else np.nan]),
        joules=np.array([spent.joules]),
        usd=np.array([np.nan if usd is None else usd * step.tokens / 1e6]),
        exact=np.array([True]),
    )


def unknown(count: int) -> Figures:
    """Figures of candidates that were neither estimated nor simulated: NaN, or 0."""
    names = "seconds", "bubble", "mfu", "mfu_causal", "tflops", "joules", "usd"
    columns: dict[str, Any] = {name: np.full(count, np.nan) for name in names}
    columns |= {name: np.zeros(count, dtype=np.int64) for name in ("device_memory", "tokens")}
    return Figures(**columns, memory={}, exposed={}, exact=np.zeros(count, dtype=bool))
