"""Fit the constants of kernels that serve (`inference` of a hardware file); print held-out errors.

    python benchmarks/fit_inference.py CHECKOUT [h100-sxm ... | rows]

CHECKOUT is a copy of NVIDIA's aiconfigurator (github.com/ai-dynamo/aiconfigurator@095f58a5,
Apache-2.0), whose tables of measured kernels are parquet files. The tables of vLLM, SGLang and
TensorRT-LLM count alike. Of the rows of a table, 70% fit and 30% are held out, by a hash of the
shape. Errors: |predicted / measured - 1|. Needs scipy and pyarrow. `rows` prints a sample of the
held-out rows of engines' attention, in the columns of kernels.csv.

Rows of products in few bits include the kernel that quantizes their input, where the engine runs
one; those of TensorRT-LLM in fp8 also the search for its scale, which checkpoints give. Tables of
their own have the times of both kernels (`quantize`), which are taken off, and so is a kernel that
casts to fp4, as long as it is predicted: TensorRT-LLM quantizes within the kernel before. Of
experts in nvfp4 there are kernels for few tokens and others; engines run the former.
"""

from __future__ import annotations

import csv
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as parquet

from fit_kernels import Constants, Rows, block, column, fit, held_out, sample, told
from stagewright.evidence import kernels
from stagewright.evidence.kernels import ITEM, MXFP4, ExpertMLP, experts_seconds
from stagewright.time.collectives import direct_all_reduce
from stagewright.time.hardware import (
    CachedAttentionFit,
    DirectAllReduce,
    Hardware,
    InferenceFit,
    InferenceGemmFit,
    SparseAttentionFit,
    resolve,
)
from stagewright.time.roofline import (
    ROWS,
    cached_attention_seconds,
    gemm_seconds,
    memory_seconds,
    sparse_attention_seconds,
)

SYSTEMS = {
    "a100-sxm-80gb": "a100_sxm",
    "h100-sxm": "h100_sxm",
    "h200": "h200_sxm",
    "b200": "b200_sxm",
    "b300": "b300_sxm",
    "gb200-nvl72": "gb200",
    "gb300-nvl72": "gb300",
}
VERSIONS = {
    "trtllm": ("1.3.0rc20", "1.0.0"),
    "sglang": ("0.5.14", "0.5.10"),
    "vllm": ("0.19.0", "0.14.0"),
}
"""Releases whose tables are read: of TensorRT-LLM and SGLang the newest with tables of all kernels,
of which A100 has none. Products of vLLM 0.24.0 in fp8 with scales of blocks take ten times as long
on B200 as those of 0.19.0."""
DTYPES = {"bf16": "bfloat16", "fp8": "fp8", "fp8_block": "fp8_block", "fp4": "nvfp4"}
SIZES = ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size",
         "moe_ep_size")  # fmt: skip
SLOW = {"moe_torch_flow_cutlass", "moe_torch_flow_nongated"}
"""Kernels of experts in nvfp4 that no engine runs for few tokens."""
TRITON = "vllm_fused_moe"
"""vLLM's kernel of experts in Triton; on Blackwell vLLM runs those of FlashInfer in fp8."""
LEAST, FEW, MOST = 64, 512, 16384
"""Rows of a product: of decode steps of few and of many requests, and of prompts at most."""


def read(checkout: Path, system: str, op: str, name: str) -> Rows:
    """The rows of all engines, latencies in ms."""
    folder = checkout / "aic-core/src/aiconfigurator_core/systems/data" / system / op
    found: Rows = []
    for engine, releases in VERSIONS.items():
        paths = [folder / engine / release / f"{name}_perf.parquet" for release in releases]
        for path in [path for path in paths if path.exists()][:1]:
            found += [row | {"engine": engine} for row in parquet.read_table(path).to_pylist()]
    return found


def even(rows: Rows, size: str, most: int) -> Rows:
    """A sample in which engines count alike, and few rows of a product as much as many and more."""
    chosen: Rows = []
    for engine in VERSIONS:
        mine = [r for r in rows if r["engine"] == engine and float(r[size]) <= MOST]
        few = [r for r in mine if float(r[size]) <= FEW]
        least = [r for r in few if float(r[size]) <= LEAST]
        many = [r for r in mine if float(r[size]) > FEW]
        chosen += sample(least, most) + sample(few, most) + sample(many, most)
    return chosen


def with_inference(on: Hardware, **changes: Any) -> Hardware:
    """The hardware with other constants of inference, as steps of inference see it."""
    of = on.inference or InferenceFit(cached_attention=START_ATTENTION)
    changed = on.model_copy(update={"inference": of.model_copy(update=changes)})
    return changed.for_inference()


START = {"launch_us": 10.0, "tile_us": 1.0, "memory_fraction": 0.9, "sharpness": 2.0}
START_ATTENTION = CachedAttentionFit(**START, fraction=0.7)
STARTS = (
    {"tile_us": 1.0, "launch_us": 5.0, "memory_fraction": 0.85, "sharpness": 2.0},
    {"tile_us": 0.2, "launch_us": 2.5, "memory_fraction": 0.6, "sharpness": 4.0},
)
MOST_OF = {"memory_fraction": (0.0, 1.0), "sharpness": (1.4, 16.0), "fraction": (0.0, 1.0)}
"""Below a sharpness of 1.4 what waits for memory would depend on the clock."""


def best(
    predict: Callable[[Constants, Rows], np.ndarray], rows: Rows, more: Constants | None = None
) -> Constants:
    """The better fit of those from several starts, with `more` constants."""
    y = column(rows, "latency") / 1e3
    found = [fit({**start, **(more or {})}, predict, rows, y, MOST_OF) for start in STARTS]
    return min(found, key=lambda c: float(np.abs(np.log(predict(c, rows) / y)).mean()))


def tested(label: str, size: str, rows: Rows, predict: Callable[[Rows], np.ndarray]) -> None:
    """Print the errors of held-out rows by engine, of few rows and of many."""
    for engine in VERSIONS:
        for low, high in ((1, LEAST), (LEAST + 1, FEW), (FEW + 1, MOST)):
            some = [r for r in rows if r["engine"] == engine and low <= float(r[size]) <= high]
            if some:
                told(f"{label}, {engine}, {low} to {high}", predict(some),
                     column(some, "latency") / 1e3)  # fmt: skip


def products(on: Hardware, dtype: str) -> Callable[[Constants, Rows], np.ndarray]:
    """Seconds of the products of some rows with other constants."""

    def predict(constants: Constants, some: Rows) -> np.ndarray:
        changed = with_inference(on, gemm={dtype: InferenceGemmFit(**constants)})
        m, n, k = (column(some, c) for c in "mnk")
        traffic = ITEM[dtype] * (m * k + k * n) + 2 * m * n
        return gemm_seconds(
            np.ones(len(m)), m, n, k, traffic=traffic, dtype=dtype, hardware=changed
        )

    return predict


def gemm(checkout: Path, on: Hardware, system: str) -> None:
    """Products, per precision; those of bf16 have the constants of training."""
    table = [r for r in read(checkout, system, "gemm", "gemm") if min(r["n"], r["k"]) >= 256]
    print("  gemm:")
    for key, theirs in DTYPES.items():
        rows = [r for r in table if r["gemm_dtype"] == theirs and r["n"] * r["k"] < 2e8]
        if key == "fp8":
            rows = [r for r in rows if r["engine"] != "trtllm"]
        if not rows or key == "bf16":
            continue
        dtype = key.removesuffix("_block")

        predict = products(on, dtype)
        keep = even([r for r in rows if not held_out(r["m"], r["n"], r["k"])], "m", 300)
        found = best(predict, keep)
        block(key, found, 4)
        test = [r for r in rows if held_out(r["m"], r["n"], r["k"])]
        tested(f"gemm {key}", "m", test, lambda some, found=found, p=predict: p(found, some))


def experts(checkout: Path, on: Hardware, system: str) -> None:
    """Grouped products of evenly loaded experts, with the copies around them."""
    table = [
        r
        for r in read(checkout, system, "moe", "moe")
        if r["distribution"] == "balanced" and r["kernel_source"] != "moe_torch_flow_nongated"
    ]
    print("  experts_gemm:")
    for key, theirs in DTYPES.items():
        rows = [r for r in table if r["moe_dtype"] == theirs]
        if key == "fp4":
            rows = [r for r in rows if r["kernel_source"] not in SLOW]
        if key == "fp8_block" and on.rate_of("fp4"):
            rows = [r for r in rows if r["kernel_source"] != TRITON]
        if not rows:
            continue
        dtype = key.removesuffix("_block")

        def predict(constants: Constants, some: Rows, dtype: str = dtype) -> np.ndarray:
            of = {dtype: InferenceGemmFit(**constants)}
            changed = with_inference(on, gemm=of, experts_gemm=of)
            sizes = (column(some, name) for name in SIZES)
            return experts_seconds(ExpertMLP(*sizes), dtype=dtype, on=changed)

        keep = even([r for r in rows if not held_out(*(r[n] for n in SIZES))], "num_tokens", 250)
        found = best(predict, keep, {"fraction": on.products(dtype, grouped=True).fraction})
        block(key, found, 4)
        test = [r for r in rows if held_out(*(r[n] for n in SIZES))]
        tested(f"experts {key}", "num_tokens", test,
               lambda some, found=found, p=predict: p(found, some))  # fmt: skip


MARLIN, WGMMA = ("vllm", "0.24.0", "marlin"), ("vllm", "0.24.0", "triton_oai")
TRTLLM, SGLANG = ("trtllm", "1.3.0rc20", ""), ("sglang", "0.5.14", "")


class FourBits(NamedTuple):
    """Kernels of experts in four bits."""

    label: str
    tables: Sequence[tuple[str, str, str]]
    """Engine, release, part of the kernel's name."""
    dtype: str
    """Of gpt-oss in the tables; empty: other models, in all data types."""
    fixed: Mapping[str, Any] = {}
    """Constants that are not fitted."""
    ranks: int = 8
    """Ranks at most that share the experts."""


FOUR_BITS = {
    "hopper": (
        FourBits("all engines, Triton", (WGMMA,), "w4a16_mxfp4"),
        FourBits("vllm, Marlin", (MARLIN,), "", {"least_rows": 16}),
        FourBits("trtllm", (TRTLLM,), "w4a16_mxfp4", ranks=2),
    ),
    "blackwell": (
        FourBits("all engines", (TRTLLM, SGLANG), "w4a8_mxfp4_mxfp8", {"product": "mxfp8"}),
    ),
}
"""By GPU. vLLM runs Marlin where VLLM_MXFP4_USE_MARLIN says so, as recipes of gpt-oss on Hopper do,
and where weights are int4. TensorRT-LLM's table for Hopper splits experts over ep alone, whose
ranks sort the tokens of all experts: a time that the kernels here lack. SGLang's table for Hopper
is left out: it has weights in bf16, by its times."""


def four_bits(checkout: Path, on: Hardware, system: str) -> None:
    """Grouped products of weights in mxfp4, with the copies around them."""
    data = checkout / "aic-core/src/aiconfigurator_core/systems/data" / system / "moe"
    print("  experts_gemm:")
    for of in FOUR_BITS["blackwell" if on.rate_of("fp4") else "hopper"]:
        gpt_oss = (of.dtype, 2880)
        rows = [
            r | {"engine": engine}
            for engine, release, kernel in of.tables
            for r in parquet.read_table(data / engine / release / "moe_perf.parquet").to_pylist()
            if r["distribution"] == "balanced"
            and r["moe_tp_size"] * r["moe_ep_size"] <= of.ranks
            and kernel in r["kernel_source"]
            and (not of.dtype or (r["moe_dtype"], r["hidden_size"]) == gpt_oss)
        ]

        def predict(constants: Constants, some: Rows, of: FourBits = of) -> np.ndarray:
            grouped = {"bf16": InferenceGemmFit(**constants, **of.fixed)}
            mlp = ExpertMLP(*(column(some, name) for name in SIZES))
            changed = with_inference(on, experts_gemm=grouped)
            return experts_seconds(mlp, dtype="bf16", on=changed, weights=MXFP4)

        keep = even([r for r in rows if not held_out(*(r[n] for n in SIZES))], "num_tokens", 150)
        found = best(predict, keep, {"fraction": 0.3})
        block(f"mxfp4 ({of.label})", {**found, **of.fixed}, 4)
        test = [r for r in rows if held_out(*(r[n] for n in SIZES))]
        tested(f"experts mxfp4 ({of.label})", "num_tokens", test,
               lambda some, found=found, p=predict: p(found, some))  # fmt: skip


BLACKWELL = {**VERSIONS, "vllm": ("0.24.0",)}
"""Releases of tables of attention on Blackwell, where vLLM 0.19.0 has none of windows."""
HEADS = ("batch_size", "num_heads", "num_key_value_heads", "head_dim", "isl", "step", "window")
PROMPT = 128
"""Tokens of a step of prompts at least; of fewer the time is that of launches."""


def attention_rows(checkout: Path, system: str, engine: str) -> Rows:
    """The rows of attention of prompts and of decode steps, over a cache in bf16 or fp8.

    Of the kernels of an engine those of most rows, which it runs by default. None of vLLM 0.19.0 on
    H200, whose table has prompts of 8,192 tokens at 2,400 TFLOP/s: it takes the constants of H100.
    """
    found: Rows = []
    if (system, engine) == ("h200_sxm", "vllm"):
        return found
    folder = checkout / "aic-core/src/aiconfigurator_core/systems/data" / system / "attention"
    releases = VERSIONS if system.startswith(("a", "h")) else BLACKWELL
    for phase in ("context", "generation"):
        paths = [
            folder / engine / release / f"{phase}_attention_perf.parquet"
            for release in releases[engine]
        ]
        table = [
            row
            | {"kv": int(row["num_key_value_heads"]) or int(row["num_heads"]), "phase": phase}
            | {"window": int(row.get("window_size") or 0), "engine": engine}
            for path in [path for path in paths if path.exists()][:1]
            for row in parquet.read_table(path).to_pylist()
        ]
        found += [
            row
            for row in default_kernel(table)
            if row["head_dim"] in (64, 128)
            and row["attn_dtype"] == "bfloat16"
            and (phase == "generation" or row["batch_size"] * row["isl"] >= PROMPT)
        ]
    return found


def attention_predicted(on: Hardware, constants: Constants, some: Rows) -> np.ndarray:
    """Seconds of attention over a cache with other constants."""
    b, h, kv, d = (column(some, n) for n in ("batch_size", "num_heads", "kv", "head_dim"))
    is_prompt = np.array([r["phase"] == "context" for r in some])
    new = np.where(is_prompt, column(some, "isl"), 1)
    cached = column(some, "step") + np.where(is_prompt, 0, column(some, "isl") - 1)
    window = column(some, "window")
    reach = np.where(window > 0, window, np.inf)
    rising = np.clip(reach - cached, 0, new)  # tokens that still see all before them
    seen = np.where(window > 0, (new - rising) * window, 0)
    pairs = rising * cached + rising * (rising + 1) / 2 + seen
    keys = np.minimum(cached, reach - 1) + new
    width = np.array([1.0 if r["kv_cache_dtype"] == "fp8" else 2.0 for r in some])
    moved = b * keys * kv * 2 * d * width + 2 * b * new * h * 2 * d
    work = (b * new * h, h / kv, b * h * pairs, b * keys * kv, 4 * d, moved)
    changed = with_inference(on, cached_attention=CachedAttentionFit(**constants))
    return cached_attention_seconds(*work, dtype="bf16", hardware=changed, window=window)


PHASES = (("generation", 600), ("context", 600))
"""Rows of decode steps and of prompts for a fit, and half as many with windows."""


OF_PROMPTS = {"fraction": 0.7, "softmax_ps": 20.0, "traffic_factor": 1.0}


def fit_attention(
    on: Hardware, rows: Rows, label: str, name: str, indent: int, of_prompts: Constants
) -> Constants:
    """Fit and print the constants of attention, and the errors of held-out rows.

    Without rows of prompts their constants stay those given.
    """
    has_prompts = any(r["phase"] == "context" for r in rows)

    def predict(constants: Constants, some: Rows) -> np.ndarray:
        return attention_predicted(on, {**of_prompts, **constants}, some)

    keep: Rows = []
    for engine in VERSIONS:
        for phase, most in PHASES:
            # More heads to a key than the tiles of decode have rows take other kernels.
            mine = [
                r
                for r in rows
                if (r["engine"], r["phase"]) == (engine, phase)
                and not held_out(*(r[n] for n in HEADS))
                and (phase == "context" or r["num_heads"] <= ROWS // 2 * r["kv"])
            ]
            keep += sample([r for r in mine if not r["window"]], most)
            keep += sample([r for r in mine if r["window"]], most // 2)
    start = {**START, **(OF_PROMPTS if has_prompts else {})}
    most_of = {"memory_fraction": (0.0, 0.98), "sharpness": (1.0, 16.0), "fraction": (0.0, 1.0)}
    found = {**of_prompts, **fit(start, predict, keep, column(keep, "latency") / 1e3, most_of)}
    block(name, found, indent)
    test = [r for r in rows if held_out(*(r[n] for n in HEADS))]
    for engine in VERSIONS:
        for phase, _ in PHASES:
            for windows in (False, True):
                some = [
                    r
                    for r in test
                    if (r["engine"], r["phase"], r["window"] > 0) == (engine, phase, windows)
                ]
                if some:
                    what = f"{label}, {engine}, {phase}{', windows' if windows else ''}"
                    told(what, predict(found, some), column(some, "latency") / 1e3)
    return found


def attention(checkout: Path, on: Hardware, system: str) -> None:
    """Attention over a cache of keys and values in bf16 or fp8, of all engines."""
    rows = [r for engine in VERSIONS for r in attention_rows(checkout, system, engine)]
    fit_attention(on, rows, "attention", "cached_attention", 2, OF_PROMPTS)


LATENT, TURNED = 512, 64
"""Width of DeepSeek's latents, and of the keys beside them."""


def latents(checkout: Path, on: Hardware, system: str) -> None:
    """Attention of a decode step to latents in bf16 or fp8, of TensorRT-LLM and SGLang.

    The kernels of vLLM were launched without a graph: those of one token take 150 us. SGLang's on
    GPUs before Blackwell first convert a cache in fp8. Held out are also the shapes of kernels.csv.
    """
    table = [r for r in read(checkout, system, "mla", "generation_mla") if r["engine"] != "vllm"]
    carried = {row.shape for row in kernels.rows("latents") if row.hardware == on.name}

    def is_held_out(row: dict[str, Any]) -> bool:
        b, h, keys = row["batch_size"], row["num_heads"], row["isl"] + row["step"]
        wide, narrow = LATENT + TURNED, LATENT
        shape = f"batch={b} k={keys} heads={h} kv_heads=1 d={wide} v={narrow}"
        return shape in carried or held_out(b, h, row["isl"], row["step"])

    print("  latent_attention:")
    for dtype, theirs in (("bf16", "bfloat16"), ("fp8", "fp8")):
        converts = dtype == "fp8" and on.rate_of("fp4") is None
        rows = [
            r
            for r in table
            if r["kv_cache_dtype"] == theirs and not (converts and r["engine"] == "sglang")
        ]
        if not rows:
            continue

        def predict(constants: Constants, some: Rows, dtype: str = dtype) -> np.ndarray:
            b, h = column(some, "batch_size"), column(some, "num_heads")
            keys = column(some, "isl") + column(some, "step")
            moved = ITEM[dtype] * b * keys * (LATENT + TURNED) + 2 * b * h * (2 * LATENT + TURNED)
            work = (b * h, h, b * h * keys, b * keys, 2 * (2 * LATENT + TURNED), moved)
            fits = {dtype: CachedAttentionFit(**constants)}
            changed = with_inference(on, latent_attention=fits)
            return cached_attention_seconds(*work, dtype=dtype, hardware=changed, latent=True)

        keep: Rows = []
        for engine in VERSIONS:
            mine = [r for r in rows if r["engine"] == engine]
            keep += sample([r for r in mine if not is_held_out(r)], 600)
        found = fit({**START, "fraction": 0.6}, predict, keep,
                    column(keep, "latency") / 1e3,
                    {"memory_fraction": (0.0, 1.0), "sharpness": (1.0, 16.0),
                     "fraction": (0.0, 1.0)})  # fmt: skip
        block(dtype, found, 4)
        for engine in VERSIONS:
            mine = [r for r in rows if r["engine"] == engine and is_held_out(r)]
            if mine:
                told(f"latents {dtype}, {engine}", predict(found, mine),
                     column(mine, "latency") / 1e3)  # fmt: skip


CHOSEN = 2048
"""Keys of a token that the indexer of GLM-5 chooses."""


def sparse(checkout: Path, on: Hardware, system: str) -> None:
    """Attention of prompts to chosen latents, SGLang's `flash_mla_sparse_fwd`, 64 heads.

    Products run at the peak: a share of it is not told from the time to gather keys, since all rows
    have the same heads and choose as many keys.
    """
    table = read(checkout, system, "sparse_attention", "glm5_dsa_attn_module")
    rows = [r for r in table if r["engine"] == "sglang" and r["latency"] > 0]
    if not rows:
        return
    tile = 128 if on.rate_of("fp4") else 64  # rows of a product of tensor cores

    def predict(constants: Constants, some: Rows) -> np.ndarray:
        tokens = column(some, "batch_size") * column(some, "isl")
        of = SparseAttentionFit(rows=tile, **constants)
        points = np.full(len(some), 2.0 * (2 * LATENT + TURNED))
        chosen = np.full(len(some), float(CHOSEN))
        return sparse_attention_seconds(
            tokens, column(some, "num_heads"), chosen, points, fit=of, hardware=on
        )

    key = ("batch_size", "isl", "step")
    keep = [r for r in rows if not held_out(*(r[n] for n in key))]
    start = {"launch_us": 8.0, "tile_us": 20.0}
    found = fit(start, predict, keep, column(keep, "latency") / 1e3, {})
    print("  sparse_attention:")
    block("bf16", {**found, "rows": tile}, 4)
    test = [r for r in rows if held_out(*(r[n] for n in key))]
    for few in (True, False):
        some = [r for r in test if (r["batch_size"] * r["isl"] <= 8 * on.compute_units) == few]
        label = f"sparse attention, {'few' if few else 'many'} tokens"
        told(label, predict(found, some), column(some, "latency") / 1e3)


def all_reduce(checkout: Path, on: Hardware, system: str) -> None:
    """All_reduce within a node, as a captured graph runs it: TensorRT-LLM's table says so."""
    table = [
        r
        for r in read(checkout, system, "comm", "custom_allreduce")
        if r["engine"] == "trtllm" and r["num_gpus"] <= on.scale_up.gpus
    ]
    link = on.scale_up.bandwidth_gb_s

    def predict(constants: Constants, some: Rows) -> np.ndarray:
        of = DirectAllReduce(**constants)
        return np.array(
            [direct_all_reduce(2 * r["message_size"], r["num_gpus"], link, of) for r in some]
        )

    few = [r for r in table if 2 * r["message_size"] <= 8 << 20]
    key = ("num_gpus", "message_size")
    keep = [r for r in few if not held_out(*(r[n] for n in key))]
    start = {"latency_us": 3.0, "gpu_us": 0.1, "bandwidth_fraction": 0.6, "second_us": 5.0}
    found = fit(start, predict, keep, column(keep, "latency") / 1e3,
                {"bandwidth_fraction": (0.0, 1.0)})  # fmt: skip
    block("all_reduce", found, 2)
    test = [r for r in few if held_out(*(r[n] for n in key))]
    told("all_reduce", predict(found, test), column(test, "latency") / 1e3)


def _quantizing(checkout: Path, system: str) -> dict[tuple[int, int], float]:
    """Milliseconds of TensorRT-LLM's search for a scale and of its cast to fp8, by m and k."""
    release = VERSIONS["trtllm"][0]
    folder = checkout / "aic-core/src/aiconfigurator_core/systems/data" / system / "quantize"
    both: list[dict[tuple[int, int], float]] = []
    for name in ("computescale", "scale_matrix"):
        path = folder / "trtllm" / release / f"{name}_perf.parquet"
        rows = parquet.read_table(path).to_pylist() if path.exists() else []
        both.append({(r["m"], r["k"]): r["latency"] for r in rows})
    return {size: both[0][size] + both[1][size] for size in both[0].keys() & both[1].keys()}


def cast_ms(on: Hardware, m: int, k: int) -> float:
    """Milliseconds that a kernel is predicted to take which casts m x k values to fp4."""
    moved = np.array([(2 + ITEM["fp4"]) * m * k])
    return float(memory_seconds(moved, np.zeros(1), on)[0]) * 1e3


def engine_gemm(checkout: Path, on: Hardware, system: str, engine: str) -> None:
    """Products in few bits of one engine alone."""
    table = [r for r in read(checkout, system, "gemm", "gemm") if min(r["n"], r["k"]) >= 256]
    table = [r for r in table if r["engine"] == engine and r["n"] * r["k"] < 2e8]
    within = _quantizing(checkout, system) if engine == "trtllm" else {}
    print("      gemm:")
    for key, theirs in DTYPES.items():
        rows = [r for r in table if r["gemm_dtype"] == theirs]
        if key == "bf16" or not rows:
            continue
        if key == "fp8" and engine == "trtllm":
            rows = [
                r | {"latency": r["latency"] - within[r["m"], r["k"]]}
                for r in rows
                if (r["m"], r["k"]) in within
            ]
        if key == "fp4" and engine == "trtllm":
            rows = [r | {"latency": r["latency"] - cast_ms(on, r["m"], r["k"])} for r in rows]
        rows = [r for r in rows if r["latency"] > 0]
        dtype = key.removesuffix("_block")

        predict = products(on, dtype)
        keep = even([r for r in rows if not held_out(r["m"], r["n"], r["k"])], "m", 250)
        found = best(predict, keep, {"fraction": on.products(dtype).fraction})
        block(key, found, 8)
        test = [r for r in rows if held_out(r["m"], r["n"], r["k"])]
        tested(f"gemm {key}", "m", test, lambda some, found=found, p=predict: p(found, some))


def engine_attention(checkout: Path, on: Hardware, system: str, engine: str) -> None:
    """Attention of one engine alone, over a cache in bf16 and in fp8."""
    table = attention_rows(checkout, system, engine)
    print("      cached_attention:")
    found: Constants = OF_PROMPTS
    for key, theirs in (("bf16", "bfloat16"), ("fp8", "fp8")):
        rows = [r for r in table if r["kv_cache_dtype"] == theirs]
        if rows:
            of_prompts = {name: found[name] for name in OF_PROMPTS}
            found = fit_attention(on, rows, f"attention {key}", key, 8, of_prompts)


def engine_experts(checkout: Path, on: Hardware, system: str, engine: str) -> None:
    """Experts of one engine alone on Hopper, by the kernels of most rows of its table.

    Those of TensorRT-LLM are CUTLASS's, of vLLM and SGLang Triton's. On Blackwell recipes have
    other kernels than the tables, and the tables of vLLM and SGLang have fewer experts with tokens
    than their labels say: their weights would be read faster than the memory allows.
    """
    if on.rate_of("fp4") or on.rate_of("fp8") is None:
        return
    table = [
        r
        for r in read(checkout, system, "moe", "moe")
        if (r["engine"], r["distribution"]) == (engine, "balanced")
        and r["moe_tp_size"] * r["moe_ep_size"] <= FourBits._field_defaults["ranks"]
    ]
    print("      experts_gemm:")
    for key, theirs in DTYPES.items():
        rows = default_kernel([r for r in table if r["moe_dtype"] == theirs])
        if not rows:
            continue
        dtype = key.removesuffix("_block")

        def predict(constants: Constants, some: Rows, dtype: str = dtype) -> np.ndarray:
            of = {dtype: InferenceGemmFit(**constants)}
            mlp = ExpertMLP(*(column(some, name) for name in SIZES))
            on_fit = with_inference(on, gemm=of, experts_gemm=of)
            return experts_seconds(mlp, dtype=dtype, on=on_fit)

        keep = [r for r in rows if not held_out(*(r[n] for n in SIZES))]
        found = best(predict, even(keep, "num_tokens", 250), {"fraction": 0.4})
        block(key, found, 8)
        test = [r for r in rows if held_out(*(r[n] for n in SIZES))]
        tested(f"experts {key}", "num_tokens", test,
               lambda some, found=found, p=predict: p(found, some))  # fmt: skip


def default_kernel(rows: Rows) -> Rows:
    """Rows of the kernel that has most of them, which the engine runs by default."""
    counts = Counter(row["kernel_source"] for row in rows)
    return [row for row in rows if row["kernel_source"] == counts.most_common(1)[0][0]]


def engines(checkout: Path, on: Hardware, system: str) -> None:
    """Constants of each engine's own kernels.

    Not of vLLM's products: its table has them with the kernel that quantizes, which steps do not
    run, and those with scales of blocks take up to ten times as long from a release to the next.
    """
    print("  engines:")
    for engine in VERSIONS:
        print(f"    {engine}:")
        engine_experts(checkout, on, system, engine)
        if engine != "vllm":
            engine_gemm(checkout, on, system, engine)
        engine_attention(checkout, on, system, engine)


def sampled_rows(checkout: Path) -> None:
    """Print four held-out rows of each GPU, engine, phase and of windows or none."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    url = "https://github.com/ai-dynamo/aiconfigurator/tree/095f58a5"
    for name, engine in itertools.product(SYSTEMS, VERSIONS):
        table = [] if name.startswith("a100") else attention_rows(checkout, SYSTEMS[name], engine)
        test = [r for r in table if held_out(*(r[n] for n in HEADS))]
        for (phase, _), windows in itertools.product(PHASES, (False, True)):
            some = [r for r in test if (r["phase"], r["window"] > 0) == (phase, windows)]
            for r in sample(some, 4):
                new = r["isl"] if phase == "context" else 1
                keys = r["step"] + r["isl"]
                shape = (
                    f"batch={r['batch_size']} heads={r['num_heads']} kv_heads={r['kv']} q={new} "
                    f"k={keys} d={r['head_dim']} window={r['window']} engine={engine}"
                )
                dtype = "fp8" if r["kv_cache_dtype"] == "fp8" else "bf16"
                head = "aiconfigurator, attention of engines", url, name, "engine_attention"
                writer.writerow([*head, dtype, shape, f"{r['latency'] * 1e3:.2f}"])


PARTS = (gemm, experts, four_bits, attention, latents, sparse, all_reduce, engines)


def main(checkout: Path, wanted: Iterable[str]) -> None:
    """All fits of the systems asked for."""
    for name in wanted:
        print(f"## {name}\ninference:", flush=True)
        for part in PARTS:
            part(checkout, resolve(name), SYSTEMS[name])


if __name__ == "__main__":
    if sys.argv[2:] == ["rows"]:
        sampled_rows(Path(sys.argv[1]))
    else:
        main(Path(sys.argv[1]), sys.argv[2:] or SYSTEMS)
