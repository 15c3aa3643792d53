"""A step of a traced PyTorch graph, simulated on a machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from stagewright.program.fit import Fit, fit_of, peak_in_issue_order
from stagewright.time.network import Machine
from stagewright.time.simulate.breakdown import Breakdown, StepTimeline
from stagewright.time.simulate.timeline import Timeline


@dataclass(frozen=True, eq=False)
class TracedStep(StepTimeline):
    """Simulated step of a program without a run, on identical ranks.

    It has times, but neither tokens nor utilization.
    """

    name: str
    machine: Machine
    line: Timeline

    @property
    def mean(self) -> Breakdown:
        """Breakdown of any GPU: all are equal."""
        return self.parts[0]

    @property
    def fit(self) -> Fit:
        """Fit of the graph's values into the memory of a device."""
        return fit_of(
            map(peak_in_issue_order, self.line.program.classes), self.machine.hardware.memory
        )

    def summary(self) -> dict[str, Any]:
        """All results as one object for JSON; times in seconds, sizes in bytes."""
        return {
            "model": self.name,
            "hardware": self.machine.hardware.name,
            "machine": str(self.machine),
            "world_size": self.machine.gpus,
            "step_seconds": self.seconds,
            "memory": self.fit.entry(),
            "mean": asdict(self.mean),
            "critical_path": self.critical_path,
        }
