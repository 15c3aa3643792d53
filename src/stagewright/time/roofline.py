"""Time of a kernel from its shape: a roofline with corrections.

Matrix products run as tiles over the compute units of a GPU: the last wave of tiles is rarely
full, a small tile reuses less of what it reads, and every tile starts and ends. Attention runs as
tiles of 128 queries, each of which passes through all keys that its mask leaves. All other kernels
move bytes; rows that are copied by index, tokens to experts and back, move more slowly than
streams. Every kernel takes at least its launch. The constants belong to the hardware and were
fitted to measured kernels (`benchmarks/fit_kernels.py`).

>>> from stagewright.time.hardware import resolve
>>> h100 = resolve("h100-sxm")
>>> sizes = [np.array([x]) for x in (1.0, 8192, 8192, 8192)]
>>> us = gemm_seconds(*sizes, traffic=np.array([3 * 2 * 8192**2]), dtype="bf16", on=h100)[0] * 1e6
>>> bool(1300 < us < 1500)  # 1405 us measured
True
"""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np

from stagewright.arrays import Float
from stagewright.errors import UserError
from stagewright.time.constants import GemmFit
from stagewright.time.hardware import PRODUCTS, Hardware

Array = Float

# Rows and columns of the tiles that libraries choose from, and into how many parts they may split
# the sum (cuBLAS and CUTLASS kernels; the fastest is taken, as their heuristics try to).
TILES = ((64, 64), (64, 128), (128, 64), (128, 128), (128, 256), (256, 128), (64, 256), (256, 64),
         (32, 64), (64, 32))  # fmt: skip
SPLITS = (1, 2, 4, 8, 16)
DEPTH = 64  # elements of the sum that a tile takes at a time


def peak_flops(hardware: Hardware, dtype: str) -> float:
    """Dense peak of matrix products in FLOP/s; for fp32 that of the vector units.

    Raises UserError where the hardware has no matrix products in this data type.
    """
    peak = hardware.rate_of(dtype)
    if peak is None:
        supported = [name for name in PRODUCTS if hardware.rate_of(name)]
        raise UserError(
            f"{hardware.name} has no matrix products in {dtype}; use one of {', '.join(supported)}"
        )
    return peak * 1e12


def gemm_seconds(
    batch: Array, m: Array, n: Array, k: Array, *, traffic: Array, dtype: str, on: Hardware
) -> Array:
    """Seconds of matrix products that move `traffic` bytes.

    Each product has `batch` results of m x n, whose elements are sums over k. Several results are
    a grouped product: one kernel, whose constants are fitted to those of experts.
    """
    is_grouped = batch > 1
    sizes, seconds = np.stack([batch, m, n, k, traffic]), np.zeros(len(m))
    for grouped in (False, True):
        selected = np.flatnonzero(is_grouped == grouped)
        if not len(selected):
            continue
        fit = on.products(dtype, grouped=grouped)
        for chunk in np.split(selected, range(_AT_ONCE, len(selected), _AT_ONCE)):
            seconds[chunk] = _fastest(sizes[:, chunk], fit, peak_flops(on, dtype), on)
    return seconds


_AT_ONCE = 1024
"""Products that are timed at once, with all tiles and splits: as many as a cache holds."""


def _fastest(sizes: Array, fit: GemmFit, peak: float, on: Hardware) -> Array:
    """Seconds of products, each with its fastest tile and split of the sum.

    `sizes` has the shape [5, products]: batch, m, n, k and traffic.
    """
    batch, m, n, k, traffic = sizes
    moves = on.memory_bandwidth_gb_s * 1e9 * fit.memory_fraction
    unit = peak / on.compute_units
    # [tiles, 1, 1] and [splits, 1], beside [products].
    rows, columns = (np.array(side)[:, None, None] for side in zip(*TILES, strict=True))
    reuse = np.array([_reuse(fit, *tile) for tile in TILES])[:, None, None]
    parts = np.array(SPLITS)[:, None]
    tiles = np.ceil(m / rows) * np.ceil(n / columns) * batch
    rate = unit * fit.fraction * reuse
    waves = _waves(tiles * parts / on.compute_units, fit.quantization)
    depth = np.ceil(k / parts / DEPTH) * DEPTH
    compute = waves * (2 * rows * columns * depth / rate + fit.tile_us * 1e-6)
    # Where the sum is split: partial sums in fp32, written and read.
    compute = compute + np.where(parts > 1, fit.split_us * 1e-6, 0.0)
    moved = traffic / moves + np.where(parts > 1, 8 * parts * batch * m * n / moves, 0.0)
    best = _overlapped(compute, moved, fit.sharpness).min(axis=(0, 1))
    return fit.launch_us * 1e-6 + best


def _reuse(fit: GemmFit, rows: int, columns: int) -> float:
    """Speed of a tile over that of 128 x 256, which reads least per multiply-add."""
    return (1 + fit.tile_factor * 0.75) / (1 + fit.tile_factor * (64 / rows + 64 / columns))


def _waves(ratio: Array, quantization: float) -> Array:
    """Waves of tiles: the last one counts in full, or by its share if tiles overlap."""
    return np.where(ratio <= 1, 1.0, quantization * np.ceil(ratio) + (1 - quantization) * ratio)


def _overlapped(compute: Array, memory: Array, sharpness: float) -> Array:
    """Seconds of two overlapping parts: the longer one, plus a term if both are similar."""
    longer, shorter = np.maximum(compute, memory), np.minimum(compute, memory)
    return longer * (1 + (shorter / longer) ** sharpness) ** (1 / sharpness)


QUERIES = 128  # queries per tile of attention


class AttentionTiles(NamedTuple):
    """The work of fused attention kernels, an array element per kernel."""

    tiles: Array
    """Blocks of `QUERIES` queries."""
    longest: Array
    """Keys that the longest of the tiles passes through."""
    points: Array
    """Pairs of a query and a key in all tiles, each with an exponential."""
    flops_per_point: Array
    traffic: Array
    """Bytes of operands and results."""


def _attention_peak(on: Hardware, dtype: str) -> float:
    """FLOP/s of fused attention; of bf16 if the hardware does not support `dtype`.

    Only narrower data types fall back to bf16: fp32 has the rate of the vector units, as in
    matrix products.
    """
    supported = dtype in ("fp32", "bf16") or (dtype == "fp8" and on.peak_fp8_tflops is not None)
    return peak_flops(on, dtype if supported else "bf16")


def attention_seconds(
    work: AttentionTiles, *, dtype: str, on: Hardware, backward: bool = False
) -> Array:
    """Seconds of fused attention kernels."""
    fit = (on.attention.fp8 if dtype == "fp8" else None) or on.attention
    rate = _attention_peak(on, dtype) * fit.fraction / on.compute_units
    if backward:
        rate *= fit.bwd_ratio
    point = work.flops_per_point / rate + fit.softmax_ps * 1e-12
    even = work.points * point / on.compute_units
    rounds = np.ceil(work.tiles / on.compute_units)
    computed = np.maximum(even, QUERIES * work.longest * point) + rounds * fit.tile_us * 1e-6
    moved = fit.traffic_factor * work.traffic / (on.memory_bandwidth_gb_s * 1e9)
    return fit.launch_us * 1e-6 + computed + moved


ROWS = 64  # of a tile of queries that share a key, the least that tensor cores multiply


class CachedAttentionWork(NamedTuple):
    """The work of attention over a cache, an array element per kernel."""

    queries: Array
    """Queries of all heads: a token has one for each head."""
    sharing: Array
    """Heads that share the keys of one key-value head."""
    points: Array
    """Pairs of a query and a key."""
    keys: Array
    """Keys of all key-value heads that are read."""
    flops_per_point: Array
    traffic: Array
    """Bytes of keys, values, queries and results."""


def cached_attention_seconds(work: CachedAttentionWork, *, dtype: str, on: Hardware) -> Array:
    """Seconds of attention over a cache, in decode, prefill or both at once.

    Several units share the keys of one request (flash decoding), so that all are busy. A tile has
    at least `ROWS` rows, however few queries meet a key: a decode step computes for rows that it
    has not, while it waits for memory.
    """
    assert on.inference is not None
    fit = on.inference.cached_attention
    rate = _attention_peak(on, dtype) * on.attention.fraction / on.compute_units
    point = work.flops_per_point / rate + on.attention.softmax_ps * 1e-12
    queries_per_key = np.maximum(
        work.points / np.maximum(work.keys, 1), 1e-9
    )  # queries that a key meets
    computed = work.points * np.maximum(1.0, ROWS / queries_per_key) * point / on.compute_units
    moved = work.traffic / (on.memory_bandwidth_gb_s * 1e9 * fit.memory_fraction)
    rows = np.clip(queries_per_key, np.minimum(work.sharing, QUERIES), QUERIES)
    tiles = work.queries / rows / on.compute_units
    both = _overlapped(computed, moved, fit.sharpness)
    return (fit.launch_us + tiles * fit.tile_us) * 1e-6 + both


class DecodingBesidePrompts(NamedTuple):
    """Time that decoding requests add to attention of prompts in one kernel.

    FlashAttention 2 has one call for all requests of a step (vLLM's `FLASH_ATTN` on GPUs of compute
    capability 8 and 12). Heads share the tile of a key-value head, and units the keys of a request,
    only where all requests have one query (`seqlenq_ngroups_swapped` of
    csrc/flash_attn/flash_api.cpp in github.com/vllm-project/flash-attention, where `max_seqlen_q`
    is 1). Beside a prompt, and where requests have drafts, each head has tiles of `ROWS` rows of
    its own, which pass through all keys of their request; heads that share keys read them again
    where the second-level cache no longer has them; and each request has as many tiles as the
    longest prompt, of which all but one are empty.
    """

    per_key: float
    """Seconds of a head's tile for each key."""
    per_tile: float
    per_empty_tile: float
    tiles: float
    """Of one request, over the compute units: one for each head."""
    moved: float
    """Seconds of reading a key and a value of all key-value heads."""
    again: float
    """Readings of a key in all but the first, where the cache has none of them."""
    held: float
    """Keys that the cache holds."""

    @classmethod
    def of(cls, on: Hardware, heads: float, sharing: float, width: float) -> Self | None:
        """Model of `heads` heads, of which `sharing` share keys, or None without such a kernel.

        `width` is that of key and value.
        """
        fit = on.inference.mixed_attention if on.inference else None
        if fit is None or on.inference is None:
            return None
        rate = _attention_peak(on, "bf16") * on.attention.fraction / on.compute_units
        point = (2 * width / rate + on.attention.softmax_ps * 1e-12) / fit.fraction
        memory = on.memory_bandwidth_gb_s * 1e9 * on.inference.cached_attention.memory_fraction
        return cls(
            ROWS * point, fit.tile_us * 1e-6, fit.empty_us * 1e-6, heads / on.compute_units,
            2 * width * heads / sharing / memory, sharing - 1, fit.cache_mb * 1e6 / (2 * width),
        )  # fmt: skip

    def __call__(self, requests: float, keys: float, queries: float) -> float:
        """Seconds of `requests` with `keys` in total; the longest prompt has `queries`."""
        tiles = self.tiles * requests
        even = tiles * self.per_tile + self.tiles * keys * self.per_key
        computed = max(even, self.per_tile + keys / requests * self.per_key)
        read = keys * self.moved * (1 + self.again * max(0.0, 1 - self.held / keys))
        empty = tiles * max(-(-queries // ROWS) - 1, 0) * self.per_empty_tile
        shorter, longer = sorted((computed, read))
        return longer * (1 + (shorter / longer) ** 6) ** (1 / 6) + empty


def bytes_per_second(on: Hardware) -> float:
    """Bandwidth in bytes per second that kernels reach which stream through device memory."""
    return on.memory_bandwidth_gb_s * 1e9 * on.memory_bandwidth_fraction


def memory_seconds(traffic: Array, flops: Array, on: Hardware) -> Array:
    """Seconds of kernels that move `traffic` bytes and compute little."""
    moved = traffic / bytes_per_second(on)
    return on.kernel_launch_us * 1e-6 + np.maximum(moved, flops / (on.peak_fp32_tflops * 1e12))


def copies_seconds(traffic: Array, flops: Array, on: Hardware) -> Array:
    """Seconds of kernels that copy rows by index, to experts and back.

    `traffic` in bytes counts the row that is read for each copy that is written.
    """
    if on.experts is None:
        return memory_seconds(traffic, flops, on)
    moved = traffic / (on.memory_bandwidth_gb_s * 1e9 * on.experts.copy_fraction)
    return on.kernel_launch_us * 1e-6 + moved


def routing_seconds(choices: Array, on: Hardware) -> Array:
    """Seconds of kernels that sort tokens by expert; `choices`: tokens times top-k."""
    if on.experts is None:
        return np.zeros_like(choices)
    return on.experts.routing_us * 1e-6 + on.experts.routing_ns * 1e-9 * choices
