"""Published peaks of memory.

Rows are lines of `data/measured/memory.csv`: what was run, as in `training`, and besides `measured`
(bytes), `quantity`: `allocated` (torch's own count of what tensors take), `reserved` (what its
allocator took from the device) or `reported`, where a paper does not say; `held`: bytes allocated
between two steps; `workspace`: what libraries take by rule, see `docs/accuracy/memory.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from stagewright.evidence.rows import Row, carried_cells, of_cells
from stagewright.evidence.training import run_of_row
from stagewright.lower.compile import compile
from stagewright.model.config import ModelConfig
from stagewright.run.settings import Run

BETWEEN_STEPS = "between steps"
"""Quantity of rows of the bytes held between two steps."""
STATES = ("parameters", "gradients", "optimizer")
_TEXT = ("source", "row", "url", "hardware", "quantity", "measured", "held", "workspace", "reason")


class MemoryUse(NamedTuple):
    """Bytes of a rank."""

    peak: int
    states: int
    """Parameters, gradients and optimizer states."""


@dataclass(frozen=True, kw_only=True)
class MemoryRow(Row):
    """Measured bytes: the peak of a step, or what is held between steps."""

    run: Run
    """With the fewest microbatches that still reach the most alive at once."""
    model: ModelConfig
    last: bool
    """True for the last pipeline rank, as in Megatron-LM's logs; else the fullest rank."""
    workspace: int

    @property
    def experiment(self) -> tuple[Run, ModelConfig, bool]:
        """The run, and which of its ranks."""
        return self.run, self.model, self.last

    def simulate(self) -> MemoryUse:
        """Bytes of the rank."""
        classes = compile(self.run, self.model).program.classes
        rank = max(classes, key=lambda c: c.pipeline_rank if self.last else c.memory["peak"])
        return MemoryUse(rank.memory["peak"], sum(rank.memory[name] for name in STATES))

    def predict(self, outcome: MemoryUse) -> float:
        """Bytes with the workspace of libraries."""
        used = outcome.states if self.quantity == BETWEEN_STEPS else outcome.peak
        return used + self.workspace


def rows(source: str | None = None) -> list[MemoryRow]:
    """The rows of the package, of sources whose name contains `source`, in the order of the file.

    A line with a figure under `held` is two rows: the peak, then the bytes between steps.
    """
    return [row for cells in carried_cells("memory.csv", source) for row in _rows(cells)]


def _rows(cells: dict[str, str]) -> list[MemoryRow]:
    run, model = run_of_row({k: v for k, v in cells.items() if k not in _TEXT})
    run = run.resolved(model)
    few = min(run.microbatches, run.pp * run.vpp)
    short = run.model_copy(update={"global_batch_size": few * run.micro_batch_size * run.dp})
    figures = {cells["quantity"]: cells["measured"], BETWEEN_STEPS: cells["held"]}
    return [
        MemoryRow(
            **of_cells(cells, quantity=quantity, measured=int(measured)),
            run=short,
            model=model,
            last=cells["quantity"] == "allocated",
            workspace=int(cells["workspace"] or 0),
        )
        for quantity, measured in figures.items()
        if measured
    ]
