"""A measured step beside a simulated one: `stagewright.compare`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from stagewright.api.compiled import Asked
from stagewright.api.result import PublicResult, known, path_text
from stagewright.api.simulated import simulate
from stagewright.errors import UserError
from stagewright.lower.compiled_run import CompiledRun
from stagewright.recorded.compare import ComparedSide, StepComparison
from stagewright.recorded.events import TraceEvents
from stagewright.recorded.kernels import describe_kernels
from stagewright.recorded.rank import RankTrace
from stagewright.recorded.ranks import as_ranks
from stagewright.recorded.read import read_traces
from stagewright.recorded.steps import recorded_steps
from stagewright.run.sections.cluster import ClusterSection
from stagewright.run.sections.execution import Execution
from stagewright.texttable import Table
from stagewright.time.hardware import Hardware
from stagewright.time.network import Machine
from stagewright.time.simulate.execute import Progress
from stagewright.time.simulate.step import SimulatedStep
from stagewright.views import compared as views
from stagewright.views import kineto

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


class Comparison(PublicResult):
    """A measured step beside a simulated one, both of the same ranks.

    Attributes:

    * `measured`, `simulated`: seconds of the step, of the mean rank.
    * `error`: simulated over measured, less 1.
    * `difference`: seconds by which each part is longer in the measured step; they add up.
    * `notes`: what the traces lack.

    Tables: `families`, `kernels` (products and attention of both), `transfers`, `idle`,
    `unmatched` (what one side has and the other has not).
    """

    __slots__ = ("_comparison", "_title")
    suffixes = (".json", ".html")

    def __init__(self, comparison: StepComparison, title: str) -> None:
        """Wrap a comparison; `title` is that of its page."""
        self._comparison, self._title = comparison, title

    @property
    def measured(self) -> float:
        """Seconds of the measured step."""
        return self._comparison.measured.seconds

    @property
    def simulated(self) -> float:
        """Seconds of the simulated step."""
        return self._comparison.simulated.seconds

    @property
    def error(self) -> float:
        """Simulated over measured step, less 1."""
        return self._comparison.error

    @property
    def difference(self) -> dict[str, float]:
        """Seconds by which each part is longer in the measured step."""
        return self._comparison.difference

    @property
    def notes(self) -> list[str]:
        """What the traces lack."""
        return views.notes(self._comparison)

    @property
    def tables(self) -> Mapping[str, Callable[..., Table]]:
        """Functions of the tables, by name."""
        return {name: partial(of, self._comparison) for name, of in views.TABLES.items()}

    def text(self) -> Iterator[str | Table]:
        """Lines and tables of `stagewright compare`."""
        return views.text(self._comparison)

    def to_dict(self) -> dict[str, Any]:
        """The object of `compare --json`: seconds, bytes."""
        comparison = self._comparison
        return {
            "measured_seconds": self.measured,
            "simulated_seconds": self.simulated,
            "error": self.error,
            "difference": self.difference,
            "parts": {
                "measured": comparison.measured.parts,
                "simulated": comparison.simulated.parts,
            },
            **{name: [known(row) for row in of().rows] for name, of in self.tables.items()},
            "notes": self.notes,
        }

    def page(self) -> str:
        """The page that `write` writes as `.html`: both steps in time, and the tables."""
        return views.page(self._comparison, self._title)


def compare(
    traces: Paths,
    what: Asked | CompiledRun | SimulatedStep,
    hardware: str | os.PathLike[str] | Hardware | Machine | ClusterSection | None = None,
    *,
    step: int | None = None,
    annotation: str | None = None,
    execution: Execution | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Comparison:
    """Compare a step that PyTorch's profiler recorded with the simulated one.

    `traces`: files, archives or folders of Kineto's JSON, one file per rank. `step` chooses
    `ProfilerStep#step`, `annotation` a `record_function`; by default the middle step. `what`,
    `hardware` and `settings` are those of `simulate`, or `what` is its result.
    """
    if step is not None and annotation is not None:
        raise UserError("both a step and an annotation are given; wanted one of them")
    recorded = read_traces(paths_of(traces))
    if isinstance(what, SimulatedStep):
        simulation = what
    elif hardware is None:
        raise UserError("no hardware given; name one (see `stagewright hardware`) or a .yaml")
    else:
        simulation = simulate(what, hardware, execution=execution, progress=progress, **settings)
    measured = recorded_steps(recorded, step, annotation)
    world = simulation.machine.gpus
    ranks = [trace.rank for trace in recorded]
    if recorded[0].world_size not in (0, world) or max(ranks) >= world:
        size = recorded[0].world_size or max(ranks) + 1
        raise UserError(
            f"{recorded[0].path}: is of a job of {size} ranks, and the simulated run has {world}; "
            "give the layout of the job: --tp, --pp, --dp"
        )
    ours = recorded_steps(simulated_traces(simulation, ranks))
    comparison = StepComparison(ComparedSide(tuple(measured)), ComparedSide(tuple(ours)))
    return Comparison(comparison, f"{simulation.compiled.model.name}: measured and simulated")


def paths_of(traces: Paths) -> list[str]:
    """Paths of traces, of which there may be one."""
    if isinstance(traces, str | os.PathLike):
        return [path_text(traces)]
    return [path_text(path) for path in traces]


def simulated_traces(step: SimulatedStep, ranks: Iterable[int]) -> list[RankTrace]:
    """Traces of some ranks of a simulated step, as its files of `generate` are read."""
    line, hardware = step.timeline, step.machine.hardware
    traces: list[RankTrace] = []
    for rank in ranks:
        lane = line.lanes[int(line.lane_map.of_rank[rank])]
        head, events = kineto.head_and_events(line, lane, hardware, rank)
        read = TraceEvents.of("simulated", head, map(json.loads, events))
        traces.append(describe_kernels(read.trace()))
    return as_ranks(traces)
