"""Fit `sustained_fraction`, the clock of a long run, per GPU and precision; print held-out errors.

    python benchmarks/fit_sustained.py steps HARDWARE PRECISION [SOURCE ...]
    python benchmarks/fit_sustained.py products HARDWARE SYSTEM.json
    python benchmarks/fit_sustained.py experts HARDWARE SYSTEM.json
    python benchmarks/fit_sustained.py rowwise

`steps` takes the training rows of dense models that the package carries, or of some sources: the
clock at which the median error is zero. Other precisions keep the clock that the hardware has; rows
of low utilization are left out, and so are those whose sequences are packed with documents of
assumed lengths. `products` takes matrix products that SimuMax
(github.com/MooreThreads/SimuMax, Apache-2.0) measured one after the other for a while, in
`configs/system/*.json`: the median of benchmark over sustained speed, among products of more than
100 us. `experts` takes the file's products of experts and prints how far they are off at that
clock as one grouped product and as one product after the other (`ExpertFit.takes_turns`), each at
least `PRODUCT_LAUNCH`. `rowwise` prints what Llama 3 8B gains by fp8 on eight H100 with HBM2e, by
recipe and rate of the products with a scale per row (`ROWWISE_RATE`). Of the rows, 70% fit and 30%
are held out, by a hash of the configuration (`stagewright validate` holds out the same).
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import numpy as np

import stagewright as sw
from stagewright.errors import UserError
from stagewright.evidence import training
from stagewright.evidence.training import Measurement, held_out, machine_of, step_seconds
from stagewright.lower.compile import CompiledRun, compile
from stagewright.model.config import ModelConfig
from stagewright.run.settings import Run
from stagewright.time import hardware as figures
from stagewright.time.hardware import Hardware, resolve
from stagewright.time.roofline import gemm_seconds
from stagewright.time.simulate.launches import PRODUCT_LAUNCH

LONG_S = 100e-6
"""Shorter products do not reach the power limit in such a benchmark."""


def fits(key: str) -> bool:
    """Whether a product is among the 70% that fit."""
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
            if len(known) > 1:  # a row needs two programs, and rows come one after the other
                known.clear()
            known[key] = compile(run, model)
        return known[key]

    return found


def told(label: str, errors: np.ndarray) -> None:
    """Print errors of some rows."""
    if len(errors):
        print(
            f"# {label}: {len(errors)} rows, mean {np.abs(errors).mean():.1%}, "
            f"bias {np.median(errors):+.1%}"
        )


def solved(key: list[str], fit: list[bool], clocks: np.ndarray, logs: np.ndarray) -> float:
    """The clock at which the median of the rows that fit is right; print both errors.

    `logs` has shape (rows, clocks): the logarithm of predicted over measured.
    """
    chosen = np.array(fit)
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


def steps(name: str, precision: str, sources: list[str]) -> None:
    """Fit a clock to step times of some sources."""
    training.compile = compile_once()  # pyright: ignore
    run_of = {"mxfp8": "fp8", "fp4": "nvfp4"}.get(precision, precision)
    rows = [
        m
        for m in training.rows()
        if m.hardware == name
        and (m.run.precision, m.run.fp8_recipe == "mxfp8") == (run_of, precision == "mxfp8")
        and not m.model.num_experts
        and not m.low_utilization
        and not m.run.document_length
        and (not sources or any(text in m.source for text in sources))
    ]
    clocks = CLOCKS[[1, 3, 5]]
    known: dict[str, list[float]] = {}
    logs: list[list[float]] = []
    kept: list[Measurement] = []
    for m in rows:
        key = m.experiment
        if key not in known:
            print(f"# {m.source}, {m.row}", file=sys.stderr, flush=True)
            known[key] = _seconds(m, precision, clocks)
        if known[key]:
            kept.append(m)
            found = [m.predict(s) / m.measured for s in known[key]]
            logs.append([log(x) if m.quantity == "step_s" else -log(x) for x in found])
    names = [f"{m.source}, {m.row}" for m in kept]
    solved(names, [not held_out(m) for m in kept], clocks, np.array(logs))


def _seconds(m: Measurement, precision: str, clocks: np.ndarray) -> list[float]:
    """Seconds of the step at each clock; empty where the row cannot be predicted."""
    machine = machine_of(m)
    try:
        return [
            step_seconds(
                m, replace(machine, hardware=with_clock(machine.hardware, precision, clock))
            )
            for clock in clocks.tolist()
        ]
    except UserError:
        return []


def products(name: str, path: str) -> float:
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
            took = gemm_seconds(*sizes, traffic=np.array([traffic]), dtype="bf16", hardware=on)[0]
            found.append(float(np.log(took / seconds)))
        key.append(shape)
        logs.append(found)
    return solved(key, [fits(k) for k in key], CLOCKS, np.array(logs))


def experts(name: str, path: str) -> None:
    """Print errors of products of experts in two ways, at the clock of `products`."""
    hardware = with_clock(resolve(name), "bf16", products(name, path)).sustained()
    fit = hardware.experts
    if fit is None:
        raise SystemExit(f"{name} has no constants of grouped products")
    table = json.loads(Path(path).read_text())["accelerator"]["op"]["group_matmul"]
    for turns in (False, True):
        update = {"experts": fit.model_copy(update={"takes_turns": turns})}
        on, errors = hardware.model_copy(update=update), dict[str, list[float]]()
        for shape, share in table["accurate_efficient_factor"].items():
            given = dict(part.split("=") for part in shape.split(", "))
            count, *sizes = (float(given[x]) for x in ("ng", "M", "N", "K"))
            m, n, k = sizes
            measured = 2 * count * m * n * k / (share * table["tflops"] * 1e12)
            of_weights = given["stage"] == "bwd_grad_w"
            if of_weights:
                m, n, k = n, k, m
            elif given["stage"] == "bwd_grad_act":
                n, k = k, n
            width = 4 if of_weights and given["main_grad_dtype"] == "fp32" else 2
            result = width * count * m * n * (2 if given["accumulate"] == "True" else 1)
            traffic = 2 * count * k * (m + n) + result
            batch = [np.array([x]) for x in (count, m, n, k)]
            took = gemm_seconds(*batch, traffic=np.array([traffic]), dtype="bf16", hardware=on)[0]
            took = max(took, count * PRODUCT_LAUNCH * 1e-6)
            errors.setdefault(given["stage"], []).append(took / measured - 1)
        for stage, found in errors.items():
            told(f"{'one after the other' if turns else 'grouped'}, {stage}", np.array(found))
        told("all", np.array([e for found in errors.values() for e in found]))


def rowwise() -> None:
    """Print the gain of fp8 by recipe: torchao's steps of torchtitan (docs/source/workflows)."""
    run: dict[str, Any] = {
        "model": "llama3-8b",
        "dp": 8,
        "zero": 3,
        "framework": "torchtitan",
        "fuse": True,
        "operators": "fused",
        "recompute": "selective",
        "global_batch_size": 8,
    }

    def seconds(**recipe: Any) -> float:
        hardware = resolve("h100-96gb-hbm2e").with_attention("fa2")
        return sw.simulate(sw.compile(**run, **recipe), hardware, launch_mode="compile").seconds

    base = seconds()
    gain = base / seconds(precision="fp8", fp8_recipe="tensorwise") - 1
    print(f"a scale per tensor: {gain:+.1%}, published +25.0%")
    for rate in (1.0, 0.8, 0.75, 0.7, 0.65):
        figures.ROWWISE_RATE = rate
        gain = base / seconds(precision="fp8", fp8_recipe="rowwise") - 1
        print(f"a scale per row at {rate}: {gain:+.1%}, published +10.0%")


def main() -> None:
    """The fit that is asked for."""
    match sys.argv[1:]:
        case ["steps", name, precision, *sources]:
            steps(name, precision, sources)
        case ["products", name, path]:
            products(name, path)
        case ["rowwise"]:
            rowwise()
        case ["experts", name, path]:
            experts(name, path)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
