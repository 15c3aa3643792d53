"""Fit `sustained_fraction`, the clock of a long run, per GPU and precision; print held-out errors.

    python benchmarks/fit_sustained.py steps HARDWARE PRECISION [ROWS.csv ...]
    python benchmarks/fit_sustained.py products HARDWARE SYSTEM.json

`steps` takes training rows of dense models that the package carries, or those of files: the clock
at which the median error is zero. Other precisions keep the clock that the hardware has. `products`
takes matrix products that SimuMax (github.com/MooreThreads/SimuMax, Apache-2.0) measured one after
the other for a while, in `configs/system/*.json`: the median of benchmark over sustained speed,
among products of more than 100 us. Of the rows, 70% fit and 30% are held out, by a hash of the
configuration.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from stagewright.evidence import validate
from stagewright.lower.compile import CompiledRun, compile
from stagewright.model.config import ModelConfig
from stagewright.run.settings import Run
from stagewright.time.hardware import Hardware, resolve
from stagewright.time.network import Machine
from stagewright.time.roofline import gemm_seconds

LONG_S = 100e-6
"""Shorter products do not reach the power limit in such a benchmark."""


def fits(key: str) -> bool:
    """Whether a row is among the 70% that fit."""
    return int(hashlib.sha256(key.encode()).hexdigest(), 16) % 10 < 7


def with_clock(hardware: Hardware, precision: str, clock: float) -> Hardware:
    """The hardware with another clock in one precision."""
    clocks = {**hardware.sustained_fraction, precision: clock}
    return hardware.model_copy(update={"sustained_fraction": clocks})


def compile_once() -> Callable[[Run, ModelConfig], CompiledRun]:
    """`compile`, which remembers: each row is predicted at several clocks."""
    known: dict[tuple[str, str], CompiledRun] = {}

    def found(run: Run, model: ModelConfig) -> CompiledRun:
        key = (run.model_dump_json(), repr(model))
        if key not in known:
            known.clear()  # rows come one after the other
        return known.setdefault(key, compile(run, model))

    return found


def told(label: str, errors: np.ndarray) -> None:
    """Print errors of some rows."""
    if len(errors):
        print(
            f"# {label}: {len(errors)} rows, mean {np.abs(errors).mean():.1%}, "
            f"bias {np.median(errors):+.1%}"
        )


def solved(key: list[str], clocks: np.ndarray, logs: np.ndarray) -> float:
    """The clock at which the median of the rows that fit is right; print both errors.

    `logs` has shape (rows, clocks): the logarithm of predicted over measured.
    """
    chosen = np.array([fits(k) for k in key])
    if not chosen.any():
        raise SystemExit("no rows of this hardware and precision among the 70% that fit")
    medians = np.median(logs[chosen], axis=0)
    clock = float(np.interp(0.0, -medians, clocks))
    at = np.array([np.interp(clock, clocks, row) for row in logs])
    errors = np.exp(at) - 1
    print(f"sustained_fraction {clock:.3f}")
    told("fitted", errors[chosen])
    told("held out", errors[~chosen])
    for k, error, used in zip(key, errors, chosen, strict=True):
        print(f"#   {error:+6.1%} {'' if used else '(held out) '}{k}")
    return clock


CLOCKS = np.array([0.5, 0.6, 0.7, 0.8, 0.9, 1.0])


def steps(name: str, precision: str, paths: list[str]) -> None:
    """Fit a clock to step times."""
    validate.compile = compile_once()  # pyright: ignore
    rows = [m for path in paths for m in validate.load(path)] or validate.measurements()
    key: list[str] = []
    logs: list[list[float]] = []
    for m in rows:
        if m.hardware != name or m.run.precision != precision or m.model.num_experts:
            continue
        found: list[float] = []
        for clock in CLOCKS[[1, 3, 5]]:
            hardware = with_clock(resolve(name), precision, clock)
            machine = Machine.of(
                hardware, gpus=m.run.world_size, attention_kernel=m.attention_kernel or None
            )
            predicted = validate.in_quantity(m, validate.step_seconds(m, machine))
            log = float(np.log(predicted / m.measured))
            found.append(log if m.quantity == "step_s" else -log)
        key.append(f"{m.source}, {m.row}")
        logs.append(found)
        print(f"# {key[-1]}", file=sys.stderr, flush=True)
    solved(key, CLOCKS[[1, 3, 5]], np.array(logs))


def products(name: str, path: str) -> None:
    """Fit the clock in bf16 to matrix products that ran for a while."""
    hardware = resolve(name)
    table = json.loads(Path(path).read_text())["accelerator"]["op"]["matmul"]
    key: list[str] = []
    logs: list[list[float]] = []
    for shape, share in table["accurate_efficient_factor"].items():
        given = dict(part.split("=") for part in shape.split(", "))
        batch, m, n, k = (float(given[x]) for x in "bmnk")
        seconds = 2 * batch * m * n * k / (share * table["tflops"] * 1e12)
        if seconds < LONG_S:
            continue
        result = (4 if given["out_dtype"] == "fp32" else 2) * batch * m * n
        traffic = 2 * batch * k * (m + n) + result * (2 if given["accumulate"] == "True" else 1)
        sizes = [np.array([x]) for x in (batch, m, n, k)]
        found: list[float] = []
        for clock in CLOCKS:
            on = with_clock(hardware, "bf16", clock).sustained()
            took = gemm_seconds(*sizes, traffic=np.array([traffic]), dtype="bf16", on=on)[0]
            found.append(float(np.log(took / seconds)))
        key.append(shape)
        logs.append(found)
    solved(key, CLOCKS, np.array(logs))


def main() -> None:
    """The fit that is asked for."""
    match sys.argv[1:]:
        case ["steps", name, precision, *paths]:
            steps(name, precision, paths)
        case ["products", name, path]:
            products(name, path)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
