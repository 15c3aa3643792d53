"""Fit the constants of kernels and collectives to measured ones; print them with held-out errors.

    python benchmarks/fit_kernels.py DIRECTORY [h100-sxm ... | rows]

DIRECTORY holds tables of NVIDIA's aiconfigurator (github.com/ai-dynamo/aiconfigurator, Apache-2.0)
as CSV: gemm_perf_, context_attention_perf_ and moe_perf_aiconfigurator.csv.gz, and
nccl_aiconfigurator.csv, whose columns are those of its parquet files and a `system`; and cuDNN's
times of fused attention: `benchmark/sdpa_benchmark_training` of github.com/NVIDIA/cudnn-frontend
@3929da2e (MIT). Of the rows of a table, 70% fit and 30% are held out, by a hash of the shape.
Errors: |predicted / measured - 1|. Needs scipy. `stagewright validate` repeats the errors on the
samples that the package carries; `rows` prints the held-out rows of cuDNN in their columns.
"""

from __future__ import annotations

import csv
import gzip
import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from scipy.optimize import minimize

from stagewright.evidence.kernels import ExpertMLP, experts_seconds, sdpa_kernels
from stagewright.time.collectives import collective_seconds
from stagewright.time.hardware import ExpertFit, GemmFit, Hardware, resolve
from stagewright.time.network import Machine, Placement
from stagewright.time.roofline import (
    attention_seconds,
    gemm_seconds,
    memory_seconds,
    training_attention_seconds,
)

SYSTEMS = {
    "a100-sxm-80gb": "a100_sxm",
    "h100-sxm": "h100_sxm",
    "h200": "h200_sxm",
    "b200": "b200_sxm",
    "gb200-nvl72": "gb200",
    "b300": "b300_sxm",
    "gb300-nvl72": "gb300",
    "rtx-pro-6000": "rtx_pro_6000_server",  # collectives alone
}
DTYPES = {"bf16": ("bfloat16", 2), "fp8": ("fp8", 1), "fp4": ("nvfp4", 0.5625)}
Rows = list[dict[str, str]]
Constants = Mapping[str, float]
Sizes = TypeVar("Sizes")


def held_out(*key: object) -> bool:
    """Whether a row is for testing: the same for the same shape, whatever the GPU."""
    return zlib.crc32(repr(key).encode()) % 10 < 3


def read(path: Path, system: str) -> Rows:
    """The rows of one system."""
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    return [row for row in csv.DictReader(text.splitlines()) if row["system"] == system]


def sample(rows: list[Any], most: int) -> list[Any]:
    """An even sample, the same every time."""
    order = np.random.default_rng(0).permutation(len(rows))[:most]
    return [rows[i] for i in sorted(order)]


def column(rows: Rows, name: str) -> np.ndarray:
    """One column as numbers."""
    return np.array([float(r[name]) for r in rows])


def fit(
    start: Constants, predict: Callable[[Constants, Sizes], np.ndarray], rows: Sizes, y: np.ndarray,
    bounds: Mapping[str, tuple[float, float]], weights: np.ndarray | None = None,
) -> dict[str, float]:  # fmt: skip
    """Constants that make the mean absolute logarithmic error least; Nelder-Mead, restarted."""
    names = list(start)

    def constants(x: np.ndarray) -> dict[str, float]:
        found = dict(zip(names, np.exp(np.clip(x, -12, 12)).tolist(), strict=True))
        return {k: float(np.clip(v, *bounds.get(k, (0, 1e9)))) for k, v in found.items()}

    def loss(x: np.ndarray) -> float:
        error = np.log(predict(constants(x), rows) / y)
        return float(np.average(np.sqrt(error**2 + 1e-4), weights=weights))

    x = np.log([max(v, 1e-4) for v in start.values()])
    for _ in range(3):
        x = minimize(loss, x, method="Nelder-Mead", options={"maxiter": 1200}).x
    return {k: float(f"{v:.4g}") for k, v in constants(x).items()}


def told(label: str, rows: np.ndarray, measured: np.ndarray) -> None:
    """Print the error of held-out rows."""
    error = rows / measured - 1
    size = np.abs(error)
    print(
        f"# {label}: {len(size)} held-out rows, median {np.median(size):.1%}, "
        f"p90 {np.quantile(size, 0.9):.1%}, bias {np.median(error):+.1%}",
        flush=True,
    )


def block(name: str, constants: Constants, indent: int) -> None:
    """Print constants as YAML."""
    pad = " " * indent
    print(f"{pad}{name}:")
    for key, value in constants.items():
        print(f"{pad}  {key}: {value:g}" if isinstance(value, float) else f"{pad}  {key}: {value}")


def gemm(folder: Path, hardware: Hardware, system: str) -> None:
    """Matrix products, per precision."""
    table = read(folder / "gemm_perf_aiconfigurator.csv.gz", system)
    for dtype, (theirs, size) in DTYPES.items():
        rows = [r for r in table if r["gemm_dtype"] == theirs]
        if not rows:
            continue

        def predict(constants: Constants, some: Rows, dtype: str = dtype, size: float = size):
            m, n, k = (column(some, c) for c in "mnk")
            changed = hardware.gemm["bf16"].model_copy(update=dict(constants))
            on = hardware.model_copy(update={"gemm": {dtype: changed}})
            traffic = size * (m * k + k * n) + 2 * m * n
            seconds = gemm_seconds(
                np.ones(len(m)), m, n, k, traffic=traffic, dtype=dtype, hardware=on
            )
            if size < 2:  # the rows include the kernel that quantizes the activations
                seconds += memory_seconds((2 + size) * m * k, m * k, on)
            return seconds

        keep = [r for r in rows if not held_out(r["m"], r["n"], r["k"])]
        # Training runs large products: half of the rows are such.
        large = [r for r in keep if min(float(r[c]) for c in "mnk") >= 512]
        few = sample(large, 1500) + sample(keep, 1500)
        start = dict(hardware.gemm["bf16"])
        found = fit(start, predict, few, column(few, "latency") / 1e3,
                    {"fraction": (0, 1), "quantization": (0, 1), "sharpness": (1, 16),
                     "memory_fraction": (0, 1)})  # fmt: skip
        block(dtype, found, 2)
        test = [r for r in rows if held_out(r["m"], r["n"], r["k"])]
        told(f"gemm {dtype}", predict(found, test), column(test, "latency") / 1e3)
        big = [r for r in test if min(float(r[c]) for c in "mnk") >= 512]
        told(f"gemm {dtype}, m, n, k >= 512", predict(found, big), column(big, "latency") / 1e3)


CUDNN = {
    "h100-sxm": "NVIDIA H200",
    "h200": "NVIDIA H200",
    "b200": "NVIDIA GB200",
    "gb200-nvl72": "NVIDIA GB200",
    "b300": "NVIDIA GB300",
    "gb300-nvl72": "NVIDIA GB300",
}
"""GPU of cuDNN's table: of the same compute units."""


def attention(folder: Path, hardware: Hardware, system: str) -> None:
    """Fused attention of training, in bf16 and in fp8.

    Of cuDNN, which Transformer Engine runs, forward and backward. It has no table of A100, whose
    constants are of TensorRT-LLM's attention of causal prompts, and whose backward is not fitted.
    """
    measured = CUDNN.get(hardware.name)
    if measured is None:
        table = read(folder / "context_attention_perf_aiconfigurator.csv.gz", system)
        block("attention", _attention(table, hardware, "bf16"), 0)
        return
    paths = sorted((folder / "sdpa_benchmark_training").rglob("*.csv"))
    rows = [row for path in paths for row in cudnn_rows(path) if row["gpu_name"] == measured]
    for dtype, theirs, name in (("bf16", "bfloat16", "attention"), ("fp8", "fp8", "fp8")):
        some = [row for row in rows if row["data_type"] == theirs]
        block(name, _cudnn_attention(some, hardware, dtype), 2 * (dtype == "fp8"))


def cudnn_rows(path: Path) -> Rows:
    """Rows of a table of cuDNN: `backward`, `ms` and sizes; deterministic backward is left out."""
    found: Rows = []
    for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines()):
        if row["success"] != "True" or row["backend"] != "cudnn":
            continue
        if "time_ms" in row:
            times = {row["profile_pass"]: row["time_ms"]}
            if row["profile_pass"] == "bwd" and row["deterministic_bwd"] == "True":
                continue
        else:
            times = {phase: row[f"{phase}_time_ms"] for phase in ("fwd", "bwd")}
        shape = {
            "batch": row["batch_size"], "heads": row["num_q_heads"],
            "kv_heads": row["num_kv_heads"], "q": row["q_seqlen"], "k": row["kv_seqlen"],
            "d": row["head_dim_qk"], "v": row["head_dim_vo"],
            "causal": str(int(row["attn_mask"] != "no_mask")),
            "window": str(int(float(row["sliding_window_size"] or 0))),
        }  # fmt: skip
        found += [row | shape | {"phase": phase, "ms": ms} for phase, ms in times.items()]
    return found


SDPA = ("batch", "heads", "kv_heads", "q", "k", "d", "v", "causal", "window")


def sdpa_seconds(rows: Rows, dtype: str, on: Hardware) -> np.ndarray:
    """Seconds of attention of training."""
    sizes = np.array([[float(row[name]) for name in SDPA] for row in rows]).reshape(-1, len(SDPA))
    backward = np.array([row["phase"] == "bwd" for row in rows])
    seconds = np.zeros(len(rows))
    for is_backward in (False, True):
        some = np.flatnonzero(backward == is_backward)
        extents = dict(zip(SDPA, sizes[some].T, strict=True))
        work = sdpa_kernels(extents, dtype, backward=is_backward)
        seconds[some] = training_attention_seconds(work, on, backward=is_backward)
    return seconds


def sdpa_held_out(row: dict[str, str]) -> bool:
    """Whether a row of cuDNN is for testing."""
    return held_out(row["model_name"], row["q"], row["causal"])


def print_cudnn(folder: Path) -> None:
    """Print the held-out rows of cuDNN, in the columns of kernels.csv."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    gpus = {
        measured: name
        for name, measured in CUDNN.items()
        if name not in ("h100-sxm", "b200", "b300")
    }
    url = "https://github.com/NVIDIA/cudnn-frontend/tree/3929da2e/benchmark/sdpa_benchmark_training"
    for path in sorted((folder / "sdpa_benchmark_training").rglob("*.csv")):
        for row in cudnn_rows(path):
            dtype = {"bfloat16": "bf16", "fp8": "fp8"}.get(row["data_type"])
            if dtype and row["gpu_name"] in gpus and sdpa_held_out(row):
                kernel = "attention" if row["phase"] == "fwd" else "attention_backward"
                shape = " ".join(f"{name}={row[name]}" for name in SDPA)
                head = "cuDNN, attention of training", url, gpus[row["gpu_name"]], kernel, dtype
                writer.writerow([*head, shape, f"{float(row['ms']) * 1e3:.0f}"])


def _cudnn_attention(rows: Rows, hardware: Hardware, dtype: str) -> dict[str, float]:
    """The constants of cuDNN's attention; those of heads of 64 to 256."""

    def predict(constants: Constants, some: Rows) -> np.ndarray:
        launch = {"launch_us": hardware.kernel_launch_us, "fp8": None}
        changed = hardware.attention.model_copy(update={**constants, **launch})
        return sdpa_seconds(some, dtype, hardware.model_copy(update={"attention": changed}))

    keep = [r for r in rows if not sdpa_held_out(r)]
    start = {"fraction": 0.8, "softmax_ps": 15.0, "tile_us": 2.0, "traffic_factor": 1.0,
             "bwd_ratio": 0.8}  # fmt: skip
    found = fit(start, predict, keep, column(keep, "ms") / 1e3, {"fraction": (0, 1)})
    for phase in ("fwd", "bwd"):
        test = [r for r in rows if sdpa_held_out(r) and r["phase"] == phase]
        told(f"attention {dtype}, {phase}", predict(found, test), column(test, "ms") / 1e3)
    return {"launch_us": hardware.kernel_launch_us, **found}


def _attention(table: Rows, hardware: Hardware, dtype: str) -> dict[str, float]:
    """The constants of flash attention on operands in `dtype`."""
    theirs, size = DTYPES[dtype]
    rows = [
        r
        for r in table
        if r["attn_dtype"] == r["kv_cache_dtype"] == theirs
        and (r["window_size"], r["step"], r["kernel_source"]) == ("0", "0", "torch_flow")
        and r["head_dim"] in ("64", "128")
        and int(r["isl"]) >= 128
        and int(r["num_key_value_heads"]) > 0
    ]
    names = ("batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim")

    def predict(constants: Constants, some: Rows) -> np.ndarray:
        b, q, h, kv, d = (column(some, name) for name in names)
        tiles = np.ceil(q / 128) * b * h
        changed = hardware.attention.model_copy(update={**constants, "fp8": None})
        points = b * h * q * q / 2 + tiles * 128**2 / 2
        work = (tiles, q, points, 4 * d, 2 * size * b * q * (h + kv) * d)
        fitted = hardware.model_copy(update={"attention": changed})
        return attention_seconds(*work, dtype=dtype, hardware=fitted)

    keep = sample([r for r in rows if not held_out(*(r[n] for n in names))], 3000)
    start = hardware.attention.model_dump(exclude={"bwd_ratio", "fp8"})
    found = fit(start, predict, keep, column(keep, "latency") / 1e3, {"fraction": (0, 1)})
    test = [r for r in rows if held_out(*(r[n] for n in names))]
    told(f"attention {dtype}", predict(found, test), column(test, "latency") / 1e3)
    long = [r for r in test if int(r["isl"]) >= 4096]
    told(f"attention {dtype}, 4096 and more", predict(found, long), column(long, "latency") / 1e3)
    return found | {"bwd_ratio": hardware.attention.bwd_ratio}


SIZES = ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size",
         "moe_ep_size")  # fmt: skip
GROUPED = {"bf16": "bfloat16", "fp8": "fp8", "fp4": "nvfp4"}


def experts(folder: Path, hardware: Hardware, system: str) -> None:
    """An MLP of evenly loaded experts: first what is around the products, then these.

    Grouped products reach the share of the peak that other products reach. With a share of their
    own the fit of bf16 is closer, at 0.95 to 1 of the peak: these kernels run for a moment, on
    weights that the benchmark does not set.
    """
    table = [
        r
        for r in read(folder / "moe_perf_aiconfigurator.csv.gz", system)
        if r["kernel_source"] in ("moe_torch_flow_cutlass", "moe_torch_flow")
        and r["distribution"] == "balanced"
    ]
    rows = [r for r in table if r["moe_dtype"] == "bfloat16" and int(r["num_tokens"]) >= 1024]

    def around(constants: Constants, some: Rows) -> np.ndarray:
        changed = hardware.model_copy(update={"experts": ExpertFit(**constants)})
        sizes = (column(some, name) for name in SIZES)
        return experts_seconds(ExpertMLP(*sizes), dtype="bf16", on=changed)

    keep = sample([r for r in rows if not held_out(*(r[n] for n in SIZES))], 2500)
    start = {"routing_us": 20.0, "routing_ns": 0.1, "copy_fraction": 0.6}
    found = fit(start, around, keep, column(keep, "latency") / 1e3, {"copy_fraction": (0, 1)})
    block("experts", found, 0)
    test = [r for r in rows if held_out(*(r[n] for n in SIZES))]
    told("experts", around(found, test), column(test, "latency") / 1e3)
    grouped(table, hardware.model_copy(update={"experts": ExpertFit(**found)}))


def grouped(table: Rows, hardware: Hardware) -> None:
    """Grouped products of all numbers of rows, per precision."""
    print("  gemm:")
    for dtype, theirs in GROUPED.items():
        rows = [r for r in table if r["moe_dtype"] == theirs]
        if not rows:
            continue
        base = hardware.products(dtype)

        def predict(
            constants: Constants, some: Rows, dtype: str = dtype, base: GemmFit = base
        ) -> np.ndarray:
            of = {dtype: base.model_copy(update=dict(constants))}
            around = hardware.experts and hardware.experts.model_copy(update={"gemm": of})
            # A rank with one expert has no grouped product; in this benchmark it runs the same.
            on = hardware.model_copy(update={"experts": around, "gemm": {**hardware.gemm, **of}})
            sizes = (column(some, name) for name in SIZES)
            return experts_seconds(ExpertMLP(*sizes), dtype=dtype, on=on)

        keep = [r for r in rows if not held_out(*(r[n] for n in SIZES))]
        many = [r for r in keep if _rows_of(r) >= 64]
        few = sample(many, 900) + sample(keep, 900)
        start = {"launch_us": 3.0, "tile_us": 2.0, "memory_fraction": 0.9, "quantization": 0.5}
        if dtype not in hardware.gemm:
            start |= {"fraction": 0.5, "tile_factor": 0.3}
        most = {"memory_fraction": (0.0, 1.0), "quantization": (0.0, 1.0), "fraction": (0.0, 1.0)}
        found = fit(start, predict, few, column(few, "latency") / 1e3, most)
        block(dtype, dict(base) | found, 4)
        test = [r for r in rows if held_out(*(r[n] for n in SIZES))]
        for low, high in ((0, 8), (8, 128), (128, 1e9)):
            some = [r for r in test if low <= _rows_of(r) < high]
            label = f"experts {dtype}, {low} to {high:g} rows each"
            told(label, predict(found, some), column(some, "latency") / 1e3)


def _rows_of(row: dict[str, str]) -> float:
    """Rows of an expert."""
    return float(row["num_tokens"]) * float(row["topk"]) / float(row["num_experts"])


OPS = {"all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
       "alltoall": "all_to_all"}  # fmt: skip


def collectives(folder: Path, hardware: Hardware, system: str) -> None:
    """NCCL within a node."""
    rows = read(folder / "nccl_aiconfigurator.csv", system)
    latest = max(r["nccl_version_dir"] for r in rows if r["nccl_version_dir"].startswith("2."))
    rows = [r for r in rows if r["nccl_version_dir"] == latest and r["dtype"] == "half"]
    keys = [
        (OPS[r["op"]], int(r["num_gpus"]), 2 * int(r["message_elements_or_bytes"])) for r in rows
    ]

    def predict(constants: Constants, some: list[Any]) -> np.ndarray:
        link = hardware.scale_up.model_copy(update=dict(constants))
        machine = Machine.of(
            hardware.model_copy(update={"scale_up": link}), gpus=hardware.scale_up.gpus
        )
        result: list[float] = []
        for op, gpus, size in some:
            local = size // gpus if op == "all_gather" else size
            group = Placement(gpus, (gpus,), (1,))
            result.append(collective_seconds(op, local, group, machine))
        return np.array(result)

    y = column(rows, "latency_ms") / 1e3
    test = np.array([held_out(*k) for k in keys])
    # The largest messages of the tables are too small to show the asymptotes (bandwidth_fraction,
    # in_network_fraction): these are from nccl-tests.
    names = ["medium_fraction", "low_latency_fraction", "latency_us", "hop_us", "medium_us"]
    if hardware.scale_up.bandwidth_gb_s < 100:  # PCIe, whose asymptote 0.5 GB shows
        names.append("bandwidth_fraction")
    names += ["bulk_us", *(["in_network_us"] if hardware.scale_up.in_network_reduction else [])]
    start = {n: float(getattr(hardware.scale_up, n)) for n in names}
    train = [k for k, out in zip(keys, test, strict=True) if not out]
    found = fit(start, predict, train, y[~test], {n: (0, 1) for n in names if "fraction" in n})
    block(f"scale_up  # NCCL {latest}", found, 0)
    rest = [k for k, out in zip(keys, test, strict=True) if out]
    told("collectives", predict(found, rest), y[test])


def main() -> None:
    """All fits of the systems asked for."""
    folder, wanted = Path(sys.argv[1]), sys.argv[2:] or list(SYSTEMS)
    if wanted == ["rows"]:
        print_cudnn(folder)
        return
    for name in wanted:
        print(f"## {name}", flush=True)
        hardware = resolve(name).with_grouped_experts()
        for part in (gemm, attention, experts, collectives):
            try:
                part(folder, hardware, SYSTEMS[name])
            except ValueError as error:
                print(f"# {part.__name__}: no rows ({error})")


if __name__ == "__main__":
    main()
