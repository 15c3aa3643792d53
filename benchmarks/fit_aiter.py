"""Fit the constants of AMD's kernels to AITER's published times; print them with held-out errors.

    python benchmarks/fit_aiter.py CHECKOUT [mi300x mi355x] [--rows FILE]

CHECKOUT is a copy of AMD's AITER (github.com/ROCm/aiter@e4048607, MIT), the kernels that vLLM and
SGLang run on AMD's GPUs. Read are its tables of tuned kernels (`aiter/configs`), which say how long
the fastest kernel of a shape took, on operands that no cache holds (`perftest` of
aiter/test_common.py), and the table of fused attention in op_tests/cpp/mha/README.md. Of the rows,
70% fit and 30% are held out, by a hash of the shape. Errors: |predicted / measured - 1|. Needs
scipy. `--rows` appends a sample of the held-out rows to FILE, in the columns of kernels.csv.

Products in fp8 are by tokens and channels, or by blocks. Experts of AITER are two kernels, which
copy rows and compute the activation within; sorting and quantizing are kernels of their own, which
the tables do not contain. Some rows of experts repeat one time for several numbers of tokens; these
are left out, as are times beyond the peak.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fit_kernels import Constants, block, fit, held_out, sample, told
from stagewright.arrays import Float
from stagewright.evidence.kernels import ITEM, MXFP4, ExpertMLP, fused_experts_seconds
from stagewright.time.hardware import ExpertFit, Hardware, resolve
from stagewright.time.roofline import Kernels, gemm_seconds, training_attention_seconds

URL = "https://github.com/ROCm/aiter/blob/e4048607"
UNITS = {"mi300x": 304, "mi355x": 256}
"""Compute units, by which the tables tell GPUs apart."""
SHARES = {"fraction": (0.0, 1.0), "quantization": (0.0, 1.0), "sharpness": (1.4, 16.0),
          "memory_fraction": (0.0, 1.0)}  # fmt: skip
STARTS = (
    {"fraction": 0.6, "tile_factor": 0.3, "tile_us": 0.7, "quantization": 0.5, "split_us": 2.0,
     "launch_us": 2.0, "memory_fraction": 0.8, "sharpness": 3.0},
    {"fraction": 0.7, "tile_factor": 1.5, "tile_us": 2.0, "quantization": 0.9, "split_us": 3.0,
     "launch_us": 1.5, "memory_fraction": 0.9, "sharpness": 6.0},
)  # fmt: skip
BINS = (0, 64, 512, 2048, 10**9)
"""Rows of products that count alike."""


class Table(NamedTuple):
    """Measured kernels of one kind: sizes and seconds, an array row per kernel."""

    sizes: Float
    seconds: Float
    held_out: np.ndarray

    @classmethod
    def of(cls, times: dict[tuple[int, ...], float]) -> Table:
        """Table of microseconds by sizes."""
        keys = sorted(times)
        out = np.array([held_out(*key) for key in keys])
        return cls(np.array(keys, float), np.array([times[key] for key in keys]) / 1e6, out)

    def fitted(self) -> np.ndarray:
        """Rows to fit to, of which few and many rows of a product count alike."""
        rows: list[int] = []
        for low, high in itertools.pairwise(BINS):
            inside = (self.sizes[:, 0] > low) & (self.sizes[:, 0] <= high) & ~self.held_out
            rows += sample(np.flatnonzero(inside).tolist(), 250)
        return np.array(rows)


Predict = Callable[[Constants, Float], Float]


def best(predict: Predict, table: Table, starts: tuple[Constants, ...]) -> dict[str, float]:
    """The better fit of those from several starts."""
    rows = table.fitted()
    sizes, seconds = table.sizes[rows], table.seconds[rows]
    found = [fit(start, predict, sizes, seconds, SHARES) for start in starts]
    return min(found, key=lambda c: float(np.abs(np.log(predict(c, sizes) / seconds)).mean()))


def tables_of(checkout: Path, kind: str, hardware: str) -> Iterator[dict[str, str]]:
    """Rows of all tuned tables whose names contain `kind`, of one GPU."""
    folder = checkout / "aiter" / "configs"
    for path in sorted([*folder.glob("*.csv"), *folder.glob("model_configs/*.csv")]):
        if kind not in path.name or "untuned" in path.name or "_tuned" not in f"_{path.name}":
            continue
        for row in csv.DictReader(path.open(encoding="utf-8")):
            here = row.get("cu_num") == str(UNITS[hardware])
            if here and row.get("gfx", "gfx9").startswith("gfx9") and float(row.get("us") or 0) > 0:
                yield row | {"file": path.name}


PRODUCTS = {"bf16": "bf16", "fp8": "a8w8", "fp8_block": "a8w8_blockscale", "fp4": "a4w4"}
"""Names of tables by the key of the constants."""


def products(checkout: Path, hardware: str, key: str) -> Table:
    """Products of one precision: m, n and k."""
    times: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for row in tables_of(checkout, f"{PRODUCTS[key]}", hardware):
        other = "fmoe" in row["file"] or "batched" in row["file"] or "M" not in row
        by_blocks = "blockscale" in row["file"] and key == "fp8"
        if other or by_blocks or "int8" in row.get("q_dtype_w", ""):
            continue
        times[int(row["M"]), int(row["N"]), int(row["K"])].append(float(row["us"]))
    return Table.of({key: statistics.median(us) for key, us in times.items()})


def products_predicted(on: Hardware, key: str, constants: Constants, sizes: Float) -> Float:
    """Seconds of products with other constants."""
    dtype = key.removesuffix("_block")
    changed = on.gemm["bf16"].model_copy(update=dict(constants))
    m, n, k = sizes.T
    traffic = ITEM[dtype] * (m * k + k * n) + 2 * m * n
    return gemm_seconds(
        np.ones(len(m)), m, n, k, traffic=traffic, dtype=dtype,
        hardware=on.model_copy(update={"gemm": {dtype: changed}}),
    )  # fmt: skip


EXPERTS = {
    "bf16": ("bfloat16", "bfloat16"),
    "fp8": ("float8", "float8"),
    "fp4": ("float4", "float4"),
    "mxfp4": ("float8", "float4"),
}
"""Data types of inputs and of weights. AITER casts the inputs of gpt-oss, whose weights alone are
in mxfp4, to mxfp8 (`fused_moe` of aiter/fused_moe.py; up to 256 tokens they stay in bf16)."""


def experts(checkout: Path, hardware: str, key: str) -> Table:
    """Gated experts of one precision: tokens, widths, experts and top-k."""
    rows = [
        row
        for row in tables_of(checkout, "fmoe", hardware)
        if EXPERTS[key][0] in row["q_dtype_a"] and EXPERTS[key][1] in row["q_dtype_w"]
    ]
    names = ("token", "model_dim", "inter_dim", "expert", "topk")
    repeated = Counter((row["file"], *(row[n] for n in names[1:]), row["us"]) for row in rows)
    times: dict[tuple[int, ...], list[float]] = defaultdict(list)
    peak = resolve(hardware).rate_of(PRODUCT_OF.get(key, key)) or 0.0
    for row in rows:
        t, h, f, e, k = (int(row[n]) for n in names)
        us = float(row["us"])
        again = repeated[(row["file"], *(row[n] for n in names[1:]), row["us"])] > 1
        if not again and 6 * t * k * h * f / us / 1e6 < peak:
            times[t, h, f, e, k].append(us)
    return Table.of({key: statistics.median(us) for key, us in times.items()})


PRODUCT_OF = {"mxfp4": "mxfp8"}
"""Data type in which products of weights run whose inputs are in bf16."""


def experts_predicted(on: Hardware, key: str, constants: Constants, sizes: Float) -> Float:
    """Seconds of AITER's two kernels of experts with other constants."""
    dtype, product = ("bf16", PRODUCT_OF[key]) if key in PRODUCT_OF else (key, "")
    weights = MXFP4 if product else None
    fits = {dtype: on.gemm["bf16"].model_copy(update={**constants, "product": product})}
    copies = on.memory_bandwidth_fraction
    around = ExpertFit(routing_us=0, routing_ns=0, copy_fraction=copies, gemm=fits)
    changed = on.model_copy(update={"experts": around, "gemm": {**on.gemm, **fits}})
    t, h, f, e, k = sizes.T
    one = np.ones(len(t))
    mlp = ExpertMLP(t, h, f, k, e, one, one)
    return fused_experts_seconds(mlp, dtype=dtype, on=changed, weights=weights)


def attention(checkout: Path, hardware: str, column: int) -> Table:
    """Fused attention: batch, heads, sequences, width and mask; TFLOP/s in `column`.

    A causal mask leaves half of the FLOPs. Columns have a value per GPU.
    """
    text = (checkout / "op_tests/cpp/mha/README.md").read_text("utf-8")
    times: dict[tuple[int, ...], float] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) != 13 or not re.fullmatch("[0-9]+", cells[0]):
            continue
        b, h, _, q, k, d, causal = sizes = tuple(int(cell) for cell in cells[:7])
        rate = float(cells[column + [*UNITS].index(hardware)])
        products = 5 if column > 8 else 2
        times[sizes] = products * (1 if causal else 2) * b * h * q * k * d / rate / 1e6
    return Table.of(times)


def attention_predicted(
    on: Hardware, constants: Constants, sizes: Float, *, backward: bool
) -> Float:
    """Seconds of fused attention with other constants."""
    b, h, kv, q, k, d, causal = sizes.T
    changed = on.attention.model_copy(update=dict(constants))
    extents = {"batch": b, "heads": h, "kv_heads": kv, "q": q, "k": k, "d": d, "v": d,
               "causal": causal, "window": np.zeros(len(b))}  # fmt: skip
    flops = (5 if backward else 2) * np.where(causal > 0, 1, 2) * b * h * q * k * d
    traffic = 4 * b * (q * h + k * kv) * d * (2 if backward else 1)
    kernels = Kernels(extents, flops, traffic, "bf16", np.full(len(b), backward))
    fitted = on.model_copy(update={"attention": changed})
    return training_attention_seconds(kernels, fitted, backward=backward)


def tested(label: str, table: Table, predicted: Float) -> None:
    """Print errors of held-out rows, by the first size."""
    for low, high in itertools.pairwise(BINS):
        inside = (table.sizes[:, 0] > low) & (table.sizes[:, 0] <= high) & table.held_out
        if inside.any():
            told(f"{label}, {low + 1} to {high:g}", predicted[inside], table.seconds[inside])


class Sample:
    """Rows for kernels.csv: an even sample of those that no constant was fitted to."""

    def __init__(self, path: Path | None) -> None:
        """Append to `path`, if any."""
        self.path = path

    def add(self, table: Table, shape: str, *head: str) -> None:
        """Rows of a table, whose sizes are named by `shape`."""
        if self.path is None:
            return
        with self.path.open("a", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            for row in sample(np.flatnonzero(table.held_out).tolist(), 40):
                sizes = shape.format(*(int(size) for size in table.sizes[row]))
                writer.writerow([*head, sizes, f"{table.seconds[row] * 1e6:.2f}"])


def main() -> None:
    """All fits of the GPUs asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("hardware", nargs="*", default=[*UNITS])
    parser.add_argument("--rows", type=Path)
    arguments = parser.parse_args()
    checkout, rows = arguments.checkout, Sample(arguments.rows)
    configs = f"{URL}/aiter/configs"
    for name in arguments.hardware:
        on = resolve(name)
        print(f"## {name}\ngemm:", flush=True)
        for key in PRODUCTS:
            table = products(checkout, name, key)
            if not len(table.sizes):
                continue

            def predict(constants: Constants, sizes: Float, key: str = key) -> Float:
                return products_predicted(on, key, constants, sizes)  # noqa: B023

            found = best(predict, table, STARTS)
            block(key, found, 2)
            tested(f"gemm {key}", table, predict(found, table.sizes))
            blocks = " blocks=1" if key == "fp8_block" else ""
            shape = "m={} n={} k={} cast=0" + blocks
            head = ("AITER, matrix products", configs, name, "gemm", key.removesuffix("_block"))
            rows.add(table, shape, *head)
        print("experts:\n  gemm:", flush=True)
        for key in EXPERTS:
            table = experts(checkout, name, key)
            if len(table.sizes) < 12:
                continue

            def predict_experts(constants: Constants, sizes: Float, key: str = key) -> Float:
                return experts_predicted(on, key, constants, sizes)  # noqa: B023

            # Constants of `InferenceGemmFit` are fewer: the rest are those of products in bf16.
            fixed = {"split_us", *(("tile_factor", "quantization") if key in PRODUCT_OF else ())}
            starts = tuple(
                {n: x for n, x in start.items() if n not in fixed} | {"launch_us": 8.0}
                for start in STARTS
            )
            found = best(predict_experts, table, starts)
            block(key, found, 4)
            tested(f"experts {key}", table, predict_experts(found, table.sizes))
            head = ("AITER, experts", configs, name, "fused_experts", key)
            rows.add(table, "tokens={} m={} f={} experts={} top_k={}", *head)
        table = attention(checkout, name, 7)
        start = {"fraction": 0.6, "softmax_ps": 20.0, "tile_us": 3.0, "launch_us": 8.0,
                 "traffic_factor": 1.0}  # fmt: skip
        train = np.flatnonzero(~table.held_out)

        def predict_attention(constants: Constants, sizes: Float) -> Float:
            return attention_predicted(on, constants, sizes, backward=False)  # noqa: B023

        found = fit(start, predict_attention, table.sizes[train], table.seconds[train], {})
        backward = attention(checkout, name, 11)

        def predict_backward(constants: Constants, sizes: Float, found: Constants = found) -> Float:
            return attention_predicted(on, {**found, **constants}, sizes, backward=True)  # noqa: B023

        found |= fit({"bwd_ratio": 0.7}, predict_backward, backward.sizes[train],
                     backward.seconds[train], {})  # fmt: skip
        block("attention", found, 0)
        tested("attention", table, predict_attention(found, table.sizes))
        tested("attention, backward", backward, predict_backward(found, backward.sizes))
        shape = "batch={} heads={} kv_heads={} q={} k={} d={} causal={}"
        url = f"{URL}/op_tests/cpp/mha/README.md"
        rows.add(table, shape, "AITER, attention", url, name, "attention", "bf16")
        rows.add(backward, shape, "AITER, attention", url, name, "attention_backward", "bf16")


if __name__ == "__main__":
    main()
