"""Kernels of public traces: src/stagewright/data/measured/recorded-kernels.csv.

    python benchmarks/recorded_kernels.py FOLDER

FOLDER has the traces of `TRACES`, with `--` for each `/` of their names. A row is the median of
equal kernels: products by m, n and k, attention by its extents, kernels that move bytes by these.
Left out are kernels that were launched before the profiler began, those of less than `SHORTEST`
bytes, whose time is a launch, ops whose bytes their inputs do not tell, and products with vectors.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections import defaultdict
from pathlib import Path

from stagewright.recorded.read import read_traces

ROOT = Path(__file__).parent.parent
OUT = ROOT / "src" / "stagewright" / "data" / "measured" / "recorded-kernels.csv"
COLUMNS = ("source", "url", "hardware", "kernel", "dtype", "shape", "measured_us", "count")

REPOSITORY = "https://github.com/AMD-AGI/TraceLens/blob/171dd747/tests/traces"
TRACES = {
    "h100/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz": "h100-sxm",
    "h100/gaunernst_bert-small-uncased__1016001.json.gz": "h100-sxm",
    "mi300/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz": "mi300x",
    "sglang_prefilldecode/sglang_Qwen3-8B_prefilldecode.json.gz": "mi300x",
}
"""Traces of TraceLens (MIT), and the hardware of each."""
SOURCES = {
    "gemm": "TraceLens, matrix products",
    "attention": "TraceLens, attention",
    "moved": "TraceLens, element-wise kernels of PyTorch",
}
MOVES = ("add", "mul", "sub", "div", "neg", "pow", "silu", "gelu", "copy_", "cat", "mean",
         "native_layer_norm", "rsqrt")  # fmt: skip
"""Ops of PyTorch whose inputs tell the bytes that they move."""
SHORTEST = 1_000_000
"""Bytes."""


def rows(path: Path, url: str, hardware: str) -> list[tuple[str, ...]]:
    """The rows of one trace."""
    (trace,) = read_traces([path])
    times: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for kernel in trace.kernels:
        op = kernel.op
        if op is None:
            continue
        if kernel.shape is not None and kernel.shape.kernel in ("gemm", "attention"):
            sizes = kernel.shape.sizes()
            if kernel.shape.kernel == "gemm":
                if sizes.pop("batch") != 1 or min(sizes.values()) == 1:
                    continue
            else:
                del sizes["v"], sizes["window"]
            shape = " ".join(f"{name}={size}" for name, size in sizes.items())
            times[kernel.shape.kernel, kernel.dtype, shape].append(kernel.duration)
        elif kernel.bytes >= SHORTEST and op.name in {f"aten::{name}" for name in MOVES}:
            # One op may be several kernels; of those that are here, each is one.
            key = "moved", kernel.dtype, f"bytes={kernel.bytes}"
            times[key].append(kernel.duration)
    return [
        (
            SOURCES[kernel], url, hardware, kernel, dtype, shape,
            f"{statistics.median(ns) / 1000:.2f}", str(len(ns)),
        )
        for (kernel, dtype, shape), ns in times.items()
    ]  # fmt: skip


def main() -> None:
    """Write the rows of all traces."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    found: list[tuple[str, ...]] = []
    for name, hardware in TRACES.items():
        (path,) = folder.rglob(f"*{name.replace('/', '--')}")
        found += rows(path, f"{REPOSITORY}/{name}", hardware)
    with OUT.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(sorted(found))


if __name__ == "__main__":
    main()
