"""Fit the constants of kernels to layers that vLLM ran alone; print them with held-out errors.

    python benchmarks/fit_layers.py CHECKOUT [rtx-4090 rtx-pro-6000]

CHECKOUT is a copy of casys-kaist/LLMServingSim@5daddb21 (MIT), whose `profiler/perf` has the
microseconds of kernels within the layers of vLLM 0.19.0 by tokens, requests and cached keys,
in bf16: products (`dense.csv`, `per_sequence.csv`), attention of a chunk of a prompt and of
requests that get tokens (`attention.csv`), and experts (`moe.csv`). All models of a card count
alike. Of the rows, 70% fit and 30% are held out, by a hash of the shape. Errors: |predicted /
measured - 1|. Needs scipy. No time of a served request is read.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fit_kernels import block, column, fit, held_out, sample, told
from stagewright.evidence.kernels import ExpertMLP, experts_seconds
from stagewright.time.hardware import (
    CachedAttentionFit,
    ExpertFit,
    Hardware,
    InferenceFit,
    MixedAttentionFit,
    resolve,
)
from stagewright.time.roofline import (
    DecodeInPromptKernel,
    cached_attention_seconds,
    gemm_seconds,
)

CARDS = {"rtx-4090": "RTX4090", "rtx-pro-6000": "RTXPRO6000"}
Rows = list[dict[str, Any]]
START = {"launch_us": 10.0, "tile_us": 1.0, "memory_fraction": 0.9, "sharpness": 2.0}


class Shape(NamedTuple):
    """A model's sizes on one of `tp` ranks."""

    m: int
    heads: int
    kv_heads: int
    d: int
    f: int
    vocab: int
    experts: int
    top_k: int


def tables(checkout: Path, card: str) -> Iterator[tuple[Shape, Path]]:
    """The folders of a card's tables, with the sizes that they have been measured for."""
    for folder in sorted((checkout / "profiler/perf" / CARDS[card]).glob("*/*/bf16/tp*")):
        tp = int(folder.name[2:])
        name = "/".join(folder.parts[-4:-2])
        of = json.loads((checkout / f"configs/model/{name}.json").read_text())
        heads, width = of["num_attention_heads"], of["hidden_size"]
        f = of.get("moe_intermediate_size", of["intermediate_size"])
        yield Shape(
            width, heads // tp, of["num_key_value_heads"] // tp,
            of.get("head_dim") or width // heads, f // tp, of["vocab_size"] // tp,
            of.get("num_experts", 0), of.get("num_experts_per_tok", 0),
        ), folder  # fmt: skip


def read(path: Path) -> Rows:
    """The rows of a table; none where it is not there."""
    return list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []


def of_layer(shape: Shape, layer: str) -> tuple[int, int] | None:
    """Columns and depth of a layer's product."""
    width = shape.heads * shape.d
    known = {
        "qkv_proj": (width + 2 * shape.kv_heads * shape.d, shape.m),
        "o_proj": (shape.m, width),
        "gate_up_proj": (2 * shape.f, shape.m),
        "down_proj": (shape.m, shape.f),
        "lm_head": (shape.vocab, shape.m),
    }
    return known.get(layer)


def products(checkout: Path, card: str) -> Rows:
    """Products, once for each shape."""
    found: dict[tuple[int, int, int], dict[str, Any]] = {}
    for shape, folder in tables(checkout, card):
        for row in read(folder / "dense.csv") + read(folder / "per_sequence.csv"):
            size = of_layer(shape, row["layer"])
            if size is None:
                continue
            m = int(row.get("tokens") or row["sequences"])
            key = (m, *size)
            found[key] = {"m": m, "n": size[0], "k": size[1], "us": float(row["time_us"])}
    return list(found.values())


def gemm(checkout: Path, on: Hardware, card: str) -> None:
    """Products in bf16."""
    rows = products(checkout, card)

    def predict(constants: Mapping[str, float], some: Rows) -> np.ndarray:
        changed = on.model_copy(
            update={"gemm": {"bf16": on.gemm["bf16"].model_copy(update=dict(constants))}}
        )
        m, n, k = (column(some, c) for c in "mnk")
        moved = 2 * (m * k + k * n + m * n)
        return gemm_seconds(np.ones(len(m)), m, n, k, traffic=moved, dtype="bf16", hardware=changed)

    keep = [r for r in rows if not held_out(r["m"], r["n"], r["k"])]
    few = sample([r for r in keep if r["m"] <= 256], 500)
    few += sample([r for r in keep if r["m"] > 256], 500)
    most = {"fraction": (0, 1.2), "quantization": (0, 1), "sharpness": (1, 16),
            "memory_fraction": (0, 1)}  # fmt: skip
    found = fit(dict(on.gemm["bf16"]), predict, few, column(few, "us") / 1e6, most)
    block("bf16", found, 2)
    test = [r for r in rows if held_out(r["m"], r["n"], r["k"])]
    for low, high in ((1, 64), (65, 256), (257, 4096)):
        some = [r for r in test if low <= r["m"] <= high]
        told(f"products, {low} to {high} rows", predict(found, some), column(some, "us") / 1e6)


AXES = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")


def attentions(checkout: Path, card: str) -> Rows:
    """Attention of chunks and of requests that get tokens."""
    found: Rows = []
    for shape, folder in tables(checkout, card):
        for row in read(folder / "attention.csv"):
            of = {name: int(row[name]) for name in AXES}
            sizes = {"heads": shape.heads, "kv": shape.kv_heads, "d": shape.d}
            found.append({**of, **sizes, "us": float(row["time_us"])})
    return found


def _key(row: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(row[name] for name in (*AXES, "heads", "kv"))


def attention(checkout: Path, on: Hardware, card: str) -> None:
    """Attention over a cache: of requests that get tokens, and of chunks of prompts.

    One kernel computes both where a step has both; rows of both fit what tokens add to prompts.
    """
    table = attentions(checkout, card)

    def fitted(constants: Mapping[str, float]) -> Hardware:
        fit = InferenceFit(cached_attention=CachedAttentionFit(**constants))
        return on.model_copy(update={"inference": fit})

    def predict(constants: Mapping[str, float], some: Rows) -> np.ndarray:
        changed = fitted(constants)
        chunk, before, decoding, context = (column(some, name) for name in AXES)
        sizes = tuple(column(some, n) for n in ("heads", "kv", "d"))
        prompts = _seconds(changed, chunk, chunk * before + chunk * (chunk + 1) / 2,
                           before + chunk, sizes)  # fmt: skip
        tokens = _seconds(changed, decoding, decoding * (context + 1), decoding * (context + 1),
                          sizes)  # fmt: skip
        return np.where(chunk > 0, prompts, 0) + np.where(decoding > 0, tokens, 0)

    tokens = [r for r in table if not r["prefill_chunk"]]
    prompts = [r for r in table if not r["n_decode"] and r["prefill_chunk"] >= 128]
    keep = [r for rows in (tokens, prompts) for r in rows if not held_out(*_key(r))]
    most = {"memory_fraction": (0.0, 0.98), "sharpness": (1.0, 16.0), "fraction": (0.0, 1.0)}
    start = {"fraction": 0.8, "softmax_ps": 50.0, "traffic_factor": 1.0, **START}
    found = fit(start, predict, keep, column(keep, "us") / 1e6, most)
    block("attention", {name: found[name] for name in ("fraction", "softmax_ps")}, 0)
    block("cached_attention", found, 2)
    for name, rows in (("tokens", tokens), ("prompts", prompts)):
        test = [r for r in rows if held_out(*_key(r))]
        told(f"attention, {name}", predict(found, test), column(test, "us") / 1e6)
    both = [r for r in table if r["n_decode"] and r["prefill_chunk"]]
    alone = [{**r, "n_decode": 0, "kv_decode": 0} for r in both]
    mixed(fitted(found), both, predict(found, alone))


def mixed(on: Hardware, rows: Rows, prompts: np.ndarray) -> None:
    """What requests that get tokens add to `prompts`, the seconds of the prompts of rows."""
    assert on.inference is not None
    cached = on.inference
    for row, seconds in zip(rows, prompts.tolist(), strict=True):
        row["prompts"] = seconds

    def predict(constants: Mapping[str, float], some: Rows) -> np.ndarray:
        fit = cached.model_copy(update={"mixed_attention": MixedAttentionFit(**constants)})
        changed, found = on.model_copy(update={"inference": fit}), []
        for r in some:
            adds = DecodeInPromptKernel.of(changed, r["heads"], r["heads"] / r["kv"], 2 * r["d"])
            assert adds is not None
            keys = r["n_decode"] * (r["kv_decode"] + 1)
            found.append(r["prompts"] + adds(r["n_decode"], keys, r["prefill_chunk"]))
        return np.array(found)

    keep = sample([r for r in rows if not held_out(*_key(r))], 2500)
    start = {"fraction": 1.0, "tile_us": 2.0, "empty_us": 0.3, "cache_mb": 70.0}
    found = fit(start, predict, keep, column(keep, "us") / 1e6, {"fraction": (0, 3)})
    block("mixed_attention", found, 6)
    test = [r for r in rows if held_out(*_key(r))]
    told("attention, both", predict(found, test), column(test, "us") / 1e6)
    usual = [r for r in test if r["prefill_chunk"] >= 128 and r["n_decode"] >= 16
             and r["kv_decode"] <= 2048]  # fmt: skip
    told("attention, chunks beside 16 and more", predict(found, usual), column(usual, "us") / 1e6)


def experts(checkout: Path, on: Hardware, card: str) -> None:
    """Experts on one rank, by tokens and by how many experts these go to, and what is around."""
    rows = [
        {**{name: float(x) for name, x in row.items()}, "shape": shape}
        for shape, folder in tables(checkout, card)
        for row in read(folder / "moe.csv")
    ]
    if not rows:
        return

    def predict(constants: Mapping[str, float], some: Rows) -> np.ndarray:
        own = {name: constants[name] for name in ("routing_us", "routing_ns", "copy_fraction")}
        rest = {name: x for name, x in constants.items() if name not in own}
        grouped = on.gemm["bf16"].model_copy(update=rest)
        changed = on.model_copy(update={"experts": ExpertFit(**own, gemm={"bf16": grouped})})
        m, f, top_k = (np.array([float(getattr(r["shape"], x)) for r in some])
                       for x in ("m", "f", "top_k"))  # fmt: skip
        busy, one = column(some, "activated_experts"), np.ones(len(some))
        mlp = ExpertMLP(column(some, "tokens"), m, f, top_k, busy, one, one)
        return experts_seconds(mlp, dtype="bf16", on=changed)

    def key(row: Mapping[str, Any]) -> tuple[int, int]:
        return int(row["tokens"]), int(row["activated_experts"])

    keep = [r for r in rows if not held_out(*key(r))]
    start = {"routing_us": 10.0, "routing_ns": 0.1, "copy_fraction": 0.7, "launch_us": 3.0,
             "tile_us": 1.0, "memory_fraction": 0.9, "quantization": 0.5, "fraction": 0.8,
             "sharpness": 4.0}  # fmt: skip
    most = dict.fromkeys(("copy_fraction", "memory_fraction", "quantization", "fraction"), (0, 1))
    most["sharpness"] = (1, 16)
    found = fit(start, predict, keep, column(keep, "time_us") / 1e6, most)
    block("experts, and gemm of these", found, 0)
    test = [r for r in rows if held_out(*key(r))]
    told("experts", predict(found, test), column(test, "time_us") / 1e6)


def _seconds(
    on: Hardware, new: np.ndarray, pairs: np.ndarray, keys: np.ndarray,
    sizes: tuple[np.ndarray, ...],
) -> np.ndarray:  # fmt: skip
    """Seconds of attention of `new` tokens to `keys` of a cache; 0 tokens: any number."""
    h, kv, d = sizes
    some = np.maximum(new, 1)
    moved = 2 * (keys * kv * 2 * d + some * h * 2 * d)
    pairs, keys = np.maximum(pairs, 1), np.maximum(keys, 1)
    work = (some * h, h / kv, pairs * h, keys * kv, 4 * d, moved)
    return cached_attention_seconds(*work, dtype="bf16", hardware=on)


def streams(checkout: Path, on: Hardware, card: str) -> None:
    """The shortest kernel, and the share of the bandwidth that the largest stream reaches.

    That is the output layer at one request: weights that no cache holds. Inputs of element-wise
    kernels are partly in the second-level cache, which the product before has filled.
    """
    rows = products(checkout, card)
    largest = max((r for r in rows if r["m"] == 1), key=lambda r: r["n"] * r["k"])
    share = 2 * largest["n"] * largest["k"] / largest["us"] / 1e3 / on.memory_bandwidth_gb_s
    shortest = min(
        float(row["time_us"])
        for _, folder in tables(checkout, card)
        for row in read(folder / "dense.csv")
        if row["layer"] != "layer"
    )
    print(f"memory_bandwidth_fraction: {share:.3f}\nkernel_launch_us: {shortest:.1f}")


PARTS = {"gemm": gemm, "attention": attention, "experts": experts, "streams": streams}


def main() -> None:
    """All fits of the cards asked for."""
    checkout, wanted = Path(sys.argv[1]), sys.argv[2:] or list(CARDS)
    for card in wanted:
        print(f"## {card}", flush=True)
        for part in PARTS.values():
            part(checkout, resolve(card), card)


if __name__ == "__main__":
    main()
