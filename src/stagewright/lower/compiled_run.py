"""Result of compiling a run: graphs, schedule and the program of every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from stagewright.graph.node import Graph, text
from stagewright.launch import files as launch
from stagewright.lower import weight_storage
from stagewright.lower.parameters import TrainedParameters
from stagewright.lower.routing import Load
from stagewright.model.config import ModelConfig
from stagewright.program.columns import Program
from stagewright.program.fit import Fit, fit_of, peak_in_program_order
from stagewright.run.notes import absent_modules, beyond_positions
from stagewright.run.settings import Run
from stagewright.schedule.actions import Order


class Capacity(NamedTuple):
    """Limits of device memory, with ideal allocation and the run's `memory_allowance`."""

    device_memory: int
    fits: bool
    """True if the step fits."""
    requests: int
    """Max requests in a step of all ranks, equal numbers per dp rank, in the step's proportions."""
    tokens: int | None
    """Max length of each request (context and new tokens); None: lengths differ, or length takes no
    memory (layers that carry a state)."""


@dataclass(frozen=True, slots=True, eq=False)
class CompiledRun:
    """Compiled run: resolved settings, sharded graphs, schedule, programs.

    `blocks`: sharded graph by label of the block variant; `parameters`: number of parameters as
    published; `active_parameters`: of these, those that a token uses.
    """

    run: Run
    model: ModelConfig
    parameters: int
    active_parameters: int
    blocks: Mapping[str, Graph]
    order: Order
    program: Program
    capacity: Capacity | None = None
    """Number of requests that fit; only in inference with a known device memory."""
    trained: TrainedParameters | None = None
    """Number of trained parameters, if not all train."""
    load: Load | None = None
    """Tokens per expert, if uneven."""
    device_memory: int | None = None
    """Bytes of a device: the run's `device_memory`, or else the hardware's if known."""
    assumed: frozenset[str] = frozenset()
    """Settings of the run that were left to their defaults."""

    def __repr__(self) -> str:
        return f"<{self.run.describe()}: {self.program.mesh.world_size} ranks, compiled>"

    @property
    def notes(self) -> list[str]:
        """Assumptions on the model, and settings that do nothing in it."""
        run, model = self.run, self.model
        notes = [*absent_modules(run, model), *beyond_positions(run, model)]
        return [*notes, *model.notes, *weight_storage.notes(run, model)]

    @property
    def fit(self) -> Fit | None:
        """Comparison with the memory of a device; None: unknown memory."""
        if self.device_memory is None:
            return None
        peaks = map(peak_in_program_order, self.program.classes)
        return fit_of(peaks, self.device_memory, self.left_out)

    @property
    def left_out(self) -> str:
        """Flags of a launch file whose effect is left out and would reduce memory."""
        return launch.memory_bounds(self.run.model, {"recompute": self.run.recompute})

    def graph_text(self) -> str:
        """Sharded graphs in the paper's notation, one section per block variant."""
        return "\n\n".join(f"# {label}\n{text(graph)}" for label, graph in self.blocks.items())
