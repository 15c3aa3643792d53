"""Predicted step times beside published measurements (`evidence.measurements` has the rows)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from stagewright.errors import UserError
from stagewright.evidence.groups import configuration, traits
from stagewright.evidence.measurements import (
    Measurement,
    NotCompared,
    measurements,
    select,
)
from stagewright.evidence.predictions import Prediction
from stagewright.executors import Processes
from stagewright.lower.compile import compile
from stagewright.schedule.schedules import SCHEDULES
from stagewright.time.hardware import resolve as resolve_hardware
from stagewright.time.network import Machine
from stagewright.time.simulate.step import execute_step
from stagewright.time.simulate.utilization import model_flops

NEEDS_REASON = 0.25
"""Absolute error beyond which a prediction is printed with its reason."""

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
    and of all rows. A row of `rows` that no program can be made of is an error; a row of the
    package is not predicted (see `compare`).
    """
    chosen = measurements(source) if rows is None else select(rows, source)
    for outcome in compare(chosen, predict=predict, progress=progress):
        if isinstance(outcome, Prediction):
            yield outcome
        elif rows is not None:
            raise UserError(f"{outcome.source}, {outcome.row}: {outcome.reason}")


def compare(
    rows: Iterable[Measurement],
    *,
    predict: Predict | None = None,
    progress: Progress | None = None,
    jobs: int = 1,
) -> Iterator[Prediction | NotCompared]:
    """The outcome of each row, in order: its prediction, or why no program could be made of it.

    Rows of one configuration, of several releases of a framework, are simulated once. `jobs`: the
    processes that simulate.
    """
    chosen = list(rows)
    distinct = {configuration(m): m for m in chosen}
    tasks = [_Task(key, m, predict or step_seconds) for key, m in distinct.items()]
    seconds: dict[str, float | str] = {}
    share = len(chosen) / max(len(tasks), 1)

    def done(found: tuple[str, float | str]) -> None:
        seconds[found[0]] = found[1]
        if progress is not None:
            progress(round(len(seconds) * share), len(chosen))

    if progress is not None:
        progress(0, len(chosen))
    Processes(jobs).run(_simulated, tasks, done)
    for m in chosen:
        found = seconds[configuration(m)]
        if isinstance(found, str):
            yield NotCompared(m.source, m.row, found)
        else:
            yield _prediction(m, found)


class _Task(NamedTuple):
    key: str
    row: Measurement
    predict: Predict


def _simulated(task: _Task) -> tuple[str, float | str]:
    """The configuration of a row, and the seconds of its step or why there are none."""
    try:
        return task.key, task.predict(task.row, machine_of(task.row))
    except UserError as error:
        return task.key, str(error)


def _prediction(m: Measurement, seconds: float) -> Prediction:
    predicted = in_quantity(m, seconds)
    error = predicted / m.measured - 1
    return Prediction(
        m.source, m.row, m.quantity, m.measured, predicted, error, m.fitted, m.reason, traits(m)
    )


def machine_of(m: Measurement) -> Machine:
    """The machine that a row was measured on."""
    hardware = resolve_hardware(m.hardware)
    if m.network_gb_s is not None:
        network = hardware.scale_out.model_copy(update={"bandwidth_gb_s": m.network_gb_s})
        hardware = hardware.model_copy(update={"scale_out": network})
    if m.attention_kernel:
        hardware = hardware.with_attention(m.attention_kernel)
    return Machine.of(hardware, gpus=m.run.world_size)


def in_quantity(m: Measurement, seconds: float) -> float:
    """A step time in the quantity that was measured."""
    if m.quantity == "step_s":
        return seconds
    run = m.run.resolved(m.model)
    if m.quantity.startswith("tflops_gpu"):
        flops = model_flops(run, m.model)
        counted = flops.full if m.quantity == "tflops_gpu_full" else flops.causal
        return counted / seconds / run.world_size / 1e12
    tokens = (run.global_batch_size or 0) * (run.seq_length or 0)
    return tokens / seconds / run.world_size


def step_seconds(m: Measurement, machine: Machine) -> float:
    """Seconds of a step, simulated.

    Once the pipeline is full, a step is linear in its microbatches: two programs with few
    microbatches stand for one with many.
    """
    run = m.run.resolved(m.model)

    def simulated(microbatches: int) -> float:
        batch = microbatches * run.micro_batch_size * run.dp
        part = run.model_copy(update={"global_batch_size": batch})
        return execute_step(compile(part, m.model), machine, m.execution).seconds

    schedule = SCHEDULES.get(run.schedule or "")
    full = (schedule.fills if schedule else 1) * run.pp
    one, two = (1, 2) if run.pp == 1 else (full, full + run.pp)
    if run.microbatches <= two:
        return simulated(run.microbatches)
    first, second = simulated(one), simulated(two)
    return second + (run.microbatches - two) * (second - first) / (two - one)
