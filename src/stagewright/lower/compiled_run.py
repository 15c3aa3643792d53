"""What compiling a run gives: its graphs, its schedule and the program of every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stagewright.graph.node import Graph, text
from stagewright.lower.frozen import TrainedParameters
from stagewright.lower.inference.capacity import Capacity
from stagewright.lower.routing import Load
from stagewright.model.config import ModelConfig
from stagewright.program.columns import Program
from stagewright.program.fit import Fit, fit_of, held_at_peak
from stagewright.run.settings import Run
from stagewright.schedule.actions import Order


@dataclass(frozen=True, slots=True, eq=False)
class CompiledRun:
    """A run with every decision made: resolved settings, sharded graphs, schedule, programs.

    `blocks` maps the label of each block variant to its sharded graph. `parameters` counts those of
    the model as published, `active_parameters` those that a token uses.
    """

    run: Run
    model: ModelConfig
    parameters: int
    active_parameters: int
    blocks: Mapping[str, Graph]
    order: Order
    program: Program
    capacity: Capacity | None = None
    """How many requests fit; only in inference, where the memory of a device is given."""
    trained: TrainedParameters | None = None
    """What trains of a model of which not all does."""
    load: Load | None = None
    """Tokens per expert; only where they are not spread evenly."""
    device_memory: int | None = None
    """Bytes of a device: the run's `device_memory`, or else the hardware's where that is known."""

    def __repr__(self) -> str:
        return f"<{self.run.describe()}: {self.program.mesh.world_size} ranks, compiled>"

    @property
    def fit(self) -> Fit | None:
        """Whether the step fits into the memory of a device; None where that is not known."""
        if self.device_memory is None:
            return None
        return fit_of(map(held_at_peak, self.program.classes), self.device_memory)

    def graph_text(self) -> str:
        """The sharded graph in the paper's notation, one section per block variant."""
        return "\n\n".join(f"# {label}\n{text(graph)}" for label, graph in self.blocks.items())
