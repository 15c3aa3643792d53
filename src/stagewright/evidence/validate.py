"""Predicted step times beside published measurements.

Rows are lines of `data/measured/*.csv`: what was run (columns named as settings of `Run`, as
fields of `ModelConfig` where the model is a variant of a preset, and `hardware`), the quantity that
was measured, its source, and the constant of Stagewright that was fitted to it, if any. A new
line adds a row.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from stagewright.errors import UserError, did_you_mean
from stagewright.evidence.predictions import Prediction
from stagewright.files import read_text
from stagewright.lower.compile import compile
from stagewright.model.catalog import resolve as resolve_model
from stagewright.model.config import ModelConfig
from stagewright.run.experiment import section_of
from stagewright.run.sections import EXPERIMENT
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.time.hardware import resolve as resolve_hardware
from stagewright.time.network import Machine
from stagewright.time.simulate.step import executed
from stagewright.time.simulate.utilization import model_flops

QUANTITIES = {
    "step_s": "seconds per step",
    "tokens_s_gpu": "tokens per second and GPU",
    "tflops_gpu": "TFLOP/s per GPU of the model: no recompute, half for causal masks",
}
NEEDS_REASON = 0.25
"""Absolute error beyond which a prediction is printed with its reason."""
_TEXT = (
    *("source", "row", "url", "quantity", "measured", "hardware", "fitted", "reason"),
    "attention_kernel",
)
_EXECUTION = [name for name, setting in EXPERIMENT.items() if setting.section == "execution"]


@dataclass(frozen=True, slots=True)
class Measurement:
    """One published number and the run that it was measured on."""

    source: str
    row: str
    url: str
    quantity: str
    measured: float
    hardware: str
    fitted: str
    """Constants of Stagewright that were fitted to this row; empty: none."""
    reason: str
    """What the run assumes, or why the prediction misses the measurement."""
    attention_kernel: str
    """An attention kernel of the hardware, where the framework does not run the default."""
    execution: Execution
    """The framework's overlaps: columns named as settings of `Execution`, axes such as `dp+pp`."""
    run: Run
    model: ModelConfig


Predict = Callable[[Measurement, Machine], float]
Progress = Callable[[int, int], None]


def validate(
    source: str | None = None,
    predict: Predict | None = None,
    progress: Progress | None = None,
    rows: Iterable[Measurement] | None = None,
) -> Iterator[Prediction]:
    """Predictions of training measurements, or of those whose source contains the text `source`.

    `rows` are the measurements, by default those that the package carries; `predict` gives the
    seconds of a step, by default `step_seconds`; `progress` is called with the number of rows done
    and of all rows.
    """
    predict = predict or step_seconds
    chosen = select(measurements() if rows is None else rows, source)
    for done, m in enumerate(chosen):
        if progress is not None:
            progress(done, len(chosen))
        predicted = in_quantity(m, predict(m, machine_of(m)))
        error = predicted / m.measured - 1
        yield Prediction(
            m.source, m.row, m.quantity, m.measured, predicted, error, m.fitted, m.reason
        )


def machine_of(m: Measurement) -> Machine:
    """The machine that a row was measured on."""
    hardware = resolve_hardware(m.hardware)
    return Machine.of(hardware, gpus=m.run.world_size, attention_kernel=m.attention_kernel or None)


def in_quantity(m: Measurement, seconds: float) -> float:
    """A step time in the quantity that was measured."""
    if m.quantity == "step_s":
        return seconds
    run = m.run.resolved(m.model)
    if m.quantity == "tflops_gpu":
        return model_flops(run, m.model).causal / seconds / run.world_size / 1e12
    tokens = (run.global_batch_size or 0) * (run.seq_length or 0)
    return tokens / seconds / run.world_size


def select(rows: Iterable[Measurement], source: str | None) -> list[Measurement]:
    """The rows whose source contains the text `source`, in any case of letters; None: all rows."""
    rows = list(rows)
    if source is None:
        return rows
    return [m for m in rows if source.lower() in m.source.lower()]


def measurements() -> list[Measurement]:
    """All training measurements that the package carries."""
    folder = files("stagewright") / "data" / "measured"
    result: list[Measurement] = []
    for file in sorted(folder.iterdir(), key=lambda f: f.name):
        if file.name.startswith("training") and file.name.endswith(".csv"):
            result += read(file.read_text(encoding="utf-8"), file.name)
    return result


def load(path: str | Path) -> list[Measurement]:
    """Measurements of a user's file, in the form of the files that the package carries."""
    return read(read_text(path, "measurements in CSV"), str(path))


def read(text: str, where: str) -> list[Measurement]:
    """Measurements of a CSV file; unknown columns are refused by name."""
    rows = csv.DictReader(text.splitlines(), restval="")
    settings, sizes = set(Run.model_fields), {f.name for f in fields(ModelConfig)} - {"name"}
    for column in rows.fieldnames or ():
        known = [*_TEXT, *_EXECUTION, *settings, *sizes]
        if column not in known:
            hint = did_you_mean(column, known)
            raise UserError(f"{where}: unknown column {column!r}{hint}")
    for column in ("source", "row", "hardware", "quantity", "measured", "model"):
        if column not in (rows.fieldnames or ()):
            raise UserError(f"{where}: the column {column} is missing; docs/time.md shows a row")
    return [_measurement(row, settings, f"{where}, line {i}") for i, row in enumerate(rows, 2)]


def _measurement(row: Mapping[str, str], settings: set[str], where: str) -> Measurement:
    if None in row:
        raise UserError(f"{where}: has more cells than there are columns; quote what has commas")
    if row["quantity"] not in QUANTITIES:
        raise UserError(
            f"{where}: quantity is {row['quantity']!r}"
            f"{did_you_mean(row['quantity'], QUANTITIES)}; wanted one of {', '.join(QUANTITIES)}"
        )
    others = (*_TEXT, *_EXECUTION)
    run, model = run_of_row({k: v for k, v in row.items() if k not in others}, settings)
    texts = {k: row.get(k) or "" for k in _TEXT if k != "measured"}
    try:
        measured = float(row["measured"])
    except ValueError:
        measured = 0.0
    if not 0 < measured < math.inf:
        raise UserError(f"{where}: measured is {row['measured']!r}, wanted a number above 0")
    execution = section_of(Execution, _execution_values(row))
    return Measurement(**texts, measured=measured, execution=execution, run=run, model=model)


def _execution_values(row: Mapping[str, str]) -> dict[str, Any]:
    cells = {name: row[name] for name in _EXECUTION if row.get(name)}
    lists = {name for name in cells if EXPERIMENT[name].kind is frozenset}
    return {
        name: cell.split("+") if name in lists else _value(cell) for name, cell in cells.items()
    }


def run_of_row(row: Mapping[str, str], settings: Container[str]) -> tuple[Run, ModelConfig]:
    """The run of a row's cells, and its model: see `run_of_values`."""
    return run_of_values({k: _value(v) for k, v in row.items() if v}, settings)


def run_of_values(given: Mapping[str, Any], settings: Container[str]) -> tuple[Run, ModelConfig]:
    """The run of settings by name, and its model: a preset with the other fields changed."""
    model = resolve_model(str(given.get("model", "")))
    changes = {k: v for k, v in given.items() if k not in settings}
    if changes:
        changes.setdefault("kv_channels", model.kv_channels)
        model = replace(model, **changes)
    return Run.load(None, {k: v for k, v in given.items() if k in settings}), model


def _value(text: str) -> Any:
    if max(map(len, text.split(","))) > 99:
        raise UserError(f"cannot read {text[:40]!r}...; wanted a number or a word")
    if text in ("true", "false"):
        return text == "true"
    if not text.isdecimal():
        if text.replace(",", "").isdecimal():
            return tuple(int(x) for x in text.split(","))
        return tuple(text.split("+")) if "+" in text else text
    return int(text)


# ---- the prediction ------------------------------------------------------------------------------


def step_seconds(m: Measurement, machine: Machine) -> float:
    """Seconds of a step, simulated.

    Once the pipeline is full, a step is linear in its microbatches: two programs with few
    microbatches stand for one with many.
    """
    run = m.run.resolved(m.model)

    def simulated(microbatches: int) -> float:
        batch = microbatches * run.micro_batch_size * run.dp
        part = run.model_copy(update={"global_batch_size": batch})
        return executed(compile(part, m.model), machine, m.execution).seconds

    one, two = (1, 2) if run.pp == 1 else (run.pp, 2 * run.pp)
    if run.microbatches <= two:
        return simulated(run.microbatches)
    first, second = simulated(one), simulated(two)
    return second + (run.microbatches - two) * (second - first) / (two - one)
