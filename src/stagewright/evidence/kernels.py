"""Predictions beside measured kernels and collectives: rows of `data/measured/kernels.csv`.

Rows of aiconfigurator are held out: no constant was fitted to them. `benchmarks/fit_kernels.py`
says which rows of the published tables they are. The largest messages of nccl-tests set bandwidths.
Rows of `recorded-kernels.csv` are medians of kernels in traces that others published
(`benchmarks/recorded_kernels.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Float
from stagewright.errors import UserError
from stagewright.evidence.rows import Row, carried_cells, of_cells
from stagewright.model.layers import Reach
from stagewright.run.lengths import COLUMNS, Cache, attention_sums
from stagewright.run.sections.inference import Group
from stagewright.time.collectives import collective_seconds, direct_all_reduce
from stagewright.time.hardware import Hardware, resolve
from stagewright.time.network import Machine, placements
from stagewright.time.roofline import (
    Kernels,
    cached_attention_seconds,
    copies_seconds,
    gemm_seconds,
    memory_seconds,
    routing_seconds,
    sparse_attention_seconds,
    training_attention_seconds,
)

RECORDED = "recorded-kernels.csv"
ITEM = {"bf16": 2, "fp8": 1, "fp4": 0.5625}
"""Bytes of a value, with its share of a scale of 16 values."""
MXFP4 = 4.25 / 8
"""Bytes of a weight in mxfp4: four bits, and eight for the scale of 32."""


@dataclass(frozen=True, kw_only=True)
class KernelRow(Row):
    """The measured time of a kernel or a collective, in microseconds."""

    kernel: str
    dtype: str
    shape: str
    """Sizes, such as `m=8192 n=4096 k=512`; `engine`: the engine whose kernel it is."""
    count: int = 1
    """Kernels of which `measured` is the median."""

    @property
    def experiment(self) -> tuple[str, ...]:
        """The kernel and its sizes on a GPU."""
        return self.hardware, self.kernel, self.dtype, self.shape

    def simulate(self) -> float:
        """Microseconds of the kernel."""
        words = dict(word.split("=") for word in self.shape.split())
        on, engine = resolve(self.hardware).with_grouped_experts(), words.pop("engine", None)
        if engine:
            on = on.for_inference(engine=engine, cache=self.dtype)
        sizes = {name: int(size) for name, size in words.items()}
        return _seconds(self.kernel, self.dtype, sizes, on) * 1e6

    def predict(self, outcome: float) -> float:
        """The outcome itself."""
        return outcome


def rows(source: str | None = None) -> list[KernelRow]:
    """The rows of the package, of sources whose name contains `source`."""
    return [
        KernelRow(
            **of_cells(
                cells,
                row=" ".join(cells[name] for name in ("hardware", "kernel", "dtype", "shape")),
                quantity="us",
                measured=float(cells["measured_us"]),
                reason="one of many; the model is for medians",
            ),
            kernel=cells["kernel"],
            dtype=cells["dtype"],
            shape=cells["shape"],
            count=int(cells.get("count", 1)),
        )
        for name in ("kernels.csv", RECORDED)
        for cells in carried_cells(name, source)
    ]


def _seconds(kernel: str, dtype: str, size: dict[str, int], on: Hardware) -> float:
    if kernel == "gemm":
        return _gemm(size, dtype, on)
    if kernel in ("attention", "attention_backward"):
        return _attention(size, dtype, on, backward=kernel == "attention_backward")
    if kernel == "moved":
        traffic, work = _arrays(size["bytes"], 0)
        return float(memory_seconds(traffic, work, on)[0])
    if kernel in ("experts", "fused_experts"):
        return _experts(size, dtype, on, fused=kernel == "fused_experts")
    if kernel == "cached_attention":
        return _cached_attention(size, dtype, on)
    if kernel == "engine_attention":
        return _engine_attention(size, dtype, on)
    if kernel == "sparse_attention":
        assert on.inference is not None
        fit, width = on.inference.sparse_attention[dtype], size["d"] + size["v"]
        sizes = _arrays(size["tokens"], size["heads"], size["chosen"], 2 * width)
        return float(sparse_attention_seconds(*sizes, fit=fit, hardware=on)[0])
    if kernel == "engine_all_reduce":
        return _engine_all_reduce(size, on)
    if "gpus" in size:
        local = size["bytes"] // size["gpus"] if kernel == "all_gather" else size["bytes"]
        machine = _machine(on.name, size["gpus"])
        ranks = np.arange(size["gpus"], dtype=np.int64).reshape(1, -1)
        return collective_seconds(kernel, local, placements(machine, ranks)[0], machine)
    raise UserError(f"kernels.csv: unknown kernel {kernel!r}")


@cache
def _machine(name: str, gpus: int) -> Machine:
    # A benchmark of fewer GPUs runs on part of a node, whose links are all there.
    hardware = resolve(name)
    return Machine.of(hardware, gpus=max(gpus, hardware.gpus_per_node))


def _arrays(*values: float) -> list[np.ndarray]:
    """Each value as an array of one element."""
    return [np.array([float(v)]) for v in values]


def _gemm(size: dict[str, int], dtype: str, on: Hardware) -> float:
    m, n, k = size["m"], size["n"], size["k"]
    if size.get("blocks"):
        on = on.for_inference(blocks=True)
    (traffic,) = _arrays(ITEM[dtype] * (m * k + k * n) + 2 * m * n)
    seconds = gemm_seconds(*_arrays(1, m, n, k), traffic=traffic, dtype=dtype, hardware=on)
    # Some rows include the kernel that quantizes the activations.
    if size.get("cast", dtype == "fp8"):
        moved, work = _arrays(3 * m * k, m * k)
        seconds = seconds + memory_seconds(moved, work, on)
    return float(seconds[0])


def _attention(size: dict[str, int], dtype: str, on: Hardware, *, backward: bool) -> float:
    sizes = {"causal": 1, "window": 0, "v": size["d"], **size}
    extents = {name: np.array([float(extent)]) for name, extent in sizes.items()}
    kernels = sdpa_kernels(extents, dtype, backward=backward)
    return float(training_attention_seconds(kernels, on, backward=backward)[0])


def sdpa_kernels(extents: Mapping[str, Float], dtype: str, *, backward: bool) -> Kernels:
    """Kernels of fused attention of training, by the extents that a program has."""
    b, h, kv, q, k, d, v, causal, window = (
        extents[x] for x in ("batch", "heads", "kv_heads", "q", "k", "d", "v", "causal", "window")
    )
    pairs = np.where(window > 0, window * (q - window / 2), np.where(causal > 0, q * k / 2, q * k))
    flops = b * h * pairs * (2 * (3 * d + 2 * v) if backward else 2 * (d + v))
    moved = (2 if backward else 1) * ITEM[dtype] * b * (q * h + k * kv) * (d + v)
    return Kernels(extents, flops, moved, dtype, np.full(len(b), backward))


def _cached_attention(size: dict[str, int], cache: str, on: Hardware) -> float:
    b, k, h, kv, d, v = (size[x] for x in ("batch", "k", "heads", "kv_heads", "d", "v"))
    # Latents are keys and values at once.
    stored = d if kv == 1 and v < d else d + v
    moved = b * k * kv * stored * ITEM[cache] + ITEM["bf16"] * b * h * (d + v)
    work = _arrays(b * h, h / kv, b * h * k, b * k * kv, 2 * (d + v), moved)
    # Only attention to latents computes in fp8; other queries are bf16, as these rows' are.
    latent = stored == d
    dtype = cache if latent else "bf16"
    return float(cached_attention_seconds(*work, dtype=dtype, hardware=on, latent=latent)[0])


def _engine_attention(size: dict[str, int], cache: str, on: Hardware) -> float:
    """Seconds of attention of `q` new tokens of each request to `k` tokens, or a window of them."""
    b, q, k, h, kv, d = (size[x] for x in ("batch", "q", "k", "heads", "kv_heads", "d"))
    window = size.get("window", 0)
    (sums,) = attention_sums([Group(1, k - q, q)], Cache(0), Reach(window=window)).tolist()
    pairs, keys = (sums[COLUMNS.index(name)] for name in ("pairs", "keys"))
    moved = b * (keys * kv * 2 * d * ITEM[cache] + 2 * ITEM["bf16"] * q * h * d)
    work = _arrays(b * q * h, h / kv, b * h * pairs, b * keys * kv, 4 * d, moved)
    return float(cached_attention_seconds(*work, dtype="bf16", hardware=on, window=window)[0])


def _engine_all_reduce(size: dict[str, int], on: Hardware) -> float:
    assert on.inference is not None
    assert on.inference.all_reduce is not None
    links = on.scale_up.bandwidth_gb_s
    return float(direct_all_reduce(size["bytes"], size["gpus"], links, on.inference.all_reduce))


def _experts(size: dict[str, int], dtype: str, on: Hardware, *, fused: bool) -> float:
    sizes = (size.get(x, 1) for x in ("tokens", "m", "f", "top_k", "experts", "etp", "ep"))
    seconds, weights = fused_experts_seconds if fused else experts_seconds, None
    if dtype == "mxfp4":  # of weights alone
        on, dtype, weights = on.for_inference(weights=dtype), "bf16", MXFP4
    return float(seconds(ExpertMLP(*_arrays(*sizes)), dtype=dtype, on=on, weights=weights)[0])


class ExpertMLP(NamedTuple):
    """An MLP of evenly loaded experts over etp x ep ranks, all of which have all tokens."""

    tokens: Float
    hidden_size: Float
    ffn_hidden_size: Float
    top_k: Float
    experts: Float
    etp: Float
    ep: Float


def fused_experts_seconds(
    mlp: ExpertMLP, *, dtype: str, on: Hardware, weights: float | None = None
) -> Float:
    """Seconds of AITER's two kernels of experts, chosen at random by each token.

    The kernels copy rows and compute the activation within: without launches of their own.
    """
    experts = on.experts and on.experts.model_copy(update={"routing_us": 0, "routing_ns": 0})
    within = on.model_copy(update={"kernel_launch_us": 0, "experts": experts})
    busy = mlp.experts * (1 - (1 - mlp.top_k / mlp.experts) ** mlp.tokens)
    return experts_seconds(mlp, dtype=dtype, on=within, busy=busy, weights=weights)


def experts_seconds(
    mlp: ExpertMLP,
    *,
    dtype: str,
    on: Hardware,
    busy: Float | None = None,
    weights: float | None = None,
) -> Float:
    """Seconds of the experts' MLP on one rank.

    Tokens are sorted by expert and copied; gate and up are one product; then come the activation,
    the down product, and the sums of each token's copies. Inputs of products are in `dtype`, their
    results in bf16; the kernels before products quantize. `busy`: experts of the rank that have
    tokens; None: as many as can be. `weights`: bytes of a weight; None: those of `dtype`.
    """
    width = ITEM[dtype]
    stored = width if weights is None else weights
    tokens, h, top_k = mlp.tokens, mlp.hidden_size, mlp.top_k
    copies, f = tokens * top_k / mlp.ep, mlp.ffn_hidden_size / mlp.etp
    if busy is None:
        busy = np.minimum(mlp.experts / mlp.ep, copies)
    rows = np.maximum(copies / busy, 1)  # of each busy expert
    up = width * copies * h + stored * busy * 2 * f * h + 2 * copies * 2 * f
    down = width * copies * f + stored * busy * f * h + 2 * copies * h
    return (
        routing_seconds(tokens * top_k, on)
        + copies_seconds((2 + width) * copies * h, copies, on)
        + gemm_seconds(busy, rows, 2 * f, h, traffic=up, dtype=dtype, hardware=on)
        + memory_seconds((4 + width) * copies * f, copies, on)
        + gemm_seconds(busy, rows, h, f, traffic=down, dtype=dtype, hardware=on)
        + copies_seconds(2 * (copies + tokens) * h, copies, on)
    )
