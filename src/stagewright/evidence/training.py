"""Published step times of training, and the runs that they were measured on.

Rows are lines of `data/measured/training*.csv`: what was run (columns named as settings of `Run`,
as fields of `ModelConfig` where the model is a variant of a preset, as settings of `Execution`, and
`hardware`), the quantity that was measured, its source, and the constant of Stagewright that was
fitted to it, if any. A new line adds a row.

`data/measured/sources.yaml` has an entry for each source: the address of its rows, the settings
that all its rows take unless a row says otherwise, each with the reason, and notes. So an
assumption is written once, and no row and no source has a constant of its own.

>>> nanotron = sources()["nanotron"]
>>> nanotron.assumed["attention_kernel"].value
'fa2'
"""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from stagewright.errors import UserError, did_you_mean
from stagewright.evidence.rows import NotCompared, Row, Traits, carried_text, of_cells, within
from stagewright.files import own_yaml, read_text
from stagewright.lower.compile import compile
from stagewright.model.catalog import resolve as resolve_model
from stagewright.model.config import ModelConfig
from stagewright.run.experiment import section_of
from stagewright.run.sections import EXPERIMENT
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.schedule.schedules import SCHEDULES
from stagewright.time.hardware import resolve as resolve_hardware
from stagewright.time.network import Machine
from stagewright.time.simulate.step import timeline_of_step
from stagewright.time.simulate.utilization import model_flops

QUANTITIES = {
    "step_s": "seconds per step",
    "tokens_s_gpu": "tokens per second and GPU",
    "tflops_gpu": "TFLOP/s per GPU of the model: no recompute, half for causal masks",
    "tflops_gpu_full": "TFLOP/s per GPU of the model: no recompute, attention in full",
}
BEYOND = 0.25
"""Error of a row for which its source names the reason."""
FITTED_TENTHS = 7
"""Tenths of the configurations that constants may be fitted to; errors are reported on the rest."""
_TEXT = (
    *("source", "row", "url", "quantity", "measured", "hardware", "fitted", "reason"),
    *("attention_kernel", "network_gb_s", "low_utilization", "not_compared"),
)
_LISTS = {name for name, setting in EXPERIMENT.items() if setting.kind is tuple}
_EXECUTION = [name for name, setting in EXPERIMENT.items() if setting.section == "execution"]


@dataclass(frozen=True, kw_only=True)
class Measurement(Row):
    """One published step time and the run that it was measured on."""

    attention_kernel: str = ""
    """An attention kernel of the hardware, where the framework does not run the default."""
    network_gb_s: float | None = None
    """Network between nodes in GB/s per GPU, one way; None: as the file of the hardware has it."""
    low_utilization: bool = False
    """True if the run reaches less than a tenth of the peak: such rows have their own totals."""
    execution: Execution
    """The framework's overlaps: columns named as settings of `Execution`, axes such as `dp+pp`."""
    run: Run
    model: ModelConfig

    @property
    def experiment(self) -> str:
        """Configuration: equal for rows of one run, whatever their source or release."""
        machine = (self.hardware, self.attention_kernel, self.network_gb_s)
        return repr((self.run, self.model, self.execution, *machine))

    def simulate(self) -> float:
        """Seconds of a step."""
        return step_seconds(self, machine_of(self))

    def predict(self, outcome: float) -> float:
        """A step time in the quantity that was measured."""
        if self.quantity == "step_s":
            return outcome
        run = self.run.resolved(self.model)
        if self.quantity.startswith("tflops_gpu"):
            flops = model_flops(run, self.model)
            counted = flops.full if self.quantity == "tflops_gpu_full" else flops.causal
            return counted / outcome / run.world_size / 1e12
        tokens = (run.global_batch_size or 0) * (run.seq_length or 0)
        return tokens / outcome / run.world_size

    @property
    def traits(self) -> Traits:
        """Group of the error."""
        run = self.run
        return Traits(
            hardware=self.hardware,
            precision="mxfp8" if run.fp8_recipe == "mxfp8" else run.precision,
            experts=self.model.num_experts > 0,
            adapters=run.lora_rank is not None,
            gpus=run.world_size,
            tokens=run.micro_batch_size * (run.seq_length or 0) // (run.tp * run.cp),
            held_out=held_out(self),
            low_utilization=self.low_utilization,
        )


def held_out(m: Measurement) -> bool:
    """Check whether a row is one of the tenths that no constant may be fitted to.

    By a hash of sizes, degrees, batch and accelerator: rows of several releases, precisions or
    overlaps fall on one side, and an assumption that is added changes no row's side.
    """
    run, model = m.run, m.model
    sizes = (
        *(run.layers or model.num_layers, model.hidden_size, model.ffn_hidden_size),
        *(model.num_attention_heads, model.num_query_groups, run.vocab or model.vocab_size),
        *(model.num_experts, model.top_k),
    )
    degrees = (run.tp, run.cp, run.ep, run.dp, run.pp, run.vpp, run.zero)
    batch = (run.seq_length, run.micro_batch_size, run.global_batch_size)
    return held_back(repr((m.hardware, sizes, degrees, batch)))


def held_back(key: str) -> bool:
    """Check whether a hash of this text falls into the tenths that are not fitted to."""
    return int(hashlib.sha256(key.encode()).hexdigest(), 16) % 10 >= FITTED_TENTHS


# ---- simulation of a step ------------------------------------------------------------------------


def machine_of(m: Measurement) -> Machine:
    """The machine that a row was measured on."""
    hardware = resolve_hardware(m.hardware)
    if m.network_gb_s is not None:
        network = hardware.scale_out.model_copy(update={"bandwidth_gb_s": m.network_gb_s})
        hardware = hardware.model_copy(update={"scale_out": network})
    if m.attention_kernel:
        hardware = hardware.with_attention(m.attention_kernel)
    return Machine.of(hardware, gpus=m.run.world_size)


def step_seconds(m: Measurement, machine: Machine) -> float:
    """Seconds of a step, simulated.

    Once the pipeline is full, a step is linear in its microbatches: two programs with few
    microbatches stand for one with many.
    """
    run = m.run.resolved(m.model)

    def simulated(microbatches: int) -> float:
        batch = microbatches * run.micro_batch_size * run.dp
        part = run.model_copy(update={"global_batch_size": batch})
        return timeline_of_step(compile(part, m.model), machine, m.execution).seconds

    schedule = SCHEDULES.get(run.schedule or "")
    full = (schedule.fills if schedule else 1) * run.pp
    one, two = (1, 2) if run.pp == 1 else (full, full + run.pp)
    if run.microbatches <= two:
        return simulated(run.microbatches)
    first, second = simulated(one), simulated(two)
    return second + (run.microbatches - two) * (second - first) / (two - one)


# ---- sources -------------------------------------------------------------------------------------


class Assumption(NamedTuple):
    """The value of a setting as a cell of a row writes it, and why it is taken."""

    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class Source:
    """Location of the rows of a source, and what is assumed of all of them."""

    address: str
    """Address of every row; a row's own `url` follows it, or replaces it if it is whole."""
    assumed: Mapping[str, Assumption]
    """By column of the rows."""
    notes: tuple[str, ...]
    """Further assumptions, and unknowns."""
    beyond: str = ""
    """Checked reason for errors beyond `BEYOND`."""

    def complete(self, row: Mapping[str, str]) -> dict[str, str]:
        """The cells of a row with the source's address and assumptions where the row has none."""
        taken = {name: a.value for name, a in self.assumed.items() if not row.get(name)}
        url = row.get("url") or ""
        whole = url if url.startswith("https://") else self.address + url
        return {**row, **taken, "url": whole}


@cache
def sources() -> Mapping[str, Source]:
    """The sources of training measurements, by name."""
    entries = own_yaml(carried_text("sources.yaml"))
    return {name: _source(entry) for name, entry in entries.items()}


def _source(entry: Mapping[str, Any]) -> Source:
    assumed = {
        name: Assumption(str(value).lower() if isinstance(value, bool) else str(value), reason)
        for name, (value, reason) in entry.get("assumed", {}).items()
    }
    notes = tuple(entry.get("notes", ()))
    return Source(entry.get("address", ""), assumed, notes, entry.get("beyond", ""))


# ---- files ---------------------------------------------------------------------------------------


def rows(source: str | None = None) -> list[Measurement]:
    """The rows of the package, of sources whose name contains `source`, that settings express."""
    return [row for row in _carried(source) if isinstance(row, Measurement)]


def not_compared(source: str | None = None) -> list[NotCompared]:
    """The rows of the package that no settings express."""
    return [row for row in _carried(source) if isinstance(row, NotCompared)]


@cache
def _carried(source: str | None) -> tuple[Measurement | NotCompared, ...]:
    folder = files("stagewright") / "data" / "measured"
    names = sorted(file.name for file in folder.iterdir() if file.name.startswith("training"))
    return tuple(
        row for name in names for row in _rows(carried_text(name), name, sources(), source)
    )


def load(path: str | Path) -> list[Measurement]:
    """Measurements of a user's file, in the form of the files that the package carries."""
    return read(read_text(path, "measurements in CSV"), str(path))


def read(text: str, where: str) -> list[Measurement]:
    """Measurements of a CSV file; unknown columns are refused by name.

    Rows with a reason under `not_compared` are left out.
    """
    return [row for row in _rows(text, where, {}) if isinstance(row, Measurement)]


def _rows(
    text: str, where: str, assumed: Mapping[str, Source], only: str | None = None
) -> Iterator[Measurement | NotCompared]:
    rows = csv.DictReader(text.splitlines(), restval="")
    sizes = {f.name for f in fields(ModelConfig)} - {"name"}
    for column in rows.fieldnames or ():
        known = [*_TEXT, *_EXECUTION, *Run.model_fields, *sizes]
        if column not in known:
            hint = did_you_mean(column, known)
            raise UserError(f"{where}: unknown column {column!r}{hint}")
    required = ("source", "row", "hardware", "quantity", "measured", "model")
    if missing := [column for column in required if column not in (rows.fieldnames or ())]:
        columns = "the column" if len(missing) == 1 else "columns"
        raise UserError(
            f"{where}: lacks {columns} {', '.join(missing)}; docs/accuracy/index.md shows a row"
        )
    for line, row in enumerate(rows, 2):
        if not within(row["source"], only):
            continue
        if row.get("not_compared"):
            yield NotCompared(row["source"], row["row"], row["not_compared"])
            continue
        source = assumed.get(row["source"])
        cells = source.complete(row) if source else row
        yield _measurement(cells, f"{where}, line {line}")


def _measurement(row: Mapping[str, str], where: str) -> Measurement:
    if None in row:
        raise UserError(f"{where}: has more cells than there are columns; quote what has commas")
    if row["quantity"] not in QUANTITIES:
        raise UserError(
            f"{where}: quantity is {row['quantity']!r}"
            f"{did_you_mean(row['quantity'], QUANTITIES)}; wanted one of {', '.join(QUANTITIES)}"
        )
    others = (*_TEXT, *_EXECUTION)
    try:
        run, model = run_of_row({k: v for k, v in row.items() if k not in others})
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    network = row.get("network_gb_s")
    return Measurement(
        **of_cells(row, measured=_positive(row["measured"], "measured", where)),
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


def run_of_row(row: Mapping[str, str]) -> tuple[Run, ModelConfig]:
    """The run of a row's cells, and its model: see `run_of_values`."""
    return run_of_values(
        {k: v.replace("+", ",") if k in _LISTS else _value(v) for k, v in row.items() if v}
    )


def run_of_values(given: Mapping[str, Any]) -> tuple[Run, ModelConfig]:
    """The run of settings by name, and its model: a preset with the other fields changed."""
    model = resolve_model(str(given.get("model", "")))
    changes = {k: v for k, v in given.items() if k not in Run.model_fields}
    if changes:
        changes.setdefault("kv_channels", model.kv_channels)
        model = replace(model, **changes)
    return Run.load(None, {k: v for k, v in given.items() if k in Run.model_fields}), model


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
