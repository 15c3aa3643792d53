"""Predicted peaks of memory beside published ones.

Rows are lines of `data/measured/memory.csv`: what was run, as in `validate`, and besides `measured`
(bytes), `quantity`: `allocated` (torch's own count of what tensors take), `reserved` (what its
allocator took from the device) or `reported`, where a paper does not say; `held`: bytes allocated
between two steps; `workspace`: what libraries take by rule, see `docs/memory.md`.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from importlib.resources import files
from typing import NamedTuple

from stagewright.evidence.measurements import run_of_row
from stagewright.lower.compile import compile
from stagewright.model.config import ModelConfig
from stagewright.run.settings import Run

STATES = ("parameters", "gradients", "optimizer")
_TEXT = ("source", "row", "url", "hardware", "quantity", "measured", "held", "workspace", "reason")


class PeakPrediction(NamedTuple):
    """A published peak and the predicted one, in bytes; errors are predicted / measured - 1."""

    source: str
    row: str
    hardware: str
    quantity: str
    measured: int
    peak: int
    workspace: int
    held: int | None  # measured between steps
    states: int  # predicted between steps
    reason: str

    @property
    def error(self) -> float:
        """Error of the peak, the workspace of libraries included."""
        return (self.peak + self.workspace) / self.measured - 1

    @property
    def error_of_states(self) -> float | None:
        """Error of the bytes held between steps; None where they were not measured."""
        return None if self.held is None else (self.states + self.workspace) / self.held - 1


def predictions() -> Iterator[PeakPrediction]:
    """Predictions of all rows, in the order of the file."""
    text = files("stagewright").joinpath("data/measured/memory.csv").read_text(encoding="utf-8")
    settings = set(Run.model_fields)
    known: dict[tuple[Run, ModelConfig, bool], tuple[int, int]] = {}
    for row in csv.DictReader(text.splitlines()):
        run, model = run_of_row({k: v for k, v in row.items() if k not in _TEXT}, settings)
        # Megatron-LM's log is that of the last rank; others give the largest of all.
        last = row["quantity"] == "allocated"
        key = _short(run, model), model, last
        if key not in known:
            known[key] = _held(*key)
        peak, states = known[key]
        yield PeakPrediction(
            row["source"],
            row["row"],
            row["hardware"],
            row["quantity"],
            int(row["measured"]),
            peak,
            int(row["workspace"] or 0),
            int(row["held"]) if row["held"] else None,
            states,
            row["reason"],
        )


def _short(run: Run, model: ModelConfig) -> Run:
    """The run with the fewest microbatches that still reach the most alive at once."""
    run = run.resolved(model)
    few = min(run.microbatches, run.pp * run.vpp)
    return run.model_copy(update={"global_batch_size": few * run.micro_batch_size * run.dp})


def _held(run: Run, model: ModelConfig, last: bool) -> tuple[int, int]:
    classes = compile(run, model).program.classes
    of = max(classes, key=lambda c: c.pipeline_rank if last else c.memory["peak"])
    return of.memory["peak"], sum(of.memory[s] for s in STATES)
