"""Fit the parts of the power that kernels draw (`time/power.py`); print held-out errors

    python benchmarks/fit_power.py CHECKOUT

CHECKOUT is a copy of NVIDIA's aiconfigurator (github.com/ai-dynamo/aiconfigurator@095f58a5,
Apache-2.0), whose tables of some releases have the power beside the latency. Kernels shorter than
200 us are left out: the power is a mean over longer spans. Of the rows, 70% fit and 30% are held
out, by a hash of the shape. Needs scipy and pyarrow.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as columns
import pyarrow.parquet as parquet
from scipy.optimize import minimize

from fit_kernels import held_out, sample
from stagewright.time.hardware import resolve
from stagewright.time.power import GROUPED_ROWS, ROWS

TABLES = (
    ("h200", "h200_sxm", "vllm/0.22.0"),
    ("b200", "b200_sxm", "vllm/0.22.0"),
    ("b200", "b200_sxm", "trtllm/1.3.0rc15"),
    ("gb200-nvl72", "gb200", "vllm/0.22.0"),
)
BYTES = {"bfloat16": 2, "fp8": 1, "fp8_block": 1, "nvfp4": 0.5625, "w4a16_mxfp4": 0.53}
DTYPES = {"bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8", "nvfp4": "fp4"}
LONG_MS = 0.2
Row = dict[str, Any]


class Drawn(NamedTuple):
    """A kernel: what it uses of bandwidth and peak, and the power that it draws over the TDP."""

    kind: str
    held: bool
    compute: float
    memory: float
    power: float


def tiled(rows: float, least: int) -> float:
    """What tiles multiply over the FLOPs of so many rows."""
    return max(1.0, np.ceil(rows / least) * least / rows)


def work(op: str, r: Row) -> tuple[float, float, str] | None:
    """FLOPs of the tiles of a kernel, bytes, and its data type; None: not counted here."""
    if op == "gemm":
        dtype, (m, n, k) = r["gemm_dtype"], (r[x] for x in "mnk")
        size = BYTES.get(dtype)
        if size is None:
            return None
        return 2 * m * n * k * tiled(m, ROWS), size * (m * k + k * n) + 2 * m * n, dtype
    if op == "moe":
        dtype, h, f = r["moe_dtype"], r["hidden_size"], r["inter_size"] / r["moe_tp_size"]
        size = BYTES.get(dtype)
        if size is None or r["distribution"] != "balanced":
            return None
        copies = r["num_tokens"] * r["topk"] / r["moe_ep_size"]
        busy = min(r["num_experts"] / r["moe_ep_size"], copies)
        flops = 6 * copies * h * f * tiled(copies / busy, GROUPED_ROWS)
        return flops, size * 3 * busy * h * f + copies * (4 * h + 6 * f), dtype
    b, h, d = r["batch_size"], r["num_heads"], r["head_dim"]
    if r.get("window_size"):
        return None
    if op == "context_attention":
        return (2.0 * b * h * r["isl"] ** 2 * d, 0.0, "bfloat16") if not r.get("step") else None
    keys, kept = r["isl"] + r["step"], r["num_key_value_heads"] or h
    size = 1 if r["kv_cache_dtype"] == "fp8" else 2
    return 4.0 * b * h * keys * d, b * keys * kept * 2.0 * d * size, "bfloat16"


def rows(checkout: Path) -> Iterator[Drawn]:
    """All kernels, an even sample of each table."""
    folder = checkout / "aic-core/src/aiconfigurator_core/systems/data"
    tables = (
        ("gemm", "gemm", 4000),
        ("moe", "moe", 4000),
        ("attention", "generation_attention", 2000),
        ("attention", "context_attention", 2000),
    )
    for name, system, release in TABLES:
        on = resolve(name)
        for room, op, most in tables:
            path = folder / system / room / release / f"{op}_perf.parquet"
            if not path.exists():
                continue
            table = parquet.read_table(path)
            long = table.filter(columns.greater(table["latency"], LONG_MS)).to_pylist()
            for r in sample(long, most):
                found = work(op, r)
                if found is None or not r["power"]:
                    continue
                flops, moved, dtype = found
                seconds = r["latency"] * 1e-3
                peak = (on.rate_of(DTYPES.get(dtype, "bf16")) or on.peak_bf16_tflops) * 1e12
                memory = moved / seconds / (on.memory_bandwidth_gb_s * 1e9)
                kind = f"{op}, {'memory' if memory > 0.5 else 'others'}"
                held = held_out(op, flops, moved)
                yield Drawn(kind, held, flops / seconds / peak, memory, r["power"] / on.tdp_w)


def main(checkout: Path) -> None:
    """The fit and its errors by kind of kernel."""
    found = list(rows(checkout))
    compute, memory, power = (
        np.minimum(np.array([getattr(r, x) for r in found]), 1)
        for x in ("compute", "memory", "power")
    )
    held, kind = np.array([r.held for r in found]), np.array([r.kind for r in found])
    weight = np.zeros(len(found))
    for one in np.unique(kind):
        weight[(kind == one) & ~held] = 1 / ((kind == one) & ~held).sum()

    def predict(x: np.ndarray) -> np.ndarray:
        return np.clip(x[0] + x[1] * memory + x[2] * compute, 0.05, 1)

    def loss(x: np.ndarray) -> float:
        return float(np.average(np.abs(np.log(predict(x) / power)), weights=weight))

    starts = ([0.5, 0.15, 0.8], [0.3, 0.4, 0.5])
    best = min((minimize(loss, x, method="Nelder-Mead") for x in starts), key=lambda r: r.fun)
    print("RUNNING, MEMORY, COMPUTE:", np.round(best.x, 3))
    error = predict(best.x) / power - 1
    for one in ["", *np.unique(kind)]:
        some = error[held & ((kind == one) | (one == ""))]
        size = np.abs(some)
        print(f"# {one or 'all'}: {len(some)} held out, median {np.median(size):.1%}, "
              f"mean {size.mean():.1%}, bias {np.median(some):+.1%}")  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]))
