"""Published step times of training, and the runs that they were measured on.

Rows are lines of `data/measured/training*.csv`: what was run (columns named as settings of `Run`,
as fields of `ModelConfig` where the model is a variant of a preset, as settings of `Execution`, and
`hardware`), the quantity that was measured, its source, and the constant of Stagewright that was
fitted to it, if any. What a source leaves open is assumed for all of its rows at once, in
`data/measured/sources.yaml` (`evidence.sources`). A new line adds a row.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from stagewright.errors import UserError, did_you_mean
from stagewright.evidence.sources import Source, sources
from stagewright.files import read_text
from stagewright.model.catalog import resolve as resolve_model
from stagewright.model.config import ModelConfig
from stagewright.run.experiment import section_of
from stagewright.run.sections import EXPERIMENT
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run

QUANTITIES = {
    "step_s": "seconds per step",
    "tokens_s_gpu": "tokens per second and GPU",
    "tflops_gpu": "TFLOP/s per GPU of the model: no recompute, half for causal masks",
    "tflops_gpu_full": "TFLOP/s per GPU of the model: no recompute, attention in full",
}
_TEXT = (
    *("source", "row", "url", "quantity", "measured", "hardware", "fitted", "reason"),
    *("attention_kernel", "network_gb_s", "low_utilization", "not_compared"),
)
_LISTS = {name for name, setting in EXPERIMENT.items() if setting.kind is tuple}
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
    network_gb_s: float | None
    """Network between nodes in GB/s per GPU, one way; None: as the file of the hardware has it."""
    low_utilization: bool
    """Whether the run reaches less than a tenth of the peak: such rows have totals of their own."""
    execution: Execution
    """The framework's overlaps: columns named as settings of `Execution`, axes such as `dp+pp`."""
    run: Run
    model: ModelConfig


class NotCompared(NamedTuple):
    """A published number that is not predicted, and why."""

    source: str
    row: str
    reason: str


def measurements(source: str | None = None) -> list[Measurement]:
    """The training measurements that the package carries and that settings can express.

    With `source`, those whose source contains this text, in any case of letters.
    """
    return [row for row in _carried(source) if isinstance(row, Measurement)]


def not_compared(source: str | None = None) -> list[NotCompared]:
    """The rows that the package carries, but that no settings express."""
    return [row for row in _carried(source) if isinstance(row, NotCompared)]


@cache
def _carried(source: str | None) -> tuple[Measurement | NotCompared, ...]:
    folder = files("stagewright") / "data" / "measured"
    result: list[Measurement | NotCompared] = []
    for file in sorted(folder.iterdir(), key=lambda f: f.name):
        if file.name.startswith("training") and file.name.endswith(".csv"):
            text = file.read_text(encoding="utf-8")
            result += _rows(text, file.name, sources(), source)
    return tuple(result)


def load(path: str | Path) -> list[Measurement]:
    """Measurements of a user's file, in the form of the files that the package carries."""
    return read(read_text(path, "measurements in CSV"), str(path))


def read(text: str, where: str) -> list[Measurement]:
    """Measurements of a CSV file; unknown columns are refused by name.

    Rows with a reason under `not_compared` are left out.
    """
    return [row for row in _rows(text, where, {}) if isinstance(row, Measurement)]


def select(rows: Iterable[Measurement], source: str | None) -> list[Measurement]:
    """The rows whose source contains the text `source`, in any case of letters; None: all rows."""
    return [m for m in rows if within(m.source, source)]


def within(name: str, source: str | None) -> bool:
    """Whether the name of a source contains the text `source`, in any case of letters."""
    return source is None or source.lower() in name.lower()


def _rows(
    text: str, where: str, assumed: Mapping[str, Source], only: str | None = None
) -> Iterator[Measurement | NotCompared]:
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
    for line, row in enumerate(rows, 2):
        if not within(row["source"], only):
            continue
        if row.get("not_compared"):
            yield NotCompared(row["source"], row["row"], row["not_compared"])
            continue
        source = assumed.get(row["source"])
        cells = source.complete(row) if source else row
        yield _measurement(cells, settings, f"{where}, line {line}")


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
    network = row.get("network_gb_s")
    return Measurement(
        source=row["source"],
        row=row["row"],
        url=row.get("url") or "",
        quantity=row["quantity"],
        measured=_positive(row["measured"], "measured", where),
        hardware=row["hardware"],
        fitted=row.get("fitted") or "",
        reason=row.get("reason") or "",
        attention_kernel=row.get("attention_kernel") or "",
        network_gb_s=_positive(network, "network_gb_s", where) if network else None,
        low_utilization=row.get("low_utilization") == "true",
        execution=section_of(Execution, _execution_values(row)),
        run=run,
        model=model,
    )


def _positive(text: str, column: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise UserError(f"{where}: {column} is {text!r}, wanted a number above 0")
    return value


def _execution_values(row: Mapping[str, str]) -> dict[str, Any]:
    cells = {name: row[name] for name in _EXECUTION if row.get(name)}
    lists = {name for name in cells if EXPERIMENT[name].kind is frozenset}
    return {
        name: cell.split("+") if name in lists else _value(cell) for name, cell in cells.items()
    }


def run_of_row(row: Mapping[str, str], settings: Container[str]) -> tuple[Run, ModelConfig]:
    """The run of a row's cells, and its model: see `run_of_values`."""
    values = {k: _value(v) for k, v in row.items() if v}
    for name in _LISTS & values.keys():
        values[name] = values[name] if isinstance(values[name], tuple) else (values[name],)
    return run_of_values(values, settings)


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
    if text.isdecimal():
        return int(text)
    if text.replace(",", "").isdecimal():
        return tuple(int(x) for x in text.split(","))
    if "+" in text:
        return tuple(text.split("+"))
    return float(text) if text.replace(".", "", 1).isdecimal() else text
