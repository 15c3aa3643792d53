"""Published figures beside predictions: the protocol of all tables of measurements.

A module with a table (`training`, `kernels`, `memory`, `servers`) returns its rows by
source. A row is one published number. It names the experiment that predicts it, which several rows
may share: the figures of one server, or a step that was measured with several releases of a
framework. `compare` simulates each experiment once and returns the prediction of every row.
"""

from __future__ import annotations

import csv
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, NamedTuple

from stagewright.errors import UserError
from stagewright.executors import Processes

RATES = ("tokens_s_gpu", "tflops_gpu", "tflops_gpu_full")
"""Quantities of training that are larger where a step is shorter."""


class Traits(NamedTuple):
    """Properties that group the errors of training rows."""

    hardware: str
    precision: str
    experts: bool
    """True for a mixture of experts."""
    adapters: bool
    """True if adapters train beside frozen weights."""
    gpus: int
    tokens: int
    """Tokens of a kernel: of a microbatch, on a rank of tensor and of context parallelism."""
    held_out: bool
    """True if constants may not be fitted to the row."""
    low_utilization: bool


@dataclass(frozen=True, kw_only=True)
class Row(ABC):
    """One published figure, and the experiment that predicts it."""

    source: str
    row: str
    url: str = ""
    hardware: str
    quantity: str
    measured: float
    fitted: str = ""
    """Constants of Stagewright that were fitted to this row; empty: none."""
    reason: str = ""
    """Assumptions of the run, or the reason why the prediction misses the measurement."""

    @property
    @abstractmethod
    def experiment(self) -> Hashable:
        """Simulated experiment; rows with equal ones share a simulation."""

    @abstractmethod
    def simulate(self) -> Any:
        """Outcome of the experiment. Raises UserError where no program can be made of it."""

    @abstractmethod
    def predict(self, outcome: Any) -> float:
        """Figure of an outcome of the experiment, in the unit of `measured`."""

    @property
    def traits(self) -> Traits | None:
        """Group of the error besides the source; None: none."""
        return None


def of_cells(cells: Mapping[str, str], **others: Any) -> dict[str, Any]:
    """The fields that all rows have, of the cells of a line; `others` replace and add fields."""
    names = ("source", "row", "url", "hardware", "quantity", "fitted", "reason")
    fields: dict[str, Any] = {name: cells.get(name) or "" for name in names}
    if "measured" not in others:
        fields["measured"] = float(cells["measured"])
    return fields | others


class Prediction(NamedTuple):
    """A published figure and its prediction."""

    source: str
    row: str
    quantity: str
    measured: float
    predicted: float
    fitted: str = ""
    reason: str = ""
    traits: Traits | None = None

    @property
    def error(self) -> float:
        """Relative error: predicted / measured - 1."""
        return self.predicted / self.measured - 1

    @property
    def error_of_time(self) -> float:
        """Error of the time: positive where the prediction is slow, whatever was measured."""
        return self.measured / self.predicted - 1 if self.quantity in RATES else self.error


class NotCompared(NamedTuple):
    """A published figure that is not predicted, and why."""

    source: str
    row: str
    reason: str


def prediction(row: Row, predicted: float) -> Prediction:
    """The row beside its prediction."""
    return Prediction(
        row.source, row.row, row.quantity, row.measured, predicted,
        row.fitted, row.reason, row.traits,
    )  # fmt: skip


def compare(
    rows: Iterable[Row], *, jobs: int = 1, progress: Callable[[int, int], None] | None = None
) -> Iterator[Prediction | NotCompared]:
    """Outcome of each row, in order: its prediction, or why its experiment cannot be simulated.

    `jobs`: processes that simulate. `progress` is called with the number of rows done and of all.
    """
    keyed = [(row.experiment, row) for row in rows]
    experiments = dict(keyed)
    outcomes: dict[Hashable, Any] = {}
    share = len(keyed) / max(len(experiments), 1)

    def done(experiment: tuple[Hashable, Any]) -> None:
        key, outcome = experiment
        outcomes[key] = outcome
        if progress is not None:
            progress(round(len(outcomes) * share), len(keyed))

    if progress is not None:
        progress(0, len(keyed))
    Processes(jobs).run(_simulate, experiments.items(), done)
    for key, row in keyed:
        outcome = outcomes[key]
        if isinstance(outcome, _Refused):
            yield NotCompared(row.source, row.row, outcome.reason)
        else:
            yield prediction(row, row.predict(outcome))


class _Refused(NamedTuple):
    reason: str


def _simulate(experiment: tuple[Hashable, Row]) -> tuple[Hashable, Any]:
    key, row = experiment
    try:
        return key, row.simulate()
    except UserError as error:
        return key, _Refused(str(error))


def within(name: str, source: str | None) -> bool:
    """True if the name of a source contains the text `source`, in any case of letters."""
    return source is None or source.lower() in name.lower()


def carried_text(name: str) -> str:
    """Text of a file of `data/measured` in the package."""
    return (files("stagewright") / "data" / "measured" / name).read_text(encoding="utf-8")


def carried_cells(name: str, source: str | None = None) -> Iterator[dict[str, str]]:
    """Cells, by column, of the rows of a CSV file of the package whose source matches."""
    for cells in csv.DictReader(carried_text(name).splitlines()):
        if within(cells["source"], source):
            yield cells
