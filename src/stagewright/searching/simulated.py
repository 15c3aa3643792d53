"""Exact simulation of candidates: in this process, in several, or on a Ray cluster.

Results do not depend on the executor. Ctrl-C keeps the candidates simulated so far.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Int
from stagewright.blocks.recipe import PRECISIONS
from stagewright.errors import UserError
from stagewright.executors import Executor, Processes
from stagewright.lower.compile import compile
from stagewright.run.sections.cluster import ClusterSection
from stagewright.searching.candidates import Candidates
from stagewright.searching.figures import Figures
from stagewright.time.job import goodput_of
from stagewright.time.roofline import peak_flops
from stagewright.time.simulate.step import SimulatedStep, simulate

Progress = Callable[[int, int, Figures], None]
"""Called after each simulation with the number simulated, the total, and the new metrics."""


@dataclass(frozen=True, slots=True, eq=False)
class Simulated:
    """Results of simulated candidates."""

    indices: Int
    """Positions among the given candidates, ascending."""
    figures: Figures
    """Metrics by position in `indices`; `seconds` is NaN for a refused run."""
    launches: Mapping[int, float]
    """Seconds of a step in which the mean GPU waits for launches, by index."""
    refused: Mapping[int, str]
    """Error messages of candidates that could not be compiled or simulated, by index."""
    stopped: bool
    """True if Ctrl-C left out the others."""


class _Result(NamedTuple):
    """Metrics of one candidate, or the error message of its run."""

    number: int
    figures: Figures
    refused: str
    launches: float = 0.0


def simulate_all(
    candidates: Candidates, executor: Executor | None = None, progress: Progress | None = None
) -> Simulated:
    """Compile and simulate every candidate on its machine; `executor` None: in this process."""
    results: dict[int, _Result] = {}

    def collect(result: _Result) -> None:
        results[result.number] = result
        if progress is not None:
            progress(len(results), len(candidates), result.figures)

    jobs = ((n, candidates.take(slice(n, n + 1))) for n in range(len(candidates)))
    stopped = False
    try:
        (executor or Processes(1)).run(_simulate_job, jobs, collect)
    except KeyboardInterrupt:
        stopped = True
    done = [results[index] for index in sorted(results)]
    return Simulated(
        np.array([result.number for result in done], dtype=np.int64),
        Figures.concatenated([result.figures for result in done] or [Figures.missing(0)]),
        {result.number: result.launches for result in done if not result.refused},
        {result.number: result.refused for result in done if result.refused},
        stopped,
    )


def _simulate_job(job: tuple[int, Candidates]) -> _Result:
    """Simulate one candidate, in any process."""
    number, candidate = job
    try:
        step = step_of(candidate, 0)
        figures = _step_figures(step, candidate.cluster(0))
        return _Result(number, figures, "", step.mean.launches)
    except UserError as error:
        return _Result(number, Figures.missing(1), str(error))


def step_of(candidates: Candidates, index: int) -> SimulatedStep:
    """Simulated step of one candidate."""
    machine, run = candidates.machine(index), candidates.run(index)
    compiled = compile(run, candidates.model, device_memory=machine.hardware.memory)
    stragglers = candidates.cluster(index).stragglers
    return simulate(compiled, machine, candidates.execution(index), stragglers)


def _step_figures(step: SimulatedStep, cluster: ClusterSection) -> Figures:
    """Metrics of one simulated step, as a candidate batch of size 1."""
    fit, expense, run = step.fit, step.expense(cluster.price), step.compiled.run
    goodput = goodput_of(step.compiled, cluster, step.machine.hardware)
    usd = expense.usd_per_million_tokens
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
        joules=np.array([expense.joules]),
        usd=np.array([np.nan if usd is None else usd * step.tokens / 1e6]),
        useful=np.array([goodput.useful_share if goodput else 1.0]),
        simulated=np.array([True]),
    )
